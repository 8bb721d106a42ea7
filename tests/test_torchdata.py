"The one door to torchdata: looking at a graph in one thread while another copies, pickles, looks or forks."

import copy
import gc
import multiprocessing
import pickle
import threading
import warnings
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import cloudpickle
import pytest
import torch
from forked import run_forked
from reference import assert_same, snapshot
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from toys import Counting, Learning, Lively, Shaky

from rollpipe.pipes import (
    AdvantageBuffer,
    EnvStepper,
    FragmentCollector,
    FragmentStacker,
    GraphError,
    Lanes,
    Minibatcher,
    ProcessReading,
)
from rollpipe.pipes.graph.edits import copy_graph, nodes
from rollpipe.pipes.graph.pipe import Pipe
from rollpipe.pipes.graph.torchdata import (
    DataLoader2,
    IterableWrapper,
    IterDataPipe,
    MapDataPipe,
    Mapper,
    traverse_dps,
)

try:
    from torchdata.dataloader2 import MultiProcessingReadingService, SequentialReadingService
    from torchdata.dataloader2.graph import find_dps, remove_dp, replace_dp

    there = True
except ModuleNotFoundError:
    there = False

needs_torchdata = pytest.mark.skipif(not there, reason="torchdata has no loader here")
SERVICES = ["torch", pytest.param("torchdata", marks=needs_torchdata)]

HERE = Path(__file__).parent


def judge_zero(obs):
    return torch.zeros(obs.shape[:-1])


class Times(Pipe):
    def __init__(self, pipe, by=2):
        super().__init__(pipe)
        self.by = by

    def stream(self, items):
        for x in items:
            yield x * self.by


class Row(MapDataPipe):
    def __init__(self, rows, first=0):
        self.rows, self.first = rows, first

    def __getitem__(self, k):
        return self.rows[k] + self.first

    def __len__(self):
        return len(self.rows)


class Waiting(list):
    "Whoever pickles this stops in the middle until it is let go."

    def __reduce_ex__(self, protocol):
        begun.set()
        assert let_go.wait(30)
        return list, ()


class Looked(IterDataPipe):
    "torch looks at it for as long as `Waiting` waits."

    def __init__(self):
        self.source = IterableWrapper([1])
        self.waiting = Waiting()
        self.also = Mapper(IterableWrapper([1]), abs)


begun = threading.Event()
let_go = threading.Event()


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
    ((_, sources),) = found[0].values()
    assert [type(p).__name__ for p, _ in sources.values()] == [
        "IterableWrapperIterDataPipe",
        "MapperIterDataPipe",
    ], "its walk is whole"


def pipes():
    return Times(Mapper(Times(IterableWrapper([1, 2, 3]), by=5), abs)), Mapper(
        Times(IterableWrapper([1, 2, 3]), by=10), abs
    )


COPIES = dict(
    pickle=lambda p: pickle.loads(pickle.dumps(p)),
    cloudpickle=lambda p: pickle.loads(cloudpickle.dumps(p)),
    deepcopy=copy.deepcopy,
    copy=copy.copy,
    copy_graph=copy_graph,
    loader=lambda p: DataLoader2(p).datapipe,
)


@pytest.mark.parametrize("how", COPIES)
def test_copies_are_whole_while_another_thread_looks_at_a_graph(how):
    for pipe in pipes():
        with another_thread_looks_at_a_graph():
            made = COPIES[how](pipe)
        assert [type(p) for p in nodes(made)] == [type(p) for p in nodes(pipe)]
        assert list(made) == [10, 20, 30]
    with another_thread_looks_at_a_graph():
        rows = pickle.loads(pickle.dumps(Row([1, 2], first=5)))
    assert rows[1] == 7


def test_two_threads_look_at_graphs_at_the_same_time():
    def shape(graph):
        return [(type(p).__name__, shape(above)) for p, above in graph.values()]

    for pipe in pipes():
        with another_thread_looks_at_a_graph():
            found = traverse_dps(pipe)
        assert shape(found) == shape(traverse_dps(pipe)) and len(shape(found)[0][1]) == 1


def test_a_process_that_is_forked_meanwhile_pickles_as_ever():
    def child(link):
        link.send_bytes(pickle.dumps(pipes()[0]))

    link, theirs = multiprocessing.Pipe()
    with another_thread_looks_at_a_graph():
        process = multiprocessing.get_context("fork").Process(target=child, args=(theirs,))
        process.start()
        assert link.poll(30)
        assert list(pickle.loads(link.recv_bytes())) == [10, 20, 30]
    process.join()


def test_looking_at_a_graph_leaves_no_hooks_behind():
    class Broken(list):
        def __reduce_ex__(self, protocol):
            raise ValueError("no")

    pipe = Looked()
    pipe.waiting = Broken()
    with pytest.raises(ValueError, match="no"):
        traverse_dps(pipe)
    for cls in (IterDataPipe, MapDataPipe):
        assert cls.reduce_ex_hook is None and cls.getstate_hook is None
    for made in (pickle.loads(pickle.dumps(p)) for p in pipes()):
        assert list(made) == [10, 20, 30]


@pytest.mark.parametrize("start_method", ["forkserver", "fork"])
def test_workers_start_whole_while_another_thread_looks_at_a_graph(start_method):
    pipe = Lanes(FragmentCollector(EnvStepper(Counting, Learning(), 2), 3), 2, seed=0)
    with (
        DataLoader2(pipe, reading_service=ProcessReading(2, start_method=start_method)) as loader,
        another_thread_looks_at_a_graph(),
    ):
        assert next(iter(loader)).valid.shape == (3, 2)


# --- the loaders of torch and torchdata


def collect(n_lanes=4, seed=0):
    return Lanes(FragmentCollector(EnvStepper(Lively, Shaky(), 2), 3), n_lanes, seed)


def per_lane(fragments):
    "lane -> its fragments"
    found = {}
    for f in fragments:
        found.setdefault(int(f.lane[0]), []).append(snapshot(f))
    return found


def torch_loader(pipe, n):
    return torch.utils.data.DataLoader(pipe, batch_size=None, num_workers=n)


@contextmanager
def torchdata_loader(pipe, n):
    "Without reading ahead in this process: torchdata's `shutdown` may hang while its thread reads an endless stream."
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # in the workers, too: they are forked
        loader = DataLoader2(
            pipe, reading_service=MultiProcessingReadingService(n, main_prefetch_cnt=0)
        )
        loader.seed(3)
        try:
            yield loader
        finally:
            loader.shutdown()


@pytest.fixture
def unheard():
    "torch's workers warn that weights do not reach them."
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def assert_part_of(found, expected):
    "Each lane gives its own first fragments."
    for lane, fragments in found.items():
        assert_same(fragments, expected[lane][: len(fragments)])


@pytest.mark.parametrize("service", [None, ProcessReading(0)])
def test_a_seed_of_the_loader_reaches_the_lanes(service):
    with DataLoader2(collect(2, None), reading_service=service) as loader:
        loader.seed(3)
        first, second, third = [list(islice(loader, 2)) for _ in range(3)]
        loader.seed(3)
        assert_same(list(islice(loader, 2)), first)
    with DataLoader2(collect(2, None), reading_service=ProcessReading(1)) as loader:
        loader.seed(3)
        assert_same(list(islice(loader, 2)), first)
        assert_same(list(islice(loader, 2)), second)
    assert not torch.equal(second[0].state.obs, third[0].state.obs)


@pytest.mark.slow_but_one
@pytest.mark.parametrize("n_workers, n_lanes", [(0, 2), (1, 2), (2, 1), (2, 4), (2, 3), (3, 5)])
def test_torchs_workers_divide_the_lanes(n_workers, n_lanes, unheard):
    expected = per_lane(islice(collect(n_lanes), 24 * n_lanes))
    found = list(islice(torch_loader(collect(n_lanes), n_workers), 12))
    told = [(int(f.lane[0]), int(f.seq[0])) for f in found]
    assert len(set(told)) == 12, "nothing comes twice"
    assert_part_of(per_lane(found), expected)
    if n_lanes % max(1, n_workers) == 0:
        assert told == [(k % n_lanes, k // n_lanes) for k in range(12)], "the serial stream"


@pytest.mark.slow_but_one
@needs_torchdata
@pytest.mark.parametrize("n_workers, n_lanes", [(1, 2), (2, 4), (2, 3)])
def test_the_workers_of_torchdata_divide_the_lanes(n_workers, n_lanes):
    expected = per_lane(islice(collect(n_lanes), 24 * n_lanes))
    with torchdata_loader(collect(n_lanes), n_workers) as loader:
        found = list(islice(loader, 12))
    assert len({(int(f.lane[0]), int(f.seq[0])) for f in found}) == 12
    assert_part_of(per_lane(found), expected)


@pytest.mark.parametrize("service", SERVICES)
def test_without_a_seed_no_two_lanes_are_alike(service, unheard):
    pipe = collect(4, seed=None)
    if service == "torch":
        found = list(islice(torch_loader(pipe, 2), 8))
    else:
        with torchdata_loader(pipe, 2) as loader:
            found = list(islice(loader, 8))
    assert len({tuple(f.state.obs[:, b].ravel().tolist()) for f in found for b in range(2)}) == 16


@pytest.mark.slow
@pytest.mark.parametrize("service", SERVICES)
def test_a_graph_without_lanes_is_refused_where_all_workers_would_collect_the_same(
    service, unheard
):
    pipe = FragmentCollector(EnvStepper(Lively, Shaky(), seed=1), 3)
    for n in (0, 1):
        assert next(iter(torch_loader(pipe, n))).valid.shape == (3, 1)
    with pytest.raises(
        RuntimeError, match="EnvStepper.*2 processes would collect the same.*Expected `Lanes`"
    ):
        if service == "torch":
            next(iter(torch_loader(pipe, 2)))
        else:
            with torchdata_loader(pipe, 2) as loader:
                next(iter(loader))
    gc.collect()  # torch's loader ends its workers when it is collected


WARNS = """
import sys, warnings
from itertools import islice
from test_torchdata import *
from rollpipe.layers import CategoricalPolicy
warnings.simplefilter("default")
which, pipe = sys.argv[1], Lanes(FragmentCollector(EnvStepper("CartPole-v1", CategoricalPolicy.for_env("CartPole-v1"), 2), 3), 4)
if which == "torch": print(len(list(islice(torch_loader(pipe, 2), 8))))
if which == "in one process": print(len(list(islice(torch_loader(pipe, 0), 8))))
if which == "torchdata":
    loader = DataLoader2(pipe, reading_service=MultiProcessingReadingService(2, main_prefetch_cnt=0))
    print(len(list(islice(loader, 8))))
    loader.shutdown()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "which, times",
    [("torch", 1), pytest.param("torchdata", 1, marks=needs_torchdata), ("in one process", 0)],
)
def test_it_is_told_once_that_weights_do_not_reach_torchs_workers(which, times):
    done = run_forked(["-c", WARNS, which], cwd=HERE)
    assert (done.returncode, done.stdout) == (0, "8\n"), done.stderr
    assert done.stderr.count("`ProcessReading`") == times, done.stderr


def test_divisions_add_up():
    "First among machines, then among the workers of each."
    found = []
    for rank in range(2):
        for worker in range(3):
            lanes = collect(12)
            lanes.apply_sharding(3, worker, SHARDING_PRIORITIES.MULTIPROCESSING)
            lanes.apply_sharding(2, rank, SHARDING_PRIORITIES.DISTRIBUTED)
            found.append(list(lanes.own_lanes()))
            copied = pickle.loads(pickle.dumps(copy_graph(lanes)))
            assert copied.own_lanes() == lanes.own_lanes() and collect(12).own_lanes() == range(12)
    assert found == [[0, 3], [1, 4], [2, 5], [6, 9], [7, 10], [8, 11]]
    with_none = collect(12)
    with_none.apply_sharding(3, 1)
    with_none.apply_sharding(2, 1, SHARDING_PRIORITIES.DISTRIBUTED)
    assert list(with_none.own_lanes()) == [7, 10], "machines first, whatever the priorities are"
    pipe = ProcessReading(2).initialize(lanes)
    with pytest.raises(
        GraphError, match="WorkerLanes: the lanes are divided among processes already"
    ):
        next(iter(pipe))


def test_torchs_loader_does_not_divide_the_lanes_of_a_machine_again():
    "With a process group, it would divide them among the same ranks, and lanes would be lost."
    divided = collect(4)
    divided.divide(2, 1)
    assert {int(f.lane[0]) for f in islice(torch_loader(divided, 0), 4)} == {2, 3}
    with pytest.raises(GraphError, match="divided among machines already"):
        divided.apply_sharding(2, 1, SHARDING_PRIORITIES.DEFAULT)
    assert list(divided.own_lanes()) == [2, 3]
    with pytest.raises(GraphError, match="divided among machines already"):
        next(iter(torch_loader(divided, 2)))
    gc.collect()  # torch's loader ends its workers when it is collected
    by_torch = collect(4)
    by_torch.apply_sharding(4, 1, SHARDING_PRIORITIES.DEFAULT)
    with pytest.raises(GraphError, match="divided among machines already"):
        by_torch.divide(2, 1)


@pytest.mark.slow_but_one
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("order", ["canonical", "ready"])
def test_workers_collect_the_lanes_of_their_machine(rank, order):
    def divided():
        pipe = collect(5)
        pipe.apply_sharding(2, rank, SHARDING_PRIORITIES.DISTRIBUTED)
        return pipe

    expected = [snapshot(f) for f in islice(divided(), 9)]
    with DataLoader2(divided(), reading_service=ProcessReading(2, order=order)) as loader:
        found = [snapshot(f) for f in islice(loader, 9)]
        assert {record.lane for record in loader.reading_service.records} == set(
            divided().own_lanes()
        )
    if order == "canonical":
        assert_same(found, expected)


@needs_torchdata
def test_reading_services_in_a_row():
    expected = [snapshot(f) for f in islice(collect(), 8)]
    with DataLoader2(
        collect(), reading_service=SequentialReadingService(ProcessReading(2))
    ) as loader:
        stream = iter(loader)
        assert_same([snapshot(next(stream)) for _ in range(2)], expected[:2])
        loader._pause()
        assert list(stream) == []
        loader._resume()
        assert_same([snapshot(next(stream)) for _ in range(2)], expected[2:4])
        stream.limit(2)
        assert_same([snapshot(f) for f in stream], expected[4:6])
        stream.resume()
        assert_same([snapshot(f) for f in stream], expected[6:8])


@needs_torchdata
def test_the_graph_tools_of_torchdata():
    pipe = FragmentStacker(AdvantageBuffer(collect(), judge_zero), 2)
    graph = traverse_dps(pipe)
    [lanes] = find_dps(graph, Lanes)
    [stepper] = find_dps(graph, EnvStepper)
    assert (
        lanes is pipe.pipe.pipe
        and lanes.pipe.pipe is stepper
        and find_dps(graph, Minibatcher) == []
    )
    expected = [snapshot(f) for f in islice(FragmentStacker(collect(), 2), 2)]
    graph = remove_dp(graph, pipe.pipe)  # these tools change the graph in place
    assert [type(p) for p in nodes(pipe)] == [EnvStepper, FragmentCollector, Lanes, FragmentStacker]
    assert_same([snapshot(f) for f in islice(pipe, 2)], expected)
    graph = replace_dp(graph, lanes, two := Lanes(lanes.pipe, 2, seed=7))
    assert find_dps(graph, Lanes) == [two] and next(iter(pipe)).lane.tolist() == [0, 0, 1, 1]
