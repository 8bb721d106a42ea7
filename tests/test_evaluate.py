"Evaluation: whole episodes, no bias, modes restored, films."
import gymnasium as gym
import numpy as np
import pytest
import torch
from PIL import Image

from rollpipe.agents.evaluate import Evaluation, RandomActor, check_film, evaluate, quotas
from rollpipe.layers import Actor, GaussianPolicy, MLPPolicy
from rollpipe.pipes.errors import DataError, EnvError


class Lengths(gym.Env):
    "Lasts as long as its random generator says; pays 1 a step; ends by a limit if even."
    observation_space, action_space = gym.spaces.Box(-1, 1, (1,)), gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = self.length = int(self.np_random.choice([2, 41]))
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.left -= 1
        over = self.left == 0
        return np.zeros(1, np.float32), 1., over and self.length % 2 == 1, over and self.length % 2 == 0, {}


class Zero(Actor):
    def forward(self, obs, act, rew, fin, *, hx, stepno, virtual):
        assert not self.training and not torch.is_grad_enabled()
        return torch.zeros(fin.shape, dtype=torch.int64), (), {}


def test_short_episodes_are_not_preferred():
    "Half of the episodes have 2 steps and half 41: first come, first served would find far fewer long ones."
    found = evaluate(Lengths, Zero(), 400, n_envs=40, seed=0)
    assert len(found.returns) == 400
    assert abs((found.lengths == 41).mean() - .5) < .1
    assert (found.returns == found.lengths).all() and (found.terminated == (found.lengths == 41)).all()


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


def test_deterministic_takes_the_mode():
    env = lambda: gym.make("Pendulum-v1")
    policy = GaussianPolicy.for_env("Pendulum-v1", seed=0)
    with torch.no_grad():
        for p in policy.head.parameters(): p.zero_()
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
        try: evaluate(source, actor, 1, max_steps=3)
        except EnvError: pass
        assert actor.training and actor.inner.training and not actor.frozen.training


def test_endless_episode():
    with pytest.raises(EnvError, match="environment 0: the episode does not end.*max_steps, got 5 steps"):
        evaluate("Pendulum-v1", RandomActor(gym.spaces.Box(-2, 2, (1,))), 1, max_steps=5)


def test_environments_are_closed():
    closed = []
    class Closing(Lengths):
        def close(self): closed.append(self)
    evaluate(Closing, Zero(), 3, n_envs=3)
    assert len(closed) >= 3


def test_film_of_one_episode(tmp_path):
    policy = MLPPolicy.for_env("CartPole-v1", seed=0)
    found = evaluate("CartPole-v1", policy, 3, n_envs=2, seed=0, record=tmp_path/"x.gif")
    with Image.open(tmp_path/"x.gif") as film:
        assert film.n_frames <= found.lengths[0] + 1  # frames that are the same may be joined
        assert film.n_frames >= found.lengths[0]//2 and film.size == (600, 400)
    assert (found.returns == evaluate("CartPole-v1", policy, 3, n_envs=2, seed=0).returns).all()


def test_what_cannot_be_filmed(tmp_path, monkeypatch):
    with pytest.raises(EnvError, match="cannot be filmed.*rgb_array.*None"):
        evaluate(lambda: gym.make("CartPole-v1"), Zero(), 1, record=tmp_path/"x.gif")
    with pytest.raises(DataError, match=".gif or .mp4"): check_film("x.png")
    monkeypatch.setitem(__import__("sys").modules, "imageio", None)
    with pytest.raises(ImportError, match=r"rollpipe\[video\]"):
        evaluate("CartPole-v1", Zero(), 1, record=tmp_path/"x.mp4")
    assert list(tmp_path.iterdir()) == []


def test_random_actor_is_uniform_and_seeded():
    actor = RandomActor(gym.spaces.Discrete(3, start=5), seed=0)
    fin = torch.zeros(1, 3000, dtype=torch.bool)
    act = actor.step(None, None, None, None, fin, hx=None, virtual=False)[0]
    assert act.unique(return_counts=True)[1].float().div(3000).sub(1/3).abs().max() < .05
    assert act.min() == 5 and act.max() == 7
    again = RandomActor(gym.spaces.Discrete(3, start=5), seed=0)
    assert torch.equal(act, again.step(None, None, None, None, fin, hx=None, virtual=False)[0])


def test_pendulum_by_chance():
    "A known number: uniform torques score about -1200."
    found = evaluate("Pendulum-v1", RandomActor(gym.spaces.Box(-2, 2, (1,)), seed=0), 20, seed=0)
    assert -1500 < found.mean < -900 and (found.lengths == 200).all() and not found.terminated.any()
    assert str(found).startswith("return -1") and isinstance(found, Evaluation)


@pytest.mark.parametrize("n", [0, -1])
def test_nothing_to_evaluate(n):
    with pytest.raises(DataError, match="n_episodes >= 1"): evaluate(Lengths, Zero(), n)
