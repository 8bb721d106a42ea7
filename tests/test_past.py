"Where an episode begins, no actor sees the action and the reward of the episode before, whatever it is and whoever asks it."

from itertools import islice

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from reference import assert_same
from tensor_worlds import Planned
from toys import Counting

from rollpipe.agents import evaluate
from rollpipe.agents.losses import vtrace_actor_critic
from rollpipe.layers import MLPPolicy
from rollpipe.pipes import (
    EnvStepper,
    FragmentCollector,
    Lanes,
    ProcessReading,
    context,
    rollout,
    rollouts,
)
from rollpipe.pipes.graph.torchdata import DataLoader2
from rollpipe.pipes.tensors.collector import TensorCollector


class Onlooker:
    "Of no base class. It chooses 1, and reports the past that it is shown."

    def step(self, stepno, obs, act, rew, fin, /, *, hx, virtual):
        return (
            torch.ones_like(stepno),
            (),
            {"act": act.clone(), "rew": rew.clone(), "fin": fin.clone()},
        )

    def reset(self, hx, at):
        return hx


class NoisyOnlooker(Onlooker):
    def draw_noise(self, lead, generator=None):
        return torch.rand(lead, generator=generator)

    def step(self, stepno, obs, act, rew, fin, /, *, hx, virtual, noise):
        new, hx, info = super().step(stepno, obs, act, rew, fin, hx=hx, virtual=virtual)
        return new - (0 if noise is None else (noise > 0.9).long()), hx, info


class Blind(Onlooker):
    uses_past = False


def fused(actor, **options):
    return rollouts(Counting, actor, n_envs=2, n_steps=5, lanes=2, seed=0, **options)


def plain(actor, **options):
    return fused(actor, optimize=False, **options)


def sticky(actor):
    return Lanes(FragmentCollector(EnvStepper(Counting, actor, 2, sticky=5), 5), 2, 0)


def vector(actor):
    return rollouts("CartPole-v1", actor, n_envs=2, n_steps=9, lanes=2, seed=0, vector="sync")


def tensors(actor):
    return Lanes(
        TensorCollector(lambda: Planned(2 * [[(3, "term"), (4, "trunc")]]), actor, 5), 2, 0
    )


def manual(actor):
    return rollout([Counting(), Counting()], actor, 5, seed=0)


def assert_past_is_hidden(fragments):
    "The actor saw zeros where an episode begins, and what is recorded is the last action of the episode before, and its reward."
    shown, recorded = 0, 0
    for f in fragments:
        fin = f.state.fin
        assert_same(f.actor["fin"], fin)
        assert_same(f.actor["act"], f.state.act.masked_fill(fin, 0))
        assert_same(f.actor["rew"], f.state.rew.masked_fill(fin, 0))
        shown = shown + int((f.actor["act"] > 0).sum())
        recorded = recorded + int((f.state.act[fin] > 0).sum())
    assert shown and recorded


class Narrow(Onlooker):
    "It computes in float32, with its last action."

    def step(self, stepno, obs, act, rew, fin, /, *, hx, virtual):
        assert act.dtype == torch.float32
        return (act + 1).clamp(max=2), (), {}


def test_actions_of_float64_are_shown_as_float32():
    class Wide(Counting):
        action_space = Box(-9.0, 9.0, (1,), np.float64)

        def number(self, action):
            return int(action[0])

    assert next(iter(rollouts(Wide, Narrow(), n_envs=2, n_steps=3))).state.act[
        :, 0, 0
    ].tolist() == [0, 1, 2, 2]


@pytest.mark.parametrize("make", [plain, fused, sticky, vector, tensors, manual])
@pytest.mark.parametrize("kind", [Onlooker, NoisyOnlooker])
def test_no_actor_sees_the_past_of_another_episode(make, kind):
    stream = iter(make(kind()))
    assert_past_is_hidden(islice(stream, 8))
    stream.close()


@pytest.mark.parametrize("make", [plain, fused])
def test_no_actor_sees_it_in_onnx_runtime(make):
    pytest.importorskip("onnxruntime")
    stream = iter(make(NoisyOnlooker(), engine="onnxruntime"))
    assert_past_is_hidden(islice(stream, 8))
    stream.close()


@pytest.mark.parametrize("kind", [Onlooker, NoisyOnlooker])
def test_no_actor_sees_it_in_a_worker(kind):
    with DataLoader2(plain(kind()), reading_service=ProcessReading(2)) as loader:
        assert_past_is_hidden(islice(loader, 8))


def test_no_actor_sees_it_when_it_is_evaluated():
    trace = evaluate(Counting, Onlooker(), 6, n_envs=2, trace=True).trace
    begins = np.concatenate([np.ones((1, 2), bool), trace.fin[:-1]])[trace.valid]
    act, rew, fin = (trace.actor[name][:-1][trace.valid].numpy() for name in ("act", "rew", "fin"))
    assert_same(fin, begins)
    assert not act[begins].any() and not rew[begins].any() and act[~begins].all()


def test_who_steps_environments_himself_is_not_shown_it_either():
    with context([Counting(), Counting()], seed=0) as envs:
        ends = 0
        for _ in range(8):
            envs.step(torch.ones(1, 2, dtype=torch.int64))
            fin = envs.seen.fin
            assert_same(envs.seen.act[0].numpy(), np.where(fin[0], 0, envs.state.act))
            assert_same(envs.seen.rew[0].numpy(), np.where(fin[0], np.float32(0), envs.state.rew))
            ends += int((envs.state.act[fin[0].numpy()] > 0).sum())
        assert ends


def test_who_does_not_look_at_the_past_gets_it_as_it_is():
    "Which takes no time."
    fragments = list(islice(plain(Blind()), 4))
    for f in fragments:
        assert_same((f.actor["act"], f.actor["rew"]), (f.state.act, f.state.rew))
    assert any(f.state.act[f.state.fin].any() for f in fragments)


class Borrowed(torch.nn.Module):
    "What a policy does, with values; of no base class."

    def __init__(self, policy):
        super().__init__()
        self.policy = policy
        self.dist = policy.dist
        self.begun = 0

    def step(self, stepno, obs, act, rew, fin, /, *, hx, virtual):
        assert not act[fin].any() and not rew[fin].any()
        self.begun += int(fin.sum())
        act, hx, info = self.policy(obs, act, rew, fin, hx=hx, stepno=stepno, virtual=virtual)
        return act, hx, {**info, "value": obs.sum(-1)}

    def replay(self, fragment):
        return {**self.policy.replay(fragment), "value": fragment.state.obs[:-1].sum(-1)}


def test_no_actor_sees_it_when_it_is_asked_for_values_again():
    policy = MLPPolicy.for_env("CartPole-v1", seed=0)
    fragment = next(iter(rollouts("CartPole-v1", policy, n_envs=2, n_steps=60, seed=0)))
    actor = Borrowed(policy)
    assert fragment.state.act[1:][fragment.state.fin[1:]].any()
    vtrace_actor_critic(fragment, actor)
    assert actor.begun
