"The messages of typical faults."

from functools import partial

import numpy as np

from rollpipe.agents import DQN, PPO, TRPO
from rollpipe.layers import QPolicy, RecurrentPolicy
from rollpipe.pipes import (
    EnvStepper,
    EpisodeCollector,
    FragmentCollector,
    FragmentStacker,
    FrameStack,
    Lanes,
    Minibatcher,
    NStep,
    ProcessReading,
    Replay,
    on_policy,
    remove,
    replayed,
    rollouts,
)
from rollpipe.pipes.steps import Steps

from .tools import first
from .worlds import Broken, Dice, Push, Walk, policy


def _said(make):
    "The message of the error that `make()`, or the stream that it returns, raises."
    try:
        list(first(make(), 6))
    except Exception as e:
        return {"error": type(e).__name__, "message": str(e)}
    return {"error": None, "message": None}


def _broken(**wrong):
    return Lanes(FragmentCollector(EnvStepper(partial(Broken, **wrong), policy(Push), 2), 4), 2, 0)


def environments():
    yield "nan", _said(lambda: _broken(obs=np.array([0, np.nan, 0], np.float32)))
    yield "shape", _said(lambda: _broken(obs=np.zeros(4, np.float32)))
    yield "dtype", _said(lambda: _broken(obs=np.array(["a", "b", "c"])))
    yield "structure", _said(lambda: _broken(obs={"x": np.zeros(3)}))
    yield "reward", _said(lambda: _broken(reward=np.zeros(2)))
    yield "infinite reward", _said(lambda: _broken(reward=float("inf")))
    yield "exception", _said(lambda: _broken(error="an accident"))
    yield "unknown id", _said(lambda: rollouts("NoSuchEnv-v0", Dice()))


def actors():
    yield "other actions", _said(lambda: rollouts(Walk, Dice(), seed=0))
    yield "other observations", _said(lambda: rollouts(Push, policy("CartPole-v1"), seed=0))
    yield "no actor", _said(lambda: rollouts(Push, None))
    yield "no values", _said(lambda: on_policy(Push, policy(Push), seed=0))


def options():
    def steps():
        return EnvStepper(Push, policy(Push), 2, seed=0)

    yield "lanes", _said(lambda: Lanes(FragmentCollector(steps(), 4), 0))
    yield "two seeds", _said(lambda: Lanes(FragmentCollector(steps(), 4), 2, seed=0))
    yield "length", _said(lambda: FragmentCollector(steps(), 0))
    yield "stacker", _said(lambda: FragmentStacker(FragmentCollector(steps(), 4), 0))
    yield "minibatcher", _said(lambda: Minibatcher(FragmentCollector(steps(), 4), 0))
    yield "gamma", _said(lambda: NStep(FragmentCollector(steps(), 4), 2, gamma=2))
    yield "workers", _said(lambda: ProcessReading(num_workers=-1))
    yield "replay", _said(lambda: Replay(FragmentCollector(steps(), 4), capacity=10, warmup=20))
    yield "agent", _said(lambda: PPO(policy(Push), epochs=0))


def misuse():
    def steps():
        return EnvStepper(Push, policy(Push), 2, seed=0)

    yield "ticks to minibatches", _said(lambda: Minibatcher(steps(), 4))
    yield (
        "fragments to fragments",
        _said(lambda: FragmentCollector(FragmentCollector(steps(), 4), 4)),
    )
    yield "episodes without terminal_obs", _said(lambda: EpisodeCollector(steps()))
    yield "no images", _said(lambda: FrameStack(FragmentCollector(steps(), 4)))
    yield (
        "steps of minibatches",
        _said(lambda: Steps(Minibatcher(FragmentCollector(steps(), 4), 3, seed=0))),
    )
    yield "nothing to remove", _said(lambda: remove(steps(), Lanes))
    short = dict(n_steps=4, length=2, capacity=50, warmup=8, seed=0)
    yield (
        "segments with memory",
        _said(lambda: replayed(Push, policy(Push, RecurrentPolicy, memory=4), **short)),
    )


def updates():
    fragment = dict(first(FragmentCollector(EnvStepper(Walk, policy(Walk), 2, seed=0), 4), 1))[
        "batch 0"
    ]
    broken = fragment._replace(adv=fragment.state.rew[1:] * np.nan, ret=fragment.state.rew[1:])
    yield "no advantages", _said(lambda: PPO(policy(Walk)).update(fragment))
    yield "nan advantages", _said(lambda: TRPO(policy(Walk)).update(broken))
    yield (
        "no valid row",
        _said(lambda: TRPO(policy(Walk)).update(broken._replace(valid=fragment.valid & False))),
    )
    yield "no values", _said(lambda: DQN(policy(Walk)))
    yield "short samples", _said(lambda: DQN(policy(Walk, QPolicy), multi_step=9).update(fragment))
