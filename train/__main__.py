"""`python -m train`, which is `lnssm-train`."""

from train.cli import process

if __name__ == "__main__":
  process.run()
