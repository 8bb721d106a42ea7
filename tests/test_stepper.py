"""The stepper: sources of environments, ticks, what is recorded, and what the actor and the environments may do to it."""

from functools import partial
from itertools import islice

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, MultiBinary, MultiDiscrete, Tuple
from reference import apply, assert_same, snapshot
from toys import (
    Constant,
    Counting,
    Ledger,
    Lively,
    Memory,
    Nested,
    NestedMemory,
    Noted,
    Plain,
    Shaky,
    Stepped,
)

from rollpipe.layers import Actor, CategoricalPolicy, GaussianPolicy
from rollpipe.pipes import EnvStepper, FragmentCollector, FragmentStacker, Lanes, ProcessReading
from rollpipe.pipes.data.fragment import Tick
from rollpipe.pipes.data.nested import leaves
from rollpipe.pipes.envs.batch import Rows
from rollpipe.pipes.graph.modules import bump_version
from rollpipe.pipes.graph.torchdata import DataLoader2
from rollpipe.pipes.steps import Steps


def f32(*x):
    return np.array(x, np.float32)


def ticks(source, actor, n, n_envs=None, **kwargs):
    return list(islice(EnvStepper(source, actor, n_envs, **kwargs), n))


def test_ticks_by_hand():
    "One tick per step of the batch: what was seen, what was done, what followed."
    first, second, third = ticks(
        [lambda: Counting([(2, "trunc")], 0), lambda: Counting([(3, "term")], 1)], Plain(), 3
    )
    assert isinstance(first, Tick) and first.lane == 0 and first.version == 0
    assert first.state.fin.tolist() == [True, True] and first.state.stepno.tolist() == [0, 0]
    assert first.state.obs.tolist() == [
        [0, 0, 0, 0],
        [1, 0, 0, 0],
    ] and first.state.rew.tolist() == [0, 0]
    assert first.next.act.tolist() == [0, 0] and first.next.rew.tolist() == [1, 1]
    assert_same(first.next, second.state)
    assert second.next.act.tolist() == [3, 3]  # (step 1 + reward 1 + stepno 1) % 5
    assert second.next.rew.tolist() == [np.float32(2.3), np.float32(2.3)]
    assert second.next.fin.tolist() == [True, False] and second.term.tolist() == [False, False]
    assert second.next.obs.tolist() == [
        [0, 1, 0, 3],
        [1, 0, 2, 3],
    ] and second.next.stepno.tolist() == [0, 2]
    assert list(second.final) == [0] and second.final[0][0].tolist() == [0, 0, 2, 3]
    assert (
        third.next.fin.tolist() == [False, True]
        and third.term.tolist() == [False, True]
        and third.final == {}
    )
    assert second.env["count"].tolist() == [2, 2] and second.valid.tolist() == [True, True]


@pytest.mark.parametrize(
    "source, actor",
    [
        (Nested, NestedMemory()),
        (Lively, GaussianPolicy.for_env(Lively)),
        (Counting, CategoricalPolicy.for_env(Counting)),
    ],
)
def test_no_tick_is_overwritten(source, actor):
    fields = lambda tick: tick[:10]
    kept = [
        (fields(t), snapshot(fields(t))) for t in islice(EnvStepper(source, actor, 3, seed=0), 20)
    ]
    for tick, as_received in kept:
        assert_same(tick, as_received)


def test_virtual_reactions_have_no_consequences():
    for source, actor in (
        (Counting, Memory()),
        (Lively, Shaky()),
        (Lively, GaussianPolicy.for_env(Lively)),
    ):
        plain = [snapshot(t[:10]) for t in islice(EnvStepper(source, actor, 2, seed=0), 12)]
        curious = []
        for t in islice(EnvStepper(source, actor, 2, seed=0), 12):
            once = t.source.react(t.next, t.next_hx)
            again = t.source.react(t.next, t.next_hx)
            assert_same(once, again)
            curious.append(snapshot(t[:10]))
        for a, b in zip(plain, curious):
            assert_same(a, b)


class Reports(Plain):
    "Reports a parameter; the rest of its report is added for many steps at once."

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1, 2))

    def forward(self, *args, **kwargs):
        act, hx, _ = super().forward(*args, **kwargs)
        return act, hx, {"w": self.weight}

    def complete(self, act, info):
        return {**info, "more": self.weight.sum() * act}


def test_all_ticks_of_an_iteration_have_one_source():
    pipe = EnvStepper(Counting, Reports(), 2)
    first, second = islice(pipe, 2)
    assert first.source is second.source and next(iter(pipe)).source is not first.source
    act = torch.ones(1, 2)
    done = first.source.complete(act, first.actor)
    assert done["more"].tolist() == [[2, 2]] and not any(x.requires_grad for x in done.values())


@pytest.mark.parametrize("source", [Counting, Nested])
@pytest.mark.parametrize("n", [1, 3, 8])
def test_steps_can_be_written_into_rows_of_others(source, n):
    "Then ticks come again, as if nothing had happened, whatever becomes of those rows."
    actor = Memory() if source is Counting else NestedMemory()
    expected = ticks(source, actor, n + 4, 2)
    items = iter(EnvStepper(source, actor, 2))
    first = next(items)
    ours = Rows(first.next, n + 1)
    ours.put(0, first.next)
    assert first.source.collect_into(ours)
    tick = next(items)
    found = first.source.collected
    for t, wanted in enumerate(expected[1 : n + 1], 1):
        assert_same(apply(lambda x, t=t: x[t], ours.state), wanted.next)
        assert_same(ours.term[t], wanted.term)
    assert_same((tick.state, tick.hx), (first.next, first.next_hx))
    assert_same((tick.next, tick.next_hx, tick.term), (wanted.next, wanted.next_hx, wanted.term))
    for x, wanted in zip(
        zip(found.reports, found.env, found.valid, strict=True), expected[1 : n + 1], strict=True
    ):
        assert_same(x, (wanted.actor, wanted.env, wanted.valid))
    ends = [
        (t, b, *final)
        for t, wanted in enumerate(expected[1 : n + 1])
        for b, final in wanted.final.items()
    ]
    for end, wanted in zip(found.ends, ends, strict=True):
        assert_same((end.t, end.b, end.obs, end.hx), wanted)
    for x in leaves(ours.state):
        x.fill(0)
    for tick, wanted in zip(islice(items, 3), expected[n + 1 :], strict=True):
        assert_same(tick[:10], wanted[:10])


def test_the_actor_is_shown_tensors_of_one_step():
    seen = []

    class Look(Actor):
        def forward(self, obs, act, rew, fin, *, hx, stepno, virtual):
            assert not torch.is_grad_enabled()
            seen.append(
                (
                    obs.dtype,
                    obs.shape,
                    act.dtype,
                    act.shape,
                    rew.dtype,
                    rew.shape,
                    fin.dtype,
                    stepno.dtype,
                )
            )
            return torch.zeros(1, 2, 3), (), {}

    class Exact(Noted):
        observation_space = Box(-1, 1, (4,), np.float64)
        action_space = Box(-1, 1, (3,), np.float64)

        def reset(self, **kwargs):
            super().reset(**kwargs)
            return np.full(4, 1 / 3), {}

        def step(self, action):
            assert action.dtype == np.float64
            return np.full(4, 1 / 3), 1, False, False, {}

    last = ticks(Exact, Look(), 3, 2)[-1]
    shown = (torch.float32, (1, 2, 4), (1, 2, 3), torch.float32, (1, 2), torch.bool, torch.int64)
    assert {(o, tuple(x), tuple(a), r, tuple(y), d, n) for o, x, _, a, r, y, d, n in seen} == {
        shown
    }
    assert last.next.obs.dtype == np.float64 and (last.next.obs == 1 / 3).all()  # recorded in full
    assert last.next.rew.dtype == np.float32


def test_the_environment_is_stepped_in_order_with_its_own_action():
    log = []

    class Tell(Counting):
        def step(self, action):
            log.append((self.tag, action))
            return super().step(action)

    class Each(Plain):
        def forward(self, obs, *rest, **context):
            return obs[..., 0].long(), (), {}

    ticks([partial(Tell, tag=tag) for tag in range(3)], Each(), 2)
    assert log == [(0, 0), (1, 1), (2, 2)] * 2


# --- sources


def first_obs(source, n_envs=None, **kwargs):
    return ticks(source, Constant(0), 1, n_envs, **kwargs)[0].state.obs


def test_sources():
    assert first_obs("CartPole-v1", 3).shape == (3, 4) and first_obs("CartPole-v1").shape == (1, 4)
    assert first_obs(Counting).tolist() == [[0, 0, 0, 0]]  # a class
    assert first_obs(lambda: Counting(tag=4), 2)[:, 0].tolist() == [4, 4]
    assert first_obs(partial(Counting, tag=3))[:, 0].tolist() == [3]
    assert first_obs([partial(Counting, tag=1), lambda: Counting(tag=2)])[:, 0].tolist() == [1, 2]
    assert first_obs([partial(Counting, tag=1), lambda: Counting(tag=2)], 4)[:, 0].tolist() == [
        1,
        2,
        1,
        2,
    ]


def test_env_kwargs():
    made = []

    class Sized(Counting):
        def __init__(self, size=1, other=0):
            super().__init__()
            made.append((size, other))

    gym.register("Sized-v0", Sized)
    try:
        ticks("Sized-v0", Plain(), 1, 2, env_kwargs=dict(size=5, other=2))
    finally:
        del gym.registry["Sized-v0"]
    assert set(made) == {(5, 2)} and len(made) >= 2


def test_a_factory_may_ask_for_its_seed():
    seeds = []

    def factory(seed=None):
        seeds.append(seed)
        return Counting()

    ticks(factory, Plain(), 1, 3, seed=5)
    assert len(set(seeds)) == 3 and all(isinstance(s, int) for s in seeds)
    again = list(seeds)
    seeds[:] = []
    ticks(factory, Plain(), 1, 3, seed=5)
    assert seeds == again


def test_environments_are_seeded_once():
    Ledger.clear()
    ticks(lambda: Counting([(2, "term")]), Plain(), 9, 2, seed=0)
    assert len(Ledger.seeds) == 2 * 5 and all(isinstance(s, int) for s in Ledger.seeds[:2])
    assert Ledger.seeds[2:] == [None] * 8


# --- actions and observations


def acting(space, tamper=None):
    "An environment for one action space that keeps what it was given."

    class Acting(Noted):
        observation_space = Box(-1, 1, (1,))
        action_space = space
        given = []

        def reset(self, **kwargs):
            super().reset(**kwargs)
            return np.zeros(1, np.float32), {}

        def step(self, action):
            self.given.append(snapshot(action))
            if tamper:
                tamper(action)
            return np.zeros(1, np.float32), 0.0, False, False, {}

    return Acting


class Says(Constant):
    "`Constant` for nested answers."

    def __init__(self, answer):
        Actor.__init__(self)
        self.answer = apply(torch.as_tensor, answer)

    def forward(self, obs, act, rew, fin, *, hx, stepno, virtual):
        return apply(lambda x: x.expand(*fin.shape, *x.shape).clone(), self.answer), (), {}


def test_actions_are_recorded_as_chosen_and_clipped_for_the_environment():
    env = acting(Box(f32(-1, -np.inf), f32(1, 5)))
    tick = ticks(env, Says(f32(-3, -70)), 1)[0]
    assert tick.next.act.tolist() == [[-3, -70]] and env.given[0].tolist() == [-1, -70]
    env = acting(Box(-1, 1, (2,)))
    ticks(env, Says(f32(-3, 70)), 1, clip_actions=False)
    assert env.given[0].tolist() == [-3, 70]
    env = acting(Dict(a=Tuple((Box(-1, 1, ()), Box(0, 2, (1,)))), b=MultiDiscrete([3, 3])))
    tick = ticks(env, Says({"a": (np.float32(-4), f32(7)), "b": np.array([2, 1])}), 1)[0]
    assert_same(
        env.given[0], {"a": (np.float32(-1), np.array([2], np.float32)), "b": np.array([2, 1])}
    )
    assert_same(
        tick.next.act,
        {"a": (np.array([-4], np.float32), np.array([[7]], np.float32)), "b": np.array([[2, 1]])},
    )


def spoil(action):
    for x in [action] if isinstance(action, np.ndarray) else action:
        x += 1


@pytest.mark.parametrize(
    "space, answer",
    [
        (Box(-9, 9, (2,)), f32(1, 2)),
        (Box(-np.inf, np.inf, (2,)), f32(1, 2)),
        (MultiDiscrete([5, 5]), np.array([1, 2])),
        (Tuple((Box(-np.inf, np.inf, (2,)), Box(-9, 9, (1,)))), (f32(1, 2), f32(3))),
    ],
    ids=lambda x: type(x).__name__,
)
@pytest.mark.parametrize("clip", [True, False])
def test_an_environment_may_change_its_action_in_place(space, answer, clip):
    "The record keeps what the actor chose, and the actor is shown that."
    env = acting(space, spoil)
    shown = []

    class Watch(Says):
        def forward(self, obs, act, rew, fin, **context):
            if not context["virtual"]:
                shown.append(snapshot(act))
            return super().forward(obs, act, rew, fin, **context)

    taken = [t.next.act for t in ticks(env, Watch(answer), 3, clip_actions=clip)]
    expected = apply(lambda x: x[None], answer)
    for act in taken:
        assert_same(act, expected)
    for act in shown[1:]:
        assert_same(act, apply(lambda x: x[None], expected))


def test_an_environment_may_reuse_its_buffers():
    class Reuses(Counting):
        def __init__(self):
            super().__init__([(3, "trunc"), (2, "term")])
            self.buffer = np.zeros(4, np.float32)
            self.info = {"at": np.zeros(1)}

        def look(self):
            self.buffer[:] = super().look()
            return self.buffer

        def step(self, action):
            obs, rew, term, trunc, info = super().step(action)
            self.info["at"][0] = info["count"]
            return obs, rew, term, trunc, self.info

    [f], [g] = (
        list(islice(FragmentCollector(EnvStepper(env, Plain(), 2), 9), 1))
        for env in (Reuses, lambda: Counting([(3, "trunc"), (2, "term")]))
    )
    assert_same(f.state, g.state)
    assert_same(f.final.obs, g.final.obs)
    assert f.env["at"][..., 0].tolist() == g.env["count"].tolist()


def test_zero_dimensional_and_mixed_observations():
    "Observations come in the dtypes of the space, also if the environment is careless about precision."

    class Careless(Nested):
        def look(self):
            obs = super().look()
            return {
                **obs,
                "exact": float(obs["exact"]),
                "place": obs["place"].astype(np.float64),
                "pair": (3, obs["pair"][1]),
            }

    tick = ticks(Careless, NestedMemory(), 1, 2)[0]
    assert tick.next.obs["exact"].dtype == np.float64 and tick.next.obs["exact"].shape == (2,)
    assert tick.next.obs["place"].dtype == np.float32 and tick.next.obs["pair"][0].tolist() == [
        3,
        3,
    ]


class Deep(Stepped):
    "Integers with which torch hardly computes."

    observation_space = Dict(
        depth=Box(0, 65535, (2,), np.uint16), step=MultiDiscrete([9], dtype=np.uint64)
    )
    action_space = gym.spaces.Discrete(2)

    def look(self):
        return dict(
            depth=np.full(2, 60_000 + self.count, np.uint16), step=np.array([self.count], np.uint64)
        )

    def ends(self):
        return False, self.count == 3


def test_unsigned_integers_of_many_bits():
    policy = CategoricalPolicy.for_env((Deep.observation_space, Deep.action_space))
    steps = list(islice(Steps(FragmentCollector(EnvStepper(Deep, policy), 4)), 8))
    assert [x.next_state["step"].item() for x in steps] == [1, 2, 3, 1, 2, 3, 1, 2]
    assert [x.next_state["depth"].tolist() for x in steps] == [
        [60_000 + n] * 2 for n in (1, 2, 3, 1, 2, 3, 1, 2)
    ]
    assert policy.predict(Deep.observation_space.sample())[0] in (0, 1)


def test_buttons():
    env = acting(MultiBinary(3))
    ticks(env, Says(torch.tensor([1, 0, 1], dtype=torch.int8)), 1)
    assert env.given[0].tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    "policy, source", [(GaussianPolicy, Lively), (CategoricalPolicy, Counting)]
)
def test_without_exploration_the_actor_answers_with_the_mode(policy, source):
    actor = policy.for_env(source)
    for t in ticks(source, actor, 5, 2, explore=False, seed=0):
        mode = actor.dist.mode(t.actor["dist"])
        assert torch.equal(mode[0], torch.from_numpy(t.next.act))
    drawn = ticks(source, actor, 5, 2, seed=0)
    assert any(
        not torch.equal(actor.dist.mode(t.actor["dist"])[0], torch.from_numpy(t.next.act))
        for t in drawn
    )


# --- infos


class Informed(Counting):
    "Infos come from a list of dicts, one per step."

    def __init__(self, infos):
        super().__init__([(99, "term")])
        self.infos = iter(infos)

    def step(self, action):
        return (*super().step(action)[:4], next(self.infos))


def infos(*rows, **kwargs):
    return [t.env for t in ticks(lambda: Informed(rows), Plain(), len(rows), **kwargs)]


def test_numeric_infos_are_recorded():
    a, b = infos(
        {
            "x": 1.5,
            "n": 3,
            "ok": True,
            "v": np.arange(2),
            "d": {"deep": (1, 2.5)},
            "s": "no",
            "o": object(),
        },
        {
            "x": 2.5,
            "n": 4,
            "ok": False,
            "v": np.arange(2),
            "d": {"deep": (1, 3.5)},
            "s": "no",
            "o": object(),
        },
    )
    assert sorted(a) == sorted(b) == ["d", "n", "ok", "v", "x"]
    assert b["x"].tolist() == [2.5] and b["n"].tolist() == [4] and b["ok"].tolist() == [False]
    assert b["v"].tolist() == [[0, 1]] and b["d"]["deep"][1].tolist() == [3.5]


def test_infos_that_come_and_go():
    "A missing number is nan and gets a mask, and a new one is recorded, with a mask from the beginning."
    a, b = infos({"x": 1.5}, {"late": 2})
    assert a["x"].tolist() == [1.5] and list(a) == ["x"] and set(b) == {"x", "_x", "late", "_late"}
    assert (
        np.isnan(b["x"]).all()
        and b["_x"].tolist() == [False]
        and b["late"].tolist() == [2]
        and b["_late"].tolist() == [True]
    )
    a, b = infos({"other": 1}, {"late": 2.0}, info_keys=["late"])
    assert a == {} and b["late"].tolist() == [2] and b["_late"].tolist() == [True] and len(b) == 2


def test_an_info_that_begins_as_an_integer_keeps_its_fractions():
    "A Python number may be 0 at first and 0.5 later: nothing is rounded off in silence."
    a, b = infos({"x": 0}, {"x": 0.5})
    assert b["x"].tolist() == [0.5]


def test_none_is_no_number_and_may_become_something_else():
    a, b = infos({"winner": None, "x": 1}, {"winner": "me", "x": 2})
    assert list(a) == list(b) == ["x"]


def test_a_source_of_several_environments_has_columns_for_all():
    rows = ticks([lambda: Informed([{"x": 1.0}]), lambda: Informed([{"x": 2.0}])], Plain(), 1)
    assert rows[0].env["x"].tolist() == [1, 2]


# --- a recurrent state that begins at a parameter


class Begins(Actor):
    "Its memory is the sum of the step numbers that it has seen in the episode, added to a parameter. `way` is how `reset` returns this."

    uses_past = False

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.begin = torch.nn.Parameter(torch.tensor([[[3.0], [5.0]]]))

    def forward(self, obs, act, rew, fin, *, hx, stepno, virtual):
        hx = (self.begin if hx is None else hx) + obs[..., 2:3]
        return hx[..., 0].long() % 5, hx, {"begin": self.begin[:, : fin.shape[1], 0]}

    def reset(self, hx, at):
        assert not self.training and at == [0, 1]
        return WAYS[self.way](hx, self.begin, at)


def assigned(hx, begin, at):
    hx = hx.clone()
    hx[:, at] = begin[:, at]
    return hx


WAYS = {
    "itself": lambda hx, begin, at: begin,
    "view": lambda hx, begin, at: begin[:, at[0] :],
    "assigned": assigned,
    "sum": lambda hx, begin, at: begin + 0 * hx,
}


@pytest.mark.parametrize("workers", [None, 0, 1])
@pytest.mark.parametrize("way", WAYS)
def test_a_recurrent_state_may_begin_at_a_parameter_that_is_learned(way, workers):
    actor = Begins(way).train()
    found = []
    pipe = FragmentStacker(
        Lanes(FragmentCollector(EnvStepper(Counting, actor, 2), 3), 1, seed=0), 1
    )
    with DataLoader2(
        pipe, reading_service=None if workers is None else ProcessReading(workers)
    ) as loader:
        for batch in islice(loader, 5):
            found.append((batch, snapshot(batch)))
            with torch.no_grad():
                actor.begin.add_(1)
            bump_version(actor)
    for batch, then in found:
        assert not batch.hx.requires_grad and actor.training
        assert_same(batch, then)
    # Episodes take 3, 4, 3 and 4 steps. So the memory is reset at the ends of fragments 0, 2 and 3, after 0, 2 and 3 updates.
    assert [batch.hx[0, :, 0].tolist() for batch, _ in found] == [
        [3, 5],
        [3, 5],
        [3 + 3, 5 + 3],
        [5 + 1, 7 + 1],
        [6 + 1, 8 + 1],
    ]
