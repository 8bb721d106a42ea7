"""Simulators in JAX as environments of tensors: beside the same simulation by hand, and kept exactly."""

from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from rollpipe import Critic, MLPPolicy, on_policy
from rollpipe.pipes.graph.pipe import restore_stream, stream_state
from rollpipe.pipes.passes import keep_as, keep_environments
from rollpipe.pipes.tensors.jax_env import BraxEnv, GymnaxEnv, JaxEnv

# Imported by the tests alone: a process that has imported JAX should not fork any more.
pytestmark = pytest.mark.skipif(find_spec("gymnax") is None, reason="gymnax is not installed")
LIMIT = 12


cartpoles = partial(GymnaxEnv, "CartPole-v1", max_steps=LIMIT)


def by_hand(seed, n_envs, actions):
    """`(obs, rew, terminated, truncated, last_obs)` of each step, one environment after the other, not compiled.

    `actions` are int [T, n_envs].
    """
    import gymnax
    import jax

    env, params = gymnax.make("CartPole-v1")
    params = params.replace(max_steps_in_episode=10**6)
    columns = []
    for b, key in enumerate(jax.random.split(jax.random.PRNGKey(seed), n_envs)):
        key, of_reset = jax.random.split(key)
        _, state = env.reset_env(of_reset, params)
        n_steps = 0
        rows = []
        for act in actions[:, b]:
            key, of_step, of_reset = jax.random.split(key, 3)
            last, state, rew, terminated, _ = env.step_env(of_step, state, int(act), params)
            n_steps += 1
            truncated = n_steps >= LIMIT
            obs = last
            if terminated or truncated:
                obs, state = env.reset_env(of_reset, params)
                n_steps = 0
            rows.append([np.asarray(x) for x in (obs, rew, terminated, truncated, last)])
        columns.append(rows)
    return columns


def test_steps_are_those_of_the_simulator_by_hand():
    actions = np.random.default_rng(0).integers(2, size=(40, 3))
    env = cartpoles(n_envs=3)
    env.reset(seed=5)
    expected = by_hand(5, 3, actions)
    n_ends = np.zeros(2, int)
    for t, act in enumerate(actions):
        obs, rew, terminated, truncated, last, _ = env.step(torch.from_numpy(act))
        n_ends += [int(terminated.sum()), int(truncated.sum())]
        for b in range(3):
            for x, y in zip((obs, rew, terminated, truncated, last), expected[b][t], strict=True):
                np.testing.assert_allclose(x[b].numpy(), y, rtol=1e-5, atol=1e-6)
    assert n_ends.min() > 0


def pipeline(**options):
    actor = MLPPolicy.for_env(cartpoles(), seed=0)
    critic = Critic.for_env(cartpoles(), seed=1)
    return on_policy(cartpoles, actor, critic, n_envs=3, n_steps=10, seed=0, **options)


def test_a_stream_goes_on_exactly():
    pipe = pipeline()
    keepers = keep_environments(pipe)
    assert [keeper.name for keeper in keepers.values()] == ["own"]
    batches = iter(pipe)
    for _ in range(2):
        next(batches)
    state = stream_state(pipe)
    expected = next(batches)

    again = pipeline()
    keep_as(again, ["own"])
    restore_stream(again, state)
    batch = next(iter(again))
    assert torch.equal(batch.state.obs, expected.state.obs)
    assert torch.equal(batch.state.act, expected.state.act)
    assert torch.equal(batch.adv, expected.adv)


def test_each_lane_has_seeds_of_its_own():
    batch = next(iter(pipeline(lanes=2)))
    first = batch.state.obs[0]
    assert batch.lane.tolist() == [0, 0, 0, 1, 1, 1]
    assert len(first.unique(dim=0)) == 6


def test_a_truncated_episode_keeps_its_last_observation():
    truncated = []
    for _, fragment in zip(range(3), pipeline()):
        over = fragment.state.fin[1:] & ~fragment.term[1:]
        truncated.append(int(over.sum()))
        assert len(fragment.final.b) == truncated[-1]
    assert sum(truncated) > 0


class BraxState(NamedTuple):
    "The names that a state has in Brax."

    data: Any
    obs: Any
    reward: Any
    done: Any
    metrics: dict


class WithTypedKey:
    "A simulator whose state has a key of the new kind."

    action_size = 1

    def reset(self, key):
        import jax

        noise = jax.random.normal(jax.random.key(0), (1,))
        return BraxState(jax.random.key(3), noise, jax.numpy.float32(0), jax.numpy.float32(0), {})

    def step(self, state, act):
        import jax

        key, draw = jax.random.split(state.data)
        obs = jax.random.normal(draw, (1,))
        return state._replace(data=key, obs=obs, reward=act[0])


def test_a_typed_key_in_the_state_is_kept():
    env = BraxEnv(WithTypedKey, n_envs=2)
    env.reset(seed=0)
    act = torch.zeros(2, 1)
    env.step(act)
    state = env.get_state()
    expected = env.step(act)[0].clone()
    other = BraxEnv(WithTypedKey, n_envs=2)
    other.set_state(state)
    assert torch.equal(other.step(act)[0], expected)


def test_actions_may_be_overwritten_after_the_step():
    env = BraxEnv(WithTypedKey, n_envs=2)
    env.reset(seed=0)
    act = torch.ones(2, 1)
    rew = env.step(act)[1]
    act.zero_()
    assert rew.tolist() == [1, 1]


def test_the_spaces_are_those_of_gymnax():
    env = cartpoles()
    assert isinstance(env, JaxEnv) and env.action_space.n == 2
    assert env.observation_space.shape == (4,)
