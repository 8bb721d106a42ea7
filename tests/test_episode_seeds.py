"`episode_seeds`: an episode can be played again from its seed alone, with workers, from a saved run and in any way that states are kept."

import copy
from itertools import islice

import gymnasium as gym
import numpy as np
import pytest
import torch
from command_line import SMALL, rollpipe
from reference import assert_same
from test_keeping import Tensors, World

from rollpipe.layers import MLPPolicy
from rollpipe.pipes import DataLoader2, ProcessReading, rollouts
from rollpipe.pipes.data.errors import DataError, EnvError
from rollpipe.pipes.envs.factories import env_factories
from rollpipe.pipes.envs.keeping import Keeper
from rollpipe.pipes.envs.vector import env_batch
from rollpipe.pipes.keeping.random_states import reseeded


def stream(source="CartPole-v1", workers=0, n=12, **kwargs):
    torch.manual_seed(0)
    env = gym.make("CartPole-v1")
    actor = MLPPolicy(env.observation_space, env.action_space, hidden=(4,))
    pipe = rollouts(
        source, actor, n_envs=2, n_steps=16, lanes=2, seed=3, episode_seeds=True, **kwargs
    )
    with DataLoader2(pipe, reading_service=ProcessReading(workers) if workers else None) as loader:
        return list(islice(loader, n))


def test_an_environment_whose_reset_takes_no_options():
    class Plain(gym.Wrapper):
        def reset(self, seed=None):
            return self.env.reset(seed=seed)

    assert "episode_seed" in stream(lambda: Plain(gym.make("CartPole-v1")), n=2)[0].env


def episodes(batches):
    "The seed, the observations and the actions of each episode that ended."
    obs, act, fin, seeds = (
        np.concatenate([np.asarray(x) for x in parts])
        for parts in zip(
            *(
                (b.state.obs[:-1], b.state.act[1:], b.state.fin[1:], b.env["episode_seed"])
                for b in batches
            )
        )
    )
    for b in range(fin.shape[1]):
        ends = np.flatnonzero(fin[:, b])
        for begin, end in zip([0, *ends[:-1] + 1], ends):
            yield int(seeds[end, b]), obs[begin : end + 1, b], act[begin : end + 1, b]


def test_each_episode_of_a_stream_is_played_again_from_its_seed():
    found = list(episodes(stream()))
    env = gym.make("CartPole-v1")
    assert len(found) > 10 and len({seed for seed, *_ in found}) == len(found)
    for seed, obs, act in found:
        x, _ = env.reset(seed=seed)
        for t, a in enumerate(act):
            np.testing.assert_array_equal(x, obs[t])
            x, _, terminated, truncated, _ = env.step(a)
        assert terminated or truncated


def test_workers_give_the_same():
    for a, b in zip(stream(), stream(workers=2), strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("keeper", ["replay (episode)", "replay (all)"])
def test_a_kept_batch_goes_on_with_the_same_seeds(keeper):
    def make():
        return env_batch(
            env_factories(World, 2),
            np.random.SeedSequence(1),
            keeper=Keeper(keeper),
            episode_seeds=True,
        )

    def play(batch):
        return [batch.step(torch.full((1, 2), t % 2)) for t in range(200)]

    ours = make()
    other = make()
    ours.reset()
    assert sum(len(x.ended) for x in play(ours)) > 3
    state = ours.get_state()
    other._at = ours._at  # the rows belong to the caller, which keeps them itself
    other.set_state(state)
    found = play(ours)
    same = play(other)
    assert len({int(s) for x in found for s in x.info["episode_seed"] if s}) > 4
    for a, b in zip(found, same, strict=True):
        assert_same((a.state, a.info, a.ended), (b.state, b.info, b.ended))


def test_what_resets_its_environments_itself_is_refused():
    with pytest.raises(EnvError, match="a vector resets its environments itself.*SyncVectorEnv"):
        stream(vector="sync", n=1)
    with pytest.raises(DataError, match="episode_seeds"):
        rollouts(Tensors, None, episode_seeds=True)


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_the_same_seeds(tmp_path, capfd):
    def train(out, steps, *words):
        return rollpipe(
            "train",
            "ppo",
            "CartPole-v1",
            "--out",
            tmp_path / out,
            "--steps",
            steps,
            "--episode-seeds",
            *SMALL,
            *words,
        )

    assert train("a", 1024) == train("b", 512) == train("b", 1024, "--continue") == 0
    assert rollpipe("diff", tmp_path / "a", tmp_path / "b") == 0, capfd.readouterr()


def test_other_noise_gives_other_episodes():
    def make():
        return env_batch(
            env_factories(World, 2),
            np.random.SeedSequence(1),
            keeper=Keeper("replay (episode)"),
            episode_seeds=True,
        )

    def seeds(batch):
        batch._at = batch._at or ours._at
        return {
            int(s)
            for t in range(300)
            for s in batch.step(torch.full((1, 2), t % 2)).info.get("episode_seed", ())
            if s
        }

    ours = make()
    ours.reset()
    begun = {env.seed for env in ours.envs}
    state = ours.get_state()
    found = []
    for noise in (1, 2):
        batch = make()
        batch.set_state(reseeded(copy.deepcopy(state), np.random.SeedSequence(noise)))
        found.append(seeds(batch) - begun)
    assert (
        all(len(x) > 2 for x in found)
        and not found[0] & found[1]
        and not (seeds(ours) - begun) & (found[0] | found[1])
    )
