"""Time of one actor step, by torch and by ONNX Runtime, for 1, 8 and 64 environments.

    python benchmarks/engines.py [--n-envs 1 8 64] [--n-steps 128] [--repeats 15] [--actors mlp gauss ...]

Both engines answer for a block of rows, in turn. The floor is torch: `actor.step` with the noise of a lane, in evaluation
mode and with the checks of answers. "Opening" is what the engine costs once per stream: exporting, opening a
session, comparing with torch, and binding the rows.
"""

import statistics
from functools import partial
from time import perf_counter

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete
from report import header, options_of, spread, table

from rollpipe.layers import MLPPolicy, QPolicy, RecurrentPolicy
from rollpipe.pipes.engines.interaction import Interaction
from rollpipe.pipes.envs.batch import Rows
from rollpipe.pipes.envs.factories import env_factories
from rollpipe.pipes.envs.vector import env_batch

STATE = Box(-1, 1, (4,))
MIXED = (
    Dict(place=Box(-1, 1, (8,), np.float64), number=Discrete(5)),
    Dict(gear=Discrete(3), steer=Box(-1, 1, (2,))),
)


def images(size, n):
    return (Box(0, 255, (size, size, n), np.uint8), Discrete(6)), dict(encoder={"images": "conv"})


ACTORS = {
    "mlp": (MLPPolicy, (STATE, Discrete(2)), {}),
    "gauss": (MLPPolicy, (STATE, Box(-1, 1, (2,))), {}),
    "wide": (MLPPolicy, (STATE, Discrete(2)), dict(hidden=(256, 256))),
    "mixed": (MLPPolicy, MIXED, {}),
    "q": (QPolicy, (STATE, Discrete(2)), {}),
    "gru": (RecurrentPolicy, (STATE, Discrete(2)), {}),
    "lstm": (RecurrentPolicy, (STATE, Discrete(2)), dict(cell="lstm", layers=2)),
    "small images": (MLPPolicy, *images(10, 4)),
    "large images": (MLPPolicy, *images(84, 4)),
}


class Still(gym.Env):
    "It is reset once, and never stepped."

    def __init__(self, spaces):
        self.observation_space, self.action_space = spaces

    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample(), {}


def opened(engine, actor, spaces, n_envs, n_steps):
    "`block` for an engine, with rows that all hold a first observation, and the milliseconds until it has run once."
    envs = env_batch(
        env_factories(lambda: Still(spaces), n_envs),
        np.random.SeedSequence(0),
        pipe="benchmark",
        lane=0,
    )
    begin = perf_counter()
    interaction = Interaction(actor, envs, np.random.SeedSequence(1), engine=engine).start()
    rows = Rows(interaction.state, n_steps + 1)
    for t in range(n_steps + 1):
        rows.put(t, interaction.state)
    run = partial(block, interaction, rows)
    run()
    return run, 1e3 * (perf_counter() - begin)


def block(interaction, rows):
    "Microseconds per step of one block of rows, with its noise."
    engine = interaction.engine
    n = min(interaction.engine.most, len(rows) - 1)
    begin = perf_counter()
    engine.load()
    engine.begin(rows, 0, n, interaction.row, interaction.act, interaction.hx)
    for t in range(n):
        engine.answer(t)
    engine.end(rows, 0, n)
    return 1e6 * (perf_counter() - begin) / n


def main():
    args = options_of(__doc__, n_steps=128, repeats=15)
    args.add_argument("--n-envs", type=int, nargs="+", default=[1, 8, 64])
    args.add_argument("--actors", nargs="+", default=list(ACTORS), choices=list(ACTORS))
    args = args.parse_args()
    torch.set_num_threads(1)
    print(header(("torch", "onnxruntime", "numpy", "rollpipe")))
    rows = []
    for name in args.actors:
        for n_envs in args.n_envs:
            cls, spaces, kwargs = ACTORS[name]
            actor = cls.for_env(spaces, seed=0, **kwargs)
            (torchs, _), (compiled, opening) = (
                opened(e, actor, spaces, n_envs, args.n_steps) for e in ("torch", "onnxruntime")
            )
            pairs = [(torchs(), compiled()) for _ in range(args.repeats)]
            torchs, compiled = zip(*pairs)
            rows.append(
                [
                    name,
                    n_envs,
                    spread(torchs, "{:.0f}"),
                    spread(compiled, "{:.0f}"),
                    f"{statistics.median(a / b for a, b in pairs):.1f}",
                    f"{opening:.0f}",
                ]
            )
    print(
        table(
            [
                "actor",
                "environments",
                "torch [us]",
                "ONNX Runtime [us]",
                "times faster",
                "opening [ms]",
            ],
            rows,
        )
    )


if __name__ == "__main__":
    main()
