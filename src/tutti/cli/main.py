"""The entry point of the command `tutti`. It imports the rest late, as Ctrl-C may come at any time."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence

INTERRUPTED = 130
"""The exit code after Ctrl-C: 128 + the number of SIGINT."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, by default the command of this process; return its exit code."""
    try:
        from tutti.cli.commands import run

        return run(list(sys.argv[1:] if arguments is None else arguments))
    except KeyboardInterrupt:
        print("tutti: interrupted", file=sys.stderr)
        return INTERRUPTED
    finally:
        if arguments is None:
            # The process ends: skip the search for garbage in all modules.
            gc.freeze()


if __name__ == "__main__":
    sys.exit(main())
