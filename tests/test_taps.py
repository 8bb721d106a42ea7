"Taps: what they tell, against plain loops; that they change nothing; and the life of every pipe that is neither source nor batch."

from itertools import islice

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_fragments import episodes as plans
from reference import apply
from toys import (
    Counting,
    Limit,
    Lively,
    Memory,
    Nested,
    NestedMemory,
    Plain,
    factories,
    judge,
)

from rollpipe.layers import GaussianPolicy, MemoryCritic, RecurrentPolicy
from rollpipe.pipes import (
    AdvantageBuffer,
    CheckInvariants,
    DataError,
    EnvStepper,
    EpisodeCollector,
    EpisodeStats,
    FragmentCollector,
    FragmentStacker,
    Lanes,
    Pipe,
    Tap,
    invariants,
)
from rollpipe.pipes.data.fragment import Tick
from rollpipe.pipes.graph.modules import bump_version
from rollpipe.pipes.graph.torchdata import (
    IterableWrapper,
)
from rollpipe.pipes.taps import EpisodeEnd, EpisodeSums, Rate, Throughput

pytestmark = pytest.mark.usefixtures("nothing_stays_open")
fast = settings(deadline=None, max_examples=25)


def run(pipe, n):
    for _ in islice(pipe, n):
        pass


def told(ticks):
    "Episode ends in the order of ticks, by a plain loop over every step of every environment."
    running = {}
    found = []
    for tick in ticks:
        for b in range(len(tick.valid)):
            if not tick.valid[b]:
                continue
            ret, length = running.get((tick.lane, b), (0.0, 0))
            ret = ret + float(tick.next.rew[b])
            length = length + 1
            if tick.next.fin[b]:
                found.append(EpisodeEnd(tick.lane, b, ret, length, bool(tick.term[b])))
            running[tick.lane, b] = (0.0, 0) if tick.next.fin[b] else (ret, length)
    return found


def same_ends(a, b):
    key = lambda ends: [(e.lane, e.env, e.length, e.terminated) for e in ends]
    assert key(a) == key(b)
    np.testing.assert_allclose([e.ret for e in a], [e.ret for e in b], rtol=1e-12)


def per_lane(ends):
    return sorted(ends, key=lambda e: (e.lane, e.env))


rewards = st.floats(-1e6, 1e6, width=32) | st.sampled_from([1.0, 0.1, 1e-7, 1e20])


@settings(deadline=None, max_examples=100)
@given(data=st.data(), n=st.integers(1, 3), n_steps=st.integers(1, 30))
def test_sums_of_episodes_bit_for_bit(data, n, n_steps):
    "Step by step, and in fragments of any length: what a loop over Python's floats adds up, in the order of time."

    def table(of):
        return np.array(
            data.draw(
                st.lists(st.lists(of, min_size=n, max_size=n), min_size=n_steps, max_size=n_steps)
            )
        )

    rew = table(rewards).astype(np.float32)
    fin = table(st.booleans())
    valid = table(st.integers(0, 3)) > 0
    expected = []
    rets = [0.0] * n
    lengths = [0] * n
    counts = [0] * n
    totals = []
    for t in range(n_steps):
        for b in range(n):
            if valid[t, b]:
                rets[b] = rets[b] + float(rew[t, b])
                lengths[b] = lengths[b] + 1
        totals.append(list(rets))
        for b in range(n):
            if valid[t, b] and fin[t, b]:
                expected.append((t, b, rets[b], lengths[b]))
                rets[b] = 0.0
                lengths[b] = 0
                counts[b] = counts[b] + 1
    steps = EpisodeSums(n)
    fragments = EpisodeSums(n)
    found = []
    running = []
    for t in range(n_steps):
        steps.add(rew[t], valid[t])
        running.append(steps.ret.tolist())
        found += [(t, *end) for end in steps.end(fin[t] & valid[t])]
    assert found == expected and running == totals
    found = []
    borders = sorted({0, n_steps, *data.draw(st.sets(st.integers(0, n_steps)))})
    for i, j in zip(borders, borders[1:]):
        found += [(i + t, *end) for t, *end in fragments.add_steps(rew[i:j], fin[i:j], valid[i:j])]
    assert found == expected
    for sums in (steps, fragments):
        assert (sums.ret.tolist(), sums.length.tolist(), sums.count.tolist()) == (
            rets,
            lengths,
            counts,
        )


@fast
@given(data=st.data(), n_steps=st.integers(1, 12))
def test_sums_of_episodes_of_which_steps_are_lost(data, n_steps):
    "Only what was seen whole is told; every end is counted. The step number cannot show a loss that crosses the end of an episode."
    fin = data.draw(st.lists(st.booleans(), min_size=n_steps, max_size=n_steps))
    kept = [over or data.draw(st.booleans()) for over in fin]
    expected = []
    seen = 0
    stepno = 0
    sums = EpisodeSums(1)
    found = []
    for t in range(n_steps):
        seen += kept[t]
        if kept[t]:
            sums.continue_at(np.array([stepno]))
            one = np.array([[1.0]]), np.array([[fin[t]]]), np.array([[True]])
            found += sums.add_steps(*one)
        stepno += 1
        if fin[t]:
            if seen == stepno:
                expected.append((0, 0, float(stepno), stepno))
            seen = stepno = 0
    assert found == expected and sums.count.tolist() == [sum(fin)]


@pytest.mark.parametrize("joined", [1, 3])
def test_a_lane_that_skips_a_fragment_is_followed_anew(joined):
    "Even if the step numbers happen to fit: episodes of 4 steps, and fragments of 2 of which every second pair is lost."

    class Skipping(Pipe):
        def stream(self, items):
            for k, item in enumerate(items):
                if k % 4 in (0, 3):
                    yield item

    ends = []
    pipe = Skipping(FragmentCollector(EnvStepper(lambda: Counting([(4, "term")]), Plain()), 2))
    run(EpisodeStats(FragmentStacker(pipe, joined), ends.append), 12 // joined)
    assert ends == []


@pytest.mark.slow
@fast
@given(
    each=st.lists(plans, min_size=1, max_size=3),
    n_steps=st.integers(1, 7),
    n_lanes=st.integers(1, 3),
    n=st.integers(1, 5),
    sticky=st.booleans(),
)
def test_episode_stats(each, n_steps, n_lanes, n, sticky):
    "On ticks, on fragments, and on batches that join lanes or consecutive fragments, with environments that rest."

    def ticks():
        return EnvStepper(factories(Counting, each), Plain(), sticky=n_steps if sticky else None)

    def pipe():
        return Lanes(FragmentCollector(ticks(), n_steps), n_lanes, seed=0)

    n_items = n_lanes * n * 3
    expected = told(islice(Lanes(ticks(), n_lanes, seed=0), n_items * n_steps))
    one = []
    two = []
    three = []
    four = []
    run(EpisodeStats(Lanes(ticks(), n_lanes, seed=0), one.append), n_items * n_steps)
    same_ends(one, expected)
    run(EpisodeStats(pipe(), two.append), n_items)
    run(FragmentStacker(EpisodeStats(pipe(), three.append), n), n_items // n)
    run(EpisodeStats(FragmentStacker(pipe(), n), four.append), n_items // n)
    for ends in (two, three, four):
        same_ends(per_lane(ends), per_lane(expected))


@pytest.mark.parametrize("mode", list(gym.vector.AutoresetMode))
def test_episode_stats_of_vector_environments(mode):
    "Phantom steps count neither as steps nor as rewards."
    vec = []
    on_fragments = []

    def source():
        return gym.vector.SyncVectorEnv([lambda: gym.make("CartPole-v1")] * 3, autoreset_mode=mode)

    run(EpisodeStats(EnvStepper(source, Pushing(), seed=0), vec.append), 200)
    assert len(vec) > 20 and all(e.ret == e.length > 1 and e.terminated for e in vec)
    run(
        EpisodeStats(
            FragmentCollector(EnvStepper(source, Pushing(), seed=0), 8), on_fragments.append
        ),
        25,
    )
    same_ends(per_lane(on_fragments), per_lane(vec))


class Pushing:
    "Pushes the cart to one side."

    def step(self, stepno, obs, act, rew, fin, /, *, hx, virtual):
        return torch.zeros_like(stepno), (), {}

    def reset(self, hx, at):
        return hx


def test_taps_pass_the_very_same_items():
    "And put nothing of their own into the stream."

    class Given(Pipe):
        def stream(self, items):
            yield from kept

    for kept in (
        list(islice(EnvStepper(Counting, Plain()), 6)),
        list(islice(FragmentCollector(EnvStepper(Counting, Plain()), 3), 6)),
    ):
        source = Given(IterableWrapper([]))
        nothing = lambda x: None
        taps = [Tap(source, nothing), EpisodeStats(source, nothing), Throughput(source, nothing)]
        if not isinstance(kept[0], Tick):
            taps.append(CheckInvariants(source, rate=1))
        for tap in taps:
            assert [id(x) for x in tap] == [id(x) for x in kept]


def test_throughput_with_a_clock_of_our_own():
    now = [0.0]
    rates = []

    class Slow(Pipe):
        def stream(self, items):
            for item in items:
                now[0] += 2
                yield item

    pipe = Throughput(
        Slow(Limit(FragmentCollector(EnvStepper(Counting, Plain(), 3), 4), 5)),
        rates.append,
        every=2,
        clock=lambda: now[0],
    )
    for _ in pipe:
        now[0] += 1
    # the time between two items is that of the item before; the first window lacks it once
    assert rates == [Rate(2, 24, 5, 4), Rate(2, 24, 6, 4), Rate(1, 12, 4, 2)]
    assert rates[1].steps_per_second == 4


def test_throughput_counts_valid_steps_only():
    rates = []
    run(
        Throughput(
            EnvStepper(lambda: Counting([(2, "term")]), Plain(), sticky=5), rates.append, every=10
        ),
        10,
    )
    assert rates[0][:2] == (10, 4)
    run(
        Throughput(
            EpisodeCollector(EnvStepper(lambda: Counting([(3, "trunc")]), Plain()), 2),
            rates.append,
            every=3,
        ),
        3,
    )
    assert rates[1][:2] == (3, 18)


# --- invariants


def healthy(kind):
    "Sound streams of all kinds."
    plan = [[(2, "term"), (5, "trunc")], [(3, "both"), (1, "trunc")]]
    if kind == "memory":
        return FragmentCollector(EnvStepper(factories(Counting, plan), Memory()), 4)
    if kind == "nested":
        return AdvantageBuffer(
            FragmentCollector(EnvStepper(factories(Nested, plan), NestedMemory()), 4), nested_judge
        )
    if kind == "sticky":
        return AdvantageBuffer(
            FragmentCollector(EnvStepper(factories(Counting, plan), Plain(), sticky=4), 4), judge
        )
    if kind == "episodes":
        plan = [[(2, "trunc"), (5, "trunc")], [(3, "trunc")]]
        return AdvantageBuffer(
            EpisodeCollector(EnvStepper(factories(Counting, plan), Plain()), 3, pad=True), judge
        )
    if kind == "vector":
        source = lambda: gym.vector.SyncVectorEnv(
            factories(Counting, plan), autoreset_mode="NextStep"
        )
        return AdvantageBuffer(
            FragmentCollector(EnvStepper(source, Plain(), info_keys=[]), 4), judge
        )
    pipe = Lanes(
        FragmentCollector(
            EnvStepper(lambda: Lively(), GaussianPolicy.for_env(Lively, seed=0), 2), 8
        ),
        2,
        seed=0,
    )
    return FragmentStacker(
        AdvantageBuffer(pipe, lambda obs: obs.sum(-1)), 4 if kind == "joined" else 1
    )


def nested_judge(obs):
    return obs["place"][..., 2] / 8 - obs["exact"]


@pytest.mark.parametrize("sticky", [None, 8])
def test_sound_policies_with_memory_pass(sticky):
    "Also with a critic that judges the memory. And their stale memory is found, where `hx` is shown and where it is only felt."
    policy = RecurrentPolicy.for_env(Lively, seed=0, report=True)

    def source():
        return FragmentCollector(EnvStepper(Lively, policy, 3, seed=0, sticky=sticky), 8)

    run(CheckInvariants(source(), rate=1), 10)
    run(
        CheckInvariants(AdvantageBuffer(source(), MemoryCritic.for_env(Lively, seed=0)), rate=1), 10
    )

    class Stale(Pipe):
        def stream(self, items):
            for f in items:
                yield f._replace(
                    hx=apply(lambda x: torch.where(f.state.fin[0][:, None], x, x + 1), f.hx)  # noqa: B023
                )

    with pytest.raises(DataError, match="likelihood ratio|memory was not reset"):
        run(CheckInvariants(Stale(source()), rate=1), 10)


@pytest.mark.slow_but_one
@pytest.mark.parametrize(
    "kind", ["memory", "nested", "sticky", "episodes", "vector", "policy", "joined"]
)
def test_sound_streams_pass(kind):
    run(CheckInvariants(healthy(kind), rate=1), 12)


def changed(f, **fields):
    "`f` with some leaves of `state`, or fields, replaced by a function of what was there."
    state = {k: fn(getattr(f.state, k)) for k, fn in fields.items() if k in f.state._fields}
    rest = {k: fn(getattr(f, k)) for k, fn in fields.items() if k not in f.state._fields}
    return f._replace(state=f.state._replace(**state), **rest)


late = lambda x: x.roll(1, 0)
FAULTS = {
    "a reward comes late": (dict(rew=late), "wrong advantage|row 0 does not continue"),
    "an action comes late": (dict(act=late), "likelihood ratio"),
    "observations come late": (dict(obs=late), "likelihood ratio"),
    "an end comes late": (dict(fin=late), "not counted|does not begin|without an end|final row"),
    "steps are counted on": (
        dict(stepno=lambda x: torch.arange(len(x))[:, None].expand_as(x).clone()),
        "not counted|does not begin",
    ),
    "terminations everywhere": (dict(term=torch.ones_like), "terminates without an end"),
    "a truncation lost its final row": (
        dict(final=lambda x: apply(lambda y: y[:0], x)),
        "no final row",
    ),
    "a final row too many": (
        dict(final=lambda x: apply(lambda y: torch.cat([y, y]), x)),
        "more than one",
    ),
    "a final row in the wrong place": (
        dict(final=lambda x: x._replace(t=(x.t + 1) % 8)),
        "final row",
    ),
    "a reward is infinite": (dict(rew=lambda x: x + float("inf")), "not finite"),
    "a row is missing": (dict(term=lambda x: x[1:]), "number of rows"),
    "advantages are centred": (dict(adv=lambda x: x - x.mean() + 1), "wrong advantage"),
    "targets are wrong": (dict(ret=lambda x: x * 2 + 1), "wrong advantage or value target"),
    "rows that are valid are not": (dict(valid=torch.zeros_like), "no step"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault):
    change, message = FAULTS[fault]

    class Faulty(Pipe):
        def stream(self, items):
            for f in items:
                yield changed(f, **change)

    with pytest.raises(DataError, match=rf"CheckInvariants, lane \[[01]\], .*({message})"):
        run(CheckInvariants(Faulty(healthy("policy")), rate=1), 12)


def test_data_of_older_weights_have_no_ratio_of_1():
    "What other weights collected is left alone; what claims to be fresh is not."
    policy = GaussianPolicy.for_env(Lively, seed=0)

    class Trained(Pipe):
        "Trains behind the back of the stream: between collecting and checking."

        def stream(self, items):
            for f in items:
                with torch.no_grad():
                    for p in policy.parameters():
                        p.add_(0.1)
                if announced:
                    bump_version(policy)
                yield f

    for announced in (True, False):
        pipe = CheckInvariants(
            Trained(FragmentCollector(EnvStepper(Lively, policy, 2, seed=0), 8)), rate=1
        )
        if announced:
            run(pipe, 3)
        else:
            with pytest.raises(DataError, match="likelihood ratio of fresh data"):
                run(pipe, 3)


@pytest.mark.parametrize(
    "rate, checked",
    [
        (0, []),
        (1, range(20)),
        (0.5, [0, 2, 4, 6, 8, 10, 12, 14, 16, 18]),
        (0.25, [0, 4, 8, 12, 16]),
        (0.1, [0, 10]),
    ],
)
def test_the_sample_is_evenly_spread(rate, checked, monkeypatch):
    seen = []
    monkeypatch.setattr(invariants, "check_alignment", lambda f: seen.append(int(f.seq[0])))
    run(CheckInvariants(healthy("memory"), rate=rate), 20)
    assert seen == list(checked)


def test_arguments_come_before_what_is_found_above():
    pipe = CheckInvariants(AdvantageBuffer(healthy("memory"), judge, 0.9, 0.8), gamma=0.5)
    with pytest.raises(DataError, match="wrong advantage"):
        run(pipe, 1)
    run(CheckInvariants(AdvantageBuffer(healthy("memory"), judge, 0.9, 0.8)), 1)


# --- the life of every pipe
