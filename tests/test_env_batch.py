"The parts of a batch of environments: memory for its steps, finite numbers, and rewards."

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import Counting

from rollpipe.pipes import context, nested
from rollpipe.pipes.data.errors import DataError, EnvError
from rollpipe.pipes.data.fragment import State
from rollpipe.pipes.envs.batch import FiniteCheck, Rows, _pinned, last_obs
from rollpipe.pipes.envs.factories import env_factories
from rollpipe.pipes.envs.single import EnvBatch, _put_all, scalar_rewards, write_step_numbers
from rollpipe.pipes.envs.vector import final_observations

fast = settings(deadline=None, max_examples=60)
floats = st.floats(width=32, allow_nan=True, allow_infinity=True)


@fast
@given(
    n_envs=st.integers(1, 3),
    n=st.integers(1, 12),
    parts=st.tuples(st.integers(0, 11), st.integers(0, 11)),
    deep=st.booleans(),
)
def test_every_row_has_memory_of_its_own(n_envs, n, parts, deep):
    "And its arrays and tensors are the same memory, also in a part of the rows."
    obs = np.zeros((n_envs, 2), np.float32)
    obs = {"a": obs, "b": (np.zeros((n_envs,), np.int64),)} if deep else obs
    memory = Rows(
        State(
            np.zeros(n_envs, np.int64),
            obs,
            (),
            np.zeros(n_envs, np.float32),
            np.zeros(n_envs, bool),
        ),
        n,
    )
    begin, end = sorted(k % n for k in parts)
    assert len(memory) == len(memory.rows) == n and not memory.acts
    for k, row in enumerate(memory.rows):
        for x in (*row.leaves, row.rew, row.stepno):
            x[...] = k
        assert not row.fin.any() and not row.term.any()
    part = memory.part(begin, end + 1)
    for k, row in [*enumerate(memory.rows), *enumerate(part.rows, begin), (end, memory.copy(end))]:
        for x in (*row.leaves, row.rew, row.stepno):
            assert (x == k).all()
        tensors = *nested.leaves(row.obs_tensors), row.rew_tensor, row.stepno_tensor, row.fin_tensor
        arrays = *nested.leaves(row.obs), row.rew, row.stepno, row.fin
        for x, y in zip(tensors, arrays):
            assert x.shape == (1, *y.shape) and x.data_ptr() == y.ctypes.data
    assert np.shares_memory(part.rows[0].rew, memory.rows[begin].rew)
    assert not np.shares_memory(memory.copy(end).rew, memory.rows[end].rew)


@fast
@given(
    fin=st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=2, max_size=9),
    first=st.lists(st.integers(0, 9), min_size=3, max_size=3),
)
def test_steps_are_counted(fin, first):
    "As one step after the other counts them."
    fin, found = np.array(fin), np.zeros((len(fin), 3), np.int64)
    found[0] = wanted = np.array(first)
    write_step_numbers(found, fin)
    for t in range(1, len(fin)):
        wanted = np.where(fin[t], 0, wanted + 1)
        assert found[t].tolist() == wanted.tolist()


def test_a_step_that_was_interrupted_counts_once(monkeypatch):
    "As after Ctrl-C in a notebook, between the step of the environments and the check of what they returned."
    with context(Counting, n_envs=2, seed=0) as ctx:
        act = torch.zeros(1, 2, dtype=torch.int64)
        settle = EnvBatch.settle
        ctx.step(act)

        def interrupt(*args):
            raise KeyboardInterrupt

        monkeypatch.setattr(EnvBatch, "settle", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ctx.step(act)
        monkeypatch.setattr(EnvBatch, "settle", settle)
        rows, t = ctx.envs._at
        rows.state.rew[t + 1 :] = np.nan  # what nobody has written must not be read
        for _ in range(100):
            assert np.isfinite(ctx.step(act).state.rew).all()


def test_a_step_before_the_reset_is_refused():
    batch = EnvBatch(
        env_factories(Counting, 2), np.random.SeedSequence(0), pipe="EnvStepper", lane=3
    )
    with pytest.raises(EnvError, match="EnvStepper, lane 3: `step` before `reset`"):
        batch.step(torch.zeros(1, 2, dtype=torch.int64))
    batch.close()


@fast
@given(
    rows=st.lists(st.lists(floats, min_size=3, max_size=3), min_size=1, max_size=3),
    deep=st.booleans(),
)
def test_what_is_not_finite_is_found(rows, deep):
    x = np.array(rows, np.float32)
    like = {"a": np.zeros(len(rows), np.int64), "x": np.zeros_like(x)} if deep else np.zeros_like(x)
    found = FiniteCheck(like, "obs").find([np.ones(len(rows), np.int64), x] if deep else [x])
    bad = [b for b, row in enumerate(rows) if not np.isfinite(np.float32(row)).all()]
    assert (found is None) == (not bad)
    if bad:
        assert (
            found[:2] == (bad[0], "obs['x']" if deep else "obs") and not np.isfinite(found[2]).all()
        )


@pytest.mark.parametrize(
    "x, error",
    [
        ([1.0, 2.0], None),
        ([1.0, np.nan], EnvError),
        ([1.0, 2.0, 3.0], DataError),
        ("ab", DataError),
    ],
)
def test_a_last_observation_is_a_checked_copy(x, error):
    like = np.zeros(2, np.float32)
    if error is None:
        x = np.array(x, np.float32)
        found = last_obs(x, like)
        x[:] = 9
        assert found.tolist() == [1, 2]
    else:
        with pytest.raises(error, match="obs"):
            last_obs(np.array(x) if isinstance(x, list) else x, like)


NO_NUMBERS = [[1.0], "1", None, {"a": 1.0}, np.ones(1), np.ones((1, 1)), np.ones(3), 1j, object()]


@fast
@given(
    rews=st.lists(
        st.one_of(
            st.integers(-5, 5), floats, st.booleans(), floats.map(np.float32), floats.map(np.array)
        ),
        min_size=1,
        max_size=4,
    ),
    bad=st.sampled_from([*NO_NUMBERS, [1.0, 2.0], "much", torch.ones(1)]),
    is_bad=st.booleans(),
    at=st.integers(0, 3),
)
def test_rewards_are_numbers(rews, bad, is_bad, at):
    at %= len(rews)
    if not is_bad:
        np.testing.assert_array_equal(scalar_rewards(rews), np.array([float(x) for x in rews]))
        return
    rews[at] = bad
    with pytest.raises(EnvError, match="the reward is no scalar.* Expected one number.* got") as e:
        scalar_rewards(rews)
    assert e.value.env == at and e.value.leaf == "rew"


@fast
@given(
    data=st.data(),
    kinds=st.lists(
        st.sampled_from([float, np.float32, np.float64, np.float16, int, bool]),
        min_size=1,
        max_size=3,
    ),
)
def test_rewards_of_all_steps_at_once_are_those_of_each_step(data, kinds):
    "Whatever kinds of numbers the environments give, in any mixture; only floats are written at once."
    small = st.floats(-100, 100, width=16)
    steps = [
        [data.draw(st.sampled_from(kinds))(data.draw(small)) for _ in range(2)] for _ in range(3)
    ]
    each, at_once = np.zeros((2, 3, 2), np.float32)
    for row, rews in zip(each, steps):
        row[:] = scalar_rewards(rews)
    fits = all(isinstance(r, (float, np.floating)) for rews in steps for r in rews)
    assert _put_all(steps, at_once) == fits
    np.testing.assert_array_equal(at_once, each if fits else np.zeros_like(each))


@fast
@given(n=st.integers(1, 4), data=st.data(), deep=st.booleans())
def test_final_observations_as_objects_or_as_a_batch(n, data, deep):
    at = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=n, unique=True).map(sorted))
    x = np.arange(n * 2, dtype=np.float64).reshape(n, 2)
    wrap = (lambda y: {"x": y}) if deep else (lambda y: y)
    objects = np.empty(n, object)
    for b in at:
        objects[b] = wrap(x[b])
    for rows in wrap(x), objects:
        found = final_observations({"final_obs": rows}, at, wrap(np.zeros((n, 2), np.float32)))
        assert (
            nested.leaves(found)[0].tolist() == x[at].tolist()
            and nested.leaves(found)[0].dtype == np.float32
        )


@pytest.mark.gpu
def test_page_locked_memory_is_that_of_the_array():
    memory = _pinned((2, 3), np.float32)
    assert memory.shape == (2, 3) and memory.dtype == np.float32
    assert torch.from_numpy(memory).is_pinned()
