"What learners share: the order of an update, checks of a batch, normalisers told once, and their state."

import copy
import platform
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rollpipe.agents.gradient_learner import ActorCriticLearner, GradientLearner
from rollpipe.agents.learner import Learner
from rollpipe.agents.losses import standardized
from rollpipe.agents.natural_gradient import NPG, TRPO
from rollpipe.agents.off_policy.action_learner import SAC, TD3
from rollpipe.agents.off_policy.crossq import CrossQ
from rollpipe.agents.off_policy.q_learner import DQN, QRDQN
from rollpipe.agents.policy_gradient import A2C, PPO, REINFORCE, VTrace
from rollpipe.agents.tabular import QLearning
from rollpipe.agents.unroll import lag_of, replay_policy
from rollpipe.layers import ActionCritic, Critic, MLPPolicy, SquashedPolicy
from rollpipe.layers.heads import Gaussian
from rollpipe.pipes import on_policy
from rollpipe.pipes.data.errors import ActorError, DataError
from rollpipe.pipes.graph.modules import bump_version, version_of

ENV = "CartPole-v1"


class Part(nn.Module):
    "Weights that count as an actor or a critic."

    def __init__(self, *values, shared=None):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(values, dtype=torch.double))
        self.shared = shared

    def replay(self, fragment):
        raise NotImplementedError

    def total(self):
        return sum((p**2).sum() for p in self.parameters())


class Descent(GradientLearner):
    "The least of an algorithm: raise the log-probability of what had an advantage, and fit the critic."

    def update(self, batch):
        self.check(batch, "adv", "ret", "logp")
        with torch.enable_grad():
            metrics = self.step(-(self.actor.replay(batch)["logp"] * batch.adv)[batch.valid].mean())
        self.tell_actor(batch)
        bump_version(self.actor)
        return self.fit(batch, 2) | metrics | dict(lag=lag_of(batch, self.actor))


def make(seed=0, **kw):
    return Descent(
        MLPPolicy.for_env(ENV, seed=seed), Critic.for_env(ENV, seed=seed), seed=seed, **kw
    )


def batch_for(agent, n_steps=32, share=1.0):
    batch = next(iter(on_policy(ENV, agent.actor, agent.critic, n_envs=4, n_steps=n_steps, seed=0)))
    return batch._replace(
        valid=torch.rand(batch.valid.shape, generator=torch.Generator().manual_seed(0)) < share
    )


def vector(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


# ---- advantages and options


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 2**31 - 1), st.floats(-100, 100))
def test_standardized_is_numpys_over_the_rows_that_count(T, B, seed, shift):
    rng = np.random.default_rng(seed)
    x = rng.normal(shift, 3, (T, B))
    valid = rng.random((T, B)) < 0.7
    valid[0, 0] = True
    got = standardized(torch.from_numpy(x), torch.from_numpy(valid)).numpy()
    kept = x[valid]
    want = (x - kept.mean()) / kept.std() if kept.std() > 1e-6 * np.abs(kept).max() else 0 * x
    np.testing.assert_allclose(got[valid], want[valid], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "learner, kind, critics",
    [
        (DQN, "QPolicy", 0),
        (QRDQN, "QuantilePolicy", 0),
        (QLearning, "TabularQ", 0),
        (SAC, "SquashedPolicy", 1),
        (TD3, "DeterministicPolicy", 1),
        (CrossQ, "RenormPolicy", 1),
    ],
)
def test_a_policy_of_another_algorithm_is_refused_with_the_class_that_fits(learner, kind, critics):
    parts = MLPPolicy.for_env("Pendulum-v1"), *[ActionCritic.for_env("Pendulum-v1")] * critics
    with pytest.raises(ActorError, match=f"Expected a `rollpipe.*{kind}`, got MLPPolicy\\.$"):
        learner(*parts)


def test_a_critic_of_states_alone_is_refused_where_actions_are_valued():
    with pytest.raises(
        DataError, match="SAC needs a critic of actions. Expected an `ActionCritic`, got Critic"
    ):
        SAC(SquashedPolicy.for_env("Pendulum-v1"), Critic.for_env("Pendulum-v1"))


# ---- the order of an update


def phases(cls, names, **kw):
    "The methods `names` in the order in which an update of a subclass of `cls` calls them."
    called = []

    def noting(name):
        def method(self, *args):
            called.append(name)
            return {} if name == "improve" else getattr(super(Noted, self), name)(*args)

        return method

    Noted = type("Noted", (cls,), {name: noting(name) for name in names})
    agent = Noted(MLPPolicy.for_env(ENV, seed=0), Critic.for_env(ENV, seed=0), **kw)
    if cls is Learner:
        agent.optimizer = torch.optim.Adam(agent.critic.parameters())
    metrics = agent.update(batch_for(agent))
    assert version_of(agent.actor) == version_of(agent.critic) == 1 and metrics["lag"] == 0
    return called, metrics


def test_a_critic_is_fitted_after_the_policys_step():
    called, metrics = phases(
        Learner, ["check", "provenance", "improve", "tell_actor", "report", "fit", "tell_critic"]
    )
    assert called == [
        "check",
        "provenance",
        "improve",
        "tell_actor",
        "report",
        "fit",
        "tell_critic",
    ]
    assert metrics.keys() == {
        "lag",
        "critic_loss",
        "explained_variance",
        "seconds_policy",
        "seconds_critic",
    }


@pytest.mark.parametrize("learner", [TRPO, NPG, REINFORCE])
def test_a_critic_with_weights_of_the_policy_is_refused_where_it_is_fitted_alone(learner):
    actor = MLPPolicy.for_env(ENV)
    critic = Critic.for_env(ENV)
    critic.encoder = actor.encoder = nn.Linear(4, 4)
    with pytest.raises(
        DataError,
        match=f"critic.encoder.weight: {learner.__name__}: a step of the critic would change the policy",
    ):
        learner(actor, critic)
    PPO(actor, critic)  # one loss for both
    actor.encoder.requires_grad_(False)
    learner(actor, critic)  # what does not learn may be shared


def test_a_critic_that_shares_the_loss_is_told_before_the_step():
    called, metrics = phases(
        ActorCriticLearner,
        ["check", "provenance", "explained", "tell_critic", "improve", "tell_actor", "count_steps"],
    )
    assert called == [
        "check",
        "provenance",
        "explained",
        "tell_critic",
        "improve",
        "tell_actor",
        "count_steps",
    ]
    assert metrics.keys() == {"lag", "explained_variance", "seconds_update"}


# ---- the batch


# ---- normalisers and the critic


def test_a_shared_normaliser_is_told_once():
    actor = MLPPolicy.for_env(ENV, seed=0)
    critic = Critic.for_env(ENV, seed=0)
    critic.obs_norm = actor.obs_norm
    agent = Descent(actor, critic)
    f = batch_for(agent)
    agent.update(f)
    assert float(actor.obs_norm.count) == f.valid.sum()


def test_modules_without_normalisers_need_none():
    agent = make()
    f = batch_for(agent)
    plain = Learner(Part(1.0), Part(2.0))
    plain.tell_actor(f)
    plain.tell_critic(f)


def test_fit_moves_the_critic_alone_and_reports_what_the_advantages_were_made_with():
    agent = make(lr=1e-2)
    f = batch_for(agent, 128, share=0.8)
    actor = vector(agent.actor)
    critic = vector(agent.critic)
    first = agent.fit(f, 4)
    second = agent.fit(f, 4)
    assert torch.equal(vector(agent.actor), actor) and not torch.equal(vector(agent.critic), critic)
    assert second["critic_loss"] < first["critic_loss"]
    v = (f.ret - f.adv)[f.valid].double().numpy()
    ret = f.ret[f.valid].double().numpy()
    assert first["explained_variance"] == pytest.approx(1 - (ret - v).var() / ret.var(), rel=1e-5)


# ---- state


# ---- rates that fall


class Unsummed(Gaussian):
    def log_prob(self, params, act):
        return super().log_prob(params, act).unsqueeze(-1)


@pytest.mark.parametrize("agent", [TRPO, NPG, PPO, A2C, VTrace, REINFORCE])
def test_a_log_probability_that_is_not_summed_is_refused(agent):
    "With a last dimension of 1 it would be broadcast against the advantages, and the gradient would be rounding noise."
    actor = MLPPolicy.for_env("Pendulum-v1", seed=0)
    critic = Critic.for_env("Pendulum-v1", seed=1)
    actor.dist = Unsummed(shape=(1,))
    batch = next(iter(on_policy("Pendulum-v1", actor, critic, n_envs=3, n_steps=4, seed=0)))
    with pytest.raises(
        DataError, match=r"leaf actor\['logp'\]: .*one number for each action.*\[4, 3\]"
    ):
        agent(actor, critic).update(batch)
    whole = batch._replace(actor={**batch.actor, "logp": batch.actor["logp"].squeeze(-1)})
    with pytest.raises(DataError, match=r"replay\(fragment\)\['logp'\].*\[4, 3\]"):
        replay_policy(whole, actor)


@pytest.mark.parametrize("agent", [PPO, A2C, VTrace])
@pytest.mark.parametrize("rates", [(5e-4, 1e-3), (1e-3, 5e-4), (None, 2e-3), (2e-3, None)])
def test_a_state_is_loaded_by_a_learner_with_another_critic_lr(agent, rates):
    "Equal learning rates share one group of the optimiser. The averages of each parameter stay with it."
    old, new = (
        agent(MLPPolicy.for_env(ENV, seed=0), Critic.for_env(ENV, seed=1), lr=1e-3, critic_lr=rate)
        for rate in rates
    )
    batch = next(iter(on_policy(ENV, old.actor, old.critic, n_envs=4, n_steps=32, seed=0)))
    old.update(batch)
    new.load_state_dict(copy.deepcopy(old.state_dict()))
    lr = {id(p): group["lr"] for group in new.optimizer.param_groups for p in group["params"]}
    for module, other, rate in (
        (old.actor, new.actor, 1e-3),
        (old.critic, new.critic, rates[1] or 1e-3),
    ):
        for p, q in zip(module.parameters(), other.parameters()):
            assert (
                torch.equal(
                    old.optimizer.state[p]["exp_avg_sq"], new.optimizer.state[q]["exp_avg_sq"]
                )
                and lr[id(q)] == rate
            )
    new.update(batch)


def test_a_state_without_a_part_of_the_learner_is_refused():
    fixed, learnt = (
        SAC(
            SquashedPolicy.for_env("Pendulum-v1"),
            ActionCritic.for_env("Pendulum-v1"),
            temperature=x,
        )
        for x in (0.2, None)
    )
    with pytest.raises(DataError, match="leaf temperature: the state lacks a part"):
        learnt.load_state_dict(fixed.state_dict())
    fixed.load_state_dict(learnt.state_dict())
    assert fixed.entropy_weight == torch.tensor(0.2)


MEMORY = """
import resource, sys
import numpy as np
from rollpipe.agents.natural_gradient import TRPO
from rollpipe.layers import MLPPolicy

def of_process(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt, int(open('/proc/self/statm').read().split()[1])
def batch(): [np.ones(2 ** 18) for _ in range(20)]

actor = MLPPolicy.for_env('CartPole-v1')
if sys.argv[1] == 'learner': TRPO(actor)
for _ in range(3): batch()
before, _ = of_process()
for _ in range(5): batch()
faults = of_process()[0] - before
large = np.ones(2 ** 22 * 10)
_, held = of_process()
del large
print(faults, held - of_process()[1])
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has the setting")
def test_memory_of_a_batch_is_kept_and_that_of_a_large_array_returned():
    "Twenty arrays of 2 MiB have 10 240 pages, which the system gives anew for each batch. An array of 320 MiB has 81 920."
    (plain, _), (kept, returned) = (
        [
            *map(
                int,
                subprocess.run(
                    [sys.executable, "-c", MEMORY, kind],
                    text=True,
                    capture_output=True,
                    timeout=120,
                    check=True,
                ).stdout.split(),
            )
        ]
        for kind in ("plain", "learner")
    )
    assert 10 * kept < plain
    assert returned > 81_000
