"What is collected on-policy, from environments and actors of every kind."

import gymnasium as gym
import torch

from rollpipe.agents import RandomActor, evaluate
from rollpipe.layers import CategoricalPolicy, GaussianPolicy, MemoryCritic, RecurrentPolicy
from rollpipe.pipes import (
    EnvStepper,
    FragmentCollector,
    FragmentStacker,
    Lanes,
    ProcessReading,
    collect,
    context,
    on_policy,
    prepare,
    remove,
    rollout,
    rollouts,
    startup,
)

from . import RENAMED
from .tools import first, named
from .worlds import (
    Dice,
    FromFive,
    Hybrid,
    Images,
    Judging,
    ManyBits,
    ManyNumbers,
    Push,
    Walk,
    critic,
    glance,
    policy,
)

SMALL = dict(n_envs=3, n_steps=12, lanes=2, seed=0)


def cartpole():
    actor = policy("CartPole-v1", CategoricalPolicy)
    yield from first(
        on_policy("CartPole-v1", actor, critic("CartPole-v1"), n_envs=4, n_steps=32, seed=0)
    )


def pendulum():
    pipe = on_policy(
        "Pendulum-v1",
        policy("Pendulum-v1", GaussianPolicy),
        critic("Pendulum-v1"),
        n_envs=2,
        n_steps=110,
        lanes=2,
        seed=0,
    )
    yield from first(pipe, 2)  # episodes are cut off after 200 steps


def short_time_limit():
    pipe = on_policy(
        "CartPole-v1",
        policy("CartPole-v1"),
        critic("CartPole-v1"),
        env_kwargs=dict(max_episode_steps=7),
        **SMALL,
    )
    yield from first(pipe)


def hybrid():
    yield from first(on_policy(Hybrid, policy(Hybrid), critic(Hybrid), gamma=0.9, lam=0.8, **SMALL))


def images():
    yield from first(
        on_policy(Images, policy(Images, encoder=glance), critic(Images, encoder=glance), **SMALL)
    )


def convolutions():
    yield from first(
        rollouts(
            Images,
            policy(Images, encoder=dict(images="conv", n_out=8)),
            n_envs=2,
            n_steps=4,
            seed=0,
        ),
        2,
    )


def many_numbers():
    yield from first(rollouts(ManyNumbers, policy(ManyNumbers), **SMALL))


def many_bits():
    yield from first(rollouts(ManyBits, policy(ManyBits), **SMALL))


def actions_from_five():
    yield from first(rollouts(FromFive, policy(FromFive), **SMALL))


def wild_actions():
    yield from first(rollouts(Push, policy(Push, std="state", log_std=1.0), **SMALL))


def without_draw_noise():
    yield from first(rollouts(Push, Dice(), **SMALL))


def reported_values():
    yield from first(on_policy(Walk, Judging(), **SMALL))


def chosen_infos():
    yield from first(rollouts(Walk, Judging(), info_keys=["count", "never"], **SMALL))


def no_infos():
    yield from first(rollouts(Walk, Judging(), info_keys=(), **SMALL))


def recurrent():
    actor = policy(Walk, RecurrentPolicy, memory=6, past=True, report=True)
    judge = critic(Walk, MemoryCritic, memory=6)
    yield from first(on_policy(Walk, actor, judge, **SMALL))


def recurrent_sticky():
    yield from first(
        on_policy(Push, policy(Push, RecurrentPolicy, memory=6), critic(Push), sticky=True, **SMALL)
    )


def recurrent_lstm_of_two_layers():
    yield from first(
        rollouts(
            Hybrid,
            policy(Hybrid, RecurrentPolicy, memory=6, cell="lstm", layers=2, past=True),
            **SMALL,
        )
    )


def lanes_not_joined():
    yield from first(remove(rollouts(Walk, policy(Walk), **SMALL), FragmentStacker), 5)


def seed_of_the_stepper():
    pipe = FragmentCollector(EnvStepper([Walk] * 2, policy(Walk), seed=3, explore=False), 9)
    yield from first(FragmentStacker(Lanes(pipe, n=2), n=2))


def seed_of_the_loader():
    pipe = FragmentCollector(EnvStepper(Push, policy(Push), n_envs=2), 9)
    yield from first(pipe, service=ProcessReading(num_workers=0), seed=5)


def ticks():
    names = (
        "state",
        "hx",
        "actor",
        "next",
        "next_hx",
        "term",
        "final",
        "env",
        "valid",
        "lane",
        "version",
    )
    last = named(EnvStepper, terminal_obs=True)
    for label, tick in first(
        EnvStepper(Push, policy(Push, RecurrentPolicy, memory=4), n_envs=3, seed=0, **last), 12
    ):
        fields = {RENAMED.get(name, name): x for name, x in tick._asdict().items()}
        yield label, {name: fields[name] for name in names}


def manual_loop():
    envs = [Push(), Push()]
    with startup(prepare(envs, policy(Push), 7, seed=0)) as ctx:
        for k in range(3):
            yield f"fragment {k}", collect(ctx)
            yield f"state {k}", ctx.state
    for k, fragment in zip(range(2), rollout(envs, policy(Push), 5, seed=1)):
        yield f"rollout {k}", fragment


def environments_alone():
    actor = policy(Push)
    with context(Push, n_envs=2, seed=0) as envs:
        for k in range(8):
            with torch.no_grad():
                act, _, _ = actor.step(*envs.seen, hx=None, virtual=True)
            yield f"step {k}", envs.step(act)._asdict()


def evaluations():
    yield "greedy", evaluate("CartPole-v1", policy("CartPole-v1"), 6, n_envs=4, seed=0)
    yield "exploring", evaluate(Hybrid, policy(Hybrid), 9, n_envs=2, seed=0, deterministic=False)
    yield "recurrent", evaluate(Walk, policy(Walk, RecurrentPolicy, memory=4), 6, seed=0)
    yield (
        "random",
        evaluate(
            lambda: gym.wrappers.TimeLimit(Walk(), 4),
            RandomActor.for_env(Walk(), seed=0),
            6,
            seed=0,
        ),
    )
