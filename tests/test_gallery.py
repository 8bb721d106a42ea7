"A copy of a run of the gallery goes on as a run that never rested, in whatever way, and is described as one that was trained in its place."

import math

import pytest
from gallery import (
    RUNS,
    check_same,
    content,
    gone_on,
    interrupted,
    quietly,
    trained,
    updates_of,
)

from rollpipe.agents.checkpoint import kept_checkpoints
from rollpipe.runs import Wish, fork, replayed_run, resume, start
from rollpipe.runs.evaluations import read_evaluations
from rollpipe.runs.folder import load_run
from rollpipe.runs.locks import owner_of
from rollpipe.runs.moments import verify
from rollpipe.traces.differences import diff
from rollpipe.traces.history import config_at

# How long the runs become
LONGER = dict(
    ppo=400,
    dqn=352,
    evaluated=384,
    sac=352,
    recurrent=400,
    masked=400,
    recorded=400,
    trpo=400,
    lagging=352,
)


def resumed(folder, out, **longer):
    "The copy itself goes on."
    return gone_on(folder, **longer).folder


def with_workers(folder, out, **longer):
    return gone_on(folder, workers=1, **longer).folder


def from_its_start_with_workers(folder, out, **longer):
    "It is trained once more, in one go, by other processes."
    config = load_run(folder).config
    return quietly(start(out, {**config, **longer, "workers": config["options"]["lanes"]})).folder


def in_parts(folder, out, **longer):
    "It is interrupted after its next update, and goes on from there."
    interrupted(folder, updates_of(folder) + 1, **longer)
    return gone_on(folder).folder


def stopped(folder, out, **longer):
    "A wish of a callback stops it, which makes it complete, and a fork goes on from there."
    stop = lambda run, record: Wish(stop="enough")
    run = gone_on(folder, callbacks=[stop], **longer)
    assert run.history.stopped == "enough"
    return gone_on(fork(folder, out, **longer)).folder


def from_an_earlier_checkpoint(folder, out, **longer):
    first, *_ = kept_checkpoints(folder / "checkpoints").values()
    return quietly(resume(first, **longer)).folder


def of_the_end(folder, out, **longer):
    "A fork of its end."
    return gone_on(fork(folder, out, **longer)).folder


def of_an_earlier_update(folder, out, **longer):
    "A fork of an update without a checkpoint, which is repeated from the one before it."
    return gone_on(fork(folder, out, 7, **longer)).folder


def of_a_fork(folder, out, **longer):
    first = gone_on(fork(folder, out / "first", 3)).folder
    return gone_on(fork(first, out / "second", 9, **longer)).folder


def after_an_extension(folder, out, **longer):
    "A fork of the old end of a run that has gone on since."
    end = updates_of(folder)
    gone_on(folder, **longer)
    return gone_on(fork(folder, out, end)).folder


WAYS = (
    resumed,
    of_an_earlier_update,
    in_parts,
    of_the_end,
    with_workers,
    from_its_start_with_workers,
    stopped,
    from_an_earlier_checkpoint,
    of_a_fork,
    after_an_extension,
)


@pytest.fixture(scope="module")
def wholes(gallery, tmp_path_factory):
    "Name -> a run that was trained in its place, in one go."
    folders = {}
    home = tmp_path_factory.mktemp("wholes")

    def whole(name):
        if name not in folders:
            about = {"case": name, **RUNS[name], "steps": LONGER[name]}
            folders[name] = trained(home / name, about.pop("case"), **about).folder
        return folders[name]

    return whole


def evaluations_of(folder):
    return [record | dict(seconds=0) for record in read_evaluations(folder)]


CASES = [(name, way) for name in LONGER for way in WAYS]
# At its end a run has a record of its last evaluation, which one that has not ended there has not.
FROM_THE_END = (resumed, with_workers, in_parts, stopped, of_the_end, after_an_extension)
CASES = [(name, way) for name, way in CASES if name != "evaluated" or way not in FROM_THE_END]
QUICK = [("ppo", of_an_earlier_update), ("dqn", in_parts), ("recurrent", of_the_end)]


@pytest.mark.parametrize(
    "name, way",
    [pytest.param(*x, marks=[pytest.mark.slow] * (x not in QUICK)) for x in CASES],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_a_copy_goes_on_as_a_run_that_never_rested(name, way, gallery, wholes, tmp_path):
    original = gallery.original(name)
    before = content(original)
    folder = gallery.copy(name, tmp_path / "run")
    parent = content(folder)
    whole = wholes(name)
    out = way(folder, tmp_path / "out", steps=LONGER[name])

    # The numbers, the description and the evaluations are those of the whole.
    check_same(whole, out)
    assert evaluations_of(out) == evaluations_of(whole)
    assert not diff(whole, out).fingerprints
    assert verify(out, 3).is_equal and not owner_of(out)
    with replayed_run(out, updates_of(out)) as moment:
        moment.outcome(moment.agent.update(moment.batch))

    # Neither the original nor the parent of a fork is changed, and nothing is left over. A recording
    # keeps the file that its writers lock.
    assert content(original) == before
    if way in (of_an_earlier_update, of_the_end):
        assert content(folder) == parent
    hidden = [p for p in tmp_path.rglob(".*") if (p.parent.name, p.name) != ("recording", ".lock")]
    assert not hidden


@pytest.mark.parametrize("name", RUNS)
def test_a_copy_is_described_as_its_original(name, gallery, tmp_path):
    "And nobody is said to train it, or its original."
    folder = gallery.copy(name, tmp_path / "run")
    check_same(gallery.original(name), folder)
    assert not diff(gallery.original(name), folder).fingerprints
    assert config_at(folder, math.inf) == load_run(folder).config
    assert not owner_of(folder) and not owner_of(gallery.original(name))
    assert str(gallery.home) not in (folder / "config.json").read_text()
