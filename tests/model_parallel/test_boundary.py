"""Who may import torch.distributed: import-linter knows packages alone, not what is inside of torch."""

from __future__ import annotations

import re
from pathlib import Path

import tutti

SOURCES = Path(tutti.__file__).parent
IMPORT = re.compile(r"^\s*(import|from) torch(\.distributed|\._C\._distributed)", re.MULTILINE)


def test_the_backend_and_model_parallelism_alone_import_torch_distributed() -> None:
    files = [path for path in SOURCES.rglob("*.py") if IMPORT.search(path.read_text(encoding="utf-8"))]
    assert {path.relative_to(SOURCES).parts[0] for path in files} == {"torch_backend", "model_parallel"}
