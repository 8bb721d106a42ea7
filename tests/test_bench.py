"`rollpipe bench`: what is missing is trained, whatever has happened before; and the evaluations of a run between its updates."

import errno
import importlib
import json
import multiprocessing
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
from command_line import QUIET, alive, error_of, process, rollpipe, run_command, wait_for
from gallery import files_of, gone_on, quietly, refused
from gymnasium.wrappers import TimeLimit

from rollpipe.layers import Critic, GaussianPolicy
from rollpipe.pipes import on_policy
from rollpipe.pipes.data.nested import first_difference
from rollpipe.results.bench import BENCH, Job, _progress_of_all, jobs_of, read_spec
from rollpipe.runs.folder import load_run, resume, start
from rollpipe.runs.fork import fork
from rollpipe.runs.locks import lock, unlock
from rollpipe.runs.logs import read_evaluations, read_metrics, read_records, write_evaluations
from rollpipe.settings.algorithms import ALGORITHMS
from rollpipe.settings.config import make_config
from rollpipe.settings.files import Resolved

pytestmark = pytest.mark.usefixtures("packages")

OPTIONS = dict(n_envs=2, n_steps=32, hidden=(8,), critic_hidden=(8,))

TOML = "options = { n_envs = 2, n_steps = 32, hidden = [8], critic_hidden = [8] }\n"


def small(**run):
    evaluated = dict(eval_every="200 steps", eval_episodes=2, final_episodes=3)
    return make_config("trpo", "CartPole-v1", OPTIONS, **{"steps": 640, **evaluated, **run})


def learn(folder, **run):
    "Train a new run. Returns its folder."
    return quietly(start(folder, small(**run))).folder


def points(folder):
    return [(r["kind"], r["steps"]) for r in read_evaluations(folder)]


def results(folder):
    return [
        {name: x for name, x in r.items() if name != "seconds"} for r in read_evaluations(folder)
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    "A run that came to its end, to be looked at."
    return learn(tmp_path_factory.mktemp("whole") / "run")


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
    plain = learn(tmp_path / "b", eval_every=0)
    assert points(whole) == WHOLE and not points(plain)
    ours, theirs = (load_run(folder).agent_state for folder in (whole, plain))
    for part in ("actor", "critic"):
        assert first_difference(ours[part], theirs[part]) is None
    ours, theirs = (read_metrics(folder) for folder in (whole, plain))
    for name in ("kl", "steps", "return_mean"):
        np.testing.assert_array_equal(ours[name][:10], theirs[name])


@pytest.mark.slow
def test_the_same_run_has_the_same_evaluations_and_the_best_file_is_the_best_of_them(
    tmp_path, whole
):
    assert results(whole) == results(learn(tmp_path / "b"))
    records = read_evaluations(whole)
    means = {r["updates"]: r["mean"] for r in records if r["kind"] == "training"}
    best = load_run(whole, best=True)
    n = best.counters["updates"]
    assert best.evaluated["eval_return_mean"] == means[n] == max(means.values())
    (of_best,) = (r for r in records if r["kind"] == "best")
    assert of_best["updates"] == n and len(of_best["returns"]) == 3


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

    run = tmp_path / "b"
    with monkeypatch.context() as patch:
        patch.setattr(parallel_evaluation, "evaluate", evaluate)
        refused("", learn, run, error=Killed)
    assert points(run) == WHOLE[:at]
    before = results(run)
    gone_on(run)
    assert points(run) == WHOLE and results(run)[:at] == before
    if at < 3:
        return
    assert [r["mean"] for r in results(run)] == [r["mean"] for r in results(whole)]
    ours, theirs = (read_metrics(x)["eval_return_mean"] for x in (run, whole))
    np.testing.assert_array_equal(ours, theirs)


NETWORKS = "--n-envs 2 --n-steps 32 --hidden 8 --critic-hidden 8"


CONTINUED = f"trpo CartPole-v1 {NETWORKS} --steps 640 --eval-every '200 steps' --eval-episodes 2 --final-episodes 3"


@pytest.mark.slow_but_one
@pytest.mark.parametrize("words", ["--resume", f"{CONTINUED} --preset none --continue --out"])
def test_a_command_makes_the_last_evaluations_up(tmp_path, words, capsys, whole):
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    before = results(run)
    counters = load_run(run).counters
    for n, code in ((4, 0), (5, 0), (6, 2 if words == "--resume" else 0)):
        write_evaluations(run, read_evaluations(run)[:n])
        assert rollpipe(f"train {words} {run} {QUIET}") == code
        assert results(run) == before and load_run(run).counters == counters
        assert ("is complete" in "".join(capsys.readouterr())) == (n == 6)


@pytest.mark.slow
def test_a_full_disk_leaves_whole_lines_and_the_run_goes_on_later(tmp_path, monkeypatch):
    run = tmp_path / "run"
    real = os.fsync

    def fsync(number):
        name = os.readlink(f"/proc/self/fd/{number}")
        if "evaluations" in name and len(points(run)) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(number)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        refused("No space left on device: .*evaluations.jsonl", learn, run, error=OSError)
    assert points(run) == WHOLE[:2] and not [*run.glob("*.tmp")]
    gone_on(run)
    assert points(run) == WHOLE


@pytest.mark.slow
def test_lost_evaluations_are_told(tmp_path, caplog):
    run = learn(tmp_path / "a", keep=20, checkpoint_every=1)
    assert load_run(run).counters["evaluations"] == 3 and "evaluations" not in read_metrics(run)
    write_evaluations(run, read_evaluations(run)[:1])
    gone_on(run, steps=704)
    assert caplog.messages == [f"{run}/evaluations.jsonl has lost 2 of 3 evaluations"]
    assert load_run(run).counters["evaluations"] == 2
    assert points(run) == [("training", 0), ("training", 640), ("last", 704), ("best", 704)]


@pytest.mark.slow
def test_lost_evaluations_are_refused_where_they_count(tmp_path, caplog, whole):
    b = learn(tmp_path / "b", keep=20, checkpoint_every=1, patience=9)
    write_evaluations(b, read_evaluations(b)[:1])
    before = files_of(b)
    kept = b / "checkpoints"
    words = f"fork {b} --out OUT --set patience=0"
    told = f"leaf patience: {b}/evaluations.jsonl has lost 2 of 3 evaluations. Expected .*; or `rollpipe {words}`"
    refused(told, resume, b, 704)
    told = "has lost 1 of 2 evaluations"
    refused(told, resume, kept / "checkpoint-000000320.safetensors")
    assert files_of(b) == before and not caplog.messages
    assert rollpipe(words.replace("OUT", f"{tmp_path}/c"), "--steps 704") == 0
    gone_on(tmp_path / "c")

    # This checkpoint has seen no more than what is left.
    gone_on(kept / "checkpoint-000000192.safetensors")
    assert [r["mean"] for r in results(b)] == [r["mean"] for r in results(whole)]
    write_evaluations(b, read_evaluations(b)[:2])
    refused(f"`rollpipe train --resume {kept}/checkpoint-000000256.safetensors`", resume, b, 704)


@pytest.mark.slow
def test_a_run_that_is_trained_further_has_its_last_evaluations_at_its_end(tmp_path, whole):
    run = shutil.copytree(whole, tmp_path / "run")
    gone_on(run, steps=700)
    assert points(run) == [*WHOLE[:4], ("last", 704), ("best", 704)]
    assert rollpipe(f"plot {run} --y eval_return_mean --out {tmp_path}/x.svg") == 0


@pytest.mark.slow
def test_the_last_evaluation_is_recorded_once_if_the_run_goes_on(tmp_path, whole):
    "At the end of a run it has a record of its own. A fork of the end has this record, too."

    def means(folder):
        return [r["eval_return_mean"] for r in read_records(folder) if "eval_return_mean" in r]

    run = learn(tmp_path / "run", steps=256)
    out = gone_on(fork(run, tmp_path / "fork", steps=640)).folder
    gone_on(run, steps=640)
    for folder in (run, out):
        assert means(folder) == means(whole) and len(means(whole)) == 4
        assert len(read_records(folder)) == len(read_records(whole)) + 1


@pytest.mark.parametrize("text", ["200steps", "200 steps", "0_200 Steps"])
def test_the_unit_says_whether_updates_or_steps_are_counted(text):
    assert small(eval_every=text) == small() and small(eval_every="3 updates") == small(
        eval_every=3
    )
    assert small(eval_every=3)["eval_every"] == 3
    assert small(eval_every="0 steps")["eval_every"] == 0


@pytest.mark.parametrize("value", ["3 hours", "steps", -1, 2.5, "-3 steps", True, None])
def test_what_is_no_interval_is_refused(value):
    told = "out of range. Expected updates, such as 10; or steps, such as '20_000 steps'"
    told = f"eval_every: ({told}|the run: wrong type of value. Expected int or str), got"
    refused(told, small, eval_every=value)
    refused("out of range. Expected an integer eval_episodes >= 1", small, eval_episodes=0)


# -- a bench -----------------------------------------------------------------------------------------------------------


def row_of(env, more=""):
    "A row of a specification."
    return f'[[row]]\nalgorithm = "trpo"\nenv = "{env}"\n{TOML}{more}'


# -- a bench -----------------------------------------------------------------------------------------------------------


def spec(path, *rows, **shared):
    "A file with these rows; each is a text that follows the algorithm and the environment."
    shared = {**dict(steps=256, every=100, episodes=2, final_episodes=2), **shared}
    head = "".join(f"{name} = {json.dumps(x)}\n" for name, x in shared.items())
    path.write_text(head + "".join(row_of("CartPole-v1", row) for row in rows))
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
    long_row = row_of("Held-v0", 'label = "long"\nsteps = 3_200\n')
    file.write_text(file.read_text() + long_row)
    out = tmp_path / "out"
    words = f"bench {file} --dir {out} --jobs 2 --quiet --import held_env"
    short, long = out / "short-CartPole-v1-s0", out / "long-Held-v0-s0"
    with process(words, env=dict(HELD="1")) as child:
        wait_for(lambda: ("best", 256) in points(short) and len(points(long)) >= 2, child)
        child.send_signal(number)
        _, err = child.communicate(timeout=120)
    wait_for(lambda: not alive(tmp_path))
    if number == signal.SIGINT:
        assert child.returncode == 130
        assert "interrupted; nothing is lost, and the same command goes on" in err
    assert 2 <= len(points(long)) < 5

    def times():
        return (long / "evaluations.jsonl").read_text().splitlines()[:2]

    def finished():
        return {path: x for path, x in files_of(short).items() if path.name != "lock"}

    # The same command once more
    before = finished()
    first = times()
    restart = number == signal.SIGKILL
    assert rollpipe(words, *["--restart"] * restart) == 0
    assert "1 of 2 runs are complete, 1 to do" in capfd.readouterr().out
    assert finished() == before
    in_turn = [("training", n) for n in (0, 832, 1600, 2432, 3200)]
    assert points(long) == [*in_turn, ("last", 3200), ("best", 3200)]
    assert load_run(long).counters["resumes"] == 0 and (times() == first) == (not restart)
    if restart:
        alone = quietly(start(tmp_path / "alone", load_run(long).config))
        assert results(long) == results(alone.folder)
    assert rollpipe(words) == 0 and "2 of 2 runs are complete, 0 to do" in capfd.readouterr().out


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
    file.write_text(file.read_text() + row_of("Failing-v0", 'label = "bad"\n'))
    words = f"bench {file} --dir out --quiet --import failing_env --jobs 2"
    broken = "bad-Failing-v0-s0: .*the motor is broken"
    assert rollpipe(words) == 2
    err = capfd.readouterr().err
    assert re.search(f"error: 1 of 2 runs failed; {broken}.* the same command goes on", err)
    good = tmp_path / "out" / "good-CartPole-v1-s0"
    assert points(good)[-1] == ("best", 256)

    # A damaged run does not stop the others, either.
    checkpoint = good / "checkpoint.safetensors"
    checkpoint.write_bytes(checkpoint.read_bytes()[:-1])
    assert rollpipe(words) == 2
    told = f"2 of 2 runs failed; good-CartPole-v1-s0: .*damaged.*; {broken}"
    assert re.search(told, capfd.readouterr().err)


@pytest.mark.slow
def test_a_specification_does_not_make_us_import_a_module_and_goes_on_with_the_same_run_command(
    tmp_path,
):
    text = "open('imported', 'a').close()\n" + HELD.replace("Held-v0", "Isle-v0")
    (tmp_path / "isle.py").write_text(text)
    file = tmp_path / "a.toml"
    more = "steps = 256\nepisodes = 1\nfinal_episodes = 1\n"
    file.write_text(row_of("isle:Isle-v0", more))
    asked = run_command(tmp_path, f"bench {file} --quiet")
    told = f"{file}: isle:Isle-v0 needs the module 'isle'.*Expected --import isle"
    assert asked.returncode == 2 and re.search(told, asked.stderr)
    assert not (tmp_path / "imported").exists() and not (tmp_path / "runs").exists()

    # Without `--import`, as by an earlier bench
    words = f"train trpo isle:Isle-v0 {NETWORKS} --steps 256 --eval-every 12steps --eval-episodes 1"
    words += " --final-episodes 1 --seed 1 --out runs/a/trpo-isle-Isle-v0-s1"
    typed = run_command(tmp_path, words)
    assert typed.returncode == 0, typed.stderr
    for complete in (1, 2):
        done = run_command(tmp_path, f"bench {file} --quiet --import isle --seeds 0-1")
        assert done.returncode == 0, done.stderr
        assert f"{complete} of 2 runs are complete" in done.stdout


@pytest.mark.parametrize(
    "more, wrong", [("steps = -600", "steps"), ("episodes = 0", "eval_episodes")]
)
def test_what_is_out_of_range_is_told_with_its_row(tmp_path, more, wrong):
    rows = read_spec(spec(tmp_path / "a.toml", 'label = "good"\n', f'label = "bad"\n{more}\n')).rows
    told = f"^bad-CartPole-v1: out of range. Expected an integer {wrong} >= 1"
    refused(told, jobs_of, rows, tmp_path)


def test_a_row_may_stop_by_its_evaluations(tmp_path):
    file = spec(tmp_path / "a.toml", "")
    rules = "options = { patience = 3, stop_at_return = 50,"
    file.write_text(file.read_text().replace("options = {", rules))
    config = jobs_of(read_spec(file).rows, tmp_path)[0].config
    assert (config["patience"], config["stop_at_return"]) == (3, 50)
    assert config["eval_every"].endswith("steps")


def test_two_benches_in_one_folder_are_refused(tmp_path, capfd):
    out = tmp_path / "out"
    out.mkdir()
    context = multiprocessing.get_context("fork")
    is_locked, is_over = context.Event(), context.Event()

    def other():
        lock(out)
        is_locked.set()
        is_over.wait(60)

    child = context.Process(target=other)
    child.start()
    is_locked.wait(60)
    try:
        assert rollpipe(f"bench {spec(tmp_path / 'a.toml', '')} --dir {out}") == 2
    finally:
        is_over.set()
        child.join(60)
    told = f"another process is training in {out}. Expected another folder, got process {child.pid}"
    assert told in capfd.readouterr().err and not (out / BENCH).exists()


def test_a_run_that_has_lost_its_checkpoint_does_not_stop_the_others(tmp_path, whole):
    lost = Path(shutil.copytree(whole, tmp_path / "lost"))
    (lost / "checkpoint.safetensors").unlink()
    config = Resolved(load_run(whole).config)
    states, damaged = _progress_of_all([Job(None, 0, folder, config) for folder in (lost, whole)])
    assert states == dict(run="complete")
    assert "checkpoint.safetensors: there is no such checkpoint" in damaged["lost"]


AMONG_OPTIONS = "row 1: '{}' stands among the options. Expected the key {} of the row"


# What is written instead of what, in a specification of one row, and what is told
WRONG = [
    ("every", "evry", "there is no key 'evry'. Expected every"),
    ("CartPole-v1", "CartPole-v9", "CartPole-v1"),
    ("= 256", "= 0", "steps"),
    ("[[row]]", "[[rows]]", "there is no key 'rows'. Expected row"),
    ("episodes = 2", "episodes = 0", "an integer eval_episodes >= 1"),
    ("= 100", "= -1", "leaf every: .*row 1: out of range. Expected at least 1, got -1"),
    ("= [8]", "= [0]", "cannot be built|hidden"),
    ("= 256", " 256", "not TOML"),
    ("{ n_envs", "{ steps = 3, n_envs", AMONG_OPTIONS.format("steps", "steps")),
    ("{ n_envs", "{ eval_episodes = 3, n_envs", AMONG_OPTIONS.format("eval_episodes", "episodes")),
    ("{ n_envs", "{ name = 3, n_envs", AMONG_OPTIONS.format("name", "label")),
]


@pytest.mark.parametrize("old, new, told", WRONG)
def test_what_is_wrong_in_a_specification_is_told_before_anything_runs(
    tmp_path, capsys, old, new, told
):
    file = spec(tmp_path / "a.toml", "")
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
    err = error_of(capsys, f"bench {file} --dir {tmp_path}/out")
    assert re.search(told, err) and err.count("\n") == 1 and not (tmp_path / "out").exists()


def test_a_folder_of_another_bench_or_with_other_options_is_refused(tmp_path, capsys):
    file = spec(tmp_path / "a.toml", "")
    out = tmp_path / "out"
    words = f"bench {file} --dir {out}"
    unlock(start(out / "trpo-CartPole-v1-s0", small(steps=64, threads=2)).folder)
    told = "has other options. Expected the same, or another folder, got"
    assert told in error_of(capsys, words)
    name = "trpo-CartPole-v1"
    about = dict(label="trpo", algorithm="trpo", env="CartPole-v1", command="rollpipe train")
    row = dict(about, name=name, seeds=[0])
    (out / BENCH).write_text(json.dumps(dict(format=1, title="another", rows=[row])))
    spec(file, 'label = "other"\n')
    told = (
        f"has runs of rows that the specification does not have. Expected another --dir, got {name}"
    )
    assert told in error_of(capsys, words)
    (out / BENCH).write_text('{"format": 5, "rows": []}')
    assert "made by another version of rollpipe" in error_of(capsys, words)
    told = "there is no such file. Expected"
    assert told in error_of(capsys, f"bench {tmp_path}/b.toml")


@pytest.mark.slow
def test_a_run_of_an_earlier_preset_or_of_more_steps_is_not_taken_for_complete(tmp_path, capsys):
    "`rollpipe train --continue` keeps the values of such a run, but a row has one configuration."
    out = tmp_path / "out"
    words = f"bench {spec(tmp_path / 'a.toml', '', every=200)} --dir {out}"
    run = out / "trpo-CartPole-v1-s0"
    now = small(steps=256, final_episodes=2, preset="auto")
    name = next(name for name in now.named("preset") if name in now["options"])
    old = {**now, "options": {**now["options"], name: 0.0625}}
    for config, told in (
        (old, f"{name}=0.0625 instead of {now['options'][name]!r}"),
        ({**now, "steps": 320}, "steps=320 instead of 256"),
    ):
        quietly(start(run, config, overwrite=True))
        told = f"the run in {run} has other options. Expected the same, or another folder, got {told}.\n"
        assert error_of(capsys, words).endswith(told) and not (out / BENCH).exists()
    quietly(start(run, now, overwrite=True))
    assert rollpipe(words) == 0
    assert "1 of 1 runs are complete, 0 to do" in capsys.readouterr().out


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
        first_options=45,
        lr_kl=4,
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
