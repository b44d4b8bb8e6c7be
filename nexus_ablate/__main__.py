"""`python -m nexus_ablate` is `nexus-ablate`."""

import sys

from nexus_ablate.cli import main

if __name__ == "__main__":
    sys.exit(main())
