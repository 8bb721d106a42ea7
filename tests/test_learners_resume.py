"Some updates, a state and the rest in new objects make the same updates as all of them in one go, bit for bit, for every learner."

import copy
from functools import cache

import gymnasium as gym
import pytest
from reference import assert_same, snapshot

import rollpipe.testing  # noqa: F401  registers environments with goals
from rollpipe.agents import (
    A2C,
    DDPG,
    DQN,
    NPG,
    PPO,
    QRDQN,
    REINFORCE,
    RND,
    SAC,
    TD3,
    TRPO,
    QLearning,
    VTrace,
)
from rollpipe.agents.checkpoint import load_checkpoint, save_checkpoint
from rollpipe.agents.intrinsic import Distillation
from rollpipe.agents.off_policy.crossq import CrossQ, RenormCritic, RenormPolicy
from rollpipe.agents.tabular import TabularQ
from rollpipe.layers import (
    ActionCritic,
    Critic,
    DeterministicPolicy,
    MLPPolicy,
    QPolicy,
    QuantilePolicy,
    RecurrentPolicy,
    RecurrentQPolicy,
    SquashedPolicy,
)
from rollpipe.pipes import (
    EnvStepper,
    EpisodeStats,
    Lanes,
    ProcessReading,
    on_policy,
    replayed,
    rollouts,
)
from rollpipe.pipes.envs.keeping import keeper_for
from rollpipe.pipes.graph.edits import find
from rollpipe.pipes.graph.pipe import restore_stream, stream_state, unknown_states
from rollpipe.pipes.graph.torchdata import DataLoader2
from rollpipe.pipes.keeping.chunks import ChunkFolder
from rollpipe.runs.states import load_states, states_of

N, SPLIT = 7, 4  # updates in all, and before the state is taken


def deep_q(algorithm, policy, env="CartPole-v1", memory=None, actor_options=None, **options):
    actor = policy.for_env(env, hidden=(8,), seed=0, **(actor_options or {}))
    agent = algorithm(actor, eps_steps=80, **options)
    stream = dict(n_envs=2, n_steps=5, lanes=2, batch_size=16, warmup=30, capacity=90, seed=0)
    return agent, replayed(env, actor, **stream | (memory or {}))


def continuous(algorithm, policy, env="Pendulum-v1", memory=None, critic=ActionCritic, **options):
    actor = policy.for_env(env, hidden=(8,), seed=0)
    critic = critic.for_env(env, hidden=(8,), n_critics=2, seed=0)
    agent = algorithm(actor, critic, random_steps=60, **options)
    stream = dict(n_envs=2, n_steps=5, lanes=2, batch_size=16, warmup=30, capacity=90, seed=0)
    return agent, replayed(env, actor, **stream | (memory or {}))


def policy_gradient(
    algorithm,
    env="CartPole-v1",
    policy=MLPPolicy,
    edits=(),
    actor_options=None,
    scale=None,
    **options,
):
    actor = policy.for_env(env, hidden=(8,), seed=0, **(actor_options or {}))
    critic = Critic.for_env(env, hidden=(8,), seed=0)
    agent = algorithm(actor, critic, **options)
    return agent, on_policy(
        env, actor, critic, n_envs=2, n_steps=12, lanes=2, seed=0, edits=edits, reward_scale=scale
    )


def explorer():
    actor = MLPPolicy.for_env("CartPole-v1", hidden=(8,), seed=0)
    critic = Critic.for_env("CartPole-v1", hidden=(8,), seed=0)
    rnd = RND.inserter(
        after=Lanes, network=Distillation.for_env("CartPole-v1", hidden=(6,), n_out=3, seed=2)
    )
    options = dict(n_envs=2, n_steps=12, lanes=2, seed=0, terminal_obs=True, edits=[rnd])
    return PPO(actor, critic), on_policy("CartPole-v1", actor, critic, **options)


def tabular():
    actor = TabularQ.for_env("FrozenLake-v1", seed=0)
    return QLearning(actor, eps_steps=200), rollouts(
        "FrozenLake-v1", actor, n_envs=2, n_steps=8, lanes=2, seed=0
    )


PRIORITIES = dict(prioritized=True, n_batches=2)
CASES = {
    "dqn": lambda: deep_q(DQN, QPolicy, memory=PRIORITIES, beta_steps=300, target_every=3),
    "dqn-segments": lambda: deep_q(
        DQN, QPolicy, memory=PRIORITIES | dict(length=3), multi_step=3, tau=0.1
    ),
    "dqn-ratio": lambda: deep_q(DQN, QPolicy, memory=dict(samples_per_step=1 / 16)),
    "dqn-recurrent": lambda: deep_q(
        DQN,
        RecurrentQPolicy,
        actor_options=dict(memory=6),
        memory=PRIORITIES | dict(length=8),
        burn_in=2,
    ),
    "qr-dqn": lambda: deep_q(
        QRDQN, QuantilePolicy, memory=PRIORITIES, beta_steps=300, actor_options=dict(n_quantiles=5)
    ),
    "dqn-goals": lambda: deep_q(
        DQN, QPolicy, "BitFlip-v0", memory=PRIORITIES | dict(n_sampled_goal=4)
    ),
    "sac-goals": lambda: continuous(
        SAC, SquashedPolicy, "PointReach-v0", memory=dict(n_sampled_goal=4)
    ),
    "sac": lambda: continuous(SAC, SquashedPolicy),
    "sac-priorities": lambda: continuous(SAC, SquashedPolicy, memory=PRIORITIES, beta_steps=300),
    "crossq": lambda: continuous(CrossQ, RenormPolicy, critic=RenormCritic, average_policy=3),
    "td3": lambda: continuous(TD3, DeterministicPolicy, memory=dict(n_batches=3)),
    "ddpg": lambda: continuous(DDPG, DeterministicPolicy, memory=PRIORITIES),
    "trpo": lambda: policy_gradient(TRPO),
    "trpo-decay": lambda: policy_gradient(TRPO, "Pendulum-v1", decay_steps=1000, scale=0.5),
    "npg": lambda: policy_gradient(NPG, "Pendulum-v1"),
    "ppo": lambda: policy_gradient(PPO, decay_steps=1000),
    "ppo-average": lambda: policy_gradient(PPO, average_policy=3),
    "ppo-recurrent": lambda: policy_gradient(
        PPO, policy=RecurrentPolicy, actor_options=dict(memory=6)
    ),
    "a2c": lambda: policy_gradient(
        A2C, edits=[EpisodeStats.inserter(after=Lanes, sink=lambda record: None)]
    ),
    "reinforce": lambda: policy_gradient(REINFORCE),
    "vtrace": lambda: policy_gradient(VTrace),
    "rnd": explorer,
    "q-learning": tabular,
}
OPTIONS = {"vtrace": dict(lag=1)}
ENVS = {
    case: "Pendulum-v1"
    for case in ("sac", "sac-priorities", "crossq", "td3", "ddpg", "trpo-decay", "npg")
} | {"q-learning": "FrozenLake-v1", "dqn-goals": "BitFlip-v0", "sac-goals": "PointReach-v0"}


def trained(case, n, workers, state=None, chunks=None):
    "Metrics of `n` updates, all weights and other state afterwards, and the state with which others go on."
    agent, pipe = CASES[case]()
    id = ENVS.get(case, "CartPole-v1")
    for stepper in find(pipe, EnvStepper):
        stepper.keeper = keeper_for(lambda: gym.make(id))
    assert unknown_states(pipe) == []
    if state is not None:
        agent.load_state_dict(state["agent"])
        load_states(pipe, state["learning"])
        restore_stream(pipe, state["stream"], chunks)
    metrics = []
    with DataLoader2(
        pipe, reading_service=ProcessReading(workers, **OPTIONS.get(case, {})) if workers else None
    ) as loader:
        items = iter(loader)
        for _ in range(n):
            found = agent.update(next(items))
            metrics.append({name: x for name, x in found.items() if not name.startswith("seconds")})
        state = dict(
            agent=agent.state_dict(),
            learning=states_of(loader.datapipe),
            stream=stream_state(loader.datapipe, chunks),
        )
        return metrics, snapshot((state["agent"], state["learning"])), copy.deepcopy(state)


class Plain:
    "As a learner to `save_checkpoint`."

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state


def stored(state, path):
    "The state, after it was in a file."
    save_checkpoint(
        path,
        Plain(state["agent"]),
        {},
        {},
        pipes=dict(learning=state["learning"], stream=state["stream"]),
    )
    found = load_checkpoint(path)
    return dict(agent=found.agent_state, **found.pipes)


@cache
def uninterrupted(case, workers):
    return trained(case, N, workers)[:2]


def check(case, workers, change=lambda state: state, chunks=lambda: None, then=None):
    whole, weights = uninterrupted(case, workers)
    first, _, state = trained(case, SPLIT, workers, chunks=chunks())
    rest, again, _ = trained(
        case, N - SPLIT, workers if then is None else then, change(state), chunks()
    )
    assert repr(first + rest) == repr(whole)
    assert_same(again, weights)


@pytest.mark.slow_but_one
@pytest.mark.parametrize("case", CASES)
def test_the_rest_is_the_same_in_new_objects(case):
    check(case, workers=int(case == "vtrace"))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["dqn", "dqn-goals", "sac", "td3", "ppo", "rnd"])
@pytest.mark.parametrize("then", [0, 1])
def test_through_a_file_and_with_another_number_of_workers(case, then, tmp_path):
    "The file of the checkpoint holds no row of the memory: these are in chunks."
    path = tmp_path / "checkpoint.safetensors"
    folder = tmp_path / "chunks"
    check(case, 1 - then, lambda state: stored(state, path), lambda: ChunkFolder(folder), then=then)
    assert bool(list(folder.glob("*.chunk"))) == (case in ("dqn", "dqn-goals", "sac", "td3"))
    ChunkFolder(folder).sweep([path])
    check(case, 1 - then, lambda state: stored(state, path), then=then)  # without a folder, it does


def test_a_resumed_training_is_resumed_again(tmp_path):
    whole, weights, _ = trained("dqn", 7, 0)
    metrics = []
    state = None
    for n in (1, 2, 1, 3):
        chunks = ChunkFolder(tmp_path / "chunks")
        more, found, state = trained("dqn", n, 0, state, chunks)
        state = stored(state, tmp_path / "checkpoint")
        chunks.sweep([tmp_path / "checkpoint"])
        metrics += more
    assert repr(metrics) == repr(whole)
    assert_same(found, weights)
