"""Environments that rest after their end until the fragment is over, against the naive engine and by hand."""

from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_fragments import episodes
from reference import Solo, apply, assert_same, gae, grid
from test_fragments import check_columns
from toys import WORLDS, Counting, Lively, Memory, Plain, factories, judge

from rollpipe.layers import GaussianPolicy, MLPPolicy
from rollpipe.pipes import DataError, EnvStepper, FragmentCollector, Lanes, find, on_policy
from rollpipe.pipes.graph.edits import replace


def collect(source, actor, n_steps, n, sticky=None, **kwargs):
    stepper = EnvStepper(source, actor, sticky=n_steps if sticky is None else sticky, **kwargs)
    return list(islice(FragmentCollector(stepper, n_steps), n))


def check(fragment, columns):
    check_columns(fragment, columns)
    assert_same(fragment.valid, grid(columns, "valid"))
    for b, c in enumerate(columns):
        for t, info in enumerate(c["envs"]):
            assert fragment.env["count"][t, b] == (0 if info is None else info["count"])


@pytest.mark.slow_but_one
@pytest.mark.parametrize("world", WORLDS)
@settings(deadline=None, max_examples=25)
@given(
    plans=st.lists(episodes, min_size=1, max_size=3),
    sticky=st.integers(1, 7),
    times=st.integers(1, 2),
)
def test_equals_the_naive_engine(world, plans, sticky, times):
    env = WORLDS[world][0]
    actor = WORLDS[world][1]()
    no_action = apply(np.zeros_like, env.action_space.sample())
    solos = [Solo(make(), actor, no_action, sticky=sticky) for make in factories(env, plans)]
    n_steps = sticky * times
    for fragment in collect(factories(env, plans), actor, n_steps, 3, sticky):
        check(fragment, [s.collect(n_steps) for s in solos])


def test_a_timeline_by_hand():
    "Episodes of 2 steps, cut off; fragments of 5."
    first, second = collect(lambda: Counting([(2, "trunc")]), Memory(), 5, 2)
    for f, episode in ((first, 0), (second, 1)):
        assert f.state.obs[:, 0, 2].tolist() == [0, 1, 0, 0, 0, 0]  # step within the episode
        assert f.state.obs[:, 0, 1].tolist() == [episode] * 2 + [episode + 1] * 4
        assert f.state.stepno[:, 0].tolist() == [0, 1, 0, 0, 0, 0]
        assert f.state.fin[:, 0].tolist() == [True, False, True, True, True, True]
        assert f.valid[:, 0].tolist() == [True, True, False, False, False]
        assert (f.state.rew[3:] == 0).all() and not f.term.any()
        assert f.final.t.tolist() == [1] and f.final.obs[0, 2] == 2
        assert f.env["count"][:, 0].tolist() == [1, 2, 0, 0, 0]
        assert f.hx["sum"].unique().tolist() == [7.0] and f.hx["n"].unique().tolist() == [
            1
        ]  # memory begins anew


def test_resting_environments_do_not_disturb_the_others():
    "Seeds are the environments' own: one that never ends sees the same beside one that rests."

    class Endless(Lively):
        def step(self, action):
            obs, rew, *_ = super().step(action)
            return obs, rew, False, False, {}

    actor = GaussianPolicy.for_env(Lively, seed=0)
    a, b = (
        collect([Lively, Endless], actor, 20, 4, seed=1, **kwargs)
        for kwargs in ({}, dict(sticky=1))
    )
    for x, y in zip(a, b):
        assert_same(apply(lambda v: v[:, 1], x.state), apply(lambda v: v[:, 1], y.state))
        assert x.valid[:, 1].all() and not x.valid[:, 0].all() and y.valid.all()


def test_on_policy_sticky():
    actor = MLPPolicy.for_env(Lively, seed=0)
    pipe = on_policy(
        Lively,
        actor,
        lambda obs: obs.sum(-1) / 9,
        n_envs=3,
        n_steps=16,
        lanes=2,
        gamma=0.9,
        lam=0.8,
        seed=0,
        sticky=True,
    )
    assert [p.sticky for p in find(pipe, EnvStepper)] == [16]
    assert find(on_policy(Lively, actor, judge), EnvStepper)[0].sticky is None
    for f in islice(pipe, 3):
        v = f.state.obs.sum(-1) / 9
        for b in range(6):
            n = int(f.valid[:, b].sum())
            assert f.valid[:n, b].all() and (f.adv[n:, b] == 0).all() and f.valid[0, b]
            last = {
                t: float(x.sum() / 9)
                for t, i, x in zip(f.final.t.tolist(), f.final.b.tolist(), f.final.obs)
                if i == b
            }
            expected = gae(
                f.state.rew[1 : n + 1, b].tolist(),
                v[: n + 1, b].tolist(),
                last,
                f.state.fin[1 : n + 1, b].tolist(),
                f.term[1 : n + 1, b].tolist(),
                0.9,
                0.8,
            )
            assert np.allclose(f.adv[:n, b], expected, atol=1e-4)


def test_fragments_begin_where_nobody_rests():
    stepper = EnvStepper(lambda: Counting([(2, "term")]), Plain(), sticky=4)
    for n_steps in (3, 2, 6):
        with pytest.raises(
            DataError, match=rf"FragmentCollector.*rests.*n_steps={n_steps}.*sticky=4"
        ):
            next(iter(FragmentCollector(stepper, n_steps)))
    assert all(
        f.valid[0].all() and f.valid[4].all() for f in islice(FragmentCollector(stepper, 8), 4)
    )
    pipe = Lanes(FragmentCollector(stepper, 4), 2)
    assert next(iter(pipe)).valid[:, 0].tolist() == [True, True, False, False]
    wrong = replace(pipe, FragmentCollector, lambda old: FragmentCollector(old.pipe, 5))
    with pytest.raises(DataError, match="sticky=4"):
        next(iter(wrong))


def test_every_iteration_begins_awake():
    stepper = EnvStepper(lambda: Counting([(2, "term")]), Plain(), sticky=5)
    a, b = (list(islice(FragmentCollector(stepper, 5), 2)) for _ in range(2))
    assert_same(a, b)
