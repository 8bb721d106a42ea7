"""Environments whose batch is made of tensors: the same fragments as from the ordinary path, and clear errors."""

from functools import partial
from itertools import islice, product

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import apply, assert_same
from tensor_worlds import AsVector, CartPole, Pendulum, Planned, PlannedNested
from torch.utils._python_dispatch import TorchDispatchMode
from toys import ENDS, Constant, Counting, Memory, Nested, NestedMemory

from rollpipe.layers import Critic, MLPPolicy, QPolicy, RecurrentPolicy
from rollpipe.pipes import (
    ActorError,
    AdvantageBuffer,
    CheckInvariants,
    DataError,
    DataLoader2,
    EnvError,
    EnvStepper,
    EpisodeStats,
    FragmentCollector,
    FragmentStacker,
    GraphError,
    Lanes,
    ProcessReading,
    TensorEnv,
    on_policy,
    rollouts,
)
from rollpipe.pipes.tensors.collector import TensorCollector
from rollpipe.pipes.tensors.tensor_env import ActionsForEnv
from rollpipe.testing import (
    ENV_SEED,
    TENSOR_ENV_FINAL,
    TENSOR_ENV_MADE,
    TENSOR_ENV_NUMBERS,
    TENSOR_ENV_RESET,
    TENSOR_ENV_STEP,
    check_env,
    env_rules,
)

PLANS = [[(3, "term"), (4, "trunc")], [(1, "trunc"), (2, "both")], [(5, "trunc")]]
episodes = st.lists(
    st.lists(st.tuples(st.integers(1, 5), st.sampled_from(ENDS)), min_size=1, max_size=3),
    min_size=1,
    max_size=4,
)
WORLDS = {"memory": (Planned, Counting, Memory), "nested": (PlannedNested, Nested, NestedMemory)}
SIMULATED = {"CartPole": partial(CartPole, 5, 9), "Pendulum": partial(Pendulum, 5, 40)}
POLICIES = {
    "mlp": MLPPolicy.for_env,
    "gru": partial(RecurrentPolicy.for_env, past=True),
    "lstm": partial(RecurrentPolicy.for_env, cell="lstm"),
}


def taken(source, actor, n_steps, n, **kwargs):
    return list(islice(TensorCollector(source, actor, n_steps, **kwargs), n))


def ordinary(source, actor, n_steps, n, **kwargs):
    return list(islice(FragmentCollector(EnvStepper(source, actor, **kwargs), n_steps), n))


def same(a, b):
    assert len(a) == len(b)
    for x, y in zip(a, b):
        assert_same(x, y)


# --- the simulated ones are gymnasium's


@pytest.mark.parametrize("name, id", [("CartPole", "CartPole-v1"), ("Pendulum", "Pendulum-v1")])
def test_the_dynamics_are_those_of_gymnasium(name, id):
    torch_env = dict(CartPole=CartPole, Pendulum=Pendulum)[name](1, dtype=torch.float64)
    env = gym.make(id).unwrapped
    rng = np.random.default_rng(0)
    for episode in range(5):
        env.reset(seed=episode)
        torch_env.reset(0)
        for _ in range(60):
            torch_env.state = torch.as_tensor(np.array(env.state)[:, None].copy())
            action = (
                rng.uniform(-3, 3, 1).astype(np.float32) if name == "Pendulum" else rng.integers(2)
            )
            obs, rew, term, *_ = env.step(action)
            _, rew_, term_, _, final, _ = torch_env.step(torch.as_tensor(action)[None])
            np.testing.assert_allclose(final[0], obs, rtol=1e-5, atol=1e-6)
            assert rew_.item() == pytest.approx(rew, rel=1e-5) and term_.item() == term
            if term:
                break


# --- the same stream as through numpy


@pytest.mark.slow_but_one
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("terminal_obs", [False, True])
@settings(deadline=None, max_examples=25)
@given(plans=episodes, n_steps=st.integers(1, 9))
def test_fragments_are_those_of_single_environments(world, terminal_obs, plans, n_steps):
    env, single, actor = WORLDS[world]
    expected = ordinary(
        [partial(single, plan, tag) for tag, plan in enumerate(plans)],
        actor(),
        n_steps,
        4,
        terminal_obs=terminal_obs,
    )
    found = taken(lambda: env(plans), actor(), n_steps, 4, terminal_obs=terminal_obs)
    for f, e in zip(found, expected):
        assert_same(apply(lambda x: x.double(), f), apply(lambda x: x.double(), e))
    for f, e in zip(found, expected):
        assert_same(f._replace(env={}), e._replace(env={}))


@pytest.mark.slow_but_one
@pytest.mark.parametrize("explore", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("world", SIMULATED)
def test_fragments_are_those_of_the_same_vector_environment(world, policy, explore):
    make = SIMULATED[world]
    actor = POLICIES[policy](make(), seed=0)
    kwargs = dict(seed=3, explore=explore)
    found = taken(make, actor, 33, 4, **kwargs)
    same(found, ordinary(lambda: AsVector(make()), actor, 33, 4, **kwargs))
    assert sum(len(f.final.t) for f in found) and all(f.valid.all() for f in found)
    assert not explore or not torch.equal(
        found[0].state.act[1:], taken(make, actor, 33, 1, seed=3, explore=False)[0].state.act[1:]
    )


def test_the_recipe_with_lanes_advantages_and_statistics():
    actor, critic = (c.for_env(CartPole(1), seed=0) for c in (MLPPolicy, Critic))
    told = []
    options = dict(
        n_steps=20,
        lanes=3,
        seed=5,
        edits=[
            EpisodeStats.inserter(after=FragmentStacker, sink=told.append),
            CheckInvariants.inserter(after=AdvantageBuffer, rate=1.0),
        ],
    )
    found = list(
        islice(on_policy(partial(CartPole, max_steps=15), actor, critic, n_envs=4, **options), 3)
    )
    n_told = len(told)
    same(
        found,
        list(
            islice(
                on_policy(lambda: AsVector(CartPole(4, 15)), actor, critic, n_envs=None, **options),
                3,
            )
        ),
    )
    assert found[0].adv.shape == (20, 12) and found[0].lane.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert n_told and told[n_told:] == told[:n_told]


@pytest.mark.parametrize("make", [MLPPolicy.for_env, partial(QPolicy.for_env, epsilon=0.5)])
def test_noise_is_drawn_where_the_generator_is(make):
    actor = make(CartPole(1), seed=0)
    with pytest.MonkeyPatch.context() as patch:
        seen = []
        empty = torch.empty
        rand = torch.rand
        patch.setattr(
            torch, "empty", lambda *a, device=None, **k: (seen.append(device), empty(*a, **k))[1]
        )
        patch.setattr(
            torch, "rand", lambda *a, device=None, **k: (seen.append(device), rand(*a, **k))[1]
        )
        actor.draw_noise((2, 3), torch.Generator())
    assert torch.device("cpu") in seen


# --- nobody waits for the device


class Waits(TorchDispatchMode):
    "Counts the operations whose result the host must wait for."

    waiting = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "unique", "equal")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        masked = name in ("index", "index_put_") and any(
            x is not None and x.dtype == torch.bool for x in args[1]
        )
        self.found = getattr(self, "found", []) + [name] * (name in self.waiting or masked)
        return func(*args, **kwargs or {})


def not_on_host(patch):
    "Fragments are made as on an accelerator."
    from rollpipe.pipes.tensors import collector

    init = collector.Ends.__init__

    def elsewhere(self, *args):
        init(self, *args)
        self.on_host = False

    patch.setattr(collector.Ends, "__init__", elsewhere)


@pytest.mark.slow_but_one
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("world", SIMULATED)
def test_within_a_fragment_nobody_waits(world, policy, monkeypatch):
    not_on_host(monkeypatch)
    make = SIMULATED[world]
    actor = POLICIES[policy](make(), seed=0)
    counts = []
    for n_steps in (41, 82):
        stream = iter(TensorCollector(make, actor, n_steps, seed=0))
        next(stream)
        with Waits() as waits:
            next(stream)
        counts.append(len(waits.found))
    assert counts[0] == counts[1] <= 4, waits.found


@pytest.mark.parametrize("terminal_obs", [False, True])
@pytest.mark.parametrize("world", WORLDS)
def test_fragments_are_the_same_as_on_the_host(world, terminal_obs, monkeypatch):
    env, _, actor = WORLDS[world]
    plain = taken(lambda: env(PLANS), actor(), 7, 4, terminal_obs=terminal_obs)
    not_on_host(monkeypatch)
    same(taken(lambda: env(PLANS), actor(), 7, 4, terminal_obs=terminal_obs), plain)


# --- what can go wrong


def fails(error, source, *parts, actor=None, n=3, **kwargs):
    with pytest.raises(error) as caught:
        for _ in islice(TensorCollector(source, actor or Constant(0), 4, **kwargs), n):
            pass
    for part in parts:
        assert part in str(caught.value), str(caught.value)


class Odd(TensorEnv):
    "Breaks one rule at its sixth step."

    observation_space = Dict(x=Box(-1, 1, (2,)), n=Discrete(3))
    action_space = Discrete(5)
    n_envs = 3

    def __init__(self, **changes):
        self.changes, self.t = changes, 0

    def look(self):
        return dict(x=torch.zeros(3, 2), n=torch.zeros(3, dtype=torch.long))

    def reset(self, seed):
        return self.look()

    def step(self, act):
        self.t = self.t + 1
        no = torch.zeros(3, dtype=torch.bool)
        answer = dict(
            obs=self.look(),
            rew=torch.zeros(3),
            term=no,
            trunc=no,
            final=None,
            info=dict(a=torch.zeros(3)),
        )
        if self.t == 6:
            answer |= {k: change(answer[k]) for k, change in self.changes.items()}
        return tuple(answer.values())


def put(value, *at):
    def change(x):
        x = x.clone()
        x[at] = value
        return x

    return change


def at(key, change):
    return lambda x: {**x, key: change(x[key])}


def boom(x):
    raise ZeroDivisionError("boom")


@pytest.mark.parametrize(
    "changes, parts",
    [
        (
            dict(obs=at("x", put(torch.nan, 1, 0))),
            ["environment 1 (Odd), leaf obs['x']: non-finite value", "row 2 of the fragment"],
        ),
        (
            dict(obs=at("n", put(3, 2))),
            ["environment 2 (Odd), leaf obs['n']: out of range", "Discrete(3)", "got 3 in row 2"],
        ),
        (
            dict(obs=at("x", lambda x: x[:2])),
            [
                "environment Odd, leaf obs['x']: wrong shape. Expected float32 [3, 2] on cpu, got float32 [2,"
            ],
        ),
        (dict(obs=lambda x: x["x"]), ["obs has the wrong structure: missing obs['n']"]),
        (dict(trunc=lambda x: None), ["truncated has the wrong structure"]),
        (
            dict(trunc=put(True, 1)),
            [
                "environment 1 (Odd), leaf final_obs: an episode ended without its last observation",
                "None in row 2",
            ],
        ),
        (
            dict(
                trunc=put(True, 1),
                final=lambda x: dict(
                    x=torch.full((3, 2), torch.nan), n=torch.zeros(3, dtype=torch.long)
                ),
            ),
            ["environment 1 (Odd), leaf final obs['x']: non-finite value"],
        ),
        (
            dict(trunc=put(True, 1), final=lambda x: torch.zeros(3)),
            ["final_obs has the wrong structure"],
        ),
        (dict(info=lambda x: {}), ["info has the wrong structure: missing info['a']"]),
        (dict(info=lambda x: {**x, "b": x["a"]}), ["unexpected info['b']"]),
        (dict(info=at("a", lambda x: x[None])), ["leaf info['a']: wrong shape"]),
        (dict(rew=boom), ["step() raised ZeroDivisionError: boom"]),
    ],
)
def test_faults_name_the_place(changes, parts):
    fails(EnvError, partial(Odd, **changes), "TensorCollector, lane 0", *parts)


def test_what_began_with_a_wrong_number_is_said():
    "An actor that fails because of what it was shown is not the culprit."

    class Strict(Constant):
        def forward(self, obs, *args, **kwargs):
            assert torch.isfinite(obs["x"]).all()
            return super().forward(obs, *args, **kwargs)

    fails(
        EnvError,
        partial(Odd, obs=at("x", put(torch.nan, 1, 0))),
        "environment 1 (Odd), leaf obs['x']: non-finite",
        actor=Strict(0),
    )
    fails(
        ActorError,
        partial(Odd, rew=boom),
        "environment 0 (Odd), leaf act: out of range",
        "Discrete(5)",
        "got 7",
        actor=From(3, 7),
    )


class From(Constant):
    "Answers 0, and something else from the step `n` on."

    def __init__(self, n, other):
        super().__init__(other)
        self.n, self.asked = n, 0

    def forward(self, obs, act, rew, fin, **kwargs):
        self.asked += 1
        act, *rest = super().forward(obs, act, rew, fin, **kwargs)
        return act if self.asked > self.n else torch.zeros_like(act), *rest


@pytest.mark.parametrize(
    "other, parts",
    [
        (7, ["leaf act: out of range", "an action of Discrete(5)", "got 7 in row 3"]),
        (-1, ["out of range"]),
    ],
)
def test_actions_out_of_range(other, parts):
    fails(ActorError, Odd, "environment 0 (Odd)", *parts, actor=From(3, other))


@pytest.mark.parametrize(
    "dtype, high", [(np.float64, 0.1), (np.float64, np.array([0.1, 0.2])), (np.float32, 0.1)]
)
def test_clipped_actions_lie_in_their_space(dtype, high):
    "Also if the bounds are rounded outwards in the dtype of the actor."
    box = Box(-high, high, (2,), dtype)
    for x, like in product((-5.0, 5.0), (torch.float32, torch.float64)):
        _, (row,) = ActionsForEnv(box, torch.device("cpu"), True)(
            torch.full((1, 1, 2), x, dtype=like)
        )
        assert row.numpy() in box and np.array_equal(row, box.low if x < 0 else box.high)


def test_actions_that_are_not_finite():
    class Swings(Odd):
        action_space = Box(-1, 1, ())

    fails(
        ActorError,
        Swings,
        "environment 0 (Swings), leaf act: non-finite action",
        "nan in row 3",
        actor=From(3, torch.nan),
    )

    class Changing(Constant):
        def forward(self, obs, *args, **kwargs):
            act, *rest = super().forward(obs, *args, **kwargs)
            return act.long() if self.asked_before() else act, *rest

        def asked_before(self):
            self.n = getattr(self, "n", 0) + 1
            return self.n > 4

    fails(
        ActorError,
        Swings,
        "leaf act: wrong dtype. Expected float32 [1, 3]",
        "int64",
        actor=Changing(0.0),
    )


def test_arguments():
    with pytest.raises(DataError, match="n_steps"):
        TensorCollector(Odd, Constant(0), 0)
    with pytest.raises(ActorError, match="method `step`"):
        TensorCollector(Odd, 3, 4)
    with pytest.raises(EnvError, match="unusable"):
        TensorCollector("CartPole-v1", Constant(0), 4)
    with pytest.raises(DataError, match="info_keys"):
        TensorCollector(Odd, Constant(0), 4, info_keys="a")
    with pytest.raises(DataError, match="leaf vector: no option"):
        rollouts(Odd, Constant(0), vector="sync")
    pipe = TensorCollector(Odd, Constant(0), 4)
    pipe.apply_sharding(2, 0)
    with pytest.raises(GraphError, match="2 processes"):
        next(iter(pipe))


def test_chosen_infos():
    (f,) = taken(lambda: Planned(PLANS), Memory(), 4, 1, info_keys=["count"])
    assert f.env.keys() == {"count"} and f.env["count"].dtype == torch.int64


def test_what_is_made_is_closed_and_what_is_lent_is_not():
    class Door(Odd):
        closed = 0

        def close(self):
            Door.closed += 1

    stream = iter(TensorCollector(Door, Constant(0), 4))
    next(stream)
    stream.close()
    assert Door.closed == 1
    mine = Door()
    list(islice(TensorCollector(mine, Constant(0), 4), 2))
    fails(EnvError, lambda: Door(rew=boom), "boom")
    assert Door.closed == 2
    with pytest.raises(
        EnvError, match="environment Door: an environment instance cannot be copied"
    ):
        next(iter(Lanes(TensorCollector(mine, Constant(0), 4), 2)))
    with pytest.raises(EnvError, match="cannot be copied"):
        DataLoader2(
            Lanes(TensorCollector(mine, Constant(0), 4), 1),
            reading_service=ProcessReading(num_workers=1),
        ).__iter__()


def test_actions_are_clipped_for_the_environment_alone():
    class Wants(Pendulum):
        def step(self, act):
            assert act.dtype == torch.float32 and act.abs().max() <= 2
            return super().step(act)

    actor = MLPPolicy.for_env(Pendulum(1), seed=0)
    (f,) = taken(partial(Wants, 50), actor, 20, 1, seed=0)
    assert f.state.act.abs().max() > 2
    with pytest.raises(EnvError, match="AssertionError"):
        taken(partial(Wants, 50), actor, 20, 1, seed=0, clip_actions=False)


# --- the contract kit


@pytest.mark.slow_but_one
@pytest.mark.parametrize(
    "source",
    [
        partial(CartPole, 3, 9),
        Pendulum(2, 5),
        partial(Planned, PLANS),
        partial(PlannedNested, PLANS),
        Odd,
    ],
)
def test_good_environments_keep_the_contract(source):
    assert check_env(source, n_steps=30) == []


class Unseeded(CartPole):
    def reset(self, seed):
        return super().reset(int(torch.randint(1 << 30, ())))


class Nowhere(Odd):
    def reset(self, seed):
        return dict(x=torch.zeros(3, 2, device="meta"), n=torch.zeros(3, dtype=torch.long))


class Countless(Odd):
    n_envs = 0


@pytest.mark.parametrize(
    "source, rule",
    [
        (partial(Odd, obs=at("x", put(torch.nan, 1, 0))), TENSOR_ENV_NUMBERS),
        (partial(Odd, obs=at("n", put(5, 0))), TENSOR_ENV_NUMBERS),
        (partial(Odd, rew=put(torch.inf, 0)), TENSOR_ENV_NUMBERS),
        (partial(Odd, trunc=put(True, 1)), TENSOR_ENV_FINAL),
        (
            partial(
                Odd,
                trunc=put(True, 1),
                final=lambda x: dict(
                    x=torch.full((3, 2), torch.nan), n=torch.zeros(3, dtype=torch.long)
                ),
            ),
            TENSOR_ENV_NUMBERS,
        ),
        (partial(Odd, rew=boom), TENSOR_ENV_STEP),
        (partial(Odd, info=lambda x: {}), TENSOR_ENV_STEP),
        (partial(Unseeded, 2), ENV_SEED),
        (Nowhere, TENSOR_ENV_RESET),
        (Countless, TENSOR_ENV_MADE),
    ],
)
def test_a_broken_rule_is_named(source, rule):
    assert [v.rule for v in check_env(source, n_steps=10, raises=False)] == [rule]


def test_a_wrong_last_observation_is_that_of_its_environment():
    wrong = dict(x=torch.full((3, 2), torch.nan), n=torch.zeros(3, dtype=torch.long))
    source = partial(Odd, trunc=put(True, 2), final=lambda x: wrong)
    (violation,) = check_env(source, n_steps=10, raises=False)
    assert violation.detail == "final_obs: obs['x'] is [nan, nan] in environment 2"


def test_every_rule_of_tensors_has_an_example_that_breaks_it():
    rules = {
        rule for _, rule in next(mark.args[1] for mark in test_a_broken_rule_is_named.pytestmark)
    }
    assert rules > {x for name, x in vars(env_rules).items() if name.startswith("TENSOR_ENV_")}
