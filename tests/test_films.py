"Films of a training: one every N updates, the same stream with and without them, and failures that are told once."

import os

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.classic_control import CartPoleEnv
from PIL import Image

from rollpipe.agents.parallel_evaluation import ParallelEvaluation
from rollpipe.cli.main import main
from rollpipe.layers import MLPPolicy
from rollpipe.pipes.data.errors import DataError
from rollpipe.runs.folder import load_run, resume, start
from rollpipe.runs.logs import read_metrics
from rollpipe.runs.training import Wish, train
from rollpipe.settings.config import make_config

SMALL = dict(n_envs=4, n_steps=16, hidden=(8,), critic_hidden=(8,))


class Pictures(CartPoleEnv):
    "Its pictures show the time; `render` may fail."

    def __init__(self, harm="none", **kwargs):
        super().__init__(**kwargs)
        self.harm, self.n = harm, 0

    def reset(self, **kwargs):
        self.n = 0
        return super().reset(**kwargs)

    def step(self, action):
        self.n += 1
        return super().step(action)

    def render(self):
        if self.harm == "raise":
            raise RuntimeError("no display here")
        if self.harm == "die":
            os._exit(3)
        return np.full((8, 8, 3), 4 * self.n % 256, np.uint8)


@pytest.fixture(autouse=True)
def pictures(monkeypatch):
    gym.register("Pictures-v0", Pictures, max_episode_steps=12)
    monkeypatch.setattr(
        "rollpipe.runs.evaluations.importlib.util.find_spec", lambda name: None
    )  # .gif, which needs no extra
    yield
    del gym.registry["Pictures-v0"]


def trained(folder, video_every=0, steps=320, env="Pictures-v0", **env_kwargs):
    run = start(
        folder, make_config("trpo", env, SMALL, env_kwargs, steps=steps, video_every=video_every)
    )
    train(run, progress=False, tensorboard=False)
    return run


def names(run):
    return sorted(p.name for p in (run.folder / "videos").iterdir())


def test_a_film_every_so_many_updates_and_of_the_last_one(tmp_path):
    run = trained(tmp_path / "run", video_every=2)
    assert names(run) == ["update-000002.gif", "update-000004.gif", "update-000005.gif"]
    for path in (run.folder / "videos").iterdir():
        with Image.open(path) as film:
            shades = []
            for k in range(film.n_frames):
                film.seek(k)
                shades.append(np.asarray(film.convert("RGB"))[0, 0, 0])
        assert 2 <= film.n_frames <= 13
        np.testing.assert_allclose(
            shades, 4.0 * np.arange(film.n_frames), atol=2
        )  # one picture a step, from the reset on
    train(resume(run.folder, steps=448), progress=False, tensorboard=False)
    assert names(run) == [f"update-{k:06}.gif" for k in (2, 4, 5, 6, 7)]


def test_the_last_update_has_a_film_also_if_a_rule_ends_the_run(tmp_path, monkeypatch):
    asked = []
    request = ParallelEvaluation.request
    monkeypatch.setattr(
        ParallelEvaluation, "request", lambda self: (asked.append(1), request(self))
    )
    for stop, films in (
        (3, ["update-000002.gif", "update-000003.gif"]),
        (4, ["update-000002.gif", "update-000004.gif"]),
    ):
        run = start(
            tmp_path / str(stop),
            make_config("trpo", "Pictures-v0", SMALL, {}, steps=320, video_every=2),
        )

        def enough(run, record, stop=stop):
            return Wish(stop="enough" if record["updates"] == stop else None)

        train(run, progress=False, tensorboard=False, callbacks=[enough])
        assert names(run) == films
    assert len(asked) == 4  # each film is made once


def test_the_training_is_the_same_with_and_without(tmp_path):
    with_films, without = (trained(tmp_path / str(every), every) for every in (1, 0))
    a, b = (read_metrics(run.folder) for run in (with_films, without))
    assert (
        list(a) == list(b)
        and not (without.folder / "videos").exists()
        and len(names(with_films)) == 5
    )
    for name in a:
        if not name.startswith("seconds") and name != "steps_per_s":
            np.testing.assert_array_equal(a[name], b[name], err_msg=name)
    for x, y in zip(with_films.agent.actor.parameters(), without.agent.actor.parameters()):
        assert x.equal(y)


@pytest.mark.parametrize("harm, told", [("raise", "no display here"), ("die", "exit code 3")])
def test_a_renderer_that_fails_is_told_once_and_the_training_goes_on(harm, told, tmp_path, caplog):
    run = trained(tmp_path / "run", video_every=1, harm=harm)
    found = [r.getMessage() for r in caplog.records if "no more films" in r.getMessage()]
    assert len(found) == 1 and told in found[0] and str(run.folder / "videos") in found[0]
    assert (
        read_metrics(run.folder)["updates"].tolist() == [1, 2, 3, 4, 5]
        and load_run(run.folder).counters["updates"] == 5
    )
    assert names(run) == []  # and nothing unfinished is left


def test_an_environment_without_pictures_is_told(tmp_path, caplog):
    class Blind(Pictures):
        metadata = {"render_modes": []}

    gym.register(
        "Blind-v0", lambda **kwargs: Blind(**{**kwargs, "render_mode": None}), max_episode_steps=12
    )
    try:
        run = trained(tmp_path / "run", video_every=1, env="Blind-v0")
    finally:
        del gym.registry["Blind-v0"]
    assert (
        "cannot be filmed" in caplog.text
        and caplog.text.count("no more films") == 1
        and len(read_metrics(run.folder)["steps"]) == 5
    )


def test_on_the_command_line(tmp_path, capsys):
    words = "train trpo Pictures-v0 --steps 128 --n-envs 4 --n-steps 16 --quiet --no-tensorboard --video-every 1 --out".split()
    assert main([*words, str(tmp_path / "run")]) == 0
    assert len(list((tmp_path / "run" / "videos").iterdir())) == 2
    assert main([*words, str(tmp_path / "run"), "--overwrite", "--video-every", "2"]) == 0
    assert len(list((tmp_path / "run" / "videos").iterdir())) == 1
    assert main([*words, str(tmp_path / "other"), "--video-every", "-1"]) == 2
    assert "video_every" in capsys.readouterr().err and not (tmp_path / "other").exists()


def test_a_film_that_cannot_be_kept_is_refused_before_the_process_is_started(tmp_path):
    actor = MLPPolicy.for_env("CartPole-v1", seed=0)
    with pytest.raises(DataError, match=".gif or .mp4"):
        ParallelEvaluation("CartPole-v1", actor, record=tmp_path / "film.avi")
    with pytest.raises(DataError, match="no such folder"):
        ParallelEvaluation("CartPole-v1", actor, record=tmp_path / "no" / "film.gif")
