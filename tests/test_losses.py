"Losses of policies against sums over single steps, written from the formulas; what they must not change, see or depend on."

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_fragments import (
    Count,
    answers,
    assert_metrics,
    assert_same_loss,
    last_state,
    make,
    mean,
    num,
    padded,
    random_fragment,
    shaken,
)

from rollpipe.agents.losses import a2c, ppo, reinforce, vtrace_actor_critic, with_old_values
from rollpipe.agents.policy_gradient import VTrace
from rollpipe.agents.unroll import (
    next_outputs,
    next_states,
    spliced,
)
from rollpipe.pipes import AdvantageBuffer, nested
from rollpipe.pipes.data.errors import DataError
from rollpipe.pipes.data.fragment_ops import transitions
from rollpipe.pipes.graph.torchdata import IterableWrapper
from rollpipe.pipes.invariants import check_alignment

KINDS = ("plain", "memory", "shared", "shared memory")
quick = settings(deadline=None, max_examples=20)
cases = dict(
    seed=st.integers(0, 2**31),
    n_steps=st.integers(1, 9),
    n_envs=st.integers(1, 3),
    kind=st.sampled_from(KINDS),
    terminal_obs=st.booleans(),
    garbage=st.booleans(),
)


def setting(seed, n_steps, n_envs, kind, terminal_obs=False, garbage=False, fresh=False, p_end=0.3):
    "An actor, its critic, and a fragment that an actor with somewhat other weights has collected, with advantages and returns."
    actor, critic = make(kind, seed)
    old = actor if fresh else shaken(actor, seed)
    fragment = random_fragment(
        seed,
        n_steps,
        n_envs,
        actor,
        old=old,
        terminal_obs=terminal_obs,
        garbage=garbage,
        p_end=p_end,
    )
    if not fragment.valid.any():
        return setting(seed + 1, n_steps, n_envs, kind, terminal_obs, garbage, fresh, p_end)
    gen = torch.Generator().manual_seed(seed)
    adv, ret = torch.randn(2, n_steps, n_envs, generator=gen).masked_fill(
        ~fragment.valid, math.nan if garbage else 0.0
    )
    return actor, critic, fragment._replace(adv=adv, ret=ret)


# ---- the slow way: one environment, one step, one number at a time


def slow_logp(params, act):
    "Log-density of one action, and entropy, of nested distributions with parameters [1, 1, ...]."
    if isinstance(act, dict):
        gear = params["gear"][0, 0]
        log = gear - gear.exp().sum().log()
        steer = params["steer"][0]
        mean = steer.mean[0, 0]
        log_std = steer.log_std[0, 0]
        x = act["steer"][0][0, 0]
        density = [
            -((x[i] - mean[i]) ** 2) / (2 * log_std[i].exp() ** 2)
            - log_std[i]
            - 0.5 * math.log(2 * math.pi)
            for i in range(2)
        ]
        spread = [0.5 * math.log(2 * math.pi * math.e) + log_std[i] for i in range(2)]
        return log[int(act["gear"]) - 1] + sum(density), -sum(
            log[i].exp() * log[i] for i in range(3)
        ) + sum(spread)


def slow_steps(actor, fragment):
    "(t, b) -> (log-probability now, entropy, value now, value of the state reached), of the valid steps."

    def ask(state, hx, virtual):
        _, hx, info = actor.step(*state, hx=hx, virtual=virtual)
        return info, hx

    def act(t, b):
        return nested.map(lambda x: x[t + 1 : t + 2, b : b + 1], fragment.state.act)

    return {
        at: (*slow_logp(now["dist"], act(*at)), now.get("value"), reached.get("value"))
        for at, (now, reached) in answers(ask, fragment).items()
    }


def slow_value(critic, fragment, t, b, k=None):
    "The critic's value of one row, or of the `k`-th final observation."
    obs, actor = (
        (fragment.state.obs, fragment.actor)
        if k is None
        else (fragment.final.obs, fragment.final.actor)
    )
    obs, actor = nested.map(lambda x: x[(t, b) if k is None else k], (obs, actor))
    return critic(critic.inputs(obs, actor) if hasattr(critic, "inputs") else obs)


def common(steps, fragment, actor):
    "Metrics of every loss."
    ratios = {at: num((x[0] - fragment.actor["logp"][at]).exp()) for at, x in steps.items()}
    return dict(
        entropy=mean([num(x[1]) for x in steps.values()]),
        rho_mean=mean([*ratios.values()]),
        lag=3 - int(fragment.version.min()),
        approx_kl=mean([r - 1 - math.log(r) for r in ratios.values()]),
    )


def present(critic, fragment, steps):
    "(t, b) -> value now, with gradients."
    return {
        at: x[2] if critic is None else slow_value(critic, fragment, *at) for at, x in steps.items()
    }


# ---- the formulas


@quick
@given(**cases, c_rho=st.sampled_from([0.8, 1.0, math.inf]), c_entropy=st.sampled_from([0.0, 0.3]))
def test_reinforce(seed, n_steps, n_envs, kind, terminal_obs, garbage, c_rho, c_entropy):
    actor, critic, fragment = setting(seed, n_steps, n_envs, kind, terminal_obs, garbage)
    loss, metrics = reinforce(fragment, actor, c_rho=c_rho, c_entropy=c_entropy)
    steps = slow_steps(actor, fragment)
    terms = []
    clipped = []
    for at, (logp, entropy, *_) in steps.items():
        rho = math.exp(num(logp) - num(fragment.actor["logp"][at]))
        clipped.append(rho > c_rho)
        terms.append(-min(rho, c_rho) * num(fragment.adv[at]) * logp - c_entropy * entropy)
    assert_same_loss(loss, mean(terms), [actor])
    assert_metrics(
        metrics, loss=mean(terms), rho_clipped=mean(clipped), **common(steps, fragment, actor)
    )


@quick
@given(**cases, c_value=st.sampled_from([0.5, 2.0]))
def test_a2c(seed, n_steps, n_envs, kind, terminal_obs, garbage, c_value):
    actor, critic, fragment = setting(seed, n_steps, n_envs, kind, terminal_obs, garbage)
    loss, metrics = a2c(fragment, actor, critic, c_value=c_value, c_entropy=0.3)
    steps = slow_steps(actor, fragment)
    scale = 1.0 if critic is None else num(critic.ret_std)
    policy = mean(
        [-num(fragment.adv[at]) * logp - 0.3 * entropy for at, (logp, entropy, *_) in steps.items()]
    )
    value = mean(
        [
            ((v - fragment.ret[at]) / scale) ** 2
            for at, v in present(critic, fragment, steps).items()
        ]
    )
    assert_same_loss(loss, policy + c_value * value, [actor, critic])
    assert_metrics(metrics, loss_value=value, **common(steps, fragment, actor))


@quick
@given(
    **cases, clip=st.sampled_from([0.05, 0.2, 10.0]), clip_value=st.sampled_from([None, 0.1, 1.0])
)
def test_ppo(seed, n_steps, n_envs, kind, terminal_obs, garbage, clip, clip_value):
    actor, critic, fragment = setting(seed, n_steps, n_envs, kind, terminal_obs, garbage)
    if critic is not None:
        fragment = with_old_values(fragment)
    loss, metrics = ppo(fragment, actor, critic, clip=clip, clip_value=clip_value, c_entropy=0.3)
    steps = slow_steps(actor, fragment)
    policy = []
    value = []
    clipped = []
    values = present(critic, fragment, steps)
    scale = 1.0 if critic is None else num(critic.ret_std)
    for at, (logp, entropy, *_) in steps.items():
        ratio = (logp - fragment.actor["logp"][at]).exp()
        adv = num(fragment.adv[at])
        limited = (
            ratio
            if abs(num(ratio) - 1) <= clip
            else torch.tensor(1 + math.copysign(clip, num(ratio) - 1))
        )
        clipped.append(limited is not ratio)
        policy.append(-min(ratio * adv, limited * adv, key=num) - 0.3 * entropy)
        v = values[at]
        target = num(fragment.ret[at])
        old = num(fragment.actor["value"][at])
        errors = [((v - target) / scale) ** 2]
        if clip_value is not None and abs(num(v) - old) > clip_value * scale:
            errors.append(
                torch.tensor(
                    ((old + math.copysign(clip_value * scale, num(v) - old) - target) / scale) ** 2
                )
            )
        value.append(max(errors, key=num))
    assert_same_loss(loss, mean(policy) + 0.5 * mean(value), [actor, critic])
    assert_metrics(
        metrics,
        clip_fraction=mean(clipped),
        loss_value=mean(value),
        **common(steps, fragment, actor),
    )


def slow_vtrace(steps, values, reached, fragment, gamma, lam, rho_clip, c_clip):
    "(t, b) -> (vs, adv) by the recursion of remark 1, which begins at the end of an episode or of the fragment."
    out = {}
    for t, b in sorted(steps, reverse=True):
        v = num(values[t, b])
        after = 0.0 if fragment.term[t + 1, b] else num(reached[t, b])
        rho = math.exp(num(steps[t, b][0]) - num(fragment.actor["logp"][t, b]))
        rew = num(fragment.state.rew[t + 1, b])
        more = (
            0.0
            if fragment.state.fin[t + 1, b] or (t + 1, b) not in out
            else out[t + 1, b][0] - num(values[t + 1, b])
        )
        delta = min(rho, rho_clip) * (rew + gamma * after - v)
        out[t, b] = (
            v + delta + gamma * lam * min(rho, c_clip) * more,
            min(rho, rho_clip) * (rew + gamma * (after + lam * more) - v),
        )
    return out


@pytest.mark.slow
@quick
@given(
    **cases,
    lam=st.sampled_from([0.0, 0.7, 1.0]),
    clips=st.sampled_from([(1.0, 1.0), (1.5, 0.8), (math.inf, 1.0)]),
)
def test_vtrace(seed, n_steps, n_envs, kind, terminal_obs, garbage, lam, clips):
    actor, critic, fragment = setting(seed, n_steps, n_envs, kind, terminal_obs, garbage)
    loss, metrics = vtrace_actor_critic(
        fragment._replace(adv=None, ret=None),
        actor,
        critic,
        gamma=0.9,
        lam=lam,
        rho_clip=clips[0],
        c_clip=clips[1],
        c_entropy=0.3,
    )
    steps = slow_steps(actor, fragment)
    ends = {(int(t), int(b)): k for k, (t, b) in enumerate(zip(*fragment.final[:2]))}
    values = present(critic, fragment, steps)
    scale = 1.0 if critic is None else num(critic.ret_std)
    reached = {
        (t, b): steps[t, b][3]
        if critic is None
        else slow_value(critic, fragment, t + 1, b, ends.get((t, b)))
        for t, b in steps
    }
    trace = slow_vtrace(steps, values, reached, fragment, 0.9, lam, *clips)
    policy = mean(
        [-trace[at][1] * logp - 0.3 * entropy for at, (logp, entropy, *_) in steps.items()]
    )
    value = mean([((values[at] - vs) / scale) ** 2 for at, (vs, _) in trace.items()])
    assert_same_loss(loss, policy + 0.5 * value, [actor, critic])
    assert_metrics(
        metrics,
        loss_value=value,
        adv_mean=mean([a for _, a in trace.values()]),
        value_mean=mean([num(v) for v in values.values()]),
        **common(steps, fragment, actor),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_are_no_steps_change_nothing_before_them(kind):
    actor, critic, fragment = setting(4, 7, 3, kind, p_end=0.0)
    whole, alone = padded(fragment._replace(adv=None, ret=None), 3)
    assert_same_loss(
        *(vtrace_actor_critic(f, actor, critic, gamma=0.9)[0] for f in (whole, alone)),
        [actor, critic],
    )
    agent = VTrace(actor, critic, gamma=0.9)
    torch.testing.assert_close(agent.returns(whole)[:4], agent.returns(alone))


# ---- identities


def gradient(loss, module):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))])


@pytest.mark.parametrize("lam", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_vtrace_of_fresh_data_is_a2c_with_gae(kind, lam):
    actor, critic, fragment = setting(1, 12, 3, kind, fresh=True)
    estimated = next(
        iter(AdvantageBuffer(IterableWrapper([fragment], deepcopy=False), critic, 0.9, lam))
    )
    one = a2c(estimated, actor, critic)[0]
    other, metrics = vtrace_actor_critic(fragment, actor, critic, gamma=0.9, lam=lam)
    assert_same_loss(one, other, [actor, critic])
    assert_metrics(metrics, rho_mean=1.0, approx_kl=0.0, rho_clipped=metrics["rho_clipped"])


@pytest.mark.parametrize("kind", ["plain", "shared"])
def test_without_memory_the_shape_of_a_fragment_does_not_matter(kind):
    actor, critic, fragment = setting(2, 7, 4, kind, terminal_obs=True)
    fragment = with_old_values(fragment)
    index = fragment.valid.flatten().nonzero()[:, 0]
    flat = transitions(fragment, index)
    halves = [transitions(fragment, part) for part in (index[:5], index[5:])]
    for loss in (
        lambda f: reinforce(f, actor),
        lambda f: a2c(f, actor, critic),
        lambda f: ppo(f, actor, critic, clip_value=0.3),
    ):
        whole = loss(fragment)[0]
        assert_same_loss(whole, loss(flat)[0], [actor, critic])
        assert_same_loss(
            whole, sum(loss(h)[0] * h.n_envs for h in halves) / len(index), [actor, critic]
        )


# ---- what they leave alone


@pytest.mark.slow_but_one
@pytest.mark.parametrize("kind", ["plain", "shared"])
def test_work_is_done_for_all_rows_at_once(kind):
    def operations(loss, n_steps, n_envs):
        actor, critic, fragment = setting(6, n_steps, n_envs, kind, p_end=0.1)
        with Count() as count:
            loss(fragment, actor, critic)
        return count.n

    for loss in (lambda f, a, c: reinforce(f, a), a2c, ppo):
        assert operations(loss, 8, 3) == operations(loss, 64, 9)
    # the backward recursion takes log2(T) rounds
    assert (
        operations(vtrace_actor_critic, 64, 9) <= operations(vtrace_actor_critic, 8, 3) + 3 * 6 * 2
    )


# ---- both ends of a step


@quick
@given(**{**cases, "kind": st.just("shared memory")})
def test_random_fragments_keep_the_rules(seed, n_steps, n_envs, kind, terminal_obs, garbage):
    check_alignment(setting(seed, n_steps, n_envs, kind, terminal_obs, garbage)[2])


@quick
@given(**{**cases, "kind": st.sampled_from(["shared", "shared memory"])})
def test_answers_to_the_states_reached(seed, n_steps, n_envs, kind, terminal_obs, garbage):
    actor, _, fragment = setting(seed, n_steps, n_envs, kind, terminal_obs, garbage)
    fast = next_outputs(
        lambda state, hx: actor.step(*state, hx=hx, virtual=True)[2]["value"], fragment
    )
    assert fast.shape == fragment.valid.shape and not fast.requires_grad
    for (t, b), (*_, v) in slow_steps(actor, fragment).items():
        if not fragment.term[t + 1, b]:
            assert num(fast[t, b]) == pytest.approx(num(v), rel=1e-4, abs=1e-5)


def test_the_state_reached_is_the_next_row_or_the_true_last_one():
    _, _, fragment = setting(7, 12, 5, "memory", p_end=0.5)
    reached = next_states(fragment)
    rows = torch.ones(12, 5, dtype=torch.bool)
    for k, (t, b) in enumerate(zip(fragment.final.t, fragment.final.b)):
        rows[t, b] = False
        for x, y in zip(nested.leaves(reached), nested.leaves(last_state(fragment, k))):
            assert torch.equal(x[t, b], y[0, 0])
    for x, y in zip(nested.leaves(reached), nested.leaves(fragment.state)):
        assert torch.equal(x[rows], y[1:][rows])


def test_splicing_keeps_every_row():
    _, _, fragment = setting(7, 12, 5, "memory", p_end=0.5)
    state, row = spliced(fragment)
    each = torch.arange(5)
    most = int(fragment.final.b.bincount().max())
    assert len(state.fin) == 13 + most and len(fragment.final.t) > most > 1
    for x, y, z in zip(*(nested.leaves(s) for s in (state, fragment.state, next_states(fragment)))):
        assert torch.equal(x[row, each], y[:-1]) and torch.equal(x[row + 1, each], z)


# ---- what is refused


@pytest.mark.parametrize("loss", [reinforce, a2c, ppo])
def test_advantages_of_another_shape_are_refused(loss):
    actor, _, fragment = setting(9, 4, 2, "plain")
    with pytest.raises(DataError, match=r"adv.*\[T, B\] = \[4, 2\].*\[3, 2\]"):
        loss(fragment._replace(adv=fragment.adv[1:]), actor)
