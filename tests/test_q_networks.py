"Q-networks: their values, their choices and their memory."

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from rollpipe.layers import QPolicy


def p_value(counts, expected):
    "The statistic of Pearson's chi-square test."
    x = ((counts - expected) ** 2 / expected).sum()
    return 1 - torch.special.gammainc(torch.tensor((len(counts) - 1) / 2), x / 2).item()


# --- values


def test_duelling_parts_before_the_last_hidden_layer():
    shapes = lambda *names: [[tuple(w.shape) for w in m.parameters() if w.ndim == 2] for m in names]
    policy = QPolicy.for_env("CartPole-v1", hidden=(8, 6), duelling=True)
    assert shapes(policy.trunk, policy.head.value, policy.head.advantage) == [
        [(8, 4)],
        [(6, 8), (1, 6)],
        [(6, 8), (2, 6)],
    ]
    policy = QPolicy.for_env("CartPole-v1", hidden=[8, 6])
    assert shapes(policy.trunk, policy.head) == [[(8, 4), (6, 8)], [(2, 6)]]


# --- choices


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 0.5, 1.0])
def test_how_often_each_action_is_taken(epsilon):
    n, N = 5, 100_000
    actor = QPolicy.for_env(
        (Box(-1, 1, (3,)), Discrete(n, start=-2)), hidden=(), epsilon=epsilon, seed=0
    )
    with torch.no_grad():
        actor.head.last.bias.copy_(torch.tensor([0.0, 1, 9, 2, 3]))
    noise = actor.draw_noise((N, 1), torch.Generator().manual_seed(0))
    act = actor.step(
        None, torch.zeros(N, 1, 3), None, None, None, hx=(), virtual=False, noise=noise
    )[0]
    counts = (act + 2).flatten().bincount(minlength=n).double()
    expected = torch.full((n,), N * epsilon / n, dtype=torch.float64)
    expected[2] += N * (1 - epsilon)
    if epsilon:
        assert p_value(counts, expected) > 1e-3
    else:
        assert torch.equal(counts, expected)


def test_neighbouring_choices_are_independent():
    "Exploration is independent across environments and steps, and independent of the action."
    noise = QPolicy.for_env("CartPole-v1").draw_noise((300, 200), torch.Generator().manual_seed(1))
    explores = (noise[..., 0] < 0.5).double()
    number = noise[..., 1].double()
    assert set(number.unique().tolist()) == {0.0, 1.0}
    for x, y in (
        (explores[1:], explores[:-1]),
        (explores[:, 1:], explores[:, :-1]),
        (explores, number),
        (number[1:], number[:-1]),
    ):
        assert abs(np.corrcoef(x.flatten(), y.flatten())[0, 1]) < 4 / np.sqrt(x.numel())


# --- errors, and a first test of learning
