"""Networks of residual blocks (`network="simba"`) in every place where a perceptron may stand."""

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from torch import nn

from rollpipe import PPO, TRPO, Critic, MLPPolicy, on_policy
from rollpipe.agents.off_policy.crossq import RenormCritic, RenormPolicy
from rollpipe.layers import ActionCritic, QPolicy, RecurrentPolicy
from rollpipe.layers.critic import QVCritic, StackedSimBa
from rollpipe.layers.mlp import SimBa
from rollpipe.pipes.data.errors import DataError

OBS = Box(-1, 1, (3,), np.float32)
ACT = Box(-1, 1, (2,), np.float32)


def plain(simba):
    "The same network of torch's own layers."

    class Residual(nn.Module):
        def __init__(self, block):
            super().__init__()
            self.branch = nn.Sequential(block.norm, block.wide, nn.ReLU(), block.narrow)

        def forward(self, x):
            return x + self.branch(x)

    blocks = map(Residual, simba.blocks)
    return nn.Sequential(simba.first, *blocks, simba.norm, simba.last)


@pytest.mark.parametrize("n_blocks", [1, 2, 3])
def test_outputs_and_gradients_are_those_of_torchs_layers(n_blocks):
    simba = SimBa(3, (8,) * n_blocks, 2)
    x = torch.randn(4, 5, 3)
    torch.testing.assert_close(simba(x), plain(simba)(x))
    gradients = torch.autograd.grad(simba(x).square().sum(), list(simba.parameters()))
    expected = torch.autograd.grad(plain(simba)(x).square().sum(), list(simba.parameters()))
    for gradient, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-4)


def test_the_last_features_have_mean_0_and_standard_deviation_1():
    features = SimBa(3, (64, 64))(10 * torch.randn(100, 3))
    torch.testing.assert_close(features.mean(-1), torch.zeros(100), atol=1e-4, rtol=0)
    torch.testing.assert_close(features.std(-1, correction=0), torch.ones(100), atol=1e-3, rtol=0)


@pytest.mark.parametrize("critic_class", [ActionCritic, QVCritic])
def test_critics_of_actions_are_apart(critic_class):
    critic = critic_class(OBS, ACT, hidden=(8, 8), network="simba")
    assert isinstance(critic.net, StackedSimBa)
    obs, act = torch.randn(6, 3), torch.rand(6, 2)
    values = critic(obs, act)
    assert values.shape == (2, 6) and not torch.equal(values[0], values[1])
    assert torch.equal(critic.first_value(obs, act), values[0])
    if critic_class is QVCritic:
        assert isinstance(critic.value_net, SimBa)


def test_the_stream_is_the_same_in_both_engines():
    def actions(engine):
        actor = RecurrentPolicy.for_env("Pendulum-v1", hidden=(16,), network="simba", seed=0)
        critic = Critic.for_env("Pendulum-v1", hidden=(16,), network="simba", seed=1)
        pipe = on_policy("Pendulum-v1", actor, critic, n_steps=20, seed=0, engine=engine)
        return next(iter(pipe)).state.act

    torch.testing.assert_close(actions("onnxruntime"), actions("torch"), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [PPO, TRPO])
def test_values_stay_when_the_scale_of_returns_changes(kind):
    actor = MLPPolicy.for_env("Pendulum-v1", hidden=(16,), network="simba", seed=0)
    critic = Critic.for_env("Pendulum-v1", hidden=(16,), network="simba", seed=1)
    agent = kind(actor, critic, seed=0)
    batches = on_policy("Pendulum-v1", actor, critic, n_envs=2, n_steps=64, seed=0)
    for _, batch in zip(range(2), batches):
        agent.update(batch)
    obs = torch.randn(9, 3)
    before = critic(obs)
    critic.observe_returns(1000 * torch.randn(64))
    torch.testing.assert_close(critic(obs), before, rtol=1e-3, atol=0.1)


@pytest.mark.slow
def test_a_critic_learns_a_function_of_both_inputs():
    critic = ActionCritic.for_env((OBS, ACT), hidden=(32, 32), network="simba", seed=0)
    optimizer = torch.optim.Adam(critic.parameters(), 1e-3)
    obs, act = 2 * torch.rand(512, 3) - 1, 2 * torch.rand(512, 2) - 1
    target = 3 * obs[:, 0] * act[:, 1] + obs[:, 2]
    for _ in range(300):
        loss = (critic(obs, act) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.02 * target.var()


@pytest.mark.parametrize("network", [RenormPolicy, RenormCritic])
def test_batch_renormalisation_has_perceptrons_only(network):
    with pytest.raises(DataError, match="Expected mlp, got 'simba'"):
        network(OBS, ACT, network="simba")


def test_a_table_has_no_blocks():
    with pytest.raises(DataError, match="residual blocks have one width"):
        QPolicy(OBS, Discrete(2), hidden=(), network="simba")
