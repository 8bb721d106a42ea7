"Rewards, casts, n-step returns, stacked frames and devices against plain loops and other libraries."

import copy
import math
import pickle
from itertools import islice

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_fragments import episodes as plans
from reference import apply, assert_same, snapshot
from toys import (
    Acts,
    Counting,
    Limit,
    Memory,
    Nested,
    NestedMemory,
    Plain,
    Present,
    Scripted,
    factories,
    judge,
)

from rollpipe.layers import Critic, MLPPolicy, RecurrentPolicy
from rollpipe.pipes import (
    AdvantageBuffer,
    DataError,
    EnvStepper,
    EpisodeStats,
    FragmentCollector,
    FragmentStacker,
    FrameStack,
    GraphError,
    Lanes,
    Minibatcher,
    NStep,
    ObservationCast,
    RewardScaler,
    Tap,
    ToDevice,
    find_one,
    frames,
    insert_after,
    on_policy,
    profile,
    rollouts,
)
from rollpipe.pipes.data.fragment_ops import (
    env_rewards,
    next_observations_in_episode,
    with_restarts,
)
from rollpipe.pipes.frames import Stacks
from rollpipe.pipes.graph.torchdata import DataLoader2, IterableWrapper
from rollpipe.pipes.workers.reading import ProcessReading
from rollpipe.runs.states import load_states, states_of

fast = settings(deadline=None, max_examples=20)


def fragments(each, n_steps, sticky=None, actor=None, **options):
    stepper = EnvStepper(factories(Counting, each), actor or Present(), sticky=sticky, **options)
    return FragmentCollector(stepper, n_steps)


# --- rewards


class Normalizer:
    "VecNormalize's treatment of rewards, for a list of all returns so far: no running formulas."

    def __init__(self, gamma):
        self.gamma = gamma
        self.returns = {}
        self.seen = []

    def step(self, rews, ends, valid):
        "One step of all environments; the scaled rewards."
        for b, r in enumerate(rews):
            if not valid[b]:
                continue
            self.returns[b] = self.returns.get(b, 0.0) * self.gamma + float(r)
            self.seen.append(self.returns[b])
            if ends[b]:
                self.returns[b] = 0.0
        return [max(-10.0, min(10.0, float(r) / math.sqrt(self.var() + 1e-8))) for r in rews]

    def var(self):
        "Variance of what was seen and of 1e-4 observations of N(0, 1)."
        count = len(self.seen) + 1e-4
        mean = sum(self.seen) / count
        squares = sum((x - mean) ** 2 for x in self.seen)
        return (squares + 1e-4 * (1 + mean**2)) / count


@pytest.mark.slow
@fast
@given(
    each=st.lists(plans, min_size=1, max_size=3),
    gamma=st.sampled_from([0.0, 0.5, 0.99, 1.0]),
    sticky=st.sampled_from([None, 3]),
)
def test_ticks_are_scaled_as_by_vec_normalize(each, gamma, sticky):
    def source():
        return EnvStepper(factories(Counting, each), Present(), sticky=sticky)

    naive = Normalizer(gamma)
    before = np.zeros(len(each), np.float32)
    for raw, tick in zip(islice(source(), 25), RewardScaler(source(), gamma=gamma)):
        expected = naive.step(raw.next.rew, raw.next.fin, raw.valid)
        np.testing.assert_allclose(tick.next.rew, expected, rtol=1e-5)
        assert tick.next.rew.dtype == np.float32 and tick.state.rew.tolist() == before.tolist()
        assert_same(tick.next._replace(rew=()), raw.next._replace(rew=()))
        before = tick.next.rew


@pytest.mark.slow
@fast
@given(
    each=st.lists(plans, min_size=1, max_size=3),
    n_steps=st.integers(1, 6),
    gamma=st.sampled_from([0.0, 0.9, 1.0]),
    joined=st.integers(1, 3),
    sticky=st.booleans(),
)
def test_fragments_are_scaled_with_all_that_is_known_after_them(
    each, n_steps, gamma, joined, sticky
):
    def source():
        return fragments(each, n_steps, n_steps if sticky else None)

    naive = Normalizer(gamma)
    before = torch.zeros(len(each))
    scaled = RewardScaler(FragmentStacker(source(), joined), gamma=gamma)
    batches = [batch.state.rew for batch in islice(scaled, 4)]
    for raw, rew in zip(source(), torch.cat(batches, 1).split(len(each), 1)):
        for t in range(n_steps):
            naive.step(raw.state.rew[t + 1], raw.state.fin[t + 1], raw.valid[t])
        expected = (raw.state.rew[1:] / math.sqrt(naive.var() + 1e-8)).clamp(-10, 10)
        torch.testing.assert_close(rew[1:], expected, rtol=1e-4, atol=1e-6)
        assert torch.equal(rew[0], before)
        before = rew[-1]


def test_lanes_share_a_scale_below_and_not_above():
    source = fragments([[(3, "term")]], 4)

    def rows(pipe):
        return torch.stack([f.state.rew for f in islice(pipe, 6)])

    above = rows(Lanes(RewardScaler(source), 2, seed=0))
    assert torch.equal(above[::2], above[1::2])
    below = rows(RewardScaler(Lanes(source, 2, seed=0)))
    assert torch.equal(below[0][1:], above[0][1:]) and not torch.equal(below[2][1:], above[2][1:])
    assert torch.equal(below[2:4, 0], below[:2, -1])


@pytest.mark.parametrize("unit", ["ticks", "fragments"])
def test_a_constant_scale(unit):
    def source():
        return EnvStepper(lambda: Counting([(3, "trunc")]), Present())

    if unit == "ticks":
        scaled = FragmentCollector(RewardScaler(source(), 0.25), 5)
    else:
        scaled = RewardScaler(FragmentCollector(source(), 5), 0.25)
    for raw, f in zip(islice(FragmentCollector(source(), 5), 4), scaled):
        assert torch.equal(f.state.rew, raw.state.rew * 0.25)
        rest = lambda x: x.state._replace(rew=())
        assert_same(rest(f), rest(raw))


@pytest.mark.parametrize("scale", [None, "sign", 0.5, 1])
def test_an_actor_never_sees_other_rewards_than_its_learner(scale):
    memory = RecurrentPolicy.for_env("CartPole-v1", hidden=(4,), memory=4, past=True)
    for place in ("before", "after"):
        edits = [RewardScaler.inserter(**{place: Lanes}, scale=scale)]
        options = dict(n_envs=2, n_steps=4, lanes=2, seed=0, edits=edits)
        pipe = rollouts("CartPole-v1", memory, **options)
        if scale == 1:
            next(iter(pipe))
        else:
            text = "RewardScaler: the actor sees its past rewards.*Expected .*scale=1"
            with pytest.raises(GraphError, match=text):
                next(iter(pipe))
        next(iter(rollouts("CartPole-v1", MLPPolicy.for_env("CartPole-v1"), **options)))


def test_rewards_do_not_change_below_their_advantages():
    source = fragments([[(3, "term")]], 4)
    text = "RewardScaler.*the advantages are those of other rewards.*Expected this pipe before `Adv"
    with pytest.raises(DataError, match=text):
        next(iter(RewardScaler(AdvantageBuffer(source, judge))))
    next(iter(AdvantageBuffer(RewardScaler(source), judge)))


def test_limits():
    def jackpot():
        is_won = lambda env: env.count == 3 and env.episode > 20
        return Scripted(pay=lambda env: 1e6 if is_won(env) else 1e-3)

    def highest(clip):
        ticks = RewardScaler(EnvStepper(jackpot, Present()), clip=clip)
        return max(tick.next.rew.max() for tick in islice(ticks, 400))

    assert highest(3.0) == 3 and highest(None) > 5


def learning(reward_scale="learn"):
    env = "Pendulum-v1"
    options = dict(n_envs=2, n_steps=8, lanes=2, seed=0, reward_scale=reward_scale)
    return on_policy(env, MLPPolicy.for_env(env, seed=0), Critic.for_env(env), **options)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_scale_of_a_pipeline_is_known_whoever_iterates_it(workers):
    pipe = learning()
    service = ProcessReading(workers) if workers else None
    with DataLoader2(pipe, reading_service=service) as loader:
        rewards, *_ = (env_rewards(batch) for batch in islice(loader, 3))
    state = states_of(pipe)["RewardScaler"]
    assert state["count"] == 3 * 32 + 1e-4

    # Both iterations of another pipeline begin at the same place.
    other = learning()
    assert load_states(other, {"RewardScaler": state}) == {}
    first = next(iter(other))
    again = next(iter(other))
    assert states_of(other)["RewardScaler"]["count"] == state["count"] + 32
    assert torch.equal(first.state.rew, again.state.rew)
    assert torch.equal(env_rewards(first), rewards)


def test_the_scale_is_that_of_the_iteration_that_goes_on():
    pipe = learning()
    items = iter(pipe)
    next(items)
    before = states_of(pipe)
    profile(pipe, 1e-3)
    assert states_of(pipe) == before
    next(iter(insert_after(pipe, FragmentStacker, lambda old: Tap(old, print))))
    next(items)
    assert states_of(pipe)["RewardScaler"]["count"] == before["RewardScaler"]["count"] + 32


@pytest.mark.parametrize(
    "state",
    [
        {},
        dict(count=1.0, mean=0.0),
        dict(count=1.0, mean=0.0, var=math.nan),
        dict(count=1.0, mean=0.0, var=math.inf),
    ],
    ids=["empty", "no variance", "nan", "infinite"],
)
def test_a_state_that_is_none_of_a_scale(state):
    with pytest.raises(DataError, match="not the state of this scale"):
        find_one(learning(), RewardScaler).load_state_dict(state)
    with pytest.raises(DataError, match="none, as the scale is constant"):
        RewardScaler(learning(None), 2.0).load_state_dict(dict(count=1.0))


# --- observations


def nested_ticks():
    return EnvStepper(lambda: Nested([(2, "trunc")]), NestedMemory(), 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_casts(dtype):
    "Floating leaves only, here of a fragment with truncated ends."
    source = FragmentCollector(nested_ticks(), 3)
    raw = next(iter(source))
    f = next(iter(ObservationCast(source, dtype)))
    for a, b in ((raw.state.obs, f.state.obs), (raw.final.obs, f.final.obs)):
        assert b["place"].dtype is b["exact"].dtype is dtype
        assert torch.equal(b["exact"], a["exact"].to(dtype))
        assert_same(b["pair"], a["pair"])
    rest = lambda f: f._replace(state=f.state._replace(obs=()), final=())
    assert_same(rest(f), rest(raw))


def test_casts_of_ticks():
    a = next(iter(FragmentCollector(ObservationCast(nested_ticks(), torch.float32), 5)))
    b = next(iter(ObservationCast(FragmentCollector(nested_ticks(), 5), torch.float32)))
    assert_same(a, b)
    text = "ObservationCast, lane 0: .*float32 or float64, got torch.float16"
    with pytest.raises(DataError, match=text):
        next(iter(ObservationCast(nested_ticks(), torch.float16)))


# --- n steps


def naive_n_step(f, n, gamma, t, b, v, v_final):
    "(sum, discount, steps, what was reached, target) of one row, in float64."
    total = 0.0
    m = 0
    ended = False
    while m < n and t + m < f.n_steps and f.valid[t + m, b] and not ended:
        total += gamma**m * float(f.state.rew[t + m + 1, b])
        ended = bool(f.state.fin[t + m + 1, b])
        m += 1
    if not m:
        return 0.0, 0.0, 0, None, 0.0
    if not ended:
        discount = gamma**m
        return total, discount, m, f.state.obs[t + m, b], total + discount * float(v[t + m, b])

    # The true last observation of an episode, which may be missing if it was terminated.
    final = {at: k for k, at in enumerate(zip(f.final.t.tolist(), f.final.b.tolist()))}
    last = final.get((t + m - 1, b))
    reached = None if last is None else f.final.obs[last]
    if f.term[t + m, b]:
        return total, 0.0, m, reached, total
    return total, gamma**m, m, reached, total + gamma**m * float(v_final[last])


@fast
@given(
    each=st.lists(plans, min_size=1, max_size=3),
    n_steps=st.integers(1, 7),
    n=st.integers(1, 9),
    gamma=st.sampled_from([0.0, 0.5, 0.99]),
    sticky=st.booleans(),
    terminal_obs=st.booleans(),
)
def test_n_step_returns(each, n_steps, n, gamma, sticky, terminal_obs):
    rest = n_steps if sticky else None
    source = fragments(each, n_steps, rest, terminal_obs=terminal_obs)
    for s in islice(NStep(source, n, gamma), 3):
        f = s.fragment
        v = judge(f.state.obs)
        v_final = judge(f.final.obs)
        reached = s.reached(f.state.obs, f.final.obs)
        target = s.target(v, v_final)
        assert s.rew.dtype is s.discount.dtype is target.dtype is torch.float32
        assert s.n_steps.dtype is s.row.dtype is torch.int64
        for at in np.ndindex(n_steps, len(each)):
            total, discount, m, obs, expected = naive_n_step(f, n, gamma, *at, v, v_final)
            ours = [s.rew[at], s.discount[at], target[at]]
            np.testing.assert_allclose(ours, [total, discount, expected], rtol=1e-4, atol=1e-4)
            assert s.n_steps[at] == m and (obs is None or torch.equal(reached[at], obs))


def test_n_step_returns_alias_nothing():
    s = next(iter(NStep(fragments([[(9, "trunc")]], 5), 1, 1.0)))
    f = s.fragment
    before = snapshot(f)
    for x in (s.rew, s.discount, s.n_steps, s.row, s.reached(f.state.obs, f.final.obs)):
        x.zero_()
    assert_same(f, before)


# --- frames


def filmed(plan, tag=0):
    "Pictures that tell the environment, the episode and the step."
    return Scripted(
        plan,
        tag,
        observation_space=gym.spaces.Box(0, 255, (2, 3), np.uint8),
        see=lambda env: np.uint8([[env.tag, env.episode, env.count], [env.count, 7, 1]]),
        pay=1.0,
        tell={},
        tell_first={},
    )


def film(each, n_steps, stack=None, sticky=None):
    def make(plan, tag):
        env = filmed(plan, tag)
        if stack is None:
            return env
        return gym.wrappers.FrameStackObservation(env, stack, padding_type="reset")

    ticks = EnvStepper(factories(make, each), Acts(uses_past=False), sticky=sticky)
    return FragmentCollector(ticks, n_steps)


def check_stacks(f, expected):
    "The observations of a fragment are these, as stacks."
    assert isinstance(f.state.obs, Stacks) and f.state.obs.shape == expected.state.obs.shape
    assert torch.equal(f.state.obs, expected.state.obs)
    assert torch.equal(f.final.obs, expected.final.obs) and f.final.obs.dtype is torch.uint8


@pytest.mark.slow
@fast
@given(
    each=st.lists(plans, min_size=1, max_size=3),
    n_steps=st.integers(1, 7),
    n=st.integers(1, 5),
    lanes=st.integers(1, 2),
    joined=st.integers(1, 3),
    below=st.booleans(),
    sticky=st.booleans(),
)
def test_stacks_are_those_of_gymnasium(each, n_steps, n, lanes, joined, below, sticky):
    "Whatever the lanes, above and below the pipe that joins fragments."
    rest = n_steps if sticky else None
    wide = FragmentStacker(Lanes(film(each, n_steps, n, rest), lanes, seed=0), joined)
    plain = Lanes(film(each, n_steps, None, rest), lanes, seed=0)
    if below:
        pipe = FrameStack(FragmentStacker(plain, joined), n)
    else:
        pipe = FragmentStacker(FrameStack(plain, n), joined)
    for expected, f in zip(islice(wide, 4), pipe):
        check_stacks(f, expected)


def test_minibatches_of_stacks():
    "Shuffled transitions stay small until they are used."
    each = [[(3, "trunc"), (5, "term")], [(4, "both")]]
    sources = film(each, 6, 4), FrameStack(film(each, 6), 4)
    wide, lazy = (Minibatcher(source, 5, 2, seed=0) for source in sources)
    for expected, f in zip(islice(wide, 8), lazy):
        check_stacks(f, expected)


def stacks():
    g = torch.Generator().manual_seed(0)
    frames, past = (torch.randint(256, (n, 2, 3), generator=g, dtype=torch.uint8) for n in (12, 4))
    return Stacks(frames, past, torch.randint(-4, 12, (5, 3, 4), generator=g))


LAZY = {
    "rows": lambda x: x[1:4],
    "one row": lambda x: x[2],
    "last": lambda x: x[:-1],
    "columns": lambda x: x[:, 1:],
    "mask": lambda x: x[:, [True, False, True]],
    "index": lambda x: x[torch.tensor([0, 4, 4])],
    "index of columns": lambda x: x[:, torch.tensor([2, 0])],
    "pairs": lambda x: x[torch.tensor([[0, 1], [1, 2]]), torch.tensor([0, 2])],
    "rows and columns": lambda x: x[1:3, 0],
    "new": lambda x: x[None],
    "mask of both": lambda x: x[torch.arange(15).view(5, 3) % 2 == 0],
    "join": lambda x: torch.cat([x, x[:, :2]], 1),
    "join rows": lambda x: torch.cat([x, x]),
    "clone": lambda x: x.clone(),
    "detach": lambda x: x.detach(),
    "move": lambda x: x.to("cpu"),
    "new from the end": lambda x: x.unsqueeze(-5),
    "rows from the end": lambda x: x.narrow(-5, 1, 3),
    "column from the end": lambda x: x.select(-4, 2),
    "join from the end": lambda x: torch.cat([x, x], -5),
    "join of three from the end": lambda x: torch.cat([x[None], x[None]], -4),
}
DENSE = {
    "float": lambda x: x.float(),
    "sum": lambda x: x.sum(),
    "arithmetic": lambda x: 2 * x + 1,
    "one frame": lambda x: x[:, :, 1],
    "pixel": lambda x: x[..., 0],
    "every second": lambda x: x[:, :, ::2],
    "flatten": lambda x: x.flatten(0, 1),
    "reshape": lambda x: x.reshape(15, -1),
    "permute": lambda x: x.permute(1, 0, 2, 3, 4),
    "frames of all": lambda x: x[0, 1, torch.tensor([0, 1])],
    "join with plain": lambda x: torch.cat([x, x.dense() if isinstance(x, Stacks) else x]),
    "join stacks": lambda x: torch.cat([x, x], 2),
    "stack": lambda x: torch.stack([x, x]),
    "divide": lambda x: x / 255,
    "long": lambda x: x.to(torch.int64),
    "split": lambda x: x.split(2)[0],
    "new before the stack": lambda x: x.unsqueeze(-4),
    "new at the front, from the end": lambda x: x[0, 0].unsqueeze(-4),
    "one frame from the end": lambda x: x.select(-3, 1),
}


@pytest.mark.parametrize("name", [*LAZY, *DENSE])
def test_stacks_are_tensors(name):
    "Operations give what they give on the dense tensor; those on leading dimensions put no frames together."
    x = stacks()
    op = (LAZY | DENSE)[name]
    result = op(x)
    expected = op(x.dense())
    assert torch.equal(result, expected)
    assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
    assert isinstance(result, Stacks) == (name in LAZY)


@pytest.mark.slow
@fast
@given(each=st.lists(plans, min_size=1, max_size=3), n_steps=st.integers(1, 7), n=st.integers(1, 5))
def test_steps_lead_to_the_stacks_of_gymnasium(each, n_steps, n):
    merger = NStep(film(each, n_steps), 3)
    for plain, lazy in zip(islice(film(each, n_steps, n), 4), FrameStack(film(each, n_steps), n)):
        assert torch.equal(next_observations_in_episode(lazy), next_observations_in_episode(plain))
        a, b = (merger.sums(f).reached(f.state.obs, f.final.obs) for f in (plain, lazy))
        assert torch.equal(b, a)


@pytest.mark.parametrize(
    "op",
    [
        lambda x: x.add_(1),
        lambda x: x.__setitem__(0, 7),
        lambda x: x.__setitem__(x > 3, 0),
        lambda x: x.zero_(),
        lambda x: torch.add(x, 1, out=x),
        lambda x: x.copy_(x.dense()),
        lambda x: torch._foreach_add_([x], 1),
        lambda x: x.index_put_((torch.tensor([0]),), x[1:2]),
    ],
)
def test_stacks_refuse_to_be_changed_in_place(op):
    with pytest.raises(DataError, match="stacks of frames cannot be changed in place"):
        op(stacks())


def test_stacks_can_be_copied_into_a_tensor():
    x = stacks()
    assert torch.equal(torch.zeros(x.shape, dtype=x.dtype).copy_(x), x)


def test_stacks_share_the_memory_of_their_parts():
    x = stacks()
    y = stacks()
    assert not x.is_shared()
    assert x.share_memory_() is x and x.is_shared() and torch.equal(x, y)
    assert all(part.is_shared() for part in (x.frames, x.past, x.rows))


def test_stacks_travel():
    x = stacks()
    for y in (pickle.loads(pickle.dumps(x)), copy.copy(x)):
        assert isinstance(y, Stacks) and torch.equal(x, y)
    meta = x.to("meta")
    assert isinstance(meta, Stacks) and meta.shape == (meta * 2).shape == x.shape
    for array in (x.detach().numpy(), np.asarray(x)):
        assert np.array_equal(array, x.dense().numpy())
    assert repr(x) == "Stacks(uint8 [5, 3, 4, 2, 3], 12 frames)"


def test_each_frame_is_stored_once():
    frames = []
    source = Tap(film([[(30, "term")]] * 2, 16), lambda f: frames.append(f.state.obs))
    stacks = [f.state.obs for f in islice(FrameStack(source, 4), 3)]
    for x, stack in zip(frames, stacks):
        assert stack.frames.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        assert (len(stack.frames), len(stack.past)) == (17 * 2, 3 * 2)


@pytest.mark.parametrize(
    "pipe",
    [lambda p: FrameStack(p, 3), RewardScaler, lambda p: EpisodeStats(p, id)],
    ids=["FrameStack", "RewardScaler", "EpisodeStats"],
)
def test_two_sources_with_the_same_lane_are_refused(pipe):
    "Each begins anew in its turn, as a lane does, but then goes on at a number that the other one has had."
    one, other = (
        list(islice(Lanes(film([[(length, "trunc")]], 4), 1, seed=0), 6)) for length in (6, 7)
    )
    mixed = [f for pair in zip(one, other) for f in pair]
    text = "two sources have the same lane.*seq >= .*`Lanes` for each of them"
    with pytest.raises(DataError, match=text):
        list(pipe(IterableWrapper(mixed)))

    # What the message advises
    renumbered = [f._replace(lane=f.lane + 1) for f in other]
    both = [f for pair in zip(one, renumbered) for f in pair]
    assert len(list(pipe(IterableWrapper(both)))) == 12


@pytest.mark.parametrize("joined", [1, 2, 3])
def test_a_lane_that_begins_anew_is_no_other_source(joined):
    "It lost its worker, and its fragments may be joined with those from before."
    one, other = (list(islice(film([[(6, "trunc")]], 4), 3)) for _ in range(2))
    lane = IterableWrapper([*one, *(with_restarts(f, 1) for f in other)])
    batches = FragmentStacker(lane, joined)
    ends = []
    for pipe in (FrameStack(batches, 3), RewardScaler(batches), EpisodeStats(batches, ends.append)):
        list(pipe)
    assert [end.length for end in ends] == [6, 6, 6, 6]


def test_frames_that_are_missing():
    first, _, third = islice(film([[(30, "term")]], 4), 3)
    text = "FrameStack, lane 0, leaf seq: a fragment is missing.*Expected seq=1, got seq=2"
    with pytest.raises(DataError, match=text):
        list(FrameStack(IterableWrapper([first, third]), 4))
    with pytest.raises(DataError, match="there are no images"):
        next(iter(FrameStack(fragments([[(1, "term")]], 2))))


# --- devices


def test_to_meta():
    "All tensors of a fragment, of n steps and of stacks, nothing else."
    plan = [[(2, "trunc")]]
    for pipe in (
        fragments(plan, 3, actor=Memory()),
        NStep(fragments(plan, 3), 2),
        FrameStack(film(plan, 3), 2),
    ):
        item = next(iter(pipe))
        moved = next(iter(ToDevice(pipe, "meta")))
        assert type(moved) is type(item)
        apply(lambda x: x.is_meta or pytest.fail("a leaf stayed"), moved)
        shapes = lambda tree: repr(apply(lambda x: (tuple(x.shape), str(x.dtype)), tree))
        assert shapes(moved) == shapes(item)


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_items_are_fetched_ahead_and_stay_in_order(ahead):
    fetched = []
    source = Tap(Limit(fragments([[(3, "trunc")]], 4), 6), fetched.append)
    for k, f in enumerate(ToDevice(source, "cpu", ahead)):
        assert f.seq.tolist() == [k] and len(fetched) == min(6, k + 1 + ahead)
    assert k == 5


def test_a_device_that_is_not_there():
    if torch.cuda.is_available():
        pytest.skip("it is there")
    for device in ("cuda:1", "mps", "xpu"):
        text = f"ToDevice.*no such device here. Expected cpu.*got '{device}'"
        with pytest.raises(DataError, match=text):
            next(iter(ToDevice(fragments([[(2, "trunc")]], 3), device)))


def test_ticks_stay():
    with pytest.raises(DataError, match="ToDevice: ticks cannot be moved"):
        next(iter(ToDevice(EnvStepper(Counting, Plain()), "cpu")))


@pytest.mark.gpu
@pytest.mark.parametrize("ahead", [0, 1])
def test_to_cuda(ahead):
    each = [[(2, "trunc"), (5, "term")]]
    for raw, f in zip(islice(fragments(each, 64), 6), ToDevice(fragments(each, 64), "cuda", ahead)):
        assert f.state.rew.is_cuda
        assert_same(apply(lambda x: x.cpu(), f), raw)
    stacked = FrameStack(film(each, 16), 4)
    for raw, f in zip(list(islice(stacked, 3)), ToDevice(stacked, "cuda", ahead)):
        assert f.state.obs.is_cuda and torch.equal(f.state.obs.cpu(), raw.state.obs)


def test_the_memory_of_all_parts_of_stacks_is_protected():
    "A CUDA stream must not use memory again while another one reads it. Only a GPU has the operation itself."
    x = stacks()
    recorded = []
    record_stream = frames._LAZY[torch.ops.aten.record_stream.default]
    assert record_stream(lambda part, stream: recorded.append(part), x, None) is x
    parts = x.frames, x.past, x.rows
    assert [part.data_ptr() for part in recorded] == [part.data_ptr() for part in parts]
