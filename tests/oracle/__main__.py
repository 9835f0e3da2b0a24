"""The command of the oracle."""

import sys

from tests import fast_compile

if __name__ == "__main__":
  fast_compile.set_flags()
  from tests.oracle.command import main

  sys.exit(main())
