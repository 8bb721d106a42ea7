"Trainings from a memory of steps, what is drawn from it, and a table of values."

import tempfile

from rollpipe.agents import DQN, QLearning
from rollpipe.agents.tabular import TabularQ
from rollpipe.layers import QPolicy, RecurrentPolicy, RecurrentQPolicy
from rollpipe.pipes import replayed, rollouts

from .tools import first, trained
from .worlds import FromFive, Hybrid, Push, Walk, policy

SMALL = dict(n_envs=3, n_steps=4, lanes=2, seed=0, capacity=90, warmup=30, batch_size=8)


def _fresh(batch):
    return batch[0]


def _drawn(pipe, n=8):
    "New steps, all samples, and how much is remembered."
    for label, (fresh, samples, memory) in first(pipe, n):
        yield label, (fresh, list(samples), len(memory))


def samples():
    yield from _drawn(replayed(Hybrid, policy(Hybrid), n_batches=2, **SMALL))


def segments():
    yield from _drawn(replayed(Push, policy(Push), length=5, **SMALL))


def segments_with_memory():
    yield from _drawn(replayed(Push, policy(Push, RecurrentPolicy, memory=4), length=6, **SMALL))


def segments_from_zeros():
    yield from _drawn(
        replayed(Push, policy(Push, RecurrentPolicy, memory=4), length=2, zero_state=True, **SMALL)
    )


def prioritized():
    yield from _drawn(replayed(Walk, policy(Walk), prioritized=True, **SMALL))


def resting_environments():
    yield from _drawn(replayed(Walk, policy(Walk), sticky=True, length=3, **SMALL))


def on_disk():
    with tempfile.TemporaryDirectory() as folder:
        yield from _drawn(replayed(Hybrid, policy(Hybrid), path=folder, **SMALL))


def _dqn(env, actor, memory=None, **kwargs):
    agent = DQN(actor, target_every=3, eps_steps=100, **kwargs)
    pipe = replayed(env, actor, n_batches=2, **SMALL, **(memory or {}))
    yield from trained(agent, pipe, 7, data=_fresh)


def dqn():
    yield from _dqn("CartPole-v1", policy("CartPole-v1", QPolicy))


def dqn_plain():
    yield from _dqn(
        FromFive, policy(FromFive, QPolicy, normalize=True), double=False, huber=None, tau=0.1
    )


def dqn_duelling_steps():
    yield from _dqn(Walk, policy(Walk, QPolicy, duelling=True), dict(length=3), multi_step=3)


def dqn_prioritized():
    yield from _dqn(Walk, policy(Walk, QPolicy), dict(prioritized=True), beta_steps=80)


def dqn_recurrent():
    actor = policy(Walk, RecurrentQPolicy, memory=6, past=True)
    yield from _dqn(Walk, actor, dict(length=6, prioritized=True), burn_in=2, multi_step=2)


def dqn_recurrent_from_zeros():
    yield from _dqn(
        Walk,
        policy(Walk, RecurrentQPolicy, memory=6, cell="lstm"),
        dict(length=3, zero_state=True),
        burn_in=1,
    )


def dqn_without_memory():
    actor = policy(Walk, QPolicy)
    yield from trained(DQN(actor), rollouts(Walk, actor, n_envs=4, n_steps=8, seed=0))


def table():
    actor = TabularQ.for_env("Taxi-v4")
    yield from trained(QLearning(actor), rollouts("Taxi-v4", actor, n_envs=4, n_steps=32, seed=0))
