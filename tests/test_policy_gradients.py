"""REINFORCE, A2C, PPO and VTrace: an update is so many steps of Adam, written out, along the loss of its rows; what else each of them does.

The losses themselves are compared with sums over single steps in `test_losses.py`; what all learners promise is in `test_agents.py`.
"""

import copy

import numpy as np
import pytest
import torch
from test_trpo import KINDS, Recurrent, Tiny, make_fragment
from torch import nn

from rollpipe.agents import A2C, PPO, REINFORCE, VTrace
from rollpipe.agents.losses import a2c, ppo, reinforce, vtrace_actor_critic
from rollpipe.layers import Critic, MLPPolicy
from rollpipe.layers.policies import SharedPolicy
from rollpipe.pipes import nested, on_policy
from rollpipe.pipes.data.errors import DataError
from rollpipe.pipes.data.fragment import Final


class Value(nn.Module):
    "A linear critic, in double precision unless told otherwise."

    dtype = torch.double

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.linspace(-0.5, 0.5, 3, dtype=torch.double))

    def forward(self, obs):
        return (obs.double() @ self.w).to(self.dtype)


def fragment_for(policy, **kwargs):
    "`make_fragment` without graph."
    return nested.map(lambda x: x.detach(), make_fragment(policy, **kwargs))


def old_fragment(policy, behaviour, **kwargs):
    "Of the ends, some are terminations, the others have a last observation; reports are in single precision, as everybody else's."
    f = fragment_for(policy, behaviour=behaviour, **kwargs)
    fin = f.state.fin
    term = f.state.fin & (torch.rand(f.state.fin.shape) < 0.5)
    t, b = (fin & ~term)[1:].logical_and(f.valid).nonzero().unbind(1)
    final = Final(t, b, torch.randn(len(t), 3), {})
    return f._replace(
        actor=dict(logp=f.actor["logp"].float()), term=term, adv=None, ret=None, final=final
    )


def descend(adam, loss):
    "A step of torch's Adam along the gradient, which is shortened to 0.5; returns its length before."
    [params] = [group["params"] for group in adam.param_groups]
    adam.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(params, 0.5)
    adam.step()
    return float(norm)


def normalised(f):
    kept = f.adv[f.valid]
    return f._replace(adv=(f.adv - kept.mean()) / kept.std(correction=0))


def orders_of(f, minibatch, epochs, seed):
    "Which steps make which minibatch: a fresh permutation of the valid steps, or of the environments, for each epoch."
    word = int(torch.randint(2**62, (), generator=torch.Generator().manual_seed(seed)))
    rng = np.random.default_rng(word)
    (T, B) = f.valid.shape
    steps = [(t, b) for t in range(T) for b in range(B) if f.valid[t, b]]
    for _ in range(epochs):
        if not nested.leaves(f.hx):
            order = [steps[i] for i in rng.permutation(len(steps))]
            yield from (order[i : i + minibatch] for i in range(0, len(order), minibatch))
        else:
            size = max(1, minibatch // T)
            order = rng.permutation(B)
            for i in range(0, B, size):
                chosen = set(order[i : i + size].tolist())
                if part := [(t, b) for t, b in steps if b in chosen]:
                    yield part


def minibatches(f):
    "Two passes in minibatches of about 11 steps, as a learner with seed 7 makes them in its first update: only their rows are valid."
    for order in orders_of(f, 11, 2, 7):
        valid = torch.zeros_like(f.valid)
        valid[tuple(zip(*order))] = True
        yield normalised(f)._replace(valid=valid)


# learner -> (class, loss, number of updates, options that the loss has as well, other options, (fragment, policy, critic) of each step)
OF_VALUES = dict(c_value=0.7, c_entropy=0.03)
LEARNERS = dict(
    reinforce=(
        REINFORCE,
        reinforce,
        1,
        dict(c_rho=1.1, c_entropy=0.03),
        dict(epochs=3),
        lambda f: [normalised(f)] * 3,
    ),
    a2c=(A2C, a2c, 3, OF_VALUES, dict(normalize_adv=True), lambda f: [normalised(f)]),
    ppo=(
        PPO,
        ppo,
        1,
        dict(OF_VALUES, clip=0.2),
        dict(epochs=2, minibatch=11, target_kl=None, seed=7),
        minibatches,
    ),
    vtrace=(
        VTrace,
        vtrace_actor_critic,
        3,
        dict(OF_VALUES, gamma=0.9, lam=0.8, rho_clip=1.2, c_clip=0.9),
        {},
        lambda f: [f],
    ),
)


@pytest.mark.slow_but_one
@pytest.mark.parametrize("cls", [Tiny, Recurrent])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LEARNERS)
def test_an_update_is_steps_of_adam_along_the_loss(name, kind, cls, monkeypatch):
    "Also of data that another policy has collected, so that clips and weights are felt."
    torch.manual_seed(1)
    learner, loss_of, n_updates, of_the_loss, others, steps = LEARNERS[name]
    policy = cls(kind)
    behaviour = None if name == "a2c" else cls(kind)
    critics = [] if name == "reinforce" else [Value()]
    if name == "vtrace":
        monkeypatch.setattr(Value, "dtype", torch.float)
        policy.complete = lambda act, info: {
            **info,
            "logp": policy.dist.log_prob(info["dist"], act).float(),
        }
    slow = copy.deepcopy([policy, *critics])
    agent = learner(
        policy, *critics, **of_the_loss, **others, lr=0.02, critic_lr=0.02, max_grad_norm=0.5
    )
    params = [p for module in slow for p in module.parameters()]
    adam = torch.optim.Adam(params, 0.02)
    make = old_fragment if name == "vtrace" else fragment_for
    for seed in range(n_updates):
        f = make(policy, T=6, B=5, seed=seed, behaviour=behaviour)
        found = []
        for rows in steps(f):
            loss = loss_of(rows, *slow, **of_the_loss)[0]
            found.append((float(loss.detach()), descend(adam, loss)))
        m = agent.update(f)
        assert [m["loss"], m["grad_norm"]] == pytest.approx(
            np.mean(found, 0), rel=1e-4 if name == "vtrace" else 1e-5
        )
        assert m["lag"] == seed  # the version of the fragments stays 0
    if name == "ppo":
        assert (
            m["minibatches"] == len(found) > 3
            and m["epochs"] == 2
            and not m["early_stop"]
            and m["clip_fraction"] > 0
        )
    if name == "reinforce":
        assert 0 < m["rho_clipped"] < 1
    for p, q in zip(agent.params, params):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7 if name != "vtrace" else 1e-6)


# ---- PPO


def test_an_update_ends_when_the_policy_has_moved_far_enough():
    torch.manual_seed(0)
    policy = Tiny("categorical")
    f = fragment_for(policy, T=20, B=8)

    def updated(epochs, target_kl):
        copied = copy.deepcopy(policy)
        return copied, PPO(
            copied, Value(), epochs=epochs, minibatch=10**6, lr=0.01, target_kl=target_kl
        ).update(f)

    stopped, m = updated(100, 0.01)
    k = int(m["minibatches"])
    assert 2 < k < 100 and m["epochs"] == k and m["early_stop"] == 1
    other, full = updated(k, None)  # one minibatch an epoch: so many steps
    assert full["early_stop"] == 0 and all(
        torch.equal(p, q) for p, q in zip(stopped.parameters(), other.parameters())
    )

    def divergence(policy):
        log_ratio = (policy.replay(f)["logp"] - f.actor["logp"][:-1])[f.valid].detach()
        return float((log_ratio.exp() - 1 - log_ratio).mean())

    assert divergence(updated(k - 1, None)[0]) <= 0.01 < divergence(stopped)


def test_data_that_are_far_already_are_used_for_one_step():
    torch.manual_seed(0)
    policy = Tiny("categorical")
    m = PPO(policy, Value(), minibatch=5, target_kl=1e-9).update(
        fragment_for(policy, behaviour=Tiny("categorical"))
    )
    assert (m["minibatches"], m["epochs"], m["early_stop"]) == (1, 1, 1)


def test_advantages_of_each_minibatch_or_of_the_batch():
    torch.manual_seed(0)
    policy = Tiny("gaussian")
    f = fragment_for(policy, T=8, B=4, share=1.0)

    def gradient(normalize_adv, minibatch, adv=f.adv):
        agent = PPO(
            copy.deepcopy(policy),
            Value(),
            epochs=1,
            minibatch=minibatch,
            normalize_adv=normalize_adv,
            lr=0.0,
        )
        return agent.update(f._replace(adv=adv)), torch.cat(
            [p.grad.flatten() for p in agent.actor.parameters()]
        )

    same = [
        gradient("batch", 99)[1],
        gradient("minibatch", 99)[1],
        gradient("never", 99, (f.adv - f.adv.mean()) / f.adv.std(correction=0))[1],
    ]
    torch.testing.assert_close(same[0], same[1])
    torch.testing.assert_close(same[0], same[2])
    assert not torch.allclose(gradient("batch", 8)[1], gradient("minibatch", 8)[1])
    assert not torch.allclose(gradient("never", 99)[1], same[0])


@pytest.mark.parametrize("policy", [MLPPolicy, SharedPolicy])
def test_the_old_values_of_value_clipping_are_those_of_the_advantages(policy):
    "A policy may report values of its own, which are not those of the critic."
    actor = policy.for_env("CartPole-v1", seed=0)
    critic = Critic.for_env("CartPole-v1", seed=0, normalize=False)
    f = next(iter(on_policy("CartPole-v1", actor, critic, n_envs=4, n_steps=32, seed=0)))
    still = dict(lr=0.0, epochs=1, minibatch=32)
    m = PPO(actor, critic, clip_value=1e-3, **still).update(f)
    assert m["clip_fraction_value"] == 0  # nothing has moved, though the advantages were normalised
    moved = PPO(actor, critic, clip_value=1e-3, epochs=3, minibatch=32).update(f)
    assert moved["clip_fraction_value"] > 0.5


# ---- A2C and REINFORCE


def test_the_critic_learns_in_units_of_the_returns():
    "PopArt: with all rewards multiplied, the update of the policy is the same, and so is that of the critic's network."
    actor = MLPPolicy.for_env("CartPole-v1", seed=0)
    critic = Critic.for_env("CartPole-v1", seed=0)
    f = next(iter(on_policy("CartPole-v1", actor, critic, n_envs=4, n_steps=64, seed=0)))

    def updated(scale):
        agent = A2C(copy.deepcopy(actor), copy.deepcopy(critic), normalize_adv=True)
        with torch.no_grad():
            agent.critic.net.last.weight.zero_(), agent.critic.net.last.bias.zero_()
        m = agent.update(f._replace(adv=scale * f.adv, ret=scale * f.ret))
        return m["loss"], m["grad_norm"], [*agent.actor.parameters(), *agent.critic.parameters()]

    (loss, norm, few) = updated(1.0)
    (loss_2, norm_2, many) = updated(1000.0)
    assert (loss, norm) == pytest.approx((loss_2, norm_2), rel=1e-3)
    for p, q in zip(few, many):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)


def test_the_baseline_is_fitted_to_the_returns_after_the_policy():
    actor = MLPPolicy.for_env("CartPole-v1", seed=0)
    critic = Critic.for_env("CartPole-v1", seed=0)
    agent, other = (
        REINFORCE(copy.deepcopy(actor), c, critic_epochs=8, critic_lr=1e-2) for c in (critic, None)
    )
    f = next(iter(on_policy("CartPole-v1", actor, critic, n_envs=4, n_steps=64, lam=1.0, seed=0)))

    def error():
        return float((critic(f.state.obs[:-1]) - f.ret).square().mean().detach())

    before = error()
    m = agent.update(f)
    assert error() < 0.7 * before and {"critic_loss", "explained_variance"} <= set(m)
    alone = other.update(f)
    assert "critic_loss" not in alone and alone["grad_norm"] == m["grad_norm"]
    assert all(
        torch.equal(p, q) for p, q in zip(agent.actor.parameters(), other.actor.parameters())
    )
    with pytest.raises(DataError, match="ret"):
        agent.update(f._replace(ret=None))
