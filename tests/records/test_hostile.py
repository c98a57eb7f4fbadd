"""What a folder says is shown as it is."""

from __future__ import annotations

import io
import json
from pathlib import Path

from tests.watching.seen import write_run
from tutti.reports.results import read_results
from tutti.reports.text import show
from tutti.run.config import TrainConfig
from tutti.watching.follow import show as show_run
from tutti.watching.health import SILENT_S


def test_a_name_with_markup_is_shown_as_it_is(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run[bold]x", epochs=1, finished=True)
    (folder / "config.json").write_text(
        json.dumps({**TrainConfig().as_json(), "model": "a[/foo]b:smile:", "workers": "1", "threads": 1})
    )
    for look in (lambda out: show(read_results([folder]), out), lambda out: show_run(folder, SILENT_S, out)):
        output = io.StringIO()
        look(output)
        assert "a[/foo]b:smile:" in output.getvalue()
        assert "run[bold]x" in output.getvalue()
