"""The doctor's report on this machine."""

from __future__ import annotations

import re

import pytest

from tests.mpi.mpirun import needs_mpirun
from tutti.cli.train import TrainCommand
from tutti.errors import PeerLost
from tutti.launch.cores import Cores
from tutti.launch.placement import place_ranks
from tutti.studies import doctor


def test_every_part_of_the_machine_is_reported() -> None:
    found = dict(doctor.examine())
    expected = {"machine", "cores", "affinity", "quota", "threads", "memory", "matrix units", "python", "MPI"}
    assert expected | {"torch", "GPU", "all-reduce", "recommended"} == found.keys() - {"mpirun"}
    assert "GiB available" in found["memory"]
    assert "4 KB in " in found["all-reduce"]
    assert "16 MB in " in found["all-reduce"]


def test_ranks_that_do_not_start_are_reported_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> object:
        raise PeerLost([1], "killed by signal 9")

    monkeypatch.setattr(doctor, "start", fail)
    assert doctor.measure_ranks(place_ranks(1)) == "lost rank 1: killed by signal 9"


def test_a_machine_without_mpi4py_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda package: "not installed")
    assert "pip install 'tutti[mpi]'" in doctor.mpi_library()


@needs_mpirun
def test_an_mpi_that_works_is_named() -> None:
    assert re.fullmatch(r".+, mpi4py \d\S+", doctor.mpi_library())


def test_roots_mpirun_is_shown_with_what_open_mpi_refuses_to_start_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(doctor.os, "geteuid", lambda: 0)
    cores = Cores(((0,), (1,), (2,)))
    (line,) = doctor.mpirun_options("Open MPI v5.0.11, mpi4py 4.1.2", cores)
    assert line.startswith("mpirun --allow-run-as-root --bind-to none -n 3 tutti train")
    assert "more ranks than 3: --oversubscribe" in line
    assert doctor.mpirun_options("MPICH Version: 4.0.2", cores) == []


def test_an_mpi_that_does_not_work_is_told_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "MPI_QUESTION", "raise RuntimeError('cannot load MPI library')")
    monkeypatch.setattr(doctor, "_version", lambda package: "4.0")
    assert "no MPI library works: RuntimeError: cannot load MPI library" in doctor.mpi_library()


def test_what_is_recommended_fits_the_cores() -> None:
    cores = Cores(((0, 4), (1, 5), (2, 6), (3, 7)))
    assert "-n 4 " in doctor.recommend(cores, "")[0]
    assert "--device cuda" in doctor.recommend(cores, "H200")[0]


def test_the_recommended_commands_are_ones_that_the_command_line_knows() -> None:
    for line in doctor.recommend(Cores(((0,), (1,))), "H200"):
        words = line.partition("    (")[0].split()
        assert words[:2] == ["tutti", "train"]
        assert TrainCommand().parser().parse_args(words[2:]).model == "cnn"


@pytest.mark.parametrize(
    ("driver", "cuda", "visible", "expected"),
    [
        ("", "13.0", None, "none"),
        ("H200", "", None, "H200, but torch 2.9 was built without CUDA"),
        ("H200", "13.0", "", "H200, but CUDA_VISIBLE_DEVICES='' hides it"),
        ("H200", "13.0", None, "H200, but its driver is too old for CUDA 13.0"),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_reported_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, driver: str, cuda: str, visible: str | None, expected: str
) -> None:
    monkeypatch.setattr(doctor, "_driver_gpu", lambda: driver)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert doctor.unused_gpu(doctor.Measured("2.9", cuda, "", ())).startswith(expected)
