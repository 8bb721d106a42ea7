"Pipes that change what passes."

import torch

from rollpipe.pipes import (
    CheckInvariants,
    EnvStepper,
    FragmentCollector,
    FrameStack,
    Lanes,
    Minibatcher,
    NStep,
    ObservationCast,
    RewardScaler,
    ToDevice,
    on_policy,
    rollouts,
)

from .tools import first
from .worlds import Frames, Hybrid, Push, Walk, critic, policy


def _lanes(env, wrap=lambda pipe: pipe):
    return Lanes(FragmentCollector(wrap(EnvStepper(env, policy(env), 3)), 10), 2, 0)


def n_steps():
    yield from first(NStep(_lanes(Walk), 3, gamma=0.9))


def frame_stack():
    yield from first(FrameStack(_lanes(Frames), 3), 5)


def frame_stack_joined():
    yield from first(
        FrameStack(rollouts(Frames, policy(Frames), n_envs=2, n_steps=5, lanes=2, seed=0), 4)
    )


def constant_reward_scale():
    yield from first(RewardScaler(_lanes(Push), scale=0.1))


def learnt_reward_scale():
    yield from first(RewardScaler(_lanes(Push), gamma=0.9), 5)


def learnt_reward_scale_of_ticks():
    yield from first(_lanes(Push, lambda pipe: RewardScaler(pipe, clip=0.5)), 5)


def cast_ticks():
    yield from first(_lanes(Hybrid, ObservationCast))


def cast_fragments():
    yield from first(ObservationCast(_lanes(Hybrid), torch.bfloat16))


def to_device():
    yield from first(ToDevice(_lanes(Walk), "cpu", ahead=1))


def _batches(env, **kwargs):
    return on_policy(env, policy(env), critic(env), n_envs=3, n_steps=10, lanes=2, seed=0, **kwargs)


def minibatches():
    yield from first(Minibatcher(_batches(Hybrid), 16, epochs=2, seed=0), 10)


def minibatches_seeded_by_the_recipe():
    yield from first(_batches(Walk, edits=[lambda pipe: Minibatcher(pipe, 25)]), 6)


def checked():
    yield from first(CheckInvariants(_batches(Walk)))


def _doubled(fragment):
    return fragment._replace(ret=2 * fragment.state.rew[1:])


def _has_ends(fragment):
    return bool(fragment.state.fin[1:].any())


def mapped_and_filtered():
    yield from first(_lanes(Walk).map(_doubled).filter(_has_ends))
