"""A rollout engine in the most naive Python: one environment at a time, lists, no pipes. Written from the design alone.

State[t]  = (stepno n_t, obs x_t, act a_{t-1}, rew r_t, fin d_t)      what the actor sees at t
REACT       (State[t], h_t)   -> a_t, h_{t+1}, actor[t]
STEP+EMIT   (s_t, a_t)        -> x_{t+1}, r_{t+1}, d_{t+1}, env[t]
"""

import math

import numpy as np
import torch


def flatten(tree, path=""):
    "(path, leaf) of every leaf of dicts, lists and tuples."
    if tree is None:
        return []
    if isinstance(tree, dict):
        return [p for k in sorted(tree) for p in flatten(tree[k], f"{path}[{k!r}]")]
    if hasattr(tree, "_fields"):
        return [p for k in tree._fields for p in flatten(getattr(tree, k), f"{path}.{k}")]
    if isinstance(tree, (list, tuple)):
        return [p for i, x in enumerate(tree) for p in flatten(x, f"{path}[{i}]")]
    return [(path, tree)]


def apply(fn, tree):
    if tree is None:
        return None
    if isinstance(tree, dict):
        return {k: apply(fn, x) for k, x in tree.items()}
    if hasattr(tree, "_fields"):
        return type(tree)(*(apply(fn, x) for x in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(apply(fn, x) for x in tree)
    return fn(tree)


def array(x):
    return x.detach().numpy() if isinstance(x, torch.Tensor) else np.asarray(x)


def snapshot(tree):
    "A copy with numpy leaves, which nothing that happens to `tree` later can change."
    return apply(lambda x: array(x).copy(), tree)


def differences(a, b):
    "Paths at which two containers differ in structure, shape, dtype or value (nan equals nan)."
    a = flatten(a)
    b = flatten(b)
    if [p for p, _ in a] != [p for p, _ in b]:
        return [f"structure: {[p for p, _ in a]} != {[p for p, _ in b]}"]
    found = []
    for (path, x), (_, y) in zip(a, b):
        x = array(x)
        y = array(y)
        if x.dtype != y.dtype or x.shape != y.shape:
            found.append(f"{path}: {x.dtype}{x.shape} != {y.dtype}{y.shape}")
        elif not np.array_equal(x, y, equal_nan=x.dtype.kind == "f"):
            found.append(f"{path}: {x} != {y}")
    return found


def assert_same(a, b):
    assert not (found := differences(a, b)), "\n".join(found)


def as_row(tree):
    "Numpy values of one environment as tensors [T=1, B=1, ...], float64 as float32: what an actor is shown."

    def row(x):
        x = torch.from_numpy(np.array(x)[None, None])
        return x.float() if x.dtype is torch.float64 else x

    return apply(row, tree)


def first_of(tree):
    return apply(lambda x: x[0, 0].numpy().copy(), tree)


class Solo:
    """One environment, one actor, one episode after the other; `collect` gives the column of a fragment.

    `sticky`: after an end nothing happens until the number of steps is a multiple of it. The actor is asked all the same.
    """

    def __init__(self, env, actor, no_action, seed=None, sticky=None):
        self.env = env
        self.actor = actor
        self.has_memory = hasattr(actor, "initial")
        self.sticky = sticky
        self.frozen = False
        self.steps = 0
        self.hx = self.fresh()
        self.term = False
        self.state = (0, snapshot(env.reset(seed=seed)[0]), no_action, 0.0, True)

    def fresh(self):
        return self.actor.initial(1) if self.has_memory else ()

    def react(self, state, hx, virtual):
        stepno, obs, act, rew, fin = state
        inputs = as_row((np.int64(stepno), obs, act, np.float32(rew), np.bool_(fin)))
        act, hx, info = self.actor.step(
            *inputs, hx=hx if self.has_memory else None, virtual=virtual
        )
        return first_of(act), hx, first_of(info)

    def collect(self, n_steps):
        states = [self.state]
        terms = [self.term]
        actors = []
        envs = []
        finals = []
        valid = []
        hx0 = self.hx
        for t in range(n_steps):
            act, self.hx, info = self.react(self.state, self.hx, virtual=False)
            actors.append(info)
            self.steps += 1
            valid.append(not self.frozen)
            if self.frozen:
                stepno, obs, *_ = self.state
                self.state, self.term, self.hx = (stepno, obs, act, 0.0, True), False, self.fresh()
                states.append(self.state)
                terms.append(False)
                envs.append(None)
                self.frozen = self.steps % self.sticky != 0
                continue
            obs, rew, term, trunc, env_info = self.env.step(apply(lambda x: x.copy(), act))
            obs = snapshot(obs)
            stepno = self.state[0] + 1
            fin = bool(term or trunc)
            if fin:
                if not term:  # cut off by a limit alone: the episode would have gone on from here
                    last = (stepno, obs, act, rew, False)
                    finals.append((t, obs, self.react(last, self.hx, virtual=True)[2]))
                obs = snapshot(self.env.reset()[0])
                stepno = 0
                self.hx = self.fresh()
                self.frozen = bool(self.sticky) and self.steps % self.sticky != 0
            self.state = (stepno, obs, act, rew, fin)
            self.term = bool(term)
            states.append(self.state)
            terms.append(self.term)
            envs.append(env_info)
        actors.append(
            self.react(self.state, self.hx, virtual=True)[2]
        )  # the look-ahead: hx and environment stay
        return dict(
            states=states, terms=terms, actors=actors, envs=envs, finals=finals, valid=valid, hx=hx0
        )


def grid(columns, key):
    "columns[b][key][t] as arrays [T, B, ...]"
    return _stack(
        [_stack([column[key][t] for column in columns]) for t in range(len(columns[0][key]))]
    )


def _stack(trees):
    one = trees[0]
    if isinstance(one, dict):
        return {k: _stack([x[k] for x in trees]) for k in one}
    if isinstance(one, (list, tuple)):
        return type(one)(_stack([x[i] for x in trees]) for i in range(len(one)))
    return np.stack([np.asarray(x) for x in trees])


def gae(rew, v, v_final, fin, term, gamma, lam):
    """Advantages of one environment, in float64, as the sum over the rest of each episode.

    rew, fin, term: T values, of the step t -> t+1; v: T+1 values of the observations; v_final: t -> value of the true
    last observation of an episode that was truncated at step t.
    """
    n_steps = len(rew)
    adv = []
    for t in range(n_steps):
        total, weight = 0.0, 1.0
        for k in range(t, n_steps):
            after = 0.0 if term[k] else v_final[k] if fin[k] else v[k + 1]
            total += weight * (rew[k] + gamma * after - v[k])
            if fin[k]:
                break
            weight *= gamma * lam
        adv.append(total)
    assert all(map(math.isfinite, adv))
    return adv
