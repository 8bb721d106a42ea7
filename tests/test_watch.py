"`rollpipe watch`: a window, whose end is the usual one, and a film, which needs no display."

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from command_line import process, rollpipe
from PIL import Image

from rollpipe.pipes.data.errors import DataError
from rollpipe.agents.evaluate import evaluate
from rollpipe.settings.config import make_config
from rollpipe.pipes.envs.factories import EnvFactory
from rollpipe.pipes.envs.watching import FilmRecorder
from rollpipe.runs import load_agent, start
from rollpipe.runs.training import train

pygame = pytest.importorskip("pygame")


class Plain(gym.Env):
    "Episodes of three steps, without pictures."

    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.observe()

    def observe(self):
        return np.full(2, self.t / 3, np.float32), {}

    def step(self, action):
        self.t += 1
        obs, info = self.observe()
        return obs, 1.0, self.t == 3, False, info


class Pictures(Plain):
    metadata = dict(render_modes=["rgb_array", "human"], render_fps=25)
    closes_at = None  # number of the step in which the user closes the window

    def __init__(self, render_mode=None):
        self.render_mode, self.n = render_mode, 0

    def render(self):
        return np.full((16, 16, 3), 40 * self.t, np.uint8)

    def observe(self):
        if self.render_mode == "human":
            pygame.init()
            pygame.display.set_mode((16, 16))
        return super().observe()

    def step(self, action):
        self.n += 1
        if self.n == self.closes_at:
            pygame.event.post(pygame.event.Event(pygame.QUIT))
        return super().step(action)

    def close(self):
        if self.render_mode == "human":
            pygame.quit()


@pytest.fixture
def registered():
    envs = {"Plain-v0": Plain, "Pictures-v0": Pictures}
    for name, env in envs.items():
        gym.register(name, env)
    yield
    for name in envs:
        del gym.registry[name]


@pytest.fixture
def no_screen(monkeypatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    pygame.quit()
    yield
    pygame.quit()


def small_run(folder, env, **options):
    run = start(
        folder,
        make_config("trpo", env, dict(n_envs=4, n_steps=32, hidden=(8,)), steps=128, **options),
    )
    train(run, progress=False, tensorboard=False)
    return run.folder


@pytest.fixture
def run(tmp_path, registered):
    return small_run(tmp_path / "run", "Pictures-v0", eval_every=1)


def test_a_window_shows_as_many_episodes_as_asked_for(run, no_screen, capsys):
    for words in ((), ("--best",), ("--sample",)):
        assert rollpipe("watch", run, "--episodes", 2, *words) == 0
        assert capsys.readouterr().out.splitlines() == [
            "episode 1: return 3.0, 3 steps",
            "episode 2: return 3.0, 3 steps",
            "mean return of 2 episodes: 3.0",
        ]


@pytest.mark.parametrize("step, episodes", [(1, 0), (3, 1), (7, 2)])
def test_closing_the_window_is_the_end(run, no_screen, capsys, monkeypatch, step, episodes):
    monkeypatch.setattr(Pictures, "closes_at", step)
    assert rollpipe("watch", run) == 0
    out = capsys.readouterr().out.splitlines()
    plural = "s" * (episodes != 1)
    assert len(out) == episodes + 1 and out[-1] == (
        f"mean return of {episodes} episode{plural}: 3.0" if episodes else "no whole episode"
    )


def test_the_seed_decides_what_is_shown(tmp_path, no_screen, capsys):
    run = small_run(tmp_path / "run", "CartPole-v1")
    assert (
        rollpipe("watch", run, "--episodes", 2, "--seed", 4, "--record", tmp_path / "film.gif") == 0
    )
    told = [float(x) for x in re.findall(r"episode \d: return ([\d.]+)", capsys.readouterr().out)]
    assert (
        told == evaluate("CartPole-v1", load_agent(run).actor, 2, n_envs=1, seed=4).returns.tolist()
    )


@pytest.mark.parametrize("name, code", [("SIGINT", 0), ("SIGTERM", 143)])
def test_ctrl_c_is_the_end_too(tmp_path, name, code):
    run = small_run(tmp_path / "run", "CartPole-v1")
    with process("watch", run, env=dict(SDL_VIDEODRIVER="dummy")) as child:
        assert child.stdout.readline().startswith("episode 1: return ")
        child.send_signal(getattr(signal, name))
        out, err = child.communicate(timeout=60)
    assert child.returncode == code and "Traceback" not in err
    assert ("mean return of " in out) == (code == 0)


@pytest.fixture
def no_display(monkeypatch):
    # Without a display SDL tries Mesa, which loads its LLVM for all to see. Triton, which torch's CUDA builds import
    # with the compiler, crashes if it loads its own LLVM after that.
    with suppress(ImportError):
        import triton  # noqa: F401
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"):
        monkeypatch.delenv(name, raising=False)
    pygame.quit()
    yield
    pygame.quit()


@pytest.mark.parametrize(
    "env", [dict(), dict(SDL_VIDEODRIVER="x11"), dict(DISPLAY=":987")], ids=["none", "x11", "wrong"]
)
@pytest.mark.skipif(
    not sys.platform.startswith("linux"),
    reason="other systems have their display without a variable",
)
def test_without_a_display_the_film_is_named(tmp_path, no_display, env, monkeypatch, capsys):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert rollpipe("watch", small_run(tmp_path / "run", "CartPole-v1")) == 2
    out, err = capsys.readouterr()
    assert (
        "no window can be opened" in err
        and "--record FILE" in err
        and err.count("\n") == 1
        and not out
    )


def test_a_film_has_all_episodes_and_needs_no_display(run, tmp_path, no_display, capsys):
    for words, episodes in (((), 1), (("--episodes", 3), 3)):
        assert rollpipe("watch", run, "--record", tmp_path / "film.gif", *words) == 0
        out = capsys.readouterr().out.splitlines()
        assert len(out) == episodes + 2 and out[-1] == f"film: {tmp_path / 'film.gif'}"
        with Image.open(tmp_path / "film.gif") as film:
            frames = [
                film.seek(i) or film.convert("RGB").getpixel((0, 0))[0]
                for i in range(film.n_frames)
            ]
        assert frames == [0, 40, 80, 120] * episodes


def test_an_environment_without_pictures_is_named(tmp_path, registered, no_screen, capsys):
    run = small_run(tmp_path / "run", "Plain-v0")
    for words, told in (
        ((), "cannot be shown. Expected 'rgb_array' or 'human' among its render modes, got none"),
        (
            ("--record", tmp_path / "x.gif"),
            "cannot be filmed. Expected 'rgb_array' among its render modes, got none",
        ),
    ):
        assert rollpipe("watch", run, *words) == 2
        err = capsys.readouterr().err
        assert f"environment Plain-v0: this environment {told}" in err and err.count("\n") == 1
    assert not (tmp_path / "x.gif").exists()


def test_pygame_that_is_missing_can_be_installed(tmp_path, monkeypatch, capsys):
    run = small_run(tmp_path / "run", "CartPole-v1")
    monkeypatch.setitem(sys.modules, "pygame", None)
    assert rollpipe("watch", run) == 2
    assert re.search(
        r"pygame is not installed, run `pip install .*classic", capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "words, told",
    [
        (("--episodes", "0"), "n_episodes >= 1"),
        (("--record", "film.avi"), ".gif or .mp4"),
        (("--best",), "has no best checkpoint"),
    ],
)
def test_mistakes(tmp_path, no_screen, capsys, words, told):
    assert rollpipe("watch", small_run(tmp_path / "run", "CartPole-v1"), *words) == 2
    assert told in capsys.readouterr().err


def test_the_end_of_a_training_says_how_to_look_at_it(tmp_path, capsys):
    run = tmp_path / "run"
    words = "--steps 64 --n-envs 2 --n-steps 32 --quiet --no-tensorboard".split()
    assert rollpipe("train", "trpo", "CartPole-v1", "--out", run, *words) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        f"watch it:     rollpipe watch {run}",
        f"evaluate it:  rollpipe evaluate {run}",
    ]


@pytest.mark.skipif(
    shutil.which("Xvfb") is None, reason="Xvfb, a display that nobody sees, is not installed"
)
def test_a_window_on_a_real_display(tmp_path):
    run = small_run(tmp_path / "run", "CartPole-v1")
    number = 90 + os.getpid() % 900
    with subprocess.Popen(["Xvfb", f":{number}"], stderr=subprocess.DEVNULL) as screen:
        try:
            deadline = time.monotonic() + 20
            while not os.path.exists(f"/tmp/.X11-unix/X{number}") and time.monotonic() < deadline:
                time.sleep(0.05)
            with process("watch", run, "--episodes", 1, env=dict(DISPLAY=f":{number}")) as child:
                out, err = child.communicate(timeout=60)
        finally:
            screen.terminate()
    assert child.returncode == 0 and out.startswith("episode 1: return "), err


def test_a_film_on_a_full_disk_is_named_and_the_one_before_it_stays(tmp_path, monkeypatch):
    film = FilmRecorder(EnvFactory("CartPole-v1"))
    with pytest.raises(DataError, match="no frame"):
        film.save(tmp_path / "film.gif")
    film.frames = [np.zeros((4, 4, 3), np.uint8)]
    film.save(tmp_path / "film.gif")
    before = (tmp_path / "film.gif").read_bytes()

    def full(image, path, **options):
        Path(path).write_bytes(b"a part")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Image.Image, "save", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*film.gif'"):
        film.save(tmp_path / "film.gif")
    assert [*tmp_path.iterdir()] == [tmp_path / "film.gif"] and (
        tmp_path / "film.gif"
    ).read_bytes() == before
