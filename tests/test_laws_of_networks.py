"""What every public network and actor promises, each promise as one law over all of them.

The registry is found by inspection: each public class of the rooms `layers` and `agents` that is made `for_env`. A new one needs a row in
`ACTORS` or `CRITICS`, which says for which spaces and with which options it is made.
"""

import copy
import importlib
import inspect
import pickle
import pkgutil
from itertools import islice, product
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from test_action_masks import SPACES, Forbidding

import rollpipe.agents
import rollpipe.layers
from rollpipe.agents.evaluate import RandomActor
from rollpipe.agents.intrinsic import Distillation
from rollpipe.agents.off_policy.crossq import RenormCritic, RenormPolicy
from rollpipe.agents.tabular import TabularQ
from rollpipe.layers import (
    ActionCritic,
    CategoricalPolicy,
    ConvTrunk,
    Critic,
    DeterministicPolicy,
    GaussianPolicy,
    MemoryCritic,
    MLPPolicy,
    Policy,
    QPolicy,
    QuantilePolicy,
    RecurrentPolicy,
    RecurrentQPolicy,
    SquashedPolicy,
)
from rollpipe.layers.critic import QVCritic
from rollpipe.layers.encoders import Bits, ModuleDict
from rollpipe.layers.heads import Categorical
from rollpipe.layers.policies import SharedPolicy
from rollpipe.pipes import EnvStepper, FragmentCollector, nested, rollouts
from rollpipe.pipes.data.action_masks import ActionMask, mask_sizes, mask_space
from rollpipe.pipes.envs.actions import in_containers
from rollpipe.pipes.envs.factories import space_spec
from rollpipe.pipes.graph.modules import bump_version
from rollpipe.runs.export import FORMATS, PolicyFunction, export_policy
from rollpipe.testing import check_actor

pytestmark = [
    pytest.mark.usefixtures("functions_of_onnx"),
    pytest.mark.filterwarnings("ignore:.*Casting input x to numpy array"),  # of spaces without axes
]

# --- the registry


def public_networks():
    "Each public class of the two rooms that is made for an environment, and is no base to write `params` or `position` for."
    found = set()
    for room in (rollpipe.layers, rollpipe.agents):
        for module in pkgutil.walk_packages(room.__path__, f"{room.__name__}."):
            classes = inspect.getmembers(importlib.import_module(module.name), inspect.isclass)
            found |= {
                x for _, x in classes if x.__module__ == module.name and hasattr(x, "for_env")
            }
    bases = {
        "ForSpaces",
        "Torso",
        "RecurrentTorso",
        "Policy",
        "EpsilonGreedy",
        "BoundedActor",
        "Features",
    }
    return {x for x in found if x.__name__ not in bases and not x.__name__.startswith("_")}


class Row(NamedTuple):
    "Spaces of an environment, the class of a network for it, and its options."

    obs: gym.Space
    act: gym.Space
    cls: Any
    options: dict = {}

    def make(self, **more):
        options = self.options | more
        if "hidden" in inspect.signature(self.cls).parameters:
            options = dict(hidden=(8,)) | options
        return self.cls.for_env((self.obs, self.act), **dict(seed=0) | options)


def image(*shape, dtype=np.uint8):
    return Box(0, 255 if dtype is np.uint8 else 1, shape, dtype)


def own_encoder(space):
    return ModuleDict(dict(a=ConvTrunk((6, 5, 3), 4), b=(Bits((2,), [3, 4]), Bits((), 8))))


class OwnMemory(Policy):
    "A user's policy with torch's own GRU, which keeps a second list of its weights, and dropout."

    dist = Categorical(3, 1)
    kind = torch.nn.GRU

    @classmethod
    def for_env(cls, spaces, seed):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            actor = cls()
        actor.observation_space, actor.action_space = spaces
        return actor

    def __init__(self):
        super().__init__()
        self.rnn = self.kind(4, 8, 2)
        linear = torch.nn.Linear
        self.head = torch.nn.Sequential(linear(8, 8), torch.nn.Dropout(0.5), linear(8, 3))

    def memory_at(self, hx, fin):
        hx = torch.zeros(2, fin.shape[1], 8) if hx is None else hx
        return hx * (~fin[0])[:, None]

    def params(self, obs, act, rew, fin, *, hx, stepno):
        "Row by row, because the memory begins anew with each episode."
        rows = []
        for x, new in zip(obs.split(1), fin.split(1)):
            y, hx = self.rnn(x, self.memory_at(hx, new))
            rows.append(y)
        return self.head(torch.cat(rows)), hx


class OwnLSTM(OwnMemory):
    kind = torch.nn.LSTM

    def memory_at(self, hx, fin):
        return tuple(super(OwnLSTM, self).memory_at(h, fin) for h in hx or (None, None))


STATE = Box(-3, 3, (4,))
ACTS = Discrete(3, start=1)
MIXED_OBS = Dict(
    image=Box(0, 255, (10, 10, 3), np.uint8),
    number=Discrete(4, start=1),
    bits=MultiBinary(3),
    pair=Tuple([MultiDiscrete([2, 5]), Box(-9, 9, (2, 2), np.float64)]),
)
MIXED_ACTS = Dict(
    a=Discrete(3, start=2),
    b=Box(-0.01, 0.02, (2, 2)),
    c=Tuple([MultiDiscrete([2, 3]), MultiBinary(2)]),
)
CONV = dict(encoder=dict(images="conv", n_out=6))
EMBED = dict(encoder=dict(discrete="embed", size=3))
BITS = dict(encoder=dict(discrete="bits"))
WIDE = MultiDiscrete([3, 2, 4], start=[1, -2, 0])
GRID = MultiDiscrete([[3, 2], [4, 5]])
PARTS = Dict(a=image(6, 5, 3), b=Tuple([Discrete(4), Box(-1, 1, (2,))]))
OWN = Dict(a=image(6, 5, 3), b=Tuple([MultiDiscrete([3, 4]), Discrete(8)]))
GREEDY = dict(epsilon=0.3)
TANH = dict(
    duelling=True, hidden=(8, 8), activation="tanh", **GREEDY
)  # values are never equal, as with relu
TWO = Dict(a=Discrete(3), b=Box(-1, 1, (2,)))

# Each encoder, head, policy and recurrent cell is in one of these at least.
ACTORS = {
    "h w": Row(image(6, 5), Discrete(3), MLPPolicy, CONV),
    "h w c": Row(image(6, 5, 3), Discrete(3, start=4), MLPPolicy, CONV),
    "c h w": Row(image(3, 6, 5), WIDE, MLPPolicy, CONV),
    "k h w c": Row(image(2, 6, 5, 3), MultiDiscrete([3, 3]), MLPPolicy, CONV),
    "k c h w": Row(image(2, 3, 6, 5), GRID, MLPPolicy, CONV),
    "large h w c": Row(image(40, 36, 3), MultiBinary((2, 3)), MLPPolicy, CONV),
    "large stack": Row(image(4, 40, 36), Box(-1, 1, ()), MLPPolicy, CONV),
    "bool image": Row(image(6, 5, 3, dtype=bool), Box(-1, 2, (2,)), MLPPolicy, CONV),
    "flat image": Row(image(4, 4, 3), Box(-1, 2, (2, 3)), MLPPolicy, dict(std="state")),
    "number": Row(Box(-1, 1, ()), Box(-1, 2, (2,), np.float64), MLPPolicy, dict(std="fixed")),
    "no bounds": Row(STATE, Box(-np.inf, np.inf, ()), GaussianPolicy),
    "int16": Row(Box(-5, 5, (2, 3), np.int16), Discrete(3), MLPPolicy, dict(hidden=())),
    "float64": Row(
        Box(-1, 1, (2, 3), np.float64),
        Dict(a=Discrete(3), b=Tuple([WIDE, Box(-1, 1, (2,))])),
        MLPPolicy,
    ),
    "mixed": Row(MIXED_OBS, MIXED_ACTS, MLPPolicy, dict(encoder=dict(images="conv"))),
    "categorical": Row(STATE, ACTS, CategoricalPolicy, dict(activation="relu")),
    "one network": Row(STATE, ACTS, SharedPolicy),
    "own": Row(OWN, Discrete(3), MLPPolicy, dict(encoder=own_encoder)),
    "switches": Row(MultiBinary((2, 3)), Discrete(3), QPolicy, dict(normalize=True, **GREEDY)),
    "one-hot": Row(WIDE, Discrete(3, start=2), QPolicy, TANH),
    "linear": Row(Discrete(9), Discrete(3), QPolicy, dict(hidden=(), **GREEDY)),
    "bits": Row(GRID, Discrete(3), QuantilePolicy, dict(n_quantiles=5, **BITS, **GREEDY)),
    "embedding": Row(WIDE, Discrete(3), QuantilePolicy, EMBED | TANH),
    "table": Row(Discrete(9, start=1), Discrete(3, start=2), TabularQ),
    "one integer": Row(Discrete(5, start=2), Box(-1, 2, ()), SquashedPolicy, EMBED),
    "one integer, bits": Row(Discrete(5, start=2), Box(-1, 2, (2,)), DeterministicPolicy, BITS),
    "parts": Row(PARTS, Box(-1, 2, (2, 3)), SquashedPolicy, CONV),
    "parts, pixels": Row(image(6, 5, 3), Box(-1, 2, (2, 3), np.float64), DeterministicPolicy, CONV),
    "renormalised": Row(STATE, Box(-1, 2, (2,)), RenormPolicy),
    **{
        f"{cell}, {layers}": Row(
            image(6, 5, 3),
            TWO,
            RecurrentPolicy,
            dict(cell=cell, layers=layers, past=layers == 2, memory=4, report=layers == 2, **CONV),
        )
        for cell, layers in product(("gru", "lstm"), (1, 2))
    },
    "gru with past": Row(MIXED_OBS, MIXED_ACTS, RecurrentPolicy, dict(past=True)),
    **{
        f"{cell}, q": Row(
            Box(-1, 1, (3,)),
            Discrete(3, start=-1),
            RecurrentQPolicy,
            dict(cell=cell, duelling=True, past=True, memory=4, normalize=True, **GREEDY),
        )
        for cell in ("gru", "lstm")
    },
    "torch's gru": Row(STATE, ACTS, OwnMemory),
    "torch's lstm": Row(STATE, ACTS, OwnLSTM),
}
MASKED = dict(action_mask="action_mask")


def masked(cls, act, **options):
    "A row whose observations have a mask of the actions."
    obs = Dict(see=Box(-1, 1, (2,)), action_mask=mask_space(mask_sizes(act)))
    return Row(obs, act, cls, MASKED | options)


ACTORS |= {
    f"masked {cls.__name__}, {space}": masked(cls, SPACES[space])
    for cls in (MLPPolicy, RecurrentPolicy)
    for space in ("start", "matrix", "dict")
}
ACTORS |= {
    f"masked {cls.__name__}": masked(cls, SPACES["start"], **options)
    for cls, options in (
        (CategoricalPolicy, {}),
        (SharedPolicy, {}),
        (QPolicy, GREEDY),
        (QuantilePolicy, GREEDY),
        (RecurrentQPolicy, GREEDY),
    )
}
NO_GRAPH = {"table"}  # what no other engine runs
NO_FILE = NO_GRAPH | {"torch's gru", "torch's lstm"}  # the files are of our own layers
CRITICS = {
    "states": Row(PARTS, ACTS, Critic, CONV),
    "memory": Row(STATE, ACTS, MemoryCritic, dict(memory=6)),
    "actions": Row(STATE, Box(-1, 2, (2, 3)), ActionCritic, dict(n_critics=3)),
    "both": Row(PARTS, Box(-1, 2, (2,)), QVCritic, CONV),
    "renormalised": Row(STATE, Box(-1, 2, (2,)), RenormCritic),
    "novelty": Row(MIXED_OBS, ACTS, Distillation),
}
each_actor = pytest.mark.parametrize("name", ACTORS)
each_critic = pytest.mark.parametrize("name", CRITICS)


def test_every_public_network_has_a_row():
    rows = {row.cls for row in (*ACTORS.values(), *CRITICS.values())} | {RandomActor}
    missing = sorted(x.__name__ for x in public_networks() - rows)
    assert not missing, f"{missing}: give each a row in ACTORS or CRITICS"


# --- what is asked


def opened(obs, act):
    "Observations whose mask, if they have one, allows an action."
    if not (isinstance(obs, dict) and "action_mask" in obs):
        return obs
    return ActionMask("action_mask", mask_sizes(act)).opened(obs)


def drawn(space, n, seed=0):
    "A batch `[n, ...]` of samples, in dicts and tuples."
    space.seed(seed)
    spec = space_spec(space, "obs")
    return nested.stack(
        [nested.map(np.asarray, in_containers(space.sample(), spec)) for _ in range(n)]
    )


def awake(actor, scale=0.3):
    "Change all parameters in place, as an optimiser does, and let the normaliser see something."
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(1)
        for p in actor.parameters():
            p.add_(torch.randn_like(p) * scale)
    norm = getattr(actor, "obs_norm", None)
    if norm is not None:
        norm.update(
            torch.randn(50, *norm.shape, generator=torch.Generator().manual_seed(2)) * 3 + 1
        )
    bump_version(actor)
    return actor


def answers_of(actor, row, n=5, steps=3):
    "Actions and states of a few steps without noise, as `predict` gives them."
    found = []
    state = None
    for t in range(steps):
        start = np.arange(n) % 2 == t % 2
        reward = np.linspace(-1, 1, n)
        action, state = actor.predict(
            opened(drawn(row.obs, n, t), row.act), state, episode_start=start, reward=reward
        )
        found.append((nested.leaves(in_containers(action, space_spec(row.act, "act"))), state))
    return found


def critic_inputs(row, n=5, seed=0):
    obs = nested.as_seen(nested.torchify(drawn(row.obs, n, seed)))
    if row.cls is MemoryCritic:
        return (
            dict(obs=obs, memory=torch.randn(n, 6, generator=torch.Generator().manual_seed(seed))),
        )
    takes_actions = "act" in inspect.signature(row.cls.forward).parameters
    return (obs, nested.torchify(drawn(row.act, n, seed))) if takes_actions else (obs,)


def assert_close(found, wanted, tolerance=1e-5):
    "Floats within the tolerance, everything else bit for bit."
    assert nested.flatten(found)[1] == nested.flatten(wanted)[1]
    for path, x, y in zip(nested.paths(wanted, "f"), nested.leaves(found), nested.leaves(wanted)):
        x, y = map(torch.as_tensor, (x, y))
        assert x.dtype == y.dtype and x.shape == y.shape, path
        if x.dtype.is_floating_point:
            torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance, msg=f"{path}: {x} {y}")
        else:
            assert torch.equal(x, y), path


# --- laws of actors


@each_actor
def test_the_contract_of_actors(name):
    "Also: a row of a batch has the answer of that environment alone, and rows at once have those of single steps."
    row = ACTORS[name]
    check_actor(awake(row.make()), (row.obs, row.act))


@each_actor
def test_a_state_a_copy_and_a_seed_give_the_same_actor(name):
    row = ACTORS[name]
    before = torch.get_rng_state()
    one, again, other = (row.make(seed=seed) for seed in (7, 7, 8))
    assert torch.equal(torch.get_rng_state(), before), name
    same, different = (
        [torch.equal(x, y) for x, y in zip(one.parameters(), net.parameters())]
        for net in (again, other)
    )
    assert all(same) and (name == "table" or not all(different)), name
    assert [x is None for x in (one.observation_space, one.action_space)] == [False, False]

    awake(one)
    expected = answers_of(one, row)
    copies = [
        copy.deepcopy(one),
        pickle.loads(pickle.dumps(one)),
        copy.deepcopy(one).share_memory(),
    ]
    other.load_state_dict(one.state_dict())
    for net in (other, *copies) if not name.endswith("own") else (other, copies[0]):
        assert_close(answers_of(net, row), expected, 0)


@each_actor
def test_predict_is_one_by_one_and_draws_only_if_asked(name):
    "Actions are in their space. Mode and gradients are left as they were."
    row = ACTORS[name]
    actor = awake(row.make())
    n = 3
    state = None
    alone = [None] * n
    for t in range(3):
        obs = opened(drawn(row.obs, n, t), row.act)
        start = np.array([t == 0, t == 2, False])
        reward = np.linspace(-1, 1, n)
        action, state = actor.predict(obs, state, episode_start=start, reward=reward)
        for b in range(n):
            own = nested.map(lambda x, b=b: x[b], obs)
            own_start = bool(start[b]) or alone[b] is None
            one, alone[b] = actor.predict(own, alone[b], episode_start=own_start, reward=reward[b])
            assert one in row.act, (name, one)
            of_batch = nested.map(
                lambda x, b=b: np.asarray(x)[b], in_containers(action, space_spec(row.act, "act"))
            )
            assert_close(
                nested.map(np.asarray, in_containers(one, space_spec(row.act, "act"))), of_batch
            )

    # Without noise always the same, with noise not
    actor.train()
    again = [actor.predict(obs, deterministic=True)[0] for _ in range(2)]
    assert_close(*again, 0)
    many = [str(actor.predict(obs, deterministic=False)[0]) for _ in range(40)]
    assert len({*many}) > 1, name
    assert actor.training and torch.is_grad_enabled()


# --- other engines and files


class Dreams(gym.Env):
    "Draws observations, rewards and ends from its own generator, so that the last bits of an action do not grow."

    def __init__(self, observation_space=STATE, action_space=ACTS):
        self.observation_space, self.action_space = copy.deepcopy((observation_space, action_space))

    def look(self):
        return opened(self.observation_space.sample(), self.action_space)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        return self.look(), {}

    def step(self, action):
        end = self.np_random.random(2) < 0.1
        obs = self.look()
        return obs, self.np_random.normal(), bool(end[0]), bool(end[1]), {}


BOTH = ("torch", "onnxruntime")


def streams(actor, obs=STATE, act=ACTS, engines=BOTH, n_envs=3, n_steps=12, **options):
    "The same pipeline with several engines, and one actor."
    options = dict(n_envs=n_envs, n_steps=n_steps, seed=1) | options
    return [iter(rollouts(lambda: Dreams(obs, act), actor, engine=e, **options)) for e in engines]


@pytest.mark.slow_but_one
@pytest.mark.parametrize(
    "n_envs, name", [*product((3, 1), [x for x in ACTORS if x not in NO_GRAPH])]
)
def test_both_engines_give_the_same_fragments_also_while_the_actor_learns(name, n_envs):
    "And what the actor replays is what was recorded."
    pytest.importorskip("onnxruntime")
    row = ACTORS[name]
    actor = row.make()
    pair = streams(actor, row.obs, row.act, n_envs=n_envs)
    for _ in range(3):
        wanted, found = map(next, pair)
        assert_close(found, wanted)
        with torch.no_grad():
            if hasattr(actor, "replay"):
                logp = actor.eval().replay(found)["logp"]
                torch.testing.assert_close(logp, found.actor["logp"][:-1], rtol=1e-4, atol=1e-4)
            if hasattr(actor, "values"):
                q, _ = actor.values(nested.as_seen(found.state), found.hx)
                torch.testing.assert_close(q, found.actor["q"], rtol=1e-4, atol=1e-4)
        awake(actor, 0.05)

    # Actions at random, of those that begin with them
    if hasattr(actor, "is_random"):
        actor.is_random.fill_(True)
        policy_acts = found.state.act
        wanted, found = map(next, pair)
        assert_close(found, wanted)
        assert not torch.allclose(found.state.act, policy_acts)


@pytest.mark.slow
@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("name", [x for x in ACTORS if x not in NO_FILE])
def test_a_file_answers_any_number_of_environments(name, to, tmp_path):
    "One file, asked by 1, 3 and 64 of them, for three steps, before the last of which some episodes begin."
    row = ACTORS[name]
    actor = awake(row.make()).requires_grad_(False)
    assert export_policy(actor, tmp_path / "policy", to) or to == "onnx"
    run = FORMATS[to].run((tmp_path / "policy").read_bytes())
    if run is None:
        pytest.skip("there is no onnxruntime")
    policy = PolicyFunction(actor).eval()
    for n in (1, 3, 64):
        state = None
        memory = {}
        rng = np.random.default_rng(n)
        for t in range(3):
            obs = opened(drawn(row.obs, n, t), row.act)
            start = (t == 0) | (rng.random(n) < 0.5) & (t == 2)
            rew = rng.normal(size=n).astype(np.float32)
            known = dict(start=torch.from_numpy(start), last_rew=torch.from_numpy(rew), **memory)
            inputs = policy.beginning(n)
            inputs.update(
                zip(inputs, nested.leaves(nested.torchify(obs)))
            )  # they are the first ones
            inputs.update({k: known[k] for k in inputs if k in known})
            found = dict(zip(policy.outputs, run(*inputs.values()), strict=True))
            memory = {k.removeprefix("next_"): x for k, x in found.items() if k.startswith("next_")}

            # Its actions, and what it carries to the next step: an action that it sees is not clipped.
            action, state = actor.predict(obs, state, episode_start=start, reward=rew)
            wanted = nested.leaves(in_containers(action, space_spec(row.act, "act")))
            acts = [x for k, x in found.items() if k.startswith("act")]
            for x, y in zip(acts, wanted, strict=True):
                np.testing.assert_allclose(np.asarray(x), y, rtol=1e-4, atol=1e-5)
            past = [x[0] for x in nested.leaves(state.act)] if actor.uses_past else []
            for x, y in zip(memory.values(), [*past, *nested.leaves(state.hx)], strict=True):
                torch.testing.assert_close(torch.as_tensor(x), y)


# --- masks of actions

MASKS = {name: row for name, row in ACTORS.items() if row.options.keys() & MASKED}
MASKS |= {f"random, {space}": masked(RandomActor, SPACES[space]) for space in SPACES}


def test_every_actor_that_takes_a_mask_has_a_row_with_one():
    taking = {
        cls
        for cls in public_networks() - {GaussianPolicy}  # whose actions have no masks
        if "action_mask" in inspect.signature(cls).parameters
    }
    missing = taking - {row.cls for row in MASKS.values()}
    assert not missing, f"{missing}: give each a row in ACTORS made by `masked`"


@pytest.mark.slow_but_one
@pytest.mark.parametrize("engine", BOTH)
@pytest.mark.parametrize("name", MASKS)
def test_what_a_mask_forbids_is_never_drawn(name, engine):
    "The environment raises at a forbidden action. Log-probabilities are finite, and replayed as they were recorded."
    row = MASKS[name]
    if engine == "onnxruntime":
        pytest.importorskip("onnxruntime")
    engine = "torch" if row.cls is RandomActor else engine
    actor = row.make()
    for explore in (True, False):
        stepper = EnvStepper(
            lambda: Forbidding(row.act), actor, 3, engine=engine, explore=explore, seed=1
        )
        fragments = list(islice(FragmentCollector(stepper, 16), 3))
        assert sum(len(f.final.t) for f in fragments)
        for f in fragments if hasattr(actor, "replay") else []:
            assert f.actor["logp"][:-1].isfinite().all() and f.final.actor["logp"].isfinite().all()
            torch.testing.assert_close(actor.replay(f)["logp"], f.actor["logp"][:-1])


# --- laws of critics


@each_critic
def test_a_critic_values_each_row_alone_and_learns_everywhere(name):
    row = CRITICS[name]
    critic = awake(row.make()).eval()
    inputs = critic_inputs(row)
    values = critic(*inputs)
    for b in range(5):
        one = critic(*nested.map(lambda x, b=b: x[b : b + 1], inputs))
        torch.testing.assert_close(one, values[..., b : b + 1], rtol=1e-4, atol=1e-5)
    total = values.square().sum()
    if hasattr(critic, "value"):
        total = total + critic.value(inputs[0]).square().sum()
    total.backward()
    trained = {k: p for k, p in critic.named_parameters() if p.requires_grad}
    assert trained and all(p.grad is not None and p.grad.any() for p in trained.values()), name


@each_critic
def test_a_state_a_copy_and_a_seed_give_the_same_critic(name):
    row = CRITICS[name]
    before = torch.get_rng_state()
    one, again, other = (row.make(seed=seed) for seed in (7, 7, 8))
    assert torch.equal(torch.get_rng_state(), before), name
    awake(one), awake(again), awake(other)
    inputs = critic_inputs(row)
    values = one(*inputs)
    assert torch.equal(again(*inputs), values) and not torch.equal(other(*inputs), values)
    if hasattr(one, "observe_returns"):
        one.observe_returns(torch.tensor([1.0, 4.0, -2.0]))
        values = one(*inputs)
    other.load_state_dict(one.state_dict())
    for net in (
        other,
        copy.deepcopy(one),
        pickle.loads(pickle.dumps(one)),
        copy.deepcopy(one).share_memory(),
    ):
        assert torch.equal(net(*inputs), values), name


@pytest.mark.parametrize("cls", sorted(public_networks(), key=str))
def test_an_option_that_is_misspelt_is_refused_by_name(cls):
    with pytest.raises(TypeError, match=rf"{cls.__name__}.*hiden"):
        cls.for_env((STATE, ACTS), hiden=(8,))
