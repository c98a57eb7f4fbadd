"""Who may import torch.distributed: import-linter knows packages alone, not what is inside of torch."""

from __future__ import annotations

import re
from pathlib import Path

import tutti

SOURCES = Path(tutti.__file__).parent
IMPORT = re.compile(r"^\s*(import|from) torch(\.distributed|\._C\._distributed)", re.MULTILINE)


def test_few_places_import_torch_distributed() -> None:
    files = [path for path in SOURCES.rglob("*.py") if IMPORT.search(path.read_text(encoding="utf-8"))]
    places = {path.relative_to(SOURCES).parts for path in files}
    assert {place[0] for place in places} == {"torch_backend", "model_parallel", "exports"}
    assert [place for place in places if place[0] == "exports"] == [("exports", "dcp.py")]
