"""A farm for Slurm: a job array whose tasks each work on the farm's folder with their own block.

    tutti cv ... --on slurm --blocks 8 ──► FARM/slurm.sh ──sbatch──► task 0: tutti cv ... --resume --out FARM
                                                                     task 1: the same; up to task 7

The tasks share the jobs like all launches on one folder (`claims.py`). No torch.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tutti.errors import UserError
from tutti.records.files import replace_file

SCRIPT: Final = "slurm.sh"

_TEXT: Final = """\
#!/bin/bash
#SBATCH --job-name={name} --array=0-{last} --output={folder}/slurm-%A-%a.txt
#SBATCH --nodes=1 --ntasks=1 --cpus-per-task={cores} --open-mode=append
#SBATCH --signal=B:USR1@60
# Each task takes jobs that no other task works on. Slurm asks it to save and stop in its last minute.
# To continue: sbatch {script}
cd {here} || exit
exec {command}
"""


@dataclass(frozen=True)
class ArrayJob:
    """A job array that works on a farm."""

    words: Sequence[str]  # of the command, from its name on
    tasks: int  # each has one block
    ranks: int  # of a block that train
    threads: int  # of each rank

    def script(self, folder: Path) -> str:
        """Return the text of the job script for the farm in a folder."""
        folder = folder.absolute()
        # The last one of repeated options counts.
        own = ["--on", "here", "--resume", "--out", str(folder)]
        own += ["--blocks", "1", "--threads", str(self.threads)]
        return _TEXT.format(
            name=shlex.quote(f"tutti-{folder.name}"),
            last=self.tasks - 1,
            folder=shlex.quote(str(folder).replace("%", "%%")),  # for `--output`, where % has a meaning
            cores=self.ranks * self.threads,
            script=shlex.quote(str(folder / SCRIPT)),
            here=shlex.quote(os.getcwd()),
            command=shlex.join([sys.executable, "-P", "-m", "tutti", *self.words, *own]),
        )

    def submit(self, folder: Path) -> str:
        """Write the script into the folder of the farm and submit it; return the job's number."""
        script = folder.absolute() / SCRIPT
        replace_file(script, os.fsencode(self.script(folder)))
        then = f"the job script is {script}: adapt it to this cluster, and submit it yourself"
        try:
            done = subprocess.run(
                ["sbatch", "--parsable", str(script)], capture_output=True, text=True, check=False
            )
        except OSError as error:
            raise UserError(f"sbatch cannot be started ({error.strerror}); {then}") from error
        if done.returncode != 0:
            raise UserError(
                f"sbatch has not taken the job: {done.stderr.strip() or 'it says nothing'}; {then}"
            )
        return done.stdout.strip().partition(";")[0]
