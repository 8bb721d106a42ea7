"The standard pipeline and its edits."

from itertools import islice

import numpy as np
import pytest
import torch
from reference import assert_same, snapshot
from toys import Counting, Lively, Plain, Present, judge

from rollpipe.layers import CategoricalPolicy, Critic, GaussianPolicy, RecurrentPolicy
from rollpipe.pipes import (
    AdvantageBuffer,
    DataError,
    EnvError,
    EnvStepper,
    FragmentCollector,
    FragmentStacker,
    GraphError,
    Lanes,
    Minibatcher,
    Pipe,
    RewardScaler,
    find,
    find_one,
    insert_after,
    on_policy,
    replayed,
    rollouts,
)


class Scaled(Pipe):
    "Multiplies rewards."

    def __init__(self, pipe, by=2.0):
        super().__init__(pipe)
        self.by = by

    def stream(self, items):
        for f in items:
            yield f._replace(state=f.state._replace(rew=f.state.rew * self.by))


class MonteCarlo(AdvantageBuffer):
    def __init__(self, pipe, critic=None):
        super().__init__(pipe, critic, gamma=1.0, lam=1.0)


def chain(pipe):
    "Class names from source to sink."
    names = [type(pipe).__name__]
    while hasattr(pipe, "pipe"):
        pipe = pipe.pipe
        names.append(type(pipe).__name__)
    return names[::-1]


STANDARD = ["EnvStepper", "FragmentCollector", "Lanes", "AdvantageBuffer", "FragmentStacker"]


def recipe(**kwargs):
    return on_policy(Counting, Present(), judge, **{"n_envs": 2, "n_steps": 5, "seed": 0, **kwargs})


def test_it_is_the_pipeline_built_by_hand():
    actor = GaussianPolicy.for_env(Lively, seed=0)
    critic = Critic.for_env(Lively, seed=0)
    pipe = EnvStepper(Lively, actor, n_envs=3)
    pipe = FragmentStacker(
        AdvantageBuffer(Lanes(FragmentCollector(pipe, 7), 2, 5), critic, 0.9, 0.8), 2
    )
    recipe = on_policy(
        Lively, actor, critic, n_envs=3, n_steps=7, lanes=2, gamma=0.9, lam=0.8, seed=5
    )
    assert chain(recipe) == chain(pipe) == STANDARD
    for a, b in islice(zip(pipe, recipe), 3):
        assert a.adv.shape == (7, 6) and a.lane.tolist() == [0, 0, 0, 1, 1, 1]
        assert_same(snapshot(a), snapshot(b))


def test_defaults():
    f = next(
        iter(
            on_policy(
                "CartPole-v1",
                CategoricalPolicy.for_env("CartPole-v1"),
                Critic.for_env("CartPole-v1"),
            )
        )
    )
    assert f.adv.shape == f.ret.shape == (256, 8) and f.seq.tolist() == [0] * 8
    pipe = find_one(recipe(), AdvantageBuffer)
    assert (pipe.gamma, pipe.lam) == (0.99, 0.95)


@pytest.mark.parametrize(
    "scale, made",
    [
        (0.5, RewardScaler.inserter(after=Lanes, scale=0.5)),
        ("learn", RewardScaler.inserter(after=Lanes, gamma=0.9)),
    ],
)
def test_scaled_rewards_are_those_of_a_scaler_before_the_advantages(scale, made):
    def pipe(**kwargs):
        return recipe(n_envs=3, lanes=2, gamma=0.9, **kwargs)

    assert "RewardScaler" in chain(pipe(reward_scale=scale))[STANDARD.index("Lanes") :]
    for a, b, c in islice(
        zip(pipe(reward_scale=scale), pipe(edits=[made]), pipe(reward_scale=scale, optimize=False)),
        4,
    ):
        assert_same(snapshot(a), snapshot(b))
        assert_same(snapshot(a), snapshot(c))


@pytest.mark.parametrize("recipe", [on_policy, replayed])
def test_a_scale_is_refused_for_an_actor_that_sees_its_past_rewards(recipe):
    def pipe(scale, past=True):
        return recipe(
            "CartPole-v1",
            RecurrentPolicy.for_env("CartPole-v1", hidden=(4,), memory=4, past=past),
            reward_scale=scale,
        )

    for scale in ("sign", 0.5):
        pipe(scale, past=False)
        with pytest.raises(
            DataError, match="reward_scale: the policy sees its past.*Expected None"
        ):
            pipe(scale)
    for scale in (None, 1):
        pipe(scale)


def test_edits_by_classmethods():
    pipe = recipe(
        edits=[
            Scaled.inserter(after=FragmentCollector, by=3.0),
            MonteCarlo.replacer(AdvantageBuffer, critic=judge),
            Scaled.inserter(before=FragmentStacker),
        ]
    )
    assert chain(pipe) == [
        "EnvStepper",
        "FragmentCollector",
        "Scaled",
        "Lanes",
        "MonteCarlo",
        "Scaled",
        "FragmentStacker",
    ]
    assert [p.by for p in find(pipe, Scaled)] in ([3.0, 2.0], [2.0, 3.0])
    plain = next(iter(recipe()))
    edited = next(iter(pipe))
    assert torch.equal(edited.state.rew, plain.state.rew * 6)


@pytest.mark.parametrize("edits", [Scaled.inserter(after=FragmentCollector, by=3.0), Scaled, 3])
@pytest.mark.parametrize("make", [rollouts, on_policy, replayed])
def test_edits_are_a_list(make, edits):
    given = [Plain(), judge] if make is on_policy else [Plain()]
    with pytest.raises(DataError, match="`edits` is a list of functions pipe -> pipe"):
        make(Counting, *given, edits=edits)


def test_an_integer_may_be_one_of_numpy():
    pipe = rollouts(Counting, Plain(), n_envs=np.int64(2), n_steps=np.int64(4), lanes=np.int32(2))
    assert type(find_one(pipe, FragmentCollector).n_steps) is int and next(
        iter(pipe)
    ).valid.shape == (4, 4)
    with pytest.raises(DataError, match="an integer n_steps"):
        rollouts(Counting, Plain(), n_steps=np.bool_(True))


@pytest.mark.parametrize(
    "recipe, name", [(on_policy, "num_envs"), (replayed, "buffer_size"), (on_policy, "capacity")]
)
def test_an_unknown_option_names_the_recipe_that_was_called_and_its_options(recipe, name):
    with pytest.raises(
        TypeError, match=rf"^{recipe.__name__}\(\) .*'{name}'. Expected env, actor, .*n_steps"
    ) as caught:
        recipe(Counting, Plain(), **{"n_envs": 1, name: 8})
    assert ("capacity" in str(caught.value).partition("Expected")[2]) == (recipe is replayed)


def test_edits_are_applied_in_order_and_leave_the_original_usable():
    before = recipe()
    log = []

    def note(pipe):
        log.append(chain(pipe)[-1])
        return Scaled(pipe)

    recipe(edits=[note, note])
    assert log == ["FragmentStacker", "Scaled"]
    a = next(iter(before))
    edited = insert_after(before, FragmentCollector, Scaled)
    assert torch.equal(next(iter(edited)).state.rew, 2 * a.state.rew)
    assert_same(snapshot(next(iter(before))), snapshot(a))


def test_an_edit_that_matches_nothing_prints_the_graph():
    with pytest.raises(GraphError, match="(?s)Minibatcher.*FragmentCollector"):
        recipe(edits=[Scaled.inserter(after=Minibatcher)])


@pytest.mark.parametrize("gamma, lam", [(0, 1), (1, 0)])
def test_a_discount_may_be_an_integer(gamma, lam):
    made = [recipe(gamma=kind(gamma), lam=kind(lam), reward_scale="learn") for kind in (int, float)]
    assert_same(*(snapshot(next(iter(pipe))) for pipe in made))


def test_a_random_pipe_of_torch_gets_a_seed_unless_it_has_one():
    def order(edit, **kwargs):
        return [int(f.seq[0]) for f in islice(recipe(edits=[edit], **kwargs), 9)]

    def shuffled(pipe):
        return pipe.shuffle(buffer_size=20)

    first = order(shuffled)
    assert first == order(shuffled) and first != order(shuffled, seed=1) and first != sorted(first)
    assert (
        order(lambda pipe: shuffled(pipe).set_seed(4))
        == order(lambda pipe: shuffled(pipe).set_seed(4), seed=1)
        != first
    )


def test_mistakes_are_found_when_it_is_built():
    with pytest.raises(EnvError, match="CartPole-v1"):
        on_policy("CartPol-v1", Plain(), judge)
    with pytest.raises(RuntimeError, match="n_steps"):
        recipe(n_steps=0)
    with pytest.raises(RuntimeError, match="n_envs"):
        recipe(n_envs=0)
    with pytest.raises(RuntimeError, match="Lanes.*n >= 1"):
        recipe(lanes=0)
    with pytest.raises(RuntimeError, match="gamma"):
        recipe(gamma=2)
