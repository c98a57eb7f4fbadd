"""What is refused, and what is not right yet."""

from __future__ import annotations

REFUSED: dict[str, tuple[int, ...]] = {
    "backward_with_create_graph": (2, 3),
    "steps_inside_the_backward_pass": (2, 3),
    "the_gradient_of_a_gradient": (2, 3),
    "an_embedding_with_a_largest_norm": (2, 3),
}
"""Loops that are refused before the first update, with the world sizes on which they are."""

BROKEN: dict[str, tuple[int, ...]] = {
    "hooks_that_clip": (2, 3),
    "hooks_after_accumulation_that_clip": (2, 3),
    "a_loader_inside_another": (2, 3),
    "the_next_batch_is_fetched_ahead": (2, 3),
    "weights_that_are_assigned": (2, 3),
    "a_model_that_is_converted": (2, 3),
}
"""Loops that end otherwise than in plain torch, with the world sizes on which they do."""

RACY: frozenset[str] = frozenset()
"""Loops that end otherwise on some runs only."""
