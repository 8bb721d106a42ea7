"VTrace against the definition of V-trace, summed up row by row; fresh data make it A2C."
import copy
import math

import pytest
import torch
from test_ppo import SlowAdam, Value, fragment_for, row_by_row
from test_trpo import KINDS, Recurrent, Tiny, log_prob, torch_dists

from rollpipe.agents.a2c import A2C
from rollpipe.agents.vtrace import VTrace
from rollpipe.layers import Critic, MLPPolicy
from rollpipe.pipes import nested, on_policy
from rollpipe.pipes.data.fragment import Final
from rollpipe.pipes.data.errors import DataError


class Single(Value):
    "Values as everybody else's critics report them: in single precision."
    def forward(self, obs): return super().forward(obs).float()


def old_fragment(policy, behaviour, T, B, seed):
    "Actions of another policy; of the ends, some are terminations, the others have a last observation."
    f = fragment_for(policy, T=T, B=B, seed=seed, behaviour=behaviour)
    fin, term = f.state.fin, f.state.fin & (torch.rand(T + 1, B) < .5)
    t, b = (fin & ~term)[1:].logical_and(f.valid).nonzero().unbind(1)
    final = Final(t, b, torch.randn(len(t), 3), {})
    return f._replace(actor=dict(logp=f.actor['logp'].float()), term=term, adv=None, ret=None, final=final)


def slow_vtrace(policy, critic, f, *, gamma, lam, rho_clip, c_clip, c_value, c_entropy):
    "The loss, from equation 1 of the paper: a sum over later rows, each with its product of weights."
    kind, total, ends = policy.net.kind, 0., {(t, b): obs for t, b, obs in zip(f.final.t.tolist(), f.final.b.tolist(), f.final.obs)}
    for b in range(f.n_envs):
        now = list(row_by_row(policy, f, b))
        logp = [log_prob(kind, p, nested.getitem(f.state.act, (t + 1, b))) for t, p in enumerate(now)]
        rho = [math.exp(float(new.detach() - old)) for new, old in zip(logp, f.actor['logp'][:, b])]
        v = [critic(obs) for obs in f.state.obs[:, b]]
        fixed = [float(x.detach()) for x in v]

        def reached(t, b=b, fixed=fixed):
            return 0. if f.term[t + 1, b] else float(critic(ends[t, b]).detach()) if (t, b) in ends else fixed[t + 1]

        def delta(t, b=b, rho=rho, fixed=fixed):
            return min(rho_clip, rho[t]) * (float(f.state.rew[t + 1, b]) + gamma * reached(t) - fixed[t])

        def correction(t, b=b, rho=rho):
            "v_t - V(s_t)"
            weight, found = 1., 0.
            for s in range(t, f.n_steps):
                found += weight * delta(s)
                if f.state.fin[s + 1, b]: break
                weight *= gamma * lam * min(c_clip, rho[s])
            return found
        for t in range(f.n_steps):
            if not f.valid[t, b]: continue
            goes_on = t + 1 < f.n_steps and not f.state.fin[t + 1, b]
            adv = delta(t) + min(rho_clip, rho[t]) * gamma * lam * (correction(t + 1) if goes_on else 0.)
            entropy = sum(d.entropy() for d in torch_dists(kind, now[t])[0])
            total = total - adv * logp[t] + c_value * (v[t] - fixed[t] - correction(t)) ** 2 - c_entropy * entropy
    return total / int(f.valid.sum())


@pytest.mark.parametrize('cls', [Tiny, Recurrent])
@pytest.mark.parametrize('kind', KINDS)
def test_updates_are_those_of_a_loop_over_rows(kind, cls):
    torch.manual_seed(1)
    policy, behaviour, critic = cls(kind), cls(kind), Single()
    slow_policy, slow_critic = copy.deepcopy(policy), copy.deepcopy(critic)
    policy.complete = lambda act, info: {**info, 'logp': policy.dist.log_prob(info['dist'], act).float()}
    options = dict(gamma=.9, lam=.8, rho_clip=1.2, c_clip=.9, c_value=.7, c_entropy=.03)
    agent = VTrace(policy, critic, lr=.02, critic_lr=.02, max_grad_norm=.5, **options)
    adam = SlowAdam([*slow_policy.parameters(), *slow_critic.parameters()], .02, .5)
    for seed in range(3):
        f = old_fragment(policy, behaviour, T=6, B=5, seed=seed)
        loss = slow_vtrace(slow_policy, slow_critic, f, **options)
        norm, m = adam.step(loss), agent.update(f)
        assert m['lag'] == seed  # the version of the fragments stays 0
        assert (m['loss'], m['grad_norm']) == pytest.approx((float(loss.detach()), norm), rel=1e-4)
    for p, q in zip([*policy.parameters(), *critic.parameters()], adam.params): torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


def test_on_fresh_data_it_is_a2c():
    "With the returns of an AdvantageBuffer as targets; the critic's normaliser must not move between the two."
    actor, critic = MLPPolicy.for_env('CartPole-v1', seed=0), Critic.for_env('CartPole-v1', seed=0, normalize=False)
    f = next(iter(on_policy('CartPole-v1', actor, critic, n_envs=4, n_steps=64, gamma=.95, lam=1., seed=0)))
    common = dict(lr=.01, critic_lr=.01, c_entropy=.02)
    one = VTrace(copy.deepcopy(actor), copy.deepcopy(critic), gamma=.95, **common)
    two = A2C(copy.deepcopy(actor), copy.deepcopy(critic), **common)
    a, b = one.update(f._replace(adv=None, ret=None)), two.update(f)
    assert [a[k] for k in ('loss', 'loss_value', 'grad_norm', 'entropy')] == pytest.approx(
        [b[k] for k in ('loss', 'loss_value', 'grad_norm', 'entropy')], rel=1e-4)
    assert a['rho_mean'] == pytest.approx(1) and one.critic.ret_std == pytest.approx(two.critic.ret_std)


@pytest.mark.parametrize('options', [dict(gamma=1.1), dict(lam=-.1), dict(rho_clip=-1.), dict(c_clip=1.5), dict(c_value=-1.), dict(lr=-1.)])
def test_options_out_of_range(options):
    with pytest.raises(DataError, match=next(iter(options))): VTrace(Tiny('categorical'), Value(), **options)
