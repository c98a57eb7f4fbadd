"""benchmarks/farm.py, tiny."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.preloaded import interpreter

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "farm.py"


def test_the_benchmark_of_a_farm_judges_what_a_trial_costs() -> None:
    options = ["overhead", "--data", "noise", "--rounds", "1", "--trials", "3"]
    done = subprocess.run(
        [*interpreter(starts_ranks=True), str(SCRIPT), *options], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    figures = [line for line in done.stdout.splitlines() if line.startswith("- ")]
    wanted = [line for line in figures if "wanted: at most" in line]
    assert len(figures) == 5
    assert len(wanted) == 2
    assert all(line.endswith(("reached", "MISSED")) for line in wanted)
