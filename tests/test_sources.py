"Environments that exist already, and pipes of environments: lent and not copied, one iteration at a time, closed by whoever made them."

import gc
import pickle
import sys
import weakref
from functools import partial
from itertools import islice, repeat
from pathlib import Path

import cloudpickle
import gymnasium as gym
import pytest
import torch
from forked import run_forked
from reference import assert_same
from toys import Counting, Ledger, Lively, Memory, Plain, Scripted, Shaky, at, fail

from rollpipe.agents import ParallelEvaluation, evaluate
from rollpipe.layers import Critic, GaussianPolicy
from rollpipe.pipes import (
    DataError,
    EnvError,
    EnvStepper,
    EpisodeCollector,
    FragmentCollector,
    FragmentStacker,
    GraphError,
    Lanes,
    ProcessReading,
    copy_graph,
    draw,
    find_one,
    on_policy,
    prepare,
    replace,
    replayed,
    rollouts,
    startup,
)
from rollpipe.pipes.envs.factories import Claim
from rollpipe.pipes.graph.edits import nodes
from rollpipe.pipes.graph.pipe import Source
from rollpipe.pipes.graph.torchdata import DataLoader2, IterableWrapper

HERE = Path(__file__).parent
SMALL = dict(n_envs=None, n_steps=6, seed=3)


@pytest.fixture(autouse=True)
def clean_ledger():
    Ledger.clear()


def judge_zero(obs):
    return torch.zeros(obs.shape[:-1])


def lively(n=3):
    return [Lively() for _ in range(n)]


def vector(cls=Lively, n=3):
    return gym.vector.SyncVectorEnv([cls] * n, autoreset_mode="SameStep")


def collected(source, **kwargs):
    return FragmentCollector(EnvStepper(source, Shaky(), seed=3, **kwargs), 6)


# --- the same stream as with factories

PIPELINES = {
    "stepper": lambda envs: EnvStepper(envs, Shaky(), seed=3),
    "fragments": collected,
    "episodes": lambda envs: EpisodeCollector(EnvStepper(envs, Shaky(), seed=3, terminal_obs=True)),
    "one lane": lambda envs: Lanes(FragmentCollector(EnvStepper(envs, Shaky()), 6), 1, seed=3),
    "rollouts": lambda envs: rollouts(envs, Shaky(), **SMALL),
    "on_policy": lambda envs: on_policy(envs, Shaky(), judge_zero, **SMALL),
    "replayed": lambda envs: replayed(envs, Shaky(), **SMALL, capacity=99, batch_size=4, warmup=9),
    "loader": lambda envs: DataLoader2(rollouts(envs, Shaky(), **SMALL)),
}


def few(pipe):
    "What the first four items hold, without references to the iteration."
    stream = iter(pipe)
    items = [
        (x.fresh, list(x.samples))
        if hasattr(x, "fresh")
        else x._replace(source=None)
        if hasattr(x, "source")
        else x
        for x in islice(stream, 4)
    ]
    getattr(stream, "close", lambda: None)()
    if hasattr(pipe, "shutdown"):
        pipe.shutdown()
    return items


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("given", [lively, vector])
def test_an_instance_gives_the_stream_of_its_factory_in_every_iteration(name, given):
    make = PIPELINES[name]
    envs = given()
    made = few(make([Lively] * 3))
    pipe = make(envs)
    for _ in range(1 if name == "loader" else 2):
        assert_same(few(pipe), made)
    assert_same(few(make(envs)), made)


def test_a_list_may_mix_what_it_holds():
    mine = Lively()
    assert_same(few(collected([mine, Lively])), few(collected([Lively] * 2)))
    assert not mine.is_closed and Ledger.open() == 1


@pytest.mark.parametrize("given", [lively, vector])
def test_evaluate_plays_in_instances(given):
    expected = evaluate(Lively, Shaky(), 7, n_envs=3, seed=1)
    Ledger.clear()
    assert_same(evaluate(given(), Shaky(), 7, seed=1), expected)
    assert len(Ledger.made) == 3 and Ledger.closed == []


@pytest.mark.parametrize("given", [lively, lambda: (Lively(), Lively), vector, lambda: Lively()])
def test_networks_fit_instances(given):
    env = given()
    pipe = on_policy(env, GaussianPolicy.for_env(env, seed=0), Critic.for_env(env, seed=1), **SMALL)
    assert next(iter(pipe)).adv.isfinite().all()


def test_manual_loops_take_a_vector_too():
    with startup(prepare(vector(), Shaky(), 6, seed=3)) as context:
        fragment = next(context._fragments)
    assert_same(fragment, next(iter(collected([Lively] * 3))))


# --- by reference, one iteration at a time


def test_edits_and_loaders_step_the_users_own():
    mine = Counting()
    pipe = rollouts(mine, Plain(), **SMALL)
    edited = replace(pipe, FragmentStacker, lambda old: old)
    copies = [edited, copy_graph(pipe), pickle.loads(pickle.dumps(pipe)), DataLoader2(pipe)]
    for k, copy in enumerate(copies):
        next(iter(copy))
        assert mine.episode == 2 * k + 1, "two episodes begin in six steps"
    assert len(Ledger.made) == 1 and not mine.is_closed


@pytest.mark.parametrize("envs", [lambda: [Counting(), Counting()], lambda: vector(Counting)])
def test_the_later_iteration_takes_the_environment(envs):
    pipe = EnvStepper(envs(), Plain())
    for other in (
        copy_graph(pipe),
        replace(
            FragmentCollector(pipe, 2), EnvStepper, lambda old: EnvStepper(pipe.factories, Plain())
        ),
    ):
        first = iter(pipe)
        second = iter(other)
        next(first), next(second)
        place = r"^EnvStepper, lane 0, environment (0 \(Counting\)|SyncVectorEnv)"
        with pytest.raises(
            EnvError, match=place + ": the environment has since been lent to another iteration"
        ):
            next(first)
        next(second)


def test_a_wrapper_shares_its_environment():
    mine = Counting()
    first = iter(EnvStepper(mine, Plain()))
    second = iter(EnvStepper(gym.wrappers.TimeLimit(mine, 9), Plain()))
    next(first), next(second)
    with pytest.raises(EnvError, match="lent to another iteration"):
        next(first)
    with pytest.raises(EnvError, match="environment 1 .*can act only once"):
        EnvStepper([mine, gym.wrappers.TimeLimit(mine, 9)], Plain())


def test_evaluating_in_the_environment_that_collects_ends_the_collection():
    mine = Lively()
    stream = iter(collected(mine))
    next(stream)
    evaluate(mine, Shaky(), 1)
    with pytest.raises(EnvError, match="lent to another iteration"):
        next(stream)


# --- a factory that returns one and the same object


def again(env):
    return lambda: env


def pooled(*envs, mode="SameStep"):
    return gym.vector.SyncVectorEnv([again(env) for env in envs], autoreset_mode=mode)


LENT = "the environment has since been lent to another iteration, loop, or lane. Expected one at a time for each instance, got a second"


@pytest.mark.parametrize(
    "make, name",
    [
        (lambda: again(Lively()), r"0 \(<lambda>\)"),
        (lambda: [Lively, again(Lively())], r"1 \(<lambda>\)"),
        (lambda: again(vector(n=2)), "<lambda>"),
    ],
)
def test_the_later_iteration_takes_what_a_factory_returns_again(make, name):
    def stepper():
        return EnvStepper(source, Shaky(), seed=3, close=False)

    source = make()
    alone = few(stepper())
    first = iter(stepper())
    second = iter(stepper())
    next(first)
    there = [next(second)]
    with pytest.raises(EnvError, match=f"^EnvStepper, lane 0, environment {name}: {LENT}"):
        next(first)
    there += islice(second, 3)
    assert_same([tick._replace(source=None) for tick in there], alone)


def test_a_claim_that_is_garbage_is_released_without_noise(monkeypatch):
    class User:
        "Releases its claim when it is collected. It is in a circle, so the garbage collector clears weak references to the claim first."

        def __init__(self, env):
            self.claim = Claim()
            self.circle = self
            self.claim.take(env, 0)

        def __del__(self):
            self.claim.release()
            released.append(self.claim.lost)

    noise = []
    released = []
    env = Counting()
    monkeypatch.setattr(sys, "unraisablehook", noise.append)
    User(env)
    gc.collect()
    assert (noise, released) == ([], [[]])


def test_lanes_do_not_share_what_a_factory_returns_again():
    stream = iter(Lanes(FragmentCollector(EnvStepper(again(Counting()), Plain()), 4), 2, seed=1))
    with pytest.raises(EnvError, match=rf"EnvStepper, lane 0, environment 0 \(<lambda>\): {LENT}"):
        list(islice(stream, 4))


@pytest.mark.parametrize(
    "one, other",
    [
        (again, lambda env: again(gym.wrappers.TimeLimit(env, 9))),
        (again, lambda env: env),
        (lambda env: env, again),
        (again, lambda env: lambda: pooled(env, Counting())),
        (lambda env: lambda: pooled(Counting(), env), again),
        (lambda env: lambda: pooled(env), lambda env: pooled(env)),
    ],
)
def test_wrappers_and_vectors_share_their_environments(one, other):
    mine = Counting()
    first = iter(EnvStepper(one(mine), Plain()))
    second = iter(EnvStepper(other(mine), Plain()))
    next(first), next(second)
    with pytest.raises(EnvError, match=LENT):
        next(first)
    next(second)
    assert mine not in Ledger.closed


def test_the_earlier_iteration_leaves_open_what_it_lost():
    mine = Counting()
    first = iter(EnvStepper([again(mine), Counting], Plain()))
    second = iter(EnvStepper(again(mine), Plain()))
    next(first), next(second)
    first.close()
    assert len(Ledger.closed) == 1 and not mine.is_closed
    next(second)
    second.close()
    assert mine.is_closed


@pytest.mark.parametrize(
    "source",
    [
        lambda one: [again(one), Counting, again(one)],
        lambda one: [one, Counting, again(gym.wrappers.TimeLimit(one, 9))],
        lambda one: lambda: pooled(one, Counting(), one),
    ],
)
def test_one_object_twice_in_a_batch(source):
    match = r"^EnvStepper, lane 0, environment 2 \(<lambda>\): the factory made no environment of its own.*got that of environment 0"
    with pytest.raises(EnvError, match=match):
        next(iter(EnvStepper(source(Counting()), Plain(), close=False)))


def test_a_refused_batch_ends_the_use_of_what_it_closes():
    mine = Counting()
    first = iter(EnvStepper(again(mine), Plain()))
    next(first)
    with pytest.raises(EnvError, match="no environment of its own"):
        next(iter(EnvStepper(again(mine), Plain(), 2)))
    with pytest.raises(EnvError, match=LENT):
        next(first)
    assert Ledger.closed == [mine]


@pytest.mark.parametrize("close", [True, False])
def test_an_iteration_that_is_over_holds_no_environment(close):
    made = []

    def making():
        made.append(weakref.ref(env := Counting()))
        return env

    for _ in range(3):
        tick = next(iter(EnvStepper(making, Plain(), 2, close=close)))  # a tick holds the batch
        Ledger.clear()
        gc.collect()
        assert [ref() for ref in made] == [None] * len(made) and tick.source.envs is not None


# --- refused where it would be copied

REASON = (
    "an environment instance cannot be copied. "
    "Expected a gymnasium id or a factory, from which each {} makes its own, got an instance and {}"
)


@pytest.mark.parametrize(
    "make",
    [
        lambda env: Lanes(collected(env), 2),
        lambda env: rollouts(env, Plain(), n_envs=None, lanes=2),
        lambda env: Lanes(collected(IterableWrapper([env], deepcopy=False)), 2),
        lambda env: replace(Lanes(collected(Lively), 2), EnvStepper, EnvStepper(env, Plain())),
    ],
)
def test_several_lanes(make):
    with pytest.raises(
        EnvError, match=r"Lanes, environment Lively: " + REASON.format("lane", r"Lanes\(n=2\)")
    ):
        next(iter(make(Lively())))


@pytest.mark.parametrize(
    "pipe",
    [
        collected,
        lambda env: Lanes(collected(env), 1),
        lambda env: collected(IterableWrapper([env])),
    ],
)
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_worker_processes(pipe, method):
    with pytest.raises(
        EnvError,
        match=r"ProcessReading, environment Lively: " + REASON.format("worker", "num_workers=1"),
    ):
        next(
            iter(
                DataLoader2(pipe(Lively()), reading_service=ProcessReading(1, start_method=method))
            )
        )
    with DataLoader2(pipe(Lively()), reading_service=ProcessReading(0)) as loader:
        next(iter(loader))


@pytest.mark.filterwarnings("ignore:.*os.fork.*:DeprecationWarning")
@pytest.mark.parametrize(
    "source", [lambda env: env, lambda env: IterableWrapper([env], deepcopy=False)]
)
@pytest.mark.parametrize(
    "load",
    [
        lambda pipe: torch.utils.data.DataLoader(pipe, batch_size=None, num_workers=1),
        lambda pipe: DataLoader2(
            pipe,
            reading_service=pytest.importorskip(
                "torchdata.dataloader2"
            ).MultiProcessingReadingService(1),
        ),
    ],
)
def test_workers_of_others(source, load):
    loader = load(collected(source(Lively())))
    stream = iter(loader)
    try:
        with pytest.raises(Exception, match="an environment instance cannot be copied"):
            next(stream)
    finally:
        getattr(stream, "_shutdown_workers", getattr(loader, "shutdown", None))()


def test_a_process_of_its_own_evaluates():
    with pytest.raises(
        EnvError,
        match="ParallelEvaluation, environment Lively: "
        + REASON.format("process", "ParallelEvaluation"),
    ):
        ParallelEvaluation(Lively(), Plain(), 1)
    with pytest.raises(EnvError, match="cannot be copied"):
        ParallelEvaluation([Lively, vector()], Plain(), 1)


@pytest.mark.parametrize("source", [lambda env: env, lambda env: IterableWrapper([env])])
def test_a_file_for_another_process(source, tmp_path):
    (tmp_path / "pipe").write_bytes(cloudpickle.dumps(collected(source(gym.make("CartPole-v1")))))
    code = (
        f"import cloudpickle; next(iter(cloudpickle.load(open({str(tmp_path / 'pipe')!r}, 'rb'))))"
    )
    done = run_forked(["-c", code], cwd=HERE)
    assert (
        done.returncode == 1
        and "an environment instance cannot be copied. Expected a gymnasium id or a factory"
        in done.stderr
    )


# --- who closes


BROKEN = partial(Scripted, before={"step": at(3, fail(OSError("lost")))})
UNWILLING = partial(Scripted, before={"make": fail(OSError("no disk"))})


def runs(source, **options):
    "An iteration that is left early, one that fails, and one that does not begin."
    next(iter(EnvStepper([source(Counting), source(Counting)], Plain(), **options)))
    with pytest.raises(EnvError, match="lost"):
        list(islice(EnvStepper([source(Counting), source(BROKEN)], Plain(), **options), 9))
    with pytest.raises(EnvError, match="no disk"):
        next(iter(EnvStepper([source(Counting), UNWILLING], Plain(), **options)))


@pytest.mark.parametrize("close", [True, False])
@pytest.mark.parametrize("source, n_closed", [(lambda make: make, 5), (lambda make: make(), 0)])
def test_whoever_makes_an_environment_closes_it(source, n_closed, close):
    "Instances stay open whatever happens."
    runs(source, close=close)
    assert len(Ledger.made) == 5 and len(Ledger.closed) == n_closed * close


@pytest.mark.parametrize("close", [True, False])
def test_a_vector_that_was_made(close):
    made = []

    def factory():
        made.append(gym.vector.SyncVectorEnv([Counting] * 2))
        return made[-1]

    next(iter(EnvStepper(factory, Plain(), close=close)))
    with pytest.raises(EnvError, match="cannot rest"):
        next(iter(EnvStepper(factory, Plain(), close=close, sticky=2)))
    assert [vec.closed for vec in made] == [close] * 2
    for vec in made:
        vec.close()


@pytest.mark.parametrize("close", [True, False])
@pytest.mark.parametrize(
    "run, n_tried",
    [
        (
            lambda close: next(iter(rollouts(Counting, Plain(), n_envs=2, n_steps=4, close=close))),
            0,
        ),
        (lambda close: evaluate(Counting, Plain(), 2, close=close), 2),
        (lambda close: startup(prepare(Counting, Plain(), 4, n_envs=2, close=close)).close(), 0),
    ],
)
def test_close_is_an_option_everywhere(run, n_tried, close):
    "`n_tried`: those with which an evaluation finds out whether two disturb one another; none if the user closes them."
    run(close)
    n_made = 2 + n_tried if close else 2
    assert len(Ledger.made) == n_made and len(Ledger.closed) == (n_made if close else 0)


# --- a pipe of environments


def made(cls):
    return cls()


class Making(Source):
    "Makes environments, and closes them when its stream is closed."

    def __init__(self, n=None):
        self.n = n

    def stream(self, items):
        made = []
        try:
            while len(made) != self.n:
                made.append(Lively())
                yield made[-1]
        finally:
            for env in made:
                env.close()


@pytest.mark.parametrize(
    "pipe, n",
    [
        (lambda: IterableWrapper([Lively] * 3), None),
        (lambda: IterableWrapper([Lively] * 5), 3),
        (lambda: Making(), 3),
        (lambda: IterableWrapper([Lively()] + [Lively] * 2, deepcopy=False), None),
        (lambda: IterableWrapper([Lively] * 3).map(made), None),
        (lambda: IterableWrapper([vector()], deepcopy=False), 1),
    ],
)
def test_a_pipe_gives_the_stream_of_a_list(pipe, n):
    expected = few(collected([Lively] * 3))
    pipe = collected(pipe(), n_envs=n)
    for _ in range(2):
        assert_same(few(pipe), expected)


def test_a_pipe_is_closed_after_its_environments_were_used():
    stream = iter(EnvStepper(Making(), Shaky(), n_envs=2))
    for _ in range(20):
        next(stream)
    assert len(Ledger.made) == 2 and Ledger.closed == []
    stream.close()
    assert len(Ledger.closed) == 2


def test_lanes_and_workers_make_their_own():
    pipe = Lanes(FragmentCollector(EnvStepper(Making(), Shaky(), n_envs=2), 6), 2, seed=1)
    expected = few(Lanes(FragmentCollector(EnvStepper(Lively, Shaky(), n_envs=2), 6), 2, seed=1))
    assert_same(few(pipe), expected)
    with DataLoader2(pipe, reading_service=ProcessReading(2, start_method="fork")) as loader:
        assert_same(list(islice(loader, 4)), expected)
    assert Ledger.open() == 0


def test_it_is_a_part_of_the_graph():
    source = IterableWrapper(["CartPole-v1", "CartPole-v1"])
    pipe = FragmentCollector(EnvStepper(source, Shaky()), 4)
    assert (
        nodes(pipe)[0] is source
        and "IterableWrapper" in str(draw(pipe))
        and "EnvStepper(a pipe, Shaky, n_envs=None)" in str(draw(pipe))
    )
    edited = replace(pipe, lambda p: p is source, IterableWrapper([Lively] * 3))
    assert next(iter(edited)).n_envs == 3 and find_one(pipe, EnvStepper).pipe is source
    loader = DataLoader2(
        FragmentCollector(EnvStepper(IterableWrapper([Counting] * 3), Memory()), 4)
    )
    assert next(iter(loader)).n_envs == 3


class Seen(Source):
    "Yields what it was given, and says which seed a lane gave it."

    def __init__(self, seeds):
        self.seeds, self.given = seeds, None

    def set_lane(self, lane, seed):
        self.given = lane

    def stream(self, items):
        self.seeds(self.given)
        yield Counting


def test_lanes_seed_the_pipe_too():
    lanes = []
    list(islice(Lanes(FragmentCollector(EnvStepper(Seen(lanes.append), Plain()), 2), 3), 3))
    assert lanes == [0, 1, 2]


@pytest.mark.parametrize(
    "items, match",
    [
        ([[Counting]], "environment 0: the pipe yields something else"),
        ([None], "environment 0: the pipe yields something else"),
        (["CartPole-v7"], "EnvStepper, lane 0: .*CartPole-v7"),
        ([lambda: 7], "the factory returned no environment"),
        ([gym.make("CartPole-v1")] * 2, r"environment 1 \(CartPole-v1\): .*can act only once"),
    ],
)
def test_what_a_pipe_must_not_yield(items, match):
    with pytest.raises(EnvError, match=match):
        next(iter(EnvStepper(IterableWrapper(items, deepcopy=False), Plain())))


def test_a_pipe_without_end_needs_a_number():
    with pytest.raises(EnvError, match="does not end. Expected n_envs, or a pipe that ends"):
        next(iter(EnvStepper(IterableWrapper(repeat(Counting), deepcopy=False), Plain())))
    with pytest.raises(DataError, match="an integer n_envs >= 1, got n_envs=0"):
        EnvStepper(IterableWrapper([Counting]), Plain(), n_envs=0)


def test_a_pipe_needs_an_iteration():
    with pytest.raises(GraphError, match="open only within an iteration"):
        startup(prepare(IterableWrapper([Counting]), Plain(), 4))
    with pytest.raises(EnvError, match="IterableWrapper"):
        evaluate(IterableWrapper([Counting]), Plain(), 1)
    with pytest.raises(EnvError, match="`vector` is for ids"):
        EnvStepper(IterableWrapper([Counting]), Plain(), vector="sync")
