"""The options of all farms: the ranks of their blocks, the folder, and where the runs are made."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tutti.cli.options import Parser, Words
from tutti.errors import BadOption, UserError
from tutti.farm.slurm import SCRIPT, ArrayJob

HERE: Final = "here"
SLURM: Final = "slurm"

_RANKS: Final = re.compile(r"(?<![\w-])-n (?=\d)")


def define_farm(parser: Parser, folder: str) -> None:
    """Add the options of all farms to a command's parser."""
    parser.option("--block", "ranks of each run", "B", 1, type=int)
    blocks = "runs at a time (default: as many as the cores allow, and no more than help)"
    parser.option("--blocks", blocks, "N", type=int)
    parser.option("--threads", "threads of each rank (default: the cores / the ranks)", "N", type=int)
    timeout = "end a run that is not done after this time, such as 10m"
    parser.option("--job-timeout", timeout, "DURATION")
    limit = "save and stop after this time, such as 2h; --resume goes on"
    parser.option("--time-limit", limit, "DURATION")
    parser.option("--out", f"folder of all runs and results (default: {folder})", "FOLDER")
    parser.option("--resume", "go on in --out, beside others that do: what has finished is kept")
    on = "where the runs are made: on this host, or by a job array of Slurm, which has --blocks tasks"
    parser.option("--on", on, default=HERE, choices=[HERE, SLURM])
    # Refused in `array_job`.
    parser.option("--hosts", argparse.SUPPRESS, "HOSTS")


@contextmanager
def ranks_by_block() -> Iterator[None]:
    """Spell the ranks of a run in a `UserError` as those of a block, which has no -n."""
    try:
        yield
    except UserError as error:
        error.args = tuple(_RANKS.sub("--block ", one) if isinstance(one, str) else one for one in error.args)
        raise


def array_job(words: Words, servers: int) -> ArrayJob | None:
    """Return the job array that is to work on the farm; None: this process is."""
    own = words.own
    if own.resume and own.out is None:
        raise BadOption("--resume needs --out: the folder to go on with")
    if own.hosts is not None:
        raise BadOption(
            "--hosts is an option of 'tutti train'; start this command on each host with --resume and the "
            "same --out folder, on a file system that all hosts share, or as a job array with --on slurm"
        )
    if own.on == HERE:
        return None
    if own.blocks is None or own.blocks < 1:
        raise BadOption(
            "--on slurm needs --blocks N: the job array has N tasks, each of which makes one run at a time"
        )
    line = [word for word in words.line if word != "--dry-run"]
    return ArrayJob(line, own.blocks, max(1, own.block - servers), own.threads or 1)


def print_script(job: ArrayJob, folder: Path) -> None:
    """Print what `submit` would hand to Slurm."""
    print(f"{folder / SCRIPT}:\n\n{job.script(folder)}", end="")


def submit(job: ArrayJob, folder: Path) -> None:
    """Hand a farm to Slurm, and say what to do next."""
    number, said = job.submit(folder), shlex.quote(str(folder))
    print(
        f"submitted {folder / SCRIPT} as job {number}, an array of {job.tasks} tasks\n"
        f"how far they are: tutti watch {said}; what has come out: tutti report {said}"
    )
