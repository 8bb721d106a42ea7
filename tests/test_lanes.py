"Lanes: their turns, their independence and their errors."

from functools import partial
from itertools import islice

import pytest
from reference import apply, assert_same, snapshot
from toys import Counting, Ledger, Lively, Memory, Plain, Shaky

from rollpipe.layers import CategoricalPolicy, GaussianPolicy
from rollpipe.pipes import (
    EnvError,
    EnvStepper,
    FragmentCollector,
    FragmentStacker,
    Lanes,
    Pipe,
    ProcessReading,
)
from rollpipe.pipes.graph.torchdata import DataLoader2, IterableWrapper


def pipeline(source, actor, n, seed=0, n_steps=4, n_envs=2):
    return Lanes(FragmentCollector(EnvStepper(source, actor, n_envs), n_steps), n, seed)


def by_lane(pipe, n_items):
    "lane -> snapshots of its fragments"
    found = {}
    for f in islice(pipe, n_items):
        found.setdefault(int(f.lane[0]), []).append(snapshot(f))
    return found


WORLDS = {
    "memory": (Counting, lambda: Memory()),
    "gaussian": (Lively, lambda: GaussianPolicy.for_env(Lively, seed=0)),
    "categorical": ("CartPole-v1", lambda: CategoricalPolicy.for_env("CartPole-v1", seed=0)),
    "global": (Lively, lambda: Shaky()),
}


def test_lanes_take_turns():
    told = [(int(f.lane[0]), int(f.seq[0])) for f in islice(pipeline(Counting, Plain(), 3), 7)]
    assert told == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (0, 2)]


def test_lanes_of_ticks():
    "The seam may be anywhere behind the stepper."
    assert [t.lane for t in islice(Lanes(EnvStepper(Counting, Plain()), 2, 0), 5)] == [
        0,
        1,
        0,
        1,
        0,
    ]


@pytest.mark.parametrize("world", WORLDS)
def test_a_lane_does_not_depend_on_its_neighbours(world):
    "Lane k is the same among 3 as among 5 lanes, and lane 0 the same as alone."
    source = WORLDS[world][0]
    actor = WORLDS[world][1]()
    alone, three, five = (by_lane(pipeline(source, actor, n), 3 * n) for n in (1, 3, 5))
    for lane in range(3):
        assert_same(three[lane], five[lane])
    assert_same(alone[0], three[0])
    assert len(five[4]) == 3


@pytest.mark.parametrize("world", ["gaussian", "categorical", "global"])
def test_lanes_differ(world):
    "Every lane and every environment has a seed of its own."
    source = WORLDS[world][0]
    actor = WORLDS[world][1]()
    lanes = by_lane(pipeline(source, actor, 3), 3)
    starts = {tuple(lanes[lane][0].state.obs[0, b].tolist()) for lane in lanes for b in range(2)}
    noise = {
        tuple(lanes[lane][0].state.act[:, b].ravel().tolist()) for lane in lanes for b in range(2)
    }
    assert len(starts) == 6 and (len(noise) == 6 or world == "categorical")


def test_the_seed_may_be_given_to_the_stepper():
    "Then each lane gets a child of it."
    make = lambda seed: Lanes(FragmentCollector(EnvStepper(Lively, actor, 2, seed=seed), 4), 3)
    actor = GaussianPolicy.for_env(Lively)
    a, b, c = (by_lane(make(seed), 6) for seed in (0, 0, 1))
    assert_same(a, b)
    assert (
        len(
            {
                lanes[k][0].state.obs[0, e].tobytes()
                for lanes in (a, c)
                for k in range(3)
                for e in range(2)
            }
        )
        == 12
    )


@pytest.mark.parametrize("seed, own", [(0, None), (0, 3), (None, 3)])
def test_a_random_pipe_of_torch_gets_a_seed_of_its_own_in_each_lane(seed, own):
    def make():
        envs = IterableWrapper([partial(Counting, tag=tag) for tag in range(20)]).shuffle()
        return pipeline(envs if own is None else envs.set_seed(own), Plain(), 3, seed, n_envs=4)

    def tags(stream):
        return [tuple(f.state.obs[0, :, 0].tolist()) for f in islice(stream, 3)]

    first = tags(make())
    assert first == tags(make()) and len({*first}) == 3
    for workers in (0, 2) if seed is not None else ():
        with DataLoader2(make(), reading_service=ProcessReading(workers)) as loader:
            assert tags(loader) == first


def test_the_graph_above_is_not_used_itself():
    "Lanes work on copies: iterating them leaves the pipe above as it was."
    above = FragmentCollector(EnvStepper(Counting, Plain()), 2)
    stream = iter(above)
    first = next(stream)
    assert [int(f.lane[0]) for f in islice(Lanes(above, 2, 0), 4)] == [0, 1, 0, 1]
    second = next(stream)
    assert int(first.seq[0]) == 0 and int(second.seq[0]) == 1


def test_a_lane_that_ends_leaves_the_turn():
    class Unequal(Pipe):
        "Lane k gives k + 1 items."

        lane = 0

        def set_lane(self, lane, seed):
            self.lane = lane

        def stream(self, items):
            yield from islice(items, self.lane + 1)

    pipe = Lanes(Unequal(FragmentCollector(EnvStepper(Counting, Plain()), 2)), 3, 0)
    assert [int(f.lane[0]) for f in pipe] == [0, 1, 2, 1, 2, 2]


def test_several_steppers_in_a_lane_get_different_seeds():
    class Zip(Pipe):
        def __init__(self, pipe, other):
            super().__init__(pipe)
            self.other = other

        def stream(self, items):
            yield from zip(items, iter(self.other))

    actor = GaussianPolicy.for_env(Lively)
    [(a, b)] = islice(Lanes(Zip(EnvStepper(Lively, actor), EnvStepper(Lively, actor)), 1, 0), 1)
    assert (a.state.obs != b.state.obs).all()


def test_an_error_names_its_lane_and_closes_all():
    "The environment of lane 2 fails at its 5th step."
    Ledger.clear()

    class Fails(Counting):
        def step(self, action):
            if Ledger.made.index(self) == 5 and self.count == 4:
                raise ValueError("out of petrol")
            return super().step(action)

    pipe = FragmentStacker(pipeline(lambda: Fails([(9, "term")]), Plain(), 3, n_steps=3), 3)
    stream = iter(pipe)
    assert next(stream).n_envs == 6
    with pytest.raises(
        EnvError,
        match=r"EnvStepper, lane 2, environment 1 \(.*\): step\(\) raised ValueError: out of petrol",
    ) as kept:
        next(stream)
    assert kept.tb and len(Ledger.made) == 6 and Ledger.open() == 0


def test_closing_an_environment_that_fails_to_close_leaves_no_other_open():
    Ledger.clear()

    class Stuck(Counting):
        def close(self):
            super().close()
            if Ledger.made.index(self) == 1:
                raise OSError("stuck")

    with pytest.warns(UserWarning, match="stuck"):
        stream = iter(pipeline(lambda: Stuck(), Plain(), 3))
        next(stream), next(stream), next(stream)
        stream.close()
    assert len(Ledger.made) == 6 and Ledger.open() == 0


def test_recurrent_state_stays_in_its_lane():
    actor = Memory()
    plans = [[(3, "trunc")], [(5, "term")]]
    lanes = by_lane(
        Lanes(
            FragmentCollector(EnvStepper([lambda p=p: Counting(p) for p in plans], actor), 4), 2, 0
        ),
        6,
    )
    assert_same(
        apply(lambda x: x, [f._replace(lane=None) for f in lanes[0]]),
        [f._replace(lane=None) for f in lanes[1]],
    )


class Frozen(Exception):
    "As a frozen dataclass: nobody may change it."

    def __setattr__(self, name, value):
        raise AttributeError("frozen")


def test_an_exception_that_nobody_may_change_arrives_as_it_is():
    class Fails(Pipe):
        def stream(self, items):
            yield next(items)
            raise Frozen("of the user")

    lanes = iter(
        Lanes(
            Fails(
                FragmentCollector(
                    EnvStepper("CartPole-v1", CategoricalPolicy.for_env("CartPole-v1"), 1), 4
                )
            ),
            1,
            seed=0,
        )
    )
    next(lanes)
    with pytest.raises(Frozen, match="of the user"):
        next(lanes)
