"""The choices of a plan: which ways to train are measured."""

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


def test_options_of_the_user_are_kept() -> None:
    assert shapes(8, "workers", workers="4") == [(4, 2)]
    assert shapes(8, "workers", workers="1") == [(1, 1), (1, 8)]
    assert shapes(8, "threads", threads=4) == [(1, 4), (2, 4)]
    assert shapes(8, "workers", "threads", workers="8", threads=2) == [(8, 2)]
    assert shapes(8, workers="4", threads=2) == shapes(8)
    assert shapes(2, "workers") == shapes(2)  # "auto" is no decision
    kept = choices_for(TrainConfig(layout="channels_last", precision="bf16"), ("layout", "precision"), 8)
    assert (kept.layouts, kept.precisions) == (("channels_last",), ("bf16",))


def test_solo_and_gpu_have_one_rank() -> None:
    assert shapes(4, strategy="solo") == [(1, 1), (1, 4)]
    assert shapes(4, device="cuda") == [(1, 1), (1, 4)]


def test_batch_size_and_precision_are_fixed_unless_several_are_given() -> None:
    plain = choices_for(TrainConfig(batch_size=48), (), 2)
    assert (plain.batch_sizes, plain.precisions) == ((48,), ("fp32",))
    varied = choices_for(TrainConfig(), (), 2, ("fp32", "bf16"), (64, 128, 64))
    assert (varied.batch_sizes, varied.precisions) == ((64, 128), ("fp32", "bf16"))


def test_every_combination_is_a_candidate_and_the_first_ones_use_all_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(candidates, "kernels", lambda _: None)
    found = choices_for(TrainConfig(), (), 2, ("fp32", "bf16"), (64, 128)).candidates()
    assert len(found) == len(set(found)) == 3 * 2 * 2 * 2 + 2 * 2
    assert found[0] == Candidate(2, 1, "fp32", "contiguous", 64)
    assert found[-1] == Candidate(1, 1, "bf16", "channels_last", 128)


def test_batch_last_needs_one_thread_and_a_precision_with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "kernels", lambda _: None)
    found = choices_for(TrainConfig(), (), 2, ("fp32", "bf16")).candidates()
    last = [one for one in found if one.layout == "batch_last"]
    assert [(one.ranks, one.threads, one.precision) for one in last] == [(2, 1, "fp32"), (1, 1, "fp32")]
    given = choices_for(TrainConfig(layout="batch_last"), ("layout",), 2).candidates()
    assert [(one.ranks, one.threads) for one in given] == [(2, 1), (1, 2), (1, 1)]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_batch_last_needs_a_compiler_and_a_cpu(
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
def test_likely_ways_come_first(
    monkeypatch: pytest.MonkeyPatch, maps: int, cores: int, batch: int, first: list[str]
) -> None:
    monkeypatch.setattr(candidates, "kernels", lambda _: None)
    found = choices_for(TrainConfig(batch_size=batch), (), cores).for_maps(maps).candidates()
    named = [f"{one.ranks} x {one.threads} {one.layout}" for one in found]
    assert named[: len(first)] == first


def test_numbers_of_ranks_larger_than_the_batch_are_left_out() -> None:
    found = choices_for(TrainConfig(batch_size=3), (), 8).candidates()
    assert {one.ranks for one in found} == {1, 2}


@pytest.mark.parametrize(
    ("config", "fixed", "sizes", "message"),
    [
        (TrainConfig(workers="4", batch_size=3), ("workers",), (), "cannot be split over 4 ranks"),
        (TrainConfig(strategy="easgd"), (), (), "for 'easgd' use 'tutti compare'"),
        (TrainConfig(), (), (64, 0), "--batch-size is 0"),
    ],
)
def test_impossible_choices_are_refused(
    config: TrainConfig, fixed: tuple[str, ...], sizes: tuple[int, ...], message: str
) -> None:
    with pytest.raises(BadOption, match=message):
        choices_for(config, fixed, 8, (), sizes)


def test_simple_candidates_have_few_ranks_and_threads_the_plain_layout_and_little_rounding() -> None:
    ordered = (
        Candidate(1, 1, "fp64", "contiguous", 64),
        Candidate(1, 1, "fp32", "contiguous", 64),
        Candidate(1, 1, "fp16", "contiguous", 64),
        Candidate(1, 1, "bf16", "contiguous", 64),
        Candidate(1, 1, "fp32", "channels_last", 64),
        Candidate(1, 2, "fp32", "contiguous", 32),
        Candidate(2, 1, "fp32", "contiguous", 32),
    )
    assert sorted(set(ordered), key=lambda one: one.complexity) == list(ordered)


def test_a_candidate_changes_only_its_fields_of_a_configuration() -> None:
    config = TrainConfig(model="mlp", lr=0.1)
    found = Candidate(2, 4, "bf16", "channels_last", 96).applied_to(config)
    assert (found.workers, found.threads, found.batch_size) == ("2", 4, 96)
    assert (found.precision, found.layout, found.model, found.lr) == ("bf16", "channels_last", "mlp", 0.1)
