"""A program whose two ranks wait for ever: python supervised.py FOLDER [HOSTS]."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tutti.launch.placement import place_ranks
from tutti.launch.start import start

if __name__ == "__main__":
    placement = place_ranks(hosts=sys.argv[2]) if len(sys.argv) > 2 else place_ranks(2)
    start("tests.launch.entries:wait_for_ever", sys.argv[1].encode(), placement)
