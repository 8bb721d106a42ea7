"Ways back into a run: with pipes of one's own, from its start in another process, beside a training, and a resume that fails."

import math
import multiprocessing
import os
import random
import shutil
import signal
import sys
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch
from command_line import rollpipe
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from recordings import recorded
from test_crash import SMALL, config_of, content
from test_fork import check_same, gone_on, trained

from rollpipe.pipes import FragmentCollector, Lanes, Pipe, Recorder, RewardScaler
from rollpipe.pipes.data.errors import DataError, PipeError
from rollpipe.pipes.data.nested import first_difference
from rollpipe.runs import fork, resume, start, train
from rollpipe.runs.folder import load_run
from rollpipe.runs.moments import verify
from rollpipe.runs.states import edited
from rollpipe.settings.config import make_config
from rollpipe.traces.differences import JOURNAL, diff
from rollpipe.traces.history import config_at
from rollpipe.traces.journal import read_journal


def in_a_process(main, status=0):
    "Call a function in another process, whose global generators have other states, and which ends with this status."

    def seeded():
        random.seed(99)
        np.random.seed(99)
        torch.manual_seed(99)
        main()

    child = multiprocessing.get_context("fork").Process(target=seeded)
    child.start()
    child.join(60)
    assert child.exitcode == status


def check_weights(a, b):
    assert first_difference(load_run(a).agent_state, load_run(b).agent_state) is None


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
    def edits(name):
        path = dict(path=tmp_path / f"{name}-items") if kind is Recorder else {}
        return [kind.inserter(after=place, **path)]

    options = dict(lanes=2, n_envs=2, n_steps=16)
    for name, steps in dict(whole=512, run=256).items():
        run = dict(steps=steps, checkpoint_every=3, workers=workers)
        made = start(tmp_path / name, make_config("ppo", "CartPole-v1", options, **run))
        train(edited(made, *edits(name)), progress=False, tensorboard=False)
    before = content(tmp_path / "run")
    with pytest.raises(DataError, match=f"edited.resume.folder.*got states of {kind.__name__}"):
        gone_on(tmp_path / "run", steps=512)
    assert content(tmp_path / "run") == before
    gone_on(tmp_path / "run", *edits("run"), steps=512)
    check_same(tmp_path / "whole", tmp_path / "run")


def test_a_second_pipe_of_one_class_does_not_take_the_state_of_the_first(tmp_path):
    "It is given before the other one, which then has another name."
    first = RunningMean.inserter(after=Lanes)
    both = [first, RunningMean.inserter(before=RunningMean)]
    whole, run = (
        trained(tmp_path / name, steps=steps, edits=both)
        for name, steps in dict(whole=640, run=320).items()
    )
    gone_on(run.folder, *both, steps=640)
    check_same(whole.folder, run.folder)


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


@pytest.mark.slow_but_one
@pytest.mark.parametrize("at", [5, 13])
def test_a_fork_that_repeats_its_run_from_the_start_has_the_same_noise(at, tmp_path):
    parent = trained(tmp_path / "run", steps=640, edits=[JITTER], checkpoint_every=20)

    def forked():
        gone_on(fork(parent.folder, tmp_path / "fork", at, edits=[JITTER]), JITTER)

    in_a_process(forked)
    check_weights(parent.folder, tmp_path / "fork")
    check_same(parent.folder, tmp_path / "fork")
    assert verify(parent.folder, 20, JITTER).is_equal


def test_two_trainings_draw_the_same_and_give_the_generators_back(tmp_path):
    here = partial(trained, steps=640, edits=[JITTER])
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    here(tmp_path / "a")
    verify(tmp_path / "a", 3, JITTER)
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert after == before
    in_a_process(lambda: here(tmp_path / "b"))
    check_same(tmp_path / "a", tmp_path / "b")
    other = trained(tmp_path / "c", steps=640, edits=[JITTER], seed=1)
    assert not diff(tmp_path / "a", other.folder).is_equal


def test_new_episodes_draw_other_numbers_than_the_start(tmp_path):
    def draws(run):
        found = []

        def look(run, record):
            found.append((random.random(), np.random.random(), torch.rand(()).item()))

        train(run, progress=False, tensorboard=False, callbacks=[look])
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
    parent = trained(tmp_path / "run", name, 400)
    checkpoint_before = moments.checkpoint_before
    moved = []

    def moving(*args, **kwargs):
        if not moved:
            moved.append(gone_on(parent.folder, steps=720))
        return checkpoint_before(*args, **kwargs)

    def from_the_start(*args, **kwargs):
        raise AssertionError("the run is repeated")

    monkeypatch.setattr(moments, "checkpoint_before", moving)
    monkeypatch.setattr(sys.modules["rollpipe.runs.fork"], "moment", from_the_start)
    made = parent.counters["updates"]
    path = parent.folder / "checkpoint.safetensors" if by_file else parent.folder
    if by_file and name == "dqn":
        with pytest.raises(AssertionError, match="the run is repeated"):
            fork(path, tmp_path / "fork")  # the chunks of its memory are gone
        return
    out = fork(path, tmp_path / "fork")
    assert load_run(out).counters["updates"] == (
        made if name == "ppo" else moved[0].counters["updates"]
    )
    gone_on(out, steps=960), gone_on(parent.folder, steps=960)
    check_same(parent.folder, out)


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


@pytest.fixture(scope="module")
def rested(tmp_path_factory):
    "A run that was killed in update 15, with checkpoints after updates 4, 8 and 12."
    folder = tmp_path_factory.mktemp("rested") / "run"
    options = dict(SMALL, lanes=2)
    run = dict(steps=1280, checkpoint_every=4, keep=9, exact=True)

    def main():
        def callback(run, record):
            if record["updates"] == 15:
                os.kill(os.getpid(), signal.SIGKILL)

        config = make_config("ppo", "Breakable-v0", options, **run)
        train(start(folder, config), progress=False, tensorboard=False, callbacks=[callback])

    in_a_process(main, -signal.SIGKILL)
    assert load_run(folder).counters["updates"] == 12
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


@pytest.mark.slow_but_one
@pytest.mark.parametrize("is_earlier", [False, True])
def test_a_resume_writes_what_it_changes_with_its_first_update(is_earlier, rested, tmp_path):
    "And removes the checkpoints that are made again. A kill in this update loses nothing of it."
    folder = shutil.copytree(rested, tmp_path / "run")
    path = min((folder / "checkpoints").iterdir()) if is_earlier else folder

    def main():
        def callback(run, record):
            os.kill(os.getpid(), signal.SIGKILL)

        run = resume(path, steps=1600, workers=1)
        assert load_run(folder).config["steps"] == 1280
        train(run, progress=False, tensorboard=False, callbacks=[callback])

    in_a_process(main, -signal.SIGKILL)
    found = load_run(folder)
    assert found.counters["updates"] == (4 if is_earlier else 12)
    assert (found.config["steps"], found.config["workers"]) == (1600, 1)
    assert config_at(folder, math.inf) == found.config
    kept = [load_run(x).counters["updates"] for x in sorted((folder / "checkpoints").iterdir())]
    assert kept == ([4] if is_earlier else [4, 8, 12])
    assert gone_on(folder, workers=0).counters["steps"] == 1600
    assert verify(folder, 25).is_equal


def test_the_command_leaves_a_run_whose_data_have_moved(tmp_path):
    data = recorded(tmp_path / "data", "CartPole-v1")
    run = dict(steps=320, data=str(data), checkpoint_every=5)
    config = make_config("bc", "CartPole-v1", dict(hidden=(8,), batch_size=8), **run)
    train(start(tmp_path / "run", config), progress=False, tensorboard=False)
    before = content(tmp_path / "run")
    data.rename(tmp_path / "elsewhere")
    assert rollpipe("train", "--resume", tmp_path / "run", "--steps", "960", "--quiet") == 2
    assert content(tmp_path / "run") == before
