"What an environment needs is an extra, and the error names the command that installs it."

import sys

import gymnasium as gym
import pytest

from rollpipe.cli.main import main
from rollpipe.pipes.data.errors import EnvError
from rollpipe.pipes.envs import factories
from rollpipe.pipes.envs.factories import EnvFactory, VectorFactory

NEEDS = [
    ("LunarLander-v3", "Box2D", "box2d"),
    ("BipedalWalker-v3", "Box2D", "box2d"),
    ("HalfCheetah-v5", "mujoco", "mujoco"),
]


@pytest.fixture
def without(monkeypatch):
    "A function that hides a package, so that gymnasium finds that it is missing."

    def hide(package):
        made = [
            n
            for n in sys.modules
            if n.startswith(("gymnasium.envs.box2d", "gymnasium.envs.mujoco"))
        ]
        for name in made:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, package, None)

    return hide


@pytest.mark.parametrize("env, package, extra", NEEDS)
def test_the_command_line_says_what_to_install(
    env, package, extra, without, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    without(package)
    assert main(["train", "ppo", env]) == 2
    err = capsys.readouterr().err
    assert (
        f"pip install 'rollpipe[{extra}]'" in err
        and err.count("\n") == 1
        and list(tmp_path.iterdir()) == []
    )


@pytest.mark.parametrize("env, package, extra", NEEDS)
def test_so_do_both_factories(env, package, extra, without):
    without(package)
    for make in (EnvFactory(env), VectorFactory(env, 2)):
        with pytest.raises(EnvError, match=rf"pip install 'rollpipe\[{extra}\]'"):
            make()


def test_atari_without_its_package(monkeypatch):
    for name in [n for n in gym.registry if n.startswith("ALE/")]:
        monkeypatch.delitem(gym.registry, name)
    monkeypatch.setattr(factories, "find_spec", lambda name: None)
    with pytest.raises(
        EnvError,
        match=r"^'ALE/Pong-v5' needs a package that is not .*the extra 'atari' of rollpipe: `pip install 'rollpipe\[atari\]'`",
    ):
        EnvFactory("ALE/Pong-v5")
    with pytest.raises(EnvError, match="nearest known ids: Pendulum-v1"):
        EnvFactory("Pendulm-v1")


def test_every_extra_that_is_named_exists():
    from configparser import ConfigParser
    from pathlib import Path

    (parser := ConfigParser()).read(Path(__file__).resolve().parents[1] / "settings.ini")
    assert {
        "box2d",
        "mujoco",
        "atari",
        "envpool",
        "video",
        "tensorboard",
        "wandb",
        "onnx",
        "minari",
    } <= {
        name.removesuffix("_requirements")
        for name in parser["DEFAULT"]
        if name.endswith("_requirements")
    }
