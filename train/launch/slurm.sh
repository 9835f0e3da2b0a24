#!/bin/bash
# A run on a Slurm cluster: sbatch train/launch/slurm.sh fit --config configs/lnssm_72m.py
#
# One process a node, which drives all GPUs of the node. The checkout, the data folder and the run
# folder lie on a file system that all nodes share. JAX finds the other processes by Slurm's own
# variables. Edit the numbers below, or give them to sbatch.
#
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=train-%j.log
# SIGTERM three minutes before the end, to all processes: they save one step and exit with 75. The
# job is then queued again and resumes. Any other code ends it: 0 finished, 2 wrong settings, 3
# diverged, 1 another failure. Slurm itself queues it again when a node fails.
#SBATCH --signal=TERM@180
set -uo pipefail
cd "${SLURM_SUBMIT_DIR:-.}" || exit
unset http_proxy https_proxy HTTP_PROXY HTTPS_PROXY ALL_PROXY all_proxy
python=${PYTHON:-.venv/bin/python}
[[ ${1:-} == fit || ${1:-} == classify ]] && set -- "$@" --stopped-code 75
trap : TERM # preemption and scancel may signal this shell too, which has to see how srun ends

# --kill-on-bad-exit: when one process fails, the others would wait for it.
srun --kill-on-bad-exit=1 "$python" -m train "$@"
code=$?
if ((code == 75)) && [[ $(scontrol show job "$SLURM_JOB_ID") != *JobState=CANCELLED* ]]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
