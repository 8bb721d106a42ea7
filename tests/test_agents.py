"What all learners of policies promise: metrics, lag, resuming bit for bit, what does not count, memory, shared trunks."

import itertools

import pytest
import torch
from test_laws_of_learners import with_value
from torch import nn

from rollpipe.agents.natural_gradient import NPG, TRPO
from rollpipe.agents.policy_gradient import A2C, PPO, REINFORCE, VTrace
from rollpipe.layers import Critic, MemoryCritic, MLPPolicy, RecurrentPolicy
from rollpipe.layers.policies import SharedPolicy
from rollpipe.pipes import on_policy, rollouts
from rollpipe.pipes.data.errors import DataError
from rollpipe.pipes.data.fragment import Fragment
from rollpipe.pipes.data.fragment_ops import columns

SMALL = dict(PPO=dict(epochs=2, minibatch=64), NPG=dict(fvp_subsample=0.5))
ALL = (REINFORCE, A2C, PPO, VTrace, TRPO, NPG)
GRADIENT = (REINFORCE, A2C, PPO, VTrace)
OF_THE_CRITIC = dict(hidden=(8,), seed=1)


def networks(env="CartPole-v1", memory=False):
    if not memory:
        return MLPPolicy.for_env(env, hidden=(8,), seed=0), Critic.for_env(env, **OF_THE_CRITIC)
    actor = RecurrentPolicy.for_env(env, hidden=(8,), memory=6, past=True, report=True, seed=0)
    return actor, MemoryCritic.for_env(env, memory=6, **OF_THE_CRITIC)


def batches(cls, env, actor, critic, n_steps=24, **kwargs):
    "An iterator of batches as the learner wants them."
    common = dict(n_envs=4, n_steps=n_steps, seed=0, **kwargs)
    return iter(
        rollouts(env, actor, **common) if cls is VTrace else on_policy(env, actor, critic, **common)
    )


def make(cls, actor, critic=None, **kwargs):
    return cls(actor, critic, **SMALL.get(cls.__name__, {}), **kwargs)


def weights(agent):
    return [
        x.clone()
        for m in (agent.actor, agent.critic)
        if m is not None
        for x in m.state_dict().values()
    ]


def without(f: Fragment, b: int) -> Fragment:
    "The same fragment without the column `b`."
    return columns(f, torch.tensor([i for i in range(f.n_envs) if i != b]))


@pytest.mark.parametrize("cls", [TRPO, NPG, REINFORCE])
def test_values_that_nobody_would_fit_are_refused(cls):
    actor = SharedPolicy.for_env("CartPole-v1", hidden=(8,))
    critic = networks()[1]
    with pytest.raises(
        DataError,
        match=f"leaf actor: {cls.__name__} would never fit the values .*Expected a critic",
    ):
        make(cls, actor)
    make(cls, actor, critic), make(PPO, actor)


class OwnShared(MLPPolicy):
    "A policy of a user that reports values, which only its answers tell."

    def answer(self, obs, *args, hx, stepno):
        params, hx, more = super().answer(obs, *args, hx=hx, stepno=stepno)
        return params, hx, more | {"value": obs.sum(-1)}


def test_values_of_a_policy_of_a_user_that_nobody_would_fit_are_refused():
    actor = OwnShared.for_env("CartPole-v1", hidden=(8,))
    batch = next(iter(on_policy("CartPole-v1", actor, n_envs=2, n_steps=8, seed=0)))
    with pytest.raises(DataError, match="leaf actor: TRPO would never fit the values"):
        make(TRPO, actor).update(batch)
    make(TRPO, actor, networks()[1]).update(batch)


def numbers(agent):
    "All numbers that a learner keeps: weights, normalisers and the state of its optimiser."
    optimizer = agent.optimizer.state_dict()["state"] if agent.optimizer is not None else {}
    return [*weights(agent), *(x.clone() for state in optimizer.values() for x in state.values())]


def test_observations_that_are_infinite_as_float16_are_refused():
    actor, critic = networks("Pendulum-v1")
    agent = make(PPO, actor, critic)
    batch = next(batches(PPO, "Pendulum-v1", actor, critic))

    def half(batch):
        return batch._replace(
            state=batch.state._replace(obs=batch.state.obs.half())
        )  # as `ObservationCast` does

    with pytest.raises(DataError, match="leaf obs.*non-finite value"):
        agent.update(half(with_value(batch, "obs", 1e5)))
    agent.update(half(with_value(batch, "obs", 6e4)))


@pytest.mark.slow_but_one
@pytest.mark.parametrize("scale", [1e5, 1e10, 1e15, 1e18])
@pytest.mark.parametrize("cls", ALL)
def test_what_a_learner_keeps_stays_finite_whatever_the_rewards(cls, scale):
    actor, critic = networks("Pendulum-v1")
    agent = make(cls, actor, critic, **dict(max_grad_norm=None) if cls in GRADIENT else {})
    for batch in itertools.islice(batches(cls, "Pendulum-v1", actor, critic), 3):
        large = batch._replace(state=batch.state._replace(rew=batch.state.rew * scale))
        if batch.adv is not None:
            large = large._replace(adv=batch.adv * scale, ret=batch.ret * scale)
        try:
            agent.update(large)
        except DataError as e:
            assert "finite" in str(e) or "too large" in str(e)
        assert all(
            x.isfinite().all() for x in numbers(agent) if x.is_floating_point() and x.numel() > 1
        )


@pytest.mark.parametrize("cls", [REINFORCE, TRPO, NPG])
def test_a_critic_whose_error_overflows_keeps_its_weights(cls):
    actor, critic = networks("Pendulum-v1")
    plain = (
        nn.Sequential(critic.encoder, nn.Linear(critic.encoder.n_out, 1), nn.Flatten(-2))
        if hasattr(critic, "encoder")
        else None
    )
    agent = make(cls, actor, plain or critic)
    batch = next(batches(cls, "Pendulum-v1", actor, critic))
    before = [x.clone() for x in agent.critic.parameters()]
    with pytest.raises(DataError, match="leaf critic_loss: the critic's error is not finite"):
        agent.update(
            batch._replace(
                ret=torch.full_like(batch.ret, 1.8e19).where(
                    torch.rand(batch.ret.shape) < 0.5, -torch.tensor(1.8e19)
                )
            )
        )
    assert all(torch.equal(x, y) for x, y in zip(before, agent.critic.parameters()))
