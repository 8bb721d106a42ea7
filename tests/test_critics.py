"Fitting a critic: variance explained, rows that count, determinism, equality with a loop written out."

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rollpipe.agents.critics import explained_variance, fit_critic
from rollpipe.pipes import nested
from rollpipe.pipes.data.errors import DataError


def make(width=64, obs=17, seed=0):
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Linear(obs, width),
        nn.Tanh(),
        nn.Linear(width, width),
        nn.Tanh(),
        nn.Linear(width, 1),
        nn.Flatten(0),
    )
    return net, torch.optim.Adam(net.parameters(), lr=1e-3)


def batch(n, obs=17, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, obs, generator=g)
    y = torch.tanh(x @ torch.randn(obs, 8, generator=g) / 4).sum(1) + torch.sin(2 * x[:, 0])
    return x, (y - y.mean()) / y.std()


def gen(seed=0):
    return torch.Generator().manual_seed(seed)


def test_explained_variance_of_large_returns_keeps_its_digits():
    y = torch.randn(1000, generator=gen()) + 1e4
    assert explained_variance(y - y.mean(), y) == pytest.approx(1.0, abs=1e-5)
    pred = y.requires_grad_()
    assert isinstance(explained_variance(pred, y.detach()), float)


@pytest.mark.slow_but_one
@pytest.mark.parametrize("n", [2048, 6000])
def test_defaults_explain_as_much_as_twenty_full_batch_steps(n):
    x, y = batch(n)
    full, adam = make()
    for _ in range(20):
        adam.zero_grad()
        (full(x) - y).square().mean().backward()
        adam.step()
    net, adam = make()
    done = fit_critic(net, adam, x, y, generator=gen())
    with torch.no_grad():
        assert done["explained_variance_after"] >= explained_variance(full(x), y)
        assert done["explained_variance_after"] == pytest.approx(explained_variance(net(x), y))
        assert done["critic_loss"] == pytest.approx(float((net(x) - y).square().mean()), rel=1e-5)
    assert done["critic_loss"] < done["critic_loss_before"] and done["explained_variance"] < 0.2


def test_steps_are_those_of_a_loop_written_out():
    x, y = batch(100, obs=3)
    (a, adam_a) = make(8, 3)
    (b, adam_b) = make(8, 3)
    done = fit_critic(a, adam_a, x, y, epochs=3, minibatch=30, generator=gen(5))
    g = gen(5)
    for _ in range(3):
        order = torch.randperm(100, generator=g)
        for lo, hi in ((0, 34), (34, 67), (67, 100)):
            rows = order[lo:hi]
            adam_b.zero_grad()
            (b(x[rows]) - y[rows]).square().mean().backward()
            adam_b.step()
    assert done["critic_steps"] == 9
    for p, q in zip(a.parameters(), b.parameters()):
        torch.testing.assert_close(p, q)


class Nested(nn.Module):
    "A critic of nested observations that records the clock readings it was asked about."

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(2, 1)
        self.seen = []
        self.ret_std = torch.tensor(5.0)

    def forward(self, obs):
        if torch.is_grad_enabled():
            self.seen += obs["clock"].tolist()
        return self.net(obs["pair"][0])[..., 0]


@settings(deadline=None, max_examples=20)
@given(
    st.integers(1, 9),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 40),
    st.integers(0, 2**31 - 1),
)
def test_each_epoch_sees_each_valid_row_once(T, B, epochs, minibatch, seed):
    torch.manual_seed(seed)
    obs = {"pair": (torch.randn(T, B, 2),), "clock": torch.arange(T * B).view(T, B)}
    valid = torch.rand(T, B) < 0.7
    target = torch.randn(T, B).masked_fill(~valid, math.nan)
    critic = Nested()
    adam = torch.optim.Adam(critic.parameters())
    if not valid.any():
        with pytest.raises(DataError, match="no valid row"):
            fit_critic(critic, adam, obs, target, valid=valid)
        return
    before = nested.map(torch.clone, obs)
    fit_critic(
        critic,
        adam,
        obs,
        target,
        valid=valid,
        epochs=epochs,
        minibatch=minibatch,
        generator=gen(seed),
    )
    rows = obs["clock"][valid].tolist()
    for e in range(epochs):
        assert sorted(critic.seen[e * len(rows) : (e + 1) * len(rows)]) == rows
    assert len(critic.seen) == epochs * len(rows)
    assert all(map(torch.equal, nested.leaves(before), nested.leaves(obs)))


def test_a_fit_with_a_generator_leaves_the_global_one_alone_and_works_under_no_grad():
    x, y = batch(300)
    net, adam = make(8)
    state = torch.get_rng_state()
    with torch.no_grad():
        done = fit_critic(net, adam, x, y, generator=gen())
    assert (
        torch.equal(state, torch.get_rng_state())
        and done["critic_loss"] < done["critic_loss_before"]
    )


@pytest.mark.parametrize("n, steps", [(50, 1), (1000, 8), (2048, 16), (25000, 64), (64000, 125)])
def test_minibatches_by_default_are_a_64th_within_bounds(n, steps):
    net = nn.Sequential(nn.Linear(1, 1), nn.Flatten(0))
    done = fit_critic(
        net, torch.optim.SGD(net.parameters(), lr=0.01), torch.ones(n, 1), torch.ones(n), epochs=1
    )
    assert done["critic_steps"] == steps and math.isnan(done["explained_variance"])
