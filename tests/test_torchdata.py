"The one door to torchdata: looking at a graph in one thread while another copies, pickles, looks or forks."
import copy
import multiprocessing
import pickle
import threading
from contextlib import contextmanager

import cloudpickle
import pytest
from toys import Counting, Learning

from rollpipe.pipes import EnvStepper, FragmentCollector, Lanes, ProcessReading
from rollpipe.pipes.graph import copy_graph, nodes
from rollpipe.pipes.pipe import Pipe
from rollpipe.pipes.torchdata import DataLoader2, IterableWrapper, IterDataPipe, MapDataPipe, Mapper, traverse_dps


class Times(Pipe):
    def __init__(self, pipe, by=2):
        super().__init__(pipe)
        self.by = by
    def stream(self, items):
        for x in items: yield x * self.by


class Row(MapDataPipe):
    def __init__(self, rows, first=0): self.rows, self.first = rows, first
    def __getitem__(self, k): return self.rows[k] + self.first
    def __len__(self): return len(self.rows)


class Waiting(list):
    "Whoever pickles this stops in the middle until it is let go."
    def __reduce_ex__(self, protocol):
        begun.set()
        assert let_go.wait(30)
        return list, ()


class Looked(IterDataPipe):
    "torch looks at it for as long as `Waiting` waits."
    def __init__(self): self.source, self.waiting, self.also = IterableWrapper([1]), Waiting(), Mapper(IterableWrapper([1]), abs)


begun, let_go = threading.Event(), threading.Event()


@contextmanager
def another_thread_looks_at_a_graph():
    begun.clear()
    let_go.clear()
    found = []
    thread = threading.Thread(target=lambda: found.append(traverse_dps(Looked())))
    thread.start()
    try:
        assert begun.wait(30)
        yield
    finally:
        let_go.set()
        thread.join()
    (_, sources), = found[0].values()
    assert [type(p).__name__ for p, _ in sources.values()] == ["IterableWrapperIterDataPipe", "MapperIterDataPipe"], "its walk is whole"


def pipes(): return Times(Mapper(Times(IterableWrapper([1, 2, 3]), by=5), abs)), Mapper(Times(IterableWrapper([1, 2, 3]), by=10), abs)


COPIES = dict(
    pickle=lambda p: pickle.loads(pickle.dumps(p)), cloudpickle=lambda p: pickle.loads(cloudpickle.dumps(p)),
    deepcopy=copy.deepcopy, copy=copy.copy, copy_graph=copy_graph, loader=lambda p: DataLoader2(p).datapipe,
)


@pytest.mark.parametrize("how", COPIES)
def test_copies_are_whole_while_another_thread_looks_at_a_graph(how):
    for pipe in pipes():
        with another_thread_looks_at_a_graph(): made = COPIES[how](pipe)
        assert [type(p) for p in nodes(made)] == [type(p) for p in nodes(pipe)]
        assert list(made) == [10, 20, 30]
    with another_thread_looks_at_a_graph(): rows = pickle.loads(pickle.dumps(Row([1, 2], first=5)))
    assert rows[1] == 7


def test_two_threads_look_at_graphs_at_the_same_time():
    def shape(graph): return [(type(p).__name__, shape(above)) for p, above in graph.values()]
    for pipe in pipes():
        with another_thread_looks_at_a_graph(): found = traverse_dps(pipe)
        assert shape(found) == shape(traverse_dps(pipe)) and len(shape(found)[0][1]) == 1


def test_a_process_that_is_forked_meanwhile_pickles_as_ever():
    def child(link): link.send_bytes(pickle.dumps(pipes()[0]))
    link, theirs = multiprocessing.Pipe()
    with another_thread_looks_at_a_graph():
        process = multiprocessing.get_context("fork").Process(target=child, args=(theirs,))
        process.start()
        assert link.poll(30)
        assert list(pickle.loads(link.recv_bytes())) == [10, 20, 30]
    process.join()


def test_looking_at_a_graph_leaves_no_hooks_behind():
    class Broken(list):
        def __reduce_ex__(self, protocol): raise ValueError("no")
    pipe = Looked()
    pipe.waiting = Broken()
    with pytest.raises(ValueError, match="no"): traverse_dps(pipe)
    for cls in (IterDataPipe, MapDataPipe): assert cls.reduce_ex_hook is None and cls.getstate_hook is None
    for made in (pickle.loads(pickle.dumps(p)) for p in pipes()): assert list(made) == [10, 20, 30]


@pytest.mark.parametrize("start_method", ["spawn", "fork"])
def test_workers_start_whole_while_another_thread_looks_at_a_graph(start_method):
    pipe = Lanes(FragmentCollector(EnvStepper(Counting, Learning(), 2), 3), 2, seed=0)
    with DataLoader2(pipe, reading_service=ProcessReading(2, start_method=start_method)) as loader, another_thread_looks_at_a_graph():
        assert next(iter(loader)).valid.shape == (3, 2)
