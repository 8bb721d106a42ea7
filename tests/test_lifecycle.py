"Copies of a graph use the networks of the user; environments are closed when one of them, or the actor, fails."

from itertools import islice

import gymnasium as gym
import pytest
import torch
from toys import Counting, Learning, Ledger, Lively, Shaky

from rollpipe.layers import MLPPolicy
from rollpipe.pipes import (
    EnvError,
    EnvStepper,
    FragmentCollector,
    Lanes,
    on_policy,
)
from rollpipe.pipes.data.errors import PipeError
from rollpipe.pipes.graph.modules import bump_version
from rollpipe.pipes.graph.torchdata import DataLoader2, InProcessReadingService

pytestmark = pytest.mark.usefixtures("nothing_stays_open")


def test_training_the_users_actor_changes_what_the_copy_of_a_loader_collects():
    actor = Learning(0.0)
    pipe = on_policy(Counting, actor, lambda obs: obs[..., 2], n_envs=2, n_steps=3, lanes=2, seed=0)
    with DataLoader2(pipe, reading_service=InProcessReadingService()) as loader:
        for k, f in enumerate(islice(loader, 4)):
            assert (
                (f.actor["weight"] == k).all()
                and (f.state.act[1:] == k).all()
                and (f.version == k).all()
            )
            with torch.no_grad():
                actor.weight.fill_(k + 1.0)
            bump_version(actor)


@pytest.mark.parametrize("fault", [ZeroDivisionError, KeyboardInterrupt, SystemExit, StopIteration])
@pytest.mark.parametrize("call", ["factory", "first reset", "step", "later reset"])
def test_a_failing_environment_closes_all(call, fault):
    "Whatever is raised, wherever; interrupts keep their type."

    class Fails(Counting):
        def __init__(self):
            if call == "factory" and len(Ledger.made) == 1:
                raise fault("x")
            super().__init__([(2, "term")])
            self.calls = 0

        def reset(self, **kwargs):
            out = super().reset(**kwargs)
            if Ledger.made[-1] is self and call == {0: "first reset", 1: "later reset"}.get(
                self.episode
            ):
                raise fault("x")
            return out

        def step(self, action):
            if Ledger.made[-1] is self and call == "step":
                raise fault("x")
            return super().step(action)

    expected = EnvError if issubclass(fault, Exception) else fault
    pipe = on_policy(
        lambda: Fails(), Learning(), lambda obs: obs[..., 0], n_envs=2, n_steps=9, lanes=1, seed=0
    )
    with pytest.raises(expected) as kept:
        for _ in pipe:
            pass
    assert kept.tb and len(Ledger.made) == (1 if call == "factory" else 2) and Ledger.open() == 0


def test_a_failing_actor_closes_all():
    class Fails(Shaky):
        def forward(self, obs, act, rew, fin, *, hx, stepno, virtual):
            if stepno[0, 0] > 1:
                raise ValueError("lost")
            return super().forward(obs, act, rew, fin, hx=hx, stepno=stepno, virtual=virtual)

    with pytest.raises(RuntimeError, match="lost") as kept:
        for _ in Lanes(FragmentCollector(EnvStepper(Lively, Fails(), 2), 50), 2, 0):
            pass
    assert kept.tb and Ledger.made and Ledger.open() == 0


@pytest.mark.parametrize(
    "source, n_envs",
    [(lambda: Counting(), 2), (lambda: gym.vector.SyncVectorEnv([Counting, Counting]), None)],
)
@pytest.mark.parametrize(
    "actor, info_keys", [(MLPPolicy.for_env("Pendulum-v1", seed=0), None), (Learning(), [["a"]])]
)
def test_what_cannot_begin_closes_the_environments_that_are_made(source, n_envs, actor, info_keys):
    "An actor for other spaces, and a name of an info that is a list."
    with pytest.raises((PipeError, TypeError)) as kept:
        next(iter(EnvStepper(source, actor, n_envs, info_keys=info_keys)))
    assert kept.tb and len(Ledger.made) == 2 and Ledger.open() == 0
