from __future__ import annotations

import os
import shutil

import pytest

needs_compiler = pytest.mark.skipif(
    not os.environ.get("CC") and not any(map(shutil.which, ("cc", "gcc", "clang"))),
    reason="needs a C compiler",
)
"""Marks what computes by the kernels."""
