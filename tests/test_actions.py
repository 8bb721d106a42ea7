"Actions of a batch, against what each environment would be given one by one."

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from hypothesis import given, settings
from hypothesis import strategies as st

from rollpipe.pipes import nested
from rollpipe.pipes.data.errors import ActorError
from rollpipe.pipes.envs.actions import action_batch, action_rows, in_containers
from rollpipe.pipes.envs.factories import space_spec

fast = settings(deadline=None, max_examples=60)
leaves = st.sampled_from(
    [
        Discrete(3),
        Discrete(4, start=-2),
        MultiDiscrete([2, 3]),
        MultiBinary(3),
        Box(-1, 1, (2,)),
        Box(-1, 1, ()),
        Box(-np.inf, np.inf, (2, 1)),
        Box(0, 255, (2,), np.uint8),
        Box(-2, 2, (1,), np.float64),
    ]
)
spaces = st.recursive(
    leaves,
    lambda inner: (
        st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=3).map(Dict)
        | st.lists(inner, min_size=1, max_size=3).map(tuple).map(Tuple)
    ),
    max_leaves=4,
)


def plain(x):
    "`x` in dicts and tuples."
    if isinstance(x, dict):
        return {k: plain(v) for k, v in x.items()}
    return tuple(map(plain, x)) if isinstance(x, tuple) else x


def samples(space, n, seed):
    space.seed(seed)
    return [nested.map(np.asarray, plain(space.sample())) for _ in range(n)]


@fast
@given(space=spaces, n=st.integers(1, 4), seed=st.integers(0, 99))
def test_samples_come_back(space, n, seed):
    "Rows and batch hold the samples, in the types of the space, and share no memory with the actor's answer."
    rows = samples(space, n, seed)
    array = nested.stack(rows)
    before = nested.map(np.copy, array)
    for found, row in zip(action_rows(space)(array), rows):
        assert gym_contains(space, found)
        nested.map(np.testing.assert_array_equal, plain(found), row)
    batch = action_batch(space)(array)
    nested.map(np.testing.assert_array_equal, batch, array)
    for x in nested.leaves(batch):
        x[...] = 1
    nested.map(np.testing.assert_array_equal, array, before)


def gym_contains(space, x):
    if isinstance(space, Dict):
        return set(x) == set(space.spaces) and all(
            gym_contains(s, x[k]) for k, s in space.spaces.items()
        )
    if isinstance(space, Tuple):
        return len(x) == len(space.spaces) and all(map(gym_contains, space.spaces, x))
    return space.contains(
        np.asarray(x, space.dtype) if space.shape == () and not isinstance(space, Discrete) else x
    )


NUMBERS = [
    Discrete(3),
    Discrete(4, start=-2),
    Discrete(2**40),
    Discrete(5, start=2**40),
    MultiDiscrete([2, 3]),
    MultiDiscrete([2, 3], start=[0, -1]),
    MultiDiscrete([[2], [7]], dtype=np.int32),
    MultiBinary(2),
]


@pytest.mark.slow_but_one
@pytest.mark.parametrize("space", NUMBERS, ids=str)
@fast
@given(
    data=st.data(),
    n=st.integers(1, 4),
    dtype=st.sampled_from([np.bool_, np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64]),
)
def test_integers_that_a_space_does_not_have(space, data, n, dtype):
    "Each number is compared with the bounds as a Python integer; the first environment at fault is named."
    info = np.iinfo(dtype) if dtype is not np.bool_ else np.iinfo(np.uint8)
    least, most = (0, 1) if dtype is np.bool_ else (int(info.min), int(info.max))
    near = st.integers(-4, 8).filter(lambda x: least <= x <= most)
    numbers = near | st.sampled_from(
        [x for x in (least, most, 2**40 + 2, 2**40 + 7) if least <= x <= most]
    )
    size = n * max(1, int(np.prod(space.shape)))
    act = np.array(data.draw(st.lists(numbers, min_size=size, max_size=size)), dtype).reshape(
        n, *space.shape
    )
    start = np.broadcast_to(getattr(space, "start", 0), space.shape).reshape(-1).tolist()
    count = (
        np.broadcast_to(
            getattr(space, "n" if isinstance(space, Discrete) else "nvec", 2), space.shape
        )
        .reshape(-1)
        .tolist()
    )

    def has(row):
        return all(
            s <= x < s + k for x, s, k in zip(row.reshape(-1).tolist(), start, count, strict=True)
        )

    wrong = [b for b, row in enumerate(act) if not has(row)]
    if not wrong:
        return np.testing.assert_array_equal(action_batch(space)(act), act)
    with pytest.raises(ActorError, match="out of range") as caught:
        action_batch(space)(act)
    assert caught.value.env == wrong[0]


@fast
@given(data=st.data(), n=st.integers(1, 4), clip=st.booleans())
def test_clipping(data, n, clip):
    values = np.array(
        data.draw(
            st.lists(
                st.lists(st.floats(-9, 9, width=32), min_size=2, max_size=2), min_size=n, max_size=n
            )
        ),
        np.float32,
    )
    found = action_batch(Box(-1, 2, (2,)), clip)(values)
    assert found.tolist() == [
        [min(max(x, -1), 2) if clip else x for x in row] for row in values.tolist()
    ]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_environment_of_a_non_finite_action_is_named(value, dtype):
    space = Dict(go=Box(-1, 1, (2,), dtype))
    act = np.full((3, 2), 1e30, dtype)
    assert np.isfinite(
        action_batch(space)(dict(go=act))["go"]
    ).all()  # its squares are not, in float32
    act[2, 1] = value
    with pytest.raises(
        ActorError, match=r"environment 2, leaf act\['go'\]: non-finite action"
    ) as caught:
        action_batch(space)(dict(go=act))
    assert caught.value.env == 2


@fast
@given(space=spaces, seed=st.integers(0, 99))
def test_containers(space, seed):
    "Lists for tuples and other mappings for dicts give what dicts and tuples give."

    class Other(dict):
        pass

    def loose(x):
        if isinstance(x, dict):
            return Other({k: loose(v) for k, v in reversed(x.items())})
        return list(map(loose, x)) if isinstance(x, tuple) else x

    [sample] = samples(space, 1, seed)
    like = space_spec(space)
    found = in_containers(loose(sample), like)
    assert nested.flatten(found)[1] == nested.flatten(like)[1]
    nested.map(np.testing.assert_array_equal, found, sample)


def test_a_space_of_gymnasium_is_what_an_id_has():
    assert action_rows(gym.make("CartPole-v1").action_space)(np.array([1, 0])) == [1, 0]
