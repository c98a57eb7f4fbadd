"""A program that starts ranks on hosts: python on_hosts.py HOSTS ENTRY PAYLOAD [SERVERS]."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tutti.launch.placement import place_ranks
from tutti.launch.start import start

if __name__ == "__main__":
    placement = place_ranks(hosts=sys.argv[1], servers=int(sys.argv[4]) if len(sys.argv) > 4 else 0)
    print(placement.describe())
    print(json.dumps(start(f"tests.launch.entries:{sys.argv[2]}", sys.argv[3].encode(), placement)))
