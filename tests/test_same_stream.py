"The proof that a change is neutral names what is not: a leaf of made-up digests, and one of a package that was changed."

import os
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from gallery import refused

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
import same_stream
import stream_cases
from stream_cases.tools import named

TREE = dict(a=torch.arange(6.0).reshape(2, 3), b=(np.int64(3), [], None), c="text")


def digests(tree, label="batch 0"):
    return dict(leaves=stream_cases.leaves(label, tree))


def difference(change):
    return same_stream.compare(digests(TREE), digests({**TREE, **change}))


def test_equal_digests_are_no_difference():
    assert difference({}) == "" and difference(dict(a=TREE["a"].clone().t().contiguous().t())) == ""
    assert len(digests(TREE)["leaves"]) == 5


def test_one_byte_is_named():
    changed = TREE["a"].clone()
    changed.view(torch.uint8)[1, 11] ^= 1
    found = difference(dict(a=changed))
    assert found.startswith("batch 0['a']: torch float32 [2, 3] ") and " here" in found


@pytest.mark.parametrize(
    "change, expected",
    [
        (
            dict(a=TREE["a"].double()),
            "batch 0['a']: torch float32 [2, 3] * there, torch float64 [2, 3] * here",
        ),
        (
            dict(a=TREE["a"].flatten()),
            "batch 0['a']: torch float32 [2, 3] * there, torch float32 [6] * here",
        ),
        (
            dict(a=TREE["a"].numpy()),
            "batch 0['a']: torch float32 [2, 3] * there, numpy float32 [2, 3] * here",
        ),
        (dict(b=(np.int64(3), (), None)), "batch 0['b'][1]: [] there, () here"),
        (dict(b=(np.int64(3), [], 0)), "batch 0['b'][2]: None there, 0 here"),
        (dict(b=(np.int64(3), [])), "batch 0['b'][2]: None there, no such leaf here"),
        (dict(c="another"), "batch 0['c']: 'text' there, 'another' here"),
        (dict(d=1), "batch 0['d']: no such leaf there, 1 here"),
    ],
)
def test_every_difference_is_named(change, expected):
    found = difference(change)
    parts = expected.split("*")
    assert (
        all(part in found for part in parts)
        and found.startswith(parts[0])
        and found.endswith(parts[-1])
    )


def test_a_new_field_makes_a_difference_unless_it_is_declared_and_none(monkeypatch):
    old = [["b.x", "None", ""]]
    new = [["b.x", "None", ""], ["b.y", "None", ""]]
    assert same_stream.first_difference(old, new) == "b.y: no such leaf there, None here"
    monkeypatch.setattr(same_stream, "ADDED", ("y",))
    assert same_stream.first_difference(old, new) == ""
    assert (
        same_stream.first_difference(old, [*old, ["b.y", "1", ""]])
        == "b.y: no such leaf there, 1 here"
    )
    assert same_stream.first_difference(old, [["b.x", "1", ""], new[1]]).startswith("b.x")


def test_the_first_of_several_is_named():
    assert difference(dict(a=TREE["a"] + 1, c="another")).startswith("batch 0['a']")


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.bfloat16, torch.float64])
def test_arrays_of_every_dtype_and_shape_have_digests(dtype):
    for shape in ((), (0, 3), (2, 1)):
        form, sha = stream_cases.leaf(torch.ones(shape, dtype=dtype))
        assert form.endswith(str(list(shape))) and len(sha) == 64


def test_what_has_no_digest_fails_the_case():
    def case():
        yield "batch 0", dict(handle=object())

    assert "neither an array" in stream_cases.record(case)["error"]

    def twice():
        yield from [("batch", 1), ("batch", 1)]

    assert "the same path" in stream_cases.record(twice)["error"]

    def nothing():
        yield from ()

    assert "nothing" in stream_cases.record(nothing)["error"]


def test_a_case_that_fails_is_no_proof():
    failed = dict(error="ValueError: no", trace="Traceback\n  line\nValueError: no")
    fine = digests(TREE)
    assert same_stream.compare(failed, failed).startswith("fails on both sides: ValueError: no")
    assert same_stream.compare(failed, {**failed, "error": "KeyError: 1"}).startswith(
        "fails on both sides in different ways"
    )
    assert same_stream.compare(fine, failed).startswith(
        "fails only here: ValueError: no\n    Traceback"
    )
    assert "the process ended" in same_stream.compare(None, fine)


def test_a_renaming_is_stated(monkeypatch):
    old = digests(dict(place=1, said="the place is taken"))
    new = digests(dict(site=1, said="the site is taken"))
    assert same_stream.compare(old, new).startswith("batch 0['place']")
    monkeypatch.setitem(stream_cases.RENAMED, "place", "site")
    assert same_stream.compare(old, new) == ""
    monkeypatch.setitem(stream_cases.REWORDED, "no such place", "there is none")
    assert (
        same_stream.compare(digests("no such place: place 3"), digests("there is none: site 3"))
        == ""
    )
    modules = {
        f"old_package{part}": types.ModuleType(part)
        for part in ("", ".pipes", ".layers", ".agents")
    }
    modules["old_package.pipes"].place = 3
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    stream_cases.rename("old_package")
    assert modules["old_package.pipes"].site == 3 and not hasattr(
        modules["old_package.agents"], "site"
    )
    assert named(lambda site, x: None, site=1, x=2) == dict(site=1, x=2)
    assert named(lambda place, x: None, site=1, x=2) == dict(place=1, x=2)


# --- in a repository of its own


def git(repository, *args):
    command = [
        "git",
        "-C",
        str(repository),
        "-c",
        "user.name=a",
        "-c",
        "user.email=a@b.c",
        "-c",
        "commit.gpgsign=false",
        *args,
    ]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def repository(tmp_path):
    "A copy of package and benchmarks, committed."
    if shutil.which("git") is None:
        pytest.skip("there is no git here")
    for folder in ("rollpipe", "benchmarks"):
        shutil.copytree(
            ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "before")
    return tmp_path


def script(repository, *args):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.Popen(
        [sys.executable, str(repository / "benchmarks" / "same_stream.py"), "HEAD", *args],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def worktrees(repository):
    return git(repository, "worktree", "list").splitlines()


@pytest.mark.slow
def test_a_changed_default_is_named(repository):
    with open(repository / "rollpipe/pipes/__init__.py", "a") as file:
        file.write("\nfrom functools import partial\non_policy = partial(on_policy, gamma=0.98)\n")
    with script(repository, "--only", "streams.cartpole", "streams.hybrid") as run:
        out = run.communicate(timeout=120)[0]
    assert run.returncode == 1
    first, second, last = out.splitlines()
    assert first.startswith("WRONG streams.cartpole: batch 0.adv: torch float32 [32, 4] ")
    assert second == "ok    streams.hybrid"  # states its own gamma
    assert last.startswith("1 of 2 cases are the same as in HEAD")
    assert len(worktrees(repository)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_behind(repository, number):
    with script(repository, "--only", "gradients", "streams") as run:
        while len(worktrees(repository)) == 1 and run.poll() is None:
            time.sleep(0.05)
        time.sleep(0.3)  # the first groups run
        run.send_signal(number)
        out = run.communicate(timeout=60)[0]
    assert run.returncode == 130 and "Traceback" not in out
    assert len(worktrees(repository)) == 1 and not list(running(repository))


def running(repository):
    "The processes that have the folder in their command, where the system tells."
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = file.read_bytes()
        except OSError:
            continue
        if str(repository).encode() in command:
            yield command


def test_another_package_is_refused(tmp_path):
    refused(
        "rollpipe was imported from",
        stream_cases.run,
        tmp_path,
        tmp_path / "out",
        ("streams",),
        (),
        error=SystemExit,
    )
