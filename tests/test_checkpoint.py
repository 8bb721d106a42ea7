"Checkpoints: bit-exact round trips, atomic writes, and files that are no checkpoint."

import fcntl
import hashlib
import importlib
import os
import pickle
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from forked import Forked, run_forked
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save

from rollpipe.agents.checkpoint import keep_checkpoint, load_checkpoint, save_checkpoint
from rollpipe.pipes.data.errors import CheckpointError
from rollpipe.pipes.keeping.files import write_atomically


class Agent:
    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state


def roundtrip(state, path):
    save_checkpoint(path, Agent(state), config={}, counters={})
    return load_checkpoint(path).agent_state


def test_an_agent_alone_can_be_saved(tmp_path):
    save_checkpoint(tmp_path / "a", Agent(dict(steps=3)))
    assert load_checkpoint(tmp_path / "a")[:3] == ({}, {}, dict(steps=3))


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (a == b or a != a and b != b)


def bits(x):
    return (
        bytes(x.detach().cpu().contiguous().clone().flatten().view(torch.uint8).tolist())
        if x.numel()
        else b""
    )


DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
]


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    x = (torch.randn(shape) * 4).to(draw(st.sampled_from(DTYPES)))
    return x.transpose(0, -1) if x.ndim > 1 and draw(st.booleans()) else x


scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), tensors()
)
keys = st.one_of(st.text(max_size=4), st.integers(-3, 3))
trees = st.recursive(
    scalars,
    lambda below: st.one_of(
        st.lists(below, max_size=3),
        st.lists(below, max_size=3).map(tuple),
        st.dictionaries(keys, below, max_size=3),
    ),
)


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(state=trees)
def test_any_nested_state_comes_back_bit_for_bit(state, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "tree.safetensors"
    assert same(state, roundtrip(state, path))


def test_names_that_collide_and_look_like_tags(tmp_path):
    state = {
        "a.b": torch.ones(1),
        "a": {"b": torch.zeros(1)},
        "tensor": "w",
        "dict": {"list": [1]},
        "": torch.ones(2),
    }
    assert same(state, roundtrip(state, tmp_path / "c"))


def test_tied_views_and_gradients(tmp_path):
    base = torch.arange(12.0).requires_grad_()
    state = dict(
        a=base,
        b=base,
        odd=base[1::2],
        grid=base.view(3, 4).T,
        nan=torch.tensor([float("nan"), -0.0]),
    )
    back = roundtrip(state, tmp_path / "c")
    assert same(state, back)
    assert back["a"].data_ptr() != back["b"].data_ptr() and not back["a"].requires_grad


def test_other_tools_can_read_the_tensors(tmp_path):
    save_checkpoint(
        tmp_path / "c.safetensors", Agent(dict(net={"0.weight": torch.ones(2)})), {}, {}
    )
    assert list(load_file(tmp_path / "c.safetensors")) == ["agent.net.0.weight"]


@pytest.mark.parametrize(
    "leaf", [object(), {1, 2}, torch.ones(2).to_sparse(), lambda: 0, b"bytes", {(1, 2): 3}]
)
def test_what_needs_a_pickle_is_refused_by_name(leaf, tmp_path):
    with pytest.raises(CheckpointError, match=r"agent\.opt\.1"):
        save_checkpoint(tmp_path / "c", Agent(dict(opt=[0, leaf])), {}, {})
    assert list(tmp_path.iterdir()) == []


def good(path):
    save_checkpoint(path, Agent(dict(w=torch.arange(1000.0))), dict(env="Toy"), dict(steps=1))
    return path.read_bytes()


def test_what_is_damaged_names_the_newest_that_was_kept(tmp_path):
    data = good(tmp_path / "checkpoint.safetensors")
    for steps in (128, 256):
        keep_checkpoint(tmp_path / "checkpoints", data, steps, 2)
    kept = tmp_path / "checkpoints" / "checkpoint-000000256.safetensors"
    for bad in (data[:-1], data[:-1] + b"x", b""):
        (tmp_path / "checkpoint.safetensors").write_bytes(bad)
        with pytest.raises(
            CheckpointError, match=f"damaged.*; beside it, {kept} is the newest that was kept"
        ):
            load_checkpoint(tmp_path / "checkpoint.safetensors")
    kept.write_bytes(bad)
    with pytest.raises(CheckpointError) as e:
        load_checkpoint(kept)
    assert "beside" not in str(e.value)


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_mutilated_anywhere(data, tmp_path_factory):
    "Bits that flipped, bytes that are missing, doubled or exchanged: always one class of error."
    path = tmp_path_factory.getbasetemp() / "mutilated"
    save_checkpoint(path, Agent(dict(w=torch.arange(10.0), n=3)), dict(env="Toy"), dict(steps=1))
    whole = path.read_bytes()
    i, j = sorted(
        (data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(0, len(whole) - 1)))
    )
    bit = 1 << data.draw(st.integers(0, 7))
    harmed = data.draw(
        st.sampled_from(
            [
                whole[:i] + bytes([whole[i] ^ bit]) + whole[i + 1 :],
                whole[:i] + whole[j + 1 :],
                whole[:j] + whole[i:],
                whole[:i] + bytes(j - i) + whole[j:],
                whole[:i] + bytes([bit]) * (j - i + 1) + whole[j + 1 :],
            ]
        )
    )
    path.write_bytes(harmed)
    if harmed == whole:
        assert load_checkpoint(path).counters == dict(steps=1)
    else:
        with pytest.raises(CheckpointError):
            load_checkpoint(path)


class Bomb:
    def __reduce__(self):
        return os._exit, (7,)


META = dict(rollpipe_checkpoint="4", config='{"dict": []}', counters='{"dict": []}')


def sealed(**parts):
    "A file with these texts, whose checksum is right."
    data = save({}, metadata=dict(META, sha256="0" * 64, **parts))
    return data.replace(b"0" * 64, hashlib.sha256(data).hexdigest().encode())


@pytest.mark.parametrize(
    "data, message",
    [
        (b"hello, this is a text and no checkpoint at all", "not a checkpoint"),
        (pickle.dumps(Bomb()), "not a checkpoint"),
        (save(dict(w=torch.ones(2))), "not made by rollpipe.*no metadata"),
        (save(dict(w=torch.ones(2)), metadata=dict(format="pt")), "not made by rollpipe.*format"),
        *(
            (
                save({}, metadata=dict(META, rollpipe_checkpoint=x)),
                f"another version of rollpipe. Expected format 4, got {x}",
            )
            for x in ("5", "3", "0", "soon")
        ),
        (save({}, metadata=META), "damaged.*checksum None"),
        (sealed(), "damaged metadata.*agent is missing"),
        (sealed(agent='{"tensor": "w"}'), "damaged metadata"),
        (sealed(agent='{"pickle": "gASV"}'), "damaged metadata.*pickle"),
        (sealed(agent='{"dict": [1, 2]}'), "damaged metadata"),
        (sealed(agent='{"dict": [[[1], 2]]}'), "damaged metadata"),
        (sealed(agent="[1, 2]"), "damaged metadata"),
        (sealed(agent='{"list": ' * 3000 + "1" + "}" * 3000), "damaged metadata"),
        (sealed(agent='{"list": [' * 3000 + "1" + "]}" * 3000), "damaged metadata"),
        (
            sealed(agent='{"list": [' * 101 + "1" + "]}" * 101),
            "damaged metadata.*nested more than 100 deep",
        ),
        (sealed(agent='{"tuple": "ab"}'), "damaged metadata.*holds no list"),
    ],
)
def test_foreign(data, message, tmp_path):
    (tmp_path / "c").write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path / "c")


def test_missing_and_folder(tmp_path):
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        load_checkpoint(tmp_path / "c")
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        load_checkpoint(tmp_path)


def test_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    good(tmp_path / "c")

    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        save_checkpoint(tmp_path / "c", Agent({}), {}, dict(steps=2))
    assert load_checkpoint(tmp_path / "c").counters == dict(steps=1)
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_the_error_of_a_full_disk_names_the_file(tmp_path):
    "A limit of the file size stands for the full disk: the system refuses to write."
    code = (
        "import os, resource, sys; from rollpipe.pipes.keeping.files import write_atomically\n"
        "from rollpipe.runs.logs import MetricWriter\n"
        "writer = MetricWriter(sys.argv[1], tensorboard=False)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        "for write in (lambda: write_atomically(sys.argv[1] + '/c', bytes(1000)),\n"
        "              lambda: [writer.write(dict(steps=1)) for _ in range(100)]):\n"
        "    try: write()\n"
        "    except OSError as e: print(e)\n"
        "sys.stdout.flush(); os._exit(0)\n"
    )
    done = run_forked(["-c", code, tmp_path])
    of_checkpoint, of_metrics = done.stdout.splitlines()
    assert f"{tmp_path}/c'" in of_checkpoint and "File too large" in of_checkpoint
    assert f"{tmp_path}/metrics." in of_metrics and "File too large" in of_metrics
    assert {p.name for p in tmp_path.iterdir()} == {"metrics.jsonl", "metrics.csv"}


def test_no_link_is_followed(tmp_path, monkeypatch):
    "Whoever may make files in the folder, and guesses the name of the temporary file, cannot direct the write elsewhere."
    victim = tmp_path / "victim"
    victim.write_text("precious")
    monkeypatch.setattr("secrets.token_hex", lambda n: "guessed")
    (tmp_path / ".c.guessed.tmp").symlink_to(victim)
    with pytest.raises(FileExistsError):
        write_atomically(tmp_path / "c", b"data")
    assert victim.read_text() == "precious" and not (tmp_path / "c").exists()


def test_two_processes_with_one_number_do_not_share_a_temporary_file(tmp_path, monkeypatch):
    "In containers every process may have the number 1."
    monkeypatch.setattr(os, "getpid", lambda: 1)
    (tmp_path / ".c.1.tmp").write_bytes(b"of somebody else")
    write_atomically(tmp_path / "c", b"data")
    assert (tmp_path / "c").read_bytes() == b"data" and (
        tmp_path / ".c.1.tmp"
    ).read_bytes() == b"of somebody else"


def test_killed_while_writing(tmp_path):
    "A process that writes all the time is killed at some moment; the file is a whole one every time."
    code = (
        "import sys, torch; from rollpipe.agents.checkpoint import save_checkpoint\n"
        "class A: state_dict = lambda self: dict(w=torch.full((200_000,), float(i)))\n"
        "for i in range(10**6):\n"
        "    save_checkpoint(sys.argv[1], A(), {}, dict(i=i))\n"
        "    if i == 2: print('ready', flush=True)"
    )
    for delay in (0, 0.013, 0.027):
        with Forked(["-c", code, tmp_path / "c"]) as process:
            process.stdout.readline()
            time.sleep(delay)
            process.kill()
        found = load_checkpoint(tmp_path / "c")
        assert found.counters["i"] >= 2 and bool(
            (found.agent_state["w"] == found.counters["i"]).all()
        )


def killed_writer(path):
    "A process that was killed before its file took its name."
    code = (
        "import os, signal, sys; from rollpipe.pipes.keeping.files import write_atomically\n"
        "os.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)\n"
        "write_atomically(sys.argv[1], bytes(1000))"
    )
    assert run_forked(["-c", code, path]).returncode == -signal.SIGKILL


def test_what_a_killed_writer_left_is_removed_by_the_next_one(tmp_path):
    "Only files of writers of the same file; whatever else has a similar name stays."
    killed_writer(tmp_path / "a[1]")
    (left,) = tmp_path.iterdir()
    others = [
        ".b.0123456789abcdef.tmp",
        ".a[1].tmp",
        ".a[1].x.tmp",
        ".a1.0123456789abcdef.tmp",
        "a[1].0123456789abcdef.tmp",
    ]
    for name in others:
        (tmp_path / name).touch()
    (tmp_path / "mine").touch()
    (tmp_path / ".a[1].aaaaaaaaaaaaaaaa.tmp").symlink_to("mine")
    os.mkfifo(tmp_path / ".a[1].bbbbbbbbbbbbbbbb.tmp")  # to open it would wait for a writer
    write_atomically(tmp_path / "a[1]", b"new")
    assert (
        not left.exists()
        and (tmp_path / "a[1]").read_bytes() == b"new"
        and (tmp_path / "mine").exists()
    )
    assert all((tmp_path / name).exists() for name in others)


def test_the_file_of_a_living_writer_is_left_alone(tmp_path):
    "Of one in another process, in the middle of writing, and of one in another thread."
    code = (
        "import os, sys, time; from rollpipe.pipes.keeping.files import write_atomically\n"
        "def fsync(fd):\n"
        "    print('writing', flush=True)\n"
        "    while not os.path.exists(sys.argv[2]): time.sleep(.01)\n"
        "os.fsync = fsync\n"
        "write_atomically(sys.argv[1], b'theirs')"
    )
    folder = tmp_path / "files"
    gate = tmp_path / "gate"
    folder.mkdir()
    with Forked(["-c", code, folder / "a", gate]) as process:
        process.stdout.readline()
        for k in range(3):
            write_atomically(folder / "a", b"%d" % k)
        assert len(list(folder.iterdir())) == 2 and (folder / "a").read_bytes() == b"2"
        gate.touch()
        assert process.wait(60) == 0
    assert [p.name for p in folder.iterdir()] == ["a"] and (folder / "a").read_bytes() == b"theirs"
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda k: write_atomically(folder / "a", b"%d" % k), range(200)))
    assert [p.name for p in folder.iterdir()] == ["a"]


def test_a_file_that_is_removed_before_it_is_locked(tmp_path, monkeypatch):
    "By another writer, which took it for one of a killed writer: a new one is made."
    lock = fcntl.flock
    removed = []

    def late(file, how):
        if not removed:
            removed.extend(tmp_path.iterdir())
            removed[0].unlink()
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    write_atomically(tmp_path / "a", b"new")
    assert (
        len(removed) == 1
        and [p.name for p in tmp_path.iterdir()] == ["a"]
        and (tmp_path / "a").read_bytes() == b"new"
    )


def test_without_locks(tmp_path, monkeypatch):
    "On a file system without locks nobody removes the file of another writer."

    def refuses(file, how):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuses)
    left = tmp_path / ".a.0123456789abcdef.tmp"
    left.touch()
    write_atomically(tmp_path / "a", b"new")
    assert {p.name for p in tmp_path.iterdir()} == {"a", left.name}


def test_permissions_are_those_of_any_new_file(tmp_path):
    write_atomically(tmp_path / "a", b"")
    (tmp_path / "b").touch()
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # the file itself is closed when it is collected
@pytest.mark.parametrize("call", ["fcntl.flock", "os.fstat", "builtins.open"])
def test_an_interrupt_at_any_call_leaves_no_file_beside(tmp_path, monkeypatch, call):
    holder, name = call.split(".")
    module = importlib.import_module(holder)
    real = getattr(module, name)
    results = []

    def interrupted(*args, **kwargs):
        results.append(real(*args, **kwargs))  # the signal is handled when the call has returned
        raise KeyboardInterrupt

    monkeypatch.setattr(module, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "x", b"data")
    monkeypatch.undo()
    if call == "builtins.open":
        results[0].close()
    assert results and not list(tmp_path.iterdir())
