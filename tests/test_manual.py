"""The manual API gives the fragments of the pipelines, on environments that belong to the user."""

from itertools import islice

import gymnasium as gym
import pytest
import torch
from reference import assert_same
from toys import WORLDS, Counting, Ledger, Lively, Memory, Plain, Scripted, Shaky, at, fail

from rollpipe.layers import GaussianPolicy
from rollpipe.pipes import (
    ActorError,
    DataError,
    EnvError,
    EnvStepper,
    FragmentCollector,
    Lanes,
    collect,
    context,
    prepare,
    rollout,
    startup,
)
from rollpipe.pipes.graph.modules import bump_version, version_of


@pytest.fixture(autouse=True)
def clean_ledger():
    Ledger.clear()


def instances(env):
    return [env(((3, "term"), (4, "trunc")), 0), env(((2, "both"),), 1), env(((9, "trunc"),), 2)]


def pipeline(env, actor, n_steps, **kwargs):
    made = instances(env)
    return FragmentCollector(EnvStepper([lambda e=e: e for e in made], actor, **kwargs), n_steps)


@pytest.mark.parametrize("world", WORLDS)
def test_fragments_are_those_of_the_pipeline(world):
    env, actor = WORLDS[world]
    ctx = startup(prepare(instances(env), actor(), 5))
    for expected in islice(pipeline(env, actor(), 5), 4):
        assert_same(collect(ctx), expected)
        assert_same(
            ctx.state.obs,
            expected.state.obs[-1]
            if env is Counting
            else {k: v for k, v in _last(expected.state.obs).items()},
        )
    for a, b in zip(islice(rollout(instances(env), actor(), 5), 4), pipeline(env, actor(), 5)):
        assert_same(a, b)


def _last(tree):
    if isinstance(tree, dict):
        return {k: _last(v) for k, v in tree.items()}
    return tuple(map(_last, tree)) if isinstance(tree, tuple) else tree[-1]


@pytest.mark.parametrize("actor", [Shaky, lambda: GaussianPolicy.for_env(Lively)])
def test_one_seed_fixes_environments_and_actions(actor):
    actor = actor()
    made = islice(FragmentCollector(EnvStepper(Lively, actor, 3, seed=5), 6), 3)
    lent = islice(rollout([Lively() for _ in range(3)], actor, 6, seed=5), 3)
    own = islice(rollout(Lively, actor, 6, n_envs=3, seed=5), 3)
    for a, b, c in zip(made, lent, own):
        assert_same(a, b)
        assert_same(a, c)


def test_nothing_is_touched_before_startup_and_nothing_is_stepped_on_trial():
    envs = instances(Counting)
    plan = prepare(envs, Plain(), 5)
    assert Ledger.seeds == [] and all(env.episode == -1 for env in envs)
    ctx = startup(plan)
    assert (
        [env.episode for env in envs] == [0, 0, 0]
        and [env.count for env in envs] == [0, 0, 0]
        and len(ctx) == 3
    )
    assert ctx.state.fin.all() and ctx.hx == () and not ctx.state.rew.any()


def test_lent_environments_stay_open_and_made_ones_are_closed():
    envs = instances(Counting)
    with startup(prepare(envs, Plain(), 5)) as ctx:
        collect(ctx)
    next(rollout(envs, Plain(), 5))
    assert Ledger.closed == []
    steps = rollout(Counting, Plain(), 5, n_envs=2)
    next(steps)
    assert len(Ledger.closed) == 0
    steps.close()
    assert len(Ledger.closed) == 2
    with startup(prepare(Counting, Plain(), 5, n_envs=2)) as ctx:
        ctx.close()
    assert len(Ledger.closed) == 4


def test_memory_is_shown_and_begins_anew_with_each_startup():
    plan = prepare(instances(Counting), Memory(), 4)
    firsts = []
    for _ in range(2):
        ctx = startup(plan)
        assert_same(ctx.hx, Memory().initial(3))
        one = collect(ctx)
        two = collect(ctx)
        assert_same(ctx.hx, collect(ctx).hx)
        firsts.append(one.hx)
        assert_same(one.seq, torch.zeros(3, dtype=torch.int64))
        assert not torch.equal(one.hx["n"], two.hx["n"])
    assert_same(*firsts)


def test_updates_between_two_fragments_are_seen():
    actor = Plain()
    ctx = startup(prepare(instances(Counting), actor, 4))
    collect(ctx)
    bump_version(actor)
    assert set(collect(ctx).version.tolist()) == {version_of(actor)} == {1}


def test_fragments_may_be_kept():
    ctx = startup(prepare(instances(Counting), Plain(), 4))
    one = collect(ctx)
    copy = [x.clone() for x in one.state]
    for _ in range(3):
        collect(ctx)
    assert_same(copy, list(one.state))


def test_a_single_environment_and_registered_ones():
    fragment = next(rollout(Counting(), Plain(), 3))
    assert fragment.n_envs == 1
    mine = gym.make("CartPole-v1")

    class Wrong:
        def step(self, stepno, *args, hx, virtual):
            return torch.full(stepno.shape, 7.5), (), {}

        def reset(self, hx, at):
            return hx

    with pytest.raises(ActorError, match=r"EnvStepper, lane 0, leaf act: wrong action") as e:
        next(rollout(mine, Wrong(), 3))
    assert "Expected integers or bools of shape [B] of Discrete(2), got float32" in str(e.value)
    mine.close()


def test_refusals():
    envs = instances(Counting)
    with pytest.raises(EnvError, match="can act only once"):
        prepare([envs[0], envs[0]], Plain(), 5)
    with pytest.raises(EnvError, match="n_envs=None"):
        prepare(envs, Plain(), 5, n_envs=6)
    with pytest.raises(DataError, match="n_steps >= 1"):
        prepare(envs, Plain(), 0)
    with pytest.raises(DataError, match="what `prepare` returned"):
        startup(EnvStepper(Counting, Plain()))
    with pytest.raises(ActorError, match="needs the method `step`"):
        prepare(envs, object(), 5)


def test_a_failure_names_the_environment_and_ends_the_context():
    ctx = startup(
        prepare(
            [Counting(), Scripted([(9, "term")], before={"step": at(4, fail(OSError("lost")))})],
            Plain(),
            2,
        )
    )
    collect(ctx)
    with pytest.raises(
        EnvError, match=r"environment 1 \(Scripted\): step\(\) raised OSError: lost"
    ):
        collect(ctx)
    with pytest.raises(DataError, match="this context has ended"):
        collect(ctx)
    assert Ledger.closed == []


def deaf():
    return Scripted(before={"reset": fail(OSError("does not begin"))})


def test_a_failure_at_startup_closes_what_was_made():
    for start in (lambda: startup(prepare(deaf, Plain(), 2)), lambda: context(deaf)):
        with pytest.raises(EnvError, match=r"reset\(\) raised OSError"):
            start()
    assert Ledger.open() == 0


def test_context_steps_environments_without_an_actor():
    fragment = next(iter(pipeline(Counting, Plain(), 8, seed=1)))
    with context(instances(Counting), seed=1) as ctx:
        assert len(ctx) == 3 and ctx.seen.obs.shape == (1, 3, 4)
        for t in range(8):
            out = ctx.step(fragment.state.act[t + 1 : t + 2])
            for name in ("obs", "rew", "fin", "stepno"):
                assert_same(getattr(ctx.state, name), getattr(fragment.state, name)[t + 1])
            assert_same(out.term, fragment.term[t + 1])
            truncated = {b for k, b in zip(fragment.final.t, fragment.final.b.tolist()) if k == t}
            assert truncated <= set(out.final) <= set(out.ended)


def test_an_instance_serves_one_loop_at_a_time():
    envs = instances(Counting)
    plan = prepare(envs, Plain(), 3)
    first = startup(plan)
    second = startup(plan)
    collect(second)
    with pytest.raises(EnvError, match="lent to another iteration, loop, or lane"):
        collect(first)
    collect(second)
    with pytest.raises(EnvError, match="each lane makes its own"):
        list(islice(Lanes(prepare(envs, Plain(), 3), 2), 3))


@pytest.mark.parametrize("sticky", [None, 4])
def test_made_and_lent_environments_of_all_kinds_give_the_same(sticky):
    plan = ((2, "trunc"), (6, "term"))
    makers = [lambda tag=tag: Counting(plan, tag) for tag in range(2)]
    lent = rollout([make() for make in makers], Memory(), 4, sticky=sticky)
    made = FragmentCollector(EnvStepper(makers, Memory(), sticky=sticky), 4)
    fragments = list(zip(islice(lent, 5), made))
    for a, b in fragments:
        assert_same(a, b)
    assert all(a.valid.all() for a, _ in fragments) == (sticky is None)

    # A vector stays open after a loop that was broken off.
    vec = gym.vector.SyncVectorEnv(makers, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
    for (_, b), a in zip(fragments if sticky is None else [], rollout(vec, Memory(), 4)):
        assert_same(a, b)
    assert not vec.closed
    vec.close()
