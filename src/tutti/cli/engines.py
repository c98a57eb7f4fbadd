"""The options of all farms: `--on` and `--hosts`, where its launches are, and the ranks of its blocks."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tutti.cli.options import Parser
from tutti.errors import BadOption, UserError
from tutti.farm.slurm import SCRIPT, ArrayJob
from tutti.launch.launcher import started_by
from tutti.launch.placement import Host, given_hosts

HERE: Final = "here"
SLURM: Final = "slurm"

_RANKS: Final = re.compile(r"(?<![\w-])-n (?=\d)")


def define_engine(parser: Parser) -> None:
    """Add the option to a command's parser."""
    on = "where the runs are made: on this host, or by a job array of Slurm, which has --blocks tasks"
    parser.option("--on", on, default=HERE, choices=[HERE, SLURM])
    hosts = (
        "hosts that share a file system, or a file of them: a launch on each, with as many ranks as its "
        "cores allow, or those of a:4,b:8; needs --out"
    )
    parser.option("--hosts", hosts, "HOSTS")


def work_on_hosts(own: argparse.Namespace) -> int | None:
    """Have launches on other hosts do all the work; return the exit code. None: this process is to do it.

    Args:
        own: the options of the command.

    Raises:
        UserError: it cannot be done like this.
    """
    if not own.hosts or own.dry_run:
        return None
    if own.on != HERE:
        raise BadOption(
            "--hosts starts the launches through mpirun, and --on by Slurm; leave one of them out"
        )
    if own.out is None:
        raise BadOption("--hosts needs --out: the folder of the farm, on a file system that all hosts share")
    context = started_by()
    if context.given:
        raise BadOption(
            f"--hosts starts the launches itself, but {context.launcher.value} has started this process; "
            f"leave --hosts out, or run the command without {context.launcher.value}"
        )
    # It would slow every start.
    from tutti.farm.hosts import run_on_hosts

    hosts = given_hosts(own.hosts, unsaid=0)
    return run_on_hosts(hosts, [[*own.command_line, *_words_of_host(own, host)] for host in hosts])


def _words_of_host(own: argparse.Namespace, host: Host) -> list[str]:
    """Return the words that a host's launch has besides those of all."""
    # Of an option that is given twice the last one counts.
    words = ["--hosts", ""]
    if not host.ranks:
        return words
    if own.blocks is not None:
        raise BadOption(
            f"--blocks is given, and so are the ranks of {host.name} in --hosts; give one of them"
        )
    if own.block < 1 or host.ranks % own.block:
        raise BadOption(
            f"--hosts gives {host.name} {host.ranks} ranks, which cannot be cut into blocks of {own.block} "
            "(--block); give a multiple of that"
        )
    return [*words, "--blocks", str(host.ranks // own.block)]


@contextmanager
def ranks_by_block() -> Iterator[None]:
    """Spell the ranks of a run in a `UserError` as those of a block, which has no -n."""
    try:
        yield
    except UserError as error:
        error.args = tuple(_RANKS.sub("--block ", one) if isinstance(one, str) else one for one in error.args)
        raise


def array_job(own: argparse.Namespace, servers: int) -> ArrayJob | None:
    """Return the job array that is to work on the farm; None: this process is.

    Args:
        own: the options of the command.
        servers: the ranks of each block that do not train.

    Raises:
        BadOption: nobody has said how many tasks there are.
    """
    if own.on == HERE:
        return None
    if own.blocks is None or own.blocks < 1:
        raise BadOption(
            "--on slurm needs --blocks N: the job array has N tasks, each of which makes one run at a time"
        )
    words = [word for word in own.command_line if word != "--dry-run"]
    return ArrayJob(words, own.blocks, max(1, own.block - servers), own.threads or 1)


def print_script(job: ArrayJob, folder: Path) -> None:
    """Print what `submit` would hand to Slurm."""
    print(f"{folder / SCRIPT}:\n\n{job.script(folder)}", end="")


def submit(job: ArrayJob, folder: Path) -> None:
    """Hand a farm to Slurm, and say what to do next.

    Raises:
        BadRunFolder: the script cannot be written.
        UserError: Slurm is not here, or does not take it.
    """
    number, said = job.submit(folder), shlex.quote(str(folder))
    print(
        f"submitted {folder / SCRIPT} as job {number}, an array of {job.tasks} tasks\n"
        f"how far they are: tutti watch {said}; what has come out: tutti report {said}"
    )
