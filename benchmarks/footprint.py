"""Peak memory of collecting, and the time of `import rollpipe`, each as a ratio to its floor. Every measurement runs in its own process.

python benchmarks/footprint.py [--repeats 5]
"""

import subprocess
import sys

from report import header, options_of, spread, table

COLLECT = """
import resource, sys; sys.path.insert(0, {here!r})
import torch; torch.set_num_threads(1)
{make}
for _ in range(20): collect()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""
FLOOR = "from floor import Floor; collect = Floor('CartPole-v1', 64, 128).collect"
PIPELINE = "from collect import pipeline; collect = pipeline('CartPole-v1', 64)"
OURS = "rollpipe.pipes, rollpipe.layers, rollpipe.agents"
IMPORT = "from time import perf_counter as t; s = t(); import {what}; print(t() - s)"


def run(code) -> float:
    "The number that a fresh interpreter prints."
    return float(
        subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True
        ).stdout
    )


def pairs(first, second, repeats):
    "Interleaved measurements of two programs."
    run(first), run(second)
    return zip(*((run(first), run(second)) for _ in range(repeats)))


def main():
    args = options_of(__doc__, repeats=5)
    args = args.parse_args()
    here = sys.path[0]
    print(header())
    rows = []
    for what, unit, floor, ours in (
        (
            "peak memory, CartPole-v1, B=64",
            "{:.0f} MB",
            *(COLLECT.format(here=here, make=m) for m in (FLOOR, PIPELINE)),
        ),
        ("import", "{:.2f} s", *(IMPORT.format(what=w) for w in ("torch, gymnasium", OURS))),
    ):
        f, p = pairs(floor, ours, args.repeats)
        rows.append([what, spread(f, unit), spread(p, unit), spread([b / a for a, b in zip(f, p)])])
    print(table(["", "floor", "rollpipe", "ratio"], rows))


if __name__ == "__main__":
    main()
