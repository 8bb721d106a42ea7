"A trained policy, used without a pipeline: `predict` against the pipeline, and exported files against `predict`."

import json
import re
from itertools import product

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollpipe.agents import evaluate
from rollpipe.cli.main import main
from rollpipe.layers import (
    Actor,
    ConvTrunk,
    DeterministicPolicy,
    MLPPolicy,
    QPolicy,
    QuantilePolicy,
    RecurrentPolicy,
    RecurrentQPolicy,
    SquashedPolicy,
)
from rollpipe.layers.encoders import Bits, ModuleDict
from rollpipe.pipes import nested
from rollpipe.pipes.data.errors import ActorError, DataError
from rollpipe.pipes.envs.actions import in_containers
from rollpipe.pipes.envs.factories import space_spec
from rollpipe.runs import load_agent
from rollpipe.runs.export import FORMATS, PolicyFunction, export_policy

N = np.float64
pytestmark = pytest.mark.usefixtures("functions_of_onnx")


class Odd(gym.Env):
    "Every kind of leaf in observations and actions; the rewards and the ends of its episodes are random."

    observation_space = gym.spaces.Dict(
        image=gym.spaces.Box(0, 255, (36, 36, 3), np.uint8),
        number=gym.spaces.Discrete(4, start=1),
        bits=gym.spaces.MultiBinary(3),
        speed=gym.spaces.Box(-np.inf, np.inf, (2,), N),
    )
    action_space = gym.spaces.Dict(
        a=gym.spaces.Discrete(3, start=2),
        b=gym.spaces.Box(-0.01, 0.02, (2, 2)),
        c=gym.spaces.Tuple([gym.spaces.MultiDiscrete([2, 3]), gym.spaces.MultiBinary(2)]),
    )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        return self.observation_space.sample(), {}

    def step(self, action):
        assert action in self.action_space
        return (
            self.observation_space.sample(),
            self.np_random.normal(),
            self.np_random.random() < 0.2,
            False,
            {},
        )


ACTORS = {
    "mlp": lambda env: MLPPolicy.for_env(env, hidden=(16,), seed=0),
    "gru": lambda env: RecurrentPolicy.for_env(env, memory=8, seed=0),
    "lstm": lambda env: RecurrentPolicy.for_env(env, memory=8, cell="lstm", past=True, seed=0),
}


def play(env, act, seed, n_steps=40):
    "Rewards of a loop as gymnasium's users write it."
    env = env()
    rewards = []
    obs, _ = env.reset(seed=seed)
    start, rew = True, 0.0
    for _ in range(n_steps):
        obs, rew, terminated, truncated, _ = env.step(act(obs, start, rew))
        rewards.append(rew)
        start = terminated or truncated
        if start:
            obs, _ = env.reset()
    return rewards


@pytest.mark.parametrize("name", ACTORS)
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_an_episode_by_predict_is_an_episode_of_the_evaluation(name, env_id):
    actor = ACTORS[name](env_id)
    env = gym.make(env_id)
    state = None
    total = 0.0
    starts = []

    class Seeded(gym.Wrapper):
        "Begins every episode as the loop below does."

        def reset(self, **kwargs):
            return self.env.reset(seed=3)

    obs, _ = env.reset(seed=3)
    rew, over = None, False
    while not over:
        action, state = actor.predict(obs, state, reward=rew)
        starts.append(int(state.stepno[0, 0]))
        obs, rew, terminated, truncated, _ = env.step(action)
        total = total + rew
        over = terminated or truncated
    assert starts == list(range(len(starts)))
    found = evaluate(lambda: Seeded(gym.make(env_id)), actor, 1, n_envs=1)
    np.testing.assert_allclose(
        (found.returns[0], found.lengths[0]), (total, len(starts)), rtol=1e-4
    )


@pytest.mark.slow_but_one
@pytest.mark.parametrize("name", ACTORS)
@settings(deadline=None, max_examples=15)
@given(
    n=st.integers(1, 4),
    seed=st.integers(0, 99),
    ends=st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=4, max_size=4),
)
def test_a_batch_is_one_by_one(name, n, seed, ends):
    actor = ACTORS[name](Odd)
    space = Odd.observation_space
    space.seed(seed)
    state = None
    alone = [None] * n
    for t, start in enumerate(ends):
        rows = [space.sample() for _ in range(n)]
        rew = np.random.default_rng(seed + t).normal(size=n)
        actions, state = actor.predict(
            {k: np.stack([row[k] for row in rows]) for k in space},
            state,
            episode_start=start[:n],
            reward=rew,
        )
        for b in range(n):
            action, alone[b] = actor.predict(
                rows[b], alone[b], episode_start=start[b], reward=rew[b]
            )
            assert action in Odd.action_space
            for x, y in (
                (action["a"], actions["a"][b]),
                (action["b"], actions["b"][b]),
                (action["c"][0], actions["c"][0][b]),
            ):
                np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_noise_only_if_asked():
    actor = MLPPolicy.for_env("Pendulum-v1", seed=0)
    obs = np.zeros(3, np.float32)
    torch.manual_seed(0)
    same, other = (
        {float(actor.predict(obs, deterministic=d)[0][0]) for _ in range(5)} for d in (True, False)
    )
    assert len(same) == 1 and len(other) > 1
    actor.train()
    actor.predict(obs)
    assert actor.training and torch.is_grad_enabled()


class NoSpaces(Actor):
    def forward(self, obs, act, rew, fin, *, hx, stepno, virtual):
        return fin.long(), (), {}


@pytest.mark.parametrize(
    "call, error, text",
    [
        (lambda: NoSpaces().predict(0), ActorError, "NoSpaces does not know its environment"),
        (lambda: PolicyFunction(NoSpaces()), ActorError, "NoSpaces does not know its environment"),
        (
            lambda: ACTORS["mlp"]("CartPole-v1").predict(np.zeros(3)),
            DataError,
            r"leaf obs: wrong shape. Expected float32 \[4\]",
        ),
        (
            lambda: ACTORS["mlp"]("CartPole-v1").predict(np.zeros((2, 3))),
            DataError,
            r"leaf obs: wrong shape. Expected float32 \[2, 4\]",
        ),
        (
            lambda: ACTORS["mlp"]("CartPole-v1").predict([0.0, 0.0, 0.0, 0.0]),
            DataError,
            r"leaf obs: a list stands where an array belongs. Expected float32 \[4\]: wrap it in np.array, got \[0.0",
        ),
        (
            lambda: ACTORS["mlp"]("CartPole-v1").predict([[0.0, 0.0, 0.0, 0.0]]),
            DataError,
            "a list stands .* wrap it in np.array",
        ),
        (
            lambda: ACTORS["mlp"]("CartPole-v1").predict((np.zeros(4), {})),
            DataError,
            "as by `obs, info = env.reset",
        ),
        (lambda: ACTORS["mlp"](Odd).predict({}), DataError, "obs has the wrong structure"),
        (
            lambda: QPolicy.for_env("Taxi-v4").predict(500),
            DataError,
            "leaf obs: this observation has no action.*got 500",
        ),
        (
            lambda: ACTORS["mlp"]("CartPole-v1").predict(np.full(4, np.nan)),
            DataError,
            "leaf obs: this observation has no action",
        ),
        (
            lambda: ACTORS["mlp"]((Box(-np.inf, np.inf, (2,), N), Discrete(3))).predict(
                np.array([[0, 0], [0, 1e39]])
            ),
            DataError,
            r"leaf obs: this observation has no action.*which float32 can hold, got \[ 0. inf\]",
        ),
        (
            lambda: ACTORS["mlp"]("CartPole-v1").predict(np.zeros(4), episode_start=[True, False]),
            DataError,
            "episode_start",
        ),
    ],
)
def test_what_cannot_be_right_is_refused(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_an_actor_that_looks_at_the_last_reward_asks_for_it():
    actor = ACTORS["lstm"]("CartPole-v1")
    _, state = actor.predict(np.zeros(4))
    with pytest.raises(ActorError, match="reward"):
        actor.predict(np.zeros(4), state)
    actor.predict(np.zeros(4), state, episode_start=True)


THREE = np.zeros((3, 4))


@pytest.mark.parametrize("name", ["mlp", "lstm"])
@pytest.mark.parametrize(
    "obs, reward, text",
    [
        (
            THREE,
            [1.0, 2.0],
            r"^leaf reward: this is no reward. Expected a finite number, or numbers \[3\], got \[1.0, 2.0\]",
        ),
        (THREE, np.zeros((3, 1)), r"leaf reward: .*got float64 \[3, 1\]"),
        (THREE, np.zeros((1, 3)), r"leaf reward: .*got float64 \[1, 3\]"),
        (THREE, torch.zeros(4), r"leaf reward: .*got float32 \[4\]"),
        (THREE[0], np.zeros(2), r"leaf reward: .*or numbers \[1\], got float64 \[2\]"),
        (THREE, "much", "leaf reward: .*got 'much'"),
        (THREE, [None, 1, 2], r"leaf reward: .*got \[None, 1, 2\]"),
        (
            THREE,
            [0, np.nan, 1],
            r"^environment 1, leaf reward: non-finite value. Expected finite numbers, got nan",
        ),
        (
            THREE,
            np.array([0, 1, -np.inf]),
            r"^environment 2, leaf reward: non-finite value.*got -inf",
        ),
        (THREE[0], float("nan"), r"^environment 0, leaf reward: non-finite value.*got nan"),
    ],
)
def test_a_reward_that_cannot_be_right(name, obs, reward, text):
    actor = ACTORS[name]("CartPole-v1")
    _, state = actor.predict(obs)
    with pytest.raises(DataError, match=text):
        actor.predict(obs, state, reward=reward)


@pytest.mark.parametrize(
    "reward",
    [
        1,
        1.0,
        True,
        np.float64(1),
        [1, 1, 1],
        np.ones(3),
        torch.ones(3, dtype=torch.float64),
        np.ones(()),
    ],
)
def test_a_reward_in_any_form(reward):
    actor = ACTORS["lstm"]("CartPole-v1")
    _, state = actor.predict(THREE)
    found, wanted = (
        actor.predict(THREE, state, reward=x)[1].hx for x in (reward, np.float32([1, 1, 1]))
    )
    for x, y in zip(found, wanted):
        assert torch.equal(x, y)


@pytest.mark.parametrize("name", ACTORS)
@pytest.mark.parametrize(
    "before, now, text",
    [
        (
            THREE,
            THREE[:2],
            "leaf state: .*Expected the state of 2 environments, as in obs, got that of 3",
        ),
        (
            THREE[:2],
            THREE,
            "leaf state: .*Expected the state of 3 environments, as in obs, got that of 2",
        ),
        (
            THREE,
            THREE[0],
            "leaf state: .*Expected the state of 1 environment, as in obs, got that of 3",
        ),
        (
            THREE[0],
            THREE,
            "leaf state: .*Expected the state of 3 environments, as in obs, got that of 1",
        ),
    ],
)
@pytest.mark.parametrize("begins", [False, True])
def test_a_state_of_another_number_of_environments(name, before, now, text, begins):
    actor = ACTORS[name]("CartPole-v1")
    _, state = actor.predict(before)
    with pytest.raises(DataError, match=text):
        actor.predict(now, state, reward=0, episode_start=begins)


@pytest.mark.parametrize("state", [(), (1, 2, 3), "state", torch.zeros(1, 2, 8)])
def test_a_state_that_is_none(state):
    with pytest.raises(
        DataError, match="leaf state: .*Expected what the call for the step before returned, got"
    ):
        ACTORS["gru"]("CartPole-v1").predict(THREE, state)


EXPORTED = {**ACTORS, "q": lambda env: QPolicy.for_env(env, duelling=True, seed=0)}
CASES = [
    *product((("lstm", Odd), ("mlp", "Pendulum-v1")), FORMATS),
    (("mlp", Odd), "torchscript"),
    (("q", "Taxi-v4"), "torchscript"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case, to", CASES
)  # the other cells and policies, in all formats, are in the matrix below
def test_an_exported_policy_plays_as_the_actor_does(case, to, tmp_path):
    name, env = case
    actor = EXPORTED[name](env)
    if actor.obs_norm is not None:
        actor.obs_norm.update(torch.randn(50, actor.obs_norm.mean.shape[-1]) * 3 + 1)
    assert export_policy(
        actor, tmp_path / "policy", to, {"env": str(env)}
    )  # which compares three steps
    run = FORMATS[to].run((tmp_path / "policy").read_bytes())
    policy = PolicyFunction(actor)
    space = actor.observation_space
    space.seed(1)
    rows = [space.sample() for _ in range(5)]
    inputs = policy.beginning(5)
    stacked = (
        {f"obs_{k}": np.stack([row[k] for row in rows]) for k in space}
        if env is Odd
        else {"obs": np.stack(rows)}
    )
    inputs.update({k: torch.from_numpy(x) for k, x in stacked.items()})
    found = dict(zip(policy.outputs, run(*inputs.values())))
    wanted = [actor.predict(row)[0] for row in rows]
    for b, action in enumerate(wanted):
        names = ("act_a", "act_b", "act_c_0", "act_c_1") if env is Odd else ("act",)
        leaves = dict(
            zip(names, (action["a"], action["b"], *action["c"]) if env is Odd else (action,))
        )
        for k, x in leaves.items():
            np.testing.assert_allclose(np.asarray(found[k])[b], x, rtol=1e-3, atol=1e-4)


Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple = (
    getattr(gym.spaces, name)
    for name in ("Box", "Dict", "Discrete", "MultiBinary", "MultiDiscrete", "Tuple")
)
CONV = dict(images="conv", n_out=6)
WIDE = MultiDiscrete([3, 2, 4], start=[1, -2, 0])
GRID = MultiDiscrete([[3, 2], [4, 5]])


def image(*shape, dtype=np.uint8):
    return Box(0, 255 if dtype is np.uint8 else 1, shape, dtype)


def own_encoder(space):
    return ModuleDict(dict(a=ConvTrunk((6, 5, 3), 4), b=(Bits((2,), [3, 4]), Bits((), 8))))


# Each encoder, head, policy and recurrent cell is in one of these at least: observations, actions, class, its options.
MATRIX = {
    "h w": (image(6, 5), Discrete(3), MLPPolicy, dict(encoder=CONV)),
    "h w c": (image(6, 5, 3), Discrete(3, start=4), MLPPolicy, dict(encoder=CONV)),
    "c h w": (image(3, 6, 5), WIDE, MLPPolicy, dict(encoder=CONV)),
    "k h w c": (image(2, 6, 5, 3), MultiDiscrete([3, 3]), MLPPolicy, dict(encoder=CONV)),
    "k c h w": (image(2, 3, 6, 5), GRID, MLPPolicy, dict(encoder=CONV)),
    "large h w c": (image(40, 36, 3), MultiBinary((2, 3)), MLPPolicy, dict(encoder=CONV)),
    "large stack": (image(4, 40, 36), Box(-1, 1, ()), MLPPolicy, dict(encoder=CONV)),
    "bool image": (image(6, 5, 3, dtype=bool), Box(-1, 2, (2,)), MLPPolicy, dict(encoder=CONV)),
    "flat image": (image(4, 4, 3), Box(-1, 2, (2, 3)), MLPPolicy, dict(std="state")),
    "number": (Box(-1, 1, ()), Box(-1, 2, (2,), N), MLPPolicy, dict(std="fixed")),
    "int16": (Box(-5, 5, (2, 3), np.int16), Discrete(3), MLPPolicy, dict(hidden=())),
    "float64": (
        Box(-1, 1, (2, 3), N),
        Dict(a=Discrete(3), b=Tuple([WIDE, Box(-1, 1, (2,))])),
        MLPPolicy,
        {},
    ),
    "switches": (MultiBinary((2, 3)), Discrete(3), QPolicy, dict(normalize=True)),
    "one-hot": (
        WIDE,
        Discrete(3, start=2),
        QPolicy,
        dict(duelling=True, hidden=(8, 8), activation="tanh"),
    ),
    "bits": (GRID, Discrete(3), QuantilePolicy, dict(encoder=dict(discrete="bits"), n_quantiles=5)),
    "embedding": (
        WIDE,
        Discrete(3),
        QuantilePolicy,
        dict(
            encoder=dict(discrete="embed", size=3), duelling=True, hidden=(8, 8), activation="tanh"
        ),
    ),  # values are never equal, as with relu
    "one integer": (
        Discrete(5, start=2),
        Box(-1, 2, ()),
        SquashedPolicy,
        dict(encoder=dict(discrete="embed", size=3)),
    ),
    "one integer, bits": (
        Discrete(5, start=2),
        Box(-1, 2, (2,)),
        DeterministicPolicy,
        dict(encoder=dict(discrete="bits")),
    ),
    "parts": (
        Dict(a=image(6, 5, 3), b=Tuple([Discrete(4), Box(-1, 1, (2,))])),
        Box(-1, 2, (2, 3)),
        SquashedPolicy,
        dict(encoder=CONV),
    ),
    "parts, pixels": (
        image(6, 5, 3),
        Box(-1, 2, (2, 3), N),
        DeterministicPolicy,
        dict(encoder=CONV),
    ),
    "own": (
        Dict(a=image(6, 5, 3), b=Tuple([MultiDiscrete([3, 4]), Discrete(8)])),
        Discrete(3),
        MLPPolicy,
        dict(encoder=own_encoder),
    ),
    **{
        f"{cell}, {layers}": (
            image(6, 5, 3),
            Dict(a=Discrete(3), b=Box(-1, 1, (2,))),
            RecurrentPolicy,
            dict(encoder=CONV, cell=cell, layers=layers, past=layers == 2, memory=4),
        )
        for cell, layers in (("gru", 1), ("lstm", 1), ("gru", 2), ("lstm", 2))
    },
    **{
        f"{cell}, q": (
            Box(-1, 1, (3,)),
            Discrete(3),
            RecurrentQPolicy,
            dict(cell=cell, duelling=True, past=True, memory=4, normalize=True),
        )
        for cell in ("gru", "lstm")
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("name", MATRIX)
def test_a_file_answers_any_number_of_environments(name, to):
    "One file, asked by 1, 3 and 64 of them, for three steps, before the last of which some episodes begin."
    obs_space, act_space, cls, options = MATRIX[name]
    actor = cls.for_env(
        (obs_space, act_space), **{"hidden": (8,), "seed": 0, **options}
    ).requires_grad_(False)
    if actor.obs_norm is not None:
        actor.obs_norm.update(torch.randn(50, *actor.obs_norm.shape) * 3 + 1)
    policy = PolicyFunction(actor).eval()
    with torch.no_grad():
        run = FORMATS[to].run(FORMATS[to].write(policy, tuple(policy.inputs.values()), "{}"))
    if run is None:
        pytest.skip("there is no onnxruntime")
    obs_space.seed(1)
    for n in (1, 3, 64):
        state = None
        memory = {}
        rng = np.random.default_rng(n)
        for t in range(3):
            obs = nested.stack(
                [
                    nested.map(
                        np.asarray, in_containers(obs_space.sample(), space_spec(obs_space, "obs"))
                    )
                    for _ in range(n)
                ]
            )
            start = (t == 0) | (rng.random(n) < 0.5) & (t == 2)
            rew = rng.normal(size=n).astype(np.float32)
            known = {"start": torch.from_numpy(start), "last_rew": torch.from_numpy(rew), **memory}
            inputs = policy.beginning(n)
            inputs.update(
                zip(inputs, nested.leaves(nested.torchify(obs)))
            )  # they are the first ones
            inputs.update({k: known[k] for k in inputs if k in known})
            found = dict(zip(policy.outputs, run(*inputs.values())))
            memory = {k.removeprefix("next_"): x for k, x in found.items() if k.startswith("next_")}
            action, state = actor.predict(obs, state, episode_start=start, reward=rew)
            wanted = nested.leaves(in_containers(action, space_spec(act_space, "act")))
            acts = [x for k, x in found.items() if k.startswith("act")]
            assert len(acts) == len(wanted)
            for x, y in zip(acts, wanted):
                np.testing.assert_allclose(np.asarray(x), y, rtol=1e-4, atol=1e-5)
            past = (
                [x[0] for x in nested.leaves(state.act)] if actor.uses_past else []
            )  # before it is clipped to the bounds
            carried = [*past, *nested.leaves(state.hx)]
            for x, y in zip(memory.values(), carried, strict=True):
                torch.testing.assert_close(torch.as_tensor(x), y)


@pytest.mark.slow_but_one
@pytest.mark.parametrize("to", FORMATS)
def test_a_policy_that_sees_its_past_needs_nothing_but_its_file(to, tmp_path):
    "It sees the actions that it wanted, of which the environment gets the clipped ones."
    actor = RecurrentPolicy.for_env("Pendulum-v1", past=True, seed=0).requires_grad_(False)
    for name, x in actor.named_parameters():
        x.mul_(4 if x.ndim > 1 else 1).add_(1.5 * ("bias" in name))
    assert export_policy(actor, tmp_path / "policy", to) or to == "onnx"
    run = FORMATS[to].run((tmp_path / "policy").read_bytes())
    policy = PolicyFunction(actor)
    if run is None:
        pytest.skip("there is no onnxruntime")
    raw = []
    obs = np.array([[0.3, -0.2, 4.0]], np.float32)
    inputs = policy.beginning(1)
    state = None
    for t in range(6):
        inputs["obs"] = torch.from_numpy(obs)
        inputs["start"] = torch.tensor([t == 0])
        found = dict(zip(policy.outputs, run(*inputs.values()), strict=True))
        act, state = actor.predict(obs, state, reward=np.zeros(1))
        np.testing.assert_allclose(np.asarray(found["act"]), act, rtol=1e-4)
        inputs.update(
            {
                name.removeprefix("next_"): torch.as_tensor(x)
                for name, x in found.items()
                if name.startswith("next_")
            }
        )
        raw.append(float(np.asarray(found["next_last_act"])[0, 0]))
        assert np.clip(raw[-1], -2, 2) == pytest.approx(act[0, 0], rel=1e-4)
        obs = obs * -0.7
    assert np.abs(raw).max() > 2


def test_a_file_that_answers_differently_is_not_written(tmp_path):
    class Clock(MLPPolicy):
        "Its action depends on the number of the step, which a file is not told."

        def params(self, obs, act, rew, fin, *, hx, stepno):
            mean, log_std = super().params(obs, act, rew, fin, hx=hx, stepno=stepno)[0]
            return type(self.head.forward(self.trunk.forward(self.features(obs))))(
                mean + stepno.unsqueeze(-1), log_std
            ), ()

    with pytest.raises(DataError, match="the exported policy answers differently at step 1"):
        export_policy(Clock.for_env("Pendulum-v1", seed=0), tmp_path / "policy", "torchscript")
    assert not list(tmp_path.iterdir())


class Told(Actor):
    "Acts on what a file is not told: `look(rew, fin, stepno)`."

    observation_space = gym.spaces.Box(-1, 1, (3,))
    action_space = gym.spaces.Discrete(2)
    uses_past = False

    def __init__(self, look):
        super().__init__()
        self.look = look

    def forward(self, obs, act, rew, fin, *, hx, stepno, virtual):
        return (obs[..., 0] * 0 + self.look(rew, fin, stepno) > 0).long(), (), {}


@pytest.mark.parametrize(
    "look, t",
    [
        (lambda rew, fin, stepno: stepno >= 100, 2),
        (lambda rew, fin, stepno: (stepno == 0).float(), 1),
        (lambda rew, fin, stepno: rew, 1),
        (lambda rew, fin, stepno: ~fin, 1),
    ],
)
def test_an_actor_that_looks_at_what_a_file_is_not_told_is_refused(look, t, tmp_path):
    with pytest.raises(DataError, match=f"the exported policy answers differently at step {t}"):
        export_policy(Told(look), tmp_path / "policy", "torchscript")
    assert not list(tmp_path.iterdir())


class Spaced(Actor):
    "An actor of spaces whose keys differ only in a character that no name in a file may have."

    uses_past = False

    def __init__(self, obs=("a b", "a_b"), act=("x", "y"), hx=("h", "g")):
        super().__init__()
        self.hx = hx
        number = gym.spaces.Box(-1, 1, (2,))
        self.observation_space, self.action_space = (
            gym.spaces.Dict({k: number for k in keys}) for keys in (obs, act)
        )

    def forward(self, obs, act, rew, fin, *, hx, stepno, virtual):
        one, two = obs.values()
        return (
            dict(zip(self.action_space, (one, two))),
            {k: fin.new_zeros(1, fin.shape[1], dtype=torch.float32) for k in self.hx},
            {},
        )


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize(
    "keys, name, one, other",
    [
        (dict(), "obs_a_b", "obs['a b']", "obs['a_b']"),
        (dict(obs=("p", "q"), act=("u-1", "u.1")), "act_u_1", "act['u-1']", "act['u.1']"),
        (dict(obs=("p", "q"), hx=("?", "")), "hx", "hx['']", "hx['?']"),
    ],
)
def test_two_leaves_of_one_name(to, keys, name, one, other, tmp_path):
    with pytest.raises(
        DataError,
        match=re.escape(f"leaf {other}: in a file ")
        + ".*"
        + re.escape(f"got {name}, the name of {one} too"),
    ):
        export_policy(Spaced(**keys), tmp_path / "policy", to)
    assert not list(tmp_path.iterdir())
    if not keys:
        assert export_policy(Spaced(("a b", "a_c")), tmp_path / "policy", to)


def test_from_a_run_to_a_loop_without_rollpipe(tmp_path, capsys):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    words = (
        "train ppo CartPole-v1 --steps 512 --n-envs 4 --n-steps 32 --quiet --no-tensorboard --out"
    )
    assert main([*words.split(), str(tmp_path / "run")]) == 0
    capsys.readouterr()
    assert main(["export", str(tmp_path / "run")]) == 0
    assert (
        capsys.readouterr().out
        == f"{tmp_path}/run/policy.onnx: obs -> act (compared with the policy)\n"
    )
    session = onnxruntime.InferenceSession(tmp_path / "run" / "policy.onnx")
    note = json.loads(session.get_modelmeta().custom_metadata_map["rollpipe"])
    assert (note["env"], note["inputs"]) == ("CartPole-v1", {"obs": ["float32", 2, 4]})
    act = lambda obs, *_: int(session.run(None, {"obs": obs[None]})[0][0])
    actor = load_agent(tmp_path / "run").actor
    make = lambda: gym.make("CartPole-v1")
    assert play(make, act, seed=1, n_steps=200) == play(
        make, lambda obs, *_: actor.predict(obs)[0], seed=1, n_steps=200
    )


@pytest.mark.parametrize(
    "words, text",
    [
        ("export RUNN", "there is no such run"),
        ("export RUN --out RUN/no/policy.pt2 --to pt2", "there is no such folder"),
    ],
)
def test_export_of_what_is_not_there(words, text, tmp_path, capsys):
    train = (
        "train ppo CartPole-v1 --steps 64 --n-envs 2 --n-steps 32 --quiet --no-tensorboard --out"
    )
    assert main([*train.split(), str(tmp_path / "RUN")]) == 0
    assert main(words.replace("RUN", str(tmp_path / "RUN")).split()) == 2
    assert text in capsys.readouterr().err


def test_a_torch_that_cannot_write_onnx_is_named_with_another_format(tmp_path, monkeypatch):
    pytest.importorskip("onnxscript")
    actor = MLPPolicy.for_env("CartPole-v1", hidden=(4,), seed=0)
    monkeypatch.setattr(torch, "__version__", "2.6.0+cpu")
    with pytest.raises(DataError, match="Expected torch 2.7 or later, .*torchscript, got 2.6.0"):
        export_policy(actor, tmp_path / "policy.onnx")
    export_policy(actor, tmp_path / "policy.pt", "torchscript")
    assert (tmp_path / "policy.pt").is_file() and not (tmp_path / "policy.onnx").exists()
