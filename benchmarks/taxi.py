"""The exact return of greedy policies on Taxi-v4: each of its 300 starts is played once. The last line has the highest that there is.

rollpipe train dqn Taxi-v4 --seeds 0-4 --out runs/taxi
python benchmarks/taxi.py runs/taxi-s*
"""

import sys

import gymnasium as gym
import numpy as np

from rollpipe.agents import evaluate
from rollpipe.agents.evaluate import policy_of
from rollpipe.runs.folder import agent_of, load_run


class EveryStart(gym.Wrapper):
    "Its resets go through the starts in turn. All of them are equally likely."

    resets = 0

    def reset(self, **given):
        _, info = self.env.reset(**given)
        taxi = self.unwrapped
        taxi.s = int(starts(taxi)[self.resets % len(starts(taxi))])
        self.resets += 1
        return taxi.s, info | dict(action_mask=taxi.action_mask(taxi.s))


def starts(taxi):
    return np.flatnonzero(taxi.initial_state_distrib)


def optimum(taxi, sweeps=200):
    "Value iteration without a discount."
    values = np.zeros(len(taxi.P))
    for _ in range(sweeps):
        values = np.array(
            [
                max(
                    sum(p * (rew + (0 if ends else values[then])) for p, then, rew, ends in way)
                    for way in taxi.P[s].values()
                )
                for s in taxi.P
            ]
        )
    return float(taxi.initial_state_distrib @ values)


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit(__doc__)
    made = gym.make("Taxi-v4").unwrapped
    for run in sys.argv[1:]:
        found = evaluate(
            lambda: EveryStart(gym.make("Taxi-v4")),
            policy_of(agent_of(load_run(run))),
            len(starts(made)),
            n_envs=1,
        )
        print(f"{run}: {found.mean:.4f}")
    print(f"optimum: {optimum(made):.4f}")
