"Losses of action values against sums over single steps, with and without memory; what a target network, n steps, burn-in and weights do."

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
    make,
    num,
    padded,
    random_fragment,
    rewards_of,
    shaken,
)

from rollpipe.agents.td import burnt_in, huber_penalty, priorities, td
from rollpipe.pipes import nested
from rollpipe.pipes.data.errors import DataError
from rollpipe.pipes.data.fragment_ops import transitions

KINDS = ("q", "q memory")
quick = settings(deadline=None, max_examples=25)
cases = dict(
    seed=st.integers(0, 2**31),
    n_steps=st.integers(1, 9),
    n_envs=st.integers(1, 3),
    kind=st.sampled_from(KINDS),
    terminal_obs=st.booleans(),
    garbage=st.booleans(),
)


def setting(seed, n_steps, n_envs, kind, terminal_obs=False, garbage=False, burn_in=0, p_end=0.3):
    "An actor, an older copy of it, and a fragment that a third one has collected; some row behind the burn-in is valid."
    actor, _ = make(kind, seed)
    target = shaken(actor, seed)
    old = shaken(actor, seed + 1)
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
    if not fragment.valid[burn_in:].any():
        return setting(seed + 1, n_steps, n_envs, kind, terminal_obs, garbage, burn_in, p_end)
    return actor, target, fragment


def slow_values(net, fragment, burn_in):
    "(t, b) -> (values of the state, values of the state reached), lists of tensors, of the valid steps; no gradient before `burn_in`."

    def ask(state, hx, virtual):
        _, hx, info = net.step(*state, hx=hx, virtual=True)
        return info["q"][0, 0], hx

    return {
        at: (now, reached.tolist())
        for at, (now, reached) in answers(ask, fragment, burn_in).items()
    }


def slow_td(fragment, own, other, double, gamma, n_steps, burn_in):
    "(t, b) -> (G, Q) of the steps that are trained on: rewards one after the other, until values take over."
    out = {}
    for t, b in own:
        if t < burn_in:
            continue
        total, k = rewards_of(fragment, gamma, n_steps, t, b)
        if not fragment.term[k + 1, b]:
            chosen = (own if double else other)[k, b][1]
            judged = other[k, b][1]
            total += gamma ** (k + 1 - t) * judged[chosen.index(max(chosen))]
        out[t, b] = total, own[t, b][0][int(fragment.state.act[t + 1, b]) - 2]
    return out


@quick
@given(
    **cases,
    method=st.sampled_from(["q", "dqn", "double"]),
    n=st.integers(1, 4),
    burn_in=st.integers(0, 4),
    huber=st.sampled_from([None, 0.5]),
    weighted=st.sampled_from([None, 1, 2]),
)
def test_td(
    seed, n_steps, n_envs, kind, terminal_obs, garbage, method, n, burn_in, huber, weighted
):
    burn_in = min(burn_in, n_steps - 1)
    actor, target, fragment = setting(seed, n_steps, n_envs, kind, terminal_obs, garbage, burn_in)
    weight = (
        None
        if weighted is None
        else torch.rand(
            (n_steps, n_envs)[2 - weighted :], generator=torch.Generator().manual_seed(seed)
        )
    )
    loss, metrics, errors = td(
        fragment,
        actor,
        None if method == "q" else target,
        gamma=0.9,
        double=method == "double",
        n_steps=n,
        burn_in=burn_in,
        weight=weight,
        huber=huber,
    )
    own = slow_values(actor, fragment, burn_in)
    other = own if method == "q" else slow_values(target, fragment, burn_in)
    rows = slow_td(fragment, own, other, method == "double", 0.9, n, burn_in)
    terms = []
    slow = torch.zeros(n_steps, n_envs)
    for (t, b), (goal, value) in rows.items():
        slow[t, b] = error = goal - value
        size = abs(num(error))
        penalty = error**2 if huber is None or size <= huber else 2 * huber * abs(error) - huber**2
        terms.append(
            penalty * (1.0 if weight is None else num(weight[b] if weighted == 1 else weight[t, b]))
        )
    assert_same_loss(loss, sum(terms) / len(terms), [actor])
    torch.testing.assert_close(errors, slow.detach(), rtol=1e-4, atol=1e-5)
    assert not errors.requires_grad and not any(p.grad is not None for p in target.parameters())
    mean = lambda xs: sum(map(num, xs)) / len(rows)
    assert_metrics(
        metrics,
        loss=loss,
        q_mean=mean(v for _, v in rows.values()),
        q_target=mean(g for g, _ in rows.values()),
        td_error=mean(abs(g - num(v)) for g, v in rows.values()),
        lag=3 - int(fragment.version.min()),
    )


def test_single_transitions_are_the_whole_fragment():
    actor, target, fragment = setting(1, 7, 4, "q", terminal_obs=True)
    index = fragment.valid.flatten().nonzero()[:, 0]
    loss, metrics, errors = td(fragment, actor, target, double=True)
    flat, flat_metrics, flat_errors = td(transitions(fragment, index), actor, target, double=True)
    assert_same_loss(loss, flat, [actor])
    torch.testing.assert_close(errors[fragment.valid], flat_errors[0])
    assert_metrics(flat_metrics, **metrics)


@pytest.mark.parametrize("n", [1, 2, 9])
@pytest.mark.parametrize("kind", KINDS)
def test_the_step_before_rows_that_are_no_steps_keeps_the_value_of_its_state(kind, n):
    actor, target, fragment = setting(5, 7, 3, kind, p_end=0.0)
    whole, alone = padded(fragment, 3)
    errors, wanted = (td(f, actor, target, gamma=0.9, n_steps=n)[2] for f in (whole, alone))
    torch.testing.assert_close(errors[:4], wanted)
    assert not errors[4:].any()


def test_burn_in_finds_a_memory_and_sends_no_gradient():
    actor, target, fragment = setting(3, 8, 3, "q memory", p_end=0.0)
    late = burnt_in(fragment, actor, 5)
    _, hx, _ = actor.step(*nested.getitem(fragment.state, slice(5)), hx=fragment.hx, virtual=True)
    torch.testing.assert_close(late.hx, hx.detach())
    assert not late.hx.requires_grad and late.n_steps == 3
    own = fragment._replace(hx=fragment.hx.clone().requires_grad_())
    assert torch.autograd.grad(td(own, actor, target)[0], own.hx)[0].any()
    loss = td(own, actor, target, burn_in=1)[0]
    assert torch.autograd.grad(loss, own.hx, allow_unused=True)[0] is None
    torch.testing.assert_close(td(fragment, actor, None, burn_in=5)[0], td(late, actor, None)[0])


@pytest.mark.parametrize("burn_in", [0, 2])
@pytest.mark.parametrize("double", [False, True])
def test_without_a_recorded_memory_that_of_the_network_begins_empty(double, burn_in):
    actor, target, fragment = setting(8, 7, 3, "q memory", burn_in=burn_in)
    unknown, empty = (
        td(fragment._replace(hx=hx), actor, target, double=double, burn_in=burn_in, n_steps=2)
        for hx in ((), torch.zeros_like(fragment.hx))
    )
    assert_same_loss(unknown[0], empty[0], [actor])
    torch.testing.assert_close(unknown[2], empty[2])
    if not burn_in:
        with pytest.raises(DataError, match="nothing from single steps"):
            td(transitions(fragment, torch.arange(3)), actor, target)


def test_huber_limits_the_gradient_and_inf_is_the_square():
    actor, target, fragment = setting(4, 8, 3, "q")
    torch.testing.assert_close(
        td(fragment, actor, target, huber=math.inf)[0], td(fragment, actor, target)[0]
    )
    errors = td(fragment, actor, target)[2].abs()[fragment.valid]
    small = td(fragment, actor, target, huber=1e-4)[0]
    assert num(small) == pytest.approx(num((2e-4 * errors).mean()), rel=1e-2)


def test_work_is_done_for_all_rows_at_once():
    def operations(n_steps, n_envs):
        actor, target, fragment = setting(6, n_steps, n_envs, "q", p_end=0.1)
        with Count() as count:
            td(fragment, actor, target, n_steps=3, double=True)
        return count.n

    assert operations(8, 3) == operations(64, 9)


def test_priorities():
    errors = torch.tensor([[-3.0, 1.0], [1.0, 7.0], [5.0, 5.0]])
    valid = torch.tensor([[True, False], [True, False], [False, False]])
    torch.testing.assert_close(
        priorities(errors, valid, eta=0.9), torch.tensor([0.9 * 3 + 0.1 * 2, 0.0])
    )
    torch.testing.assert_close(priorities(errors[:1], valid[:1] | True), torch.tensor([3.0, 1.0]))


def test_a_return_of_no_steps_is_refused():
    actor, _, fragment = setting(7, 4, 2, "q")
    with pytest.raises(DataError, match="n >= 1"):
        td(fragment, actor, n_steps=0)


@pytest.mark.parametrize("huber", [1e-3, 1e30, float("inf")])
def test_any_limit_has_finite_gradients(huber):
    error = torch.tensor([-3.0, -1e-4, 0.0, 0.5, 7.0], requires_grad=True)
    huber_penalty(error, huber).sum().backward()
    torch.testing.assert_close(error.grad, 2 * error.detach().clamp(-huber, huber))
