"Films of a training: one every N updates, the same stream with and without them, and failures that are told once."

import os

import gymnasium as gym
import numpy as np
import pytest
from command_line import QUIET, error_of, rollpipe
from gallery import gone_on, numbers, quietly, refused
from gymnasium.envs.classic_control import CartPoleEnv
from PIL import Image

from rollpipe.agents.parallel_evaluation import ParallelEvaluation
from rollpipe.layers import MLPPolicy
from rollpipe.pipes.data.nested import first_difference
from rollpipe.runs.folder import load_run, start
from rollpipe.runs.logs import read_metrics
from rollpipe.runs.training import Wish
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


def trained(folder, video_every=0, steps=320, env="Pictures-v0", callbacks=(), **env_kwargs):
    config = make_config("trpo", env, SMALL, env_kwargs, steps=steps, video_every=video_every)
    return quietly(start(folder, config), callbacks=callbacks)


def names(run):
    "The films of a run, by the numbers of their updates."
    return sorted(path.name for path in (run.folder / "videos").iterdir())


def films(*updates):
    return [f"update-{n:06}.gif" for n in updates]


def test_a_film_every_so_many_updates_and_of_the_last_one(tmp_path):
    "One picture a step, from the reset on."
    run = trained(tmp_path / "run", video_every=2)
    assert names(run) == films(2, 4, 5)
    for path in (run.folder / "videos").iterdir():
        with Image.open(path) as film:
            shades = []
            for k in range(film.n_frames):
                film.seek(k)
                shades.append(np.asarray(film.convert("RGB"))[0, 0, 0])
        assert 2 <= len(shades) <= 13
        np.testing.assert_allclose(shades, 4.0 * np.arange(len(shades)), atol=2)
    gone_on(run.folder, steps=448)
    assert names(run) == films(2, 4, 5, 6, 7)


@pytest.mark.parametrize("last, expected", [(3, (2, 3)), (4, (2, 4))])
def test_the_last_update_has_a_film_also_if_a_rule_ends_the_run(
    last, expected, tmp_path, monkeypatch
):
    "Each film is made once."
    asked = []
    request = ParallelEvaluation.request
    monkeypatch.setattr(
        ParallelEvaluation, "request", lambda self: (asked.append(1), request(self))
    )
    stop = lambda run, record: Wish(stop=record["updates"] == last)
    run = trained(tmp_path / "run", video_every=2, callbacks=[stop])
    assert names(run) == films(*expected) and len(asked) == 2


@pytest.mark.slow
def test_the_training_is_the_same_with_and_without(tmp_path):
    with_films, without = (trained(tmp_path / str(every), every) for every in (1, 0))
    assert len(names(with_films)) == 5 and not (without.folder / "videos").exists()
    assert numbers(with_films.folder) == numbers(without.folder)
    ours, theirs = (load_run(run.folder).agent_state for run in (with_films, without))
    assert first_difference(ours, theirs) is None


@pytest.mark.parametrize("harm, told", [("raise", "no display here"), ("die", "exit code 3")])
def test_a_renderer_that_fails_is_told_once_and_the_training_goes_on(harm, told, tmp_path, caplog):
    "And nothing unfinished is left."
    run = trained(tmp_path / "run", video_every=1, harm=harm)
    (message,) = [x for x in caplog.messages if "no more films" in x]
    assert told in message and str(run.folder / "videos") in message
    assert read_metrics(run.folder)["updates"].tolist() == [1, 2, 3, 4, 5]
    assert load_run(run.folder).counters["updates"] == 5 and names(run) == []


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


@pytest.mark.slow
def test_on_the_command_line(tmp_path, capsys):
    words = f"train trpo Pictures-v0 --steps 128 --n-envs 4 --n-steps 16 {QUIET} --video-every"
    run = tmp_path / "run"
    for more, n_films in ((f"1 --out {run}", 2), (f"2 --out {run} --overwrite", 1)):
        assert rollpipe(f"{words} {more}") == 0
        assert len(os.listdir(run / "videos")) == n_films
    assert "video_every" in error_of(capsys, f"{words} -1 --out {tmp_path}/other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    "name, told", [("film.avi", ".gif or .mp4"), ("no/film.gif", "no such folder")]
)
def test_a_film_that_cannot_be_kept_is_refused_before_the_process_is_started(name, told, tmp_path):
    actor = MLPPolicy.for_env("CartPole-v1", seed=0)
    refused(told, ParallelEvaluation, "CartPole-v1", actor, record=tmp_path / name)
