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
# SIGTERM three minutes before the end, to all processes: they save one step and exit with 0.
#SBATCH --signal=TERM@180
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"
unset http_proxy https_proxy HTTP_PROXY HTTPS_PROXY ALL_PROXY all_proxy
python=${PYTHON:-.venv/bin/python}

# --kill-on-bad-exit: when one process fails, the others would wait for it.
srun --kill-on-bad-exit=1 "$python" -m train "$@"
