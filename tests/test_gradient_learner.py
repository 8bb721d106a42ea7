"Steps along a gradient: Adam against its formulas, what is not finite, what is clipped."
import copy
import math

import numpy as np
import pytest
import torch
from test_learner import Part
from torch import nn

from rollpipe.agents.gradient_learner import GradientLearner
from rollpipe.pipes.errors import DataError


@pytest.mark.parametrize('name', ['lr', 'critic_lr', 'max_grad_norm'])
def test_a_gradient_learner_refuses_negative_numbers(name):
    with pytest.raises(DataError, match=name): GradientLearner(Part(1.), **{name: -1.})


def test_steps_are_adams_with_the_gradient_clipped_and_every_parameter_counts_once():
    common = nn.Parameter(torch.tensor([3., -1.], dtype=torch.double))
    actor, critic = Part(1., -2., shared=nn.ParameterList([common])), Part(.5, shared=nn.ParameterList([common]))
    agent = GradientLearner(actor, critic, lr=.1, critic_lr=.02, max_grad_norm=2.)
    assert [id(p) for p in agent.params] == [id(p) for p in (actor.w, common, critic.w)]
    x, rate = np.array([1., -2., 3., -1., .5]), np.array([.1] * 4 + [.02])
    m, v = np.zeros(5), np.zeros(5)
    for k in range(1, 6):
        norm = agent.step(actor.total() + .5 * (critic.w ** 2).sum())
        g = x * [2, 2, 2, 2, 1]
        assert norm == pytest.approx(np.linalg.norm(g))
        g = g * min(1, 2 / np.linalg.norm(g))
        m, v = .9 * m + .1 * g, .999 * v + .001 * g ** 2
        x = x - rate * (m / (1 - .9 ** k)) / (np.sqrt(v / (1 - .999 ** k)) + 1e-8)
        np.testing.assert_allclose(torch.cat([p.detach() for p in agent.params]).numpy(), x, rtol=1e-5)


@pytest.mark.parametrize('loss, word', [(lambda w: w.sum() / 0, 'non-finite loss'), (lambda w: w.sum() * math.nan, 'non-finite loss'),
                                        (lambda w: (w - w.detach()).sum().sqrt(), 'non-finite gradient')])
def test_what_is_not_finite_leaves_parameters_and_optimiser_alone(loss, word):
    actor = Part(1., -2.)
    agent = GradientLearner(actor, lr=.1)
    agent.step(actor.total())
    before = copy.deepcopy(agent.state_dict())
    with pytest.raises(DataError, match=f'surrogate.*{word}|{word}.*surrogate'): agent.step(loss(actor.w), 'surrogate')
    torch.testing.assert_close(agent.state_dict(), before, rtol=0, atol=0)
    assert agent.step(actor.total()) > 0 and torch.isfinite(actor.w).all()


def test_without_a_limit_nothing_is_clipped_and_frozen_parameters_stay():
    actor = Part(300., 400., shared=Part(7.))
    actor.shared.w.requires_grad_(False)
    agent = GradientLearner(actor, max_grad_norm=None)
    assert agent.step(actor.total() / 2) == pytest.approx(500)
    assert actor.w.grad.tolist() == [300, 400]
    assert actor.shared.w.item() == 7 and len(agent.params) == 1
