"Weights in shared memory: whole publications only, of whatever modules hold, and clear errors for what cannot be sent."

import copy
import logging
import multiprocessing
import time
from functools import partial
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from local_crew import CREWS, LocalReading
from toys import Counting, Learning, Plain
from worker_cases import stream

from rollpipe.pipes import ActorError, EnvStepper, FragmentCollector, Lanes
from rollpipe.pipes.envs.infos import InfoRecorder
from rollpipe.pipes.graph.modules import bump_version, modules_in, state_of, version_of
from rollpipe.pipes.graph.torchdata import DataLoader2
from rollpipe.pipes.workers.channel import WeightPublisher

fork = multiprocessing.get_context("fork")


def channel(*holders, copies=None, depth=2):
    "A channel and a subscriber that feeds copies of the holders."
    publisher = WeightPublisher(holders, depth)
    copies = [copy.deepcopy(h) for h in holders] if copies is None else copies
    subscriber = publisher.subscriber(range(len(holders)))
    subscriber.attach(copies)
    return publisher, subscriber, copies


def fill(holder, value):
    with torch.no_grad():
        for x in state_of(modules_in(holder)).values():
            x.fill_(value)


def same(a, b):
    a = state_of(modules_in(a))
    b = state_of(modules_in(b))
    assert list(a) == list(b)
    for x, y in zip(a.values(), b.values()):
        assert x.dtype == y.dtype and torch.equal(x, y)


# --- weights that change while they are published


def test_weights_that_another_thread_changes_meanwhile_are_not_published(monkeypatch):
    net = torch.nn.Linear(2, 2)
    publisher, subscriber, (copied,) = channel(net)
    publisher.publish()
    subscriber.fetch()
    before = copy.deepcopy(copied)
    calls = []

    def change():
        calls.append(1)
        if len(calls) == 2:
            fill(net, 3.0)  # as a thread might, when the last tensor has been copied

    monkeypatch.setattr("rollpipe.pipes.workers.channel._fence", change)
    fill(net, 2.0)
    with pytest.raises(
        ActorError, match="another thread changed the weights while they were published"
    ):
        publisher.publish()
    monkeypatch.undo()
    subscriber.fetch()
    same(copied, before)  # no worker gets a mixture
    publisher.publish()
    subscriber.fetch()
    same(copied, net)
    publisher.close()


# --- no torn reads


class Big(torch.nn.Module):
    "120 000 parameters in pieces, a count, and a mode."

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(100, 199) for _ in range(6)])
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.low = torch.nn.Parameter(torch.zeros(999, dtype=torch.bfloat16))


def read(subscriber, module, link, seconds):
    "Fetch the latest as fast as possible; tell how often there was something new, and what was torn."
    subscriber.attach([module])
    new = 0
    torn = []
    last = -1
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        number = subscriber.fetch()
        value = int(module.count)
        whole = all(bool((x == value % 128).all()) for x in module.parameters())
        if (
            not whole
            or version_of(module) != value
            or module.training != bool(value % 2)
            or number < last
            or value != number
        ):
            torn.append((number, value, version_of(module), whole))
        new = new + (number != last)
        last = number
    link.send((new, torn[:5]))


@pytest.mark.slow_but_one
@pytest.mark.parametrize("depth", [2, 4])
def test_hammer(depth):
    "One process publishes as fast as it can, two others read: what they see is always one publication, and ever newer."
    module = Big()
    assert sum(x.numel() for x in module.parameters()) > 100_000

    def publish(k):
        with torch.no_grad():
            for x in module.parameters():
                x.fill_(k % 128)  # exact in bfloat16
            module.count.fill_(k)
        module.train(bool(k % 2))
        bump_version(module, to=k)
        assert publisher.publish() == k

    fill(module, 0)
    publisher = WeightPublisher([module], depth)
    publish(0)
    subscribers = []
    for _ in range(2):
        ours, theirs = fork.Pipe()
        process = fork.Process(target=read, args=(publisher.subscriber([0]), module, theirs, 2.5))
        process.start()
        subscribers.append((process, ours))
    k = 0
    while any(process.is_alive() for process, _ in subscribers):
        k += 1
        publish(k)
    for process, ours in subscribers:
        assert ours.poll(20)
        new, torn = ours.recv()
        assert torn == [] and new > 20
        process.join()
    assert k > 100
    publisher.close()


def test_a_reader_waits_for_a_publication_to_be_whole():
    "While one is under way it goes on looking; it gets the next whole one."
    module = torch.nn.Linear(3, 3)
    publisher, subscriber, (mine,) = channel(module)
    for k in range(3):
        fill(module, k)
        publisher.publish()
    publisher.block.buffers[0].publication[0] = -1  # as the writer does at first
    link, theirs = fork.Pipe()

    def child():
        subscriber.fetch()
        theirs.send(mine.weight.unique().tolist())

    process = fork.Process(target=child)
    process.start()
    assert not link.poll(0.3)
    publisher.block.buffers[0].publication[0] = 2
    assert link.poll(20) and link.recv() == [2.0]
    process.join()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_what_is_no_longer_there(depth):
    "A subscriber that is late gets the latest, and does not wait for ever."
    module = torch.nn.Linear(2, 2)
    publisher, subscriber, (mine,) = channel(module, depth=depth)
    for k in range(5):
        fill(module, k)
        publisher.publish()
    for k in range(5):
        told = subscriber.fetch(k)
        assert told == (k if k > 4 - depth else 4) and (mine.weight == told).all()


# --- what is sent


def everything():
    "Buffers, a shared trunk, tied parameters, an integer, bfloat16, complex and bool, none, and none at all."

    class Holds(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(4)
            self.a = torch.nn.Linear(4, 4)
            self.b = torch.nn.Linear(4, 4)
            self.b.weight = self.a.weight
            self.again = self.a
            self.low = torch.nn.Parameter(torch.randn(5).bfloat16())
            self.phase = torch.nn.Parameter(torch.randn(2, dtype=torch.complex64))
            self.empty = torch.nn.Parameter(torch.zeros(0, 3))
            self.scalar = torch.nn.Parameter(torch.tensor(2.0))
            self.whole = torch.nn.Parameter(torch.arange(3), requires_grad=False)
            self.register_buffer("mask", torch.tensor([True, False]))
            self.register_buffer("fleeting", torch.ones(3, dtype=torch.float64), persistent=False)
            self.register_buffer("nothing", None)
            self.turned = torch.nn.Parameter(torch.randn(3, 4).T)
            self.drop = torch.nn.Dropout(0.5)

    return Holds()


def test_of_everything():
    module = everything()
    publisher, subscriber, (mine,) = channel(module)
    assert len(publisher._published[0].form.specs) == 16  # tied ones once
    for k in range(4):
        fill(module, k)
        with torch.no_grad():
            module.turned.copy_(torch.arange(12.0).view(4, 3) + k)
        module.drop.train(k % 2 == 0)
        module.norm.train(k > 1)
        bump_version(module)
        assert publisher.publish() == k and subscriber.fetch(k) == k
        same(mine, module)
        assert [m.training for m in mine.modules()] == [m.training for m in module.modules()]
        assert version_of(mine) == version_of(module) == k + 1
        assert mine.a.weight is mine.b.weight and mine.turned.stride() == module.turned.stride()
    assert publisher.publish() == 3  # nothing has changed
    module.mask[0] = ~module.mask[0]  # a buffer has
    assert publisher.publish() == 4 and subscriber.fetch() == 4
    same(mine, module)


@settings(deadline=None, max_examples=20)
@given(
    shapes=st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=5),
    depth=st.integers(1, 4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool]),
)
def test_of_any_shape(shapes, depth, dtype):
    module = torch.nn.Module()
    for k, shape in enumerate(shapes):
        module.register_buffer(f"x{k}", (torch.rand(shape) * 100).to(dtype))
    publisher, subscriber, (mine,) = channel(module, depth=depth)
    for _ in range(3):
        for x in module.buffers():
            x.copy_((torch.rand(x.shape) * 100).to(dtype))
        assert subscriber.fetch(publisher.publish()) == publisher.publication
        same(mine, module)
    publisher.close()


def test_a_shared_trunk():
    "Of two holders, whose copies may share it, too, or not."
    trunk = torch.nn.Linear(2, 2)
    actor, critic = (torch.nn.Sequential(trunk, torch.nn.Linear(2, k)) for k in (3, 1))
    both = copy.deepcopy((actor, critic))
    for copies in (list(both), [copy.deepcopy(actor), copy.deepcopy(critic)]):
        publisher, subscriber, copies = channel(actor, critic, copies=copies)
        fill(actor, 3), fill(critic, 4)
        subscriber.fetch(publisher.publish())
        for mine, original in zip(copies, (actor, critic)):
            same(mine, original)
        assert (copies[0][0].weight == 4).all()


def test_one_holder_in_several_places():
    "As an actor is, in all lanes of a worker."
    module = torch.nn.Linear(1, 1)
    publisher = WeightPublisher([module, torch.nn.Linear(2, 2)])
    subscriber = publisher.subscriber([0, 1, 0])
    mine = copy.deepcopy(module)
    subscriber.attach([mine, copy.deepcopy(publisher.holders[1]), mine])
    fill(module, 7)
    subscriber.fetch(publisher.publish())
    same(mine, module)


class Judge:
    __slots__ = ("parts",)

    def __init__(self, net):
        self.parts = {"nets": [net]}

    def step(self):
        pass

    def judge(self, obs):
        return self.parts["nets"][0](obs)


NET = torch.nn.Linear(2, 1)
JUDGE = Judge(NET)


def uses_a_global(obs):
    return NET(obs)


def by_default(x, net=NET):
    return net(x)


def by_keyword(x, *, net=NET):
    return net(x)


def in_comprehension(xs):
    return [NET(x) for x in xs]


def of_an_object(x):
    return JUDGE.parts["nets"][0](x)


def in_inner_function(x):
    def inner():
        return NET(x)

    return inner()


def closure(net):
    return lambda obs: net(obs)[..., 0]


def of_itself(net):
    def loop(n):
        return loop(n - 1) if n else net

    return loop


CYCLE = {"f": of_itself(NET)}
CYCLE["c"] = CYCLE
HOLDERS = {
    "a global": uses_a_global,
    "a default": by_default,
    "a default of a keyword": by_keyword,
    "in a comprehension": in_comprehension,
    "of a global object": of_an_object,
    "in an inner function": in_inner_function,
    "a closure": closure(NET),
    "a function that refers to itself": CYCLE["f"],
    "a dict that holds itself": CYCLE,
    "a set in a dict": {"a": {NET}},
    "an argument of a partial": partial(lambda f, obs: f(obs), NET),
    "the function of a partial": partial(closure(NET)),
    "a partial of a partial": partial(partial(lambda x, obs, f: 0, f=closure(NET)), 1),
    "a method": JUDGE.judge,
    "an object": JUDGE,
}


@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
def test_networks_are_found_wherever_they_are_used(holder):
    assert modules_in(holder) == [NET]
    publisher = WeightPublisher([holder])
    assert (publisher.publish(), publisher.publish()) == (0, 0)
    with torch.no_grad():
        NET.weight.add_(1)
    assert publisher.publish() == 1
    publisher.close()


@pytest.mark.parametrize("holder", [lambda obs: 2 * obs, torch.relu, print])
def test_nothing_is_found_where_no_network_is(holder):
    assert modules_in(holder) == []


def test_modules_in_shared_memory():
    "The user's may be; a worker's copy is its own all the same."
    module = torch.nn.Linear(3, 3).share_memory()
    publisher = WeightPublisher([module])
    publisher.publish()
    subscriber = publisher.subscriber([0])
    (ours, theirs) = fork.Pipe()

    def child():
        subscriber.attach([module])
        subscriber.fetch()
        with torch.no_grad():
            module.weight.fill_(99)
        theirs.send((module.weight.is_shared(), float(module.weight.detach().sum())))

    process = fork.Process(target=child)
    process.start()
    assert (
        ours.poll(20)
        and ours.recv() == (False, 9 * 99.0)
        and float(module.weight.detach().max()) < 99
    )
    process.join()


def test_gradients_are_no_hindrance():
    module = torch.nn.Linear(2, 2)
    publisher, subscriber, (mine,) = channel(module)
    module(torch.ones(2)).sum().backward()
    publisher.publish(), subscriber.fetch()
    assert mine.weight.requires_grad and mine.weight.grad is None and not mine.weight.is_shared()


# --- what cannot be sent


def test_changed_shapes_and_names():
    module = torch.nn.Sequential(torch.nn.Linear(2, 2))
    publisher, *_ = channel(module)
    told = r"Sequential changed the form of its weights. Expected Sequential.0.bias float32 \[2\], .*, got Sequential.0.bias float"
    for spoil in (
        lambda: module.append(torch.nn.Linear(2, 2)),
        lambda: module.pop(1) and module.double(),
        lambda: module.pop(0) and module.append(torch.nn.Linear(2, 3)),
    ):
        spoil()
        with pytest.raises(ActorError, match=told):
            publisher.publish()


def test_lazy_sparse_and_meta():
    for module, told in (
        (torch.nn.LazyLinear(3), "UninitializedParameter"),
        (torch.nn.Linear(2, 2, device="meta"), "on meta"),
    ):
        with pytest.raises(
            ActorError,
            match=rf"leaf {type(module).__name__}.weight: weights of this kind cannot be sent.*{told}",
        ):
            WeightPublisher([module])
    module = torch.nn.Module()
    module.register_buffer("graph", torch.eye(2).to_sparse())
    with pytest.raises(ActorError, match="leaf Module.graph.*sparse"):
        WeightPublisher([module])


def test_a_module_without_weights_may_be_counted():
    actor = Plain()
    with DataLoader2(
        Lanes(FragmentCollector(EnvStepper(Counting, actor), 2), 2),
        reading_service=LocalReading(1),
    ) as loader:
        for k, f in enumerate(islice(loader, 4)):
            assert f.version.tolist() == [k]
            bump_version(actor)


# --- through worker processes


class Thorough(Plain):
    "Reports the sum of each of its tensors, and its modes."

    def __init__(self):
        super().__init__()
        self.holds = everything()

    def complete(self, act, info):
        sums = {
            name.rpartition(".")[2] + name.rpartition(".")[0]: x.to(torch.complex128).sum().real
            for name, x in state_of(modules_in(self)).items()
        }
        modes = torch.tensor([float(m.training) for m in self.modules()]).sum()
        return info | {
            k: v.detach().float().expand(*act.shape) for k, v in {**sums, "modes": modes}.items()
        }


@pytest.mark.parametrize("Reading", CREWS.values(), ids=CREWS)
@pytest.mark.parametrize("lag", [0, 1])
def test_workers_have_what_the_learner_has(lag, Reading):
    actor = Thorough()
    history = []
    pipe = Lanes(FragmentCollector(EnvStepper(Counting, actor), 2), 2)
    with DataLoader2(pipe, reading_service=Reading(2, lag=lag)) as loader:
        for k, f in enumerate(islice(loader, 8)):
            history.append(
                {k: float(x[0, 0]) for k, x in actor.complete(torch.zeros(1, 1), {}).items()}
            )
            expected = history[max(0, k - lag)] | {
                "modes": 0.0
            }  # who collects is in evaluation mode
            assert {key: float(f.actor[key][0, 0]) for key in expected} == expected
            fill(actor, k + 1)
            actor.holds.drop.train(k % 2 == 0)
            bump_version(actor)


def test_two_pipes_hold_one_module():
    "A pipe above the seam, and the actor, that share weights; trained here, both see it."

    class Told(Learning):
        pass

    actor = Told(0.0)

    def note(fragment):
        return fragment._replace(ret=actor.weight.detach().expand(2, 1).clone())

    pipe = Lanes(Noted(FragmentCollector(EnvStepper(Counting, actor), 2), note), 2)
    with DataLoader2(pipe, reading_service=LocalReading(2)) as loader:
        for k, f in enumerate(islice(loader, 5)):
            assert (f.ret == k).all() and (f.actor["weight"][:-1] == k).all()
            with torch.no_grad():
                actor.weight += 1


class Noted(FragmentCollector):
    "A pipe of the user's, with a function of the user's."

    def __init__(self, pipe, note):
        self.pipe, self.note = pipe, note

    def stream(self, items):
        for item in items:
            yield self.note(item)


# --- what is no parameter and no buffer


class Plan:
    def __init__(self):
        self.rate = 1.0


KINDS = dict(
    number=lambda x: x + 1,
    scalar=lambda x: x + np.float64(1),
    text=lambda x: x + "!",
    _private=lambda x: x + 1,
    tensor=lambda x: x.add_(1),
    array=lambda x: x.__iadd__(1),
    list=lambda x: x.append(1),
    dict=lambda x: x.update(a=2),
    nested=lambda x: x["a"][0].append(3),
    object=lambda x: setattr(x, "rate", 2.0),
)


class Keeper(Plain):
    "Keeps something of each kind."

    def __init__(self):
        super().__init__()
        self.number = 1
        self.scalar = np.float64(1)
        self.text = "text"
        self.tensor = torch.ones(2)
        self.array = np.ones(2)
        self.list = [1]
        self.dict = {"a": 1}
        self.nested = {"a": ([1],)}
        self.object = Plan()
        self._private = 1


@pytest.mark.parametrize("kind", KINDS)
def test_what_does_not_travel_is_named_once_when_it_changes(kind, caplog):
    actor = Keeper()
    publisher = WeightPublisher([actor])
    with caplog.at_level(logging.WARNING, "rollpipe"):
        publisher.publish()
        assert not caplog.records
        for _ in range(3):
            new = KINDS[kind](getattr(actor, kind))
            if kind in ("number", "scalar", "text", "_private"):
                setattr(actor, kind, new)
            publisher.publish()
    publisher.close()
    assert [r.getMessage().split(" changed")[0] for r in caplog.records] == [
        f"attribute {kind} of Keeper"
    ]
    assert "only parameters and buffers are sent" in caplog.text


def test_a_plain_actor_that_holds_a_network_is_looked_at_too(caplog):
    class Player:
        def __init__(self):
            self.net = torch.nn.Linear(2, 2)
            self.rate = np.float64(1)

    player = Player()
    publisher = WeightPublisher([player])
    publisher.publish()
    player.rate += 1
    with caplog.at_level(logging.WARNING, "rollpipe"):
        publisher.publish()
    publisher.close()
    assert "attribute rate of Player changed from" in caplog.text


@pytest.mark.parametrize("world", ["gaussian", "recurrent", "nested", "vector"])
def test_ordinary_actors_give_no_warning(world, caplog, monkeypatch):
    # A stream of this seed may have been made here before, and its warning is logged once a process:
    # in a worker, which inherits what was logged here, and in the parent of workers.
    monkeypatch.setattr(InfoRecorder, "logged", set())
    monkeypatch.setattr("rollpipe.pipes.workers.channel._LOGGED", set())
    with caplog.at_level(logging.WARNING, "rollpipe"):
        stream(world, LocalReading(1))
    # One world has infos that are no numbers, which is said once.
    about_infos = [text for text in caplog.messages if text.startswith("Infos that are not")]
    assert len(about_infos) == (world == "nested") and caplog.messages == about_infos
