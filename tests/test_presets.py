"Presets and files of settings: what goes before what, what is recorded, and what is refused; and `rollpipe list`."

import csv
import fnmatch
import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import pytest
from command_line import rollpipe

from rollpipe import testing  # noqa: F401    registers Recall-v0
from rollpipe.cli.main import build_parser
from rollpipe.layers import MLPPolicy
from rollpipe.pipes.data.errors import DataError
from rollpipe.runs.autotune import autotune
from rollpipe.runs.commands import config_from
from rollpipe.runs.folder import load_run, resume
from rollpipe.runs.locks import unlock
from rollpipe.settings import files, listing
from rollpipe.settings.algorithms import ALGORITHMS, options_for
from rollpipe.settings.config import RUN_OPTIONS, build, make_config
from rollpipe.settings.files import check_table, kind_of_actions, read_table, tables_in

FOLDER = Path(files.__file__).parent / "presets"
SMALL = "--n-envs 4 --n-steps 8 --hidden 8 --warmup 32 --batch-size 16 --n-batches 1 --quiet --no-tensorboard".split()
SHIPPED = [
    (path.stem, name)
    for path in sorted(FOLDER.glob("*.toml"))
    for name in files.presets_of(path.stem)
]


def config(words):
    return config_from(build_parser().parse_args(shlex.split(words)))


@pytest.fixture
def presets(monkeypatch):
    "Presets of DQN in place of those that ship: a function that sets them."

    def put(**tables):
        for module in (files, listing):
            monkeypatch.setattr(
                module, "presets_of", lambda algorithm: tables if algorithm == "dqn" else {}
            )

    put(
        **{
            "CartPole-v1": dict(
                actions="Discrete", steps=300, lr=0.25, gamma=0.5, checkpoint_every=3
            ),
            "hills": dict(envs=["MountainCar*"], actions="Discrete", lr=0.125),
            "wheels": dict(actions="Box", lr=0.5),
        }
    )
    return put


# -- what ships --------------------------------------------------------------------------------------------------------


def test_every_file_belongs_to_an_algorithm_and_has_only_tables():
    assert SHIPPED and {path.stem for path in FOLDER.glob("*.toml")} <= set(ALGORITHMS)
    for path in FOLDER.glob("*.toml"):
        values = files.read_table(path)
        assert tables_in(values, ()) == values, path


@pytest.mark.parametrize("algorithm, name", SHIPPED)
def test_every_preset_that_ships_names_real_options_and_its_kind_of_actions_and_can_be_built(
    algorithm, name
):
    table = files.presets_of(algorithm)[name]
    known = [o for o in options_for(algorithm) + RUN_OPTIONS if o.name != "preset"]
    assert check_table(name, table, known, algorithm)
    if name == "atari":
        pytest.importorskip("ale_py"), pytest.importorskip("cv2")
    for env in [fnmatch.filter(gym.registry, pattern)[-1] for pattern in table.get("envs", [name])]:
        for extra in ("mujoco", "Box2D"):
            if f".{extra.lower()}" in str(gym.spec(env).entry_point):
                pytest.importorskip(extra)
        assert table["actions"] == kind_of_actions(env, None)
        found = make_config(algorithm, env, preset="auto")
        assert found["preset"] == name
        build(found)


def test_rainbow_is_for_whoever_asks_for_it():
    "It is a combination and not an environment's preset, so it fits Discrete actions anywhere."
    assert config("train qr_dqn Taxi-v4")["preset"] != "rainbow"
    found = config("train qr_dqn Acrobot-v1 --preset rainbow")
    assert (
        all(found["options"][name] for name in ("double", "duelling", "prioritized"))
        and found["options"]["multi_step"] > 1
    )
    build(found)
    assert rollpipe("train", "qr_dqn", "Pendulum-v1", "--preset", "rainbow") == 2


# -- what goes before what ---------------------------------------------------------------------------------------------


def test_typed_before_file_before_preset_before_default(presets, tmp_path):
    (tmp_path / "own.toml").write_text("lr = 0.0625\nsteps = 200\n\n[CartPole-v1]\nsteps = 250\n")
    file = f"--config {tmp_path / 'own.toml'}"
    env = "train dqn CartPole-v1"

    def values(words):
        found = config(words)
        return [found["options"][k] for k in ("lr", "gamma", "eta")] + [
            found[k] for k in ("steps", "checkpoint_every", "preset")
        ]

    assert values(f"{env} --preset none") == [1e-3, 0.99, 0.9, 100_000, 20, None]
    assert (
        values(env)
        == values(f"{env} --preset auto")
        == values(f"{env} --preset CartPole-v1")
        == [0.25, 0.5, 0.9, 300, 3, "CartPole-v1"]
    )
    assert values(f"{env} {file}") == [0.0625, 0.5, 0.9, 250, 3, "CartPole-v1"]
    assert values(f"{env} {file} --preset none") == [0.0625, 0.99, 0.9, 250, 20, None]
    assert values(f"{env} {file} --lr 2 --gamma 1 --steps 9 --checkpoint-every 1") == [
        2,
        1,
        0.9,
        9,
        1,
        "CartPole-v1",
    ]


def test_more_steps_than_the_learning_rates_of_a_preset_last_are_refused_at_once(
    presets, tmp_path, capsys
):
    (tmp_path / "own.toml").write_text("steps = 64\ndecay_steps = 64\nn_envs = 2\nn_steps = 16\n")
    words = [
        "train",
        "ppo",
        "CartPole-v1",
        "--config",
        tmp_path / "own.toml",
        "--out",
        tmp_path / "run",
        "--quiet",
    ]
    run = tmp_path / "run"
    told = "--decay-steps: the learning rates fall to 0 before the training ends. Expected 0, or at least the steps of the training"
    assert rollpipe(*words, "--steps", "96") == 2 and not run.exists()
    assert f"{told}, as by --decay-steps 96 for a new run, got 64." in capsys.readouterr().err
    assert rollpipe(*words) == 0
    assert (
        rollpipe("train", "--resume", run, "--steps", "96") == 2 and told in capsys.readouterr().err
    )
    assert rollpipe(*words, "--steps", "96", "--decay-steps", "96", "--overwrite") == 0


def test_a_value_that_equals_the_default_is_typed_as_well(presets):
    assert config("train dqn CartPole-v1 --steps 100k --lr 0.001")["steps"] == 100_000
    assert (
        make_config("dqn", "CartPole-v1", dict(lr=1e-3), steps=100_000, preset="auto")["options"][
            "lr"
        ]
        == 1e-3
    )


def test_python_gets_the_bare_defaults_unless_it_asks(presets):
    bare = make_config("dqn", "CartPole-v1")
    assert bare["preset"] is None and bare["options"] == {
        o.name: list(o.default) if isinstance(o.default, tuple) else o.default
        for o in options_for("dqn")
    }
    assert bare == make_config("dqn", "CartPole-v1", preset="none").having(origins={})
    assert bare["steps"] == 100_000
    assert make_config("dqn", "CartPole-v1", preset="auto")["options"]["lr"] == 0.25


@pytest.mark.parametrize(
    "env, name",
    {
        "CartPole-v1": "CartPole-v1",
        "gymnasium:CartPole-v1": "CartPole-v1",
        "MountainCar-v0": "hills",
        "CartPole-v0": None,
        "Taxi-v4": None,
    }.items(),
)
def test_the_preset_is_that_of_the_environment_or_its_family(presets, env, name):
    assert config(f"train dqn {env}")["preset"] == name


def test_a_preset_and_a_table_may_have_keywords_for_the_environment(presets, tmp_path):
    presets(
        **{
            "CartPole-v1": dict(
                actions="Discrete", lr=0.25, env_kwargs=dict(sutton_barto_reward=True)
            )
        }
    )
    (tmp_path / "own.toml").write_text(
        "[CartPole-v1]\nlr = 0.5\nenv_kwargs = {sutton_barto_reward = false, max_episode_steps = 9}\n"
    )

    def kwargs(words):
        return config(f"train dqn CartPole-v1 {words}")["env_kwargs"]

    assert kwargs("") == dict(sutton_barto_reward=True) and kwargs("--preset none") == {}
    assert kwargs("--env-kwargs sutton_barto_reward=False") == dict(sutton_barto_reward=False)
    assert kwargs(f"--config {tmp_path / 'own.toml'}") == dict(
        sutton_barto_reward=False, max_episode_steps=9
    )
    assert (
        kwargs(f"--config {tmp_path / 'own.toml'} --env-kwargs max_episode_steps=5")[
            "max_episode_steps"
        ]
        == 5
    )
    (tmp_path / "own.toml").write_text("[CartPole-v1]\nenv_kwargs = 3\n")
    with pytest.raises(
        DataError,
        match="own.toml, table CartPole-v1: wrong type of value.* names with values, got 3",
    ):
        kwargs(f"--config {tmp_path / 'own.toml'}")


def test_auto_passes_over_another_kind_of_actions_and_a_name_does_not(presets):
    presets(
        **{
            "MountainCar-v0": dict(actions="Box", lr=0.5),
            "all": dict(envs=["Mountain*"], actions="Discrete", lr=0.125),
        }
    )
    assert make_config("dqn", "MountainCar-v0", preset="auto")["preset"] == "all"
    assert make_config("dqn", "CartPole-v1", preset="all")["options"]["lr"] == 0.125


# -- what is recorded --------------------------------------------------------------------------------------------------


def test_a_run_keeps_its_values_when_the_preset_changes(presets, tmp_path, capsys):
    run = tmp_path / "run"
    words = ["train", "dqn", "CartPole-v1", "--out", run, *SMALL]
    assert rollpipe(*words) == 0
    assert "dqn on CartPole-v1, seed 0, preset CartPole-v1: " in capsys.readouterr().out
    before = json.loads((run / "config.json").read_text())
    assert (before["preset"], before["options"]["lr"], before["steps"]) == (
        "CartPole-v1",
        0.25,
        300,
    )
    of_preset = [name for name, origin in before["origins"].items() if origin == "preset"]
    assert of_preset == ["steps", "lr", "gamma", "checkpoint_every"]
    presets(**{"CartPole-v1": dict(lr=1.0, gamma=0.0, steps=300)})
    resumed = resume(run, steps=400)
    assert resumed.config == {**before, "steps": 400} and resumed.agent.lr == 0.25
    unlock(run)
    assert rollpipe(*words, "--steps", 500, "--continue") == 0
    assert load_run(run).config == {**before, "steps": 500}
    assert (
        rollpipe(*words, "--continue", "--steps", 600, "--lr", 0.75) == 2
    )  # what is typed is compared
    assert (
        "has other options. Expected the same, or another folder, got lr=0.25 instead of 0.75.\n"
        in capsys.readouterr().err
    )
    assert rollpipe(*words, "--continue", "--steps", 600, "--preset", "CartPole-v1") == 2
    assert (
        "has other options. Expected the same, or another folder, got checkpoint_every=3 instead of "
        in capsys.readouterr().err
    )


def without_origins(config):
    return {name: x for name, x in config.items() if name != "origins"}


def test_the_configuration_of_a_run_is_a_file_of_settings(presets, tmp_path):
    words = [
        "--out",
        tmp_path / "a",
        "--seed",
        3,
        "--env-kwargs",
        "sutton_barto_reward=True",
        *SMALL,
    ]
    assert rollpipe("train", "dqn", "CartPole-v1", *words) == 0
    presets(**{"CartPole-v1": dict(eta=0.0, lr=1.0)})
    first = load_run(tmp_path / "a").config
    again = f"train dqn CartPole-v1 --config {tmp_path / 'a' / 'config.json'}"
    assert first["env_kwargs"] == dict(sutton_barto_reward=True) and first["seed"] == 3
    from_file = without_origins(config(again))
    assert from_file == {**without_origins(first), "preset": None}
    assert {*config(again)["origins"].values()} == {"file"}
    assert config(f"{again} --lr 2 --seed 4")["options"]["lr"] == 2
    # The file is complete.
    named = config(f"{again} --preset CartPole-v1")
    assert without_origins(named) == {**without_origins(first), "preset": "CartPole-v1"}
    assert not named.named("preset") and named.origin("preset") == "typed"


def test_the_configuration_of_a_run_over_ranks_is_a_file_of_settings(tmp_path):
    assert (
        rollpipe("train", "dqn", "CartPole-v1", "--steps", 64, "--out", tmp_path / "a", *SMALL) == 0
    )
    first = load_run(tmp_path / "a").config
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**first, "ranks": 2}))
    found = config(f"train dqn CartPole-v1 --config {path}")
    again = config(f"train dqn CartPole-v1 --config {tmp_path / 'a' / 'config.json'}")
    assert found == again and "ranks" not in found
    (tmp_path / "own.toml").write_text("lr = 0.5\nranks = 2\n")
    assert rollpipe("train", "dqn", "CartPole-v1", "--config", tmp_path / "own.toml") == 2


@pytest.mark.slow
def test_several_seeds_have_the_preset_too(tmp_path):
    "It ships, because the runs have processes of their own."
    assert (
        rollpipe(
            "train",
            "dqn",
            "Taxi-v4",
            "--steps",
            64,
            "--seeds",
            "0-1",
            "--out",
            tmp_path / "a",
            *SMALL,
        )
        == 0
    )
    table = files.presets_of("dqn")["Taxi-v4"]
    for seed in (0, 1):
        found = load_run(tmp_path / f"a-s{seed}").config
        assert found["preset"] == "Taxi-v4" and found["seed"] == seed
        assert all(
            found["options"][name] == table[name]
            for name in ("lr", "gamma", "eps_steps", "prioritized")
        )


def test_autotune_begins_with_the_preset_and_may_change_it(presets):
    presets(**{"CartPole-v1": dict(n_envs=2, n_steps=64, lr=0.25, warmup=16, batch_size=16)})
    trials = list(autotune("dqn", "CartPole-v1", seconds=0.01, preset="auto"))
    assert (trials[0].setting["n_envs"], trials[0].setting["n_steps"]) == (2, 64) and len(
        {t.setting["n_envs"] for t in trials}
    ) > 1
    assert {t.setting["n_envs"] * t.setting["lanes"] * t.setting["n_steps"] for t in trials} == {
        128
    }


# -- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, told",
    [
        ("lrr = 1e-3", "own.toml: there is no option 'lrr'. Expected lr"),
        (
            "[CartPole-v1]\nstep = 3",
            "own.toml, table CartPole-v1: there is no option 'step'. Expected steps",
        ),
        (
            "[Taxi-v4]\nstep = 3",
            "own.toml, table Taxi-v4: there is no option 'step'",
        ),  # also in a table that is not needed now
        ("steps = 900\n[option]\nlr = 1", "own.toml: there is no table 'option'. Expected options"),
        (
            "lr = '1e-3'",
            "--lr: .*own.toml: wrong type of value. Expected float or schedule, got '1e-3'",
        ),
        ("steps = 1e5", "--steps: .*own.toml: wrong type of value. Expected int, got 100000.0"),
        ("double = 1", "--double: .*wrong type of value. Expected bool, got 1"),
        ("hidden = [64, 'x']", "--hidden: .*own.toml"),
        ("lr = 1\nlr = 2", r"own.toml: not TOML \(Cannot overwrite a value"),
        ("lr = 1e-3\n\n[CartPole-v1\n", "own.toml: not TOML .*line 3"),
        ("[Taxi-v4]\nlr = 1", "own.toml: has nothing for CartPole-v1.*got Taxi-v4"),
        ("", "own.toml: has nothing for CartPole-v1.*got an empty file"),
        ("[CartPole-v1]\nactions = 'Box'\nlr = 1", "own.toml: has nothing for CartPole-v1"),
        ("[carts]\nenvs = 'CartPole-v1'\nlr = 1", "own.toml, table carts: wrong type of value"),
        ("[carts]\nenvs = ['C*']\nactions = 1\nlr = 1", "table carts: wrong type of value"),
        ("algorithm = 'ppo'\nlr = 1", "own.toml: is for another algorithm. Expected dqn, got ppo"),
        (
            "imports = ['moons']\nlr = 1",
            "own.toml: its run needs a module. Expected --import moons",
        ),
        ("env_kwargs = 3\nlr = 1", "leaf env_kwargs: .*own.toml"),
        ("preset = 'cart'\nlr = 1", "dqn has no preset 'cart'"),
        ("lr = -1", "lr.*got -1"),
    ],
)
def test_a_file_that_is_wrong_is_refused(text, told, tmp_path, capsys):
    (tmp_path / "own.toml").write_text(text)
    assert (
        rollpipe(
            "train",
            "dqn",
            "CartPole-v1",
            "--config",
            tmp_path / "own.toml",
            "--out",
            tmp_path / "run",
        )
        == 2
    )
    err = capsys.readouterr().err
    assert re.search(told, err) and err.count("\n") == 1 and not (tmp_path / "run").exists()


@pytest.mark.parametrize("name, text", [("own.toml", "lr = 1\r\n"), ("own.json", '{"lr": 1}')])
def test_a_file_may_begin_with_a_byte_order_mark(name, text, tmp_path):
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert read_table(tmp_path / name) == {"lr": 1}


@pytest.mark.parametrize(
    "name, content, told",
    [
        ("won.toml", None, r"won.toml: there is no such file. Expected \S*own.toml"),
        ("", None, "there is no such file. Expected a file, such as its config.json, got a folder"),
        ("own.json", b'{"lr": 1,}', "own.json: not JSON .*line 1 column"),
        ("own.json", b"[1]", "own.json: holds no options"),
        (
            "own.json",
            b'{"lr":\n' + b"[" * 100_000 + b"]" * 100_000 + b"}",
            "own.json: nested too deep, in line 2",
        ),
        (
            "own.toml",
            b"steps = 64\n\nlr = " + b"[" * 100_000 + b"]" * 100_000,
            "own.toml: nested too deep, in line 3",
        ),
        ("own.toml", b"a." * 2_000 + b"b = 1", "own.toml: nested too deep, in line 1"),
        ("own.json", b'{"env": "\\ud800"}', "own.json: not JSON .*surrogates"),
        ("own.toml", b"\xff\xfe", "own.toml: not a text in UTF-8"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(name, content, told, tmp_path, capsys):
    (tmp_path / "own.toml").write_text("lr = 1")
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert rollpipe("graph", "dqn", "CartPole-v1", "--config", tmp_path / name) == 2
    assert re.search(told, capsys.readouterr().err)


@pytest.mark.parametrize(
    "words, told",
    [
        (
            "dqn CartPole-v1 --preset CartPol-v1",
            "dqn has no preset 'CartPol-v1'. Expected CartPole-v1, auto or none",
        ),
        ("ppo CartPole-v1 --preset hills", "ppo has no preset 'hills'. Expected auto or none"),
        (
            "dqn CartPole-v1 --preset wheels",
            "CartPole-v1: the preset 'wheels' of dqn is for another action space. Expected Box, got Discrete",
        ),
        ("dqn CartPol-v1", "CartPole-v1"),
        ("dqn CartPol-v1 --preset hills", "unknown environment id 'CartPol-v1'"),
    ],
)
def test_a_preset_that_does_not_fit_is_refused(presets, words, told, capsys):
    assert rollpipe("graph", *words.split()) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    "command, words",
    [
        *(
            ("graph", words)
            for words in (
                "--seeds 0-4",
                "--seeds=0-4",
                "--jobs 2",
                "--continue",
                "--overwrite",
                "--out x",
                "--no-tensorboard",
            )
        ),
        ("profile", "--seeds 0-4"),
        ("autotune", "--quiet"),
    ],
)
def test_commands_without_a_run_refuse_its_options(command, words, capsys):
    assert rollpipe(command, "dqn", "CartPole-v1", *words.split()) == 2
    assert (
        f"{words.split()[0]} is an option of `rollpipe train`, and rollpipe {command} makes no run"
        in capsys.readouterr().err
    )


# -- lists -------------------------------------------------------------------------------------------------------------


def listed(capsys, *words):
    assert rollpipe("list", *words) == 0
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_lists(capsys, presets):
    assert {line[0]: line[1] for line in listed(capsys, "algorithms")}.keys() == ALGORITHMS.keys()
    assert listed(capsys, "presets")[0] == [
        "dqn",
        "CartPole-v1",
        "steps=300",
        "lr=0.25",
        "gamma=0.5",
        "checkpoint_every=3",
    ]
    assert [line[:3] for line in listed(capsys, "presets", "dqn")][1] == [
        "dqn",
        "hills",
        "MountainCar*",
    ]
    assert listed(capsys, "presets", "ppo") == ["ppo has no presets".split()]
    assert [line[0] for line in listed(capsys, "options", "dqn")] == [
        o.flag for o in options_for("dqn") + RUN_OPTIONS
    ]


@pytest.mark.parametrize("algorithm", ["dqn", "ppo"])
def test_environments_that_are_listed_fit_and_the_others_do_not(algorithm, capsys):
    "Against the environments themselves, as far as they can be made here."
    there = {line[0]: line[1] for line in listed(capsys, "envs")}
    fitting = {line[0] for line in listed(capsys, "envs", algorithm)}
    kinds = {
        name: kind
        for name, kind in there.items()
        if kind != "?" and not listing.missing_for(gym.spec(name))
    }
    assert len(kinds) >= 10 and "CartPole-v0" not in there and "GymV21Environment-v0" not in there
    for name, kind in kinds.items():
        assert kind == kind_of_actions(name, None)
        assert (name in fitting) == (algorithm == "ppo" or kind == "Discrete")


def test_what_needs_an_extra_is_marked(capsys, monkeypatch):
    monkeypatch.setattr(listing, "find_spec", lambda name: None if name == "Box2D" else object())
    there = {line[0]: line[1:] for line in listed(capsys, "envs")}
    assert there["LunarLander-v3"] == ["Discrete", "needs", "rollpipe[box2d]"] and there[
        "HalfCheetah-v5"
    ] == ["Box"]


@pytest.mark.parametrize(
    "words, told",
    [
        ("options", "options of which algorithm? Expected trpo"),
        ("options dqm", "unknown algorithm. Expected dqn, or one of --import, got dqm"),
        ("envs dqm", "unknown algorithm"),
        ("presets dqm", "unknown algorithm"),
        ("algorithms dqn", "takes no name"),
    ],
)
def test_a_list_of_what_is_not_there_is_refused(words, told, capsys):
    assert rollpipe("list", *words.split()) == 2
    assert told in capsys.readouterr().err


def test_the_configuration_of_a_run_without_a_preset_is_a_file_of_settings(tmp_path):
    assert (
        rollpipe(
            "train",
            "dqn",
            "CartPole-v1",
            "--preset",
            "none",
            "--steps",
            64,
            "--lr",
            0.5,
            "--out",
            tmp_path / "a",
            *SMALL,
        )
        == 0
    )
    again = config(f"train dqn CartPole-v1 --config {tmp_path / 'a' / 'config.json'}")
    before = load_run(tmp_path / "a").config
    assert without_origins(again) == without_origins(before)


def test_keywords_in_a_file_decide_about_its_table(tmp_path):
    "They say what kind of actions the environment has."
    gym.register(
        "Kinds-v0",
        entry_point=lambda continuous=False, **kw: gym.make(
            "Pendulum-v1" if continuous else "CartPole-v1", **kw
        ),
    )
    try:
        path = tmp_path / "a.toml"
        path.write_text(
            '[env_kwargs]\ncontinuous = true\n[discrete]\nenvs = ["Kinds-v0"]\nactions = "Discrete"\nlr = 0.5\n'
            '[box]\nenvs = ["Kinds-v0"]\nactions = "Box"\nlr = 0.25\n'
        )
        assert config(f"train ppo Kinds-v0 --config {path}")["options"]["lr"] == 0.25
        path.write_text("[env_kwargs]\ncontinuous = true\n")
        assert config(f"train ppo Kinds-v0 --config {path}")["env_kwargs"] == dict(continuous=True)
    finally:
        gym.registry.pop("Kinds-v0")


def test_a_policy_that_fails_for_other_spaces_does_not_end_the_list():
    class Fails:
        def for_env(env, **kwargs):
            return env[1].n

    for parts in (dict(policy=Fails, critic=None), dict(policy=MLPPolicy, critic=Fails)):
        kinds = [
            kind
            for kind, space in listing.KINDS.items()
            if listing._can_be_built(SimpleNamespace(**parts), space)
        ]
        assert kinds == ["Discrete", "MultiBinary"]


def measured(algorithm, env, label):
    """Last returns of the seeds in the committed results; empty if there is no such row. Labels of studies say what was changed.
    The results in `learning` are mostly of the defaults."""
    files = (Path(__file__).parents[1] / "benchmarks" / "results").glob("*/report.csv")
    return [
        float(row["last"])
        for file in files
        if file.parent.name != "learning"
        for row in csv.DictReader(file.read_text().splitlines())
        if (row["algorithm"], row["environment"], row["label"]) == (algorithm, env, label)
    ]


MEASURED = [
    (a, env)
    for a in ("ddpg", "dqn", "ppo", "sac", "td3", "trpo")
    for env in files.presets_of(a)
    if env != "atari"
]


@pytest.mark.parametrize(
    "algorithm, env, table, label",
    [
        *((a, env, env, a.upper()) for a, env in MEASURED),
        ("qr_dqn", "CartPole-v1", "rainbow", "QR-DQN, rainbow"),
    ],
)
def test_the_comments_are_those_of_the_results(algorithm, env, table, label):
    "Every preset that ships has a row, of five seeds, and on MuJoCo of ten for TRPO and three for PPO; not of games, which take days."
    text = (FOLDER / f"{algorithm}.toml").read_text().partition(f"[{table}]\n")[2]
    numbers = re.match(r"# (?:.*\n# )*?(?:CartPole-v1: )?((-?[\d.]+ ?)+)", text)[1].split()
    found = measured(algorithm, env, label)
    assert [*map(float, numbers)] == [round(x, 2 if "." in numbers[0] else 0) for x in found]
    assert len(numbers) == (dict(trpo=10, ppo=3).get(algorithm, 5) if env.endswith("-v5") else 5)
