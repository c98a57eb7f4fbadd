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


def test_the_report_has_every_part_of_the_machine() -> None:
    found = dict(doctor.examine())
    expected = {"machine", "cores", "affinity", "quota", "threads", "memory", "matrix units", "python", "MPI"}
    assert expected | {"torch", "GPU", "all-reduce", "recommended"} == found.keys() - {"mpirun"}
    assert "GiB available" in found["memory"]
    assert "4 KB in " in found["all-reduce"]
    assert "16 MB in " in found["all-reduce"]


def test_ranks_that_do_not_start_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> object:
        raise PeerLost([1], "killed by signal 9")

    monkeypatch.setattr(doctor, "start", fail)
    assert doctor.measure_ranks(place_ranks(1)) == "lost rank 1: killed by signal 9"


@needs_mpirun
def test_a_working_mpi_is_named() -> None:
    assert re.fullmatch(r".+, mpi4py \d\S+", doctor.mpi_library())


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("not installed", "pip install 'tutti[mpi]'"),
        ("4.0", "no MPI library works: RuntimeError: cannot load MPI library"),
    ],
)
def test_a_missing_or_broken_mpi_is_reported_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, version: str, expected: str
) -> None:
    monkeypatch.setattr(doctor, "MPI_QUESTION", "raise RuntimeError('cannot load MPI library')")
    monkeypatch.setattr(doctor, "version_of", lambda package: version)
    assert expected in doctor.mpi_library()


def test_the_mpirun_of_root_is_shown_with_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(doctor.os, "geteuid", lambda: 0)
    cores = Cores(((0,), (1,), (2,)))
    (line,) = doctor.mpirun_options("Open MPI v5.0.11, mpi4py 4.1.2", cores)
    assert line.startswith("mpirun --allow-run-as-root --bind-to none -n 3 tutti train")
    assert "add --oversubscribe for more ranks than 3" in line
    assert doctor.mpirun_options("MPICH Version: 4.0.2", cores) == []


def test_the_recommended_commands_fit_the_machine_and_can_be_parsed() -> None:
    cores = Cores(((0, 4), (1, 5), (2, 6), (3, 7)))
    assert "-n 4 " in doctor.recommend(cores, "")[0]
    assert "--device cuda" in doctor.recommend(cores, "H200")[0]
    for line in doctor.recommend(cores, "H200"):
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
