"Taxi in minutes: a table, DQN, double and duelling DQN drive as well as possible; CartPole-v1 with the defaults of the command line."
import gymnasium as gym
import numpy as np
import pytest

from rollpipe.agents import evaluate
from rollpipe.agents.dqn import DQN
from rollpipe.agents.tabular import QLearning, TabularQ
from rollpipe.layers import QPolicy
from rollpipe.pipes import EnvStepper, FragmentCollector
from rollpipe.pipes.replay import Replay

pytestmark = pytest.mark.slow
TAXI = max((name for name in gym.registry if name.startswith('Taxi-v')), key=lambda name: int(name.rpartition('v')[2]))


def best_returns(seed, n=100):
    "Returns `[n]` of the best policy, by value iteration on the environment's own model, in the episodes of `evaluate` with `seed`."
    env = gym.make(TAXI)
    outcomes = [[env.unwrapped.P[s][a][0] for a in range(6)] for s in range(500)]
    after, reward, end = (np.array([[x[i] for x in row] for row in outcomes]) for i in (1, 2, 3))
    q = np.zeros((500, 6))
    for _ in range(500): q = reward + .99 * (1 - end) * q.max(1)[after]
    actor = TabularQ.for_env(TAXI)
    actor.table.data[:] = actor.table.new_tensor(q)
    return evaluate(TAXI, actor, n, seed=seed).returns


def train(agent, stream, most, check=10_000):
    "Update until 200 greedy episodes are all but as good as they can be, or `most` steps are consumed."
    enough, due = best_returns(5, 200).mean() - .03, check
    for batch in stream:
        metrics = agent.update(batch)
        assert metrics['lag'] == 0
        if agent.steps < due: continue
        due += check
        if agent.steps >= most or evaluate(TAXI, agent.actor, 200, seed=5).mean >= enough: break
    stream.close()


def taxi_table(seed):
    actor = TabularQ.for_env(TAXI)
    agent = QLearning(actor, lr=.9, gamma=.9, eps_end=.05, eps_steps=50_000)
    return agent, FragmentCollector(EnvStepper(TAXI, actor, 32, seed=seed), 8)


def taxi_network(seed, duelling=False, **options):
    actor = QPolicy.for_env(TAXI, hidden=(64,), duelling=duelling, seed=seed)
    agent = DQN(actor, lr=1e-2, gamma=.9, huber=None, target_every=50, eps_end=.05, eps_steps=50_000, seed=seed, **options)
    fragments = FragmentCollector(EnvStepper(TAXI, actor, 32, seed=seed), 4)
    return agent, Replay(fragments, 50_000, 256, n_batches=4, warmup=1000, prioritized=True, seed=seed)


KINDS = dict(table=taxi_table, dqn=lambda seed: taxi_network(seed, double=False), double=lambda seed: taxi_network(seed, double=True),
             duelling=lambda seed: taxi_network(seed, duelling=True))


@pytest.mark.parametrize('seed', range(3))
@pytest.mark.parametrize('kind', KINDS)
def test_taxi(kind, seed, capsys):
    agent, stream = KINDS[kind](seed)
    train(agent, iter(stream), 200_000)
    result, best = evaluate(TAXI, agent.actor, 100, seed=30_000 + seed), best_returns(30_000 + seed)
    with capsys.disabled(): print(f'\n{TAXI}, {kind}, seed {seed}, {agent.steps} steps: {result}; best possible {best.mean():.2f}')
    assert len(result.returns) == 100 and result.mean >= 7.5
