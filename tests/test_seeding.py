"One integer fixes everything, and nothing else is disturbed."

import random
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import assert_same, snapshot
from toys import Counting, Ledger, Lively, Plain, Shaky
from worker_cases import Global

from rollpipe.layers import CategoricalPolicy, GaussianPolicy
from rollpipe.pipes import (
    EnvStepper,
    FragmentCollector,
    Lanes,
    Minibatcher,
    ProcessReading,
    on_policy,
    rollouts,
)
from rollpipe.pipes.data.errors import DataError
from rollpipe.pipes.graph.torchdata import DataLoader2, InProcessReadingService
from rollpipe.pipes.keeping.random_states import GlobalRandomStates

ACTORS = {"explicit": lambda: GaussianPolicy.for_env(Lively, seed=0), "global": lambda: Shaky()}


def recipe(actor, seed, **kwargs):
    return on_policy(
        Lively, actor, judge, **{"n_envs": 2, "n_steps": 6, "lanes": 2, **kwargs}, seed=seed
    )


def judge(obs):
    return obs.sum(-1)


def take(pipe, n):
    return [snapshot(f) for f in islice(pipe, n)]


@pytest.mark.parametrize("kind", ACTORS)
@settings(deadline=None, max_examples=5)
@given(seed=st.integers(0, 2**64))
def test_the_same_seed_gives_bit_identical_fragments(kind, seed):
    actor = ACTORS[kind]()
    a = take(recipe(actor, seed), 3)
    torch.manual_seed(99)
    np.random.seed(99)
    random.seed(99)
    b = take(recipe(actor, seed), 3)
    assert_same(a, b)


@pytest.mark.parametrize("kind", ACTORS)
def test_different_seeds_give_different_fragments(kind):
    actor = ACTORS[kind]()
    runs = [take(recipe(actor, seed), 1)[0] for seed in (0, 1, 2)]
    assert (
        len({run.state.obs.tobytes() for run in runs})
        == len({run.state.act.tobytes() for run in runs})
        == 3
    )
    assert all((a.state.obs[0] != b.state.obs[0]).any() for a in runs for b in runs if a is not b)


@pytest.mark.parametrize("kind", ACTORS)
def test_without_a_seed_every_iteration_is_fresh(kind):
    pipe = recipe(ACTORS[kind](), None)
    a = take(pipe, 1)[0]
    b = take(pipe, 1)[0]
    assert (a.state.obs[0] != b.state.obs[0]).any() and (a.state.act[1:] != b.state.act[1:]).any()


def test_torchs_global_seed_is_not_an_input():
    "`torch.manual_seed` neither fixes an unseeded stream nor changes a seeded one."
    actor = ACTORS["explicit"]()
    runs = []
    for seed in (None, None, 0, 0):
        torch.manual_seed(5)
        runs.append(take(recipe(actor, seed), 1)[0])
    assert (runs[0].state.obs[0] != runs[1].state.obs[0]).any()
    assert_same(runs[2], runs[3])


@pytest.mark.parametrize("kind", ACTORS)
@pytest.mark.parametrize("seed", [0, None])
def test_collecting_does_not_disturb_the_users_random_numbers(kind, seed):
    "Neither torch's, nor numpy's, nor Python's."
    actor = ACTORS[kind]()
    draws = lambda: (
        torch.randn(3).tolist(),
        np.random.rand(3).tolist(),
        [random.random() for _ in range(3)],
    )

    def start():
        torch.manual_seed(1)
        np.random.seed(1)
        random.seed(1)

    start()
    expected = [draws() for _ in range(4)]
    stream = iter(Minibatcher(recipe(actor, seed), 5, seed=seed))
    start()
    found = []
    for _ in range(4):
        found.append(draws())
        next(stream)
    assert found == expected


@pytest.mark.parametrize("kind", ACTORS)
def test_the_users_random_numbers_do_not_disturb_the_stream(kind):
    actor = ACTORS[kind]()
    found = []
    expected = take(recipe(actor, 3), 4)
    for f in islice(recipe(actor, 3), 4):
        found.append(snapshot(f))
        torch.randn(7)
        torch.manual_seed(0)
        np.random.seed(4)
        random.random()
    assert_same(found, expected)


def test_an_actor_that_fails_leaves_torchs_generator_as_it_was():
    class Fails(Shaky):
        def forward(self, *args, **kwargs):
            super().forward(*args, **kwargs)
            raise ValueError("no idea")

    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="no idea"):
        next(iter(EnvStepper(Lively, Fails(), seed=0)))
    assert torch.equal(torch.get_rng_state(), before)


def test_two_streams_at_once_do_not_disturb_one_another():
    actor = Shaky()
    expected = [take(recipe(actor, seed), 3) for seed in (0, 1)]
    streams = [iter(recipe(actor, seed)) for seed in (0, 1)]
    found = [[], []]
    for _ in range(3):
        for k, stream in enumerate(streams):
            found[k].append(snapshot(next(stream)))
    assert_same(found, expected)


def test_environments_and_actor_have_separate_random_numbers():
    "Another actor, who draws more or less, meets the same start states and the same luck."

    class Lucky(Lively):
        def step(self, action):
            return super().step(np.zeros_like(action))  # does not depend on the action

    a, b = (
        take(FragmentCollector(EnvStepper(Lucky, actor, 2, seed=0), 9), 2)
        for actor in (Shaky(), ACTORS["explicit"]())
    )
    for f, g in zip(a, b):
        assert_same(
            (f.state.obs, f.state.rew, f.state.fin), (g.state.obs, g.state.rew, g.state.fin)
        )


@pytest.mark.parametrize("source", ["CartPole-v1", Lively])
def test_episodes_of_an_environment_start_differently(source):
    "It is seeded once, so its episodes are independent draws."
    actor = (CategoricalPolicy if source == "CartPole-v1" else GaussianPolicy).for_env(
        source, seed=0
    )
    starts = set()
    for f in islice(FragmentCollector(EnvStepper(source, actor, 2, seed=0), 100), 2):
        starts |= {tuple(x.tolist()) for x in f.state.obs[f.state.fin]}
    fins = (
        sum(
            int(f.state.fin[1:].sum())
            for f in islice(FragmentCollector(EnvStepper(source, actor, 2, seed=0), 100), 2)
        )
        + 2
    )
    assert len(starts) == fins >= 6


def test_every_environment_is_seeded_once_with_a_seed_of_its_own():
    Ledger.clear()
    pipe = Lanes(
        FragmentCollector(EnvStepper(lambda: Counting([(2, "trunc")]), Plain(), 3), 4), 4, seed=0
    )
    list(islice(pipe, 8))
    seeds = [s for s in Ledger.seeds if s is not None]
    assert len(seeds) == len(set(seeds)) == 12 and len(Ledger.seeds) > 24
    Ledger.clear()
    list(islice(pipe, 8))
    assert [s for s in Ledger.seeds if s is not None] == seeds


def test_the_action_spaces_are_seeded():
    "An environment, or wrapper, that samples its own actions is reproducible."

    class Samples(Lively):
        def step(self, action):
            return super().step(self.action_space.sample() / 2)

        def __init__(self):
            super().__init__()
            self.action_space = type(self.action_space)(-1, 1, (2,))

    a, b = (
        take(FragmentCollector(EnvStepper(Samples, Shaky(), 2, seed=0), 9), 1) for _ in range(2)
    )
    assert_same(a, b)


def test_a_reading_service_seeds_what_has_no_seed():
    "`DataLoader2.seed` fixes the environments, the actions and the order of minibatches."
    actor = ACTORS["explicit"]()
    runs = []
    for seed in (7, 7, 8):
        pipe = Minibatcher(recipe(actor, None), 5)
        with DataLoader2(pipe, reading_service=InProcessReadingService()) as loader:
            loader.seed(seed)
            runs.append(take(loader, 6))
    assert_same(runs[0], runs[1])
    assert (runs[0][0].state.obs != runs[2][0].state.obs).any()


# --- environments that draw from the global generators


def globally(seed=3, lanes=3, **kwargs):
    return rollouts(Global, Plain(), n_envs=2, n_steps=6, lanes=lanes, seed=seed, **kwargs)


def test_lanes_have_global_states_of_their_own():
    "The same seed gives the same numbers whatever was drawn before, no two lanes draw the same, and nobody else's generators move."

    def states():
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    runs = []
    for k in range(2):
        random.seed(k)
        np.random.seed(k)
        torch.manual_seed(k)
        before = states()
        runs.append(take(globally(), 3))
        assert states() == before
    assert_same(*runs)
    drawn = np.concatenate([f.state.obs[..., :3].reshape(-1) for f in runs[0]])
    assert (
        len(np.unique(drawn)) > 0.9 * drawn.size
    )  # row 0 of a fragment is the last row of the one before


def test_global_states_follow_from_the_seed_that_there_is():
    def lanes(own, seed):
        return Lanes(FragmentCollector(EnvStepper(Global, Plain(), 2, seed=own), 6), 2, seed)

    assert_same(take(lanes(5, None), 4), take(lanes(5, None), 4))
    a, b, c = (
        take(lanes(*seeds), 1)[0].state.obs for seeds in ((5, None), (6, None), (None, None))
    )
    assert (a[..., :3] != b[..., :3]).any() and (a[..., :3] != c[..., :3]).any()


def test_a_graph_without_lanes_goes_on_from_the_global_states():
    pipe = FragmentCollector(EnvStepper(Global, Plain(), 2, seed=0), 6)
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()

    def again():
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])

    expected = take(pipe, 3)
    for start_method in ("fork", "forkserver"):
        again()
        with DataLoader2(
            pipe, reading_service=ProcessReading(1, start_method=start_method)
        ) as loader:
            assert_same(take(loader, 3), expected)


def test_a_lane_that_begins_again_draws_other_numbers():
    lanes = Lanes(FragmentCollector(EnvStepper(Global, Plain(), 2), 6), 2, 0)
    first, again = (lanes.global_random_states(1, lanes.root(), k) for k in range(2))

    def draw():
        return random.random(), np.random.random(), float(torch.rand(()))

    with first:
        a = draw()
    with again:
        b = draw()
    assert not set(a) & set(b)


DRAWS = {
    "uniform": lambda r: r.uniform(),
    "one normal": lambda r: r.standard_normal(),
    "three normal": lambda r: list(r.normal(size=3)),
    "integers": lambda r: list(r.randint(0, 10, 5)),
    "many": lambda r: r.bytes(5000),
    "seed": lambda r: r.seed(7),
    "nothing": lambda r: None,
}


@settings(deadline=None, max_examples=200)
@given(
    turns=st.lists(
        st.tuples(st.sampled_from(["outside", 0, 1]), st.sampled_from(sorted(DRAWS))), max_size=12
    ),
    mersenne=st.booleans(),
)
def test_each_lane_and_the_user_go_on_with_generators_of_their_own(turns, mersenne):
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.MT19937(3) if mersenne else np.random.PCG64(3))
    if not mersenne:
        turns = [
            (who, what) for who, what in turns if what != "seed"
        ]  # numpy cannot seed another global generator
    try:
        lanes = [GlobalRandomStates(), GlobalRandomStates()]
        kinds = np.random.MT19937 if mersenne else np.random.PCG64
        alone = {who: np.random.RandomState(kinds(3)) for who in ("outside", 0, 1)}
        for who, what in turns:
            wanted = DRAWS[what](alone[who])
            if who == "outside":
                assert DRAWS[what](np.random) == wanted
            else:
                with lanes[who]:
                    assert DRAWS[what](np.random) == wanted
    finally:
        np.random.set_bit_generator(before)


@pytest.mark.parametrize("seed", [-1, "one", 0.5])
def test_what_is_no_seed_is_refused_when_the_graph_is_made(seed):
    with pytest.raises(DataError, match="Lanes, leaf seed: not a seed. Expected an integer >= 0"):
        recipe(Shaky(), seed)
