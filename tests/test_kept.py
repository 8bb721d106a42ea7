"Checkpoints beside the last one: that of the best evaluation, and the newest few."

import errno
import os
import shutil
import time

import numpy as np
import pytest
import torch
from command_line import SMALL, rollpipe

from rollpipe.agents import parallel_evaluation
from rollpipe.agents.checkpoint import Snapshot, kept_checkpoints, load_checkpoint
from rollpipe.agents.evaluate import evaluate
from rollpipe.pipes.data.errors import CheckpointError, DataError
from rollpipe.runs import load_agent
from rollpipe.runs.evaluations import best_return
from rollpipe.runs.folder import load_run, restore, resume, start
from rollpipe.runs.logs import read_metrics
from rollpipe.runs.moments import verify
from rollpipe.runs.training import train
from rollpipe.settings.config import make_config


def small(steps=640, **run):
    options = dict(n_envs=4, n_steps=32, hidden=(8,), critic_hidden=(8,))
    return make_config("trpo", "CartPole-v1", options, steps=steps, **run)


def train_small(folder, steps=640, **run):
    run = start(folder, small(steps, **run))
    train(run, progress=False, tensorboard=False)
    return run


def kept(folder):
    return list(kept_checkpoints(folder / "checkpoints"))


# --- the best evaluation


@pytest.mark.slow
def test_the_best_file_holds_the_weights_that_were_evaluated(tmp_path):
    run = train_small(tmp_path / "run", 1280, eval_every=1, seed=3)
    found = load_run(tmp_path / "run", best=True)
    records = read_metrics(tmp_path / "run")
    assert (
        np.nanmax(records["eval_return_mean"])
        == found.evaluated["eval_return_mean"]
        == best_return(run.folder)
    )
    assert (
        found.counters["updates"] == found.evaluated["eval_version"]
        and found.evaluated["episodes"] == 20
    )
    actor = load_agent(tmp_path / "run", best=True).actor
    again = evaluate("CartPole-v1", actor, 20, seed=found.evaluated["seed"])
    assert (
        again.mean == found.evaluated["eval_return_mean"]
        and again.returns.max() == found.evaluated["eval_return_max"]
    )


@pytest.mark.slow
def test_the_file_is_that_of_the_evaluation_although_training_goes_on(tmp_path, monkeypatch):
    "The first evaluation takes as long as the rest of the training, and is the best. The same training for one update gives its weights."
    calls = []

    def slow(**options):
        calls.append(time.sleep(0.5))
        found = evaluate(**options)
        return found._replace(returns=found.returns - 1000 * len(calls))

    monkeypatch.setattr(parallel_evaluation, "evaluate", slow)
    train_small(tmp_path / "run", 1280, eval_every=1)
    found = load_run(tmp_path / "run", best=True)
    assert (
        found.counters["updates"] == 1 and read_metrics(tmp_path / "run")["eval_version"][-1] == 10
    )
    other = train_small(tmp_path / "other", found.counters["steps"])
    state = other.agent.state_dict()
    assert all(
        torch.equal(found.agent_state["actor"][name], x) for name, x in state["actor"].items()
    )
    assert all(
        torch.equal(found.agent_state["critic"][name], x) for name, x in state["critic"].items()
    )


@pytest.mark.slow
def test_evaluate_best_says_what_training_has_said(tmp_path, capsys):
    run = tmp_path / "run"
    words = "train trpo CartPole-v1 --steps 640 --eval-every 2 --seed 5 --out".split()
    assert rollpipe(*words, run, *SMALL) == 0
    mean = best_return(run)
    told = f"best evaluation: return {mean:.1f} (mean of 20 episodes) after "
    assert told in capsys.readouterr().out
    for words in ([run, "--best"], [run / "best.safetensors"]):
        assert rollpipe("evaluate", *words, "--seed", 5) == 0
        assert capsys.readouterr().out.startswith(f"return {mean:.1f} +- ")
    assert rollpipe("export", run, "--best", "--to", "pt2") == 0 and (run / "policy.pt2").exists()


@pytest.mark.slow
def test_the_best_score_survives_resuming(tmp_path):
    run = train_small(tmp_path / "run", 256, eval_every=1)
    train(resume(run.folder, 384), progress=False, tensorboard=False)
    assert best_return(run.folder) == np.nanmax(read_metrics(run.folder)["eval_return_mean"])
    run.save_best(
        Snapshot(run.agent), run.counters, dict(eval_return_mean=1000.0)
    )  # more than CartPole has
    before = run.best.read_bytes()
    train(resume(run.folder, 512), progress=False, tensorboard=False)
    assert run.best.read_bytes() == before


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    "The folder of a run of two updates, each of which is evaluated and kept."
    folder = tmp_path_factory.mktemp("runs") / "run"
    train_small(folder, 256, eval_every=1, keep=2, checkpoint_every=1)
    return folder


@pytest.fixture
def copied(evaluated, tmp_path):
    "A copy of the folder of this run, which a test may change."
    return shutil.copytree(evaluated, tmp_path / "run")


def go_on(path, steps=None):
    train(resume(path, steps), progress=False, tensorboard=False)


def test_a_damaged_best_file_is_not_replaced_silently(copied):
    best = copied / "best.safetensors"
    best.write_bytes(best.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="best.safetensors.*damaged"):
        go_on(copied, 512)
    assert load_run(copied).counters["steps"] == 256


def test_a_run_without_evaluations_has_no_best(tmp_path, capsys):
    run = train_small(tmp_path / "run", 128)
    assert not run.best.exists()
    with pytest.raises(DataError, match="has no best checkpoint. Expected a run with --eval-every"):
        load_agent(run.folder, best=True)
    assert rollpipe("evaluate", run.checkpoint, "--best") == 2
    assert "Expected the folder of the run, got the file" in capsys.readouterr().err


def test_a_disk_that_is_full_when_the_best_is_written(tmp_path, monkeypatch):
    def full(self, *args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.best))

    run = start(tmp_path / "run", small(eval_every=1))
    monkeypatch.setattr(type(run), "save_best", full)
    with pytest.raises(OSError, match="No space left.*best.safetensors"):
        train(run, progress=False, tensorboard=False)
    assert load_run(run.folder).counters["steps"] == run.counters["steps"] > 0


# --- the newest few


@pytest.mark.slow
def test_the_newest_checkpoints_are_kept(tmp_path):
    run = train_small(tmp_path / "run", keep=2, checkpoint_every=2)
    assert kept(run.folder) == [512, 640]  # after 2 and 4 updates, and the last one
    for steps, path in kept_checkpoints(run.folder / "checkpoints").items():
        assert load_run(path).counters["steps"] == steps
        assert rollpipe("evaluate", path, "--episodes", 1) == 0
    other = train_small(tmp_path / "other", 512)  # the same training, which ends earlier
    state = load_run(run.folder / "checkpoints" / "checkpoint-000000512.safetensors").agent_state[
        "actor"
    ]
    assert all(torch.equal(state[name], x) for name, x in other.agent.state_dict()["actor"].items())


def test_a_run_goes_on_from_an_earlier_checkpoint(tmp_path):
    run = train_small(tmp_path / "run", keep=3, checkpoint_every=1)
    assert kept(run.folder) == [384, 512, 640]
    go_on(run.folder / "checkpoints" / "checkpoint-000000384.safetensors")
    assert read_metrics(run.folder)["steps"].tolist() == [128, 256, 384, 512, 640]
    assert kept(run.folder) == [384, 512, 640]
    checkpoints = kept_checkpoints(run.folder / "checkpoints").values()
    assert [load_checkpoint(path).counters["resumes"] for path in checkpoints] == [0, 0, 0]


@pytest.mark.slow
def test_a_run_that_goes_back_stays_there_if_it_ends_before_its_first_update(tmp_path, monkeypatch):
    run = train_small(tmp_path / "run", keep=9, checkpoint_every=1, record=True)
    more = resume(run.folder / "checkpoints" / "checkpoint-000000256.safetensors")

    def end(batch):
        raise KeyboardInterrupt

    monkeypatch.setattr(more.agent, "update", end)
    with pytest.raises(KeyboardInterrupt):
        train(more, progress=False, tensorboard=False)
    assert load_run(run.folder).counters["steps"] == 256 and kept(run.folder) == [128, 256]
    train(resume(run.folder), progress=False, tensorboard=False)
    assert (
        read_metrics(run.folder)["steps"].tolist() == [128, 256, 384, 512, 640]
        and verify(run.folder).common == 5
    )


def test_a_run_goes_on_from_its_best(copied):
    best = copied / "best.safetensors"
    steps = load_run(best).counters["steps"]
    more = resume(best, 512)
    assert (more.folder, more.counters["steps"]) == (copied, steps)
    train(more, progress=False, tensorboard=False)
    assert read_metrics(copied)["steps"][-1] == 512


@pytest.mark.slow
def test_overwriting_removes_them_and_nothing_else(tmp_path):
    words = ["train", "trpo", "CartPole-v1", "--steps", 128, *SMALL, "--overwrite", "--out"]
    run = train_small(tmp_path / "run", keep=2, eval_every=5)
    mine = run.folder / "checkpoints" / "checkpoint-of-mine.safetensors"
    mine.write_text("mine")
    assert rollpipe(*words, run.folder) == 0
    assert kept(run.folder) == [] and mine.read_text() == "mine" and not run.best.exists()
    mine.unlink()
    train_small(tmp_path / "other", 128, keep=1)
    assert rollpipe(*words, tmp_path / "other") == 0
    assert not (tmp_path / "other" / "checkpoints").exists()


def test_what_is_left_of_a_run_is_not_taken_over(tmp_path):
    run = train_small(tmp_path / "run", 128, keep=1)
    for path in run.folder.iterdir():
        if path.is_file():
            path.unlink()
    with pytest.raises(DataError, match="has a run already"):
        start(run.folder, small())


def test_a_full_disk_leaves_the_earlier_checkpoints(copied, monkeypatch):
    before = {p.name: p.read_bytes() for p in (copied / "checkpoints").iterdir()}
    real = os.fsync

    def fsync(number):
        if "checkpoints" in os.readlink(f"/proc/self/fd/{number}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(number)

    monkeypatch.setattr(os, "fsync", fsync)
    told = "No space left on device: .*checkpoints/checkpoint-000000384.safetensors"
    with pytest.raises(OSError, match=told):
        go_on(copied, 1280)
    assert {p.name: p.read_bytes() for p in (copied / "checkpoints").iterdir()} == before
    assert restore(load_run(copied)) and not (copied / "lock").exists()


@pytest.mark.parametrize("n", [-1, -5])
def test_a_negative_number_is_refused(n):
    with pytest.raises(
        DataError, match=f"out of range. Expected an integer keep >= 0, got keep={n}"
    ):
        small(keep=n)


def test_a_number_of_workers_that_would_change_the_stream_is_refused(tmp_path):
    "Lag and order count with workers alone. Nothing is written, and the run goes on with what does not change it."
    config = make_config(
        "vtrace", "CartPole-v1", dict(n_steps=32, n_envs=2, lanes=2, hidden=(8,)), steps=640, lag=1
    )
    train(run := start(tmp_path / "run", config), progress=False, tensorboard=False)
    before = (run.folder / "config.json").read_bytes()
    with pytest.raises(
        DataError,
        match=r"workers: workers=2 would change the stream.*Expected .*'lag': 0.*got .*'lag': 1",
    ):
        resume(run.folder, steps=1280, workers=2)
    with pytest.raises(DataError, match="workers: 3 workers have too few lanes"):
        resume(run.folder, steps=1280, workers=3)
    assert (run.folder / "config.json").read_bytes() == before
    assert (
        train(resume(run.folder, steps=1280, workers=0), progress=False, tensorboard=False)["steps"]
        >= 1280
    )
