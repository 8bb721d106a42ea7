"""The stepper: sources of environments, ticks, what is recorded, and what the actor and the environments may do to it."""

import re
from functools import partial
from itertools import islice

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, MultiDiscrete, Tuple
from reference import apply, assert_same, snapshot
from toys import (
    Acts,
    Constant,
    Counting,
    Lively,
    Memory,
    Nested,
    NestedMemory,
    Plain,
    Scripted,
    Shaky,
)

from rollpipe.layers import Actor, CategoricalPolicy, GaussianPolicy
from rollpipe.pipes import EnvStepper, FragmentCollector, FragmentStacker, Lanes, ProcessReading
from rollpipe.pipes.graph.modules import bump_version
from rollpipe.pipes.graph.torchdata import DataLoader2
from rollpipe.pipes.steps import Steps


def f32(*x):
    return np.array(x, np.float32)


def ticks(source, actor, n, n_envs=None, **kwargs):
    return list(islice(EnvStepper(source, actor, n_envs, **kwargs), n))


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


def test_the_actor_is_shown_tensors_of_one_step():
    shown = set()

    def note(x):
        assert not torch.is_grad_enabled()
        shown.add(tuple((y.dtype, tuple(y.shape)) for y in (x.obs, x.act, x.rew, x.fin, x.stepno)))

    def exact():
        return Scripted(
            observation_space=Box(-1, 1, (4,), np.float64),
            action_space=Box(-1, 1, (3,), np.float64),
            see=np.full(4, 1 / 3),
            before={"step": lambda env: taken.add(env.action.dtype)},
        )

    taken = set()
    last = ticks(exact, Acts(np.zeros(3, np.float32), before=note), 3, 2)[-1]
    wide = torch.float32, (1, 2, 4)
    one = (1, 2)
    assert shown == {
        (
            wide,
            (torch.float32, (1, 2, 3)),
            (torch.float32, one),
            (torch.bool, one),
            (torch.int64, one),
        )
    }
    assert taken == {np.dtype(np.float64)}
    assert last.next.obs.dtype == np.float64 and (last.next.obs == 1 / 3).all()  # recorded in full
    assert last.next.rew.dtype == np.float32


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


# --- actions and observations


def acting(space, tamper=lambda action: None):
    "`(factory, list)`: an environment for one action space, and the actions that it was given."
    given = []

    def make():
        return Scripted(
            observation_space=Box(-1, 1, (1,)),
            action_space=space,
            see=np.zeros(1, np.float32),
            ends=(False, False),
            before={"step": lambda env: given.append(snapshot(env.action))},
            tell=lambda env: tamper(env.action) or {},
        )

    return make, given


class Says(Constant):
    "`Constant` for nested answers."

    def __init__(self, answer):
        Actor.__init__(self)
        self.answer = apply(torch.as_tensor, answer)

    def forward(self, obs, act, rew, fin, *, hx, stepno, virtual):
        return apply(lambda x: x.expand(*fin.shape, *x.shape).clone(), self.answer), (), {}


@pytest.mark.parametrize("clip, taken", [(True, [-1, -70]), (False, [-3, -70])])
def test_actions_are_recorded_as_chosen_and_clipped_for_the_environment(clip, taken):
    env, given = acting(Box(f32(-1, -np.inf), f32(1, 5)))
    (tick,) = ticks(env, Says(f32(-3, -70)), 1, clip_actions=clip)
    assert tick.next.act.tolist() == [[-3, -70]] and given[0].tolist() == taken


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
    env, _ = acting(space, spoil)
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


Deep = partial(  # integers with which torch hardly computes
    Scripted,
    [(3, "trunc")],
    observation_space=Dict(
        depth=Box(0, 65535, (2,), np.uint16), step=MultiDiscrete([9], dtype=np.uint64)
    ),
    see=lambda env: dict(depth=np.uint16([60_000 + env.count] * 2), step=np.uint64([env.count])),
)


def test_unsigned_integers_of_many_bits():
    policy = CategoricalPolicy.for_env(Deep)
    steps = list(islice(Steps(FragmentCollector(EnvStepper(Deep, policy), 4)), 8))
    numbers = [1, 2, 3, 1, 2, 3, 1, 2]
    assert [x.next_state["step"].item() for x in steps] == numbers
    assert [x.next_state["depth"].tolist() for x in steps] == [[60_000 + n] * 2 for n in numbers]
    assert policy.predict(Deep().observation_space.sample())[0] in range(5)


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


class Outside(gym.Env):
    "Its first observation has a number above the bound."

    action_space = gym.spaces.Discrete(2)

    def __init__(self, high):
        self.observation_space = Dict(x=Box(0, high, (2,)), n=Box(0, 255, (3,), np.uint8))

    def reset(self, *, seed=None, options=None):
        return dict(x=f32(0, 9), n=np.uint8([0, 1, 255])), {}

    def step(self, action):
        return *self.reset()[:1], 0.0, False, False, {}


@pytest.mark.parametrize(
    "high, kind",
    [(7, lambda make: make), (8, lambda make: lambda: gym.vector.SyncVectorEnv([make] * 2))],
)
def test_a_first_observation_outside_of_its_bounds_is_named_once(high, kind, caplog):
    source = kind(partial(Outside, high))
    actor = CategoricalPolicy.for_env(partial(Outside, high))
    for _ in range(2):
        assert ticks(source, actor, 1)[0].next.obs["x"][0].tolist() == [0, 9]
    (message,) = caplog.messages
    assert re.fullmatch(
        r"EnvStepper, lane 0, environment 0.*, leaf obs\['x'\]\[1\]: a first observation is outside.*"
        rf" Expected 0\.0 \.\.\. {high}\.0, or other bounds, got 9\.0\.",
        message,
    )
