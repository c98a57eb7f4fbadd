"""`python -m tutti` is the command line."""

import sys

from tutti.cli.main import main

sys.exit(main())
