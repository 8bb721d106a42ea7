"Options of learners: each learner has the options and defaults that it always had, and each option one meaning."

import inspect
from dataclasses import make_dataclass

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from rollpipe.agents.gradient_learner import ActorCriticLearner
from rollpipe.agents.intrinsic import Distillation, Novelty
from rollpipe.agents.learner import Learner
from rollpipe.agents.off_policy.q_learner import DQN
from rollpipe.agents.shared_options import (
    ByAdam,
    DecayingEpsilon,
    Discounted,
    EntropyBonus,
    ScaledAdvantages,
    check_options,
    meanings,
)
from rollpipe.agents.tabular import QLearning
from rollpipe.layers.policies import UnitBox
from rollpipe.layers.q_networks import QPolicy
from rollpipe.pipes.data.errors import DataError
from rollpipe.pipes.data.nested import first_difference
from rollpipe.settings.algorithms import ALGORITHMS, options_for

NATURAL = dict(
    damping=0.1,
    cg_iters=10,
    cg_gain=0.0,
    fvp_subsample=1.0,
    precondition="auto",
    normalize_adv=True,
    critic_lr=1e-3,
    critic_epochs=4,
    decay_steps=0,
)
ACTIONS = dict(
    tau=0.005,
    multi_step=1,
    random_steps=1000,
    beta_steps=None,
    gamma=0.99,
    critic_lr=None,
    max_grad_norm=None,
)
FROM_DATA = {name: x for name, x in ACTIONS.items() if name != "random_steps"}
DEFAULTS = dict(
    trpo=dict(max_kl=0.01, backtrack=0.8, max_backtracks=10, accept_ratio=0.1, **NATURAL),
    npg=dict(max_kl=0.01, lr=None, **NATURAL),
    reinforce=dict(
        epochs=1,
        c_rho=1.0,
        c_entropy=0.01,
        normalize_adv=True,
        lr=5e-3,
        critic_lr=1e-3,
        critic_epochs=4,
        max_grad_norm=0.5,
        decay_steps=0,
    ),
    a2c=dict(
        c_value=0.5,
        c_entropy=0.0,
        normalize_adv=False,
        lr=1e-3,
        lr_kl=None,
        critic_lr=1e-2,
        max_grad_norm=0.5,
        decay_steps=0,
    ),
    ppo=dict(
        epochs=10,
        minibatch=256,
        clip=0.2,
        clip_value=None,
        target_kl=None,
        c_value=0.5,
        c_entropy=0.0,
        normalize_adv="batch",
        lr=1e-3,
        lr_kl=None,
        critic_lr=None,
        max_grad_norm=0.5,
        decay_steps=0,
    ),
    vtrace=dict(
        gamma=0.99,
        lam=1.0,
        rho_clip=1.0,
        c_clip=1.0,
        c_value=0.5,
        c_entropy=0.0,
        lr=5e-4,
        critic_lr=1e-2,
        max_grad_norm=0.5,
        decay_steps=0,
    ),
    dqn=dict(
        lr=1e-3,
        gamma=0.99,
        double=True,
        multi_step=1,
        burn_in=0,
        huber=1.0,
        target_every=200,
        tau=None,
        max_grad_norm=10.0,
        eps_start=1.0,
        eps_end=0.05,
        eps_steps=20_000,
        beta_steps=None,
        eta=0.9,
        decay_steps=0,
    ),
    qr_dqn=dict(
        lr=5e-4,
        gamma=0.99,
        double=True,
        multi_step=1,
        burn_in=0,
        huber=1.0,
        target_every=200,
        tau=None,
        max_grad_norm=10.0,
        eps_start=1.0,
        eps_end=0.05,
        eps_steps=20_000,
        beta_steps=None,
        eta=0.9,
        decay_steps=0,
    ),
    sac=dict(temperature=None, first_temperature=1.0, target_entropy=None, lr=3e-4, **ACTIONS),
    crossq=dict(
        temperature=None,
        first_temperature=1.0,
        target_entropy=None,
        policy_every=3,
        beta1=0.5,
        lr=1e-3,
        **{name: x for name, x in ACTIONS.items() if name != "tau"},
    ),
    td3=dict(smoothing=0.2, smoothing_limit=0.5, policy_every=2, lr=1e-3, **ACTIONS),
    ddpg=dict(lr=1e-3, **ACTIONS),
    bc=dict(lr=1e-3, max_grad_norm=None, decay_steps=0),
    iql=dict(expectile=0.7, beta=3.0, max_weight=100.0, decay_steps=0, lr=3e-4, **FROM_DATA),
    td3bc=dict(alpha=2.5, smoothing=0.2, smoothing_limit=0.5, policy_every=2, lr=3e-4, **FROM_DATA),
)
# what another learner calls by the same name
OWN_MEANING = dict(
    ppo={"normalize_adv"}, npg={"lr", "critic_lr"}, trpo={"critic_lr"}, iql={"decay_steps"}
)
TOLD = {
    name: text
    for owner in (
        Discounted,
        ByAdam,
        EntropyBonus,
        ScaledAdvantages,
        DecayingEpsilon,
        Learner,
        ActorCriticLearner,
    )
    for name, text in meanings(owner).items()
    if name not in ("actor", "critic")
}
SHARED = TOLD.keys()


def learner_options(algorithm):
    return {o.param: o for o in options_for(algorithm) if o.part == "learner"}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_names_and_defaults_have_not_changed(algorithm):
    found = {name: option.default for name, option in learner_options(algorithm).items()}
    expected = dict(DEFAULTS[algorithm], average_policy=0)
    assert found == expected
    assert {name: type(x) for name, x in found.items()} == {
        name: type(x) for name, x in expected.items()
    }


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_signature_shows_every_option(algorithm):
    parameters = inspect.signature(ALGORITHMS[algorithm].learner).parameters
    assert set(parameters) - {"actor", "critic"} == DEFAULTS[algorithm].keys() | {
        "seed",
        "average_policy",
    }
    assert all(
        p.kind is p.KEYWORD_ONLY and p.annotation is not p.empty
        for p in parameters.values()
        if p.name not in ("actor", "critic")
    )


def test_an_option_means_the_same_everywhere():
    assert len(SHARED) == 14 and all(TOLD.values())
    for algorithm in ALGORITHMS:
        for name, option in learner_options(algorithm).items():
            assert option.help, (algorithm, name)
            if name in SHARED:
                assert (option.help == TOLD[name]) == (
                    name not in OWN_MEANING.get(algorithm, ())
                ), (algorithm, name)


class Actor(nn.Module):
    "Weights with whatever a learner may need of an actor."

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(2, 2))
        self.register_buffer("epsilon", torch.tensor(1.0))
        self.register_buffer("is_random", torch.tensor(True))
        self.box = UnitBox(Box(-1, 1))
        for name in (
            "replay",
            "params",
            "dist",
            "distribution",
            "values",
            "quantiles",
            "sample",
            "act",
            "by_batch",
        ):
            setattr(self, name, None)


def learner_of(cls, **options):
    "A learner, with a critic if it needs one."
    critic = inspect.signature(cls).parameters.get("critic")
    needs_critic = critic is not None and critic.default is critic.empty
    critics = [nn.Linear(1, 1)] * needs_critic
    for x in critics:
        x.value = x.by_batch = None  # what some learners need
    return cls(Actor(), *critics, **options)


@pytest.mark.parametrize("cls", [*(a.learner for a in ALGORITHMS.values()), QLearning])
def test_options_that_a_learner_does_not_have_are_refused(cls):
    taken = inspect.signature(cls).parameters
    for name in sorted(SHARED - taken.keys()) + ["no_option"]:
        with pytest.raises(TypeError, match=name):
            learner_of(cls, **{name: 1.0})


@pytest.mark.parametrize("cls", [*(a.learner for a in ALGORITHMS.values()), QLearning])
def test_options_reach_the_learner(cls):
    names = (SHARED & inspect.signature(cls).parameters.keys()) - {"seed", "normalize_adv"}
    integers = ("critic_epochs", "eps_steps", "average_policy")
    values = {name: 3 if name in integers else 0.25 for name in names}
    agent = learner_of(cls, **values)
    assert {name: getattr(agent, name) for name in values} == values


UNIT = {
    name: owner
    for owner in (Discounted, ByAdam, EntropyBonus, DecayingEpsilon)
    for name in owner.__dataclass_fields__
}


@given(st.dictionaries(st.sampled_from(sorted(UNIT)), st.floats(0, 1), min_size=1), st.data())
def test_another_default_keeps_the_range_of_the_base_class(defaults, data):
    "`make_dataclass` states the defaults as a learner does: the fields have no range of their own."
    bases = tuple(dict.fromkeys(UNIT[name] for name in defaults))
    cls = make_dataclass(
        "Mine",
        [(name, float, default) for name, default in defaults.items()],
        bases=bases,
        kw_only=True,
    )
    chosen = data.draw(
        st.fixed_dictionaries({}, optional={name: st.floats(0, 1) for name in defaults})
    )
    made = cls(**chosen)
    check_options(made)
    assert {name: getattr(made, name) for name in defaults} == defaults | chosen
    for name in defaults:
        with pytest.raises(DataError, match=f"Mine.*{name}|{name}.*Mine"):
            check_options(cls(**{name: -1.0}))


def test_numbers_of_numpy_are_taken_as_those_of_python():
    "torch refuses integers of numpy as seeds, and numpy warns where a float32 is compared with a number beyond its range."
    spaces = Box(-1, 1, (2,)), Discrete(2)
    policies = [QPolicy.for_env(spaces, seed=kind(3)) for kind in (int, np.int64)]
    made = [
        DQN(policy, seed=kind(3), burn_in=kind(2), lr=np.float32(0.25))
        for policy, kind in zip(policies, (int, np.int64))
    ]
    assert (made[1].burn_in, made[1].seed, made[1].lr) == (2, 3, 0.25) and type(
        made[1].burn_in
    ) is int
    assert first_difference(*(agent.state_dict() for agent in made)) is None
    assert (
        Novelty(
            Distillation.for_env(spaces, seed=np.int64(1)), seed=np.int64(3)
        ).generator.initial_seed()
        == 3
    )


@pytest.mark.parametrize("name", ["trpo", "npg"])
def test_a_learner_that_needs_a_learning_rate_of_the_critic_does_not_offer_none(name):
    option = next(o for o in options_for(name) if o.name == "critic_lr")
    assert (
        option.kinds == ("float", "schedule")
        and "None" not in option.help
        and option.default == 1e-3
    )
    assert "None" in next(o for o in options_for("ppo") if o.name == "critic_lr").kinds
