"One suite for the loader of torchdata and for our own, which takes its place where torchdata has none; and the seeds that they give."

import gc
import os
import pickle
import subprocess
import sys
import warnings
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import assert_same, snapshot
from torch.utils.data.datapipes.iter import ShardingFilter, Zipper
from toys import Lively, Shaky

from rollpipe.pipes import EnvStepper, FragmentCollector, Lanes, ProcessReading
from rollpipe.pipes.graph import torchdata
from rollpipe.pipes.graph.edits import nodes
from rollpipe.pipes.loading import loader as own
from rollpipe.pipes.loading.datapipes import IterableWrapper, IterDataPipe, MapDataPipe, Mapper
from rollpipe.pipes.loading.loader import SeedGenerator, SeedStream, philox

ROOT = Path(__file__).parents[1]
NAMES = "DataLoader2", "InProcessReadingService", "ReadingServiceInterface", "set_graph_random_seed"


def loader_of(which):
    "The four names, from torchdata or from our own loader."
    if which == "own":
        return SimpleNamespace(
            **{name: getattr(own, name) for name in NAMES}, SeedGenerator=SeedGenerator
        )
    pytest.importorskip("torchdata.dataloader2", reason="torchdata has no loader here")
    from torchdata.dataloader2.random import SeedGenerator as theirs

    return SimpleNamespace(
        **{name: getattr(torchdata, name) for name in NAMES}, SeedGenerator=theirs
    )


@pytest.fixture(params=["torchdata", "own"])
def lib(request):
    return loader_of(request.param)


@pytest.fixture
def both():
    return loader_of("torchdata"), loader_of("own")


# --- toys


class Noted(IterDataPipe):
    "Tells what happens to it, in a list of the module: a pipe is copied."

    def __init__(self, n=4, fails=None, interrupted=None):
        self.n = n
        self.fails = fails
        self.interrupted = interrupted

    def set_seed(self, seed):
        notes.append(f"seed {seed}")

    def pause(self):
        notes.append("pause")

    def resume(self):
        notes.append("resume")

    def __iter__(self):
        try:
            for k in range(self.n):
                if k == self.interrupted:
                    raise KeyboardInterrupt
                if k == self.fails:
                    raise ValueError(f"no item {k}")
                yield k
        finally:
            notes.append("closed")


class Random(IterDataPipe):
    def __init__(self, *sources):
        self.sources, self.seed = sources, None

    def set_seed(self, seed):
        self.seed = seed

    def __iter__(self):
        yield self.seed


class Row(MapDataPipe):
    def __init__(self, rows):
        self.rows = rows

    def __getitem__(self, k):
        return self.rows[k]

    def __len__(self):
        return len(self.rows)


class Service:
    "A reading service that notes each call; `changes` says which optional verbs it has."

    def initialize(self, datapipe):
        notes.append("initialize")
        return Mapper(datapipe, abs)

    def initialize_iteration(self, seed_generator, iter_reset_fn=None):
        notes.append(f"begin {seed_generator.generate_seed()}")

    def finalize_iteration(self):
        notes.append("end")

    def finalize(self):
        notes.append("finalize")


class Halting(Service):
    def _pause(self, pause_fn=None):
        notes.append("pause")

    def _resume(self, resume_fn=None):
        notes.append("resume")

    def _limit(self, num_batches, limit_fn=None):
        notes.append(f"limit {num_batches}")


class Changing(Halting):
    "Gives the loader a function that changes the graph, at each occasion."

    def initialize_iteration(self, seed_generator, iter_reset_fn=None):
        return add_ten

    def _pause(self, pause_fn=None):
        return add_ten

    def _resume(self, resume_fn=None):
        return add_ten


def add_ten(pipe):
    return Mapper(pipe, plus_ten)


def plus_ten(x):
    return x + 10


notes = []


@pytest.fixture(autouse=True)
def no_notes():
    notes.clear()


# --- what a loader does


def test_a_loader_has_a_copy_of_the_graph_and_of_the_service(lib):
    pipe = Random()
    service = lib.InProcessReadingService()
    with lib.DataLoader2(pipe, reading_service=service) as loader:
        assert loader.datapipe is not pipe and loader.reading_service is not service
        assert [type(x) for x in loader] == [int] and pipe.seed is None
    assert list(lib.DataLoader2(Row([5, 6, 7]))) == [5, 6, 7]
    assert (
        list(lib.DataLoader2(IterableWrapper([1]), [add_ten, add_ten]))
        == list(lib.DataLoader2(IterableWrapper([11]), add_ten))
        == [21]
    )


def test_what_cannot_be_pickled_says_so(lib):
    with pytest.raises((pickle.PicklingError, AttributeError, TypeError), match="pickle|local"):
        lib.DataLoader2(IterableWrapper([lambda: 1], deepcopy=False))


def test_the_calls_of_a_life(lib):
    "Two iterations, the first left early, and the end; the verbs come in this order."
    with lib.DataLoader2(Noted(2), reading_service=Service()) as loader:
        loader.seed(3)
        assert next(iter(loader)) == 0 and list(loader) == [0, 1]
        notes.append("out")
    generator = SeedGenerator(3)
    first = generator.generate_seed()
    second = generator.generate_seed()
    assert notes == [
        "initialize",
        f"begin {first}",
        f"begin {second}",
        "closed",
        "closed",
        "end",
        "out",
        "end",
        "finalize",
    ]
    loader.shutdown()
    assert notes[-2:] == ["end", "finalize"] and len(notes) == 9
    with pytest.raises(RuntimeError, match="shut down"):
        iter(loader)


def test_a_loader_that_is_shut_down_says_how_to_go_on():
    loader = torchdata.DataLoader2(IterableWrapper([1]))
    loader.shutdown()
    with pytest.raises(RuntimeError, match="shut down.* Make a new `DataLoader2` of the same pipe"):
        iter(loader)


def test_an_iteration_begins_when_the_last_one_was_read(lib):
    "As long as nobody has read from an iteration, `iter` goes on with it."
    loader = lib.DataLoader2(Noted(2), reading_service=Service())
    iter(loader), iter(loader)
    assert [n.split()[0] for n in notes] == ["initialize", "begin"]
    assert list(loader) == [0, 1] and [n.split()[0] for n in notes] == [
        "initialize",
        "begin",
        "closed",
        "end",
    ]
    assert list(loader) == [0, 1] and [n.split()[0] for n in notes[4:]] == [
        "begin",
        "closed",
        "end",
    ]


def test_one_iterator_at_a_time(lib):
    loader = lib.DataLoader2(IterableWrapper([1, 2, 3]), reading_service=Service())
    old = iter(loader)
    assert next(old) == 1
    new = iter(loader)
    with pytest.raises(RuntimeError, match="invalidated"):
        next(old)
    assert notes[-1] == "end" and list(new) == [1, 2, 3]


@pytest.mark.parametrize("service", [None, Service])
def test_an_error_shuts_the_loader_down(lib, service):
    loader = lib.DataLoader2(Noted(fails=2), reading_service=service and service())
    stream = iter(loader)
    assert [next(stream), next(stream)] == [0, 1]
    with pytest.raises(ValueError, match="no item 2"):
        next(stream)
    assert service is None or notes[-2:] == ["end", "finalize"]
    with pytest.raises(RuntimeError, match="shut down"):
        iter(loader)


def test_an_interrupt_does_not(lib):
    loader = lib.DataLoader2(Noted(interrupted=1), reading_service=Service())
    stream = iter(loader)
    assert next(stream) == 0
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    assert notes[-1] == "closed" and next(iter(loader)) == 0


def test_the_end_releases_a_stream_that_was_left(lib):
    with lib.DataLoader2(Noted()) as loader:
        stream = iter(loader)
        assert next(stream) == 0 and notes == []
    assert notes == ["closed"]
    assert next(stream, "the end") == "the end"
    loader = lib.DataLoader2(Noted())
    assert next(iter(loader)) == 0
    gc.disable()
    try:
        del loader
        assert notes == ["closed"] * 2, "nothing but the user's name held it"
    finally:
        gc.enable()


@pytest.mark.parametrize("service", [None, Service])
def test_a_shutdown_within_the_loop_ends_it(lib, service):
    loader = lib.DataLoader2(Noted(), reading_service=service and service())
    found = []
    for x in loader:
        found.append(x)
        if x == 1:
            loader.shutdown()
    assert found == [0, 1] and "closed" in notes


def test_a_constructor_that_fails_leaves_nothing_to_end(lib):
    class Refuses(IterDataPipe):
        def __reduce_ex__(self, protocol):
            raise RuntimeError("not me")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError, match="not me"):
            lib.DataLoader2(Refuses())
        gc.collect()


# --- limit, pause and resume


def test_limit_pause_and_resume(lib):
    with lib.DataLoader2(Noted(9), reading_service=Halting()) as loader:
        stream = iter(loader)
        assert next(stream) == 0
        stream.limit(2)
        found = [list(stream), list(stream)]
        stream.resume()
        found.append(list(stream))
        stream.resume()
        stream.limit(None)
        found.append(list(islice(stream, 2)))
        stream._pause()
        found.append(list(stream))
        stream.resume()
        found.append(list(stream))
    assert found == [[1, 2], [], [3, 4], [5, 6], [], [7, 8]]
    assert notes[2:10] == [
        "limit 2",
        "pause",
        "resume",
        "pause",
        "resume",
        "limit None",
        "pause",
        "resume",
    ]
    assert notes[10:] == ["closed", "end", "end", "finalize"]


def test_a_pause_tells_the_pipes_of_this_process(lib):
    with lib.DataLoader2(
        Mapper(Noted(), abs), reading_service=lib.InProcessReadingService()
    ) as loader:
        loader.seed(0)
        stream = iter(loader)
        stream.limit(1)
        assert list(stream) == [0]
        stream.resume()
        stream.limit(None)
        assert list(stream) == [1, 2, 3]
    assert notes == [f"seed {SeedGenerator(0).generate_seed()}", "pause", "resume", "closed"]


@pytest.mark.parametrize("service", [None, Service])
def test_a_service_that_cannot_pause_is_told_of(lib, service):
    with lib.DataLoader2(
        IterableWrapper([1, 2, 3]), reading_service=service and service()
    ) as loader:
        stream = iter(loader)
        for name, act in {
            "limit": lambda: stream.limit(2),
            "pause": stream._pause,
            "resume": stream.resume,
        }.items():
            with pytest.warns(UserWarning, match=name):
                act()
        with pytest.warns(UserWarning, match="pause"):
            assert list(stream) == [1, 2, 3]


def test_resume_without_a_pause_is_told_of(lib):
    with lib.DataLoader2(IterableWrapper([1]), reading_service=Halting()) as loader:
        with pytest.warns(UserWarning, match="not paused"):
            iter(loader).resume()
    assert "resume" not in notes


def test_a_service_may_change_the_graph_for_an_iteration(lib):
    with lib.DataLoader2(IterableWrapper([1, 2]), reading_service=Changing()) as loader:
        assert [list(loader), list(loader)] == [[11, 12], [21, 22]]
        stream = iter(loader)
        stream._pause()
        stream.resume()
        assert list(stream) == [31, 32] and list(loader) == [61, 62]


def test_the_iterator_passes_attributes_on(lib):
    class Told(IterDataPipe):
        def __iter__(self):
            return Telling()

    loader = lib.DataLoader2(IterableWrapper([1]))
    loader.datapipe = Told()
    stream = iter(loader)
    assert stream.told == 5
    assert not hasattr(stream, "other")


class Telling:
    told = 5

    def __iter__(self):
        return self

    def __next__(self):
        raise StopIteration


# --- seeds


def test_philox_is_what_its_authors_publish():
    "The known answers of Random123 1.09, `tests/kat_vectors`, for philox4x32 with 10 rounds."
    for line in (
        "00000000 00000000 00000000 00000000 00000000 00000000 6627e8d5 e169c58d bc57ac4c 9b00dbd8",
        "ffffffff ffffffff ffffffff ffffffff ffffffff ffffffff 408f276d 41c83b0e a20bc7c6 6d5451fd",
        "243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0 d16cfe09 94fdcceb 5001e420 24126ea1",
    ):
        words = tuple(int(word, 16) for word in line.split())
        assert philox(words[4:6], words[:4]) == words[6:]


@given(
    st.integers(-(2**63), 2**64 - 1),
    st.integers(0, 2**40),
    st.lists(st.sampled_from(["shared", "own", "spawn", "inplace", "pickle"]), max_size=12),
)
def test_generators_give_the_same_numbers(seed, worker, calls):
    "Whatever is asked, in whatever order."
    pytest.importorskip("torchdata.dataloader2", reason="torchdata has no loader here")
    from torchdata.dataloader2.random import SeedGenerator as Theirs

    generators = [Theirs(seed), SeedGenerator(seed)]
    found = [[], []]
    for call in calls:
        for k, g in enumerate(generators):
            if call == "spawn":
                generators[k] = g.spawn(worker)
            elif call == "inplace":
                assert g.spawn(worker, inplace=True) is g
            elif call == "pickle":
                generators[k] = pickle.loads(pickle.dumps(g))
            else:
                found[k].append(g.generate_shared_seed() if call == "shared" else g.generate_seed())
    for k, g in enumerate(generators):
        found[k] += [
            g.generate_shared_seed(),
            g.generate_seed(),
            g.generate_seed(),
            g.generate_seed(),
        ]
    assert found[0] == found[1]


def test_the_numbers_of_a_seed_stay_as_they_are():
    "As torchdata 0.9 gives them: so they are checked where it is missing, too."
    stream = SeedStream(123)
    assert [stream.generate() for _ in range(3)] == [
        9025247384375923790,
        16000952678483384606,
        4620172586781465253,
    ]
    assert stream.spawn(5).generate() == 5981684171022569597


@pytest.mark.parametrize(
    "bad",
    [
        lambda lib: lib.SeedGenerator(2**64),
        lambda lib: lib.SeedGenerator(0).spawn(-1),
        lambda lib: lib.DataLoader2(IterableWrapper([1])).seed(2**64),
    ],
)
def test_seeds_out_of_range(lib, bad):
    with pytest.raises(ValueError, match="18446744073709551616|-1"):
        bad(lib)


def test_without_a_seed_it_comes_from_torchs_generator(lib):
    state = torch.get_rng_state()
    a, b = (lib.SeedGenerator().generate_seed() for _ in range(2))
    assert a == b and torch.equal(torch.get_rng_state(), state)
    loader = lib.DataLoader2(Random(), reading_service=lib.InProcessReadingService())
    assert (
        list(loader)
        == list(loader)
        == list(lib.DataLoader2(Random(), reading_service=lib.InProcessReadingService()))
        == [a]
    )
    torch.randn(1)
    assert lib.SeedGenerator().generate_seed() != a != next(iter(loader))


def branches():
    "A diamond, a pipe that two read, and a filter that divides the items among workers."
    source = Random(IterableWrapper([1]))
    left = Random(Random(source))
    right = Random(source, Random(ShardingFilter(Random(source))))
    return Random(Zipper(left, right), [Random(), {"more": Random()}], left)


def test_random_pipes_get_the_same_seeds(both):
    found = []
    for lib in both:
        loader = lib.DataLoader2(branches(), reading_service=lib.InProcessReadingService())
        loader.seed(11)
        found.append([])
        for _ in range(3):
            found[-1] += [*loader, seeds_of(loader.datapipe)]
        loader.seed(12)
        found[-1] += [*loader, seeds_of(loader.datapipe)]
    assert found[0] == found[1] and len({s for s in found[0] if isinstance(s, int)}) == 4


def seeds_of(pipe):
    seeds = [p.seed for p in nodes(pipe) if isinstance(p, Random)]
    assert None not in seeds
    return seeds


# --- pipelines


def lanes(n=3):
    return Lanes(FragmentCollector(EnvStepper(Lively, Shaky(), 2), 3), n)


@pytest.mark.parametrize("workers", [None, 0, 1, 2])
def test_a_pipeline_is_the_same_under_both(both, workers):
    found = []
    for lib in both:
        service = lib.InProcessReadingService() if workers is None else ProcessReading(workers)
        with lib.DataLoader2(lanes(), reading_service=service) as loader:
            loader.seed(5)
            found.append(
                [snapshot(f) for f in islice(loader, 7)] + [snapshot(f) for f in islice(loader, 4)]
            )
    assert_same(*found)


# --- the choice

CHOICE = """
import sys, types, warnings
warnings.simplefilter("error")
if sys.argv[1] == "missing": sys.modules["torchdata"] = None
if sys.argv[1] == "without a loader": sys.modules["torchdata"] = types.ModuleType("torchdata"); sys.modules["torchdata"].__path__ = []
if sys.argv[1] == "broken":
    sys.modules["torchdata"] = types.ModuleType("torchdata"); sys.modules["torchdata"].__path__ = []
    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name == "torchdata.dataloader2": raise ModuleNotFoundError("No module named 'requests'", name="requests")
    sys.meta_path.insert(0, Finder())
from rollpipe.pipes import DataLoader2, ProcessReading
from rollpipe.pipes.graph.torchdata import ReadingServiceInterface
print(DataLoader2.__module__, isinstance(ProcessReading(1), ReadingServiceInterface))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "state, told",
    {
        "missing": "rollpipe.pipes.loading.loader True\n",
        "without a loader": "rollpipe.pipes.loading.loader True\n",
        "broken": "No module named 'requests'",
    }.items(),
)
def test_ours_is_chosen_where_torchdata_has_none(state, told):
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    done = subprocess.run(
        [sys.executable, "-c", CHOICE, state], env=env, capture_output=True, text=True, timeout=120
    )
    assert (
        (done.stdout == told and not done.stderr)
        if "True" in told
        else (done.returncode and told in done.stderr)
    ), done.stderr
