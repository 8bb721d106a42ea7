"""A learning rate that follows the divergence (`lr_kl`)."""

import copy

import pytest
import torch

from rollpipe import A2C, PPO, Critic, MLPPolicy, on_policy
from rollpipe.pipes.data.errors import DataError
from rollpipe.runs import make_config, start

ENV = "CartPole-v1"


def learner_of(kind, **options):
    actor, critic = MLPPolicy.for_env(ENV, seed=0), Critic.for_env(ENV, seed=1)
    return kind(actor, critic, seed=0, **options)


def batches_of(agent, n):
    pipe = on_policy(ENV, agent.actor, agent.critic, n_envs=4, n_steps=32, seed=0)
    return [batch for _, batch in zip(range(n), pipe)]


def divergence(agent, batch):
    "The mean of (ratio - 1) - log(ratio) over the valid rows, from Schulman's note on estimators."
    with torch.no_grad():
        log_ratio = agent.actor.replay(batch)["logp"] - batch.actor["logp"][:-1]
    terms = log_ratio.exp() - 1 - log_ratio
    return float(terms[batch.valid].mean())


def test_the_rate_of_a2c_follows_the_divergence_of_each_step():
    agent = learner_of(A2C, lr=1e-3, lr_kl=1e-5)
    rate = 1e-3
    for batch in batches_of(agent, 8):
        metrics = agent.update(batch)
        moved = divergence(agent, batch)
        if moved > 2e-5:
            rate /= 1.5
        elif moved < 0.5e-5:
            rate *= 1.5
        rate = min(max(rate, 1e-6), 1e-2)
        assert metrics["lr"] == pytest.approx(rate, rel=1e-9)
    assert rate != 1e-3


@pytest.mark.parametrize("kind", [A2C, PPO])
def test_a_steered_learner_goes_on_exactly(kind):
    agent = learner_of(kind, lr_kl=1e-3)
    batches = batches_of(agent, 4)
    for batch in batches[:2]:
        agent.update(batch)
    state = copy.deepcopy(agent.state_dict())
    expected = [agent.update(batch)["lr"] for batch in batches[2:]]

    again = learner_of(kind, lr_kl=1e-3)
    again.load_state_dict(state)
    assert [again.update(batch)["lr"] for batch in batches[2:]] == expected
    for x, y in zip(agent.actor.parameters(), again.actor.parameters(), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("lr_kl", [None, 1e-6])
def test_another_rate_begins_anew(lr_kl):
    "As in a fork with another `lr`, which was ignored; also of a run whose rate was not steered."
    agent = learner_of(PPO, lr=1e-3, lr_kl=lr_kl)
    batch = batches_of(agent, 1)[0]
    agent.update(batch)
    forked = learner_of(PPO, lr=1e-5, lr_kl=1e-6)
    forked.load_state_dict(copy.deepcopy(agent.state_dict()))
    assert forked.optimizer.param_groups[0]["lr"] == 1e-5


def test_the_critic_keeps_a_rate_of_its_own():
    agent = learner_of(PPO, lr=1e-2, critic_lr=5e-3, lr_kl=1e-6)
    agent.update(batches_of(agent, 1)[0])
    of_actor, of_critic = (group["lr"] for group in agent.optimizer.param_groups)
    assert of_actor < 1e-2 and of_critic == 5e-3


@pytest.mark.parametrize("kind", [A2C, PPO])
@pytest.mark.parametrize("before, after", [(None, 5e-3), (5e-3, None), (5e-3, 1e-2), (1e-2, 5e-3)])
def test_the_critic_of_a_fork_may_join_or_leave_the_group_of_the_actor(kind, before, after):
    "As in a fork with another `critic_lr`, which was refused because the groups are other ones."
    agent = learner_of(kind, lr=1e-2, critic_lr=before, lr_kl=1e-6)
    agent.update(batches_of(agent, 1)[0])
    steered = agent.optimizer.param_groups[0]["lr"]
    assert steered != 1e-2

    forked = learner_of(kind, lr=1e-2, critic_lr=after, lr_kl=1e-6)
    forked.load_state_dict(copy.deepcopy(agent.state_dict()))
    expected = [steered, 5e-3] if after == 5e-3 else [steered]
    assert [group["lr"] for group in forked.optimizer.param_groups] == expected

    # A fork of the fork continues with the same rates.
    again = learner_of(kind, lr=1e-2, critic_lr=before, lr_kl=1e-6)
    again.load_state_dict(copy.deepcopy(forked.state_dict()))
    expected = [steered, 5e-3] if before == 5e-3 else [steered]
    assert [group["lr"] for group in again.optimizer.param_groups] == expected


@pytest.mark.parametrize("options", [dict(lr="linear:1e-3:0:10k"), dict(decay_steps=10_000)])
def test_a_rate_follows_one_thing(options, tmp_path):
    "It is refused before a run has a folder, and when an option is changed later."
    told = "the learning rate cannot follow two things"
    with pytest.raises(DataError, match=told):
        learner_of(PPO, lr_kl=0.01, **options)
    config = make_config("ppo", "CartPole-v1", dict(lr_kl=0.01, **options), steps=1000)
    with pytest.raises(DataError, match=told):
        start(tmp_path / "run", config)
    assert not (tmp_path / "run").exists()

    agent = learner_of(PPO, lr_kl=0.01)
    agent.set_option("lr", "linear:1e-3:0:10k")
    with pytest.raises(DataError, match=told):
        agent.update(batches_of(agent, 1)[0])
