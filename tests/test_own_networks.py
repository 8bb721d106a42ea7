"Networks of one's own in a learner: they are trained and saved, or refused."

import copy
from itertools import islice

import pytest
import torch
from torch import nn

from rollpipe.agents import A2C, DQN, NPG, PPO, REINFORCE, SAC, TRPO
from rollpipe.agents.checkpoint import load_checkpoint, save_checkpoint
from rollpipe.agents.offline import BC, TD3BC
from rollpipe.layers import (
    ActionCritic,
    Critic,
    DeterministicPolicy,
    MLPPolicy,
    QPolicy,
    SquashedPolicy,
)
from rollpipe.pipes import DataError, on_policy, replayed
from rollpipe.pipes.data.nested import first_difference

POLE = "CartPole-v1"
PENDULUM = "Pendulum-v1"


def networks():
    return MLPPolicy.for_env(POLE, hidden=(8,), seed=0), Critic.for_env(POLE, hidden=(8,), seed=1)


def batches(n, actor, critic):
    "Always the same batches, whatever the learner makes of the networks."
    pipe = on_policy(POLE, copy.deepcopy(actor), copy.deepcopy(critic), n_steps=16, seed=0)
    return [*islice(pipe, n)]


def next_error(predict, batch):
    "Mean squared error of the next observation."
    return (predict(batch.state.obs[:-1]) - batch.state.obs[1:])[batch.valid].square().mean()


def linear(n_in=4, n_out=4):
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return nn.Linear(n_in, n_out)


class Predicts:
    "Mixin: the loss has a term with a network of one's own."

    def __post_init__(self):
        super().__post_init__()
        self.predict_next = linear()

    def loss(self, batch):
        loss, metrics = super().loss(batch)
        return loss + next_error(self.predict_next, batch), metrics


class PPOPredicts(Predicts, PPO):
    pass


class A2CPredicts(Predicts, A2C):
    pass


def test_it_is_trained_as_by_hand():
    "One step of the Adam of torch for actor, critic and the network, with one limit of the gradient."
    actor, critic = networks()
    [batch] = batches(1, actor, critic)
    agent = A2CPredicts(actor, critic, lr=0.01, max_grad_norm=0.5)
    hand = A2CPredicts(*copy.deepcopy((actor, critic)), lr=0.01)
    parameters = [p for x in (hand.actor, hand.critic, hand.predict_next) for p in x.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=0.01)
    hand.tell_critic(batch)
    hand.loss(batch)[0].backward()
    nn.utils.clip_grad_norm_(parameters, 0.5)
    optimizer.step()

    before = copy.deepcopy(agent.predict_next)
    agent.update(batch)
    assert not torch.equal(agent.predict_next.weight, before.weight)
    mine = [p for x in (agent.actor, agent.critic, agent.predict_next) for p in x.parameters()]
    for x, y in zip(mine, parameters, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-6)


class Many(PPO):
    "A parameter, a tensor that needs gradients, a list, a dict, buffers, a frozen network."

    def __post_init__(self):
        super().__post_init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.shift = torch.zeros(4, requires_grad=True)
        self.heads = [linear(), nn.BatchNorm1d(4)]
        self.named = {"last": (linear(),)}
        self.frozen = linear().requires_grad_(False)
        self.of_the_actor = next(iter(self.actor.children()))

    def loss(self, batch):
        loss, metrics = super().loss(batch)
        x, y = (x[batch.valid] for x in (batch.state.obs[:-1], batch.state.obs[1:]))
        for part in (*self.heads, self.named["last"][0]):
            x = part(x)
        return loss + (self.scale * x + self.shift - self.frozen(y)).square().mean(), metrics


NAMES = ["scale", "shift", "heads.0", "heads.1", "named.last.0", "frozen"]


@pytest.mark.slow_but_one
@pytest.mark.parametrize("cls", [PPOPredicts, Many])
@pytest.mark.parametrize("options", [{}, dict(critic_lr=0.01), dict(critic_lr=0.02)])
def test_a_checkpoint_has_it_and_the_training_goes_on_exactly(cls, options, tmp_path):
    first = networks()
    many = batches(4, *first)
    whole = cls(*copy.deepcopy(first), lr=0.01, decay_steps=10_000, **options)
    for batch in many:
        whole.update(batch)

    half = cls(*copy.deepcopy(first), lr=0.01, decay_steps=10_000, **options)
    for batch in many[:2]:
        half.update(batch)
    save_checkpoint(tmp_path / "half", half)
    resumed = cls(*networks(), lr=0.01, decay_steps=10_000, **options)
    for parameter in [x for names in resumed.untrained().values() for x in names]:
        parameter.data.fill_(7)
    resumed.load_state_dict(load_checkpoint(tmp_path / "half").agent_state)
    for batch in many[2:]:
        resumed.update(batch)
    assert first_difference(whole.state_dict(), resumed.state_dict()) is None


def test_the_names_in_the_state():
    agent = Many(*networks())
    assert [*agent.own_parts()] == NAMES
    state = agent.state_dict()
    assert set(NAMES) < set(state)
    assert {*state["heads.1"]} == {*nn.BatchNorm1d(4).state_dict()}
    assert not {"params", "of_the_actor"} & set(state)


def test_all_parts_are_trained_but_the_frozen_one():
    actor, critic = networks()
    agent = Many(actor, critic, lr=0.01)
    before = copy.deepcopy(agent.own_parts())
    agent.update(batches(1, actor, critic)[0])
    changed = {
        name
        for name, x in agent.own_parts().items()
        for y, z in zip(
            x.parameters() if isinstance(x, nn.Module) else [x],
            before[name].parameters() if isinstance(x, nn.Module) else [before[name]],
        )
        if not torch.equal(y, z)
    }
    assert changed == {*NAMES} - {"frozen"}


def test_one_that_is_set_after_the_first_update_is_trained_from_then_on():
    class Late(PPO):
        def loss(self, batch):
            loss, metrics = super().loss(batch)
            return loss + sum(next_error(x, batch) for x in self.heads), metrics

    actor, critic = networks()
    many = batches(3, actor, critic)
    agent = Late(actor, critic, lr=0.01)
    agent.heads = []
    agent.update(many[0])
    agent.heads.append(linear())
    agent.again = agent.heads[0]  # another name of the same network
    agent.update(many[1])
    assert not torch.equal(agent.heads[0].weight, linear().weight)
    with pytest.raises(DataError, match="Late lacks a part of the state.*__post_init__"):
        other = Late(*networks())
        other.heads = []
        other.load_state_dict(agent.state_dict())


def test_a_state_without_it_is_refused():
    actor, critic = networks()
    state = PPO(actor, critic).state_dict()
    with pytest.raises(DataError, match="predict_next.*the state lacks a part of the learner"):
        PPOPredicts(actor, critic).load_state_dict(state)


@pytest.mark.parametrize("critic_lr", [None, 0.01, 0.02])
def test_its_learning_rate_is_that_of_the_actor(critic_lr):
    actor, critic = networks()
    agent = PPOPredicts(actor, critic, lr=0.01, critic_lr=critic_lr)
    agent.update(batches(1, actor, critic)[0])
    own = agent.optimizer.param_groups[-1]
    assert {id(p) for p in own["params"]} == {id(p) for p in agent.predict_next.parameters()}
    assert own["lr"] == 0.01
    if critic_lr != 0.01:
        agent.set_option("lr", 0.5)
        assert own["lr"] == 0.5
        return
    with pytest.raises(DataError, match="lr and critic_lr were equal"):
        agent.set_option("lr", 0.5)


def by_hand(cls):
    "A subclass with a network and its own optimiser, whose steps it takes itself."

    class ByHand(cls):
        def __post_init__(self):
            super().__post_init__()
            self.predict_next = linear()
            self.predict_optimizer = torch.optim.Adam(self.predict_next.parameters(), lr=0.01)

        def improve(self, batch):
            self.predict_optimizer.zero_grad()
            next_error(self.predict_next, batch).backward()
            self.predict_optimizer.step()
            return super().improve(batch)

    return ByHand


@pytest.mark.parametrize("cls", [PPO, TRPO, NPG])
def test_an_optimiser_of_ones_own_is_saved_and_has_its_network_alone(cls):
    first = networks()
    many = batches(3, *first)
    agent = by_hand(cls)(*copy.deepcopy(first))
    alone = linear()
    optimizer = torch.optim.Adam(alone.parameters(), lr=0.01)
    for batch in many[:2]:
        agent.update(batch)
        optimizer.zero_grad()
        next_error(alone, batch).backward()
        optimizer.step()
    assert torch.equal(agent.predict_next.weight, alone.weight)

    resumed = by_hand(cls)(*networks())
    resumed.load_state_dict(agent.state_dict())
    agent.update(many[2])
    resumed.update(many[2])
    assert first_difference(agent.state_dict(), resumed.state_dict()) is None


@pytest.mark.parametrize("cls", [TRPO, NPG])
def test_a_learner_without_an_optimiser_of_the_policy_refuses_it(cls):
    actor, critic = networks()
    [batch] = batches(1, actor, critic)
    agent = cls(actor, critic)
    agent.predict_next = linear()
    expected = f"{cls.__name__} would never train this network.*self.predict_next_optimizer"
    for act in (lambda: agent.update(batch), agent.state_dict):
        with pytest.raises(DataError, match=f"leaf predict_next: {expected}"):
            act()
    agent.predict_next.requires_grad_(False)
    agent.update(batch)
    assert torch.equal(agent.state_dict()["predict_next"]["weight"], linear().weight)


def test_reinforce_behaviour_cloning_and_dqn_train_it():
    actor, critic = networks()
    [batch] = batches(1, actor, critic)
    q = QPolicy.for_env(POLE, hidden=(8,), seed=0)
    [*_, sample] = islice(replayed(POLE, q, n_steps=8, batch_size=16, warmup=16, seed=0), 4)
    for agent, item in (
        (REINFORCE(actor, critic), batch),
        (BC(MLPPolicy.for_env(POLE, seed=0)), batch),
        (DQN(q), sample),
    ):
        agent.predict_next = linear()
        step = agent.step
        agent.step = lambda loss, *args, step=step, agent=agent, **kwargs: step(
            loss + agent.predict_next.weight.square().sum(), *args, **kwargs
        )
        agent.update(item)
        assert not torch.equal(agent.predict_next.weight, linear().weight)
        assert torch.equal(agent.predict_next.bias, linear().bias)


def test_learners_with_an_optimiser_for_each_network_want_one_for_it():
    "SAC and TD3BC: whose loss it belongs to is not known. One in `optimizers` is stepped by `optimizer_step`, and saved."
    sac = SquashedPolicy.for_env(PENDULUM, hidden=(8,), seed=0)
    td3 = DeterministicPolicy.for_env(PENDULUM, hidden=(8,), seed=0)
    for cls, actor in ((SAC, sac), (TD3BC, td3)):

        class Own(cls):
            def critic_loss(self, fragment, weight):
                loss = next_error(self.predict_next, fragment)
                self.optimizer_step("next", loss, "loss_next", n=fragment.valid.sum())
                return super().critic_loss(fragment, weight)

        critic = ActionCritic.for_env(PENDULUM, hidden=(8,), seed=1)
        items = replayed(PENDULUM, actor, n_steps=8, batch_size=16, warmup=16, length=2, seed=0)
        agent = Own(actor, critic)
        agent.predict_next = linear(3, 3)
        iterator = iter(items)
        with pytest.raises(DataError, match="Own would never train this network"):
            agent.update(next(iterator))
        agent.optimizers["next"] = torch.optim.Adam(agent.predict_next.parameters(), lr=0.01)
        for _ in range(4):
            agent.update(next(iterator))
        assert not torch.equal(agent.predict_next.weight, linear(3, 3).weight)
        assert {"predict_next", "optimizers"} < agent.state_dict().keys()
        assert {*agent.state_dict()["optimizers"]} >= {"critic", "policy", "next"}
