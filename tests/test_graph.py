"""Graph edits: on small graphs by hand, and on random graphs against an oracle that edits nested tuples."""

import pickle
import random
import sys
from collections import defaultdict, deque, namedtuple
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data.datapipes.iter import Mapper, Shuffler, Zipper

from rollpipe.pipes import Lanes, Pipe
from rollpipe.pipes.data.errors import GraphError
from rollpipe.pipes.graph.edits import (
    copy_graph,
    draw,
    find,
    find_one,
    inputs,
    insert_after,
    insert_before,
    nodes,
    remove,
    replace,
)
from rollpipe.pipes.graph.torchdata import DataLoader2, IterableWrapper, IterDataPipe, traverse_dps

Pair = namedtuple("Pair", "left right")


class Source(IterDataPipe):
    def __init__(self, name, n=3):
        self.name, self.n = name, n

    def __iter__(self):
        yield from range(self.n)


class Add(IterDataPipe):
    "Adds `by` to its input."

    def __init__(self, pipe, by=1, name=""):
        self.pipe = pipe
        self.by = by
        self.name = name

    def __iter__(self):
        yield from (x + self.by for x in self.pipe)


class AddTen(Add):
    def __init__(self, pipe, name=""):
        super().__init__(pipe, 10, name)


class Sum(IterDataPipe):
    "Sums its inputs, which may sit in any container; reads them one after the other, so that they may be shared."

    def __init__(self, inputs, name="", log=None):
        self.held = inputs
        self.name = name
        self.log = log

    def __iter__(self):
        yield from map(sum, zip(*[list(p) for p in inputs(self)]))


def named(name):
    return lambda p: getattr(p, "name", None) == name


def double(x):
    return 2 * x


def diamond(wrap=list):
    "source -> (left, right) -> sum -> sink"
    source = Source("source")
    left = Add(source, 1, "left")
    right = AddTen(source, "right")
    return Add(Sum(wrap([left, right]), "sum"), 100, "sink")


WRAPS = {
    "list": list,
    "tuple": tuple,
    "namedtuple": lambda x: Pair(*x),
    "dict": lambda x: dict(enumerate(x)),
    "keys": lambda x: {p: 0.5 for p in x},
    "set": set,
    "frozenset": frozenset,
    "deque": lambda x: deque(x, maxlen=2),
    "deep": lambda x: {"a": [(x[0],)], "b": Pair({x[1]}, None)},
    "defaultdict": lambda x: defaultdict(list, a=x),
}
before = [111, 113, 115]  # (i + 1) + (i + 10) + 100


@pytest.fixture(params=WRAPS)
def pipe(request):
    "A diamond, and afterwards the proof that it was left alone."
    pipe = diamond(WRAPS[request.param])
    ids = set(map(id, nodes(pipe)))
    text = str(draw(pipe))
    held = find_one(pipe, Sum).held
    yield pipe
    assert (ids, text) == (set(map(id, nodes(pipe))), str(draw(pipe)))
    assert find_one(pipe, Sum).held is held
    assert list(pipe) == list(pipe) == before


def check(edited, pipe, expected):
    "The edited graph is new, and gives what is expected, here and in a loader."
    assert not set(map(id, nodes(edited))) & set(map(id, nodes(pipe)))
    assert type(find_one(edited, Sum).held) is type(find_one(pipe, Sum).held)
    assert list(edited) == list(edited) == expected
    assert list(DataLoader2(edited)) == expected
    assert list(pickle.loads(pickle.dumps(edited))) == expected
    assert list(pipe) == before


def test_replace(pipe):
    check(replace(pipe, AddTen, lambda old: Add(old.pipe, 20)), pipe, [121, 123, 125])
    check(replace(pipe, AddTen, AddTen), pipe, [121, 123, 125])  # a class wraps the old
    check(replace(pipe, named("left"), Source("new", 2)), pipe, [110, 112])
    check(replace(pipe, named("sink"), lambda old: Add(old.pipe, 0)), pipe, [11, 13, 15])


def test_replace_with_pipe_that_wraps_the_old(pipe):
    source = find_one(pipe, Source)
    edited = replace(pipe, Source, Add(source, 1000, "wrap"))
    check(edited, pipe, [2111, 2113, 2115])
    assert {
        id(p.pipe) for p in find(edited, lambda p: getattr(p, "name", "") in ("left", "right"))
    } == {id(find_one(edited, named("wrap")))}
    check(replace(pipe, named("sink"), Add(pipe, 1)), pipe, [112, 114, 116])


def test_new_pipe_that_holds_originals_gets_their_copies(pipe):
    source = find_one(pipe, Source)
    edited = replace(
        pipe, named("left"), lambda old: Sum([old, source])
    )  # `source` is the original's, by closure
    assert len(find(edited, Source)) == 1
    assert list(edited) == [111, 114, 117]


def test_a_pipe_is_no_function_that_makes_one(pipe):
    for edit in (insert_after, insert_before):
        with pytest.raises(TypeError, match="an edit needs a class or function.*got .*Add"):
            edit(pipe, named("left"), Add(Source("a")))


def test_insert(pipe):
    def make(old):
        return Add(old, 1000)

    check(insert_after(pipe, Source, make), pipe, [2111, 2113, 2115])  # both readers
    check(insert_after(pipe, named("sink"), make), pipe, [1111, 1113, 1115])
    check(insert_before(pipe, AddTen, make), pipe, [1111, 1113, 1115])  # one reader
    check(insert_before(pipe, named("sink"), make), pipe, [1111, 1113, 1115])


def test_remove(pipe):
    check(remove(pipe, named("right")), pipe, [101, 103, 105])
    check(remove(pipe, named("sink")), pipe, [11, 13, 15])
    # both sides gone: the source is held twice, and a pipe counts once among the inputs
    both = remove(remove(pipe, AddTen), named("left"))
    assert inputs(find_one(both, Sum)) == [find_one(both, Source)]


def test_second_input_and_shared_container():
    source = Source("a")
    first = Sum([source, Add(source)], log=source)
    edited = replace(first, Source, Source("b", 1))
    assert edited.held[0] is edited.held[1].pipe is edited.log
    assert edited.log.n == 1 and first.log is source


def test_other_attributes_are_shared():
    log = [1, 2]
    actor = object()
    pipe = Add(Source("a"))
    pipe.log = log
    pipe.actor = actor
    pipe.data = {"x": (1, [2])}
    new = copy_graph(pipe)
    assert new.log is log and new.actor is actor and new.data is pipe.data
    new.extra = 1
    assert "extra" not in vars(pipe)


def test_copies_start_fresh():
    pipe = Add(Source("a"))
    running = iter(pipe)
    assert next(running) == 1
    new = copy_graph(pipe)
    assert not [name for name in vars(new) if name.startswith("_")]
    assert list(new) == [1, 2, 3] and list(copy_graph(pipe)) == [1, 2, 3]
    assert list(running) == [2, 3]  # the copies did not invalidate it
    assert not hasattr(copy_graph(pipe), "nothing_of_that_name")


@pytest.mark.filterwarnings(
    "ignore:Some child DataPipes are not exhausted"
)  # torch's zip stops at the shortest
def test_torch_pipes():
    source = Source("a", 4)
    even, odd = source.demux(2, parity)
    left, right = Mapper(even, double).fork(2)
    pipe = Zipper(left, right, odd)
    assert list(pipe) == [(0, 0, 1), (4, 4, 3)]
    edited = insert_after(pipe, Mapper, lambda old: Add(old, 5))
    assert list(edited) == [(5, 5, 1), (9, 9, 3)]
    edited = replace(edited, Source, Source("b", 6))
    assert list(edited) == [(5, 5, 1), (9, 9, 3), (13, 13, 5)]
    assert list(DataLoader2(edited)) == list(edited)
    assert list(pipe) == [(0, 0, 1), (4, 4, 3)]
    half = iter(pipe)
    next(half)
    assert list(copy_graph(pipe)) == [
        (0, 0, 1),
        (4, 4, 3),
    ]  # from a graph in the midst of an iteration
    assert next(half) == (4, 4, 3)


def parity(x):
    return x % 2


def test_a_copy_of_a_random_pipe_has_its_own_generator():
    pipe = Shuffler(IterableWrapper(range(20)))
    pipe.set_seed(7)
    first = list(copy_graph(pipe))
    assert (
        first == list(copy_graph(pipe)) and sorted(first) == list(range(20)) and first == list(pipe)
    )


class Drawn(IterDataPipe):
    "Draws from the generator that it was made with, as torchdata's `SampleMultiplexer`."

    def __init__(self, pipe):
        self.pipe = pipe
        self.rng = random.Random(0)

    def __iter__(self):
        yield from (self.rng.random() for _ in self.pipe)


def test_a_copy_draws_as_the_original_does_and_changes_nothing_there():
    expected = list(Drawn(Source("a")))
    pipe = Drawn(Source("a"))
    for _ in range(2):
        assert (
            list(copy_graph(pipe))
            == list(insert_after(pipe, Source, lambda old: Mapper(old, double)))
            == expected
        )
    assert list(copy_graph(Lanes(pipe, 2))) == [x for x in expected for _ in range(2)]
    assert list(pipe) == expected


def test_a_copy_that_is_deleted_takes_nothing_from_a_running_pipe():
    pipe = Shuffler(IterableWrapper(range(20)), buffer_size=8)
    items = iter(pipe)
    found = [next(items)]
    copy_graph(pipe)
    assert sorted(found + list(items)) == list(range(20))


def test_singular_verbs_draw_the_graph():
    pipe = diamond()
    for verb in (
        find_one,
        remove,
        lambda *a: replace(*a, Add),
        lambda *a: insert_after(*a, Add),
        lambda *a: insert_before(*a, Add),
    ):
        with pytest.raises(GraphError) as e:
            verb(pipe, Add)
        text = str(e.value)
        assert (
            text.startswith("3 pipes match Add, expected exactly one, in\n")
            and str(draw(pipe, Add)) in text
        )
        assert text.count("<-- here") == 3
        with pytest.raises(GraphError, match="no pipes match Mapper") as e:
            verb(pipe, Mapper)
        assert "AddTen(name='right')" in str(e.value) and "<--" not in str(e.value)


WRONG = {
    "a fork before its end": (
        lambda p: insert_before(p, Sum, Add),
        GraphError,
        "one input, this one has 2",
    ),
    "what reads another": (
        lambda p: insert_before(p, named("sink"), lambda old: Source("x")),
        GraphError,
        "does not read",
    ),
    "the pipe itself": (lambda p: replace(p, Source, p), GraphError, "cycle"),
    "nothing": (lambda p: replace(p, Sum, lambda old: None), TypeError, "expected a pipe"),
    "a list": (lambda p: insert_after(p, Sum, lambda old: [old]), TypeError, "expected a pipe"),
    "a class": (lambda p: replace(p, Sum, lambda old: IterDataPipe), TypeError, "expected a pipe"),
    "a pipe as place": (lambda p: find(p, p), TypeError, "`where` is a class or a predicate"),
    "a drawing of a list": (lambda p: draw([p]), TypeError, "expected a pipe, got list"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_edit_that_cannot_be_leaves_the_graph_alone(name):
    edit, error, text = WRONG[name]
    pipe = diamond()
    with pytest.raises(error, match=text):
        edit(pipe)
    assert list(pipe) == before


def test_cycles():
    a = Add(Source("a"))
    b = Add(Add(a))
    a.pipe = [b]
    for verb in (nodes, draw, copy_graph, lambda p: find(p, Add)):
        with pytest.raises(GraphError, match="cycle"):
            verb(b)
    self_held = Source("a")
    self_held.data = [1]
    self_held.data.append(self_held.data)  # a container that holds itself is no cycle of pipes
    assert nodes(copy_graph(self_held))[0].data is self_held.data


def test_deep_graphs():
    depth = 5 * sys.getrecursionlimit()
    pipe = Source("a")
    for _ in range(depth):
        pipe = Add(pipe, 1)
    assert len(nodes(copy_graph(pipe))) == depth + 1
    assert len(nodes(remove(pipe, lambda p: p is pipe))) == depth
    assert str(draw(pipe)).count("\n") == depth


def test_inputs_agree_with_torch():
    for wrap in WRAPS.values():
        pipe = diamond(wrap)

        def flat(graph):
            return {i for i in graph} | {i for _, sub in graph.values() for i in flat(sub)}

        assert flat(traverse_dps(pipe)) == set(map(id, nodes(pipe)))


# -- random graphs, against an oracle on plain data: a graph is a list of rows of indices of earlier rows ------------


@st.composite
def graphs(draw):
    rows = [[]]
    for i in range(1, draw(st.integers(2, 9))):
        rows.append(draw(st.lists(st.integers(0, i - 1), max_size=3, unique=True)))
    rows.append([i for i in range(len(rows)) if not any(i in row for row in rows)])  # one sink
    wraps = st.sampled_from(
        ["list", "tuple", "dict", "keys", "defaultdict"]
    )  # of any length, and in order
    return rows, draw(st.lists(wraps, min_size=len(rows), max_size=len(rows)))


def build(rows, wraps):
    pipes = []
    for i, row in enumerate(rows):
        pipes.append(Sum(WRAPS[wraps[i]]([pipes[j] for j in row]), i))
    return pipes[-1]


def tree(pipe):
    return (pipe.name, *map(tree, inputs(pipe)))  # the graph unfolded, by the pipes' own attributes


def oracle(rows, i, edit, reader=None):
    "The graph unfolded at row `i`, where `edit(i, subtree, reader)` may answer another; equal inputs count once."
    seen = dict.fromkeys(oracle(rows, j, edit, i) for j in rows[i])
    return edit(i, (i, *seen), reader)


@settings(max_examples=60, deadline=None)
@given(graphs(), st.data())
def test_random_edits(graph, data):
    rows, wraps = graph
    pipe = build(rows, wraps)
    sink = len(rows) - 1
    k = data.draw(st.integers(0, sink))
    original = tree(pipe)
    order = [p.name for p in nodes(pipe)]
    assert sorted(order) == list(range(len(rows)))
    assert all(order.index(j) < order.index(i) for i, row in enumerate(rows) for j in row)
    where = named(k)
    cases = [
        (copy_graph(pipe), lambda i, t, r: t),
        (replace(pipe, where, Sum([], "new")), lambda i, t, r: ("new",) if i == k else t),
        (
            replace(pipe, where, Sum([find_one(pipe, where)], "new")),
            lambda i, t, r: ("new", t) if i == k else t,
        ),
        (
            insert_after(pipe, where, lambda old: Sum({0: old}, "new")),
            lambda i, t, r: ("new", t) if i == k else t,
        ),
    ]
    if len(rows[k]) == 1:
        cases += [
            (remove(pipe, where), lambda i, t, r: t[1] if i == k else t),
            (
                insert_before(pipe, where, lambda o: Sum((o,), "new")),
                lambda i, t, r: ("new", t) if r == k else t,
            ),
        ]
    for edited, edit in cases:
        # pipes of one name are one pipe: sharing is as it was; and where a removal makes two inputs one, it counts once
        assert tree(edited) == oracle(rows, sink, edit)
        names = [p.name for p in nodes(edited)]
        assert len(names) == len(set(names))
        assert not set(map(id, nodes(edited))) & set(map(id, nodes(pipe)))
    assert tree(pipe) == original


@settings(max_examples=40, deadline=None)
@given(graphs())
def test_random_drawings(graph):
    rows, wraps = graph
    drawing = draw(build(rows, wraps))
    lines = str(drawing).splitlines()
    assert sum("↑" not in line for line in lines) == len(rows)  # every pipe is drawn once,
    assert (
        sum("↑" in line for line in lines) == sum(map(len, rows)) - len(rows) + 1
    )  # any other edge is a reference
    for line in lines:
        if "↑" in line:
            assert any(line.split("↑ ")[1] in above for above in lines[: lines.index(line)])
    svg = ElementTree.fromstring(drawing._repr_svg_())
    boxes = [
        tuple(float(r.get(k)) for k in ("x", "y", "width", "height"))
        for r in svg.iter("{http://www.w3.org/2000/svg}rect")
    ]
    assert len(boxes) == len(rows)
    width = float(svg.get("width"))
    height = float(svg.get("height"))
    for i, (x, y, w, h) in enumerate(boxes):
        assert 0 <= x and 0 <= y and x + w <= width and y + h <= height
        for X, Y, W, H in boxes[:i]:
            assert x + w <= X or X + W <= x or y + h <= Y or Y + H <= y, "boxes overlap"


class Same(Pipe):
    def stream(self, items):
        yield from items


class Recursing(Pipe):
    def stream(self, items):
        yield from map(self.deep, items)

    def deep(self, x):
        return self.deep(x)


def test_a_graph_that_is_too_long_for_python():
    "Each pipe takes some calls within one another, of which Python allows a thousand."

    def long(n):
        pipe = IterableWrapper([1, 2])
        for _ in range(n):
            pipe = Same(pipe)
        return pipe

    assert list(DataLoader2(long(100))) == [1, 2]
    for n in (250, 400, 3000):
        for run in (list, lambda pipe: list(DataLoader2(pipe)), lambda pipe: list(Lanes(pipe, 2))):
            with pytest.raises(
                GraphError,
                match=r"too many pipes in a row.*fewer, about \d+, or a larger `sys.setrecursionlimit`",
            ):
                run(long(n))
    with pytest.raises(RecursionError):
        list(Recursing(long(3)))  # the fault of a pipe stays what it is
