"""Replay against a memory in the most naive Python.

It is a list of steps, each of which knows its own two rows and who follows it.
"""

from collections import Counter
from functools import cache, partial
from itertools import chain, islice, pairwise

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_fragments import fragments
from reference import assert_same, snapshot
from toys import WORLDS, Counting, Lively, Memory, Plain, Shaky

from rollpipe.pipes import (
    DataError,
    EnvStepper,
    EpisodeCollector,
    Fragment,
    FragmentCollector,
    FragmentStacker,
    Lanes,
    ObservationCast,
    Pipe,
    Replay,
    ReplayMemory,
    find_one,
    nested,
    replayed,
    rollouts,
)
from rollpipe.pipes.data.fragment_ops import columns, join
from rollpipe.pipes.graph.torchdata import IterableWrapper
from rollpipe.pipes.invariants import check_alignment
from rollpipe.pipes.replay.layout import FragmentLayout, Ring, SideTable, unbatched
from rollpipe.pipes.replay.memory import SumTree
from rollpipe.testing import check_pipe

EPISODES = ((3, "term"), (4, "trunc"), (1, "both"), (2, "trunc"), (6, "term"))


@cache
def collected(world="plain", lane=0, n_envs=2, n_steps=4, n=12, sticky=None):
    "`n` fragments of a lane; the first number of an observation tells lane and environment."
    env, actor = WORLDS[world]
    makes = [partial(env, EPISODES[b:] + EPISODES[:b], tag=10 * lane + b) for b in range(n_envs)]
    pipe = FragmentCollector(EnvStepper(makes, actor(), seed=0, sticky=sticky), n_steps)
    return [f._replace(lane=torch.full((n_envs,), lane)) for f in islice(pipe, n)]


def at(tree, *index):
    return snapshot(nested.map(lambda x: x[index], tree))


def column(tree, b):
    return at(tree, slice(None), b)


def filled(fragments, capacity=100, **options):
    "A memory that has these fragments."
    memory = ReplayMemory(capacity, **{"seed": 0, **options})
    for f in fragments:
        memory.add(f)
    return memory


def cuts_of(final, b):
    "Step in column `b` -> its row of `final`."
    places = enumerate(zip(final.t.tolist(), final.b.tolist()))
    return {t: k for k, (t, its_b) in places if its_b == b}


class Naive:
    "Steps in the order of their arrival."

    def __init__(self, capacity):
        self.capacity = capacity
        self.steps = []
        self.ends = {}
        self.n = 0

    def add(self, f):
        """`f` may be joined of lanes and of several fragments of a lane.

        Its steps come in the order of `seq`, and then of the columns.
        """
        seqs = [None] * f.n_envs if f.seq is None else f.seq.tolist()
        lanes = [0] * f.n_envs if f.lane is None else f.lane.tolist()
        n_columns = Counter()  # of a fragment, so far
        for b in sorted(range(f.n_envs), key=lambda b: seqs[b] or 0):
            fragment = lanes[b], seqs[b]
            self._column(f, b, (lanes[b], n_columns[fragment]), seqs[b])
            n_columns[fragment] += 1
        self.steps = self.steps[-self.capacity :]

    def _column(self, f, b, stream, seq):
        cuts = cuts_of(f.final, b)
        begins = int(f.state.stepno[0, b])
        before, *end = self.ends.get(stream, (None,))
        if seq is None or end != [seq - 1, begins]:
            before = None
        for t in range(f.n_steps):
            step = dict(
                serial=self.n,
                row=at((f.state, f.term), t, b),
                ahead=at((f.state, f.term), t + 1, b),
                told=at((f.actor, f.env, f.valid), t, b),
                then=None,
                who=at((f.lane, f.seq, f.version), b),
                hx=column(f.hx, b) if t == 0 else None,
                final=at((f.final.obs, f.final.actor), cuts[t]) if t in cuts else None,
                valid=bool(f.valid[t, b]),
            )
            if before:
                before["then"] = step
            self.steps.append(step)
            before = step
            self.n = self.n + 1
        self.ends[stream] = before, seq, int(f.state.stepno[-1, b])

    def segments(self, length, stored):
        "serial number -> steps; `stored`: only those that begin with a fragment."
        steps_of = {}
        for step in self.steps:
            steps = [step]
            while steps[-1] and len(steps) < length:
                steps.append(steps[-1]["then"])
            counts = step["valid"]
            if stored:
                counts = step["hx"] is not None and any(s and s["valid"] for s in steps)
            if steps[-1] and counts:
                steps_of[step["serial"]] = steps
        return steps_of


def check_column(f, i, steps, zero_state):
    "Column `i` of a sample is the segment `steps`."
    rows = nested.stack([s["row"] for s in steps] + [steps[-1]["ahead"]])
    assert_same(column((f.state, f.term), i), rows)
    told = nested.map(lambda x: x[:-1], f.actor), f.env, f.valid
    assert_same(column(told, i), nested.stack([s["told"] for s in steps]))
    assert_same(at((f.lane, f.seq, f.version), i), steps[0]["who"])

    # The last observations of episodes that were cut off
    cuts = cuts_of(f.final, i)
    assert sorted(cuts) == [t for t, s in enumerate(steps) if s["final"] is not None]
    for t, k in cuts.items():
        assert_same(at((f.final.obs, f.final.actor), k), steps[t]["final"])

    hx = column(f.hx, i)
    if zero_state:
        assert not any(x.any() for x in nested.leaves(hx))
    else:
        assert_same(hx, steps[0]["hx"] if steps[0]["hx"] is not None else ())


def check(memory, naive):
    assert len(memory) == sum(s["valid"] for s in naive.steps)
    stored = memory.store.keep_hx
    segments = naive.segments(memory.length, stored)
    if not segments:
        with pytest.raises(DataError, match="nothing to sample from"):
            memory.sample(1)
        return

    n = 30 * len(segments)
    fragment, weight, index = memory.sample(n)
    sizes = fragment.n_steps, fragment.n_envs, len(weight), len(index)
    assert sizes == (memory.length, n, n, n)
    assert (weight.dtype, index.dtype) == (torch.float32, torch.int64) and weight.max() == 1
    assert set(index.tolist()) == set(segments)
    check_alignment(fragment)
    first = {serial: i for i, serial in reversed(list(enumerate(index.tolist())))}
    for serial, i in islice(first.items(), 12):
        check_column(fragment, i, segments[serial], not stored)


def check_both(groups, capacity, **options):
    "Compare a memory with a naive one, after each fragment that both get."
    memory = ReplayMemory(capacity, **{"seed": 0, **options})
    naive = Naive(capacity)
    for f in groups:
        memory.add(f)
        naive.add(f)
        check(memory, naive)
    return memory


@st.composite
def arrivals(draw):
    "Options of a memory, and the fragments that arrive, each joined of several ones."
    world = draw(st.sampled_from(list(WORLDS)))
    n_steps = draw(st.integers(1, 5))
    n_lanes = draw(st.integers(1, 3))
    sticky = draw(st.booleans())
    zero = draw(st.booleans())
    length = draw(st.integers(1 if world == "plain" or zero else n_steps, n_steps + 4))
    n_envs = [1 + lane % 2 for lane in range(n_lanes)]
    lanes = [
        collected(world, lane, n_envs[lane], n_steps, 8, n_steps if sticky else None)
        for lane in range(n_lanes)
    ]
    position = [0] * n_lanes
    groups = []
    for _ in range(draw(st.integers(1, 10))):
        group = []
        for lane in draw(st.lists(st.integers(0, n_lanes - 1), min_size=1, max_size=3)):
            if draw(st.integers(0, 9)) == 0:
                position[lane] = draw(st.integers(0, 7))  # a gap, or a new beginning
            group.append(lanes[lane][position[lane] % 8])
            position[lane] += 1
        if len({(int(f.lane[0]), int(f.seq[0])) for f in group}) == len(group):
            groups.append(group)
    joined = [join(group) for group in groups]
    largest = max([length] + [f.valid.numel() for f in joined])
    return dict(
        groups=joined,
        capacity=draw(st.integers(largest, 90)),
        length=length,
        zero_state=zero,
        prioritized=draw(st.booleans()),
    )


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(arrivals())
def test_a_memory_is_the_naive_one(case):
    check_both(**case)


@pytest.mark.parametrize("length", [1, 3])
def test_episodes_of_any_length(length):
    pipe = EpisodeCollector(
        EnvStepper(partial(Counting, EPISODES), Plain(), 2, seed=0, terminal_obs=True)
    )
    check_both(chain.from_iterable(islice(pipe, 14)), 23, length=length)


def test_fragments_without_provenance_stand_alone():
    fragments = [f._replace(lane=None, seq=None, version=None) for f in collected()]
    memory = check_both(fragments, 100, length=3)
    assert memory.sample(2).fragment.lane is None


@pytest.mark.parametrize("swapped", [False, True])
def test_columns_of_other_environments_do_not_follow_though_their_numbers_do(swapped):
    "As the columns of shuffled minibatches, or of another recording with the same lane."
    makes = [partial(Counting, [(9, "term")], tag=tag) for tag in (0, 1)]
    first, second = islice(FragmentCollector(EnvStepper(makes, Plain(), seed=0), 3), 2)
    if swapped:
        second = columns(second, torch.tensor([1, 0]))
    state = filled([first, second], length=3).sample(200).fragment.state
    assert (state.obs[:, :, 0] == state.obs[0, :, 0]).all()

    # The segment of steps 1, 2 and 3 lies across the border.
    assert (state.stepno[0] == 1).any() != swapped


@pytest.mark.parametrize("length", [1, 3])
def test_fragments_made_of_steps_keep_what_led_to_their_borders(length):
    "`from_steps` knows no action, reward or termination before row 0. The fragment before does."

    def part(k, over=False):
        """Steps 2 k and 2 k + 1: step `t` is at `t`, takes action `t + 1`, and is paid `10 t`.

        The last one may terminate.
        """
        t = torch.arange(2 * k, 2 * k + 3.0)
        ends = torch.tensor([[False], [over]])
        return Fragment.from_steps(
            t[:, None, None],
            t[:2, None].long() + 1,
            10 * t[:2, None],
            ends,
            stepno=2 * k % 6,
            lane=torch.tensor([0]),
            seq=torch.tensor([k]),
        )

    memory = ReplayMemory(6, length=length, seed=0)
    for k in range(5):
        memory.add(part(k, over=k == 2))
        if not k:
            continue
        f = memory.sample(100).fragment
        t = f.state.obs[:-1, :, 0]
        assert len({*t[0].tolist()}) == min(6, 2 * k + 2) + 1 - length
        led = nested.map(lambda x: x[1:], (f.state.act, f.state.rew, f.term, f.state.fin))
        assert_same(led, (t.long() + 1, 10 * t, t == 5, t == 5))


def test_advantages_are_kept_if_there_are_any():
    f = collected()[0]
    f = f._replace(adv=torch.arange(8.0).view(4, 2), ret=torch.zeros(4, 2))
    fragment, _, index = filled([f]).sample(50)
    assert torch.equal(fragment.adv[0], (index % 4 * 2 + index // 4).float())
    assert fragment.ret.shape == (1, 50)


def test_an_observation_is_stored_once():
    """One record a step, and one more for each environment, however many fragments there are.

    There is no recurrent state or end too many.
    """
    memory = ReplayMemory(30, length=4, seed=0)
    for f in collected("memory"):
        memory.add(f)
        store = memory.store
        assert len(store.records) == 30 and store.links.look_ahead.n_used == 2
        assert store.hxs.n_used <= 30 // 4 + 1
        assert store.finals.n_used == (store.records["final"][: store.ring.n_filled] >= 0).sum()
    assert len(memory.store.links.look_ahead.records) == 16  # it did not grow


def test_a_sample_is_a_copy():
    memory = filled(collected()[:2], 16)
    sample = memory.sample(20)
    before = snapshot(sample)
    for f in collected():
        memory.add(f)
    memory.sample(20)
    assert_same(snapshot(sample), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_observations_of_any_dtype_come_back(dtype):
    pipe = ObservationCast(FragmentCollector(EnvStepper(Lively, Shaky(), 2, seed=0), 4), dtype)
    f = next(iter(pipe))
    sample, _, index = filled([f], length=4).sample(10)
    b = index // 4
    starts = (index % 4 == 0).nonzero()[:, 0]
    assert sample.state.obs.dtype == dtype
    assert torch.equal(sample.state.obs[:, starts], f.state.obs[:, b[starts]])


# --- what it is made of


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 9), st.lists(st.integers(0, 9), max_size=6))
def test_a_ring_keeps_the_newest(capacity, arrivals):
    ring = Ring(capacity)
    slots = {}  # slot -> serial number
    n = 0
    for more in (min(k, capacity) for k in arrivals):
        serial, replaced = ring.take(more)
        slot_of = {i: i % capacity for i in range(n, n + more)}
        assert serial.tolist() == list(slot_of)
        assert replaced.tolist() == [slot for slot in slot_of.values() if slot in slots]
        slots.update({slot: i for i, slot in slot_of.items()})
        n += more
        assert ring.n_filled == len(slots) and ring.oldest == min(slots.values(), default=0)
        filled = np.array(sorted(slots), np.int64)
        assert ring.serial(filled).tolist() == [slots[k] for k in sorted(slots)]
        assert ring.slot(ring.serial(filled)).tolist() == filled.tolist()


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=8))
def test_a_side_table_is_a_dict_with_numbers_of_its_own(changes):
    table = SideTable(np.int64)
    known = {}
    n = 0
    for more, fewer in changes:
        numbers = table.put(np.arange(n, n + more))
        assert not known.keys() & set(numbers.tolist())
        known.update(zip(numbers.tolist(), range(n, n + more)))
        n += more
        gone = list(known)[:fewer]
        table.release(np.array(gone, np.int64))
        for number in gone:
            del known[number]
        assert table.n_used == len(known)
        assert table.records[list(known)].tolist() == list(known.values())


@settings(deadline=None, max_examples=50)
@given(fragments(), st.data())
def test_what_is_packed_comes_out_again(f, data):
    "In any order of the environments, with nested leaves, final rows and recurrent states."
    layout = FragmentLayout(unbatched(f))
    order = np.array(data.draw(st.permutations(range(f.n_envs))))
    records = layout.pack(f, order)
    place = np.argsort(order)[f.final.b.numpy()], f.final.t.numpy()
    records["final"][place] = np.arange(len(f.final.t))
    records["hx"][:, 0] = np.arange(f.n_envs)
    back = layout.unpack(records.T, layout.pack_final(f), layout.pack_hx(f, order))
    expected = columns(f, torch.from_numpy(order))
    by_time = np.lexsort((expected.final.b, expected.final.t))
    assert_same(back, expected._replace(final=nested.getitem(expected.final, by_time)))


# --- what is drawn


def chi_square(counts, expected):
    "How far counts are from what was expected, in standard deviations of the chi-square statistic."
    k = len(counts) - 1
    return (((counts - expected) ** 2 / expected).sum() - k) / (2 * k) ** 0.5


@pytest.mark.parametrize("sticky", [False, True])
def test_all_segments_are_equally_likely(sticky):
    fragments = collected(n_steps=8, n=12, sticky=8) if sticky else collected()
    memory = filled(fragments, 1000)
    counts = np.bincount(memory.sample(40_000).index, minlength=memory.store.ring.next_serial)
    possible = np.concatenate([f.valid.T.flatten().numpy() for f in fragments])
    assert possible.sum() == len(memory) and not counts[~possible].any()
    assert not sticky or 2 * len(memory) < len(possible)
    assert abs(chi_square(counts[possible], 40_000 / possible.sum())) < 4


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_priorities_decide_how_often(alpha):
    memory = filled(collected(), 1000, prioritized=True, alpha=alpha, beta=0.7)
    error = torch.rand(96, generator=torch.Generator().manual_seed(0)) * 3
    memory.prioritize(torch.arange(96), error)
    share = (error.double().numpy() + 1e-6) ** alpha
    share /= share.sum()
    counts = np.zeros(96)
    for _ in range(400):
        _, weight, index = memory.sample(100)
        counts += np.bincount(index, minlength=96)
        expected = (96 * share[index]) ** -0.7
        np.testing.assert_allclose(weight, expected / expected.max(), rtol=1e-5)
    assert chi_square(counts, 40_000 * share) < 4  # strata: closer than chance
    assert counts.max() - 40_000 * share.max() < 4 * (40_000 * share.max()) ** 0.5


def test_new_segments_have_the_greatest_priority_so_far():
    first, second, third = collected()[:3]
    memory = filled([first], 1000, prioritized=True, alpha=0.5)
    assert memory.sampler.tree[np.arange(8)].tolist() == [1.0] * 8
    memory.prioritize(np.arange(8), np.arange(8.0))
    memory.add(second)
    memory.prioritize(np.arange(8), np.zeros(8))
    memory.add(third)
    np.testing.assert_allclose(memory.sampler.tree[np.arange(8, 24)], 7**0.5, rtol=1e-6)
    np.testing.assert_allclose(memory.sampler.tree[np.arange(8)], 1e-3, rtol=1e-6)


def test_priorities_of_what_is_gone_are_left_out():
    memory = filled(collected()[:2], 16, prioritized=True, alpha=1.0)
    index = memory.sample(200).index
    memory.add(collected()[2])
    memory.prioritize(index, torch.full((200,), 5.0))

    # The first eight are new steps, in the slots of old ones.
    assert memory.sampler.tree[np.arange(8)].tolist() == [1.0] * 8
    np.testing.assert_allclose(memory.sampler.tree[np.arange(8, 16)], 5, rtol=1e-6)


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 70), st.integers(0, 2**32 - 1))
def test_a_sum_tree_finds_as_cumulative_sums_do(size, seed):
    rng = np.random.default_rng(seed)
    tree = SumTree(size)
    priority = np.zeros(size)
    for _ in range(5):
        index = rng.integers(size, size=rng.integers(1, 200))
        value = rng.integers(0, 9, size=len(index)) / 8  # sums without rounding
        tree[index] = value
        for i, x in zip(index, value):
            priority[i] = x
        assert tree.total == priority.sum()
        np.testing.assert_array_equal(tree[np.arange(size)], priority)
        if tree.total == 0:
            continue
        sums = rng.integers(0, int(8 * tree.total), size=40) / 8
        np.testing.assert_array_equal(
            tree.find(sums), np.searchsorted(priority.cumsum(), sums, side="right")
        )


def test_a_sum_beyond_all_priorities_by_rounding_finds_one_of_them():
    tree = SumTree(5)
    tree[np.arange(5)] = [0.1, 0.2, 0.3, 1e-6, 1e-6]
    assert (tree.find(np.full(3, tree.total * (1 + 1e-15))) == 4).all()


@pytest.mark.parametrize(
    "options", [{}, dict(prioritized=True), dict(length=4), dict(prioritized=True, length=4)]
)
def test_a_seed_fixes_the_samples(options, tmp_path):
    def drawn(seed, path=None):
        memory = ReplayMemory(50, seed=seed, path=path, **options)
        samples = []
        for f in collected("memory" if "length" in options else "plain"):
            memory.add(f)
            samples.append(memory.sample(7))
            if memory.prioritized:
                memory.prioritize(samples[-1].index, samples[-1].index % 5)
        return [snapshot(x) for x in samples]

    assert_same(drawn(3), drawn(3))
    assert_same(drawn(3), drawn(3, tmp_path))
    assert any((a.index != b.index).any() for a, b in zip(drawn(3), drawn(4)))


def test_steps_are_mapped_to_a_file(tmp_path):
    folder = tmp_path / "new" / "folder"
    fragments = collected()[:3]
    memory = filled(fragments, 50, path=folder)
    assert len(memory) == 24
    assert [p.name for p in folder.iterdir()] == ["steps.npy"]
    rows = np.load(folder / "steps.npy", mmap_mode="r", allow_pickle=False)
    expected = torch.cat([f.state.obs[:-1].transpose(0, 1).flatten(0, 1) for f in fragments])
    np.testing.assert_array_equal(rows["fragment.state.obs"][:24], expected)


# --- the pipe


def options(**kwargs):
    sizes = dict(n_envs=2, n_steps=4, lanes=2, capacity=200, batch_size=5, warmup=30, n_batches=3)
    return {**sizes, "seed": 0, **kwargs}


def test_the_recipe_is_the_pipeline_built_by_hand():
    recipe = replayed(Counting, Plain(), **options(prioritized=True))
    pipe = Lanes(FragmentCollector(EnvStepper(Counting, Plain(), 2, terminal_obs=True), 4), 2, 0)
    seed = find_one(recipe, Replay).seed
    pipe = Replay(FragmentStacker(pipe, 2), 200, 5, 3, 30, prioritized=True, seed=seed)
    for k, (a, b) in enumerate(islice(zip(recipe, pipe), 4)):
        assert_same(snapshot(a.fresh), snapshot(b.fresh))
        samples = list(a.samples)
        assert len(samples) == (0 if k == 0 else 3) and list(a.samples) == []
        assert_same([snapshot(x) for x in samples], [snapshot(x) for x in b.samples])
        assert len(a.memory) == 16 * (k + 1)
    fresh = rollouts(Counting, Plain(), n_envs=2, n_steps=4, lanes=2, seed=0, terminal_obs=True)
    for a, f in islice(zip(recipe, fresh), 3):
        assert_same(snapshot(a.fresh), snapshot(f))


def test_samples_are_drawn_when_they_are_asked_for():
    "So the second one knows the priorities that were set after the first."
    pipe = replayed(Counting, Plain(), **options(prioritized=True, warmup=16, alpha=1.0))
    item = next(iter(pipe))
    index = next(item.samples).index
    item.memory.prioritize(np.arange(16), np.where(np.arange(16) == 3, 1e9, 0.0))
    assert next(item.samples).index.tolist() == [3] * 5 and len(index) == 5


class Drawn(Pipe):
    "The fragments of the samples."

    def stream(self, items):
        for item in items:
            for sample in item.samples:
                yield sample.fragment

    def not_kept(self):
        return "it yields several fragments for an item"


@pytest.mark.parametrize("length", [1, 5])
def test_samples_keep_the_contract_of_pipes(length):
    about = options(length=length, zero_state=True)
    check_pipe(lambda: Drawn(replayed(partial(Counting, EPISODES), Memory(), **about)), n_items=6)


def test_edits_of_the_recipe_change_its_pipes():
    edits = [
        FragmentStacker.inserter(before=Replay, n=2),
        Replay.replacer(Replay, capacity=64, warmup=0, batch_size=9),
    ]
    pipe = replayed(Counting, Plain(), **options(), edits=edits)
    item = next(iter(pipe))
    assert [x.fragment.n_envs for x in item.samples] == [9]
    assert (item.fresh.n_envs, item.memory.capacity) == (8, 64)


def test_sizes_may_be_integers_of_numpy():
    pipe = FragmentCollector(EnvStepper(Counting, Plain()), 4)
    sizes = dict(
        capacity=np.int32(100), batch_size=np.int64(3), warmup=np.uint8(4), length=np.int16(2)
    )
    replay = Replay(pipe, prioritized=True, **sizes)
    assert {type(getattr(replay, name)) for name in sizes} == {int}
    item = next(iter(replay))
    assert [x.fragment.valid.shape for x in item.samples] == [(2, 3)]


# --- mistakes


@pytest.mark.parametrize(
    "kwargs, text",
    [(dict(length=101), "capacity >= length=101"), (dict(warmup=101), "warmup <= capacity=100")],
)
def test_options_that_do_not_fit_the_capacity_are_refused(kwargs, text):
    "What is no size or no fraction is refused as in other pipes."
    pipe = FragmentCollector(EnvStepper(Counting, Plain()), 4)
    with pytest.raises(DataError, match=f"Replay.*{text}"):
        Replay(pipe, **{"capacity": 100, "warmup": 0, **kwargs})


def test_fragments_that_do_not_fit_are_refused_by_name():
    f = collected()[0]
    memory = ReplayMemory(100, seed=0)
    with pytest.raises(DataError, match="nothing to sample"):
        memory.sample(1)
    with pytest.raises(DataError, match="Fragment.*Tick|wanted here"):
        memory.add("fragment")
    memory.add(f)
    with pytest.raises(DataError, match=r"ReplayMemory, leaf fragment\.actor\['obs'\]: wrong sh"):
        memory.add(f._replace(actor={**f.actor, "obs": f.actor["obs"][..., :2]}))
    with pytest.raises(DataError, match=r"missing fragment\.env\['parts'\]\['half'\]"):
        memory.add(f._replace(env={**f.env, "parts": {"at": f.env["parts"]["at"]}}))
    with pytest.raises(DataError, match="n >= 1"):
        memory.sample(0)
    assert len(memory) == 8 and len(memory.sample(3).index) == 3


def test_a_recurrent_state_must_be_known():
    f = collected("memory")[0]
    with pytest.raises(DataError, match="length >= n_steps=4, or zero_state.*length=3"):
        ReplayMemory(100, length=3).add(f)


def test_priorities_that_are_none_are_refused():
    with pytest.raises(DataError, match="prioritized=True"):
        ReplayMemory(100).prioritize([0], [1.0])
    memory = ReplayMemory(100, prioritized=True)
    with pytest.raises(DataError, match="index < 0"):
        memory.prioritize([0], [1.0])
    memory.prioritize(torch.arange(0), torch.zeros(0))
    memory.add(collected()[0])
    memory.prioritize(torch.arange(0), torch.zeros(0))
    with pytest.raises(DataError, match=r"Expected integers 0 <= index < 8, got float64 \[0\]"):
        memory.prioritize([], [])
    for errors in ([float("nan")], [float("inf")], [1.0, 2.0], [], [None], ["1"]):
        with pytest.raises(DataError, match="not absolute TD errors"):
            memory.prioritize([0], errors)
    for index in ([-1], [8], torch.zeros(1), ["0"]):
        with pytest.raises(DataError, match="integers 0 <= index < 8"):
            memory.prioritize(index, [1.0])
    memory.prioritize([0], torch.ones(1, dtype=torch.bfloat16))


def test_a_full_memory_is_warm_though_not_all_of_its_rows_are_steps():
    "A vector has rows in which it resets."
    make = lambda: gym.vector.SyncVectorEnv([partial(Counting, EPISODES)] * 2)
    sizes = dict(n_envs=None, n_steps=4, capacity=80, warmup=79, batch_size=8)
    pipe = replayed(make, Plain(), **sizes, seed=0)
    drawn = [(len(list(item.samples)), len(item.memory)) for item in islice(pipe, 20)]
    assert [n for n, _ in drawn] == [0] * 9 + [1] * 11 and max(n for _, n in drawn) < 79


@pytest.mark.parametrize("more", [dict(n_batches=2), dict(samples_per_step=0.1)])
def test_a_memory_in_which_no_segment_fits_is_told(more):
    about = options(n_envs=8, length=40, capacity=256, n_batches=1) | more
    pipe = replayed(Counting, Plain(), **about)
    n_rows = []
    told = "Replay, leaf capacity: no segment.*more than 40 steps of each environment, got 256"
    with pytest.raises(DataError, match=told):
        for item in islice(pipe, 20):
            n_rows.append(item.memory.store.ring.next_serial)
            list(item.samples)
    assert n_rows[-1] + 64 == 2 * 256  # the next item of 64 steps is refused


def test_agents_that_rest_for_long_are_no_error():
    fragments = [f._replace(valid=f.valid & (k >= 9)) for k, f in enumerate(collected())]
    pipe = Replay(IterableWrapper(fragments, deepcopy=False), 32, 4, warmup=0, length=6, seed=0)
    assert [len(list(item.samples)) for item in pipe] == [0] * 10 + [1] * 2


@pytest.mark.parametrize(
    "capacity, warmup, n", [(1001, 1001, 2), (1000, 1000, 3), (100, 98, 3), (100, 90, 3)]
)
def test_a_rank_can_be_as_warm_as_it_is_large(capacity, warmup, n):
    pipe = Replay(FragmentCollector(EnvStepper(Counting, Plain()), 4), capacity, 12, warmup=warmup)
    pipe.divide(n)
    assert (pipe.capacity, pipe.warmup) == (capacity // n, min(capacity // n, -(-warmup // n)))


def test_samples_of_warm_up_are_not_drawn_late():
    "A consumer that is one fragment ahead gets the samples that one gets who draws at once."
    about = dict(n_envs=1, n_steps=5, warmup=10, batch_size=2, samples_per_step=1.0, seed=0)
    pipe = replayed(Counting, Plain(), **about)
    at_once = [len(list(item.samples)) for item in islice(pipe, 5)]
    ahead = [len(list(item.samples)) for item, _ in islice(pairwise(pipe), 5)]
    assert at_once == ahead == [0, 5, 5, 5, 5]


@pytest.mark.parametrize("ratio", ["0.5", -1, float("nan"), float("inf"), [1.0]])
def test_a_ratio_that_is_no_number_of_samples_is_refused(ratio):
    with pytest.raises(DataError, match="samples_per_step.*a number from 0"):
        replayed(Counting, Plain(), n_envs=1, samples_per_step=ratio)
