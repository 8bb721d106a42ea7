"A training that stops before it has made all of its steps says why, counts as complete, and is the beginning of one that does not stop."

import time

import numpy as np
import pytest
from command_line import QUIET, error_of, rollpipe
from gallery import check_same, content, gone_on, interrupted, quietly, refused, updates_of

from rollpipe.pipes.data.nested import first_difference
from rollpipe.results.collect import read_result
from rollpipe.runs import Run, Wish, evaluations, resume, start
from rollpipe.runs.evaluations import read_evaluations, why_enough
from rollpipe.runs.folder import load_run
from rollpipe.runs.locks import unlock
from rollpipe.runs.logs import read_records
from rollpipe.runs.moments import verify
from rollpipe.settings.config import make_config
from rollpipe.traces.differences import diff
from rollpipe.traces.history import History

EVERY = dict(eval_every="256 steps", eval_episodes=4, final_episodes=4)


def made(folder, steps=2048, **run):
    "A run of updates of 64 steps that has not begun."
    options = dict(n_envs=2, n_steps=32, epochs=4, lr=3e-3)
    about = dict(steps=steps, seed=1, checkpoint_every=3, **run)
    return start(folder, make_config("ppo", "CartPole-v1", options, **about))


def check_goes_on(whole, other):
    "A run that was stopped and went on has all numbers of one that was not, and one line more: that of its end."
    one = load_run(whole)
    two = load_run(other)
    assert diff(whole, other).is_equal and one.counters["updates"] == two.counters["updates"]
    assert first_difference(one.agent_state, two.agent_state) is None
    assert first_difference(one.stream, two.stream) is None


def means(folder):
    return [r["mean"] for r in read_evaluations(folder) if r["kind"] == "training"]


# -- the rules ---------------------------------------------------------------------------------------------------------

NAN = float("nan")


@pytest.mark.parametrize(
    "config, found, why",
    [
        (dict(stop_at_return=3.0), [], None),
        (dict(stop_at_return=3.0), [4.0, 2.9], None),
        (dict(stop_at_return=3.0), [1.0, 3.0], "return 3 has"),
        (dict(stop_at_return=-3.0), [-4.0, -2.0], "stop_at_return=-3"),
        (dict(stop_at_return=0.0), [NAN], None),
        (dict(patience=2), [1.0, 2.0, 1.0], None),
        (
            dict(patience=2),
            [1.0, 2.0, 1.0, 2.0],
            "no evaluation since the mean return 2 was better",
        ),
        (dict(patience=2), [NAN, 1.0, NAN], None),
        (dict(patience=1), [NAN, NAN], "since the mean return nan"),
        (dict(patience=1), [1.0], None),
        (dict(patience=0), [3.0, 2.0, 1.0], None),
        ({}, [1.0], None),
    ],
)
def test_evaluations_that_are_enough(config, found, why):
    told = why_enough(config, found)
    assert told is None if why is None else why in told


# -- a run that stops --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return quietly(made(tmp_path_factory.mktemp("whole") / "run", **EVERY)).folder


def goal_of(whole):
    "A return that an evaluation in the middle is the first to reach, and its number."
    found = means(whole)
    k = next(k for k in range(3, len(found)) if found[k] > max(found[:k]))
    return found[k], k


@pytest.mark.slow
def test_at_a_return_it_stops_says_why_and_is_complete(whole, tmp_path, monkeypatch, capsys):
    goal, k = goal_of(whole)
    engine = load_run(whole).config["options"]["engine"]
    words = (
        f"train ppo CartPole-v1 --n-envs 2 --n-steps 32 --epochs 4 --lr 3e-3 --steps 2048 --seed 1 --engine {engine} "
        "--checkpoint-every 3 --preset none --eval-every '256 steps' --eval-episodes 4 --final-episodes 4 --out run "
        f"--continue --stop-at-return {goal!r} {QUIET}"
    )
    monkeypatch.chdir(tmp_path)
    assert rollpipe(words) == 0
    found = load_run("run")
    why = f"the mean return {goal:g} has reached stop_at_return={goal:g}"
    assert f"\nstopped: {why}\n" in capsys.readouterr().out
    assert found.history.stopped == History.read("run").stopped == why
    assert means("run") == means(whole)[: k + 1] and found.counters["steps"] == 256 * k
    kinds = {r["kind"] for r in read_evaluations("run") if r["steps"] == 256 * k}
    assert kinds == {"training", "last", "best"}

    # A second time there is nothing to do.
    before = content(tmp_path / "run")
    assert rollpipe(words) == 0
    told = f"run is complete, with {found.counters['steps']} steps, and was stopped: {why}"
    assert told in capsys.readouterr().out
    assert "run is complete" in error_of(capsys, "train --resume run")
    assert content(tmp_path / "run") == before and verify("run", 99).is_equal

    # To go on is a wish of its own.
    assert rollpipe(f"train --resume run --steps 2048 {QUIET}") == 0
    assert load_run("run").history.stopped is load_run("run").config["stop_at_return"] is None
    check_goes_on(whole, tmp_path / "run")


@pytest.mark.slow
def test_a_run_that_is_interrupted_stops_where_it_would_have_stopped(whole, tmp_path):
    goal, k = goal_of(whole)
    goal = dict(EVERY, stop_at_return=goal)
    one = quietly(made(tmp_path / "one", **goal)).folder
    stopped = load_run(one).history.stopped
    for n, at in enumerate((1, 4 * k - 1)):
        other = tmp_path / f"other{n}"
        unlock(made(other, **goal).folder)
        interrupted(other, at)
        gone_on(other)
        check_same(one, other)
        assert load_run(other).history.stopped == stopped

    # Killed between the evaluation and the saving of the stop: the next start only has to say so.
    config = load_run(one).config
    run = start(tmp_path / "again", {**config, "stop_at_return": None, "steps": 256 * k})
    quietly(run)
    run.config.update(config)
    run.save()
    assert gone_on(run.folder).counters["updates"] == 4 * k
    assert load_run(run.folder).history.stopped == stopped


@pytest.mark.slow
def test_patience(tmp_path):
    run = quietly(made(tmp_path / "run", patience=2, steps=10_000, **EVERY))
    found = means(run.folder)
    assert len(found) == found.index(max(found)) + 3
    told = "patience=2: no evaluation since the mean return"
    assert run.history.stopped.startswith(told)
    assert verify(run.folder, 5).is_equal


class Killed(BaseException):
    "Stands for the end of the process."


@pytest.mark.slow
@pytest.mark.parametrize("place, name", [(Run, "save"), (History, "write")])
def test_a_run_that_is_killed_while_its_stop_is_saved_is_complete_later(
    tmp_path, monkeypatch, place, name
):
    real = getattr(place, name)

    def end(*args):
        if (args[0].history if place is Run else args[0]).stopped:
            raise Killed
        return real(*args)

    run = made(tmp_path / "run", patience=2, steps=10_000, **EVERY)
    with monkeypatch.context() as context:
        context.setattr(place, name, end)
        refused("", quietly, run, error=Killed)
    assert rollpipe(f"train --resume {run.folder} {QUIET}") == 0
    found = read_result(run.folder, 1)
    assert found.state == "complete"
    assert load_run(run.folder).history.stopped == found.history.stopped == run.history.stopped


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["training", "last", "best"])
def test_a_kill_after_one_of_the_last_evaluations_loses_no_record(kind, tmp_path, monkeypatch):
    whole = quietly(made(tmp_path / "whole", steps=256, **EVERY)).folder
    real = evaluations.write_evaluations

    def end(folder, records):
        real(folder, records)
        if (records[-1]["kind"], records[-1]["steps"]) == (kind, 256):
            raise Killed

    run = made(tmp_path / "run", steps=256, **EVERY)
    with monkeypatch.context() as context:
        context.setattr(evaluations, "write_evaluations", end)
        refused("", quietly, run, error=Killed)
    is_complete = kind == "best"
    assert rollpipe(f"train --resume {run.folder} {QUIET}") == (2 if is_complete else 0)
    one, two = (
        [(r["updates"], r.get("eval_return_mean")) for r in read_records(folder)]
        for folder in (whole, run.folder)
    )
    assert one == two and one[-1] == (4, means(run.folder)[-1])


def test_after_some_time_it_stops(tmp_path):
    run = made(tmp_path / "run", stop_after="0.5 s", steps=10**6)
    quietly(run, callbacks=[lambda run, record: time.sleep(0.1)])
    seconds = [r["seconds"] for r in read_records(run.folder)]
    assert seconds[-1] >= 0.5 and all(x < 0.5 for x in seconds[:-1])
    assert run.history.stopped == "0.5 s of training have passed"
    refused("is complete", resume, run.folder)
    n = run.counters["updates"]
    run = gone_on(run.folder, steps=run.counters["steps"] + 128)
    assert run.config["stop_after"] is None and run.counters["updates"] == n + 2


# -- wishes of a callback ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_callback_may_wish_to_save_or_to_stop(whole, tmp_path):
    saved = []

    def callback(run, record):
        saved.append(updates_of(run.folder))
        if record["updates"] == 4:
            return Wish({"my/number": 4.0}, save=True)
        if record["updates"] == 7:
            return Wish(stop="seven is enough")

    run = quietly(made(tmp_path / "run", **EVERY), callbacks=[callback])
    assert saved == [0, 0, 0, 3, 4, 4, 6]
    assert run.counters["updates"] == updates_of(run.folder) == 7
    assert read_records(run.folder)[3]["my/number"] == 4.0
    assert load_run(run.folder).history.stopped == "seven is enough"
    gone_on(run.folder, steps=2048)
    check_goes_on(whole, run.folder)
    assert means(run.folder) == means(whole)


def test_a_wish_to_stop_may_be_a_comparison(tmp_path):
    stop = lambda run, record: Wish(stop=np.float64(record["updates"]) > 6)
    folder = quietly(made(tmp_path / "run"), callbacks=[stop]).folder
    assert updates_of(folder) == 7 and load_run(folder).history.stopped == "True"


NO_WAITING = "the training stops only by evaluations for which it waits"


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "run, text",
    [
        (
            dict(stop_at_return=9.0),
            "leaf stop_at_return: .* Expected eval_every in steps, as by --eval-every '20_000 steps', got eval_every=0",
        ),
        (dict(patience=2, eval_every=10), f"leaf patience: {NO_WAITING}.*got eval_every=10"),
        (dict(patience=-1), "patience"),
        (dict(stop_at_return="high"), "leaf stop_at_return: .*wrong type of value. Expected float"),
        (dict(stop_at_return=NAN), "stop_at_return"),
        (dict(stop_after="2 weeks"), "leaf stop_after: not a duration. Expected such as '45 s'"),
        (dict(stop_after="0 h"), "leaf stop_after"),
        (dict(stop_after=2), "leaf stop_after: the run: wrong type of value"),
    ],
)
def test_rules_that_could_not_work_are_refused(run, text, tmp_path):
    refused(text, made, tmp_path / "run", **run)
    assert not (tmp_path / "run").exists()
