"""`ProcessReading`: the stream does not depend on who collects it; lag, order and memory as promised; a loader's whole life.

What a reading service for a cluster promises as well is in `test_contract.py`, and `test_local_crew.py` has laws of the coordinator.
"""

import copy
import gc
import os
import threading
from functools import partial
from itertools import islice

import numpy as np
import pytest
import torch
from local_crew import Clock, Fault, LocalReading, Plan
from reference import assert_same, snapshot
from toys import Counting, Learning, Lively, Plain, Scripted, Shaky, at
from worker_cases import (
    SPACES,
    WORLDS,
    learned,
    learned_serially,
    script,
    serial,
    stream,
)

from rollpipe.agents.natural_gradient import TRPO
from rollpipe.layers import Critic, GaussianPolicy
from rollpipe.pipes import (
    ActorError,
    DataError,
    EnvStepper,
    FragmentCollector,
    GraphError,
    Lanes,
    ProcessReading,
    WorkerError,
    on_policy,
    rollouts,
)
from rollpipe.pipes.graph.edits import insert_after, nodes
from rollpipe.pipes.graph.torchdata import DataLoader2, InProcessReadingService
from rollpipe.pipes.taps import EpisodeStats, Tap, Throughput

# --- whoever collects, it is the same stream


def test_torchdatas_service_makes_no_difference():
    assert_same(learned(InProcessReadingService()), learned_serially())


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_shuffle_below_the_lanes_keeps_the_seed_of_the_recipe(num_workers):
    def shuffled():
        return rollouts(
            Counting,
            Plain(),
            n_envs=1,
            n_steps=3,
            lanes=3,
            seed=0,
            edits=[lambda pipe: insert_after(pipe, Lanes, lambda x: x.shuffle(buffer_size=3))],
        )

    with DataLoader2(shuffled(), reading_service=LocalReading(num_workers)) as loader:
        found = [x.lane.tolist() for x in islice(loader, 6)]
    assert found == [x.lane.tolist() for x in islice(shuffled(), 6)] != [[0, 1, 2]] * 6


@pytest.mark.slow_but_one
@pytest.mark.parametrize("method, workers", [("spawn", 1), ("forkserver", 3)])
def test_the_start_method_makes_no_difference(method, workers):
    assert_same(learned(ProcessReading(workers, start_method=method)), learned_serially())


def test_the_parents_threads_make_no_difference():
    "Torch's threads in the parent change neither what workers collect, nor do forked workers hang on them."
    first = GaussianPolicy.for_env(SPACES, hidden=(256, 256), seed=0)

    def wide(lanes):
        actor = copy.deepcopy(first)
        return rollouts(Lively, actor, n_envs=64, n_steps=3, lanes=lanes, seed=3), actor

    expected = stream(wide, None, 2)
    torch.set_num_threads(3)
    try:
        torch.randn(400, 400) @ torch.randn(400, 400)  # the threads are there
        assert_same(stream(wide, ProcessReading(2), 2), expected)
        assert_same(stream(wide, None, 2), expected)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(1)


@pytest.mark.slow
def test_a_worker_may_have_several_threads():
    def threads(lanes):
        actor = Plain()
        actor.complete = lambda act, info: (
            info | {"threads": torch.full(act.shape, torch.get_num_threads())}
        )
        return Lanes(FragmentCollector(EnvStepper(Counting, actor), 2), lanes), actor

    assert [
        int(f.actor["threads"][0, 0])
        for f in stream(threads, ProcessReading(1, worker_threads=2), 1)
    ] == [2]


# --- lag


def test_lag_none_is_bounded_and_reported():
    "Never more versions behind than there are buffers; the learner's metrics tell it."
    actor = GaussianPolicy.for_env(SPACES, hidden=(8,), seed=0)
    critic = Critic.for_env(SPACES, hidden=(8,), seed=0)
    agent = TRPO(actor, critic, seed=0)
    lags = []
    pipe = on_policy(Lively, actor, critic, n_envs=2, n_steps=8, lanes=2, seed=5)
    with DataLoader2(pipe, reading_service=LocalReading(2, lag=None, n_buffers=5)) as loader:
        for k, batch in enumerate(islice(loader, 8)):
            lags.append(agent.update(batch)["lag"])
            assert lags[-1] == k - int(batch.version.min())
            loader.reading_service._pause()  # the workers have done all they were asked for
            coordinator = loader.reading_service.seams[0].coordinator
            assert len(coordinator.schedule.pending) <= 4 and capacity(coordinator.pool) == 4
    assert 0 < max(lags) <= 5  # while the learner waits, workers collect in advance


# --- memory


def capacity(pool):
    return pool.width * len(pool.slots)


@pytest.mark.parametrize(
    "options", [dict(n_buffers=3), dict(n_buffers=6, lag=1), dict(n_buffers=4, lag=None)], ids=str
)
def test_n_buffers(options):
    pipe = rollouts(Counting, Plain(), n_steps=4, n_envs=1, lanes=3, seed=0)
    with DataLoader2(pipe, reading_service=LocalReading(2, **options)) as loader:
        kept = list(islice(loader, 6))
        (seam,) = loader.reading_service.seams
        assert capacity(seam.coordinator.pool) == 3 * (options["n_buffers"] // 3)  # slots for three
    if options.get("lag", 0) is not None:
        assert_same([snapshot(b) for b in kept], list(map(snapshot, islice(pipe, 6))))


# --- graphs


def test_two_seams_in_one_graph():
    "Each has its workers."
    left, right = (Lanes(FragmentCollector(EnvStepper(Counting, Plain()), k), 2, 0) for k in (2, 3))
    pipe = left.zip(right)
    expected = [snapshot(x) for x in islice(pipe, 4)]
    with DataLoader2(pipe, reading_service=LocalReading(2)) as loader:
        assert_same([snapshot(x) for x in islice(loader, 4)], expected)
        assert len(loader.reading_service.health()) == 4


def test_the_users_modules_stay_their_own():
    "A worker's copy is private: not in shared memory, and nothing comes back. To change it there is an error."

    class Vain(Learning):
        def step(self, *args, **kwargs):
            with torch.no_grad():
                self.weight += 100
            return super().step(*args, **kwargs)

    actor = Vain(0.0)
    with DataLoader2(
        FragmentCollector(EnvStepper(Counting, actor), 2), reading_service=ProcessReading(1)
    ) as loader:
        with pytest.raises(
            ActorError, match="parameter weight: Vain changed while a lane collected"
        ):
            list(islice(loader, 3))
    assert actor.weight.tolist() == 0 and not actor.weight.is_shared()


def test_options_out_of_range():
    "Those that only worker processes have."
    for options in (dict(n_buffers=0), dict(spin=-1)):
        with pytest.raises(
            DataError, match=f"ProcessReading, leaf {list(options)[-1]}: out of range"
        ):
            ProcessReading(1, **options)
    with pytest.raises(WorkerError, match="unknown start method.*spawn.*'thread'"):
        ProcessReading(1, start_method="thread")


@pytest.mark.parametrize("n_cores", [1, 8])
@pytest.mark.parametrize("lag", [0, None])
def test_spinning_changes_nothing(lag, n_cores, monkeypatch):
    "But how the learner's process waits; and that is noticed at once when a worker dies."
    clock = Clock().install(monkeypatch)
    pipe = Lanes(FragmentCollector(EnvStepper(Counting, Plain()), 3), 2, 0)
    expected = [snapshot(x) for x in islice(pipe, 21)]
    plan = Plan([Fault("dies before", 1, 10)], clock=clock, n_cores=n_cores)
    items = []
    with (
        pytest.raises(WorkerError, match="worker 1 .*SIGKILL"),
        DataLoader2(pipe, reading_service=LocalReading(2, lag=lag, spin=10, plan=plan)) as loader,
    ):
        for item in loader:
            items.append(snapshot(item))
    assert_same(items, expected[: len(items)])
    assert 17 <= len(items) <= 21 and (lag is None or len(items) == 21)
    assert clock.now < 5


def test_affinity():
    def cores(lanes):
        actor = Plain()
        actor.complete = lambda act, info: (
            info | {"cores": torch.full(act.shape, sum(2**k for k in os.sched_getaffinity(0)))}
        )
        return Lanes(FragmentCollector(EnvStepper(Counting, actor), 2), lanes), actor

    mine = sorted(os.sched_getaffinity(0))
    found = stream(cores, ProcessReading(2, affinity=[mine[0], mine[-2:]]), 2, lanes=2)
    assert [int(f.actor["cores"][0, 0]) for f in found] == [
        2 ** mine[0],
        sum(2**k for k in mine[-2:]),
    ]
    assert sorted(os.sched_getaffinity(0)) == mine
    with pytest.raises(DataError, match="leaf affinity.*got 4096"):
        stream(cores, ProcessReading(1, affinity=[4096]), 2, lanes=2)


# --- the life of a loader


def test_iterations_that_are_left_early():
    pipe, _ = WORLDS["global_generator"](3)
    expected = [snapshot(x) for x in islice(pipe, 3)]
    with DataLoader2(pipe, reading_service=LocalReading(2, lag=1)) as loader:
        for n in (3, 1, 2, 3):
            assert_same([snapshot(x) for x in islice(loader, n)], expected[:n])


def test_a_loader_inside_the_loop_of_a_loader():
    "It ends in the loop, or after it; also with the very same pipe."
    pipe, _ = WORLDS["global_generator"](2)
    expected = [snapshot(x) for x in islice(pipe, 3)]
    with DataLoader2(pipe, reading_service=ProcessReading(2)) as outer:
        for k, f in enumerate(islice(outer, 3)):
            assert_same(snapshot(f), expected[k])
            with DataLoader2(pipe, reading_service=ProcessReading(1)) as inner:
                assert_same([snapshot(x) for x in islice(inner, k + 1)], expected[: k + 1])


def test_two_loaders_in_two_threads():
    found = {}

    def work(k):
        found[k] = stream("global_generator", ProcessReading(1), 4)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    for k in range(2):
        for f, g in zip(found[k], serial("global_generator")):
            assert np.array_equal(f.state.act, g.state.act)


def test_a_seed_of_the_pipes_takes_precedence_over_that_of_the_loader():
    def run(service, seed, own=None):
        pipe = rollouts(Lively, Shaky(), n_envs=2, n_steps=4, lanes=2, seed=own)
        with DataLoader2(pipe, reading_service=service) as loader:
            loader.seed(seed)
            return next(iter(loader)).state.obs

    assert (run(LocalReading(2), 8) != run(LocalReading(2), 7)).any()
    assert_same(run(LocalReading(2), 2, own=4), run(None, 1, own=4))


def test_without_a_seed_every_iteration_is_fresh():
    "As far as torchdata gives one another seed: from torch's generator."
    pipe = rollouts(Lively, Shaky(), n_envs=1, n_steps=4, lanes=2)
    found = []
    with DataLoader2(pipe, reading_service=LocalReading(2)) as loader:
        for _ in range(2):
            found.append(next(iter(loader)).state.obs)
            torch.randn(3)
    a, b = found
    assert (a[0] != b[0]).any() and (a[0, 0] != a[0, 1]).any()


def test_pause_before_the_first_item():
    with DataLoader2(WORLDS["memory"](2)[0], reading_service=LocalReading(2)) as loader:
        items = iter(loader)
        loader._pause()
        assert list(items) == []
        items.resume()
        assert_same(snapshot(next(items)), snapshot(next(iter(WORLDS["memory"](2)[0]))))


def test_a_generator_abandoned_half_way_and_collected():
    "Whatever is let go of ends its workers: the loader, or without a loader the stream itself."
    loader = DataLoader2(WORLDS["memory"](2)[0], reading_service=ProcessReading(2, lag=None))
    next(iter(loader))
    pids = [state["pid"] for state in loader.reading_service.health()]
    assert len(pids) == 2 and all(os.path.exists(f"/proc/{pid}") for pid in pids)
    del loader
    gc.collect()
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    pipe = ProcessReading(2).initialize(WORLDS["memory"](2)[0])
    items = iter(pipe)
    next(items)
    del items
    gc.collect()


def test_the_end_of_an_older_stream_does_not_end_a_newer_one():
    pipe = LocalReading(2).initialize(WORLDS["memory"](2)[0])
    (seam,) = (p for p in nodes(pipe) if isinstance(p, Lanes))
    old = seam._run()
    next(old)
    new = seam._run()
    next(new), next(new)
    pids = [w["pid"] for w in seam.coordinator.members.health()]
    old.close()
    assert [w["pid"] for w in seam.coordinator.members.health() if w["alive"]] == pids and next(
        new
    ).seq.tolist() == [1, 1]
    new.close()


def test_garbage_of_one_loader_in_the_workers_of_another():
    "A forked worker inherits what its parent has not collected yet; collecting it there must not harm anybody."

    collects = partial(Scripted, before={"reset": at(1, lambda env: gc.collect())})
    pipe = Lanes(FragmentCollector(EnvStepper(collects, Plain()), 4), 2, 0)
    gc.disable()
    try:
        lost = DataLoader2(pipe, reading_service=ProcessReading(2))
        lost.itself, items = lost, iter(lost)
        next(items)
        (seam,) = lost.reading_service.seams
        workers = [member.process for member in seam.coordinator.members]
        del lost, items, seam
        with DataLoader2(pipe, reading_service=ProcessReading(2)) as loader:
            assert len(list(islice(loader, 6))) == 6
            assert all(worker.process.is_alive() for worker in workers)
    finally:
        gc.enable()
    gc.collect()
    assert not any(worker.process.is_alive() for worker in workers)


# --- programs of their own


def done(process, timeout=120):
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


@pytest.mark.slow
def test_a_script_with_everything_in_it(tmp_path):
    "Lambdas and classes of `__main__`, spawned; the interpreter ends while the loader lives."
    code, out, err = done(
        script(
            tmp_path,
            """
import multiprocessing, os
import torch
from itertools import islice
from toys import Counting
from rollpipe.layers import Actor
from rollpipe.pipes import EnvStepper, FragmentCollector, Lanes, ProcessReading, WorkerError
from rollpipe.pipes.graph.torchdata import DataLoader2

class Mine(Counting):
    def look(self): return super().look() + 1

class Own(Actor):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(2.))
    def forward(self, obs, act, rew, fin, *, hx, stepno, virtual):
        return torch.ones_like(stepno), (), {'weight': self.weight.expand(fin.shape).clone()}

if __name__ == '__main__':
    actor = Own()
    loader = DataLoader2(Lanes(FragmentCollector(EnvStepper(lambda: Mine([(3, 'term')]), actor, info_keys=()), 4), 2, 0),
                         reading_service=ProcessReading(1, start_method='spawn'))
    items = iter(loader)
    f = next(items)
    print(f.state.obs[:, 0, 2].tolist(), f.actor['weight'].unique().tolist())
    actor.weight.data += 1
    print(next(items).actor['weight'].unique().tolist())
    actor.stream = (x for x in ())
    try: next(iter(DataLoader2(FragmentCollector(EnvStepper(Mine, actor), 4), reading_service=ProcessReading(1, start_method='spawn'))))
    except WorkerError as e: print(e, len(multiprocessing.active_children()))
    print(*[state['pid'] for state in loader.reading_service.health()])
""",
        )
    )
    assert code == 0, err
    lines = out.splitlines()
    assert lines[:2] == ["[1.0, 2.0, 3.0, 1.0, 2.0] [2.0]", "[3.0]"], out
    assert lines[2].startswith(
        "EnvStepper: Own cannot be sent to a worker: TypeError: cannot pickle 'generator' object"
    )
    assert lines[2].endswith(" 1")
    assert not os.path.exists(f"/proc/{lines[3]}") and err == ""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_script_without_a_guard_ends_with_one_message(method, tmp_path):
    "Its workers import it as well, and would each say at length that they cannot start processes."
    source = f"""
from toys import Counting, Plain
from rollpipe.pipes import ProcessReading, rollouts
from rollpipe.pipes.graph.torchdata import DataLoader2

pipe = rollouts(lambda: Counting([(3, 'term')]), Plain(), n_steps=4, lanes=2, seed=0)
next(iter(DataLoader2(pipe, reading_service=ProcessReading(2, start_method='{method}'))))
"""
    code, out, err = done(script(tmp_path, source))
    assert (code, out, err.count("Traceback")) == (1, "", 1)
    assert "ended with exit code 1 while it was started. Expected" in err.splitlines()[-1]


@pytest.mark.slow
def test_a_notebook(tmp_path):
    "Cells have no file; their classes and lambdas go to spawned workers all the same, without a guard."
    code, out, err = done(
        script(
            tmp_path,
            """
import sys
main = sys.modules['__main__']
del main.__file__
main.__spec__ = None
cells = '''
from itertools import islice
from toys import Counting, Plain
from rollpipe.pipes import EnvStepper, FragmentCollector, Lanes, ProcessReading
from rollpipe.pipes.graph.torchdata import DataLoader2
episodes = [(3, 'term')]
class Mine(Counting):
    def look(self): return super().look() + 1
---
class Other(Mine): pass
class Double(Plain):
    def forward(self, *args, **kwargs):
        act, hx, info = super().forward(*args, **kwargs)
        return 0 * act + 3, hx, {}
pipe = Lanes(FragmentCollector(EnvStepper([lambda: Mine(episodes), Other], Double(), info_keys=()), 4), 1, 0)
---
with DataLoader2(pipe, reading_service=ProcessReading(1, start_method='spawn')) as loader:
    for f in islice(loader, 1): print(f.state.obs[:, 0, 2].tolist(), f.state.act[1:].unique().tolist())
'''
for cell in cells.split('---'): exec(compile(cell, '<cell>', 'exec'), vars(main))
""",
        )
    )
    assert code == 0, err
    assert out.splitlines() == ["[1.0, 2.0, 3.0, 1.0, 2.0] [3]"] and err == ""


@pytest.mark.slow
def test_the_interpreter_ends_with_a_live_loader(tmp_path):
    "Forked workers, in the middle of a long step, a generator abandoned at the top level: no orphan, no complaint, and soon."
    code, out, err = done(
        script(
            tmp_path,
            """
import sys, time
from toys import Counting, Plain
from rollpipe.pipes import EnvStepper, FragmentCollector, Lanes, ProcessReading
from rollpipe.pipes.graph.torchdata import DataLoader2
class Slow(Counting):
    def step(self, action):
        if self.episode: time.sleep(100)
        return super().step(action)
pipe = Lanes(FragmentCollector(EnvStepper(lambda: Slow([(3, 'term')]), Plain(), info_keys=()), 3), 2, 0)
loader = DataLoader2(pipe, reading_service=ProcessReading(2, lag=1))
items = iter(loader)
next(items)
print(*[state['pid'] for state in loader.reading_service.health()])
if len(sys.argv) > 1: raise ZeroDivisionError
""",
        )
    )
    assert code == 0 and err == "", err
    assert not any(os.path.exists(f"/proc/{pid}") for pid in out.split())


# --- taps


def collected(tap_ticks=lambda p: p):
    return FragmentCollector(tap_ticks(EnvStepper(Counting, Plain(), 2)), 3)


def tapped(where, tap):
    "A graph with `tap` above or below `Lanes`, or at a place where `ProcessReading` puts lanes of its own."
    if where == "above, on ticks":
        return Lanes(collected(tap), 2)
    if where == "above, on fragments":
        return Lanes(tap(collected()), 2)
    if where == "above lanes to come":
        return collected(tap)
    return tap(Lanes(collected(), 2)) if where == "below" else tap(collected())


TAPS = [
    lambda p, told: EpisodeStats(p, told),
    lambda p, told: Tap(p, told),
    lambda p, told: Throughput(p, told),
]
each_tap = pytest.mark.parametrize("make", TAPS, ids=["EpisodeStats", "Tap", "Throughput"])


@each_tap
@pytest.mark.parametrize("where", ["above, on ticks", "above, on fragments", "above lanes to come"])
def test_a_tap_whose_function_would_be_a_copy_in_a_worker_is_refused(make, where):
    told = []
    pipe = tapped(where, lambda p: make(p, told.append))
    with pytest.raises(
        GraphError,
        match=r"^(EpisodeStats|Tap|Throughput): in a worker process .* Expected taps below `Lanes`",
    ):
        iter(DataLoader2(pipe, reading_service=ProcessReading(2)))
    for service in (None, ProcessReading(0)):  # in one process it tells all
        with DataLoader2(pipe, reading_service=service) as loader:
            list(islice(loader, 40))
        assert told
        told.clear()


@each_tap
@pytest.mark.parametrize("where", ["below", "below lanes to come"])
def test_a_tap_below_the_lanes_is_told_all(make, where):
    def told(workers):
        found = []
        with DataLoader2(
            tapped(where, lambda p: make(p, found.append)), reading_service=LocalReading(workers)
        ) as loader:
            return found, len(list(islice(loader, 40)))

    for workers in (0, 2):
        found, n = told(workers)
        assert n == 40 and found
