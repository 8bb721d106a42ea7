"""The time that a checkpoint and a resume take, with the state of eight running environments.

    python benchmarks/checkpoint_cost.py [ENV ...]

PPO with 8 environments and 64 steps a batch. A table is printed: the state of the stream, the whole checkpoint on disk, its size, and the
time from `resume` to the first batch.
"""

import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch

from rollpipe.runs import resume, start
from rollpipe.runs.locks import unlock
from rollpipe.runs.training import reading
from rollpipe.settings.config import make_config

REPEATS = 7


def milliseconds(function) -> str:
    "Median, smallest and largest time of some calls."
    times = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        function()
        times.append(1000 * (time.perf_counter() - begun))
    return f"{statistics.median(times):.1f} ({min(times):.1f}-{max(times):.1f})"


def measure(env, folder) -> str:
    run = start(
        Path(folder, "run"), make_config("ppo", env, dict(n_envs=8, n_steps=64), steps=10**6)
    )
    with reading(run) as (batches, _, graph):
        run.stream.begin(graph)
        for _ in range(3):
            run.agent.update(next(batches))
        run.counters.update(steps=1536, updates=3)
        told = milliseconds(run.stream.state)
        saved = milliseconds(run.save)
    unlock(run.folder)
    begun = time.perf_counter()
    again = resume(run.folder)
    with reading(again) as (batches, *_):
        next(batches)
    unlock(run.folder)
    return f"| {env} | {told} | {saved} | {run.checkpoint.stat().st_size / 1e6:.2f} | {time.perf_counter() - begun:.2f} |"


def main():
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(
        "| environment | state [ms] | checkpoint [ms] | size [MB] | resume to the first batch [s] |\n|---|---|---|---|---|"
    )
    for env in sys.argv[1:] or ["CartPole-v1", "Pendulum-v1"]:
        with tempfile.TemporaryDirectory() as folder:
            print(measure(env, folder), flush=True)


if __name__ == "__main__":
    main()
