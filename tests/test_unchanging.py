"What an actor changes in itself while a lane collects is an error or a warning that names it, with and without worker processes."

import logging
import random
from collections import Counter
from itertools import islice, product

import gymnasium as gym
import numpy as np
import pytest
import torch
from toys import Counting, Plain

from rollpipe.layers import GaussianPolicy, MLPPolicy, RecurrentPolicy
from rollpipe.pipes import (
    ActorError,
    EnvStepper,
    FragmentCollector,
    FragmentStacker,
    Lanes,
    Pipe,
    ProcessReading,
    rollouts,
)
from rollpipe.pipes.graph.modules import bump_version
from rollpipe.pipes.graph.torchdata import DataLoader2
from rollpipe.testing import ContractError, check_actor

READINGS = [
    None,
    dict(num_workers=1),
    dict(num_workers=2, lag=1),
    dict(num_workers=1, start_method="forkserver"),
]
NAMES = ["here", "1 worker", "2 workers, lag", "forkserver"]


class Changing(Plain):
    "Something in it changes at each step, or at each virtual reaction."

    def __init__(self, change, virtual=False):
        super().__init__()
        self.change = change
        self.virtual = virtual
        self.weight = torch.nn.Parameter(torch.zeros(2))
        self.inner = torch.nn.Module()
        self.inner.register_buffer("count", torch.zeros(1))
        self.n = 0
        self.items = []
        self.seen = {"a": np.zeros(2)}
        self.rng = np.random.default_rng(0)
        self.other = torch.Generator()
        self.python = random.Random(0)
        self.space = gym.spaces.Discrete(3, seed=0)

    def forward(self, *args, virtual, **kwargs):
        if virtual == self.virtual:
            CHANGES[self.change](self)
        return super().forward(*args, virtual=virtual, **kwargs)


def new_buffer(actor):
    actor.inner.count = actor.inner.count + 1


def count(actor):
    actor.n += 1


CHANGES = {
    "buffer inner.count": lambda a: a.inner.count.add_(1),
    "buffer inner.count, new": new_buffer,
    "parameter weight": lambda a: a.weight.add_(1),
    "buffer inner.late": lambda a: a.inner.register_buffer("late", torch.zeros(1)),
    "attribute n": count,
    "attribute items": lambda a: a.items.append(1),
    "attribute seen": lambda a: a.seen["a"].__iadd__(1),
    "attribute rng": lambda a: a.rng.random(),
    "attribute other": lambda a: torch.rand(1, generator=a.other),
    "attribute python": lambda a: a.python.random(),
    "attribute space": lambda a: a.space.sample(),
}
TENSORS = [name for name in CHANGES if not name.startswith("attribute")]
ATTRIBUTES = [name for name in CHANGES if name.startswith("attribute")]


def collect(actor, reading=None, n=12, n_steps=3, lanes=2, wrap=lambda pipe: pipe):
    pipe = FragmentStacker(
        Lanes(wrap(FragmentCollector(EnvStepper(Counting, actor, 2), n_steps)), lanes, seed=0),
        lanes,
    )
    if reading is None:
        return list(islice(pipe, n))
    with DataLoader2(pipe, reading_service=ProcessReading(**reading)) as loader:
        return list(islice(loader, n))


@pytest.mark.slow_but_one
@pytest.mark.parametrize("reading", READINGS, ids=NAMES)
@pytest.mark.parametrize("change", TENSORS)
def test_a_tensor_that_changes_is_an_error(change, reading):
    with pytest.raises(ActorError) as e:
        collect(Changing(change), reading)
    assert f"leaf {change.split(',')[0]}: Changing changed" in str(e.value) and e.value.lane in (
        0,
        1,
    ), str(e.value)


@pytest.mark.parametrize("virtual, n_steps", [(False, 1), (True, 3)])
def test_the_error_comes_with_one_step_and_with_virtual_reactions(virtual, n_steps):
    with pytest.raises(ActorError, match="buffer inner.count"):
        collect(Changing("buffer inner.count", virtual), n=1, n_steps=n_steps)


@pytest.mark.slow_but_one
@pytest.mark.parametrize(
    "change, reading", [*product(ATTRIBUTES, READINGS[:3]), ("attribute n", READINGS[3])]
)
def test_an_attribute_that_changes_is_named_once_in_each_process(change, reading, caplog):
    with caplog.at_level(logging.WARNING, "rollpipe"):
        collect(Changing(change), reading)
    told = Counter(r.getMessage().split(" changed")[0].split(": ")[-1] for r in caplog.records)
    assert told == {f"{change} of Changing": reading["num_workers"] if reading else 1}, caplog.text


def test_learning_between_items_is_no_change(caplog):
    actor = Changing("nothing")
    actor.change, actor.virtual = "nothing", None  # which no step equals
    pipe = Lanes(FragmentCollector(EnvStepper(Counting, actor, 2), 3), 2, seed=0)
    with caplog.at_level(logging.WARNING, "rollpipe"):
        for _ in islice(pipe, 20):
            with torch.no_grad():
                actor.weight += 1
            new_buffer(actor)
            count(actor)
            bump_version(actor)
    assert not caplog.records


def test_a_pipe_that_changes_the_actor_is_found_too():
    class Exploring(Pipe):
        "Lowers a buffer of the actor from above the lanes."

        def __init__(self, pipe, actor):
            super().__init__(pipe)
            self.actor = actor

        def stream(self, items):
            for item in items:
                self.actor.inner.count -= 1
                yield item

    actor = Changing("nothing", virtual=None)
    with pytest.raises(ActorError, match="buffer inner.count: Changing changed"):
        collect(actor, wrap=lambda pipe: Exploring(pipe, actor))


@pytest.mark.parametrize("policy", [MLPPolicy, GaussianPolicy, RecurrentPolicy])
def test_ordinary_actors_are_left_alone(policy, caplog):
    actor = (
        policy.for_env("Pendulum-v1", normalize=True)
        if policy is MLPPolicy
        else policy.for_env("Pendulum-v1")
    )
    with caplog.at_level(logging.WARNING, "rollpipe"):
        assert (
            len(
                list(
                    islice(rollouts("Pendulum-v1", actor, n_envs=2, n_steps=8, lanes=2, seed=0), 10)
                )
            )
            == 10
        )
    assert not caplog.records


@pytest.mark.slow_but_one
@pytest.mark.parametrize("change", [name for name in CHANGES if "late" not in name])
@pytest.mark.parametrize("virtual", [False, True])
def test_the_contract_names_what_changes(change, virtual):
    with pytest.raises(
        ContractError, match=f"an actor does not change itself.*{change.split(',')[0]}"
    ):
        check_actor(Changing(change, virtual), Counting)


# --- other ways to change


class Doing(Plain):
    "Does something in each step, with what was prepared."

    def __init__(self, prepare, do):
        super().__init__()
        prepare(self)
        self.do = do

    def forward(self, obs, *args, **kwargs):
        self.do(self, obs)
        return super().forward(obs, *args, **kwargs)


def normed(actor):
    actor.norm = torch.nn.BatchNorm1d(4)


def counted(actor):
    actor.register_buffer("count", torch.zeros((), dtype=torch.bfloat16))


def add_behind_the_back_of_torch(actor, obs):
    actor.count.data += 1


@pytest.mark.parametrize("reading", READINGS[:2], ids=NAMES[:2])
@pytest.mark.parametrize(
    "prepare, do, text",
    [
        (
            normed,
            lambda actor, obs: actor.norm.train()(obs[0]),
            "buffer norm.num_batches_tracked: Doing changed",
        ),
        (counted, add_behind_the_back_of_torch, "buffer count: Doing changed"),
    ],
    ids=["training mode", "not counted"],
)
def test_changes_that_torch_does_not_tell(prepare, do, text, reading):
    with pytest.raises(ActorError, match=text):
        collect(Doing(prepare, do), reading)


def test_the_contract_finds_changes_that_torch_does_not_count():
    with pytest.raises(ContractError, match="an actor does not change itself.*buffer count"):
        check_actor(Doing(counted, add_behind_the_back_of_torch), Counting)


def test_the_contract_asks_in_evaluation_mode():
    actor = Doing(normed, lambda actor, obs: actor.norm(obs.flatten(0, -2)))
    assert check_actor(actor, Counting) == [] and actor.norm.training


@pytest.mark.slow
def test_an_attribute_that_changes_later_is_noticed(caplog):
    clock = {"now": 0}

    def late(actor, obs):
        clock["now"] += 1
        actor.late += clock["now"] > 300

    def actor():
        return Doing(lambda actor: setattr(actor, "late", 0.0), late)

    with caplog.at_level(logging.WARNING, "rollpipe"):
        collect(actor(), n=10)
        assert not caplog.records
        collect(actor(), n=150)
    assert "attribute late of Doing changed from" in caplog.text


def once(actor, obs):
    if actor.table is None:
        actor.table = torch.arange(5)


def test_what_is_computed_once_is_no_change(caplog):
    with caplog.at_level(logging.WARNING, "rollpipe"):
        for reading in READINGS[:2]:
            collect(Doing(lambda actor: setattr(actor, "table", None), once), reading)
    assert not caplog.records


def test_a_lazy_layer_may_get_its_weights_while_the_first_item_is_collected():
    def lazy(actor):
        actor.net = torch.nn.LazyLinear(3)

    assert len(collect(Doing(lazy, lambda actor, obs: actor.net(obs)), n=3)) == 3
