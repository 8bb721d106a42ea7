"Q-networks: their values, their choices and their memory."

import copy
from itertools import islice

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import assert_same, snapshot
from toys import Counting, Recall

from rollpipe.layers import QPolicy, RecurrentQPolicy
from rollpipe.layers.q_networks import DuellingHead
from rollpipe.pipes import EnvStepper, FragmentCollector, Lanes, nested
from rollpipe.pipes.data.errors import SpaceError
from rollpipe.testing import check_actor

fast = settings(deadline=None, max_examples=25)
SPACES = Dict(place=Box(-1, 1, (3,)), room=Discrete(4, start=1)), Discrete(5, start=-2)
KINDS = dict(
    plain=(QPolicy, {}),
    duelling=(QPolicy, dict(duelling=True)),
    linear=(QPolicy, dict(hidden=())),
    gru=(RecurrentQPolicy, dict(past=True)),
    lstm=(RecurrentQPolicy, dict(cell="lstm", layers=2, duelling=True)),
)


def fragments(actor, n, source=Counting, n_steps=5, lanes=1, n_envs=3, seed=0, **kwargs):
    return list(
        islice(
            Lanes(
                FragmentCollector(EnvStepper(source, actor, n_envs, **kwargs), n_steps), lanes, seed
            ),
            n,
        )
    )


def p_value(counts, expected):
    "The statistic of Pearson's chi-square test."
    x = ((counts - expected) ** 2 / expected).sum()
    return 1 - torch.special.gammainc(torch.tensor((len(counts) - 1) / 2), x / 2).item()


# --- values


@fast
@given(
    lead=st.lists(st.integers(0, 3), max_size=3),
    n=st.integers(1, 5),
    hidden=st.lists(st.integers(1, 4), max_size=2),
)
def test_duelling_values_are_centred_on_the_value_of_the_state(lead, n, hidden):
    head = DuellingHead(3, n, hidden)
    x = torch.randn(*lead, 3)
    q = head(x)
    v = head.value(x)
    a = head.advantage(x)
    assert q.shape == (*lead, n)
    torch.testing.assert_close((q - v).mean(-1), torch.zeros(lead), atol=1e-5, rtol=0)
    torch.testing.assert_close(q - q[..., :1], a - a[..., :1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(q, v + a - a.sum(-1, keepdim=True) / n, atol=1e-5, rtol=1e-5)


def test_a_constant_in_the_advantages_changes_nothing():
    head = DuellingHead(3, 4, (5,))
    x = torch.randn(7, 3)
    before = head(x)
    with torch.no_grad():
        head.advantage.last.bias += 3
    torch.testing.assert_close(head(x), before, atol=1e-5, rtol=1e-5)


def test_duelling_parts_before_the_last_hidden_layer():
    shapes = lambda *names: [[tuple(w.shape) for w in m.parameters() if w.ndim == 2] for m in names]
    policy = QPolicy.for_env("CartPole-v1", hidden=(8, 6), duelling=True)
    assert shapes(policy.trunk, policy.head.value, policy.head.advantage) == [
        [(8, 4)],
        [(6, 8), (1, 6)],
        [(6, 8), (2, 6)],
    ]
    policy = QPolicy.for_env("CartPole-v1", hidden=[8, 6])
    assert shapes(policy.trunk, policy.head) == [[(8, 4), (6, 8)], [(2, 6)]]


def test_a_linear_network_of_a_discrete_observation_is_a_table():
    policy = QPolicy.for_env((Discrete(500), Discrete(6)), hidden=(), seed=0)
    w, b = policy.head.last.parameters()
    states = torch.arange(500).view(100, 5)
    q = policy.step(None, states, None, None, None, hx=(), virtual=True)[2]["q"]
    torch.testing.assert_close(q, (w.t() + b)[states])
    (grad,) = torch.autograd.grad(q[7, 3].sum(), w)
    assert grad.any(0).nonzero().tolist() == [[7 * 5 + 3]]


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_reported(kind):
    "Replay starts from the memory at row 0, and gives the recorded values whatever episodes ended in between."
    cls, kwargs = KINDS[kind]
    actor = cls.for_env(Counting, seed=0, epsilon=0.5, **kwargs)
    for f in fragments(actor, 3):
        state = nested.as_seen(f.state)
        q, hx = actor.values(state, f.hx)
        assert q.requires_grad and (hx == ()) == (cls is QPolicy) and f.state.fin[1:].any()
        torch.testing.assert_close(q, f.actor["q"], rtol=1e-5, atol=1e-4)


def test_values_begin_without_memory_and_go_on_with_it():
    actor = RecurrentQPolicy.for_env(Counting, memory=6, past=True, seed=0)
    first, second = fragments(actor, 2)
    rows = nested.as_seen(nested.getitem(first.state, slice(-1)))
    q, hx = actor.values(rows)
    assert torch.equal(q, actor.values(rows, ())[0]) and torch.equal(
        q, actor.values(rows, torch.zeros(1, 3, 6))[0]
    )
    ended = first.state.fin[-1].unsqueeze(-1)
    torch.testing.assert_close(hx.masked_fill(ended, 0), second.hx, rtol=1e-5, atol=1e-6)


# --- choices


@pytest.mark.parametrize("kind", KINDS)
def test_contract(kind):
    cls, kwargs = KINDS[kind]
    for epsilon in (0.0, 0.3, 1.0):
        check_actor(cls.for_env(SPACES, seed=0, epsilon=epsilon, **kwargs), SPACES)


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 0.5, 1.0])
def test_how_often_each_action_is_taken(epsilon):
    n, N = 5, 100_000
    actor = QPolicy.for_env(
        (Box(-1, 1, (3,)), Discrete(n, start=-2)), hidden=(), epsilon=epsilon, seed=0
    )
    with torch.no_grad():
        actor.head.last.bias.copy_(torch.tensor([0.0, 1, 9, 2, 3]))
    noise = actor.draw_noise((N, 1), torch.Generator().manual_seed(0))
    act = actor.step(
        None, torch.zeros(N, 1, 3), None, None, None, hx=(), virtual=False, noise=noise
    )[0]
    counts = (act + 2).flatten().bincount(minlength=n).double()
    expected = torch.full((n,), N * epsilon / n, dtype=torch.float64)
    expected[2] += N * (1 - epsilon)
    if epsilon:
        assert p_value(counts, expected) > 1e-3
    else:
        assert torch.equal(counts, expected)


def test_neighbouring_choices_are_independent():
    "Exploration is independent across environments and steps, and independent of the action."
    noise = QPolicy.for_env("CartPole-v1").draw_noise((300, 200), torch.Generator().manual_seed(1))
    explores = (noise[..., 0] < 0.5).double()
    number = noise[..., 1].double()
    assert set(number.unique().tolist()) == {0.0, 1.0}
    for x, y in (
        (explores[1:], explores[:-1]),
        (explores[:, 1:], explores[:, :-1]),
        (explores, number),
        (number[1:], number[:-1]),
    ):
        assert abs(np.corrcoef(x.flatten(), y.flatten())[0, 1]) < 4 / np.sqrt(x.numel())


def test_without_noise_the_first_of_the_best_is_taken():
    actor = QPolicy.for_env((Box(-1, 1, (3,)), Discrete(4, start=7)), hidden=(), epsilon=1.0)
    with torch.no_grad():
        for p in actor.parameters():
            p.zero_()
        actor.head.last.bias.copy_(torch.tensor([-1.0, 2, 2, 0]))
    assert (
        actor.step(None, torch.randn(4, 9, 3), None, None, None, hx=(), virtual=False)[0] == 8
    ).all()


def test_a_stream_that_does_not_explore_is_greedy():
    actor = QPolicy.for_env(Counting, epsilon=1.0, seed=0)
    (f,) = fragments(actor, 1, explore=False)
    assert torch.equal(f.state.act[1:], f.actor["q"][:-1].argmax(-1))
    (f,) = fragments(actor, 1)
    assert not torch.equal(f.state.act[1:], f.actor["q"][:-1].argmax(-1))


def test_epsilon_travels_with_the_weights():
    actor, other = (QPolicy.for_env("CartPole-v1", epsilon=e) for e in (0.25, 0.75))
    assert (
        actor.epsilon.shape == ()
        and actor.epsilon.dtype == torch.float32
        and "epsilon" in dict(actor.named_buffers())
    )
    other.load_state_dict(actor.state_dict())
    assert other.epsilon == 0.25
    clone = copy.deepcopy(actor).share_memory()
    clone.epsilon.fill_(0.0)
    noise = torch.zeros(1, 6, 2)
    obs = torch.randn(1, 6, 4)
    noise[..., 1] = 1 - actor.values((None, obs, None, None, None))[0].argmax(
        -1
    )  # always the other action
    act = [
        a.step(None, obs, None, None, None, hx=(), virtual=False, noise=noise)[0]
        for a in (actor, clone)
    ]
    assert torch.equal(act[0], 1 - act[1])


@pytest.mark.parametrize("kind", ["plain", "gru"])
def test_lanes_are_reproducible_and_independent(kind):
    cls, kwargs = KINDS[kind]
    actor = cls.for_env(Counting, epsilon=0.5, seed=0, **kwargs)
    runs = []
    for lanes in (1, 3, 3):
        torch.manual_seed(len(runs))
        runs.append([snapshot(f) for f in fragments(actor, 2 * lanes, lanes=lanes, n_steps=20)])
    assert_same(runs[1], runs[2])
    assert_same(runs[0], runs[1][::3])
    acts = [f.state.act[1:, b].tolist() for f in runs[1][:3] for b in range(3)]
    assert all(a != b for i, a in enumerate(acts) for b in acts[:i])


# --- errors, and a first test of learning


@pytest.mark.parametrize("cls", [QPolicy, RecurrentQPolicy])
def test_what_is_refused(cls):
    for space in (Box(-1, 1, (2,)), MultiBinary(2), Dict(a=Discrete(2))):
        with pytest.raises(
            SpaceError, match=f"{cls.__name__}: unsupported action space. Expected Discrete"
        ):
            cls.for_env((Box(-1, 1, (4,)), space))
    for epsilon in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match="Expected epsilon in"):
            cls.for_env("CartPole-v1", epsilon=epsilon)
    with pytest.raises(TypeError, match="takes no|unexpected"):
        cls.for_env("CartPole-v1", sigma=1)


def test_memory_can_be_learned_by_regression():
    "The value of the right answer in `Recall`, two steps after the cue, from recorded episodes."
    env = lambda: Recall(delay=2, n_cues=3)
    actor = RecurrentQPolicy.for_env(env, hidden=(16,), memory=16, epsilon=1.0, seed=0)
    (f,) = fragments(actor, 1, env, n_steps=48, n_envs=16)
    state = nested.as_seen(nested.getitem(f.state, slice(-1)))
    ends = f.term[1:]
    adam = torch.optim.Adam(actor.parameters(), 1e-2)
    act = f.state.act[1:].unsqueeze(-1)
    rew = f.state.rew[1:]
    for _ in range(60):
        q = actor.values(state, f.hx)[0].gather(-1, act).squeeze(-1)
        loss = (q - rew)[ends].square().mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
    assert rew[ends].std() > 0.5 and loss < 0.05
