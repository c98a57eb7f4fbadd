"""The pictures of the README: three trainings by five ways each, how much faster they are and how accurate.

    pip install 'tutti[plots]'
    python examples/readme_picture.py [--epochs 1] [--repeats 3] [--out docs/compare.svg] [--runs FOLDER]
                                      [--screenshot docs/report.png]
    python examples/readme_picture.py --terminal docs/terminal.svg

Each training is a `tutti compare`: one process with one thread and with all, and sync, hogwild, easgd and
downpour on 1 and 2 workers with one thread each; all in turn, medians of the repeats. The runs are kept in
FOLDER, each comparison with its page; what has been run there already is not run again. On two cores it takes
about 20 minutes. --screenshot also takes a picture of the first page, with chromium and 'tutti[browser]'.
--terminal draws what one training prints instead.
"""

import argparse
import io
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import altair as alt
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text
from tutti.reports.figures.base import COLOURS
from tutti.reports.results import read_comparison


@dataclass(frozen=True)
class Training:
    """What is trained."""

    title: str
    model: str
    data: str
    options: tuple[str, ...]
    epochs: int


TRAININGS = {
    "lenet": Training("MNIST, LeNet", "lenet", "mnist", (), 1),
    "mlp": Training(
        "Fashion-MNIST, sigmoid MLP",
        "mlp",
        "fashion-mnist",
        ("--model.activation", "sigmoid", "--model.hidden", "100"),
        3,
    ),
    "cnn": Training("Fashion-MNIST, CNN", "cnn", "fashion-mnist", ("--model.channels", "16,32"), 1),
}
"""Each by the name of its folder; its epochs are multiplied by --epochs."""

WAYS = "solo,sync,hogwild,easgd,downpour"

SETTINGS = ("--batch-size", "128", "--lr", "0.003")

OWN = ("easgd:strategy.every=4", "hogwild:lr=0.001", "downpour:lr=0.002")
"""Chosen on the validation part."""


def compare(training, folder, args):
    words = ["compare", training.model, "--data", training.data, *training.options, *SETTINGS]
    words += ["--strategies", WAYS, "-n", args.workers, "--repeats", str(args.repeats)]
    words += ["--epochs", str(args.epochs * training.epochs), "--out", str(folder)]
    words += [word for own in OWN for word in ("--for", own)]
    words += ["--resume"] if (folder / "comparison.json").exists() else []
    subprocess.run([sys.executable, "-m", "tutti", *words], check=True)


def measured(title, results):
    """The numbers of the picture: one row for each way, and one for each repeat."""
    rows, repeats = [], []
    for row in results.rows:
        way = row.combination.name
        share = None if row.accuracy is None else 100 * row.accuracy
        rows.append({"training": title, "way": way, "speed-up": row.speed_up, "accuracy": share})
        for run in results.runs[row.combination.folder]:
            found = row.speed_up * row.seconds / run.seconds if row.speed_up is not None else None
            share = None if run.accuracy is None else 100 * run.accuracy
            repeats.append({"training": title, "way": way, "speed-up": found, "accuracy": share})
    return rows, repeats


def draw(found, out):
    columns = []
    for place, (rows, repeats) in enumerate(found):
        axis = alt.Y(
            "way:N", sort=None, title=None, axis=alt.Axis(labels=place == 0, ticks=False, domain=False)
        )
        color = alt.Color("way:N", sort=None, scale=alt.Scale(range=COLOURS), legend=None)
        base, ticks = alt.Chart(alt.Data(values=rows)).encode(y=axis), alt.Chart(alt.Data(values=repeats))
        few = alt.Axis(tickCount=4)
        size = {"width": 235, "height": alt.Step(19)}
        fast = base.mark_bar().encode(x=alt.X("speed-up:Q", title="times as fast as one thread"), color=color)
        number = base.mark_text(align="left", dx=4, fontSize=10).encode(
            x=alt.value(2), text=alt.Text("speed-up:Q", format=".2f")
        )
        right = base.mark_point(filled=True, size=70, opacity=1).encode(
            x=alt.X("accuracy:Q", title="test accuracy, %", axis=few, scale=alt.Scale(zero=False)),
            color=color,
        )
        tick = {"thickness": 1.5, "color": "#333333"}
        panels = [
            alt.layer(fast, ticks.mark_tick(**tick, size=11).encode(x="speed-up:Q", y=axis), number),
            alt.layer(ticks.mark_tick(**tick, size=9).encode(x="accuracy:Q", y=axis), right),
        ]
        panels[0] = panels[0].properties(title=rows[0]["training"], **size)
        columns.append(alt.vconcat(panels[0], panels[1].properties(**size), spacing=12))
    chart = (
        alt.hconcat(*columns, spacing=14)
        .resolve_scale(x="independent")
        .configure(background="#ffffff", padding=14, font="Helvetica, Arial, sans-serif")
        .configure_view(stroke="#dddddd")
        .configure_title(fontSize=14)
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    for kind in (".svg", ".png"):
        chart.save(str(out.with_suffix(kind)), **({"scale_factor": 2} if kind == ".png" else {}))


SHOWN = "train lenet --data mnist --epochs 3 --batch-size 128 --schedule one_cycle --lr 0.005"
"""What the picture of a terminal shows."""


def draw_terminal(out):
    """Draw what a terminal shows at the end of a command; the picture needs no font from elsewhere."""
    written = bytearray()

    def read(terminal):
        written.extend(data := os.read(terminal, 1 << 16))
        return data

    os.environ["COLUMNS"] = "104"
    with tempfile.TemporaryDirectory() as folder:
        pty.spawn(["env", "-C", folder, sys.executable, "-m", "tutti", *SHOWN.split()], read)
    # A line is what is left of it when it was written over; the bar goes away.
    lines = [re.split(r"\r(?!$)|\x1b\[2K", line)[-1] for line in written.decode().split("\n")]
    lines = [re.sub(r"\x1b\[[\d;?]*[a-zA-Z]|\r", "", line) for line in lines if "\u2501" not in line]
    console = Console(record=True, width=104, file=io.StringIO())
    console.print(Text(f"$ tutti {SHOWN}", style="bold green"))
    console.print(Text("\n".join(lines).rstrip()))
    svg = console.export_svg(title="tutti", theme=MONOKAI, unique_id="terminal")
    out.write_text(re.sub(r"@font-face {.*?}\s*", "", svg, flags=re.S), encoding="utf-8")


def photograph(page, out):
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        shown = browser.new_page(viewport={"width": 1200, "height": 1500})
        shown.goto(page.resolve().as_uri())
        shown.wait_for_selector("body[data-drawn]")
        shown.screenshot(path=out)
        browser.close()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trainings", default=",".join(TRAININGS), help="of: " + ", ".join(TRAININGS))
    parser.add_argument("--epochs", type=int, default=1, help="times the epochs of each training")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", default="1,2")
    parser.add_argument("--out", default="docs/compare.svg", help="picture to write, as .svg and as .png")
    parser.add_argument("--runs", default="comparisons/readme", help="folder for the runs")
    parser.add_argument("--screenshot", help="file for a picture of the first page, .png")
    parser.add_argument("--terminal", type=Path, help="file for the picture of a terminal, .svg")
    args = parser.parse_args()
    if args.terminal:
        draw_terminal(args.terminal)
        return
    found = []
    for name in args.trainings.split(","):
        folder = Path(args.runs, name)
        compare(TRAININGS[name], folder, args)
        found.append(measured(TRAININGS[name].title, read_comparison(folder)))
    draw(found, Path(args.out))
    if args.screenshot:
        photograph(Path(args.runs, args.trainings.split(",")[0], "report.html"), args.screenshot)
    print(f"written: {Path(args.out).resolve()}")


if __name__ == "__main__":
    main()
