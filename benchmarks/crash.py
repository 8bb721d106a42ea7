"""What the flight recorder of a training costs, and how soon a planted NaN is there again.

    python benchmarks/crash.py

The first table has the share of a training's time that the snapshots and the held batches take, as `benchmarks/traces.py` does for the
journal. Then a loss becomes NaN in update 317 of a run with a checkpoint every 50 updates, and the update is made again in a new process.
"""
import os, subprocess, sys, tempfile, time
from pathlib import Path

import torch
from traces import COSTS, trained

from rollpipe.agents import PPO
from rollpipe.traces.recorder import FlightRecorder

AT = 317
improve = PPO.improve


def failing(agent, batch):
    "As `PPO.improve`; in update `AT` the advantages are not numbers."
    if agent.steps >= (AT - 1) * batch.valid.numel(): batch = batch._replace(adv=batch.adv * float("nan"))
    return improve(agent, batch)


class Timed(FlightRecorder):
    "Measures its own time, without that of the learner."
    seconds, snapshots, most_held = 0., 0, 0

    def update(self, batch):
        learner, begun = [0.], time.perf_counter()
        agent, self.agent = self.agent, self

        def learn(batch):
            start = time.perf_counter()
            try: return agent.update(batch)
            finally: learner[0] = time.perf_counter() - start
        self.agent = type("Agent", (), dict(update=staticmethod(learn), state_dict=agent.state_dict))
        try: return super().update(batch)
        finally:
            self.agent = agent
            Timed.seconds += time.perf_counter() - begun - learner[0]
            Timed.most_held = max(Timed.most_held, len(self.held))

    def _take_snapshot(self):
        Timed.snapshots += 1
        super()._take_snapshot()


def costs(steps=20_000):
    from rollpipe.runs import training
    training.FlightRecorder = Timed
    print(f"{'training':44}{'updates':>9}{'ms each':>9}{'snapshots':>11}{'most held':>11}{'us of the recorder':>20}{'share':>8}")
    for algorithm, env, options in COSTS:
        Timed.seconds, Timed.snapshots, Timed.most_held = 0., 0, 0
        with tempfile.TemporaryDirectory() as folder:
            run = trained(Path(folder, "run"), algorithm, env, options, steps if algorithm != "sac" else 3000)
        n, seconds = run.counters["updates"], run.counters["seconds"]
        name = f"{algorithm} {env} {' '.join(f'{k}={x}' for k, x in options.items())}"
        print(f"{name:44}{n:9}{1e3*seconds/n:9.2f}{Timed.snapshots:11}{Timed.most_held:11}{1e6*Timed.seconds/n:20.1f}"
              f"{Timed.seconds/seconds:8.2%}", flush=True)


def reproduced():
    "The seconds that a NaN in update `AT` takes until it is there again, in processes of their own."
    words = f"train ppo CartPole-v1 --steps 1e6 --n-envs 4 --n-steps 256 --epochs 1 --checkpoint-every 50 --quiet --no-tensorboard --out {'{}'}/run"
    here = str(Path(__file__).resolve().parent)
    with tempfile.TemporaryDirectory() as folder:
        for command in (words.format(folder), f"replay {folder}/run --crash", f"replay {folder}/run --update {AT}"):
            begun = time.perf_counter()
            done = subprocess.run([sys.executable, "-c", "import sys, crash\ncrash.PPO.improve = crash.failing\nfrom rollpipe.cli.main import main\n"
                                   "sys.exit(main())", *command.split()], cwd=here, text=True, capture_output=True)
            print(f"rollpipe {command.split()[0]}: {time.perf_counter() - begun:.1f} s", *(done.stdout + done.stderr).splitlines()[-2:], sep="\n    ", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    costs()
    reproduced()
