"Fragments that lanes make where they are joined, and advantages that are estimated behind the join, for all of them at once."

import gc
import weakref
from functools import partial
from itertools import islice, product

import pytest
import torch
from gymnasium.vector import AutoresetMode
from hypothesis import given, settings
from hypothesis import strategies as st
from random_fragments import episodes
from reference import assert_same, snapshot
from test_joined import Pictures, Sees
from test_vector import PLANS, Vectorised
from toys import WORLDS, Counting, Memory, Nested, NestedMemory, Plain, Valued, judge

from rollpipe.layers import Critic, MemoryCritic, MLPPolicy, RecurrentPolicy
from rollpipe.pipes import (
    AdvantageBuffer,
    DataError,
    EnvStepper,
    FragmentCollector,
    FragmentStacker,
    Lanes,
    Pipe,
    ProcessReading,
    Tap,
    draw,
    find_one,
    insert_after,
    nested,
    on_policy,
    optimize,
    profile,
    remove,
)
from rollpipe.pipes.batches import SideBySide
from rollpipe.pipes.graph.modules import bump_version
from rollpipe.pipes.graph.torchdata import DataLoader2

fast = settings(deadline=None, max_examples=15)


@pytest.fixture(autouse=True)
def _small_arrays_too(monkeypatch):
    monkeypatch.setattr(SideBySide, "LEAST", 1)


def joined(source, actor, n_steps, lanes, n, critic=None, advantages=True, **kwargs):
    pipe = Lanes(FragmentCollector(EnvStepper(source, actor, **kwargs), n_steps), lanes, seed=0)
    return FragmentStacker(AdvantageBuffer(pipe, critic, 0.9, 0.8) if advantages else pipe, n)


def behind(pipe):
    "The graph with the `AdvantageBuffer` behind the join."
    return AdvantageBuffer(FragmentStacker(pipe.pipe.pipe, pipe.n), pipe.pipe.critic, 0.9, 0.8)


def first(pipe, n=4):
    return [snapshot(x) for x in islice(pipe, n)]


def fusion_of(pipe):
    return find_one(pipe, FragmentStacker).fusion


def assert_same_streams(make, n=4):
    """`make()` makes a graph; its stream, and that of the optimized graph, to the last bit.

    So is that of the graph whose advantages are estimated behind the join, for a critic that computes each row alone.
    """
    expected = first(make(), n)
    fused = optimize(make())
    assert fusion_of(fused) is not None
    others = [fused]
    if isinstance(fused.pipe, AdvantageBuffer):
        others.append(behind(make()))
    for other in others:
        for a, b in zip(expected, first(other, n), strict=True):
            assert_same(a, b)


# --- made where they are joined


def judge_of_place(obs):
    return obs["place"][..., 2] + obs["exact"]


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
@fast
@given(
    plans=st.lists(episodes, min_size=1, max_size=3),
    n_steps=st.integers(1, 9),
    lanes=st.integers(1, 4),
    n=st.integers(2, 5),
    terminal_obs=st.booleans(),
    ticks=st.booleans(),
    advantages=st.booleans(),
)
def test_lanes_that_write_into_the_batch_yield_the_same(
    world, plans, n_steps, lanes, n, terminal_obs, ticks, advantages
):
    "Whether they make ticks or not, with advantages and without."
    env, actor = WORLDS[world]
    envs = [partial(env, plan, tag) for tag, plan in enumerate(plans)]
    critic = judge if env is Counting else judge_of_place

    def make():
        options = dict(advantages=advantages, terminal_obs=terminal_obs)
        pipe = joined(envs, actor(), n_steps, lanes, n, critic, **options)
        return insert_after(pipe, EnvStepper, Passing) if ticks else pipe

    assert_same_streams(make)


def of_vector(mode, **options):
    return joined(partial(Vectorised, PLANS, mode), Memory(), 5, 3, 3, judge, **options)


def of_single(**options):
    envs = [partial(Counting, plan, k) for k, plan in enumerate(PLANS)]
    return joined(envs, Memory(), 5, 3, 3, judge, **options)


def ending(n):
    "Lanes that end, one after the other."
    pipe = joined(Nested, NestedMemory(), 5, 4, n, advantages=False, n_envs=2)
    return insert_after(pipe, EnvStepper, Some)


def reporting():
    "The actor reports the values."
    plans = [[(3, "trunc"), (2, "term"), (4, "both")], [(2, "trunc")]]
    return joined([partial(Counting, plan) for plan in plans], Valued(), 5, 3, 3)


CASES = {
    "values of the actor": reporting,
    "single": of_single,
    "single, last observations": partial(of_single, terminal_obs=True),
    "single, resting": partial(of_single, sticky=5),
    **{f"lanes that end, {n}": partial(ending, n) for n in (2, 3, 4, 7)},
    **{
        f"vector, {mode.name}, {terminal_obs}": partial(of_vector, mode, terminal_obs=terminal_obs)
        for mode, terminal_obs in product(AutoresetMode, (False, True))
    },
}


@pytest.mark.slow_but_one
@pytest.mark.parametrize("name", CASES)
def test_in_place_is_as_apart(name):
    assert_same_streams(CASES[name], 99 if "end" in name else 4)


def test_the_last_batches_are_made_of_the_lanes_that_are_left():
    for n in (2, 3, 4, 7):
        assert sum(x.n_envs for x in ending(n)) == 2 * (1 + 2 + 3 + 4)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", "onnxruntime"])
def test_with_networks_whose_weights_change(engine):
    "Versions, the recurrent state and the normaliser, too; nothing changes in what is kept."
    if engine == "onnxruntime":
        pytest.importorskip("onnxruntime")
    streams = []
    kept = []
    for change in (lambda pipe: pipe, optimize):
        actor = RecurrentPolicy.for_env(Nested, seed=0)
        critic = Critic.for_env(Nested, seed=0)
        items = iter(change(joined(Nested, actor, 8, 2, 2, critic, n_envs=2, engine=engine)))
        found = []
        for k in range(6):
            found.append(snapshot(batch := next(items)))
            kept.append((batch, found[-1]))
            with torch.no_grad():
                for p in [*actor.parameters(), *critic.parameters()]:
                    p += 0.01 * k
            if k % 3:
                bump_version(actor)
            actor.observe(batch.state.obs)
        streams.append(found)
    for a, b in zip(*streams, strict=True):
        assert_same(a, b)
    for batch, was in kept:
        assert_same(snapshot(batch), was)


class Noted(SideBySide):
    "Remembers where its arrays are."

    noted = []

    def take(self, shape, dtype):
        place = super().take(shape, dtype)
        if place >= 0 and self.position == 0:
            self.noted.append(weakref.ref(self.wholes[place]))
        return place


def test_images_are_not_copied_and_floats_lie_apart(monkeypatch):
    monkeypatch.setattr(SideBySide, "LEAST", 2**16)
    monkeypatch.setattr("rollpipe.pipes.passes.SideBySide", Noted)
    Noted.noted.clear()
    make = partial(
        joined, Pictures, Sees(), 4, 2, 2, lambda obs: obs["heat"].mean((-2, -1)), n_envs=2
    )
    pipe = optimize(make())
    seen = []
    critic = find_one(pipe, AdvantageBuffer).critic
    find_one(pipe, AdvantageBuffer).critic = lambda obs: (
        seen.append(obs["heat"].is_contiguous()) or critic(obs)
    )
    items = iter(pipe)
    plain = iter(make())
    for k in range(4):
        batch = next(items)
        [whole] = [
            x for x in (ref() for ref in Noted.noted) if x is not None
        ]  # that of the batch before is gone
        image = batch.state.obs["image"]
        assert (
            image.data_ptr() == whole.data_ptr()
            and image.is_contiguous()
            and image.untyped_storage().nbytes() == image.nbytes
        )
        assert len(Noted.noted) == k + 1 and all(seen)
        assert_same(snapshot(batch), snapshot(next(plain)))
        batch.state.obs["image"].zero_()  # it is the consumer's
        del batch, image, whole
        gc.collect()


class Passing(Pipe):
    reads, keeps_items = 1, False

    def stream(self, items):
        yield from items


class Some(Pipe):
    "Lane k gives 5 (k + 1) ticks."

    reads = 1
    lane = 0

    def set_lane(self, lane, seed):
        self.lane = lane

    def stream(self, items):
        yield from islice(items, 5 * (self.lane + 1))


def test_who_holds_a_fragment_never_sees_it_change():
    "A pipe that may keep fragments gets them in memory of their own, also if it was put there by hand."

    def see(fragment):
        kept.append((fragment, snapshot(fragment)))

    for by_hand in (False, True):
        kept = []
        pipe = optimize(joined(Nested, NestedMemory(), 5, 2, 2, advantages=False, n_envs=2))
        if by_hand:
            pipe.pipe = Tap(pipe.pipe, see)
        else:
            pipe = insert_after(pipe, Lanes, partial(Tap, see=see))
        assert "in_place" not in str(draw(pipe))
        for batch in islice(pipe, 4):
            nested.map(torch.Tensor.zero_, batch.state)
        assert len(kept) == 8
        for fragment, was in kept:
            assert_same(snapshot(fragment), was)


# --- advantages of joined fragments


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mlp", "memory", "nested"])
def test_networks_agree_to_the_last_bits(kind):
    env = Nested if kind == "nested" else "CartPole-v1"
    critic = (MemoryCritic if kind == "memory" else Critic).for_env(env, seed=0)
    for n_envs, n_steps in ((1, 7), (3, 32)):

        def make(n_envs=n_envs, n_steps=n_steps):
            actor = (
                RecurrentPolicy.for_env(env, seed=0, report=True)
                if kind == "memory"
                else MLPPolicy.for_env(env, seed=0)
            )
            return joined(env, actor, n_steps, 4, 4, critic, n_envs=n_envs)

        for a, b in zip(islice(make(), 4), islice(behind(make()), 4), strict=True):
            assert_same(
                snapshot(a._replace(adv=None, ret=None)), snapshot(b._replace(adv=None, ret=None))
            )
            scale = a.ret.abs().max()
            for x, y in ((a.adv, b.adv), (a.ret, b.ret), (a.ret - a.adv, b.ret - b.adv)):
                assert (x - y).abs().max() <= 1e-6 * scale


class Counted:
    "Counts its calls, and notes how many environments it was shown."

    def __init__(self):
        self.shown = []

    def __call__(self, obs):
        self.shown.append(obs.shape[-2])
        return judge(obs)


def test_the_critic_is_called_once_for_a_batch():
    critic = Counted()
    list(
        islice(
            behind(joined(lambda: Counting([(99, "term")]), Plain(), 4, 3, 3, critic, n_envs=2)), 6
        )
    )
    assert critic.shown == [6] * 6


@pytest.mark.slow_but_one
@pytest.mark.parametrize("n_workers, lag", [(0, 0), (1, 0), (2, 0), (2, 1)])
def test_the_same_with_any_number_of_workers(n_workers, lag):
    "The learner's process estimates, with the weights that it has then."

    def pipeline():
        actor = MLPPolicy.for_env("CartPole-v1", seed=0)
        critic = Critic.for_env("CartPole-v1", seed=0)
        return on_policy("CartPole-v1", actor, critic, n_envs=2, n_steps=40, lanes=4, seed=3)

    wanted = []
    critics = []
    for service in (None, ProcessReading(n_workers, lag=lag)):
        pipe = pipeline()
        found = []
        critics.append(critic := find_one(pipe, AdvantageBuffer).critic)
        with DataLoader2(pipe, reading_service=service) as loader:
            for batch in islice(loader, 4):
                if service:
                    assert ("in_place" in str(draw(loader.reading_service.end))) == (n_workers == 0)
                found.append(snapshot(batch))
                with torch.no_grad():
                    critic.net.last.bias += 0.5
        wanted.append(found)
    for a, b in zip(*wanted, strict=True):
        assert_same(a, b)


# --- faults


def told(pipe):
    "What it says when it fails."
    with pytest.raises(DataError) as e:
        list(islice(pipe, 5))
    return str(e.value), e.value.lane, repr(e.value.__cause__)


def only(lane, then):
    "A critic that judges by the third fragment of `lane`, whose environments have the tags 10, 11, ... times `lane`."

    def critic(obs):
        hit = (obs[..., 0] >= 10 * lane) & (obs[..., 0] < 10 * (lane + 1)) & (obs[..., 1] >= 2)
        return then(obs, hit)

    return critic


class Lane(Counting):
    "Its tag says the lane."

    numbers = iter(())

    def __init__(self, plan):
        super().__init__(plan, next(type(self).numbers))


def raising(obs, hit):
    if hit.any():
        raise KeyError("seen")
    return judge(obs)


@pytest.mark.slow_but_one
@pytest.mark.parametrize("lane", [0, 1, 2])
@pytest.mark.parametrize(
    "then",
    [
        lambda obs, hit: judge(obs).masked_fill(hit, torch.inf),
        raising,
        lambda obs, hit: judge(obs).double() if hit.any() else judge(obs),
    ],
    ids=["inf", "raises", "float64"],
)
def test_a_fault_names_its_lane(lane, then):
    "In the same words as without batches, whether the stacker is fused, or the buffer stands behind it."

    def make():
        Lane.numbers = iter([0, 1, 10, 11, 20, 21])
        return joined(
            partial(Lane, [(2, "term"), (3, "trunc")]), Plain(), 4, 3, 3, only(lane, then), n_envs=2
        )

    wanted = told(make())
    assert wanted[1] == lane and wanted[0].startswith(f"AdvantageBuffer, lane {lane}")
    assert told(optimize(make())) == wanted
    assert told(behind(make())) == wanted


def test_a_critic_that_fails_only_when_fragments_are_joined():
    def critic(obs):
        if obs.shape[-2] > 2:
            raise ValueError("too many")
        return judge(obs)

    text, lanes, cause = told(
        behind(joined(lambda: Counting([(99, "term")]), Plain(), 4, 3, 3, critic, n_envs=2))
    )
    assert (
        lanes == "0, 1, 2"
        and "the critic raised ValueError: too many" in text
        and "float32 [5, 6, 4]" in text
        and "too many" in cause
    )


def test_fragments_that_do_not_fit_together():
    "The error is that of the join."

    def make():
        return insert_after(joined(Counting, Plain(), 3, 2, 2, judge), EnvStepper, Some)

    text = told(make())
    assert (
        text[0].startswith("FragmentStacker: fragments of different lengths")
        and told(optimize(make())) == text
    )


# --- the graph


class Stacks(FragmentStacker):
    def stream(self, items):
        yield from super().stream(items)


class Buffers(AdvantageBuffer):
    def estimate(self, fragment):
        return super().estimate(fragment)


class Keeps(FragmentCollector):
    def stream(self, items):
        yield from super().stream(items)


def fragments(kind=FragmentCollector):
    return kind(EnvStepper(Counting, Valued(), 2), 4)


@pytest.mark.parametrize(
    "make, why",
    [
        (lambda: FragmentStacker(AdvantageBuffer(Lanes(fragments(), 2)), 2), None),
        (lambda: FragmentStacker(Lanes(fragments(), 2), 2), None),
        (
            lambda: FragmentStacker(AdvantageBuffer(Lanes(fragments(), 2)), 1),
            "it joins one fragment",
        ),
        (
            lambda: Stacks(AdvantageBuffer(Lanes(fragments(), 2)), 2),
            "Stacks has methods of its own",
        ),
        (
            lambda: FragmentStacker(Buffers(Lanes(fragments(), 2)), 2),
            "it reads Buffers, which may keep fragments or wants them to be contiguous",
        ),
        (
            lambda: FragmentStacker(AdvantageBuffer(Lanes(fragments(Keeps), 2)), 2),
            "the fragments of Keeps have memory of their own",
        ),
        (
            lambda: FragmentStacker(AdvantageBuffer(fragments()), 2),
            "it reads FragmentCollector, which may keep fragments or wants them to be contiguous",
        ),
        (
            lambda: FragmentStacker(Passing(AdvantageBuffer(Lanes(fragments(), 2))), 2),
            "it reads Passing, which may keep fragments or wants them to be contiguous",
        ),
    ],
)
def test_what_stands_in_the_way_is_reported(make, why):
    pipe = make()
    fused, report = optimize(pipe, report=True)
    done, _, because = report.partition(", because ")
    assert (because or None, done.startswith("not ")) == (why, why is not None)
    assert (fusion_of(fused) is None) == (why is not None) and fusion_of(pipe) is None
    assert ("in_place=True" in str(draw(fused))) == (why is None)
    assert [x.n_envs for x in islice(make(), 3)] == [x.n_envs for x in islice(fused, 3)]


def test_other_readers_of_the_same_fragments():
    class Both(Pipe):
        def __init__(self, pipe, other):
            super().__init__(pipe)
            self.other = other

        def stream(self, items):
            yield from items

    buffer = AdvantageBuffer(Lanes(fragments(), 2))
    lanes = Lanes(fragments(), 2)
    for pipe, name in (
        (Both(FragmentStacker(buffer, 2), buffer), "AdvantageBuffer"),
        (Both(FragmentStacker(AdvantageBuffer(lanes), 2), lanes), "Lanes"),
    ):
        assert optimize(pipe, report=True)[1].endswith(f", because other pipes read {name}, too")


def test_recipes_optimize():
    pipe = on_policy(Counting, Plain(), judge, n_envs=2, lanes=2, n_steps=4, seed=0)
    assert fusion_of(pipe) is not None
    assert fusion_of(on_policy(Counting, Plain(), judge, lanes=2, optimize=False)) is None
    assert str(draw(optimize(pipe))) == str(draw(pipe))


def test_an_edit_takes_it_apart_where_it_must():
    plain = joined(Counting, Plain(), 4, 2, 2, judge, n_envs=2)
    there = "FragmentStacker(n=2, in_place=True)"
    for edit, text in (
        (lambda pipe: insert_after(pipe, AdvantageBuffer, Passing), "FragmentStacker(n=2)"),
        (lambda pipe: insert_after(pipe, Lanes, Passing), "FragmentStacker(n=2)"),
        (lambda pipe: insert_after(pipe, FragmentCollector, Passing), "FragmentStacker(n=2)"),
        (lambda pipe: remove(pipe, AdvantageBuffer), there),
        (lambda pipe: insert_after(pipe, EnvStepper, Passing), there),
    ):
        edited = edit(optimize(plain))
        assert repr(find_one(edited, FragmentStacker)) == text
        for a, b in zip(first(edit(plain)), first(edited), strict=True):
            assert_same(a, b)


def test_it_can_be_profiled():
    "The stages that a fused join stands for have times of their own."
    told = profile(
        optimize(
            joined(
                "CartPole-v1",
                MLPPolicy.for_env("CartPole-v1"),
                16,
                2,
                2,
                Critic.for_env("CartPole-v1"),
            )
        ),
        seconds=0.5,
    )
    shares = {stage.label.partition("(")[0]: stage.share for stage in told.stages}
    assert told.error is None and told.steps_per_s > 0
    assert all(
        shares[name] > 0 for name in ("EnvStepper", "Lanes", "AdvantageBuffer", "FragmentStacker")
    ), shares


# --- what is left alone, or refused


class Blind(Lanes):
    "Its iteration is its own."

    def __iter__(self):
        for fragment in self._run():
            yield fragment._replace(valid=torch.zeros_like(fragment.valid))


class Deaf(AdvantageBuffer):
    "So is this one's."

    def __iter__(self):
        for fragment in self._run():
            yield fragment._replace(adv=torch.zeros_like(fragment.adv))


def test_a_pipe_with_an_iteration_of_its_own_is_iterated_so():
    lanes = FragmentCollector(EnvStepper(Counting, Plain(), 2), 4)
    for pipe in (
        FragmentStacker(Blind(lanes, 2, seed=0), 2),
        FragmentStacker(Deaf(Lanes(lanes, 2, seed=0), judge), 2),
    ):
        for a, b in zip(first(pipe), first(optimize(pipe)), strict=True):
            assert_same(a, b)
