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
# SIGTERM or Ctrl-C to this script goes to its processes: all hosts save one step and end.
set -euo pipefail
export JAX_COORDINATOR_ADDRESS=$1 JAX_NUM_PROCESSES=$2
first=$3 here=$4
shift 4
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}

started=()
trap 'kill -TERM "${started[@]}" 2>/dev/null || true' TERM INT
for ((i = 0; i < here; i++)); do
  if [[ -n ${GPUS_EACH:-} ]]; then
    export CUDA_VISIBLE_DEVICES=$(seq -s, $((i * GPUS_EACH)) $(((i + 1) * GPUS_EACH - 1)))
  fi
  # A session of its own: Ctrl-C in a terminal reaches it once, through this script.
  JAX_PROCESS_ID=$((first + i)) setsid "$python" -m train "$@" &
  started+=($!)
done

code=0
for process in "${started[@]}"; do
  status=0
  wait "$process" || status=$?
  while kill -0 "$process" 2>/dev/null; do # a signal ended `wait`, not the process
    status=0
    wait "$process" || status=$?
  done
  if ((status > 128)); then
    again=0
    wait "$process" || again=$?
    ((again == 127)) || status=$again # 127: it had been waited for, and ended by a signal
  fi
  if ((status != 0 && code == 0)); then
    code=$status
    kill -TERM "${started[@]}" 2>/dev/null || true
  fi
done
exit "$code"
