"""``python -m trainkernel``: see ``trainkernel.cli``."""

import sys

from trainkernel.cli import main

if __name__ == "__main__":
    sys.exit(main())
