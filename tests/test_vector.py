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
from reference import assert_same
from toys import ENDS, Acts, Constant, Counting, Lively, Memory, Scripted, at, fail, judge

from rollpipe.layers import MLPPolicy
from rollpipe.pipes import (
    AdvantageBuffer,
    DataError,
    EnvError,
    EnvStepper,
    FragmentCollector,
    Lanes,
    PipeError,
    find,
    on_policy,
)
from rollpipe.pipes.envs.factories import VectorFactory

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


def fragments(source, actor, n_steps, n, **kwargs):
    return list(islice(FragmentCollector(EnvStepper(source, actor, **kwargs), n_steps), n))


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


def test_seeds_of_vectors_that_are_not_gymnasiums():
    "One integer for other implementations, none for an EnvPool but the factory's."
    made = []

    def keep(x):
        made.append(x)
        return x

    fragments(lambda: keep(Vectorised(PLANS)), Memory(), 5, 1, seed=0)
    assert len(made[0].asked) == 1 and made[0].asked[0] >= 0
    fragments(lambda seed: keep(Pool(makers(Counting, PLANS), seed)), Memory(), 5, 1, seed=0)
    assert 0 < made[1].made_with < 2**31


def test_lanes_make_their_own_vectors():
    made = []

    def source():
        made.append(Vectorised(PLANS))
        return made[-1]

    pipe = Lanes(FragmentCollector(EnvStepper(source, Memory()), 4), 3, seed=0)
    assert not made and [f.lane[0].item() for f in islice(pipe, 6)] == [0, 1, 2] * 2
    assert len(made) == 3 and len({vec.asked[0] for vec in made}) == 3
    assert all(vec.closed for vec in made)


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


def endless(infos):
    me = {}
    me["me"] = me
    return {**infos, "count": me}


@pytest.mark.parametrize(
    "error, source, parts",
    [
        (EnvError, broken(trunc=lambda x: x[:1]), ["one truncation for each"]),
        (
            EnvError,
            broken(trunc=lambda x: ~x),
            ["ended while it was reset", "environment 0 (", "NextStep"],
        ),
        (
            DataError,
            broken(obs=lambda x: x[:, :2]),
            ["leaf obs: wrong shape", "float32 [2, 4]", "[2, 2]"],
        ),
        (DataError, broken(obs=lambda x: {"a": x}), ["obs has the wrong structure"]),
        (
            EnvError,
            broken(infos=lambda x: [{}, {}]),
            ["lane 0", "environment <lambda>", "leaf infos", "no dict", "got [{}, {}]"],
        ),
        (EnvError, broken(infos=endless), ["lane 0", "info['count']", "contains itself"]),
        (
            EnvError,
            broken(infos=lambda x: {**x, "count": np.zeros((2, 3))}),
            ["info['count']", "changed their form"],
        ),
    ],
)
def test_faults_name_the_place(error, source, parts):
    "Of a vector as a whole; those of one environment are in the laws of environments."
    fails(error, source, *parts)


def test_an_array_of_whole_numbers_that_do_not_fit_names_the_environment():
    space = Box(-9, 9, (1,), np.int8)
    vec = lambda: gym.wrappers.vector.TransformObservation(
        SyncVectorEnv([Counting] * 2),
        lambda obs: np.array([[0], [200]]),
        single_observation_space=space,
        observation_space=batch_space(space, 2),
    )
    told = ["lane 0, environment 1 (", "leaf obs: an integer does not fit", "127, as int8", "200"]
    fails(EnvError, vec, *told, actor=Constant(0))


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


def vectorised():
    return Vectorised(PLANS)


def asynchronous():
    pool = Pool(makers(Counting, PLANS))
    pool.is_async = True
    return pool


class Talking(Counting):
    observation_space = Dict(x=Box(0, 1), says=Text(5))


def doubled(shown):
    return shown.stepno.double()


@pytest.mark.parametrize(
    "source, options, parts",
    [
        (asynchronous, {}, ["asynchronous EnvPool", "batch_size"]),
        (lambda: SyncVectorEnv([Talking]), {}, ["['says']"]),
        ([Counting, vectorised], {}, ["a batch by itself", "environment 1"]),
        ([vectorised, Counting], {}, ["several sources"]),
        (vectorised, dict(n_envs=1), ["n_envs=1", "as in the vector, or None"]),
        ("CartPool-v1", dict(vector="sync"), ["CartPole-v1"]),
        ("Acrobot-v1", dict(vector="vector_entry_point"), ["could not be made"]),
        (vectorised, dict(actor=Acts(doubled)), ["wrong action"]),
    ],
)
def test_what_does_not_fit_is_refused(source, options, parts):
    fails(PipeError, source, *parts, **options)


@pytest.mark.filterwarnings("ignore:.*(Worker-1|last exception|Traceback)")
def test_an_async_environment_that_fails_leaves_nothing_behind():
    failing = partial(Scripted, before={"step": at(3, fail(ZeroDivisionError("boom")))})
    fails(
        EnvError,
        lambda: AsyncVectorEnv([Counting, failing]),
        "step() raised ZeroDivisionError",
        "boom",
    )


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


@pytest.mark.parametrize("vector", ["sync", pytest.param("async", marks=pytest.mark.slow)])
def test_wrappers_of_ones_own_stand_around_the_mask(vector):
    "They took its place, and the observations had no mask."
    kwargs = dict(with_action_mask="action_mask", wrappers=[gym.wrappers.OrderEnforcing])
    vec = VectorFactory("Taxi-v4", 2, vector, kwargs)(seed=0)
    try:
        assert "action_mask" in vec.single_observation_space.spaces
        obs, _ = vec.reset(seed=0)
        assert obs["action_mask"].shape == (2, 6)
    finally:
        vec.close()
