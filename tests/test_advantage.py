"Advantages of real fragments against a slow float64 oracle, and how the critic is treated."

from itertools import islice

import numpy as np
import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_fragments import episodes
from reference import assert_same, snapshot
from torch import nn
from toys import Counting, Lively, Memory, Nested, NestedMemory, Plain, Shaky, Valued, judge

from rollpipe.layers import Critic
from rollpipe.pipes import (
    AdvantageBuffer,
    CheckInvariants,
    DataError,
    EnvStepper,
    Fragment,
    FragmentCollector,
    FragmentStacker,
    Lanes,
)
from rollpipe.pipes.graph.torchdata import IterableWrapper

unit = st.sampled_from([0.0, 0.3, 0.9, 0.99, 1.0])


def fragments(source, actor, n_steps, n_envs=None, **kwargs):
    return FragmentCollector(EnvStepper(source, actor, n_envs, **kwargs), n_steps)


def oracle(f, critic, gamma, lam):
    "(adv, ret) [T, B], one environment and one episode at a time."
    value = lambda obs: float(critic(torch.as_tensor(obs)))
    adv = np.zeros(f.valid.shape)
    v = np.array([[value(x) for x in row] for row in f.state.obs])
    for b in range(f.n_envs):
        ends = {
            int(t): value(obs)
            for t, which, obs in zip(f.final.t, f.final.b, f.final.obs)
            if which == b
        }
        rew, fin, term = (x[1:, b].tolist() for x in (f.state.rew.double(), f.state.fin, f.term))
        adv[:, b] = reference.gae(rew, v[:, b].tolist(), ends, fin, term, gamma, lam)
    return adv, adv + v[:-1]


@settings(deadline=None, max_examples=25)
@given(
    plans=st.lists(episodes, min_size=1, max_size=3),
    n_steps=st.integers(1, 9),
    gamma=unit,
    lam=unit,
)
def test_equals_the_oracle(plans, n_steps, gamma, lam):
    source = [lambda p=p, b=b: Counting(p, b) for b, p in enumerate(plans)]
    for f in islice(AdvantageBuffer(fragments(source, Memory(), n_steps), judge, gamma, lam), 3):
        adv, ret = oracle(f, judge, gamma, lam)
        assert f.adv.dtype is f.ret.dtype is torch.float32
        np.testing.assert_allclose(f.adv, adv, rtol=1e-4, atol=1e-2)  # rewards are in the hundreds
        np.testing.assert_allclose(f.ret, ret, rtol=1e-4, atol=1e-2)


def test_a_row_that_is_no_step_says_nothing_about_the_step_before():
    "Nothing has ended there: the column is padded."
    obs, pays, critic = (
        torch.arange(6.0).reshape(6, 1, 1),
        torch.ones(5, 1),
        lambda obs: 100 + 10 * obs[..., 0],
    )
    short, long = (
        Fragment.from_steps(obs[: n + 1], pays[:n], pays[:n], valid=torch.arange(n)[:, None] < 3)
        for n in (3, 5)
    )
    alone, padded = (
        next(iter(CheckInvariants(AdvantageBuffer(IterableWrapper([f]), critic, 0.9, 0.95), 1.0)))
        for f in (short, long)
    )
    assert (
        torch.equal(padded.adv[:3], alone.adv)
        and torch.equal(padded.ret[:3], alone.ret)
        and not padded.adv[3:].any()
    )


@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_what_a_row_that_is_no_step_observes_does_not_matter(end):
    obs = torch.arange(6.0).reshape(6, 1, 1)
    pays = torch.ones(5, 1)
    at = torch.arange(5)[:, None]
    steps = {
        "act": pays,
        "rew": pays,
        "valid": at != 2,
        end: at == 1,
        "last_obs": None if end == "terminated" else obs[2],
    }
    fragments = [
        Fragment.from_steps(obs.index_fill(0, torch.tensor(2), x), **steps)
        for x in (7.0, float("nan"))
    ]
    known, unknown = AdvantageBuffer(IterableWrapper(fragments), lambda obs: obs[..., 0], 0.9, 0.95)
    assert torch.equal(known.adv, unknown.adv) and torch.equal(known.ret, unknown.ret)


def test_without_a_critic_the_reported_value_is_used():
    source = [
        lambda: Counting([(3, "trunc"), (2, "term"), (4, "both")]),
        lambda: Counting([(2, "trunc")]),
    ]
    reported, judged = (
        list(islice(AdvantageBuffer(fragments(source, Valued(), 5), critic, 0.9, 0.8), 4))
        for critic in (None, judge)
    )
    for a, b in zip(reported, judged):
        assert len(a.final.t)
        assert_same((a.adv, a.ret), (b.adv, b.ret))


class Touchy(nn.Module):
    "A critic that insists on how it is called."

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 1), nn.Dropout(0.9), nn.BatchNorm1d(1))
        self.calls = []
        self.net[2].eval()

    def forward(self, obs):
        assert not torch.is_grad_enabled() and not any(m.training for m in self.modules())
        self.calls.append(tuple(obs.shape))
        return self.net[1](self.net[0](obs)).squeeze(-1)


@pytest.mark.parametrize("training", [True, False])
def test_the_critic_judges_in_evaluation_mode_without_gradients(training):
    "And every module of it is afterwards in the mode it was in, also those that the user has frozen."
    critic = Touchy()
    if not training:
        critic.eval()
    before = [m.training for m in critic.modules()]
    for f in islice(
        AdvantageBuffer(fragments(lambda: Counting([(2, "trunc")]), Plain(), 3), critic), 3
    ):
        assert [m.training for m in critic.modules()] == before
        assert not f.adv.requires_grad and not f.ret.requires_grad
    assert torch.is_grad_enabled()


def test_the_mode_of_a_critic_that_fails_is_restored():
    class Fails(Touchy):
        def forward(self, obs):
            raise ValueError("no opinion")

    critic = Fails()
    before = [m.training for m in critic.modules()]
    with pytest.raises(ValueError, match="no opinion"):
        next(iter(AdvantageBuffer(fragments(Counting, Plain(), 3), critic)))
    assert [m.training for m in critic.modules()] == before


def test_a_dropout_within_an_otherwise_evaluated_critic_is_switched_off():
    "The root's flag alone does not tell the mode of its parts."
    critic = nn.Sequential(nn.Linear(4, 1), nn.Dropout(0.5), nn.Flatten(-2)).eval()
    critic[1].train()
    pipe = AdvantageBuffer(fragments(lambda: Counting([(50, "term")]), Plain(), 40), critic)
    a, b = (next(iter(pipe)) for _ in range(2))
    assert_same(a.adv, b.adv)
    assert [m.training for m in critic] == [False, True, False]


def test_the_rest_of_the_fragment_is_untouched():
    plain = [snapshot(f) for f in islice(fragments(Nested, NestedMemory(), 4, 2), 3)]
    value = lambda obs: obs["place"][..., 2] + obs["exact"]
    rich = [
        snapshot(f)
        for f in islice(AdvantageBuffer(fragments(Nested, NestedMemory(), 4, 2), value), 3)
    ]
    for a, b in zip(plain, rich):
        assert_same(a, b._replace(adv=None, ret=None))


def test_the_critic_is_shown_what_an_actor_is_shown():
    "float64 observations come as float32, [T+1, B, ...]."
    shown = []

    def value(obs):
        shown.append((obs["exact"].dtype, tuple(obs["place"].shape)))
        return obs["exact"]

    [f] = islice(
        AdvantageBuffer(fragments(lambda: Nested([(3, "trunc")]), NestedMemory(), 7, 2), value), 1
    )
    assert shown[0] == (torch.float32, (8, 2, 4)) and set(shown[1:]) <= {(torch.float32, (4, 4))}
    assert f.state.obs["exact"].dtype is torch.float64


@pytest.mark.slow
def test_it_can_stand_above_or_below_lanes_and_stacker():
    f = lambda: FragmentCollector(EnvStepper(Lively, Shaky(), 2), 12)
    critic = Critic.for_env(Lively, seed=0)
    below = FragmentStacker(AdvantageBuffer(Lanes(f(), 2, seed=0), critic), 2)
    above = FragmentStacker(Lanes(AdvantageBuffer(f(), critic), 2, seed=0), 2)
    last = AdvantageBuffer(FragmentStacker(Lanes(f(), 2, seed=0), 2), critic)
    for a, b, c in islice(zip(below, above, last), 3):
        torch.testing.assert_close(a.adv, b.adv)
        torch.testing.assert_close(a.adv, c.adv)
        torch.testing.assert_close(a.ret, c.ret)


OTHER = Critic.for_env("CartPole-v1", seed=0)
WIDE = Critic.for_env((Nested.observation_space, Nested.action_space), seed=0)


@pytest.mark.parametrize(
    "env, actor, critic, got",
    [
        (Lively, Shaky, OTHER, r"float32 \[4, 1, \d\]"),
        (Counting, Plain, WIDE, r"float32 \[4, 1, 4\]"),
        (
            Nested,
            NestedMemory,
            OTHER,
            r"\{'place': float32 \[4, 1, 4\], .*'exact': float32 \[4, 1\]\}",
        ),
    ],
)
def test_a_critic_of_another_environment_is_named_with_what_it_was_shown(env, actor, critic, got):
    text = r"leaf state.obs: the critic raised \w+Error: .* Expected observations that Critic can judge, got "
    with pytest.raises(DataError, match=rf"AdvantageBuffer, lane 0, {text}{got}") as caught:
        next(iter(AdvantageBuffer(fragments(env, actor(), 3), critic)))
    assert caught.value.__cause__ is not None


def touchy(obs):
    if obs.ndim == 2:
        raise KeyError("two dimensions")
    return obs[..., 0]


WRONG = {  # critic -> message
    "vector": (lambda obs: obs, r"shape.*\[T\+1, B\] = \[6, 1\].*\[6, 1, 4\]"),
    "column": (lambda obs: obs[..., :1], r"shape.*\[T\+1, B\] = \[6, 1\].*\[6, 1, 1\]"),
    "scalar": (lambda obs: torch.tensor(1.0), "shape"),
    "nan": (lambda obs: obs[..., 0] / 0, "non-finite"),
    "number": (lambda obs: 3.0, ""),
    "float64": (lambda obs: obs[..., 0].double(), "float32"),
    "int64": (lambda obs: obs[..., 0].long(), "float"),
    "a vector at the end": (lambda obs: obs[..., 0] if obs.ndim == 3 else obs[..., :2], ""),
    "an error at the end": (
        touchy,
        r"leaf final.obs: the critic raised KeyError: 'two dim.*got float32 \[2, 4\]",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_values_that_are_no_values(name):
    critic, text = WRONG[name]
    with pytest.raises(DataError, match=f"AdvantageBuffer, lane 0.*{text}"):
        next(iter(AdvantageBuffer(fragments(lambda: Counting([(2, "trunc")]), Plain(), 5), critic)))
