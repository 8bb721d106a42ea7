"PPO against a loop over rows with torch.distributions, Adam written out; what ends an update, and what it is told."
import copy
import math

import numpy as np
import pytest
import torch
from test_trpo import KINDS, Recurrent, Tiny, log_prob, make_fragment, torch_dists
from torch import nn

from rollpipe.agents.ppo import PPO
from rollpipe.layers import Critic, MLPPolicy
from rollpipe.pipes import nested, on_policy
from rollpipe.pipes.data.errors import DataError


class Value(nn.Module):
    "A linear critic in double precision."
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.linspace(-.5, .5, 3, dtype=torch.double))

    def forward(self, obs): return obs.double() @ self.w


def fragment_for(policy, **kwargs):
    "`make_fragment` without graph; as in real ones, what is no transition stands between episodes."
    f = nested.map(lambda x: x.detach(), make_fragment(policy, **kwargs))
    f.state.fin[1:] |= ~f.valid
    f.state.fin[:-1] |= ~f.valid
    return f


class SlowAdam:
    "Kingma and Ba 2015, algorithm 1, after the gradients of all parameters together were shortened to `max_norm`."
    def __init__(self, params, lr, max_norm):
        self.params, self.lr, self.max_norm, self.t = list(params), lr, max_norm, 0
        self.m, self.v = ([torch.zeros_like(p) for p in self.params] for _ in range(2))

    def step(self, loss):
        grads = [torch.zeros_like(p) if g is None else g for p, g in
                 zip(self.params, torch.autograd.grad(loss, self.params, allow_unused=True))]
        norm = math.sqrt(sum(float(g.square().sum()) for g in grads))
        self.t += 1
        for i, (p, g) in enumerate(zip(self.params, grads)):
            g = g * min(1., self.max_norm / norm)
            self.m[i], self.v[i] = .9 * self.m[i] + .1 * g, .999 * self.v[i] + .001 * g * g
            m, v = self.m[i] / (1 - .9 ** self.t), self.v[i] / (1 - .999 ** self.t)
            with torch.no_grad(): p -= self.lr * m / (v.sqrt() + 1e-8)
        return norm


def row_by_row(policy, f, b):
    "Parameters of the distribution at every step of environment `b`, one at a time, memory included."
    h = f.hx[0][b] if nested.leaves(f.hx) else None
    for t in range(f.n_steps):
        if type(policy) is Tiny: yield policy.net(f.state.obs[t, b])
        else:
            if f.state.fin[t, b]: h = torch.zeros_like(h)
            h = policy.cell(f.state.obs[t, b].double(), h)
            yield policy.net.head(h)


def slow_normalised(adv, valid):
    kept = [float(adv[t, b]) for t, b in valid.nonzero()]
    mean = sum(kept) / len(kept)
    std = math.sqrt(sum((x - mean) ** 2 for x in kept) / len(kept))
    return lambda t, b: (float(adv[t, b]) - mean) / std


def slow_ppo(policy, critic, f, orders, *, clip, c_value, c_entropy, lr, max_norm):
    "The losses of the minibatches, lists of (t, b), after the update."
    adv, adam, losses = slow_normalised(f.adv, f.valid), SlowAdam([*policy.parameters(), *critic.parameters()], lr, max_norm), []
    kind = policy.net.kind
    for order in orders:
        now, total = {b: list(row_by_row(policy, f, b)) for b in {b for _, b in order}}, 0.
        for t, b in order:
            act = nested.getitem(f.state.act, (t + 1, b))
            ratio = (log_prob(kind, now[b][t], act) - f.actor['logp'][t, b]).exp()
            gain = min(ratio * adv(t, b), max(1 - clip, min(1 + clip, ratio)) * adv(t, b))
            entropy = sum(d.entropy() for d in torch_dists(kind, now[b][t])[0])
            total = total - gain + c_value * (critic(f.state.obs[t, b]) - f.ret[t, b]) ** 2 - c_entropy * entropy
        losses.append(float(total.detach()) / len(order))
        adam.step(total / len(order))
    return losses


def orders_of(f, minibatch, epochs, seed):
    "Which steps make which minibatch: a fresh permutation of the valid steps, or of the environments, for each epoch."
    word = int(torch.randint(2 ** 62, (), generator=torch.Generator().manual_seed(seed)))
    rng, (T, B) = np.random.default_rng(word), f.valid.shape
    steps = [(t, b) for t in range(T) for b in range(B) if f.valid[t, b]]
    for _ in range(epochs):
        if not nested.leaves(f.hx):
            order = [steps[i] for i in rng.permutation(len(steps))]
            yield from (order[i:i + minibatch] for i in range(0, len(order), minibatch))
        else:
            size, order = max(1, minibatch // T), rng.permutation(B)
            for i in range(0, B, size):
                chosen = set(order[i:i + size].tolist())
                if part := [(t, b) for t, b in steps if b in chosen]: yield part


@pytest.mark.parametrize('cls', [Tiny, Recurrent])
@pytest.mark.parametrize('kind', KINDS)
def test_an_update_is_that_of_a_loop_over_rows(kind, cls):
    torch.manual_seed(1)
    policy, other, critic = cls(kind), cls(kind), Value()
    f = fragment_for(policy, T=5, B=6, behaviour=other)  # old data: the clip is felt
    slow_policy, slow_critic = copy.deepcopy(policy), copy.deepcopy(critic)
    common = dict(clip=.2, c_value=.5, c_entropy=.02, lr=.02)
    agent = PPO(policy, critic, epochs=2, minibatch=11, target_kl=None, max_grad_norm=.5, seed=7, **common)
    m = agent.update(f)
    orders = list(orders_of(f, 11, 2, 7))
    losses = slow_ppo(slow_policy, slow_critic, f, orders, max_norm=.5, **common)
    assert m['minibatches'] == len(orders) > 3 and m['epochs'] == 2 and not m['early_stop']
    assert m['loss'] == pytest.approx(np.mean(losses), rel=1e-5) and m['clip_fraction'] > 0
    for p, q in zip([*policy.parameters(), *critic.parameters()], [*slow_policy.parameters(), *slow_critic.parameters()]):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


def test_an_update_ends_when_the_policy_has_moved_far_enough():
    torch.manual_seed(0)
    policy = Tiny('categorical')
    f = fragment_for(policy, T=20, B=8)

    def updated(epochs, target_kl):
        copied = copy.deepcopy(policy)
        return copied, PPO(copied, Value(), epochs=epochs, minibatch=10 ** 6, lr=.01, target_kl=target_kl).update(f)
    stopped, m = updated(100, .01)
    k = int(m['minibatches'])
    assert 2 < k < 100 and m['epochs'] == k and m['early_stop'] == 1
    other, full = updated(k, None)  # one minibatch an epoch: so many steps
    assert full['early_stop'] == 0 and all(torch.equal(p, q) for p, q in zip(stopped.parameters(), other.parameters()))

    def divergence(policy):
        log_ratio = (policy.replay(f)['logp'] - f.actor['logp'][:-1])[f.valid].detach()
        return float((log_ratio.exp() - 1 - log_ratio).mean())
    assert divergence(updated(k - 1, None)[0]) <= .01 < divergence(stopped)


def test_data_that_are_far_already_are_used_for_one_step():
    torch.manual_seed(0)
    policy = Tiny('categorical')
    m = PPO(policy, Value(), minibatch=5, target_kl=1e-9).update(fragment_for(policy, behaviour=Tiny('categorical')))
    assert (m['minibatches'], m['epochs'], m['early_stop']) == (1, 1, 1)


def test_advantages_of_each_minibatch_or_of_the_batch():
    torch.manual_seed(0)
    policy = Tiny('gaussian')
    f = fragment_for(policy, T=8, B=4, share=1.)

    def gradient(normalize_adv, minibatch, adv=f.adv):
        agent = PPO(copy.deepcopy(policy), Value(), epochs=1, minibatch=minibatch, normalize_adv=normalize_adv, lr=0.)
        return agent.update(f._replace(adv=adv)), torch.cat([p.grad.flatten() for p in agent.actor.parameters()])
    same = [gradient('batch', 99)[1], gradient('minibatch', 99)[1],
            gradient('never', 99, (f.adv - f.adv.mean()) / f.adv.std(correction=0))[1]]
    torch.testing.assert_close(same[0], same[1])
    torch.testing.assert_close(same[0], same[2])
    assert not torch.allclose(gradient('batch', 8)[1], gradient('minibatch', 8)[1])
    assert not torch.allclose(gradient('never', 99)[1], same[0])


def test_the_old_values_of_value_clipping_are_those_of_the_advantages():
    actor, critic = MLPPolicy.for_env('CartPole-v1', seed=0), Critic.for_env('CartPole-v1', seed=0, normalize=False)
    f = next(iter(on_policy('CartPole-v1', actor, critic, n_envs=4, n_steps=32, seed=0)))
    still = dict(lr=0., epochs=1, minibatch=32)
    m = PPO(actor, critic, clip_value=1e-3, **still).update(f)
    assert m['clip_fraction_value'] == 0  # nothing has moved, though the advantages were normalised
    moved = PPO(actor, critic, clip_value=1e-3, epochs=3, minibatch=32).update(f)
    assert moved['clip_fraction_value'] > .5


@pytest.mark.parametrize('options, name', [
    (dict(epochs=0), 'epochs'), (dict(minibatch=2.5), 'minibatch'), (dict(clip=-1), 'clip'), (dict(target_kl=-1.), 'target_kl'),
    (dict(clip_value=-1.), 'clip_value'), (dict(lr=-1.), 'lr'), (dict(normalize_adv=True), 'normalize_adv')])
def test_options_out_of_range(options, name):
    with pytest.raises(DataError, match=name): PPO(Tiny('categorical'), Value(), **options)
