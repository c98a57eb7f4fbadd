"""The command `tutti`, for a server to fork."""

import sys

from tutti.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
