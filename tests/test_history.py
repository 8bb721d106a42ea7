"What was asked for never changes, and the configuration after each update is a fold of the history over it."

import json
import math
import secrets

import pytest
from gallery import quietly, refused

from rollpipe.pipes.data.errors import CheckpointError
from rollpipe.runs import Wish, fork, resume, start
from rollpipe.runs.folder import load_run
from rollpipe.runs.mailbox import Mailbox
from rollpipe.settings.config import make_config
from rollpipe.traces.history import HISTORY, REQUEST, History, config_at, read_request


def config_of(**given):
    options = dict(n_steps=16, n_envs=2, epochs=1, hidden=(8,), engine="torch", clip=0.2)
    run = dict(steps=320, checkpoint_every=1, keep=50)
    return make_config("ppo", "CartPole-v1", options, **{**run, **given})


def trained(run, edits=None, stop_at=None):
    """Train to the end of a run.

    Args:
        edits: number of updates -> options that change then
        stop_at: number of updates after which it stops
    """

    def after(run, record):
        changes = (edits or {}).get(record["updates"])
        if changes:
            (run.folder / "inbox").mkdir(exist_ok=True)
            path = run.folder / "inbox" / f"{secrets.token_hex(16)}.ask"
            path.write_text(json.dumps(dict(set=changes)))
        return Wish(stop="enough") if record["updates"] == stop_at else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Mailbox, "EVERY", 0.0)  # it looks after each update, however quick
        quietly(run, callbacks=[after])
    return run.folder


def check_folds(folder):
    "Each checkpoint holds the configuration that the fold gives for its update. Returns them, by update."
    request = read_request(folder)
    in_force = {}
    for path in sorted((folder / "checkpoints").iterdir()):
        checkpoint = load_run(path)
        update = int(checkpoint.counters["updates"])
        in_force[update] = checkpoint.config
        assert checkpoint.history.config(request) == checkpoint.config, update
        if checkpoint.history == History.read(folder).until(update):  # not extended at this update
            assert config_at(folder, update) == checkpoint.config, update
    assert config_at(folder, math.inf) == load_run(folder).config
    return in_force


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    "A run that is edited twice, stops, is extended, and is edited once more."
    place = tmp_path_factory.mktemp("runs")
    run = start(place / "run", config_of())
    request = (run.folder / REQUEST).read_bytes()
    trained(run, {3: dict(clip=0.1), 6: dict(lr=1e-4, steps=400)}, stop_at=8)
    trained(resume(run.folder, steps=480), {10: dict(clip=0.3)})
    assert (run.folder / REQUEST).read_bytes() == request
    return run.folder


def test_the_fold_is_the_configuration_after_each_update(folder):
    in_force = check_folds(folder)
    clips = {n: config["options"]["clip"] for n, config in in_force.items()}
    assert (clips[2], clips[4], clips[9], clips[11]) == (0.2, 0.1, 0.1, 0.3)
    steps = {n: config["steps"] for n, config in in_force.items()}
    assert (steps[5], steps[7], steps[9]) == (320, 400, 480)


def test_the_history_has_an_event_for_all_that_happened(folder):
    history = History.read(folder)
    events = [(event["event"], event["at"]) for event in history]
    expected = [("began", 0), ("edited", 3), ("edited", 6), ("stopped", 8), ("extended", 8)]
    assert events == [*expected, ("edited", 10)]
    assert (history.until(8).stopped, history.stopped, history.inexact) == (None, None, None)
    assert History(history[:4]).stopped == "enough"
    assert load_run(folder).history == history


@pytest.mark.slow
def test_a_fork_begins_a_history_of_its_own(folder, tmp_path):
    first = fork(folder, tmp_path / "first", 5, gamma=0.9, steps=480)
    trained(resume(first), {7: dict(clip=0.4)})
    second = fork(first, tmp_path / "second", 9, lr=0.01)
    trained(resume(second))
    for place, origin, at in ((first, folder, 5), (second, first, 9)):
        request = json.loads((place / REQUEST).read_text())
        history = History.read(place)
        assert (history.origin["run"], history.origin["at"]) == (str(origin), at)
        in_force = check_folds(place)
        assert in_force[min(in_force)] == request == config_at(place, at)
    assert config_at(second, 9)["options"]["clip"] == 0.4


@pytest.mark.slow
def test_a_run_that_goes_back_keeps_what_is_due(folder, tmp_path):
    "From an earlier checkpoint it forgets the stop after it, and makes the later edits once more."
    again = fork(folder, tmp_path / "again", 2, steps=480)
    trained(resume(again), {4: dict(clip=0.1), 9: dict(lr=0.01)}, stop_at=12)
    early = sorted((again / "checkpoints").iterdir())[3]
    assert load_run(early).counters["updates"] == 6
    trained(resume(early))
    history = History.read(again)
    assert [(e["event"], e["at"]) for e in history] == [
        ("forked", 2),
        ("resumed", 2),
        ("edited", 4),
        ("resumed", 6),
        ("edited", 9),
    ]
    assert load_run(again).counters["updates"] == 15
    check_folds(again)


def test_a_run_without_its_request_or_history_goes_on(tmp_path):
    "As a kill leaves it that comes between the first checkpoint and these files."
    run = start(tmp_path / "run", config_of())
    for name in (REQUEST, HISTORY):
        (run.folder / name).unlink()
    trained(resume(run.folder))
    assert json.loads((run.folder / REQUEST).read_text()) == run.config
    assert [event["event"] for event in History.read(run.folder)] == ["began", "resumed"]


@pytest.mark.parametrize("history", [None, [], [dict(event="other", at=1)], 3])
def test_a_checkpoint_without_a_history_is_refused(history, tmp_path):
    run = start(tmp_path / "run", config_of())
    damaged = load_run(run.folder)._replace(history=history)
    if isinstance(history, int):
        with pytest.raises(TypeError):
            damaged.data()
        return
    run.checkpoint.write_bytes(damaged.data())
    refused(
        "not a configuration that was saved.*history", load_run, run.folder, error=CheckpointError
    )


# -- runs of before ----------------------------------------------------------------------------------------------------

# Runs that were trained when `config.json` was request and diary at once. For each: what of its
# request ever changed, with an option that did not, its history, and what the checkpoints of that
# time held: first update, last update, and the values that were not those of the request.
BEGAN = dict(event="began", at=0, kept={}, inexact=None)
CLIPPED = dict(insert="run_edits:clipped", kwargs=dict(clip=5.0))
PASSED = dict(insert="run_edits:passed", kwargs={})
RUNS_OF_BEFORE = {
    "edited twice": (
        dict(steps=320, keep=1000, options=dict(clip=0.2, lr=0.001, gamma=0.99)),
        [
            BEGAN,
            dict(event="edited", at=4, set=dict(clip=0.1)),
            dict(event="edited", at=9, set=dict(lr="linear:0.01:0.001:400", steps=400)),
        ],
        [
            (1, 3, {}),
            (4, 8, dict(clip=0.1)),
            (9, 25, dict(clip=0.1, lr="linear:0.01:0.001:400", steps=400)),
        ],
    ),
    "three edits of one update": (
        dict(steps=320, keep=1000, options=dict(clip=0.2, lr=0.001, gamma=0.99)),
        [
            BEGAN,
            dict(event="edited", at=4, set=dict(clip=0.1)),
            dict(event="edited", at=4, set=dict(clip=0.3)),
            dict(event="edited", at=4, set=dict(gamma=0.9, clip=0.2)),
        ],
        [(1, 3, {}), (4, 20, dict(gamma=0.9))],
    ),
    "pipes inserted": (
        dict(steps=320, options=dict(clip=0.2, lr=0.001)),
        [
            BEGAN,
            dict(event="edited", at=3, **CLIPPED),
            dict(event="edited", at=8, set=dict(clip=0.1)),
            dict(event="edited", at=12, **PASSED),
        ],
        [
            (1, 2, {}),
            (3, 7, dict(imports=["run_edits"], inserts=[CLIPPED])),
            (8, 11, dict(imports=["run_edits"], inserts=[CLIPPED], clip=0.1)),
            (12, 20, dict(imports=["run_edits"], inserts=[CLIPPED, PASSED], clip=0.1)),
        ],
    ),
    "shortened, extended and shortened": (
        dict(steps=320, keep=1000, options=dict(lr=0.001)),
        [
            BEGAN,
            dict(event="edited", at=4, set=dict(steps=240)),
            dict(event="extended", at=15, set=dict(steps=400)),
            dict(event="edited", at=22, set=dict(steps=384)),
        ],
        [
            (1, 3, {}),
            (4, 14, dict(steps=240)),
            (16, 21, dict(steps=400)),
            (22, 24, dict(steps=384)),
        ],
    ),
    "stopped by its patience and extended": (
        dict(steps=3200, patience=2, stop_at_return=None, stop_after=None, options=dict(lr=0.0)),
        [
            BEGAN,
            dict(event="stopped", at=20, why="no evaluation was better"),
            dict(
                event="extended",
                at=20,
                set=dict(steps=640, patience=0, stop_at_return=None, stop_after=None),
            ),
        ],
        [(1, 19, {}), (21, 40, dict(steps=640, patience=0))],
    ),
    "a fork of an edited run": (
        dict(steps=400, keep=1000, options=dict(clip=0.1, lr="linear:0.01:0.001:400")),
        [
            dict(event="forked", at=12, run="edited_twice", set={}, kept={}, inexact=None),
            dict(event="edited", at=14, set=dict(clip=0.25)),
        ],
        [(13, 13, {}), (14, 25, dict(clip=0.25))],
    ),
    "killed, and resumed with more workers": (
        dict(steps=320, workers=1, options=dict(lanes=2)),
        [BEGAN, dict(event="resumed", at=3, set=dict(workers=2))],
        [(6, 6, dict(workers=2)), (9, 10, dict(workers=2))],
    ),
}


@pytest.mark.parametrize("name", RUNS_OF_BEFORE)
def test_the_fold_gives_what_the_checkpoints_of_runs_of_before_held(name):
    request, events, answers = RUNS_OF_BEFORE[name]
    text = json.dumps(request)
    history = History(events)
    for first, last, others in answers:
        options = {key: others.get(key, x) for key, x in request["options"].items()}
        of_run = {key: x for key, x in others.items() if key not in options}
        for update in range(first, last + 1):
            folded = history.until(update).config(request)
            assert folded == {**request, **of_run, "options": options}, update
    assert json.dumps(request) == text
