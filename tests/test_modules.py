"Handles: references that survive pickling, copies elsewhere, and the count of updates."

import copy
import gc
import os
import pickle
import weakref
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pytest
import torch
from forked import run_forked
from toys import Counting, Plain

from rollpipe.agents import losses
from rollpipe.layers import Actor, CategoricalPolicy
from rollpipe.pipes import (
    ActorError,
    AdvantageBuffer,
    EnvStepper,
    FragmentCollector,
    Lanes,
    ProcessReading,
    find_one,
    on_policy,
)
from rollpipe.pipes.graph.modules import EvalMode, Handle, bump_version, version_of
from rollpipe.pipes.graph.torchdata import DataLoader2

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "copied",
    [
        lambda x: pickle.loads(pickle.dumps(x)),
        copy.copy,
        copy.deepcopy,
        lambda x: pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(x)))),
    ],
)
def test_a_copy_in_this_process_is_a_reference(copied):
    module = torch.nn.Linear(2, 2)
    handle = copied(Handle(module))
    assert isinstance(handle, Handle) and handle.module is module


def test_it_is_a_reference_also_after_training():
    module = torch.nn.Linear(2, 2)
    text = pickle.dumps(Handle(module))
    with torch.no_grad():
        module.weight.fill_(5)
    assert pickle.loads(text).module is module


def test_modules_are_told_apart():
    a = torch.nn.Linear(2, 2)
    b = torch.nn.Linear(2, 2)
    x, y, z = pickle.loads(pickle.dumps([Handle(a), Handle(b), Handle(a)]))
    assert x.module is z.module is a and y.module is b


def test_a_handle_or_its_pickle_does_not_keep_a_module_for_ever():
    module = torch.nn.Linear(2, 2)
    there = weakref.ref(module)
    handle = Handle(module)
    text = pickle.dumps(handle)
    del module
    gc.collect()
    assert there() is handle.module  # a handle holds its module
    weight = handle.module.weight.detach().clone()
    del handle
    gc.collect()
    assert there() is None  # a pickle does not, but can make a copy
    a = pickle.loads(text)
    b = pickle.loads(text)
    assert torch.equal(a.module.weight, weight) and a.module is b.module


def run(code, *args):
    path = os.pathsep.join(
        [str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    done = run_forked(
        ["-c", code, *args], {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_another_process_gets_one_copy_of_each_module(tmp_path):
    "As it was when pickled, of classes that exist here only."

    class Local(torch.nn.Module):
        def __init__(self, k):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor(float(k)))

        def forward(self, x):
            return x * self.weight

    a = Local(2)
    b = Local(3)
    file = tmp_path / "handles"
    file.write_bytes(pickle.dumps([Handle(a), Handle(b), Handle(a)]))
    again = tmp_path / "again"
    again.write_bytes(pickle.dumps(Handle(a)))
    assert run(
        """
import pickle, sys
x, y, z = (h.module for h in pickle.load(open(sys.argv[1], 'rb')))
w = pickle.load(open(sys.argv[2], 'rb')).module
print(x is z, x is w, x is y, float(x(1.)), float(y(1.)), x.weight.requires_grad)
""",
        file,
        again,
    ).split() == ["True", "True", "False", "2.0", "3.0", "True"]


def test_what_cannot_be_pickled_is_a_reference_here_and_an_error_elsewhere(tmp_path):
    module = Plain()
    module.stream = (x for x in "generators do not pickle")
    handle = Handle(module)
    assert pickle.loads(pickle.dumps(handle)).module is module
    pipe = FragmentCollector(EnvStepper(Counting, module), 2)
    with DataLoader2(pipe) as loader:
        next(iter(loader))
    file = tmp_path / "handle"
    file.write_bytes(pickle.dumps(handle))
    text = run(
        """
import pickle, sys
from rollpipe.pipes import ActorError
try: pickle.load(open(sys.argv[1], 'rb'))
except ActorError as e: print(e)
""",
        file,
    )
    assert "Plain cannot be pickled" in text and "generator" in text
    assert issubclass(ActorError, RuntimeError)


def test_versions():
    a = torch.nn.Linear(1, 1)
    b = torch.nn.Linear(1, 1)
    assert version_of(a) == version_of(b) == 0
    bump_version(a)
    bump_version(a)
    assert (version_of(a), version_of(b)) == (2, 0)
    bump_version(b, to=7)
    bump_version(b)
    assert (version_of(a), version_of(b)) == (2, 8)
    assert version_of(pickle.loads(pickle.dumps(Handle(a))).module) == 2


@dataclass
class Recipe:
    "An actor that is compared by value, and so has no hash."

    answer: int

    def step(self, stepno, obs, act, rew, fin, /, *, hx, virtual):
        return torch.full(fin.shape, self.answer), (), {}

    def reset(self, hx, at):
        return hx


def test_an_actor_is_anything_with_step_and_reset():
    "Also if it has no hash, since it is held by identity."
    actor = Recipe(3)
    with DataLoader2(FragmentCollector(EnvStepper(Counting, actor), 2)) as loader:
        f = next(iter(loader))
        assert (f.state.act[1:] == 3).all() and f.version.tolist() == [0]


class Alike(torch.nn.Module):
    "Modules that claim to be equal."

    def __eq__(self, other):
        return isinstance(other, Alike)

    def __hash__(self):
        return 1


def test_equal_modules_are_not_the_same_module():
    a = Alike()
    b = Alike()
    bump_version(a)
    assert (version_of(a), version_of(b)) == (1, 0)
    x, y = pickle.loads(pickle.dumps([Handle(a), Handle(b)]))
    assert x.module is a and y.module is b


def test_pipes_hold_handles_not_modules():
    "An edited graph and the lanes refer to the user's own actor and critic."
    actor = Plain()
    critic = torch.nn.Linear(4, 1)
    pipe = AdvantageBuffer(Lanes(FragmentCollector(EnvStepper(Counting, actor), 2), 2, 0), critic)
    again = pickle.loads(pickle.dumps(pipe))
    assert (
        find_one(again, EnvStepper).actor is actor
        and find_one(again, AdvantageBuffer).critic is critic
    )
    assert all(
        find_one(find_one(pipe, Lanes).copy(k, 0), EnvStepper).actor is actor for k in range(2)
    )


# --- loops written by hand, which call `optim.step()` and count nothing


def by_hand(service, n, count=lambda actor: None):
    "Versions of the fragments, and the lag that the loss reports, of a few updates."
    actor = CategoricalPolicy.for_env("CartPole-v1", hidden=(8,), seed=0)
    optimizer = torch.optim.SGD(actor.parameters(), lr=0.1)
    pipe = on_policy("CartPole-v1", actor, lambda obs: obs.sum(-1), n_envs=2, n_steps=4, seed=0)
    versions = []
    lags = []
    with DataLoader2(pipe, reading_service=service) as loader:
        for batch in islice(loader, n):
            loss, metrics = losses.reinforce(batch, actor)
            versions.append(int(batch.version[0]))
            lags.append(metrics["lag"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            count(actor)
    return versions, lags


@pytest.mark.parametrize(
    "count", [lambda actor: None, bump_version], ids=["nobody counts", "counted"]
)
def test_every_change_is_one_version(count):
    assert by_hand(None, 4, count) == ([0, 1, 2, 3], [0] * 4)
    assert by_hand(ProcessReading(1), 4, count) == ([0, 1, 2, 3], [0] * 4)
    assert by_hand(ProcessReading(1, lag=1), 5, count) == ([0, 0, 1, 2, 3], [0, 1, 1, 1, 1])


# --- who collects is in evaluation mode


class Normalised(Actor):
    "Has a normaliser that moves its statistics in training mode, and refuses a single row there."

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)

    def forward(self, obs, act, rew, fin, *, hx, stepno, virtual):
        act = (self.norm(obs.flatten(0, 1)).sum(-1) > 0).long().unflatten(0, fin.shape)
        return act, (), dict(training=torch.full(fin.shape, self.training))


@pytest.mark.parametrize("service", [None, lambda: ProcessReading(1)], ids=["here", "worker"])
def test_actors_collect_in_evaluation_mode(service):
    actor = Normalised()
    before = copy.deepcopy(actor.state_dict())
    pipe = Lanes(FragmentCollector(EnvStepper(Counting, actor, 1), 6), 1, 0)
    with DataLoader2(pipe, reading_service=service and service()) as loader:
        fragments = list(islice(loader, 2))
    assert (
        not any(f.actor["training"].any() for f in fragments)
        and actor.training
        and actor.norm.training
    )
    assert all(torch.equal(x, before[name]) for name, x in actor.state_dict().items())


def test_a_module_of_torchscript_collects_in_evaluation_mode_too():
    net = torch.jit.script(
        torch.nn.Sequential(
            torch.nn.Linear(2, 2),
            torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Dropout().eval()),
        )
    )
    modes = [part.training for part in net.modules()]
    x = torch.ones(1, 2)
    wanted = copy.deepcopy(net).eval()(x)
    with EvalMode([net]):
        assert not any(part.training for part in net.modules())
        assert torch.equal(net(x), wanted)
    assert [part.training for part in net.modules()] == modes


def test_the_mode_comes_back_after_an_error():
    class Broken(Normalised):
        def forward(self, *args, **kwargs):
            raise ValueError("broken")

    actor = Broken()
    with pytest.raises(ActorError, match="broken"):
        next(iter(EnvStepper(Counting, actor)))
    assert actor.training and actor.norm.training
