"`rollpipe ablate`: pairs of branches share state and noise, an option without effect changes nothing, and an interrupted ablation goes on."

import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import alive, lines, process, rollpipe, wait_for
from test_crash import CASES, POLE, config_of, content
from test_fork import check_same, gone_on, numbers

from rollpipe.pipes.data.errors import DataError, WorkerError
from rollpipe.pipes.data.nested import first_difference
from rollpipe.results.ablation import Branch, _beside, _fork, ablate, equal_up_to
from rollpipe.results.pairs import course
from rollpipe.runs import fork, start, train
from rollpipe.runs.folder import load_run
from rollpipe.runs.logs import read_evaluations, read_records
from rollpipe.runs.moments import verify
from rollpipe.traces.differences import diff
from rollpipe.traces.journal import read_journal

pytestmark = pytest.mark.usefixtures("packages")


def trained(folder, name="ppo", steps=800, **run):
    made = start(folder, config_of(name, steps=steps, **run))
    train(made, progress=False, tensorboard=False)
    return made.folder


def begun(folder):
    return load_run(folder / "fork.safetensors")


# -- other noise -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, run",
    [
        ("ppo", {}),
        ("dqn", {}),
        ("sac", {}),
        ("ppo", dict(intrinsic=0.1)),
        ("dqn", dict(workers=2, lag=1)),
    ],
)
def test_forks_with_the_same_noise_are_equal_and_others_are_not(name, run, tmp_path):
    "Only generators differ where they begin. A fork with other noise can be verified, and branched again."
    steps = 160 if CASES[name][2].get("n_steps") != 16 else 352
    parent = trained(tmp_path / "run", name, steps, **run)
    one, two, other = (
        fork(parent, tmp_path / out, 6, noise=noise)
        for out, noise in dict(one=1, two=1, other=2).items()
    )
    plain = fork(parent, tmp_path / "plain", 6)
    for a, b in ((one, plain), (one, other)):
        x = begun(a)
        y = begun(b)
        assert first_difference(x.stream, y.stream) is not None and not torch.equal(
            x.agent_state["generator"], y.agent_state["generator"]
        )
        assert (
            first_difference({**x.agent_state, "generator": 0}, {**y.agent_state, "generator": 0})
            is None
        )
    assert first_difference(begun(one).stream, begun(two).stream) is None
    for out in (one, two, other, plain):
        gone_on(out)
    check_same(parent, plain)
    check_same(one, two)
    assert all(
        str(equal_up_to(one, x)).startswith(("update 7", "update 8")) for x in (other, plain)
    )  # one was collected before
    assert verify(one, 3).is_equal and load_run(one).history.origin["noise"] == 1
    assert "and with other noise (1)" in str(diff(parent, one))
    gone_on(fork(one, tmp_path / "again", 9))
    check_same(one, tmp_path / "again")


@pytest.mark.slow
def test_a_fork_of_a_run_has_its_origin_in_verify_once(tmp_path):
    out = fork(trained(tmp_path / "run"), tmp_path / "fork", 4, clip=0.3)
    gone_on(out)
    assert str(verify(out, 2)).count("is a fork of") == 1


def test_noise_that_cannot_be(tmp_path, capsys):
    parent = trained(tmp_path / "run", steps=320)
    for noise in (-1, True, 1.5):
        with pytest.raises(DataError, match="an integer noise >= 0"):
            fork(parent, tmp_path / "fork", 4, noise=noise)
    with pytest.raises(DataError, match="has no such update. Expected 1 to 10, got 4.0"):
        fork(parent, tmp_path / "fork", 4.0)
    made = load_run(fork(parent, tmp_path / "numpy", np.int64(4), noise=np.int64(3))).history.origin
    assert (made["at"], made["noise"]) == (4, 3)
    assert (
        rollpipe(
            "fork", parent, "--at", 4, "--noise", 3, "--out", tmp_path / "fork", "--steps", 640
        )
        == 0
    )
    assert (
        "stood after update 4, with other noise (3), and has steps=640" in capsys.readouterr().out
    )


# -- pairs -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_twins_are_the_run_again_pairs_share_the_noise_and_no_effect_is_exactly_none(tmp_path):
    run = trained(tmp_path / "run")
    before = content(run)
    lr = load_run(run).config["options"]["lr"]
    found = ablate(
        run, [5, 12], dict(lr=[lr, 0.1]), updates=6, repeat=2, jobs=2, out=tmp_path / "out", last=3
    )
    assert content(run) == before
    same, other = found.pairs
    assert [same.label, other.label] == [f"lr={lr}", "lr=0.1"] and same.at.tolist() == [
        5,
        5,
        12,
        12,
    ]
    assert found.difference(same)[:6] == (4, 0, 0, 0, 0, 0) and (same.base == same.edited).all()
    assert (other.base[..., 0] == other.edited[..., 0]).all() and (other.base != other.edited).any()
    assert (other.base == same.base).all() and (other.base[0] != other.base[1]).any()
    for n in (5, 12):
        twin = tmp_path / "out" / f"at{n}-0"
        assert equal_up_to(run, twin) == n + 6
        ours = {e.updates: (e.batch, e.weights) for e in read_journal(run / "journal.jsonl")}
        theirs = {e.updates: (e.batch, e.weights) for e in read_journal(twin / "journal.jsonl")}
        assert all(ours[k] == theirs[k] for k in ours.keys() & theirs.keys())
        assert repr(numbers(twin)[: n + 6]) == repr(numbers(run)[: n + 6])
        for noise in (0, 1):
            pair = [begun(tmp_path / "out" / f"at{n}-{noise}{edit}") for edit in ("", "-lr=0.1")]
            assert first_difference(*(x.stream for x in pair)) is None
            for part in ("actor", "critic", "generator"):
                assert first_difference(*(x.agent_state[part] for x in pair)) is None
    assert f"Pairing lasts 6 of 6 updates with lr={lr}" in str(
        found
    ) and "An interval from 4 pairs is narrower" in str(found)
    assert (tmp_path / "out" / "report.md").read_text() == str(found)
    rows = (tmp_path / "out" / "report.csv").read_text().splitlines()
    assert len(rows) == 9 and rows[1].startswith(f"lr={lr},5,") and rows[1].endswith(",0")


@pytest.mark.slow
def test_a_metric_and_more_of_the_same(tmp_path):
    "A second call keeps what is there; the mean of episodes counts each of them once."
    run = trained(tmp_path / "run")
    first = ablate(run, [4], dict(lr=[0.1]), updates=4, metric="entropy")
    home = tmp_path / "run-ablation"
    whole = content(home / "at4-0")
    assert (
        len(first.pairs[0].at) == 1
        and "One pair has no interval" in str(first)
        and "Pairing lasts" not in str(first)
    )
    second = ablate(run, [4, 9], dict(lr=[0.1]), updates=4, repeat=2, last=4)
    assert content(home / "at4-0") == whole
    records = {int(r["updates"]): r for r in read_records(home / "at9-1-lr=0.1")}
    ended = [
        (records[n]["episodes"] - records[n - 1]["episodes"], records[n].get("return_mean", 0))
        for n in (10, 11, 12, 13)
    ]
    mean = sum(n * x for n, x in ended) / sum(n for n, _ in ended)
    assert np.isclose(second.pairs[0].means(slice(-4, None))[1][3], mean) and second.pairs[
        0
    ].at.tolist() == [4, 4, 9, 9]
    longer = ablate(run, [4], dict(lr=[0.1]), updates=6, last=6)
    assert (longer.pairs[0].base[..., :4] == second.pairs[0].base[:1]).all() and longer.pairs[
        0
    ].base.shape[-1] == 6
    with pytest.raises(DataError, match="leaf klo: .*never has this metric"):
        course(home / "at4-0", "klo", 4, 4)


def test_metrics_that_one_run_alone_has_are_not_compared(tmp_path):
    "The branches of a run with a callback do not have its metrics. An ablation trained all of them, and refused them then."
    run, twin, other = (
        trained(tmp_path / "run", steps=160),
        *(start(tmp_path / x, config_of("ppo", steps=160)) for x in ("twin", "other")),
    )
    train(
        twin,
        progress=False,
        tensorboard=False,
        callbacks=[lambda run, record: {"my/steps": record["steps"]}],
    )
    train(other, progress=False, tensorboard=False, callbacks=[lambda run, record: {"my/steps": 0}])
    assert (
        equal_up_to(twin.folder, run) == equal_up_to(run, twin.folder) == twin.counters["updates"]
    )
    assert str(equal_up_to(twin.folder, other.folder)).startswith("update 1: ['my/steps']")


def test_each_evaluation_counts_once(tmp_path):
    "That of a policy is in the record of the next update, and that of the last one in a record of its own."
    run = trained(
        tmp_path / "run", steps=320, eval_every="32 steps", eval_episodes=2, final_episodes=1
    )
    means = [r["mean"] for r in read_evaluations(run) if r["kind"] == "training"]
    assert len(means) == 11 and course(run, "eval_return_mean", 2, 8).tolist() == [
        [*means[2:9], means[9] + means[10]],
        [1] * 7 + [2],
    ]


# -- interruptions and errors ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ctrl_c_saves_and_the_same_command_goes_on_to_the_same_numbers(tmp_path, capsys):
    run = trained(tmp_path / "run")
    words = [
        "--at",
        "5",
        "--set",
        "clip=0.01",
        "--updates",
        400,
        "--repeat",
        2,
        "--jobs",
        2,
        "--out",
    ]
    with process("ablate", run, *words, tmp_path / "a", start_new_session=True) as child:
        wait_for(lambda: lines(tmp_path / "a" / "at5-0-clip=0.01" / "metrics.jsonl") > 30, child)
        os.killpg(child.pid, signal.SIGINT)
        out, err = child.communicate(timeout=120)
    assert (
        child.returncode == 130
        and "interrupted; nothing is lost, and the same command goes on" in err
    )
    assert not alive(tmp_path / "a") and not (tmp_path / "a" / "report.md").exists()
    reached = load_run(tmp_path / "a" / "at5-0").counters["updates"]
    assert 5 <= reached < 405
    words[words.index(400)] = 40
    for out in "ab":
        assert rollpipe("ablate", run, *words, tmp_path / out) == 0
    assert [(tmp_path / x / "report.csv").read_text() for x in "ab"][0] == (
        tmp_path / "b" / "report.csv"
    ).read_text()
    out = capsys.readouterr().out
    assert (
        "0 of 4 branches are complete, 2 at a time" in out
        and "| clip=0.01 | 2 |" in out
        and f"{tmp_path}/b/report.html" in out
    )


def test_what_cannot_work_is_named_before_anything_is_made(tmp_path, capsys):
    run = trained(tmp_path / "run", steps=320)
    before = content(tmp_path)
    for words, text in {
        ("--at", "11", "--set", "clip=0.1"): "has no such update. Expected 1 to 10, got 11",
        ("--at", "0", "--set", "clip=0.1"): "has no such update",
        ("--at", "x", "--set", "clip=0.1"): "--at: not numbers of updates",
        ("--at", "3", "--set", "clop=0.1"): "clop",
        ("--at", "3", "--set", "clip=0.1,x"): "--set clip: wrong type of value",
        ("--at", "3", "--set", "clip=-2"): "no branch with clip=-2.0",
        ("--at", "3", "--set", "hidden=8,8"): "cannot have another hidden",
        ("--at", "3", "--set", "n_envs=9"): "cannot have another n_envs",
        ("--at", "3", "--set", "clip"): "Expected NAME=VALUE",
        ("--at", "3", "--set", "clip=0.1,.1"): "--set clip: a value is there twice",
        (
            "--at",
            "3",
            "--set",
            "steps=1000",
        ): "--set steps: the steps of a branch are those of its updates",
        ("--at", "3", "--set", "clip=0.1", "--updates", "0"): "an integer updates >= 1",
        (
            "--at",
            "3",
            "--set",
            "clip=0.1",
            "--updates",
            "3",
            "--last",
            "4",
        ): "Expected 1 to 3, the updates of a branch, got 4",
        ("--at", "3", "--set", "clip=0.1", "--metric", "entropi"): "has no such metric. Expected ",
        (
            "--at",
            "3",
            "--set",
            "clip=0.1",
            "--metric",
            "eval_return_mean",
        ): "has no such metric. Expected ",
        ("--at", "3"): "--set",
    }.items():
        assert rollpipe("ablate", run, *words) == 2, words
        err = capsys.readouterr().err
        assert text in err, (words, err)
    assert content(tmp_path) == before
    assert (
        rollpipe("ablate", tmp_path / "no", "--at", 3, "--set", "clip=0.1") == 2
        and "there is no such run" in capsys.readouterr().err
    )


def test_a_run_that_is_the_working_folder_has_its_branches_beside_it(tmp_path, monkeypatch):
    (tmp_path / "run" / "more").mkdir(parents=True)
    for place, name in (("run", "."), ("run/more", "..")):
        monkeypatch.chdir(tmp_path / place)
        assert _beside(Path(name)) == f"{tmp_path}/run-ablation"
    assert _beside(Path("runs/x")) == "runs/x-ablation"


def test_a_branch_is_known_from_another_working_folder_and_after_it_was_moved(
    tmp_path, monkeypatch
):
    trained(tmp_path / "old" / "run", steps=160)
    monkeypatch.chdir(tmp_path / "old")
    _fork(Branch(Path("out"), Path("run"), 3, 0, {}), 320, {})
    monkeypatch.chdir(tmp_path)
    os.rename("old", "new")
    for home in (Path("new"), tmp_path / "new"):
        branch = Branch(home / "out", home / "run", 3, 0, {})
        _fork(branch, 320, {})
        with pytest.raises(
            DataError,
            match="is no such branch.* got a fork of run after update 3 .*, equal up to 3",
        ):
            _fork(branch._replace(at=4), 320, {})


@pytest.mark.slow
def test_a_folder_of_other_branches_and_a_run_that_has_changed_are_refused(tmp_path):
    run = trained(tmp_path / "run")
    other = trained(tmp_path / "other", seed=5)
    ablate(run, [4], dict(clip=[0.1]), updates=2, out=tmp_path / "out", metric="entropy")
    with pytest.raises(DataError, match="is no such branch"):
        ablate(other, [4], dict(clip=[0.1]), updates=2, out=tmp_path / "out")
    os.rename(run, tmp_path / "gone"), os.rename(other, run)
    with pytest.raises(
        DataError, match="is no such branch.* or another --out, got a fork of .*, update 1: "
    ):
        ablate(run, [4], dict(clip=[0.1]), updates=2, out=tmp_path / "out", metric="entropy")


@pytest.mark.slow
def test_a_branch_that_fails_is_named_and_the_others_are_trained(tmp_path):
    run = trained(tmp_path / "run")
    ablate(run, [4], dict(clip=[0.1]), updates=2, out=tmp_path / "out", metric="entropy")
    (tmp_path / "out" / "at4-0-clip=0.1" / "journal.jsonl").write_text("{}\n")
    with pytest.raises(
        WorkerError,
        match=r"1 of 2 branches failed; at4-0-clip=0.1: .*damaged.*the same command goes on",
    ):
        ablate(run, [4], dict(clip=[0.1]), updates=4, out=tmp_path / "out", metric="entropy")
    assert load_run(tmp_path / "out" / "at4-0").counters["updates"] == 8


@pytest.mark.slow
def test_names_of_branches_and_environments_that_are_kept_by_a_replay(tmp_path):
    "A value may have letters that no folder should have. A note says what the branches still share."
    run = trained(tmp_path / "run", steps=320)
    assert set(load_run(run).history.kept.values()) == {"copy"} and POLE
    found = ablate(run, [3], dict(name=["a/b: c"]), updates=2, out=tmp_path / "out", repeat=2)
    assert (
        found.difference(found.pairs[0])[1] == 0
        and (tmp_path / "out" / "at3-0-name=a-b--c").is_dir()
    )
    assert not re.search("kept by a replay", str(found))
