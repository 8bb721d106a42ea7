"One set of defaults learns CartPole-v1 and Pendulum-v1 within 100 000 steps: greedy return over 20 fresh episodes."
from time import perf_counter

import pytest

from rollpipe.agents.evaluate import evaluate
from rollpipe.agents.trpo import TRPO
from rollpipe.layers import Critic, MLPPolicy
from rollpipe.pipes import on_policy

pytestmark = pytest.mark.slow
STEPS = 100_000


def train(env, seed):
    "The policy after `STEPS` steps with default settings, and the wall time by phase."
    actor, critic = MLPPolicy.for_env(env, seed=seed), Critic.for_env(env, seed=seed + 1000)
    agent, done, seconds = TRPO(actor, critic, seed=seed), 0, dict(collect=0., policy=0., critic=0.)
    batches = iter(on_policy(env, actor, critic, n_envs=8, n_steps=256, seed=seed))
    while done < STEPS:
        start = perf_counter()
        batch = next(batches)
        seconds['collect'] += perf_counter() - start
        metrics = agent.update(batch)
        seconds['policy'] += metrics['seconds_policy']
        seconds['critic'] += metrics['seconds_critic']
        done += int(batch.valid.sum())
        assert metrics['kl'] <= agent.max_kl and metrics['lag'] == 0
    batches.close()
    return actor, seconds


@pytest.mark.parametrize('seed', range(3))
@pytest.mark.parametrize('env, enough', [('CartPole-v1', 475), ('Pendulum-v1', -200)])
def test_learns(env, enough, seed, capsys):
    actor, seconds = train(env, seed)
    result = evaluate(env, actor, 20, seed=10_000 + seed)
    phases = ', '.join(f'{name} {s:.1f} s' for name, s in seconds.items())
    with capsys.disabled(): print(f'\n{env}, seed {seed}, {STEPS} steps: {result}; {phases}, in all {sum(seconds.values()):.1f} s')
    assert len(result.returns) == 20
    if env == 'Pendulum-v1': assert result.mean > enough
    else: assert result.mean >= enough
