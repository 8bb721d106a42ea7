"""Memory of image observations: bytes per step and copies of each frame, for 84x84 uint8 frames in stacks of 4.

    python benchmarks/images.py [--n-envs 8] [--n-steps 128] [--repeats 5]

The floor stores every stack whole, as `gymnasium.wrappers.FrameStackObservation` gives it; the pipeline stores frames, and `FrameStack`
shows them in stacks. To count copies, the benchmark checks after each stage whether a frame is still in the same memory.
"""

from itertools import islice
from time import perf_counter

import gymnasium as gym
import numpy as np
import torch
from report import begun, options_of, spread, table

from rollpipe.pipes import EnvStepper, FragmentCollector, FrameStack, Tap, nested
from rollpipe.pipes.frames import Stacks

SHAPE = (84, 84)
STACK = 4


class Pictures(gym.Env):
    "Shows random pictures, in episodes that are cut off after 100 steps."

    observation_space = gym.spaces.Box(0, 255, SHAPE, np.uint8)
    action_space = gym.spaces.Discrete(2)

    def look(self):
        self.shown = self.np_random.integers(0, 256, SHAPE, np.uint8)
        return self.shown

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self.look(), {}

    def step(self, action):
        self.count += 1
        return self.look(), 0.0, False, self.count == 100, {}


class Idle:
    "Always the same action."

    def step(self, stepno, *args, hx, virtual):
        return torch.zeros_like(stepno), (), {}

    def reset(self, hx, at):
        return hx


def storages(tree):
    "Bytes of memory behind the tensors, each piece counted once."
    parts = [
        part
        for x in nested.leaves(tree)
        for part in ((x.frames, x.past, x.rows) if isinstance(x, Stacks) else (x,))
    ]
    return sum({s.data_ptr(): s.nbytes() for s in (x.untyped_storage() for x in parts)}.values())


def fragments(args, whole):
    make = (
        (lambda: gym.wrappers.FrameStackObservation(Pictures(), STACK, padding_type="reset"))
        if whole
        else Pictures
    )
    collect = FragmentCollector(EnvStepper(make, Idle(), args.n_envs, seed=0), args.n_steps)
    return collect if whole else FrameStack(collect, STACK)


def copies(args):
    "(border, copied?) for a frame on its way from the environment to the stack."
    envs = []
    ticks = []
    before = []

    def make():
        envs.append(Pictures())
        return envs[-1]

    # the observations of a tick are in the rows of the batch
    pipe = Tap(
        EnvStepper(make, Idle(), 1, seed=0),
        lambda tick: ticks.append((envs[0].shown, tick.next.obs)),
    )
    pipe = FrameStack(
        Tap(FragmentCollector(pipe, args.n_steps), lambda f: before.append(f.state.obs)), STACK
    )
    fragment = next(iter(pipe))
    shown, row = ticks[0]
    frames = before[0].numpy()
    stacks = fragment.state.obs
    return [
        ("environment -> row of the batch", not np.shares_memory(shown, row)),
        ("row -> fragment", not np.shares_memory(row, frames)),
        ("fragment -> stacks", not np.shares_memory(frames, stacks.frames.numpy())),
    ]


def main():
    args = options_of(__doc__, n_envs=8, n_steps=128, repeats=5)
    args = begun(args)
    frame = SHAPE[0] * SHAPE[1]
    steps = args.n_envs * args.n_steps
    rows = []
    both = {"whole stacks": True, "FrameStack": False}
    held = {name: next(iter(fragments(args, whole))) for name, whole in both.items()}
    index = torch.randint(args.n_steps, (256,)), torch.randint(args.n_envs, (256,))
    seconds = {name: [] for name in both}
    for _ in range(args.repeats):
        for name, f in held.items():
            start = perf_counter()
            for _ in range(20):
                f.state.obs[index].float()
            seconds[name].append((perf_counter() - start) / 20 * 1e3)
    for name, f in held.items():
        obs = storages(f.state.obs) / steps
        end = storages(f.final.obs) / steps
        rows.append(
            [
                name,
                f"{obs:,.0f}",
                f"{obs / frame:.2f}",
                f"{end:,.0f}",
                spread(seconds[name], "{:.1f}"),
            ]
        )
    print(f"T = {args.n_steps}, B = {args.n_envs}, frames of {frame:,} bytes, stacks of {STACK}:\n")
    head = [
        "stored as",
        "state.obs [bytes/step]",
        "frames per step",
        "final.obs [bytes/step]",
        "minibatch of 256, as float [ms]",
    ]
    print(table(head, rows))
    told = copies(args)
    print(
        f"\nCopies of a frame before it is used: {sum(copied for _, copied in told)} "
        f"({', '.join(f'{border}: {int(copied)}' for border, copied in told)}); putting a stack together is one more."
    )
    assert all(
        torch.equal(a.state.obs, b.state.obs)
        for a, b in islice(zip(fragments(args, True), fragments(args, False)), 3)
    )


if __name__ == "__main__":
    main()
