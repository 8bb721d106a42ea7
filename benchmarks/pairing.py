"""How many steps show the effect of an option: by pairs of branches, by branches with noise of their own, and by trainings of other seeds.

    python benchmarks/pairing.py [ENV] [--at 10,20 --updates 12 --repeat 4 --seeds 4 ...]

A run has the first value of the option. It is branched with both values, and each pair begins in one state and meets one noise
(`rollpipe ablate`). Beside it, each of some seeds is trained with both values, from its start until the last branch ends. A table is
printed: the effect on the mean return, its deviation between pairs or seeds, the steps of one more pair or seed, the steps with which a
95 % interval leaves out 0, and those with which it is as wide as that of the pairs. What is complete in the folder is kept.
"""

import argparse
from pathlib import Path

import numpy as np

from rollpipe.results.ablation import ablate
from rollpipe.results.experiments import python_words, run_all
from rollpipe.results.pairs import course
from rollpipe.runs.folder import load_run
from rollpipe.runs.logs import records_of
from rollpipe.settings.options import typed


def trained(args, value, seeds, updates) -> dict:
    "Seed -> folder of a training with this value of the option."
    folders = {seed: args.out / f"{value}-s{seed}" for seed in seeds}
    words = [
        *python_words(),
        "train",
        args.algorithm,
        args.env,
        f"--{args.option.replace('_', '-')}",
        value,
        "--steps",
        updates * args.batch,
        "--quiet",
        "--no-tensorboard",
        "--continue",
    ]
    commands = {
        folder.name: typed([*words, "--seed", seed, "--out", folder])
        for seed, folder in folders.items()
    }
    run_all(commands, args.jobs).check(len(commands))
    return folders


def row(name, values, deviation, steps, fixed, half) -> str:
    """A line of the table.

    Args:
        values: the effect in each pair or seed
        deviation: of the effect
        steps: of one more of them
        fixed: steps that they share
        half: half the width of an interval to reach
    """
    effect = float(np.mean(values))
    shows, narrow = (
        fixed + steps * max(2, np.ceil((1.96 * deviation / x) ** 2)) for x in (abs(effect), half)
    )
    return f"| {name} | {len(values)} | {effect:.0f} | {deviation:.0f} | {steps / 1000:.0f}k | {shows / 1000:.0f}k | {narrow / 1000:.0f}k |"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("env", nargs="?", default="Pendulum-v1")
    for name, default in dict(
        algorithm="trpo", option="critic_epochs", values="2,20", at="10,20"
    ).items():
        parser.add_argument(f"--{name}", default=default)
    for name, default in dict(updates=9, repeat=3, seeds=3, jobs=1, batch=2048).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path, default=Path("runs/pairing"))
    args = parser.parse_args()
    (first, second) = args.values.split(",")
    at = [int(n) for n in args.at.split(",")]
    whole = max(at) + args.updates
    last = max(1, args.updates // 3)
    run = trained(args, first, [1000], max(at))[1000]
    kind = type(load_run(run).config["options"][args.option])
    found = ablate(
        run,
        at,
        {args.option: [kind(second)]},
        args.updates,
        args.repeat,
        args.jobs,
        args.out / "branches",
        last=last,
    )
    pairs = found.pairs[0]
    (base, edited) = found.pairs[0].means(slice(-last, None))
    of_seeds = []
    for value in (first, second):
        folders = trained(args, value, range(args.seeds), whole)
        courses = [
            course(folder, "return_mean", whole - args.updates, args.updates)[:, -last:].sum(-1)
            for folder in folders.values()
        ]
        of_seeds.append(np.array([total / n for total, n in courses]))
    steps = max(r["steps"] for r in records_of(run)) / max(r["updates"] for r in records_of(run))
    within = lambda *xs: np.sqrt(sum(np.mean([x.var(ddof=1) for x in pairs.strata(x)]) for x in xs))
    paired = within(edited - base)
    apart = within(base, edited)
    seeds = np.sqrt(sum(x.var(ddof=1) for x in of_seeds))
    half = 1.96 * paired / np.sqrt(len(base))
    print(
        f"{found}\n| how | number | effect | deviation | steps of one more | steps that show it | steps for +- {half:.0f} |"
    )
    print("|---" * 7 + "|")
    print(row("pairs", edited - base, paired, 2 * args.updates * steps, max(at) * steps, half))
    print(
        row(
            "branches with noise of their own",
            edited - base,
            apart,
            2 * args.updates * steps,
            max(at) * steps,
            half,
        )
    )
    print(row("seeds", of_seeds[1] - of_seeds[0], seeds, 2 * whole * steps, 0, half))
    print(
        "noise of the differences after 1, 2, ... updates: "
        + ", ".join(f"{pairs.noise([x]):.2f}" for x in pairs.windows(1))
    )


if __name__ == "__main__":
    main()
