"Whatever is wrong: a clear error that names pipe, lane, environment, leaf, what was expected and what came."

import re
import sys
from collections import OrderedDict
from functools import partial
from itertools import islice
from types import ModuleType
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import (
    Box,
    Dict,
    Discrete,
    Graph,
    MultiBinary,
    MultiDiscrete,
    Sequence,
    Text,
    Tuple,
)
from tensor_worlds import CartPole as Pole
from tensor_worlds import Planned
from toys import (
    Acts,
    Constant,
    Counting,
    Failing,
    Ledger,
    Nested,
    NestedMemory,
    Plain,
    Scripted,
    Valued,
    sampled,
)

from rollpipe.cli.main import main
from rollpipe.layers import (
    GRU,
    MLP,
    ActionCritic,
    Critic,
    DeterministicPolicy,
    MLPPolicy,
    QPolicy,
    SquashedPolicy,
    encoder_for,
)
from rollpipe.pipes import (
    ActorError,
    AdvantageBuffer,
    CheckInvariants,
    DataError,
    EnvError,
    EnvStepper,
    FragmentCollector,
    FragmentStacker,
    Lanes,
    Minibatcher,
    NStep,
    PipeError,
    Replay,
    ReplayMemory,
    RewardScaler,
    SpaceError,
    StepMerger,
    on_policy,
    optimize,
    replayed,
)
from rollpipe.pipes.data.errors import CheckpointError
from rollpipe.pipes.envs.factories import space_spec
from rollpipe.pipes.envs.kept import Keeper
from rollpipe.pipes.envs.single import is_end
from rollpipe.pipes.graph.torchdata import IterableWrapper
from rollpipe.pipes.recording.replayer import parts_in
from rollpipe.pipes.tensors.collector import TensorCollector
from rollpipe.pipes.workers.reading import ProcessReading
from rollpipe.runs import resume, start, train
from rollpipe.runs.changes import options_in
from rollpipe.runs.folder import load_run
from rollpipe.runs.mailbox import view
from rollpipe.settings.algorithms import ALGORITHMS
from rollpipe.settings.config import make_config

LONG = [(99, "term")]
CUT = [(3, "trunc")]
nan = float("nan")
inf = float("inf")


def failure(error, make, *text, n=12):
    """Run `make()`, a pipe or a function that makes one. Returns its `error`.

    Its message contains all text, in that order; " … " separates text as well.
    """
    in_order = ".*".join(map(re.escape, " … ".join(text).split(" … ")))
    with pytest.raises(error, match=f"(?s){in_order}") as caught:
        for _ in islice(make() if callable(make) else make, n):
            pass
    assert isinstance(caught.value, PipeError) and Ledger.open() == 0
    return caught.value


def refused_by_the_command_line(capsys, text, *words):
    "A command ends with 2 and one line on stderr, which has all the text."
    assert main([str(word) for word in words]) == 2
    line = capsys.readouterr().err
    assert line.startswith("error: ") and line.count("\n") == 1
    assert all(part in line for part in text.split(" … ")), line


@pytest.fixture(autouse=True)
def clean_ledger():
    Ledger.clear()


def tampered(base=Counting, when=3, plan=LONG, **change):
    """A factory of environments that behave, but whose step (or reset) number `when` answers with a `change`.

    `change`: functions of the names obs, rew, term, trunc, info, whole (a step's answer), reset (its answer),
    or first (the observation of a reset).
    """

    def changed(n, answer, whole, *names):
        if n != when:
            return answer
        leaves = [change.get(name, same)(x) for name, x in zip(names, answer, strict=True)]
        return change.get(whole, tuple)(leaves)

    class Tampered(base):
        n_steps = n_resets = 0

        def reset(self, **kwargs):
            self.n_resets += 1
            return changed(self.n_resets, super().reset(**kwargs), "reset", "first", "first info")

        def step(self, action):
            self.n_steps += 1
            names = "obs", "rew", "term", "trunc", "info"
            return changed(self.n_steps, super().step(action), "whole", *names)

    return lambda: Tampered(plan)


def same(x):
    return x


def fine(base=Counting):
    return lambda: base(LONG)


def stepper(factory, base=Counting, actor=None, **kwargs):
    "Environment 0 is fine, environment 1 is not."
    return EnvStepper(
        [fine(base), factory], actor or (NestedMemory() if base is Nested else Plain()), **kwargs
    )


WHO = "EnvStepper, lane 0, environment 1 (<lambda>)"


# --- where environments come from


def plain(source, *args, **kwargs):
    return EnvStepper(source, Plain(), *args, **kwargs)


IDS = {
    "CartPol-v1": "CartPole-v1",
    "cartpole-v1": "CartPole-v1",
    "Pendulum": "Pendulum-v1",
    "pendulum-v1": "Pendulum-v1",
    "CartPole-v7": "CartPole-v1",
    "MountainCarContinous-v0": "MountainCarContinuous-v0",
}


@pytest.mark.parametrize("source, near", IDS.items())
def test_unknown_ids_name_their_nearest(source, near):
    failure(EnvError, lambda: plain(source), repr(source), "Expected … known ids", near)


NO_SOURCE = "environment source … Expected a gymnasium id or a callable, got "


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: plain("Xyzzyqwv"), "'Xyzzyqwv' … Expected"),
        (lambda: plain("no such namespace/Game-v0"), "'no such namespace/Game-v0'"),
        (lambda: plain(""), "''"),
        (lambda: on_policy("CartPol-v1", Plain()), "'CartPol-v1' … CartPole-v1"),
        (lambda: plain(None), NO_SOURCE + "None"),
        (lambda: plain(3), NO_SOURCE + "3"),
        (lambda: plain({}), NO_SOURCE + "{}"),
        (lambda: plain(Old()), "a `gymnasium.Env` … a gymnasium id or a factory … got Old"),
        (lambda: plain(Pole()), "a `TensorEnv` goes to `TensorCollector`, got CartPole"),
        (lambda: stepper(lambda: "a game"), "environment 1 … gymnasium.Env … got str"),
        (lambda: stepper(lambda: None), "lane 0, environment 1 … got NoneType"),
        (
            lambda: plain("CartPole-v1", env_kwargs=dict(colour="red")),
            "EnvStepper, lane 0, environment 0 (CartPole-v1) … TypeError … colour",
        ),
        (lambda: plain(Counting, env_kwargs=dict(tag=1)), "env_kwargs … Expected"),
        (lambda: plain([]), "number of environments … 0 sources"),
        (lambda: plain([Counting, Counting], 3), "multiple of 2 … n_envs=3"),
    ],
)
def test_unusable_sources(make, text):
    failure(EnvError, make, text)


class Old:
    "It is stepped like an environment, but is none of gymnasium's."

    def reset(self):
        return 0

    def step(self, action):
        return 0, 0.0, False, {}


def test_a_factory_that_fails():
    def broken():
        raise ValueError("no disk")

    text = "EnvStepper, lane 0, environment 1 (broken) … ValueError: no disk"
    error = failure(EnvError, stepper(broken), text)
    assert isinstance(error.__cause__, ValueError) and len(Ledger.made) == 1


def with_spaces(**spaces):
    "A factory of environments with these spaces."
    return partial(Scripted, LONG, see=sampled, **spaces)


@pytest.mark.parametrize(
    "name, other", [("observation_space", Box(-1, 1, (4,))), ("action_space", Discrete(6))]
)
def test_mismatching_spaces(name, other):
    failure(
        EnvError,
        plain([Counting, Counting, partial(Scripted, **{name: other})]),
        f"EnvStepper, lane 0, environment 2 (partial) … {name}",
        f"Expected … as in environment 0 … got {other}",
    )
    assert len(Ledger.made) == 3


# --- unsupported spaces


class Strange(gym.Space):
    "A space that gymnasium does not know."

    def __repr__(self):
        return "a strange space"


NO_FORM = "Expected Box, Discrete"
SPACES = [  # space, path of the part that is refused, what is said
    (Text(4), "", NO_FORM),
    (Sequence(Discrete(2)), "", NO_FORM),
    (Graph(Box(-1, 1, (2,)), None), "", NO_FORM),
    (Strange(), "", NO_FORM),
    (Dict(a=Discrete(2), b=Tuple((Discrete(2), Text(4)))), "['b'][1]", NO_FORM),
    (Tuple((Sequence(Discrete(2)),)), "[0]", NO_FORM),
    (Dict({}), "", "empty"),
    (Tuple(()), "", "empty"),
    (Dict(a=Discrete(2), b=Dict({})), "['b']", "empty"),
    (Tuple((Discrete(2), Tuple(()))), "[1]", "empty"),
]


@pytest.mark.parametrize("space, path, said", SPACES, ids=str)
@pytest.mark.parametrize("name", ["observation_space", "action_space"])
def test_unsupported_and_empty_spaces(name, space, path, said):
    "Nothing can be observed in an empty space, and an empty part of an action would leave no action at all."
    part = eval(f"space{path}", dict(space=space))
    failure(
        SpaceError,
        plain(with_spaces(**{name: space})),
        f"EnvStepper, lane 0, environment 0 (partial) … leaf {name}{path}:",
        said,
        "got" if said == "empty" else f"got {part}",
    )


# --- environments that fail


THREE = Box(-1, 1, (3,))
LONGER = MultiDiscrete([2] * 600 + [3] + [2] * 599)


@pytest.mark.parametrize(
    "name, mine, theirs",
    [
        ("action_space", Discrete(2), Discrete(4)),
        ("action_space", Discrete(2), Discrete(2, start=1)),
        ("action_space", MultiDiscrete([2, 2]), MultiDiscrete([2, 3])),
        ("action_space", MultiDiscrete([2] * 1200), LONGER),
        ("action_space", Box(-1, 1, (2,)), THREE),
        ("action_space", Tuple((Discrete(2), THREE)), Tuple((Discrete(3), THREE))),
        ("observation_space", THREE, Box(-1, 1, (4,))),
        ("observation_space", Discrete(4), Discrete(2)),
        ("observation_space", Box(0, 255, (3,), np.uint8), Box(0, 255, (3,))),
        ("observation_space", Dict(a=Discrete(2)), Dict(b=Discrete(2))),
        ("observation_space", Dict(a=Discrete(2)), Dict(a=Discrete(2), b=Discrete(2))),
    ],
)
def test_an_actor_for_other_spaces(name, mine, theirs):
    spaces = dict(observation_space=THREE, action_space=Discrete(2))
    env = with_spaces(**spaces | {name: theirs})
    kind = name.removesuffix("_space")
    failure(
        ActorError,
        EnvStepper(env, MLPPolicy.for_env(tuple((spaces | {name: mine}).values()))),
        f"lane 0, leaf {name}: MLPPolicy was made for other {kind}s … Expected {theirs}, got {mine}",
    )
    next(iter(EnvStepper(env, MLPPolicy.for_env(tuple((spaces | {name: theirs}).values())))))


def test_the_lane_is_named():
    def sixth(env):
        if Ledger.made.index(env) == 5:
            raise ValueError("boom")

    source = partial(Scripted, before={"step": sixth})
    pipe = Lanes(FragmentCollector(EnvStepper(source, Plain(), 2), 4), 3, seed=0)
    failure(
        EnvError,
        AdvantageBuffer(pipe, lambda obs: obs[..., 0]),
        "EnvStepper, lane 2, environment 1 (partial) … boom",
    )


@pytest.mark.parametrize(
    "change, answer, call, numbers",  # the numbers of the message
    [
        ("whole", lambda out: out[:4], "step()", "54"),
        ("whole", lambda out: [*out, 1], "step()", "5"),
        ("whole", lambda out: None, "step()", ""),
        ("whole", lambda out: out[0], "step()", "54"),
        ("reset", lambda out: out[0], "reset()", "2"),
        ("reset", lambda out: (out[0],), "reset()", "21"),
        ("reset", lambda out: None, "reset()", ""),
    ],
)
@pytest.mark.parametrize("when", [1, 2])
def test_answers_of_the_wrong_arity(change, answer, call, numbers, when):
    "Such as those of the old gym interface."
    source = tampered(when=when, plan=[(2, "term")], **{change: answer})
    text = f"{call} gave another answer … Expected (observation, "
    error = failure(EnvError, stepper(source), WHO, text)
    assert all(number in str(error) for number in numbers)


@pytest.mark.parametrize(
    "space, seen",
    [
        (Box(-1, 1, (2,)), np.zeros(2, np.float32)),
        (Dict(a=Box(-1, 1, ()), b=Box(-1, 1, ())), dict(a=np.float32(0), b=np.float32(0))),
    ],
    ids=["two numbers", "a dict of two"],
)
def test_an_observation_alone_from_reset(space, seen):
    "`reset` of the old interface: both can be unpacked, but are no pair of observation and info."
    source = tampered(seeing(space), 1, reset=lambda _: seen)
    text = "environment 0 (<lambda>): reset() gave another answer … Expected (observation, info)"
    failure(EnvError, plain(source), text)


# --- observations


def put(value, *index):
    "A function that writes `value` at `index`."

    def change(x):
        x = np.array(x)
        x[index] = value
        return x

    return change


def inside(key, change):
    return lambda obs: {**obs, key: change(obs[key])}


@pytest.mark.parametrize("value", [nan, inf, -inf])
@pytest.mark.parametrize("key, place", [("place", [2]), ("exact", [])])
@pytest.mark.parametrize(
    "name, when, plan",
    [
        ("obs", 3, LONG),
        ("first", 1, LONG),
        ("first", 2, CUT),
        ("first", 2, [(3, "term")]),
    ],
)
def test_non_finite_parts_of_observations(name, when, plan, key, place, value):
    "In float32 and in float64; for observations of one array see the laws of environments."
    failure(
        EnvError,
        stepper(tampered(Nested, when, plan, **{name: inside(key, put(value, *place))}), Nested),
        WHO,
        f"leaf obs['{key}'] … non-finite … Expected finite … got",
    )


@pytest.mark.parametrize("dtype, large", [(np.float32, 1e30), (np.float64, 1e200)])
def test_large_numbers_are_finite(dtype, large):
    "1e30 squares to infinity in float32, and is fine."

    def ticks(see):
        space = Box(-inf, inf, (4,), dtype)
        return plain(partial(Scripted, LONG, observation_space=space, see=see))

    failure(PipeError, ticks(large))  # one number in place of four
    late = ticks(lambda env: np.full(4, large if env.count == 2 else 0, dtype))
    assert len(list(islice(late, 5))) == 5


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_an_observation_too_large_for_the_space():
    "Float64 numbers that are infinite in the float32 of the space."
    source = tampered(obs=lambda x: put(1e300, 2)(x.astype(np.float64)))
    failure(EnvError, stepper(source), WHO, "leaf obs … non-finite … Expected finite")


@pytest.mark.parametrize(
    "name, when, plan",
    [
        ("obs", 1, LONG),
        ("obs", 4, LONG),
        ("obs", 3, CUT),
        ("first", 1, CUT),
        ("first", 2, CUT),
    ],
)
@pytest.mark.parametrize(
    "change, text",
    [
        (lambda x: x[:3], "wrong shape … Expected float32 [4], got float32 [3]"),
        (lambda x: x[None], "wrong shape … Expected float32 [4], got float32 [1, 4]"),
        (lambda x: x.astype(complex), "wrong dtype … Expected float32 [4], got complex128 [4]"),
        (lambda x: [x, x], "Expected … got"),
        (lambda x: {"x": x}, "structure … Expected … got"),
        (lambda x: None, "Expected … got"),
        (lambda x: "up", "Expected float32 [4] … got"),
    ],
    ids=["shape", "batch", "complex", "list", "dict", "None", "text"],
)
def test_observations_that_do_not_fit(name, when, plan, change, text):
    "From the first, at any later time, or at the end of an episode that is cut off."
    source = tampered(when=when, plan=plan, **{name: change})
    failure(PipeError, stepper(source), WHO, "obs", text)


@pytest.mark.parametrize(
    "change, text",
    [
        (
            inside("pair", lambda x: (x[0], {"pixels": x[1]["pixels"][:1]})),
            "leaf obs['pair'][1]['pixels'] … wrong shape … Expected uint8 [2, 2], got uint8 [1, 2]",
        ),
        (
            inside("pair", lambda x: (x[0], {"pixels": x[1]["pixels"] + 0.5})),
            "leaf obs['pair'][1]['pixels'] … wrong dtype … Expected uint8 … got float64",
        ),
        (
            inside("pair", lambda x: (1.5, x[1])),
            "leaf obs['pair'][0] … wrong dtype … Expected int64 … got float64",
        ),
        (
            inside("pair", lambda x: x[:1]),
            "structure … missing obs['pair'][1]['pixels'] … Expected … got",
        ),
        (
            inside("pair", lambda x: (x[0], {})),
            "structure … missing obs['pair'][1]['pixels'] … Expected … got",
        ),
        (lambda x: {**x, "sound": 1}, "structure … unexpected obs['sound'] … Expected … got"),
        (
            lambda x: {k: x[k] for k in ("pair", "place")},
            "structure … missing obs['exact'] … Expected … got",
        ),
        (lambda x: x["place"], "structure … missing obs['exact'] … Expected … got"),
        (
            inside("pair", lambda x: np.zeros(2)),
            "structure … missing obs['pair'][0] … Expected … got",
        ),
    ],
    ids=[
        "shape",
        "dtype",
        "kind",
        "short",
        "missing",
        "unexpected",
        "missing key",
        "bare",
        "array for a tuple",
    ],
)
def test_nested_observations_that_do_not_fit(change, text):
    failure(PipeError, stepper(tampered(Nested, obs=change), Nested), WHO, text)


# --- whole numbers that would be others in the dtype of the space, or that the space does not have


def whole(space, value, when, name):
    "A factory of environments that see `value` at one moment, and the least numbers of the space otherwise."
    return tampered(seeing(space), when, CUT, **{name: lambda _: value})


def seeing(space):
    "`Counting` that sees the least numbers of the space."
    return type("Seeing", (Counting,), dict(observation_space=space, look=lambda _: least(space)))


def least(space):
    if isinstance(space, Dict):
        return {k: least(s) for k, s in space.spaces.items()}
    return np.full(space.shape, getattr(space, "start", 0), space.dtype)


@pytest.mark.parametrize(
    "space, value, text",
    [
        (Box(-9, 9, (2,), np.int16), [0, 70000], "does not fit … Expected … int16 … 70000"),
        (Box(-9, 9, (), np.int8), np.uint8(200), "does not fit … int8 … got 200"),
        (Box(0, 9, (2,), np.uint8), np.array([300, 0], np.uint16), "does not fit … uint8"),
        (Box(0, 9, (1,), np.int64), np.array([2**63], np.uint64), f"int64 … got {2**63}"),
        (MultiBinary(2), [0, 256], "does not fit … int8 … got 256"),
        (MultiBinary(2), np.array([0, 2], np.int8), "out of range … MultiBinary(2) … got [0 2]"),
        (MultiBinary(2), [-1, 0], "out of range … MultiBinary(2) … got [-1  0]"),
        (Discrete(4), 7, "out of range … Discrete(4) … got 7"),
        (Discrete(4), np.int32(-1), "out of range … got -1"),
        (Discrete(4, start=2), 6, "out of range … got 6"),
        (Discrete(4, start=2), np.int64(1), "out of range … got 1"),
        (Discrete(4, start=-2), 2, "out of range … got 2"),
        (MultiDiscrete([2, 3]), [1, 3], "out of range … got [1 3]"),
        (
            Dict(a=Box(-1, 1, (2,)), b=Discrete(3)),
            {"a": np.zeros(2, np.float32), "b": 3},
            "['b'] … out of range … got 3",
        ),
        (
            Dict(a=Box(-9, 9, (), np.int8), b=Discrete(3)),
            {"a": -200, "b": 0},
            "['a'] … does not fit … got -200",
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("name, when", [("obs", 1), ("obs", 3), ("first", 1), ("first", 2)])
def test_whole_numbers_that_do_not_fit(space, value, text, name, when):
    "Also in the last observation of an episode that is cut off (step 3)."
    value = np.array(value) if isinstance(value, list) else value
    good = partial(Scripted, LONG, observation_space=space, see=least(space))
    pipe = EnvStepper([good, whole(space, value, when, name)], Constant(0))
    failure(EnvError, pipe, WHO, "leaf … obs", text)


@pytest.mark.parametrize(
    "space, value",
    [
        (Box(-9, 9, (2,), np.int16), np.array([32767, -32768])),
        (MultiBinary(2), np.array([True, False])),
        (Discrete(4), 3),
        (Discrete(4), np.uint8(3)),
        (Discrete(4, start=-2), 1),
        (MultiDiscrete([2, 255], dtype=np.uint8), np.array([1, 254], np.uint8)),
        (Box(-9, 9, (2,)), np.array([1, 2**24])),
    ],
    ids=str,
)
def test_whole_numbers_that_fit(space, value):
    ticks = list(islice(EnvStepper(whole(space, value, 2, "obs"), Constant(0)), 2))
    assert ticks[1].next.obs.dtype == space.dtype and (ticks[1].next.obs[0] == value).all()


# --- rewards


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("value", [np.float32(nan), torch.tensor(nan), None, 1e39])
def test_rewards_that_are_not_finite(value):
    "1e39 is infinite in the float32 that rewards are kept in; None is what a forgotten `return` gives."
    failure(EnvError, stepper(tampered(rew=lambda _: value)), WHO, "leaf rew … Expected … got")


@pytest.mark.parametrize(
    "value", [3, True, np.int64(3), np.float64(3), np.array(3.0), np.float16(3), torch.tensor(3.0)]
)
def test_rewards_that_are_numbers(value):
    [tick] = islice(EnvStepper(tampered(when=1, rew=lambda _: value), Plain()), 1)
    assert tick.next.rew.dtype == np.float32 and tick.next.rew.tolist() == [float(value)]


# --- ends of episodes


@pytest.mark.parametrize(
    "value, got",
    [
        ("False", "False"),
        ("", "''"),
        (nan, "nan"),
        (np.float32(nan), "nan"),
        ([False], "[False]"),
        ([], "[]"),
        (None, "None"),
        (2, "2"),
        (0.5, "0.5"),
        (np.array([True]), "bool [1]"),
        (np.zeros(2), "float64 [2]"),
        ({}, "{}"),
        (gym, "gymnasium"),
    ],
    ids=lambda x: "module" if x is gym else repr(x),
)
def test_ends_that_are_neither_true_nor_false(value, got):
    text = f"Expected True or False … got … {got}"
    failure(EnvError, stepper(tampered(trunc=lambda _: value)), WHO, "leaf truncated", text)
    failure(EnvError, lambda: is_end(value, False), "leaf terminated", text)


@pytest.mark.parametrize("kind", [bool, np.bool_, int, float, np.int8, np.array, torch.tensor])
def test_ends_that_are_true_or_false(kind):
    for value in (True, False):
        ends = (kind(value), np.False_)
        [tick] = islice(plain(partial(Scripted, LONG, ends=lambda env, x=ends: x)), 1)
        assert tick.term.tolist() == [value] and tick.next.fin.tolist() == [value]


# --- infos


def endless(kind):
    "A dict, or a list, that contains itself."
    x = kind()
    if kind is dict:
        x["me"] = x
    else:
        x.append(x)
    return x


@pytest.mark.parametrize(
    "value, got",
    [(None, "None"), ([], "[]"), ([("x", 1)], "'x'"), ("info", "info"), (3, "3")],
    ids=repr,
)
@pytest.mark.parametrize("when", [1, 3])
@pytest.mark.parametrize("options", [{}, dict(info_keys=[])], ids=["all", "none"])
def test_infos_that_are_no_dicts(value, got, when, options):
    source = tampered(when=when, info=lambda _: value)
    text = f"leaf info … no dict … Expected a dict … got … {got}"
    failure(EnvError, stepper(source, **options), WHO, text)


@pytest.mark.parametrize("kind", [dict, list])
@pytest.mark.parametrize("when", [1, 3])
@pytest.mark.parametrize(
    "key, options",
    [("count", {}), ("count", dict(info_keys=["count"])), ("new", dict(info_keys=["new"]))],
)
def test_an_info_that_contains_itself(kind, when, key, options):
    source = tampered(when=when, info=lambda info: {**info, key: endless(kind)})
    failure(EnvError, stepper(source, **options), WHO, f"leaf info['{key}'] … Expected … got")


def test_any_mapping_is_an_info():
    other = type("Other", (OrderedDict,), {})
    ticks = islice(plain(tampered(when=2, info=other)), 3)
    assert [int(tick.env["count"][0]) for tick in ticks] == [1, 2, 3]


# --- actors


class Answers(Plain):
    "Behaves until its answer number `when`, which is `change(act, hx, info)`; virtual reactions count too."

    def __init__(self, change, when=1):
        super().__init__()
        self.change = change
        self.when = when
        self.n = 0

    def forward(self, obs, act, rew, fin, **context):
        act, hx, _ = super().forward(obs, act, rew, fin, **context | {"hx": None})
        info = {"a": fin.float(), "b": (fin.float(),)}
        self.n = self.n + 1
        return self.change(act, hx, info) if self.n >= self.when else (act, hx, info)


def answered(change, when=1, n_steps=3):
    return FragmentCollector(EnvStepper(fine(), Answers(change, when), 2), n_steps)


# an action that does not fit -> what it is in place of what it should be, and what is said of it
ACTIONS = {
    "one environment": (lambda act: act[:, :1], "leaf act … Expected … 2 … got int64 [1, 1]"),
    "no time": (lambda act: act[0], "leaf act … Expected … got int64 [2]"),
    "two times": (lambda act: act.repeat(2, 1), "leaf act … Expected … got int64 [2, 2]"),
    "a vector": (lambda act: act[..., None], "leaf act … Expected … Discrete(5) … got int64 ["),
    "float": (lambda act: act.float(), "leaf act … Expected … Discrete(5) … got float32 ["),
    "array": (lambda act: act.numpy(), "leaf act … Expected a tensor … got int64 ["),
    "number": (lambda act: 3, "leaf act … Expected … got 3"),
    "None": (lambda act: None, "act … Expected … got None"),
    "a pair": (lambda act: (act, act), "act … Expected … got ("),
    "a dict": (lambda act: {"x": act}, "act … Expected … got {"),
}
ANSWERS = {
    "no triple": (
        lambda act, hx, info: (act, info),
        "no triple … Expected (act, hx, info) … got",
    ),
    "nothing": (lambda *answer: None, "no triple … Expected (act, hx, info) … got None"),
}
for name, (change, text) in ACTIONS.items():
    ANSWERS[name] = lambda act, *rest, change=change: (change(act), *rest), text


def reported(**leaves):
    "An answer with other leaves in the report: functions of the first leaf."
    return lambda act, hx, info: (
        act,
        hx,
        info | {name: leaf(info["a"]) for name, leaf in leaves.items()},
    )


AT_FIRST = ANSWERS | {
    "memory": (
        lambda act, hx, info: (act, torch.zeros(1, 3, 4), info),
        "leaf hx … Expected … got float32 [1, 3, 4]",
    ),
    "report": (
        reported(b=lambda _: (torch.zeros(3),)),
        "leaf info['b'][0] … Expected … got float32 [3]",
    ),
    "array in the report": (
        reported(a=torch.Tensor.numpy),
        "leaf info['a'] … Expected a tensor … got float32 [1, 2]",
    ),
}


@pytest.mark.parametrize("change, text", AT_FIRST.values(), ids=AT_FIRST)
def test_an_answer_of_an_actor_that_does_not_fit(change, text):
    failure(ActorError, answered(change), "EnvStepper, lane 0", text)


@pytest.mark.parametrize("n_steps", [3, 99], ids=["ahead", "step"])
@pytest.mark.parametrize("change, text", ANSWERS.values(), ids=ANSWERS)
def test_a_later_answer_of_an_actor_that_does_not_fit(change, text, n_steps):
    "In a step, or in the look-ahead: each answer decides what an environment does, or what is learned."
    failure(ActorError, answered(change, 5, n_steps), "EnvStepper, lane 0", text)


LATER_REPORTS = {
    "missing": (lambda act, hx, info: (act, hx, {"a": info["a"]}), "lane 0"),
    "unexpected": (reported(c=torch.clone), "lane 0"),
    "shape": (reported(a=lambda x: x[..., None]), "lane 0"),
    "structure": (reported(b=torch.clone), "lane 0"),
    "tensor": (AT_FIRST["report"][0], "lane 0 … ['b'][0]"),
    "array": (AT_FIRST["array in the report"][0], "lane 0 … ['a']"),
}


@pytest.mark.parametrize("change, text", LATER_REPORTS.values(), ids=LATER_REPORTS)
def test_a_report_that_changes_is_noticed(change, text):
    failure(PipeError, answered(change, 5, 7), text)


def steered(change):
    "An action with another part `steer`, a function of wheel and buttons."
    return lambda act: {**act, "steer": change(*act["steer"])}


class NestedAnswers(NestedMemory):
    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, *args, **kwargs):
        act, hx, info = super().forward(*args, **kwargs)
        return self.change(act), hx, info


@pytest.mark.parametrize(
    "change, text",
    [
        (
            lambda a: {**a, "gear": a["gear"].float()},
            "leaf act['gear'] … Expected … Discrete … got float32",
        ),
        (
            steered(lambda wheel, buttons: (wheel[..., :1], buttons)),
            "leaf act['steer'][0] … Expected … 2 … Box … got float32 [",
        ),
        (
            steered(lambda wheel, buttons: (wheel, buttons.float())),
            "leaf act['steer'][1] … Expected … MultiBinary … got float32 [",
        ),
        (
            steered(lambda wheel, buttons: (wheel.long(), buttons)),
            "leaf act['steer'][0] … Expected … Box … got int64 [",
        ),
        (
            steered(lambda wheel, buttons: (wheel,)),
            "leaf act['steer'] … structure … Expected Tuple … got",
        ),
        (
            lambda a: {"gear": a["gear"]},
            "leaf act … structure … Expected Dict … 'gear' … 'steer' … got",
        ),
        (lambda a: {**a, "horn": a["gear"]}, "leaf act … structure … Expected Dict … got"),
        (lambda a: a["gear"], "leaf act … structure … Expected Dict … got"),
        (lambda a: (a["gear"], a["steer"]), "leaf act … structure … Expected Dict … got"),
        (
            steered(lambda wheel, buttons: (wheel / 0, buttons)),
            "environment 0 … leaf act['steer'][0] … non-finite … Expected finite … got",
        ),
    ],
    ids=[
        "float gear",
        "shape",
        "float buttons",
        "integer wheel",
        "short",
        "missing",
        "unexpected",
        "bare",
        "tuple",
        "nan",
    ],
)
def test_nested_actions_that_do_not_fit(change, text):
    failure(
        ActorError, EnvStepper(fine(Nested), NestedAnswers(change), 2), "EnvStepper, lane 0", text
    )


class Steer(NamedTuple):
    wheel: object
    buttons: object


@pytest.mark.parametrize("make", [lambda *pair: list(pair), Steer], ids=["list", "namedtuple"])
def test_the_containers_of_an_action_may_be_lists_and_namedtuples(make):
    "For a Tuple space, what counts is the position; in every row of every fragment."
    pipe = FragmentCollector(EnvStepper(fine(Nested), NestedAnswers(steered(make)), 2), 3)
    assert [f.state.act["steer"][0].shape for f in islice(pipe, 2)] == [(4, 2, 2)] * 2


@pytest.mark.parametrize(
    "change",
    [inside("pair", list), inside("pair", lambda x: Steer(*x)), OrderedDict],
    ids=["list", "namedtuple", "ordered"],
)
def test_the_containers_of_an_observation_may_be_lists_and_namedtuples(change):
    class Loose(Nested):
        def look(self):
            return change(super().look())

    pipe = FragmentCollector(EnvStepper(lambda: Loose([(2, "trunc")]), NestedMemory(), 2), 3)
    assert [f.state.obs["pair"][1]["pixels"].shape for f in islice(pipe, 2)] == [(4, 2, 2, 2)] * 2


def continuous(shape, dtype):
    nothing = np.zeros(1, np.float32)
    action_space = Box(-1, 1, shape, dtype)
    observation_space = Box(-1, 1, (1,))
    return partial(
        Scripted,
        LONG,
        see=nothing,
        pay=0.0,
        observation_space=observation_space,
        action_space=action_space,
    )


def later(shape, dtype, value):
    "Acts zeros, but `value` in environment 1 from step 3 on."

    def act(shown):
        new = torch.zeros(*shown.fin.shape, *shape, dtype=dtype)
        new[:, 1] = torch.where(shown.stepno[0, 1] >= 3, value, 0.0)
        return new

    return Acts(act)


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("value", [nan, inf, -inf])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_non_finite_actions(shape, dtype, value, clip):
    "Infinity is not clipped away."
    actor = later(shape, getattr(torch, dtype), value)
    failure(
        ActorError,
        EnvStepper(continuous(shape, dtype), actor, 2, clip_actions=clip),
        "EnvStepper, lane 0, environment 1 (partial) … leaf act … non-finite action",
        f"Expected finite … got … {value}",
    )


def test_large_actions_are_finite():
    pipe = EnvStepper(continuous((3,), "float32"), later((3,), torch.float32, 1e30), 2)
    assert len(list(islice(pipe, 6))) == 6


MANY = partial(Scripted, action_space=MultiDiscrete([2, 3]))
WITH_GRADIENT = Acts(lambda shown: torch.nn.Parameter(torch.zeros(1, 2, 1)))


@pytest.mark.parametrize(
    "source, actor, text",
    [
        (
            continuous((3,), "float32"),
            later((3,), torch.int64, 1),
            "Expected … Box … got int64",
        ),
        (MANY, Constant([0.5, 1.5]), "MultiDiscrete … got float32"),
        ("Pendulum-v1", WITH_GRADIENT, "with a gradient … `detach`"),
    ],
)
def test_actions_of_another_kind(source, actor, text):
    failure(ActorError, EnvStepper(source, actor, 2), "EnvStepper, lane 0 … leaf act", text)


def test_an_actor_that_raises():
    def lost(shown):
        if shown.stepno.max() == 2:
            raise KeyError("map")

    error = failure(
        ActorError,
        Lanes(EnvStepper(fine(), Acts(before=lost)), 2, 0),
        "EnvStepper, lane 0 … Acts.step raised KeyError: 'map'",
    )
    assert isinstance(error.__cause__, KeyError)


class Lost(Plain):
    "From its answer number `when` on, it reports NaN for environment 1, as from weights that are NaN."

    def __init__(self, when):
        super().__init__()
        self.when = when
        self.n = 0

    def forward(self, *args, **context):
        act, hx, info = super().forward(*args, **context)
        self.n += 1
        info["value"] = torch.full(act.shape, -inf)  # this is allowed
        if self.n >= self.when:
            info["value"][..., -1] = nan
        return act, hx, info


@pytest.mark.parametrize(
    "when, at", [(2, "[0, 1]"), (5, "[3, 1]"), (6, "[4, 1]")], ids=["first", "last", "ahead"]
)
def test_a_report_that_is_no_number(when, at):
    "The first answer is asked for before the first step, and the last one is the look-ahead."
    text = f"EnvStepper, lane 0 … info['value'] … Lost reported … NaN at {at}"
    plain, fused = (FragmentCollector(EnvStepper(fine(), Lost(when), 2), 4) for _ in range(2))
    for pipe in (plain, optimize(fused)):
        failure(ActorError, pipe, text, n=1)
    tensors = TensorCollector(lambda: Planned([LONG] * 2), Lost(when), 4)
    failure(ActorError, tensors, f"TensorCollector, lane 0 … NaN at {at}", n=1)


@pytest.mark.parametrize(
    "options",
    [{}, dict(optimize=False), dict(engine="onnxruntime")],
    ids=["fused", "plain", "onnxruntime"],
)
def test_an_actor_without_numbers(options):
    "A categorical distribution whose logits are NaN would take the first action for ever."
    policy, q, critic = (cls.for_env("CartPole-v1", seed=0) for cls in (MLPPolicy, QPolicy, Critic))
    with torch.no_grad():
        for parameter in (*policy.parameters(), *q.parameters()):
            parameter.fill_(nan)

    options = dict(n_envs=2, n_steps=4) | options
    text = "EnvStepper, lane 0 … info['{} … NaN at [0, 0]"
    pipe = on_policy("CartPole-v1", policy, critic, **options)
    failure(ActorError, pipe, text.format("dist"))
    failure(ActorError, replayed("CartPole-v1", q, **options), text.format(""))


def test_an_observation_that_is_infinite_for_the_actor():
    space = Box(-inf, inf, (2,), np.float64)
    far = partial(Scripted, observation_space=space, see=np.array([1e39, 0]))
    pipe = replayed(far, QPolicy.for_env(far), n_envs=1, n_steps=4)
    error = failure(ActorError, pipe, "EnvStepper, lane 0 … info['q'] … NaN at [0, 0]")
    assert "observation that float32 cannot hold" in str(error)


class Half:
    def step(self):
        pass


@pytest.mark.parametrize(
    "actor, lacks",
    [(None, "step"), (print, "step"), (torch.nn.Linear(2, 2), "step"), (Half(), "reset")],
)
def test_an_actor_without_a_method_that_it_needs(actor, lacks):
    make = lambda: EnvStepper(Counting, actor)
    failure(ActorError, make, f"EnvStepper … `{lacks}` … Expected … got")


# --- infos


@pytest.mark.parametrize(
    "value",
    ["text", object(), ["a", 1], {"x": "y"}, None, [], {}, np.array(["a"]), len],
    ids=lambda x: "object" if type(x) is object else repr(x),
)
def test_infos_that_are_no_numbers_do_no_harm(value):
    source = partial(Scripted, LONG, tell=lambda env: {"count": env.count, "thing": value})
    [f] = islice(FragmentCollector(EnvStepper(source, Plain(), 2), 3), 1)
    assert list(f.env) == ["count"]


# --- sizes and order of pipes


def collector(**options):
    return FragmentCollector(EnvStepper(Counting, Plain()), **dict(n_steps=2) | options)


# what takes an integer -> how, its name in the message, the smallest one
SIZES = {
    "EnvStepper": (lambda n: plain(Counting, n), "n_envs", 1),
    "EnvStepper of a list": (lambda n: plain([Counting] * 2, n), "n_envs", 1),
    "EnvStepper of a vector": (
        lambda n: plain("CartPole-v1", n, vector="sync"),
        "n_envs",
        1,
    ),
    "sticky": (lambda n: plain(Counting, sticky=n), "sticky", 1),
    "FragmentCollector": (lambda n: collector(n_steps=n), "n_steps", 1),
    "on_policy, n_envs": (lambda n: on_policy(Counting, Plain(), n_envs=n), "n_envs", 1),
    "on_policy": (lambda n: on_policy(Counting, Plain(), n_steps=n), "n_steps", 1),
    "on_policy, lanes": (lambda n: on_policy(Counting, Plain(), lanes=n), "n", 1),
    "ProcessReading": (ProcessReading, "num_workers", 0),
    "ReplayMemory": (ReplayMemory, "capacity", 1),
    "ReplayMemory, length": (lambda n: ReplayMemory(99, length=n), "length", 1),
    "Replay, batch_size": (
        lambda n: Replay(collector(), 99, n, warmup=0),
        "batch_size",
        1,
    ),
    "Replay, n_batches": (
        lambda n: Replay(collector(), 99, warmup=0, n_batches=n),
        "n_batches",
        0,
    ),
    "Replay, warmup": (lambda n: Replay(collector(), 99, warmup=n), "warmup", 0),
    "encoder, size": (lambda n: encoder_for(Discrete(2), size=n), "size", 1),
    "encoder, n_out": (lambda n: encoder_for(Discrete(2), n_out=n), "n_out", 1),
    "MLP": (lambda n: MLP(3, (8, n)), "", 0),
    "ActionCritic": (
        lambda n: ActionCritic.for_env("Pendulum-v1", hidden=(8, n)),
        "",
        0,
    ),
    "GRU": (lambda n: GRU(3, n), "", 0),
}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize(
    "value", ["below", 1.5, "4", True, 2**63, 10**400], ids=lambda x: str(x)[:9]
)
def test_a_size_is_an_integer_that_a_machine_can_count(name, value):
    make, argument, least = SIZES[name]
    value = least - 1 if value == "below" else value
    if value is True and not argument:
        pytest.skip("a layer takes True for 1")
    error = EnvError if argument == "n_envs" else DataError
    failure(error, lambda: make(value), "Expected", argument, f"{argument}={value!r}")


@pytest.mark.parametrize(
    "make",
    [
        partial(FragmentCollector, n_steps=2),
        Lanes,
        AdvantageBuffer,
        partial(FragmentStacker, n=2),
        partial(Minibatcher, size=3),
    ],
)
@pytest.mark.parametrize("what", [None, [1, 2], "CartPole-v1", EnvStepper])
def test_pipes_read_from_pipes(make, what):
    with pytest.raises(TypeError, match=r"reads from a pipe .*, got (NoneType|list|str|\w+)"):
        make(what)


def test_fragments_are_made_of_ticks():
    pipe = FragmentCollector(FragmentCollector(EnvStepper(fine(), Plain()), 2), 2)
    failure(DataError, pipe, "FragmentCollector … Ticks are wanted … Expected Tick, got Fragment")


def test_errors_pass_through_pipes_below_unchanged():
    "The message is that of the culprit, however long the pipeline; errors of a user's pipe stay as they are."
    pipe = on_policy(
        [fine(), tampered(rew=lambda _: nan)], Valued(), n_envs=2, n_steps=5, lanes=2, seed=0
    )
    failure(
        EnvError,
        Minibatcher(pipe, 3),
        "EnvStepper, lane 0, environment 1 (<lambda>), leaf rew … non-finite",
    )
    pipe = Minibatcher(Failing(on_policy(fine(), Valued(), n_envs=1, n_steps=2), 1), 9)
    with pytest.raises(ZeroDivisionError, match="downstream"):
        list(pipe)


EMPTY = IterableWrapper([])
FRACTIONS = [
    (AdvantageBuffer, [EMPTY], "gamma"),
    (AdvantageBuffer, [EMPTY], "lam"),
    (RewardScaler, [EMPTY], "gamma"),
    (NStep, [EMPTY, 2], "gamma"),
    (StepMerger, [EMPTY, 2], "gamma"),
    (CheckInvariants, [EMPTY], "rate"),
    (ReplayMemory, [9], "alpha"),
    (ReplayMemory, [9], "beta"),
]


@pytest.mark.parametrize("cls, arguments, name", FRACTIONS)
@pytest.mark.parametrize("value", [-0.01, 1.01, nan, -inf, None, "0.5", [0.5]])
def test_a_fraction_is_a_number_from_0_to_1(cls, arguments, name, value):
    text = f"{cls.__name__}: out of range. Expected 0 <= {name} <= 1, got {name}={value!r}"
    failure(DataError, lambda: cls(*arguments, **{name: value}), text)
    for fraction in (0, 0.5, 1, np.float32(0.5)):
        cls(*arguments, **{name: fraction})


# --- numbers that are none, or too large


@pytest.mark.parametrize(
    "make, name",
    [
        (lambda n: EnvStepper(Counting, Plain(), n), "n_envs"),
        (lambda n: Lanes(EnvStepper(Counting, Plain()), n), "n"),
    ],
)
def test_more_environments_and_lanes_than_there_is_memory_for(make, name):
    failure(
        DataError,
        lambda: make(2**62),
        f"not enough memory … Expected at most … got {name}={2**62:,}, which needs",
    )


@pytest.mark.parametrize(
    "name", ["n_envs", "n_steps", "lanes", "workers", "steps", "threads", "capacity", "batch_size"]
)
@pytest.mark.parametrize("value", [2**63, 10**30])
def test_integers_of_a_run_that_no_machine_can_count(name, value, tmp_path, capsys):
    algorithm = "dqn" if name in ("capacity", "batch_size") else "ppo"
    of_the_run = name in ("workers", "steps", "threads")
    options = {name: value} if of_the_run else dict(options={name: value})
    failure(DataError, lambda: make_config(algorithm, "CartPole-v1", **options), name)
    words = f"train {algorithm} CartPole-v1 --{name.replace('_', '-')} {value} --out".split()
    refused_by_the_command_line(capsys, f"{name} … Expected", *words, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow_but_one
@pytest.mark.parametrize(
    "words, name",
    [
        ("ppo --lr", "lr"),
        ("ppo --clip", "clip"),
        ("ppo --c-entropy", "c_entropy"),
        ("trpo --max-kl", "max_kl"),
        ("a2c --gamma", "gamma"),
        ("a2c --lam", "lam"),
        ("dqn --eta", "eta"),
        ("ppo --log-std", "--log-std"),
        ("ppo --intrinsic", "intrinsic"),
        ("td3 --explore-std", "explore_std"),
        ("sac --target-entropy", "target_entropy"),
    ],
)
@pytest.mark.parametrize("value", ["inf", "nan", "-inf"])
def test_options_that_are_no_finite_numbers(words, name, value, tmp_path, capsys):
    algorithm, flag = words.split()
    env = "Pendulum-v1" if algorithm in ("sac", "td3") else "CartPole-v1"
    words = "train", algorithm, env, f"{flag}={value}", "--out", tmp_path / "run"
    refused_by_the_command_line(capsys, f"{name} … Expected … {value}", *words)


# --- what a network cannot be made of


@pytest.mark.parametrize("space", [Box(-1, 1, (0,)), Box(-1, 1, (2, 0), np.float64)], ids=str)
@pytest.mark.parametrize("cls", [SquashedPolicy, DeterministicPolicy, ActionCritic])
def test_an_action_without_a_number(cls, space):
    text = f"leaf action_space … {cls.__name__} … Expected at least one number … {space}"
    failure(SpaceError, lambda: cls.for_env((THREE, space)), text)


OF_ONE_KIND = [(Critic, "action_space")]  # a critic looks at observations
ONLY_OTHERS = (QPolicy, SquashedPolicy)  # actions of one kind, so that no part is named


@pytest.mark.parametrize("cls", [MLPPolicy, Critic, QPolicy, SquashedPolicy])
@pytest.mark.parametrize("name", ["observation_space", "action_space"])
@pytest.mark.parametrize("path", ["", "['b'][0]"])
def test_integers_of_which_there_are_none(cls, name, path):
    if (cls, name) in OF_ONE_KIND:
        pytest.skip("a critic looks at observations")
    none = MultiDiscrete([])
    space = Dict(a=Discrete(2), b=Tuple([none])) if path else none
    spaces = dict(
        observation_space=Box(-1, 1, (3,)),
        action_space=Discrete(2) if cls is QPolicy else Box(-1, 1, (1,)),
    )
    where = "" if name == "action_space" and cls in ONLY_OTHERS else path
    pair = tuple((spaces | {name: space}).values())
    failure(SpaceError, lambda: cls.for_env(pair), f"leaf {name}{where}: … Expected … got")


@pytest.mark.parametrize(
    "make",
    [
        MLPPolicy.for_env,
        Critic.for_env,
        QPolicy.for_env,
        partial(QPolicy.for_env, duelling=True),
        lambda env, hidden: MLP(4, hidden),
    ],
)
def test_one_layer_is_a_list_too(make):
    failure(
        DataError,
        lambda: make("CartPole-v1", hidden=64),
        "leaf hidden … Expected a list or tuple … got 64",
    )


@pytest.mark.parametrize(
    "encoder, text",
    [
        (
            {"image": "conv"},
            "leaf encoder['image'] … Expected images, discrete, size, n_out … got 'image'",
        ),
        ({"images": "conv", "3": 4}, "leaf encoder['3'] … Expected images, discrete … got '3'"),
        ({3: 4}, "leaf encoder[3] … got 3"),
        ("conv", "leaf encoder … Expected a dict of options, or a function … got 'conv'"),
        (7, "leaf encoder … got 7"),
        (
            torch.nn.Flatten(),
            "leaf encoder … a function from the space to a module … got Flatten(",
        ),
    ],
)
def test_encoders_that_are_none(encoder, text, tmp_path, capsys):
    for cls in (MLPPolicy, Critic, QPolicy):
        failure(DataError, lambda cls=cls: cls.for_env("CartPole-v1", encoder=encoder), text)
    if isinstance(encoder, dict) and 3 not in encoder:  # a file has texts as keys
        words = ["train", "ppo", "CartPole-v1", "--encoder", encoder, "--out", tmp_path / "run"]
        refused_by_the_command_line(capsys, text, *words)


class Inventory(gym.Env):
    observation_space = Box(0, 1, (2,))
    action_space = Discrete(2)


NO_IDS = [
    (Inventory, "'Inventory-v0', after `gymnasium.register('Inventory-v0', Inventory)`"),
    (lambda: Inventory(), "after `gymnasium.register('Own-v0', Own)`"),
    (gym.make("CartPole-v1"), "Expected the id 'CartPole-v1'"),
    (gym.spec("CartPole-v1"), "Expected the id 'CartPole-v1'"),
    (None, "got None"),
]


@pytest.mark.parametrize("env, way_out", NO_IDS)
def test_a_run_needs_the_id_of_its_environment(env, way_out):
    for preset in ("none", "auto"):
        failure(
            DataError,
            partial(make_config, "ppo", env, preset=preset),
            f"leaf env: a run needs the id of its environment … {way_out}",
        )


def test_the_part_of_a_configuration_that_json_cannot_write_is_named():
    for kwargs, text in (
        (
            dict(size=[1, np.float32(2)]),
            "leaf env_kwargs['size'][1]: JSON cannot write this value … got float32 2.0",
        ),
        (dict(x=endless(list)), "leaf env_kwargs"),
    ):
        make = partial(make_config, "ppo", "CartPole-v1", env_kwargs=kwargs)
        failure(DataError, make, text)


class MissionSpace(gym.Space):
    "As that of minigrid: texts that a function makes."

    def __init__(self):
        super().__init__((), str)


@pytest.mark.parametrize(
    "space", [MissionSpace(), Text(4), Graph(Box(0, 1), None), Sequence(Discrete(2))]
)
def test_the_wrapper_for_a_space_without_an_array_form_is_named(space):
    seen = Dict(image=Box(0, 1, (2,)), mission=space)
    text = "leaf observation_space['mission'] … gymnasium.wrappers: FilterObservation"
    failure(SpaceError, lambda: space_spec(seen, "observation_space"), text)
    failure(SpaceError, lambda: space_spec(space, "action_space"), "wrappers: TransformAction")
    assert {"FilterObservation", "TransformObservation", "TransformAction"} <= vars(
        gym.wrappers
    ).keys()


def test_what_was_found_when_environments_were_kept_is_told_in_words():
    broken = dict(attributes="EnvError: no.", replay="EnvError: no.")
    assert Keeper("none", broken).why == "attributes, replay: EnvError: no"
    keeper = Keeper("none", {"0 (A)": broken, "1 (B)": dict(own="other")})
    assert keeper.why == "0 (A): attributes, replay: EnvError: no; 1 (B): own: other"


def test_data_of_another_kind_name_the_pipe_that_reads_them(tmp_path):
    (tmp_path / "main_data.hdf5").write_bytes(b"x")
    for path in (tmp_path, tmp_path / "main_data.hdf5", tmp_path / "nothing"):
        failure(DataError, lambda path=path: parts_in(path), "no recording here … `from_minari`")


class Wide(gym.Env):
    "A wide world. How wide it is, and what it takes, may change after a run has begun."

    observation_space = Box(-1, 1, (3,))
    action_space = Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 1.0, True, False, {}


@pytest.fixture
def run_of_a_module(tmp_path, monkeypatch):
    "The folder of a run of `Wide`, whose id a module registers."
    module = ModuleType("wide_world")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(gym.registry, "Wide-v0", gym.envs.registration.EnvSpec("Wide-v0", Wide))
    options = dict(n_steps=8, n_envs=1, engine="torch")
    config = make_config("ppo", "Wide-v0", options, steps=8, imports=[module.__name__])
    train(start(tmp_path / "run", config), progress=False, tensorboard=False)
    return tmp_path / "run"


CHANGED = dict(
    observation_space=(Box(-1, 1, (4,)), r"observation_space Box\(-1.0, 1.0, \(4,\)"),
    action_space=(Discrete(5), r"action_space Discrete\(5\)"),
)


@pytest.mark.parametrize("name", CHANGED)
def test_spaces_that_changed_since_the_run_are_named(name, run_of_a_module, monkeypatch, capsys):
    space, text = CHANGED[name]
    monkeypatch.setattr(Wide, name, space)
    expected = f"Wide-v0: the checkpoint does not fit the agent. Expected the spaces, .*{text}"
    with pytest.raises(CheckpointError, match=expected):
        resume(run_of_a_module, 16)
    assert main(["evaluate", str(run_of_a_module)]) == 2
    assert re.search(expected, capsys.readouterr().err)


def test_a_run_is_asked_and_watched_without_the_modules_that_it_needs(run_of_a_module, monkeypatch):
    monkeypatch.delitem(sys.modules, "wide_world")
    with pytest.raises(CheckpointError, match="--import wide_world"):
        load_run(run_of_a_module)
    assert options_in(["keep=2", "lr=1e-4"], run_of_a_module) == dict(keep=2, lr=1e-4)
    with pytest.raises(DataError, match="there is no option 'kep'. Expected keep"):
        options_in(["kep=2"], run_of_a_module)
    shown = view(run_of_a_module)
    assert "ppo on Wide-v0" in shown and "steps_per_s" in shown
    assert shown.count("--import") == 1  # for the drawing of the pipeline, which has to be built
    monkeypatch.delitem(ALGORITHMS, "ppo")  # as one that the module registers
    assert options_in(["keep=2", "lr=1e-4"], run_of_a_module) == dict(keep=2, lr=1e-4)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_a_reward_that_is_too_large_for_float32_says_so():
    def huge():
        return gym.wrappers.TransformReward(gym.make("CartPole-v1"), lambda reward: 1e300)

    pipe = EnvStepper(huge, MLPPolicy.for_env("CartPole-v1"))
    with pytest.raises(EnvError, match=r"leaf rew.* got 1e\+300, which is not finite in float32"):
        list(islice(pipe, 3))
