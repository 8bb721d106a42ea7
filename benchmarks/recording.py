"""What recording costs: the time of a training's batches with and without a `Recorder` of the fragments.

    python benchmarks/recording.py [ENV ...]

PPO's pipeline with 8 environments. The games of ALE show 84x84 images in stacks of 4 to a learner, and an actor always presses the same
button. Batches are collected in turn with and without a recorder; the processor time of both is compared, so that other programs disturb
little. The table has the median ratio, its quartiles, and the size of a fragment.
"""

import statistics
import sys
import tempfile
import time
import warnings
from contextlib import closing
from pathlib import Path

import gymnasium as gym
import torch
from images import Idle

from rollpipe.layers import Critic, MLPPolicy
from rollpipe.pipes import (
    EnvStepper,
    FragmentCollector,
    FrameStack,
    Lanes,
    Recorder,
    insert_after,
    on_policy,
)
from rollpipe.pipes.recording.recorder import item_files

ROUNDS = 40


def pipeline(env):
    if env.startswith("ALE/"):

        def make():
            return gym.wrappers.AtariPreprocessing(gym.make(env, frameskip=1))

        return FrameStack(Lanes(FragmentCollector(EnvStepper(make, Idle(), 8), 128), 1, seed=0), 4)
    actor = MLPPolicy.for_env(env, seed=0)
    critic = Critic.for_env(env, seed=1)
    return on_policy(env, actor, critic, n_steps=256, n_envs=8, lanes=1, seed=0)


def seconds(items) -> float:
    begun = time.process_time()
    next(items)
    return time.process_time() - begun


def measure(env, folder, compress) -> str:
    recorded = insert_after(
        pipeline(env), Lanes, lambda old: Recorder(old, folder, compress=compress)
    )
    with closing(iter(pipeline(env))) as plain, closing(iter(recorded)) as written:
        for items in (plain, written):
            next(items)
        ratios = [seconds(written) / seconds(plain) for _ in range(ROUNDS)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    size = sum(f.path.stat().st_size for f in item_files(folder)) / (ROUNDS + 1)
    return f"| {env}{', compressed' * compress} | {middle:.3f} ({low:.3f}-{high:.3f}) | {size / 1e6:.2f} |"


def main():
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print("| environment | with a recorder / without | a fragment on disk [MB] |\n|---|---|---|")
    for env in sys.argv[1:] or ["Pendulum-v1"]:
        for compress in (False, True) if env.startswith("ALE/") else (False,):
            with tempfile.TemporaryDirectory() as folder:
                print(measure(env, Path(folder), compress), flush=True)


if __name__ == "__main__":
    main()
