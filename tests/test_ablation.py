"`rollpipe ablate`: pairs of branches share state and noise, an option without effect changes nothing, and an interrupted ablation goes on."

import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import alive, error_of, lines, process, rollpipe, wait_for
from gallery import (
    check_same,
    config_of,
    content,
    gone_on,
    numbers,
    quietly,
    refused,
    trained,
)

from rollpipe.pipes.data.errors import WorkerError
from rollpipe.pipes.data.nested import first_difference
from rollpipe.results import ablation
from rollpipe.results.ablation import Branch, _beside, _fork, ablate, equal_up_to
from rollpipe.results.pairs import course
from rollpipe.runs import fork, start
from rollpipe.runs.folder import load_run
from rollpipe.runs.logs import read_evaluations, read_records
from rollpipe.runs.moments import verify
from rollpipe.traces.differences import diff
from rollpipe.traces.journal import read_journal

pytestmark = pytest.mark.usefixtures("packages")


def begun(folder):
    return load_run(folder / "fork.safetensors")


@pytest.fixture
def pole(gallery, tmp_path):
    "A run of PPO of 25 updates."
    return gallery.copy("pole", tmp_path / "run")


# -- other noise -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo", "dqn", "sac", "intrinsic", "lagging"])
def test_forks_with_the_same_noise_are_equal_and_others_are_not(name, gallery, tmp_path):
    "Only generators differ where they begin. A fork with other noise can be verified, and branched again."
    if name == "intrinsic":
        parent = trained(tmp_path / "run", steps=352, intrinsic=0.1).folder
    else:
        parent = gallery.original(name)
    branches = dict(one=1, two=1, other=2, plain=0)
    one, two, other, plain = (
        fork(parent, tmp_path / out, 6, noise=noise) for out, noise in branches.items()
    )
    for a, b in ((one, plain), (one, other)):
        x = begun(a)
        y = begun(b)
        generators = [z.agent_state.pop("generator") for z in (x, y)]
        assert first_difference(x.stream, y.stream) is not None and not torch.equal(*generators)
        assert first_difference(x.agent_state, y.agent_state) is None
    assert first_difference(begun(one).stream, begun(two).stream) is None
    for out in (one, two, other, plain):
        gone_on(out)
    check_same(parent, plain)
    check_same(one, two)
    for x in (other, plain):  # one update was collected before
        assert str(equal_up_to(one, x)).startswith(("update 7", "update 8"))
    assert verify(one, 3).is_equal and load_run(one).history.origin["noise"] == 1
    assert "and with other noise (1)" in str(diff(parent, one))
    check_same(one, gone_on(fork(one, tmp_path / "again", 9)).folder)


@pytest.mark.slow
def test_a_fork_of_a_run_has_its_origin_in_verify_once(pole, tmp_path):
    out = gone_on(fork(pole, tmp_path / "fork", 4, clip=0.3)).folder
    assert str(verify(out, 2)).count("is a fork of") == 1


@pytest.mark.slow
def test_noise_that_cannot_be(gallery, tmp_path, capsys):
    parent = gallery.original("ppo")
    for noise in (-1, True, 1.5):
        refused("an integer noise >= 0", fork, parent, tmp_path / "fork", 4, noise=noise)
    told = "has no such update. Expected 1 to 10, got 4.0"
    refused(told, fork, parent, tmp_path / "fork", 4.0)
    made = load_run(fork(parent, tmp_path / "numpy", np.int64(4), noise=np.int64(3)))
    assert (made.history.origin["at"], made.history.origin["noise"]) == (4, 3)
    words = f"fork {parent} --at 4 --noise 3 --out {tmp_path}/fork --steps 640"
    assert rollpipe(words) == 0
    told = "stood after update 4, with other noise (3), and has steps=640"
    assert told in capsys.readouterr().out


# -- pairs -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_twins_are_the_run_again_pairs_share_the_noise_and_no_effect_is_exactly_none(
    pole, tmp_path
):
    before = content(pole)
    out = tmp_path / "out"
    lr = load_run(pole).config["options"]["lr"]
    about = dict(updates=6, repeat=2, jobs=2, out=out, last=3)
    found = ablate(pole, [5, 12], dict(lr=[lr, 0.1]), **about)
    assert content(pole) == before

    # Two edits in four branches each, of which the first changes nothing
    same, other = found.pairs
    assert [same.label, other.label] == [f"lr={lr}", "lr=0.1"]
    assert same.at.tolist() == [5, 5, 12, 12]
    assert found.difference(same)[:6] == (4, 0, 0, 0, 0, 0) and (same.base == same.edited).all()
    assert (other.base[..., 0] == other.edited[..., 0]).all() and (other.base != other.edited).any()
    assert (other.base == same.base).all() and (other.base[0] != other.base[1]).any()
    for n in (5, 12):
        # The twin is the run itself.
        twin = out / f"at{n}-0"
        assert equal_up_to(pole, twin) == n + 6
        ours, theirs = (
            {e.updates: (e.batch, e.weights) for e in read_journal(x / "journal.jsonl")}
            for x in (pole, twin)
        )
        assert all(ours[k] == theirs[k] for k in ours.keys() & theirs.keys())
        assert repr(numbers(twin)[: n + 6]) == repr(numbers(pole)[: n + 6])

        # The branches of a pair begin with one state.
        for noise in (0, 1):
            x, y = (begun(out / f"at{n}-{noise}{edit}") for edit in ("", "-lr=0.1"))
            assert first_difference(x.stream, y.stream) is None
            for part in ("actor", "critic", "generator"):
                assert first_difference(x.agent_state[part], y.agent_state[part]) is None
    assert f"Pairing lasts 6 of 6 updates with lr={lr}" in str(found)
    assert "An interval from 4 pairs is narrower" in str(found)
    assert (out / "report.md").read_text() == str(found)
    rows = (out / "report.csv").read_text().splitlines()
    assert len(rows) == 9 and rows[1].startswith(f"lr={lr},5,") and rows[1].endswith(",0")


@pytest.mark.slow
def test_a_metric_and_more_of_the_same(pole, tmp_path):
    "A second call keeps what is there; the mean of episodes counts each of them once."
    edit = dict(lr=[0.1])
    first = ablate(pole, [4], edit, updates=4, metric="entropy")
    home = tmp_path / "run-ablation"
    whole = content(home / "at4-0")
    assert len(first.pairs[0].at) == 1
    assert "One pair has no interval" in str(first) and "Pairing lasts" not in str(first)
    (second,) = ablate(pole, [4, 9], edit, updates=4, repeat=2, last=4).pairs
    assert content(home / "at4-0") == whole

    # The mean over the episodes of four updates
    records = {int(r["updates"]): r for r in read_records(home / "at9-1-lr=0.1")}
    total = count = 0
    for n in (10, 11, 12, 13):
        n_ended = records[n]["episodes"] - records[n - 1]["episodes"]
        total += n_ended * records[n].get("return_mean", 0)
        count += n_ended
    assert np.isclose(second.means(slice(-4, None))[1][3], total / count)
    assert second.at.tolist() == [4, 4, 9, 9]
    (longer,) = ablate(pole, [4], edit, updates=6, last=6).pairs
    assert (longer.base[..., :4] == second.base[:1]).all() and longer.base.shape[-1] == 6
    refused("leaf klo: .*never has this metric", course, home / "at4-0", "klo", 4, 4)


def test_metrics_that_one_run_alone_has_are_not_compared(tmp_path):
    "The branches of a run with a callback do not have its metrics. An ablation trained all of them, and refused them then."
    run = trained(tmp_path / "run", steps=160).folder

    def reporting(name, value):
        made = start(tmp_path / name, config_of("ppo", steps=160))
        return quietly(made, callbacks=[lambda run, record: {"my/steps": value(record)}]).folder

    twin = reporting("twin", lambda record: record["steps"])
    other = reporting("other", lambda record: 0)
    assert equal_up_to(twin, run) == equal_up_to(run, twin) == 5
    assert str(equal_up_to(twin, other)).startswith("update 1: ['my/steps']")


@pytest.mark.slow
def test_each_evaluation_counts_once(tmp_path):
    "That of a policy is in the record of the next update, and that of the last one in a record of its own."
    evaluated = dict(eval_every="32 steps", eval_episodes=2, final_episodes=1)
    run = trained(tmp_path / "run", steps=320, **evaluated).folder
    means = [r["mean"] for r in read_evaluations(run) if r["kind"] == "training"]
    sums = [*means[2:9], means[9] + means[10]]
    assert len(means) == 11
    assert course(run, "eval_return_mean", 2, 8).tolist() == [sums, [1] * 7 + [2]]


@pytest.mark.slow
def test_branches_are_evaluated_only_for_a_metric_of_evaluations(tmp_path, monkeypatch):
    evaluated = dict(eval_every="64 steps", eval_episodes=1, final_episodes=1)
    run = trained(tmp_path / "run", steps=160, **evaluated).folder

    def untrained(commands, jobs):
        raise WorkerError("no branch is trained")

    monkeypatch.setattr(ablation, "run_all", untrained)
    interval = load_run(run).config["eval_every"]
    for metric, expected in (("entropy", 0), ("eval_return_mean", interval)):
        out = tmp_path / metric
        with pytest.raises(WorkerError, match="no branch is trained"):
            ablate(run, [2], dict(clip=[0.1]), updates=2, metric=metric, out=out)
        assert [load_run(x).config["eval_every"] for x in out.glob("at2-*")] == [expected] * 2


# -- interruptions and errors ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ctrl_c_saves_and_the_same_command_goes_on_to_the_same_numbers(pole, tmp_path, capsys):
    words = f"ablate {pole} --at 5 --set clip=0.01 --repeat 2 --jobs 2 --updates"
    out = tmp_path / "a"
    with process(f"{words} 400 --out {out}", start_new_session=True) as child:
        wait_for(lambda: lines(out / "at5-0-clip=0.01" / "metrics.jsonl") > 30, child)
        os.killpg(child.pid, signal.SIGINT)
        _, err = child.communicate(timeout=120)
    assert child.returncode == 130
    assert "interrupted; nothing is lost, and the same command goes on" in err
    assert not alive(out) and not (out / "report.md").exists()
    assert 5 <= load_run(out / "at5-0").counters["updates"] < 405
    for name in "ab":
        assert rollpipe(f"{words} 40 --out {tmp_path / name}") == 0
    one, two = ((tmp_path / name / "report.csv").read_text() for name in "ab")
    assert one == two
    told = capsys.readouterr().out
    for text in (
        "0 of 4 branches are complete, 2 at a time",
        "| clip=0.01 | 2 |",
        f"{tmp_path}/b/report.html",
    ):
        assert text in told


@pytest.mark.slow
def test_what_cannot_work_is_named_before_anything_is_made(gallery, tmp_path, capsys):
    run = gallery.copy("ppo", tmp_path / "run")
    before = content(tmp_path)
    for words, text in {
        "--at 11 --set clip=0.1": "has no such update. Expected 1 to 10, got 11",
        "--at 0 --set clip=0.1": "has no such update",
        "--at x --set clip=0.1": "--at: not numbers of updates",
        "--at 3 --set clop=0.1": "clop",
        "--at 3 --set clip=0.1,x": "--set clip: wrong type of value",
        "--at 3 --set clip=-2": "no branch with clip=-2.0",
        "--at 3 --set hidden=8,8": "cannot have another hidden",
        "--at 3 --set n_envs=9": "cannot have another n_envs",
        "--at 3 --set clip": "Expected NAME=VALUE",
        "--at 3 --set clip=0.1,.1": "--set clip: a value is there twice",
        "--at 3 --set steps=1000": "--set steps: the steps of a branch are those of its updates",
        "--at 3 --set clip=0.1 --updates 0": "an integer updates >= 1",
        "--at 3 --set clip=0.1 --updates 3 --last 4": "Expected 1 to 3, the updates of a branch, got 4",
        "--at 3 --set clip=0.1 --metric entropi": "has no such metric. Expected ",
        "--at 3 --set clip=0.1 --metric eval_return_mean": "has no such metric. Expected ",
        "--at 3": "--set",
    }.items():
        err = error_of(capsys, f"ablate {run} {words}")
        assert text in err, (words, err)
    told = error_of(capsys, f"ablate {run} --at 3 --set n_envs=9")
    assert "with which its state was made; or a new run" in told and "--new-episodes" not in told
    told = error_of(capsys, f"ablate {tmp_path}/no --at 3 --set clip=0.1")
    assert "there is no such run" in told and content(tmp_path) == before


def test_a_run_that_is_the_working_folder_has_its_branches_beside_it(tmp_path, monkeypatch):
    (tmp_path / "run" / "more").mkdir(parents=True)
    for place, name in (("run", "."), ("run/more", "..")):
        monkeypatch.chdir(tmp_path / place)
        assert _beside(Path(name)) == f"{tmp_path}/run-ablation"
    assert _beside(Path("runs/x")) == "runs/x-ablation"


def test_a_branch_is_known_from_another_working_folder_and_after_it_was_moved(
    gallery, tmp_path, monkeypatch
):
    (tmp_path / "old").mkdir()
    gallery.copy("ppo", tmp_path / "old" / "run")
    monkeypatch.chdir(tmp_path / "old")
    _fork(Branch(Path("out"), Path("run"), 3, 0, {}), 320, {})
    monkeypatch.chdir(tmp_path)
    os.rename("old", "new")
    told = "is no such branch.* got a fork of run after update 3 .*, equal up to 3"
    for home in (Path("new"), tmp_path / "new"):
        branch = Branch(home / "out", home / "run", 3, 0, {})
        _fork(branch, 320, {})
        refused(told, _fork, branch._replace(at=4), 320, {})


@pytest.mark.slow
def test_a_folder_of_other_branches_and_a_run_that_has_changed_are_refused(pole, tmp_path):
    other = trained(tmp_path / "other", seed=5).folder
    about = dict(updates=2, out=tmp_path / "out")
    branches = ([4], dict(clip=[0.1]))
    ablate(pole, *branches, metric="entropy", **about)
    refused("is no such branch", ablate, other, *branches, **about)
    os.rename(pole, tmp_path / "gone")
    os.rename(other, pole)
    told = "is no such branch.* or another --out, got a fork of .*, update 1: "
    refused(told, ablate, pole, *branches, metric="entropy", **about)


@pytest.mark.slow
def test_a_branch_that_fails_is_named_and_the_others_are_trained(pole, tmp_path):
    out = tmp_path / "out"
    about = dict(out=out, metric="entropy")
    branches = ([4], dict(clip=[0.1]))
    ablate(pole, *branches, updates=2, **about)
    (out / "at4-0-clip=0.1" / "journal.jsonl").write_text("{}\n")
    told = r"1 of 2 branches failed; at4-0-clip=0.1: .*damaged.*the same command goes on"
    refused(told, ablate, pole, *branches, updates=4, **about, error=WorkerError)
    assert load_run(out / "at4-0").counters["updates"] == 8


@pytest.mark.slow
def test_names_of_branches_and_environments_that_are_kept_by_a_replay(gallery, tmp_path):
    "A value may have letters that no folder should have. A note says what the branches still share."
    run = gallery.copy("ppo", tmp_path / "run")
    out = tmp_path / "out"
    assert set(load_run(run).history.kept.values()) == {"copy"}
    found = ablate(run, [3], dict(name=["a/b: c"]), updates=2, out=out, repeat=2)
    assert found.difference(found.pairs[0])[1] == 0 and (out / "at3-0-name=a-b--c").is_dir()
    assert not re.search("kept by a replay", str(found))
