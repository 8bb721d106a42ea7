"`rollpipe watch`: a window, whose end is the usual one, and a film, which needs no display."

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import weakref
from contextlib import contextmanager, suppress

import gymnasium as gym
import numpy as np
import pytest
import torch
from command_line import QUIET, error_of, process, rollpipe, wait_for
from gallery import quietly
from PIL import Image

from rollpipe.agents.evaluate import evaluate
from rollpipe.layers import Actor
from rollpipe.pipes.data.errors import DataError
from rollpipe.pipes.envs import watching
from rollpipe.pipes.envs.factories import EnvFactory
from rollpipe.pipes.envs.watching import FilmRecorder
from rollpipe.runs import load_agent, start
from rollpipe.settings.config import make_config

pygame = pytest.importorskip("pygame")


@pytest.fixture
def pole(gallery):
    "A run of CartPole, which nobody changes."
    return gallery.original("pole_trpo")


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
    quietly(run)
    return run.folder


@pytest.fixture
def run(tmp_path, registered):
    "A run of `Pictures` with a best checkpoint."
    return small_run(tmp_path / "run", "Pictures-v0", eval_every=1)


@pytest.mark.slow
def test_a_window_shows_as_many_episodes_as_asked_for(run, no_screen, capsys):
    episodes = [f"episode {k}: return 3.0, 3 steps" for k in (1, 2)]
    for more in ("", "--best", "--sample"):
        assert rollpipe(f"watch {run} --episodes 2 {more}") == 0
        told = capsys.readouterr().out.splitlines()
        assert told == [*episodes, "mean return of 2 episodes: 3.0"]


@pytest.mark.slow_but_one
@pytest.mark.parametrize(
    "step, told",
    [
        (1, ["no whole episode"]),
        (3, ["mean return of 1 episode: 3.0"]),
        (7, ["mean return of 2 episodes: 3.0"]),
    ],
)
def test_closing_the_window_is_the_end(run, no_screen, capsys, monkeypatch, step, told):
    monkeypatch.setattr(Pictures, "closes_at", step)
    assert rollpipe(f"watch {run}") == 0
    out = capsys.readouterr().out.splitlines()
    assert len(out) == step // 3 + 1 and out[-1:] == told


def test_the_seed_decides_what_is_shown(pole, tmp_path, no_screen, capsys):
    words = f"watch {pole} --episodes 2 --seed 4 --record {tmp_path}/film.gif"
    assert rollpipe(words) == 0
    told = [float(x) for x in re.findall(r"episode \d: return ([\d.]+)", capsys.readouterr().out)]
    played = evaluate("CartPole-v1", load_agent(pole).actor, 2, n_envs=1, seed=4)
    assert told == played.returns.tolist()


@pytest.mark.parametrize("name, code", [("SIGINT", 0), ("SIGTERM", 143)])
def test_ctrl_c_is_the_end_too(pole, name, code):
    with process("watch", pole, env=dict(SDL_VIDEODRIVER="dummy")) as child:
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


@pytest.mark.slow_but_one
@pytest.mark.parametrize(
    "env", [dict(), dict(SDL_VIDEODRIVER="x11"), dict(DISPLAY=":987")], ids=["none", "x11", "wrong"]
)
@pytest.mark.skipif(
    not sys.platform.startswith("linux"),
    reason="other systems have their display without a variable",
)
def test_without_a_display_the_film_is_named(pole, no_display, env, monkeypatch, capsys):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    err = error_of(capsys, f"watch {pole}")
    assert "no window can be opened" in err and "--record FILE" in err and err.count("\n") == 1


def test_a_film_has_all_episodes_and_needs_no_display(run, tmp_path, no_display, capsys):
    path = tmp_path / "film.gif"
    for more, episodes in (("", 1), ("--episodes 3", 3)):
        assert rollpipe(f"watch {run} --record {path} {more}") == 0
        out = capsys.readouterr().out.splitlines()
        assert len(out) == episodes + 2 and out[-1] == f"film: {path}"
        with Image.open(path) as film:
            frames = [
                film.seek(i) or film.convert("RGB").getpixel((0, 0))[0]
                for i in range(film.n_frames)
            ]
        assert frames == [0, 40, 80, 120] * episodes


@pytest.mark.parametrize(
    "more, told",
    [
        ("", "shown. Expected 'rgb_array' or 'human' among its render modes, got none"),
        ("--record x.gif", "filmed. Expected 'rgb_array' among its render modes, got none"),
    ],
)
def test_an_environment_without_pictures_is_named(
    more, told, tmp_path, registered, no_screen, monkeypatch, capsys
):
    run = small_run(tmp_path / "run", "Plain-v0")
    monkeypatch.chdir(tmp_path)
    err = error_of(capsys, f"watch {run} {more}")
    told = f"environment Plain-v0: this environment cannot be {told}"
    assert told in err and err.count("\n") == 1 and os.listdir(tmp_path) == ["run"]


def test_pygame_that_is_missing_can_be_installed(pole, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pygame", None)
    err = error_of(capsys, f"watch {pole}")
    assert re.search(r"pygame is not installed, run `pip install .*classic", err)


@pytest.mark.parametrize(
    "more, told",
    [
        ("--episodes 0", "n_episodes >= 1"),
        ("--record film.avi", ".gif or .mp4"),
        ("--best", "has no best checkpoint"),
    ],
)
def test_mistakes(pole, no_screen, capsys, more, told):
    assert told in error_of(capsys, f"watch {pole} {more}")


def test_the_end_of_a_training_says_how_to_look_at_it(tmp_path, capsys):
    run = tmp_path / "run"
    words = f"train trpo CartPole-v1 --steps 64 --n-envs 2 --n-steps 32 {QUIET} --out {run}"
    assert rollpipe(words) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        f"watch it:     rollpipe watch {run}",
        f"evaluate it:  rollpipe evaluate {run}",
    ]


@pytest.mark.skipif(
    shutil.which("Xvfb") is None, reason="Xvfb, a display that nobody sees, is not installed"
)
def test_a_window_on_a_real_display(pole):
    number = 90 + os.getpid() % 900
    with subprocess.Popen(["Xvfb", f":{number}"], stderr=subprocess.DEVNULL) as screen:
        try:
            wait_for(lambda: os.path.exists(f"/tmp/.X11-unix/X{number}"), screen, 20)
            with process(f"watch {pole} --episodes 1", env=dict(DISPLAY=f":{number}")) as child:
                out, err = child.communicate(timeout=60)
        finally:
            screen.terminate()
    assert child.returncode == 0 and out.startswith("episode 1: return "), err


def test_a_film_on_a_full_disk_is_named_and_the_one_before_it_stays(tmp_path, monkeypatch):
    path = tmp_path / "film.gif"
    with pytest.raises(DataError, match="no frame"), FilmRecorder(filmable(Pictures), path):
        pass
    with pytest.raises(KeyboardInterrupt), film_of_pictures(path):
        raise KeyboardInterrupt
    assert not [*tmp_path.iterdir()]
    with film_of_pictures(path):
        pass
    before = path.read_bytes()

    def full(film, *frame):
        if not frame:
            film.file.close()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for call in ("append_data", "close"):
        with monkeypatch.context() as m:
            m.setattr(watching._Gif, call, full)
            with pytest.raises(OSError, match=r"No space left on device: '.*film.gif'"):
                with film_of_pictures(path):
                    pass
        assert [*tmp_path.iterdir()] == [path] and path.read_bytes() == before


@contextmanager
def film_of_pictures(path, n=3):
    "A film of the first steps of an episode."
    with FilmRecorder(filmable(Pictures), path) as recorder:
        env = recorder()
        env.reset()
        for _ in range(n):
            env.step(0)
        yield recorder


def filmable(cls):
    return EnvFactory(lambda: cls(render_mode="rgb_array"))


class Noise(Pictures):
    "Never ends, and holds no picture that it has drawn."

    most_alive, alive = 0, None

    def __init__(self, render_mode=None):
        super().__init__(render_mode)
        Noise.alive = weakref.WeakSet()
        Noise.most_alive = 0

    def step(self, action):
        obs, reward, _, truncated, info = super().step(action)
        return np.zeros(2, np.float32), reward, False, truncated, info

    def render(self):
        picture = np.random.default_rng(self.t).integers(0, 256, (16, 16, 3), np.uint8).view(Kept)
        Noise.alive.add(picture)
        Noise.most_alive = max(Noise.most_alive, len(Noise.alive))
        return picture


class Kept(np.ndarray):
    "An array to which there may be a weak reference that a set can hold."

    __hash__ = object.__hash__

    def __eq__(self, other):
        return self is other

    def astype(self, dtype):
        return self  # the film has the very picture


def test_frames_go_to_the_film_one_by_one(tmp_path, monkeypatch):
    frames = []

    class Film:
        "Stands for imageio's writer, and keeps what it gets."

        def append_data(self, frame):
            frames.append(int(np.asarray(frame).sum()))

        def close(self):
            (tmp_path / "film.part.mp4").write_bytes(b"film")

    gif = watching._film
    monkeypatch.setattr(watching, "check_film", lambda path: None)
    for kind, film in ((".gif", gif), (".mp4", lambda path, fps: Film())):
        monkeypatch.setattr(watching, "_film", film)
        with FilmRecorder(filmable(Noise), tmp_path / f"film{kind}") as recorder:
            env = recorder()
            env.reset()
            for _ in range(60):
                env.step(0)
        assert recorder.n == 61 and Noise.most_alive <= 3
    assert len(frames) == 61 and (tmp_path / "film.mp4").read_bytes() == b"film"


def test_a_gif_has_the_pictures_that_pillow_would_write(tmp_path):
    rng = np.random.default_rng(0)
    pictures = [np.zeros((24, 32, 3), np.uint8)]
    for k in range(30):  # a square that moves, and stands still in every third picture
        picture = pictures[-1].copy()
        if k % 3:
            y, x = rng.integers(0, 16), rng.integers(0, 24)
            picture[y : y + 8, x : x + 8] = rng.integers(0, 256, 3)
        pictures.append(picture)
    film = watching._Gif(tmp_path / "film.gif", 50)
    for picture in pictures:
        film.append_data(picture)
    film.close()
    first, *rest = map(Image.fromarray, pictures)
    first.save(tmp_path / "pillow.gif", save_all=True, append_images=rest, duration=20, loop=0)

    def shown(path):
        with Image.open(path) as found:
            assert found.info["loop"] == 0
            for k in range(found.n_frames):
                found.seek(k)
                picture = np.asarray(found.convert("RGB"))
                for _ in range(found.info["duration"] // 20):
                    yield picture

    mine, theirs = (list(shown(tmp_path / name)) for name in ("film.gif", "pillow.gif"))
    np.testing.assert_array_equal(mine, theirs)
    np.testing.assert_array_equal(mine, pictures)
    assert (tmp_path / "film.gif").stat().st_size <= 2 * (tmp_path / "pillow.gif").stat().st_size


def test_a_picture_may_stand_still_for_longer_than_a_gif_can_say(tmp_path):
    film = watching._Gif(tmp_path / "film.gif", 1)
    for _ in range(700):
        film.append_data(np.full((4, 4, 3), 90, np.uint8))
    film.close()
    with Image.open(tmp_path / "film.gif") as found:
        durations = [found.seek(k) or found.info["duration"] for k in range(found.n_frames)]
        assert sum(durations) == 700_000 and found.convert("RGB").getpixel((0, 0)) == (90,) * 3


def test_a_film_has_a_limit_and_says_so(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(watching, "MOST_FRAMES", 5)
    film = tmp_path / "film.gif"
    found = evaluate(
        lambda: Noise("rgb_array"), Zero(), 2, n_envs=1, max_steps=9, record=film, record_episodes=2
    )
    assert found.lengths.tolist() == [9, 9]
    assert caplog.text.count("film.gif: the film ends after 5 frames") == 1
    with Image.open(film) as pictures:
        assert pictures.n_frames == 5


class Zero(Actor):
    "Always action 0."

    def forward(self, obs, act, rew, fin, *, hx, stepno, virtual):
        return torch.zeros(fin.shape, dtype=torch.int64), (), {}
