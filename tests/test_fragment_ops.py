"Making, joining, cutting and picking fragments, against slow indexing and against what is collected."

from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_fragments import fragments
from reference import apply, array, assert_same, flatten
from toys import ENDS, Counting, Nested, NestedMemory, Plain

from rollpipe.pipes import DataError, EnvStepper, Fragment, FragmentCollector, nested
from rollpipe.pipes.data.fragment_ops import (
    columns,
    final_numbers,
    join,
    pad_episodes,
    pieces,
    strands,
    transitions,
)
from rollpipe.pipes.invariants import check_alignment

fast = settings(deadline=None, max_examples=50)
FIELDS = set(Fragment._fields)


def remade(f):
    "`f`, made anew of what it tells."
    end = f.state.fin[1:] & f.valid
    return Fragment.from_steps(
        f.state.obs,
        nested.getitem(f.state.act, slice(1, None)),
        f.state.rew[1:],
        f.term[1:],
        end & ~f.term[1:],
        last_obs=f.final.obs,
        last_actor=f.final.actor,
        stepno=f.state.stepno[0],
        **{
            name: getattr(f, name)
            for name in ("actor", "env", "hx", "valid", "adv", "ret", *Fragment.COLUMNS)
        },
    )


# --- making fragments


@fast
@given(fragments())
def test_a_fragment_made_of_steps_keeps_the_rules_and_tells_them_again(f):
    check_alignment(f)
    assert_same(remade(f), f)


@fast
@given(
    st.lists(st.tuples(st.integers(1, 4), st.sampled_from(ENDS)), min_size=1, max_size=3),
    st.integers(1, 9),
)
def test_what_is_told_is_what_is_collected(plan, n_steps):
    collected = next(iter(FragmentCollector(EnvStepper(lambda: Counting(plan), Plain()), n_steps)))
    env = Counting(plan)
    acts = collected.state.act[1:, 0].tolist()
    rows = [env.reset()[0]]
    steps = []
    last = []
    for act in acts:
        obs, rew, terminated, truncated, _ = env.step(act)
        steps.append((act, rew, terminated, truncated))
        if truncated and not terminated:
            last.append(obs)
        rows.append(env.reset()[0] if terminated or truncated else obs)
    obs, act, rew, *ends = (torch.as_tensor(np.array(x))[:, None] for x in (rows, *zip(*steps)))
    told = Fragment.from_steps(
        obs, act, rew.float(), *ends, last_obs=torch.as_tensor(np.array(last)) if last else None
    )
    for name in ("state", "term", "valid"):
        assert_same(getattr(told, name), getattr(collected, name))
    assert_same(told.final._replace(actor=None), collected.final._replace(actor=None))


# --- the three kinds of fields


def test_each_field_is_of_one_kind():
    kinds = [*Fragment.ROWS, *Fragment.STEPS, *Fragment.COLUMNS, "hx", "final"]
    assert set(kinds) == FIELDS and len(kinds) == len(FIELDS)


@fast
@given(fragments())
def test_map_gives_each_leaf_to_the_function_of_its_kind(f):
    seen = {kind: [] for kind in ("rows", "steps", "columns", "hx")}
    marked = f.map(
        **{kind: lambda x, kind=kind: seen[kind].append(x.shape) or kind for kind in seen},
        final=lambda final: "final",
    )
    T, B = f.n_steps, f.n_envs
    for kind, lead in (("rows", (T + 1, B)), ("steps", (T, B)), ("columns", (B,))):
        assert all(s[: len(lead)] == lead for s in seen[kind])
    assert all(shape[1] == B for shape in seen["hx"]) and marked.final == "final"
    leaves = [leaf for _, leaf in flatten(marked._replace(final=None))]
    assert len(leaves) == sum(map(len, seen.values())) == len(flatten(f._replace(final=None)))


@fast
@given(fragments(), st.sets(st.sampled_from(sorted(FIELDS))))
def test_only_some_fields(f, names):
    part = f.only(*names)
    for name in FIELDS:
        assert getattr(part, name) is (getattr(f, name) if name in names else None)


# --- joining and cutting


@fast
@given(fragments(), st.integers(1, 7))
def test_pieces_can_be_joined(f, size):
    parts = list(pieces(f, size))
    assert [p.n_envs for p in parts] == [min(size, f.n_envs - i) for i in range(0, f.n_envs, size)]
    whole = join(parts)
    by_place = torch.argsort(f.final.b // size, stable=True)  # final rows come piece by piece
    assert_same(whole, f._replace(final=nested.getitem(f.final, by_place)))
    for part in parts:
        check_alignment(part)


def slow_column(f, b):
    "All that a fragment tells about environment `b`, one step after the other."

    def at(tree, *where):
        return apply(lambda x: array(x[where]).copy(), tree)

    rows = [
        {name: at(getattr(f, name), t, b) for name in Fragment.ROWS} for t in range(f.n_steps + 1)
    ]
    steps = [
        {name: at(getattr(f, name), t, b) for name in Fragment.STEPS} for t in range(f.n_steps)
    ]
    ends = {
        int(t): at((f.final.obs, f.final.actor), k)
        for k, (t, c) in enumerate(zip(f.final.t, f.final.b))
        if c == b
    }
    return rows, steps, ends, at((f.lane, f.seq, f.version), b), at(f.hx, slice(None), b)


@fast
@given(st.data())
def test_columns_are_those_of_slow_indexing(data):
    f = data.draw(fragments())
    index = data.draw(st.lists(st.integers(0, f.n_envs - 1), unique=True, min_size=1))
    some = columns(f, torch.tensor(index))
    assert some.n_envs == len(index)
    for k, b in enumerate(index):
        (*found, ends) = slow_column(some, k)
        (*wanted, last) = slow_column(f, b)
        assert_same((found, ends), (wanted, last))


@fast
@given(st.data())
def test_transitions_are_those_of_slow_indexing(data):
    f = data.draw(fragments(recurrent=st.just(False)))
    index = data.draw(
        st.lists(st.integers(0, f.valid.numel() - 1), min_size=1)
    )  # one may come twice
    some = transitions(f, torch.tensor(index))
    assert (some.n_steps, some.n_envs) == (1, len(index))
    for k, i in enumerate(index):
        t, b = divmod(i, f.n_envs)
        rows, steps, ends, who, _ = slow_column(f, b)
        found = slow_column(some, k)
        assert_same(
            found[:4], (rows[t : t + 2], steps[t : t + 1], {0: ends[t]} if t in ends else {}, who)
        )


@fast
@given(fragments())
def test_numbers_of_final_rows(f):
    numbers = final_numbers(f)
    for t in range(f.n_steps):
        for b in range(f.n_envs):
            rows = [
                k
                for k, at in enumerate(zip(f.final.t.tolist(), f.final.b.tolist()))
                if at == (t, b)
            ]
            assert [numbers[t, b].item()] == (rows or [-1])


@fast
@given(st.booleans(), st.data())
def test_padded_fragments_differ_only_in_rows_that_are_not_valid(rich, data):
    f, g = (data.draw(fragments(st.just(rich), st.just(rich))) for _ in range(2))
    whole = pad_episodes([f, g])
    check_alignment(whole)
    assert (
        whole.n_steps == max(f.n_steps, g.n_steps)
        and whole.valid.sum() == f.valid.sum() + g.valid.sum()
    )
    for part, x in zip(
        (
            columns(whole, torch.arange(f.n_envs)),
            columns(whole, torch.arange(f.n_envs, whole.n_envs)),
        ),
        (f, g),
    ):
        assert_same(
            part.map(rows=lambda y, n=x.n_steps: y[: n + 1], steps=lambda y, n=x.n_steps: y[:n]), x
        )
        assert not part.valid[x.n_steps :].any()


@pytest.mark.parametrize("n", [1, 2, 3])
def test_strands_of_what_was_joined(n):
    "Each strand is the fragment that it was, in the order of time."
    make = lambda lane: [
        f._replace(lane=torch.full((2,), lane))
        for f in islice(
            FragmentCollector(
                EnvStepper([lambda: Nested([(3, "trunc")], lane)] * 2, NestedMemory(), seed=lane), 4
            ),
            n,
        )
    ]
    parts = [f for lane in (4, 2) for f in make(lane)]
    found = strands(join(parts))
    assert [seq for _, seq, _ in found] == sorted(seq for _, seq, _ in found)
    for lane, seq, where in found:
        (part,) = [f for f in parts if (int(f.lane[0]), int(f.seq[0])) == (lane, seq)]
        assert_same(columns(join(parts), torch.arange(where.start, where.stop)), part)


ROWS = torch.zeros(4, 2, 3)  # observations of T = 3 steps of B = 2 environments
STEPS = torch.zeros(3, 2)
NO_STEPS = [
    ("no tensor", dict(obs=ROWS.numpy()), "leaf obs: not a tensor. .*as_tensor.*got ndarray"),
    ("a list", dict(act=STEPS.tolist()), r"leaf act\[0\]\[0\]: not a tensor.*got float"),
    ("no tensor in a dict", dict(obs=dict(x=ROWS.numpy())), r"leaf obs\['x'\]: not a tensor"),
    ("rewards of numpy", dict(rew=STEPS.numpy()), "leaf rew: not a tensor"),
    ("a memory of numpy", dict(hx=np.zeros((1, 2, 3))), "leaf hx: not a tensor"),
    ("advantages of numpy", dict(adv=STEPS.numpy()), "leaf adv: not a tensor"),
    ("[T]", dict(obs=ROWS[:, 0], act=STEPS[:, 0], rew=STEPS[:, 0]), r"leaf rew: .*`x\[:, None\]`"),
    ("T = 0", dict(obs=ROWS[:1], act=STEPS[:0], rew=STEPS[:0]), r"leaf rew: wrong shape.*T >= 1"),
    ("no rewards", dict(rew=None), "leaf rew: wrong shape. .*got None"),
    ("whole rewards", dict(rew=STEPS.long()), r"leaf rew: wrong dtype. .*`rew.float\(\)`.*int64"),
    ("rewards of bools", dict(rew=STEPS.bool()), "leaf rew: wrong dtype. .*got bool"),
    (
        "five columns",
        dict(stepno=torch.zeros(5).long()),
        r"leaf stepno: .*\[B\] = \[2\], got int64",
    ),
    ("half a step", dict(stepno=0.5), "leaf stepno: .*an int.*got float32 0.5"),
    ("actions of more steps", dict(act=ROWS[..., 0]), r"leaf act: .*\[T, B\] = \[3, 2\]"),
    ("ends of bytes", dict(terminated=STEPS.byte()), r"leaf terminated: wrong dtype.*got uint8"),
    ("ends of floats", dict(truncated=STEPS), "leaf truncated: wrong dtype"),
    ("steps of floats", dict(valid=STEPS), "leaf valid: wrong dtype"),
    ("ends of one column", dict(terminated=STEPS[:, :1].bool()), "leaf terminated"),
    ("ends of one row", dict(truncated=STEPS[:1].bool()), "leaf truncated"),
    ("a report of no look-ahead", dict(actor=dict(logp=STEPS)), r"leaf actor\['logp'\]"),
    ("infos of more steps", dict(env=dict(x=ROWS)), r"leaf env\['x'\]"),
    ("advantages of more steps", dict(adv=ROWS[..., 0]), "leaf adv"),
    ("a version for each step", dict(version=STEPS[:, 0]), r"leaf version: .*\[B\] = \[2\]"),
    ("a last observation too many", dict(last_obs=STEPS[0]), r"leaf last_obs: .*\[K\] = \[0\]"),
    (
        "no last report",
        dict(truncated=~STEPS.bool(), last_obs=STEPS.view(6), actor=dict(logp=ROWS[..., 0])),
        "leaf last_actor",
    ),
]


@pytest.mark.parametrize("change, message", [x[1:] for x in NO_STEPS], ids=[x[0] for x in NO_STEPS])
def test_steps_of_another_form_are_named(change, message):
    steps = dict(obs=ROWS, act=STEPS, rew=STEPS)
    assert Fragment.from_steps(**steps).valid.all()
    with pytest.raises(DataError, match=f"Fragment.from_steps, {message}"):
        Fragment.from_steps(**{**steps, **change})
