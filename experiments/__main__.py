"""`python -m experiments`."""

from experiments.command import main
from train.cli import process

if __name__ == "__main__":
  process.run(main)
