"""Our own convolutions and maximum pooling, for images whose samples lie next to each other in memory."""

from __future__ import annotations

from typing import Final

BATCH_LAST: Final = "batch_last"
"""The layout."""

REAL_TYPES: Final = {"fp32": "float", "fp64": "double"}
"""The precisions that it has kernels for, and their types in C."""
