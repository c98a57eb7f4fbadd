"""`tutti cv` whose launches on other hosts come with torch imported: on_hosts.py PROGRAM WORDS...

A launch is started with the word "launch" in place of a program; it draws no page.
"""

from __future__ import annotations

import json
import sys

from tutti.cli import cv
from tutti.cli.main import main
from tutti.farm import hosts
from tutti.records.farm_folder import FarmFolder
from tutti.studies.cross_validation.study import Findings


def _page(folder: FarmFolder, found: Findings) -> str:
    return "none"


if __name__ == "__main__":
    if sys.argv[1] == "launch":
        cv.prepare_drawing = lambda: None  # type: ignore[attr-defined]
        cv.write_cv_page = _page  # type: ignore[attr-defined]
    else:
        hosts.PROGRAM = tuple(json.loads(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
