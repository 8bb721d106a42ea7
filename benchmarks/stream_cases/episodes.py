"Whole episodes, and fragments as single steps."

from rollpipe.agents import EpisodeReturns
from rollpipe.layers import RecurrentPolicy
from rollpipe.pipes import (
    AdvantageBuffer,
    EnvStepper,
    EpisodeCollector,
    EpisodeStats,
    FragmentCollector,
    Lanes,
    WithImage,
    on_policy,
    rollouts,
)
from rollpipe.pipes.data.fragment_ops import pad_episodes
from rollpipe.pipes.steps import Fragments, Steps
from rollpipe.pipes.taps import Throughput

from .tools import first, named
from .worlds import Hybrid, Push, Walk, critic, policy, vector


def _ticks(*args, **kwargs):
    return EnvStepper(*args, **kwargs, **named(EnvStepper, terminal_obs=True))


def _episodes(env, actor, batch, pad=False):
    return Lanes(EpisodeCollector(_ticks(env, actor, 3), batch, pad=pad), 2, 0)


def one_by_one():
    yield from first(_episodes(Walk, policy(Walk), 1), 8)


def in_lists():
    yield from first(_episodes(Hybrid, policy(Hybrid), 3))


def padded():
    yield from first(_episodes(Hybrid, policy(Hybrid), 4, pad=True))


def recurrent():
    yield from first(
        _episodes(Push, policy(Push, RecurrentPolicy, memory=5, past=True), 4, pad=True)
    )


def padded_afterwards():
    for label, episodes in first(_episodes(Walk, policy(Walk), 4)):
        yield label, pad_episodes(episodes)


def of_a_vector_environment():
    yield from first(
        EpisodeCollector(_ticks(vector("NEXT_STEP"), policy(Walk), seed=0), 4, pad=True)
    )


def with_advantages():
    yield from first(
        AdvantageBuffer(
            _episodes(Walk, policy(Walk), 4, pad=True), critic(Walk), gamma=0.9, lam=0.7
        )
    )


def _joined(env):
    return on_policy(env, policy(env), critic(env), n_envs=2, n_steps=8, lanes=2, seed=0)


def single_steps():
    yield from first(Steps(_joined(Hybrid)), 80)


def steps_of_resting_environments():
    yield from first(
        Steps(rollouts(Walk, policy(Walk), n_envs=2, n_steps=8, sticky=True, seed=0)), 30
    )


def steps_and_back():
    yield from first(Fragments(Steps(_joined(Push)), 6), 6)


class _Drawn(Walk):
    render_mode = "rgb_array"

    def render(self):
        return (self.look()[:, None, None] * [[10, 20, 30]] + 99).astype("uint8")


def steps_with_images():
    yield from first(
        Steps(
            FragmentCollector(EnvStepper(lambda: WithImage(_Drawn()), policy(Walk), seed=0), 6),
            image="image",
        ),
        12,
    )


def ends():
    "What the taps and the accountant tell of episodes, in ticks, in fragments of lanes, and in those that were joined."
    from_ticks = []
    from_lanes = []
    rates = []
    account = EpisodeReturns()
    clock = iter(range(10_000))
    pipe = EpisodeStats(EnvStepper(Push, policy(Push), 3), from_ticks.append)
    pipe = EpisodeStats(Lanes(FragmentCollector(pipe, 8), 2, 0), from_lanes.append)
    for _, fragment in first(Throughput(pipe, rates.append, every=2, clock=lambda: next(clock)), 7):
        account.add(fragment)
    yield (
        "told",
        dict(
            from_ticks=from_ticks,
            from_lanes=from_lanes,
            rates=rates,
            pop=account.pop(),
            steps=account.steps,
        ),
    )
    joined = []
    account = EpisodeReturns()
    for k, fragment in first(EpisodeStats(_joined(Walk), joined.append)):
        account.add(fragment)
        yield f"metrics after {k}", account.metrics()
    yield "told, joined", joined
