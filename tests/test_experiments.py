"`rollpipe train --seeds`: several runs, a few at a time, each as if it were alone."

import math
import os
import re
import shlex
import signal

import numpy as np
import pytest
from command_line import alive, error_of, lines, process, rollpipe, wait_for, words_of

from rollpipe.pipes.data.nested import first_difference
from rollpipe.runs.folder import load_run
from rollpipe.runs.logs import read_metrics
from rollpipe.traces.history import config_at

pytestmark = pytest.mark.usefixtures("packages")

SMALL = "--n-envs 4 --n-steps 32 --hidden 8 --critic-hidden 8 --no-tensorboard"


TRPO = f"train trpo CartPole-v1 {SMALL}"


def train(out, words="", steps=384):
    return rollpipe(f"{TRPO} --steps {steps} --out {out} {words}")


@pytest.mark.slow
def test_each_run_is_as_if_it_were_alone_and_the_end_compares_them(tmp_path, capfd):
    evaluated = "--eval-every 2 --keep 1"
    assert train(tmp_path / "a", f"--seeds 0-1 --jobs 2 {evaluated}") == 0
    out, err = capfd.readouterr()
    assert train(tmp_path / "b", f"--seed 1 --quiet {evaluated}") == 0

    # The weights and the metrics are those of a run alone.
    ours, alone = (load_run(tmp_path / name) for name in ("a-s1", "b"))
    assert ours.config == alone.config and ours.counters["steps"] == alone.counters["steps"] == 384
    for part in ("actor", "critic"):
        assert first_difference(ours.agent_state[part], alone.agent_state[part]) is None
    ours, alone = (read_metrics(tmp_path / name) for name in ("a-s1", "b"))
    for name in alone:
        if not name.startswith(("seconds", "steps_per_s", "eval_")):
            np.testing.assert_array_equal(ours[name], alone[name], err_msg=name)

    # The end compares them.
    returns = [read_metrics(tmp_path / f"a-s{n}")["return_mean"] for n in (0, 1)]
    last = np.array([x[np.isfinite(x)][-1] for x in returns])
    spread = f"{last.mean():.1f} +- {last.std(ddof=1):.1f}"
    assert f"last training return: {spread} (mean, standard deviation over 2 seeds)" in out
    for n in (0, 1):
        told = f"s{n}: trpo on CartPole-v1, seed {n}, preset CartPole-v1: 0 -> 384 steps"
        assert f"{told} in {tmp_path}/a-s{n}\n" in err
    assert re.search(r"^s0: 384/384 steps", err, re.M)
    command = out.splitlines()[-1].partition("rollpipe ")[2]
    assert command == f"plot {tmp_path}/a-s0 {tmp_path}/a-s1"
    picture = tmp_path / "curve.svg"
    assert rollpipe(f"{command} --out {picture}") == 0 and "<svg" in picture.read_text()


@pytest.mark.slow
def test_a_run_that_fails_does_not_stop_the_others(tmp_path, capfd):
    "A slash at the end makes no other folder."
    (tmp_path / "a-s0").write_text("a file, where the folder should be")
    assert train(f"{tmp_path}/a/", "--seeds 0,1 --jobs 2 --quiet") == 2
    out, err = capfd.readouterr()
    assert load_run(tmp_path / "a-s1").counters["steps"] == 384
    assert f"{tmp_path}/a-s1: last training return" in out
    told = r"error: 1 of 2 runs failed; s0: .*a-s0.*continue with: rollpipe train .*--seeds 0,1 .*--continue\.?\n$"
    assert re.search(told, err)
    (tmp_path / "a-s0").unlink()
    assert train(tmp_path / "a", "--seeds 0,1 --quiet --continue") == 0
    out, err = capfd.readouterr()
    assert f"s1: {tmp_path}/a-s1 is complete, with 384 steps" in err
    assert "standard deviation over 2 seeds" in out


def steps_of(run):
    return load_run(run).counters["steps"]


@pytest.mark.slow
@pytest.mark.parametrize("sends", ["terminal", "kill"])
def test_ctrl_c_stops_all_after_saving_and_one_command_continues_all(tmp_path, sends):
    runs = [tmp_path / f"a-s{n}" for n in range(3)]
    words = f"{TRPO} --out {tmp_path}/a --seeds 0-2 --jobs 2 --checkpoint-every 1000000"
    with process(f"{words} --steps 100000000", start_new_session=True) as child:
        wait_for(lambda: all(lines(run / "metrics.jsonl") >= 2 for run in runs[:2]), child)
        if sends == "terminal":
            os.killpg(child.pid, signal.SIGINT)  # to the runs as well
        else:
            child.send_signal(signal.SIGTERM)
        _, err = child.communicate(timeout=120)
    assert child.returncode == (130 if sends == "terminal" else 143) and "Traceback" not in err, err
    assert not alive(tmp_path) and not runs[2].exists()
    saved = [steps_of(run) for run in runs[:2]]
    assert saved == [read_metrics(run)["steps"][-1] for run in runs[:2]]

    # The command that is told goes on with all.
    told = err.strip().splitlines()[-1]
    start = "interrupted; 0 of 3 runs are complete; continue all with: rollpipe "
    assert told.startswith(f"{start}train trpo CartPole-v1 ")
    command = words_of(told.partition(start)[2])
    steps = max(saved) + 1
    command[command.index("--steps") + 1] = str(steps)
    assert rollpipe(shlex.join(command), "--quiet") == 0
    counters = [load_run(run).counters for run in runs]
    assert all(x["steps"] >= steps and x["resumes"] == 0 for x in counters)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the guard needs pidfd_open")
def test_runs_do_not_outlive_an_experiment_that_is_killed(tmp_path):
    files = [tmp_path / f"a-s{n}" / "metrics.jsonl" for n in (0, 1)]
    words = f"{TRPO} --out {tmp_path}/a --seeds 0,1 --jobs 2 --steps 100000000 --quiet"
    with process(words) as child:
        wait_for(lambda: all(lines(file) >= 1 for file in files), child)
        child.kill()
        child.communicate()
    wait_for(lambda: not alive(tmp_path), seconds=30)


# Options of several runs => what is told, a pattern

REFUSED = r"""
--seeds 0-2 => there are runs already. Expected another folder, --overwrite, or --continue, got a-s1
--seeds 0-2 --continue => the run in a-s1 has other options. Expected the same, or another folder, got max_kl
--seeds 0,1,0 => --seeds: a seed is there twice. Got 0
--seeds 1,0-2 => twice. Got 1
--seeds 4-0 => got 4-0
--seeds x => such as 0-4 or 0,3,7, got x
--seeds 0-1 --seed 3 => either --seed or --seeds, not both
--seeds 0-1 --jobs 0 => an integer jobs >= 1
--jobs 2 => so it needs --seeds
--seeds 0 --overwrite --continue => either --continue or --overwrite
--seeds 0,5 --lanes 0 => n=0
--seeds 0,5 --steps 0 => an integer steps >= 1
--continue --seed 1 --out a-s1 => other options.*max_kl
"""


@pytest.mark.slow
def test_what_cannot_work_is_refused_before_anything_begins(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert train("a", "--seed 1", steps=128) == 0
    os.rename("a", "a-s1")
    before = sorted(tmp_path.iterdir())
    for line in REFUSED.strip().splitlines():
        words, told = line.split(" => ")
        err = error_of(capsys, f"{TRPO} --out a {words} --max-kl .5")
        assert re.search(told, err) and err.count("\n") == 1, (words, err)
    err = error_of(capsys, "train trpo CartPole-v9 --seeds 0-4")
    assert "CartPole-v1" in err and err.count("\n") == 1 and sorted(tmp_path.iterdir()) == before


def test_one_run_is_continued_by_its_own_command(tmp_path):
    for steps in (256, 256, 512):
        assert train(tmp_path / "a", "--continue --quiet", steps=steps) == 0
        found = load_run(tmp_path / "a").counters
        assert (found["steps"], found["resumes"]) == (steps, 0)
    assert config_at(tmp_path / "a", math.inf)["steps"] == 512
