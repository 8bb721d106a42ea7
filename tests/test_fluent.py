"""The functional form makes the same pipes as the constructors, and survives being imported again."""

import importlib
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
from reference import assert_same
from toys import Counting, Plain, judge

import rollpipe.pipes.fluent as fluent
from rollpipe import pipes
from rollpipe.pipes import (
    AdvantageBuffer,
    EnvStepper,
    FragmentCollector,
    FragmentStacker,
    GraphError,
    Lanes,
    Pipe,
)
from rollpipe.pipes.graph.torchdata import IterDataPipe

ROOT = Path(__file__).resolve().parents[1]


def test_makes_the_same_pipes():
    def source():
        return EnvStepper(Counting, Plain(), 2)

    by_name = source().fragments(n_steps=5).lanes(2, seed=0).advantage(judge, lam=0.5).stack(2)
    by_class = FragmentStacker(
        AdvantageBuffer(Lanes(FragmentCollector(source(), 5), 2, seed=0), judge, lam=0.5), 2
    )
    assert repr(by_name) == repr(by_class)
    for a, b in zip(islice(by_name, 2), by_class):
        assert_same(a, b)


@pytest.mark.parametrize("name", fluent.NAMES)
def test_every_name_is_a_method_with_the_docstring_of_its_class(name):
    method = getattr(EnvStepper(Counting, Plain()), name)
    assert method.__doc__ == fluent.NAMES[name].__doc__ and name in dir(
        EnvStepper(Counting, Plain())
    )


def test_no_name_hides_behind_an_attribute_of_a_pipe():
    classes = [
        cls
        for cls in vars(pipes).values()
        if isinstance(cls, type) and issubclass(cls, IterDataPipe)
    ]
    assert len(classes) > 10 and not [
        (cls, name) for cls in classes for name in fluent.NAMES if name in dir(cls)
    ]


def test_may_be_imported_and_reloaded_again_and_again():
    before = dict(IterDataPipe.functions)
    importlib.reload(fluent)
    sys.modules.pop("rollpipe.pipes.fluent")
    again = importlib.import_module("rollpipe.pipes.fluent")
    assert again is not fluent and set(IterDataPipe.functions) == set(before)
    assert type(EnvStepper(Counting, Plain()).fragments(3)) is FragmentCollector
    sys.modules["rollpipe.pipes.fluent"] = fluent


def test_a_class_that_was_made_anew_takes_its_name_over():
    "A notebook cell that defines and registers a pipe may be run twice."
    try:
        made = []
        for _ in range(2):

            class Passing(Pipe):
                def stream(self, items):
                    yield from items

            fluent.register({"passing_on": Passing})
            made.append(Passing)
        assert type(EnvStepper(Counting, Plain()).passing_on()) is made[1]
    finally:
        IterDataPipe.functions.pop("passing_on", None)


@pytest.mark.parametrize(
    "name, problem",
    [
        ("batch", "'batch' is taken"),
        ("fragments", "'fragments' is taken"),
        ("reset", "cannot be a method"),
        ("no name", "cannot be a method"),
    ],
)
def test_refuses_the_names_of_others_and_leaves_the_table_as_it_was(name, problem):
    class Mine(Pipe):
        pass

    before = dict(IterDataPipe.functions)
    with pytest.raises(GraphError, match=problem):
        fluent.register({"fresh_name": Mine, name: Mine})
    assert IterDataPipe.functions == before


@pytest.mark.slow
def test_nothing_is_registered_before_it_is_imported():
    code = (
        "import rollpipe.pipes as p; from rollpipe.pipes.graph.torchdata import IterDataPipe as D; "
        "assert 'fragments' not in D.functions;"
        "import rollpipe.pipes.fluent; assert 'fragments' in D.functions"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=ROOT)
