"""Registers `q_table`, Q-learning with a table, as an algorithm of the command line: `--import benchmarks.q_table`."""

from rollpipe.agents.tabular import QLearning, TabularQ
from rollpipe.pipes.recipes import rollouts
from rollpipe.settings.algorithms import ALGORITHMS, Algorithm


def q_table(actor, *, lr=0.9, gamma=0.9, eps_end=0.05, eps_steps=50_000, seed=0):
    "`QLearning` with the signature that the registry needs. It draws nothing at random, so it ignores the seed."
    return QLearning(actor, lr=lr, gamma=gamma, eps_end=eps_end, eps_steps=eps_steps)


ALGORITHMS["q_table"] = Algorithm(q_table, rollouts, TabularQ, defaults=dict(n_envs=32, n_steps=8))
