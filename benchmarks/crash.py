"""What the flight recorder of a training costs, and how soon a planted NaN is there again.

    python benchmarks/crash.py

The first table has the share of a training's time that the snapshots and the held batches take, as `benchmarks/traces.py` does for the
journal. Then a loss becomes NaN in update 317 of a run with a checkpoint every 50 updates, and the update is made again in a new process.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from traces import COSTS, Clock, trained

from rollpipe.agents import PPO
from rollpipe.traces import observers as flight

AT = 317
improve = PPO.improve


def failing(agent, batch):
    "As `PPO.improve`; in update `AT` the advantages are not numbers."
    if agent.steps >= (AT - 1) * batch.valid.numel():
        batch = batch._replace(adv=batch.adv * float("nan"))
    return improve(agent, batch)


def costs(steps=20_000):
    print(
        f"{'training':44}{'updates':>9}{'ms each':>9}{'snapshots':>11}{'us of the recorder':>20}{'share':>8}"
    )
    whole = [
        (flight, "noted"),
        (flight.FlightRecorder, "_is_due"),
        (flight.FlightRecorder, "_take_snapshot"),
    ]
    whole = [(place, name, getattr(place, name)) for place, name in whole]
    for algorithm, env, options in COSTS:
        clock = Clock()
        snapshots = Clock()
        for place, name, function in whole:
            setattr(place, name, clock.timed(function))
        flight.FlightRecorder._take_snapshot = snapshots.timed(flight.FlightRecorder._take_snapshot)
        with tempfile.TemporaryDirectory() as folder:
            run = trained(
                Path(folder, "run"), algorithm, env, options, steps if algorithm != "sac" else 3000
            )
        for place, name, function in whole:
            setattr(place, name, function)
        n = run.counters["updates"]
        seconds = run.counters["seconds"]
        name = f"{algorithm} {env} {' '.join(f'{k}={x}' for k, x in options.items())}"
        print(
            f"{name:44}{n:9}{1e3 * seconds / n:9.2f}{snapshots.calls:11}{1e6 * clock.seconds / n:20.1f}{clock.seconds / seconds:8.2%}",
            flush=True,
        )


def reproduced():
    "The seconds that a NaN in update `AT` takes until it is there again, in processes of their own."
    options = "--steps 1e6 --n-envs 4 --n-steps 256 --epochs 1 --checkpoint-every 50 --quiet --no-tensorboard"
    program = "import sys, crash; crash.PPO.improve = crash.failing; from rollpipe.cli.main import main; sys.exit(main())"
    with tempfile.TemporaryDirectory() as folder:
        run = f"{folder}/run"
        here = Path(__file__).resolve().parent
        for command in (
            f"train ppo CartPole-v1 {options} --out {run}",
            f"replay {run} --crash",
            f"replay {run} --update {AT}",
        ):
            begun = time.perf_counter()
            done = subprocess.run(
                [sys.executable, "-c", program, *command.split()],
                cwd=here,
                text=True,
                capture_output=True,
            )
            lines = (done.stdout + done.stderr).splitlines()[-2:]
            print(
                f"rollpipe {command.split()[0]}: {time.perf_counter() - begun:.1f} s",
                *lines,
                sep="\n    ",
                flush=True,
            )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    costs()
    reproduced()
