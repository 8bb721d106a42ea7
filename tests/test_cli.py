"The command line as a user meets it: results, resuming, Ctrl-C, and one line for each mistake."

import errno
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import (
    QUIET,
    SMALL_LINE,
    error_of,
    lines,
    process,
    python,
    rollpipe,
    run_command,
    wait_for,
)
from forked import Forked
from gallery import check_same, quietly, refused
from recordings import recorded

from rollpipe.agents.checkpoint import load_checkpoint, save_checkpoint
from rollpipe.agents.metrics import METRICS
from rollpipe.cli.main import build_parser, main
from rollpipe.pipes.data.errors import CheckpointError
from rollpipe.pipes.data.nested import first_difference
from rollpipe.pipes.keeping.files import write_atomically
from rollpipe.pipes.recording.recorder import ItemFolder
from rollpipe.runs import commands
from rollpipe.runs.commands import TYPED_OPTIONS, config_from
from rollpipe.runs.folder import load_run, restore, resume, start
from rollpipe.runs.locks import lock, owner_of, unlock
from rollpipe.runs.logs import read_metrics
from rollpipe.runs.pack import load_agent
from rollpipe.settings.algorithms import ALGORITHMS, options_for
from rollpipe.settings.config import build, make_config
from rollpipe.settings.options import parse_env_kwargs, parse_value
from rollpipe.traces.history import config_at

SMALL_TRPO = f"train trpo CartPole-v1 {SMALL_LINE}"

ROOT = Path(__file__).resolve().parents[1]


def task_of(algorithm):
    "An environment with actions that suit it."
    is_continuous = algorithm in "sac crossq td3 ddpg iql td3bc".split()
    return "Pendulum-v1" if is_continuous else "CartPole-v1"


def succeed(*words):
    assert rollpipe(*words) == 0, words


def wait_for_updates(run, n, child):
    "Wait until a training in a process has recorded so many updates."
    wait_for(lambda: lines(run / "metrics.jsonl") >= n, child)


def names_in(folder):
    return {path.name for path in folder.iterdir()}


def small_run(folder, more=""):
    succeed(f"{SMALL_TRPO} --steps 384 --out {folder} {more}")
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return small_run(tmp_path_factory.mktemp("trained") / "run")


@pytest.fixture
def run(trained, tmp_path):
    "A copy of the trained run, which the test may change."
    return Path(shutil.copytree(trained, tmp_path / "run"))


FILES_OF_A_RUN = """
config.json fingerprint.json metrics.csv metrics.jsonl history.jsonl journal.jsonl checkpoint.safetensors
""".split()


# -- train, resume -----------------------------------------------------------------------------------------------------


def test_a_run_leaves_its_files_with_metrics_and_configuration(run):
    assert names_in(run) == {*FILES_OF_A_RUN, "costs.json"}
    metrics = read_metrics(run)
    assert metrics["steps"].tolist() == [128, 256, 384] and set(metrics) <= set(METRICS)
    assert metrics["lag"].tolist() == [0, 0, 0]
    some = "kl accepted entropy explained_variance seconds_policy seconds_collect"
    assert {*some.split()} <= set(metrics)
    config = json.loads((run / "config.json").read_text())
    options = config["options"]
    assert (options["hidden"], options["gamma"], config["seed"]) == ([8], 0.99, 0)
    assert load_checkpoint(run / "checkpoint.safetensors").config == config


def test_options_reach_their_parts():
    typed = dict(max_kl=0.02, n_steps=16, lanes=2, hidden=(8, 4), normalize=False)
    agent, pipe = build(make_config("trpo", "CartPole-v1", typed))
    assert agent.max_kl == 0.02
    assert agent.actor.obs_norm is None and agent.critic.obs_norm is not None
    assert sorted(p.shape[0] for p in agent.actor.trunk.parameters() if p.ndim == 2) == [4, 8]
    fragment = next(iter(pipe))
    assert fragment.adv.shape == (16, 16) and fragment.lane.unique().tolist() == [0, 1]


def test_activations_are_chosen_and_stored_by_name(tmp_path):
    def activations(config):
        agent, _ = build(config)
        return [type(net.activation).__name__ for net in (agent.actor.trunk, agent.critic.net)]

    run = small_run(tmp_path / "run", "--activation relu --critic-activation silu")
    options = json.loads((run / "config.json").read_text())["options"]
    assert (options["activation"], options["critic_activation"]) == ("relu", "silu")
    config = load_run(run).config
    assert activations(config) == ["ReLU", "SiLU"]
    succeed(f"evaluate {run} --episodes 1")

    # As in runs from before this option
    options = {name: x for name, x in config["options"].items() if not name.endswith("activation")}
    assert activations({**config, "options": options}) == ["Tanh", "Tanh"]


def test_keywords_of_the_environment_are_typed_and_stored(tmp_path):
    kwargs = "--env-kwargs map_name=8x8 is_slippery=False"
    words = f"train trpo FrozenLake-v1 {kwargs} --steps 64 {SMALL_LINE} --out"
    succeed(words, tmp_path / "a")
    checkpoint = load_run(tmp_path / "a")
    assert checkpoint.config["env_kwargs"] == dict(map_name="8x8", is_slippery=False)
    shapes = [tuple(x.shape) for x in checkpoint.agent_state["actor"].values()]
    assert (8, 64) in shapes  # one input for each of 64 fields
    succeed(f"evaluate {tmp_path}/a --episodes 2")


def test_a_resume_changes_what_holds_and_not_what_was_asked_for(run):
    more = resume(run, steps=640)
    assert more.counters["resumes"] == 0  # it goes on exactly, so nobody can tell
    quietly(more)
    metrics = read_metrics(run)
    assert (np.diff(metrics["episodes"]) >= 0).all() and (np.diff(metrics["seconds"]) > 0).all()
    assert metrics["lag"].tolist() == [0] * 5
    assert config_at(run, math.inf)["steps"] == 640
    assert json.loads((run / "config.json").read_text())["steps"] == 384


def test_a_resumed_run_sees_fresh_episodes(run):
    config = load_run(run).config
    a, b, c = (next(iter(build(config, resumes=n)[1])).state.obs for n in (0, 1, 1))
    assert not torch.equal(a, b) and torch.equal(b, c)


def test_records_after_the_last_checkpoint_are_made_again(run):
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"steps": 512, "updates": 4}\n{"steps": 640, "upd')
    succeed(f"train --resume {run} --steps 512 {QUIET}")
    assert read_metrics(run)["steps"].tolist() == [128, 256, 384, 512]


def test_overwrite_removes_only_the_run(run, capsys):
    (run / "notes.txt").write_text("mine")
    words = f"{SMALL_TRPO} --steps 128 --out {run}"
    assert "has a run already" in error_of(capsys, words) and len(read_metrics(run)["steps"]) == 3
    succeed(f"{words} --overwrite")
    assert len(read_metrics(run)["steps"]) == 1 and (run / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("more", ["", "--continue"])
def test_a_run_that_another_process_made_meanwhile_stays(more, tmp_path, capsys, monkeypatch):
    from rollpipe.runs import folder

    build = folder.build
    run = tmp_path / "run"
    words = f"{SMALL_TRPO} --steps 128 --out {run}"

    def late(*args):
        monkeypatch.setattr(folder, "build", build)
        succeed(f"{words} --seed 1")
        return build(*args)

    monkeypatch.setattr(folder, "build", late)
    assert rollpipe(f"{words} --seed 0 {more}") == 2
    assert "has a run already" in capsys.readouterr().err
    assert load_run(run).config["seed"] == 1 and not (run / "lock").exists()
    succeed(f"{words} --seed 1 --continue")


@pytest.mark.parametrize(
    "words", ["demo", *(f"train ppo CartPole-v1{x}" for x in ("", " --overwrite", " --continue"))]
)
@pytest.mark.parametrize("config", ["{}", "[1]", "{"])
def test_files_that_belong_to_no_run_stay(config, words, tmp_path, capsys):
    (tmp_path / "videos").mkdir()
    files = {"config.json": config, "metrics.csv": "mine", "videos/holiday.mp4": "film"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    err = error_of(capsys, f"{words} --steps 64 --out {tmp_path} {QUIET}")
    assert "got config.json, metrics.csv, videos" in err
    after = {str(x.relative_to(tmp_path)): x.read_text() for x in tmp_path.rglob("*.*")}
    assert after == files


@pytest.mark.parametrize("name", ["checkpoint.safetensors", "config.json"])
def test_a_run_that_lacks_files_can_be_replaced(name, run):
    for path in [*run.iterdir()]:
        if path.name not in (name, "metrics.csv"):
            path.unlink()
    succeed(f"{SMALL_TRPO} --steps 128 --out {run} --overwrite")


# -- every algorithm ---------------------------------------------------------------------------------------------------

TINY = dict(
    n_envs=4,
    n_steps=16,
    hidden=(8,),
    critic_hidden=(8,),
    epochs=2,
    minibatch=32,
    warmup=64,
    batch_size=16,
    samples_per_step=0.25,
)


def as_typed(value):
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else value


def tiny(algorithm, folder, checkpoint_every=2):
    """The configuration of a very short run, with those options of `TINY` that the algorithm has.

    It has data if it needs them.
    """
    has = {o.name for o in options_for(algorithm)}
    env = task_of(algorithm)
    options = {name: x for name, x in TINY.items() if name in has}
    if "data" in has:
        options |= dict(data=str(recorded(folder / "data", env)), batch_size=64)
    return make_config(algorithm, env, options, steps=256, checkpoint_every=checkpoint_every)


@pytest.mark.slow_but_one
@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_every_algorithm_trains_is_saved_goes_on_and_plays(algorithm, tmp_path, capsys):
    "The options are typed, and give what they give in Python."
    run = tmp_path / "a"
    expected = tiny(algorithm, tmp_path, checkpoint_every=20)
    words = f"train {algorithm} {task_of(algorithm)} --preset none --steps 256 --out {run}"
    for name in expected["options"].keys() & {*TINY, "data"}:
        value = expected["options"][name]
        words += f" --{name.replace('_', '-')} {as_typed(value)}"
    succeed(words, QUIET)
    metrics = read_metrics(run)
    checkpoint = load_run(run)
    assert set(metrics) <= set(METRICS) and (metrics["lag"] == 0).all()
    assert metrics["steps"].tolist() == [64, 128, 192, 256] and checkpoint.counters["steps"] == 256

    # The configuration has the engine that 'auto' was.
    if "engine" in expected["options"]:
        has_onnx = find_spec("onnxruntime") and find_spec("onnx")
        expected = expected.having(engine="onnxruntime" if has_onnx else "torch")
    assert checkpoint.config.having(origins={}) == expected.having(origins={})
    agent, _ = restore(checkpoint)
    assert first_difference(agent.state_dict(), checkpoint.agent_state) is None

    # It goes on, and plays.
    succeed(f"train --resume {run} --steps 384 {QUIET}")
    assert read_metrics(run)["steps"].tolist() == [64, 128, 192, 256, 320, 384]
    succeed(f"evaluate {run} --episodes 2 --seed 0")
    assert "mean, standard error of 2 episodes" in capsys.readouterr().out


# -- evaluate, plot, graph, demo ---------------------------------------------------------------------------------------


def test_an_evaluation_is_the_same_for_a_run_and_its_checkpoint(run, capsys, tmp_path):
    capsys.readouterr()
    succeed(f"evaluate {run} --episodes 3 --seed 1")
    first = capsys.readouterr().out
    assert re.match(r"return [\d.]+ \+- [\d.]+ \(mean, standard error of 3 episodes; min", first)
    succeed(f"evaluate {run}/checkpoint.safetensors --episodes 3 --seed 1")
    assert capsys.readouterr().out == first
    film = tmp_path / "film.gif"
    succeed(f"evaluate {run} --episodes 1 --sample --record {film}")
    assert film.read_bytes()[:3] == b"GIF"


def test_a_plot_of_two_runs_is_a_picture(run, tmp_path, capsys):
    picture = tmp_path / "two.svg"
    succeed(f"plot {run} {run} --out {picture} --y kl --band std --window 2")
    assert "<svg" in picture.read_text()
    assert capsys.readouterr().out.splitlines()[-1] == str(picture)


@pytest.mark.slow
def test_the_commands_for_a_folder_that_begins_with_a_dash_can_be_typed(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    words = "train ppo CartPole-v1 --steps 64 --n-envs 2 --n-steps 16 --hidden 4 --no-tensorboard"
    rollpipe(f"{words} --out=-dash")
    rollpipe(f"{words} --seeds 0-1 --out=-more --quiet")
    lines = re.findall(r"rollpipe ((?:evaluate|plot) .*)", capsys.readouterr().out)
    assert lines == ["evaluate ./-dash", "plot ./-more-s0 ./-more-s1"]
    Path("spec.toml").write_text(
        '[[row]]\nalgorithm = "ppo"\nenv = "Pendulum-v1"\nsteps = 64\nseeds = [0]\nepisodes = 1\n'
        "final_episodes = 1\noptions = { n_envs = 2, n_steps = 16, hidden = [4], log_std = -1e-5 }"
    )
    for line in (*lines, "bench spec.toml --dir ./-bench --quiet"):
        succeed(line)
    (report,) = re.findall(r"rollpipe (report .*)", capsys.readouterr().out)
    succeed(report)


def test_a_folder_whose_name_is_not_utf8_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    name = os.fsdecode(b"run\xff")
    told = f"the name of a folder is not UTF-8. Expected another name, got '{tmp_path}/run\\udcff'"
    assert told in error_of(capsys, "train ppo CartPole-v1 --steps 64 --quiet --out", name)


def full_disk(*args, **options):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_lock_on_a_full_disk_is_named(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("rollpipe.runs.locks.print", full_disk, raising=False)
        refused(f"No space left on device: '{tmp_path}/lock'", lock, tmp_path, error=OSError)
    lock(tmp_path), unlock(tmp_path)


def test_a_link_in_the_folder_of_a_run_leads_nowhere(run, gallery, tmp_path, capsys):
    "The folder may come from a stranger. A link to the whole folder is the user's own."
    mine = tmp_path / "mine"
    mine.write_text("years of work")
    (tmp_path / "link").symlink_to(run)
    lock(tmp_path / "link"), unlock(tmp_path / "link")

    # A lock that is no plain file
    path = run / "lock"
    for plant in (
        lambda: path.symlink_to(mine),
        lambda: os.mkfifo(path),
        lambda: path.symlink_to(tmp_path / "nothing"),
    ):
        plant()
        refused(f"{path} is no lock. Expected a plain file, or none", lock, run)
        assert owner_of(run) == ""  # at once
        path.unlink()
    assert mine.read_text() == "years of work" and not (tmp_path / "nothing").exists()

    # A folder of the run that is a link
    kept = gallery.copy("dqn", tmp_path / "other") / "checkpoints"
    n_kept = len([*kept.iterdir()])
    for name in ("checkpoints", "replay", "recording"):
        (run / name).symlink_to(kept)
        refused(f"{run}/{name} is a link. Expected a folder", resume, run, 10**6)
        error_of(capsys, f"train ppo CartPole-v1 --out {run} --overwrite --quiet --steps 64")
        (run / name).unlink()
    assert len([*kept.iterdir()]) == n_kept > 3
    (run / "recording").mkdir()
    (run / "recording" / ".lock").symlink_to(mine)
    refused(".lock", ItemFolder, run / "recording", error=OSError)
    assert mine.read_text() == "years of work"


@pytest.mark.parametrize(
    "words, file",
    [
        ("plot {run}", "{run}/curve.png"),
        ("plot {run} --out {file}", "picture.svg"),
        ("profile ppo CartPole-v1 --seconds 0.1 --svg {file}", "picture.svg"),
    ],
)
def test_a_picture_on_a_full_disk(words, file, run, tmp_path, monkeypatch, capsys):
    before = {*run.iterdir(), *tmp_path.iterdir()}
    file = tmp_path / file.format(run=run)
    monkeypatch.setattr(os, "fsync", full_disk)
    assert rollpipe(words.format(run=run, file=file)) == 2
    err = capsys.readouterr().err
    assert "No space left on device" in err and str(file) in err
    assert {*run.iterdir(), *tmp_path.iterdir()} == before


@pytest.mark.slow
def test_another_curve_is_another_picture(run, capsys):
    for words, name in {
        "": "curve.png",
        "--y kl": "curve-kl.png",
        "--y kl --x updates": "curve-kl-updates.png",
        "--y return_mean": "curve.png",
    }.items():
        succeed(f"plot {run} {words}")
        assert capsys.readouterr().out == f"{run}/{name}\n" and (run / name).is_file()
    small_run(run, "--overwrite")
    assert not [*run.glob("curve*")]  # they belong to the run before


@pytest.mark.parametrize(
    "words", ["--lr 0.1", "--lr=0.1", "--lag 2", "--no-normalize", "--steps 500 --gamma .9"]
)
def test_a_run_that_goes_on_keeps_its_options(words, run, capsys):
    option = "--gamma" if "--gamma" in words else words.split()[0]
    told = f"a run that goes on keeps its options, so {option} cannot stand beside --resume"
    assert told in error_of(capsys, f"train --resume {run} {words}")


@pytest.mark.slow_but_one
@pytest.mark.parametrize("way", ["--continue", "--resume"])
def test_a_run_goes_on_with_other_options_on_which_no_number_depends(way, tmp_path, monkeypatch):
    "Its numbers are those of a run without an interruption; what is not typed, stays."
    monkeypatch.chdir(tmp_path)
    begin = f"train trpo CartPole-v1 {SMALL_LINE} --lanes 2 --out run"
    words = f"{begin} --continue" if way == "--continue" else f"train --resume run {QUIET}"
    free = dict(workers=2, checkpoint_every=1, restarts=3)
    assert rollpipe(f"{begin} --steps 256") == 0
    assert rollpipe(f"{words} --steps 512 --workers 2 --checkpoint-every 1 --restarts 3") == 0
    assert load_run("run").history[-1] == dict(event="extended", at=1, set=dict(free, steps=512))
    assert rollpipe(f"{words} --steps 768 --workers 0") == 0
    assert config_at("run", math.inf) == {**config_at("run", 0), **free, "workers": 0, "steps": 768}

    assert rollpipe(f"{begin.replace('--out run', '--out whole')} --steps 768") == 0
    check_same(tmp_path / "run", tmp_path / "whole")


def test_graph_draws_what_train_would_run(capsys):
    succeed("graph trpo Pendulum-v1 --lanes 3 --n-steps 7 --steps 5 --seed 1")
    out = capsys.readouterr().out
    pipes = [re.search(r"\w+", line)[0] for line in out.splitlines()]
    names = "EnvStepper FragmentCollector Lanes AdvantageBuffer FragmentStacker"
    assert pipes == names.split()
    assert "Pendulum-v1" in out and "n_steps=7" in out and "n=3" in out


@pytest.mark.slow
def test_a_demo_can_be_run_twice(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        succeed(f"demo --steps 2048 {QUIET}")
        out = capsys.readouterr().out
        for name in ("random policy", "trained policy, no exploration"):
            assert re.search(name + r" +-\d+\.\d \+- ", out)
    assert names_in(Path("runs/demo")) == {*FILES_OF_A_RUN, "curve.png"}


LISTING = """
import sys
from rollpipe.cli.start import main
try: main()
finally: print({'torch', 'numpy'} & {*sys.modules})
"""


@pytest.mark.slow_but_one
@pytest.mark.parametrize("words", ["", "--help", "-h", "--version"])
def test_the_list_of_commands_needs_no_torch_and_is_that_of_the_parser(words, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    command = [sys.executable, "-c", LISTING, *words.split()]
    done = subprocess.run(command, text=True, capture_output=True, timeout=60, cwd=ROOT)
    with pytest.raises(SystemExit):
        build_parser().parse_args([words or "--help"])
    assert (done.returncode, done.stdout) == (0, capsys.readouterr().out + "set()\n")


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_every_option_has_its_meaning_in_the_help_with_the_default_of_the_algorithm(
    algorithm, capsys
):
    "And each default is one that its annotation allows."
    succeed("train", algorithm, "--help")
    text = " ".join(capsys.readouterr().out.split())
    defaults = ALGORITHMS[algorithm].defaults
    options = {option.name: option for option in options_for(algorithm)}
    assert "==SUPPRESS==" not in text and set(defaults) <= set(options)
    config = make_config(algorithm, "CartPole-v1")["options"]
    assert config.keys() == options.keys()
    for name, option in options.items():
        option.check(option.default)
        meaning = " ".join(option.help.split()).replace("None:", "none:")  # as it is typed
        assert meaning and option.flag in text and meaning in text, option
        if name in defaults:
            value = defaults[name]
            assert f"{meaning} [{as_typed(value)}]" in text
            assert config[name] == ([*value] if isinstance(value, tuple) else value)

    # The parser adds none of its own.
    args = vars(build_parser().parse_args(["train", algorithm, "CartPole-v1"]))
    assert not set(args) & options.keys()


def test_every_default_of_a_run_is_what_its_annotation_allows():
    for option in TYPED_OPTIONS:
        option.check(option.default)


def typed(words):
    "The configuration of a command."
    return config_from(build_parser().parse_args(words.split()))


@pytest.mark.parametrize("word", ["none", "None"])
@pytest.mark.parametrize(
    "words",
    [
        *(f"ppo --{name}" for name in ("target-kl", "max-grad-norm", "critic-lr")),
        *(f"dqn --{name}" for name in ("huber", "tau", "beta-steps", "encoder", "path")),
        "trpo --vector",
    ],
)
def test_none_can_be_typed_where_the_annotation_allows_it(words, word):
    algorithm, flag = words.split()
    config = typed(f"train {algorithm} CartPole-v1 {flag} {word}")
    assert config["options"][flag.strip("-").replace("-", "_")] is None
    build(config)


CONV = dict(images="conv")


BITS = dict(images="conv", discrete="bits")


@pytest.mark.parametrize(
    "words, encoder, of_critic",
    [
        ("--encoder images=conv", CONV, CONV),
        ("--encoder images=conv,discrete=bits", BITS, BITS),
        ("--encoder {'images':'conv'} --critic-encoder none", CONV, None),
        ("--critic-encoder images=conv", None, CONV),
        ("", None, None),
    ],
)
def test_the_critic_has_the_encoder_of_the_actor_unless_it_has_its_own(words, encoder, of_critic):
    options = typed(f"train ppo CartPole-v1 {words}")["options"]
    assert (options["encoder"], options["critic_encoder"]) == (encoder, of_critic)


@pytest.mark.parametrize(
    "word, value",
    [
        ("x=true", True),
        ("x=false", False),
        ("x=True", True),
        ("x='true'", "true"),
        ("x=truely", "truely"),
    ],
)
def test_keyword_arguments_of_an_environment(word, value):
    assert parse_env_kwargs([word]) == dict(x=value)


@pytest.mark.parametrize(
    "text", ["images=conv,images=flat", "images=conv,flat", "images=conv,", "conv=(16,32)"]
)
def test_what_is_no_list_of_keywords_is_no_dict(text):
    refused("is not dict or none", parse_value, text, ("dict", "None"), error=ValueError)


@pytest.mark.parametrize(
    "algorithm, options, told",
    [
        ("ppo", dict(target_kl="abc"), "target_kl.*float or none or schedule, got 'abc'"),
        ("ppo", dict(epochs=2.5), "epochs.*int, got 2.5"),
        ("dqn", dict(huber=True), "huber"),
        ("trpo", dict(hidden=(8, "x")), "hidden"),
        ("trpo", dict(hidden=8), "hidden"),
    ],
)
def test_options_are_checked_without_a_command_line_as_well(algorithm, options, told):
    refused(told, make_config, algorithm, "CartPole-v1", options)


# -- mistakes ----------------------------------------------------------------------------------------------------------


# A command => what its one line says, a pattern

LINES_OF_MISTAKES = r"""
train trpo Pendulm-v1 => Pendulm-v1.*Pendulum-v1
train trop Pendulum-v1 => invalid choice: 'trop'.*trpo.*one of your own needs --import MODULE
train trpo Pendulum-v1 --hidden 8 9 => unknown argument 9; an option takes one word, such as --hidden 64,64
train --seed 2 trpo Pendulum-v1 => invalid choice: .2.*options such as --seed stand after ALGO ENV
train => which algorithm.*trpo
train trpo => required: ENV
train ppo CartPole-v1 --lr -1 => ^error: --lr: PPO: out of range. Expected 0 <= lr < inf
fork RUN --set lr=-1 --out FORK => --set lr: .*out of range|no option 'lr'
trian ppo CartPole-v1 => 'trian'; did you mean train[?]
train pppo CartPole-v1 => 'pppo'; did you mean ppo[?].*--import
list algoritms => 'algoritms'; did you mean algorithms[?]
list options pppo => Expected ppo, or one of --import, got pppo
export RUN --to onx => Expected onnx, torchscript, pt2, got 'onx'
fork RUN --st clip=0.1 --out FORK => unknown argument --st; did you mean --steps or --set[?]
tune ppo CartPole-v1 --trails 3 => unknown argument --trails; did you mean --trials
evaluate RUN --episode 3 => unknown argument --episode; did you mean --episodes[?]
train ppo CartPole-v1 --preset cartpole-V1 => no preset.*Expected CartPole-v1, auto
train ppo cartpole-V1 => nearest known ids: CartPole-v1
train ppo nowhere:Own => module of .* 'nowhere:Own' cannot be imported.*named 'nowhere'
train ppo toys:Plain => gymnasium.register.'Plain-v0', Plain.. in toys: 'toys:Plain-v0'
train trpo Pendulum-v1 --max-lk 1 => --max-lk.*did you mean --max-kl
train trpo Pendulum-v1 --gamma x => --gamma: invalid float value: 'x'
train trpo Pendulum-v1 --steps 1.5 => --steps: invalid int value: '1.5'
train trpo Pendulum-v1 --hidden 8,x => --hidden
train ppo Pendulum-v1 --target-kl abc => --target-kl: invalid float or none or schedule value: 'abc'
train trpo Pendulum-v1 --critic-lr fast => --critic-lr: invalid float or schedule value: 'fast'
train dqn CartPole-v1 --tau abc => --tau: invalid float or none or schedule value: 'abc'
train dqn CartPole-v1 --epsilon 0.5 => unknown argument --epsilon; did you mean --eps-end
train ppo CartPole-v1 --lag soon => --lag: invalid int or none value: 'soon'
train dqn CartPole-v1 --beta-steps many => --beta-steps: invalid int or none value: 'many'
train ppo CartPole-v1 --encoder conv => --encoder: invalid dict or none value: 'conv'
train trpo CartPole-v1 --activation rule => activation.*elu, gelu, leaky_relu, relu, sigmoid, silu, tanh, got 'rule'
train trpo CartPole-v1 --critic-activation ReLU => unknown activation.*got 'ReLU'
train trpo Pendulum-v1 --steps 1x => --steps: invalid int value
train trpo Pendulum-v1 --steps 0 => ^error: out of range. Expected an integer steps >= 1, got steps=0
train trpo Pendulum-v1 --seed -1 => an integer seed >= 0, got seed=-1
train trpo Pendulum-v1 --n-steps 0 => n_steps >= 1
train trpo Pendulum-v1 --n-envs 0 => environments
train trpo Pendulum-v1 --lanes 0 => Lanes: out of range.*n=0
train trpo Pendulum-v1 --env-kwargs g => key=value, got g
train trpo Pendulum-v1 --env-kwargs planet=mars => planet
train --resume nowhere => nowhere: there is no such run
train --resume RUN => is complete.*--steps above 384
train --resume RUN trpo CartPole-v1 => not both
evaluate RUNN => there is no such run.*for example .*run
evaluate RUN --episodes 0 => n_episodes >= 1
evaluate RUN --record film.avi => .gif or .mp4
evaluate RUN/metrics.csv => not a checkpoint
evaluate BROKEN => damaged
evaluate FOREIGN => not the checkpoint of a run
plot nowhere => not the folder of a run
plot RUN --y kul => kul
plot RUN --out RUN/no/such/folder.png => folder
graph trpo Pendulum => Pendulum-v1
graph trpo Pendulum-v1 --lamb 1 => did you mean --lam
plto => invalid choice: 'plto'
train ppo CartPole-v1 --learning-rate 1e-3 => did you mean --lr[?]
train ppo CartPole-v1 --total-timesteps=1000 => did you mean --steps[?]
train ppo CartPole-v1 --batch_size 64 => did you mean --minibatch[?]
train ppo CartPole-v1 --track => did you mean --wandb[?]
train ppo CartPole-v1 --lrate 3 => did you mean --lr[?]
train ppo CartPole-v1 --max-kl 3 => --max-kl, an option of trpo and npg .see rollpipe train ppo --help.
train trpo CartPole-v1 --clip 3 => --clip, an option of ppo .see rollpipe train trpo --help.
train ppo CartPole-v1 --tau 0.1 => --tau, an option of other algorithms .see rollpipe train ppo --help.
evaluate RUN --max-kl 3 => unknown argument --max-kl .see rollpipe evaluate --help.
train ppo CartPole-v1 --overwite => did you mean --overwrite[?]
train sac Pendulum-v1 --ent-coef 0.1 => did you mean --temperature[?]
train sac CartPole-v1 => Box of floats for sac, or an algorithm for it: trpo, .*dqn, qr_dqn, got Discrete\(2\)
train dqn Pendulum-v1 => Discrete for dqn, or an algorithm for it: .*ppo, vtrace, sac, crossq, td3, ddpg, got Box
train ppo Qzxvk-v0 => Expected an id of gymnasium's registry; or .*--import MODULE.*'MODULE:Qzxvk-v0'
train ppo Point-v0 --import point.py => --import point.py: a file name .* did you mean point[?] Python looks
train ppo Point-v0 --import ./sub/point.py => did you mean sub.point[?]
train ppo Own-v0 => which a module registers .*--import MODULE.*'MODULE:Own-v0'
train --resume RUN --learning-rate 0.1 => so --learning-rate cannot stand .*which takes --steps, --device, --workers, --address,
train --resume RUN --learning-rate 0.1 => --workers, --address, --checkpoint-every, --restarts, --quiet
train --resume RUN --out other => so --out cannot stand beside --resume
replay nowhere --update 1 => ^error: nowhere: there is no such run
verify RUN --updates 0 => an integer updates >= 1, got updates=0
export RUN --to torchscript --out nowhere/policy.pt => ^error: nowhere/policy.pt: there is no such folder
export RUN --to torchscript --out RUN => this is a folder. Expected a file to write
train trpo CartPole-v1 --resume RUN => either --resume RUN or ALGO ENV, not both
train --resume RUN/config.json => config.json: not a checkpoint. Expected the folder of the run, .*run
train --resume RUN/.. => there is no run in this folder. Expected for example .*run
evaluate RUN/.. => there is no run in this folder. Expected for example .*run
evaluate RUN --seed -1 => --seed: not a seed. Expected an integer >= 0, got -1
watch RUN --record film.gif --seed -1 => --seed: not a seed
pack RUN --out packed --seed -1 => --seed: not a seed
plot RUN --out curve.foo => unknown kind of picture. Expected a path ending in .png, .svg or .pdf, got curve.foo
train trpo CartPole-v1 --out BROKEN => broken: this is a file. Expected a folder
pack RUN --out BROKEN => broken: this is a file. Expected a folder
train trpo CartPole-v1 --record-limit 5GB => --record-limit: a limit, but no recording. Expected --record, got '5GB'
train trpo CartPole-v1 --std abc => ^error: .*--std: unknown kind. Expected 'free', 'fixed' or 'state', got 'abc'
train trpo CartPole-v1 --hidden 8,0 => an integer hidden\[1\] >= 1, got hidden\[1\]=0
train trpo CartPole-v1 --hidden 64.5 => --hidden: invalid int or int,int value: '64.5'
train ppo Pendulum-v1 --action-mask m => ^error: environment Pendulum-v1, leaf action_space: WithActionMask: there are no masks
train ppo CartPole-v1 --env-kwargs g=1 h=2 g=3 => a keyword is there twice.* Got g.
train trpo CartPole-v1 --lanes 2 --workers 3 => --lanes 3
train trpo CartPole-v1 --lanes 2 --lag -1 => lag
train trpo CartPole-v1 --lanes 2 --workers -1 => got workers=-1
train trpo CartPole-v1 --lanes 2 --order random => order
train trpo CartPole-v1 --lanes 2 --eval-every -1 => --eval-every
"""

MISTAKES = [line.split(" => ") for line in LINES_OF_MISTAKES.strip().splitlines()]


@pytest.fixture(scope="module")
def places(tmp_path_factory, trained):
    folder = tmp_path_factory.mktemp("places")
    run = Path(shutil.copytree(trained, folder / "run"))
    checkpoint = (run / "checkpoint.safetensors").read_bytes()
    (folder / "broken").write_bytes(checkpoint[:-1])
    save_checkpoint(folder / "foreign", Same({}), {}, {})
    return {"RUN": run, "BROKEN": folder / "broken", "FOREIGN": folder / "foreign"}


@pytest.mark.slow_but_one
@pytest.mark.parametrize("line, message", MISTAKES)
def test_a_mistake_is_one_clear_line(line, message, places, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, path in places.items():
        line = line.replace(name, str(path))
    err = error_of(capsys, line)
    assert re.search(message, err) and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []  # nothing was begun


class Same:
    "Stands for a learner with this state."

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state


def store(run, **harm):
    "Store the checkpoint of a run once more, with another configuration."
    old = load_run(run)
    if harm.get("options"):
        harm = dict(options={**old.config["options"], **harm["options"]})
    path = run / "checkpoint.safetensors"
    config = {**old.config, **harm}
    save_checkpoint(path, Same(old.agent_state), config, old.counters, history=old.history)


def test_the_option_debug_raises_the_error(tmp_path):
    refused("Pendulm", main, ["graph", "trpo", "Pendulm-v1", "--debug"], error=RuntimeError)


def test_a_checkpoint_that_does_not_fit_its_configuration_is_refused(run, capsys):
    store(run, options=dict(hidden=[16]))
    told = "not a configuration that was saved (--hidden: there are no such layers in the file"
    assert told in error_of(capsys, f"evaluate {run}")


@pytest.mark.parametrize(
    "harm",
    [
        dict(options=dict(n_envs=10**9)),
        dict(options=dict(lanes=10**8)),
        dict(options=dict(n_steps=10**9)),
        dict(options=dict(hidden=[300_000])),
        dict(options=dict(recurrent="gru", state_size=8000)),
        dict(options=dict(hidden=[-1])),
        dict(options=dict(gamma="x")),
        dict(options=dict(encoder=dict(a=1))),
        dict(options=dict(n_envs=None)),
        dict(seed="x"),
        dict(seed=-1),
        dict(steps=None),
        dict(threads=0),
        dict(env=5),
        dict(env_kwargs=[1]),
        dict(env_kwargs=dict(nonsense=1)),
        dict(imports=5),
        dict(algorithm=[1]),
        dict(options=None),
    ],
    ids=str,
)
def test_a_stored_configuration_is_checked_before_anything_is_built(harm, run, capsys):
    store(run, **harm)
    for words in (f"evaluate {run}", f"train --resume {run} --steps 1000000"):
        assert error_of(capsys, words).count("\n") == 1


@pytest.mark.parametrize(
    "algorithm, options, harm",
    [
        ("ppo", dict(recurrent="gru", state_size=8), dict(state_size=8000)),
        ("dqn", dict(recurrent="lstm", length=4), dict(state_size=-1)),
        ("qr_dqn", dict(n_quantiles=7), dict(n_quantiles=2_000_000)),
        ("qr_dqn", dict(duelling=True), dict(n_quantiles=0)),
        ("sac", dict(n_critics=3), dict(n_critics=3000)),
    ],
)
def test_a_strangers_sizes_are_compared_with_the_file(
    algorithm, options, harm, tmp_path, monkeypatch
):
    "Networks that are larger than those of the file would take memory and time before they do not fit."
    folder = tmp_path / "run"
    start(folder, make_config(algorithm, task_of(algorithm), options))
    unlock(folder)
    checkpoint = load_run(folder)
    stored = checkpoint.config["options"]
    assert stored.items() >= options.items()

    def load_with(**others):
        config = {**checkpoint.config, "options": {**stored, **others}}
        data = checkpoint._replace(config=config, stream=None).data()
        write_atomically(folder / "checkpoint.safetensors", data)
        load_agent(folder)

    # Without memory its size decides nothing.
    unused = {} if "state_size" in harm else dict(state_size=8000)
    load_with(**unused)
    monkeypatch.setattr("rollpipe.runs.folder.build", lambda *args: pytest.fail("it is built"))
    (name,) = harm
    told = f"--{name.replace('_', '-')}: there are no such layers in the file"
    refused(told, load_with, **unused, **harm, error=CheckpointError)


ENDLESS = f"{SMALL_TRPO} --steps 100000000"


# -- a process of its own ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_trainings_do_not_share_a_folder(tmp_path, capsys):
    """The second one is refused, with whatever it is started.

    A process that is killed leaves no lock, not even if its workers live on.
    """
    run = tmp_path / "run"
    words = f"{ENDLESS} --out {run} --lanes 2 --workers 2 --checkpoint-every 1"
    with process(words) as child:
        wait_for_updates(run, 2, child)
        told = f"another process is training in .*process {child.pid}"
        for others in (f"train --resume {run} {QUIET}", f"{words} --overwrite"):
            assert re.search(told, error_of(capsys, others))
        child.kill()
        child.communicate()
    steps = load_run(run).counters["steps"] + 1
    succeed(f"train --resume {run} --steps {steps} {QUIET}")
    assert not (run / "lock").exists()


@pytest.mark.slow_but_one
@pytest.mark.parametrize(
    "numbers, workers", [(("SIGINT", "SIGINT"), 0), (("SIGHUP", "SIGTERM", "SIGINT"), 2)]
)
def test_what_schedulers_containers_and_terminals_send_saves_and_leaves(tmp_path, numbers, workers):
    "The last signal comes while the interpreter ends."
    run = tmp_path / "run"
    numbers = [getattr(signal, name) for name in numbers]
    words = f"{ENDLESS} --out {run} --checkpoint-every 1000000 --lanes 2 --workers {workers}"
    with python(words, start_new_session=True) as child:
        wait_for_updates(run, 2, child)
        for number in numbers:  # a terminal sends it to the workers, too
            if number == signal.SIGTERM:
                child.send_signal(number)
            else:
                os.killpg(child.pid, number)
            time.sleep(0.05)
        out, err = child.communicate(timeout=120)
    assert child.returncode == 128 + numbers[0], err
    assert "Traceback" not in err and f"--resume {run}" in err
    assert load_run(run).counters["steps"] == read_metrics(run)["steps"][-1]


IMPATIENT = """
import sys
from rollpipe.cli.main import main
from rollpipe.runs import signals
signals.PATIENCE = .5
sys.exit(main())
"""


@pytest.mark.slow_but_one
@pytest.mark.parametrize("name, code", [("SIGTERM", 143), ("SIGHUP", 129), ("SIGINT", 130)])
def test_what_is_stopped_before_its_first_update_can_be_started_again(tmp_path, name, code):
    run = tmp_path / "run"
    words = f"train trpo CartPole-v1 --n-steps 100000 --out {run} {QUIET}"
    with Forked(["-c", IMPATIENT, *words.split()]) as child:
        wait_for((run / "metrics.jsonl").exists, child)
        child.send_signal(getattr(signal, name))
        out, err = child.communicate(timeout=120)
    assert child.returncode == code and "Traceback" not in err, err
    assert not run.exists()


def test_a_run_that_fails_before_its_first_update_is_removed_only_if_it_is_new(
    tmp_path, monkeypatch
):
    run = start(tmp_path / "run", tiny("trpo", tmp_path))
    left = []
    monkeypatch.setattr(commands, "train", lambda *args, **kwargs: 1 / 0)
    for again in (resume(run.folder), run):
        refused("", commands.run_to_end, again, Namespace(), error=ZeroDivisionError)
        left.append(run.checkpoint.exists())
    assert left == [True, False]


@pytest.mark.slow
def test_a_training_under_nohup_ignores_a_hangup(tmp_path):
    run = tmp_path / "run"
    with process(f"{ENDLESS} --out {run}", ignored=[signal.SIGHUP]) as child:
        wait_for_updates(run, 1, child)
        child.send_signal(signal.SIGHUP)
        n = lines(run / "metrics.jsonl")
        wait_for_updates(run, n + 2, child)
        child.send_signal(signal.SIGTERM)
        child.communicate(timeout=120)
    assert child.returncode == 143


@pytest.mark.slow
def test_output_that_nobody_reads():
    "Of `python -m rollpipe`."
    with python("graph trpo CartPole-v1") as child:
        child.stdout.close()
        assert child.stderr.read() == "" and child.wait() == 0


def test_a_broken_pipe_that_is_not_that_of_the_output(monkeypatch, capsys):
    def command(*_):
        raise BrokenPipeError(32, "of a server of mine")

    monkeypatch.setattr("rollpipe.cli.main.list_command", command)
    assert rollpipe("list") == 2 and "of a server of mine" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="a shell closes the streams")
@pytest.mark.parametrize("more", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed(more):
    status = os.system(f"{shlex.quote(sys.executable)} -m rollpipe list {more}")
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.slow
def test_a_terminal_that_does_not_know_a_letter(monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    with python("graph trpo CartPole-v1") as child:
        assert "EnvStepper" in child.stdout.read() and child.wait() == 0


ISLAND = """
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv
gymnasium.register("Island-v0", CartPoleEnv, max_episode_steps=20)
"""


@pytest.fixture
def island(tmp_path):
    "A folder with a module that registers an environment."
    (tmp_path / "island.py").write_text(ISLAND)
    return tmp_path


def output_in(folder, words):
    "What a command prints, which runs in this folder to its end."
    done = run_command(folder, words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def error_in(folder, words):
    "What a command says that is refused in this folder."
    done = run_command(folder, words)
    assert done.returncode == 2, done.stderr
    return done.stderr


@pytest.mark.slow_but_one
@pytest.mark.parametrize(
    "words", ["Island-v0 --import island", "island:Island-v0"], ids=["import", "in the id"]
)
def test_the_printed_command_evaluates_where_a_module_was_needed(words, island):
    "Also: the module is found in the current folder."
    out = output_in(island, f"train trpo {words} --steps 128 --out 'my run' {SMALL_LINE}")
    command = out.splitlines()[-1].partition("rollpipe ")[2]
    assert output_in(island, f"{command} --episodes 1").startswith("return ")
    assert "--import island" in error_in(island, "evaluate 'my run'")


WANDERER = """
import os
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

class Wanderer(CartPoleEnv):
    def step(self, action):
        if os.path.basename(os.getcwd()) != "elsewhere":
            os.makedirs("elsewhere", exist_ok=True)
            os.chdir("elsewhere")
        return super().step(action)

gymnasium.register("Wanderer-v0", Wanderer, max_episode_steps=20)
"""


@pytest.mark.slow
def test_an_environment_that_changes_the_current_folder_moves_no_run(tmp_path):
    "All commands that step environments in their own process write where they were told to, and say so."
    (tmp_path / "wanderer.py").write_text(WANDERER)

    def run(words):
        return output_in(tmp_path, f"{words} --import wanderer")

    options = f"--checkpoint-every 1 --n-envs 2 --n-steps 32 --hidden 4 {QUIET}"
    out = run(f"train reinforce Wanderer-v0 --steps 256 --out run {options}")
    assert f"saved in {tmp_path / 'run' / 'checkpoint.safetensors'}" in out
    run(f"train --resume run --steps 512 {QUIET}")
    run("fork run --out fork --at 1")
    run(f"train --resume fork {QUIET}")
    for words in ("diff run fork", "replay run --update 2", "verify run"):
        assert "are equal" in run(words)
    run("pack run --episodes 1")
    run("evaluate run --episodes 1 --record film.gif")
    names = names_in(tmp_path) - {"__pycache__"}
    assert names == {"wanderer.py", "run", "fork", "film.gif", "elsewhere"}
    assert (tmp_path / "run" / "pack" / "README.md").is_file()
    assert not names_in(tmp_path / "elsewhere")


def test_modules_may_be_named_at_several_places(tmp_path, monkeypatch):
    "What a run needs is all of them: argparse keeps the innermost alone."
    for name in ("one_isle", "two_isles"):
        (tmp_path / f"{name}.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    words = "--import one_isle train reinforce CartPole-v1 --import two_isles --steps 64 --n-envs 2"
    succeed(f"{words} --n-steps 32 --hidden 4 {QUIET} --out", tmp_path / "run")
    assert load_run(tmp_path / "run").config["imports"] == ["one_isle", "two_isles"]


@pytest.mark.slow_but_one
@pytest.mark.parametrize("is_in_id", [False, True])
def test_a_run_whose_environment_needs_a_module_goes_on(is_in_id, island):
    """By the command that has begun it, and with or without what says the same.

    No file makes us import anything by itself.
    """
    (island / "other.py").write_text("")
    first = "trpo island:Island-v0" if is_in_id else "trpo Island-v0 --import island"
    first = f"train {first} {SMALL_LINE} --out run"
    resume = f"train --resume run {QUIET}"

    # Each command has a batch of 128 steps more.
    same = [f"{first} --continue --import island"] if is_in_id else []
    commands = [first, f"{first} --continue", *same, f"{resume} --import island"]
    for k, words in enumerate(commands, 1):
        output_in(island, f"{words} --steps {128 * k}")
    assert n_batches(island / "run") == len(commands)

    assert "--import island" in error_in(island, f"{resume} --steps 9999")
    error = error_in(island, f"{first} --import other --continue --steps 9999")
    assert "has other options" in error and "imports=" in error


def n_batches(run):
    "How many batches of 128 steps a run has, of which only the file is read."
    return load_checkpoint(run / "checkpoint.safetensors").counters["steps"] // 128


@pytest.mark.slow
def test_seeds_of_an_environment_in_a_module_go_on_by_the_printed_run_command(island):
    (island / "run-s1").write_text("a file, where the folder should be")
    words = f"train trpo island:Island-v0 --steps 128 --out run --seeds 0-1 {SMALL_LINE}"
    error = error_in(island, words)
    assert "1 of 2 runs failed" in error
    (island / "run-s1").unlink()
    output_in(island, error.rpartition("continue with: rollpipe ")[2].rstrip(".\n"))
    assert [n_batches(island / name) for name in ("run-s0", "run-s1")] == [1, 1]


def test_the_version_and_the_list_of_commands_are_printed(capsys):
    succeed("--version")
    succeed()
    out = capsys.readouterr().out
    assert out.startswith("rollpipe 0.")
    for command in ("train", "evaluate", "export", "plot", "graph", "demo"):
        assert f"    {command}" in out


# --- worker processes


def train_to(folder, words="--quiet"):
    options = "--n-steps 32 --n-envs 2 --lanes 2 --hidden 8 --steps 500 --no-tensorboard"
    succeed(f"train trpo CartPole-v1 {options} --out {folder} {words}")
    return folder


def test_lag_and_workers_are_recorded(tmp_path):
    records = read_metrics(train_to(tmp_path / "a", "--quiet --workers 2 --lag 1"))
    assert records["lag"][0] == 0 and set(records["lag"][1:]) == {1}
    assert set(records["workers"]) == {2} and set(records["restarts"]) == {0}


@pytest.mark.slow
def test_options_of_workers_that_change_nothing_are_told(tmp_path, capsys):
    train_to(tmp_path / "a", "--quiet --restarts 3 --lag 2")
    told = "no workers (--workers N), so these options change nothing: lag=2, restarts=3"
    assert told in capsys.readouterr().out
    train_to(tmp_path / "b", "--quiet --workers 1 --lag 1")
    assert "no workers" not in capsys.readouterr().out


@pytest.mark.slow
def test_evaluations_are_recorded_while_training_and_the_last_one_is_shown(tmp_path, capsys):
    records = read_metrics(train_to(tmp_path / "a", "--eval-every 2"))
    last = {name: values[-1] for name, values in records.items()}
    shown = capsys.readouterr().err.splitlines()[-1]
    assert f"evaluated {last['eval_return_mean']:.4g}  " in shown
    versions = [v for v in records["eval_version"] if v == v]
    assert versions[-1] == last["updates"] and last["eval_return_max"] >= 8
    low, middle, high = (last[f"eval_return_{name}"] for name in ("min", "median", "max"))
    assert low <= middle <= high and 0 <= last["eval_return_std"] <= high - low


def test_a_module_that_is_missing_is_named_with_its_option(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = "train ppo CartPole-v1 --steps 64 --import"
    told = "error: --import nonsuch.part: No module named 'nonsuch'. Python looks in this folder"
    assert told in error_of(capsys, f"{words} nonsuch.part")

    # The module is there, and imports one that is not.
    Path("needs_more.py").write_text("import nonsuch\n")
    told = "error: --import needs_more: No module named 'nonsuch'."
    assert told in error_of(capsys, f"{words} needs_more")
