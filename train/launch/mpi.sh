#!/bin/bash
# A run under MPI: HOSTS=node1:1,node2:1 train/launch/mpi.sh fit --config configs/lnssm_72m.py
#
# HOSTS names the hosts and how many processes each runs. MPI only starts the processes; what they
# send each other goes through JAX. The first host runs process 0. Set PORT if 12345 is taken.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
hosts=${HOSTS:?name the hosts, such as HOSTS=node1:1,node2:1}
first=${hosts%%[:,]*}
processes=0
for entry in ${hosts//,/ }; do
  [[ $entry == *:* ]] && processes=$((processes + ${entry##*:})) || processes=$((processes + 1))
done
export JAX_COORDINATOR_ADDRESS=$first:${PORT:-12345}

if mpirun --version 2>&1 | grep -q "Open MPI"; then
  exec mpirun --host "$hosts" -np "$processes" -x JAX_COORDINATOR_ADDRESS "$python" -m train "$@"
fi
exec mpirun -hosts "$hosts" -np "$processes" -genv JAX_COORDINATOR_ADDRESS \
  "$JAX_COORDINATOR_ADDRESS" "$python" -m train "$@"
