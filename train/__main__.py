"""`python -m train`."""

import sys

from train.cli.main import main

if __name__ == "__main__":
  sys.exit(main())
