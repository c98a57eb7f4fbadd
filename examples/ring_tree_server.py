"""All-reduce by ring, tree or parameter server: what it costs on 2 to 256 virtual ranks.

    python examples/ring_tree_server.py [--ranks 2,4,8,16,32,64,128,256] [--out ring-tree-server.svg]

The vectors are real, the clock is virtual: a message of n bytes takes alpha + n beta, here 20 us + n x 0.8 ns
(10 Gbit/s). The lesson: docs/lessons/ring-tree-server.md
"""

import argparse

import torch
from tutti.allreduce import ALGORITHMS
from tutti.allreduce.ranks import Ranks
from tutti.comm.network import Network, rounds
from tutti.comm.virtual.world import VirtualWorld

ALPHA, BETA = Network().latency_s, 1 / Network().bandwidth_bytes_per_s
SIZES = {"4 KiB": 2**12, "64 KiB": 2**16, "1 MiB": 2**20}


def server(ranks, vector):
    """Every rank sends its vector to rank 0 and gets the sum back."""
    if ranks.rank:
        ranks.send(vector, 0)
        ranks.recv(vector, 0)
        return
    incoming = torch.empty_like(vector)
    for other in range(1, ranks.size):
        ranks.recv(incoming, other)
        vector.add_(incoming)
    for other in range(1, ranks.size):
        ranks.send(vector, other)


WAYS = {"ring": ALGORITHMS["ring"], "tree": ALGORITHMS["tree"], "server": server}
FORMULAS = {
    "ring": lambda p, n: 2 * (p - 1) * ALPHA + 2 * (p - 1) / p * n * BETA,
    "tree": lambda p, n: 2 * rounds(p) * (ALPHA + n * BETA),
    "server": lambda p, n: 2 * ALPHA + 2 * (p - 1) * n * BETA,
}


def measure(way, size, p):
    """All-reduce vectors of ones on p hosts; time and bytes on the virtual clock."""

    def program(comm):
        ranks, vector = Ranks(comm), torch.ones(SIZES[size] // 4)
        WAYS[way](ranks, vector)
        assert vector.eq(p).all()
        return ranks.sent

    world = VirtualWorld(p, ranks_per_host=1)
    sent = world.run(program)
    row = {"way": way, "size": size, "ranks": p, "us": world.seconds * 1e6}
    row |= {"formula": FORMULAS[way](p, SIZES[size]) * 1e6, "steps": max(one.steps for one in sent)}
    kib = [one.nbytes / 1024 for one in sent]
    print(
        *(f"{value:10,.0f}" if isinstance(value, float) else f"{value:>7}" for value in row.values()), end=""
    )
    print(f"{max(kib):12,.1f} KiB sent by one rank, {sum(kib):12,.1f} by all")
    return row


def draw(rows, out):
    import altair as alt

    ranks = alt.X("ranks:Q", scale=alt.Scale(type="log", base=2), axis=alt.Axis(tickCount=8))
    powers = alt.Axis(values=[10**k for k in range(1, 7)], format="~s")
    time = alt.Y("us:Q", title="time, µs", scale=alt.Scale(type="log"), axis=powers)
    algorithm = alt.Color("way:N", sort=[*WAYS], title="algorithm", legend=alt.Legend(orient="bottom"))
    base = alt.Chart(alt.Data(values=rows)).encode(ranks, color=algorithm)
    lines = alt.layer(base.mark_line().encode(alt.Y("formula:Q")), base.mark_point(filled=True).encode(time))
    facets = lines.properties(width=230, height=220).facet(alt.Column("size:N", sort=[*SIZES], title=None))
    chart = facets.configure(background="#ffffff", padding=14).configure_axis(labelFlush=False)
    chart.configure_legend(columnPadding=18).save(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="2,4,8,16,32,64,128,256")
    parser.add_argument("--out", default="ring-tree-server.svg", help="picture to write: .svg, .png or .html")
    args = parser.parse_args()
    counts = [int(count) for count in args.ranks.split(",")]
    print("    way   size   ranks     measured   formula  steps")
    draw([measure(way, size, p) for size in SIZES for p in counts for way in WAYS], args.out)
    print(f"written: {args.out}")
