"A trained policy, used without a pipeline: `predict` against the pipeline, and exported files against `predict`."

import json
import re

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete

from rollpipe.agents import evaluate
from rollpipe.cli.main import main
from rollpipe.layers import (
    Actor,
    MLPPolicy,
    QPolicy,
    RecurrentPolicy,
)
from rollpipe.pipes.data.errors import ActorError, DataError
from rollpipe.runs import load_agent
from rollpipe.runs.export import FORMATS, PolicyFunction, export_policy

pytestmark = pytest.mark.usefixtures("functions_of_onnx")


NESTED = Dict(image=Box(0, 255, (2, 2), np.uint8), number=Discrete(4)), Discrete(3)


ACTORS = {
    "mlp": lambda env: MLPPolicy.for_env(env, hidden=(16,), seed=0),
    "gru": lambda env: RecurrentPolicy.for_env(env, memory=8, seed=0),
    "lstm": lambda env: RecurrentPolicy.for_env(env, memory=8, cell="lstm", past=True, seed=0),
}


def play(env, act, seed, n_steps=40):
    "Rewards of a loop as gymnasium's users write it."
    env = env()
    rewards = []
    obs, _ = env.reset(seed=seed)
    start, rew = True, 0.0
    for _ in range(n_steps):
        obs, rew, terminated, truncated, _ = env.step(act(obs, start, rew))
        rewards.append(rew)
        start = terminated or truncated
        if start:
            obs, _ = env.reset()
    return rewards


@pytest.mark.parametrize("name", ACTORS)
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_an_episode_by_predict_is_an_episode_of_the_evaluation(name, env_id):
    actor = ACTORS[name](env_id)
    env = gym.make(env_id)
    state = None
    total = 0.0
    starts = []

    class Seeded(gym.Wrapper):
        "Begins every episode as the loop below does."

        def reset(self, **kwargs):
            return self.env.reset(seed=3)

    obs, _ = env.reset(seed=3)
    rew, over = None, False
    while not over:
        action, state = actor.predict(obs, state, reward=rew)
        starts.append(int(state.stepno[0, 0]))
        obs, rew, terminated, truncated, _ = env.step(action)
        total = total + rew
        over = terminated or truncated
    assert starts == list(range(len(starts)))
    found = evaluate(lambda: Seeded(gym.make(env_id)), actor, 1, n_envs=1)
    np.testing.assert_allclose(
        (found.returns[0], found.lengths[0]), (total, len(starts)), rtol=1e-4
    )


class NoSpaces(Actor):
    def forward(self, obs, act, rew, fin, *, hx, stepno, virtual):
        return fin.long(), (), {}


@pytest.mark.parametrize(
    "call, error, text",
    [
        (lambda: NoSpaces().predict(0), ActorError, "NoSpaces does not know its environment"),
        (lambda: PolicyFunction(NoSpaces()), ActorError, "NoSpaces does not know its environment"),
        (
            lambda: ACTORS["mlp"]("CartPole-v1").predict(np.zeros(3)),
            DataError,
            r"leaf obs: wrong shape. Expected float32 \[4\]",
        ),
        (
            lambda: ACTORS["mlp"]("CartPole-v1").predict(np.zeros((2, 3))),
            DataError,
            r"leaf obs: wrong shape. Expected float32 \[2, 4\]",
        ),
        (
            lambda: ACTORS["mlp"]("CartPole-v1").predict([0.0, 0.0, 0.0, 0.0]),
            DataError,
            r"leaf obs: a list stands where an array belongs. Expected float32 \[4\]: wrap it in np.array, got \[0.0",
        ),
        (
            lambda: ACTORS["mlp"]("CartPole-v1").predict([[0.0, 0.0, 0.0, 0.0]]),
            DataError,
            "a list stands .* wrap it in np.array",
        ),
        (
            lambda: ACTORS["mlp"]("CartPole-v1").predict((np.zeros(4), {})),
            DataError,
            "as by `obs, info = env.reset",
        ),
        (lambda: ACTORS["mlp"](NESTED).predict({}), DataError, "obs has the wrong structure"),
        (
            lambda: QPolicy.for_env("Taxi-v4").predict(500),
            DataError,
            "leaf obs: this observation has no action.*got 500",
        ),
        (
            lambda: ACTORS["mlp"]("CartPole-v1").predict(np.full(4, np.nan)),
            DataError,
            "leaf obs: this observation has no action",
        ),
        (
            lambda: ACTORS["mlp"]((Box(-np.inf, np.inf, (2,), np.float64), Discrete(3))).predict(
                np.array([[0, 0], [0, 1e39]])
            ),
            DataError,
            r"leaf obs: this observation has no action.*which float32 can hold, got \[ 0. inf\]",
        ),
        (
            lambda: ACTORS["mlp"]("CartPole-v1").predict(np.zeros(4), episode_start=[True, False]),
            DataError,
            "episode_start",
        ),
    ],
)
def test_what_cannot_be_right_is_refused(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_an_actor_that_looks_at_the_last_reward_asks_for_it():
    actor = ACTORS["lstm"]("CartPole-v1")
    _, state = actor.predict(np.zeros(4))
    with pytest.raises(ActorError, match="reward"):
        actor.predict(np.zeros(4), state)
    actor.predict(np.zeros(4), state, episode_start=True)


THREE = np.zeros((3, 4))


@pytest.mark.parametrize("name", ["mlp", "lstm"])
@pytest.mark.parametrize(
    "obs, reward, text",
    [
        (
            THREE,
            [1.0, 2.0],
            r"^leaf reward: this is no reward. Expected a finite number, or numbers \[3\], got \[1.0, 2.0\]",
        ),
        (THREE, np.zeros((3, 1)), r"leaf reward: .*got float64 \[3, 1\]"),
        (THREE, np.zeros((1, 3)), r"leaf reward: .*got float64 \[1, 3\]"),
        (THREE, torch.zeros(4), r"leaf reward: .*got float32 \[4\]"),
        (THREE[0], np.zeros(2), r"leaf reward: .*or numbers \[1\], got float64 \[2\]"),
        (THREE, "much", "leaf reward: .*got 'much'"),
        (THREE, [None, 1, 2], r"leaf reward: .*got \[None, 1, 2\]"),
        (
            THREE,
            [0, np.nan, 1],
            r"^environment 1, leaf reward: non-finite value. Expected finite numbers, got nan",
        ),
        (
            THREE,
            np.array([0, 1, -np.inf]),
            r"^environment 2, leaf reward: non-finite value.*got -inf",
        ),
        (THREE[0], float("nan"), r"^environment 0, leaf reward: non-finite value.*got nan"),
    ],
)
def test_a_reward_that_cannot_be_right(name, obs, reward, text):
    actor = ACTORS[name]("CartPole-v1")
    _, state = actor.predict(obs)
    with pytest.raises(DataError, match=text):
        actor.predict(obs, state, reward=reward)


@pytest.mark.parametrize(
    "reward",
    [
        1,
        1.0,
        True,
        np.float64(1),
        [1, 1, 1],
        np.ones(3),
        torch.ones(3, dtype=torch.float64),
        np.ones(()),
    ],
)
def test_a_reward_in_any_form(reward):
    actor = ACTORS["lstm"]("CartPole-v1")
    _, state = actor.predict(THREE)
    found, wanted = (
        actor.predict(THREE, state, reward=x)[1].hx for x in (reward, np.float32([1, 1, 1]))
    )
    for x, y in zip(found, wanted):
        assert torch.equal(x, y)


@pytest.mark.parametrize("name", ACTORS)
@pytest.mark.parametrize(
    "before, now, text",
    [
        (
            THREE,
            THREE[:2],
            "leaf state: .*Expected the state of 2 environments, as in obs, got that of 3",
        ),
        (
            THREE[:2],
            THREE,
            "leaf state: .*Expected the state of 3 environments, as in obs, got that of 2",
        ),
        (
            THREE,
            THREE[0],
            "leaf state: .*Expected the state of 1 environment, as in obs, got that of 3",
        ),
        (
            THREE[0],
            THREE,
            "leaf state: .*Expected the state of 3 environments, as in obs, got that of 1",
        ),
    ],
)
@pytest.mark.parametrize("begins", [False, True])
def test_a_state_of_another_number_of_environments(name, before, now, text, begins):
    actor = ACTORS[name]("CartPole-v1")
    _, state = actor.predict(before)
    with pytest.raises(DataError, match=text):
        actor.predict(now, state, reward=0, episode_start=begins)


@pytest.mark.parametrize("state", [(), (1, 2, 3), "state", torch.zeros(1, 2, 8)])
def test_a_state_that_is_none(state):
    with pytest.raises(
        DataError, match="leaf state: .*Expected what the call for the step before returned, got"
    ):
        ACTORS["gru"]("CartPole-v1").predict(THREE, state)


class Told(Actor):
    "Acts on what a file is not told: `look(rew, fin, stepno)`."

    observation_space = gym.spaces.Box(-1, 1, (3,))
    action_space = gym.spaces.Discrete(2)
    uses_past = False

    def __init__(self, look):
        super().__init__()
        self.look = look

    def forward(self, obs, act, rew, fin, *, hx, stepno, virtual):
        return (obs[..., 0] * 0 + self.look(rew, fin, stepno) > 0).long(), (), {}


@pytest.mark.parametrize(
    "look, t",
    [
        (lambda rew, fin, stepno: stepno >= 100, 2),
        (lambda rew, fin, stepno: (stepno == 0).float(), 1),
        (lambda rew, fin, stepno: rew, 1),
        (lambda rew, fin, stepno: ~fin, 1),
    ],
)
def test_an_actor_that_looks_at_what_a_file_is_not_told_is_refused(look, t, tmp_path):
    with pytest.raises(DataError, match=f"the exported policy answers differently at step {t}"):
        export_policy(Told(look), tmp_path / "policy", "torchscript")
    assert not list(tmp_path.iterdir())


class Spaced(Actor):
    "An actor of spaces whose keys differ only in a character that no name in a file may have."

    uses_past = False

    def __init__(self, obs=("a b", "a_b"), act=("x", "y"), hx=("h", "g")):
        super().__init__()
        self.hx = hx
        number = gym.spaces.Box(-1, 1, (2,))
        self.observation_space, self.action_space = (
            gym.spaces.Dict({k: number for k in keys}) for keys in (obs, act)
        )

    def forward(self, obs, act, rew, fin, *, hx, stepno, virtual):
        one, two = obs.values()
        return (
            dict(zip(self.action_space, (one, two))),
            {k: fin.new_zeros(1, fin.shape[1], dtype=torch.float32) for k in self.hx},
            {},
        )


@pytest.mark.slow_but_one
@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize(
    "keys, name, one, other",
    [
        (dict(), "obs_a_b", "obs['a b']", "obs['a_b']"),
        (dict(obs=("p", "q"), act=("u-1", "u.1")), "act_u_1", "act['u-1']", "act['u.1']"),
        (dict(obs=("p", "q"), hx=("?", "")), "hx", "hx['']", "hx['?']"),
    ],
)
def test_two_leaves_of_one_name(to, keys, name, one, other, tmp_path):
    with pytest.raises(
        DataError,
        match=re.escape(f"leaf {other}: in a file ")
        + ".*"
        + re.escape(f"got {name}, the name of {one} too"),
    ):
        export_policy(Spaced(**keys), tmp_path / "policy", to)
    assert not list(tmp_path.iterdir())
    if not keys:
        assert export_policy(Spaced(("a b", "a_c")), tmp_path / "policy", to)


def test_from_a_run_to_a_loop_without_rollpipe(tmp_path, capsys):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    words = (
        "train ppo CartPole-v1 --steps 512 --n-envs 4 --n-steps 32 --quiet --no-tensorboard --out"
    )
    assert main([*words.split(), str(tmp_path / "run")]) == 0
    capsys.readouterr()
    assert main(["export", str(tmp_path / "run")]) == 0
    assert (
        capsys.readouterr().out
        == f"{tmp_path}/run/policy.onnx: obs -> act (compared with the policy)\n"
    )
    session = onnxruntime.InferenceSession(tmp_path / "run" / "policy.onnx")
    note = json.loads(session.get_modelmeta().custom_metadata_map["rollpipe"])
    assert (note["env"], note["inputs"]) == ("CartPole-v1", {"obs": ["float32", 2, 4]})
    assert (note["seed"], note["steps"], note["updates"]) == (0, 512, 4)
    act = lambda obs, *_: int(session.run(None, {"obs": obs[None]})[0][0])
    actor = load_agent(tmp_path / "run").actor
    make = lambda: gym.make("CartPole-v1")
    assert play(make, act, seed=1, n_steps=200) == play(
        make, lambda obs, *_: actor.predict(obs)[0], seed=1, n_steps=200
    )


@pytest.mark.parametrize(
    "words, text",
    [
        ("export RUNN", "there is no such run"),
        ("export RUN --out RUN/no/policy.pt2 --to pt2", "there is no such folder"),
    ],
)
def test_export_of_what_is_not_there(words, text, tmp_path, capsys):
    train = (
        "train ppo CartPole-v1 --steps 64 --n-envs 2 --n-steps 32 --quiet --no-tensorboard --out"
    )
    assert main([*train.split(), str(tmp_path / "RUN")]) == 0
    assert main(words.replace("RUN", str(tmp_path / "RUN")).split()) == 2
    assert text in capsys.readouterr().err


def test_a_torch_that_cannot_write_onnx_is_named_with_another_format(tmp_path, monkeypatch):
    pytest.importorskip("onnxscript")
    actor = MLPPolicy.for_env("CartPole-v1", hidden=(4,), seed=0)
    monkeypatch.setattr(torch, "__version__", "2.6.0+cpu")
    with pytest.raises(DataError, match="Expected torch 2.7 or later, .*torchscript, got 2.6.0"):
        export_policy(actor, tmp_path / "policy.onnx")
    export_policy(actor, tmp_path / "policy.pt", "torchscript")
    assert (tmp_path / "policy.pt").is_file() and not (tmp_path / "policy.onnx").exists()
