"""The beginning and the end of the command `tutti`: Ctrl-C may come before anything else is imported."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence

INTERRUPTED = 130
"""The exit code after Ctrl-C: 128 + the number of SIGINT."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, of this process's words by default; return its exit code."""
    try:
        from tutti.cli.commands import run

        return run(list(sys.argv[1:] if arguments is None else arguments))
    except KeyboardInterrupt:
        print("tutti: interrupted", file=sys.stderr)
        return INTERRUPTED
    finally:
        if arguments is None:
            # The process ends: else Python looks through all that is imported for garbage once more.
            gc.freeze()


if __name__ == "__main__":
    sys.exit(main())
