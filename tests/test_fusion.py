"""A collector that lets its source write into the fragment yields what it makes of ticks, bit for bit, and fails as with ticks."""

import importlib.util
import logging
import re
from collections.abc import Callable
from functools import partial
from itertools import islice, product
from typing import NamedTuple

import numpy as np
import pytest
import torch
from fault_cases import Fault, pipeline
from fault_rows import HARMS, ROWS
from gymnasium.spaces import Box, Dict, Discrete
from gymnasium.vector import AutoresetMode
from hypothesis import given, settings
from hypothesis import strategies as st
from random_fragments import episodes
from reference import assert_same, snapshot
from test_vector import PLANS, Vectorised
from toys import WORLDS, Acts, Counting, Lively, Memory, Nested, Plain, Scripted, Shaky, factories

from rollpipe.layers import Actor, MLPPolicy, RecurrentPolicy
from rollpipe.pipes import (
    EnvStepper,
    FragmentCollector,
    Lanes,
    Pipe,
    find_one,
    insert_after,
    insert_before,
    on_policy,
    remove,
    replace,
    replayed,
    rollouts,
)
from rollpipe.pipes.data.errors import DataError
from rollpipe.pipes.data.nested import leaves
from rollpipe.pipes.envs.infos import SingleInfos
from rollpipe.pipes.envs.single import EnvBatch
from rollpipe.pipes.fragments import Destination, FragmentBuilder
from rollpipe.pipes.graph.modules import bump_version

fast = settings(deadline=None, max_examples=25)


class Passing(Pipe):
    "Ticks pass through it, so a collector cannot let their source write into the fragment."

    reads, keeps_items = 1, False

    def stream(self, items):
        yield from items


def ticked(pipe):
    return insert_after(pipe, EnvStepper, Passing)


def n_ticks(pipe, n=3):
    "Number of ticks that the collector reads for its first `n` fragments."
    collector = find_one(pipe, FragmentCollector)
    with pytest.MonkeyPatch.context() as patch:
        read = []
        add = FragmentBuilder.add
        patch.setattr(
            FragmentBuilder, "add", lambda self, tick: read.append(tick) or add(self, tick)
        )
        for _ in islice(collector, n):
            pass
    return len(read)


def first(pipe, n=4):
    return [snapshot(x) for x in islice(pipe, n)]


def outcome(pipe, n=4, learns=False):
    "The first items of a pipe, what the log says meanwhile, and the error that ends it."
    SingleInfos.logged.clear()  # so that each stream says again what it leaves out
    items = []
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("rollpipe").addHandler(handler)
    error = ()
    try:
        for k, item in enumerate(islice(pipe, n)):
            items.append(snapshot(item))
            if learns:
                learn(find_one(pipe, EnvStepper).actor, item, k)
    except BaseException as e:
        error = type(e).__name__, str(e), repr(e.__cause__), repr(e.__context__)
    finally:
        logging.getLogger("rollpipe").removeHandler(handler)
    return items, messages, error


def learn(actor, item, k):
    "Other weights, often another version, and another normaliser."
    with torch.no_grad():
        for p in actor.parameters():
            p += 0.01 * k
    if k % 3:
        bump_version(actor)
    actor.observe(item.state.obs)


def assert_same_outcome(make, **options):
    "`make()` makes a graph; what comes of it, and of the graph in which ticks pass through a pipe, is the same. Returns it."
    expected = outcome(ticked(make()), **options)
    found = outcome(make(), **options)
    assert found[1:] == expected[1:]
    for a, b in zip(expected[0], found[0], strict=True):
        assert_same(a, b)
    return found


# --- the stream


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
@fast
@given(
    plans=st.lists(episodes, min_size=1, max_size=3),
    n_steps=st.integers(1, 7),
    terminal_obs=st.booleans(),
    sticky=st.sampled_from([None, 1, 2, 5]),
)
def test_a_source_that_writes_into_the_fragment_yields_the_same(
    world, plans, n_steps, terminal_obs, sticky
):
    "Also of environments that rest."
    env, actor = WORLDS[world]
    options = dict(terminal_obs=terminal_obs, sticky=sticky)
    n_steps *= sticky or 1
    *_, error = assert_same_outcome(
        lambda: FragmentCollector(EnvStepper(factories(env, plans), actor(), **options), n_steps)
    )
    assert not error


def test_a_fragment_that_is_too_long_for_the_memory():
    pipe = FragmentCollector(
        EnvStepper("CartPole-v1", MLPPolicy.for_env("CartPole-v1"), seed=0), 10**14
    )
    with pytest.raises(
        DataError,
        match=r"leaf n_steps: a fragment takes more memory than there is. Expected fewer steps, got 10+ of them",
    ):
        next(iter(pipe))


class Changing(MLPPolicy):
    "Its `mode` says what its answer depends on besides the observation."

    mode = ""

    def step(self, *seen, **kwargs):
        act, hx, info = super().step(*seen, **kwargs)
        stepno, _, past, rew, fin = seen
        if self.mode:
            act = (act + past + (rew > 0.5).long() + stepno) % 2
        if self.mode == "lists":
            act = torch.tensor(act.tolist())  # this cannot be exported
        return act, hx, info


@pytest.mark.slow_but_one
@pytest.mark.parametrize("mode", ["graph", "lists"])
@pytest.mark.parametrize("n_steps", [8, 150])
def test_an_actor_that_begins_to_read_more_or_to_run_with_torch(mode, n_steps):
    "The first fragment after the change has the actions of the changed actor, with another engine as with torch."
    pytest.importorskip("onnxruntime")
    streams = []
    for engine, direct in (("torch", False), ("auto", False), ("auto", True)):
        actor = Changing.for_env("CartPole-v1", seed=0)
        pipe = FragmentCollector(
            EnvStepper("CartPole-v1", actor, 2, seed=1, engine=engine), n_steps
        )
        items = iter(pipe if direct else ticked(pipe))
        found = [snapshot(next(items))]
        actor.mode = mode
        streams.append(found + [snapshot(next(items)) for _ in range(2)])
    for wanted, *others in zip(*streams, strict=True):
        for x in others:
            assert (x.state.act == wanted.state.act).all() and (
                x.state.obs == wanted.state.obs
            ).all()


class Own(Counting):
    "Keeps its observation, and uses it again; its infos come late, change their dtype, and share its memory."

    def __init__(self, episodes=((3, "term"), (4, "trunc")), tag=0):
        super().__init__(episodes, tag)
        self.memory = np.zeros(4, np.float32)

    def look(self):
        self.memory[:] = super().look()
        return self.memory

    def step(self, action):
        obs, rew, term, trunc, _ = super().step(action)
        info = {"same": self.memory, "n": self.count if self.episode < 2 else self.count / 2}
        if self.episode > 1:
            info["late"] = [self.episode]
        if self.count == 2:
            info["name"] = "x"
        return obs, rew, term, trunc, info


KINDS_OF_REWARDS = 1, 2.5, np.float32(0.1), True, np.int64(2**60 + 1), np.array(3), 2**60 + 1


def one_of_several(env):
    return KINDS_OF_REWARDS[(env.episode + env.count) % 7]


def drawn(env):
    "From the global generators of torch and numpy."
    assert torch.is_grad_enabled(), "torch.no_grad leaks into the environment"
    return torch.rand(()).item() + np.random.random()


class Mirror(Actor):
    "Its actions, its memory and its report are views of what it sees."

    def forward(self, obs, act, rew, fin, *, hx, stepno, virtual):
        return obs[..., :2], (obs[..., :1],), {"saw": obs}

    def reset(self, hx, at):
        return hx


@pytest.mark.parametrize("shape", [(3,), (3, 90, 90)])
def test_memory_that_is_used_again_by_its_reader(shape):
    "As the slots of a worker are. What is carried to the next fragment must not lie there."

    class Reused(Destination):
        def __init__(self):
            self.memory = []
            self.k = 0

        def empty(self, shape, dtype):
            self.memory.append(np.zeros(shape, dtype))
            return self.memory[-1]

    class Large(Lively):
        def look(self, x):
            return np.broadcast_to(x.reshape(3, *[1] * (len(shape) - 1)), shape).copy()

        def reset(self, **kwargs):
            return self.look(super().reset(**kwargs)[0]), {}

        def step(self, action):
            return self.look((answer := super().step(np.clip(action, -1, 1)))[0]), *answer[1:]

    Large.observation_space = Box(-np.inf, np.inf, shape)

    class Sees(Mirror):
        def forward(self, obs, act, rew, fin, **context):
            return super().forward(obs.reshape(*fin.shape, 3, -1)[..., 0], act, rew, fin, **context)

    streams = []
    make = partial(FragmentCollector, EnvStepper(Large, Sees(), 2, seed=0), 6)
    for pipe in (ticked(make()), make()):
        destination = Reused()
        found = []
        for fragment in islice(pipe.into(destination), 5):
            found.append(snapshot(fragment))
            for x in destination.memory:
                x.fill(77)
            destination.memory.clear()
        streams.append(found)
    for a, b in zip(*streams, strict=True):
        assert_same(a, b)


# --- many cases of one law


class Harmed(Vectorised):
    "After `at` steps, environment 1 returns `value` in its observation or as its reward."

    def __init__(self, mode, leaf, at, value):
        super().__init__(PLANS, mode)
        self.leaf = leaf
        self.at = at
        self.value = value
        self.n = 0

    def step(self, actions):
        self.n += 1
        obs, rew, *rest = super().step(actions)
        if self.n == self.at and self.leaf == "obs":
            obs[1, 2] = self.value
        if self.n == self.at and self.leaf == "rew":
            rew[1] = self.value
        return obs, rew, *rest


class Spoilt(Counting):
    "From step `at` on its observations are not finite, and later something else goes wrong."

    def __init__(self, at, then):
        super().__init__([(50, "trunc")])
        self.at = at
        self.then = then
        self.n = 0

    def step(self, action):
        self.n += 1
        obs, rew, term, trunc, info = super().step(action)
        if self.n == self.at:
            obs[1] = np.nan
        if self.n > self.at + 1:
            if self.then == "raises":
                raise OSError("later")
            if self.then == "reward":
                rew = "much"
            if self.then == "info":
                info = None
            if self.then == "end":
                trunc = "yes"
        return obs, rew, term, trunc, info


class Careful(Plain):
    "Fails if it is shown what is no number."

    def forward(self, obs, *args, **kwargs):
        if obs.isnan().any():
            raise ValueError("the actor has seen it")
        return super().forward(obs.nan_to_num(), *args, **kwargs)


def beyond(end):
    "It counts beyond its space, and is cut off after `end` steps."
    return Scripted(
        [(end, "trunc")],
        observation_space=Dict(n=Discrete(5)),
        action_space=Discrete(2),
        see=lambda env: {"n": env.count},
        tell={},
    )


def fickle(at):
    "An actor, the dtype of whose action changes at call `at`."
    calls = []

    def act(x):
        calls.extend([1] * (not x.virtual))
        zeros = torch.zeros(*x.fin.shape, 2)
        return zeros.double() if len(calls) >= at else zeros

    return Acts(act)


class Still(EnvBatch):
    "Does nothing, whatever the actor chooses."

    def actions(self, array):
        return super().actions(array * 0)


class StillStepper(EnvStepper):
    "Its batch has its own way of actions."

    fusible = True

    def make_envs(self, *args, **kwargs):
        envs = super().make_envs(*args, **kwargs)
        envs.__class__ = Still
        return envs


class Case(NamedTuple):
    "A graph of which ticks and fragments must tell the same."

    make: Callable
    n: int = 4  # items
    error: str = ""  # what its error says; "": there is none
    learns: bool = False  # its actor changes after each item


def fragments(source, actor, n_envs=None, *, n_steps=5, kind=EnvStepper, **options):
    return FragmentCollector(kind(source, actor, n_envs, **options), n_steps)


def networks(kind, source, n_steps=32, env_kwargs=None, options=(), **more):
    "A network of this kind that collects, always an equal one."
    actor = kind.for_env(source, env_kwargs=env_kwargs, seed=0, **dict(options))
    return fragments(source, actor, 3, n_steps=n_steps, seed=1, env_kwargs=env_kwargs, **more)


LSTM = dict(cell="lstm", past=True, report=True).items()
KINDS = [(MLPPolicy, ()), (RecurrentPolicy, ()), (RecurrentPolicy, LSTM)]
TIMED = dict(max_episode_steps=13)
LEARNING = {  # source and options of the stepper
    "cart": ("CartPole-v1", dict(env_kwargs=TIMED)),
    "lively": (Lively, {}),
    "resting": (Lively, dict(sticky=16)),
    "the mode": (Lively, dict(explore=False)),
    "vector": ("CartPole-v1", dict(vector="sync")),
    "device": ("Pendulum-v1", dict(device="cpu")),
}
BY_ENGINE = {  # the same, with another engine: longer than its memory for 128 steps, too
    "cart": ("CartPole-v1", dict(env_kwargs=TIMED, n_steps=150)),
    "last observations": (Lively, dict(terminal_obs=True, n_steps=150)),
    "resting": (Lively, dict(sticky=2)),
    "the mode": (Lively, dict(explore=False)),
    "containers": (Nested, {}),
    "vector": ("CartPole-v1", dict(vector="sync")),
}
CASES = {
    f"networks, {name}, {k}": Case(
        partial(networks, kind, source, options=more, **options), 6, learns=True
    )
    for name, (source, options) in LEARNING.items()
    for k, (kind, more) in enumerate(KINDS)
}
CASES |= {
    f"engine, {name}, {k}": Case(
        partial(networks, kind, source, options=more, engine="onnxruntime", **options),
        3,
        learns=True,
    )
    for name, (source, options) in BY_ENGINE.items()
    for k, (kind, more) in enumerate(KINDS[::2])
}
CASES |= {
    f"vector, {mode.name}, {terminal_obs}": Case(
        partial(fragments, partial(Vectorised, PLANS, mode), Memory(), terminal_obs=terminal_obs),
        5,
    )
    for mode, terminal_obs in product(AutoresetMode, (False, True))
}
CASES |= {
    f"infos, {keys}": Case(
        lambda keys=keys: Lanes(fragments([Own] * 2, Plain(), n_steps=4, info_keys=keys), 2, 90), 12
    )
    for keys in (None, ("n", "late"), ())
}
REWARDS = [
    partial(Scripted, pay=one_of_several),
    partial(Scripted, [(2, "both")], pay=one_of_several),
]
LONG = [Counting, partial(Counting, [(7, "trunc"), (99, "both")])]
CASES |= {
    "a long fragment": Case(
        lambda: fragments(LONG, RecurrentPolicy.for_env(Counting, seed=0), n_steps=400, seed=0), 1
    ),
    "a long fragment, engine": Case(
        lambda: fragments(
            LONG,
            RecurrentPolicy.for_env(Counting, seed=0),
            n_steps=400,
            seed=0,
            engine="onnxruntime",
        ),
        1,
    ),
    "global generators": Case(
        lambda: Lanes(fragments(partial(Scripted, pay=drawn), Plain(), 2), 3, seed=0), 9
    ),
    "an actor of torch's generator": Case(lambda: Lanes(fragments(Lively, Shaky(), 2), 3, 0), 9),
    "rewards of several kinds": Case(lambda: fragments(REWARDS, Plain(), n_steps=9)),
    "rewards, engine": Case(
        lambda: fragments(
            REWARDS, MLPPolicy.for_env(Counting, seed=0), n_steps=9, seed=0, engine="onnxruntime"
        )
    ),
    "a dtype that changes at once": Case(lambda: fragments(Lively, fickle(1), n_steps=4, seed=0)),
    "a dtype that changes": Case(lambda: fragments(Lively, fickle(3), n_steps=4, seed=0)),
    "a batch with its own actions": Case(
        lambda: fragments(Counting, Plain(), 2, kind=StillStepper)
    ),
    "a range, end": Case(
        lambda: fragments(partial(beyond, 5), Acts(), n_steps=8), 1, "out of range"
    ),
    "a range": Case(lambda: fragments(partial(beyond, 99), Acts(), n_steps=8), 1, "out of range"),
}
CASES |= {
    f"harmed, {value} as {leaf} at {at}, {mode.name}": Case(
        partial(fragments, partial(Harmed, mode, leaf, at, value), Plain(), seed=0),
        9,
        f"environment 1 .*leaf {leaf}.*non-finite.*{value}",
    )
    for mode in AutoresetMode
    for leaf, value in (("obs", np.nan), ("obs", np.inf), ("rew", np.nan), ("rew", -np.inf))
    for at in (1, 3, 4, 5, 9, 10)
}
THEN = "nothing", "raises", "reward", "info", "end"
CASES |= {
    f"no number, at {at}, then {then}, {actor.__name__}": Case(
        lambda at=at, then=then, actor=actor: fragments(spoilt(at, then), actor(), n_steps=4),
        9,
        "non-finite",
    )
    for at, then, actor in product((1, 4, 9), THEN, (Plain, Careful))
}
CASES |= {
    f"no number by engine, at {at}, then {then}": Case(
        lambda at=at, then=then: fragments(
            spoilt(at, then),
            MLPPolicy.for_env(Counting, seed=0),
            n_steps=140,
            engine="onnxruntime",
            seed=0,
        ),
        3,
        "non-finite",
    )
    for at, then in product((1, 4, 9, 200), THEN)
}
OF_PLACE = "factory step reset actor actor_reset actor_complete vector_step vector_reset"
OF_PLACE = [place.replace("_", " ") for place in OF_PLACE.split()]
CASES |= {
    f"fault, {harm} in {place} at {at}": Case(
        lambda harm=harm, place=place, at=at: pipeline(Fault(HARMS[harm], place, at)), 6, ".*"
    )
    for place in OF_PLACE
    for harm in sorted({x.harm for x in ROWS if x.place == place and x.here and not x.options})
    for at in (3, 10)
}


def spoilt(at, then):
    "Two environments, of which the second one is spoilt, and the first one is not for long."
    return [partial(Spoilt, 999, then), partial(Spoilt, at, then)]


if importlib.util.find_spec("onnxruntime") is None:
    CASES = {name: case for name, case in CASES.items() if "engine" not in name}
GROUPS = sorted({name.partition(",")[0] for name in CASES})
LONG_GROUPS = ["a long fragment", "engine", "fault", "harmed", "networks", "no number by engine"]
LONG_GROUPS = [name for name in LONG_GROUPS if name in GROUPS]


@pytest.mark.parametrize(
    "group, whole",
    [
        *((group, group not in LONG_GROUPS) for group in GROUPS),
        *(pytest.param(group, True, marks=pytest.mark.slow) for group in LONG_GROUPS),
    ],
)
def test_fragments_tell_what_their_ticks_tell(group, whole):
    "The same items and log; and the first fault in the same words, after as many items, of which none has what is not finite."
    cases = {name: case for name, case in CASES.items() if name.partition(",")[0] == group}
    for name, case in islice(cases.items(), None if whole else 1):
        items, _, error = assert_same_outcome(case.make, n=case.n, learns=case.learns)
        if case.error:
            for item in items:
                assert all(np.isfinite(x).all() for x in leaves(getattr(item, "state", ()))), name
        if case.error != ".*":
            assert bool(error) == bool(case.error), (name, error)
            assert not error or re.search(case.error, error[1], re.S), (name, error)


def test_a_batch_with_its_own_actions_is_asked():
    (fragment,) = first(fragments(Counting, Plain(), 2, kind=StillStepper), 1)
    assert not fragment.state.obs[..., 3].any()


def test_a_dtype_that_changes_where_a_fragment_begins():
    "Then the first fragment that is made at once has the dtype of the one before."
    make = partial(fragments, Lively, n_steps=4, seed=0)
    streams = first(ticked(make(actor=fickle(5))), 3), first(make(actor=fickle(5)), 3)
    for k, (a, b) in enumerate(zip(*streams, strict=True)):
        wide = np.float64 if k else np.float32, np.float64 if k == 2 else np.float32
        assert (a.state.act.dtype, b.state.act.dtype) == wide
        assert_same(a.state._replace(act=a.state.act.astype(b.state.act.dtype)), b.state)


# --- when it does so


class MyStepper(EnvStepper):
    "Overrides something."

    def make_envs(self, *args):
        return super().make_envs(*args)


class Same(EnvStepper):
    "Overrides nothing."


class MyCollector(FragmentCollector):
    "The same."


class OtherCollector(FragmentCollector):
    def stream(self, *args, **kwargs):
        return super().stream(*args, **kwargs)


def stepper(kind=EnvStepper, **kwargs):
    return kind(Counting, Plain(), 2, **kwargs)


class Negating:
    "Changes its ticks."

    def stream(self, items):
        for tick in super().stream(items):
            yield tick._replace(next=tick.next._replace(rew=-tick.next.rew))


class Negated(EnvStepper):
    keeps_items = False  # to keep no tick is no promise to change none

    def stream(self, items):
        for tick in super().stream(items):
            yield tick._replace(next=tick.next._replace(rew=-tick.next.rew))


class NegatedByAMixin(Negating, EnvStepper):
    pass


@pytest.mark.parametrize("kind", [Negated, NegatedByAMixin])
def test_a_stepper_that_changes_its_ticks_is_heard(kind):
    for a, b in zip(
        first(FragmentCollector(stepper(), 4)),
        first(FragmentCollector(stepper(kind), 4)),
        strict=True,
    ):
        assert (a.state.rew == -b.state.rew).all() and a.state.rew[1:].any()


def test_a_class_loses_the_promises_of_what_it_overrides():
    class Promising(Negating):
        fusible = False

    class Same(Promising, EnvStepper):
        fusible = True  # what the class itself says counts

    class Later(Negating, FragmentCollector):
        pass

    class Keeps(EnvStepper):
        keeps_items = False

        def stream(self, items):
            yield from super().stream(items)

    kinds = EnvStepper, NegatedByAMixin, Same, Keeps
    assert [kind.fusible for kind in kinds] == [True, False, True, False]
    assert (Later.keeps_items, Later.fusible) == (True, False)
    assert (FragmentCollector.keeps_items, FragmentCollector.fusible) != (True, False)


@pytest.mark.parametrize(
    "make, direct",
    [
        (lambda: FragmentCollector(stepper(), 4), True),
        (lambda: FragmentCollector(stepper(Same), 4), True),
        (lambda: MyCollector(stepper(), 4), True),
        (lambda: FragmentCollector(stepper(MyStepper), 4), False),
        (lambda: FragmentCollector(Passing(stepper()), 4), False),
        (lambda: OtherCollector(stepper(), 4), False),
    ],
)
def test_most_ticks_are_made_only_where_somebody_may_see_them(make, direct):
    assert n_ticks(make()) == (6 if direct else 12)
    assert_same_outcome(make)


def test_two_readers_of_the_same_ticks():
    "The newest iterator is the valid one, as with all datapipes."
    ticks = stepper()
    fragments = iter(FragmentCollector(ticks, 4))
    passed = iter(Passing(ticks))
    next(fragments)
    next(passed)
    with pytest.raises(RuntimeError, match="invalidated"):
        next(fragments)


EDITS = {
    "before the collector": (lambda pipe: insert_before(pipe, FragmentCollector, Passing), False),
    "after the stepper": (lambda pipe: insert_after(pipe, EnvStepper, Passing), False),
    "another stepper": (
        lambda pipe: replace(pipe, EnvStepper, lambda old: stepper(MyStepper)),
        False,
    ),
    "another collector": (
        lambda pipe: replace(pipe, FragmentCollector, lambda old: FragmentCollector(old.pipe, 6)),
        True,
    ),
    "the same kind of stepper": (
        lambda pipe: replace(pipe, EnvStepper, lambda old: stepper(explore=False)),
        True,
    ),
    "after the collector": (lambda pipe: insert_after(pipe, FragmentCollector, Passing), True),
    "inserted and removed": (
        lambda pipe: remove(insert_after(pipe, EnvStepper, Passing), Passing),
        True,
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_that_needs_ticks_gets_them(name):
    edit, direct = EDITS[name]
    plain = Lanes(FragmentCollector(stepper(), 4), 2, seed=0)
    edited = edit(plain)
    n = find_one(edited, FragmentCollector).n_steps
    assert n_ticks(edited, 2) == (n + 1 if direct else 2 * n)
    for a, b in zip(
        first(edit(ticked(plain)) if name != "inserted and removed" else edited, 4),
        first(edited),
        strict=True,
    ):
        assert_same(a, b)


@pytest.mark.parametrize(
    "recipe, options",
    [(rollouts, {}), (on_policy, dict(critic=None)), (replayed, dict(batch_size=4, warmup=8))],
)
def test_recipes(recipe, options):
    make = partial(recipe, Counting, Plain(), n_envs=2, lanes=2, n_steps=4, seed=0, **options)
    assert n_ticks(make()) == n_ticks(make(optimize=False)) == 6
    assert n_ticks(make(edits=[Passing.inserter(after=EnvStepper)])) == 12


def test_a_pipe_of_environments_is_read_and_closed():
    class Makes(Pipe):
        def __init__(self):
            pass

        def _open(self):
            return iter(())

        def stream(self, items):
            try:
                yield from [Counting] * 5
            finally:
                closed.append(True)

    closed = []
    items = iter(FragmentCollector(EnvStepper(Makes(), Plain(), 2), 4))
    assert next(items).n_envs == 2 and not closed
    items.close()
    assert closed == [True]
