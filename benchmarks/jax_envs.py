"""CartPole of gymnax through the pipeline, beside two loops by hand in the same process. It needs `pip install jax gymnax`.

    python benchmarks/jax_envs.py [--n-envs 64 1024 4096] [--n-steps 128] [--repeats 7]

All have the same MLP, 2x64 tanh, sample its actions and record observations, actions, rewards, ends and log-probabilities.

- **torch by hand**: the loop of `tensor_envs.py` over gymnax's own step, mapped and compiled, with arrays through DLPack. gymnax begins the
  next episode itself, so this loop does not know time limits, nor the last observations of episodes, which the pipeline keeps.
- **JAX by hand**: the whole rollout is one compiled function (`jax.lax.scan`), with the network in JAX too. It is what one gives up for a
  learner in torch.

Runs are interleaved. Times are wall time, because JAX computes in threads of its own: `taskset -c 0` gives all of them one core.
"""

from functools import partial
from statistics import median
from time import perf_counter

import jax
import torch
from gymnax import make
from report import begun, options_of, spread, table
from tensor_envs import TensorFloor

from rollpipe.layers import MLPPolicy
from rollpipe.pipes.tensors.collector import TensorCollector
from rollpipe.pipes.tensors.jax_env import GymnaxEnv

ENV = "CartPole-v1"
HIDDEN = 64


class ByHand:
    "gymnax's own environments for `TensorFloor`."

    def __init__(self, n_envs: int, device: str = "cpu"):
        env, params = make(ENV)
        spaces = GymnaxEnv(ENV)
        self.n_envs = n_envs
        self.observation_space = spaces.observation_space
        self.action_space = spaces.action_space
        self.never = torch.zeros(n_envs, dtype=torch.bool)
        self._reset = jax.jit(jax.vmap(partial(env.reset, params=params)))
        self._step = jax.jit(jax.vmap(partial(env.step, params=params)))

    def reset(self, seed: int):
        self.key = jax.random.PRNGKey(seed)
        obs, self.state = self._reset(jax.random.split(self.key, self.n_envs))
        return torch.from_dlpack(obs)

    def step(self, act):
        self.key, key = jax.random.split(self.key)
        keys = jax.random.split(key, self.n_envs)
        act = jax.dlpack.from_dlpack(act)
        obs, self.state, rew, done, _ = self._step(keys, self.state, act)
        obs, rew, done = (torch.from_dlpack(x.block_until_ready()) for x in (obs, rew, done))
        return obs, rew, done, self.never, obs, {}


class InJax:
    "A rollout that is one compiled function."

    def __init__(self, n_envs: int, n_steps: int):
        env, params = make(ENV)
        n_obs, n_actions = 4, 2
        sizes = [(n_obs, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, n_actions)]
        keys = jax.random.split(jax.random.PRNGKey(0), len(sizes))
        weights = [jax.random.normal(k, size) * size[0] ** -0.5 for k, size in zip(keys, sizes)]

        def logits(obs):
            for w in weights[:-1]:
                obs = jax.numpy.tanh(obs @ w)
            return obs @ weights[-1]

        def tick(carried, _):
            key, state, obs = carried
            key, of_actions, of_steps = jax.random.split(key, 3)
            out = logits(obs)
            act = jax.random.categorical(of_actions, out)
            logp = jax.numpy.take_along_axis(jax.nn.log_softmax(out), act[:, None], 1)[:, 0]
            step = jax.vmap(partial(env.step, params=params))
            next_obs, state, rew, done, _ = step(jax.random.split(of_steps, n_envs), state, act)
            return (key, state, next_obs), (obs, act, rew, done, logp)

        self.rollout = jax.jit(lambda carried: jax.lax.scan(tick, carried, None, n_steps))
        reset = jax.vmap(partial(env.reset, params=params))
        obs, state = reset(jax.random.split(jax.random.PRNGKey(1), n_envs))
        self.carried = jax.random.PRNGKey(2), state, obs

    def collect(self):
        self.carried, rows = self.rollout(self.carried)
        return jax.block_until_ready(rows)


def seconds(collect) -> float:
    start = perf_counter()
    collect()
    return perf_counter() - start


def collectors(n_envs: int, n_steps: int) -> dict:
    "Name -> function that collects one fragment."
    actor = MLPPolicy.for_env(GymnaxEnv(ENV), hidden=(HIDDEN, HIDDEN), normalize=False, seed=0)
    stream = iter(TensorCollector(partial(GymnaxEnv, ENV, n_envs=n_envs), actor, n_steps, seed=0))
    return {
        "JAX by hand": InJax(n_envs, n_steps).collect,
        "torch by hand": TensorFloor(ByHand, n_envs, n_steps, "cpu", False).collect,
        "pipeline": partial(next, stream),
    }


def main():
    parser = options_of(__doc__, n_envs=[64, 1024, 4096], n_steps=128, repeats=7)
    args = begun(parser)
    print(f"gymnax's CartPole, T = {args.n_steps}; steps a second, median of {args.repeats}\n")
    lines = []
    for n_envs in args.n_envs:
        of_name = collectors(n_envs, args.n_steps)
        for collect in of_name.values():
            seconds(collect)
            seconds(collect)
        times = [[seconds(collect) for collect in of_name.values()] for _ in range(args.repeats)]
        columns = dict(zip(of_name, zip(*times)))
        rates = [f"{n_envs * args.n_steps / median(t):,.0f}" for t in columns.values()]

        # Time of the pipeline to those of the loops, repeat by repeat
        ratios = [
            spread([ours / theirs for ours, theirs in zip(columns["pipeline"], columns[name])])
            for name in ("torch by hand", "JAX by hand")
        ]
        lines.append([n_envs, *rates, *ratios])
    print(table(["B", *of_name, "time / torch by hand", "time / JAX by hand"], lines))


if __name__ == "__main__":
    main()
