"""A stream that is interrupted and goes on in another iteration equals the one that was never interrupted, bit for bit.

The state goes through the encoding of checkpoints, in which nothing can be executed.
"""
import json
from itertools import count

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import assert_same, snapshot
from tensor_worlds import CartPole, Pendulum
from toys import Counting, Lively, Memory, Plain, Shaky
from worker_cases import SPACES, WORLDS, Global, Images, change, _above, _recipe

from rollpipe.agents.checkpoint import decode, encode
from rollpipe.agents.intrinsic.distillation import Distillation
from rollpipe.agents.intrinsic.rnd import RND
from rollpipe.layers import CategoricalPolicy, Critic, GaussianPolicy, RecurrentPolicy
from rollpipe.pipes import (
    AdvantageBuffer, CheckInvariants, CheckpointError, EnvError, EnvStepper, EpisodeCollector, EpisodeStats, FragmentCollector,
    FragmentStacker, FrameStack, Lanes, Minibatcher, NStep, ObservationCast, Pipe, PipeError, ProcessReading, RewardScaler, StepMerger, Tap,
    ToDevice, find, find_one, on_policy, rollouts,
)
from rollpipe.pipes.envs.sources import Acting
from rollpipe.pipes.graph.states import restore_stream, stream_state, unknown_states
from rollpipe.pipes.graph.torchdata import DataLoader2, IterableWrapper
from rollpipe.pipes.lanes import learning_pipes
from rollpipe.pipes.resumable import keep_environments
from rollpipe.pipes.steps import Fragments, Steps
from rollpipe.pipes.taps import Meter, Throughput
from rollpipe.pipes.tensors.collector import TensorCollector

pytestmark = pytest.mark.timeout(300)


KEEPERS = {}     # world -> how the environments of each source are kept


def encoded(state):
    "The state after a checkpoint of it was written and read."
    tensors = {}
    code = json.loads(json.dumps(encode(state, tensors), allow_nan=False))
    return decode(code, {name: x.clone() for name, x in tensors.items()})


def told(pipe):
    "The state of a stream: of its iteration, and of the pipes that learn."
    return encoded((stream_state(pipe), {name: p.state_dict() for name, p in learning_pipes(pipe).items()}))


def part(world, n, start=0, state=None, service=None, lanes=2):
    "`n` batches from the `start`-th one on, after each of which the actor changes, and the state after them."
    pipe, actor = world(lanes)
    if world not in KEEPERS: KEEPERS[world] = [*keep_environments(pipe).values()]
    for source, keeper in zip(find(pipe, Acting), KEEPERS[world]): source.keeper = keeper
    assert not unknown_states(pipe)
    for _ in range(start): change(actor)
    if state is not None:
        for name, p in learning_pipes(pipe).items(): p.load_state_dict(state[1][name])
        restore_stream(pipe, state[0])
    found = []
    with DataLoader2(pipe, reading_service=service) as loader:
        items = iter(loader)
        for _ in range(n):
            found.append(snapshot(without_source(next(items))))
            change(actor)
        return found, told(loader.datapipe)


def without_source(x): return x._replace(source=None) if 'source' in getattr(x, '_fields', ()) else x


def resumes(world, n=6, cuts=None, **options):
    "Compare the whole stream with a part and the rest, for several cuts, and with parts of one batch each."
    whole, _ = part(world, n, **options)
    for k in range(1, n) if cuts is None else cuts:
        first, state = part(world, k, **options)
        rest, _ = part(world, n - k, k, state, **options)
        assert_same(whole, first + rest)
    found, state = part(world, 1, **options)
    for k in range(1, n):
        one, state = part(world, 1, k, state, **options)
        found += one
    assert_same(whole, found)


class LateInfos(Lively):
    "The first episodes have no infos, and the dtype of one grows."
    def step(self, action):
        *answer, _ = super().step(action)
        self.count = getattr(self, "count", 0) + 1
        more = {} if self.count < 15 else {"late": 1 if self.count < 40 else .5}
        return *answer, {"count": self.count, **more, **({"rare": np.float32([1, 2])} if self.count % 11 == 0 else {})}


class FromNumpy(gym.Env):
    "Draws from numpy's global generator."
    observation_space, action_space = Box(-np.inf, np.inf, (4,)), Discrete(5)
    def reset(self, *, seed=None, options=None): return self.look(), {}
    def look(self): return np.random.random(4).astype(np.float32)
    def step(self, action): return self.look(), np.random.normal(), np.random.random() < .1, False, {}


def normalized(): return gym.wrappers.NormalizeObservation(gym.wrappers.TimeLimit(Lively(), 7))
def gaussian(): return GaussianPolicy.for_env(SPACES, hidden=(8,), seed=0)


# --- single pipes

def of_ticks(make, source=Lively, actor=Shaky, **options):
    def world(lanes):
        mine = actor()
        return make(EnvStepper(source, mine, 2, seed=3, **options)), mine
    return world


def of_fragments(make, source=Lively, actor=Shaky, **options):
    return lambda lanes: _above(source, actor(), lanes, lambda p: make(FragmentCollector(p, 5)), **options)


def below(make, source=Lively, actor=Shaky, **options):
    def world(lanes):
        pipe, mine = _above(source, actor(), lanes, lambda p: FragmentCollector(p, 5), **options)
        return make(pipe), mine
    return world


PIPES = dict(
    ticks=of_ticks(lambda p: p), sticky=of_ticks(lambda p: FragmentCollector(p, 8), sticky=4),
    scaled_ticks=of_ticks(RewardScaler), scaled_fragments=of_fragments(lambda p: RewardScaler(p, gamma=.9)),
    scaled_below=below(lambda p: RewardScaler(p, gamma=.9)), scaled_batches=below(lambda p: RewardScaler(FragmentStacker(p, 2))),
    frames=of_fragments(lambda p: FrameStack(p, 3), Images, lambda: WORLDS["frames"](1)[1]),
    frames_below=below(lambda p: FrameStack(FragmentStacker(p, 2), 4), Images, lambda: WORLDS["frames"](1)[1]),
    episodes=of_ticks(lambda p: EpisodeCollector(p, 2, pad=True), LateInfos, terminal_obs=True),
    episode_lists=of_ticks(lambda p: EpisodeCollector(p, 3), Counting, Memory, terminal_obs=True),
    every_episode=of_ticks(EpisodeCollector, Counting, Plain, terminal_obs=True),
    steps=of_fragments(Steps), steps_of_batches=below(lambda p: Steps(FragmentStacker(p, 2))),
    fragments=below(lambda p: Fragments(Steps(p), 3)), merged=below(lambda p: StepMerger(Steps(p), 3)),
    minibatches=below(lambda p: Minibatcher(p, 4, 2, seed=5)),
    columns=below(lambda p: Minibatcher(p, 4, 2, seed=5), Counting, Memory),
    checked=below(lambda p: CheckInvariants(p, rate=.6), actor=gaussian),
    taps=below(lambda p: Throughput(EpisodeStats(Tap(p, id), id), id, 2)),
    cast=of_fragments(lambda p: NStep(ObservationCast(ToDevice(p, "cpu"), torch.float64), 3)),
    novelty=below(lambda p: RND(p, Distillation.for_env(SPACES, hidden=(4,), seed=0)), actor=gaussian, terminal_obs=True),
    tensors=lambda lanes: (Lanes(TensorCollector(CartPole, mine := cart(), 5, 3), lanes, 1), mine),
    tensor_ends=lambda lanes: (TensorCollector(lambda n_envs: Pendulum(n_envs, max_steps=3), mine := Turning(), 4, 2, seed=1), mine),
)


class Turning(Memory):
    "Actions in Box(1) from the memory."
    def look(self, obs): return obs[..., 0].round()
    def choose(self, number): return (number % 5)[..., None] / 2. - 1


def cart(): return CategoricalPolicy.for_env((CartPole.observation_space, CartPole.action_space), hidden=(4,), seed=0)


@pytest.mark.parametrize("name", PIPES)
def test_a_pipe_goes_on(name): resumes(PIPES[name], 7)


@pytest.mark.parametrize("name", ["episodes", "merged", "steps_of_batches", "minibatches", "fragments"])
def test_a_pipe_goes_on_within_what_it_cuts_or_joins(name):
    "Longer, so that many items lie between two reads."
    whole, _ = part(PIPES[name], 45)
    for k in range(3, 45, 5):
        first, state = part(PIPES[name], k)
        assert_same(whole, first + part(PIPES[name], 45 - k, k, state)[0])


# --- whole pipelines

def scaled(lanes): return _recipe(actor := gaussian(), critic=Critic.for_env(SPACES, seed=0), reward_scale="learn", lanes=lanes)[0], actor
def above_lanes(lanes): return _recipe(gaussian(), rollouts, lanes=lanes, edits=[RewardScaler.inserter(after=FragmentCollector)])
def rests(lanes): return _recipe(gaussian(), rollouts, lanes=lanes, sticky=True)
def infos(lanes): return _recipe(gaussian(), rollouts, LateInfos, lanes=lanes)
def wrapped(lanes): return _recipe(gaussian(), rollouts, normalized, lanes=lanes)
def numpy_env(lanes): return _recipe(Plain(), rollouts, FromNumpy, lanes=lanes)
def several(lanes): return _recipe(gaussian(), rollouts, [Lively, LateInfos], lanes=lanes)
def onnx(lanes): return _recipe(gaussian(), rollouts, lanes=lanes, engine="onnxruntime")
def onnx_memory(lanes):
    return _recipe(RecurrentPolicy.for_env(SPACES, hidden=(5,), memory=6, past=True, seed=1), rollouts, lanes=lanes, engine="onnxruntime")
def stacked(lanes): return _above(Images, WORLDS["frames"](1)[1], lanes, lambda p: Minibatcher(FrameStack(FragmentCollector(p, 5), 3), 4))
def stacked_steps(lanes): return _above(Images, WORLDS["frames"](1)[1], lanes, lambda p: Steps(FrameStack(FragmentCollector(p, 5), 3)))
def of_tensors(lanes): return _recipe(cart(), rollouts, CartPole, lanes=lanes)


MORE = dict(scaled=scaled, above_lanes=above_lanes, rests=rests, infos=infos, wrapped=wrapped, numpy_env=numpy_env, several=several, onnx=onnx,
            onnx_memory=onnx_memory, stacked=stacked, stacked_steps=stacked_steps, of_tensors=of_tensors)
ALL = {**{name: world for name, world in WORLDS.items() if name not in ("finite", "unequal")}, **MORE}


@pytest.mark.parametrize("name", ALL)
def test_a_pipeline_goes_on(name):
    if name.startswith("onnx"): pytest.importorskip("onnxruntime")
    resumes(ALL[name], 5, cuts=[2, 3])


SERVICES = dict(none=lambda **options: None, one=lambda **options: ProcessReading(1, **options), two=lambda **options: ProcessReading(2, **options),
                spawned=lambda **options: ProcessReading(2, start_method="spawn", **options))


@pytest.mark.parametrize("name, services", [
    ("scaled", ["none", "two", "one"]), ("recurrent", ["two", "none", "one"]), ("wrapped", ["one", "two", "none"]),
    ("infos", ["two", "one", "none"]), ("frames", ["two", "none", "two"]), ("episodes", ["one", "none", "two"]),
    ("global_env", ["two", "none", "one"]), ("vector", ["one", "two", "none"]), ("global_generator", ["spawned", "none", "spawned"]),
    ("stacked", ["two", "one", "none"]), ("of_tensors", ["two", "none", "one"])])
@pytest.mark.parametrize("lag", [0, 1])
def test_the_number_of_workers_changes(name, services, lag):
    "A part of two batches with each service, after a part of one batch with the first one."
    whole, _ = part(ALL[name], 7, service=ProcessReading(2, lag=lag) if lag else None, lanes=3)
    found, state = part(ALL[name], 1, service=SERVICES[services[0] if not lag else "two"](lag=lag), lanes=3)
    for service in services:
        if lag and service == "none": service = "one"
        more, state = part(ALL[name], 2, len(found), state, SERVICES[service](lag=lag), lanes=3)
        found += more
    assert_same(whole, found)
