"""Environment steps per second through the pipeline, as a ratio to a hand-written loop in the same run.

    python benchmarks/collect.py [--envs CartPole-v1 Pendulum-v1 HalfCheetah-v5] [--sizes 1 8 64] [--repeats 5]

On-policy fragments with GAE, T = 128, separate actor and critic MLPs 2x64 tanh, one thread. There are two floors, both without GAE and
without checks: one calls the critic at every step, as most code does, the other once per fragment, as the pipeline does. The runs are
interleaved.
"""
import argparse, gc
from time import perf_counter

import gymnasium as gym
import torch
from floor import Floor
from report import header, spread, table

from rollpipe.layers import Critic, MLPPolicy
from rollpipe.pipes import on_policy, returns

T = 128


def pipeline(env_id, n_envs):
    "A function that collects one fragment with advantages."
    actor, critic = (c.for_env(env_id, normalize=False, seed=0) for c in (MLPPolicy, Critic))
    fragments = iter(on_policy(env_id, actor, critic, n_envs=n_envs, n_steps=T, seed=0, info_keys=()))
    return lambda: next(fragments)


def seconds(collect, n):
    start = perf_counter()
    for _ in range(n): collect()
    return perf_counter() - start


def gae_seconds(fragment, n=50):
    "Seconds of the advantage estimate alone, the critic's values given."
    rew, fin, term = fragment.state.rew[1:], fragment.state.fin[1:], fragment.term[1:]
    v = torch.zeros_like(rew)
    return seconds(lambda: returns.gae(rew, v, v, 0.99 * (~term), 0.95, cut=fin), n) / n


def measure(env_id, n_envs, repeats, budget):
    "Rows of the table for one environment and batch size: steps/s of both floors and the pipeline, and the ratios."
    runs = {'critic per step': Floor(env_id, n_envs, T).collect,
            'critic per fragment': Floor(env_id, n_envs, T, values='fragment').collect,
            'pipeline': pipeline(env_id, n_envs)}
    for collect in runs.values(): seconds(collect, 2)
    n = max(1, round(budget / seconds(runs['pipeline'], 1)))
    rates = {name: [] for name in runs}
    for _ in range(repeats):
        for name, collect in runs.items():
            gc.collect()
            rates[name].append(n * T * n_envs / seconds(collect, n))
    share = [gae_seconds(runs['pipeline']()) * rate / (T * n_envs) for rate in rates['pipeline']]
    ratio = {name: [p / f for p, f in zip(rates['pipeline'], rates[name])] for name in runs}
    return [env_id, n_envs, *(spread(rates[name], '{:,.0f}') for name in runs),
            spread(ratio['critic per step']), spread(ratio['critic per fragment']), spread(share, '{:.1%}')]


def installed(env_id) -> bool:
    "Whether the environment can be made; prints a message if not."
    try: gym.make(env_id).close()
    except gym.error.DependencyNotInstalled as e:
        print(f"{env_id} left out: {e}\n")
        return False
    return True


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument('--envs', nargs='+', default=['CartPole-v1', 'Pendulum-v1', 'HalfCheetah-v5'])
    args.add_argument('--sizes', nargs='+', type=int, default=[1, 8, 64])
    args.add_argument('--repeats', type=int, default=5)
    args.add_argument('--seconds', type=float, default=1.0, help="length of one run")
    args = args.parse_args()
    torch.set_num_threads(1)
    print(header())
    envs = [env for env in args.envs if installed(env)]
    rows = [measure(env, B, args.repeats, args.seconds) for env in envs for B in args.sizes]
    print(table(['environment', 'B', 'floor, critic per step', 'floor, critic per fragment', 'pipeline [steps/s]',
                 'ratio to the first', 'ratio to the second', 'GAE of collecting'], rows))


if __name__ == '__main__': main()
