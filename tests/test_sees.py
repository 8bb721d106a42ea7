"""What a network sees of Dict observations (`sees`): a critic may be told more than the actor."""

import inspect

import gymnasium as gym
import numpy as np
import onnxruntime
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete

import rollpipe.layers as layers
from rollpipe import PPO, Critic, MLPPolicy, on_policy
from rollpipe.layers.observer import Torso
from rollpipe.pipes.data import nested
from rollpipe.pipes.data.errors import SpaceError
from rollpipe.runs.export import export_policy
from rollpipe.testing.tasks import Luck

SENSOR = Box(-1, 1, (2,), np.float32)
SPACE = Dict(friction=Box(0, 1, (3,), np.float32), sensor=SENSOR)
SENSOR_ALONE = Dict(sensor=SENSOR)
PUBLIC = [getattr(layers, name) for name in layers.__all__]
NETWORKS = [
    network
    for network in PUBLIC
    if inspect.isclass(network)
    and issubclass(network, Torso)
    and "sees" in inspect.signature(network).parameters
]


def observations():
    "One observation for each of three steps of two environments."
    generator = torch.Generator().manual_seed(0)
    return dict(
        friction=torch.rand(3, 2, 3, generator=generator),
        sensor=torch.rand(3, 2, 2, generator=generator),
    )


def answer_of(network, obs, act_space):
    "What a network computes from observations `[3, 2, ...]`."
    zero = nested.torchify(act_space.sample()) * 0
    act = zero.expand(3, 2, *zero.shape)
    if isinstance(network, layers.MemoryCritic):
        return network(dict(obs=obs, memory=torch.ones(3, 2, 64)))
    if not hasattr(network, "step"):
        is_of_actions = "act" in inspect.signature(network.forward).parameters
        return network(obs, act) if is_of_actions else network(obs)
    fin = torch.zeros(3, 2, dtype=torch.bool)
    fin[0] = True
    return network.step(fin.long(), obs, act, fin.float(), fin, hx=None, virtual=False)


@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.__name__)
def test_a_network_that_sees_an_entry_is_the_network_of_this_entry(network):
    discrete = Discrete(3)
    is_of_values = "q" in dir(network)
    act_space = discrete if is_of_values else Box(-1, 1, (2,), np.float32)
    try:
        alone = network.for_env((SENSOR_ALONE, act_space), seed=0)
    except SpaceError:
        act_space = discrete
        alone = network.for_env((SENSOR_ALONE, act_space), seed=0)
    seeing = network.for_env((SPACE, act_space), seed=0, sees=["sensor"])
    obs = observations()
    sensor = dict(sensor=obs["sensor"])

    # Before it has seen anything, and after both have learned how observations are distributed
    for _ in range(2):
        expected = nested.leaves(answer_of(alone, sensor, act_space))
        for given in (obs, sensor):
            answers = nested.leaves(answer_of(seeing, given, act_space))
            for x, y in zip(answers, expected, strict=True):
                assert torch.equal(x, y), network.__name__
        for network_, given in ((alone, sensor), (seeing, obs)):
            is_of_memory = isinstance(network_, layers.MemoryCritic)
            network_.observe(dict(obs=given) if is_of_memory else given)


def share_of_right_actions(critic_sees):
    "Probability of the right action in a quarter minute of PPO, for both cues."
    actor = MLPPolicy.for_env(Luck, seed=0, sees=["cue"], hidden=(16,))
    critic = Critic.for_env(Luck, seed=1, sees=critic_sees, hidden=(16,))
    agent = PPO(actor, critic, seed=0, lr=3e-3)
    batches = on_policy(Luck, actor, critic, n_envs=16, n_steps=64, seed=0, gamma=0.9)
    for _, batch in zip(range(12), batches):
        agent.update(batch)
    cues = dict(cue=torch.eye(2).view(1, 2, 2))
    logits, _ = actor.params(cues, None, None, None, hx=(), stepno=None)
    return logits.softmax(-1)[0].diagonal()


@pytest.mark.slow
def test_the_actor_learns_only_beside_a_critic_that_sees_the_luck():
    assert share_of_right_actions(None).min() > 0.9
    assert share_of_right_actions(["cue"]).min() < 0.75


def test_the_stream_is_the_same_in_both_engines():
    def fragment(engine):
        actor = MLPPolicy.for_env(Luck, seed=0, sees=["cue"])
        critic = Critic.for_env(Luck, seed=1)
        return next(iter(on_policy(Luck, actor, critic, n_steps=40, seed=0, engine=engine)))

    expected = fragment("torch")
    assert torch.equal(fragment("onnxruntime").state.obs["luck"], expected.state.obs["luck"])
    assert torch.equal(fragment("onnxruntime").state.act, expected.state.act)


@pytest.mark.slow
def test_a_robot_gives_what_the_actor_sees(tmp_path):
    actor = MLPPolicy.for_env(Luck, seed=0, sees=["cue"])
    obs, _ = Luck().reset(seed=0)
    cue = dict(cue=obs["cue"])
    assert actor.predict(cue)[0] == actor.predict(obs)[0]

    # The file asks for the cue alone.
    export_policy(actor, tmp_path / "policy.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "policy.onnx")
    assert [x.name for x in session.get_inputs()] == ["obs_cue"]
    assert session.run(None, {"obs_cue": obs["cue"][None]})[0] == actor.predict(obs)[0]


def test_a_mask_of_the_actions_is_seen_besides():
    space = Dict(
        extra=Box(0, 1, (3,), np.float32),
        mask=Box(0, 1, (3,), np.int8),
        sensor=SENSOR,
    )
    actor = MLPPolicy.for_env((space, Discrete(3)), seed=0, sees=["sensor"], action_mask="mask")
    obs = dict(mask=np.array([0, 1, 0], np.int8), sensor=np.zeros(2, np.float32))
    assert set(actor.seen_space) == {"mask", "sensor"}
    assert actor.predict(obs)[0] == 1
    assert (
        isinstance(actor.observation_space, gym.spaces.Dict) and len(actor.observation_space) == 3
    )
