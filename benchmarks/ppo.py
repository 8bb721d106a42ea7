"""Time of whole trainings with PPO by phase, as a ratio to a hand-written loop with a hand-written update.

    python benchmarks/ppo.py [--env CartPole-v1] [--steps 200000] [--repeats 5]

8 environments in one process, 256 steps each per update, one thread; 10 epochs of minibatches of 256, separate actor and critic MLPs 2x64
tanh, one Adam, gradients clipped, no normaliser. The floor is `floor.py`, which calls the critic once per fragment (faster than at every
step), followed by GAE and an update that computes only the loss: no metrics, no checks, no support for invalid rows, and no true last
observations where an episode was cut off. It comes in two forms: with the fused Adam that rollpipe uses, and with torch's default Adam.
The runs are interleaved; repeat number i has seed i on all sides. The ratio is the time of the floor divided by the time of rollpipe.
"""

import gc
from functools import partial
from time import perf_counter, process_time

import torch
from floor import Floor
from report import begun, options_of, spread, table

from rollpipe.agents import PPO
from rollpipe.layers import Critic, MLPPolicy
from rollpipe.pipes import AdvantageBuffer, rollouts

PHASES = ("collect", "advantage", "update")
N_ENVS = 8
N_STEPS = 256
EPOCHS = 10
MINIBATCH = 256
GAMMA = 0.99
LAM = 0.95
CLIP = 0.2
C_VALUE = 0.5
LR = 1e-3
MAX_GRAD_NORM = 0.5


class ByHand:
    "A minimal hand-written PPO, whose phases are `collect`, `advantage` and `update`."

    def __init__(self, env, seed, **adam):
        self.floor = Floor(env, N_ENVS, N_STEPS, seed, values="fragment")
        self.params = [*self.floor.actor.parameters(), *self.floor.critic.parameters()]
        if not self.floor.discrete:
            self.params.append(self.floor.log_std.requires_grad_())
        self.optimizer = torch.optim.Adam(self.params, lr=LR, **adam)

    def collect(self, _):
        return self.floor.collect()

    @torch.no_grad()
    def advantage(self, batch):
        obs, act, rew, term, trunc, logp, value = batch
        alive = (~term).float()
        going = (~(term | trunc)).float()
        delta = rew + GAMMA * alive * value[1:] - value[:-1]
        adv = torch.empty_like(rew)
        last = torch.zeros(N_ENVS)
        for t in reversed(range(N_STEPS)):
            adv[t] = last = delta[t] + GAMMA * LAM * going[t] * last
        return obs[:-1], act, logp, adv, adv + value[:-1]

    def log_prob(self, obs, act):
        out = self.floor.actor(obs)
        if self.floor.discrete:
            return out.log_softmax(-1).gather(-1, act[:, None])[:, 0]
        return torch.distributions.Normal(out, self.floor.log_std.exp()).log_prob(act).sum(-1)

    def update(self, batch):
        obs, act, logp, adv, ret = (x.flatten(0, 1) for x in batch)
        adv = (adv - adv.mean()) / (adv.std() + 1e-8)
        for _ in range(EPOCHS):
            for rows in torch.randperm(len(adv)).split(MINIBATCH):
                x = obs[rows]
                a = adv[rows]
                ratio = (self.log_prob(x, act[rows]) - logp[rows]).exp()
                surrogate = torch.min(ratio * a, ratio.clamp(1 - CLIP, 1 + CLIP) * a).mean()
                loss = (
                    C_VALUE * (self.floor.critic(x)[:, 0] - ret[rows]).square().mean() - surrogate
                )
                self.optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.params, MAX_GRAD_NORM)
                self.optimizer.step()


class Rollpipe:
    "The same with the library's parts; advantages are computed after `rollouts`, so that they are timed separately."

    def __init__(self, env, seed):
        actor, critic = (
            kind.for_env(env, normalize=False, seed=seed) for kind in (MLPPolicy, Critic)
        )
        self.agent = PPO(
            actor,
            critic,
            epochs=EPOCHS,
            minibatch=MINIBATCH,
            clip=CLIP,
            c_value=C_VALUE,
            c_entropy=0.0,
            lr=LR,
            max_grad_norm=MAX_GRAD_NORM,
            seed=seed,
        )
        pipe = rollouts(env, actor, n_envs=N_ENVS, n_steps=N_STEPS, seed=seed, info_keys=())
        self.fragments = iter(pipe)
        self.advantage = AdvantageBuffer(pipe, critic, GAMMA, LAM).estimate
        self.update = self.agent.update

    def collect(self, _):
        return next(self.fragments)


def train(side, env, seed, steps) -> dict:
    "Seconds of one training by phase and in total, each as (wall time, processor time)."
    run = side(env, seed)
    clock = lambda: torch.tensor([perf_counter(), process_time()], dtype=torch.double)
    seconds = dict.fromkeys(PHASES, 0.0)
    for _ in range(round(steps / (N_ENVS * N_STEPS))):
        item = None
        for phase in PHASES:
            start = clock()
            item = getattr(run, phase)(item)
            seconds[phase] = seconds[phase] + clock() - start
    return seconds | dict(all=sum(seconds.values()))


def rows_of(results):
    "Rows of the table: wall and processor time of each side by phase, then the ratios."
    columns = (*PHASES, "all")
    for i, kind in enumerate(("wall time [s]", "processor time [s]")):
        for name, runs in results.items():
            yield [name, kind, *(spread([float(r[c][i]) for r in runs]) for c in columns)]
    *floors, ours = results
    for i, kind in enumerate(("wall time", "processor time")):
        for name in floors:
            pairs = list(zip(results[name], results[ours]))
            yield [
                f"ratio to {name}",
                kind,
                *(spread([float(f[c][i] / r[c][i]) for f, r in pairs]) for c in columns),
            ]


def main():
    args = options_of(__doc__, env="CartPole-v1", steps=200_000, repeats=5)
    args = begun(args)
    sides = {
        "floor, fused Adam": partial(ByHand, fused=True),
        "floor, plain Adam": ByHand,
        "rollpipe": Rollpipe,
    }
    for side in sides.values():
        train(side, args.env, 0, 3 * N_ENVS * N_STEPS)
    results = {name: [] for name in sides}
    for seed in range(args.repeats):
        for name, side in sides.items():
            gc.collect()
            results[name].append(train(side, args.env, seed, args.steps))
    print(
        f"{args.env}, {args.steps} steps, {N_ENVS} environments x {N_STEPS} steps; median (range) of {args.repeats} repeats.\n"
    )
    print(table(["", "", *PHASES, "all"], rows_of(results)))


if __name__ == "__main__":
    main()
