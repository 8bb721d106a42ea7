"""One deterministic environment through every adapter, and what vector environments can get wrong."""

import sys
from functools import partial
from itertools import islice

import gymnasium as gym
import numpy as np
import pytest
import reference
import torch
from gymnasium.spaces import Box, Dict, Discrete, Text
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import apply, assert_same, snapshot
from toys import ENDS, Constant, Counting, Ledger, Lively, Memory, Nested, NestedMemory, judge

from rollpipe.layers import MLPPolicy
from rollpipe.pipes import (
    ActorError,
    AdvantageBuffer,
    DataError,
    EnvError,
    EnvStepper,
    FragmentCollector,
    Lanes,
    SpaceError,
    find,
    on_policy,
)

MODES = {mode.name: mode for mode in AutoresetMode}
PLANS = [[(3, "term"), (4, "trunc")], [(1, "trunc"), (2, "both")], [(5, "trunc")]]


class Vectorised(VectorEnv):
    """`Counting`, written for arrays. It uses its memory again, and gives rewards in float64.

    With SAME_STEP the final observations are one array, not an array of objects.
    """

    single_observation_space = Counting.observation_space
    single_action_space = Counting.action_space

    def __init__(self, plans, mode=AutoresetMode.NEXT_STEP):
        self.num_envs = len(plans)
        self.metadata = {"autoreset_mode": mode}
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        size = max(map(len, plans))
        self.length = np.array([[length for length, _ in (plan * size)[:size]] for plan in plans])
        self.kind = np.array(
            [[ENDS.index(end) for _, end in (plan * size)[:size]] for plan in plans]
        )
        self.period = np.array([len(plan) for plan in plans])
        self.tag, self.memory = np.arange(self.num_envs), np.zeros((self.num_envs, 4), np.float32)
        self.asked = []

    def look(self):
        self.memory[:] = np.stack([self.tag, self.episode, self.count, self.last], 1)
        return self.memory

    def begin(self, where):
        self.episode[where] = self.episode[where] + 1
        self.count[where] = 0

    def reset(self, *, seed=None, options=None):
        if options and "reset_mask" in options:
            self.begin(options["reset_mask"])
        else:
            self.asked.append(seed)
            self.episode, self.count, self.last = np.zeros((3, self.num_envs), int)
            self.over = np.zeros(self.num_envs, bool)
        return self.look(), {}

    def step(self, actions):
        assert self.action_space.contains(actions)
        mode = self.metadata["autoreset_mode"]
        busy = self.over if mode is AutoresetMode.NEXT_STEP else np.zeros_like(self.over)
        self.last = np.where(busy, self.last, actions)
        self.count = self.count + 1
        actions[:] = -1
        which = self.episode % self.period
        over = (self.count >= self.length[self.tag, which]) & ~busy
        kind = self.kind[self.tag, which]
        rewards = np.where(busy, 0.0, 100 * self.episode + self.count + self.last / 10)
        self.begin(busy)
        count = self.count.copy() if mode is AutoresetMode.SAME_STEP else self.count
        infos = {
            "count": count,
            "parts": {"half": self.count / 2, "at": np.stack([self.tag, self.last], 1)},
        }
        if mode is AutoresetMode.SAME_STEP and over.any():
            final_obs = self.look().copy()
            now = {"count": np.where(over, 0, self.count)}
            self.begin(over)
            infos = {
                **now,
                "parts": infos["parts"],
                "final_info": infos,
                "final_obs": final_obs,
                "_final_obs": over,
            }
        self.over = over
        return (
            self.look(),
            rewards,
            over & (kind != ENDS.index("trunc")),
            over & (kind != ENDS.index("term")),
            infos,
        )

    def close(self, **kwargs):
        assert not self.closed
        self.closed = True


class Pool:
    "What EnvPool shows of itself in its gymnasium interface: the spaces of one environment, no vector base, no seeds."

    def __init__(self, makers, seed=0):
        self.envs = [make() for make in makers]
        self.all_env_ids = np.arange(len(self.envs), dtype=np.int32)
        self.config = {"num_envs": len(self.envs), "batch_size": len(self.envs)}
        self.is_async = False
        self.observation_space = self.envs[0].observation_space
        self.action_space = self.envs[0].action_space
        self.done = np.zeros(len(self.envs), bool)
        self.made_with = seed

    def send(self, action, env_id=None):
        raise NotImplementedError

    def recv(self):
        raise NotImplementedError

    def join(self, obs):
        return concatenate(
            self.observation_space, obs, create_empty_array(self.observation_space, len(self.envs))
        )

    def info(self):
        parts = {
            "half": np.array([e.count / 2 for e in self.envs]),
            "at": np.array([[e.tag, e.last] for e in self.envs]),
        }
        return {
            "env_id": self.all_env_ids,
            "players": {"env_id": self.all_env_ids},
            "parts": parts,
            "count": np.array([e.count for e in self.envs]),
        }

    def reset(self, env_id=None):
        self.done[:] = False
        return self.join([e.reset()[0] for e in self.envs]), self.info()

    def step(self, action):
        rows = []
        for env, act, done in zip(
            self.envs, iterate(batch_space(self.action_space, len(self.envs)), action), self.done
        ):
            rows.append((env.reset()[0], 0.0, False, False) if done else env.step(act)[:4])
        obs, rew, term, trunc = zip(*rows)
        self.done = np.array(term) | np.array(trunc)
        # a termination at the limit counts as one here, so that all adapters can be compared
        return (
            self.join(obs),
            np.array(rew, np.float32),
            np.array(term),
            np.array(trunc),
            self.info(),
        )

    def close(self):
        for env in self.envs:
            env.close()


def makers(env, plans):
    return [partial(env, plan, tag) for tag, plan in enumerate(plans)]


def builtin(kind, mode, env, plans):
    return lambda: kind(makers(env, plans), autoreset_mode=mode)


ADAPTERS = {
    f"{kind.__name__} {name}": partial(builtin, kind, mode)
    for kind in (SyncVectorEnv, AsyncVectorEnv)
    for name, mode in MODES.items()
}
ADAPTERS["EnvPool"] = lambda env, plans: lambda: Pool(makers(env, plans))
WRITTEN = {
    f"Vectorised {name}": partial(lambda mode, env, plans: lambda: Vectorised(plans, mode), mode)
    for name, mode in MODES.items()
}
WORLDS = {"memory": (Counting, Memory), "nested": (Nested, NestedMemory)}


def fragments(source, actor, n_steps, n, **kwargs):
    return list(islice(FragmentCollector(EnvStepper(source, actor, **kwargs), n_steps), n))


def transitions(stream, b, infos=("count", "parts")):
    "Everything that a fragment says of the valid transitions of environment `b`, one record each."
    found = []
    for f in stream:
        finals = {(t, i): k for k, (t, i) in enumerate(zip(f.final.t.tolist(), f.final.b.tolist()))}
        cut = (f.state.fin & ~f.term)[1:] & f.valid
        assert len(finals) == len(f.final.t) and sorted(finals) == sorted(
            map(tuple, cut.nonzero().tolist())
        )
        for t in f.valid[:, b].nonzero()[:, 0].tolist():
            now, after = (apply(lambda x, i=i: x[i, b], f.state) for i in (t, t + 1))
            actor, told = apply(lambda x, t=t: x[t, b], (f.actor, {k: f.env[k] for k in infos}))
            record = dict(
                stepno=now.stepno,
                obs=now.obs,
                fin=now.fin,
                actor=actor,
                act=after.act,
                rew=after.rew,
                ended=after.fin,
                term=f.term[t + 1, b],
                env=told,
            )
            if not now.fin:
                record["before"] = now.act, now.rew
            if not after.fin:
                record["then"] = after.obs, after.stepno
            if (k := finals.get((t, b))) is not None:
                record["final"] = apply(lambda x, k=k: x[k], (f.final.obs, f.final.actor))
            found.append(snapshot(record))
    return found


def statistics(stream, b):
    "(return, length) of the episodes of environment `b`."
    found = []
    total = 0.0
    length = 0
    for f in stream:
        for t in range(f.n_steps):
            total = total + float(f.state.rew[t + 1, b] * f.valid[t, b])
            length = length + int(f.valid[t, b])
            if f.valid[t, b] and f.state.fin[t + 1, b]:
                found = [*found, (total, length)]
                total = 0.0
                length = 0
    return found


def check_adapter(source, env, actor, plans, n_steps):
    expected = fragments(makers(env, plans), actor, n_steps, 6)
    found = fragments(source, actor, n_steps, 6)
    for b in range(len(plans)):
        a = transitions(found, b)
        e = transitions(expected, b)
        assert len(a) >= len(e) / 2 and len(e) == 6 * n_steps
        for x, y in zip(a, e):
            assert_same(x, y)
        s = statistics(found, b)
        assert s == statistics(expected, b)[: len(s)]
    for f in found:
        idle = ~f.valid
        assert (
            f.state.fin[1:][idle].all()
            and not f.term[1:][idle].any()
            and (f.state.rew[1:][idle] == 0).all()
        )
        assert (f.state.stepno[f.state.fin] == 0).all()
        count = f.env["count"][idle]
        assert (count == 0).all()
    for before, f in zip(found, found[1:]):
        assert_same(
            apply(lambda x: x[-1], (before.state, before.term)),
            apply(lambda x: x[0], (f.state, f.term)),
        )
    return found


@pytest.mark.slow_but_one
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_every_adapter_gives_the_same_transitions(adapter, world):
    env, actor = WORLDS[world]
    for n_steps in (4, 7):
        check_adapter(ADAPTERS[adapter](env, PLANS), env, actor(), PLANS, n_steps)


@pytest.mark.slow_but_one
@pytest.mark.parametrize(
    "adapter", [*WRITTEN, "SyncVectorEnv NEXT_STEP", "SyncVectorEnv SAME_STEP", "EnvPool"]
)
@settings(deadline=None, max_examples=15)
@given(
    plans=st.lists(
        st.lists(st.tuples(st.integers(1, 5), st.sampled_from(ENDS)), min_size=1, max_size=3),
        min_size=1,
        max_size=3,
    ),
    n_steps=st.integers(1, 7),
)
def test_transitions_of_random_episodes(adapter, plans, n_steps):
    check_adapter(
        {**WRITTEN, **ADAPTERS}[adapter](Counting, plans), Counting, Memory(), plans, n_steps
    )


@pytest.mark.parametrize(
    "adapter",
    [
        "SyncVectorEnv SAME_STEP",
        "AsyncVectorEnv DISABLED",
        "Vectorised SAME_STEP",
        "Vectorised DISABLED",
    ],
)
def test_without_phantoms_the_fragments_are_identical(adapter):
    source = {**WRITTEN, **ADAPTERS}[adapter](Counting, PLANS)
    for f, e in zip(
        fragments(source, Memory(), 5, 4), fragments(makers(Counting, PLANS), Memory(), 5, 4)
    ):
        assert_same(f, e)
        assert f.valid.all()


def test_a_phantom_step_by_hand():
    (f,) = fragments(lambda: Vectorised([[(2, "trunc"), (2, "term")]]), Memory(), 6, 1)
    assert f.state.obs[:, 0, 2].tolist() == [0, 1, 2, 0, 1, 2, 0]  # step within the episode
    assert f.state.obs[:, 0, 1].tolist() == [0, 0, 0, 1, 1, 1, 2]  # episode
    assert f.valid[:, 0].tolist() == [True, True, False, True, True, False]
    assert f.state.fin[:, 0].tolist() == [True, False, True, True, False, True, True]
    assert f.state.stepno[:, 0].tolist() == [0, 1, 0, 0, 1, 0, 0]
    assert f.term[:, 0].tolist() == [False] * 5 + [True, False]
    assert f.state.rew[3, 0] == f.state.rew[6, 0] == 0
    assert f.final.t.tolist() == [1] and f.final.obs.tolist() == [[0, 0, 2, f.final.obs[0, 3]]]


@pytest.mark.parametrize("gamma, lam", [(0.9, 0.8), (1.0, 1.0)])
def test_rows_that_are_not_valid_have_no_advantage_and_reach_no_neighbour(gamma, lam):
    pipe = AdvantageBuffer(
        FragmentCollector(EnvStepper(lambda: Vectorised(PLANS), Memory()), 9), judge, gamma, lam
    )
    for f in islice(pipe, 4):
        assert (f.adv[~f.valid] == 0).all() and not f.valid.all()
        v = judge(f.state.obs)
        assert torch.equal(f.ret, (f.adv + v[:-1]).masked_fill(~f.valid, 0.0))
        for b in range(f.n_envs):
            rows = f.valid[:, b].nonzero()[:, 0].tolist()
            last = {
                t: float(judge(obs))
                for t, i, obs in zip(f.final.t.tolist(), f.final.b.tolist(), f.final.obs)
                if i == b
            }
            column = lambda x, b=b, rows=rows: x[1:, b][rows].tolist()
            # where an episode goes on, the next valid row is the next row
            after = [*v[:-1, b][rows].tolist(), float(v[rows[-1] + 1, b])]
            cut = {i: last[t] for i, t in enumerate(rows) if t in last}
            expected = reference.gae(
                column(f.state.rew), after, cut, column(f.state.fin), column(f.term), gamma, lam
            )
            assert np.allclose(f.adv[:, b][rows], expected, atol=1e-3)


# --- ids, seeds, lanes


@pytest.mark.parametrize("vector", ["sync", "async"])
def test_a_vector_of_an_id_is_what_single_environments_are(vector):
    actor = MLPPolicy.for_env("CartPole-v1", seed=1)
    kwargs = dict(n_envs=3, seed=5, env_kwargs=dict(max_episode_steps=11))
    for f, e in zip(
        fragments("CartPole-v1", actor, 30, 3, vector=vector, **kwargs),
        fragments("CartPole-v1", actor, 30, 3, **kwargs),
    ):
        assert_same(f, e)
        assert len(f.final.t)


class OneArray(gym.Env):
    "Counts its steps in an array that it returns each time; an episode is truncated after five."

    observation_space = Box(0, 9, (1,))
    action_space = Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.count = getattr(self, "count", np.zeros(1, np.float32))
        self.count[:] = 0
        return self.count, {}

    def step(self, action):
        self.count += 1
        return self.count, 1.0, False, bool(self.count == 5), {}


gym.register("OneArray-v0", OneArray)


@pytest.mark.parametrize("vector", ["sync", "async"])
@pytest.mark.parametrize("env_kwargs", [{}, dict(wrappers=[gym.wrappers.OrderEnforcing])])
def test_the_last_observation_stays_if_the_environment_writes_the_next_one_into_the_same_array(
    vector, env_kwargs
):
    (f,) = fragments(
        "OneArray-v0",
        MLPPolicy.for_env("OneArray-v0"),
        6,
        1,
        n_envs=2,
        vector=vector,
        env_kwargs=env_kwargs,
    )
    assert f.final.obs.tolist() == [[5.0], [5.0]] and f.state.obs[:, 0, 0].tolist() == [
        0,
        1,
        2,
        3,
        4,
        0,
        1,
    ]


def test_a_factory_may_return_a_vector_environment():
    def source():
        return SyncVectorEnv([Lively] * 4, autoreset_mode="SameStep")

    actor = MLPPolicy.for_env(source, seed=1)
    for n_envs in (None, 4):
        one_by_one = fragments(Lively, actor, 20, 3, n_envs=4, seed=2)
        for f, e in zip(fragments(source, actor, 20, 3, n_envs=n_envs, seed=2), one_by_one):
            assert_same(f, e)


def test_seeds():
    "One seed for each where that is known to work, one integer for other implementations, none for an EnvPool but the factory's."
    Ledger.clear()
    fragments(lambda: SyncVectorEnv([Lively] * 3), MLPPolicy.for_env(Lively), 5, 1, seed=0)
    first = Ledger.seeds[:3]
    assert len(set(first)) == 3 and None not in first and set(Ledger.seeds[3:]) <= {None}
    made = []

    def keep(x):
        made.append(x)
        return x

    fragments(lambda: keep(Vectorised(PLANS)), Memory(), 5, 1, seed=0)
    assert made[0].asked == [first[0]]
    fragments(lambda seed: keep(Pool(makers(Counting, PLANS), seed)), Memory(), 5, 1, seed=0)
    assert 0 < made[1].made_with < 2**31


def test_lanes_make_and_close_their_own():
    made = []

    def source():
        made.append(Vectorised(PLANS))
        return made[-1]

    pipe = Lanes(FragmentCollector(EnvStepper(source, Memory()), 4), 3, seed=0)
    assert not made and [f.lane[0].item() for f in islice(pipe, 6)] == [0, 1, 2] * 2
    assert len(made) == 3 and len({vec.asked[0] for vec in made}) == 3
    pipe = EnvStepper(source, Memory())
    stream = iter(pipe)
    next(stream)
    assert not made[-1].closed
    stream.close()
    assert made[-1].closed


def test_on_policy_over_a_vector():
    actor = MLPPolicy.for_env("CartPole-v1", seed=1)
    pipe = on_policy(
        "CartPole-v1",
        actor,
        judge,
        n_envs=16,
        n_steps=40,
        lanes=2,
        seed=0,
        vector="vector_entry_point",
    )
    batch = next(iter(pipe))
    assert (
        batch.adv.shape == (40, 32)
        and not batch.valid.all()
        and (batch.adv[~batch.valid] == 0).all()
    )
    assert find(pipe, EnvStepper)[0].n_envs == 16


def test_no_loop_over_environments():
    "As many Python calls in a tick of 256 environments as in one of 8."

    def calls(n_envs):
        stream = iter(
            EnvStepper(
                "CartPole-v1",
                MLPPolicy.for_env("CartPole-v1"),
                n_envs,
                vector="vector_entry_point",
                seed=0,
            )
        )
        for _ in range(3):
            next(stream)
        count = []
        sys.setprofile(lambda frame, event, arg: count.append(event))
        try:
            next(stream)
        finally:
            sys.setprofile(None)
        stream.close()
        return len(count)

    assert calls(256) <= calls(8) + 5


# --- infos


class Telling(Counting):
    "Says more at some steps than at others."

    def step(self, action):
        *rest, info = super().step(action)
        info = {"count": self.count, "flag": np.bool_(self.count % 2), "name": "text"}
        if self.count == 2:
            info["late"] = 2.5
        if self.tag:
            info["own"] = self.count
        return *rest, info


@pytest.mark.parametrize("mode", ["SameStep", "Disabled"])
def test_infos_are_those_of_single_environments(mode):
    plans = [[(2, "trunc")], [(3, "term")]]
    for keys in (None, ("late", "count")):
        kwargs = dict(info_keys=keys)
        for f, e in zip(
            fragments(
                lambda: SyncVectorEnv(makers(Telling, plans), autoreset_mode=mode),
                Memory(),
                5,
                3,
                **kwargs,
            ),
            fragments(makers(Telling, plans), Memory(), 5, 3, **kwargs),
        ):
            # The second step of an episode says more, and only the second environment says something of its own.
            assert set(e.env) == {"count", "late", "_late"} | (
                set() if keys else {"flag", "own", "_own"}
            )
            assert torch.equal(e.env["_late"], e.env["count"] == 2)
            if keys is None:
                assert not e.env["_own"][:, 0].any() and e.env["_own"][:, 1].all()
            assert_same(apply(lambda x: x.double(), f.env), apply(lambda x: x.double(), e.env))


# --- what can go wrong


def fails(error, source, *parts, actor=None, n=12, **kwargs):
    with pytest.raises(error) as caught:
        for _ in islice(EnvStepper(source, actor or Memory(), **kwargs), n):
            pass
    for part in parts:
        assert part in str(caught.value), str(caught.value)


class Odd(Vectorised):
    "Breaks one rule at its fourth step."

    def __init__(self, rule, mode=AutoresetMode.NEXT_STEP):
        super().__init__([[(3, "trunc")], [(9, "term")]], mode)
        self.rule, self.t = rule, 0

    def step(self, actions):
        obs, rew, term, trunc, infos = super().step(actions)
        self.t += 1
        return self.rule(self.t, obs.copy(), rew, term, trunc, infos)


def broken(**changes):
    def rule(t, obs, rew, term, trunc, infos):
        now = dict(obs=obs, rew=rew, term=term, trunc=trunc, infos=infos)
        if t == 4:
            now.update({k: change(now[k]) for k, change in changes.items()})
        return tuple(now.values())

    return lambda: Odd(rule)


def nan_in_1(x):
    x = x.astype(np.float32)
    x[1] = np.nan
    return x


def boom(x):
    raise ZeroDivisionError("boom")


def endless(infos):
    me = {}
    me["me"] = me
    return {**infos, "count": me}


@pytest.mark.parametrize(
    "error, source, parts",
    [
        (EnvError, broken(obs=nan_in_1), ["lane 0, environment 1 (", "leaf obs: non-finite value"]),
        (EnvError, broken(rew=nan_in_1), ["environment 1 (", "leaf rew: non-finite value"]),
        (
            EnvError,
            broken(rew=lambda x: x[:, None]),
            ["one reward for each environment", "numbers [2]", "[2, 1]"],
        ),
        (EnvError, broken(term=lambda x: x.astype(int)), ["one termination for each", "bool [2]"]),
        (EnvError, broken(trunc=lambda x: x[:1]), ["one truncation for each"]),
        (
            EnvError,
            broken(trunc=lambda x: ~x),
            ["ended while it was reset", "environment 0 (", "NextStep"],
        ),
        (
            EnvError,
            broken(obs=boom),
            ["step() raised ZeroDivisionError: boom", "EnvStepper, lane 0"],
        ),
        (
            DataError,
            broken(obs=lambda x: x[:, :2]),
            ["leaf obs: wrong shape", "float32 [2, 4]", "[2, 2]"],
        ),
        (
            EnvError,
            broken(obs=lambda x: torch.ones(2, 4, requires_grad=True).exp()),
            ["leaf obs", "no array"],
        ),
        (DataError, broken(obs=lambda x: {"a": x}), ["obs has the wrong structure"]),
        (
            EnvError,
            broken(infos=lambda x: None),
            ["lane 0", "environment <lambda>", "leaf infos", "no dict", "got None"],
        ),
        (
            EnvError,
            broken(infos=lambda x: [{}, {}]),
            ["lane 0", "environment <lambda>", "leaf infos", "no dict", "got [{}, {}]"],
        ),
        (
            EnvError,
            broken(infos=lambda x: endless(x)),
            ["lane 0", "environment <lambda>", "info['count']", "contains itself"],
        ),
        (
            EnvError,
            broken(infos=lambda x: {**x, "count": np.zeros((2, 3))}),
            ["info['count']", "changed their form"],
        ),
    ],
)
def test_faults_name_the_place(error, source, parts):
    fails(error, source, *parts)


class Whole(VectorEnv):
    "Two environments that observe whole numbers; the second one says `n` at the second step."

    metadata = dict(autoreset_mode=AutoresetMode.NEXT_STEP)
    num_envs = 2
    single_observation_space = Dict(n=Discrete(4), x=Box(-9, 9, (), np.int8))
    single_action_space = Discrete(2)
    observation_space = batch_space(single_observation_space, 2)
    action_space = batch_space(single_action_space, 2)

    def __init__(self, **second):
        self.second, self.t = second, 0

    def reset(self, **_):
        return dict(n=np.zeros(2, np.int64), x=np.zeros(2, np.int8)), {}

    def step(self, actions):
        obs = self.reset()[0]
        none = np.zeros(2, bool)
        self.t = self.t + 1
        if self.t == 2:
            obs |= {k: np.array([0, v]) for k, v in self.second.items()}
        return obs, np.zeros(2), none, none, {}


@pytest.mark.parametrize(
    "second, parts",
    [
        (dict(n=4), ["leaf obs['n']: out of range", "Discrete(4)", "got 4"]),
        (dict(x=200), ["leaf obs['x']: an integer does not fit", "127, as int8", "got 200"]),
    ],
)
def test_whole_numbers_that_do_not_fit(second, parts):
    fails(EnvError, lambda: Whole(**second), "lane 0, environment 1 (", *parts, actor=Constant(0))


def test_final_observations_that_are_missing_or_wrong():
    def without(t, obs, rew, term, trunc, infos):
        return obs, rew, term, trunc, {}

    fails(EnvError, lambda: Odd(without, AutoresetMode.SAME_STEP), "info['final_obs']")

    def bad(t, obs, rew, term, trunc, infos):
        if "final_obs" in infos:
            infos["final_obs"][:] = np.nan
        return obs, rew, term, trunc, infos

    fails(
        EnvError,
        lambda: Odd(bad, AutoresetMode.SAME_STEP),
        "environment 0 (",
        "final obs",
        "non-finite",
    )


def test_what_does_not_fit_is_refused():
    def vec():
        return Vectorised(PLANS)

    def silent():
        made = vec()
        made.metadata = {}
        return made

    def asynchronous():
        pool = Pool(makers(Counting, PLANS))
        pool.is_async = True
        return pool

    class Talking(Counting):
        observation_space = Dict(x=Box(0, 1), says=Text(5))

    fails(EnvError, silent, "metadata['autoreset_mode']", "must say when")
    fails(EnvError, asynchronous, "asynchronous EnvPool", "batch_size")
    fails(SpaceError, lambda: SyncVectorEnv([Talking]), "['says']")
    fails(EnvError, vec, "n_envs=3, as in the vector", n_envs=2)
    fails(EnvError, vec, "cannot rest", sticky=4)
    fails(EnvError, [Counting, vec], "a batch by itself", "environment 1")
    fails(EnvError, [vec, Counting], "several sources")
    fails(EnvError, "CartPole-v1", "cannot rest", vector="sync", sticky=4)
    fails(EnvError, "CartPole-v1", "one of sync, async", vector="threads")
    fails(EnvError, "CartPole-v1", "n_envs=0", vector="sync", n_envs=0)
    fails(EnvError, "CartPool-v1", "CartPole-v1", vector="sync")
    fails(EnvError, Counting, "`vector` is for ids", vector="sync")
    fails(EnvError, "Acrobot-v1", "could not be made", vector="vector_entry_point")

    class Wide(Memory):
        def choose(self, number):
            return number.double()

    fails(ActorError, vec, "wrong action", actor=Wide())


@pytest.mark.filterwarnings("ignore:.*(Worker-1|last exception|Traceback)")
def test_an_async_environment_that_fails_leaves_nothing_behind():
    class Failing(Counting):
        def step(self, action):
            if self.count == 2:
                raise ZeroDivisionError("boom")
            return super().step(action)

    fails(
        EnvError,
        lambda: AsyncVectorEnv([Counting, Failing]),
        "step() raised ZeroDivisionError",
        "boom",
    )


def test_closing_that_fails_is_told():
    class Stuck(Vectorised):
        def close(self, **kwargs):
            self.closed = True
            raise ZeroDivisionError("boom")

    stream = iter(EnvStepper(lambda: Stuck(PLANS), Memory()))
    next(stream)
    told = r"EnvStepper, lane 0, environment <lambda>: close\(\) raised ZeroDivisionError: boom"
    with pytest.warns(UserWarning, match=told):
        stream.close()


def test_actions_of_a_vector():
    "Clipped and cast for the environment, recorded as chosen."

    class Wants(SyncVectorEnv):
        def step(self, actions):
            assert actions.dtype == np.float32 and abs(actions).max() <= 1
            return super().step(actions)

    actor = MLPPolicy.for_env(Lively)
    with torch.no_grad():
        for p in actor.parameters():
            p.add_(1.0)
    (f,) = fragments(lambda: Wants([Lively] * 2), actor, 30, 1, seed=0)
    assert f.state.act.abs().max() > 1


# --- the real one


def test_envpool():
    pytest.importorskip("envpool")
    actor = MLPPolicy.for_env("CartPole-v1", seed=0)
    kwargs = dict(n_envs=5, vector="envpool", env_kwargs=dict(max_episode_steps=12), seed=3)
    a, b = (fragments("CartPole-v1", actor, 40, 3, **kwargs) for _ in range(2))
    assert_same(a, b)
    for f in a:
        assert (
            not f.valid.all()
            and (f.state.rew[1:][f.valid] == 1).all()
            and (f.state.rew[1:][~f.valid] == 0).all()
        )
        assert (f.env["elapsed_step"][f.valid] == f.state.stepno[:-1][f.valid] + 1).all()
        assert torch.equal(f.final.obs, f.state.obs[f.final.t + 1, f.final.b])
        assert len(f.final.t) and (f.state.stepno[f.final.t, f.final.b] == 11).all()
    assert all(n == total <= 12 for b in range(5) for total, n in statistics(a, b))
