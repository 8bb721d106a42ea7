"""A collector that lets its source write into the fragment yields what it makes of ticks, bit for bit, and fails as with ticks."""

import logging
import pickle
from functools import partial
from itertools import islice

import gymnasium as gym
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
from toys import WORLDS, Counting, Lively, Memory, Nested, Plain, Shaky, factories

from rollpipe.layers import Actor, Critic, MLPPolicy, RecurrentPolicy
from rollpipe.pipes import (
    EnvStepper,
    FragmentCollector,
    Lanes,
    Pipe,
    ProcessReading,
    copy_graph,
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
from rollpipe.pipes.envs.single import EnvBatch
from rollpipe.pipes.fragments import Destination, FragmentBuilder
from rollpipe.pipes.graph.modules import bump_version
from rollpipe.pipes.graph.torchdata import DataLoader2

fast = settings(deadline=None, max_examples=25)


class Passing(Pipe):
    "Ticks pass through it, so a collector cannot let their source write into the fragment."

    reads, keeps_items = 1, False

    def stream(self, items):
        yield from items


def ticked(pipe):
    return insert_after(pipe, EnvStepper, Passing)


def directly(pipe):
    return pipe


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


def assert_same_streams(make, n=4):
    "`make()` makes a graph; its stream, and that of the graph in which ticks pass through a pipe."
    for a, b in zip(first(ticked(make()), n), first(make(), n), strict=True):
        assert_same(a, b)


# --- the stream


@pytest.mark.slow_but_one
@pytest.mark.parametrize("world", WORLDS)
@fast
@given(
    plans=st.lists(episodes, min_size=1, max_size=3),
    n_steps=st.integers(1, 7),
    terminal_obs=st.booleans(),
)
def test_a_source_that_writes_into_the_fragment_yields_the_same(
    world, plans, n_steps, terminal_obs
):
    env, actor = WORLDS[world]
    assert_same_streams(
        lambda: FragmentCollector(
            EnvStepper(factories(env, plans), actor(), terminal_obs=terminal_obs), n_steps
        )
    )


@pytest.mark.parametrize("engine", ["torch", "onnxruntime"])
@pytest.mark.parametrize("kind", [MLPPolicy, RecurrentPolicy])
def test_a_long_fragment(engine, kind):
    "It is made part by part."
    actor = kind.for_env(Counting, seed=0)
    envs = [Counting, partial(Counting, [(7, "trunc"), (99, "both")])]

    def make():
        return FragmentCollector(EnvStepper(envs, actor, seed=0, engine=engine), 400)

    assert_same(*(snapshot(next(iter(pipe))) for pipe in (ticked(make()), make())))


def test_a_fragment_that_is_too_long_for_the_memory():
    pipe = FragmentCollector(
        EnvStepper("CartPole-v1", MLPPolicy.for_env("CartPole-v1"), seed=0), 10**14
    )
    with pytest.raises(
        DataError,
        match=r"leaf n_steps: a fragment takes more memory than there is. Expected fewer steps, got 10+ of them",
    ):
        next(iter(pipe))


@fast
@given(
    plans=st.lists(episodes, min_size=1, max_size=3),
    sticky=st.integers(1, 5),
    periods=st.integers(1, 2),
)
def test_with_environments_that_rest(plans, sticky, periods):
    assert_same_streams(
        lambda: FragmentCollector(
            EnvStepper(factories(Counting, plans), Memory(), sticky=sticky), sticky * periods
        )
    )


@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("terminal_obs", [False, True])
def test_with_vector_environments(mode, terminal_obs):
    def make():
        return FragmentCollector(
            EnvStepper(partial(Vectorised, PLANS, mode), Memory(), terminal_obs=terminal_obs), 5
        )

    assert_same_streams(make, 5)


@pytest.mark.slow_but_one
@pytest.mark.parametrize(
    "kind, options",
    [
        (MLPPolicy, {}),
        (RecurrentPolicy, {}),
        (RecurrentPolicy, dict(cell="lstm", past=True, report=True)),
    ],
)
@pytest.mark.parametrize(
    "source, kwargs",
    [
        ("CartPole-v1", dict(env_kwargs=dict(max_episode_steps=13))),
        (Lively, {}),
        (Lively, dict(sticky=16)),
        (Lively, dict(explore=False)),
        ("CartPole-v1", dict(vector="sync")),
        ("Pendulum-v1", dict(device="cpu")),
    ],
)
def test_with_networks_whose_weights_change(kind, options, source, kwargs):
    "Versions, noise and the normaliser, too."
    assert_same_while_it_learns(kind, options, source, 32, 6, **kwargs)


def assert_same_while_it_learns(kind, options, source, n_steps, n_items, **kwargs):
    streams = []
    for direct in (False, True):
        actor = kind.for_env(source, env_kwargs=kwargs.get("env_kwargs"), seed=0, **options)
        pipe = FragmentCollector(EnvStepper(source, actor, 3, seed=1, **kwargs), n_steps)
        items = iter(pipe if direct else ticked(pipe))
        found = []
        for k in range(n_items):
            found.append(snapshot(fragment := next(items)))
            with torch.no_grad():
                for p in actor.parameters():
                    p += 0.01 * k
            if k % 3:
                bump_version(actor)
            actor.observe(fragment.state.obs)
        streams.append(found)
    for a, b in zip(*streams, strict=True):
        assert_same(a, b)


@pytest.mark.slow_but_one
@pytest.mark.parametrize(
    "kind, options", [(MLPPolicy, {}), (RecurrentPolicy, dict(cell="lstm", past=True, report=True))]
)
@pytest.mark.parametrize(
    "source, kwargs, n_steps",
    [
        ("CartPole-v1", dict(env_kwargs=dict(max_episode_steps=13)), 150),
        (Lively, dict(terminal_obs=True), 150),
        (Lively, dict(sticky=2), 32),
        (Lively, dict(explore=False), 32),
        (Nested, {}, 32),
        ("CartPole-v1", dict(vector="sync"), 32),
    ],
)
def test_with_another_engine(kind, options, source, kwargs, n_steps):
    "An engine gives the same numbers for many steps at once as step by step, within its memory for 128 steps and over its end."
    pytest.importorskip("onnxruntime")
    assert_same_while_it_learns(kind, options, source, n_steps, 3, engine="onnxruntime", **kwargs)


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


@pytest.mark.parametrize("info_keys", [None, ["n", "late"], []])
def test_infos_that_appear_later_and_memory_that_is_used_again(info_keys, caplog):
    told = []
    for change in (ticked, directly):
        caplog.clear()
        told.append(
            (
                first(
                    change(
                        Lanes(
                            FragmentCollector(
                                EnvStepper([Own] * 2, Plain(), info_keys=info_keys), 4
                            ),
                            2,
                            seed=len(told) + 90,
                        )
                    ),
                    12,
                ),
                list(caplog.messages),
            )
        )
    (a, said), (b, same) = told
    for x, y in zip(a, b, strict=True):
        assert_same(x, y)
    assert said == same


class Draws(Counting):
    "Reads the global generators of torch and numpy, and asks whether torch computes gradients."

    def step(self, action):
        obs, rew, *rest = super().step(action)
        assert torch.is_grad_enabled(), "torch.no_grad leaks into the environment"
        return obs, rew + torch.rand(()).item() + np.random.random(), *rest


@pytest.mark.parametrize("make", [lambda: (Draws, Plain()), lambda: (Lively, Shaky())])
def test_global_generators_and_gradients(make):
    assert_same_streams(lambda: Lanes(FragmentCollector(EnvStepper(*make(), 2), 5), 3, seed=0), 9)


class Reward(Counting):
    "Its rewards are of several kinds."

    kinds = (1, 2.5, np.float32(0.1), True, np.int64(2**60 + 1), np.array(3), 2**60 + 1)

    def step(self, action):
        obs, _, *rest = super().step(action)
        return obs, self.kinds[(self.episode + self.count) % 7], *rest


def test_rewards_of_several_kinds():
    envs = [Reward, partial(Reward, [(2, "both")])]
    assert_same_streams(lambda: FragmentCollector(EnvStepper(envs, Plain()), 9))
    pytest.importorskip("onnxruntime")
    assert_same_streams(
        lambda: FragmentCollector(
            EnvStepper(envs, MLPPolicy.for_env(Reward, seed=0), seed=0, engine="onnxruntime"), 9
        )
    )


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
    for change in (ticked, directly):
        pipe = change(FragmentCollector(EnvStepper(Large, Sees(), 2, seed=0), 6))
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


# --- where it runs


def joined(n_workers=None, **kwargs):
    actor = MLPPolicy.for_env("CartPole-v1", seed=0)
    pipe = on_policy(
        "CartPole-v1",
        actor,
        Critic.for_env("CartPole-v1", seed=0),
        n_envs=2,
        n_steps=40,
        lanes=4,
        seed=3,
        **kwargs,
    )
    if n_workers is None:
        return first(pipe, 3)
    with DataLoader2(pipe, reading_service=ProcessReading(n_workers)) as loader:
        return first(loader, 3)


@pytest.mark.parametrize("n_workers", [None, 0, 1, 2])
def test_the_same_with_any_number_of_workers(n_workers):
    for a, b in zip(joined(optimize=False, edits=[ticked]), joined(n_workers), strict=True):
        assert_same(a, b)


def test_loans_serve_one_iteration():
    env = gym.make("CartPole-v1")
    pipe = FragmentCollector(EnvStepper(env, MLPPolicy.for_env(env), seed=0), 3)
    one = iter(pipe)
    next(one)
    two = iter(copy_graph(pipe))
    next(two)
    with pytest.raises(Exception, match="has since been lent to another iteration"):
        next(one)
    env.close()


def test_it_can_be_pickled_and_copied():
    pipe = Lanes(FragmentCollector(EnvStepper(Counting, Plain(), 2), 4), 2, seed=0)
    for copy in (pickle.loads(pickle.dumps(pipe)), copy_graph(pipe)):
        assert n_ticks(copy) == 6
    for a, b in zip(first(pipe), first(pickle.loads(pickle.dumps(pipe))), strict=True):
        assert_same(a, b)


# --- faults


def told(harm, place, at, change):
    "What a pipeline says that is harmed."
    found = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())
    logging.getLogger("rollpipe").addHandler(handler)
    try:
        found += [
            type(x).__name__ for x in islice(change(pipeline(Fault(HARMS[harm], place, at))), 6)
        ]
    except BaseException as e:
        found += [type(e).__name__, str(e), repr(e.__cause__), repr(e.__context__)]
    finally:
        logging.getLogger("rollpipe").removeHandler(handler)
    return found


@pytest.mark.slow_but_one
@pytest.mark.parametrize(
    "place",
    [
        "factory",
        "step",
        "reset",
        "actor",
        "actor reset",
        "actor complete",
        "vector step",
        "vector reset",
    ],
)
def test_faults_are_told_in_the_same_words(place):
    harms = sorted(
        {row.harm for row in ROWS if row.place == place and row.here and not row.options}
    )
    assert harms
    for harm in harms:
        for at in (3, 10):
            assert told(harm, place, at, ticked) == told(harm, place, at, directly), (harm, at)


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


@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize(
    "leaf, value", [("obs", np.nan), ("obs", np.inf), ("rew", np.nan), ("rew", -np.inf)]
)
def test_numbers_of_a_vector_that_are_not_finite(mode, leaf, value):
    "Wherever it happens, also where an environment begins anew, the fragment is not yielded, and the message is that of the ticks."
    for at in (1, 3, 4, 5, 9, 10):
        texts = []
        counts = []
        for change in (ticked, directly):
            items = iter(
                change(
                    FragmentCollector(
                        EnvStepper(partial(Harmed, mode, leaf, at, value), Plain(), seed=0), 5
                    )
                )
            )
            counts.append(0)
            with pytest.raises(Exception, match=f"environment 1 .*leaf {leaf}.*non-finite") as e:
                for _ in items:
                    counts[-1] += 1
            texts.append(str(e.value))
        assert texts[0] == texts[1]
        assert counts == [(at - 1) // 5] * 2
        assert str(value) in texts[0]


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


@pytest.mark.parametrize("then", ["nothing", "raises", "reward", "info", "end"])
@pytest.mark.parametrize("at", [1, 4, 9])
def test_the_first_fault_is_told_and_nothing_that_is_not_finite_leaves(then, at):
    class Careful(Plain):
        def forward(self, obs, *args, **kwargs):
            if obs.isnan().any():
                raise ValueError("the actor has seen it")
            return super().forward(obs.nan_to_num(), *args, **kwargs)

    for actor in (Plain, Careful):
        texts = []
        counts = []
        for change in (ticked, directly):
            items = iter(
                change(
                    FragmentCollector(
                        EnvStepper([partial(Spoilt, 99, then), partial(Spoilt, at, then)], actor()),
                        4,
                    )
                )
            )
            counts.append(0)
            with pytest.raises(Exception) as e:
                for fragment in items:
                    counts[-1] += 1
                    assert all(x.isfinite().all() for x in leaves(fragment.state))
            texts.append((type(e.value), str(e.value), repr(e.value.__cause__)))
        assert texts[0] == texts[1] and counts[0] == counts[1]
        assert "non-finite" in texts[0][1]


@pytest.mark.slow_but_one
@pytest.mark.parametrize("then", ["nothing", "raises", "reward", "info", "end"])
@pytest.mark.parametrize("at", [1, 4, 9, 200])
def test_the_first_fault_with_another_engine(then, at):
    pytest.importorskip("onnxruntime")
    texts = []
    for change in (ticked, directly):
        actor = MLPPolicy.for_env(Counting, seed=0)
        stepper = EnvStepper(
            [partial(Spoilt, 999, then), partial(Spoilt, at, then)],
            actor,
            engine="onnxruntime",
            seed=0,
        )
        with pytest.raises(Exception) as e:
            first(change(FragmentCollector(stepper, 140)), 3)
        texts.append((type(e.value), str(e.value), repr(e.value.__cause__)))
    assert texts[0] == texts[1] and "non-finite" in texts[0][1]


class Range(gym.Env):
    observation_space = Dict(n=Discrete(5))
    action_space = Discrete(2)

    def reset(self, **kwargs):
        return {"n": 0}, {}

    def __init__(self):
        self.n = 0

    def step(self, action):
        self.n += 1
        return {"n": self.n}, 1.0, False, self.n == self.end, {}


@pytest.mark.parametrize("end", [5, 99])
def test_integers_that_a_space_does_not_have(end):
    class Ends(Range):
        pass

    Ends.end = end

    class Zero(Actor):
        def forward(self, obs, act, rew, fin, **_):
            return torch.zeros_like(act, dtype=torch.int64), (), {}

    texts = []
    for change in (ticked, directly):
        with pytest.raises(Exception, match="out of range") as e:
            first(change(FragmentCollector(EnvStepper(Ends, Zero()), 8)))
        texts.append(str(e.value))
    assert texts[0] == texts[1]


class Fickle(Actor):
    "The dtype of its action changes at call `at`."

    def __init__(self, at):
        super().__init__()
        self.at = at
        self.n = [0]

    def forward(self, obs, act, rew, fin, *, virtual, **_):
        self.n[0] += not virtual
        new = torch.zeros(*fin.shape, 2)
        return new.double() if self.n[0] >= self.at else new, (), {}


@pytest.mark.parametrize("at", [1, 3])
def test_a_dtype_that_changes(at):
    assert_same_streams(lambda: FragmentCollector(EnvStepper(Lively, Fickle(at), seed=0), 4), 3)


def test_a_dtype_that_changes_where_a_fragment_begins():
    "Then the first fragment that is made at once has the dtype of the one before."
    make = lambda: FragmentCollector(EnvStepper(Lively, Fickle(5), seed=0), 4)
    for k, (a, b) in enumerate(zip(first(ticked(make()), 3), first(make(), 3), strict=True)):
        assert (a.state.act.dtype, b.state.act.dtype) == (
            (np.float64 if k else np.float32),
            (np.float64 if k == 2 else np.float32),
        )
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
    assert_same_streams(make)


@pytest.mark.parametrize("promises", [{}, dict(keeps_items=False)])
def test_a_stepper_that_changes_its_ticks_is_heard(promises):
    "To keep no tick is no promise to change none."

    def stream(self, items):
        for tick in EnvStepper.stream(self, items):
            yield tick._replace(next=tick.next._replace(rew=-tick.next.rew))

    kind = type("Negated", (EnvStepper,), dict(promises, stream=stream))
    for a, b in zip(
        first(FragmentCollector(stepper(), 4)),
        first(FragmentCollector(stepper(kind), 4)),
        strict=True,
    ):
        assert (a.state.rew == -b.state.rew).all() and a.state.rew[1:].any()


def test_a_mixin_before_a_stepper_that_changes_its_ticks_is_heard():
    class Negating:
        def stream(self, items):
            for tick in super().stream(items):
                yield tick._replace(next=tick.next._replace(rew=-tick.next.rew))

    class Promising(Negating):
        fusible = False

    class Negated(Negating, EnvStepper):
        pass

    class Same(Promising, EnvStepper):
        fusible = True  # what the class itself says counts

    assert [kind.fusible for kind in (EnvStepper, Negated, Same)] == [True, False, True]
    for a, b in zip(
        first(FragmentCollector(stepper(), 4)),
        first(FragmentCollector(stepper(Negated), 4)),
        strict=True,
    ):
        assert (a.state.rew == -b.state.rew).all() and a.state.rew[1:].any()

    class Later(Negating, FragmentCollector):
        pass

    assert (
        (Later.keeps_items, Later.fusible)
        == (True, False)
        != (FragmentCollector.keeps_items, FragmentCollector.fusible)
    )


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


def test_a_graph_that_is_changed_by_hand():
    pipe = FragmentCollector(stepper(), 4)
    seen = []

    class Look(Pipe):
        def stream(self, items):
            for tick in items:
                yield seen.append(tick) or tick

    pipe.pipe = Look(pipe.pipe)
    next(iter(pipe))
    assert len(seen) == 4


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


def test_a_batch_with_its_own_way_of_actions_is_stepped_so():
    class Still(EnvBatch):
        def actions(self, array):
            return super().actions(array * 0)

    class Stepper(EnvStepper):
        fusible = True

        def make_envs(self, *args, **kwargs):
            envs = super().make_envs(*args, **kwargs)
            envs.__class__ = Still
            return envs

    assert_same_streams(lambda: FragmentCollector(Stepper(Counting, Plain(), 2), 5), 3)
    assert (
        not first(FragmentCollector(Stepper(Counting, Plain(), 2), 5), 1)[0].state.obs[..., 3].any()
    )
