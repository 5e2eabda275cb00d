"""The entry point of `python -m mpsd_client.standby`."""

import sys

from mpsd_client.standby.command import main

if __name__ == "__main__":
    sys.exit(main())
