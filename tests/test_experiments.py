"`rollpipe train --seeds`: several runs, a few at a time, each as if it were alone."

import math
import os
import re
import shlex
import signal
import time

import numpy as np
import pytest
import torch
from command_line import alive, lines, process, rollpipe, wait_for

from rollpipe.runs.folder import load_run
from rollpipe.runs.logs import read_metrics
from rollpipe.traces.history import config_at

pytestmark = pytest.mark.usefixtures("packages")
SMALL = "--n-envs 4 --n-steps 32 --hidden 8 --critic-hidden 8 --no-tensorboard".split()


def train(out, *words, steps=384):
    return rollpipe("train", "trpo", "CartPole-v1", "--steps", steps, "--out", out, *SMALL, *words)


@pytest.mark.slow
def test_each_run_is_as_if_it_were_alone_and_the_end_compares_them(tmp_path, capfd):
    assert train(tmp_path / "a", "--seeds", "0-1", "--jobs", 2, "--eval-every", 2, "--keep", 1) == 0
    out, err = capfd.readouterr()
    assert train(tmp_path / "b", "--seed", 1, "--eval-every", 2, "--keep", 1, "--quiet") == 0
    ours = load_run(tmp_path / "a-s1")
    alone = load_run(tmp_path / "b")
    assert ours.config == alone.config and ours.counters["steps"] == alone.counters["steps"] == 384
    for part in ("actor", "critic"):
        assert all(
            torch.equal(ours.agent_state[part][name], x)
            for name, x in alone.agent_state[part].items()
        )
    timed = {"seconds", "seconds_collect", "steps_per_s"}
    ours = read_metrics(tmp_path / "a-s1")
    alone = read_metrics(tmp_path / "b")
    for name in set(alone) - timed:
        if not name.startswith(("seconds_", "eval_")):
            np.testing.assert_array_equal(ours[name], alone[name], err_msg=name)
    returns = [read_metrics(tmp_path / f"a-s{n}")["return_mean"] for n in (0, 1)]
    last = np.array([x[np.isfinite(x)][-1] for x in returns])
    assert (
        f"last return: {last.mean():.1f} +- {last.std(ddof=1):.1f} (mean, standard deviation over 2 seeds)"
        in out
    )
    for n in (0, 1):
        assert (
            f"s{n}: trpo on CartPole-v1, seed {n}, preset CartPole-v1: 0 -> 384 steps in {tmp_path}/a-s{n}\n"
            in err
        )
    assert re.search(r"^s0: 384/384 steps", err, re.M)
    command = out.splitlines()[-1].partition("rollpipe ")[2]
    assert command == f"plot {tmp_path}/a-s0 {tmp_path}/a-s1"
    assert rollpipe(*shlex.split(command), "--out", tmp_path / "curve.svg") == 0
    assert "<svg" in (tmp_path / "curve.svg").read_text()


@pytest.mark.slow
def test_a_run_that_fails_does_not_stop_the_others(tmp_path, capfd):
    (tmp_path / "a-s0").write_text("a file, where the folder should be")
    assert (
        train(f"{tmp_path}/a/", "--seeds", "0,1", "--jobs", 2, "--quiet") == 2
    )  # a slash at the end makes no other folder
    out, err = capfd.readouterr()
    assert (
        load_run(tmp_path / "a-s1").counters["steps"] == 384
        and f"{tmp_path}/a-s1: last return" in out
    )
    assert re.search(
        r"error: 1 of 2 runs failed; s0: .*a-s0.*continue with: rollpipe train .*--seeds 0,1 .*--continue\.?\n$",
        err,
    )
    (tmp_path / "a-s0").unlink()
    assert train(tmp_path / "a", "--seeds", "0,1", "--quiet", "--continue") == 0
    out, err = capfd.readouterr()
    assert (
        f"s1: {tmp_path}/a-s1 is complete, with 384 steps" in err
        and "standard deviation over 2 seeds" in out
    )


@pytest.mark.slow_but_one
@pytest.mark.parametrize("sends", ["terminal", "kill"])
def test_ctrl_c_stops_all_after_saving_and_one_command_continues_all(tmp_path, sends, capfd):
    runs = [tmp_path / f"a-s{n}" for n in range(3)]
    words = [
        "train",
        "trpo",
        "CartPole-v1",
        "--out",
        tmp_path / "a",
        "--seeds",
        "0-2",
        "--jobs",
        2,
        "--checkpoint-every",
        10**6,
        *SMALL,
    ]
    with process(*words, "--steps", 10**8, start_new_session=True) as child:
        wait_for(lambda: all(lines(run / "metrics.jsonl") >= 2 for run in runs[:2]), child)
        if sends == "terminal":
            os.killpg(child.pid, signal.SIGINT)  # to the runs as well
        else:
            child.send_signal(signal.SIGTERM)
        out, err = child.communicate(timeout=120)
    assert child.returncode == (130 if sends == "terminal" else 143) and "Traceback" not in err, err
    assert not alive(tmp_path) and not runs[2].exists()
    saved = [load_run(run).counters["steps"] for run in runs[:2]]
    assert saved == [read_metrics(run)["steps"][-1] for run in runs[:2]]
    told = err.strip().splitlines()[-1]
    assert told.startswith(
        "interrupted; 0 of 3 runs are complete; continue all with: rollpipe train trpo CartPole-v1 "
    )
    command = shlex.split(told.partition("rollpipe ")[2])
    steps = max(saved) + 1
    command[command.index("--steps") + 1] = str(steps)
    assert rollpipe(*command, "--quiet") == 0
    found = [load_run(run).counters for run in runs]
    assert all(x["steps"] >= steps for x in found) and [x["resumes"] for x in found] == [0, 0, 0]


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the guard needs pidfd_open")
def test_runs_do_not_outlive_an_experiment_that_is_killed(tmp_path):
    words = [
        "train",
        "trpo",
        "CartPole-v1",
        "--out",
        tmp_path / "a",
        "--seeds",
        "0,1",
        "--jobs",
        2,
        "--steps",
        10**8,
        "--quiet",
        *SMALL,
    ]
    with process(*words) as child:
        wait_for(
            lambda: all(lines(tmp_path / f"a-s{n}" / "metrics.jsonl") >= 1 for n in (0, 1)), child
        )
        child.kill()
        child.communicate()
    deadline = time.monotonic() + 30
    while alive(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive(tmp_path)


def test_what_cannot_work_is_refused_before_anything_begins(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert train("a", "--seed", 1, steps=128) == 0
    os.rename("a", "a-s1")
    before = sorted(tmp_path.iterdir())
    capsys.readouterr()
    for words, told in [
        (
            "--seeds 0-2",
            "there are runs already. Expected another folder, --overwrite, or --continue, got a-s1",
        ),
        (
            "--seeds 0-2 --continue",
            "the run in a-s1 has other options. Expected the same, or another folder, got max_kl",
        ),
        ("--seeds 0,1,0", "--seeds: a seed is there twice. Got 0"),
        ("--seeds 1,0-2", "twice. Got 1"),
        ("--seeds 4-0", "got 4-0"),
        ("--seeds x", "such as 0-4 or 0,3,7, got x"),
        ("--seeds 0-1 --seed 3", "either --seed or --seeds, not both"),
        ("--seeds 0-1 --jobs 0", "an integer jobs >= 1"),
        ("--jobs 2", "so it needs --seeds"),
        ("--seeds 0 --overwrite --continue", "either --continue or --overwrite"),
        ("--seeds 0,5 --lanes 0", "n=0"),
        ("--seeds 0,5 --steps 0", "an integer steps >= 1"),
        ("--continue --seed 1 --out a-s1", "other options.*max_kl"),
    ]:
        line = ["--out", "a", *words.split()] if "--out" not in words else words.split()
        assert rollpipe("train", "trpo", "CartPole-v1", *SMALL, *line, "--max-kl", ".5") == 2, words
        out, err = capsys.readouterr()
        assert re.search(told, err) and err.count("\n") == 1 and not out, (words, err)
    assert rollpipe("train", "trpo", "CartPole-v9", "--seeds", "0-4") == 2
    err = capsys.readouterr().err
    assert "CartPole-v1" in err and err.count("\n") == 1 and sorted(tmp_path.iterdir()) == before


def test_one_run_is_continued_by_its_own_command(tmp_path, capsys):
    for steps, resumes in ((256, 0), (256, 0), (512, 0)):
        assert train(tmp_path / "a", "--continue", "--quiet", steps=steps) == 0
        found = load_run(tmp_path / "a").counters
        assert (found["steps"], found["resumes"]) == (steps, resumes)
    assert config_at(tmp_path / "a", math.inf)["steps"] == 512
