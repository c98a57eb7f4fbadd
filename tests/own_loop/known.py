"""What is refused, and what is not right yet."""

from __future__ import annotations

REFUSED: dict[str, tuple[int, ...]] = {
    "backward_with_create_graph": (2, 3),
    "an_embedding_with_a_largest_norm": (2, 3),
    "weights_that_are_assigned": (2, 3),
    "batches_of_graphs": (2, 3),
    "batches_that_another_thread_fetches": (2, 3),
    "one_backward_of_all_batches": (2, 3),
    "gradients_by_autograd_grad": (2, 3),
    "a_loader_inside_another": (2, 3),
    "steps_inside_the_backward_pass": (2, 3),
}
"""Loops that are refused before the first update, with the world sizes on which they are."""

REFUSED_LATER: dict[str, tuple[int, ...]] = {
    "a_layer_that_is_replaced": (2, 3),
    "a_layer_that_is_added": (2, 3),
    "one_backward_of_two_uneven_loaders": (2, 3),
    "the_next_batch_is_fetched_ahead": (2, 3),
}
"""Loops that are refused when they come to what is refused, after updates that were right."""

REFUSED_BY_MESSAGES: tuple[str, ...] = ("sparse_adam",)
"""Loops that are refused before the first update where gradients are reduced by messages."""

REFUSED_WITH: dict[str, tuple[str, ...]] = dict.fromkeys(
    ("adpsgd", "diloco", "easgd_sync", "gossip", "hogwild", "local"), ("unfreezing",)
)
"""Loops that are refused with these strategies on several workers, and right with the default one."""
