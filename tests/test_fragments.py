"""Fragments of the real engine against a naive one, and the rules of the timeline one by one."""

import gc
import weakref
from functools import partial
from itertools import islice

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, Tuple
from hypothesis import given, settings
from hypothesis import strategies as st
from random_fragments import episodes
from reference import Solo, apply, assert_same, flatten, grid, snapshot
from toys import (
    WORLDS,
    Counting,
    Limit,
    Lively,
    Memory,
    Nested,
    NestedMemory,
    Plain,
    Scripted,
    Shaky,
    factories,
    sampled,
)

from rollpipe.layers import Actor, CategoricalPolicy, GaussianPolicy, MLPPolicy
from rollpipe.pipes import DataError, EnvStepper, Fragment, FragmentCollector, Pipe, State
from rollpipe.pipes.data.fragment import Final, TickSource
from rollpipe.pipes.data.nested import leaves
from rollpipe.pipes.envs.batch import Rows
from rollpipe.pipes.fragments import Destination, FragmentBuilder

fast = settings(deadline=None, max_examples=25)


def collect(source, actor, n_steps, n, n_envs=None, **kwargs):
    "The first `n` fragments."
    return list(islice(FragmentCollector(EnvStepper(source, actor, n_envs, **kwargs), n_steps), n))


def check_columns(fragment, columns):
    "Compare a fragment with the columns of `Solo`, but for infos and rows that are no step."
    stepno, obs, act, rew, fin = grid(columns, "states")
    assert_same(fragment.state, State(stepno, obs, act, rew.astype(np.float32), fin))
    assert_same(fragment.term, grid(columns, "terms"))
    assert_same(fragment.actor, grid(columns, "actors"))
    assert_same(fragment.hx, apply_dim1([c["hx"] for c in columns]))
    expected = {(t, b): (obs, info) for b, c in enumerate(columns) for t, obs, info in c["finals"]}
    final = fragment.final
    where = list(zip(final.t.tolist(), final.b.tolist()))
    assert sorted(where) == sorted(expected) and final.t.dtype is final.b.dtype is torch.int64
    for k, at in enumerate(where):
        assert_same(apply(lambda x, k=k: x[k], (final.obs, final.actor)), expected[at])


def check(fragment, columns, infos):
    check_columns(fragment, columns)
    assert_same(
        fragment.env,
        {key: grid([{"x": [i[key] for i in c["envs"]]} for c in columns], "x") for key in infos},
    )
    assert (
        fragment.valid.all()
        and fragment.valid.dtype is torch.bool
        and fragment.valid.shape == fragment.state.rew[1:].shape
    )


def apply_dim1(hxs):
    "Recurrent states [.., 1, ..] side by side on dim 1."
    return (
        {k: torch.cat([hx[k] for hx in hxs], 1) for k in hxs[0]} if isinstance(hxs[0], dict) else ()
    )


@pytest.mark.slow_but_one
@pytest.mark.parametrize("world", WORLDS)
@fast
@given(plans=st.lists(episodes, min_size=1, max_size=3), n_steps=st.integers(1, 7))
def test_equals_the_naive_engine(world, plans, n_steps):
    env = WORLDS[world][0]
    actor = WORLDS[world][1]()
    fragments = collect(factories(env, plans), actor, n_steps, 3)
    no_action = env.action_space.sample()
    no_action = apply(np.zeros_like, no_action)
    solos = [Solo(make(), actor, no_action) for make in factories(env, plans)]
    for seq, fragment in enumerate(fragments):
        assert (
            isinstance(fragment, Fragment)
            and isinstance(fragment.state, State)
            and isinstance(fragment.final, Final)
        )
        check(fragment, [solo.collect(n_steps) for solo in solos], infos=("count", "parts"))
        assert fragment.lane.tolist() == [0] * len(plans) and fragment.seq.tolist() == [seq] * len(
            plans
        )
        assert (
            fragment.version.tolist() == [0] * len(plans)
            and fragment.adv is None
            and fragment.ret is None
        )


@pytest.mark.parametrize("world", ["counting", "gaussian", "categorical", "global"])
def test_cutting_the_stream_differently_changes_nothing(world):
    "10 fragments of 1 step and 1 of 10: the look-ahead is not acted on, advances no memory and spends no random number."
    source, actor = {
        "counting": (lambda: Counting([(3, "trunc"), (2, "term"), (1, "trunc")]), Memory()),
        "gaussian": (Lively, GaussianPolicy.for_env(Lively)),
        "global": (Lively, Shaky()),
        "categorical": (Counting, CategoricalPolicy.for_env(Counting)),
    }[world]
    [whole] = collect(source, actor, 10, 1, 2, seed=3)
    pieces = collect(source, actor, 1, 10, 2, seed=3)
    for t, piece in enumerate(pieces):
        assert_same(piece.state, apply(lambda x, t=t: x[t : t + 2], whole.state))
        assert_same(piece.term, whole.term[t : t + 2])
        assert_same(piece.env, apply(lambda x, t=t: x[t : t + 1], whole.env))
        one = apply(lambda x: x[0], piece.actor)
        many = apply(lambda x, t=t: x[t], whole.actor)
        if "logp" in one:
            torch.testing.assert_close(
                one.pop("logp"), many.pop("logp")
            )  # sums over one row or ten
        assert_same(one, many)
        here = whole.final.t == t
        assert piece.final.b.tolist() == whole.final.b[here].tolist()
        assert_same(piece.final.obs, whole.final.obs[here])
    assert_same(pieces[0].hx, whole.hx)


def test_empty_final_has_the_structure_of_a_full_one():
    "K = 0 rows join with K > 0 rows."
    [none], [some] = (
        collect(lambda end=end: Nested([(2, end)]), NestedMemory(), 4, 1)
        for end in ("term", "trunc")
    )
    shapes = lambda final: [(path, x.dtype, x.shape[1:]) for path, x in flatten(final)]
    assert len(none.final.t) == 0 and len(some.final.t) == 2
    assert shapes(none.final) == shapes(some.final)


def test_fragments_share_no_memory():
    "A learner may normalise one fragment in place without disturbing the next, or the environments."
    edited = []
    untouched = []
    for keep, edit in ((untouched, False), (edited, True)):
        for f in islice(
            FragmentCollector(EnvStepper(lambda: Counting([(4, "trunc")]), Memory(), 2), 3), 4
        ):
            keep.append(snapshot(f))
            if edit:
                apply(
                    lambda x: x.zero_(), tuple(f.state) + (f.actor, f.env, f.term, f.final, f.valid)
                )
    for a, b in zip(edited, untouched):
        assert_same(a, b)


def by_chance(env):
    "One step of eight terminates the episode, and another one truncates it."
    draw = env.np_random.integers(8)
    return bool(draw == 0), bool(draw == 1)


Toolbox = partial(  # random observations for actions in containers
    Scripted,
    observation_space=Dict(x=Box(-1, 1, (3,)), kind=Discrete(4)),
    action_space=Dict(gear=Discrete(3, start=1), steer=Tuple((Box(-2, 2, (2,)), Discrete(2)))),
    see=sampled,
    pay=0.0,
    ends=by_chance,
    tell={},
    tell_first={},
)


@pytest.mark.parametrize(
    "env, policy",
    [
        ("CartPole-v1", CategoricalPolicy),
        ("Pendulum-v1", GaussianPolicy),
        (Lively, GaussianPolicy),
        (Toolbox, MLPPolicy),
    ],
)
def test_replay(env, policy):
    "The policy, run once more over a recorded fragment, tells the recorded parameters and log-probabilities."
    actor = policy.for_env(env)
    for f in collect(env, actor, 40, 2, 3, seed=0):
        s = f.state
        with torch.no_grad():
            dist, _ = actor.params(s.obs, s.act, s.rew, s.fin, hx=f.hx, stepno=s.stepno)
            logp = actor.dist.log_prob(apply(lambda x: x[:-1], dist), apply(lambda x: x[1:], s.act))
        for x, y in zip(*map(torch.utils._pytree.tree_leaves, (dist, f.actor["dist"]))):
            torch.testing.assert_close(x, y)
        torch.testing.assert_close(logp, f.actor["logp"][:-1], rtol=1e-4, atol=1e-5)
        assert f.actor["logp"].shape == s.rew.shape and not logp.requires_grad


class Tuned(Actor):
    "Its report is a function of its parameter."

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, obs, act, rew, fin, *, hx, stepno, virtual):
        assert not torch.is_grad_enabled()
        return (
            torch.zeros(fin.shape, dtype=torch.int64),
            (),
            {"w": self.weight.expand(fin.shape).clone()},
        )

    def complete(self, act, info):
        return {**info, "logp": self.weight * info["w"]}


@pytest.mark.parametrize(
    "source, actor",
    [
        (lambda: Counting([(2, "trunc")]), Tuned),
        (Lively, lambda: GaussianPolicy.for_env(Lively)),
        (Lively, lambda: GaussianPolicy.for_env(Lively, std="state")),
        (Counting, lambda: CategoricalPolicy.for_env(Counting)),
    ],
)
def test_nothing_in_a_fragment_asks_for_gradients(source, actor):
    [f] = collect(source, actor(), 20, 1, 2, seed=0)
    n_ends = len(f.final.t)
    asking = [path for path, x in flatten(f) if x.requires_grad]
    assert n_ends and not asking


@pytest.mark.parametrize("std", ["free", "state"])
def test_training_the_policy_does_not_change_what_it_reported(std):
    "A fragment holds the distribution that acted, not the parameters of today."
    actor = GaussianPolicy.for_env(Lively, std=std)
    for f in islice(FragmentCollector(EnvStepper(Lively, actor, 2, seed=0), 15), 3):
        assert len(f.final.t)
        received = snapshot(f)
        with torch.no_grad():
            for weight in actor.parameters():
                weight.add_(0.5)
        assert_same(f, received)


def test_a_source_that_ends_gives_a_shorter_last_fragment():
    pipe = FragmentCollector(Limit(EnvStepper(Counting, Plain()), 7), 3)
    assert [f.n_steps for f in pipe] == [3, 3, 1]
    assert [f.state.rew.shape for f in pipe] == [(4, 1), (4, 1), (2, 1)]


def test_action_dtype_is_the_same_in_every_fragment():
    "An actor may answer in a narrower dtype than the space's; what is recorded must not depend on where it is cut."

    class Narrow(Plain):
        def forward(self, *args, **kwargs):
            act, hx, info = super().forward(*args, **kwargs)
            return act.to(torch.int32), hx, {}

    assert len({f.state.act.dtype for f in collect(Counting, Narrow(), 3, 3)}) == 1


class Changed(Pipe):
    "Changes the observation that tick `k` leads to."

    def __init__(self, pipe, change):
        super().__init__(pipe)
        self.change = change

    def stream(self, items):
        for k, tick in enumerate(items):
            yield tick._replace(next=tick.next._replace(obs=self.change(k, tick.next.obs)))


def changed(change, n_steps=4):
    return next(iter(FragmentCollector(Changed(EnvStepper(Counting, Plain(), 2), change), n_steps)))


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_rows(data):
    "Any shapes, also without elements; memory that has to grow, or lies beside that of others."
    B = data.draw(st.integers(1, 3))
    n = data.draw(st.integers(1, 9))
    leaf = st.tuples(st.lists(st.integers(0, 3), max_size=2), st.sampled_from(["f4", "i8", "?"]))
    kinds = data.draw(st.lists(leaf, min_size=1, max_size=3))
    rng = np.random.default_rng(0)
    strided = data.draw(st.booleans())

    def random():
        return {
            f"{k}": (9 * rng.random((B, *shape))).astype(dtype)
            for k, (shape, dtype) in enumerate(kinds)
        }

    made = [
        State(
            np.full(B, t),
            random(),
            np.full(B, 2 * t),
            np.full(B, t, np.float32),
            np.full(B, t % 2 == 0),
        )
        for t in range(n)
    ]

    def empty(shape, dtype):
        return (
            np.empty((shape[0], 2 * shape[1], *shape[2:]), dtype)[:, B:]
            if strided
            else np.empty(shape, dtype)
        )

    rows = Rows(made[0], data.draw(st.integers(1, 12)), empty)
    for t, row in enumerate(made):
        rows.put(t, row, row.fin)
    taken = rows.tensors(n)
    for x, *wanted in zip(leaves(taken), *map(leaves, made), strict=True):
        wanted = np.stack(wanted)
        assert (
            x.numpy().dtype == wanted.dtype
            and np.array_equal(x.numpy(), wanted)
            and x.shape == wanted.shape
        )
    assert np.array_equal(rows.term[:n], taken.fin)


def test_another_precision_is_that_of_the_first_step():
    cast = changed(lambda k, obs: obs.astype("f8" if k % 2 else "f4")).state.obs
    assert cast.dtype == torch.float32
    assert torch.equal(cast, changed(lambda k, obs: obs).state.obs)


CHANGES = [  # what is seen at step k -> message; fractions are not cut off, and nothing is repeated so that it fits
    (
        lambda k, obs: obs.astype(int) if k < 2 else obs + 0.5,
        "the dtype changes within a fragment. Expected int64, got float",
    ),
    (
        lambda k, obs: obs if k < 2 else obs[:, :1],
        "the shape changes .* Expected .2, 4., got float32 .2, 1.",
    ),
    (lambda k, obs: obs if k < 3 else obs.T, "the shape changes within a fragment"),
    (lambda k, obs: obs if k < 3 else {"a": obs}, "the shape changes .* got .'a': float32"),
    (
        lambda k, obs: {"a": obs} if k else {"b": obs},
        "the structure changes within a fragment",
    ),
]


@pytest.mark.parametrize("change, text", CHANGES)
def test_observations_that_change_their_form_are_refused(change, text):
    with pytest.raises(DataError, match=f"FragmentCollector, lane 0: {text}"):
        changed(change)


def test_many_steps(monkeypatch):
    "More than are made room for at once, until the source ends."

    class Ends(Pipe):
        def stream(self, items):
            yield from islice(items, 7)

    def collect(n_steps):
        return next(iter(FragmentCollector(Ends(EnvStepper(Counting, Plain(), 2)), n_steps)))

    assert_same(snapshot(collect(10**12)), snapshot(collect(7)))
    monkeypatch.setattr(FragmentBuilder, "AT_ONCE", 3)
    assert_same(snapshot(collect(10**12)), snapshot(collect(7)))


# --- the source of ticks


class Replayed(TickSource):
    "Of somebody's own: it reacts, and can neither complete reports nor write observations anywhere."

    def __init__(self, source):
        self.source = source

    def react(self, state, hx):
        return self.source.react(state, hx)


class WithSource(Pipe):
    "Stands between the ticks and their source."

    def stream(self, items):
        for tick in items:
            yield tick._replace(source=Replayed(tick.source))


@pytest.mark.parametrize("actor", [Memory(), MLPPolicy.for_env(Counting, seed=0)])
def test_a_source_need_only_react(actor):
    "Without `complete`, what the actor would add is missing; all else is the same."

    def stepper():
        return EnvStepper(lambda: Counting([(2, "trunc"), (3, "term")]), actor, 2, seed=1)

    for f, g in zip(
        islice(FragmentCollector(WithSource(stepper()), 5), 3), FragmentCollector(stepper(), 5)
    ):
        for info in (g.actor, g.final.actor):
            info.pop("logp", None)
        assert_same(f, g)


def test_memory_is_asked_for_once_a_fragment():
    "Whether the source writes into it or not."

    class Own(EnvStepper):
        fusible = True

        def stream(self, items):
            for tick in super().stream(items):
                yield tick._replace(source=Replayed(tick.source))

    class Counts(Destination):
        n = 0

        def empty(self, shape, dtype):
            self.n += 1
            return super().empty(shape, dtype)

    for kind in (EnvStepper, Own):
        memory = Counts()
        found = []
        for fragment in islice(
            FragmentCollector(kind(Counting, Plain(), 2, seed=0), 3).into(memory), 4
        ):
            found.append(snapshot(fragment))
        assert memory.n == 4 * 5
    for f, g in zip(found, FragmentCollector(EnvStepper(Counting, Plain(), 2, seed=0), 3)):
        assert_same(f, snapshot(g))


@fast
@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4), n_steps=st.integers(1, 6))
def test_a_builder_gives_what_was_added(sizes, n_steps):
    "Whenever a fragment is taken, and whether or not it has got as many ticks as it was to get."
    ticks = list(
        islice(EnvStepper(lambda: Counting([(3, "trunc"), (2, "term")]), Memory(), 2), sum(sizes))
    )
    whole = FragmentBuilder(n_steps)
    cut = FragmentBuilder(n_steps)
    for tick in ticks:
        whole.add(tick)
    whole = whole.take()
    begin = 0
    for seq, size in enumerate(sizes):
        for tick in ticks[begin : begin + size]:
            cut.add(tick)
        f = cut.take()
        assert_same(
            f.state, apply(lambda x, rows=slice(begin, begin + size + 1): x[rows], whole.state)
        )
        assert_same(f.term, whole.term[begin : begin + size + 1])
        assert f.n_steps == size and f.seq.tolist() == [seq, seq] and not cut.n
        begin += size


def test_ticks_of_two_lanes_are_refused_also_where_a_fragment_begins():
    first, second = islice(EnvStepper(Counting, Plain()), 2)
    builder = FragmentBuilder(1)
    builder.add(first)
    builder.take()
    with pytest.raises(DataError, match="ticks of several lanes.*lanes 0 and 1"):
        builder.add(second._replace(lane=1))


# --- observations are made where they will lie


class Passing(Pipe):
    "Behind it, nobody knows who has the ticks."

    reads = 1

    def stream(self, items):
        yield from items


class Where(MLPPolicy):
    "Notes where it was shown the leaves of each state that it acted in."

    def step(self, stepno, obs, act, rew, fin, /, *, hx, virtual, noise=None):
        if not virtual:
            vars(self).setdefault("shown", []).append([x.data_ptr() for x in leaves(obs)])
        return super().step(stepno, obs, act, rew, fin, hx=hx, virtual=virtual, noise=noise)


def in_place(fragment, shown):
    "For each state that was acted in: were all leaves of its observation (but float64, shown as float32) where the fragment has them?"
    return [
        all(
            x[t].data_ptr() == at
            for x, at in zip(leaves(fragment.state.obs), row)
            if x.dtype != torch.float64
        )
        for t, row in enumerate(shown)
    ]


@pytest.mark.parametrize("env", [Counting, Nested])
@pytest.mark.parametrize("n_steps", [1, 2, 3, 4, 9])
def test_observations_are_made_in_the_fragment(env, n_steps):
    "From the second fragment on, but for the last row, with which the next fragment begins."
    actor = Where.for_env(env)
    for k, fragment in enumerate(collect(env, actor, n_steps, 3, 2)):
        shown = actor.shown[k * n_steps : (k + 1) * n_steps + 1]
        assert in_place(fragment, shown) == [k > 0 and t < n_steps for t in range(len(shown))]


class ReadsAhead(FragmentCollector):
    "Has the next tick made before it takes one."

    def stream(self, items):
        yield from super().stream(self.ahead(items))

    def ahead(self, items):
        before = next(items)
        for tick in items:
            yield before
            before = tick


class Stepper(EnvStepper):
    "Of somebody's own: it may keep what it gives, since it has a `stream` of its own and promises nothing."

    def stream(self, items):
        yield from super().stream(items)


class SameStepper(EnvStepper):
    "Overrides nothing, so the promises of its base hold."


class SameCollector(FragmentCollector):
    "The same."


def test_subclasses_that_override_nothing_keep_the_promises():
    actor = Where.for_env(Counting)
    _, fragment = islice(SameCollector(SameStepper(Counting, actor, 2), 6), 2)
    assert in_place(fragment, actor.shown[6:12]) == 6 * [True]


@pytest.mark.parametrize(
    "kind, collector, stepper",
    [
        (Where, FragmentCollector, lambda *args: Passing(EnvStepper(*args))),
        (Where, ReadsAhead, EnvStepper),
        (Where, FragmentCollector, Stepper),
    ],
)
def test_observations_that_somebody_may_keep_are_copied(kind, collector, stepper):
    actor = kind.for_env(Counting)
    _, fragment = islice(collector(stepper(Counting, actor, 2), 6), 2)
    assert not any(in_place(fragment, actor.shown[6:12]))
    assert (
        fragment.state.obs[:, 0, 2].tolist()
        == fragment.state.stepno[:, 0].tolist()
        == [3, 0, 1, 2, 0, 1, 2]
    )


@pytest.mark.parametrize(
    "source, kind, kwargs",
    [
        (Counting, Where, {}),
        ("CartPole-v1", MLPPolicy, {}),
        ("CartPole-v1", MLPPolicy, dict(vector="sync")),
    ],
)
def test_a_fragment_that_nobody_has_is_gone(source, kind, kwargs):
    "Neither the stream nor the environments keep its memory, in which they made their observations."
    made = []
    pipe = FragmentCollector(EnvStepper(source, kind.for_env(source), 2, **kwargs), 6)

    class Noted(Destination):
        def empty(self, shape, dtype):
            made.append(weakref.ref(x := np.empty(shape, dtype)))
            return x

    items = pipe.into(Noted())
    for _ in range(3):
        next(items)
        gc.collect()
        assert len(made) == 5 and not any(x() is not None for x in made)
        made.clear()


def test_a_vector_environment_is_copied_into_the_fragment():
    actor = Where.for_env("CartPole-v1")
    _, fragment = islice(
        FragmentCollector(EnvStepper("CartPole-v1", actor, 2, vector="sync"), 6), 2
    )
    assert in_place(fragment, actor.shown[6:12]) == 6 * [True]
