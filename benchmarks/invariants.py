"""The cost of `CheckInvariants`: the time that it takes for fragments, as a share of the time for collecting them.

    python benchmarks/invariants.py [--fragments 100] [--repeats 5]

On-policy fragments with GAE, T = 128, separate actor and critic MLPs 2x64 tanh, one thread. All checks are on: alignment, continuation,
likelihood ratio and advantages. The fragments are collected first and then sent through the pipe, so that both times are measured
separately, as processor time. The target is a cost below 2 % at a rate of 1 %.
"""

from itertools import islice
from time import process_time

from report import begun, options_of, spread, table

from rollpipe.layers import Critic, MLPPolicy
from rollpipe.pipes import CheckInvariants, Source, on_policy

T = 128


class Kept(Source):
    "Yields fragments that were collected before."

    def __init__(self, items):
        self.items = items

    def stream(self, items):
        yield from self.items


def main():
    args = options_of(__doc__, fragments=100, repeats=5)
    args = begun(args)
    rows = []
    for env in ("CartPole-v1", "Pendulum-v1"):
        for n_envs in (1, 8, 64):
            actor, critic = (c.for_env(env, normalize=False, seed=0) for c in (MLPPolicy, Critic))
            stream = iter(
                on_policy(env, actor, critic, n_envs=n_envs, n_steps=T, seed=0, info_keys=())
            )
            shares = {0.01: [], 1: []}
            for _ in range(args.repeats):
                start = process_time()
                fragments = list(islice(stream, args.fragments))
                collecting = process_time() - start
                for rate, found in shares.items():
                    pipe = CheckInvariants(
                        Kept(fragments), rate, actor, critic, gamma=0.99, lam=0.95
                    )
                    start = process_time()
                    for _ in pipe:
                        pass
                    found.append((process_time() - start) / collecting)
            rows.append([env, n_envs, *(spread(found, "{:.2%}") for found in shares.values())])
    print(table(["environment", "B", "rate 1 %: part of collecting", "every fragment"], rows))


if __name__ == "__main__":
    main()
