"""What an environment begins to hold after a while: a replay keeps it; where a state lacks it, the run says what it lost and why."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from rollpipe import PPO, Critic, MLPPolicy, on_policy
from rollpipe.agents.checkpoint import load_checkpoint
from rollpipe.pipes.data.errors import DataError
from rollpipe.pipes.envs.kept import ActionLog, KeptActions
from rollpipe.runs import resumed, saved
from rollpipe.runs.folder import load_run, resume, start
from rollpipe.runs.training import train
from rollpipe.settings.config import make_config
from rollpipe.traces.history import History


class LateTask(gym.Env):
    """A walk on a line that gets a new attribute after 300 steps of its life, an iterator over numbers.

    What it holds decides what comes, over its episodes. (Other objects that come late: `test_keeping`.)
    """

    observation_space = Box(-5, 5, (2,), np.float32)
    action_space = Discrete(2)
    total = 0
    held = None

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        self.steps = 0
        return self.place.copy(), {}

    def step(self, action):
        self.total += 1
        self.steps += 1
        if self.total == 300:
            self.held = iter(self.np_random.normal(size=10_000).tolist())
        self.place = self.place * np.float32(0.9) + np.float32(0.1 if action else -0.1)
        if self.held is not None:
            self.place = (self.place + np.float32(next(self.held) / 20)).clip(-5, 5)
        return self.place.copy(), 1.0, False, self.steps == 30, {}


class LateTold(LateTask):
    "It tells its state, which is no plain data any more when the iterator has come."

    def get_state(self):
        names = ("place", "steps", "total", "held", "_np_random")
        return {name: getattr(self, name) for name in names}

    def set_state(self, state):
        vars(self).update(state)


class Tasks(LateTask):
    "It holds an iterator from the start, so that only a replay of all of its actions is exact."

    def __init__(self):
        self.held = iter(range(10_000))


KINDS = [LateTask, LateTold, Tasks]


@pytest.fixture(autouse=True, scope="module")
def registered():
    for kind in KINDS:
        gym.register(f"{kind.__name__}-v0", kind)
    yield
    for kind in KINDS:
        gym.registry.pop(f"{kind.__name__}-v0")


def config_of(kind, **given):
    options = dict(n_steps=64, n_envs=2, lanes=2, hidden=(4,))
    return make_config("ppo", f"{kind.__name__}-v0", options, seed=0, **given)


def weights(folder):
    state = load_run(folder).agent_state
    return [x.clone() for x in state["actor"].values()]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_the_weights_are_saved_and_the_run_says_what_is_lost(workers, tmp_path, caplog):
    "All updates are in the checkpoint, though none was saved in between."
    more = dict(workers=2, restarts=1) if workers else {}
    run = start(tmp_path / "run", config_of(LateTold, steps=1280, checkpoint_every=1000, **more))
    assert run.history.inexact is None
    train(run, progress=False)
    found = load_run(run.folder)
    assert found.counters["updates"] == 5 and found.stream is None
    for reason in (found.history.inexact, History.read(run.folder).inexact):
        assert "list_iterator" in reason and "LateTold" in reason and "environment" in reason
    assert found.history.inexact in caplog.text

    caplog.clear()
    again = resume(run.folder, steps=1536)
    assert "begins new episodes" in caplog.text
    train(again, progress=False)
    assert load_run(run.folder).counters["updates"] == 6


def exact_checkpoints(run):
    "Of each checkpoint, whether it has the state of the stream; where it lacks one, the history says so."
    train(run, progress=False)
    kept = [load_run(path) for path in sorted((run.folder / "checkpoints").iterdir())]
    is_exact = [x.stream is not None for x in kept]
    assert is_exact == [x.history.inexact is None for x in kept]
    return is_exact


@pytest.mark.slow
def test_the_last_exact_checkpoint_still_goes_on_exactly(tmp_path, caplog):
    config = config_of(LateTold, steps=1280, checkpoint_every=1, keep=20)
    assert exact_checkpoints(start(tmp_path / "run", config)) == [True] * 4 + [False]
    assert caplog.text.count("it will begin new episodes") == 1


def test_a_log_of_actions_that_is_too_long_is_dropped_and_the_run_says_so_once(
    tmp_path, caplog, monkeypatch
):
    "Of an environment, an update has 64 actions of a byte, and every 30th step a reset of 8 bytes."
    config = config_of(Tasks, steps=1280, checkpoint_every=1, keep=20)
    run = start(tmp_path / "run", config)
    assert run.history.kept == {"EnvStepper": "replay (all)"}
    monkeypatch.setattr(KeptActions, "MOST", 250)
    monkeypatch.setattr(ActionLog, "CHUNK", 50)
    assert exact_checkpoints(run) == [True] * 3 + [False] * 2
    assert caplog.text.count("it will begin new episodes") == 1
    reason = load_run(run.folder).history.inexact
    assert "environment 0 (Tasks-v0)" in reason and "it has taken too many actions" in reason

    again = resume(run.folder, steps=1536)
    assert "begins new episodes" in caplog.text
    train(again, progress=False)
    assert load_run(run.folder).counters["updates"] == 6


def test_a_replay_keeps_what_comes_late(tmp_path):
    whole = start(tmp_path / "whole", config_of(LateTask, steps=1536))
    train(whole, progress=False)
    run = start(tmp_path / "run", config_of(LateTask, steps=1280))
    train(run, progress=False)
    assert load_run(run.folder).history.inexact is None
    train(resume(run.folder, steps=1536), progress=False)
    for a, b in zip(weights(whole.folder), weights(run.folder)):
        np.testing.assert_array_equal(a, b)


def test_a_run_that_has_to_be_exact_keeps_its_last_exact_checkpoint(tmp_path):
    run = start(tmp_path / "run", config_of(LateTold, steps=1280, checkpoint_every=2, exact=True))
    with pytest.raises(DataError, match="leaf exact.*list_iterator"):
        train(run, progress=False)
    found = load_run(run.folder)
    assert found.stream is not None and found.history.inexact is None
    assert found.counters["updates"] == 4


@pytest.mark.parametrize("exact", [True, False])
def test_a_loop_of_ones_own(exact, tmp_path):
    env = "LateTold-v0"
    actor = MLPPolicy.for_env(env, seed=0, hidden=(4,))
    critic = Critic.for_env(env, seed=1, hidden=(4,))
    pipe = on_policy(env, actor, critic, n_steps=400, n_envs=1, seed=0)
    path = tmp_path / "loop.safetensors"
    agent = PPO(actor, critic)
    with resumed(path, pipe, agent, exact=exact) as (loader, _):
        agent.update(next(iter(loader)))
        if exact:
            with pytest.raises(DataError, match="list_iterator"):
                saved(path, loader, agent, 1)
            assert not path.exists()
        else:
            saved(path, loader, agent, 1)
            assert "list_iterator" in load_checkpoint(path).config["inexact"]
