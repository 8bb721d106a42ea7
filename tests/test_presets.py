"Presets and files of settings: what goes before what, what is recorded, and what is refused; and `rollpipe list`."

import csv
import fnmatch
import json
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import pytest
from command_line import error_of, rollpipe
from gallery import refused

from rollpipe import testing  # noqa: F401    registers Recall-v0
from rollpipe.cli.main import build_parser
from rollpipe.layers import MLPPolicy
from rollpipe.runs.autotune import autotune
from rollpipe.runs.commands import config_from
from rollpipe.runs.folder import load_run, resume
from rollpipe.runs.locks import unlock
from rollpipe.settings import files, listing
from rollpipe.settings.algorithms import ALGORITHMS, options_for
from rollpipe.settings.config import RUN_OPTIONS, build, make_config
from rollpipe.settings.files import check_table, kind_of_actions, read_table, tables_in

FOLDER = Path(files.__file__).parent / "presets"

SMALL = "--n-envs 4 --n-steps 8 --hidden 8 --warmup 32 --batch-size 16 --n-batches 1 --quiet --no-tensorboard"


POLE = "train dqn CartPole-v1"

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


def test_rainbow_is_for_whoever_asks_for_it(capsys):
    "It is a combination and not an environment's preset, so it fits Discrete actions anywhere."
    assert config("train qr_dqn Taxi-v4")["preset"] != "rainbow"
    found = config("train qr_dqn Acrobot-v1 --preset rainbow")
    options = found["options"]
    assert options["double"] and options["duelling"] and options["prioritized"]
    assert options["multi_step"] > 1
    build(found)
    error_of(capsys, "train qr_dqn Pendulum-v1 --preset rainbow")


# -- what goes before what ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, expected",
    {
        "--preset none": [1e-3, 0.99, 0.9, 100_000, 20, None],
        "": [0.25, 0.5, 0.9, 300, 3, "CartPole-v1"],
        "--preset auto": [0.25, 0.5, 0.9, 300, 3, "CartPole-v1"],
        "--preset CartPole-v1": [0.25, 0.5, 0.9, 300, 3, "CartPole-v1"],
        "FILE": [0.0625, 0.5, 0.9, 250, 3, "CartPole-v1"],
        "FILE --preset none": [0.0625, 0.99, 0.9, 250, 20, None],
        "FILE --lr 2 --gamma 1 --steps 9 --checkpoint-every 1": [2, 1, 0.9, 9, 1, "CartPole-v1"],
    }.items(),
)
def test_typed_before_file_before_preset_before_default(words, expected, presets, tmp_path):
    (tmp_path / "own.toml").write_text("lr = 0.0625\nsteps = 200\n\n[CartPole-v1]\nsteps = 250\n")
    found = config(f"{POLE} {words.replace('FILE', f'--config {tmp_path}/own.toml')}")
    of_learner = [found["options"][name] for name in ("lr", "gamma", "eta")]
    of_run = [found[name] for name in ("steps", "checkpoint_every", "preset")]
    assert of_learner + of_run == expected


def test_more_steps_than_the_learning_rates_of_a_preset_last_are_refused_at_once(tmp_path, capsys):
    run = tmp_path / "run"
    file = tmp_path / "own.toml"
    file.write_text("steps = 64\ndecay_steps = 64\nn_envs = 2\nn_steps = 16\n")
    words = f"train ppo CartPole-v1 --config {file} --out {run} --quiet"
    told = "--decay-steps: the learning rates fall to 0 before the training ends. Expected 0, or at least the steps of the training"
    err = error_of(capsys, f"{words} --steps 96")
    assert f"{told}, as by --decay-steps 96 for a new run, got 64." in err and not run.exists()
    assert rollpipe(words) == 0
    assert told in error_of(capsys, f"train --resume {run} --steps 96")
    assert rollpipe(f"{words} --steps 96 --decay-steps 96 --overwrite") == 0


def test_python_gets_the_bare_defaults_unless_it_asks(presets):
    bare = make_config("dqn", "CartPole-v1")
    defaults = {option.name: option.default for option in options_for("dqn")}
    plain = {name: [*x] if isinstance(x, tuple) else x for name, x in defaults.items()}
    assert bare["preset"] is None and bare["steps"] == 100_000 and bare["options"] == plain
    assert bare == make_config("dqn", "CartPole-v1", preset="none").having(origins={})
    assert make_config("dqn", "CartPole-v1", preset="auto")["options"]["lr"] == 0.25

    # A value that equals the default is typed as well.
    assert config(f"{POLE} --steps 100k --lr 0.001")["steps"] == 100_000
    found = make_config("dqn", "CartPole-v1", dict(lr=1e-3), steps=100_000, preset="auto")
    assert found["options"]["lr"] == 1e-3


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
    of_preset = dict(sutton_barto_reward=True)
    presets(**{"CartPole-v1": dict(actions="Discrete", lr=0.25, env_kwargs=of_preset)})
    file = tmp_path / "own.toml"
    of_table = "env_kwargs = {sutton_barto_reward = false, max_episode_steps = 9}"
    file.write_text(f"[CartPole-v1]\nlr = 0.5\n{of_table}\n")

    def kwargs(words):
        return config(f"{POLE} {words}")["env_kwargs"]

    assert kwargs("") == of_preset and kwargs("--preset none") == {}
    assert kwargs("--env-kwargs sutton_barto_reward=False") == dict(sutton_barto_reward=False)
    both = dict(sutton_barto_reward=False, max_episode_steps=9)
    assert kwargs(f"--config {file}") == both
    assert kwargs(f"--config {file} --env-kwargs max_episode_steps=5")["max_episode_steps"] == 5
    file.write_text("[CartPole-v1]\nenv_kwargs = 3\n")
    told = "own.toml, table CartPole-v1: wrong type of value.* names with values, got 3"
    refused(told, kwargs, f"--config {file}")


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
    words = f"{POLE} --out {run} {SMALL}"
    assert rollpipe(words) == 0
    assert "dqn on CartPole-v1, seed 0, preset CartPole-v1: " in capsys.readouterr().out
    before = json.loads((run / "config.json").read_text())
    values = (before["preset"], before["options"]["lr"], before["steps"])
    assert values == ("CartPole-v1", 0.25, 300)
    of_preset = [name for name, origin in before["origins"].items() if origin == "preset"]
    assert of_preset == ["steps", "lr", "gamma", "checkpoint_every"]

    # It goes on with them.
    presets(**{"CartPole-v1": dict(lr=1.0, gamma=0.0, steps=300)})
    resumed = resume(run, steps=400)
    assert resumed.config == {**before, "steps": 400} and resumed.agent.lr == 0.25
    unlock(run)
    assert rollpipe(f"{words} --steps 500 --continue") == 0
    assert load_run(run).config == {**before, "steps": 500}

    # What is typed is compared.
    told = "has other options. Expected the same, or another folder, got "
    for more, difference in {
        "--lr 0.75": "lr=0.25 instead of 0.75.\n",
        "--preset CartPole-v1": "gamma=0.5 instead of 0.0, lr=0.25 instead of 1.0.\n",
    }.items():
        err = error_of(capsys, f"{words} --continue --steps 600 {more}")
        assert told + difference in err


def without_origins(config):
    return {name: x for name, x in config.items() if name != "origins"}


def test_the_configuration_of_a_run_is_a_file_of_settings(presets, tmp_path):
    "Also of one over ranks."
    run = tmp_path / "a"
    kwargs = "--env-kwargs sutton_barto_reward=True"
    assert rollpipe(f"{POLE} --out {run} --seed 3 {kwargs} {SMALL}") == 0
    presets(**{"CartPole-v1": dict(eta=0.0, lr=1.0)})
    first = load_run(run).config
    again = f"{POLE} --config {run}/config.json"
    assert first["env_kwargs"] == dict(sutton_barto_reward=True) and first["seed"] == 3
    found = config(again)
    assert without_origins(found) == {**without_origins(first), "preset": None}
    assert {*found["origins"].values()} == {"file"}
    assert config(f"{again} --lr 2 --seed 4")["options"]["lr"] == 2

    # The file is complete.
    named = config(f"{again} --preset CartPole-v1")
    assert without_origins(named) == {**without_origins(first), "preset": "CartPole-v1"}
    assert not named.named("preset") and named.origin("preset") == "typed"

    # Only the file of a run may say over how many ranks it was.
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**first, "ranks": 2}))
    assert config(f"{POLE} --config {path}") == found and "ranks" not in found
    (tmp_path / "own.toml").write_text("lr = 0.5\nranks = 2\n")
    assert rollpipe(f"{POLE} --config {tmp_path}/own.toml") == 2


@pytest.mark.slow
def test_several_seeds_have_the_preset_too(tmp_path):
    "It ships, because the runs have processes of their own."
    words = f"train dqn Taxi-v4 --steps 64 --seeds 0-1 --out {tmp_path}/a {SMALL}"
    assert rollpipe(words) == 0
    table = files.presets_of("dqn")["Taxi-v4"]
    values = {name: table[name] for name in ("lr", "gamma", "eps_steps", "prioritized")}
    for seed in (0, 1):
        found = load_run(tmp_path / f"a-s{seed}").config
        assert found["preset"] == "Taxi-v4" and found["seed"] == seed
        assert found["options"].items() >= values.items()


def test_autotune_begins_with_the_preset_and_may_change_it(presets):
    presets(**{"CartPole-v1": dict(n_envs=2, n_steps=64, lr=0.25, warmup=16, batch_size=16)})
    trials = autotune("dqn", "CartPole-v1", seconds=0.01, preset="auto")
    settings = [trial.setting for trial in trials]
    assert (settings[0]["n_envs"], settings[0]["n_steps"]) == (2, 64)
    assert len({setting["n_envs"] for setting in settings}) > 1
    sizes = {x["n_envs"] * x["lanes"] * x["n_steps"] for x in settings}
    assert sizes == {128}


# -- mistakes ----------------------------------------------------------------------------------------------------------

# A file, whose lines end with `;` => what is told, a pattern

WRONG_FILES = r"""
lrr = 1e-3 => own.toml: there is no option 'lrr'. Expected lr
[CartPole-v1];step = 3 => own.toml, table CartPole-v1: there is no option 'step'. Expected steps
[Taxi-v4];step = 3 => own.toml, table Taxi-v4: there is no option 'step'
steps = 900;[option];lr = 1 => own.toml: there is no table 'option'. Expected options
lr = '1e-3' => --lr: .*own.toml: wrong type of value. Expected float or schedule, got '1e-3'
steps = 1e5 => --steps: .*own.toml: wrong type of value. Expected int, got 100000.0
double = 1 => --double: .*wrong type of value. Expected bool, got 1
hidden = [64, 'x'] => --hidden: .*own.toml
lr = 1;lr = 2 => own.toml: not TOML \(Cannot overwrite a value
lr = 1e-3;;[CartPole-v1; => own.toml: not TOML .*line 3
[Taxi-v4];lr = 1 => own.toml: has nothing for CartPole-v1.*got Taxi-v4
 => own.toml: has nothing for CartPole-v1.*got an empty file
[CartPole-v1];actions = 'Box';lr = 1 => own.toml: has nothing for CartPole-v1
[carts];envs = 'CartPole-v1';lr = 1 => own.toml, table carts: wrong type of value
[carts];envs = ['C*'];actions = 1;lr = 1 => table carts: wrong type of value
algorithm = 'ppo';lr = 1 => own.toml: is for another algorithm. Expected dqn, got ppo
imports = ['moons'];lr = 1 => own.toml: its run needs a module. Expected --import moons
env_kwargs = 3;lr = 1 => leaf env_kwargs: .*own.toml
preset = 'cart';lr = 1 => dqn has no preset 'cart'
lr = -1 => lr.*got -1
"""


# -- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", WRONG_FILES.strip("\n").splitlines())
def test_a_file_that_is_wrong_is_refused(line, tmp_path, capsys):
    text, told = line.split(" => ")
    file = tmp_path / "own.toml"
    file.write_text(text.replace(";", "\n"))
    err = error_of(capsys, f"{POLE} --config {file} --out {tmp_path}/run")
    assert re.search(told, err) and err.count("\n") == 1 and not (tmp_path / "run").exists()


DEEP = b"[" * 100_000 + b"]" * 100_000
TOO_MANY_DOTS = "own.toml: nested too deep, in line 1"
if sys.version_info >= (3, 13):  # it reads them, and then there is no such option
    TOO_MANY_DOTS = "own.toml, table a: there is no option"


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
        ("own.json", b'{"lr":\n%b}' % DEEP, "own.json: nested too deep, in line 2"),
        ("own.toml", b"steps = 64\n\nlr = " + DEEP, "own.toml: nested too deep, in line 3"),
        ("own.toml", b"a." * 2_000 + b"b = 1", TOO_MANY_DOTS),
        ("own.json", b'{"env": "\\ud800"}', "own.json: not JSON .*surrogates"),
        ("own.toml", b"\xff\xfe", "own.toml: not a text in UTF-8"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(name, content, told, tmp_path, capsys):
    (tmp_path / "own.toml").write_text("lr = 1")
    if content is not None:
        (tmp_path / name).write_bytes(content)
    err = error_of(capsys, f"graph dqn CartPole-v1 --config {tmp_path / name}")
    assert re.search(told, err)


OF_TRAIN = "{} is an option of `rollpipe train`, and rollpipe {} makes no run"


REFUSED = {
    "graph dqn CartPole-v1 --preset CartPol-v1": "dqn has no preset 'CartPol-v1'. Expected CartPole-v1, auto or none",
    "graph ppo CartPole-v1 --preset hills": "ppo has no preset 'hills'. Expected auto or none",
    "graph dqn CartPole-v1 --preset wheels": "the preset 'wheels' of dqn is for another action space. Expected Box, got Discrete",
    "graph dqn CartPol-v1": "CartPole-v1",
    "graph dqn CartPol-v1 --preset hills": "unknown environment id 'CartPol-v1'",
    "graph dqn CartPole-v1 --seeds=0-4": OF_TRAIN.format("--seeds=0-4", "graph"),
    **{
        f"{command} dqn CartPole-v1 {option} {value}": OF_TRAIN.format(option, command)
        for command, option, value in (
            ("graph", "--seeds", "0-4"),
            ("graph", "--jobs", 2),
            ("graph", "--continue", ""),
            ("graph", "--overwrite", ""),
            ("graph", "--out", "x"),
            ("graph", "--no-tensorboard", ""),
            ("profile", "--seeds", "0-4"),
            ("autotune", "--quiet", ""),
        )
    },
    "list options": "options of which algorithm? Expected trpo",
    "list options dqm": "unknown algorithm. Expected dqn, or one of --import, got dqm",
    "list envs dqm": "unknown algorithm",
    "list presets dqm": "unknown algorithm",
    "list algorithms dqn": "takes no name",
}


@pytest.mark.parametrize("words, told", REFUSED.items())
def test_a_preset_an_option_or_a_list_that_does_not_fit_is_refused(presets, words, told, capsys):
    assert told in error_of(capsys, words)


# -- lists -------------------------------------------------------------------------------------------------------------


def listed(capsys, words):
    assert rollpipe(f"list {words}") == 0
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_lists(capsys, presets):
    assert {line[0] for line in listed(capsys, "algorithms")} == ALGORITHMS.keys()
    first = "dqn CartPole-v1 steps=300 lr=0.25 gamma=0.5 checkpoint_every=3"
    assert listed(capsys, "presets")[0] == first.split()
    assert listed(capsys, "presets dqn")[1][:3] == ["dqn", "hills", "MountainCar*"]
    assert listed(capsys, "presets ppo") == ["ppo has no presets".split()]
    flags = [option.flag for option in options_for("dqn") + RUN_OPTIONS]
    assert [line[0] for line in listed(capsys, "options dqn")] == flags


@pytest.mark.parametrize("algorithm", ["dqn", "ppo"])
def test_environments_that_are_listed_fit_and_the_others_do_not(algorithm, capsys):
    "Against the environments themselves, as far as they can be made here."
    there = {line[0]: line[1] for line in listed(capsys, "envs")}
    fitting = {line[0] for line in listed(capsys, f"envs {algorithm}")}
    assert not there.keys() & {"CartPole-v0", "GymV21Environment-v0"}
    n_made = 0
    for name, kind in there.items():
        if kind != "?" and not listing.missing_for(gym.spec(name)):
            n_made += 1
            assert kind == kind_of_actions(name, None)
            assert (name in fitting) == (algorithm == "ppo" or kind == "Discrete")
    assert n_made >= 10


def test_what_needs_an_extra_is_marked(capsys, monkeypatch):
    monkeypatch.setattr(listing, "find_spec", lambda name: None if name == "Box2D" else object())
    there = {line[0]: line[1:] for line in listed(capsys, "envs")}
    assert there["LunarLander-v3"] == ["Discrete", "needs", "rollpipe[box2d]"] and there[
        "HalfCheetah-v5"
    ] == ["Box"]


def test_the_configuration_of_a_run_without_a_preset_is_a_file_of_settings(tmp_path):
    run = tmp_path / "a"
    assert rollpipe(f"{POLE} --preset none --steps 64 --lr 0.5 --out {run} {SMALL}") == 0
    again = config(f"{POLE} --config {run}/config.json")
    assert without_origins(again) == without_origins(load_run(run).config)


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
