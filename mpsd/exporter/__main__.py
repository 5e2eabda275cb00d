"""The entry point of `python -m mpsd.exporter`."""

import sys

from mpsd.exporter.metrics import main

if __name__ == "__main__":
    sys.exit(main())
