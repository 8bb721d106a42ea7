"`rollpipe bench`: what is missing is trained, whatever has happened before; and the evaluations of a run between its updates."

import errno
import importlib
import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from command_line import alive, process, rollpipe, run_command, wait_for
from gymnasium.wrappers import TimeLimit

from rollpipe.layers import Critic, GaussianPolicy
from rollpipe.pipes import on_policy
from rollpipe.pipes.data.errors import DataError
from rollpipe.results.bench import BENCH, Job, _states, jobs_of, read_spec
from rollpipe.runs.folder import load_run, resume, start
from rollpipe.runs.fork import fork
from rollpipe.runs.locks import lock
from rollpipe.runs.logs import read_evaluations, read_metrics, read_records, write_evaluations
from rollpipe.runs.training import train
from rollpipe.settings.algorithms import ALGORITHMS
from rollpipe.settings.config import make_config
from rollpipe.settings.files import Resolved

pytestmark = pytest.mark.usefixtures("packages")
OPTIONS = dict(n_envs=2, n_steps=32, hidden=(8,), critic_hidden=(8,))
TOML = "options = { n_envs = 2, n_steps = 32, hidden = [8], critic_hidden = [8] }\n"


def small(**run):
    run = {**dict(steps=640, eval_every="200 steps", eval_episodes=2, final_episodes=3), **run}
    return make_config("trpo", "CartPole-v1", OPTIONS, **run)


def learn(run):
    return train(run, progress=False, tensorboard=False)


def points(folder):
    return [(r["kind"], r["steps"]) for r in read_evaluations(folder)]


def results(folder):
    return [
        {name: x for name, x in r.items() if name != "seconds"} for r in read_evaluations(folder)
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    "A run that came to its end, to be looked at."
    learn(run := start(tmp_path_factory.mktemp("whole") / "run", small()))
    return run


WHOLE = [
    ("training", 0),
    ("training", 256),
    ("training", 448),
    ("training", 640),
    ("last", 640),
    ("best", 640),
]


# -- evaluations of one run --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_training_does_not_notice_its_evaluations(tmp_path, whole):
    seen = whole
    plain = start(tmp_path / "b", small(eval_every=0))
    learn(plain)
    assert points(seen.folder) == WHOLE and not points(plain.folder)
    ours, theirs = (load_run(run.folder).agent_state for run in (seen, plain))
    for part in ("actor", "critic"):
        assert all(torch.equal(ours[part][name], x) for name, x in theirs[part].items())
    ours, theirs = (read_metrics(run.folder) for run in (seen, plain))
    for name in ("kl", "steps", "return_mean"):
        np.testing.assert_array_equal(ours[name][:10], theirs[name])


def test_the_same_run_has_the_same_evaluations_and_the_best_file_is_the_best_of_them(
    tmp_path, whole
):
    learn(start(tmp_path / "b", small()))
    assert results(whole.folder) == results(tmp_path / "b")
    means = {
        r["updates"]: r["mean"] for r in read_evaluations(whole.folder) if r["kind"] == "training"
    }
    best = load_run(whole.folder, best=True)
    assert (
        best.evaluated["eval_return_mean"] == means[best.counters["updates"]] == max(means.values())
    )
    (of_best,) = (r for r in read_evaluations(whole.folder) if r["kind"] == "best")
    assert of_best["updates"] == best.counters["updates"] and len(of_best["returns"]) == 3


class Killed(BaseException):
    "Stands for the end of the process: nothing is saved after it."


@pytest.mark.slow_but_one
@pytest.mark.parametrize("at", range(6))
def test_a_run_that_ends_during_an_evaluation_makes_it_up(tmp_path, monkeypatch, at, whole):
    "The process ends after the checkpoint was saved, and before the evaluation is written."
    from rollpipe.agents import parallel_evaluation

    real = parallel_evaluation.evaluate
    calls = []

    def evaluate(*args, **kwargs):
        calls.append(1)
        if len(calls) == at + 1:
            raise Killed
        return real(*args, **kwargs)

    monkeypatch.setattr(parallel_evaluation, "evaluate", evaluate)
    run = start(tmp_path / "b", small())
    with pytest.raises(Killed):
        learn(run)
    assert points(run.folder) == WHOLE[:at]
    before = results(run.folder)
    monkeypatch.setattr(parallel_evaluation, "evaluate", real)
    learn(resume(run.folder))
    assert points(run.folder) == WHOLE and results(run.folder)[:at] == before
    if at < 3:
        return
    assert [r["mean"] for r in results(run.folder)] == [r["mean"] for r in results(whole.folder)]
    ours, theirs = (read_metrics(x.folder)["eval_return_mean"] for x in (run, whole))
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow_but_one
@pytest.mark.parametrize(
    "words",
    [
        ["--resume"],
        [
            *"trpo CartPole-v1 --n-envs 2 --n-steps 32 --hidden 8 --critic-hidden 8 --steps 640 --eval-episodes 2 --final-episodes 3"
            " --preset none --continue".split(),
            "--eval-every",
            "200 steps",
            "--out",
        ],
    ],
)
def test_a_command_makes_the_last_evaluations_up(tmp_path, words, capsys):
    learn(run := start(tmp_path / "run", small()))
    before = results(run.folder)
    for n, code in ((4, 0), (5, 0), (6, 2 if words[0] == "--resume" else 0)):
        write_evaluations(run.folder, read_evaluations(run.folder)[:n])
        assert rollpipe("train", *words, run.folder, "--quiet", "--no-tensorboard") == code
        assert results(run.folder) == before and load_run(run.folder).counters == run.counters
        assert ("is complete" in "".join(capsys.readouterr())) == (n == 6)


@pytest.mark.slow
def test_a_full_disk_leaves_whole_lines_and_the_run_goes_on_later(tmp_path, monkeypatch):
    run = start(tmp_path / "run", small())
    real = os.fsync
    full = [True]

    def fsync(number):
        name = os.readlink(f"/proc/self/fd/{number}")
        if full[0] and "evaluations" in name and len(points(run.folder)) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(number)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="No space left on device: .*evaluations.jsonl"):
        learn(run)
    assert points(run.folder) == WHOLE[:2] and not [
        p for p in run.folder.iterdir() if p.name.endswith(".tmp")
    ]
    full[0] = False
    learn(resume(run.folder))
    assert points(run.folder) == WHOLE


@pytest.mark.slow
def test_from_an_earlier_checkpoint_later_evaluations_are_made_again(tmp_path):
    run = start(tmp_path / "run", small(keep=20, checkpoint_every=1))
    learn(run)
    learn(resume(run.folder / "checkpoints" / "checkpoint-000000320.safetensors"))
    found = read_evaluations(run.folder)
    assert points(run.folder) == WHOLE and [r["resumes"] for r in found] == [0] * 6


@pytest.mark.slow
def test_lost_evaluations_are_told_and_refused_where_they_count(tmp_path, caplog, whole):
    for name, rules in (("a", {}), ("b", dict(patience=9))):
        learn(run := start(tmp_path / name, small(keep=20, checkpoint_every=1, **rules)))
        assert load_run(run.folder).counters[
            "evaluations"
        ] == 3 and "evaluations" not in read_metrics(run.folder)
        write_evaluations(run.folder, read_evaluations(run.folder)[:1])
    a = tmp_path / "a"
    b = tmp_path / "b"
    learn(resume(a, 704))
    assert (
        caplog.messages == [f"{a}/evaluations.jsonl has lost 2 of 3 evaluations"]
        and load_run(a).counters["evaluations"] == 2
    )
    assert points(a) == [("training", 0), ("training", 640), ("last", 704), ("best", 704)]
    caplog.clear()
    before = {path: path.read_bytes() for path in b.rglob("*") if path.is_file()}
    words = f"rollpipe fork {b} --out OUT --set patience=0"
    with pytest.raises(
        DataError,
        match=f"leaf patience: {b}/evaluations.jsonl has lost 2 of 3 evaluations. Expected .*; or `{words}`",
    ):
        resume(b, 704)
    with pytest.raises(DataError, match="has lost 1 of 2 evaluations"):
        resume(b / "checkpoints" / "checkpoint-000000320.safetensors")
    assert {
        path: path.read_bytes() for path in b.rglob("*") if path.is_file()
    } == before and not caplog.messages
    assert (
        rollpipe(
            *words.replace("OUT", str(tmp_path / "c")).replace("=0", "=0 --steps 704").split()[1:]
        )
        == 0
    )
    learn(resume(tmp_path / "c"))
    learn(
        resume(b / "checkpoints" / "checkpoint-000000192.safetensors")
    )  # it has seen no more than what is left
    assert [r["mean"] for r in results(b)] == [r["mean"] for r in results(whole.folder)]
    write_evaluations(b, read_evaluations(b)[:2])
    with pytest.raises(
        DataError,
        match=f"`rollpipe train --resume {b}/checkpoints/checkpoint-000000256.safetensors`",
    ):
        resume(b, 704)


@pytest.mark.slow
def test_a_run_that_is_trained_further_has_its_last_evaluations_at_its_end(tmp_path):
    run = start(tmp_path / "run", small())
    learn(run)
    learn(resume(run.folder, 700))
    assert points(run.folder) == [*WHOLE[:4], ("last", 704), ("best", 704)]
    assert rollpipe("plot", run.folder, "--y", "eval_return_mean", "--out", tmp_path / "x.svg") == 0


@pytest.mark.slow
def test_the_last_evaluation_is_recorded_once_if_the_run_goes_on(tmp_path, whole):
    "At the end of a run it has a record of its own. A fork of the end has this record, too."
    learn(run := start(tmp_path / "run", small(steps=256)))
    learn(resume(fork(run.folder, tmp_path / "fork", steps=640)))
    learn(resume(run.folder, 640))
    for folder in (run.folder, tmp_path / "fork"):
        found = [
            [r["eval_return_mean"] for r in read_records(x) if "eval_return_mean" in r]
            for x in (whole.folder, folder)
        ]
        assert (
            found[0] == found[1]
            and len(found[0]) == 4
            and len(read_records(folder)) == len(read_records(whole.folder)) + 1
        )


@pytest.mark.parametrize("text", ["200steps", "200 steps", "0_200 Steps"])
def test_the_unit_says_whether_updates_or_steps_are_counted(text):
    assert small(eval_every=text) == small() and small(eval_every="3 updates") == small(
        eval_every=3
    )
    assert small(eval_every=3)["eval_every"] == 3
    assert small(eval_every="0 steps")["eval_every"] == 0


@pytest.mark.parametrize("value", ["3 hours", "steps", -1, 2.5, "-3 steps", True, None])
def test_what_is_no_interval_is_refused(value):
    with pytest.raises(
        DataError,
        match="eval_every: (out of range. Expected updates, such as 10; or steps, such as '20_000 steps'|"
        "the run: wrong type of value. Expected int or str), got",
    ):
        small(eval_every=value)
    with pytest.raises(DataError, match="out of range. Expected an integer eval_episodes >= 1"):
        small(eval_episodes=0)


# -- a bench -----------------------------------------------------------------------------------------------------------


def spec(path, *rows, **shared):
    "A file with these rows; each is a text that follows the algorithm and the environment."
    shared = dict(dict(steps=256, every=100, episodes=2, final_episodes=2), **shared)
    head = "".join(f"{name} = {json.dumps(x)}\n" for name, x in shared.items())
    path.write_text(
        head
        + "".join(f'[[row]]\nalgorithm = "trpo"\nenv = "CartPole-v1"\n{TOML}{row}' for row in rows)
    )
    return path


HELD = """
import os
import time
import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv

class Held(CartPoleEnv):
    "After 3 000 steps of its process it waits to be stopped, if the process was told so."
    n = 0
    def step(self, action):
        Held.n += 1
        while "HELD" in os.environ and Held.n > 3_000: time.sleep(.01)
        return super().step(action)

gym.register("Held-v0", Held, max_episode_steps=500)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_bench_that_is_stopped_loses_no_finished_run_and_the_next_call_goes_on(
    tmp_path, monkeypatch, number, capfd
):
    "With --restart the results are those of a bench that was never stopped. Without it the run goes on, with new episodes."
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "held_env.py").write_text(HELD)
    file = spec(tmp_path / "a.toml", 'label = "short"\n', every=800)
    file.write_text(
        file.read_text()
        + f'[[row]]\nlabel = "long"\nalgorithm = "trpo"\nenv = "Held-v0"\nsteps = 3_200\n{TOML}'
    )
    words = [
        "bench",
        file,
        "--dir",
        tmp_path / "out",
        "--jobs",
        2,
        "--quiet",
        "--import",
        "held_env",
    ]
    short, long = (tmp_path / "out" / name for name in ("short-CartPole-v1-s0", "long-Held-v0-s0"))
    with process(*words, env=dict(HELD="1")) as child:
        wait_for(lambda: ("best", 256) in points(short) and len(points(long)) >= 2, child)
        child.send_signal(number)
        out, err = child.communicate(timeout=120)
    wait_for(lambda: not alive(tmp_path))
    if number == signal.SIGINT:
        assert (
            child.returncode == 130
            and "interrupted; nothing is lost, and the same command goes on" in err
        )
    assert 2 <= len(points(long)) < 5
    before = {
        path.name: path.read_bytes()
        for path in short.iterdir()
        if path.is_file() and path.name != "lock"
    }
    restart = ["--restart"] * (number == signal.SIGKILL)
    first = (long / "evaluations.jsonl").read_text().splitlines()[:2]
    assert rollpipe(*words, *restart) == 0
    assert "1 of 2 runs are complete, 1 to do" in capfd.readouterr().out
    assert {
        path.name: path.read_bytes() for path in short.iterdir() if path.name != "lock"
    } == before
    assert points(long) == [
        *(("training", n) for n in (0, 832, 1600, 2432, 3200)),
        ("last", 3200),
        ("best", 3200),
    ]
    again = (long / "evaluations.jsonl").read_text().splitlines()[:2]  # with their times
    assert load_run(long).counters["resumes"] == 0 and (again == first) == (not restart)
    if restart:
        learn(whole := start(tmp_path / "alone", load_run(long).config))
        assert results(long) == results(whole.folder)
    assert rollpipe(*words) == 0 and "2 of 2 runs are complete, 0 to do" in capfd.readouterr().out


FAILING = """
import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv

class Failing(CartPoleEnv):
    n = 0
    def step(self, action):
        self.n += 1
        if self.n > 60: raise RuntimeError("the motor is broken")
        return super().step(action)

gym.register("Failing-v0", Failing, max_episode_steps=20)
"""


@pytest.mark.slow
def test_a_run_that_fails_does_not_stop_the_others(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "failing_env.py").write_text(FAILING)
    file = spec(tmp_path / "a.toml", 'label = "good"\n')
    file.write_text(
        file.read_text() + f'[[row]]\nlabel = "bad"\nalgorithm = "trpo"\nenv = "Failing-v0"\n{TOML}'
    )
    words = ["bench", file, "--dir", "out", "--quiet", "--import", "failing_env", "--jobs", 2]
    assert rollpipe(*words) == 2
    err = capfd.readouterr().err
    assert re.search(
        r"error: 1 of 2 runs failed; bad-Failing-v0-s0: .*the motor is broken.* the same command goes on",
        err,
    )
    assert points(tmp_path / "out" / "good-CartPole-v1-s0")[-1] == ("best", 256)
    checkpoint = tmp_path / "out" / "good-CartPole-v1-s0" / "checkpoint.safetensors"
    checkpoint.write_bytes(checkpoint.read_bytes()[:-1])
    assert rollpipe(*words) == 2  # a damaged run does not stop the others, either
    assert re.search(
        r"2 of 2 runs failed; good-CartPole-v1-s0: .*damaged.*; bad-Failing-v0-s0: .*the motor is broken",
        capfd.readouterr().err,
    )


def test_a_specification_does_not_make_us_import_a_module_and_goes_on_with_the_same_run_command(
    tmp_path, monkeypatch
):
    (tmp_path / "isle.py").write_text(
        "open('imported', 'a').close()\n" + HELD.replace("Held-v0", "Isle-v0")
    )
    file = tmp_path / "a.toml"
    file.write_text(
        f'[[row]]\nalgorithm = "trpo"\nenv = "isle:Isle-v0"\nsteps = 256\nepisodes = 1\nfinal_episodes = 1\n{TOML}'
    )
    asked = run_command(tmp_path, "bench", file, "--quiet")
    assert asked.returncode == 2 and re.search(
        f"{file}: isle:Isle-v0 needs the module 'isle'.*Expected --import isle", asked.stderr
    )
    assert not (tmp_path / "imported").exists() and not (tmp_path / "runs").exists()
    words = "--n-envs 2 --n-steps 32 --hidden 8 --critic-hidden 8 --steps 256 --eval-every 12steps --eval-episodes 1".split()
    words += ["--final-episodes", 1]
    typed = run_command(
        tmp_path,
        "train",
        "trpo",
        "isle:Isle-v0",
        *words,
        "--seed",
        1,
        "--out",
        "runs/a/trpo-isle-Isle-v0-s1",
    )
    assert typed.returncode == 0, typed.stderr  # without `--import`, as by an earlier bench
    for complete in (1, 2):
        done = run_command(tmp_path, "bench", file, "--quiet", "--import", "isle", "--seeds", "0-1")
        assert done.returncode == 0 and f"{complete} of 2 runs are complete" in done.stdout, (
            done.stderr
        )


@pytest.mark.parametrize(
    "more, wrong", [("steps = -600", "steps"), ("episodes = 0", "eval_episodes")]
)
def test_what_is_out_of_range_is_told_with_its_row(tmp_path, more, wrong):
    rows = read_spec(spec(tmp_path / "a.toml", 'label = "good"\n', f'label = "bad"\n{more}\n')).rows
    with pytest.raises(
        DataError, match=f"^bad-CartPole-v1: out of range. Expected an integer {wrong} >= 1"
    ):
        jobs_of(rows, tmp_path)


def test_a_row_may_stop_by_its_evaluations(tmp_path):
    file = spec(tmp_path / "a.toml", "")
    file.write_text(
        file.read_text().replace("options = {", "options = { patience = 3, stop_at_return = 50,")
    )
    (job,) = jobs_of(read_spec(file).rows, tmp_path)[:1]
    assert (job.config["patience"], job.config["stop_at_return"]) == (3, 50) and job.config[
        "eval_every"
    ].endswith("steps")


def test_two_benches_in_one_folder_are_refused(tmp_path, capfd):
    file = spec(tmp_path / "a.toml", "")
    (ready, tell) = os.pipe()
    (wait, end) = os.pipe()
    (tmp_path / "out").mkdir()
    if not (pid := os.fork()):
        lock(tmp_path / "out")
        os.write(tell, b"x")
        os.read(wait, 1)
        os._exit(0)
    os.read(ready, 1)
    try:
        assert rollpipe("bench", file, "--dir", tmp_path / "out") == 2
        assert (
            f"another process is training in {tmp_path}/out. Expected another folder, got process {pid}"
            in capfd.readouterr().err
        )
        assert not (tmp_path / "out" / BENCH).exists()
    finally:
        os.write(end, b"x")
        os.waitpid(pid, 0)
        for number in (ready, tell, wait, end):
            os.close(number)


def test_a_run_that_has_lost_its_checkpoint_does_not_stop_the_others(tmp_path, whole):
    lost = Path(shutil.copytree(whole.folder, tmp_path / "lost"))
    (lost / "checkpoint.safetensors").unlink()
    states, damaged = _states(
        [Job(None, 0, folder, Resolved(whole.config)) for folder in (lost, whole.folder)]
    )
    assert (
        states == dict(run="complete")
        and "checkpoint.safetensors: there is no such checkpoint" in damaged["lost"]
    )


@pytest.mark.parametrize(
    "old, new, told",
    [
        ("every", "evry", "there is no key 'evry'. Expected every"),
        ("n_envs", "n_env", "row 1: there is no option 'n_env'. Expected n_envs"),
        ('"trpo"', '"tpro"', "there is no algorithm 'tpro'. Expected trpo"),
        ("CartPole-v1", "CartPole-v9", "CartPole-v1"),
        (
            "steps = 256",
            'steps = "many"',
            "row 1: wrong type of value. Expected a whole number, got 'many'",
        ),
        ("steps = 256", "steps = 0", "steps"),
        ("[[row]]", "[[rows]]", "there is no key 'rows'. Expected row"),
        ("steps = 256", 'preset = "Pendulum-v1"', "is for another action space"),
        ("episodes = 2", "episodes = 0", "an integer eval_episodes >= 1"),
        *(
            (
                "every = 100",
                f"every = {n}",
                f"leaf every: .*row 1: out of range. Expected at least 1, got {n}",
            )
            for n in (0, -1)
        ),
        ("= [8]", "= [0]", "cannot be built|hidden"),
        ("steps = 256", "steps 256", "not TOML"),
        *(
            (
                "options = { ",
                f"options = {{ {name} = 3, ",
                f"row 1: '{name}' stands among the options. Expected the key {key} of the row",
            )
            for name, key in dict(
                steps="steps",
                eval_every="every",
                seed="seeds",
                eval_episodes="episodes",
                name="label",
            ).items()
        ),
        (
            "every = 100",
            'every = 100\n[[published]]\nalgorithm = "ppo"\nenv = "CartPole-v1"\nname = "x"\nmean = 1\nsource = "y"',
            "no row to compare it",
        ),
    ],
)
def test_what_is_wrong_in_a_specification_is_told_before_anything_runs(
    tmp_path, capsys, old, new, told
):
    file = spec(tmp_path / "a.toml", "")
    text = file.read_text()
    assert old in text
    text = text.replace(old, new, 1)
    if "[[published]]" in new:  # tables come after the keys of the file
        head, _, rest = text.partition("\n[[published]]")
        published, _, row = ("[[published]]" + rest).partition("\nepisodes")
        text = head + "\nepisodes" + row + published
    file.write_text(text)
    assert rollpipe("bench", file, "--dir", tmp_path / "out") == 2
    out, err = capsys.readouterr()
    assert (
        re.search(told, err)
        and err.count("\n") == 1
        and not out
        and not (tmp_path / "out").exists()
    )


def test_a_folder_of_another_bench_or_with_other_options_is_refused(tmp_path, capsys):
    file = spec(tmp_path / "a.toml", "")
    run = tmp_path / "out" / "trpo-CartPole-v1-s0"
    learn(start(run, small(steps=64, threads=2)))
    assert rollpipe("bench", file, "--dir", tmp_path / "out") == 2
    assert "has other options. Expected the same, or another folder, got" in capsys.readouterr().err
    row = dict(
        name="trpo-CartPole-v1",
        label="trpo",
        algorithm="trpo",
        env="CartPole-v1",
        command="rollpipe train",
        seeds=[0],
    )
    (tmp_path / "out" / BENCH).write_text(json.dumps(dict(format=1, title="another", rows=[row])))
    assert rollpipe("bench", spec(file, 'label = "other"\n'), "--dir", tmp_path / "out") == 2
    assert (
        "has runs of rows that the specification does not have. Expected another --dir, got trpo-CartPole-v1"
        in capsys.readouterr().err
    )
    (tmp_path / "out" / BENCH).write_text('{"format": 5, "rows": []}')
    assert rollpipe("bench", file, "--dir", tmp_path / "out") == 2
    assert "made by another version of rollpipe" in capsys.readouterr().err
    assert (
        rollpipe("bench", tmp_path / "b.toml") == 2
        and "there is no such file. Expected" in capsys.readouterr().err
    )


def test_a_run_of_an_earlier_preset_or_of_more_steps_is_not_taken_for_complete(tmp_path, capsys):
    "`rollpipe train --continue` keeps the values of such a run, but a row has one configuration."
    file = spec(tmp_path / "a.toml", "", every=200)
    run = tmp_path / "out" / "trpo-CartPole-v1-s0"
    now = small(steps=256, eval_episodes=2, final_episodes=2, preset="auto")
    name = next(name for name in now.named("preset") if name in now["options"])
    old = {**now, "options": {**now["options"], name: 0.0625}}
    for config, told in (
        (old, f"{name}=0.0625 instead of {now['options'][name]!r}"),
        ({**now, "steps": 320}, "steps=320 instead of 256"),
    ):
        learn(start(run, config, overwrite=True))
        assert rollpipe("bench", file, "--dir", tmp_path / "out") == 2
        out, err = capsys.readouterr()
        assert err.endswith(
            f"the run in {run} has other options. Expected the same, or another folder, got {told}.\n"
        ), err
        assert not out and not (tmp_path / "out" / BENCH).exists()
    learn(start(run, now, overwrite=True))
    assert (
        rollpipe("bench", file, "--dir", tmp_path / "out") == 0
        and "1 of 1 runs are complete, 0 to do" in capsys.readouterr().out
    )


@pytest.fixture
def terminating(monkeypatch):
    "The module `benchmarks.ablations`, whose algorithm is known for this test alone."
    monkeypatch.setitem(ALGORITHMS, "trpo_terminating", ALGORITHMS["trpo"])
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[1])
    monkeypatch.delitem(sys.modules, "benchmarks.ablations", raising=False)
    return importlib.import_module("benchmarks.ablations").terminating


@pytest.mark.slow
def test_the_ablation_values_nothing_after_a_truncation(terminating):
    "The last step of an episode gains its reward, less the critic's value before it. With the recipe it gains what may follow, too."

    def cut():
        return TimeLimit(gym.make("Pendulum-v1").unwrapped, 5)

    actor = GaussianPolicy.for_env("Pendulum-v1", seed=0)
    critic = Critic.for_env("Pendulum-v1", seed=1)
    ours, usual = (
        next(iter(make(cut, actor, critic, n_envs=2, n_steps=7, seed=0)))
        for make in (terminating, on_policy)
    )
    gained = (usual.state.rew[5] - critic(usual.state.obs[4])).detach()
    torch.testing.assert_close(ours.adv[4], gained)
    assert (usual.adv[4] - gained).abs().min() > 1e-3 and torch.equal(ours.adv[5:], usual.adv[5:])


SPECS = sorted((Path(__file__).resolve().parents[1] / "benchmarks" / "specs").glob("*.toml"))


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_the_specifications_that_ship_can_be_read(path, terminating, monkeypatch):
    monkeypatch.setitem(
        ALGORITHMS, "q_table", ALGORITHMS["reinforce"]
    )  # `benchmarks.q_table` registers it
    found = read_spec(path)
    rows = dict(
        ablation=12,
        box2d=2,
        classic=9,
        crossq=3,
        fvp_subsample=6,
        learning=14,
        minatar=4,
        mujoco=10,
        off_policy=5,
        off_policy_million=1,
        off_policy_mujoco=4,
        recall=1,
    )
    assert len(found.rows) == rows[path.stem] and all(row.seeds for row in found.rows)


def test_a_folder_is_no_specification(tmp_path, capsys):
    assert SPECS and rollpipe("bench", tmp_path) == 2
    assert (
        f"{tmp_path}: there is no such file. Expected a specification (TOML), got a folder"
        in capsys.readouterr().err
    )
