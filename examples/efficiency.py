"""Speed-up and efficiency of training with 1, 2 and 4 MPI processes.

    pip install 'tutti[mpi,plots]'
    python examples/efficiency.py [--model lenet] [--data mnist] [--steps 150] [--repeats 3] [--out FILE]

The ways take turns; the table shows medians. The seconds are those of training, without start-up and
evaluation. The lesson: docs/lessons/efficiency.md
"""

import argparse
from statistics import median

import tutti
from tutti.launch.cores import allowed_cores

CORES = allowed_cores().usable


def ways(processes):
    """Return the options of `tutti.train` by the name of the way."""
    found = {"1 thread": {"workers": 1, "threads": 1}, f"{CORES} threads": {"workers": 1, "threads": CORES}}
    for p in processes:
        name = f"MPI, {p} process{'es' * (p > 1)}"
        found[name] = {"workers": p, "threads": 1, "hosts": f"localhost:{p}"}
    return found


def seconds_of(options, args):
    fixed = {"steps": args.steps, "batch_size": 128, "lr": 0.003, "validation": 0.0, "quiet": True}
    return tutti.train(args.model, args.data, **fixed, **options).summary.seconds


def table(seconds, options):
    """Return a row for each way; speed-ups and efficiencies follow from the seconds in the table."""
    one_thread, all_threads = list(seconds.values())[:2]
    rows = []
    for name, s in seconds.items():
        used = options[name]["workers"] * options[name]["threads"]
        row = {
            "way": name,
            "seconds": s,
            "over 1 thread": one_thread / s,
            "over all threads": all_threads / s,
        }
        row |= {"per process": one_thread / s / used, "per core": one_thread / s / min(used, CORES)}
        rows.append(row)
    return rows


def draw(rows, out):
    import altair as alt

    baselines = [name for name in rows[0] if name.startswith("over")]
    data = [{"way": row["way"], "baseline": name, "times": row[name]} for row in rows for name in baselines]
    base = alt.Chart(alt.Data(values=data)).encode(
        alt.X("times:Q", title=f"speed-up on {CORES} cores", axis=alt.Axis(tickCount=6)),
        alt.Y("way:N", sort=None, title=None),
        yOffset=alt.YOffset("baseline:N", sort=None),
    )
    color = alt.Color("baseline:N", sort=None, title=None, legend=alt.Legend(orient="bottom"))
    numbers = base.mark_text(align="right", dx=-4).encode(text=alt.Text("times:Q", format=".2f"))
    chart = (base.mark_bar().encode(color) + numbers).properties(width=560, height=230)
    chart = chart.configure(background="#ffffff", padding=14).configure_axis(labelFlush=False)
    chart.configure_legend(columnPadding=18).save(out)


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
    rows = table({name: median(repeats) for name, repeats in times.items()}, chosen)
    print(*rows[0], sep="  ")
    for row in rows:
        print(*(f"{value:.2f}" if isinstance(value, float) else value for value in row.values()), sep="  ")
    draw(rows, args.out)
    print(f"written: {args.out}")
