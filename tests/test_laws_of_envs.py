"""What holds for every kind of batch of environments: single ones, gymnasium's vectors, an EnvPool, agents, and tensors.

A kind makes a batch of the same single environments, so the stream of these is the oracle. A new kind gets a row in `KINDS`.
"""

from functools import partial
from itertools import islice

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Discrete
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import apply, assert_same, differences, snapshot
from resuming import encoded
from test_vector import PLANS, Pool, Vectorised
from toys import (
    ENDS,
    Alone,
    Constant,
    Counting,
    InTensors,
    Ledger,
    Lively,
    Memory,
    Nested,
    NestedMemory,
    OwnState,
    Scripted,
    Shaky,
    at,
    fail,
)

from rollpipe.layers import MLPPolicy
from rollpipe.pipes import EnvError, EnvStepper, FragmentCollector
from rollpipe.pipes.envs.agents import Agents
from rollpipe.pipes.graph.pipe import restore_stream, stream_state
from rollpipe.pipes.passes import keep_as
from rollpipe.pipes.tensors.collector import TensorCollector
from rollpipe.testing import check_pipe

INFOS = ("count", "parts")


# --- the kinds of batches


def agents(makes):
    remaining = iter(makes)
    return Agents(lambda: Alone(next(remaining)()), len(makes))


def vector_of(kind, mode, makes, **options):
    return lambda: kind(makes, autoreset_mode=mode, **options)


MODES = {mode.name: mode for mode in AutoresetMode}
SYNC = {f"SyncVectorEnv {name}": partial(vector_of, SyncVectorEnv, x) for name, x in MODES.items()}
ASYNC = {
    f"AsyncVectorEnv {name}": partial(vector_of, AsyncVectorEnv, x) for name, x in MODES.items()
}

# kind -> function of the factories of single environments that gives a source of a batch
KINDS = {
    "single": lambda makes: makes,
    **SYNC,
    "vector without copies": partial(vector_of, SyncVectorEnv, MODES["SAME_STEP"], copy=False),
    "EnvPool": lambda makes: lambda: Pool(makes),
    "agents": lambda makes: lambda: agents(makes),
    "tensors": lambda makes: lambda: InTensors(makes, INFOS),
}
# vectors that are written for arrays, use their memory again, and overwrite the actions
WRITTEN = {
    f"Vectorised {name}": lambda makes, mode=mode: (
        lambda: Vectorised([m.args[0] for m in makes], mode)
    )
    for name, mode in MODES.items()
}
RESETS_IN_A_STEP = (
    "Vectorised NEXT_STEP",
    "SyncVectorEnv NEXT_STEP",
    "AsyncVectorEnv NEXT_STEP",
    "EnvPool",
)
OTHERS = [kind for kind in KINDS if kind != "single"]


def pipe_of(kind, makes, actor, n_steps, **options):
    "A pipe of fragments of a batch of this kind."
    source = {**KINDS, **ASYNC, **WRITTEN}[kind](makes)
    if kind == "tensors":
        return TensorCollector(source, actor, n_steps, **options)
    return FragmentCollector(EnvStepper(source, actor, **options), n_steps)


def fragments(kind, makes, actor, n_steps, n, **options):
    return list(islice(pipe_of(kind, makes, actor, n_steps, **options), n))


# --- one stream


def transitions(stream, b):
    "Everything that a fragment says of the valid transitions of environment `b`, one record each."
    found = []
    for f in stream:
        # Each episode that was cut off has its last observation, and nothing else has one.
        finals = {(t, i): k for k, (t, i) in enumerate(zip(f.final.t.tolist(), f.final.b.tolist()))}
        cut = (f.state.fin & ~f.term)[1:] & f.valid
        assert len(finals) == len(f.final.t)
        assert sorted(finals) == sorted(map(tuple, cut.nonzero().tolist()))

        for t in f.valid[:, b].nonzero()[:, 0].tolist():
            now, after = (apply(lambda x, i=i: x[i, b], f.state) for i in (t, t + 1))
            infos = {name: f.env[name] for name in INFOS}
            actor, told = apply(lambda x, t=t: x[t, b], (f.actor, infos))
            record = dict(
                now=(now.stepno, now.obs, now.fin),
                reaction=(actor, after.act),
                answer=(after.rew, after.fin, f.term[t + 1, b], told),
            )
            if not now.fin:
                record["before"] = now.act, now.rew
            if not after.fin:
                record["then"] = after.obs, after.stepno
            if (t, b) in finals:
                k = finals[t, b]
                record["final"] = apply(lambda x, k=k: x[k], (f.final.obs, f.final.actor))
            found.append(snapshot(record))
    return found


def check_kind(kind, env, actor, plans, n_steps):
    "Compare all transitions with those of single environments; rows that are none are marked."
    makes = [partial(env, plan, tag) for tag, plan in enumerate(plans)]
    expected = fragments("single", makes, actor, n_steps, 6)
    found = fragments(kind, makes, actor, n_steps, 6)
    if kind not in RESETS_IN_A_STEP:
        assert all(f.valid.all() for f in found)

    for b in range(len(plans)):
        ours = transitions(found, b)
        theirs = transitions(expected, b)
        assert len(ours) >= len(theirs) / 2
        for x, y in zip(ours, theirs):
            assert_same(x, y)

    for f in found:
        idle = ~f.valid
        assert f.state.fin[1:][idle].all() and not f.term[1:][idle].any()
        assert (f.state.rew[1:][idle] == 0).all() and (f.env["count"][idle] == 0).all()
        assert (f.state.stepno[f.state.fin] == 0).all()
    for before, after in zip(found, found[1:]):
        last = apply(lambda x: x[-1], (before.state, before.term))
        assert_same(last, apply(lambda x: x[0], (after.state, after.term)))


@pytest.mark.parametrize("kind", OTHERS)
def test_every_kind_gives_the_transitions_of_single_environments(kind):
    "Nested observations and actions of several dtypes."
    for n_steps in (4, 7):
        check_kind(kind, Nested, NestedMemory(), PLANS, n_steps)


@pytest.mark.slow_but_one
@pytest.mark.parametrize("kind", ASYNC)
def test_vectors_of_processes_give_the_transitions_of_single_environments(kind):
    for env, actor in ((Counting, Memory()), (Nested, NestedMemory())):
        check_kind(kind, env, actor, PLANS, 4)


@pytest.mark.slow_but_one
@pytest.mark.parametrize("kind", [*OTHERS, *WRITTEN])
@settings(deadline=None, max_examples=8)
@given(
    plans=st.lists(
        st.lists(st.tuples(st.integers(1, 5), st.sampled_from(ENDS)), min_size=1, max_size=3),
        min_size=1,
        max_size=3,
    ),
    n_steps=st.integers(1, 7),
)
def test_random_episodes_are_those_of_single_environments(kind, plans, n_steps):
    check_kind(kind, Counting, Memory(), plans, n_steps)


# --- seeds, lanes, closing, states: the contract of pipes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("env", [Lively, OwnState])
def test_every_kind_keeps_the_contract_of_pipes(kind, env):
    "A seed fixes the stream, in copies too; items stay as they are; a state at any item goes on exactly; all is closed."
    if kind == "EnvPool":
        pytest.skip("the factory of an EnvPool gets its seed by another name")
    Ledger.clear()
    actor = Shaky() if env is Lively else Memory()
    check_pipe(lambda: pipe_of(kind, [env] * 2, actor, 4, seed=3))
    assert Ledger.open() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_each_environment_has_a_seed_of_its_own_once(kind):
    "It comes with the first reset of an iteration; all later resets have none."
    Ledger.clear()
    makes = [partial(Counting, [(2, "trunc")], tag) for tag in range(3)]
    pipe = pipe_of(kind, makes, Memory(), 9, seed=5)
    for _ in range(2):
        list(islice(pipe, 2))
    # 0 is the seed of a test of the last observations, which has environments of its own.
    seeds = [seed for seed in Ledger.seeds if seed]
    n_seeds = 0 if kind == "EnvPool" else 3
    assert len(set(seeds)) == n_seeds and seeds == seeds[:n_seeds] * 2
    assert len(Ledger.seeds) > 12


# --- errors


def seen(value, when):
    "A rule: the observation of `Counting`, in which one number is `value` in the moment `when`."

    def see(env):
        obs = Counting.look(env)
        if when(env):
            obs[2] = value
        return obs

    return see


def in_step(env):
    return (env.episode, env.count) == (0, 2)


def at_first(env):
    return (env.episode, env.count) == (0, 0)


def at_second_reset(env):
    return (env.episode, env.count) == (1, 0)


def at_the_end(env):
    return (env.episode, env.count) == (0, 3)


BOOM = fail(ZeroDivisionError("boom"))
CUT = [(3, "trunc")]

# fault -> rules of environment 1, and parts of the message
FAULTS = {
    "NaN in a step": (
        dict(see=seen(np.nan, in_step)),
        ["leaf obs", "non-finite", "Expected finite"],
    ),
    "infinity in a step": (dict(see=seen(-np.inf, in_step)), ["leaf obs", "non-finite", "-inf"]),
    "NaN at the begin": (dict(see=seen(np.nan, at_first)), ["leaf obs", "non-finite"]),
    "NaN at a reset": (dict(see=seen(np.inf, at_second_reset)), ["leaf obs", "non-finite"]),
    "NaN in the last observation": (dict(see=seen(np.nan, at_the_end)), ["obs", "non-finite"]),
    "NaN as a reward": (dict(pay=np.nan), ["leaf rew", "non-finite", "Expected finite"]),
    "infinite reward": (dict(pay=-np.inf), ["leaf rew", "non-finite", "-inf"]),
}


GEARS = dict(observation_space=Discrete(4, start=1), see=lambda env: 5 if in_step(env) else 1)
FAULTS["number out of range"] = GEARS, ["leaf obs", "out of range", "Discrete(4, start=1)", "got 5"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_number_that_cannot_be_names_environment_and_leaf(fault, kind):
    rules, parts = FAULTS[fault]
    sound = rules | dict(see=1) if rules is GEARS else {}
    makes = [partial(Scripted, CUT, **sound), partial(Scripted, CUT, 1, **rules)]
    with pytest.raises(EnvError) as caught:
        fragments(kind, makes, Constant(0), 4, 3)
    text = str(caught.value)
    pipe = "TensorCollector" if kind == "tensors" else "EnvStepper"
    assert text.startswith(f"{pipe}, lane 0, environment 1 "), text
    for part in parts:
        assert part in text, f"{part!r} is not in {text!r}"


CALLS = {
    "make": "could not be made: ZeroDivisionError: boom",
    "reset": "reset() raised ZeroDivisionError: boom",
    "step": "step() raised ZeroDivisionError: boom",
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "call, n", [("make", 1), ("reset", 1), ("reset", 2), ("step", 1), ("step", 5)]
)
def test_an_environment_that_raises_is_told_with_its_call(call, n, kind):
    "A later reset is within a step, where the batch resets its environments itself."
    Ledger.clear()
    makes = [Counting, partial(Scripted, CUT, 1, before={call: at(n, BOOM)})]
    with pytest.raises(EnvError) as caught:
        fragments(kind, makes, Memory(), 4, 3)
    told = CALLS[call] if n == 1 or kind == "single" else "() raised ZeroDivisionError: boom"
    assert told in str(caught.value) and "lane 0, environment" in str(caught.value)
    if call != "make":
        assert Ledger.open() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_closing_that_fails_is_a_warning_that_names_the_environment(kind):
    makes = [Counting, partial(Scripted, before={"close": BOOM})]
    items = iter(pipe_of(kind, makes, Memory(), 4))
    next(items)
    with pytest.warns(
        UserWarning, match=r"lane 0, environment .*close\(\) raised ZeroDivisionError: boom"
    ):
        items.close()


# --- states


def told_late(env):
    "Infos of which one comes late."
    is_late = env.episode > 1
    return {"count": env.count} | ({"late": env.episode / 2} if is_late else {})


def cart():
    env = gym.make("CartPole-v1", max_episode_steps=7)
    return gym.wrappers.NormalizeObservation(gym.wrappers.RecordEpisodeStatistics(env))


def scripted(kind, n_steps):
    makes = [partial(Scripted, plan, tag, tell=told_late) for tag, plan in enumerate(PLANS)]
    return pipe_of(kind, makes, Memory(), n_steps, seed=3)


def carts(kind, n_steps):
    options = dict(seed=3, info_keys=["episode"])
    return pipe_of(kind, [cart] * 3, MLPPolicy.for_env(cart, seed=0), n_steps, **options)


# way to keep -> what makes a pipe, and the kinds that a test at the start may keep so
WAYS = {
    "replay (all)": (scripted, [kind for kind in KINDS if kind != "EnvPool"]),
    "replay (episode)": (scripted, ["single"]),
    "copy": (carts, ["single", *SYNC]),
}
KEPT = [(way, kind) for way, (_, kinds) in WAYS.items() for kind in kinds]


@pytest.mark.parametrize("way, kind", KEPT)
def test_a_stream_goes_on_from_its_state_at_any_item(way, kind):
    "Also where an environment is about to be reset, and before and after an info comes late."
    n = 7
    make, _ = WAYS[way]

    def resumed(k, state=None):
        pipe = make(kind, 2)
        keep_as(pipe, [way])
        if state is not None:
            restore_stream(pipe, state)
        items = iter(pipe)
        found = list(map(snapshot, islice(items, k)))
        for f in found:
            f.env.get("episode", {}).pop("t", None)  # a duration on the clock
        return found, encoded(stream_state(pipe))

    whole, _ = resumed(n)
    for k in range(1, n):
        first, state = resumed(k)
        rest, _ = resumed(n - k, state)
        for i, (x, y) in enumerate(zip(first + rest, whole, strict=True)):
            assert not differences(x, y), f"item {i}, from a state after {k}"
