"""A recording gives the items again, bit for bit, on every edge of every recipe.

Faults of disks, files and people lose nothing silently.
"""

import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import torch
from forked import Forked
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from resuming import encoded
from safetensors.torch import load_file
from toys import Acts, Lively, Scripted, Shaky, sampled

from rollpipe.agents import DQN, PPO, SAC, TRPO
from rollpipe.layers import (
    ActionCritic,
    Critic,
    MLPPolicy,
    QPolicy,
    RecurrentPolicy,
    SquashedPolicy,
)
from rollpipe.pipes import (
    CheckpointError,
    DataError,
    EnvStepper,
    EpisodeCollector,
    FragmentCollector,
    FragmentStacker,
    FrameStack,
    Lanes,
    ProcessReading,
    Recorder,
    Replayer,
    Source,
    ToDevice,
    find,
    insert_after,
    on_policy,
    replace,
    replayed,
)
from rollpipe.pipes.data.nested import first_difference
from rollpipe.pipes.graph.edits import nodes
from rollpipe.pipes.graph.pipe import restore_stream, stream_state
from rollpipe.pipes.graph.torchdata import DataLoader2
from rollpipe.pipes.passes import keep_as, keep_environments
from rollpipe.pipes.recording import recorder
from rollpipe.pipes.recording.recorder import item_files, records_in
from rollpipe.pipes.steps import Steps
from rollpipe.runs import resumed, saved

pytestmark = pytest.mark.timeout(300)
POLE = "CartPole-v1"


def small(cls=MLPPolicy, env=POLE, seed=0):
    return cls.for_env(env, hidden=(8,), seed=seed)


LANES = dict(n_envs=2, lanes=2, seed=0)


def trpo(env=POLE):
    actor = small(env=env)
    critic = small(Critic, env, 1)
    pipe = on_policy(env, actor, critic, n_steps=16, reward_scale="learn", **LANES)
    return pipe, TRPO(actor, critic)


def ppo(policy, n_steps, edits=()):
    actor = small(policy)
    critic = small(Critic, seed=1)
    pipe = on_policy(POLE, actor, critic, n_steps=n_steps, edits=edits, **LANES)
    return pipe, PPO(actor, critic, epochs=1)


PICTURES = partial(
    Scripted,
    [(7, "trunc")],
    see=sampled,
    pay=lambda env: float(env.action),
    tell={},
    tell_first={},
    observation_space=gym.spaces.Box(0, 255, (6, 6), np.uint8),
    action_space=gym.spaces.Discrete(2),
)


class Sum:
    "A learner that adds up what it sees."

    total = 0.0

    def state_dict(self):
        return dict(total=self.total)

    def update(self, batch):
        self.total += batch.state.obs.float().square().sum().item()
        return dict(total=self.total)


def images():
    pipe = Lanes(FragmentCollector(EnvStepper(PICTURES, Acts(1, uses_past=False), 2), 8), 2, seed=0)
    return FrameStack(pipe, 3), Sum()


def dqn():
    pipe, actor = of_samples(lanes=2, prioritized=True)
    return pipe, DQN(actor)


def sac():
    actor = small(SquashedPolicy, "Pendulum-v1")
    critic = small(ActionCritic, "Pendulum-v1", 1)
    sizes = dict(n_steps=4, capacity=256, batch_size=8, warmup=16)
    pipe = replayed("Pendulum-v1", actor, **sizes, **LANES)
    return pipe, SAC(actor, critic, random_steps=8, seed=0)


def of_samples(**options):
    "A pipe of samples from a memory, and its actor."
    actor = small(QPolicy)
    sizes = dict(n_steps=8, n_envs=2, capacity=64, batch_size=8, warmup=16)
    return replayed(POLE, actor, seed=0, **{**sizes, "lanes": 1, **options}), actor


RECIPES = dict(
    trpo=trpo,
    tuples=partial(trpo, "Blackjack-v1"),
    recurrent=partial(ppo, RecurrentPolicy, 24),
    images=images,
    dqn=dqn,
    sac=sac,
)


def weights(pipe, agent, n=4):
    "The learner after `n` updates, and the numbers that it told."
    torch.manual_seed(3)
    # Times, and what is told only if there is a memory
    left_out = ("seconds", "replay", "beta", "weight_min")
    told = []
    for batch in islice(pipe, n):
        metrics = agent.update(batch).items()
        told.append({name: x for name, x in metrics if not name.startswith(left_out)})
    return encoded(agent.state_dict()), told


def assert_equal(a, b):
    difference = first_difference(a, b)
    assert difference is None, difference


def taken(pipe, n):
    "The first `n` items of a pipe, whose iteration is closed."
    items = iter(pipe)
    first = list(islice(items, n))
    items.close()
    return first


class IterList(Source):
    "Items of a list."

    def __init__(self, items):
        self.items = items

    def stream(self, items):
        yield from self.items


def record(items, path, **options):
    "Record these items. Returns those that come out of the recorder."
    return list(Recorder(IterList(items), path, **options))


def played(path, **options):
    "All items of a recording."
    return list(Replayer(path, **options))


EDGES = []
for name, make in RECIPES.items():
    pipe, _ = make()
    EDGES += [(name, type(p).__name__) for p in nodes(pipe)]


@pytest.mark.slow_but_one
@pytest.mark.parametrize("recipe,edge", EDGES)
def test_training_from_the_recording_of_an_edge_equals_training_from_environments(
    recipe, edge, tmp_path
):
    "And recording changes nothing."
    make = RECIPES[recipe]
    here = lambda p: type(p).__name__ == edge
    plain = weights(*make())
    pipe, agent = make()
    recording = insert_after(pipe, here, partial(Recorder, path=tmp_path))
    assert_equal(weights(recording, agent), plain)
    pipe, agent = make()
    again = replace(pipe, here, lambda old: Replayer(tmp_path))
    assert not find(again, EnvStepper)
    assert_equal(weights(again, agent), plain)


def fragments_of(env=POLE, n_envs=2, n_steps=8, seed=None):
    return FragmentCollector(EnvStepper(env, small(), n_envs=n_envs, seed=seed), n_steps)


def recorder_of(path, **options):
    "A pipe of two lanes that record their fragments."
    return Lanes(Recorder(fragments_of(), path, **options), 2, seed=0)


def recorded(path, n=6, **options):
    "The recording of so many fragments of two lanes, above `Lanes`; and the fragments."
    return taken(recorder_of(path, **options), n)


@pytest.mark.parametrize("method", ["fork", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_each_lane_records_its_part_in_a_worker(method, tmp_path):
    fragments = recorded(tmp_path / "here")
    reading = ProcessReading(2, start_method=method)
    with DataLoader2(recorder_of(tmp_path / "there"), reading_service=reading) as loader:
        for _ in zip(range(6), loader):
            pass
    for path in (tmp_path / "here", tmp_path / "there"):
        assert sorted(p.name for p in path.iterdir()) == ["lane-0000", "lane-0001"]
        for pipe in (Replayer(path), Lanes(Replayer(path), 2)):
            assert_equal(list(islice(pipe, 6)), fragments)  # in turn, as `Lanes` yields them
    abouts = [tmp_path / "here" / f"lane-000{k}" / "about.json" for k in (0, 1)]
    seeds = [json.loads(path.read_text())["seeds"] for path in abouts]
    assert seeds[0] != seeds[1]
    with pytest.raises(DataError, match="no part of this lane.*lane-0002"):
        list(Lanes(Replayer(tmp_path / "here"), 3))


# --- interrupted and resumed


def loop(folder, until, workers=0, above=True):
    "A loop over a recorded pipeline that is saved every second update. Returns its weights."
    place = FragmentCollector if above else Lanes
    edit = Recorder.inserter(after=place, path=folder / "rec", chunk=1500)
    pipe, agent = ppo(MLPPolicy, 8, [edit])
    reading = ProcessReading(workers) if workers else None
    file = folder / "run.safetensors"
    with resumed(file, pipe, agent, reading) as (loader, done):
        for update, batch in zip(range(done, until), loader):
            agent.update(batch)
            if update % 2 == 1:
                saved(file, loader, agent, update + 1)


def recorded_in(folder):
    "The records of all parts of a recording, in order."
    records = []
    for part in sorted({file.parent for file in folder.rglob("*.safetensors")}):
        for file in item_files(part):
            records += records_in(file)
    return records


@pytest.mark.slow_but_one
@pytest.mark.parametrize("above", [True, False])
@pytest.mark.parametrize("workers", [(0, 0, 0), (0, 2, 1)])
def test_a_resumed_loop_records_each_item_once(workers, above, tmp_path):
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    loop(tmp_path / "whole", 9, above=above)
    for until, n in zip((3, 5, 9), workers):
        loop(tmp_path / "parts", until, n, above)  # the third and the fifth update are repeated
    whole, parts = (recorded_in(tmp_path / name / "rec") for name in ("whole", "parts"))
    assert_equal(parts, whole)
    assert len(whole) == 18


def collector_of(seed=None):
    return FragmentCollector(EnvStepper(Lively, Shaky(), 2, seed=seed, terminal_obs=True), 4)


# edge of a pipeline -> the pipeline with a recorder there
RECORDED = {
    "fragments": lambda recorder: recorder(collector_of(1)),
    "lanes": lambda recorder: Lanes(recorder(collector_of()), 2, seed=0),
    "above lanes": lambda recorder: recorder(Lanes(collector_of(), 2, seed=0)),
    "batches": lambda recorder: recorder(FragmentStacker(Lanes(collector_of(), 2, seed=0), 3)),
    "episodes": lambda recorder: recorder(EpisodeCollector(collector_of(1).pipe)),
    "steps": lambda recorder: recorder(Steps(collector_of(1))),
}


def resumed_items(pipe, n, state=None):
    "`n` items of a pipe that goes on from a state; and the iterator, without which the state would be lost."
    if not isinstance(pipe, Replayer):
        keep_as(pipe, ["replay (episode)"])
    if state is not None:
        restore_stream(pipe, state)
    items = iter(pipe)
    return list(islice(items, n)), items


@pytest.mark.slow_but_one
@pytest.mark.parametrize("edge, compress", [*zip(RECORDED, [False, True] * 3)])
def test_what_is_recorded_comes_out_though_the_stream_is_resumed_at_any_item(
    edge, compress, tmp_path
):
    """Items that were recorded after the state was taken are lost, and recorded again.

    Also where a lane had not begun.
    """
    n = 6

    def pipe_of(folder):
        recorder = partial(Recorder, path=tmp_path / folder, chunk=1500, compress=compress)
        return RECORDED[edge](recorder)

    def replayer_of(folder):
        replayer = Replayer(tmp_path / folder)
        return Lanes(replayer, 2) if edge == "lanes" else replayer

    whole, items = resumed_items(pipe_of("whole"), n)
    items.close()
    assert_equal(list(replayer_of("whole")), whole)

    for k in range(1, n):
        # The recording goes on from its state after `k` items.
        pipe = pipe_of(str(k))
        first, items = resumed_items(pipe, k)
        state = stream_state(pipe)
        next(items), next(items)
        items = None
        rest, items = resumed_items(pipe_of(str(k)), n - k, state)
        items.close()
        assert_equal(first + rest, whole)
        # A lane that was not asked again still has what it recorded after the state was taken.
        items = list(replayer_of(str(k)))
        assert_equal(items[:n], whole)
        assert len(items) == n or edge == "lanes"

        # So does what plays it.
        replayer = replayer_of("whole")
        first, items = resumed_items(replayer, k)
        state = stream_state(replayer)
        rest, items = resumed_items(replayer_of("whole"), None, state)
        assert_equal(first + rest, whole)


RECORDING = """
import os, signal, sys
from rollpipe.layers import MLPPolicy
from rollpipe.pipes import EnvStepper, FragmentCollector, Recorder
actor = MLPPolicy.for_env('CartPole-v1', hidden=(8,), seed=0)
fragments = FragmentCollector(EnvStepper('CartPole-v1', actor, n_envs=2, seed=0), 8)
items = enumerate(Recorder(fragments, sys.argv[1], chunk=4000))
for k, _ in items:
    if k == 20: {end}
"""
KILLED = RECORDING.format(end="os.kill(os.getpid(), signal.SIGKILL)")


def test_a_kill_loses_at_most_the_file_that_is_not_full(tmp_path):
    with Forked(["-c", KILLED, tmp_path]) as child:
        assert child.wait(60) == -signal.SIGKILL
    files = item_files(tmp_path)
    assert [f.end for f in files[:-1]] == [f.first for f in files[1:]] and 15 < files[-1].end <= 20
    items = played(tmp_path)
    assert_equal(items, list(islice(fragments_of(seed=0), len(items))))
    with pytest.raises(DataError, match="has a recording already.*append=True"):
        next(iter(Recorder(IterList([1]), tmp_path)))
    assert record([1, 2], tmp_path, append=True) == [1, 2]
    assert played(tmp_path)[-2:] == [1, 2] and len(played(tmp_path)) == len(items) + 2


def test_a_worker_that_is_replaced_records_each_item_once(tmp_path):
    fragments = recorded(tmp_path / "here", 10)
    pipe = recorder_of(tmp_path / "there")
    keep_environments(pipe)
    with DataLoader2(pipe, reading_service=ProcessReading(2, restart=1)) as loader:
        for k, _ in zip(range(10), loader):
            if k == 4:
                os.kill(loader.reading_service.health()[1]["pid"], signal.SIGKILL)
        assert max(state["restarted"] for state in loader.reading_service.health()) == 1
    assert all(f.restarts is None for f in Replayer(tmp_path / "there"))
    assert_equal(list(islice(Replayer(tmp_path / "there"), 10)), fragments)


@pytest.mark.slow
def test_a_script_that_ends_with_an_open_iteration_records_all_of_its_items(tmp_path):
    command = [sys.executable, "-c", RECORDING.format(end="break"), tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "") and len(played(tmp_path)) == 21


# --- a full disk


class Full:
    "A disk that is full after `n` files."

    def __init__(self, monkeypatch, n):
        self.left, self.write = n, Path.write_bytes
        monkeypatch.setattr(Path, "write_bytes", lambda path, data: self.put(path, data))

    def put(self, path, data):
        self.left -= 1
        if self.left < 0:
            self.write(path, data[: len(data) // 2])
            raise OSError(28, "No space left on device")
        return self.write(path, data)


@pytest.mark.parametrize("compress", [False, True])
def test_a_full_disk_ends_the_run_or_the_recording(compress, tmp_path, monkeypatch, caplog):
    items = [np.arange(k, k + 3) for k in range(9)]
    told = r"No space left on device: '.*000000003-000000004.safetensors"
    with monkeypatch.context() as patch, pytest.raises(OSError, match=told):
        Full(patch, 3)
        record(items, tmp_path / "a", chunk=1, compress=compress)
    assert_equal(played(tmp_path / "a"), items[:3])
    Full(monkeypatch, 3)
    passed = record(items, tmp_path / "b", chunk=1, compress=compress, on_error="stop")
    assert_equal(passed, items)
    assert_equal(played(tmp_path / "b"), items[:3])
    told = "the recording has stopped"
    assert sum(told in text and "000000003" in text for text in caplog.messages) == 1
    assert not [*tmp_path.rglob("*.tmp")]


def test_the_oldest_files_make_room(tmp_path):
    items = [np.full(1000, k) for k in range(30)]
    record(items, tmp_path, limit="50 kB", chunk="8 kB")
    files = item_files(tmp_path)
    assert 30_000 < sum(f.path.stat().st_size for f in files) <= 50_000
    assert_equal(played(tmp_path), items[files[0].first :])


def test_a_recording_goes_on_though_the_limit_has_left_nothing_of_it(tmp_path):
    """It has removed all items from before a checkpoint, and a resume those after it.

    The resume is killed before it writes a file.
    """
    pipe = Recorder(IterList(list(range(9))), tmp_path, limit=900, chunk=1)
    for k, _ in enumerate(pipe):
        if k == 2:
            state = stream_state(pipe)
    assert item_files(tmp_path)[0].first > 3

    def resumed(limit):
        return restore_stream(Recorder(IterList([3, 4]), tmp_path, limit=limit), state)

    for _ in range(2):
        recorder.ItemFolder(tmp_path, 3, True, 900).close()
        assert not item_files(tmp_path)
    with pytest.raises(DataError, match="lacks items. Expected 3 items, got 0"):
        list(resumed(None))
    assert list(resumed(900)) == [3, 4] == played(tmp_path)


# --- files of strangers, and damaged ones


def test_a_folder_that_is_no_recording_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "nowhere", tmp_path, tmp_path / "file"):
        with pytest.raises(DataError, match="no recording here"):
            Replayer(path)
    for name in ("notes.txt", "1-2.safetensors"):
        (tmp_path / name).write_text("x")
    with pytest.raises(DataError, match="a folder without items"):
        Replayer(tmp_path)
    (tmp_path / "000000000-000000001.safetensors").write_text("x")
    told = "000000000-000000001.safetensors: damaged, or not a recording"
    with pytest.raises(CheckpointError, match=told):
        played(tmp_path)


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_changed_byte_is_told(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rec")
    compress = data.draw(st.booleans())
    record([dict(x=np.arange(5.0), n=k) for k in range(3)], folder, compress=compress)
    (file,) = item_files(folder)
    content = bytearray(file.path.read_bytes())
    # The length differs, because the header has no order.
    place = int(data.draw(st.floats(0, 1, exclude_max=True)) * len(content))
    content[place] ^= data.draw(st.integers(1, 255))
    file.path.write_bytes(content)
    try:
        items = played(folder)
    except CheckpointError as e:
        assert str(file.path) in str(e)
    else:
        assert compress and len(items) == 3  # a byte of the header of gzip that means nothing


def test_damaged_and_missing_files_are_skipped_by_choice(tmp_path, caplog):
    record(list(range(8)), tmp_path, chunk=1)
    files = item_files(tmp_path)
    files[2].path.write_bytes(files[2].path.read_bytes()[:-1])
    files[5].path.unlink()
    with pytest.raises(CheckpointError, match=re.escape(str(files[2].path))):
        played(tmp_path)
    assert played(tmp_path, damaged="skip") == [0, 1, 3, 4, 6, 7]
    assert [r.message.partition(": ")[0] for r in caplog.records] == ["left out of a recording"] * 2

    # Another number of items than its name says
    files[2].path.rename(tmp_path / "000000002-000000004.safetensors")
    with pytest.raises(CheckpointError):
        played(tmp_path)


class Ragged(NamedTuple):
    "An item with what cannot be stored."

    infos: list


def test_an_item_that_cannot_be_stored_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"Recorder.*1\.item\.infos\.1"):
        record([Ragged([1, 2]), Ragged([1, object()])], tmp_path)
    with pytest.raises(CheckpointError, match=r"infos"):
        record([Ragged(np.array([None, 3]))], tmp_path / "b")
    assert played(tmp_path) == [Ragged([1, 2])]

    class Local(NamedTuple):
        x: int

    with pytest.raises(CheckpointError, match="Local"):
        record([Local(1)], tmp_path / "c")


def test_wrong_options_are_named(tmp_path):
    for name, value in (("limit", "much"), ("chunk", 0), ("chunk", None), ("on_error", "x")):
        with pytest.raises(DataError, match=name):
            Recorder(IterList([]), tmp_path, **{name: value})
    record([1], tmp_path / "r")
    with pytest.raises(DataError, match="damaged"):
        Replayer(tmp_path / "r", damaged="x")


def test_a_new_iteration_ends_the_older_one_and_does_not_write_over_it(tmp_path):
    pipe = Recorder(IterList([1, 2, 3]), tmp_path)
    next(iter(pipe))
    with pytest.raises(DataError, match="has a recording already"):
        next(iter(pipe))
    assert played(tmp_path) == [1]


def test_recordings_can_be_mixed(tmp_path):
    record([0, 1, 2, 3], tmp_path / "a")
    record([10, 11, 12, 13], tmp_path / "b")
    one, two = Replayer(tmp_path / "a"), Replayer(tmp_path / "b")
    assert list(one.mux(two)) == [0, 10, 1, 11, 2, 12, 3, 13]
    samples = pytest.importorskip("torchdata.datapipes.iter").SampleMultiplexer
    mixed = list(samples({one: 0.5, two: 0.5}, seed=0))
    assert sorted(mixed) == [0, 1, 2, 3, 10, 11, 12, 13]
    assert [x for x in mixed if x < 10] == [0, 1, 2, 3]


# --- comparing


def test_a_live_pipeline_that_differs_is_told_at_the_item_and_the_leaf(tmp_path):
    class Nudged(gym.ObservationWrapper):
        n = 0

        def observation(self, observation):
            self.n += 1
            return observation + (1e-7 if self.n == 50 else 0) * np.array([0, 0, 0, 1], np.float32)

    def live(env=POLE):
        return fragments_of(env, 1, 16, seed=0)

    taken(Recorder(live(), tmp_path), 6)
    assert len(played(tmp_path, against=live())) == 6
    told = r"leaf .state.obs\[15, 0, 3\].*item 2 differs from the recording"
    with pytest.raises(DataError, match=told):
        played(tmp_path, against=live(lambda: Nudged(gym.make(POLE))))
    with pytest.raises(DataError, match="item 6: the pipe has ended|item 5: the pipe has ended"):
        played(tmp_path, against=IterList(played(tmp_path)[:5]))


@pytest.mark.parametrize("stop", [None, 3])
def test_items_that_the_recording_lacks_are_not_compared(stop, tmp_path, caplog):
    """The limit has removed the first items of the lanes, and others are damaged or lost.

    All items of the pipe come, and keep their places.
    """
    fragments = fragments_of(n_envs=1, n_steps=4)
    expected = taken(Lanes(Recorder(fragments, tmp_path, chunk=1), 2, seed=0), 12)
    one, two = (item_files(tmp_path / f"lane-000{k}") for k in (0, 1))
    for file in (*one[:2], *two[:1], one[4]):
        file.path.unlink()
    two[-1].path.write_bytes(b"")

    def replayer(seed=0):
        live = Lanes(fragments_of(n_envs=1, n_steps=4), 2, seed=seed)
        pipe = Replayer(tmp_path, against=live, damaged="skip")
        keep_environments(pipe)
        return pipe

    pipe = replayer()
    items = iter(pipe)
    compared = list(islice(items, stop))
    state = None if stop is None else stream_state(pipe)
    items.close()
    if stop is not None:
        compared += restore_stream(replayer(), state)
    assert_equal(compared, expected)
    assert "lane-0000: items 0 to 1 are not recorded, so they are not compared" in caplog.text
    with pytest.raises(DataError, match="lane-0001, item 1 differs from the recording"):
        list(replayer(seed=1))


def test_samples_are_compared_as_they_are_drawn(tmp_path):
    def replayer():
        live, _ = of_samples()
        return Replayer(tmp_path, against=live)

    pipe, _ = of_samples()
    items = iter(Recorder(pipe, tmp_path))
    for item in islice(items, 4):
        list(item.samples)
    items.close()
    for item in islice(replayer(), 4):
        list(item.samples)
    with pytest.raises(DataError, match="what it was asked for differs"):
        for item in islice(replayer(), 4):
            if item.memory is not None:
                item.memory.sampler_seed = 1
            list(item.samples)
            item.memory.sample(8)


def test_what_is_asked_for_after_the_next_item_has_come_is_recorded(tmp_path):
    pipe, _ = of_samples(n_steps=4, warmup=8, n_batches=2)
    items = iter(ToDevice(Recorder(pipe, tmp_path / "a"), "cpu", ahead=1))
    live = [list(item.samples) for item in islice(items, 6)]
    items.close()
    again = [list(item.samples) for item in Replayer(tmp_path / "a")]
    assert list(map(len, live)) == [2] * 6
    assert_equal(again[:6], live)
    late = islice(ToDevice(Recorder(pipe, tmp_path / "b", chunk=1), "cpu", ahead=1), 6)
    told = "Recorder.*item 0 was asked for more after it was written.*greater `chunk`"
    with pytest.raises(DataError, match=told):
        for item in late:
            list(item.samples)


def test_a_lane_that_is_missing_is_told(tmp_path):
    for lane in (2, 3, 4):
        list(
            Recorder(IterList([lane]), tmp_path / f"lane-000{lane}")
        )  # a machine of several has such lanes
    assert played(tmp_path) == [2, 3, 4]
    shutil.rmtree(tmp_path / "lane-0003")
    with pytest.raises(DataError, match="a lane is missing. Expected lane-0003, got lane-0004"):
        Replayer(tmp_path)


def test_no_lane_is_left_out_in_silence(tmp_path, caplog):
    for lane in range(3):
        record([lane], tmp_path / f"lane-000{lane}")
    with pytest.raises(DataError, match="has more lanes. Expected Lanes.*3.*got 2 lanes"):
        list(Lanes(Replayer(tmp_path), 2))
    item_files(tmp_path / "lane-0001")[0].path.unlink()
    for pipe in (Replayer(tmp_path), Lanes(Replayer(tmp_path), 3)):
        with pytest.raises(DataError, match="lane-0001: no items of this lane"):
            list(pipe)
    assert played(tmp_path, damaged="skip") == [0, 2]
    assert "left out of a recording" in caplog.text
    assert "lane-0001: no items of this lane" in caplog.text


def test_many_small_items_take_a_time_in_proportion(tmp_path, monkeypatch):
    """Neither writing nor reading looks at all items of a file for each of them.

    Counted, because a clock would be noisy.
    """
    looked = []
    nbytes = torch.Tensor.nbytes

    def noticed(x):
        looked.append(1)
        return nbytes.__get__(x)

    monkeypatch.setattr(torch.Tensor, "nbytes", property(noticed))
    items = [np.arange(3, dtype=np.float32) + k for k in range(300)]
    record(items, tmp_path)
    assert_equal(played(tmp_path), items)
    assert len(item_files(tmp_path)) == 1 and len(looked) < 10 * len(items)


def test_a_signal_while_a_file_is_written_loses_no_item(tmp_path, monkeypatch):
    write = Path.write_bytes
    calls = []

    def interrupted(path, data):
        calls.append(path)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        record([1, 2, 3, 4, 5], tmp_path, chunk=1)
    assert played(tmp_path) == [1, 2, 3] and not [*tmp_path.glob("*.tmp")]


@pytest.mark.parametrize("method, place", [("add", "self.n += 1"), ("flush", "self._clear()")])
def test_a_signal_between_two_lines_leaves_a_recording_that_can_be_read(method, place, tmp_path):
    function = getattr(recorder.ItemWriter, method)
    lines, first = inspect.getsourcelines(function)
    at = first + next(i for i, line in enumerate(lines) if place in line)

    def local(frame, event, _):
        if event != "line" or frame.f_lineno != at or frame.f_locals["self"].n < 6:
            return local
        sys.settrace(before)
        raise KeyboardInterrupt

    before = sys.gettrace()
    passed = []
    sys.settrace(lambda frame, *_: local if frame.f_code is function.__code__ else None)
    try:
        with pytest.raises(KeyboardInterrupt):
            passed.extend(Recorder(IterList(list(range(10))), tmp_path, chunk=300))
    finally:
        sys.settrace(before)
    items = played(tmp_path)
    assert all(file.first < file.end for file in item_files(tmp_path))
    assert items == [*range(len(items))]
    assert len(passed) >= 6 and items[: len(passed)] == passed


def test_a_forked_process_does_not_write(tmp_path):
    "It has the iteration of its parent, and ends it when it exits."
    items = iter(Recorder(IterList([1, 2, 3, 4]), tmp_path, chunk=1))
    assert [next(items), next(items)] == [1, 2]
    pid = os.fork()
    if not pid:
        try:
            next(items)
        except DataError as e:
            os._exit(5 if "a forked process does not record" in str(e) else 6)
        finally:
            items.close()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
    with pytest.raises(DataError, match="another pipeline records here"):
        next(iter(Recorder(IterList([1]), tmp_path, append=True)))
    assert list(items) == [3, 4] and played(tmp_path) == [1, 2, 3, 4]


def test_another_library_reads_the_tensors_by_name(tmp_path):
    (fragment,) = recorded(tmp_path, 1)
    tensors = load_file(item_files(tmp_path / "lane-0000")[0].path)
    assert torch.equal(tensors["0.item.state.obs"], fragment.state.obs)
    assert torch.equal(tensors["0.item.actor.logp"], fragment.actor["logp"])
