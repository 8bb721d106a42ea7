"""Which option of PPO matters first: one option at a time is four times as large, or a quarter (gamma: 0.9 and 0.999), on five tasks.

    rollpipe bench benchmarks/specs/first_options.toml --jobs 2      # 135 runs of 60 000 steps, an hour of one core, beside other work
    python benchmarks/first_options.py runs/first_options

A cell is the mean return of the last policies of three seeds, with the smallest and the largest mean of a seed. The score of a run is 0 for
the return of a policy that was not trained, and 1 for the best mean of a setting on this task. The last column is the mean score over
the tasks, with its range over the seeds. The table is printed as Markdown, and written to `results/first_options/returns.csv`.
"""

import argparse
import csv
from pathlib import Path

import numpy as np

from rollpipe.results.collect import read_results

TABLE = Path(__file__).parent / "results" / "first_options" / "returns.csv"


def read_returns(folder: Path) -> tuple[dict, dict]:
    """Returns of last policies, and of policies before the training.

    The first is setting -> task -> float [seeds], the second is task -> float.
    """
    returns = {}
    untrained = {}
    for row in read_results(folder).rows:
        unfinished = [run.seed for run in row.results if run.state != "complete"]
        if unfinished:
            raise SystemExit(f"{row.label} on {row.env}: seeds {unfinished} are not complete")
        returns.setdefault(row.label, {})[row.env] = np.array(
            [run.mean("last") for run in row.results]
        )
        first_means = [run.curve[1][0] for run in row.results]
        untrained.setdefault(row.env, []).extend(first_means)
    return returns, {env: np.mean(means) for env, means in untrained.items()}


def scores(returns: dict, untrained: dict) -> dict:
    "Setting -> float [tasks, seeds], see above."
    best = {env: max(by_env[env].mean() for by_env in returns.values()) for env in untrained}
    of_setting = {}
    for setting, by_env in returns.items():
        rows = [(by_env[env] - untrained[env]) / (best[env] - untrained[env]) for env in untrained]
        of_setting[setting] = np.stack(rows)
    return of_setting


def with_range(x: np.ndarray, digits: int) -> str:
    return f"{x.mean():.{digits}f} ({x.min():.{digits}f} to {x.max():.{digits}f})"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    returns, untrained = read_returns(parser.parse_args().folder)
    of_setting = scores(returns, untrained)

    # The table for people
    tasks = list(untrained)
    print("| setting |", " | ".join(tasks), "| score |")
    print("| --- |" + " ---: |" * (len(tasks) + 1))
    print("| not trained |", " | ".join(f"{untrained[env]:.0f}" for env in tasks), "| 0 |")
    for setting, by_env in returns.items():
        cells = [with_range(by_env[env], 0) for env in tasks]
        cells.append(with_range(of_setting[setting].mean(0), 2))
        print(f"| {setting} |", " | ".join(cells), "|")

    # The table for programs
    TABLE.parent.mkdir(parents=True, exist_ok=True)
    with TABLE.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["setting", "task", "seed", "return"])
        for setting, by_env in returns.items():
            for env, means in by_env.items():
                for seed, mean in enumerate(means):
                    writer.writerow([setting, env, seed, round(float(mean), 2)])


if __name__ == "__main__":
    main()
