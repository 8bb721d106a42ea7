"""Actors, perceptrons, normalisers, heads, encoders, policies and critics."""

import inspect

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import (
    Box,
    Dict,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    Tuple,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import prune

import rollpipe.layers
from rollpipe.agents.critics import fit_critic
from rollpipe.agents.off_policy.crossq import RenormCritic, RenormPolicy
from rollpipe.agents.shared_options import args_section
from rollpipe.layers import (
    MLP,
    ActionCritic,
    Actor,
    Categorical,
    CategoricalPolicy,
    Critic,
    DeterministicPolicy,
    Gaussian,
    GaussianPolicy,
    MemoryCritic,
    MLPPolicy,
    Policy,
    QPolicy,
    QuantilePolicy,
    RecurrentPolicy,
    RecurrentQPolicy,
    RunningNorm,
    SquashedPolicy,
    encoder_for,
)
from rollpipe.layers.heads import GaussianHead
from rollpipe.pipes import nested

fast = settings(deadline=None, max_examples=25)
BOX = Box(-1, 1, (4,))


def test_surface_is_sorted_and_complete():
    names = rollpipe.layers.__all__
    assert names == sorted(names) and all(hasattr(rollpipe.layers, name) for name in names)


# --- actor


def define(**methods):
    return type("Mine", (Actor,), methods)


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, obs, act, rew, fin, *, hx, stepno, virtual: None,
        lambda self, x, a, r, d, hx, stepno, virtual: None,
        lambda self, *args, **kwargs: None,
        lambda self, obs, *_, hx, temperature=1, **kwargs: None,
    ],
)
def test_signatures_that_fit(forward):
    define(forward=forward)


@pytest.mark.parametrize(
    "method, fn, message",
    [
        (
            "forward",
            lambda self, obs, *, hx, stepno, virtual: None,
            "Mine.forward lacks act, rew, fin",
        ),
        (
            "forward",
            lambda self, obs, act, rew, fin, *, hx: None,
            "Mine.forward lacks stepno, virtual",
        ),
        (
            "forward",
            lambda self, obs, act, rew, fin, extra, *, hx, stepno, virtual: None,
            "Mine.forward demands extra",
        ),
        (
            "step",
            lambda self, stepno, obs, act, rew, fin, /, *, hx: None,
            "Mine.step lacks virtual, noise",
        ),
        ("reset", lambda self, hx: None, "Mine.reset lacks at"),
        ("draw_noise", lambda self, lead, generator: None, "Mine.forward lacks noise"),
    ],
)
def test_signatures_that_do_not_fit(method, fn, message):
    forward = {"forward": lambda self, obs, act, rew, fin, *, hx, stepno, virtual: None}
    with pytest.raises(TypeError, match=message):
        define(**{**forward, method: fn})


def test_policies_check_params_too():
    with pytest.raises(TypeError, match="Mine.params lacks hx"):
        type("Mine", (Policy,), {"params": lambda self, obs, act, rew, fin, *, stepno: None})
    with pytest.raises(NotImplementedError, match="Mine must define params"):
        type("Mine", (Policy,), {})().params(None, None, None, None, hx=(), stepno=None)


def test_reset_zeroes_environments_of_every_leaf_in_a_copy():
    actor = Actor()
    hx = {
        "lstm": (torch.ones(2, 5, 3), torch.ones(2, 5, 3)),
        "count": torch.ones(1, 5, dtype=torch.int64),
    }
    for at in (
        [1, 3],
        np.array([1, 3]),
        torch.tensor([False, True, False, True, False]),
        slice(1, 4, 2),
    ):
        new = actor.reset(hx, at)
        for leaf in nested.leaves(new):
            assert (leaf[:, [1, 3]] == 0).all() and (leaf[:, [0, 2, 4]] == 1).all()
    assert all((leaf == 1).all() for leaf in nested.leaves(hx))
    assert actor.reset((), [0]) == () and actor.reset(None, [0]) is None


@pytest.mark.parametrize("name", ["elu", "gelu", "leaky_relu", "relu", "sigmoid", "silu", "tanh"])
def test_an_activation_by_name_is_the_function_of_that_name(name):
    mlp = MLP(3, (4,), activation=name)
    x = torch.randn(5, 3)
    function = getattr(torch, name, None) or getattr(torch.nn.functional, name)
    assert torch.equal(mlp(x), function(mlp.hidden[0](x)))


# --- the arguments that many networks have

TAKE = {"observation_space", "hidden", "normalize", "activation", "encoder", "sees", "network"}


@pytest.mark.parametrize(
    "cls, others",
    [
        (MLPPolicy, "action_space action_mask std log_std"),
        (CategoricalPolicy, "action_space action_mask"),
        (GaussianPolicy, "action_space action_mask std log_std"),
        (
            RecurrentPolicy,
            "action_space action_mask std log_std report memory cell layers span past",
        ),
        (QPolicy, "action_space action_mask duelling epsilon"),
        (QuantilePolicy, "action_space action_mask duelling epsilon n_quantiles"),
        (
            RecurrentQPolicy,
            "action_space action_mask duelling epsilon memory cell layers span past",
        ),
        (SquashedPolicy, "action_space"),
        (RenormPolicy, "action_space"),
        (RenormCritic, "action_space n_critics"),
        (DeterministicPolicy, "action_space explore_std"),
        (Critic, ""),
        (MemoryCritic, "memory"),
        (ActionCritic, "action_space n_critics"),
    ],
)
def test_networks_show_and_explain_what_they_take(cls, others):
    taken = inspect.signature(cls).parameters
    assert set(taken) == set(args_section(cls.__doc__)) == TAKE | set(others.split())
    with pytest.raises(
        TypeError, match=rf"{cls.__name__}.__init__\(\) got an unexpected keyword argument 'hiden'"
    ):
        cls.for_env((BOX, BOX), hiden=(8,))


# --- mlp


@fast
@given(
    chunks=st.lists(st.integers(0, 7), min_size=1, max_size=5),
    seed=st.integers(0, 99),
    shift=st.sampled_from([0.0, 1e3]),
)
def test_running_norm_in_chunks_equals_all_at_once(chunks, seed, shift):
    g = torch.Generator().manual_seed(seed)
    x = shift + torch.randn(sum(chunks), 2, 3, generator=g)
    valid = torch.rand(sum(chunks), 2, generator=g) < 0.7
    norm = RunningNorm(3)
    for part, mask in zip(x.split(chunks), valid.split(chunks)):
        norm.update(part, mask)
    rows = x[valid].double()
    assert norm.count == len(rows)
    if not len(rows):
        return
    torch.testing.assert_close(norm.mean, rows.mean(0).float(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(norm.var, rows.var(0, correction=0).float(), rtol=1e-3, atol=1e-5)
    expected = ((x - norm.mean) / (norm.var + norm.eps).sqrt()).clamp(-10, 10)
    torch.testing.assert_close(norm(x), expected, rtol=1e-4, atol=1e-4)


# --- heads


def test_the_middle_of_large_bounds_is_between_them():
    "The sum of the two bounds is no float32."
    head = GaussianHead(8, (1,), low=2e38, high=3e38)
    assert head.center.item() == pytest.approx(2.5e38) and head.half_range.item() == pytest.approx(
        0.5e38
    )


def test_a_mean_begins_within_its_bounds():
    "With one bound of 5, it was 0: an environment got the bound for each action, and no policy could learn from that."
    low = np.array([5, -np.inf, 0, -3, -np.inf, 4])
    high = np.array([np.inf, -3, np.inf, np.inf, np.inf, 4])
    mean, log_std = GaussianHead(8, (6,), low, high)(torch.zeros(8))
    assert mean.tolist() == [5, -3, 0, 0, 0, 4] and log_std.tolist() == [0] * 6


# --- encoders


def slow_encoding(space, obs):
    "The features of one unbatched numpy observation, from gymnasium's own flatten where it agrees with ours."
    if isinstance(space, Dict):
        return np.concatenate([slow_encoding(s, obs[k]) for k, s in space.spaces.items()])
    if isinstance(space, Tuple):
        return np.concatenate([slow_encoding(s, o) for s, o in zip(space.spaces, obs)])
    if isinstance(space, MultiDiscrete):
        return np.concatenate(
            [np.eye(n)[o - s] for n, o, s in zip(space.nvec.flat, obs.flat, space.start.flat)]
        )
    flat = gym.spaces.flatten(space, obs).astype(np.float64)
    return flat / 255 if space.dtype == np.uint8 and len(space.shape or ()) == 3 else flat


@pytest.mark.parametrize(
    "space",
    [
        BOX,
        Box(-1, 1, (), dtype=np.float64),
        Box(0, 9, (2, 3), dtype=np.int16),
        Box(0, 255, (4, 4, 3), np.uint8),
        Discrete(5, start=-2),
        MultiBinary(4),
        MultiBinary((2, 3)),
        MultiDiscrete([2, 5, 3], start=[0, 1, -1]),
        MultiDiscrete([[2, 3], [4, 2]]),
        Dict(
            b=Discrete(3),
            a=Tuple([Box(-1, 1, (2, 2)), MultiDiscrete([2, 2])]),
            c=Dict(d=MultiBinary(2)),
        ),
    ],
)
def test_encoders_agree_with_gymnasium(space):
    space.seed(0)
    samples = [space.sample() for _ in range(6)]
    rows = nested.torchify(nested.stack(samples))
    encoder = encoder_for(space)
    expected = torch.tensor(
        np.stack([slow_encoding(space, x) for x in samples]), dtype=torch.float32
    )
    torch.testing.assert_close(encoder(rows), expected)
    assert encoder(rows).dtype == torch.float32 and expected.shape[-1] == encoder.n_out
    grid = nested.map(lambda x: x.reshape(2, 3, *x.shape[1:]), rows)
    torch.testing.assert_close(encoder(grid), expected.view(2, 3, -1))


# --- policies


def test_for_env_takes_ids_factories_environments_and_spaces():
    env = gym.make("CartPole-v1")
    for source in (
        "CartPole-v1",
        lambda: gym.make("CartPole-v1"),
        env,
        (env.observation_space, env.action_space),
    ):
        assert CategoricalPolicy.for_env(source).dist == Categorical(2)
        assert Critic.for_env(source)(torch.zeros(4)).shape == ()
    env.close()
    assert GaussianPolicy.for_env("Pendulum-v1", std="state", hidden=(8,)).dist == Gaussian((1,))


# --- critic


@fast
@given(
    scale=st.sampled_from([1e-2, 1.0, 1e3]),
    shift=st.sampled_from([0.0, -50.0, 1000.0]),
    seed=st.integers(0, 99),
)
def test_critic_values_survive_rescaling(scale, shift, seed):
    g = torch.Generator().manual_seed(seed)
    critic = Critic(BOX).double()
    obs = torch.randn(5, 3, 4, generator=g).double()
    every = [ret := torch.tensor([-3.0, 3.0])]  # later returns can be of any scale
    critic.observe_returns(ret)
    for _ in range(3):
        ret = shift + scale * torch.randn(6, 4, generator=g)
        valid = torch.rand(6, 4, generator=g) < 0.8
        before = critic(obs)
        critic.observe_returns(ret, valid)
        torch.testing.assert_close(critic(obs), before, rtol=1e-9, atol=1e-6)
        every.append(ret[valid].double())
    every = torch.cat(every)
    torch.testing.assert_close(critic.ret_mean, every.mean(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(critic.ret_std, every.std(correction=0), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("scale, shift", [(1.0, 0.0), (1.0, 5.0), (0.2, 0.0), (1e3, 0.0)])
def test_values_before_the_first_returns_survive_them(scale, shift):
    critic = Critic(BOX)
    obs = torch.randn(5, 4)
    before = critic(obs)
    critic.observe_returns(shift + scale * torch.tensor([-1.0, 1.0]))
    torch.testing.assert_close(critic(obs), before)


@pytest.mark.parametrize("scale, shift", [(1e-2, 0.0), (1e-5, 0.0), (1.0, 1e4), (1e-3, -20.0)])
@pytest.mark.parametrize("zeros", [0, 64])
def test_returns_of_any_scale_are_learned(scale, shift, zeros):
    """The untrained values would ask for a last layer that learning cannot undo. Sparse rewards begin with returns that are all equal."""
    critic = Critic(BOX)
    errors = []
    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-2)
    obs = torch.randn(256, 4)
    if zeros:
        critic.observe_returns(torch.full((zeros,), shift))
    y = obs[:, 0] - obs[:, 1]
    for _ in range(10):
        critic.observe_returns(shift + scale * y)
        errors.append(
            fit_critic(critic, optimizer, obs, shift + scale * y)["explained_variance_after"]
        )
    assert errors[-1] > 0.8


def test_constant_returns_leave_the_scale():
    critic = Critic(BOX)
    critic.observe_returns(torch.full((8,), 3.0))
    assert critic.ret_std == 1 and critic.ret_mean == 3
    critic.observe_returns(torch.zeros(0))
    assert critic.ret_count == 8


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    "change", ["subclass", "sequence", "spectral norm", "weight norm", "pruning"]
)
def test_a_layer_that_was_replaced_or_parametrised_is_the_one_that_answers(change):
    net = MLP(3, (4,), 2)
    x = torch.randn(5, 3)
    layer = net.hidden[0]
    y = torch.randn(5, 3)
    if change == "subclass":
        net.hidden[0] = Doubled(3, 4)
    elif change == "sequence":
        net.hidden[0] = nn.Sequential(layer, nn.LayerNorm(4))
    elif change == "spectral norm":
        nn.utils.parametrizations.spectral_norm(layer)
    elif change == "weight norm":
        nn.utils.parametrizations.weight_norm(layer)
    else:
        prune.l1_unstructured(layer, "weight", 0.5)
    net.eval()  # spectral norm changes with each call in training
    torch.testing.assert_close(net(x), net.last(net.hidden[0](x).tanh()))
    net(y).sum().backward()
    assert all(p.grad is not None for p in net.parameters())
