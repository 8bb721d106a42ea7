"Signals outside of `main`: while the command line is imported, and in scripts that call `train`."

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from functools import partial

import gymnasium
import pytest
from command_line import wait_for
from forked import Forked
from gallery import gone_on, quietly
from gymnasium.envs.classic_control import CartPoleEnv

from rollpipe.agents.checkpoint import load_checkpoint
from rollpipe.cli.main import main
from rollpipe.pipes import WorkerError
from rollpipe.pipes.data.nested import first_difference
from rollpipe.runs import signals
from rollpipe.runs.folder import load_run, start
from rollpipe.runs.logs import read_metrics
from rollpipe.runs.signals import STOP_SIGNALS, Stopped, stop_signals, uninterrupted
from rollpipe.settings.config import make_config

SLOW = "import pathlib, time\npathlib.Path('importing').touch()\nfor _ in range(600): time.sleep(.05)\n"

SCRIPT = """
import signal, sys
from rollpipe.settings.config import make_config
from rollpipe.runs.folder import start
from rollpipe.runs.training import train
{handler}
config = make_config("trpo", "CartPole-v1", dict(n_steps=64, n_envs=2, hidden=(8,)), {{}}, steps=10**8, checkpoint_every=10**6)
try: train(start("run", config), progress=False, tensorboard=False)
finally: print("the script went on", flush=True)
"""

OWN = "def own(number, frame): sys.exit(7)\nsignal.signal(signal.SIGTERM, own)"


PROGRAM = (
    "import sys; sys.path.insert(0, 'slow'); from rollpipe.cli.start import main; sys.exit(main())"
)


@contextmanager
def importing(folder, **kwargs):
    "A command in a process of its own, while it imports a torch that takes half a minute."
    (folder / "slow" / "torch").mkdir(parents=True)
    (folder / "slow" / "torch" / "__init__.py").write_text(SLOW)
    with python(folder, "-c", PROGRAM, "train", "trpo", "CartPole-v1", **kwargs) as child:
        wait_for((folder / "importing").exists, child)
        yield child


def script(folder, handler=""):
    return Forked(["-c", SCRIPT.format(handler=handler)], cwd=folder)


@contextmanager
def python(folder, *words, **kwargs):
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    child = subprocess.Popen([sys.executable, *map(str, words)], cwd=folder, **pipes, **kwargs)
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def records(folder):
    file = folder / "run" / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


@pytest.mark.parametrize("name, code", [("SIGTERM", 143), ("SIGHUP", 129), ("SIGINT", 130)])
def test_a_signal_during_the_imports_ends_the_command(tmp_path, name, code):
    with importing(tmp_path) as child:
        child.send_signal(getattr(signal, name))
        out, err = child.communicate(timeout=20)
    assert (child.returncode, out, err) == (code, "", "\ninterrupted\n")
    assert sorted(os.listdir(tmp_path)) == ["importing", "slow"]


def test_nohup_is_respected_during_the_imports(tmp_path):
    ignore = lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with importing(tmp_path, preexec_fn=ignore) as child:
        child.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        assert child.poll() is None


def interpreter(folder):
    return python(folder, "-c", SCRIPT.format(handler=""))


@pytest.mark.slow_but_one
@pytest.mark.parametrize(
    "name, begin, code, told",
    [
        ("SIGTERM", script, -signal.SIGTERM, None),
        ("SIGHUP", script, -signal.SIGHUP, None),
        ("SIGTERM", lambda folder: script(folder, OWN), 7, ""),
        ("SIGINT", interpreter, -signal.SIGINT, "KeyboardInterrupt"),
    ],
    ids=["ends", "hangs up", "has a handler of its own", "Ctrl-C"],
)
def test_train_in_a_script_saves_before_the_signal_takes_effect(name, begin, code, told, tmp_path):
    "A script that handles it goes on: by a function of its own, or as by any `KeyboardInterrupt`, which the interpreter tells at the end."
    with begin(tmp_path) as child:
        wait_for(lambda: records(tmp_path) >= 3, child)
        child.send_signal(getattr(signal, name))
        out, err = child.communicate(timeout=60)
    assert child.returncode == code, err
    assert "Traceback" not in err if told is None else "the script went on" in out and told in err
    assert (
        load_run(tmp_path / "run").counters["steps"] == read_metrics(tmp_path / "run")["steps"][-1]
    )


def test_handlers_are_put_back():
    before = [signal.getsignal(s) for s in STOP_SIGNALS]
    with stop_signals(lambda handler: handler == signal.SIG_DFL):
        during = [signal.getsignal(s) for s in STOP_SIGNALS]
    assert [signal.getsignal(s) for s in STOP_SIGNALS] == before
    assert [x == y for x, y in zip(before, during)] == [x != signal.SIG_DFL for x in before]


def collect(delays):
    "Collect a batch for half a second, while signals come after these delays [s]. Returns what has happened."
    told = []
    try:
        with uninterrupted() as delay:
            delay.collecting()
            begun = time.monotonic()
            for seconds in (*delays, 0.5):
                while time.monotonic() < begun + seconds:
                    time.sleep(0.01)
                if seconds != 0.5:
                    signal.raise_signal(signal.SIGINT)
            told.append("the batch is complete")
    except KeyboardInterrupt:
        told.append("interrupted")
    return told


def test_two_signals_in_a_moment_are_one_wish(monkeypatch):
    "A terminal sends Ctrl-C to a run and to its parent, which passes it on. The run is not stopped within a batch by that."
    assert collect([0.1, 0.2]) == ["the batch is complete", "interrupted"]
    monkeypatch.setattr(signals, "ONE_WISH", 0.05)
    assert collect([0.1, 0.2]) == ["interrupted"]
    monkeypatch.setattr(signals, "PATIENCE", 0.1)
    assert collect([0.1]) == ["interrupted"]


# -- the processes of a training end -----------------------------------------------------------------------------------

PLANNED = []  # what happens in the next step of an environment of this process


class Eventful(CartPoleEnv):
    def step(self, action):
        while PLANNED:
            PLANNED.pop()()
        return super().step(action)


gymnasium.register("Eventful-v0", Eventful, max_episode_steps=500)


def small_run(folder, **run):
    "A run of 12 updates, with checkpoints after 5, 10 and 12."
    options = dict(n_steps=16, n_envs=2, hidden=(8,), critic_hidden=(8,), epochs=1, engine="torch")
    return start(
        folder,
        make_config(
            "ppo", "Eventful-v0", options, steps=12 * 32, checkpoint_every=5, eval_episodes=1, **run
        ),
    )


def test_ctrl_c_tells_once_how_to_go_on(tmp_path, caplog, capsys, monkeypatch):
    "In Python by the log, and on the command line by its last line."
    monkeypatch.chdir(tmp_path)
    run = small_run(tmp_path / "run")
    PLANNED.append(partial(signal.raise_signal, signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        quietly(run)
    line = "interrupted after 32 steps and saved; continue with: train(resume('run'))"
    assert caplog.messages[-1] == line

    caplog.clear()
    PLANNED.append(partial(signal.raise_signal, signal.SIGINT))
    assert main("train --resume run --quiet".split()) == 130
    line = "interrupted after 64 steps and saved; continue with: rollpipe train --resume run"
    assert capsys.readouterr().err.count(line) == 1 and not caplog.messages


def strike(number, reaches_all=True):
    "A signal ends the processes that this one has started, and may reach this one next."
    for child in multiprocessing.active_children():
        os.kill(child.pid, number)
        child.join(10)
    if reaches_all:
        signal.raise_signal(number)


def struck(run, event, error):
    "Train, with an event in update 6. Returns the checkpoint."

    def callback(run, record):
        return event() if record["updates"] == 6 else None

    with stop_signals(), pytest.raises(error):
        quietly(run, callbacks=[callback])
    return load_checkpoint(run.checkpoint)


@pytest.mark.slow_but_one
@pytest.mark.parametrize(
    "number, reaches_all, error",
    [(signal.SIGKILL, False, WorkerError), (signal.SIGTERM, True, Stopped)],
)
def test_an_evaluation_that_ends_within_a_batch_leaves_learner_and_stream_together(
    number, reaches_all, error, tmp_path
):
    "An answer that was sent before the strike is taken first."
    twin = quietly(small_run(tmp_path / "twin", exact=True))
    one = small_run(tmp_path / "one", exact=True, eval_every=1)
    found = struck(one, lambda: PLANNED.append(partial(strike, number, reaches_all)), error)
    last = (7, 8) if error is WorkerError else (7,)
    assert found.counters["updates"] in last and found.stream is not None
    gone_on(one.folder)
    ours, theirs = (load_checkpoint(run.checkpoint).agent_state for run in (twin, one))
    assert first_difference(ours, theirs) is None


@pytest.mark.parametrize("is_exact, updates", [(True, 5), (False, 6)])
def test_a_signal_that_has_ended_the_workers_while_the_learner_learned_is_reported_as_a_signal(
    is_exact, updates, tmp_path
):
    "The states of their environments are lost. The last update is saved without them, unless that would replace an exact checkpoint."
    run = small_run(tmp_path / "run", exact=is_exact, workers=1)
    found = struck(run, partial(strike, signal.SIGTERM), Stopped)
    assert (found.counters["updates"], found.stream is not None) == (updates, is_exact)
