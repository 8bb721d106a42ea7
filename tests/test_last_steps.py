"""Environments that write into their arrays again: what a vector with SAME_STEP loses is refused, and what it cannot lose passes."""

from functools import partial
from itertools import islice

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space

from rollpipe.pipes import EnvStepper
from rollpipe.pipes.data.errors import EnvError
from rollpipe.pipes.envs.wrappers import CopiesLastObs
from rollpipe.testing import check_env

ASYNC = partial(AsyncVectorEnv, context="fork")


class Idle:
    "Acts with 0."

    def step(self, stepno, *args, hx, virtual):
        return torch.zeros_like(stepno), (), {}

    def reset(self, hx, at):
        return hx


class Walk(gym.Env):
    "A walk on a line from a random place. All answers are new arrays."

    observation_space = Box(-9, 9, (2,), np.float32)
    action_space = Discrete(2)
    length = 3

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        self.steps = 0
        return self.look(), {}

    def look(self):
        return self.place.copy()

    def tell(self):
        return {}

    def step(self, action):
        self.place += 0.5 if action else -0.25
        self.steps += 1
        return self.look(), 1.0, False, self.steps == self.length, self.tell()


class Reuses(Walk):
    "All observations are one array."

    def __init__(self):
        self.memory = np.zeros(2, np.float32)

    def look(self):
        self.memory[:] = self.place
        return self.memory


class LongReuses(Reuses):
    length = 10_000


class ReusesInStep(Reuses):
    "`reset` returns a copy, but writes into the array that `step` has returned."

    def reset(self, **given):
        obs, info = super().reset(**given)
        return obs.copy(), info


class ReusesPart(Reuses):
    "One leaf of a dict is used again."

    observation_space = Dict(fresh=Walk.observation_space, same=Walk.observation_space)

    def look(self):
        return dict(fresh=self.place.copy(), same=super().look())


class Buffered(gym.ObservationWrapper):
    "A wrapper that keeps one array for what it returns."

    def __init__(self, env):
        super().__init__(env)
        self.memory = np.zeros(2, np.float32)

    def observation(self, obs):
        self.memory[:] = obs
        return self.memory


def buffered():
    return Buffered(Walk())


class Turns(Walk):
    "Two arrays in turn: the last observation is safe."

    def __init__(self):
        self.memories = [np.zeros(2, np.float32) for _ in range(2)]

    def look(self):
        self.memories.reverse()
        self.memories[0][:] = self.place
        return self.memories[0]


class Bandit(Walk):
    "Each observation is the same, in one array."

    zeros = np.zeros(2, np.float32)

    def look(self):
        return self.zeros


class TellsAgain(Walk):
    "The infos are one array."

    def __init__(self):
        self.memory = np.zeros(2, np.float32)

    def reset(self, **given):
        obs, _ = super().reset(**given)
        self.memory[:] = 0
        return obs, {}

    def tell(self):
        self.memory[:] = self.place
        return dict(at=self.memory, steps=self.steps)


def vectors(make, *makes, mode=AutoresetMode.SAME_STEP):
    return [
        partial(kind, [make, *(makes or [make])], autoreset_mode=mode)
        for kind in (SyncVectorEnv, ASYNC)
    ]


def wrapped(make):
    return gym.vector.VectorWrapper(make())


def first_tick(source, **kwargs):
    stream = iter(EnvStepper(source, Idle(), seed=0, **kwargs))
    try:
        next(stream)
    finally:
        stream.close()


REUSING = {
    "one array": (Reuses, "obs"),
    "long episodes": (LongReuses, "obs"),
    "array of step": (ReusesInStep, "obs"),
    "one leaf": (ReusesPart, "obs['same']"),
    "wrapper": (buffered, "obs"),
}


@pytest.mark.parametrize("name", REUSING)
@pytest.mark.parametrize("kind", [0, 1], ids=["sync", "async"])
def test_a_stream_refuses_last_observations_that_a_reset_changes(name, kind):
    make, leaf = REUSING[name]
    with pytest.raises(EnvError) as caught:
        first_tick(vectors(make)[kind])
    assert caught.value.leaf == leaf and "CopiesLastObs" in str(caught.value)


@pytest.mark.slow_but_one
@pytest.mark.parametrize("name", REUSING)
@pytest.mark.parametrize("kind", [0, 1], ids=["sync", "async"])
def test_check_env_tells_of_last_observations_that_a_reset_changes(name, kind):
    make, _ = REUSING[name]
    alone = check_env(make, raises=False)
    of_vector = check_env(vectors(make)[kind], raises=False)
    (said,) = [v for v in alone if v.rule.startswith("reset() does not change the last obs")]
    assert said in of_vector


def test_wrapped_vectors_and_mixed_ones_are_refused():
    for vector in vectors(Walk, Reuses):
        with pytest.raises(EnvError, match="reset"):
            first_tick(vector)
        with pytest.raises(EnvError, match="reset"):
            first_tick(partial(wrapped, vector))


@pytest.mark.parametrize(
    "makes",
    [
        [lambda make=make: make() for make in (Walk, Reuses)],
        [partial(lambda make: make(), make) for make in (Walk, Reuses)],
    ],
)
def test_makers_that_share_their_code(makes):
    vector = partial(SyncVectorEnv, makes, autoreset_mode=AutoresetMode.SAME_STEP)
    with pytest.raises(EnvError, match="reset"):
        first_tick(vector)


def test_a_test_makes_one_environment_of_a_kind():
    made = []

    def maker(rank):
        def make():
            made.append(rank)
            return Walk()

        return make

    first_tick(lambda: SyncVectorEnv([maker(b) for b in range(5)], autoreset_mode="SameStep"))
    assert made == [0, 1, 2, 3, 4, 0]


def test_a_vector_that_is_lent_is_refused_and_stays_open():
    vector = SyncVectorEnv([Reuses], autoreset_mode=AutoresetMode.SAME_STEP)
    with pytest.raises(EnvError, match="reset"):
        first_tick(vector)
    assert not vector.closed
    vector.close()


@pytest.mark.parametrize("make", [Walk, Turns, Bandit, lambda: CopiesLastObs(Reuses())])
def test_last_observations_that_stay_pass(make):
    for vector in vectors(make):
        for _ in islice(EnvStepper(vector, Idle(), seed=0), 20):
            pass


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED])
def test_other_modes_may_reuse_arrays(mode):
    for vector in vectors(Reuses, mode=mode):
        first_tick(vector)


def test_the_test_leaves_the_stream_as_it_is():
    "An environment that draws from the global generators gives what it gives without the test."

    class Global(Walk):
        def look(self):
            return np.random.uniform(-1, 1, 2).astype(np.float32)

    def observations(makes, **kwargs):
        np.random.seed(5)
        return [t.state.obs for t in islice(EnvStepper(makes, Idle(), seed=0, **kwargs), 4)]

    for a, b in zip(observations([Global] * 2), observations(vectors(Global)[0])):
        np.testing.assert_array_equal(a, b)


def test_infos_that_a_reset_changes():
    "A vector with processes sends them after the reset; one without copies them before."
    sync, processes = vectors(TellsAgain)
    first_tick(sync)
    with pytest.warns(UserWarning, match=r"info\['at'\]"):
        first_tick(processes)
    first_tick(processes, info_keys=["steps"])


class Foreign(VectorEnv):
    "A vector of another library, whose last observations are its present ones where `loses`."

    single_observation_space = observation_space = None
    single_action_space = Walk.action_space
    metadata = dict(autoreset_mode=AutoresetMode.SAME_STEP)

    def __init__(self, make, loses, n=2):
        self.envs = [make() for _ in range(n)]
        self.num_envs = n
        self.loses = loses
        self.single_observation_space = self.envs[0].observation_space
        self.observation_space = batch_space(self.single_observation_space, n)
        self.action_space = batch_space(self.single_action_space, n)

    def reset(self, *, seed=None, options=None):
        obs = [env.reset(seed=seed + b)[0] for b, env in enumerate(self.envs)]
        return self.joined(obs), {}

    def joined(self, obs):
        if isinstance(obs[0], dict):
            return {key: np.stack([x[key] for x in obs]) for key in obs[0]}
        return np.stack(obs)

    def step(self, actions):
        answers = [env.step(a) for env, a in zip(self.envs, actions)]
        over = np.array([x[3] for x in answers])
        obs = final = [x[0] for x in answers]
        infos = {}
        if over.any():
            obs = [env.reset()[0] if end else x for env, x, end in zip(self.envs, obs, over)]
            if self.loses:
                final = [self.loses(x, y) for x, y in zip(final, obs)]
            infos = dict(final_obs=self.joined(final), _final_obs=over)
        return self.joined(obs), np.ones(len(obs)), np.zeros(len(obs), bool), over, infos


@pytest.mark.parametrize(
    "make, loses, leaf",
    [
        (Walk, lambda last, first: first, "obs"),
        (ReusesPart, None, r"obs\['same'\]"),
        (buffered, None, "obs"),
    ],
)
def test_a_vector_of_another_library_is_told_after_some_ends(make, loses, leaf):
    stream = EnvStepper(lambda: Foreign(make, loses), Idle(), seed=0)
    with pytest.warns(UserWarning, match=f"leaf {leaf}.*bit for bit") as caught:
        for _ in islice(stream, 30):
            pass
    assert len(caught) == 1


class Parity(Walk):
    "A leaf that returns to where it began with each end, and another one that does not."

    observation_space = Dict(place=Walk.observation_space, odd=Discrete(2))
    length = 4

    def look(self):
        return dict(place=self.place.copy(), odd=getattr(self, "steps", 0) % 2)

    def reset(self, **given):
        obs, info = super().reset(**given)
        return dict(obs, odd=0), info


@pytest.mark.parametrize("make", [Walk, Turns, Bandit, Parity])
def test_a_vector_of_another_library_that_loses_nothing_passes(make):
    for _ in islice(EnvStepper(lambda: Foreign(make, None), Idle(), seed=0), 60):
        pass


@pytest.mark.parametrize("vector", ["sync", "async"])
def test_vectors_of_rollpipe_keep_last_infos(vector):
    gym.register("TellsAgain-v0", TellsAgain)
    try:
        ticks = lambda source, **kwargs: [
            (np.asarray(tick.env["at"]), np.asarray(tick.state.fin))
            for tick in islice(EnvStepper(source, Idle(), n_envs=2, seed=0, **kwargs), 12)
            if "at" in tick.env
        ]
        single = ticks("TellsAgain-v0")
        several = ticks("TellsAgain-v0", vector=vector)
    finally:
        gym.registry.pop("TellsAgain-v0")
    assert len(single) == len(several) > 6 and any(fin.any() for _, fin in single)
    for (a, _), (b, _) in zip(single, several):
        np.testing.assert_array_equal(a, b)
