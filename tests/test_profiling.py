"`profile`: known costs are found exactly, the stream and the graph stay as they are, and every end is told."

import math
import os
import queue
import shlex
import tempfile
import threading
from datetime import date
from itertools import islice
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import assert_same, snapshot
from toys import Counting, Failing, Ledger, Limit, Plain, Scripted, Valued
from worker_cases import WORLDS, change, harmful, stream

from rollpipe.cli.main import build_parser, main
from rollpipe.layers import MLPPolicy, QPolicy
from rollpipe.pipes import (
    DataError,
    EnvError,
    EnvStepper,
    FragmentCollector,
    FragmentStacker,
    GraphError,
    Lanes,
    Pipe,
    ProcessReading,
    Source,
    Tap,
    on_policy,
    profile,
    replayed,
    rollouts,
)
from rollpipe.pipes.graph.edits import draw, find_one, nodes
from rollpipe.pipes.graph.torchdata import (
    DataLoader2,
    InProcessReadingService,
    IterableWrapper,
    Mapper,
)
from rollpipe.runs.autotune import NO_TIME, Trial, autotune, command_for, profile_config
from rollpipe.runs.autotune import settings as settings_to_try
from rollpipe.settings.config import make_config
from rollpipe.settings.options import parse_env_kwargs


class Hands:
    "A clock that stands still until `wait` is called."

    def __init__(self):
        self.time = 0.0

    def __call__(self):
        return self.time

    def wait(self, seconds):
        self.time += seconds


class Costly(Source):
    "`n` items, each after `cost` seconds of the clock."

    def __init__(self, hands, cost, n=1000):
        self.hands = hands
        self.cost = cost
        self.n = n

    def stream(self, items):
        for k in range(self.n):
            self.hands.wait(self.cost)
            yield np.full(2, k)


class Work(Pipe):
    "Reads `every` items for each one, with `cost` seconds before and after that."

    def __init__(self, pipe, hands, cost, every=1):
        super().__init__(pipe)
        self.hands = hands
        self.cost = cost
        self.every = every

    def stream(self, items):
        while True:
            self.hands.wait(self.cost)
            found = list(islice(items, self.every))
            self.hands.wait(self.cost)
            if not found:
                return
            yield found[0]


def own(found):
    return {x.label.partition("(")[0]: x.share * found.seconds for x in found.stages}


# --- known costs


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([0, 1, 2, 5]), st.integers(1, 3)), max_size=4),
    st.integers(0, 7),
    st.integers(1, 4),
)
def test_the_costs_of_a_chain_are_found_exactly(chain, learning, source):
    hands = Hands()
    n = 5
    pipe = Costly(hands, source, 10**6)
    for cost, every in chain:
        pipe = Work(pipe, hands, cost, every)
    seen = []

    def update(item):
        hands.wait(learning)
        seen.append(item)
        if len(seen) > n:
            raise StopAsyncIteration

    found = profile(pipe, 10**9, update=update, now=hands)
    assert isinstance(found.error, StopAsyncIteration)
    items = 1
    expected = []
    rates = []
    for cost, every in reversed(chain):
        expected.append(2 * cost * items)
        rates.append(items)
        items *= every
    expected = [items * source, *expected[::-1], learning]
    rates = [items, *rates[::-1]]
    total = sum(expected)  # for each item that the learner gets
    assert found.seconds == total * n
    np.testing.assert_allclose(
        [x.share for x in found.stages], np.array(expected) / total, atol=1e-12
    )
    np.testing.assert_allclose([x.items_per_s for x in found.stages[:-1]], np.array(rates) / total)
    np.testing.assert_allclose(
        [x.awaited for x in found.stages[:-1]], np.cumsum(expected[:-1]) / total
    )  # it waits for all above
    assert found.stages[found.slowest].share == max(x.share for x in found.stages)
    assert found.learner == pytest.approx(learning / total)


class Pensive(Plain):
    "An actor whose answers cost 3 s, whether they are acted out or not."

    def __init__(self, hands):
        super().__init__()
        self.hands = [hands]

    def forward(self, *args, **kwargs):
        self.hands[0].wait(3)
        return super().forward(*args, **kwargs)


class Passing(Pipe):
    "Ticks pass through it, so a collector reads all of them."

    def stream(self, items):
        yield from items


@pytest.mark.parametrize("ticks", [False, True])
def test_environments_and_actor_have_times_of_their_own(ticks):
    "Two lanes of 2 environments, fragments of 4 steps: each fragment costs 4 * 2 s of steps, and 4 answers with one to look ahead."
    hands = Hands()

    def source():
        return Scripted([(100, "term")], before={"step": lambda env: hands.wait(1)})

    edits = [Passing.inserter(after=EnvStepper)] if ticks else []
    found = profile(
        rollouts(source, Pensive(hands), n_envs=2, n_steps=4, lanes=2, seed=0, edits=edits),
        100,
        now=hands,
    )
    stepper = found.stages[0]
    assert found.seconds == 2 * 3 * (
        8 + 15
    )  # two lanes, and three batches are the first to last longer than 100 s
    assert stepper.parts == dict(
        environments=8 / 23, actor=15 / 23
    ) and stepper.share == pytest.approx(1)
    wanted = (
        [24, 24, 6, 6, 3] if ticks else [6, 6, 6, 3]
    )  # a tick for each step, or for all steps of a fragment
    assert [x.items_per_s * found.seconds for x in found.stages] == pytest.approx(wanted)
    assert found.steps_per_s == 2 * 8 / (2 * 23) and found.slowest == 0
    assert "35 % of it environments, 65 % of it actor" in found.advice


@pytest.mark.parametrize("ticks", [False, True])
@pytest.mark.parametrize("vector", [None, "sync"])
def test_an_engine_and_a_vector_have_times_of_their_own(ticks, vector):
    pytest.importorskip("onnxruntime")
    pipe = rollouts(
        "CartPole-v1",
        MLPPolicy.for_env("CartPole-v1"),
        n_envs=2,
        n_steps=128,
        seed=0,
        vector=vector,
        engine="onnxruntime",
        edits=[Passing.inserter(after=EnvStepper)] if ticks else [],
    )
    stepper = profile(pipe, 0.2).stages[0]
    assert (
        min(stepper.parts.values()) > 0.02 and sum(stepper.parts.values()) <= stepper.share + 1e-9
    )


def test_samples_are_drawn_in_the_time_of_the_replay():
    hands = Hands()
    actor = QPolicy.for_env("CartPole-v1", hidden=(4,), seed=0)
    pipe = replayed(
        "CartPole-v1", actor, n_envs=2, n_steps=2, warmup=4, batch_size=2, n_batches=3, seed=0
    )
    draws = []
    replay = find_one(pipe, lambda p: hasattr(p, "n_batches"))

    class Slowly(type(replay)):
        def _samples(self, *args):
            for sample in super()._samples(*args):
                hands.wait(2)
                draws.append(sample)
                yield sample

    replay.__class__ = Slowly

    def learn(item):
        for _ in item.samples:
            hands.wait(1)

    for update, shares in (learn, [6 / 9, 3 / 9]), (None, [1]):
        found = profile(pipe, 20, update=update, now=hands)
        assert [x.share for x in found.stages if x.share] == pytest.approx(shares)
        assert found.stages[len(nodes(pipe)) - 1].parts["sampling"] == pytest.approx(shares[0])
    assert len(draws) == 3 * (1 + 3 + 1 + 4)  # windows of 3 and 4 batches, each after a first one


class Wait:
    "A function that costs 4 s."

    def __init__(self, hands):
        self.hands = hands

    def __call__(self, x):
        self.hands.wait(4)
        return x


class Two(Pipe):
    "Reads two pipes in turn."

    def __init__(self, pipe, other):
        super().__init__(pipe)
        self.other = other

    def stream(self, items):
        yield from zip(items, self.other)


def test_plain_pipes_and_branches():
    hands = Hands()
    first = Costly(hands, 1)
    second = Mapper(IterableWrapper(range(1000), deepcopy=False), Wait(hands))
    left, right = second.fork(num_instances=2)
    pipe = Two(first, left.zip(right).batch(2))
    found = profile(pipe, 100, now=hands)
    assert own(found)["Mapper"] == 8 * found.n_items and own(found)["Costly"] == found.n_items
    assert sum(own(found).values()) == pytest.approx(found.seconds) and found.stages[
        found.slowest
    ].label.startswith("Mapper")
    assert len(str(found.drawing()).splitlines()) >= len(nodes(pipe))


class InThread(Pipe):
    "Reads its input in another thread, as a prefetcher does."

    def stream(self, items):
        box = queue.Queue(1)

        def read():
            for item in self.pipe:
                box.put([item])
            box.put(None)

        thread = threading.Thread(target=read)
        thread.start()
        for (item,) in iter(box.get, None):
            yield item
        thread.join()


def test_each_thread_has_an_account_of_its_own():
    hands = Hands()
    found = profile(InThread(Work(Costly(hands, 2, 1), hands, 1)), 1e9, now=hands)
    assert found.ended and found.n_items == 1
    assert (
        own(found)["Costly"] == 2 and own(found)["Work"] == 4
    )  # it also works when it finds the end


# --- the stream and the graph


class Enough(Exception):
    "The test has what it wants."


def profiled(pipe, n, service=None, then=lambda batch: None):
    "Snapshots of the first `n` items while the pipe is profiled."
    found = []

    def update(batch):
        found.append(snapshot(batch))
        then(batch)
        if len(found) == n:
            raise Enough

    report = profile(pipe, 1e6, reading_service=service, update=update)
    assert isinstance(report.error, Enough) if len(found) == n else report.ended, report.error
    return found


@pytest.mark.slow_but_one
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world", WORLDS)
def test_the_stream_is_the_same_bit_for_bit(world, workers):
    pipe, actor = WORLDS[world](3)
    found = profiled(
        pipe, 4, ProcessReading(workers) if workers else None, lambda batch: change(actor)
    )
    assert_same(found, stream(world, ProcessReading(workers) if workers else None))


def test_workers_of_another_start_method_report_too():
    actor = Valued()
    pipe = on_policy(Counting, actor, n_envs=2, n_steps=4, lanes=2, seed=0)
    found = profile(pipe, 0.2, reading_service=ProcessReading(2, start_method="forkserver"))
    check_workers(found)


def test_replays_are_the_same_bit_for_bit():
    def make():
        actor = QPolicy.for_env("CartPole-v1", hidden=(4,), seed=0)
        return replayed(
            "CartPole-v1",
            actor,
            n_envs=2,
            n_steps=4,
            warmup=8,
            batch_size=4,
            n_batches=2,
            seed=0,
            prioritized=True,
        )

    def content(item):
        return [snapshot(item.fresh), *(snapshot(sample) for sample in item.samples)]

    found = []

    def update(item):
        found.append(content(item))
        if len(found) == 6:
            raise Enough

    profile(make(), 1e6, update=update)
    assert_same(found, [content(item) for item in islice(make(), 6)])
    assert len(found[-1]) == 3


def test_lent_environments_and_a_stream_in_progress():
    "An instance is stepped and not closed; another iteration of the same graph goes on, if its environments are its own."
    Ledger.clear()
    lent = Counting()
    report = profile(FragmentCollector(EnvStepper(lent, Plain(), seed=0), 4), 1e-3)
    assert report.n_items and not lent.is_closed
    pipe = rollouts(Counting, Plain(), n_envs=2, n_steps=4, lanes=2, seed=0)
    items = iter(pipe)
    expected = [snapshot(x) for x in islice(pipe.__class__(pipe.pipe, 2), 3)]
    items = iter(pipe)
    first = [snapshot(next(items))]
    profile(pipe, 1e-3)
    assert_same(first + [snapshot(x) for x in islice(items, 2)], expected)
    items.close()
    lent.close()
    assert Ledger.open() == 0


@pytest.mark.parametrize("workers", [0, 2])
def test_the_graph_stays_as_it_was(workers):
    pipe = on_policy(Counting, Valued(), n_envs=2, n_steps=4, lanes=2, seed=0)
    service = ProcessReading(workers)

    def facts():
        return (
            [(p, type(p), dict(vars(p))) for p in nodes(pipe)],
            str(draw(pipe)),
            dict(vars(service)),
        )

    before = facts()
    profile(pipe, 1e-3, reading_service=service)
    assert facts() == before and not service.records


# --- workers


def check_workers(found):
    stepper, collector, seam = found.stages[:3]
    assert [x.place for x in found.stages] == ["workers", "workers", "seam", "here", "here"]
    assert (
        stepper.items_per_s == pytest.approx(collector.items_per_s)
        and collector.items_per_s > 0
        and min(stepper.parts.values()) > 0
    )
    assert collector.bytes_per_s > 0 and seam.share > 0
    assert len(found.workers) == 2
    for x in found.workers:
        assert 0 < x.busy < 1 and x.busy + x.waiting == pytest.approx(1) and x.queue >= 0
    busy = np.average([x.busy for x in found.workers])
    assert stepper.share + collector.share == pytest.approx(
        busy, abs=0.3
    )  # the mean is not weighted
    assert sum(stepper.parts.values()) <= stepper.share


@pytest.mark.parametrize("lag", [0, 1])
def test_workers_report(lag, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = profile(
        on_policy(Counting, Valued(), n_envs=2, n_steps=4, lanes=4, seed=0),
        0.2,
        reading_service=ProcessReading(2, lag),
    )
    check_workers(found)
    assert [x.name for x in found.workers] == ["worker 0", "worker 1"] and "worker 1: busy" in str(
        found
    )
    assert os.listdir(tmp_path) == []


def test_a_graph_without_lanes_gets_them():
    found = profile(
        FragmentStacker(FragmentCollector(EnvStepper(Counting, Plain(), seed=0), 4), 1),
        0.1,
        reading_service=ProcessReading(1),
    )
    assert [x.label.partition("(")[0] for x in found.stages] == [
        "EnvStepper",
        "FragmentCollector",
        "WorkerLanes",
        "FragmentStacker",
    ]


# --- every end


@pytest.mark.parametrize("n, measured", [(3, (2, 4)), (1, (1, 2)), (0, (0, 0))])
def test_a_stream_that_ends_early_or_is_empty(n, measured):
    "The first item is not measured, unless it is the only one."
    hands = Hands()
    found = profile(Costly(hands, 2, n), 100, now=hands)
    assert found.ended and found.error is None and (found.n_items, found.seconds) == measured
    assert "then the stream ended" in str(found)
    ElementTree.fromstring(found._repr_svg_())


@pytest.mark.parametrize("n", [0, 1, 4])
def test_an_error_ends_it_with_the_figures_until_then(n):
    hands = Hands()
    found = profile(Failing(Costly(hands, 2), n), 100, now=hands)
    assert isinstance(
        found.error, ZeroDivisionError
    ) and "ended by ZeroDivisionError: downstream" in str(found)
    assert found.n_items == max(n - 1, min(n, 1))
    assert own(found)["Costly"] == found.seconds > 0  # the item that fails is made, too


def test_errors_of_workers_and_learners():
    found = profile(harmful("raise", "step", at=9), 60, reading_service=ProcessReading(2))
    assert isinstance(found.error, EnvError) and "ended by EnvError" in str(found)

    def update(batch):
        raise RuntimeError("no gradient")

    found = profile(rollouts(Counting, Plain(), n_envs=2, n_steps=4, seed=0), 60, update=update)
    assert str(found.error) == "no gradient" and found.stages[1].items_per_s > 0

    def stop(batch):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        profile(
            rollouts(Counting, Plain(), n_steps=4, lanes=2, seed=0),
            60,
            reading_service=ProcessReading(2),
            update=stop,
        )


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), True, "3", None])
def test_bad_seconds(seconds):
    with pytest.raises(DataError, match="seconds > 0"):
        profile(IterableWrapper([1]), seconds)


def test_bad_arguments():
    pipe = rollouts(Counting, Plain(), n_steps=4)
    with pytest.raises(TypeError, match="reading_service"):
        profile(DataLoader2(pipe))
    with pytest.raises(DataError, match="a ProcessReading, or None"):
        profile(pipe, reading_service=InProcessReadingService())
    with pytest.raises(DataError, match=r"update\(item\)"):
        profile(pipe, update=3)
    with pytest.raises(GraphError, match="tap"):
        profile(
            Lanes(Tap(FragmentCollector(EnvStepper(Counting, Plain()), 4), print)),
            reading_service=ProcessReading(1),
        )


def test_the_picture_holds_every_figure():
    found = profile(
        Limit(rollouts(Counting, Plain(), n_envs=2, n_steps=4, seed=0), 3),
        60,
        update=lambda batch: None,
    )
    svg = found._repr_svg_()
    root = ElementTree.fromstring(svg)
    texts = ["".join(x.itertext()) for x in root.iter("{http://www.w3.org/2000/svg}text")]
    assert len([x for x in root.iter("{http://www.w3.org/2000/svg}rect")]) == len(found.stages)
    assert (
        "slowest" in texts
        and "the learner" in texts
        and sum(x.startswith("awaited") for x in texts) == len(found.stages) - 1
    )
    assert str(found).count("<-- slowest") == 1 and found.advice.split(".")[0] in str(found)


# --- the command line


def printed(capsys, words):
    code = main(words.split())
    return code, capsys.readouterr()


TINY = " --n-envs 2 --n-steps 16 --hidden 4 --critic-hidden 4"


def test_the_profile_command_prints_draws_and_tells_the_error(capsys, tmp_path):
    picture = tmp_path / "p.svg"
    words = f"profile a2c CartPole-v1 --seconds 0.05 --svg {picture} --lanes 2 --workers 2"
    code, said = printed(capsys, words + TINY)
    assert code == 0
    for text in ("<-- slowest", "worker 1: busy", "the learner"):
        assert text in said.out
    ElementTree.parse(picture)
    for option, text in (("--env-kwargs no_such=1", "no_such"), ("--seconds 0", "seconds > 0")):
        code, said = printed(capsys, f"profile a2c CartPole-v1 {option}" + TINY)
        assert code == 2 and text in said.err


def test_autotune_prints_a_command_that_gives_the_best_setting(capsys):
    words = "autotune a2c CartPole-v1 --no-normalize --lanes 2 --seconds 0.5"
    code, said = printed(capsys, words + TINY)
    lines = said.out.splitlines()
    args = build_parser().parse_args(lines[-1].split()[1:])
    assert code == 0 and args.workers in (0, 1, 2)
    assert (args.n_envs, args.n_steps, args.lanes, args.hidden) == (2, 16, 2, (4,))
    assert args.normalize is False

    # The table of settings, the fastest first, and two lines below it.
    assert lines[-2].startswith("best: ") and lines[-3].startswith("noise: ")
    is_head = [line.split()[:1] == ["lanes"] or "of the best" in line for line in lines]
    first = max(k for k, it_is in enumerate(is_head) if it_is) + 1
    speeds = [line.split()[-3] for line in lines[first:-3]]
    numbers = [float(speed.replace(",", "")) for speed in speeds]
    assert numbers == sorted(numbers, reverse=True) and lines[-2] == f"best: {speeds[0]} steps/s"


def test_autotune_measures_the_fastest_settings_twice(monkeypatch):
    done = []

    def measure(algorithm, env, env_kwargs, typed, setting, seconds):
        done.append(setting)
        return Trial(setting, SimpleNamespace(steps_per_s=float(len(done))))

    monkeypatch.setattr("rollpipe.runs.autotune._measured", measure)
    n = len(
        {str(trial.setting) for trial in autotune("a2c", "CartPole-v1", dict(n_envs=2), seconds=60)}
    )
    assert (
        len(done) == n + 3 and done[n:] == done[n - 3 : n][::-1]
    )  # the later ones were the faster ones here


def test_autotune_keeps_the_steps_of_a_fragment_that_were_typed():
    found = settings_to_try("ppo", dict(n_steps=128, n_envs=8), 4)
    assert {x["n_steps"] for x in found} == {128} and len(found) > 1


@pytest.mark.parametrize(
    "value", [math.inf, -math.inf, dict(x=math.inf), [1, math.inf, "a b"], "inf", "5", None, True]
)
def test_a_command_has_the_keyword_arguments_of_the_environment(value):
    *_, word = shlex.split(command_for("ppo", "Pendulum-v1", {}, dict(g=value)))
    assert parse_env_kwargs([word]) == dict(g=value)


@pytest.mark.parametrize("value", [math.nan, ["inf", math.inf], date(2020, 1, 1)])
def test_a_keyword_argument_that_no_command_can_have_is_named(value):
    with pytest.raises(DataError, match="leaf g: cannot be typed on a command line"):
        command_for("ppo", "Pendulum-v1", {}, dict(g=value))


def test_autotune_after_ctrl_c_and_after_failures(capsys, monkeypatch):
    trials = iter(
        [
            Trial(dict(n_envs=4, n_steps=8), None, "EnvError: broken\nmore"),
            Trial(dict(n_envs=8, n_steps=4), None, NO_TIME),
        ]
    )

    def interrupted(*args, **kwargs):
        yield Trial(
            dict(n_envs=2, n_steps=16),
            profile_config(make_config("a2c", "CartPole-v1", dict(n_envs=2, n_steps=16)), 0.01),
        )
        yield from trials
        raise KeyboardInterrupt

    monkeypatch.setattr("rollpipe.runs.commands.autotune", interrupted)
    code, said = printed(capsys, "autotune a2c CartPole-v1")
    assert code == 130 and "EnvError: broken" in said.out and "interrupted" in said.err
    assert said.out.splitlines()[-1] == "rollpipe train a2c CartPole-v1 --n-envs 2 --n-steps 16"
    monkeypatch.setattr(
        "rollpipe.runs.commands.autotune",
        lambda *args, **kwargs: [Trial(dict(n_envs=4), None, "EnvError: broken")],
    )
    code, said = printed(capsys, "autotune a2c CartPole-v1")
    assert code == 2 and "no setting worked" in said.err
