"""The command `tutti`, killed as soon as it prints a text: python killed.py TEXT WORDS...

Who reads what it prints and kills it then comes too late where the machine is busy: it may be done.
"""

from __future__ import annotations

import os
import signal
import sys
from io import TextIOWrapper

from tutti.cli.main import main


class _Deadly(TextIOWrapper):
    """Standard output that passes on what is written, and kills its process with the first line of a text."""

    def write(self, text: str) -> int:
        written = super().write(text)
        if sys.argv[1] in text:
            self.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return written


if __name__ == "__main__":
    sys.stdout = _Deadly(sys.stdout.detach(), write_through=True)  # type: ignore[union-attr]
    main(sys.argv[2:])
