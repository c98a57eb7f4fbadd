"""A program that supervises two ranks which wait for ever: python supervised.py FOLDER."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tutti.launch.plan import make_plan
from tutti.launch.start import start

if __name__ == "__main__":
    start("launch.entries:wait_for_ever", sys.argv[1].encode(), make_plan(2))
