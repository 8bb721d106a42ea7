"Games of Atari: lives, scores, presets and the state of the emulator, with the real games if the extra is there; and shared networks."

import json

import gymnasium as gym
import numpy as np
import pytest
import torch
from command_line import rollpipe

from rollpipe.agents import evaluate
from rollpipe.layers.policies import SharedPolicy
from rollpipe.pipes import EnvStepper, on_policy, replayed
from rollpipe.pipes.data.errors import DataError, EnvError
from rollpipe.pipes.data.fragment_ops import env_rewards
from rollpipe.pipes.envs.factories import EnvFactory, VectorFactory
from rollpipe.pipes.graph.edits import find
from rollpipe.runs.folder import agent_of, load_run
from rollpipe.settings.config import build, make_config


@pytest.fixture(scope="module")
def ale():
    module = pytest.importorskip("ale_py")
    _ = pytest.importorskip("cv2")
    module.ALEInterface.setLoggerMode(module.LoggerMode.Error)


def config(algorithm="ppo", env="ALE/Breakout-v5", **options):
    return make_config(algorithm, env, options, preset="auto")


@pytest.mark.parametrize("algorithm", ["ppo", "dqn"])
def test_training_plays_lives_and_evaluation_plays_games(algorithm, ale):
    found = config(
        algorithm,
        n_envs=2,
        **dict(capacity=500, warmup=100) if algorithm == "dqn" else dict(n_steps=8),
    )
    assert (
        found["env_kwargs"] == dict(atari="games", repeat_action_probability=0.0)
        and found["preset"] == "atari"
    )
    agent, pipe = build(found)
    (stepper,) = find(pipe, EnvStepper)
    assert stepper.env_kwargs["atari"] == "lives"
    batch = next(iter(pipe))
    obs = (batch.fresh if algorithm == "dqn" else batch).state.obs
    assert obs.dtype == torch.uint8 and obs.shape[1:] == (2, 4, 84, 84)
    assert agent.actor.trunk.n_in == 512 and (
        algorithm == "dqn" or isinstance(agent.actor, SharedPolicy) and agent.critic is None
    )


def test_a_life_of_breakout_goes_on_where_the_last_one_was_lost(ale):
    env, games = (
        EnvFactory("ALE/Breakout-v5", dict(atari=episodes, repeat_action_probability=0.0))()
        for episodes in ("lives", "games")
    )
    lives = []
    lengths = []
    scores = []
    for episode in range(6):
        _, info = env.reset(seed=3 if episode == 0 else None)
        lives.append(info["lives"])
        over = False
        n = 0
        score = 0.0
        while not over:
            _, reward, over, _, _ = env.step(n % 4)
            n = n + 1
            score = score + reward
        lengths.append(n)
        scores.append(score)
    assert lives == [5, 4, 3, 2, 1, 5]
    games.reset(seed=3)
    whole = sum(lengths[:5])
    over = False
    n = 0
    score = 0.0
    t = 0
    left = [*lengths]
    while not over:  # the same actions: the count begins anew with each life
        _, reward, over, _, _ = games.step(t)
        n = n + 1
        score = score + reward
        left[0] = left[0] - 1
        t = (t + 1) % 4
        if left[0] == 0:
            t = 0
            left = left[1:]
    assert (n, score) == (whole, sum(scores[:5]))


def test_scores_are_those_of_the_games_and_the_learner_sees_signs(ale):
    batches = on_policy(
        "ALE/SpaceInvaders-v5",
        RandomPolicy(),
        reward_scale="sign",
        n_envs=2,
        n_steps=200,
        seed=0,
        env_kwargs=dict(atari="lives", repeat_action_probability=0.0),
    )
    batch = next(iter(batches))
    assert set(batch.state.rew.unique().tolist()) == {0.0, 1.0} and env_rewards(batch).max() >= 5.0
    found = evaluate(
        "ALE/SpaceInvaders-v5", RandomPolicy(), 2, seed=0, env_kwargs=dict(atari="games")
    )
    assert (found.returns % 5 == 0).all() and found.returns.max() >= 30


def RandomPolicy():
    return SharedPolicy.for_env(
        "ALE/SpaceInvaders-v5", env_kwargs=dict(atari="games"), encoder=dict(images="conv"), seed=0
    )


def test_a_run_of_pong_is_exact_and_its_evaluation_has_real_scores(ale, tmp_path, capfd):
    words = [
        "ALE/Pong-v5",
        "--steps",
        32,
        "--n-envs",
        2,
        "--n-steps",
        8,
        "--eval-every",
        "1_000 steps",
        "--eval-episodes",
        1,
        "--exact",
        "--final-episodes",
        1,
        "--quiet",
        "--no-tensorboard",
        "--out",
        tmp_path / "run",
    ]
    assert rollpipe("train", "ppo", *words) == 0, capfd.readouterr().err
    history = load_run(tmp_path / "run").history
    assert (history.kept, history.inexact) == ({"EnvStepper": "ALE"}, None)
    scores = [
        json.loads(line)["mean"]
        for line in (tmp_path / "run" / "evaluations.jsonl").read_text().splitlines()
    ]
    assert all(-21 <= score < -10 for score in scores)


@pytest.mark.parametrize(
    "kwargs, told",
    [
        (dict(atari="life"), "leaf atari: .*unknown episodes of an Atari game"),
        (dict(atari="lives", frameskip=4), "Disable frame-skipping"),
    ],
)
def test_keywords_that_do_not_fit_are_refused(kwargs, told, ale):
    with pytest.raises(EnvError, match=told):
        EnvFactory("ALE/Pong-v5", kwargs)()


def test_vectors_of_games(ale):
    vec = VectorFactory("ALE/Pong-v5", 2, "sync", dict(atari="lives"))()
    assert vec.single_observation_space.shape == (4, 84, 84)
    vec.close()
    with pytest.raises(EnvError, match="such a vector takes no wrapper for games of Atari"):
        VectorFactory("ALE/Pong-v5", 2, "vector_entry_point", dict(atari="lives"))()


# -- signs of rewards and shared networks, without games ---------------------------------------------------------------


class Scores(gym.Env):
    "Rewards of 5, -3 and 0 in turn."

    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.zeros(2, np.float32), [5.0, -3.0, 0.0][(self.t - 1) % 3], self.t == 6, False, {}


def test_a_memory_keeps_signs():
    actor = SharedPolicy.for_env(Scores, seed=0)
    item = next(
        iter(
            replayed(
                Scores,
                actor,
                n_envs=1,
                n_steps=6,
                capacity=50,
                warmup=0,
                reward_scale="sign",
                seed=0,
            )
        )
    )
    assert (
        item.fresh.state.rew[1:, 0].tolist() == [1.0, -1.0, 0.0] * 2
        and env_rewards(item.fresh)[:, 0].tolist() == [5.0, -3.0, 0.0] * 2
    )
    assert set(next(item.samples).fragment.state.rew[1:].unique().tolist()) == {-1.0, 0.0, 1.0}
    with pytest.raises(DataError, match="reward_scale"):
        replayed(Scores, actor, reward_scale="learn")


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["a2c", "ppo", "vtrace"])
def test_a_shared_network_learns_resumes_and_is_evaluated(algorithm, tmp_path):
    words = [
        "--shared",
        "--hidden",
        16,
        "--n-envs",
        4,
        "--n-steps",
        16,
        "--quiet",
        "--no-tensorboard",
    ]
    for out, steps in (("whole", 256), ("halves", 128)):
        assert (
            rollpipe(
                "train", algorithm, "CartPole-v1", "--steps", steps, "--out", tmp_path / out, *words
            )
            == 0
        )
    assert rollpipe("train", "--resume", tmp_path / "halves", "--steps", 256, "--quiet") == 0
    weights = [agent_of(load_run(tmp_path / out)).actor.state_dict() for out in ("whole", "halves")]
    first = build(load_run(tmp_path / "whole").config)[0].actor.state_dict()
    for name, x in weights[0].items():
        assert torch.equal(x, weights[1][name]), name
    assert all(
        not torch.equal(weights[0][name], first[name])
        for name in ("value.weight", "trunk.hidden.0.weight")
    )
    assert rollpipe("evaluate", tmp_path / "whole", "--episodes", 2) == 0


@pytest.mark.parametrize(
    "option", [dict(critic_hidden=[8]), dict(critic_lr=0.1), dict(recurrent="gru")]
)
def test_an_option_of_a_critic_of_its_own_is_refused(option):
    with pytest.raises(
        DataError,
        match=f"leaf {next(iter(option))}: this option is of a critic apart from the policy",
    ):
        build(make_config("ppo", "CartPole-v1", dict(shared=True, **option)))
    assert "shared" not in make_config("trpo", "CartPole-v1")["options"]
