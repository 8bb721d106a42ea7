"""Environments and actors whose every number can be predicted, and pipes that count or fail; used by many tests."""

from copy import deepcopy
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, Tuple, flatten

from rollpipe.layers import Actor
from rollpipe.pipes import Pipe, TensorEnv, nested
from rollpipe.testing import Recall as Remembered

ENDS = ("term", "trunc", "both")


class Ledger:
    "What happened to the environments of this process; `clear` it at the start of a test that looks."

    made = []
    closed = []
    seeds = []

    @classmethod
    def clear(cls):
        for log in (cls.made, cls.closed, cls.seeds):
            log.clear()

    @classmethod
    def open(cls):
        return len(cls.made) - len(cls.closed)


class Noted(gym.Env):
    "An environment that writes into the `Ledger` when it is made, seeded and closed."

    def __init__(self):
        Ledger.made.append(self)
        self.is_closed = False

    def reset(self, *, seed=None, options=None):
        assert not self.is_closed
        super().reset(seed=seed)
        Ledger.seeds.append(seed)

    def close(self):
        assert not self.is_closed, "closed twice"
        self.is_closed = True
        Ledger.closed.append(self)


class Stepped(gym.Env):
    "Subclasses say what is seen and paid in step `count` of an episode, and when it ends. Here 1 is paid, and there is no end."

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        self.begin()
        return self.look(), {}

    def step(self, action):
        self.count += 1
        return self.look(), self.pay(action), *self.ends(), {}

    def begin(self):
        pass

    def look(self):
        return np.full(self.observation_space.shape, self.count, np.float32)

    def pay(self, action):
        return 1.0

    def ends(self):
        return False, False  # terminated, truncated


class Counting(Noted):
    """Plays the `episodes`, a list of (length, 'term' | 'trunc' | 'both'), over and over.

    The observation is [tag, number of the episode, step within it, last action]; the reward of a step tells the
    same moment: 100 * episode + step (of the state reached) + action / 10.
    """

    observation_space = Box(-np.inf, np.inf, (4,))
    action_space = Discrete(5)

    def __init__(self, episodes=((3, "term"), (4, "trunc")), tag=0):
        super().__init__()
        self.episodes = episodes
        self.tag = tag
        self.episode = -1
        self.last = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode = self.episode + 1
        self.count = 0
        return self.look(), {"count": 0}

    def look(self):
        return np.array([self.tag, self.episode, self.count, self.last], np.float32)

    def step(self, action):
        self.last = self.number(action)
        self.count = self.count + 1
        length, end = self.episodes[self.episode % len(self.episodes)]
        over = self.count >= length
        info = {
            "count": self.count,
            "parts": {"half": self.count / 2, "at": np.array([self.tag, self.last])},
            "name": f"step {self.count}",
            "none": None,
        }
        reward = 100 * self.episode + self.count + self.last / 10
        return self.look(), reward, over and end != "trunc", over and end != "term", info

    def number(self, action):
        return int(action)


class Nested(Counting):
    "`Counting` with containers for observations and actions, of several dtypes."

    observation_space = Dict(
        place=Box(-np.inf, np.inf, (4,)),
        pair=Tuple((Discrete(10_000), Dict(pixels=Box(0, 255, (2, 2), np.uint8)))),
        exact=Box(-np.inf, np.inf, (), np.float64),
    )
    action_space = Dict(gear=Discrete(3, start=1), steer=Tuple((Box(-9, 9, (2,)), MultiBinary(2))))

    def look(self):
        place = super().look()
        return {
            "place": place,
            "exact": np.asarray(self.count / 3 + self.last),
            "pair": (np.int64(self.episode), {"pixels": np.full((2, 2), self.count, np.uint8)}),
        }

    def number(self, action):
        assert self.action_space.contains(action), action
        wheel, buttons = action["steer"]
        return int(action["gear"]) + 10 * int(wheel.sum()) + 1000 * int(buttons.sum())


class Thrifty(Counting):
    "`Counting` whose answers are the same objects again and again, also in resets and in all environments. With `fresh`, they are copies."

    at = np.zeros(4, np.float32)
    info = {"place": np.zeros(2), "parts": [np.zeros(1), 0]}

    paid = np.zeros(())

    def __init__(self, paid=paid, fresh=False, **kwargs):
        super().__init__(**kwargs)
        self.paid, self.fresh = paid, fresh

    def again(self, obs, reward):
        self.at[:], self.paid[...] = obs, reward
        self.info["n"], self.info["parts"][1] = self.count, self.count
        self.info["place"][:] = self.info["parts"][0][:] = self.count
        return (
            deepcopy((self.at, self.paid, self.info))
            if self.fresh
            else (self.at, self.paid, self.info)
        )

    def reset(self, **kwargs):
        return self.again(super().reset(**kwargs)[0], -1)[::2]

    def step(self, action):
        obs, reward, *ends, _ = super().step(action)
        obs, reward, info = self.again(obs, reward)
        return obs, reward, *ends, info


class Lively(Noted):
    "Everything is random: where episodes start, how long they are, how they end, what is paid."

    observation_space = Box(-np.inf, np.inf, (3,))
    action_space = Box(-1, 1, (2,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x = self.np_random.normal(size=3)
        return self.x.astype(np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.x = 0.9 * self.x + 0.3 * self.np_random.normal(size=3)
        self.x[:2] += action
        chance = self.np_random.random()
        return (
            self.x.astype(np.float32),
            float(self.x.sum()),
            bool(chance < 0.1),
            bool(0.05 < chance < 0.2),
            {},
        )


class Recall(Remembered, Noted):
    "That of `rollpipe.testing`, which writes into the `Ledger`."


# --- actors; all arithmetic is on small integers, so results do not depend on how rows are batched


def _report(stepno, obs, act, rew, fin, virtual):
    "What the actor was shown, to be recorded, and whether it was told that this reaction is virtual."
    return dict(obs=obs, act=act, seen=(stepno, rew, fin), virtual=torch.full(fin.shape, virtual))


class Plain(Actor):
    "Discrete(5) actions from what is seen now; no memory."

    def forward(self, obs, act, rew, fin, *, hx, stepno, virtual):
        assert hx is None or hx == ()
        new = (obs[..., 2].long() + 2 * obs[..., 1].long() + (rew * (~fin)).long() + stepno) % 5
        return new, (), _report(stepno, obs, act, rew, fin, virtual)


class Present(Plain):
    "As `Plain`, but past actions and rewards do not matter to it."

    uses_past = False

    def forward(self, obs, act, rew, fin, **context):
        return super().forward(obs, act, torch.zeros_like(rew), fin, **context)


class Memory(Actor):
    """Discrete(5) actions from a running sum and a counter, which begin at 7 and 1, not at zero.

    `hx = {'sum': [2, B, 3] float32, 'n': [1, B] int64}`. It relies on `reset` and does not look at `fin`.
    """

    def initial(self, n):
        return {"sum": torch.full((2, n, 3), 7.0), "n": torch.ones(1, n, dtype=torch.int64)}

    def look(self, obs):
        return obs[..., 2] + 3 * obs[..., 1]

    def forward(self, obs, act, rew, fin, *, hx, stepno, virtual):
        lead = fin.shape
        if hx is None:
            hx = self.initial(lead[1])
        total = hx["sum"]
        n = hx["n"]
        before = []
        for x in self.look(obs):
            before.append(total[0, :, 0] + n[0])
            total = (total + (x + n[0])[None, :, None]) % 1009
            n = n + 1
        memory = torch.stack(before)
        number = (memory + rew.floor() * (~fin) + stepno).long()
        info = {**_report(stepno, obs, act, rew, fin, virtual), "memory": memory}
        return self.choose(number), {"sum": total, "n": n}, info

    def choose(self, number):
        return number % 5

    def reset(self, hx, at):
        new = {k: x.clone() for k, x in hx.items()}
        new["sum"][:, at], new["n"][:, at] = 7.0, 1
        return new


class NestedMemory(Memory):
    "`Memory` for the spaces of `Nested`."

    def look(self, obs):
        assert obs["exact"].dtype is torch.float32  # actors are shown float32 for float64
        return obs["place"][..., 2] + 3 * obs["pair"][0] + obs["pair"][1]["pixels"][..., 1, 0]

    def choose(self, number):
        steer = torch.stack([number % 7, number % 4], -1).float()
        return {
            "gear": number % 3 + 1,
            "steer": (steer, torch.stack([number % 2, number // 2 % 2], -1).to(torch.int8)),
        }


class Valued(Plain):
    "`Plain` that reports a value."

    def forward(self, obs, act, rew, fin, **context):
        new, hx, info = super().forward(obs, act, rew, fin, **context)
        return new, hx, {**info, "value": judge(obs)}


class Shaky(Actor):
    "Draws from torch's global generator, for Box(2) actions; reports what it drew."

    uses_past = False

    def forward(self, obs, act, rew, fin, *, hx, stepno, virtual):
        new = torch.randn(*fin.shape, 2)
        return new, (), {"drawn": new.clone()}


class Constant(Actor):
    "Always answers with `answer`, an action for one environment."

    def __init__(self, answer):
        super().__init__()
        self.answer = torch.as_tensor(answer)

    def forward(self, obs, act, rew, fin, *, hx, stepno, virtual):
        return self.answer.expand(*fin.shape, *self.answer.shape).clone(), (), {}


class Learning(torch.nn.Module):
    "No `Actor`: anything with `step` and `reset`. Reports its one parameter, and chooses the remainder by 5."

    def __init__(self, answer=0.0):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(float(answer)))

    def step(self, stepno, obs, act, rew, fin, /, *, hx, virtual):
        number = self.weight.expand(fin.shape).clone()
        return number.long() % 5, (), {"weight": number}

    def reset(self, hx, at):
        return hx


def judge(obs):
    "A critic for the observations of `Counting`: never the same twice within an episode."
    return obs[..., 2] / 8 - obs[..., 1] / 4 + obs[..., 3] / 16 + obs[..., 0]


# --- pipes


class Limit(Pipe):
    "The first `n` items."

    def __init__(self, pipe, n):
        super().__init__(pipe)
        self.n = n

    def stream(self, items):
        for _ in range(self.n):
            yield next(items)


class Failing(Pipe):
    "Passes `n` items on, then fails."

    def __init__(self, pipe, n):
        super().__init__(pipe)
        self.n = n

    def stream(self, items):
        for k, item in enumerate(items):
            if k == self.n:
                raise ZeroDivisionError("downstream")
            yield item


class Brief(Lively):
    "`Lively` whose episodes never terminate."

    def step(self, action):
        obs, rew, term, trunc, info = super().step(action)
        return obs, rew, False, term or trunc, info


WORLDS = {
    "plain": (Counting, Plain),
    "memory": (Counting, Memory),
    "nested": (Nested, NestedMemory),
}


def factories(env, plans):
    return [lambda tag=tag, plan=plan: env(plan, tag) for tag, plan in enumerate(plans)]


# --- environments and actors by parameters: a rule is an answer, or a function that gives it


class at:
    """A rule of `before` that acts in one call, or in all of them from it on (`onwards`); calls are counted from 1.

    >>> env = Scripted(before={"step": at(3, fail(OSError("lost")))})
    >>> env = Scripted(before={"close": at(1, lambda env: time.sleep(0.8))})
    """

    def __init__(self, number, do, onwards=False):
        self.number = number
        self.do = do
        self.onwards = onwards

    def __call__(self, env):
        n = env.calls[env.call]
        if n == self.number or (self.onwards and n > self.number):
            self.do(env)


class fail:
    "A rule that raises `error`."

    def __init__(self, error):
        self.error = error

    def __call__(self, _):
        raise self.error


def answer_of(rule, source):
    return rule(source) if callable(rule) else deepcopy(rule)


class Scripted(Counting):
    """`Counting` in which single things are otherwise. A rule is an answer, or a function of the environment.

    A rule reads what it needs: `env.count` (step), `env.episode`, `env.tag`, `env.action`, `env.last` (its number),
    `env.np_random`, `env.calls` (how often 'make', 'reset', 'step' and 'close' were called).

    >>> env = Scripted([(9, "trunc")], pay=1.0, tell=lambda env: {"n": env.count})
    >>> env = Scripted(observation_space=Box(-1, 1, (2,)), see=lambda env: env.np_random.uniform(-1, 1, 2))

    Args:
        episodes, tag: see `Counting`.
        see: the observation. Without it that of `Counting`, or the number of the step in all places of a Box.
        pay: the reward of a step.
        ends: terminated and truncated, in place of `episodes`.
        tell, tell_first: the infos of a step, and of a reset.
        begin: called in each reset, after the seed is set.
        before: call ('make', 'reset', 'step' or 'close') -> rule that is called first; see `at` and `fail`.
        observation_space, action_space: spaces in place of those of `Counting`.
    """

    def __init__(
        self,
        episodes=((3, "term"), (4, "trunc")),
        tag=0,
        *,
        see=None,
        pay=None,
        ends=None,
        tell=None,
        tell_first=None,
        begin=None,
        before=None,
        observation_space=None,
        action_space=None,
    ):
        self.rules = dict(see=see, pay=pay, ends=ends, tell=tell, tell_first=tell_first)
        self.begin = begin
        self.before = before or {}
        self.calls = dict.fromkeys(("make", "reset", "step", "close"), 0)
        self.noticed("make")
        super().__init__(episodes, tag)

        # Without a rule, an observation of another space tells the number of the step.
        if observation_space is not None:
            self.observation_space = observation_space
            if see is None:
                self.rules["see"] = step_number
        if action_space is not None:
            self.action_space = action_space

    def noticed(self, call):
        "Counts the call, and does what shall happen before it."
        self.call = call
        self.calls[call] += 1
        if call in self.before:
            self.before[call](self)

    def answer(self, name, otherwise):
        rule = self.rules[name]
        return otherwise if rule is None else answer_of(rule, self)

    def reset(self, **kwargs):
        self.noticed("reset")
        _, info = super().reset(**kwargs)
        if self.begin is not None:
            self.begin(self)
        return self.look(), self.answer("tell_first", info)

    def step(self, action):
        self.action = action
        self.noticed("step")
        obs, reward, *ends, info = super().step(action)
        return (
            obs,
            self.answer("pay", reward),
            *self.answer("ends", ends),
            self.answer("tell", info),
        )

    def look(self):
        if self.rules["see"] is None:
            return super().look()
        return answer_of(self.rules["see"], self)

    def number(self, action):
        if isinstance(self.action_space, Discrete):
            return int(action)
        return int(flatten(self.action_space, action).sum())

    def close(self):
        self.noticed("close")
        super().close()


def step_number(env):
    "The rule `see` for any Box: the number of the step in all places."
    return np.full(env.observation_space.shape, env.count, env.observation_space.dtype)


def sampled(env):
    "The rule `see` for any space: a sample, drawn by the generator of the environment."
    env.observation_space.seed(int(env.np_random.integers(2**31)))
    return env.observation_space.sample()


class OwnState(Scripted):
    "`Scripted` that tells its state, and takes it. `held` names more attributes that belong to it."

    held = ()

    def get_state(self):
        names = ("episode", "count", "last", *self.held)
        return {name: deepcopy(getattr(self, name)) for name in names} | {
            "generator": self.np_random.bit_generator.state
        }

    def set_state(self, state):
        values = dict(state)
        self.np_random.bit_generator.state = values.pop("generator")
        vars(self).update(deepcopy(values))


class InTensors(TensorEnv):
    """Single environments as one batch of tensors, with the infos that are numbers.

    >>> env = InTensors([lambda: Counting(tag=0), lambda: Counting(tag=1)])
    """

    def __init__(self, factories):
        self.envs = [make() for make in factories]
        self.n_envs = len(self.envs)
        self.observation_space = self.envs[0].observation_space
        self.action_space = self.envs[0].action_space

    def reset(self, seed):
        return self.stacked([env.reset(seed=seed + b)[0] for b, env in enumerate(self.envs)])

    def stacked(self, rows):
        return nested.map(lambda *xs: torch.as_tensor(np.stack(xs)), *rows)

    def step(self, act):
        actions = [nested.map(lambda x, b=b: x[b].numpy(), act) for b in range(self.n_envs)]
        answers = [env.step(action) for env, action in zip(self.envs, actions)]
        final, rewards, terminated, truncated, _ = zip(*answers)

        # Environments whose episode is over begin the next one in the same step.
        over = [term or trunc for term, trunc in zip(terminated, truncated)]
        obs = [env.reset()[0] if end else x for env, x, end in zip(self.envs, final, over)]
        return (
            self.stacked(obs),
            torch.tensor(rewards, dtype=torch.float32),
            torch.tensor(terminated),
            torch.tensor(truncated),
            self.stacked(final),
            {},
        )


class Shown(NamedTuple):
    "What an actor is shown, for the rules of `Acts`."

    obs: Any
    act: Any
    rew: Any
    fin: Any
    hx: Any
    stepno: Any
    virtual: Any


class Acts(Actor):
    """An actor by rules. `act` is one environment's action, or a function of what it is shown (`Shown`).

    >>> actor = Acts(1)
    >>> actor = Acts(lambda x: x.obs[..., 0].long() % 5, report=lambda x: {"at": x.stepno})

    Args:
        act: an action, nested as the space, or a function that gives actions `[T, B, ...]`.
        report: what is recorded, a function that gives a dict.
        remember: the next recurrent state, a function.
        before: called first; raises, waits, notes.
        uses_past: see `Actor`.
    """

    def __init__(self, act=0, report=None, remember=None, before=None, uses_past=True):
        super().__init__()
        self.act = act if callable(act) else nested.map(torch.as_tensor, act)
        self.report = report
        self.remember = remember
        self.before = before
        self.uses_past = uses_past

    def forward(self, obs, act, rew, fin, *, hx, stepno, virtual):
        shown = Shown(obs, act, rew, fin, hx, stepno, virtual)
        if self.before is not None:
            self.before(shown)
        return (
            self.act(shown) if callable(self.act) else self.repeated(fin.shape),
            () if self.remember is None else self.remember(shown),
            {} if self.report is None else self.report(shown),
        )

    def repeated(self, lead):
        return nested.map(lambda x: x.expand(*lead, *x.shape).clone(), self.act)
