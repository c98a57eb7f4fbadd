"""The scripts and manifests for clusters give commands that the command line takes."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tutti.cli.command import Command
from tutti.cli.commands import COMMANDS
from tutti.cli.options import config_from
from tutti.run.config import Options

EXAMPLES = Path(__file__).parents[2] / "examples"


def in_scripts() -> Iterator[tuple[str, list[str]]]:
    """The words of tutti's command in each job script of Slurm."""
    for path in sorted(EXAMPLES.glob("slurm/*.sbatch")):
        (line,) = re.findall(r"^(?:srun .*)?tutti (train .*)$", path.read_text(), re.MULTILINE)
        yield path.name, shlex.split(line.removesuffix("&").replace('"$@"', ""))


def in_manifests() -> Iterator[tuple[str, list[str]]]:
    """The words of tutti's command in each manifest of Kubernetes."""
    for path in sorted(EXAMPLES.glob("kubernetes/*.yaml")):
        for container in containers(yaml.safe_load(path.read_text())):
            words = [*container["command"], *container.get("args", [])]
            if "tutti" in words:
                yield path.name, words[words.index("tutti") + 1 :]


def in_images() -> Iterator[tuple[str, list[str]]]:
    text = (EXAMPLES / "docker" / "Dockerfile").read_text()
    for listed in re.findall(r"^CMD (\[.*\])$", text, re.MULTILINE):
        yield "Dockerfile", yaml.safe_load(listed)[1:]
    for line in re.findall(r"docker run .* tutti tutti (.*)$", text, re.MULTILINE):
        yield "Dockerfile", shlex.split(line)


def containers(part: object) -> list[dict[str, Any]]:
    """All containers in a manifest, however deep they stand in it."""
    if isinstance(part, list):
        return [one for each in part for one in containers(each)]
    if not isinstance(part, dict):
        return []
    return [*part.get("containers", []), *(one for each in part.values() for one in containers(each))]


COMMANDS_FOUND = [*in_scripts(), *in_manifests(), *in_images()]


def test_every_kind_of_example_has_commands() -> None:
    assert {name.rpartition(".")[2] for name, _ in COMMANDS_FOUND} == {"sbatch", "yaml", "Dockerfile"}
    assert len(COMMANDS_FOUND) == 7


@pytest.mark.parametrize(("name", "words"), COMMANDS_FOUND)
def test_a_command_of_an_example_is_parsed(
    name: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[dict[str, Any], dict[str, Options]]] = []

    def note(
        command: Command, own: argparse.Namespace, given: dict[str, Any], dotted: dict[str, Options]
    ) -> int:
        seen.append((given, dotted))
        return 0

    monkeypatch.setattr(COMMANDS[words[0]], "run", note)
    assert COMMANDS[words[0]]()(words[1:]) == 0
    ((given, dotted),) = seen
    config_from(given, dotted)


def test_the_ranks_of_the_mpi_job_fill_its_workers() -> None:
    spec = yaml.safe_load((EXAMPLES / "kubernetes" / "mpi-job.yaml").read_text())["spec"]
    launcher, worker = (spec["mpiReplicaSpecs"][name] for name in ("Launcher", "Worker"))
    arguments = launcher["template"]["spec"]["containers"][0]["args"]
    assert int(arguments[arguments.index("-n") + 1]) == worker["replicas"] * spec["slotsPerWorker"]
    limits = worker["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert int(limits["cpu"]) == spec["slotsPerWorker"]


def test_the_parts_of_the_image_that_the_manifest_names_are_those_that_it_has() -> None:
    image = (EXAMPLES / "docker" / "Dockerfile").read_text()
    manifest = (EXAMPLES / "kubernetes" / "mpi-job.yaml").read_text()
    for path in ("/home/mpiuser/.ssh", "/home/mpiuser/sshd_config"):
        assert path in image
        assert path in manifest
