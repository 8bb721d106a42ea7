"""Single steps against the naive engine, torchdata's own pipes on them, and fragments regained from them."""

import copy
import inspect
from collections import defaultdict
from itertools import islice

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_fragments import episodes
from reference import Solo, apply, assert_same, flatten
from toys import Constant, Counting, Limit, Memory, Nested, NestedMemory, Plain, factories, judge

from rollpipe.pipes import (
    AdvantageBuffer,
    DataError,
    EnvError,
    EnvStepper,
    EpisodeCollector,
    Fragment,
    FragmentCollector,
    FragmentStacker,
    Lanes,
    Minibatcher,
    State,
    StepMerger,
    WithImage,
)
from rollpipe.pipes.data.fragment import Final, Tick
from rollpipe.pipes.graph.torchdata import IterableWrapper
from rollpipe.pipes.replay.hindsight import MergedStep
from rollpipe.pipes.steps import Fragments, Step, Steps

fast = settings(deadline=None, max_examples=20)
MIXED = ((3, "term"), (4, "trunc"), (1, "both"), (2, "trunc"))


def collector(plans=(MIXED,), n_steps=5, env=Counting, actor=Plain):
    return FragmentCollector(EnvStepper(factories(env, plans), actor()), n_steps)


def numbers(step):
    return int(step.proc_id), int(step.env_id), int(step.episode_n), int(step.step_n)


@fast
@given(plans=st.lists(episodes, min_size=1, max_size=3), n_steps=st.integers(1, 7))
@pytest.mark.parametrize("actor", [Plain, Memory])
def test_every_field_against_the_naive_engine(actor, plans, n_steps):
    n = 3 * n_steps
    n_envs = len(plans)
    steps = list(islice(Steps(collector(plans, n_steps, actor=actor)), n * n_envs))

    # Each environment for itself
    for b, plan in enumerate(plans):
        column = Solo(Counting(plan, b), actor(), np.int64(0)).collect(n)
        finals = {t: obs for t, obs, _ in column["finals"]}
        total = 0.0
        episode = 0
        for t, step in enumerate(steps[b::n_envs]):
            stepno, obs, _, _, _ = column["states"][t]
            _, after, act, rew, fin = column["states"][t + 1]
            term = bool(column["terms"][t + 1])
            total += float(np.float32(rew))
            expected = Step(
                state=obs,
                action=act,
                next_state=finals.get(t, obs if fin else after),
                terminated=np.bool_(term),
                truncated=np.bool_(fin and not term),
                reward=np.float32(rew),
                total_reward=step.total_reward,
                advantage=None,
                env_id=np.int64(b),
                proc_id=np.int64(0),
                step_n=np.int64(stepno),
                episode_n=np.int64(episode),
            )
            assert_same(step._asdict(), expected._asdict())
            assert step.total_reward == pytest.approx(total)
            if fin:
                total = 0.0
                episode += 1


def test_types_and_shapes_are_those_documented():
    number = torch.float32, []
    integer = torch.int64, []
    flag = torch.bool, []
    obs = torch.float32, [4]
    expected = dict(
        state=obs,
        action=integer,
        next_state=obs,
        terminated=flag,
        truncated=flag,
        reward=number,
        total_reward=number,
        advantage=number,
        env_id=integer,
        proc_id=integer,
        step_n=integer,
        episode_n=integer,
    )
    step = next(iter(Steps(AdvantageBuffer(collector(), judge))))
    for leaves in (step._asdict(), Step.random(seed=3, env=Counting)._asdict()):
        assert leaves.pop("image") is None
        assert {name: (x.dtype, list(x.shape)) for name, x in leaves.items()} == expected


def test_advantages_travel_along():
    pipe = AdvantageBuffer(collector([MIXED] * 2), judge)
    steps = list(islice(Steps(pipe), 10))
    assert torch.equal(torch.stack([s.advantage for s in steps]).view(5, 2), next(iter(pipe)).adv)


def test_rows_that_are_no_transition_are_left_out_and_counted_nowhere():
    fragment = next(iter(collector(n_steps=9)))
    # as after the end of an episode with `sticky`: nothing happens, `fin` stays True
    valid = torch.ones(9, 1, dtype=torch.bool)
    valid[3:5] = False
    state = fragment.state._replace(rew=fragment.state.rew.clone(), fin=fragment.state.fin.clone())
    state.rew[4:6] = 0
    state.fin[4:6] = True
    steps = list(Steps(IterableWrapper([fragment._replace(state=state, valid=valid)])))
    assert [int(s.episode_n) for s in steps[:5]] == [0, 0, 0, 1, 1] and len(steps) == 7
    assert float(steps[3].total_reward) == float(fragment.state.rew[6])


def test_the_totals_of_an_episode_whose_beginning_was_not_seen_are_unknown():
    "In row 5 the first environment is within its first episode, and the second one begins another."
    fragments = list(islice(collector([[(9, "term")], [(5, "term")]]), 5))
    whole = {numbers(s): float(s.total_reward) for s in Steps(IterableWrapper(fragments))}
    for step in Steps(IterableWrapper(fragments[1:])):
        _, env, episode, n = numbers(step)
        if (env, episode) == (0, 0):
            assert n >= 5 and torch.isnan(step.total_reward)
        else:
            assert float(step.total_reward) == whole[0, env, episode + env, n]


# --- the helpers of Step


def test_clone_detach_to():
    step = Step.random(seed=1, env=Nested)
    same = step.clone()
    for (_, x), (_, y) in zip(flatten(step._asdict()), flatten(same._asdict())):
        assert torch.equal(x, y) and x.data_ptr() != y.data_ptr()
    grad = step._replace(reward=torch.ones((), requires_grad=True) * 2)
    assert grad.detach().reward.grad_fn is None and grad.reward.grad_fn is not None
    double = step.to(torch.float64)
    leaves = double.reward, double.terminated, double.step_n, double.state["pair"][1]["pixels"]
    dtypes = [torch.float64, torch.bool, torch.int64, torch.uint8]
    assert [x.dtype for x in leaves] == dtypes
    assert all(x.device.type == "meta" for _, x in flatten(step.to("meta")._asdict()))


@pytest.mark.parametrize("env", [None, Counting, Nested])
def test_random_is_fixed_by_its_seed_and_fits_the_spaces(env):
    before = torch.get_rng_state()
    assert_same(Step.random(5, env)._asdict(), Step.random(5, env)._asdict())
    assert torch.equal(torch.get_rng_state(), before)
    some = [Step.random(seed, env, reward=torch.tensor(2.0)) for seed in range(20)]
    batch = Step.stack(some)
    assert batch.reward.unique().tolist() == [2.0] and len({numbers(s) for s in some}) > 10
    assert batch.terminated.unique().tolist() == [False, True]
    assert not (batch.terminated & batch.truncated).any()
    assert batch.total_reward.diff().all()
    if env is Nested:
        states = (step.state for step in (some[0], next(iter(nested_steps()))))
        assert_same(*(apply(lambda x: x * 0, state) for state in states))


def nested_steps():
    return Steps(collector(env=Nested, actor=NestedMemory))


def test_nested_observations_and_actions():
    for step, other in zip(nested_steps(), Steps(collector())):
        assert torch.equal(step.state["place"][1:3], other.state[1:3])
        assert step.next_state["exact"].dtype is torch.float64
        assert set(step.action) == {"gear", "steer"}
        if step.truncated:
            return
        assert not step.terminated or torch.equal(step.next_state["place"], step.state["place"])


# --- back to fragments


def regained(f):
    "What single steps tell of a fragment."
    return f.state, f.term, f.valid, f.lane, f.seq, f.final[:3]


@fast
@given(
    plans=st.lists(episodes, min_size=1, max_size=3),
    n_steps=st.integers(1, 7),
    lanes=st.integers(1, 2),
)
def test_back_to_fragments_of_any_length(plans, n_steps, lanes):
    def errors(n_steps):
        "TD errors do not depend on the cut."
        return AdvantageBuffer(Lanes(collector(plans, n_steps), lanes), judge, lam=0.0)

    direct = {(int(f.lane[0]), int(f.seq[0])): f for f in islice(errors(n_steps), 3 * lanes)}
    for fragment in islice(Fragments(Steps(errors(4)), n_steps), 2 * lanes):
        other = direct[int(fragment.lane[0]), int(fragment.seq[0])]
        assert_same(regained(fragment), regained(other))
        assert torch.equal(fragment.adv[~fragment.term[1:]], other.adv[~fragment.term[1:]])


def test_what_is_left_makes_shorter_last_fragments():
    "The last environment lacks one step."
    steps = list(islice(Steps(collector([MIXED] * 2)), 2 * 11))
    fragments = list(Fragments(IterableWrapper(steps[:-1], deepcopy=False), 4))
    assert [f.n_steps for f in fragments] == [4, 4, 2] and fragments[0].adv is None
    total = sum(float(f.state.rew[1:].sum()) for f in fragments)
    assert total == pytest.approx(sum(float(s.reward) for s in steps[:20]))
    assert list(Fragments(IterableWrapper([]), 4)) == []


@pytest.mark.parametrize("plan, n_steps", [([(2, "term")], 5), ([(2, "term"), (3, "term")], 50)])
def test_refuses_environments_that_take_unequal_numbers_of_steps(plan, n_steps):
    "With `sticky`, the steps of others would wait for an environment that rests, and be dropped at the end."
    envs = [lambda plan=plan: Counting(plan) for plan in ([(100, "term")], plan)]
    pipe = FragmentCollector(EnvStepper(envs, Plain(), sticky=5), 5)
    text = "Fragments, lane 0, environment 1: it takes fewer steps than others, "
    expected = r"Expected \d+ steps since the last fragment, got \d+"
    with pytest.raises(DataError, match=f"{text}.* {expected}"):
        list(Fragments(Steps(Limit(pipe, 9)), n_steps))


# --- what else yields fragments


def test_whole_episodes():
    plan = ((3, "trunc"), (4, "trunc"), (1, "trunc"))
    pipe = EpisodeCollector(EnvStepper(lambda: Counting(plan), Plain()), batch=3, pad=True)
    steps = list(islice(Steps(pipe), 3 + 4 + 1 + 3))
    assert [int(s.step_n) for s in steps] == [0, 1, 2, 0, 1, 2, 3, 0, 0, 1, 2]
    assert [int(s.episode_n) for s in steps] == [0] * 3 + [1] * 4 + [2] + [3] * 3
    for step in steps:
        assert step.next_state[1:3].tolist() == [step.episode_n, step.step_n + 1]
    assert [int(s.truncated) for s in steps] == [0, 0, 1, 0, 0, 0, 1, 1, 0, 0, 1]


def test_resting_environments_take_no_steps():
    makers = factories(Counting, [MIXED, ((9, "trunc"),)])
    steps = list(islice(Steps(FragmentCollector(EnvStepper(makers, Plain(), sticky=6), 6)), 40))
    first = [s for s in steps if s.env_id == 0]
    assert len(first) < len(steps) / 2
    for a, b in zip(first, Steps(collector([MIXED]))):
        assert numbers(a) == numbers(b)
        assert (a.total_reward, a.truncated) == (b.total_reward, b.truncated)


# --- copies and pictures


class Painted(Counting):
    render_mode = "rgb_array"

    def render(self):
        return np.full((2, 3, 3), 10 * self.episode + self.count, np.uint8)


def test_pictures_show_the_moment_after_the_step():
    pipe = Limit(FragmentCollector(EnvStepper(lambda: WithImage(Painted()), Plain()), 4), 2)
    steps = list(Steps(pipe, image="image"))
    assert [int(s.image[0, 0, 0]) for s in steps] == [1, 2, 3, 11, 12, 13, 14, 21]
    assert steps[0].image.shape == (2, 3, 3) and steps[0].image.dtype is torch.uint8
    assert next(iter(Steps(pipe))).image is None
    with pytest.raises(DataError, match=r"env\['picture'\]: no such info"):
        list(Steps(pipe, image="picture"))
    with pytest.raises(EnvError, match="draws no pictures.*rgb_array"):
        WithImage(gym.make("CartPole-v1"))


# --- torch's own loader


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("env, actor", [(Counting, Plain), (Nested, NestedMemory)])
def test_torchs_loader_joins_steps_to_batches(env, actor, num_workers):
    "With its own `default_collate`, though a step without advantage and picture has leaves that are None."
    steps = Steps(Lanes(collector([MIXED] * 2, env=env, actor=actor), 2, seed=0))
    loader = torch.utils.data.DataLoader(steps, batch_size=5, num_workers=num_workers)
    expected = list(islice(steps, 15))
    for batch, start in zip(loader, range(0, 15, 5)):
        assert_same(batch, Step.stack(expected[start : start + 5]))
        assert type(batch) is Step and batch.reward.shape == (5,) and batch.advantage is None


def test_what_a_field_means_stands_at_the_field():
    for cls in (Step, State, Tick, Final, Fragment):
        words_of_class = " ".join(inspect.getdoc(cls).split())  # entries go on in further lines
        for name in cls._fields:
            meaning = getattr(cls, name).__doc__
            assert "\n" not in meaning and f" {name}: {meaning}" in words_of_class
    assert Step.state.__doc__.startswith("observation before the action")


# --- merged steps


def naive_merged(steps, i, n, gamma):
    "(sum, discount, number, last step) of the transition from the i-th of the `steps` of one environment on."
    total = 0.0
    for m, step in enumerate(steps[i : i + n], 1):
        total += gamma ** (m - 1) * float(step.reward)
        if step.terminated or step.truncated:
            break
    return total, 0.0 if step.terminated else gamma**m, m, step


def of_fragments(plans, n_steps, lanes, joined):
    return Steps(FragmentStacker(Lanes(collector(plans, n_steps), lanes, seed=0), joined))


def of_episodes(plans, n_steps, lanes, joined):
    makers = factories(Counting, plans)
    ticks = Lanes(EnvStepper(makers, Plain(), terminal_obs=True), lanes, seed=0)
    return Steps(EpisodeCollector(ticks, batch=joined, pad=True))


def of_resting(plans, n_steps, lanes, joined):
    ticks = EnvStepper(factories(Counting, plans), Plain(), sticky=n_steps)
    return Steps(Lanes(FragmentCollector(ticks, n_steps), lanes, seed=0))


@pytest.mark.slow
@pytest.mark.parametrize("source", [of_fragments, of_episodes, of_resting])
@fast
@given(
    plans=st.lists(episodes, min_size=1, max_size=3),
    n_steps=st.integers(1, 6),
    n=st.integers(1, 9),
    gamma=st.sampled_from([0.0, 0.5, 0.99, 1.0]),
    lanes=st.integers(1, 2),
    joined=st.integers(1, 2),
)
def test_merged_steps_against_the_sum(source, plans, n_steps, n, gamma, lanes, joined):
    "Over several fragments, lanes and environments, and to the end of the stream, without padding and rest."

    def steps():
        return Limit(source(plans, n_steps, lanes, joined), 40)

    def by_environment(steps):
        columns = defaultdict(list)
        for step in steps:
            columns[numbers(step)[:2]].append(step)
        return columns

    columns = by_environment(steps())
    merged = by_environment(StepMerger(steps(), n, gamma))
    assert merged.keys() == columns.keys()
    for key, column in columns.items():
        for i, (step, x) in enumerate(zip(column, merged[key], strict=True)):
            total, discount, m, last = naive_merged(column, i, n, gamma)
            assert numbers(x) == numbers(step) and numbers(last)[:3] == numbers(x)[:3]
            assert (x.n_steps, x.n_steps.dtype) == (m, torch.int64)
            assert x.reward.dtype is x.discount.dtype is torch.float32
            np.testing.assert_allclose([x.reward, x.discount], [total, discount], rtol=1e-6)
            assert_same((x.state, x.action), (step.state, step.action))
            reached = lambda step: (step.next_state, step.terminated, step.truncated)
            assert_same(reached(x), reached(last))


def test_merged_steps_by_hand():
    "Rewards 1, 2, 3 | 101, 102, and nothing for the action 0; the second episode is cut off."
    plan = ((3, "term"), (2, "trunc"))
    source = Steps(collector([plan], 4, actor=lambda: Constant(0)))
    rows = Step.stack(list(islice(StepMerger(source, 3, 0.5), 5)))
    assert rows.reward.tolist() == [1 + 1 + 0.75, 2 + 1.5, 3, 101 + 51, 102]
    assert rows.discount.tolist() == [0, 0, 0, 0.25, 0.5]
    assert rows.next_state[3:, :3].tolist() == [[0, 1, 2], [0, 1, 2]]
    assert rows.n_steps.tolist() == [3, 2, 1, 2, 1]


def test_merged_steps_of_containers_are_stacked_and_leave_the_steps_alone():
    steps = list(Limit(Steps(collector((MIXED, MIXED), env=Nested, actor=NestedMemory)), 30))
    before = copy.deepcopy(steps)
    merged = list(StepMerger(IterableWrapper(steps, deepcopy=False), 3))
    for x in merged:
        for number in (x.reward, x.discount, x.n_steps):
            number.zero_()
    assert_same(steps, before)
    pipe = StepMerger(IterableWrapper(steps), 3)
    batch = next(iter(torch.utils.data.DataLoader(pipe, batch_size=7)))
    assert type(batch) is MergedStep
    assert (batch.reward.shape, batch.state["place"].shape) == ((7,), (7, 4))


# --- what is out of order

IN_A_ROW = "environment 0: the steps of an environment must follow one another. Expected step {}"
MESSAGES = {  # pipe, change of the first nine steps -> message
    "fragments, turned": (Fragments, lambda s: s[1:2] + s[:1], IN_A_ROW.format(r"\d")),
    "fragments, one left out": (Fragments, lambda s: s[:1] + s[2:], IN_A_ROW.format(r"\d")),
    "fragments, the end left out": (Fragments, lambda s: s[:2] + s[3:], IN_A_ROW.format(r"\d")),
    "fragments, a batch": (Fragments, lambda s: [Step.stack(s)], "env_id: single steps"),
    "fragments, a late environment": (
        Fragments,
        lambda s: [*s, s[0]._replace(env_id=torch.tensor(1))],
        "a new environment among",
    ),
    "merger, one left out": (
        StepMerger,
        lambda s: s[:1] + s[2:],
        IN_A_ROW.format("1 of episode 0"),
    ),
    "merger, one twice": (StepMerger, lambda s: s[:2] + s[1:], "must follow one another"),
    "merger, turned": (StepMerger, lambda s: s[::-1], "must follow one another"),
    "merger, a batch": (StepMerger, lambda s: [Step.stack(s)], "single steps are wanted here"),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_steps_out_of_order_are_refused(name):
    pipe, change, text = MESSAGES[name]
    steps = change(list(islice(Steps(collector()), 9)))
    with pytest.raises(DataError, match=f"^{pipe.__name__}, .*{text}"):
        list(pipe(IterableWrapper(steps, deepcopy=False), 3))


@pytest.mark.parametrize(
    "change",
    [
        lambda a, b, c: [a, c],
        lambda a, b, c: [a, a],
        lambda a, b, c: [b, a],
        lambda a, b, c: list(islice(Minibatcher(IterableWrapper([a]), 2), 3)),
        lambda a, b, c: list(Minibatcher(IterableWrapper([a, b, c]), 5, seed=0)),
    ],
)
def test_fragments_out_of_order_are_refused(change):
    fragments = change(*islice(collector(), 3))
    text = "Steps, lane 0: fragments must come whole and in the order of collecting"
    with pytest.raises(DataError, match=text):
        list(Steps(IterableWrapper(fragments)))
