"Ways back into a run: with pipes of one's own, from its start in another process, beside a training, and a resume that fails."

import math
import random
import shutil
import sys

import gymnasium as gym
import numpy as np
import pytest
import torch
from command_line import QUIET, rollpipe
from gallery import (
    SMALL,
    check_same,
    config_of,
    content,
    gone_on,
    in_a_process,
    interrupted,
    killed_in,
    quietly,
    refused,
    trained,
    updates_of,
)
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from recordings import recorded

from rollpipe.pipes import FragmentCollector, Lanes, Pipe, Recorder, RewardScaler
from rollpipe.pipes.data.errors import PipeError
from rollpipe.runs import fork, resume, start, train, training
from rollpipe.runs.folder import load_run
from rollpipe.runs.moments import verify
from rollpipe.settings.config import make_config
from rollpipe.traces.differences import JOURNAL, diff
from rollpipe.traces.history import config_at
from rollpipe.traces.journal import read_journal

# -- pipes of one's own that keep something ----------------------------------------------------------------------------


class RunningMean(Pipe):
    "Subtracts the mean of all rewards so far."

    def stream(self, items):
        kept = self.keep(n=0, total=0.0)
        for fragment in items:
            rew = fragment.state.rew
            kept["n"] += rew.numel()
            kept["total"] += rew.sum().item()
            rew = rew - kept["total"] / kept["n"]
            yield fragment._replace(state=fragment.state._replace(rew=rew))


@pytest.mark.slow_but_one
@pytest.mark.parametrize(
    "kind, place, workers",
    [
        (RunningMean, Lanes, 0),
        (RunningMean, Lanes, 2),
        (RunningMean, FragmentCollector, 0),
        (RunningMean, FragmentCollector, 2),
        (RewardScaler, Lanes, 0),
        (Recorder, Lanes, 0),
        (Recorder, FragmentCollector, 0),
    ],
)
def test_a_pipe_that_keeps_something_is_given_again_with_an_edit(kind, place, workers, tmp_path):
    def edit(name):
        path = dict(path=tmp_path / f"{name}-items") if kind is Recorder else {}
        return kind.inserter(after=place, **path)

    about = dict(checkpoint_every=3, workers=workers)
    for name, steps in dict(whole=512, run=256).items():
        trained(tmp_path / name, "lanes", steps, edits=[edit(name)], **about)
    run = tmp_path / "run"
    before = content(run)
    told = f"edited.resume.folder.*got states of {kind.__name__}"
    refused(told, gone_on, run, steps=512)
    assert content(run) == before
    gone_on(run, edit("run"), steps=512)
    check_same(tmp_path / "whole", run)


def test_a_second_pipe_of_one_class_does_not_take_the_state_of_the_first(tmp_path):
    "It is given before the other one, which then has another name."
    both = [RunningMean.inserter(after=Lanes), RunningMean.inserter(before=RunningMean)]
    whole = trained(tmp_path / "whole", steps=640, edits=both).folder
    run = trained(tmp_path / "run", steps=320, edits=both).folder
    gone_on(run, *both, steps=640)
    check_same(whole, run)


# -- from the start, in another process --------------------------------------------------------------------------------


class Jitter(Pipe):
    "From its twelfth item on it adds numbers of all three global generators to the rewards."

    def stream(self, items):
        kept = self.keep(n=0)
        for fragment in items:
            kept["n"] += 1
            if kept["n"] >= 12:
                noise = np.random.random() + random.random() + torch.rand(()).item()
                rew = fragment.state.rew + noise
                fragment = fragment._replace(state=fragment.state._replace(rew=rew))
            yield fragment


JITTER = Jitter.inserter(after=Lanes)


@pytest.mark.slow
@pytest.mark.parametrize("at", [5, 13])
def test_a_fork_that_repeats_its_run_from_the_start_has_the_same_noise(at, tmp_path):
    about = dict(steps=640, edits=[JITTER], checkpoint_every=20)
    parent = trained(tmp_path / "run", **about).folder
    out = tmp_path / "fork"
    in_a_process(lambda: gone_on(fork(parent, out, at, edits=[JITTER]), JITTER))
    check_same(parent, out)
    assert verify(parent, 20, JITTER).is_equal


def states_of_generators():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


@pytest.mark.slow
def test_two_trainings_draw_the_same_and_give_the_generators_back(tmp_path):
    about = dict(steps=640, edits=[JITTER])
    before = states_of_generators()
    a = trained(tmp_path / "a", **about).folder
    verify(a, 3, JITTER)
    assert states_of_generators() == before
    in_a_process(lambda: trained(tmp_path / "b", **about))
    check_same(a, tmp_path / "b")
    assert not diff(a, trained(tmp_path / "c", **about, seed=1).folder).is_equal


def test_new_episodes_draw_other_numbers_than_the_start(tmp_path):
    def draws(run):
        found = []

        def look(run, record):
            found.append((random.random(), np.random.random(), torch.rand(()).item()))

        quietly(run, callbacks=[look])
        return found

    parent = start(tmp_path / "run", config_of("ppo", steps=160))
    first = draws(parent)
    new = [fork(parent.folder, tmp_path / name, new_episodes=True, steps=320) for name in "ab"]
    a, b = (draws(resume(out)) for out in new)
    assert a == b and not {*sum(a, ())} & {*sum(first, ())}


# -- beside a training -------------------------------------------------------------------------------------------------


@pytest.mark.slow_but_one
@pytest.mark.parametrize("name", ["ppo", "dqn"])
@pytest.mark.parametrize("by_file", [False, True])
def test_a_fork_of_the_newest_checkpoint_is_not_made_from_the_start(
    by_file, name, tmp_path, monkeypatch
):
    "The training saves twice between the first look of the fork and the next."
    moments = sys.modules["rollpipe.runs.moments"]
    parent = trained(tmp_path / "run", name, 320).folder
    made = updates_of(parent)
    checkpoint_before = moments.checkpoint_before
    moved = []

    def moving(*args, **kwargs):
        if not moved:
            moved.append(gone_on(parent, steps=480))
        return checkpoint_before(*args, **kwargs)

    def from_the_start(*args, **kwargs):
        raise AssertionError("the run is repeated")

    monkeypatch.setattr(moments, "checkpoint_before", moving)
    monkeypatch.setattr(sys.modules["rollpipe.runs.fork"], "moment", from_the_start)
    path = parent / "checkpoint.safetensors" if by_file else parent
    if by_file and name == "dqn":  # the chunks of its memory are gone
        refused("the run is repeated", fork, path, tmp_path / "fork", error=AssertionError)
        return
    out = fork(path, tmp_path / "fork")
    assert updates_of(out) == (made if name == "ppo" else moved[0].counters["updates"])
    gone_on(out, steps=640)
    gone_on(parent, steps=640)
    check_same(parent, out)


# -- a resume that fails -----------------------------------------------------------------------------------------------


class Breakable(CartPoleEnv):
    "An environment that is changed while a run rests."

    broken = ""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        if self.broken == "made":
            raise RuntimeError("planted")
        if self.broken == "attribute":
            self.toll = 1

    def reset(self, **kwargs):
        if self.broken == "reset":
            raise RuntimeError("planted")
        return super().reset(**kwargs)

    def step(self, action):
        if self.broken == "step":
            raise RuntimeError("planted")
        obs, *rest = super().step(action)
        return obs * np.float32(1 + (self.broken == "numbers")), *rest


gym.register("Breakable-v0", Breakable, max_episode_steps=500)


# -- a resume that fails -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rested(tmp_path_factory):
    "A run that was killed in update 15, with checkpoints after updates 4, 8 and 12."
    folder = tmp_path_factory.mktemp("rested") / "run"
    about = dict(steps=1280, checkpoint_every=4, keep=9, exact=True)
    config = make_config("ppo", "Breakable-v0", dict(SMALL, lanes=2), **about)
    killed_in(15, lambda: start(folder, config))
    assert updates_of(folder) == 12
    assert read_journal(folder / JOURNAL)[-1].updates == 15
    (folder / "lock").unlink()
    return folder


@pytest.mark.parametrize(
    "broken, is_earlier, given",
    [
        ("made", False, {}),
        ("reset", False, dict(steps=2000)),
        ("step", False, dict(steps=2000)),
        ("step", True, {}),
        ("step", True, dict(steps=2000, workers=2)),
        ("attribute", False, dict(steps=2000)),
        ("attribute", True, dict(workers=2)),
        ("too many workers", False, dict(steps=2000, workers=9)),
        ("a pipe is lacking", True, dict(steps=2000)),
    ],
)
def test_a_resume_that_fails_leaves_every_file_of_the_folder_as_it_is(
    broken, is_earlier, given, rested, tmp_path, monkeypatch
):
    folder = shutil.copytree(rested, tmp_path / "run")
    before = content(folder)
    path = min((folder / "checkpoints").iterdir()) if is_earlier else folder
    monkeypatch.setattr(Breakable, "broken", broken)
    with pytest.raises(PipeError):
        run = resume(path, **given)
        if broken == "a pipe is lacking":
            run = run._replace(waiting=dict(RND={}))
        train(run, progress=False)
    assert content(folder) == before


@pytest.mark.slow
@pytest.mark.parametrize("is_earlier", [False, True])
def test_a_resume_writes_what_it_changes_with_its_first_update(is_earlier, rested, tmp_path):
    "And removes the checkpoints that are made again. A kill in this update loses nothing of it."
    folder = shutil.copytree(rested, tmp_path / "run")
    path = min((folder / "checkpoints").iterdir()) if is_earlier else folder

    def resumed():
        run = resume(path, steps=1600, workers=1)
        assert load_run(folder).config["steps"] == 1280
        return run

    first = 5 if is_earlier else 13
    killed_in(first, resumed)
    found = load_run(folder)
    assert found.counters["updates"] == first - 1
    assert (found.config["steps"], found.config["workers"]) == (1600, 1)
    assert config_at(folder, math.inf) == found.config
    assert [*map(updates_of, sorted((folder / "checkpoints").iterdir()))] == (
        [4] if is_earlier else [4, 8, 12]
    )
    assert gone_on(folder, workers=0).counters["steps"] == 1600
    assert verify(folder, 25).is_equal


def test_the_command_leaves_a_run_whose_data_have_moved(tmp_path):
    data = recorded(tmp_path / "data", "CartPole-v1")
    run = tmp_path / "run"
    options = dict(hidden=(8,), batch_size=8)
    about = dict(steps=320, data=str(data), checkpoint_every=5)
    quietly(start(run, make_config("bc", "CartPole-v1", options, **about)))
    before = content(run)
    data.rename(tmp_path / "elsewhere")
    assert rollpipe(f"train --resume {run} --steps 960 {QUIET}") == 2
    assert content(run) == before


def test_ctrl_c_counts_more_than_a_checkpoint_that_cannot_be_read(tmp_path, monkeypatch, caplog):
    def unreadable(path):
        raise OSError(5, "Input/output error")

    trained(tmp_path / "run", steps=32)
    monkeypatch.setattr(training, "load_checkpoint", unreadable)
    interrupted(tmp_path / "run", at=2, steps=320)
    (message,) = caplog.messages
    assert "after 64 steps; its checkpoint cannot be read ([Errno 5] Input/output error)" in message
