"""The base pipe: closing, messages, lengths, pickles; and the one door to torchdata."""

import gc
import pickle
import subprocess
import sys
from abc import abstractmethod
from collections import namedtuple
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils.data.datapipes.iter import Mapper

from rollpipe.pipes.data.errors import DataError
from rollpipe.pipes.graph.edits import draw
from rollpipe.pipes.graph.pipe import Pipe, Source
from rollpipe.pipes.graph.torchdata import (
    IterableWrapper,
    IterDataPipe,
)

ROOT = Path(__file__).parents[1]


class Toy(Source):
    "Counts up to `n`, and how often it was opened and closed."

    opened = closed = 0

    def __init__(self, n=5):
        self.n = n

    def stream(self, items):
        Toy.opened += 1
        try:
            yield from range(self.n)
        finally:
            Toy.closed += 1


class Scale(Pipe):
    reads = 1

    def __init__(self, pipe, by=2, fn=None, note=None):
        super().__init__(pipe)
        self.by = by
        self.fn = fn
        self.note = note

    def stream(self, items):
        for x in items:
            yield x * self.by


class Fragile(Pipe):
    def stream(self, items):
        for x in items:
            if x == 2:
                raise DataError("two", pipe=self, got="2")
            yield x


class Greedy(Pipe):
    "Reads ahead and stops early, leaving its input unfinished."

    def stream(self, items):
        next(items)
        yield next(items)


@pytest.fixture(autouse=True)
def all_closed():
    Toy.opened = Toy.closed = 0
    yield
    gc.collect()
    assert Toy.opened == Toy.closed > -1


def open_now():
    return Toy.opened - Toy.closed


def test_exhausted():
    pipe = Scale(Greedy(Scale(Toy())))
    assert list(pipe) == list(pipe) == [4]
    assert (Toy.opened, Toy.closed) == (2, 2)


def test_break_and_close():
    pipe = Scale(Scale(Toy()))
    for _ in pipe:
        assert open_now() == 1
        break
    assert open_now() == 0
    items = iter(pipe)
    next(items)
    items.close()
    assert open_now() == 0 and list(items) == []
    items = iter(pipe)
    next(items)
    del items  # without a garbage collection: no reference cycle is made
    assert open_now() == 0
    iter(pipe).close()  # never started
    assert Toy.opened == 3


def test_exception_in_a_pipe_and_in_the_consumer():
    for pipe in (Scale(Fragile(Scale(Toy(), by=1))), Fragile(Scale(Scale(Toy(), by=1), by=1))):
        with pytest.raises(DataError) as kept:
            list(pipe)
        assert open_now() == 0, "the traceback is still held"
        assert str(kept.value) == "Fragile: two. Got 2."
    kept = None
    try:
        for x in Scale(Toy()):
            raise KeyError(x)
    except KeyError as e:
        kept = e
    assert open_now() == 0 and kept.__traceback__ is not None


def test_a_plain_message_stays_readable():
    module = torch.nn.Sequential(*[torch.nn.Linear(1, 1) for _ in range(50)])
    pipe = Scale(Scale(Scale(Fragile(Toy()), fn=module), fn=module), fn=module)
    with pytest.raises(DataError) as e:
        list(pipe)
    assert e.value.args == ("two",)


def test_invalidated_iterator_closes_its_input():
    first_toy = Toy()
    other = None
    pipe = Scale(first_toy)
    first = iter(pipe)
    next(first)
    other = iter(pipe)  # torch's rule: one iterator at a time
    assert next(other) == 0
    with pytest.raises(RuntimeError, match="invalidated"):
        next(first)
    first.close()
    assert open_now() == 1
    assert list(other) == [2, 4, 6, 8]
    assert open_now() == 0
    # the same in the middle of a pipeline: whoever reads the invalid iterator fails and is closed
    pipe = Scale(Scale(Toy()))
    outer = iter(pipe)
    next(outer)
    inner = iter(pipe.pipe)
    next(inner)
    with pytest.raises(RuntimeError, match="invalidated") as kept:
        next(outer)
    assert open_now() == 1 and kept is not None
    inner.close()
    assert open_now() == 0


def test_upstream_without_close_and_foreign_pipes():
    assert list(Scale(IterableWrapper([1, 2]))) == [2, 4]

    class Plain(IterDataPipe):
        def __iter__(self):
            return iter([1, 2])

    assert list(Scale(Plain())) == [2, 4]
    for _ in Scale(Mapper(Scale(Toy()), abs)):
        break
    assert open_now() == 0
    with pytest.raises(DataError):
        list(Scale(Mapper(Fragile(Toy()), abs)))
    assert open_now() == 0


def test_a_pipe_without_a_stream_says_what_to_define():
    with pytest.raises(NotImplementedError, match=r"Pipe must define stream\(self, items\)"):
        list(Pipe(IterableWrapper([1])))
    assert Scale(IterableWrapper([]))  # it is true, though its length is 0


class ForgetsYield(Pipe):
    def stream(self, items):
        for x in items:
            x + 1


class HasNoBody(Source):
    def stream(self, items):
        "Nothing."


class Loud:
    def stream(self, items):
        list(items)


class OfAMixin(Loud, Pipe):
    pass


class Number(Pipe):
    def stream(self, items):
        return 3


class ReturnsItsItem(Pipe):
    "A fragment is a tuple, whose fields could be iterated."

    def stream(self, items):
        return with_a_name(next(items))


with_a_name = namedtuple("Named", "value")


class ForgetsSuper(Pipe):
    def __init__(self, pipe):
        pass

    def stream(self, items):
        yield from items


def test_a_pipe_that_has_not_called_super_says_so():
    with pytest.raises(TypeError, match=r"ForgetsSuper has no input. Expected `super\(\).__init__"):
        next(iter(ForgetsSuper(IterableWrapper([1]))))


@pytest.mark.parametrize(
    "cls, got",
    [
        (ForgetsYield, "None"),
        (HasNoBody, "None"),
        (OfAMixin, "None"),
        (Number, "3"),
        (ReturnsItsItem, "a Named"),
    ],
)
def test_a_stream_that_is_none_is_named_at_its_first_item(cls, got):
    source = () if cls is HasNoBody else (IterableWrapper([1, 2]),)
    text = rf"^{cls.__name__}\.stream returned {got}\. Expected a generator"
    with pytest.raises(TypeError, match=text):
        next(iter(cls(*source)))


@pytest.mark.parametrize(
    "edit, expected",
    [
        (Scale.inserter(after=Toy, by=5), [0, 10, 20]),
        (Scale.inserter(before=Scale, by=5), [0, 10, 20]),
        (Scale.inserter(after=Scale), [0, 4, 8]),
        (Scale.replacer(Scale, by=7), [0, 7, 14]),
        (Toy.replacer(Toy, n=2), [0, 2]),
        (Toy.replacer(Scale, n=2), [0, 1]),
    ],
)
def test_edits_by_classes_can_be_pickled(edit, expected):
    pipe = Scale(Toy(3), by=2)
    assert list(edit(pipe)) == list(pickle.loads(pickle.dumps(edit))(pipe)) == expected
    assert list(pipe) == [0, 2, 4]


def test_a_source_has_no_place_behind_a_pipe():
    with pytest.raises(TypeError, match="cannot be inserted"):
        Toy.inserter(after=Scale)


def test_streams_that_return_an_iterator_raise_or_are_abstract():
    class Plus(Pipe):
        def stream(self, items):
            return map(abs, items)

    class Maybe(Pipe):
        def stream(self, items):
            return iter(()) if items is None else items

    class Either(Pipe):
        def stream(self, items):
            if items is None:
                return
            return (x for x in items)

    class One(Pipe):
        stream = lambda self, items: zip(items)

    class Base(Pipe):
        def stream(self, items):
            raise NotImplementedError("a subclass says it")

    class Abstract(Pipe):
        @abstractmethod
        def stream(self, items): ...

    class Decorated(Pipe):
        @torch.no_grad()
        def stream(self, items):
            yield from items

    class Foreign(Pipe):
        stream = staticmethod(partial(filter, None))

    source = IterableWrapper([1, 2])
    assert (
        list(Plus(source))
        == list(Maybe(source))
        == list(Either(source))
        == list(Decorated(source))
        == list(Foreign(source))
        == [1, 2]
    )
    assert list(One(source)) == [(1,), (2,)]
    with pytest.raises(NotImplementedError, match="a subclass"):
        list(Base(source))


def test_repr_is_short():
    pipe = Scale(Toy(), by=0.5, fn=torch.nn.Linear(1, 1), note="x" * 1000)
    assert repr(pipe).startswith("Scale(by=0.5, fn=Linear, note='xxx") and len(repr(pipe)) < 70
    assert str(pipe) == repr(pipe) and f"→ {pipe!r}" in str(draw(pipe))
    with torch.autograd.profiler.profile():
        assert list(Scale(Toy(2))) == [0, 2]


@pytest.mark.slow
def test_the_door_is_cheap_and_silent():
    code = (
        "import sys, rollpipe.pipes.graph.torchdata\n"
        "assert not {'torchdata', 'rollpipe.pipes.loading.loader'} & set(sys.modules)\n"
        "from rollpipe.pipes.graph.torchdata import DataLoader2, ReadingServiceInterface\n"
        "own = ReadingServiceInterface.__module__ == 'rollpipe.pipes.loading.loader'\n"
        "assert own == (sys.version_info >= (3, 13))\n"
    )
    command = [sys.executable, "-W", "error::UserWarning", "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
