"Taxi in minutes: a table, DQN, double and duelling DQN drive as well as possible."

import gymnasium as gym
import numpy as np
import pytest
import torch

from rollpipe.agents import evaluate
from rollpipe.agents.off_policy.q_learner import DQN
from rollpipe.agents.tabular import QLearning, TabularQ
from rollpipe.layers import QPolicy
from rollpipe.pipes import EnvStepper, FragmentCollector
from rollpipe.pipes.replay.pipe import Replay

pytestmark = pytest.mark.slow
TAXI = max(
    (name for name in gym.registry if name.startswith("Taxi-v")),
    key=lambda name: int(name.rpartition("v")[2]),
)


class Model:
    "Taxi as tables `[500, 6]`, for what can be computed without playing."

    def __init__(self):
        env = gym.make(TAXI).unwrapped
        outcomes = [[env.P[s][a][0] for a in range(6)] for s in range(500)]
        self.after, self.reward, self.end = (
            np.array([[x[i] for x in row] for row in outcomes]) for i in (1, 2, 3)
        )
        self.begin = env.initial_state_distrib

    def best_q(self, gamma=0.9):
        "By value iteration."
        q = np.zeros((500, 6))
        for _ in range(300):
            q = self.reward + gamma * (1 - self.end) * q.max(1)[self.after]
        return q

    def policy_return(self, q):
        "Expected return of the greedy policy over all states where episodes begin, within 200 steps."
        at = (np.arange(500), q.argmax(1))
        v = np.zeros(500)
        for _ in range(200):
            v = self.reward[at] + (1 - self.end[at]) * v[self.after[at]]
        return float(self.begin @ v)


def train(agent, stream, model, most, check=10_000):
    "Update until the greedy policy is all but the best from every beginning, or `most` steps are consumed; its expected return."
    enough = model.policy_return(model.best_q()) - 0.03
    due = check
    every = torch.arange(500)[None]
    for batch in stream:
        metrics = agent.update(batch)
        assert metrics["lag"] == 0
        if agent.steps < due:
            continue
        due += check
        with torch.no_grad():
            q = agent.actor.q(every, None, None, None, hx=None)[0][0].numpy()
        if agent.steps >= most or model.policy_return(q) >= enough:
            break
    stream.close()
    return model.policy_return(q)


def taxi_table(seed):
    actor = TabularQ.for_env(TAXI)
    agent = QLearning(actor, lr=0.9, gamma=0.9, eps_end=0.05, eps_steps=50_000)
    return agent, FragmentCollector(EnvStepper(TAXI, actor, 32, seed=seed), 8)


def taxi_network(seed, duelling=False, **options):
    actor = QPolicy.for_env(TAXI, hidden=(64,), duelling=duelling, seed=seed)
    agent = DQN(
        actor,
        lr=1e-2,
        gamma=0.9,
        huber=None,
        target_every=50,
        eps_end=0.05,
        eps_steps=50_000,
        seed=seed,
        **options,
    )
    fragments = FragmentCollector(EnvStepper(TAXI, actor, 32, seed=seed), 4)
    return agent, Replay(
        fragments, 50_000, 256, n_batches=4, warmup=1000, prioritized=True, seed=seed
    )


KINDS = dict(
    table=taxi_table,
    dqn=lambda seed: taxi_network(seed, double=False),
    double=lambda seed: taxi_network(seed, double=True),
    duelling=lambda seed: taxi_network(seed, duelling=True),
)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_taxi(kind, seed, capsys):
    agent, stream = KINDS[kind](seed)
    expected = train(agent, iter(stream), Model(), 200_000)
    result = evaluate(TAXI, agent.actor, 100, seed=30_000 + seed)
    with capsys.disabled():
        print(
            f"\n{TAXI}, {kind}, seed {seed}, {agent.steps} steps: {result}; expected, from the model: {expected:.2f}"
        )
    assert len(result.returns) == 100 and result.mean >= 7.5
