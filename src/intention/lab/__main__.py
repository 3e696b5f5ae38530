"""`python -m intention.lab` is `intention`."""

import sys

from intention.lab.cli import main

if __name__ == "__main__":
    sys.exit(main())
