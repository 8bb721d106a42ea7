"To recall a cue after 20 steps takes a memory: recurrent TRPO learns it, feed-forward TRPO answers by chance."
from itertools import islice
from time import perf_counter

import pytest
from toys import Recall

from rollpipe.agents.evaluate import evaluate
from rollpipe.agents.trpo import TRPO
from rollpipe.layers import Critic, MLPPolicy, RecurrentPolicy
from rollpipe.pipes import on_policy

pytestmark = pytest.mark.slow
UPDATES, SEED = 150, 0


def train(actor):
    "The share of right answers in 200 fresh episodes after `UPDATES` batches of 32 environments with 3 episodes each."
    critic = Critic.for_env(Recall, hidden=(32,), normalize=False, seed=SEED + 1)
    agent = TRPO(actor, critic, seed=SEED)
    # the answer alone is rewarded: longer advantage estimates would only add the noise of later rows to earlier ones
    batches = iter(on_policy(Recall, actor, critic, n_envs=32, n_steps=63, gamma=0.9, lam=0., seed=SEED))
    for batch in islice(batches, UPDATES): assert agent.update(batch)['kl'] <= agent.max_kl
    batches.close()
    return (evaluate(Recall, actor, 200, seed=1000 + SEED).mean + 1) / 2


@pytest.mark.parametrize('kind', ('recurrent', 'feed-forward'))
def test_memory(kind, capsys):
    start = perf_counter()
    if kind == 'recurrent': actor = RecurrentPolicy.for_env(Recall, hidden=(32,), memory=32, normalize=False, seed=SEED)
    else: actor = MLPPolicy.for_env(Recall, normalize=False, seed=SEED)
    right = train(actor)
    with capsys.disabled(): print(f'\n{kind}: {right:.0%} right after {UPDATES} updates, {perf_counter() - start:.0f} s')
    assert right > .9 if kind == 'recurrent' else right < .4
