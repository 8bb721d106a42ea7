"""Milliseconds of one update of each learner of gradients, at the sizes of its defaults, beside the least that it can cost.

    python benchmarks/updates.py [--only ppo dqn] [--repeats 15] [--seconds 0.3]

CartPole-v1, MLPs 2x64, one thread, processor time. The batches are collected before, and each side learns from them again and again. The
learning rate is 0, so the work of all updates is alike. The floor is an update by hand in plain torch with the same arithmetic: the loss,
its gradient, `clip_grad_norm_`, and torch's fused Adam, minibatch by minibatch, and for DQN the copies to the target network. It has no
metrics, no checks, no normalisers, no invalid rows, and no true last observations where an episode was cut off. The two sides take turns.
"""

from inspect import signature
from itertools import cycle, islice
from time import process_time

import torch
from report import header, options_of, spread, table
from torch import nn
from torch.nn import functional as F

from rollpipe.pipes import nested
from rollpipe.settings.algorithms import ALGORITHMS

ENV = "CartPole-v1"
GAMMA = 0.99
CLIP = 0.2
C_VALUE = 0.5


def mlp(n_out, activation=nn.Tanh):
    return nn.Sequential(
        nn.Linear(4, 64), activation(), nn.Linear(64, 64), activation(), nn.Linear(64, n_out)
    )


class Floor:
    "Networks and an optimiser; a subclass writes `update(batch)`."

    def __init__(self, options):
        self.options = options
        self.actor = mlp(2)
        self.critic = mlp(1)
        self.params = [*self.actor.parameters(), *self.critic.parameters()]
        self.optimizer = torch.optim.Adam(self.params, lr=0.0, fused=True)

    def step(self, loss):
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(
            [p for p in self.params if p.grad is not None], self.options["max_grad_norm"]
        )
        self.optimizer.step()

    def rows(self, batch):
        "Observations, actions, log-probabilities, advantages and value targets, each [T * B, ...]."
        return [
            x.flatten(0, 1)
            for x in (
                batch.state.obs[:-1],
                batch.state.act[1:],
                batch.actor["logp"][:-1],
                batch.adv,
                batch.ret,
            )
        ]

    def logp(self, obs, act):
        return self.actor(obs).log_softmax(-1).gather(-1, act[..., None])[..., 0]


class PPO(Floor):
    def update(self, batch):
        obs, act, logp, adv, ret = self.rows(batch)
        adv = (adv - adv.mean()) / adv.std()
        for _ in range(self.options["epochs"]):
            for rows in torch.randperm(len(adv)).split(self.options["minibatch"]):
                x = obs[rows]
                a = adv[rows]
                ratio = (self.logp(x, act[rows]) - logp[rows]).exp()
                gain = torch.min(ratio * a, ratio.clamp(1 - CLIP, 1 + CLIP) * a).mean()
                self.step(C_VALUE * (self.critic(x)[:, 0] - ret[rows]).square().mean() - gain)


class A2C(Floor):
    def update(self, batch):
        obs, act, _, adv, ret = self.rows(batch)
        self.step(
            C_VALUE * (self.critic(obs)[:, 0] - ret).square().mean()
            - (adv * self.logp(obs, act)).mean()
        )


class VTrace(Floor):
    def update(self, batch):
        obs = batch.state.obs
        going = GAMMA * (~batch.term[1:]).float()
        fin = batch.state.fin[1:]
        v = self.critic(obs)[..., 0]
        logp = self.logp(obs[:-1], batch.state.act[1:])
        with torch.no_grad():
            rho = (logp - batch.actor["logp"][:-1]).exp().clamp(max=1.0)
            delta = rho * (batch.state.rew[1:] + going * v[1:] - v[:-1])
            weight = going * rho * ~fin
            later = torch.zeros_like(v[0])
            errors = []
            for d, w in zip(delta.flip(0), weight.flip(0)):
                later = d + w * later
                errors.append(later)
            vs = v[:-1] + torch.stack(errors[::-1])
            adv = rho * (
                batch.state.rew[1:]
                + going * torch.where(fin, v[1:], torch.cat([vs[1:], v[-1:]]))
                - v[:-1]
            )
        self.step(C_VALUE * (v[:-1] - vs).square().mean() - (adv * logp).mean())


class REINFORCE(Floor):
    def update(self, batch):
        obs, act, logp_old, adv, ret = self.rows(batch)
        adv = (adv - adv.mean()) / adv.std()
        dist = self.actor(obs).log_softmax(-1)
        logp = dist.gather(-1, act[:, None])[:, 0]
        weight = (logp.detach() - logp_old).exp().clamp(max=1.0)
        self.step(
            (self.options["c_entropy"] * (dist.exp() * dist).sum(-1) - weight * adv * logp).mean()
        )
        for _ in range(self.options["critic_epochs"]):
            for rows in torch.randperm(len(ret)).split(128):
                self.optimizer.zero_grad()
                (self.critic(obs[rows])[:, 0] - ret[rows]).square().mean().backward()
                self.optimizer.step()


class DQN(Floor):
    def __init__(self, options):
        super().__init__(options)
        self.actor = mlp(2, nn.ReLU)
        self.target = mlp(2, nn.ReLU).requires_grad_(False)
        self.n = 0
        self.params = [*self.actor.parameters()]
        self.optimizer = torch.optim.Adam(self.params, lr=0.0, fused=True)

    def update(self, sample):
        f = sample.fragment
        (obs, after) = f.state.obs
        act = f.state.act[1]
        rew = f.state.rew[1]
        term = f.term[1]
        with torch.no_grad():
            best = self.actor(after).argmax(-1, keepdim=True)
            goal = rew + GAMMA * ~term * self.target(after).gather(-1, best)[:, 0]
        self.step(2 * F.huber_loss(self.actor(obs).gather(-1, act[:, None])[:, 0], goal))
        self.n += 1
        if self.n % self.options["target_every"] == 0:
            self.target.load_state_dict(self.actor.state_dict())


FLOORS = dict(ppo=PPO, a2c=A2C, vtrace=VTrace, reinforce=REINFORCE, dqn=DQN)


def prepared(name):
    "`(update, update by hand, batches, size)`: both sides take a batch, or a sample of the memory for DQN."
    parts = ALGORITHMS[name]
    nets = [part.for_env(ENV, seed=0) for part in (parts.policy, parts.critic) if part is not None]
    agent = parts.learner(
        *nets,
        lr=0.0,
        **({"critic_lr": 0.0} if "critic_lr" in signature(parts.learner).parameters else {}),
    )
    wanted = signature(parts.pipeline).parameters
    pipe = parts.pipeline(
        ENV,
        *nets[: 1 + ("critic" in wanted)],
        seed=0,
        **{k: x for k, x in parts.defaults.items() if k in wanted},
    )
    by_hand = FLOORS[name](
        {k: p.default for k, p in signature(parts.learner).parameters.items()}
    ).update
    if name == "dqn":
        memory = list(islice(pipe, 60))[-1].memory
        batches = [memory.sample(wanted["batch_size"].default) for _ in range(20)]
        return (
            lambda sample: agent.learn(sample, memory),
            by_hand,
            batches,
            f"{batches[0].fragment.n_envs} transitions",
        )
    batches = [nested.map(torch.clone, batch) for batch in islice(pipe, 4)]
    for batch in batches:
        agent.update(batch)
    return agent.update, by_hand, batches, f"{batches[0].n_steps} x {batches[0].n_envs} steps"


def timed(update, batches, n) -> float:
    "Milliseconds of processor time of each of `n` updates."
    start = process_time()
    for batch in islice(batches, n):
        update(batch)
    return (process_time() - start) / n * 1e3


def measure(name, repeats, seconds):
    "A row of the table."
    *sides, batches, size = prepared(name)
    batches = cycle(batches)
    n = max(1, round(seconds * 1e3 / max(timed(update, batches, 3) for update in sides)))
    ours, floor = zip(*([timed(update, batches, n) for update in sides] for _ in range(repeats)))
    return [name, size, spread(ours), spread(floor), spread([x / y for x, y in zip(ours, floor)])]


if __name__ == "__main__":
    parser = options_of(__doc__, repeats=15, seconds=0.3)
    parser.add_argument("--only", nargs="+", choices=FLOORS, default=list(FLOORS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(header())
    rows = [measure(name, args.repeats, args.seconds) for name in args.only]
    print(table(["learner", "batch", "update [ms]", "floor [ms]", "update / floor"], rows))
