"""MPI against sequential training: 1, 2 and 4 processes, and how efficient they really are.

    pip install 'tutti[mpi,plots]'
    python examples/efficiency.py [--model lenet] [--data mnist] [--steps 150] [--repeats 3] [--out FILE]

All ways take turns, and the medians are shown; the seconds are those of training alone, without the start of
the processes and without evaluations. The lesson: docs/lessons/efficiency.md
"""

import argparse
from statistics import median

import tutti
from tutti.launch.cores import allowed_cores

CORES = allowed_cores().usable


def ways(processes):
    """Each way by its name: options of `tutti.train`."""
    mpi = {
        f"MPI, {p} process{'es' * (p > 1)}": {"workers": p, "threads": 1, "hosts": f"localhost:{p}"}
        for p in processes
    }
    alone = {
        "one thread": {"workers": 1, "threads": 1},
        f"all {CORES} threads": {"workers": 1, "threads": CORES},
    }
    return alone | mpi


def seconds_of(options, args):
    result = tutti.train(
        args.model,
        args.data,
        steps=args.steps,
        batch_size=128,
        lr=0.003,
        validation=0.0,
        quiet=True,
        **options,
    )
    return result.summary.seconds


def table(found):
    """One row for each way; speed-up and efficiency come from the seconds in the row, and no other."""
    one, every = (found[name] for name in list(found)[:2])
    rows = []
    for name, seconds in found.items():
        p = int(name.split()[1]) if "MPI" in name else 1
        threads = CORES if name.startswith("all") else 1
        cores = min(CORES, p * threads)
        row = {
            "way": name,
            "seconds": seconds,
            "against one thread": one / seconds,
            "against all threads": every / seconds,
        }
        row |= {
            "efficiency per process": one / seconds / (p * threads),
            "efficiency per core": one / seconds / cores,
        }
        rows.append(row | {"note": "processes share cores" if p * threads > CORES else ""})
    return rows


def draw(rows, out):
    import altair as alt

    bars = [name for name in rows[0] if name.startswith("against")]
    data = [{"way": row["way"], "speed-up": name, "times": row[name]} for row in rows for name in bars]
    chart = (
        alt.Chart(alt.Data(values=data))
        .mark_bar()
        .encode(
            alt.X("times:Q", title=f"times as fast; there are {CORES} cores"),
            alt.Y("way:N", sort=None, title=None),
            alt.Color("speed-up:N", title="speed-up"),
            yOffset="speed-up:N",
        )
    )
    line = alt.Chart(alt.Data(values=[{"times": 1}])).mark_rule(strokeDash=[4, 3]).encode(x="times:Q")
    (chart + line).properties(width=460, height=230).configure(background="#ffffff", padding=14).save(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="lenet")
    parser.add_argument("--data", default="mnist")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--processes", default="1,2,4")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", default="efficiency.svg", help="picture to write: .svg, .png or .html")
    args = parser.parse_args()
    chosen = ways([int(p) for p in args.processes.split(",")])
    times = {name: [] for name in chosen}
    for _ in range(args.repeats):
        for name, options in chosen.items():
            times[name].append(seconds_of(options, args))
    rows = table({name: median(found) for name, found in times.items()})
    for row in rows:
        print(*(f"{value:.2f}" if isinstance(value, float) else value for value in row.values()), sep="  ")
    draw(rows, args.out)
    print(f"written: {args.out}")
