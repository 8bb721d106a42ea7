"REINFORCE against a loop over rows: weights of old actions and where they are clipped, entropy, repeated use of a batch."
import copy
import math

import pytest
import torch
from test_ppo import SlowAdam, Value, fragment_for, row_by_row, slow_normalised
from test_trpo import KINDS, Recurrent, Tiny, log_prob, torch_dists

from rollpipe.agents.reinforce import REINFORCE
from rollpipe.layers import Critic, MLPPolicy
from rollpipe.pipes import nested, on_policy
from rollpipe.pipes.data.errors import DataError


def slow_reinforce(policy, f, *, epochs, c_rho, c_entropy, lr, max_norm):
    adv, adam, norms = slow_normalised(f.adv, f.valid), SlowAdam(policy.parameters(), lr, max_norm), []
    kind, n = policy.net.kind, int(f.valid.sum())
    for _ in range(epochs):
        now, total = [list(row_by_row(policy, f, b)) for b in range(f.n_envs)], 0.
        for t, b in f.valid.nonzero().tolist():
            logp = log_prob(kind, now[b][t], nested.getitem(f.state.act, (t + 1, b)))
            rho = min(math.exp(float(logp.detach() - f.actor['logp'][t, b])), c_rho)
            entropy = sum(d.entropy() for d in torch_dists(kind, now[b][t])[0])
            total = total - rho * adv(t, b) * logp - c_entropy * entropy
        norms.append(adam.step(total / n))
    return norms


@pytest.mark.parametrize('cls', [Tiny, Recurrent])
@pytest.mark.parametrize('kind', KINDS)
def test_an_update_is_that_of_a_loop_over_rows(kind, cls):
    torch.manual_seed(1)
    policy = cls(kind)
    f, slow = fragment_for(policy, T=6, B=5, behaviour=cls(kind)), copy.deepcopy(policy)
    options = dict(epochs=3, c_rho=1.1, c_entropy=.03, lr=.02)
    m = REINFORCE(policy, max_grad_norm=.5, **options).update(f)
    norms = slow_reinforce(slow, f, max_norm=.5, **options)
    assert m['grad_norm'] == pytest.approx(sum(norms) / 3, rel=1e-5) and 0 < m['rho_clipped'] < 1
    for p, q in zip(policy.parameters(), slow.parameters()): torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


def test_the_baseline_is_fitted_to_the_returns_after_the_policy():
    actor, critic = MLPPolicy.for_env('CartPole-v1', seed=0), Critic.for_env('CartPole-v1', seed=0)
    agent, other = (REINFORCE(copy.deepcopy(actor), c, critic_epochs=8, critic_lr=1e-2) for c in (critic, None))
    f = next(iter(on_policy('CartPole-v1', actor, critic, n_envs=4, n_steps=64, lam=1., seed=0)))

    def error(): return float((critic(f.state.obs[:-1]) - f.ret).square().mean().detach())
    before, m = error(), agent.update(f)
    assert error() < .7 * before and {'critic_loss', 'explained_variance'} <= set(m)
    alone = other.update(f)
    assert 'critic_loss' not in alone and alone['grad_norm'] == m['grad_norm']
    assert all(torch.equal(p, q) for p, q in zip(agent.actor.parameters(), other.actor.parameters()))
    with pytest.raises(DataError, match='ret'): agent.update(f._replace(ret=None))


@pytest.mark.parametrize('options', [dict(epochs=0), dict(c_rho=-1.), dict(c_entropy=-1.), dict(critic_epochs=1.5), dict(lr=-1.)])
def test_options_out_of_range(options):
    with pytest.raises(DataError, match=next(iter(options))): REINFORCE(Tiny('categorical'), Value(), **options)
