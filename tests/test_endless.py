"Environments without an end: a limit of steps for training and evaluation, and evaluations that cut, say so and go on."

import json
import sys

import gymnasium as gym
import numpy as np
import pytest
from command_line import rollpipe

from rollpipe.agents.evaluate import RandomActor, evaluate, policy_of
from rollpipe.pipes import on_policy
from rollpipe.pipes.data.errors import DataError, EnvError
from rollpipe.pipes.envs.factories import EnvFactory
from rollpipe.pipes.envs.wrappers import wrappers_in
from rollpipe.runs import load_agent
from rollpipe.runs.logs import read_evaluations, read_metrics
from rollpipe.settings import config as settings
from rollpipe.settings.config import build, make_config

QUIET = "--quiet --no-tensorboard".split()
SMALL = "--steps 128 --n-envs 2 --n-steps 32 --hidden 8".split()


class Endless(gym.Env):
    "Each step pays 1. The observation is the number of the step, and the second number that of the episode."

    observation_space = gym.spaces.Box(0, np.inf, (2,))
    action_space = gym.spaces.Discrete(2)
    metadata = dict(render_modes=["rgb_array"], render_fps=25)

    def __init__(self, render_mode=None):
        self.render_mode = render_mode
        self.episode = -1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode += 1
        self.t = 0
        return self.observe(), {}

    def observe(self):
        return np.array([self.t, self.episode], np.float32)

    def step(self, action):
        self.t += 1
        return self.observe(), 1.0, False, False, {}

    def render(self):
        return np.full((8, 8, 3), self.t % 256, np.uint8)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    gym.register("Endless-v0", Endless)
    monkeypatch.setattr(settings, "LONGEST", 50)
    yield
    del gym.registry["Endless-v0"]


def train(folder, *words):
    return rollpipe("train", "trpo", "Endless-v0", "--out", folder, *SMALL, *QUIET, *words)


# --- a run whose evaluations would not end


@pytest.mark.slow_but_one
@pytest.mark.parametrize("every", ["1", "64 steps"])
def test_a_run_goes_on_when_its_evaluations_do_not_end(tmp_path, capsys, caplog, every):
    run = tmp_path / "run"
    words = ["--eval-every", every, "--eval-episodes", 3, "--final-episodes", 2]
    assert train(run, *words) == 0
    out = capsys.readouterr().out
    assert "best evaluation: return 50.0 (mean of 3 episodes, 3 of which were cut off)" in out
    warnings = [r.getMessage() for r in caplog.records if "cut off" in r.getMessage()]
    assert len(warnings) == 1
    assert "3 of 3 episodes were cut off after 50 steps" in warnings[0]
    assert "--max-episode-steps" in warnings[0]
    found = read_metrics(run)
    assert np.nanmax(found["eval_cut_off"]) == 3 and np.nanmax(found["eval_return_mean"]) == 50
    if every != "1":
        for record in read_evaluations(run):
            assert record["lengths"] == [50] * len(record["returns"])
            assert record["cut_off"] == len(record["returns"])
    assert rollpipe("train", "--resume", run, "--steps", 256, *QUIET) == 0
    assert read_metrics(run)["steps"][-1] == 256


def test_the_limit_of_a_run_holds_in_training_and_evaluation(tmp_path, capsys, caplog):
    run = tmp_path / "run"
    words = ["--max-episode-steps", 7, "--eval-every", "64 steps", "--final-episodes", 2]
    assert train(run, *words) == 0
    assert "cut off" not in caplog.text + capsys.readouterr().out
    assert {n for r in read_evaluations(run) for n in r["lengths"]} == {7}
    assert read_metrics(run)["length_mean"][1] == 7
    assert rollpipe("evaluate", run, "--episodes", 3) == 0
    assert "mean length 7.0" in capsys.readouterr().out
    assert rollpipe("evaluate", run, "--episodes", 3, "--max-episode-steps", 9) == 0
    assert "mean length 9.0" in capsys.readouterr().out
    config = json.loads((run / "config.json").read_text())
    assert config["max_episode_steps"] == 7
    assert evaluate("Endless-v0", load_agent(run).actor, 1, max_steps=9).cut_off.all()


def test_an_evaluation_of_a_run_is_cut_and_says_so(tmp_path, capsys, monkeypatch):
    run = tmp_path / "run"
    assert train(run) == 0
    assert rollpipe("evaluate", run, "--episodes", 3) == 0
    assert "mean length 50.0; 3 cut off, with partial returns" in capsys.readouterr().out
    for words, length in ((), 50), (("--max-episode-steps", 4), 4):
        film = tmp_path / "film.gif"
        assert rollpipe("watch", run, "--record", film, *words) == 0
        assert f"episode 1: return {length}.0, {length} steps" in capsys.readouterr().out
    for name in ("export_policy", "learning_curve"):
        monkeypatch.delattr(sys.modules["rollpipe.runs.pack"], name)  # they are left out
    assert rollpipe("pack", run, "--out", tmp_path / "pack", "--episodes", 2) == 0
    assert "2 cut off, with partial returns" in (tmp_path / "pack" / "README.md").read_text()


def test_films_of_an_endless_environment_end(tmp_path, monkeypatch, caplog):
    from PIL import Image

    monkeypatch.setattr(
        "rollpipe.runs.evaluations.importlib.util.find_spec", lambda name: None
    )  # .gif, which needs no extra
    run = tmp_path / "run"
    assert train(run, "--video-every", 2) == 0
    assert "no more films" not in caplog.text
    with Image.open(run / "videos" / "update-000002.gif") as film:
        assert film.n_frames == 51


# --- where the limit comes from


def test_a_longer_limit_replaces_that_of_the_environment():
    gym.register("Ends-v0", Endless, max_episode_steps=5)
    try:
        for given, length in (None, 5), (3, 3), (60, 60):
            config = make_config("trpo", "Ends-v0", {"hidden": (8,)}, max_episode_steps=given)
            agent, pipe = build({**config, "options": {**config["options"], "n_steps": 64}})
            batch = next(iter(pipe))
            assert batch.state.stepno.max() == length - 1 + (length > 64)
            found = evaluate(actor=policy_of(agent), n_episodes=2, **settings.playing(config))
            assert found.lengths.tolist() == [length] * 2 and not found.cut_off.any()
    finally:
        del gym.registry["Ends-v0"]


def test_a_preset_and_a_file_may_set_the_limit(tmp_path):
    (tmp_path / "own.toml").write_text("[Endless-v0]\nmax_episode_steps = 6\nn_steps = 32\n")
    run = tmp_path / "run"
    assert train(run, "--config", tmp_path / "own.toml") == 0
    assert read_metrics(run)["length_mean"][1] == 6
    again = tmp_path / "again"
    assert train(again, "--config", run / "config.json") == 0
    assert read_metrics(again)["length_mean"][1] == 6
    assert train(tmp_path / "other", "--config", run / "config.json", "--max-episode-steps", 8) == 0
    assert read_metrics(tmp_path / "other")["length_mean"][1] == 8


def test_a_fork_begins_new_episodes_with_another_limit(tmp_path, capsys):
    run = tmp_path / "run"
    assert train(run, "--max-episode-steps", 7) == 0
    words = ["--set", "max_episode_steps=9", "--steps", 256]
    assert rollpipe("fork", run, "--out", tmp_path / "a", *words) == 2
    assert "cannot have another max_episode_steps" in capsys.readouterr().err
    assert rollpipe("fork", run, "--out", tmp_path / "a", *words, "--new-episodes") == 0
    assert rollpipe("train", "--resume", tmp_path / "a", *QUIET) == 0
    assert read_metrics(tmp_path / "a")["length_mean"][-1] == 9


@pytest.mark.parametrize("n", ["0", "-1", "2.5", "x"])
def test_a_limit_out_of_range(tmp_path, capsys, n):
    assert train(tmp_path / "run", f"--max-episode-steps={n}") == 2
    assert "max" in capsys.readouterr().err and not (tmp_path / "run").exists()


# --- the limit in Python


def test_a_game_of_atari_counts_the_steps_of_the_actor():
    kwargs, (_, limit) = wrappers_in(dict(atari="games", max_episode_steps=3))
    assert kwargs == dict(frameskip=1)  # gymnasium would count the frames
    env = limit(Endless())
    env.reset()
    assert [env.step(0)[3] for _ in range(3)] == [False, False, True]


def limited(source, n, **options):
    space = gym.spaces.Discrete(2)
    return on_policy(
        source,
        RandomActor(space),
        critic=lambda obs: obs[..., 0],
        n_steps=12,
        seed=0,
        env_kwargs=dict(max_episode_steps=n),
        **options,
    )


@pytest.mark.parametrize(
    "source, options",
    [
        ("Endless-v0", {}),
        (Endless, {}),
        (lambda: Endless(), {}),
        (lambda seed: Endless(), {}),
        ([Endless, "Endless-v0"], {}),
        ("Endless-v0", dict(vector="sync")),
    ],
    ids=["id", "class", "factory", "seeded", "list", "sync"],
)
def test_an_episode_is_cut_as_a_truncation_with_its_last_observation(source, options):
    batch = next(iter(limited(source, 5, n_envs=2, **options)))
    np.testing.assert_array_equal(batch.state.stepno[:, 0], [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1, 2])
    assert not batch.term.any()
    assert batch.final.obs[:, 0].tolist() == [5.0] * 4


def test_vectors_have_no_limit_from_outside():
    vector = lambda: gym.vector.SyncVectorEnv([Endless] * 2, autoreset_mode="SameStep")
    with pytest.raises(EnvError, match="max_episode_steps.*the episodes of a vector.*TimeLimit"):
        next(iter(limited(vector, 5, n_envs=None)))
    with pytest.raises(EnvError, match="env_kwargs are for gymnasium ids"):
        limited(Endless(), 5, n_envs=None)
    with pytest.raises((DataError, EnvError), match="max_episode_steps"):
        EnvFactory(Endless, dict(max_episode_steps=0))
    with pytest.raises(EnvError, match="env_kwargs are for gymnasium ids"):
        EnvFactory(Endless, dict(max_episode_steps=3, gravity=1))


# --- Python's evaluate


def test_evaluate_cuts_by_default_and_says_so(caplog):
    actor = RandomActor(Endless.action_space)
    for source in ("Endless-v0", Endless, Endless()):
        caplog.clear()
        found = evaluate(source, actor, 3, max_steps=20)
        assert found.returns.tolist() == [20.0] * 3 and found.cut_off.all()
        assert not found.terminated.any()
        assert "3 of 3 episodes were cut off after 20 steps" in caplog.text
    caplog.clear()
    assert evaluate(Endless, actor, 3, max_steps=20, on_limit="cut").cut_off.all()
    assert not caplog.text  # who asks for it knows
    with pytest.raises(EnvError, match="does not end"):
        evaluate(Endless, actor, 3, max_steps=20, on_limit="raise")


def test_a_vector_that_does_not_end_is_refused_when_it_does_not_end():
    actor = RandomActor(Endless.action_space)
    vector = gym.vector.SyncVectorEnv([Endless] * 2, autoreset_mode="SameStep")
    with pytest.raises(EnvError, match="does not end.*a time limit"):
        evaluate(vector, actor, 2, max_steps=20)
    short = lambda: gym.wrappers.TimeLimit(Endless(), 6)
    factory = lambda: gym.vector.SyncVectorEnv([short] * 4, autoreset_mode="SameStep")
    assert evaluate(factory, actor, 4, max_steps=20).lengths.tolist() == [6] * 4
    vector = gym.vector.SyncVectorEnv([short] * 2, autoreset_mode="SameStep")
    assert evaluate(vector, actor, 4, max_steps=20).lengths.tolist() == [6] * 4
