"""What is refused, and what is not right yet."""

from __future__ import annotations

REFUSED: dict[str, str] = {
    "lbfgs": "BadOption",
    "sparse_adam": "BadOption",
    "a_model_that_is_converted": "BadModel",
    "weights_from_a_vector": "BadModel",
    "one_optimizer_given_with_each_of_two_models": "BadModel",
}
"""Loops that are refused before the first update, on any number of ranks, with the error's class."""

BROKEN: dict[str, tuple[int, ...]] = {
    "gradients_are_read_after_backward": (2, 3),
    "gradients_are_read_after_the_step": (1, 2, 3),
    "clipping_by_norm": (2, 3),
    "clipping_by_value": (2, 3),
    "clipping_of_accumulated_gradients": (2, 3),
    "gradients_are_replaced": (2, 3),
    "gradient_of_one_parameter_is_dropped": (1, 2, 3),
    "backward_with_create_graph": (1, 2, 3),
    "backward_into_named_inputs": (1, 2, 3),
    "gradients_are_kept_from_step_to_step": (2, 3),
    "gradients_of_two_losses_are_projected": (2, 3),
    "steps_inside_the_backward_pass": (1, 2, 3),
    "clipping_through_the_optimizer": (1, 2, 3),
    "hooks_that_clip": (2, 3),
    "hooks_after_accumulation_that_clip": (2, 3),
    "the_gradient_of_a_gradient": (2, 3),
    "heads_in_turn_with_adam": (1, 2, 3),
    "heads_in_turn_with_adamw_and_zeroed_gradients": (1, 2, 3),
    "heads_in_turn_with_momentum": (1, 2, 3),
    "heads_in_turn_with_a_fused_adam": (1, 2, 3),
    "ranks_use_different_heads": (1, 2, 3),
    "a_recurrent_network": (2, 3),
    "a_wide_layer_with_a_fused_optimizer": (1, 2, 3),
    "one_parameter_of_a_counting_optimizer": (1, 2, 3),
    "one_parameter_of_adam": (1, 2, 3),
    "state_of_the_optimizer_is_read": (1, 2, 3),
    "going_back_to_a_checkpoint": (1, 2, 3),
    "a_checkpoint_is_loaded_before_distributing": (1, 2, 3),
    "a_checkpoint_is_loaded_after_distributing": (1, 2, 3),
    "a_state_that_goes_on_in_plain_torch": (1, 2, 3),
    "a_copy_of_the_optimizer": (1, 2, 3),
    "state_is_reset": (1, 2, 3),
    "state_is_edited": (1, 2, 3),
    "step_hooks": (1, 2, 3),
    "a_group_that_counts": (1, 2, 3),
    "state_that_is_rebound": (1, 2, 3),
    "a_norm_over_all_parameters": (2, 3),
    "a_gradient_scaler_and_clipping": (2, 3),
    "a_gradient_scaler_and_one_overflow": (2, 3),
    "a_gradient_scaler_and_a_fused_optimizer": (1, 2, 3),
    "a_gradient_scaler_and_one_overflow_of_a_fused_optimizer": (1, 2, 3),
    "a_gradient_scaler_with_accumulation": (2, 3),
    "a_pickled_optimizer": (1, 2, 3),
    "a_schedule_goes_back_with_its_optimizer": (1, 2, 3),
    "state_is_read_between_the_parts_of_a_step": (1, 2, 3),
    "gradients_are_never_zeroed": (1, 2, 3),
    "step_without_a_gradient": (1, 2, 3),
    "several_steps_for_one_backward": (1, 2, 3),
    "accumulation_of_uneven_micro_batches": (2, 3),
    "accumulation_over_the_end_of_an_epoch": (2, 3),
    "evaluation_between_backward_and_step": (2, 3),
    "evaluation_before_backward": (2, 3),
    "a_loader_inside_another": (2, 3),
    "the_next_batch_is_fetched_ahead": (2, 3),
    "adversaries_zeroed_by_optimizer": (1, 2, 3),
    "adversaries_zeroed_by_model": (1, 2, 3),
    "two_optimizers_of_one_model": (1, 2, 3),
    "an_optimizer_of_some_parameters": (1, 2, 3),
    "unfreezing": (1, 2, 3),
    "freezing": (1, 2, 3),
    "a_group_added_later": (1, 2, 3),
    "a_frozen_group_added_later": (1, 2, 3),
    "an_actor_and_a_critic_on_one_body": (1, 2, 3),
    "weights_that_are_assigned": (1, 2, 3),
}
"""Loops that end otherwise than in plain torch, with the world sizes on which they do."""

RACY: frozenset[str] = frozenset(
    {
        "weights_are_clamped",
        "weights_are_scaled_in_place",
        "weights_are_projected",
        "weights_are_perturbed_for_the_gradient",
        "evaluation_with_averaged_weights",
        "weights_are_initialised_afterwards",
        "a_lookahead_copy",
        "an_embedding_with_a_largest_norm",
    }
)
"""Loops that write weights while other ranks may read them: on several ranks their end is left to chance."""

_OVERWRITTEN = ("a_part_of_the_model_is_loaded", "weights_are_scaled_in_place")

BROKEN_WITH: dict[str, tuple[str, ...]] = {
    "adpsgd": _OVERWRITTEN,
    "downpour": _OVERWRITTEN,
    "lazy": _OVERWRITTEN,
    "paramserver": _OVERWRITTEN,
    "hogwild": ("a_sparse_embedding_with_adagrad",),
}
"""Loops that are right with the default strategy, and not with these, on one worker."""
