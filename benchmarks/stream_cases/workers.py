"Cases in two worker processes, for each way to start them."

from functools import partial

import numpy as np
import torch

from rollpipe.agents import PPO, ParallelEvaluation, VTrace
from rollpipe.layers import RecurrentPolicy
from rollpipe.pipes import (
    EnvStepper,
    EpisodeCollector,
    FragmentCollector,
    FragmentStacker,
    Lanes,
    ProcessReading,
    on_policy,
    remove,
    rollouts,
)
from rollpipe.pipes.graph.modules import bump_version

from .tools import first, named, trained
from .worlds import Broken, Hybrid, Images, Push, Walk, critic, glance, policy

SMALL = dict(n_envs=3, n_steps=8, seed=0)
IMAGES = dict(SMALL, n_steps=16)


def _service(method, lag):
    return ProcessReading(num_workers=2, lag=lag, start_method=method)


def change(actor):
    "Change the weights, as an update would."
    with torch.no_grad():
        for k, x in enumerate(actor.parameters()):
            x.add_(0.01 * (k + 1))
    bump_version(actor)


def changing(pipe, actor, service, n=5):
    "The first batches, after each of which the actor's weights change."
    for label, batch in first(pipe, n, service):
        yield label, batch
        change(actor)


def fault(method):
    "The first line of what is told of a fault in a worker; the others are its traceback."
    pipe = Lanes(
        FragmentCollector(
            EnvStepper([Push, partial(Broken, obs=np.full(3, np.nan))], policy(Push)), 4
        ),
        2,
        0,
    )
    try:
        list(first(pipe, 4, _service(method, 0)))
    except Exception as e:
        yield "fault", {"error": type(e).__name__, "message": str(e).splitlines()[0]}


def evaluations(method):
    "Two versions of an actor, evaluated in a process of its own."
    actor = policy(Walk)
    with ParallelEvaluation(Walk, actor, 6, seed=0, start_method=method) as evaluation:
        for k in range(2):
            evaluation.request()
            for version, found, _ in evaluation.wait():
                yield f"evaluation {k}", (version, found)
            change(actor)


def hybrid(method, lag):
    actor = policy(Hybrid)
    yield from changing(
        on_policy(Hybrid, actor, critic(Hybrid), lanes=4, **SMALL), actor, _service(method, lag)
    )


def images(method, lag):
    actor = policy(Images, encoder=glance)
    judge = critic(Images, encoder=glance)
    yield from changing(
        on_policy(Images, actor, judge, lanes=2, **IMAGES), actor, _service(method, lag)
    )


def images_not_joined(method, lag):
    actor = policy(Images, encoder=glance)
    pipe = remove(rollouts(Images, actor, lanes=3, **IMAGES), FragmentStacker)
    yield from changing(pipe, actor, _service(method, lag), 7)


def recurrent(method, lag):
    actor = policy(Walk, RecurrentPolicy, memory=6, past=True)
    yield from changing(
        rollouts(Walk, actor, lanes=3, sticky=True, **SMALL), actor, _service(method, lag)
    )


def seed_of_the_loader(method, lag):
    yield from first(
        rollouts(Walk, policy(Walk), n_envs=2, n_steps=8, lanes=2), 3, _service(method, lag), seed=5
    )


def episodes(method, lag):
    actor = policy(Walk)
    ticks = EnvStepper(Walk, actor, 3, **named(EnvStepper, terminal_obs=True))
    yield from changing(Lanes(EpisodeCollector(ticks, 3), 2, 0), actor, _service(method, lag))


def ppo(method, lag):
    actor = policy("CartPole-v1")
    judge = critic("CartPole-v1")
    pipe = on_policy("CartPole-v1", actor, judge, lanes=2, n_envs=4, n_steps=16, seed=0)
    yield from trained(PPO(actor, judge, epochs=2, minibatch=64), pipe, 4, _service(method, lag))


def vtrace(method, lag):
    actor = policy(Walk)
    judge = critic(Walk)
    yield from trained(
        VTrace(actor, judge), rollouts(Walk, actor, lanes=2, **SMALL), 5, _service(method, lag)
    )
