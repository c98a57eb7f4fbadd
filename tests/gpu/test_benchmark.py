"""benchmarks/gpu.py where there is no GPU: all that it does but CUDA itself."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.preloaded import interpreter

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


def test_the_benchmark_of_a_gpu_writes_both_tables_on_the_cpu(tmp_path: Path) -> None:
    sizes = "--device cpu --rounds 1 --models mlp cnn --batch 4 --steps 1 --widths 8 --batches 4"
    found = tmp_path / "RESULTS.md"
    done = subprocess.run(
        [*interpreter(), str(SCRIPT), *sizes.split(), "--out", str(found)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    training, paying = found.read_text().split("## Training")[1].split("## Where a GPU begins to pay")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in training.splitlines() if "|" in line]
    assert [row[0] for row in rows] == ["samples/s", rows[1][0], "mlp", "cnn"]
    for _, samples, ours, _, by_hand, _, ratio in rows[2:]:
        assert samples == "4"
        assert int(ours.replace(",", "")) > 0
        assert int(by_hand.replace(",", "")) > 0
        assert "reached" in ratio or "MISSED" in ratio
    assert [cell.strip() for cell in paying.splitlines()[-1].split("|")][1:3] == ["8", "4"]
