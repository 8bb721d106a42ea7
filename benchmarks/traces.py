"""What the journal of a run costs, and whether repeated runs ever differ.

    python benchmarks/traces.py [--only costs repeats] [--repeats 100]

`costs`: the share of a training's time that its journal takes. `repeats`: two trainings of 4 lanes are repeated with 0 to 4 workers, by
fork and by spawn, and the fingerprints and journals of all are compared with those of the first ones. The exit status is 1 if one of them
differs.
"""

import argparse
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch

from rollpipe.pipes.workers.reading import ProcessReading
from rollpipe.runs import training
from rollpipe.runs.folder import start
from rollpipe.runs.training import train
from rollpipe.settings.config import make_config
from rollpipe.traces.differences import diff
from rollpipe.traces.journal import Journal

COSTS = [
    ("trpo", "Pendulum-v1", {}),
    ("ppo", "CartPole-v1", {}),
    ("ppo", "CartPole-v1", dict(n_envs=8, n_steps=16)),
    ("a2c", "CartPole-v1", {}),
    ("dqn", "CartPole-v1", {}),
    ("dqn", "CartPole-v1", dict(n_envs=1, n_steps=4)),
    ("sac", "Pendulum-v1", dict(warmup=1000)),
]


def trained(folder, algorithm, env, options, steps, **run):
    "A short training."
    run = start(
        folder, make_config(algorithm, env, {"engine": "torch", **options}, steps=steps, **run)
    )
    train(run, progress=False, tensorboard=False)
    return run


class Clock:
    "Measures the time in some functions, and counts their calls."

    def __init__(self):
        self.seconds, self.calls = 0.0, 0

    def timed(self, method):
        def wrapper(*args):
            begin = time.perf_counter()
            self.calls = self.calls + 1
            try:
                return method(*args)
            finally:
                self.seconds += time.perf_counter() - begin

        return wrapper


def costs(steps=20_000):
    print(
        f"{'training':44}{'updates':>9}{'ms each':>9}{'us of the journal':>19}{'share':>8}{'bytes a 1000 steps':>20}"
    )
    whole = {name: getattr(Journal, name) for name in ("saw", "learned", "mark")}
    for algorithm, env, options in COSTS:
        clock = Clock()
        for name, method in whole.items():
            setattr(Journal, name, clock.timed(method))
        with tempfile.TemporaryDirectory() as folder:
            run = trained(
                Path(folder, "run"), algorithm, env, options, steps if algorithm != "sac" else 3000
            )
            size = (run.folder / "journal.jsonl").stat().st_size
        for name, method in whole.items():
            setattr(Journal, name, method)
        n = run.counters["updates"]
        seconds = run.counters["seconds"]
        name = f"{algorithm} {env} {' '.join(f'{k}={x}' for k, x in options.items())}"
        print(
            f"{name:44}{n:9}{1e3 * seconds / n:9.2f}{1e6 * clock.seconds / n:19.0f}{clock.seconds / seconds:8.2%}"
            f"{1000 * size / run.counters['steps']:20.0f}",
            flush=True,
        )


def repeats(n):
    "Repeat two trainings, with other workers each time; prints every difference, and returns how many there were."
    ways = [
        (0, None),
        *((workers, method) for method in ("fork", "spawn") for workers in (1, 2, 3, 4)),
    ]
    reading_for, alarms = training.reading_for, 0
    cases = [
        ("ppo", "CartPole-v1", dict(lanes=4, n_envs=2, n_steps=32)),
        ("dqn", "CartPole-v1", dict(lanes=4, n_envs=2, warmup=100)),
    ]
    with tempfile.TemporaryDirectory() as folder:
        for k in range(n + 2):  # the first two are those that the others repeat
            algorithm, env, options = cases[k % 2]
            workers, method = ways[k // 2 % len(ways)]
            training.reading_for = partial(
                lambda method, config: ProcessReading(config["workers"], start_method=method),
                method,
            )
            place = Path(folder, f"{k}")
            trained(place, algorithm, env, options, 2000, workers=workers)
            found = diff(Path(folder, f"{k % 2}"), place)
            if not found.is_equal or found.fingerprints or found.common < 2:
                alarms += 1
                print(f"{algorithm}, {workers} workers by {method}: {found}", flush=True)
    training.reading_for = reading_for
    print(f"{alarms} false alarms in {n} repeats with 0 to 4 workers, by fork and spawn")
    return alarms


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", choices=("costs", "repeats"), default=("costs", "repeats")
    )
    parser.add_argument("--repeats", type=int, default=100)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    if "costs" in args.only:
        costs()
    sys.exit("repeats" in args.only and repeats(args.repeats) > 0)
