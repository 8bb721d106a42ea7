"Errors keep their fields across processes, pickling and the hands of others."

import multiprocessing
import pickle
import re
import sys
import traceback
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import IterDataPipe

from rollpipe.pipes.data import errors
from rollpipe.pipes.data.errors import (
    DataError,
    EnvError,
    GraphError,
    PipeError,
    annotated_names,
    describe,
    signature_of,
)

ALL = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.PipeError)
]


def make(cls):
    return cls(
        "went wrong",
        pipe="EnvStepper",
        lane=2,
        env=(5, "Pendulum-v1"),
        leaf="obs['camera']",
        expected="finite float32",
        got=float("nan"),
    )


MESSAGE = (
    "EnvStepper, lane 2, environment 5 (Pendulum-v1), leaf obs['camera']: went wrong. "
    "Expected finite float32, got nan."
)


@pytest.mark.parametrize("cls", ALL)
def test_every_error_pickles_with_its_fields(cls):
    error = make(cls)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls and isinstance(copy, PipeError)
    assert str(copy) == str(error) == MESSAGE
    assert vars(copy) == vars(error) and copy.args == error.args == ("went wrong",)


class MyError(EnvError):
    "A user's error with a signature of its own."

    def __init__(self, env):
        super().__init__("my problem", env=env)
        self.extra = [1]


def test_subclass_with_another_signature_pickles():
    copy = pickle.loads(pickle.dumps(MyError(3)))
    assert type(copy) is MyError and copy.extra == [1] and str(copy) == "environment 3: my problem."


def fail_in_worker(_):
    raise make(DataError)


def test_crosses_a_process():
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        with pytest.raises(DataError) as info:
            pool.map(fail_in_worker, [0])
        pool.close()
        pool.join()
    assert str(info.value) == MESSAGE and info.value.lane == 2


class Failing(IterDataPipe):
    def __iter__(self):
        yield 1
        raise make(EnvError)


def test_message_stays_clean_when_it_passes_a_datapipe():
    "torch.utils.data appends a sentence to args[0] of whatever passes the iterator of a pipe."
    with pytest.raises(EnvError) as info:
        list(Failing())
    assert "thrown by __iter__" in str(
        info.value.args[0]
    )  # should this ever end, our own __str__ may end with it
    assert str(info.value) == MESSAGE
    assert "thrown by" not in "".join(traceback.format_exception_only(info.type, info.value))


def test_numbers_that_are_zero_are_said():
    assert str(PipeError("bad", lane=0, env=0, got=0)) == "lane 0, environment 0: bad. Got 0."


def test_root_leaf_is_not_said():
    assert str(PipeError("bad", leaf="")) == "bad."


def test_drawing_may_end_the_message():
    assert str(GraphError("no such pipe in\nA\n└─B\n")) == "no such pipe in\nA\n└─B\n"


@pytest.mark.parametrize("pipe", [Failing, Failing()])
def test_pipe_leaves_only_its_name(pipe):
    error = PipeError("bad", pipe=pipe)
    assert error.pipe == "Failing" and str(error) == "Failing: bad."


def test_values_leave_only_their_description():
    error = PipeError("bad", expected=torch.zeros(2), got=[lambda: 0, np.zeros((3, 4))])
    assert error.expected == "float32 [2]" and "float64 [3, 4]" in error.got
    pickle.dumps(error)


def test_locate_fills_only_what_is_unknown():
    error = EnvError("bad", env=1)
    assert error.locate(env=9, lane=4) is error
    assert (error.env, error.lane, error.pipe) == (1, 4, None)


@pytest.mark.parametrize(
    "value, text",
    [
        (np.float32(0.5), "float32 0.5"),
        (torch.tensor(True), "bool True"),
        (np.zeros((0, 2), int), "int64 [0, 2]"),
        ([], "[]"),
        ((), "()"),
        ({}, "{}"),
        ((1,), "(1,)"),
        (None, "None"),
        ("a", "'a'"),
        (dict, "dict"),
        (np.array(["x"]), "<U1 [1]"),
        ({"a": [np.int8(1)]}, "{'a': [int8 1]}"),
    ],
)
def test_describe(value, text):
    assert describe(value) == text


@pytest.mark.parametrize(
    "value", ["x" * 10**6, list(range(10**6)), {i: i for i in range(10**5)}, [["a" * 99] * 99] * 99]
)
def test_describe_is_short(value):
    assert len(describe(value)) == 120 and describe(value).endswith("...")


def test_what_contains_itself_has_a_short_description():
    x = {}
    x["a"] = x
    x["b"] = [x]
    assert len(describe(x)) <= 120 and describe(x).startswith("{'a': {'a': ")


def test_signatures_are_read_in_one_place():
    "From Python 3.14 on, `inspect.signature` looks up names that type checkers alone know."
    package = Path(__file__).resolve().parents[1] / "rollpipe"
    direct = re.compile(r"inspect\.(signature|get_annotations)\(|from inspect import .*signature")
    callers = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if direct.search(path.read_text(encoding="utf-8"))
    }
    assert callers == {"pipes/data/errors.py"}


@pytest.mark.skipif(sys.version_info < (3, 14), reason="annotations are evaluated at once")
def test_an_annotation_that_only_a_type_checker_knows_is_read_as_a_text():
    scope = {}
    exec("def act(obs: Unknown) -> Nowhere: ...\nclass Some:\n    size: Unknown = 1", scope)
    assert signature_of(scope["act"]).parameters["obs"].annotation == "Unknown"
    assert annotated_names(scope["Some"]) == ["size"]
