"""The contract kit: sound things pass, and for every rule there is an example that breaks this rule and no other."""

import time

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Text
from toys import Counting, Lively, Memory, Nested, NestedMemory, Plain, Shaky, Valued, judge

from rollpipe import testing
from rollpipe.layers import Actor, CategoricalPolicy, GaussianPolicy, MLPPolicy, RecurrentPolicy
from rollpipe.pipes import (
    AdvantageBuffer,
    EnvStepper,
    FragmentCollector,
    FragmentStacker,
    Lanes,
    Minibatcher,
    Pipe,
    PipeError,
    on_policy,
    with_rewards,
)
from rollpipe.pipes.graph.torchdata import IterableWrapper, IterDataPipe
from rollpipe.pipes.steps import Fragments, Steps
from rollpipe.testing import ContractError, check_actor, check_env, check_pipe

RULES = {name: rule for name, rule in vars(testing).items() if name.isupper()}
COVERED = {}


def broken(check, *only):
    "Register a toy under the name of the rules that it breaks."

    def register(toy):
        for name in only:
            COVERED.setdefault(name, []).append(toy)
        CASES.append(pytest.param(check, toy, set(only), id=f"{'-'.join(only)}:{toy.__name__}"))
        return toy

    return register


CASES = []


# --- environments


class Sound(gym.Env):
    observation_space = Box(-1, 1, (2,))
    action_space = Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self.look(), {}

    def look(self):
        return self.np_random.uniform(-1, 1, 2).astype(np.float32)

    def step(self, action):
        self.count += 1
        return self.look(), 1.0, False, self.count == 7, {"count": self.count, "at": np.zeros(2)}


@pytest.mark.parametrize("space", [Box(0, 1000, (2,), np.uint16), MultiDiscrete([5, 6], np.uint32)])
def test_unsigned_observations(space):
    class Unsigned(Sound):
        observation_space = space

        def look(self):
            return self.np_random.integers(0, 5, 2).astype(space.dtype)

    check_env(Unsigned)


def changed(i, value):
    "A `step` whose i-th result is replaced by `value(env, result)`."

    def step(self, action):
        out = list(Sound.step(self, action))
        out[i] = value(self, out[i])
        return tuple(out)

    return step


@broken(check_env, "ENV_SPACES")
class Speaks(Sound):
    action_space = Text(3)


@broken(check_env, "ENV_MADE")
class CannotBeMade(Sound):
    def __init__(self):
        raise OSError("no display")


@broken(check_env, "ENV_MADE")
def many_at_once():
    return gym.vector.SyncVectorEnv([Sound])


@broken(check_env, "ENV_RESET")
class OldReset(Sound):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0]


@broken(check_env, "ENV_RESET")
class TakesNoSeed(Sound):
    def reset(self):
        return super().reset()


@broken(check_env, "ENV_STEP")
class FourAnswers(Sound):
    def step(self, action):
        return super().step(action)[1:]


@broken(check_env, "ENV_STEP")
class NoInfo(Sound):
    step = changed(4, lambda env, info: None)


@broken(check_env, "ENV_STEP")
class FailsLater(Sound):
    step = changed(1, lambda env, rew: rew / (5 - env.count))


@broken(check_env, "ENV_OBS_LIKE_SPACE")
class WrongShape(Sound):
    def look(self):
        return super().look()[:1]


@broken(check_env, "ENV_OBS_LIKE_SPACE")
class WrongContainer(Sound):
    observation_space = Dict(place=Sound.observation_space)


@broken(check_env, "ENV_OBS_FINITE")
class Infinite(Sound):
    step = changed(0, lambda env, obs: obs * (np.inf if env.count == 3 else 1))


@broken(check_env, "ENV_OBS_WITHIN_BOUNDS")
class Outside(Sound):
    step = changed(0, lambda env, obs: obs + 2)


@broken(check_env, "ENV_LAST_OBS")
class OneArray(Sound):
    def look(self):
        self.kept = getattr(self, "kept", super().look())
        self.kept[:] = super().look()
        return self.kept


class Long(Sound):
    "An episode is longer than what `check_env` plays before it resets within it."

    resets = 0

    def reset(self, *, seed=None, options=None):
        self.resets += 1
        return super().reset(seed=seed, options=options)

    def step(self, action):
        obs, rew, term, _, info = super().step(action)
        return obs, rew, term, False, info


@broken(check_env, "ENV_SEED")
class FreshGenerator(Long):
    "A generator from the seed of each reset, which is None from the second reset on."

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.random.default_rng(seed).uniform(-1, 1, 2).astype(np.float32), {}


@broken(check_env, "ENV_OBS_LIKE_SPACE")
class DoubleAtSecondReset(Long):
    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        return obs if self.resets == 1 else obs.astype(complex), info


@broken(check_env, "ENV_OBS_WITHIN_BOUNDS")
class OutsideAtThirdReset(Long):
    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        return obs + 2 * (self.resets == 3), info


@broken(check_env, "ENV_RESET")
class FailsWithOptions(Long):
    def reset(self, *, seed=None, options=None):
        if options is not None:
            options["level"]
        return super().reset(seed=seed)


@broken(check_env, "ENV_STEP")
class FailsAfterLaterReset(Long):
    def step(self, action):
        if self.resets == 2 and self.count == 5:
            raise IndexError("no more levels")
        return super().step(action)


@broken(check_env, "ENV_LAST_OBS")
class LongOneArray(Long):
    memory = np.zeros(2, np.float32)

    def look(self):
        self.memory[:] = super().look()
        return self.memory


@broken(check_env, "ENV_REWARD")
class VectorReward(Sound):
    step = changed(1, lambda env, rew: np.ones(1))


@broken(check_env, "ENV_REWARD")
class NoReward(Sound):
    step = changed(1, lambda env, rew: float("nan"))


@broken(check_env, "ENV_FLAGS")
class NumberForFlag(Sound):
    step = changed(2, lambda env, term: 0)


@broken(check_env, "ENV_INFO_STAYS")
class GrowingInfo(Sound):
    step = changed(4, lambda env, info: {"at": np.zeros(env.count)})


@broken(check_env, "ENV_INFO_STAYS")
class InfoBecomesText(Sound):
    step = changed(4, lambda env, info: {"at": 1 if env.count < 3 else "far"})


@broken(check_env, "ENV_INFO_STAYS")
class LateInfoGrows(Sound):
    step = changed(4, lambda env, info: {"at": np.zeros(env.count)} if env.count > 2 else {})


@broken(check_env, "ENV_SPACES_STAY")
class ChangingSpace(Sound):
    def reset(self, **kwargs):
        self.observation_space = Box(-1, 1 + self.np_random.random(), (2,))
        return super().reset(**kwargs)


@broken(check_env, "ENV_SEED")
class IgnoresItsSeed(Sound):
    def look(self):
        return np.random.uniform(-1, 1, 2).astype(np.float32)


@broken(check_env, "ENV_SEED")
class PaysByChance(Sound):
    "In one array, which both runs use again."

    paid = np.zeros(())

    def step(self, action):
        obs, _, *rest = super().step(action)
        self.paid[...] = np.random.uniform()
        return obs, self.paid, *rest


@broken(check_env, "ENV_CLOSE")
class DoesNotClose(Sound):
    def close(self):
        raise OSError("still busy")


@broken(check_env, "ENV_UNDISTURBED")
class CountsForAll(Sound):
    "The steps of all instances count, until an episode begins in one of them."

    counts = [0]

    def reset(self, **kwargs):
        self.counts[0] = 0
        return super().reset(**kwargs)

    def step(self, action):
        self.counts[0] += 1
        obs, _, *rest = super().step(action)
        return obs, float(self.counts[0]), *rest


@broken(check_env, "ENV_RESUMABLE")
class ForgetsItsGenerator(Sound):
    def get_state(self):
        return self.count

    def set_state(self, count):
        self.count = count


# --- actors


class Base:
    def step(self, stepno, obs, act, rew, fin, /, *, hx, virtual):
        return (obs[..., 0] > 0).long(), (), {"value": obs.sum(-1)}

    def reset(self, hx, at):
        return hx


class Recurrent(Base):
    "A running sum of the observations, which starts from zero where `fin`."

    def step(self, stepno, obs, act, rew, fin, /, *, hx, virtual):
        sums = []
        sum = obs.new_zeros(1, fin.shape[1], 1) if hx is None else hx
        for x, end in zip(obs.sum(-1), fin):
            sum = torch.where(end[None, :, None], 0, sum) + x[None, :, None]
            sums.append(sum[0, :, 0])
        return torch.stack(sums).gt(0).long(), sum, {"sum": torch.stack(sums)}

    def reset(self, hx, at):
        hx = hx.clone()
        hx[:, at] = 0
        return hx


class Noisy(Base):
    def draw_noise(self, lead, generator):
        return torch.rand(lead, generator=generator)

    def step(self, *state, hx, virtual, noise):
        act, hx, info = super().step(*state, hx=hx, virtual=virtual)
        return (act if noise is None else (noise > 0.5).long()), hx, info


def answers(**parts):
    "A `step` that applies functions to parts of the sound answer."

    def step(self, stepno, obs, act, rew, fin, /, *, hx, virtual):
        answer = dict(
            zip(
                ("act", "hx", "info"),
                Base.step(self, stepno, obs, act, rew, fin, hx=hx, virtual=virtual),
            )
        )
        return tuple({**answer, **{k: fn(answer[k]) for k, fn in parts.items()}}.values())

    return step


@broken(check_actor, "ACTOR_METHODS")
class Mute:
    def step(self):
        pass


@broken(check_actor, "ACTOR_STEP")
class TwoAnswers(Base):
    def step(self, *state, hx, virtual):
        return super().step(*state, hx=hx, virtual=virtual)[:2]


@broken(check_actor, "ACTOR_STEP")
class NeedsMemory(Base):
    def step(self, *state, hx, virtual):
        return super().step(*state, hx=len(hx), virtual=virtual)


@broken(check_actor, "ACTOR_ACT")
class ForgetsTime(Base):
    step = answers(act=lambda act: act[0])


@broken(check_actor, "ACTOR_ACT")
class FloatAction(Base):
    step = answers(act=lambda act: act.float())


@broken(check_actor, "ACTOR_ACT_IN_SPACE")
class ThirdAction(Base):
    step = answers(act=lambda act: act + 1)


@broken(check_actor, "ACTOR_INFO")
class ScalarInfo(Base):
    step = answers(info=lambda info: {"value": 1.0})


@broken(check_actor, "ACTOR_HX")
class BatchFirst(Base):
    step = answers(hx=lambda hx: torch.zeros(8, 1))


@broken(check_actor, "ACTOR_INPUTS_KEPT")
class ScalesInPlace(Base):
    def step(self, stepno, obs, *state, hx, virtual):
        obs.clamp_(-0.5, 0.5)
        return super().step(stepno, obs, *state, hx=hx, virtual=virtual)


@broken(check_actor, "ACTOR_INPUTS_KEPT", "ACTOR_RESET_FORGETS")
class ResetsInPlace(Recurrent):
    def reset(self, hx, at):
        hx[:, at] += 1
        return hx


@broken(check_actor, "ACTOR_FRESH")
class OneBuffer(Base):
    buffers = {}

    def step(self, *state, hx, virtual):
        act, hx, info = super().step(*state, hx=hx, virtual=virtual)
        buffer = self.buffers.setdefault(tuple(act.shape), torch.zeros(act.shape))
        return act, hx, {"value": buffer.copy_(info["value"])}


@broken(check_actor, "ACTOR_NOISE")
class OtherGenerator(Noisy):
    def draw_noise(self, lead, generator):
        return torch.rand(lead)


@broken(check_actor, "ACTOR_NOISE")
class OneNoise(Noisy):
    def draw_noise(self, lead, generator):
        return torch.rand(1, generator=generator)


@broken(check_actor, "ACTOR_NOISE")
class DrawsMore(Noisy):
    def step(self, *state, hx, virtual, noise):
        torch.rand(1)
        return super().step(*state, hx=hx, virtual=virtual, noise=noise)


@broken(check_actor, "ACTOR_REPEATS", "ACTOR_UNCHANGED")
class Tires(Base):
    n = 0

    def step(self, *state, hx, virtual):
        self.n += not virtual
        return answers(info=lambda info: {"value": info["value"] + self.n})(
            self, *state, hx=hx, virtual=virtual
        )


@broken(check_actor, "ACTOR_UNCHANGED")
class Numbers(Base):
    n = 0

    def step(self, *state, hx, virtual):
        self.n += 1
        return super().step(*state, hx=hx, virtual=virtual)


@broken(check_actor, "ACTOR_VIRTUAL", "ACTOR_UNCHANGED")
class RemembersVirtual(Base):
    n = 0

    def step(self, *state, hx, virtual):
        self.n += virtual
        return answers(info=lambda info: {"value": info["value"] + self.n})(
            self, *state, hx=hx, virtual=virtual
        )


@broken(check_actor, "ACTOR_COLUMNS")
class ComparesColumns(Base):
    step = answers(info=lambda info: {"value": info["value"] - info["value"].mean(1, keepdim=True)})


@broken(check_actor, "ACTOR_NEW_EPISODE")
class LooksBack(Base):
    def step(self, stepno, obs, act, rew, fin, /, *, hx, virtual):
        new, hx, info = super().step(stepno, obs, act, rew, fin, hx=hx, virtual=virtual)
        return new, hx, {"value": info["value"] + rew}


@broken(check_actor, "ACTOR_RESET")
class ResetsAll(Recurrent):
    def reset(self, hx, at):
        return torch.zeros_like(hx)


@broken(check_actor, "ACTOR_RESET")
class ResetReshapes(Recurrent):
    def reset(self, hx, at):
        return super().reset(hx, at).double()


@broken(check_actor, "ACTOR_RESET_FORGETS")
class NeverForgets(Recurrent):
    def reset(self, hx, at):
        return hx.clone()


@broken(check_actor, "ACTOR_REPLAY")
class IgnoresEnds(Recurrent):
    def step(self, stepno, obs, act, rew, fin, /, *, hx, virtual):
        return super().step(stepno, obs, act, rew, torch.zeros_like(fin), hx=hx, virtual=virtual)


@broken(check_actor, "ACTOR_REPLAY")
class CountsRows(Base):
    step = answers(
        info=lambda info: {"value": info["value"] + torch.arange(len(info["value"]))[:, None]}
    )


@broken(check_actor, "ACTOR_RESUMABLE")
class Anchored(Base):
    "What it sees first stays with it."

    def step(self, *args, **kwargs):
        act, hx, info = super().step(*args, **kwargs)
        self.anchor = getattr(self, "anchor", info["value"][0, 0].clone())
        return act, hx, {**info, "value": info["value"] - self.anchor}


# --- pipes


def collector(seed=0):
    return FragmentCollector(EnvStepper(Sound, Base(), 2, seed=seed), 5)


class Edited(Pipe):
    "Fragments with other fields."

    def __init__(self, pipe, edit):
        super().__init__(pipe)
        self.edit = edit

    def stream(self, items):
        for fragment in items:
            yield fragment._replace(**self.edit(fragment))


class Finite(Pipe):
    def stream(self, items):
        for _ in range(3):
            yield next(items)


@broken(check_pipe, "PIPE_MADE")
def makes_a_list():
    return [1, 2]


@broken(check_pipe, "PIPE_RUNS")
def fails_at_once():
    return Edited(collector(), lambda f: 1 / 0)


@broken(check_pipe, "PIPE_SEEDED", "PIPE_BEGINS_ANEW", "PIPE_COPIES")
def has_no_seed():
    return collector(seed=None)


class Continues(IterDataPipe):
    "Continues where the last iteration stopped."

    def __init__(self):
        self.n = 0

    def __iter__(self):
        while True:
            self.n += 1
            yield self.n


@broken(check_pipe, "PIPE_BEGINS_ANEW")
def continues():
    return Continues()


class Forgets(IterDataPipe):
    def __init__(self):
        self.n = 2

    def __iter__(self):
        yield from [self.n] * 9

    def __reduce__(self):
        return Forgets.copied, ()

    @staticmethod
    def copied():
        pipe = Forgets()
        pipe.n = 3
        return pipe


@broken(check_pipe, "PIPE_COPIES")
def forgets_in_copies():
    return Forgets()


class Overwrites(Pipe):
    def stream(self, items):
        out = torch.zeros(5, 2)
        for fragment in items:
            yield out.copy_(fragment.state.obs[1:, :, 0])


@broken(check_pipe, "PIPE_ITEMS_KEPT")
def overwrites():
    return Overwrites(collector())


class Clings(IterDataPipe):
    def __init__(self, pipe):
        self.pipe = pipe

    def __iter__(self):
        self.held = iter(self.pipe)
        yield from (next(self.held) for _ in range(9))


@broken(check_pipe, "PIPE_CLOSES")
def holds_on_to_its_input():
    return Clings(collector())


class Sums(Pipe):
    def stream(self, items):
        total = 0.0
        for fragment in items:
            total = total + fragment.state.rew.sum()
            yield fragment._replace(env={"total": total.expand(5, 2)})


@broken(check_pipe, "PIPE_RESUMABLE")
def keeps_a_sum():
    return Sums(collector())


class HalfTold(Sums):
    def stream(self, items):
        kept = self.keep(total=0.0)
        last = None
        for fragment in items:
            kept["total"] = kept["total"] + fragment.state.rew.sum()
            yield fragment._replace(
                env={"total": kept["total"].expand(5, 2), "last": torch.full((5, 2), last is None)}
            )
            last = fragment


@broken(check_pipe, "PIPE_RESUMABLE")
def tells_a_part():
    return HalfTold(collector())


@broken(check_pipe, "PIPE_RESUMABLE")
def keeps_an_iterator():
    return KeepsAnIterator(collector())


class KeepsAnIterator(Pipe):
    "What it keeps is no plain data, so its state is refused."

    def stream(self, items):
        kept = self.keep(numbers=iter(range(9)))
        for fragment in items:
            yield fragment._replace(env={"n": torch.full((5, 2), next(kept["numbers"]))})


class Boasts(Finite):
    def __len__(self):
        return 4


@broken(check_pipe, "PIPE_LENGTH")
def says_it_is_longer():
    return Boasts(collector())


class Twice(Pipe):
    reads = 1

    def stream(self, items):
        for fragment in items:
            yield fragment
            yield fragment


@broken(check_pipe, "PIPE_READS")
def yields_twice():
    return Twice(collector())


class Nothing(Pipe):
    def stream(self, items):
        for _ in items:
            yield None


@broken(check_pipe, "PIPE_RUNS")
def yields_none():
    return Nothing(collector())


class Rebinds(Pipe):
    def stream(self, items):
        kept = self.keep(n=0)
        for fragment in items:
            kept = dict(n=kept["n"] + 1)
            yield with_rewards(fragment, fragment.state.rew * kept["n"])


class Late(Pipe):
    def stream(self, items):
        kept = self.keep(n=0)
        for fragment in items:
            yield with_rewards(fragment, fragment.state.rew * kept["n"])
            kept["n"] += 1


@pytest.mark.parametrize(
    "cls, advice",
    [(Rebinds, "not a new dict"), (Late, "before the `yield`"), (Sums, "belongs into")],
)
def test_a_pipe_that_does_not_resume_is_told_why(cls, advice):
    with pytest.raises(ContractError, match=f"^{cls.__name__} breaks 1 rule.*\n.*{advice}"):
        check_pipe(lambda: cls(collector()))


@broken(check_pipe, "FRAGMENT_SHAPES")
def lacks_a_row():
    return Edited(collector(), lambda f: dict(adv=f.state.rew))


@broken(check_pipe, "FRAGMENT_SHAPES")
def has_an_array():
    return Edited(collector(), lambda f: dict(adv=f.state.rew[1:].numpy()))


@broken(check_pipe, "FRAGMENT_SHAPES")
def has_a_double():
    return Edited(collector(), lambda f: dict(adv=f.state.rew[1:].double()))


@broken(check_pipe, "FRAGMENT_TERM")
def terminates_in_between():
    return Edited(collector(), lambda f: dict(term=~f.state.fin))


@broken(check_pipe, "FRAGMENT_FINAL")
def drops_final():
    return Edited(
        collector(),
        lambda f: dict(
            final=f.final._replace(
                t=f.final.t[:0],
                b=f.final.b[:0],
                obs=f.final.obs[:0],
                actor={"value": f.final.actor["value"][:0]},
            )
        ),
    )


@broken(check_pipe, "FRAGMENT_FINAL")
def moves_final():
    return Edited(collector(), lambda f: dict(final=f.final._replace(t=(f.final.t + 1) % 5)))


@broken(check_pipe, "FRAGMENT_STEPNO")
def counts_on():
    return Edited(collector(), lambda f: dict(state=f.state._replace(stepno=f.state.stepno + 1)))


# ---


def violations(check, toy):
    args = (toy(), Sound) if check is check_actor else (toy,)
    return check(*args, raises=False)


@pytest.mark.slow_but_one
@pytest.mark.parametrize("check, toy, only", CASES)
def test_a_broken_rule_is_named(check, toy, only):
    found = violations(check, toy)
    assert {v.rule for v in found} == {RULES[name] for name in only}, found
    with pytest.raises(ContractError) as e:
        check(*((toy(), Sound) if check is check_actor else (toy,)))
    assert [v.rule for v in e.value.violations] == [v.rule for v in found] and isinstance(
        e.value, (PipeError, AssertionError)
    )
    assert all(f"- {RULES[name]}: " in str(e.value) for name in only) and toy.__name__ in str(
        e.value
    )


def test_there_is_an_example_for_every_rule():  # those of a `TensorEnv` are in test_tensor_envs
    assert set(COVERED) == {name for name in RULES if not name.startswith("TENSOR_ENV_")}


@pytest.mark.slow_but_one
@pytest.mark.parametrize(
    "env",
    [Sound, Counting, Nested, Lively, "CartPole-v1", "Pendulum-v1", "Acrobot-v1", "FrozenLake-v1"],
)
def test_sound_environments_pass(env):
    assert check_env(env) == []


def test_an_environment_that_is_lent_stays_open():
    class Watched(Sound):
        closed = 0

        def close(self):
            self.closed += 1

    env = Watched()
    assert check_env(env) == [] and env.closed == 0


ACTORS = {
    "base": (Base, Sound),
    "recurrent": (Recurrent, Sound),
    "noisy": (Noisy, Sound),
    "plain": (Plain, Counting),
    "valued": (Valued, Counting),
    "shaky": (Shaky, Lively),
    "cartpole": (lambda: CategoricalPolicy.for_env("CartPole-v1"), "CartPole-v1"),
    "pendulum": (lambda: GaussianPolicy.for_env("Pendulum-v1"), "Pendulum-v1"),
    "memory": (lambda: RecurrentPolicy.for_env("CartPole-v1"), "CartPole-v1"),
    "lively": (lambda: MLPPolicy.for_env(Lively), Lively),
}


@pytest.mark.parametrize("name", ACTORS)
def test_sound_actors_pass(name):
    make, env = ACTORS[name]
    before = torch.get_rng_state()
    assert check_actor(actor := make(), env) == []
    assert isinstance(actor, Actor) or torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("make, env", [(Memory, Counting), (NestedMemory, Nested)])
def test_actors_that_rely_on_being_reset_cannot_be_replayed(make, env):
    assert {v.rule for v in check_actor(make(), env, raises=False)} == {testing.ACTOR_REPLAY}


PIPES = {
    "ticks": lambda: EnvStepper(Lively, Shaky(), 2, seed=1),
    "fragments": collector,
    "lanes": lambda: Lanes(collector(None), 3, seed=2),
    "memory": lambda: FragmentCollector(EnvStepper(Nested, NestedMemory(), 2, seed=0), 4),
    "batches": lambda: FragmentStacker(
        AdvantageBuffer(Lanes(collector(None), 2, seed=2), lambda obs: obs.sum(-1)), 2
    ),
    "minibatches": lambda: Minibatcher(collector(), 4, epochs=2, seed=3),
    "steps": lambda: Steps(collector()),
    "regained": lambda: Fragments(Steps(collector()), 3),
    "finite": lambda: Finite(collector()),
    "wrapped": lambda: IterableWrapper(range(3)),
    "recipe": lambda: on_policy(Counting, Plain(), judge, n_envs=2, n_steps=5, lanes=2, seed=0),
}


@pytest.mark.slow_but_one
@pytest.mark.parametrize("name", PIPES)
def test_sound_pipes_pass(name):
    assert check_pipe(PIPES[name]) == []


class Timed(Sound):
    def step(self, action):
        *answer, _ = super().step(action)
        return *answer, {"clock": time.perf_counter()}


def test_what_breaks_no_rule_is_told(capsys):
    assert check_env("CartPole-v1") == []
    kept = "A running environment is kept by:"
    assert capsys.readouterr().out == f"CartPole-v1 breaks no rule\n{kept} copy\n"
    assert check_env(Timed) == []
    why = "replay (episode), replay (all): EnvError: leaf info['clock']: step 0 differs"
    assert capsys.readouterr().out == f"Timed breaks no rule\n{kept} none ({why})\n"
    assert check_env("CartPole-v1", raises=False) == [] and not capsys.readouterr().out
    assert check_actor(MLPPolicy.for_env("CartPole-v1"), "CartPole-v1") == []
    assert capsys.readouterr().out == "MLPPolicy breaks no rule\n"
