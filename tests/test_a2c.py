"A2C against a loop over rows, a few updates in a row."
import copy

import pytest
import torch
from test_ppo import SlowAdam, Value, fragment_for, row_by_row, slow_normalised
from test_trpo import KINDS, Recurrent, Tiny, log_prob, torch_dists

from rollpipe.agents.a2c import A2C
from rollpipe.layers import Critic, MLPPolicy
from rollpipe.pipes import nested, on_policy
from rollpipe.pipes.data.errors import DataError


def slow_loss(policy, critic, f, c_value, c_entropy):
    adv, kind, total = slow_normalised(f.adv, f.valid), policy.net.kind, 0.
    for b in range(f.n_envs):
        for t, params in enumerate(row_by_row(policy, f, b)):
            if not f.valid[t, b]: continue
            logp = log_prob(kind, params, nested.getitem(f.state.act, (t + 1, b)))
            entropy = sum(d.entropy() for d in torch_dists(kind, params)[0])
            total = total - adv(t, b) * logp + c_value * (critic(f.state.obs[t, b]) - f.ret[t, b]) ** 2 - c_entropy * entropy
    return total / int(f.valid.sum())


@pytest.mark.parametrize('cls', [Tiny, Recurrent])
@pytest.mark.parametrize('kind', KINDS)
def test_updates_are_those_of_a_loop_over_rows(kind, cls):
    torch.manual_seed(1)
    policy, critic = cls(kind), Value()
    slow_policy, slow_critic = copy.deepcopy(policy), copy.deepcopy(critic)
    agent = A2C(policy, critic, normalize_adv=True, c_value=.7, c_entropy=.03, lr=.02, critic_lr=.02, max_grad_norm=.5)
    adam = SlowAdam([*slow_policy.parameters(), *slow_critic.parameters()], .02, .5)
    for seed in range(3):
        f = fragment_for(policy, T=6, B=5, seed=seed)
        loss = slow_loss(slow_policy, slow_critic, f, .7, .03)
        norm, m = adam.step(loss), agent.update(f)
        assert (m['loss'], m['grad_norm']) == pytest.approx((float(loss.detach()), norm), rel=1e-5)
    for p, q in zip([*policy.parameters(), *critic.parameters()], adam.params): torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


def test_the_critic_learns_in_units_of_the_returns():
    "PopArt: with all rewards multiplied, the update of the policy is the same, and so is that of the critic's network."
    actor, critic = MLPPolicy.for_env('CartPole-v1', seed=0), Critic.for_env('CartPole-v1', seed=0)
    f = next(iter(on_policy('CartPole-v1', actor, critic, n_envs=4, n_steps=64, seed=0)))

    def updated(scale):
        agent = A2C(copy.deepcopy(actor), copy.deepcopy(critic), normalize_adv=True)
        with torch.no_grad(): agent.critic.net.last.weight.zero_(), agent.critic.net.last.bias.zero_()
        m = agent.update(f._replace(adv=scale * f.adv, ret=scale * f.ret))
        return m['loss'], m['grad_norm'], [*agent.actor.parameters(), *agent.critic.parameters()]
    (loss, norm, few), (loss_2, norm_2, many) = updated(1.), updated(1000.)
    assert (loss, norm) == pytest.approx((loss_2, norm_2), rel=1e-3)
    for p, q in zip(few, many): torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize('options', [dict(c_value=-1.), dict(c_entropy=-1.), dict(lr=-1.), dict(max_grad_norm=-1.)])
def test_options_out_of_range(options):
    with pytest.raises(DataError, match=next(iter(options))): A2C(Tiny('categorical'), Value(), **options)
