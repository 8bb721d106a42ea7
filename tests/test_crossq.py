"Batch renormalisation and CrossQ against torch's batch normalisation, against sums by hand, and against a plain form of the loss."

import copy

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from test_off_policy import random_fragment, successor
from torch import nn

from rollpipe.agents.off_policy.crossq import BatchRenorm, CrossQ, RenormCritic, RenormPolicy
from rollpipe.pipes import DataError
from rollpipe.pipes.data.fragment import Final
from rollpipe.pipes.replay.memory import Sample

SPACES = Box(-1, 1, (3,)), Box(np.float32([-1, 2]), np.float32([3, 2.5]))


def networks(seed=0, hidden=(8, 6)):
    return tuple(
        cls.for_env(SPACES, hidden=hidden, seed=seed) for cls in (RenormPolicy, RenormCritic)
    )


# --- the layer


def test_an_observation_may_have_no_number():
    norm = BatchRenorm(0)
    norm.learns = True
    assert norm(torch.zeros(5, 0)).shape == (5, 0) and int(norm.n_batches) == 1


@pytest.mark.parametrize(
    "shape, size",
    [
        ((3,), (6, 3)),
        ((3,), (4, 2, 3)),
        ((1,), (6, 1)),
        ((2, 1, 3), (2, 5, 3)),
        ((2, 1, 3), (4, 2, 5, 3)),
        ((2, 1, 1), (2, 5, 1)),
        ((1, 1, 1), (1, 5, 1)),
        ((2, 3), (5, 2, 3)),
    ],
)
def test_each_number_of_the_shape_has_its_moments(shape, size):
    norm = BatchRenorm(shape, warm_up=0, momentum=0.5)
    x = torch.randn(size, generator=torch.Generator().manual_seed(0), requires_grad=True)
    norm.learns = True
    dims = [*range(len(size) - len(shape)), *(i for i in range(-len(shape), 0) if shape[i] == 1)]
    mean = x.mean(dims, keepdim=True)
    std = (x.var(dims, correction=0, keepdim=True) + 1e-3).sqrt()
    r = (std.detach() / 1.001**0.5).clamp(1 / 3, 3)
    d = (mean.detach() / 1.001**0.5).clamp(-5, 5)
    y = norm(x)
    expected = (x - mean) / std * r + d
    slope = torch.randn(size, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(
        torch.autograd.grad(y, x, slope),
        torch.autograd.grad(expected, x, slope),
        rtol=1e-4,
        atol=1e-5,
    )
    torch.testing.assert_close(norm.mean, mean.detach().view(shape) / 2)


def test_a_trace_of_batches_by_hand():
    "Ioffe's algorithm 1 in float64, with batches that reach both bounds, and gradients that do not know of the correction."
    norm = BatchRenorm(2, momentum=0.8, r_max=1.5, d_max=0.5, warm_up=2)
    mean = np.zeros(2)
    var = np.ones(2)
    reached = []
    norm.learns = True
    for k, rng in enumerate(map(np.random.default_rng, range(8))):
        x = rng.normal(size=(6, 2)) * [1.0, 3.0] + [0.3 * k, 0.0]
        m = x.mean(0)
        s = np.sqrt(x.var(0) + 1e-3)
        past = np.sqrt(var + 1e-3)
        r, d = (
            (np.clip(s / past, 1 / 1.5, 1.5), np.clip((m - mean) / past, -0.5, 0.5))
            if k >= 2
            else (np.ones(2), np.zeros(2))
        )
        reached.append([(r == 1.5).any(), (d == 0.5).any()])
        tensor = torch.tensor(x, dtype=torch.float32, requires_grad=True)
        y = norm(tensor)
        np.testing.assert_allclose(y.detach(), (x - m) / s * r + d, rtol=1e-4, atol=1e-5)
        slope = torch.from_numpy(rng.normal(size=(6, 2)).astype(np.float32))
        plain = torch.tensor(x, requires_grad=True)
        nn.functional.batch_norm(plain, None, None, training=True, eps=1e-3).backward(
            slope.double() * torch.from_numpy(r)
        )
        np.testing.assert_allclose(
            torch.autograd.grad(y, tensor, slope)[0], plain.grad, rtol=1e-3, atol=1e-4
        )
        mean = 0.8 * mean + 0.2 * m
        var = 0.8 * var + 0.2 * x.var(0)
        np.testing.assert_allclose((norm.mean, norm.var), (mean, var), rtol=1e-4, atol=1e-6)
    assert np.any(reached, 0).all() and not np.all(reached, 0).any()

    # It no longer learns: then it is batch normalisation with the running moments.
    norm.learns = False
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([2.0, 0.5]))
        norm.bias.copy_(torch.tensor([-1.0, 3.0]))
        found = norm(tensor)
    expected = (x - mean) / np.sqrt(var + 1e-3) * [2.0, 0.5] + [-1.0, 3.0]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert int(norm.n_batches) == 8


# --- the networks and the loss


def plain(weights, biases):
    "The same perceptron of torch's layers."
    layers = []
    for i, (w, b) in enumerate(zip(weights, biases)):
        linear = nn.Linear(*w.shape)
        linear.weight.data = w.detach().T.clone()
        linear.bias.data = b.detach().flatten().clone()
        layers += [nn.ReLU()] * (i > 0) + [
            nn.BatchNorm1d(w.shape[0], eps=1e-3, momentum=0.01),
            linear,
        ]
    return nn.Sequential(*layers)


@pytest.mark.parametrize("terminal_obs", [False, True])
def test_the_loss_is_that_of_one_batch_of_both_ends(terminal_obs):
    "The last observation of a terminated episode counts in the moments, if it is known, and not that of the next episode."
    actor, critic = networks()
    agent = CrossQ(actor, critic, gamma=0.9, temperature=0.3)
    fragment = random_fragment(1, 40, invalid=False)
    if terminal_obs:
        t, b = fragment.state.fin[1:].nonzero(as_tuple=True)
        fragment = fragment._replace(final=Final(t, b, torch.randn(len(t), 3), {}))
    nets = [
        plain([x[k] for x in critic.net.weights], [x[k] for x in critic.net.biases])
        for k in range(2)
    ]
    state = agent.generator.get_state()
    noise = agent.noise(fragment)
    agent.generator.set_state(state)
    with torch.no_grad():
        after = torch.stack([successor(fragment, 0, b) for b in range(40)])
        term = fragment.term[1]
        known = ~term | terminal_obs
        act, logp = actor.sample(after, noise[0])
    pairs = torch.cat(
        [
            torch.cat([fragment.state.obs[0], after[known]]),
            critic.box.position(torch.cat([fragment.state.act[1], act[known]])),
        ],
        -1,
    )
    assert known.all() == terminal_obs
    q = [net(pairs).squeeze(-1) for net in nets]
    low = torch.zeros(40).masked_scatter(known, torch.minimum(*(x[40:] for x in q)).detach())
    target = fragment.state.rew[1] + 0.9 * ~term * (low - 0.3 * (logp + actor.box.log_volume))
    expected = sum(0.5 * (target - x[:40]).square().mean() for x in q)
    loss, _, errors = agent.critic_loss(fragment, None)
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)
    grads = torch.autograd.grad(loss, [*critic.net.weights])
    for k, net in enumerate(nets):
        theirs = torch.autograd.grad(
            expected, [x.weight for x in net if isinstance(x, nn.Linear)], retain_graph=True
        )
        for mine, x in zip(grads, theirs):
            torch.testing.assert_close(mine[k], x.T, rtol=1e-3, atol=1e-4)
        means = [x.running_mean for x in net if isinstance(x, nn.BatchNorm1d)]
        torch.testing.assert_close([norm.mean[k, 0] for norm in critic.net.norms], means)
    torch.testing.assert_close(
        errors[0], sum((target - x[:40]).abs() for x in q).detach() / 2, rtol=1e-4, atol=1e-4
    )


def test_beta1_is_an_option_and_no_state():
    agent = CrossQ(*networks(), beta1=0.7)
    agent.load_state_dict(CrossQ(*networks()).state_dict())
    betas = {name: x.param_groups[0]["betas"][0] for name, x in agent.optimizers.items()}
    assert betas == dict(critic=0.7, policy=0.7, temperature=0.9)


def test_moments_move_with_the_network_that_learns_only():
    actor, critic = networks()
    agent = CrossQ(actor, critic)
    before = [copy.deepcopy(net.state_dict()) for net in (actor, critic)]
    fragment = random_fragment()
    counts = []
    actor.predict(np.zeros(3, np.float32))
    for seed in range(4):
        agent.learn(Sample(random_fragment(seed=seed), None, None))
        counts.append((int(critic.net.norms[0].n_batches), int(actor.trunk.norms[0].n_batches)))
    assert (
        counts == [(1, 0), (2, 0), (3, 1), (4, 1)]
        and not agent.target_updates
        and not agent.target.state_dict()
    )
    assert all(
        any((x != net.state_dict()[name]).any() for name, x in old.items())
        for net, old in zip((actor, critic), before)
    )
    assert not any(
        part.learns
        for net in (actor, critic)
        for part in net.modules()
        if isinstance(part, BatchRenorm)
    )
    with pytest.raises(DataError):
        agent.learn(Sample(fragment._replace(valid=~fragment.valid & False), None, None))
    assert not any(part.learns for part in critic.modules() if isinstance(part, BatchRenorm))
    assert {
        name: group["betas"] for name, x in agent.optimizers.items() for group in x.param_groups
    } == dict(critic=(0.5, 0.999), policy=(0.5, 0.999), temperature=(0.9, 0.999))
