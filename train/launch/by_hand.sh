#!/bin/bash
# Several processes without a scheduler, one call on each host:
#
#   train/launch/by_hand.sh HOST:PORT PROCESSES FIRST HERE fit --config configs/lnssm_72m.py
#
# HOST:PORT   a free port of the host that runs process 0; the same on every host
# PROCESSES   of the whole run
# FIRST HERE  this host runs HERE processes, numbered from FIRST
#
# Two processes on this machine, with half of its four GPUs each (leave GPUS_EACH out on CPUs):
#
#   GPUS_EACH=2 train/launch/by_hand.sh localhost:12345 2 0 2 fit --config configs/lnssm_72m.py
#
# SIGTERM, SIGUSR1, SIGUSR2, SIGHUP or Ctrl-C to this script goes to its processes: all hosts save one step and end.
# When a process fails, the others here get SIGTERM, and after GRACE seconds (60) SIGKILL. The exit
# code is that of the first that failed. If this script is killed, its processes get SIGTERM.
set -uo pipefail
export JAX_COORDINATOR_ADDRESS=$1 JAX_NUM_PROCESSES=$2
first=$3 here=$4
shift 4
cd "$(dirname "$0")/../.." || exit
python=${PYTHON:-.venv/bin/python}

started=()
signal_all() { kill "-$1" "${started[@]}" 2>/dev/null; }
trap 'signal_all TERM' TERM INT USR1 USR2
trap 'signal_all HUP' HUP
# Each process leads a group of its own: nothing that it has started stays either.
trap 'kill -KILL "${started[@]/#/-}" 2>/dev/null' EXIT

# A session of its own: Ctrl-C in a terminal reaches a process once, through this script.
start=(setsid)
if setpriv --pdeathsig TERM true 2>/dev/null; then
  start+=(setpriv --pdeathsig TERM)
fi
for ((i = 0; i < here; i++)); do
  if [[ -n ${GPUS_EACH:-} ]]; then
    CUDA_VISIBLE_DEVICES=$(seq -s, $((i * GPUS_EACH)) $(((i + 1) * GPUS_EACH - 1)))
    export CUDA_VISIBLE_DEVICES
  fi
  JAX_PROCESS_ID=$((first + i)) "${start[@]}" "$python" -m train "$@" &
  started+=($!)
done

code=0 deadline=
running=("${started[@]}")
while ((${#running[@]})); do
  # The first that ends wakes this, whichever it is; so does a signal to this script, or the clock.
  sleep 1 &
  clock=$! woken=0
  wait -n || woken=$?
  kill "$clock" 2>/dev/null && wait "$clock" 2>/dev/null
  left=()
  for process in "${running[@]}"; do
    if kill -0 "$process" 2>/dev/null; then
      left+=("$process")
      continue
    fi
    status=0
    wait "$process" || status=$?
    ((status == 127)) && status=$woken # the first `wait` had taken its status
    if ((status != 0 && code == 0)); then
      code=$status deadline=$((SECONDS + ${GRACE:-60}))
      # 75 and 129: all have saved the same step and are ending by themselves.
      ((code == 75 || code == 129)) || signal_all TERM
    fi
  done
  running=("${left[@]}")
  [[ -n $deadline ]] && ((SECONDS > deadline)) && signal_all KILL
done
exit "$code"
