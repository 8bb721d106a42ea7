"`EnvStepper(terminal_obs=True)`: terminated episodes leave their last observation as well, and are still worth nothing."

from itertools import islice

import pytest
import torch
from reference import assert_same
from toys import Counting, Memory, Plain, Valued, judge

from rollpipe.agents.td import td
from rollpipe.layers import QPolicy
from rollpipe.pipes import (
    AdvantageBuffer,
    EnvStepper,
    FragmentCollector,
    Lanes,
    Replay,
    nested,
    replayed,
)
from rollpipe.pipes.graph.torchdata import IterableWrapper
from rollpipe.pipes.steps import Fragments, Steps

MIXED = ((3, "term"), (4, "trunc"), (1, "both"), (2, "term"))
OTHER = ((5, "term"), (2, "trunc"))
ACTORS = [Plain, Memory, Valued]


def collector(terminal_obs, actor=Plain, n_steps=5, lanes=2):
    makers = [
        lambda plan=plan, tag=tag: Counting(plan, tag) for tag, plan in enumerate((MIXED, OTHER))
    ]
    return Lanes(
        FragmentCollector(EnvStepper(makers, actor(), terminal_obs=terminal_obs), n_steps),
        lanes,
        seed=0,
    )


def both(make, n=8):
    return zip(*(islice(make(terminal_obs), n) for terminal_obs in (False, True)))


@pytest.mark.parametrize("actor", ACTORS)
def test_fragments_have_a_row_for_every_end(actor):
    seen = 0
    for without, fragment in both(lambda x: collector(x, actor)):
        assert_same(without._replace(final=None)._asdict(), fragment._replace(final=None)._asdict())
        final = fragment.final
        ends = fragment.state.fin[1:] & fragment.valid
        assert sorted(zip(final.t.tolist(), final.b.tolist())) == sorted(
            map(tuple, ends.nonzero().tolist())
        )
        before = fragment.state.obs[final.t, final.b]
        assert (final.obs[:, :2] == before[:, :2]).all() and (
            final.obs[:, 2] == before[:, 2] + 1
        ).all()
        over = fragment.term[1:][final.t, final.b]
        seen += int(over.sum())
        assert_same(without.final._asdict(), nested.getitem(final, ~over)._asdict())
        assert all((x[over] == 0).all() for x in nested.leaves(final.actor))
    assert seen > 5


@pytest.mark.parametrize("actor, critic", [(Plain, judge), (Valued, None)])
def test_advantages_are_the_same(actor, critic):
    for a, b in both(lambda x: AdvantageBuffer(collector(x, actor), critic)):
        assert torch.equal(a.adv, b.adv) and torch.equal(a.ret, b.ret)


def test_steps_and_fragments_of_them():
    for told, steps in (
        (False, list(islice(Steps(collector(False)), 80))),
        (True, list(islice(Steps(collector(True)), 80))),
    ):
        ended = [s for s in steps if s.terminated]
        assert len(ended) > 5
        for s in ended:
            assert s.next_state[2] == s.state[2] + told and s.next_state[1] == s.state[1]
    steps = list(islice(Steps(collector(True)), 80))
    again = list(Steps(Fragments(IterableWrapper(steps, deepcopy=False), 4)))
    assert len(again) == len(steps)

    def key(s):
        return int(s.proc_id), int(s.env_id), int(s.episode_n), int(s.step_n)

    for a, b in zip(sorted(steps, key=key), sorted(again, key=key)):
        assert torch.equal(a.next_state, b.next_state) and torch.equal(a.terminated, b.terminated)


def test_the_replay_shows_it_and_learns_the_same():
    actor = QPolicy(Counting.observation_space, Counting.action_space)
    seen = 0
    for a, b in both(lambda x: Replay(collector(x), 200, 32, 1, warmup=5, seed=0)):
        for one, two in zip(a.samples, b.samples):
            final = two.fragment.final
            over = two.fragment.term[1]
            seen += int(over.sum())
            assert set(over.nonzero()[:, 0].tolist()) <= set(final.b.tolist())
            before = two.fragment.state.obs[0, final.b]
            assert (final.obs[:, 2] == before[:, 2] + 1).all() and (
                final.obs[:, 1] == before[:, 1]
            ).all()
            assert torch.equal(td(one.fragment, actor, actor)[2], td(two.fragment, actor, actor)[2])
    assert seen > 10


def test_the_recipe_asks_for_it():
    def last(**options):
        pipe = replayed(
            lambda: Counting(((2, "term"),)),
            Plain(),
            n_envs=1,
            n_steps=4,
            warmup=4,
            seed=0,
            **options,
        )
        return next(iter(pipe)).fresh.final.obs[:, 2].tolist()

    assert last() == [2, 2] and last(terminal_obs=False) == []
