"""Which ways to train are measured, and which are left out because something was decided."""

from __future__ import annotations

from pathlib import Path

import pytest

from tutti.batch_last.compiler import kernels
from tutti.errors import BadOption
from tutti.run.config import TrainConfig
from tutti.studies.autotune import candidates
from tutti.studies.autotune.candidates import Candidate, choices_for


def shapes(cores: int, *fixed: str, **options: object) -> list[tuple[int, int]]:
    return list(choices_for(TrainConfig(**options), fixed, cores).shapes)  # type: ignore[arg-type]


def test_ranks_are_powers_of_two_and_all_cores_and_threads_fill_the_cores() -> None:
    assert shapes(2) == [(1, 1), (1, 2), (2, 1)]
    assert shapes(6) == [(1, 1), (1, 6), (2, 3), (4, 1), (6, 1)]
    assert shapes(64)[2:] == [(2, 32), (4, 16), (8, 8), (16, 4), (32, 2), (64, 1)]
    assert shapes(1) == [(1, 1)]


@pytest.mark.parametrize("precision", ["fp64", "fp32", "fp16", "bf16"])
def test_ways_in_any_precision_can_be_compared(precision: str) -> None:
    found = choices_for(TrainConfig(precision=precision), (), 2).candidates()
    assert min(found, key=lambda one: one.complexity) == Candidate(1, 1, precision, "contiguous", 32)


def test_what_was_decided_is_kept() -> None:
    assert shapes(8, "workers", workers="4") == [(4, 2)]
    assert shapes(8, "workers", workers="1") == [(1, 1), (1, 8)]
    assert shapes(8, "threads", threads=4) == [(1, 4), (2, 4)]
    assert shapes(8, "workers", "threads", workers="8", threads=2) == [(8, 2)]
    assert shapes(8, workers="4", threads=2) == shapes(8)
    kept = choices_for(TrainConfig(layout="channels_last", precision="bf16"), ("layout", "precision"), 8)
    assert (kept.layouts, kept.precisions) == (("channels_last",), ("bf16",))


def test_auto_workers_are_no_decision() -> None:
    assert shapes(2, "workers") == shapes(2)


def test_solo_and_the_gpu_have_one_rank() -> None:
    assert shapes(4, strategy="solo") == [(1, 1), (1, 4)]
    assert shapes(4, device="cuda") == [(1, 1), (1, 4)]


def test_the_batch_and_the_precision_are_the_users_unless_several_are_given() -> None:
    plain = choices_for(TrainConfig(batch_size=48), (), 2)
    assert (plain.batch_sizes, plain.precisions) == ((48,), ("fp32",))
    varied = choices_for(TrainConfig(), (), 2, ("fp32", "bf16"), (64, 128, 64))
    assert (varied.batch_sizes, varied.precisions) == ((64, 128), ("fp32", "bf16"))


def test_every_combination_is_a_candidate_and_the_first_use_all_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(candidates, "kernels", lambda _: None)
    found = choices_for(TrainConfig(), (), 2, ("fp32", "bf16"), (64, 128)).candidates()
    assert len(found) == len(set(found)) == 3 * 2 * 2 * 2 + 2 * 2
    assert found[0] == Candidate(2, 1, "fp32", "contiguous", 64)
    assert found[-1] == Candidate(1, 1, "bf16", "channels_last", 128)


def test_batch_last_is_tried_with_one_thread_in_precisions_that_it_has_kernels_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(candidates, "kernels", lambda _: None)
    found = choices_for(TrainConfig(), (), 2, ("fp32", "bf16")).candidates()
    last = [one for one in found if one.layout == "batch_last"]
    assert [(one.ranks, one.threads, one.precision) for one in last] == [(2, 1, "fp32"), (1, 1, "fp32")]
    given = choices_for(TrainConfig(layout="batch_last"), ("layout",), 2).candidates()
    assert [(one.ranks, one.threads) for one in given] == [(2, 1), (1, 2), (1, 1)]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_batch_last_is_no_choice_without_a_compiler_or_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str
) -> None:
    if device == "cpu":
        monkeypatch.setenv("TUTTI_CACHE", str(tmp_path))
        monkeypatch.setenv("CC", str(tmp_path / "none"))
        kernels.cache_clear()
    assert choices_for(TrainConfig(device=device), (), 2).layouts == ("contiguous", "channels_last")


@pytest.mark.parametrize(
    ("maps", "cores", "batch", "first"),
    [
        (16, 2, 64, ["2 x 1 batch_last", "2 x 1 channels_last", "2 x 1 contiguous"]),
        (512, 2, 64, ["2 x 1 channels_last", "2 x 1 contiguous", "1 x 2 channels_last"]),
        (0, 4, 64, ["4 x 1 contiguous", "2 x 2 contiguous", "1 x 4 contiguous", "1 x 1 contiguous"]),
        (0, 4, 16, ["2 x 2 contiguous", "1 x 4 contiguous", "1 x 1 contiguous", "4 x 1 contiguous"]),
    ],
)
def test_the_likely_ways_come_first(
    monkeypatch: pytest.MonkeyPatch, maps: int, cores: int, batch: int, first: list[str]
) -> None:
    monkeypatch.setattr(candidates, "kernels", lambda _: None)
    found = choices_for(TrainConfig(batch_size=batch), (), cores).for_maps(maps).candidates()
    named = [f"{one.ranks} x {one.threads} {one.layout}" for one in found]
    assert named[: len(first)] == first


def test_ranks_that_a_batch_cannot_be_split_over_are_left_out() -> None:
    found = choices_for(TrainConfig(batch_size=3), (), 8).candidates()
    assert {one.ranks for one in found} == {1, 2}


def test_a_batch_that_no_rank_would_get_a_sample_of_is_refused() -> None:
    with pytest.raises(BadOption, match="cannot be split over 4 ranks"):
        choices_for(TrainConfig(workers="4", batch_size=3), ("workers",), 8)


def test_another_strategy_is_refused() -> None:
    with pytest.raises(BadOption, match=r"for 'easgd' use 'tutti compare'"):
        choices_for(TrainConfig(strategy="easgd"), (), 2)


def test_an_impossible_batch_size_is_refused() -> None:
    with pytest.raises(BadOption, match="--batch-size is 0"):
        choices_for(TrainConfig(), (), 2, (), (64, 0))


def test_the_simpler_of_two_has_fewer_ranks_then_fewer_threads_then_the_plain_layout() -> None:
    ordered = (
        Candidate(1, 1, "fp32", "contiguous", 64),
        Candidate(1, 1, "bf16", "contiguous", 64),
        Candidate(1, 1, "fp32", "channels_last", 64),
        Candidate(1, 2, "fp32", "contiguous", 32),
        Candidate(2, 1, "fp32", "contiguous", 32),
    )
    assert sorted(set(ordered), key=lambda one: one.complexity) == list(ordered)


def test_a_candidate_in_a_configuration_leaves_the_rest_as_it_was() -> None:
    config = TrainConfig(model="mlp", lr=0.1)
    found = Candidate(2, 4, "bf16", "channels_last", 96).applied_to(config)
    assert (found.workers, found.threads, found.batch_size) == ("2", 4, 96)
    assert (found.precision, found.layout, found.model, found.lr) == ("bf16", "channels_last", "mlp", 0.1)
