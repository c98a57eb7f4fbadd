"""What is refused, and what is not right yet."""

from __future__ import annotations

REFUSED: dict[str, tuple[int, ...]] = {
    "backward_with_create_graph": (2, 3),
    "an_embedding_with_a_largest_norm": (2, 3),
}
"""Loops that are refused before the first update, with the world sizes on which they are."""

BROKEN: dict[str, tuple[int, ...]] = {}
"""Loops that end otherwise than in plain torch, with the world sizes on which they do."""
