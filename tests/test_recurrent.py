"Recurrent layers against runs of single episodes; replay of recorded actors; nothing of one episode reaches the next."

from itertools import islice

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import Counting, Lively, Recall

from rollpipe.agents.natural_gradient import TRPO
from rollpipe.layers import GRU, LSTM, MemoryCritic, MLPPolicy, RecurrentPolicy
from rollpipe.layers.recurrent import Recurrent
from rollpipe.pipes import EnvStepper, FragmentCollector, FragmentStacker, Lanes, nested, on_policy
from rollpipe.pipes.batches import values
from rollpipe.pipes.data.errors import DataError
from rollpipe.pipes.data.fragment import State

CELLS = dict(gru=GRU, lstm=LSTM)


@st.composite
def ends(draw):
    "`fin` [T, B] with few or many episodes, or as in `sticky` fragments, where an environment stays ended after its first episode."
    T = draw(st.integers(1, 9))
    B = draw(st.integers(1, 5))
    kind = draw(st.sampled_from(["none", "few", "many", "all", "sticky"]))
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    if kind == "sticky":
        fin = np.arange(T)[:, None] >= rng.integers(1, T + 3, B)
        fin[0] = rng.random(B) < 0.5
    else:
        fin = rng.random((T, B)) < dict(none=0, few=0.1, many=0.5, all=1)[kind]
    return torch.from_numpy(fin)


def case(cell, fin, layers=1, dtype=torch.float32):
    "A layer, its inputs, and the memory before row 0; inputs and memory require gradients."
    T, B = fin.shape
    rnn = CELLS[cell](3, 4, layers).to(dtype)
    x, *hx = (
        torch.randn(*shape, dtype=dtype, requires_grad=True)
        for shape in ((T, B, 3), (layers, B, 4), (layers, B, 4))
    )
    return rnn, x, hx[0] if cell == "gru" else tuple(hx)


def row_by_row(rnn, x, fin, hx):
    "The same, one row at a time."
    outputs = []
    for x_row, fin_row in zip(x.split(1), fin.split(1)):
        y, hx = rnn(x_row, fin_row, hx)
        outputs.append(y)
    return torch.cat(outputs), hx


def alone(rnn, x, fin, hx):
    "The same by torch's own layer, one environment and one episode at a time."
    columns = []
    memories = []
    for b in range(x.shape[1]):
        h = nested.map(lambda h, b=b: h[:, b : b + 1].contiguous(), hx)
        pieces = []
        cuts = [0, *(t for t in range(1, len(x)) if fin[t, b]), len(x)]
        for i, j in zip(cuts, cuts[1:]):
            if fin[i, b]:
                h = None
            y, h = rnn.rnn(x[i:j, b : b + 1].contiguous(), h)
            pieces.append(y)
        columns.append(torch.cat(pieces))
        memories.append(h)
    return torch.cat(columns, 1), nested.cat(memories, 1)


def close(a, b, tol):
    for x, y in zip(nested.leaves(a), nested.leaves(b)):
        torch.testing.assert_close(x, y, rtol=tol, atol=tol)


@pytest.mark.slow_but_one
@pytest.mark.parametrize("layers", (1, 2))
@pytest.mark.parametrize("cell", CELLS)
@given(fin=ends())
@settings(deadline=None, max_examples=15)
def test_both_ways_are_that_of_an_episode_alone(cell, layers, fin):
    torch.manual_seed(0)
    for dtype, tol in ((torch.float32, 1e-6), (torch.float64, 1e-12)):
        rnn, x, hx = case(cell, fin, layers, dtype)
        results = []
        for run in (alone, row_by_row, Recurrent.__call__):
            y, h = run(rnn, x, fin, hx)
            inputs = [x, *nested.leaves(hx), *rnn.parameters()]
            loss = y.square().sum() + sum(u.sin().sum() for u in nested.leaves(h))
            grads = torch.autograd.grad(loss, inputs, allow_unused=True)
            results.append(
                (y, h, [torch.zeros_like(i) if g is None else g for g, i in zip(grads, inputs)])
            )
        for y, h, grads in results[1:]:
            close((y, h), results[0][:2], tol)
            close(grads, results[0][2], tol * 30)  # sums of many terms


@pytest.mark.slow_but_one
@pytest.mark.parametrize("cell", CELLS)
def test_twice_differentiable(cell):
    fin = torch.tensor([[1, 0], [0, 0], [0, 1], [1, 0]]).bool()
    rnn, x, hx = case(cell, fin, dtype=torch.float64)
    weights = list(rnn.parameters())

    def fn(x, *w):
        return torch.func.functional_call(rnn, dict(zip(names, w)), (x, fin, hx))[0]

    names = [name for name, _ in rnn.named_parameters()]
    assert torch.autograd.gradgradcheck(fn, (x, *weights))
    # the Gauss-Newton products of TRPO, against finite differences
    v = [torch.randn_like(w) for w in weights]
    y = rnn(x, fin, hx)[0]
    at = torch.zeros_like(y, requires_grad=True)
    g = torch.autograd.grad(y, weights, at, create_graph=True)
    tangent = torch.autograd.grad(g, at, v)[0]

    def moved(eps):
        with torch.no_grad():
            for w, d in zip(weights, v):
                w.add_(d, alpha=eps)
            y = rnn(x, fin, hx)[0]
            for w, d in zip(weights, v):
                w.sub_(d, alpha=eps)
        return y

    close(tangent, (moved(1e-6) - moved(-1e-6)) / 2e-6, 1e-7)


@pytest.mark.parametrize("run", (row_by_row, Recurrent.__call__))
@pytest.mark.parametrize("cell", CELLS)
def test_a_spoilt_memory_ends_with_its_episode(cell, run):
    fin = torch.tensor([[1, 0], [0, 0], [0, 1]]).bool()
    rnn, x, hx = case(cell, fin)
    with torch.no_grad():
        for h in nested.leaves(hx):
            h[:, 0] = torch.nan
        y, h = run(rnn, x, fin, hx)
        assert all(u.isfinite().all() for u in nested.leaves((y, h)))
        x[0, 1] = torch.nan
        y, h = run(rnn, x, fin, hx)
    assert (
        y[:2, 1].isnan().all()
        and y[2].isfinite().all()
        and all(u.isfinite().all() for u in nested.leaves(h))
    )


@pytest.mark.parametrize("cell", CELLS)
def test_inputs_stay_and_devices_without_data_work(cell):
    fin = torch.tensor([[1, 0], [0, 1]]).bool()
    rnn, x, hx = case(cell, fin)
    before = nested.map(torch.clone, (x, fin, hx))
    rnn(x, fin, hx), rnn(x[:1], fin[:1], hx)
    for a, b in zip(nested.leaves(before), nested.leaves((x, fin, hx))):
        assert torch.equal(a, b)
    y, h = row_by_row(rnn.to("meta"), *nested.map(lambda u: u.to("meta"), (x, fin, hx)))
    assert (
        y.is_meta
        and y.shape == (2, 2, 4)
        and all(u.is_meta and u.shape == (1, 2, 4) for u in nested.leaves(h))
    )
    with pytest.raises(ValueError, match="span >= 2, got 1"):
        CELLS[cell](3, 4, span=1)


# ---- replay

ENVS = dict(
    counting=lambda: Counting([(3, "term"), (4, "trunc"), (1, "trunc"), (5, "both")]), lively=Lively
)


@pytest.mark.slow_but_one
@pytest.mark.parametrize("lanes, sticky", [(1, None), (2, None), (2, 5)])
@pytest.mark.parametrize("past", (False, True))
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("env", ENVS)
def test_replaying_a_fragment_reproduces_what_was_recorded(env, cell, past, lanes, sticky):
    "Replay gives the recorded distributions, log-probabilities and values, across resets, rests and borders of fragments."
    actor = RecurrentPolicy.for_env(
        ENVS[env], hidden=(5,), memory=6, cell=cell, past=past, layers=2, seed=1, report=True
    )
    critic = MemoryCritic.for_env(ENVS[env], memory=6, seed=1)
    for p in actor.head.parameters():
        p.data.mul_(30)  # the memory has a visible effect on the action
    pipe = FragmentCollector(EnvStepper(ENVS[env], actor, 3, sticky=sticky), 5)
    stream = iter(FragmentStacker(Lanes(pipe, lanes, seed=0), lanes))
    for k, f in enumerate(islice(stream, 6)):
        assert f.state.fin[1:].any() and bool(f.valid.all()) == (
            sticky is None or not f.state.fin[1:-1].any()
        )
        obs = nested.getitem(f.state.obs, slice(-1))
        with torch.no_grad():
            seen = actor.replay(f)
        assert set(seen) == {"dist", "logp", "memory"}
        for a, b in zip(nested.leaves(seen), nested.leaves(nested.getitem(f.actor, slice(-1)))):
            torch.testing.assert_close(a[f.valid], b[f.valid], rtol=1e-5, atol=1e-5)
        with torch.no_grad():
            value = critic(critic.inputs(obs, seen))
        torch.testing.assert_close(
            value[f.valid], values(f, critic)[0][f.valid], rtol=1e-5, atol=1e-5
        )
        forgetful = actor.distribution(nested.as_seen(nested.getitem(f.state, slice(-1))), None)
        begun = f.state.fin[:-1].cummax(0)[0]
        changed = (nested.leaves(forgetful)[0] != nested.leaves(seen["dist"])[0]).any(-1)
        if k:
            assert begun.all() or changed[~begun].any()  # the memory has an effect
        close(*(nested.getitem(d, begun) for d in (forgetful, seen["dist"])), 1e-5)
    stream.close()


# ---- nothing of one episode reaches the next


# ---- with pipes and learners


@pytest.mark.parametrize("policy", (RecurrentPolicy, MLPPolicy))
def test_noise_is_drawn_on_the_host_and_goes_where_the_policy_is(policy):
    spaces = Box(-1, 1, (2,)), Dict(a=Discrete(3), b=Box(-1, 1, (4,)))
    actor = policy.for_env(spaces)
    noise = [actor.draw_noise([1, 5], torch.Generator().manual_seed(0)) for _ in range(2)]
    assert torch.equal(noise[0]["a"], noise[1]["a"])
    actor.to("meta")
    noise = actor.draw_noise([1, 5], torch.Generator().manual_seed(0))
    state = nested.map(
        lambda x: x.to("meta"),
        State(
            torch.zeros(1, 5, dtype=torch.int64),
            torch.ones(1, 5, 2),
            dict(a=torch.zeros(1, 5, dtype=torch.int64), b=torch.zeros(1, 5, 4)),
            torch.zeros(1, 5),
            torch.ones(1, 5, dtype=torch.bool),
        ),
    )
    act, hx, info = actor.step(*state, hx=None, virtual=False, noise=noise)
    assert all(x.is_meta for x in nested.leaves((noise, act, hx, info))) and act["b"].shape == (
        1,
        5,
        4,
    )


def test_a_critic_that_sees_the_memory_takes_any_encoder_whose_features_are_known():
    critic = MemoryCritic(
        Box(-1, 1, (3,)), memory=2, hidden=(4,), encoder=lambda space: torch.nn.Linear(3, 5)
    )
    assert critic.net.n_in == 5 + 2 and critic(
        dict(obs=torch.zeros(6, 3), memory=torch.zeros(6, 2))
    ).shape == (6,)


@pytest.mark.parametrize("sticky", (False, True))
def test_a_critic_that_sees_the_memory(sticky):
    "The critic gets the memory of each row, at truncated ends the memory of that moment, and is trained on the same inputs."
    env = ENVS["counting"]
    actor = RecurrentPolicy.for_env(env, hidden=(5,), memory=6, report=True, seed=0)
    critic = MemoryCritic.for_env(env, memory=6, hidden=(5,), seed=0)
    agent = TRPO(actor, critic, critic_lr=1e-2)
    stream = iter(
        on_policy(env, actor, critic, n_envs=4, n_steps=20, gamma=0.9, sticky=sticky, seed=0)
    )
    for k, f in enumerate(islice(stream, 3)):
        v = critic(critic.inputs(f.state.obs, f.actor)).detach()
        ends = critic(dict(obs=f.final.obs, memory=f.final.actor["memory"])).detach()
        _, v_tp1 = values(f, critic)
        assert (len(ends) or not k) and torch.equal(v_tp1[f.final.t, f.final.b], ends)
        delta = f.state.rew[1:] + 0.9 * v_tp1 * ~f.term[1:] - v[:-1]
        last = f.state.fin[1:] & f.valid  # the last step of its episode
        torch.testing.assert_close(f.adv[last], delta[last])
        assert agent.update(f)["critic_loss"] > 0 and int(critic.ret_count) > 0
    stream.close()
    with pytest.raises(DataError, match=r"reports no memory.*report=True"):
        next(iter(on_policy(env, RecurrentPolicy.for_env(env), critic, n_envs=1, n_steps=5)))


def test_the_question_is_asked_after_the_delay():
    env = Recall(delay=3, n_cues=2)
    obs, _ = env.reset(seed=0)
    shown = [obs]
    for t in range(4):
        obs, rew, term, trunc, _ = env.step(env.cue)
        shown.append(obs)
        assert (rew, term, trunc) == ((1.0, True, False) if t == 3 else (0.0, False, False))
    assert np.argmax(shown, 1).tolist() == [1 + env.cue, 0, 0, 3, 0]
    env.reset()
    for _ in range(3):
        env.step(0)
    assert env.step(1 - env.cue)[1] == -1
