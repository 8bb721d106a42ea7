"Vector environments in every autoreset mode."

from rollpipe.layers import RecurrentPolicy
from rollpipe.pipes import on_policy, rollouts

from .tools import first
from .worlds import Hybrid, Walk, critic, policy, vector

SMALL = dict(n_envs=None, n_steps=12, seed=0)


def _mode(name):
    yield from first(on_policy(vector(name), policy(Walk), critic(Walk), lanes=2, **SMALL))


def next_step():
    yield from _mode("NEXT_STEP")


def same_step():
    yield from _mode("SAME_STEP")


def disabled():
    yield from _mode("DISABLED")


def next_step_recurrent():
    yield from first(
        rollouts(vector("NEXT_STEP"), policy(Walk, RecurrentPolicy, memory=5, past=True), **SMALL)
    )


def same_step_recurrent():
    yield from first(
        rollouts(vector("SAME_STEP"), policy(Walk, RecurrentPolicy, memory=5, past=True), **SMALL)
    )


def next_step_hybrid():
    yield from first(rollouts(vector("NEXT_STEP", Hybrid), policy(Hybrid), **SMALL))


def same_step_hybrid():
    yield from first(rollouts(vector("SAME_STEP", Hybrid), policy(Hybrid), **SMALL))


def _made(vector):
    return rollouts(
        "CartPole-v1", policy("CartPole-v1"), n_envs=4, n_steps=32, vector=vector, seed=0
    )


def made_by_gymnasium():
    yield from first(_made("sync"))


def cartpole_in_arrays():
    yield from first(_made("vector_entry_point"))
