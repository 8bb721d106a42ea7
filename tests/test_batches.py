"Fragments side by side, and their transitions in shuffled minibatches."

from collections import Counter
from itertools import islice

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import apply, array, assert_same, flatten, snapshot
from toys import ENDS, Counting, Limit, Memory, Nested, NestedMemory, Plain, judge

from rollpipe.layers import Critic, MLPPolicy
from rollpipe.pipes import (
    AdvantageBuffer,
    DataError,
    EnvStepper,
    FragmentCollector,
    FragmentStacker,
    Lanes,
    Minibatcher,
    Pipe,
    nested,
    on_policy,
)
from rollpipe.pipes.graph.torchdata import IterableWrapper

PLAN = ((3, "trunc"), (2, "term"), (4, "both"), (1, "trunc"))
fast = settings(deadline=None, max_examples=20)


def fragments(env=Counting, actor=None, n_steps=5, n_envs=2, lanes=1, plan=PLAN):
    pipe = EnvStepper([lambda b=b: env(plan, b) for b in range(n_envs)], actor or Plain())
    return Lanes(FragmentCollector(pipe, n_steps), lanes, seed=0)


def cut(f, b, n):
    "Environments b ... b + n - 1 of a fragment."
    s = slice(b, b + n)
    time_major = lambda tree: apply(lambda x: x[:, b : b + n], tree)
    rows = [k for k, which in enumerate(f.final.b.tolist()) if b <= which < b + n]
    final = apply(lambda x: x[rows], f.final)
    return f._replace(
        state=time_major(f.state),
        actor=time_major(f.actor),
        env=time_major(f.env),
        hx=time_major(f.hx),
        term=f.term[:, s],
        valid=f.valid[:, s],
        adv=time_major(f.adv),
        ret=time_major(f.ret),
        final=final._replace(b=final.b - b),
        lane=f.lane[s],
        seq=f.seq[s],
        version=f.version[s],
    )


# --- FragmentStacker


@pytest.mark.parametrize(
    "env, actor", [(Counting, Plain), (Counting, Memory), (Nested, NestedMemory)]
)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_stacked_fragments_come_apart_again(env, actor, n):
    "Every column of the batch, its ends and its provenance are those of the fragment it came from."
    single = list(islice(fragments(env, actor(), lanes=3), 6))
    batches = list(islice(FragmentStacker(fragments(env, actor(), lanes=3), n), 6 // n))
    for k, batch in enumerate(batches):
        assert batch.n_envs == 2 * n and batch.n_steps == 5
        for j in range(n):
            assert_same(cut(batch, 2 * j, 2), single[k * n + j])


def test_advantages_are_stacked_too():
    rich = lambda: AdvantageBuffer(fragments(lanes=2), judge)
    a, b = islice(rich(), 2)
    batch = next(iter(FragmentStacker(rich(), 2)))
    assert torch.equal(batch.adv, torch.cat([a.adv, b.adv], 1)) and torch.equal(
        batch.ret, torch.cat([a.ret, b.ret], 1)
    )


def test_what_is_left_over_makes_a_smaller_batch():
    assert [f.n_envs for f in FragmentStacker(Limit(fragments(), 5), 2)] == [4, 4, 2]


def test_structures_that_do_not_fit():
    class Odd(Pipe):
        def stream(self, items):
            for k, f in enumerate(items):
                yield f if k == 0 else f._replace(actor={"other": f.state.rew})

    with pytest.raises(DataError, match="FragmentStacker.*structure"):
        next(iter(FragmentStacker(Odd(fragments()), 2)))


# --- Minibatcher


class Holes(Pipe):
    "Marks some rows as no transition, by their place."

    def stream(self, items):
        for f in items:
            t, b = torch.meshgrid(torch.arange(f.n_steps), torch.arange(f.n_envs), indexing="ij")
            yield f._replace(valid=(t + 2 * b + f.seq) % 3 != 0)


def by_place(f, t, b):
    "Everything that a fragment tells about its transition t -> t+1 of environment b."
    two = lambda tree: apply(lambda x: x[t : t + 2, b], tree)
    one = lambda tree: apply(lambda x: x[t, b], tree)
    ends = [k for k, at in enumerate(zip(f.final.t.tolist(), f.final.b.tolist())) if at == (t, b)]
    final = [apply(lambda x, k=k: x[k], (f.final.obs, f.final.actor)) for k in ends]
    return dict(
        state=two(f.state),
        actor=two(f.actor),
        env=one(f.env),
        term=two(f.term),
        valid=one(f.valid),
        adv=one(f.adv),
        ret=one(f.ret),
        final=final,
        who=(f.lane[b], f.seq[b], f.version[b]),
    )


def as_bytes(tree):
    return tuple((path, array(x).tobytes()) for path, x in flatten(tree))


@pytest.mark.slow_but_one
@pytest.mark.parametrize("env, actor", [(Counting, Plain), (Nested, None)])
@fast
@given(
    plan=st.lists(st.tuples(st.integers(1, 5), st.sampled_from(ENDS)), min_size=1, max_size=3),
    n_steps=st.integers(1, 6),
    size=st.integers(1, 15),
    epochs=st.integers(1, 2),
    holes=st.booleans(),
)
def test_every_valid_transition_occurs_once_an_epoch(
    env, actor, plan, n_steps, size, epochs, holes
):
    "And with everything that belongs to it: both rows, its end, its advantage and its origin."
    value = judge if env is Counting else (lambda obs: obs["place"][..., 2])

    class Still(NestedMemory):
        "`NestedMemory` that forgets."

        def forward(self, *args, hx, **context):
            act, _, info = super().forward(*args, hx=None, **context)
            return act, (), info

        def reset(self, hx, at):
            return hx

    def source():
        pipe = AdvantageBuffer(
            fragments(env, Still() if actor is None else actor(), n_steps, lanes=2, plan=plan),
            value,
        )
        return Holes(pipe) if holes else pipe

    whole = list(islice(source(), 2))
    small = iter(Minibatcher(source(), size, epochs, seed=1))
    for f in whole:
        places = f.valid.nonzero().tolist()
        expected = Counter(as_bytes(by_place(f, t, b)) for t, b in places)
        for _ in range(epochs):
            left = len(places)
            found = Counter()
            while left:
                m = next(small)
                assert (
                    m.n_steps == 1 and m.n_envs == min(size, left) and m.hx == () and m.valid.all()
                )
                found.update(as_bytes(by_place(m, 0, b)) for b in range(m.n_envs))
                left -= m.n_envs
            assert found == expected


def test_minibatches_are_shuffled():
    "Across time and environments, differently in each epoch and for each fragment."
    pipe = Minibatcher(fragments(n_steps=20, n_envs=3, plan=[(99, "term")]), 60, epochs=2, seed=0)
    order = [tuple(m.state.obs[0, :, 2].tolist()) for m in islice(pipe, 4)]
    assert len({tuple(np.array(o) % 20) for o in order}) == 4
    assert all(sorted(o) != list(o) for o in order)


@pytest.mark.slow_but_one
@pytest.mark.parametrize("env, actor", [(Counting, Memory), (Nested, NestedMemory)])
@pytest.mark.parametrize("size, per_batch", [(1, 1), (5, 1), (9, 1), (10, 2), (15, 3), (999, 4)])
def test_recurrent_minibatches_are_whole_columns(env, actor, size, per_batch):
    value = judge if env is Counting else (lambda obs: obs["place"][..., 2])
    source = lambda: Holes(
        AdvantageBuffer(FragmentStacker(fragments(env, actor(), lanes=2), 2), value)
    )
    whole = next(iter(source()))
    small = iter(Minibatcher(source(), size, epochs=2, seed=0))
    expected = Counter(as_bytes(cut(whole, b, 1)) for b in range(4))
    assert len(expected) == 4
    for _ in range(2):
        left = 4
        found = Counter()
        while left:
            m = next(small)
            assert m.n_steps == 5 and m.n_envs == min(per_batch, left)
            found.update(as_bytes(cut(m, b, 1)) for b in range(m.n_envs))
            left -= m.n_envs
        assert found == expected


def test_minibatches_of_minibatches_of_batches():
    "Pieces are fragments themselves: they can be joined and cut again."
    pieces = list(Minibatcher(Limit(FragmentStacker(fragments(lanes=2), 2), 1), 4, seed=0))
    assert [p.n_envs for p in pieces] == [4] * 5
    again = next(iter(FragmentStacker(IterableWrapper(pieces, deepcopy=False), 5)))
    batch = next(iter(FragmentStacker(fragments(lanes=2), 2)))
    count = lambda f: Counter(
        as_bytes(by_place(f, t, b)) for t in range(f.n_steps) for b in range(f.n_envs)
    )
    assert count(again) == count(batch)


def test_a_fragment_without_valid_rows_gives_no_minibatch():
    class Nothing(Pipe):
        def stream(self, items):
            for k, f in enumerate(items):
                yield f._replace(valid=f.valid & (k > 0))

    pipe = Limit(Minibatcher(Nothing(fragments(n_steps=3)), 2, seed=0), 3)
    assert [(m.n_envs, int(m.seq[0])) for m in pipe] == [(2, 1)] * 3


def test_minibatches_share_no_memory_with_the_fragment():
    source = list(islice(fragments(n_steps=4), 1))
    before = snapshot(source)
    for m in Minibatcher(IterableWrapper(source, deepcopy=False), 3, seed=0):
        apply(lambda x: x.zero_(), (m.state, m.env))
    assert_same(source, before)


def test_lanes_whose_first_infos_differ_can_stand_side_by_side():
    "Only an episode that ends reports its statistics, and Blackjack often ends at the first step."
    source = lambda: gym.wrappers.RecordEpisodeStatistics(gym.make("Blackjack-v1"))
    actor = MLPPolicy.for_env(source, seed=0)
    critic = Critic.for_env(source, seed=0)
    for seed in range(5):
        batch = next(
            iter(on_policy(source, actor, critic, n_envs=1, n_steps=8, lanes=2, seed=seed))
        )
        assert {x.shape for x in nested.leaves(batch.env)} <= {(8, 2)}
