"Bits, embeddings, images, dicts of modules, and the encoders made of them, each against another way to compute it."

import math

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Tuple
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import one_hot

from rollpipe.layers import ConvTrunk, MLPPolicy, QPolicy, RecurrentPolicy, encoder_for
from rollpipe.layers.encoders import Bits, Embeddings, ModuleDict
from rollpipe.pipes.data.errors import DataError, SpaceError

fast = settings(deadline=None, max_examples=25)
IMAGE = Box(0, 255, (10, 10, 3), np.uint8)
STACK = Box(0, 255, (4, 40, 40), np.uint8)
TAXI = Dict(where=MultiDiscrete([5, 5]), passenger=Discrete(5), goal=Discrete(4, start=1))


# --- bits


@fast
@given(x=st.lists(st.integers(0, 2**62), min_size=1, max_size=6), n_bits=st.integers(1, 62))
def test_bits_are_those_python_writes(x, n_bits):
    expected = [[float(digit) for digit in f"{k:063b}"[::-1][:n_bits]] for k in x]
    bits = Bits((), 1 << n_bits)
    assert bits(torch.tensor([x])).tolist() == [expected] and bits.n_out == n_bits


# --- the integers of a space


@st.composite
def numbers(draw):
    "A space of integers, and samples `[2, 3, *shape]` of it."
    n, start = (
        draw(st.lists(st.integers(*bounds), min_size=3, max_size=3)) for bounds in ((1, 9), (-3, 3))
    )
    space = draw(
        st.sampled_from(
            [
                Discrete(n[0], start=start[0]),
                MultiDiscrete(n, start=start),
                MultiDiscrete([n, n[::-1]], start=[start, start]),
                MultiDiscrete(n, dtype=np.uint8),
            ]
        )
    )
    space.seed(draw(st.integers(0, 99)))
    return space, torch.from_numpy(np.stack([[space.sample() for _ in range(3)] for _ in range(2)]))


def one_by_one(space, x):
    "For each integer, its number of values and its value counted from 0, `[2, 3]`."
    n, start = (
        np.reshape(y, -1).tolist()
        for y in (
            (space.n, space.start) if isinstance(space, Discrete) else (space.nvec, space.start)
        )
    )
    return [
        (k, column.long() - s) for k, s, column in zip(n, start, x.reshape(2, 3, -1).unbind(-1))
    ]


@fast
@given(case=numbers())
def test_bits_of_a_space_count_from_its_start(case):
    space, x = case
    bits = encoder_for(space, discrete="bits")
    expected = torch.cat(
        [
            (k[..., None] >> torch.arange(max(1, math.ceil(math.log2(n)))) & 1).float()
            for n, k in one_by_one(space, x)
        ],
        -1,
    )
    assert isinstance(bits, Bits) and bits.is_normalized
    assert torch.equal(bits(x), expected) and bits.n_out == expected.shape[-1]


@fast
@given(case=numbers(), size=st.integers(1, 5))
def test_embeddings_are_one_hot_vectors_times_tables(case, size):
    space, x = case
    module = encoder_for(space, discrete="embed", size=size)
    parts = one_by_one(space, x)
    tables = module.table.weight.split([n for n, _ in parts])
    expected = torch.cat(
        [one_hot(k, n).float() @ table for (n, k), table in zip(parts, tables)], -1
    )
    assert isinstance(module, Embeddings) and module.n_out == expected.shape[-1]
    torch.testing.assert_close(module(x), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        encoder_for(space)(x), torch.cat([one_hot(k, n).float() for n, k in parts], -1)
    )


def test_a_number_beyond_the_table_is_refused():
    with pytest.raises(IndexError):
        Embeddings((), 3)(torch.tensor([3]))


# --- images


def by_torch(trunk, planes):
    "The same layers as torch modules, for floats `[N, c, h, w]`."
    layers = [layer for conv in trunk.layers for layer in (conv, nn.ReLU())]
    return nn.Sequential(*layers, nn.Flatten(), trunk.last, nn.ReLU())(planes)


@pytest.mark.parametrize(
    "shape, channels",
    [
        ((10, 10), None),
        ((10, 10, 4), -1),
        ((4, 10, 10), 0),
        ((10, 10, 10), -1),
        ((2, 12, 10, 3), -1),
        ((2, 3, 12, 10), 1),
        ((36, 40, 1), -1),
        ((84, 84), None),
    ],
)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.float32])
def test_images_of_all_layouts(shape, channels, dtype):
    trunk = ConvTrunk(shape, n_out=5)
    x = torch.randint(256 if dtype is torch.uint8 else 2, (2, 3, *shape)).to(dtype)
    planes = x.flatten(0, 1).float() / (255 if dtype is torch.uint8 else 1)
    if channels is None:
        planes = planes.unsqueeze(1)
    elif len(shape) == 3 and channels == -1:
        planes = torch.einsum("nhwc->nchw", planes)
    elif len(shape) == 4:
        planes = torch.cat(
            [torch.einsum("nhwc->nchw", p) if channels == -1 else p for p in planes.unbind(1)], 1
        )
    torch.testing.assert_close(
        trunk(x), by_torch(trunk, planes).view(2, 3, 5), rtol=1e-4, atol=1e-5
    )
    assert (
        trunk(x[0]).shape == (3, 5)
        and trunk(x[0, 0]).shape == (5,)
        and trunk(x[:0]).shape == (0, 3, 5)
    )


@pytest.mark.parametrize(
    "layers, message",
    [
        (5, "not a list of convolutions. Got 5"),
        ([(16, 8)], r"layers\[0\]: not a convolution"),
        ([(16, 0, 1)], r"an integer layers\[0\].kernel >= 1"),
        ([(10**9, 3, 1)], "not enough memory"),
    ],
)
def test_layers_that_are_no_convolutions_are_named(layers, message):
    space = Dict(image=Box(0, 255, (4, 84, 84), np.uint8))
    with pytest.raises(DataError, match=r"leaf observation_space\['image'\]: .*" + message):
        encoder_for(space, images="conv", layers=layers)
    with pytest.raises(DataError, match="leaf layers: .*images='conv'. Got images='flat'"):
        encoder_for(space, layers=[[16, 8, 4]])


def test_initial_weights_of_a_trunk_are_orthogonal():
    trunk = ConvTrunk((4, 84, 84))
    for layer in (*trunk.layers, trunk.last):
        w = layer.weight.flatten(1)
        torch.testing.assert_close(w @ w.T, 2 * torch.eye(len(w)), atol=1e-4, rtol=0)
        assert not layer.bias.any()


@pytest.mark.parametrize("shape", [(4,), (10, 2), (10, 2, 2), (2, 10, 2, 1), (2, 2, 3, 10, 10)])
def test_shapes_that_are_no_images(shape):
    with pytest.raises(SpaceError, match="unsupported shape of an image"):
        ConvTrunk(shape)


# --- encoders and the actors that have them


def test_encoders_choose_blocks():
    encoder = encoder_for(
        Dict(a=IMAGE, b=Tuple([STACK, Discrete(9)]), c=Box(-1, 1, (10, 10))),
        images="conv",
        discrete="bits",
        n_out=6,
    )
    image, pair, rest = encoder.encoders
    assert [type(e) for e in (image, *pair.encoders)] == [ConvTrunk, ConvTrunk, Bits]
    assert encoder.n_out == 6 + 6 + 4 + 100 and not rest.is_normalized and pair.is_normalized
    assert isinstance(encoder_for(Box(0, 1, (10, 10, 4), bool), images="conv"), ConvTrunk)
    with pytest.raises(ValueError, match="images 'flat' or 'conv', got 'deep'"):
        encoder_for(IMAGE, images="deep")


@pytest.mark.parametrize("cls", [MLPPolicy, RecurrentPolicy, QPolicy])
def test_actors_take_encoders(cls):
    "An encoder is given by options, or by a function of the space; learned features are not normalised."
    images = Dict(a=IMAGE, b=Discrete(4))
    for space, encoder in (
        (images, dict(images="conv", discrete="embed", size=3, n_out=8)),
        (TAXI, dict(discrete="bits")),
        (TAXI, lambda space: encoder_for(space, discrete="embed", size=2)),
    ):
        options = dict(hidden=(8,), normalize=True, encoder=encoder, seed=0)
        actor = cls.for_env((space, Discrete(3)), **options)
        assert actor.obs_norm is None
    assert actor.trunk.n_in == 8


def test_an_encoder_that_knows_its_numbers_are_to_be_normalised():
    class Sensor(nn.Linear):
        is_normalized = False

    actor = MLPPolicy.for_env((Box(-1, 1, (4,)), Discrete(2)), encoder=lambda space: Sensor(4, 5))
    assert actor.obs_norm.shape == (5,)


def test_only_numbers_that_need_it_are_normalised():
    "A feature that is learned, and constant in the data, would otherwise be divided by the square root of a variance of 0."
    space = Dict(
        image=IMAGE, k=Discrete(3), pair=Tuple([Box(-9, 9, (2,)), Box(0, 255, (2, 2, 3), np.uint8)])
    )
    net = MLPPolicy.for_env((space, Discrete(2)), seed=0)
    conv = MLPPolicy.for_env(
        (Dict(image=IMAGE, x=Box(-9, 9, (2,))), Discrete(2)),
        encoder=dict(images="conv", n_out=4),
        seed=0,
    )
    x = torch.tensor([[-3.0, 4.0], [5.0, 6.0], [1.0, -5.0]])
    image = torch.randint(0, 256, (1, *IMAGE.shape), dtype=torch.uint8).expand(3, -1, -1, -1)
    obs = dict(image=image, k=torch.tensor([0, 2, 2]), pair=(x, image[:, :2, :2]))
    oracle = (x - x.mean(0)) / x.std(0, correction=0)
    with torch.no_grad():
        conv.encoder.encoders[0].last.weight.mul_(1e3)  # learned features may be large
    for actor, seen, at in ((net, obs, 300 + 3), (conv, dict(image=image, x=x), 4)):
        raw = actor.encoder(seen)
        actor.observe(seen)
        y = actor.features(seen)
        torch.testing.assert_close(y[:, at : at + 2], oracle)
        torch.testing.assert_close(
            torch.cat([y[:, :at], y[:, at + 2 :]], -1),
            torch.cat([raw[:, :at], raw[:, at + 2 :]], -1),
            rtol=0,
            atol=0,
        )
    assert raw.max() > conv.obs_norm.clip
    assert not encoder_for(Dict(a=Box(-1, 1, (2,)), b=Box(-1, 1, ()))).is_normalized


# --- dicts of modules


def test_module_dict_along_another_dim():
    net = ModuleDict(dict(a=nn.Identity(), b=nn.Identity()), dim=0)
    assert net(dict(a=torch.zeros(2, 3), b=torch.ones(1, 3))).shape == (3, 3)


@pytest.mark.parametrize(
    "inputs, got",
    [
        (dict(a=0), "got keys ['a']"),
        (dict(a=0, b=0, c=0), "got keys ['a', 'b', 'c']"),
        ((0, 0), "got keys ['0', '1']"),
        (torch.zeros(2), "got float32 [2]"),
    ],
)
def test_module_dict_refuses_other_keys(inputs, got):
    with pytest.raises(DataError) as e:
        ModuleDict(dict(a=nn.Identity(), b=nn.Identity()))(inputs)
    assert "ModuleDict: other inputs than modules. Expected keys ['a', 'b']" in str(
        e.value
    ) and got in str(e.value)
