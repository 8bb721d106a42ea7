"Evaluation: whole episodes, no bias, modes restored, films."

import copy
import pickle
import random
from itertools import islice

import gymnasium as gym
import numpy as np
import pytest
import torch
from evaluation_cases import Constant, Luck
from toys import Acts, Scripted

from rollpipe.agents import A2C
from rollpipe.agents.evaluate import Evaluation, RandomActor, evaluate, quotas
from rollpipe.layers import GaussianPolicy, MLPPolicy
from rollpipe.pipes import EnvStepper, FragmentCollector, Lanes, ProcessReading, nested
from rollpipe.pipes.data.errors import ActorError, DataError, EnvError
from rollpipe.pipes.envs.watching import check_film
from rollpipe.pipes.graph.torchdata import DataLoader2
from rollpipe.pipes.keeping.random_states import GlobalRandomStates


def begin_lengths(env):
    env.length = int(env.np_random.choice([2, 41]))


def ends_lengths(env):
    "By a limit if the length is even."
    over = env.count == env.length
    return over and env.length % 2 == 1, over and env.length % 2 == 0


class Lengths(Scripted):
    "Lasts as long as its random generator says; pays 1 a step."

    observation_space = gym.spaces.Box(-1, 1, (1,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self):
        super().__init__(
            see=np.zeros(1, np.float32), pay=1.0, begin=begin_lengths, ends=ends_lengths
        )


def check_mode(shown):
    assert not torch.is_grad_enabled()


def Zero():
    return Acts(0, before=check_mode, uses_past=False)


def test_short_episodes_are_not_preferred():
    "Half of the episodes have 2 steps and half 41: first come, first served would find far fewer long ones."
    found = evaluate(Lengths, Zero(), 400, n_envs=40, seed=0)
    assert len(found.returns) == 400
    assert abs((found.lengths == 41).mean() - 0.5) < 0.1
    assert (found.returns == found.lengths).all() and (
        found.terminated == (found.lengths == 41)
    ).all()


@pytest.mark.parametrize("n, n_envs", [(1, None), (5, 2), (20, None), (3, 8)])
def test_exact_number(n, n_envs):
    assert len(evaluate(Lengths, Zero(), n, n_envs=n_envs).returns) == n
    assert quotas(n, n_envs or 8).sum() == n


def test_what_the_environments_themselves_saw():
    logs = []

    class Log(gym.Wrapper):
        def __init__(self):
            super().__init__(gym.make("Pendulum-v1", max_episode_steps=30))
            logs.append(self)
            self.episodes = []

        def reset(self, **kwargs):
            self.episodes.append([])
            return self.env.reset(**kwargs)

        def step(self, action):
            out = self.env.step(action)
            self.episodes[-1].append(out[1])
            return out

    found = evaluate(Log, GaussianPolicy.for_env("Pendulum-v1", seed=0), 5, n_envs=2)
    expected = [sum(rews) for log, quota in zip(logs, (3, 2)) for rews in log.episodes[:quota]]
    np.testing.assert_allclose(found.returns, expected, rtol=1e-5)


def test_seeds_are_fresh_unless_given():
    policy = GaussianPolicy.for_env("Pendulum-v1", seed=0)
    a, b, c, d = (evaluate("Pendulum-v1", policy, 2, seed=s).returns for s in (1, 1, None, None))
    assert (a == b).all() and (a != c).all() and (c != d).all()


def draws():
    return random.random(), np.random.rand(), float(torch.rand(()))


@pytest.mark.parametrize("seed", [1, None])
def test_global_generators_of_the_evaluation_are_its_own(seed):
    def returns(seed):
        with GlobalRandomStates():
            expected = draws()
        found = evaluate(Luck, Constant(), 3, seed=seed).returns
        assert draws() == expected  # and the next evaluation begins from other states
        return found

    a = returns(seed)
    b = returns(seed)
    other = returns(2)
    assert (a != other).all() and (a == b).all() == (seed is not None)
    with GlobalRandomStates():
        c = returns(seed)
    assert (returns(seed) == c).all() == (seed is not None)  # both begin from the same states


def test_deterministic_takes_the_mode():
    env = lambda: gym.make("Pendulum-v1")
    policy = GaussianPolicy.for_env("Pendulum-v1", seed=0)
    with torch.no_grad():
        for p in policy.head.parameters():
            p.zero_()
    seen = []

    class Spy(gym.ActionWrapper):
        def action(self, action):
            seen.append(abs(action).max())
            return action

    evaluate(lambda: Spy(env()), policy, 1, n_envs=1)
    assert max(seen) == 0
    evaluate(lambda: Spy(env()), policy, 1, n_envs=1, deterministic=False)
    assert max(seen) > 0


def test_modes_of_all_parts_are_restored_even_after_an_error():
    actor = Zero()
    actor.inner = torch.nn.Dropout()
    actor.frozen = torch.nn.BatchNorm1d(1).eval()
    for source in (Lengths, lambda: gym.make("CartPole-v1", max_episode_steps=10)):
        try:
            evaluate(source, actor, 1, max_steps=3)
        except EnvError:
            pass
        assert actor.training and actor.inner.training and not actor.frozen.training


def test_environments_are_closed():
    closed = []

    class Closing(Lengths):
        def close(self):
            closed.append(self)

    evaluate(Closing, Zero(), 3, n_envs=3)
    assert len(closed) >= 3


def test_what_cannot_be_filmed(tmp_path, monkeypatch):
    with pytest.raises(EnvError, match="cannot be filmed.*rgb_array.*None"):
        evaluate(lambda: gym.make("CartPole-v1"), Zero(), 1, record=tmp_path / "x.gif")
    with pytest.raises(DataError, match=".gif or .mp4"):
        check_film("x.png")
    monkeypatch.setitem(__import__("sys").modules, "imageio", None)
    with pytest.raises(ImportError, match=r"rollpipe\[video\]"):
        evaluate("CartPole-v1", Zero(), 1, record=tmp_path / "x.mp4")
    assert list(tmp_path.iterdir()) == []


def test_random_actor_is_uniform_and_seeded():
    actor = RandomActor(gym.spaces.Discrete(3, start=5), seed=0)
    fin = torch.zeros(1, 3000, dtype=torch.bool)
    act = actor.step(None, None, None, None, fin, hx=None, virtual=False)[0]
    assert act.unique(return_counts=True)[1].float().div(3000).sub(1 / 3).abs().max() < 0.05
    assert act.min() == 5 and act.max() == 7
    again = RandomActor(gym.spaces.Discrete(3, start=5), seed=0)
    assert torch.equal(act, again.step(None, None, None, None, fin, hx=None, virtual=False)[0])


@pytest.mark.parametrize(
    "space",
    [
        gym.spaces.Discrete(50),
        gym.spaces.Dict(a=gym.spaces.Discrete(50), b=gym.spaces.Box(-1, 1, (2,))),
    ],
)
def test_random_actions_of_lanes_differ_and_do_not_depend_on_the_workers(space, caplog):
    def env():
        return Scripted([(99, "trunc")], action_space=space, tell={}, tell_first={})

    def actions(service):
        stepper = EnvStepper(env, RandomActor(space), 2)
        pipe = Lanes(FragmentCollector(stepper, 6), 2, seed=0)
        with DataLoader2(pipe, reading_service=service) as loader:
            fragments = list(islice(loader, 6))
        return [
            (f.state.act if isinstance(space, gym.spaces.Discrete) else f.state.act["a"])[1:]
            for f in fragments
        ]

    serial = actions(None)
    assert not any(torch.equal(x, y) for i, x in enumerate(serial) for y in serial[:i])
    assert not any(torch.equal(x[:, 0], x[:, 1]) for x in serial)
    for n in (1, 2):
        assert all(map(torch.equal, serial, actions(ProcessReading(n))))
    assert not caplog.records  # nothing has changed while a lane collected


def test_a_random_actor_acts_without_a_pipeline():
    env = gym.make("FrozenLake-v1")
    assert {int(RandomActor.for_env(env).predict(env.reset(seed=0)[0])[0]) for _ in range(100)} == {
        0,
        1,
        2,
        3,
    }


def test_pendulum_by_chance():
    "A known number: uniform torques score about -1200."
    found = evaluate("Pendulum-v1", RandomActor(gym.spaces.Box(-2, 2, (1,)), seed=0), 20, seed=0)
    assert -1500 < found.mean < -900 and (found.lengths == 200).all() and not found.terminated.any()
    assert str(found).startswith("return -1") and isinstance(found, Evaluation)


@pytest.mark.parametrize("n", [0, -1])
def test_nothing_to_evaluate(n):
    with pytest.raises(DataError, match="n_episodes >= 1"):
        evaluate(Lengths, Zero(), n)


# --- episodes that are cut off


@pytest.mark.slow_but_one
@pytest.mark.parametrize("limit", [1, 2, 3, 5, 40, 41])
@pytest.mark.parametrize("n_envs", [1, 3])
def test_cut_off_is_the_limit_of_gymnasium_told_apart(limit, n_envs):
    "The same as a `TimeLimit` around the environment, which cannot say whose limit it was. An episode that ends just then is not cut off."
    found = evaluate(Lengths, Zero(), 20, n_envs=n_envs, seed=0, max_steps=limit, on_limit="cut")
    limited = evaluate(
        lambda: gym.wrappers.TimeLimit(Lengths(), limit), Zero(), 20, n_envs=n_envs, seed=0
    )
    for a, b in zip(found, limited):
        np.testing.assert_array_equal(a, b)
    ends = evaluate(
        lambda: WholeLength(Lengths()),
        Zero(),
        20,
        n_envs=n_envs,
        seed=0,
        max_steps=limit,
        on_limit="cut",
    )
    np.testing.assert_array_equal(
        found.cut_off, ends.returns > limit
    )  # each of these returns tells how long the episode would be
    assert found.lengths.max() <= limit and ("cut off" in str(found)) == found.cut_off.any()


class WholeLength(gym.Wrapper):
    "Pays the whole length of an episode in its first step."

    def reset(self, **kwargs):
        self.first = True
        return self.env.reset(**kwargs)

    def step(self, action):
        obs, _, *rest = self.env.step(action)
        rew = self.unwrapped.length * self.first
        self.first = False
        return obs, float(rew), *rest


def test_nothing_is_cut_off_by_default():
    assert not evaluate(Lengths, Zero(), 20, seed=0).cut_off.any()
    assert not evaluate(Lengths, Zero(), 20, seed=0, max_steps=41, on_limit="cut").cut_off.any()


def test_the_result_unpacks_as_before():
    found = evaluate(Lengths, Zero(), 20, seed=0, max_steps=9, on_limit="cut", trace=True)
    returns, lengths, terminated = found
    assert (
        (returns == found.returns).all()
        and (lengths == found.lengths).all()
        and (terminated == found.terminated).all()
    )
    for again in (pickle.loads(pickle.dumps(found)), copy.deepcopy(found)):
        assert (
            str(again) == str(found)
            and (again.cut_off == found.cut_off).all()
            and (again.trace.rew == found.trace.rew).all()
        )


@pytest.mark.parametrize(
    "change, match",
    [
        (
            dict(on_limit="stop"),
            "leaf on_limit: out of range. Expected 'raise' or 'cut', got 'stop'",
        ),
        (dict(max_steps=0), "max_steps >= 1"),
        (dict(max_steps=1e4), "an integer max_steps"),
        (dict(render="rgb_array"), "leaf render: out of range. Expected 'human'"),
        (dict(render="human", record="x.gif"), "'human' without record"),
    ],
)
def test_options_out_of_range(change, match):
    with pytest.raises(DataError, match=match):
        evaluate(Lengths, Zero(), 1, **change)


def test_what_cannot_be_cut_off():
    vec = gym.vector.SyncVectorEnv([Lengths] * 2, autoreset_mode="SameStep")
    with pytest.raises(
        EnvError,
        match="leaf on_limit: the episodes of a vector cannot be cut off. Expected on_limit='raise'",
    ):
        evaluate(vec, Zero(), 2, on_limit="cut")
    with pytest.raises(EnvError, match="on_limit='cut', or a larger max_steps"):
        evaluate(vec, Zero(), 2, max_steps=1)
    assert not vec.closed
    vec.close()


# --- single steps


class Telling(Acts):
    "Reports what it has seen, and completes its reports afterwards."

    def __init__(self):
        super().__init__(0, report=lambda x: dict(stepno=x.stepno, more=dict(obs=x.obs)))

    def complete(self, act, info):
        return {**info, "act": act}


@pytest.mark.parametrize(
    "source",
    [
        Lengths,
        *(
            (lambda mode=mode: gym.vector.SyncVectorEnv([Lengths] * 3, autoreset_mode=mode))
            for mode in ("SameStep", "NextStep", "Disabled")
        ),
    ],
)
def test_a_trace_holds_the_steps_of_the_episodes_and_no_others(source):
    env = source() if source is not Lengths else [Lengths() for _ in range(3)]
    found = evaluate(env, Telling(), 7, seed=3, trace=True)
    rew, fin, valid, actor = found.trace
    quota = quotas(7, 3)
    at = 0
    T = len(rew)
    assert rew.dtype == np.float32 and {x.dtype for x in (fin, valid)} == {np.dtype(bool)}
    assert rew.shape == fin.shape == valid.shape == (T, 3) and actor["act"].shape == actor[
        "stepno"
    ].shape == (T + 1, 3)
    assert actor["more"]["obs"].shape == (T + 1, 3, 1)
    assert not rew[~valid].any() and (fin & valid).sum() == 7
    for b in range(3):
        rows = np.flatnonzero(valid[:, b])
        episodes = np.split(rows, 1 + np.flatnonzero(fin[rows, b]))[:-1]
        for rows, ret, length in zip(episodes, found.returns[at:], found.lengths[at:]):
            assert rew[rows, b].sum() == ret and actor["stepno"][rows, b].tolist() == list(
                range(length)
            )
        assert len(episodes) == quota[b]
        at += quota[b]


def test_a_trace_costs_nothing_else():
    policy = GaussianPolicy.for_env("Pendulum-v1", seed=0)
    with_it, without = (
        evaluate("Pendulum-v1", policy, 3, seed=1, deterministic=False, trace=trace)
        for trace in (True, False)
    )
    assert (with_it.returns == without.returns).all() and without.trace is None
    np.testing.assert_allclose(with_it.trace.rew.sum(0), with_it.returns, rtol=1e-5)
    assert set(with_it.trace.actor) >= {"logp"} and all(
        len(x) == 201 for x in nested.leaves(with_it.trace.actor)
    )


def fading(length, truncated):
    "The observation is the number of the step; the episode ends after `length` steps."
    end = "trunc" if truncated else "term"
    return Scripted([(length, end)], pay=1.0, observation_space=gym.spaces.Box(0, 99, (1,)))


def judge():
    "Its value is 7 + 10 times the observation, and depends on a memory that counts the steps of an episode, from 1 on."

    def count(x):
        return 1 + (torch.zeros(1, x.fin.shape[1]) if x.hx is None else x.hx[0])

    return Acts(
        0,
        remember=lambda x: (count(x),),
        report=lambda x: dict(value=7 + 10 * x.obs[..., 0] + count(x) / 10),
    )


VECTORS = [None, "SameStep", "NextStep", "Disabled"]


@pytest.mark.parametrize("mode", VECTORS)
def test_a_trace_has_the_value_of_the_last_observation(mode):
    "So one can draw TD errors: it is a virtual reaction with the memory of that moment, and 0 where the episode terminated."
    plan = [(2, True), (4, False), (3, True), (1, True), (5, False)]
    envs = [lambda x=x: fading(*x) for x in plan]
    env = envs if mode is None else gym.vector.SyncVectorEnv(envs, autoreset_mode=mode)
    trace = evaluate(env, judge(), 5, n_envs=5 if mode is None else None, seed=0, trace=True).trace
    v = trace.actor["value"].numpy()
    for b, (length, truncated) in enumerate(plan):
        known = [7 + 10 * k + (k + 1) / 10 for k in range(length + 1)]
        np.testing.assert_allclose(
            v[: length + 1, b], [*known[:-1], known[-1] * truncated], rtol=1e-6
        )
    assert trace.valid.sum(0).tolist() == [length for length, _ in plan] and len(v) == 6


def test_the_value_of_the_last_observation_of_an_episode_that_was_cut_off():
    trace = evaluate(
        lambda: fading(9, False),
        judge(),
        4,
        n_envs=2,
        seed=0,
        max_steps=3,
        on_limit="cut",
        trace=True,
    ).trace
    np.testing.assert_allclose(
        trace.actor["value"][:, 0], [7.1, 17.2, 27.3, 7.1, 17.2, 27.3, 37.4], rtol=1e-6
    )


# --- a window


@pytest.fixture
def no_screen(monkeypatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    pygame = pytest.importorskip("pygame")
    yield pygame
    pygame.quit()


class Closing(gym.Wrapper):
    "The user closes the window in step `at`."

    def __init__(
        self,
        pygame,
        at,
        end=lambda pygame: pygame.event.post(pygame.event.Event(pygame.QUIT)),
        render_mode="human",
    ):
        super().__init__(gym.make("CartPole-v1", render_mode=render_mode))
        self.pygame = pygame
        self.at = at
        self.end = end
        self.n = 0
        self.unwrapped.metadata = dict(self.unwrapped.metadata, render_fps=10_000)

    def step(self, action):
        self.n += 1
        if self.n == self.at:
            self.end(self.pygame)
        return self.env.step(action)


def gone(pygame):
    pygame.display.quit()


@pytest.mark.parametrize("end", [None, gone])
@pytest.mark.parametrize("at", [1, 12, 25])
def test_closing_the_window_ends_the_evaluation(no_screen, at, end):
    policy = MLPPolicy.for_env("CartPole-v1", seed=0)
    whole = evaluate("CartPole-v1", policy, 9, n_envs=1, seed=0)
    found = evaluate(
        lambda: Closing(no_screen, at, *filter(None, [end])),
        policy,
        9,
        seed=0,
        render="human",
        trace=True,
    )
    n = int((whole.lengths.cumsum() <= (at if end is None else at - 1)).sum())
    assert (
        len(found.returns) == n < 9
        and (found.returns == whole.returns[:n]).all()
        and found.trace.rew.sum() == found.returns.sum()
    )
    assert str(found) == "no whole episode" if n == 0 else str(found).startswith("return")
    assert np.isnan(found.mean) == (n == 0) and not no_screen.display.get_init(), (
        "the window is gone"
    )


def test_a_window_that_stays_open(no_screen):
    policy = MLPPolicy.for_env("CartPole-v1", seed=0)
    found = evaluate(lambda: Closing(no_screen, -1), policy, 2, seed=0, render="human")
    assert (found.returns == evaluate("CartPole-v1", policy, 2, n_envs=1, seed=0).returns).all()


def test_your_own_window_stays(no_screen):
    mine = Closing(no_screen, 3)
    policy = MLPPolicy.for_env("CartPole-v1", seed=0)
    assert len(evaluate(mine, policy, 2, render="human").returns) == 0
    assert (
        no_screen.display.get_init() and len(evaluate(mine, policy, 1, render="human").returns) == 1
    )
    mine.close()


def test_an_id_is_made_with_its_window(no_screen):
    gym.register(
        "Hasty-v0", lambda render_mode=None: Closing(no_screen, 30, render_mode=render_mode)
    )
    try:
        found = evaluate(
            "Hasty-v0",
            MLPPolicy.for_env("CartPole-v1", seed=0),
            9,
            seed=0,
            render="human",
            on_limit="cut",
            max_steps=4,
        )
    finally:
        del gym.registry["Hasty-v0"]
    assert found.lengths.tolist() == [4] * 7 and found.cut_off.all()


def test_other_failures_are_told_while_a_window_is_open(no_screen):
    def fail(pygame):
        raise OSError("lost")

    with pytest.raises(EnvError, match=r"step\(\) raised OSError: lost"):
        evaluate(
            lambda: Closing(no_screen, 5, fail),
            MLPPolicy.for_env("CartPole-v1", seed=0),
            2,
            render="human",
        )


@pytest.mark.parametrize("close", [True, False])
@pytest.mark.parametrize(
    "options", [dict(render="human"), dict(record="x.gif"), dict(on_limit="cut")]
)
def test_what_is_refused_is_closed_by_whom_it_is_made(options, close, tmp_path, monkeypatch):
    closed = []
    monkeypatch.chdir(tmp_path)

    class Ours(Lengths):
        def close(self):
            closed.append(self)

    vector = lambda: gym.vector.SyncVectorEnv([Ours])
    with pytest.raises(EnvError):
        evaluate(
            Ours if "on_limit" not in options else vector,
            Zero(),
            1,
            n_envs=1,
            close=close,
            **options,
        )
    assert bool(closed) == close


@pytest.mark.parametrize(
    "call",
    [
        lambda actor, env: evaluate(actor, env),
        lambda actor, env: evaluate([actor], env),
        lambda actor, env: EnvStepper(actor, env),
        lambda actor, env: EnvStepper(actor, env.spec.id),
    ],
)
def test_arguments_in_the_wrong_order(call):
    with pytest.raises(
        EnvError,
        match=r"^a network stands where an environment belongs. Expected the environment first and then the "
        r"actor, as in `evaluate\(env, actor\)`, got MLPPolicy.$",
    ):
        call(MLPPolicy.for_env("CartPole-v1"), gym.make("CartPole-v1"))


def test_an_agent_is_no_actor():
    agent = A2C(MLPPolicy.for_env("CartPole-v1"))
    with pytest.raises(
        EnvError,
        match=r"^an agent stands where an environment belongs. Expected the environment first.*got A2C.$",
    ):
        evaluate(agent, "CartPole-v1")
    with pytest.raises(
        ActorError,
        match=r"an actor needs the method `reset`. Expected `agent.actor`, the actor of this agent, got A2C.$",
    ):
        evaluate("CartPole-v1", agent)
