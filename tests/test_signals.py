"Signals outside of `main`: while the command line is imported, and in scripts that call `train`."
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
from command_line import wait_for
from forked import Forked

from rollpipe.runs.logs import read_metrics
from rollpipe.runs.folder import load_run
from rollpipe.runs import signals
from rollpipe.runs.signals import STOP_SIGNALS, stop_signals, uninterrupted

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


def script(folder, handler=""): return Forked(["-c", SCRIPT.format(handler=handler)], cwd=folder)


@contextmanager
def python(folder, *words, **kwargs):
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    child = subprocess.Popen([sys.executable, *map(str, words)], cwd=folder, **pipes, **kwargs)
    try: yield child
    finally:
        child.kill()
        child.communicate()


def records(folder):
    file = folder/"run"/"metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


@pytest.mark.parametrize("name, code", [("SIGTERM", 143), ("SIGHUP", 129), ("SIGINT", 130)])
def test_a_signal_during_the_imports_ends_the_command(tmp_path, name, code, monkeypatch):
    (tmp_path/"slow"/"torch").mkdir(parents=True)
    (tmp_path/"slow"/"torch"/"__init__.py").write_text(SLOW)
    program = "import sys; sys.path.insert(0, 'slow'); from rollpipe.cli.start import main; sys.exit(main())"
    with python(tmp_path, "-c", program, "train", "trpo", "CartPole-v1") as child:
        wait_for((tmp_path/"importing").exists, child)
        child.send_signal(getattr(signal, name))
        out, err = child.communicate(timeout=20)
    assert (child.returncode, out, err) == (code, "", "\ninterrupted\n")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["importing", "slow"]


def test_nohup_is_respected_during_the_imports(tmp_path):
    (tmp_path/"slow"/"torch").mkdir(parents=True)
    (tmp_path/"slow"/"torch"/"__init__.py").write_text(SLOW)
    program = "import sys; sys.path.insert(0, 'slow'); from rollpipe.cli.start import main; sys.exit(main())"
    with python(tmp_path, "-c", program, "train", preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)) as child:
        wait_for((tmp_path/"importing").exists, child)
        child.send_signal(signal.SIGHUP)
        time.sleep(.5)
        assert child.poll() is None


def interpreter(folder): return python(folder, "-c", SCRIPT.format(handler=""))


@pytest.mark.parametrize("name, begin, code, told", [
    ("SIGTERM", script, -signal.SIGTERM, None), ("SIGHUP", script, -signal.SIGHUP, None),
    ("SIGTERM", lambda folder: script(folder, OWN), 7, ""), ("SIGINT", interpreter, -signal.SIGINT, "KeyboardInterrupt")],
    ids=["ends", "hangs up", "has a handler of its own", "Ctrl-C"])
def test_train_in_a_script_saves_before_the_signal_takes_effect(name, begin, code, told, tmp_path):
    "A script that handles it goes on: by a function of its own, or as by any `KeyboardInterrupt`, which the interpreter tells at the end."
    with begin(tmp_path) as child:
        wait_for(lambda: records(tmp_path) >= 3, child)
        child.send_signal(getattr(signal, name))
        out, err = child.communicate(timeout=60)
    assert child.returncode == code, err
    assert "Traceback" not in err if told is None else "the script went on" in out and told in err
    assert load_run(tmp_path/"run").counters["steps"] == read_metrics(tmp_path/"run")["steps"][-1]


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
            for seconds in (*delays, .5):
                while time.monotonic() < begun + seconds: time.sleep(.01)
                if seconds != .5: signal.raise_signal(signal.SIGINT)
            told.append("the batch is complete")
    except KeyboardInterrupt: told.append("interrupted")
    return told


def test_two_signals_in_a_moment_are_one_wish(monkeypatch):
    "A terminal sends Ctrl-C to a run and to its parent, which passes it on. The run is not stopped within a batch by that."
    assert collect([.1, .2]) == ["the batch is complete", "interrupted"]
    monkeypatch.setattr(signals, "ONE_WISH", .05)
    assert collect([.1, .2]) == ["interrupted"]
    monkeypatch.setattr(signals, "PATIENCE", .1)
    assert collect([.1]) == ["interrupted"]
