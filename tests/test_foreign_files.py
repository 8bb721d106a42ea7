"""Files of a stranger: regular files alone, at most so much memory as the file's size allows, and no way into other files."""

import gzip
import os
import signal
from contextlib import contextmanager

import gymnasium as gym
import numpy as np
import pytest
import torch
from command_line import SMALL, rollpipe

from rollpipe.agents.checkpoint import load_checkpoint
from rollpipe.agents.evaluate import RandomActor
from rollpipe.pipes import Recorder, rollouts
from rollpipe.pipes.data.errors import CheckpointError, DataError
from rollpipe.pipes.graph.torchdata import IterableWrapper
from rollpipe.pipes.keeping.chunks import ChunkFolder, chunk_names
from rollpipe.pipes.keeping.files import (
    SPREAD,
    from_safetensors,
    most_bytes,
    packed,
    read_file,
    write_atomically,
)
from rollpipe.pipes.profiling.report import Profile
from rollpipe.pipes.recording import from_minari, to_minari
from rollpipe.pipes.recording.recorder import ItemFile, item_files, records_in
from rollpipe.runs.folder import load_run
from rollpipe.runs.logs import read_evaluations, read_records, records_of
from rollpipe.settings.files import read_table
from rollpipe.traces.differences import read_fingerprints
from rollpipe.traces.history import History, read_request
from rollpipe.traces.journal import read_journal

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")


@contextmanager
def at_once():
    "A block that reads a named pipe would wait for ever. An alarm ends it."

    def late(*args):
        raise TimeoutError("waits for the other end of a named pipe")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# --- regular files alone


def test_a_regular_file_is_read_and_nothing_else_is(tmp_path):
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert read_file(tmp_path / "file") == read_file(tmp_path / "link") == b"abc"
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "to_pipe").symlink_to(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path / "to_pipe", "/dev/zero", tmp_path):
        with at_once(), pytest.raises((DataError, IsADirectoryError), match="a regular file|Is a"):
            read_file(path)
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "none")
    with open(tmp_path / "huge", "wb") as file:
        file.truncate(2**43)  # it takes no room on the disk
    with pytest.raises(DataError, match="not enough memory.*huge"):
        read_file(tmp_path / "huge")


READERS = {
    "config.json": [
        lambda path: read_request(path.parent),
        read_table,
    ],
    "history.jsonl": [lambda path: History.read(path.parent)],
    "fingerprint.json": [lambda path: read_fingerprints(path.parent)],
    "journal.jsonl": [read_journal],
    "metrics.jsonl": [
        lambda path: read_records(path.parent),
        lambda path: records_of(path.parent),
    ],
    "evaluations.jsonl": [lambda path: read_evaluations(path.parent)],
    "costs.json": [Profile.load],
    "checkpoint.safetensors": [load_checkpoint, load_run, chunk_names],
}


@pytest.mark.parametrize(
    "name, read", [(name, read) for name, readers in READERS.items() for read in readers]
)
def test_no_reader_of_a_run_waits_for_a_named_pipe(tmp_path, name, read):
    os.mkfifo(tmp_path / name)
    with at_once():
        try:
            read(tmp_path / name)
        except (DataError, CheckpointError):
            pass


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    words = "train trpo CartPole-v1 --steps 256 --record --lanes 2".split()
    assert rollpipe(*words, *SMALL, "--out", folder) == 0
    return folder


@pytest.mark.slow_but_one
@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "fingerprint.json",
        "journal.jsonl",
        "metrics.jsonl",
        "metrics.csv",
        "evaluations.jsonl",
        "best.safetensors",
        "costs.json",
        "wandb.json",
        "recording/.lock",
    ],
)
def test_no_command_waits_for_a_named_pipe_in_a_run(trained, tmp_path, name, capsys):
    run = tmp_path / "run"
    for path in trained.rglob("*"):
        if path.is_file():
            (run / path.relative_to(trained)).parent.mkdir(parents=True, exist_ok=True)
            (run / path.relative_to(trained)).write_bytes(path.read_bytes())
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    with at_once():
        for words in (
            ["diff", run, trained],
            ["fork", run, "--out", tmp_path / "fork"],
            ["train", "--resume", run, "--steps", 512, "--quiet", "--no-tensorboard"],
        ):
            assert rollpipe(*words) in (0, 2), words


@pytest.mark.parametrize("name", ["000000000-000000001.safetensors", "about.json"])
@pytest.mark.parametrize("end", ["", ".gz"])
def test_a_recording_has_regular_files(tmp_path, name, end, capsys):
    recorded(tmp_path / "a", [np.zeros(3)])
    path = tmp_path / "a" / (name + end * name.endswith("safetensors"))
    for old in (*tmp_path.glob("a/*.safetensors*"), path):
        if old == path or name != "about.json":
            old.unlink(missing_ok=True)
    os.mkfifo(path)
    with at_once():
        assert rollpipe("data", tmp_path / "a") in (0, 2)
    assert path.name in "".join(capsys.readouterr())


def test_a_chunk_is_a_regular_file(tmp_path):
    chunks = ChunkFolder(tmp_path)
    name = f"{'0' * 64}.chunk"
    os.mkfifo(tmp_path / name)
    with at_once(), pytest.raises(CheckpointError, match="regular file"):
        ChunkFolder(tmp_path).read(name)
    assert name not in chunks.names


# --- memory


def recorded(folder, items, compress=False):
    list(Recorder(IterableWrapper(items), folder, compress=compress))
    return item_files(folder)


@pytest.mark.slow
def test_a_compressed_recording_takes_as_much_memory_as_its_size_allows(tmp_path, capsys):
    (file,) = recorded(tmp_path / "a", [np.zeros(3)])
    data = file.path.read_bytes()
    bomb = file.path.with_name(f"{file.path.name}.gz")
    file.path.unlink()
    bomb.write_bytes(gzip.compress(data + bytes(2**28), 9))
    assert bomb.stat().st_size < 2**19
    with pytest.raises(CheckpointError, match=r"more than \d[\d,]* bytes.*gunzip"):
        list(records_in(ItemFile(0, 1, bomb)))
    assert rollpipe("data", tmp_path / "a") in (0, 2)
    assert "gunzip" in "".join(capsys.readouterr())
    assert most_bytes(2**20) == SPREAD * 2**20 and most_bytes(10) == 2**24


@pytest.mark.parametrize("shape", [(3,), (2**20,), (2**25 + 1,)])
def test_a_recording_that_could_be_written_can_be_read(tmp_path, shape):
    "Zeros are compressed a thousandfold, which a reader would refuse."
    (file,) = recorded(tmp_path / "a", [np.zeros(shape, np.uint8)], compress=True)
    assert file.path.suffix == ".gz"
    (record,) = records_in(file)
    assert record.item.shape == shape and not record.item.any()


def test_a_tensor_with_strides_is_made_once(tmp_path):
    "Many views of one small tensor, each spread widely, would take many times the size of the file."
    spread = ["x", [1000], [10], 0]
    once = packed("test", 1, dict(a=dict(tensor=spread)), dict(x=torch.ones(1000)))
    write_atomically(tmp_path / "once", once)
    assert from_safetensors(tmp_path / "once", "test", 1)["a"].stride() == (10,)
    codes = dict(a=dict(list=[dict(tensor=spread)] * 3))
    write_atomically(tmp_path / "often", packed("test", 1, codes, dict(x=torch.ones(1000))))
    with pytest.raises(CheckpointError, match="damaged metadata"):
        from_safetensors(tmp_path / "often", "test", 1)


# --- no way into other files


@pytest.fixture
def minari(tmp_path):
    h5py = pytest.importorskip("h5py")
    space = gym.spaces.Discrete(2)
    pipe = rollouts("CartPole-v1", RandomActor(space), n_envs=2, seed=0, terminal_obs=True)
    to_minari([next(iter(pipe))], "cart/pole-v0", "CartPole-v1", folder=tmp_path)
    file = tmp_path / "cart" / "pole-v0" / "data" / "main_data.hdf5"
    assert sum(1 for _ in from_minari("cart/pole-v0", 64, folder=tmp_path))
    return h5py, file


def link_away(h5py, file, path):
    del file["episode_0/rewards"]
    file["episode_0/rewards"] = h5py.ExternalLink(str(path), "/secret")


def link_episode_away(h5py, file, path):
    del file["episode_1"]
    file["episode_1"] = h5py.ExternalLink(str(path), "/")


def link_softly(h5py, file, path):
    file["episode_0/infos/more"] = h5py.SoftLink("/episode_1/rewards")


def store_outside(h5py, file, path):
    n = len(file["episode_0/rewards"])
    del file["episode_0/rewards"]
    external = [(str(path), 0, n * 8)]
    file["episode_0"].create_dataset("rewards", (n,), "f8", external=external)


def read_virtually(h5py, file, path):
    n = len(file["episode_0/rewards"])
    del file["episode_0/rewards"]
    layout = h5py.VirtualLayout((n,), "f8")
    layout[:] = h5py.VirtualSource(str(path), "secret", (n,))
    file["episode_0"].create_virtual_dataset("rewards", layout)


def fill_chunks(h5py, file, path):
    n = len(file["episode_0/rewards"])
    del file["episode_0/rewards"]
    options = dict(maxshape=(None,), chunks=(2**29,), compression="gzip")
    file["episode_0"].create_dataset("rewards", (n,), "f4", **options)


@pytest.mark.parametrize(
    "change, told",
    [
        (link_away, "episode_0/rewards.*ExternalLink"),
        (link_episode_away, "episode_1.*ExternalLink"),
        (link_softly, "episode_0/infos/more.*SoftLink"),
        (store_outside, "episode_0/rewards.*other files"),
        (read_virtually, "episode_0/rewards.*other files"),
        (fill_chunks, "episode_0/rewards.*bytes"),
    ],
)
def test_a_data_set_of_minari_has_its_numbers_itself(minari, tmp_path, change, told):
    h5py, file = minari
    secret = tmp_path / "secret.hdf5"
    with h5py.File(secret, "w") as other:
        other["secret"] = np.full(1000, 42.0)
    with h5py.File(file, "r+") as data:
        if change is link_softly:
            data["episode_0"].require_group("infos")
        change(h5py, data, secret)
    with pytest.raises(DataError, match=told):
        next(iter(from_minari("cart/pole-v0", 64, folder=tmp_path)))


@pytest.mark.parametrize("name", ["main_data.hdf5", "metadata.json"])
def test_a_data_set_of_minari_has_regular_files(minari, tmp_path, name):
    path = minari[1].with_name(name)
    path.unlink()
    os.mkfifo(path)
    with at_once(), pytest.raises(DataError, match="regular file"):
        next(iter(from_minari("cart/pole-v0", 64, folder=tmp_path)))


def test_a_group_that_contains_itself_is_looked_at_once(minari, tmp_path):
    h5py, file = minari
    with h5py.File(file, "r+") as data:
        data["episode_0/infos/self"] = data["episode_0"]
    with at_once(), pytest.raises(DataError):
        next(iter(from_minari("cart/pole-v0", 64, folder=tmp_path)))


def test_a_file_of_settings_is_not_huge(tmp_path):
    with open(tmp_path / "own.toml", "wb") as file:
        file.truncate(2**43)
    with pytest.raises(DataError, match="not enough memory"):
        read_table(tmp_path / "own.toml")
