"""PPO with masks of actions beside `MaskablePPO` of Stable-Baselines3-contrib, on its own environments and with its default settings.

    python benchmarks/peer_masks.py [--steps 20000] [--seeds 3]

An episode has 100 steps. A step is worth 1 if the action is the observed one; some of the others are forbidden. Without masks a random
policy gets 5 in an episode of the first environment. The greedy policy of each side plays 20 episodes. The interpreter has both packages.
"""

import argparse
from functools import partial
from itertools import islice

import torch
from report import header, spread, table
from sb3_contrib import MaskablePPO
from sb3_contrib.common.envs import InvalidActionEnvDiscrete, InvalidActionEnvMultiDiscrete
from sb3_contrib.common.maskable.evaluation import evaluate_policy
from sb3_contrib.common.wrappers import ActionMasker
from stable_baselines3.common.monitor import Monitor

from rollpipe.agents import PPO, evaluate
from rollpipe.layers import Critic, MLPPolicy
from rollpipe.pipes import on_policy
from rollpipe.pipes.data.action_masks import WithActionMask

N_STEPS, EPISODES = 2048, 20
ENVS = {
    "20 actions, 10 forbidden": partial(InvalidActionEnvDiscrete, dim=20, n_invalid_actions=10),
    "80 actions, 60 forbidden": partial(InvalidActionEnvDiscrete, dim=80, n_invalid_actions=60),
    "2 of 3 actions, 3 forbidden": partial(
        InvalidActionEnvMultiDiscrete, dims=[3, 3], n_invalid_actions=3
    ),
}


def ours(make, steps, seed):
    env = lambda: WithActionMask(make(), "action_masks")
    actor = MLPPolicy.for_env(env, action_mask="action_masks", seed=seed)
    critic = Critic.for_env(env, seed=seed + 1)
    agent = PPO(
        actor,
        critic,
        lr=3e-4,
        minibatch=64,
        normalize_adv="minibatch",
        max_grad_norm=0.5,
        seed=seed,
    )
    pipe = on_policy(env, actor, critic, n_envs=1, n_steps=N_STEPS, gamma=0.99, lam=0.95, seed=seed)
    for batch in islice(pipe, -(-steps // N_STEPS)):
        agent.update(batch)
    return evaluate(env, actor, EPISODES, seed=seed).mean


def theirs(make, steps, seed):
    env = lambda: ActionMasker(Monitor(make()), lambda env: env.unwrapped.action_masks())
    model = MaskablePPO("MlpPolicy", env(), seed=seed, device="cpu").learn(steps)
    return evaluate_policy(model, env(), n_eval_episodes=EPISODES)[0]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in (("steps", 20_000), ("seeds", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [
        [
            name,
            *(
                spread([train(make, args.steps, seed) for seed in range(args.seeds)], "{:.1f}")
                for train in (ours, theirs)
            ),
        ]
        for name, make in ENVS.items()
    ]
    print(header(("torch", "gymnasium", "sb3_contrib", "stable_baselines3")))
    print(
        f"greedy return (at most 100) after {args.steps} steps, median of {args.seeds} seeds (range)\n"
    )
    print(table(["environment", "rollpipe", "sb3-contrib"], rows))


if __name__ == "__main__":
    main()
