"""PPO with one policy for the three agents of simple_spread (package mpe2): rollpipe, or Stable-Baselines3 on SuperSuit's vector.

    python benchmarks/agents.py rollpipe|sb3 --out FILE [--steps 200000] [--seed 0]

Both step 8 environments, whose 24 agents share one policy, with the same settings. After each tenth of the steps, the greedy policy plays
100 episodes, which a plain loop over PettingZoo counts. A line of JSON is added to the file: environment steps, mean return of an agent,
its standard error, seconds of training. Random actions are measured first. Stable-Baselines3 and SuperSuit are not among the extras.
"""

import argparse
import json
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from mpe2 import simple_spread_v3

COPIES = 8
STEPS = 128
LR = 7e-4
GAMMA = 0.95
LAM = 0.95
EPOCHS = 5
MINIBATCH = 512
ENTROPY = 0.01


def score(act, episodes=100):
    "Mean and standard error of the return of an agent: the mean over the three of them, in each of the episodes."
    env = simple_spread_v3.parallel_env()
    returns = []
    for seed in range(10_000, 10_000 + episodes):
        obs = env.reset(seed=seed)[0]
        total = 0.0
        while env.agents:
            acts = act(np.stack([obs[agent] for agent in env.possible_agents]))
            obs, rew, *_ = env.step(dict(zip(env.possible_agents, acts)))
            total += sum(rew.values()) / len(env.possible_agents)
        returns.append(total)
    return float(np.mean(returns)), float(np.std(returns, ddof=1) / episodes**0.5)


def of_rollpipe(seed):
    "Yields after each batch; first of all a function obs [3, 18] -> actions [3]."
    from rollpipe.agents import PPO
    from rollpipe.layers import Critic, MLPPolicy
    from rollpipe.pipes import on_policy
    from rollpipe.pipes.envs.agents import Agents

    def spread():
        return Agents(simple_spread_v3.parallel_env, COPIES)

    actor = MLPPolicy.for_env(spread, hidden=(64, 64), seed=seed)
    critic = Critic.for_env(spread, hidden=(64, 64), seed=seed)
    agent = PPO(
        actor, critic, lr=LR, epochs=EPOCHS, minibatch=MINIBATCH, c_entropy=ENTROPY, seed=seed
    )
    yield lambda obs: actor.predict(obs)[0]
    for batch in on_policy(
        spread, actor, critic, n_envs=None, n_steps=STEPS, gamma=GAMMA, lam=LAM, seed=seed
    ):
        agent.update(batch)
        yield


def of_sb3(seed):
    "The same with `stable_baselines3.PPO`."
    import supersuit
    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import VecMonitor

    vec = supersuit.pettingzoo_env_to_vec_env_v1(simple_spread_v3.parallel_env())
    vec = VecMonitor(
        supersuit.concat_vec_envs_v1(vec, COPIES, num_cpus=0, base_class="stable_baselines3")
    )
    model = PPO(
        "MlpPolicy",
        vec,
        LR,
        STEPS,
        MINIBATCH,
        EPOCHS,
        GAMMA,
        LAM,
        ent_coef=ENTROPY,
        seed=None,
        policy_kwargs=dict(net_arch=[64, 64]),
        device="cpu",
    )
    model.set_random_seed(None)
    torch.manual_seed(seed)
    yield lambda obs: model.predict(obs, deterministic=True)[0]
    while True:
        model.learn(STEPS * 3 * COPIES, reset_num_timesteps=False)
        yield


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("who", choices=("rollpipe", "sb3"))
    for name, value in (("steps", 200_000), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rng = np.random.default_rng(args.seed)
    n = 0
    seconds = 0.0
    training = dict(rollpipe=of_rollpipe, sb3=of_sb3)[args.who](args.seed)
    act = next(training)
    due = 0

    def tell(steps, act):
        mean, error = score(act)
        line = dict(
            who=args.who, seed=args.seed, steps=steps, mean=mean, error=error, seconds=seconds
        )
        with args.out.open("a") as f:
            print(json.dumps(line), file=f)

    tell(-1, lambda obs: rng.integers(5, size=3))
    while True:
        if n >= due:
            tell(n, act)
            due += args.steps / 10
        if n >= args.steps:
            return
        begin = perf_counter()
        next(training)
        seconds = seconds + perf_counter() - begin
        n = n + COPIES * STEPS


if __name__ == "__main__":
    main()
