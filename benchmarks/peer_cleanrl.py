"""Time of PPO trainings on CartPole with the settings of CleanRL's `ppo.py`: rollpipe against a loop of torch and gymnasium in its style.

    python benchmarks/peer_cleanrl.py [--env CartPole-v1] [--steps 200000] [--repeats 5]

The loop is written anew and has the structure of that file: a `SyncVectorEnv`, actor and critic asked at every step through
`torch.distributions`, GAE in a Python loop, torch's default Adam. The settings are those of the file: 4 environments x 128 steps, 4 epochs
of 4 minibatches, learning rate 2.5e-4 that falls to 0, Adam's epsilon 1e-5, clip 0.2 of ratios and values, entropy weight 0.01, value
weight 0.5 of half the squared error, advantages scaled for each minibatch, gradients clipped at 0.5, separate MLPs 2x64 tanh.

The critic of rollpipe also keeps the scale of its targets, and clips values in that unit. It bootstraps from true last observations,
which that file does not. One process and one thread; repeat number i has seed i on both sides. Afterwards the greedy policy plays 20
episodes, which are not timed.
"""

import gc
from time import perf_counter

import gymnasium as gym
import numpy as np
import torch
from report import begun, options_of, spread, table
from torch import nn
from torch.distributions import Categorical

from rollpipe.agents import PPO, evaluate
from rollpipe.layers import Critic, MLPPolicy
from rollpipe.pipes import on_policy

N_ENVS = 4
N_STEPS = 128
EPOCHS = 4
MINIBATCHES = 4
LR = 2.5e-4
EPS = 1e-5
GAMMA = 0.99
LAM = 0.95
CLIP = 0.2
C_ENTROPY = 0.01
C_VALUE = 0.5
MAX_GRAD_NORM = 0.5


def layer(n_in, n_out, gain=2**0.5):
    made = nn.Linear(n_in, n_out)
    nn.init.orthogonal_(made.weight, gain)
    nn.init.zeros_(made.bias)
    return made


class Agent(nn.Module):
    def __init__(self, n_obs, n_act):
        super().__init__()
        self.critic = nn.Sequential(
            layer(n_obs, 64), nn.Tanh(), layer(64, 64), nn.Tanh(), layer(64, 1, 1.0)
        )
        self.actor = nn.Sequential(
            layer(n_obs, 64), nn.Tanh(), layer(64, 64), nn.Tanh(), layer(64, n_act, 0.01)
        )

    def act_and_value(self, obs, act=None):
        dist = Categorical(logits=self.actor(obs))
        if act is None:
            act = dist.sample()
        return act, dist.log_prob(act), dist.entropy(), self.critic(obs)[:, 0]


class Loop:
    "The training in CleanRL's style; its networks act greedily in `score`."

    def __init__(self, env, seed):
        torch.manual_seed(seed)
        self.env = env
        self.rng = np.random.default_rng(seed)
        make = lambda: gym.wrappers.RecordEpisodeStatistics(gym.make(env))
        self.envs = gym.vector.SyncVectorEnv(
            [make] * N_ENVS, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP
        )
        self.n_obs = self.envs.single_observation_space.shape
        self.agent = Agent(self.n_obs[0], int(self.envs.single_action_space.n))
        self.optimizer = torch.optim.Adam(self.agent.parameters(), lr=LR, eps=EPS)
        self.obs = torch.tensor(self.envs.reset(seed=seed)[0])
        self.done = torch.zeros(N_ENVS)

    def collect(self):
        obs = torch.zeros((N_STEPS, N_ENVS, *self.n_obs))
        act = torch.zeros((N_STEPS, N_ENVS), dtype=torch.long)
        logp, rew, done, value = (torch.zeros((N_STEPS, N_ENVS)) for _ in range(4))
        for t in range(N_STEPS):
            obs[t], done[t] = self.obs, self.done
            with torch.no_grad():
                act[t], logp[t], _, value[t] = self.agent.act_and_value(self.obs)
            new, r, terminated, truncated, _ = self.envs.step(act[t].numpy())
            rew[t] = torch.tensor(r)
            self.obs = torch.tensor(new)
            self.done = torch.tensor(np.logical_or(terminated, truncated), dtype=torch.float32)
        with torch.no_grad():
            next_value = self.agent.critic(self.obs)[:, 0]
            next_done = self.done
            last = 0.0
            adv = torch.zeros_like(rew)
            for t in reversed(range(N_STEPS)):
                delta = rew[t] + GAMMA * next_value * (1 - next_done) - value[t]
                adv[t] = last = delta + GAMMA * LAM * (1 - next_done) * last
                next_value = value[t]
                next_done = done[t]
        return [x.flatten(0, 1) for x in (obs, act, logp, adv, adv + value, value)]

    def update(self, batch):
        obs, act, logp, adv, ret, value = batch
        order = np.arange(len(adv))
        size = len(adv) // MINIBATCHES
        self.clipped = []
        for _ in range(EPOCHS):
            self.rng.shuffle(order)
            for start in range(0, len(adv), size):
                rows = order[start : start + size]
                _, new_logp, entropy, v = self.agent.act_and_value(obs[rows], act[rows])
                ratio = (new_logp - logp[rows]).exp()
                a = adv[rows]
                with torch.no_grad():
                    self.kl = ((ratio - 1) - ratio.log()).mean()
                    self.clipped.append(((ratio - 1).abs() > CLIP).float().mean().item())
                a = (a - a.mean()) / (a.std() + 1e-8)
                policy = torch.max(-a * ratio, -a * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
                clipped = value[rows] + (v - value[rows]).clamp(-CLIP, CLIP)
                error = torch.max((v - ret[rows]) ** 2, (clipped - ret[rows]) ** 2)
                loss = policy - C_ENTROPY * entropy.mean() + C_VALUE * 0.5 * error.mean()
                self.optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.agent.parameters(), MAX_GRAD_NORM)
                self.optimizer.step()

    def score(self):
        envs = gym.vector.SyncVectorEnv([lambda: gym.make(self.env)] * 20)
        total = np.zeros(20)
        obs = envs.reset(seed=1000)[0]
        alive = np.ones(20, dtype=bool)
        while alive.any():
            with torch.no_grad():
                act = self.agent.actor(torch.tensor(obs)).argmax(-1).numpy()
            obs, rew, terminated, truncated, _ = envs.step(act)
            total += rew * alive
            alive &= ~(terminated | truncated)
        return total.mean()


class Rollpipe:
    "The same with the library's parts."

    def __init__(self, env, seed):
        self.env = env
        (actor, critic) = (
            kind.for_env(env, normalize=False, seed=seed) for kind in (MLPPolicy, Critic)
        )
        self.agent = PPO(
            actor,
            critic,
            epochs=EPOCHS,
            minibatch=N_ENVS * N_STEPS // MINIBATCHES,
            clip=CLIP,
            clip_value=CLIP,
            c_value=C_VALUE / 2,
            c_entropy=C_ENTROPY,
            lr=LR,
            max_grad_norm=MAX_GRAD_NORM,
            normalize_adv="minibatch",
            seed=seed,
        )
        self.optimizer, self.update = self.agent.optimizer, self.agent.update
        for group in self.optimizer.param_groups:
            group["eps"] = EPS
        self.batches = iter(
            on_policy(
                env, actor, critic, n_envs=N_ENVS, n_steps=N_STEPS, gamma=GAMMA, lam=LAM, seed=seed
            )
        )

    def collect(self):
        return next(self.batches)

    def score(self):
        return evaluate(self.env, self.agent.actor, 20, seed=1000).mean


def train(side, env, seed, steps) -> dict:
    "Seconds of one training in all, of its collecting (with advantages) and its updates, and the score of the greedy policy."
    start = perf_counter()
    n = steps // (N_ENVS * N_STEPS)
    collect = 0.0
    run = side(env, seed)
    for i in range(n):
        for group in run.optimizer.param_groups:
            group["lr"] = LR * (1 - i / n)
        began = perf_counter()
        batch = run.collect()
        collect += perf_counter() - began
        run.update(batch)
    seconds = perf_counter() - start
    return dict(collect=collect, update=seconds - collect, all=seconds, score=float(run.score()))


def main():
    args = options_of(__doc__, env="CartPole-v1", steps=200_000, repeats=5)
    args = begun(args)
    sides = {"loop in CleanRL's style": Loop, "rollpipe": Rollpipe}
    for side in sides.values():
        train(side, args.env, 0, 10 * N_ENVS * N_STEPS)
    results = {name: [] for name in sides}
    for seed in range(args.repeats):
        for name, side in sides.items():
            gc.collect()
            results[name].append(train(side, args.env, seed, args.steps))
    print(
        f"{args.env}, {args.steps} steps, {N_ENVS} environments x {N_STEPS} steps; median (range) of {args.repeats} repeats.\n"
    )
    phases = ("collect", "update", "all")
    (loop, ours) = results.values()
    rows = [
        [
            f"{name} [s]",
            *(spread([r[p] for r in runs]) for p in phases),
            " ".join(f"{r['score']:.0f}" for r in runs),
        ]
        for name, runs in results.items()
    ]
    ratios = [
        "loop / rollpipe",
        *(spread([a[p] / b[p] for a, b in zip(loop, ours)]) for p in phases),
        "",
    ]
    print(table(["", *phases, "greedy return of 20 episodes, by seed"], [*rows, ratios]))


if __name__ == "__main__":
    main()
