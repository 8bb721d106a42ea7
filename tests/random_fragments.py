"""Random fragments that keep the rules of the stream, with ends of all kinds and rows that are no step; their actors; comparing losses."""

import copy
import math

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, Tuple
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from toys import ENDS

from rollpipe.agents.metrics import METRICS, check_metrics
from rollpipe.layers import (
    Critic,
    MemoryCritic,
    MLPPolicy,
    QPolicy,
    RecurrentPolicy,
    RecurrentQPolicy,
)
from rollpipe.layers.observer import seeded
from rollpipe.pipes import nested
from rollpipe.pipes.data.fragment import Final, Fragment, State
from rollpipe.pipes.graph.modules import bump_version

OBS = Dict(place=Box(-1, 1, (3,)), kind=Discrete(3))
ACT = Dict(gear=Discrete(3, start=1), steer=Tuple((Box(-2, 2, (2,)),)))
CHOICE = Discrete(3, start=2)
SMALL = dict(hidden=(5,), normalize=False)
BOTH = st.booleans()
episodes = st.lists(
    st.tuples(st.integers(1, 6), st.sampled_from(ENDS)), min_size=1, max_size=3
)  # of a `Counting`


@st.composite
def fragments(draw, recurrent=BOTH, rich=BOTH):
    "Fragments of random content with ends of all kinds, rows that are no step, and nested leaves."
    T = draw(st.integers(1, 5))
    B = draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))

    def real(*shape):
        return torch.from_numpy(rng.normal(size=shape).astype(np.float32))

    def flags(p):
        return torch.from_numpy(rng.random((T, B)) < p)

    def report(*lead):
        return dict(logp=real(*lead), dist=(real(*lead, 3),))

    valid = flags(0.8)
    terminated = flags(0.3)
    truncated = flags(0.3)
    K = int((truncated & ~terminated & valid).sum())

    def obs(*lead):
        return dict(place=real(*lead, 2), kind=torch.from_numpy(rng.integers(9, size=lead)))

    more = (
        dict(
            adv=real(T, B),
            ret=real(T, B),
            env=dict(count=real(T, B)),
            **{name: torch.from_numpy(rng.integers(9, size=B)) for name in Fragment.COLUMNS},
        )
        if draw(rich)
        else {}
    )
    return Fragment.from_steps(
        obs(T + 1, B),
        (real(T, B, 2),),
        real(T, B),
        terminated,
        truncated,
        last_obs=obs(K),
        actor=report(T + 1, B),
        last_actor=report(K),
        hx=(real(2, B, 3),) if draw(recurrent) else (),
        valid=valid,
        stepno=torch.from_numpy(rng.integers(3, size=B)),
        **more,
    )


class Shared(MLPPolicy):
    "Reports a value from its own hidden layer."

    def __init__(self, *spaces, **options):
        super().__init__(*spaces, **options)
        self.judge = nn.Linear(self.trunk.n_out, 1)

    def forward(self, obs, act, rew, fin, **context):
        new, hx, info = super().forward(obs, act, rew, fin, **context)
        return new, hx, {**info, "value": self.judge(self.trunk(self.features(obs))).squeeze(-1)}


class SharedMemory(RecurrentPolicy):
    "Reports a value from its own memory."

    def __init__(self, *spaces, **options):
        super().__init__(*spaces, report=True, **options)
        self.judge = nn.Linear(self.memory.n_out, 1)

    def forward(self, obs, act, rew, fin, **context):
        new, hx, info = super().forward(obs, act, rew, fin, **context)
        return new, hx, {**info, "value": self.judge(info["memory"]).squeeze(-1)}


def make(kind, seed):
    "(actor, critic or None): 'plain' and 'memory' with a critic of their own, 'shared' and 'shared memory' with values of theirs."
    memory = dict(memory=4, past=True)
    with seeded(seed):
        if kind == "plain":
            return MLPPolicy(OBS, ACT, **SMALL), scaled(Critic(OBS, **SMALL))
        if kind == "memory":
            return RecurrentPolicy(OBS, ACT, report=True, **SMALL, **memory), scaled(
                MemoryCritic(OBS, memory=4, **SMALL)
            )
        if kind == "shared":
            return Shared(OBS, ACT, **SMALL), None
        if kind == "shared memory":
            return SharedMemory(OBS, ACT, **SMALL, **memory), None
        if kind == "q":
            return QPolicy(OBS, CHOICE, **SMALL), None
        if kind == "q memory":
            return RecurrentQPolicy(OBS, CHOICE, **SMALL, **memory), None


def scaled(critic):
    "`critic`, which has seen returns of some scale."
    critic.observe_returns(torch.tensor([1.0, 4.0, -2.0]))
    return critic


def shaken(actor, seed, by=0.2):
    "A copy with other weights."
    actor = copy.deepcopy(actor)
    gen = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in actor.parameters():
            p += by * torch.randn(p.shape, generator=gen)
    return actor


def random_fragment(
    seed, n_steps, n_envs, actor, *, old=None, p_end=0.3, terminal_obs=False, garbage=False
) -> Fragment:
    """Steps that `old` recorded, `actor` if None; a third of the ends is followed by rows that are no step.

    `terminal_obs`: terminal states have a `final` row, too. `garbage`: where there was no step, floats are nan.
    """
    rng = np.random.default_rng(seed)
    obs_space = OBS
    act_space = getattr(actor, "n_actions", None) and CHOICE or ACT
    for k, space in enumerate((obs_space, act_space)):
        space.seed(int(rng.integers(2**31)) + k)
    valid, ended, term = (torch.zeros(n_steps, n_envs, dtype=torch.bool) for _ in range(3))
    stepno = torch.zeros(n_envs, dtype=torch.int64)
    for b in range(n_envs):
        stepno[b] = int(rng.integers(3))
        still = 0
        for t in range(n_steps):
            valid[t, b] = still == 0
            still = max(0, still - 1)
            ended[t, b] = bool(valid[t, b]) and rng.random() < p_end
            term[t, b] = bool(ended[t, b]) and rng.random() < 0.5
            if ended[t, b] and rng.random() < 1 / 3:
                still = int(rng.integers(1, 3))
    act = sample(act_space, n_steps + 1, n_envs)
    rew = torch.from_numpy(rng.normal(size=(n_steps + 1, n_envs)).astype(np.float32))
    obs = sample(obs_space, n_steps + 1, n_envs)
    told = ended if terminal_obs else ended & ~term
    t, b = told.nonzero(as_tuple=True)
    last = nested.map(lambda x: x[0, : len(t)], sample(obs_space, 1, len(t) + 1))
    hx = ()
    if hasattr(actor, "memory"):
        hx = torch.from_numpy(rng.normal(size=(1, n_envs, 4)).astype(np.float32))
    version = torch.from_numpy(rng.integers(0, 4, n_envs))
    bump_version(actor, to=3)
    lane = torch.zeros(n_envs, dtype=torch.int64)
    fragment = Fragment.from_steps(
        obs,
        nested.getitem(act, slice(1, None)),
        rew[1:],
        term,
        ended & ~term,
        last_obs=nested.getitem(last, ~term[t, b]),
        hx=hx,
        valid=valid,
        stepno=stepno,
        lane=lane,
        seq=lane,
        version=version,
    )
    state = fragment.state._replace(
        act=act, rew=torch.cat([rew[:1], fragment.state.rew[1:]])
    )  # something came before row 0
    fragment = fragment._replace(state=state, final=Final(t, b, last, {}))
    return spoilt(record(fragment, old or actor), garbage)


def padded(fragment, n):
    "The fragment of whose rows the last `n` are no steps, though nothing has ended before them, and its other rows alone."
    T = fragment.n_steps - n
    valid = fragment.valid.clone()
    fin = fragment.state.fin.clone()
    rew = fragment.state.rew.clone()
    valid[T:] = False
    fin[T + 1 :] = True
    rew[T + 1 :] = 0.0
    alone = fragment.map(rows=lambda x: x[: T + 1], steps=lambda x: x[:T])
    return fragment._replace(state=fragment.state._replace(fin=fin, rew=rew), valid=valid), alone


def sample(space, *lead):
    "Random tensors `[*lead, ...]`."
    rows = nested.stack(
        [nested.stack([space.sample() for _ in range(lead[1])]) for _ in range(lead[0])]
    )
    return nested.torchify(rows)


@torch.no_grad()
def record(fragment, old):
    "`fragment` with what `old` reports, step by step, with its memory; `final` gets what it would have said there."
    rows = []
    ends = {}
    where = list(zip(fragment.final.t.tolist(), fragment.final.b.tolist()))
    hx = fragment.hx
    for t in range(fragment.n_steps + 1):
        state = nested.getitem(fragment.state, slice(t, t + 1))
        _, hx, info = old.step(*state, hx=hx, virtual=False)
        if hasattr(old, "complete"):  # the look-ahead has no action of its own: any will do
            info = old.complete(
                nested.getitem(fragment.state.act, [min(t + 1, fragment.n_steps)]), info
            )
        rows.append(nested.map(lambda x: x[0], info))
        for k, (t_k, b) in enumerate(where):
            if t_k != t:
                continue
            info = old.step(
                *last_state(fragment, k), hx=hx[:, b : b + 1] if len(hx) else (), virtual=True
            )[2]
            ends[k] = nested.map(lambda x: x[0, 0], info)
    final = (
        nested.stack([ends[k] for k in range(len(where))])
        if where
        else nested.map(lambda x: x[0, :0], info)
    )
    return fragment._replace(actor=nested.stack(rows), final=fragment.final._replace(actor=final))


def last_state(fragment, k):
    "The `k`-th true last observation as a `State` `[1, 1, ...]`."
    t = int(fragment.final.t[k])
    b = int(fragment.final.b[k])
    one = lambda tree, at: nested.map(lambda x: x[at][None, None], tree)
    return State(
        fragment.state.stepno[t, b][None, None] + 1,
        one(fragment.final.obs, k),
        one(fragment.state.act, (t + 1, b)),
        one(fragment.state.rew, (t + 1, b)),
        torch.zeros(1, 1, dtype=torch.bool),
    )


def answers(ask, fragment, burn_in=0):
    """(t, b) -> (answer to the state, answer to the state reached) of the valid steps, asked one by one.

    `ask(state [1, 1, ...], hx, virtual)` returns (answer, hx). No gradient goes through the memory before `burn_in`.
    """
    ends = {(int(t), int(b)): k for k, (t, b) in enumerate(zip(fragment.final.t, fragment.final.b))}
    out = {}
    for b in range(fragment.n_envs):
        hx = fragment.hx[:, b : b + 1] if len(fragment.hx) else ()
        at = lambda t, b=b: nested.map(lambda x: x[t : t + 1, b : b + 1], fragment.state)
        for t in range(fragment.n_steps):
            if not fragment.valid[t, b]:
                continue
            if fragment.state.fin[t, b] and len(hx):
                hx = torch.zeros_like(hx)
            now, hx = ask(at(t), hx, False)
            if t < burn_in and len(hx):
                hx = hx.detach()
            out[t, b] = (
                now,
                ask(last_state(fragment, ends[t, b]) if (t, b) in ends else at(t + 1), hx, True)[0],
            )
    return out


def rewards_of(fragment, gamma, n_steps, t, b):
    "The sum of the rewards of step (t, b) and those after it, until values take over; and the last of these steps."
    total, k = 0.0, t
    while True:
        total += gamma ** (k - t) * num(fragment.state.rew[k + 1, b])
        if fragment.state.fin[k + 1, b] or k + 1 == fragment.n_steps or k + 1 == t + n_steps:
            return total, k
        k += 1


def spoilt(fragment, garbage):
    "`fragment` with nan in all that was seen, done and said in steps that were none, if `garbage`."
    if not garbage:
        return fragment
    still = ~fragment.valid

    def spoil(x, row):
        if not x.is_floating_point():
            return x
        x = x.clone()
        x[row:][: fragment.n_steps][still] = float("nan")
        return x

    state = fragment.state._replace(
        obs=nested.map(lambda x: spoil(x, 0), fragment.state.obs),
        act=nested.map(lambda x: spoil(x, 1), fragment.state.act),
    )
    return fragment._replace(state=state, actor=nested.map(lambda x: spoil(x, 0), fragment.actor))


# ---- comparing losses


def mean(xs):
    return sum(xs) / len(xs)


def num(x):
    return float(x.detach() if isinstance(x, torch.Tensor) else x)


def assert_same_loss(loss, slow, modules):
    "Equal values, and equal gradients of all parameters."
    torch.testing.assert_close(loss.detach(), slow.detach().reshape(()), rtol=2e-4, atol=2e-5)
    params = [p for m in modules if m is not None for p in m.parameters()]
    grads = zip(
        *(
            torch.autograd.grad(x.sum(), params, allow_unused=True, retain_graph=True)
            for x in (loss, slow)
        )
    )
    for fast, other in grads:
        assert (fast is None) == (other is None) or not (fast if other is None else other).any()
        if fast is not None and other is not None:
            torch.testing.assert_close(fast, other, rtol=1e-3, atol=1e-4)


def assert_metrics(metrics, **wanted):
    assert set(metrics) <= set(METRICS) and all(
        math.isfinite(x) for x in check_metrics(metrics).values()
    )
    assert not any(
        isinstance(x, torch.Tensor) and (x.requires_grad or x.ndim) for x in metrics.values()
    )
    for name, x in wanted.items():
        assert num(metrics[name]) == pytest.approx(num(x), rel=1e-3, abs=1e-4), name


class Count(TorchDispatchMode):
    "Counts the operations that torch is asked for."

    n = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.n += 1
        return func(*args, **(kwargs or {}))
