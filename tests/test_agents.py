"What all learners of policies promise: metrics, lag, resuming bit for bit, what does not count, memory, shared trunks."

import copy
import itertools

import pytest
import torch
from random_fragments import Shared
from torch import nn

from rollpipe.agents.metrics import METRICS, check_metrics
from rollpipe.agents.natural_gradient import NPG, TRPO
from rollpipe.agents.offline import BC
from rollpipe.agents.policy_gradient import A2C, PPO, REINFORCE, VTrace
from rollpipe.layers import Critic, MemoryCritic, MLPPolicy, RecurrentPolicy
from rollpipe.layers.policies import SharedPolicy
from rollpipe.pipes import nested, on_policy, rollouts
from rollpipe.pipes.data.errors import DataError
from rollpipe.pipes.data.fragment import Fragment
from rollpipe.pipes.data.fragment_ops import columns
from rollpipe.pipes.graph.modules import bump_version, version_of

SMALL = dict(PPO=dict(epochs=2, minibatch=64), NPG=dict(fvp_subsample=0.5))
ALL = (REINFORCE, A2C, PPO, VTrace, TRPO, NPG)
GRADIENT = (REINFORCE, A2C, PPO, VTrace)
OF_THE_CRITIC = dict(hidden=(8,), seed=1)


def networks(env="CartPole-v1", memory=False):
    if not memory:
        return MLPPolicy.for_env(env, hidden=(8,), seed=0), Critic.for_env(env, **OF_THE_CRITIC)
    actor = RecurrentPolicy.for_env(env, hidden=(8,), memory=6, past=True, report=True, seed=0)
    return actor, MemoryCritic.for_env(env, memory=6, **OF_THE_CRITIC)


def batches(cls, env, actor, critic, n_steps=24, **kwargs):
    "An iterator of batches as the learner wants them."
    common = dict(n_envs=4, n_steps=n_steps, seed=0, **kwargs)
    return iter(
        rollouts(env, actor, **common) if cls is VTrace else on_policy(env, actor, critic, **common)
    )


def make(cls, actor, critic=None, **kwargs):
    return cls(actor, critic, **SMALL.get(cls.__name__, {}), **kwargs)


def weights(agent):
    return [
        x.clone()
        for m in (agent.actor, agent.critic)
        if m is not None
        for x in m.state_dict().values()
    ]


def changing(module):
    "Weights and normalisers, without constants."
    return {
        name: x
        for name, x in module.state_dict().items()
        if not name.endswith(("low", "high", "center", "half_range"))
    }


@pytest.mark.slow_but_one
@pytest.mark.parametrize("memory", [False, True], ids=["mlp", "memory"])
@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
@pytest.mark.parametrize("cls", ALL)
def test_an_update_moves_everything_and_says_how(cls, env, memory):
    actor, critic = networks(env, memory)
    agent = make(cls, actor, critic)
    stream = batches(cls, env, actor, critic)
    for i in range(2):
        before = copy.deepcopy([changing(actor), changing(critic)])
        m = agent.update(next(stream))
        assert (
            set(m) <= set(METRICS)
            and check_metrics(m) == m
            and all(isinstance(x, (int, float)) for x in m.values())
        ), m
        assert m["lag"] == 0 and version_of(actor) == i + 1 and version_of(critic) == i + 1
    stream.close()
    for old, new in zip(before, (changing(actor), changing(critic))):
        assert "obs_norm.mean" in new and not [
            name for name in new if torch.equal(old[name], new[name])
        ]


@pytest.mark.parametrize("cls", ALL)
def test_lag_is_reported_and_harmless(cls):
    actor, critic = networks()
    agent = make(cls, actor, critic)
    batch = next(batches(cls, "CartPole-v1", actor, critic))
    bump_version(actor, to=3)
    two = batch._replace(version=torch.tensor([0, 3, 2, 3]))
    assert agent.update(two)["lag"] == 3 and agent.update(two)["lag"] == 4
    assert agent.update(two._replace(version=None))["lag"] == 0
    assert all(x.isfinite().all() for x in weights(agent))


@pytest.mark.slow_but_one
@pytest.mark.parametrize("memory", [False, True], ids=["mlp", "memory"])
@pytest.mark.parametrize("cls", ALL)
def test_a_restored_learner_goes_on_bit_for_bit(cls, memory):
    "TRPO and NPG also where nobody asks for gradients. The batch and the global random state are left alone."
    first, second = (make(cls, *networks(memory=memory), seed=s) for s in (3, 4))
    stream = batches(cls, "CartPole-v1", first.actor, first.critic)
    one, two, three = (next(stream) for _ in range(3))
    first.update(one), first.update(two)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    copied = copy.deepcopy(three)
    state = torch.get_rng_state()
    a = first.update(three)
    with torch.set_grad_enabled(cls in GRADIENT):
        b = second.update(three)
    for x, y in zip(nested.leaves(copied), nested.leaves(three)):
        torch.testing.assert_close(x, y, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert {k: v for k, v in a.items() if "seconds" not in k} == {
        k: v for k, v in b.items() if "seconds" not in k
    }
    assert all(torch.equal(p, q) for p, q in zip(weights(first), weights(second)))
    assert version_of(first.actor) == version_of(second.actor) == 3


def spoiled(f: Fragment) -> Fragment:
    "Environment 1 rests from the start: nothing in its rows means anything."

    def nonsense(x):
        x = x.clone()
        x[:, 1] = 77 if x.is_floating_point() else 0
        return x

    state, actor = nested.map(nonsense, (f.state._replace(fin=None), f.actor))
    fin = f.state.fin.clone()
    valid = f.valid.clone()
    term = f.term.clone()
    fin[:, 1] = True
    valid[:, 1] = False
    term[:, 1] = False
    adv, ret = nested.map(nonsense, (f.adv, f.ret))
    keep = f.final.b != 1
    return f._replace(
        state=state._replace(fin=fin),
        actor=actor,
        valid=valid,
        term=term,
        adv=adv,
        ret=ret,
        final=nested.getitem(f.final, keep),
    )


def without(f: Fragment, b: int) -> Fragment:
    "The same fragment without the column `b`."
    return columns(f, torch.tensor([i for i in range(f.n_envs) if i != b]))


@pytest.mark.parametrize("cls", GRADIENT)
@pytest.mark.parametrize("memory", [False, True], ids=["mlp", "memory"])
def test_rows_that_are_no_step_do_not_count(cls, memory):
    actor, critic = networks(memory=memory)
    options = (
        dict(epochs=1, minibatch=10**6)
        if cls is PPO
        else dict(critic_epochs=1)
        if cls is REINFORCE
        else {}
    )
    batch = next(batches(cls, "CartPole-v1", actor, critic))
    states = []
    for f in (spoiled(batch), without(batch, 1)):
        agent = cls(copy.deepcopy(actor), copy.deepcopy(critic), **options)
        m = agent.update(f)
        states.append(weights(agent) + [torch.tensor(m["entropy"])])
    for p, q in zip(*states):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("cls", [A2C, PPO, VTrace])
def test_a_policy_may_judge_itself(cls):
    actor = Shared.for_env("CartPole-v1", hidden=(8,), seed=0)
    agent = make(cls, actor)
    stream = batches(cls, "CartPole-v1", actor, None)
    before = actor.judge.weight.detach().clone()
    metrics = agent.update(next(stream))
    assert metrics["loss_value"] > 0 and not torch.equal(before, actor.judge.weight)
    second = make(cls, Shared.for_env("CartPole-v1", hidden=(8,), seed=1))
    second.load_state_dict(copy.deepcopy(agent.state_dict()))
    f = next(stream)
    agent.update(f), second.update(f)
    assert all(torch.equal(p, q) for p, q in zip(weights(agent), weights(second)))


@pytest.mark.parametrize("cls", [TRPO, NPG, REINFORCE])
def test_values_that_nobody_would_fit_are_refused(cls):
    actor = SharedPolicy.for_env("CartPole-v1", hidden=(8,))
    critic = networks()[1]
    with pytest.raises(
        DataError,
        match=f"leaf actor: {cls.__name__} would never fit the values .*Expected a critic",
    ):
        make(cls, actor)
    make(cls, actor, critic), make(PPO, actor)


@pytest.mark.parametrize("cls", ALL)
def test_what_is_missing_is_named(cls):
    actor, critic = networks()
    agent = make(cls, actor, critic)
    f = next(batches(cls, "CartPole-v1", actor, critic))
    wrong = [
        (f._replace(valid=f.valid & False), "no valid row"),
        (f._replace(actor={}), "logp"),
        (f._replace(actor=f.adv), "logp"),
        (f._replace(state=f.state._replace(obs=f.state.obs * float("nan"))), "obs"),
        (f._replace(state=f.state._replace(rew=f.state.rew / 0)), "rew"),
    ]
    if cls is not VTrace:
        wrong += [
            (f._replace(adv=None), "AdvantageBuffer"),
            (f._replace(ret=None), "ret"),
            (f._replace(adv=f.adv / 0), "adv"),
        ]
    before = weights(agent)
    for batch, name in wrong:
        with pytest.raises(DataError, match=name):
            agent.update(batch)
    assert all(torch.equal(p, q) for p, q in zip(before, weights(agent))) and version_of(actor) == 0


@pytest.mark.parametrize("cls", ALL)
def test_a_policy_with_memory_needs_the_memory_that_acted(cls):
    "Steps of a recording come without it. They ended as `'tuple' object has no attribute 'unbind'`."
    actor, critic = networks(memory=True)
    agent = make(cls, actor, critic)
    f = next(batches(cls, "CartPole-v1", actor, critic))
    for hx in ((), None):
        with pytest.raises(DataError, match="hx: the memory of the policy that acted is not known"):
            agent.update(f._replace(hx=hx))
    agent.update(f)


@pytest.mark.parametrize("cls", [*ALL, BC])
def test_the_memory_of_another_policy_is_refused(cls):
    "Of another size it was an error of torch, and of another kind a `TypeError`."
    actor, critic = networks(memory=True)
    agent = BC(actor) if cls is BC else make(cls, actor, critic)
    f = next(batches(PPO if cls is BC else cls, "CartPole-v1", actor, critic))
    for hx in (f.hx[..., 1:], torch.cat([f.hx, f.hx]), (f.hx, f.hx)):
        with pytest.raises(DataError, match="hx: this is the memory of another policy"):
            agent.update(f._replace(hx=hx))
    agent.update(f)


def with_value(batch, what, value):
    "The batch with `value` in one row that counts."
    t, b = batch.valid.nonzero()[0].tolist()

    def put(x, t):
        x = x.clone()
        x[t, b] = value
        return x

    if what in ("adv", "ret"):
        return batch._replace(**{what: put(getattr(batch, what), t)})
    if what == "logp":
        return batch._replace(actor=dict(batch.actor, logp=put(batch.actor["logp"], t)))
    return batch._replace(
        state=batch.state._replace(**{what: put(getattr(batch.state, what), t + (what != "obs"))})
    )


def numbers(agent):
    "All numbers that a learner keeps: weights, normalisers and the state of its optimiser."
    optimizer = agent.optimizer.state_dict()["state"] if agent.optimizer is not None else {}
    return [*weights(agent), *(x.clone() for state in optimizer.values() for x in state.values())]


@pytest.mark.slow_but_one
@pytest.mark.parametrize(
    "cls, what",
    [
        (cls, what)
        for cls in ALL
        for what in ("obs", "act", "rew", "adv", "ret", "logp")
        if cls is not VTrace or what not in ("adv", "ret")
    ],
)  # it makes its own
def test_numbers_whose_squares_overflow_are_refused_by_name(cls, what):
    actor, critic = networks("Pendulum-v1")
    agent = make(cls, actor, critic)
    stream = batches(cls, "Pendulum-v1", actor, critic)
    agent.update(next(stream))
    batch = next(stream)
    before = numbers(agent)
    for value in (3e38, -1e20, float("inf"), float("nan")):
        with pytest.raises(DataError) as e:
            agent.update(with_value(batch, what, value))
        assert what in e.value.leaf and (
            "too large" in str(e.value) or "non-finite" in str(e.value)
        ), str(e.value)
        for x, y in zip(before, numbers(agent), strict=True):
            assert torch.equal(x, y)
    assert agent.update(batch)["lag"] == 0


def test_observations_that_are_infinite_as_float16_are_refused():
    actor, critic = networks("Pendulum-v1")
    agent = make(PPO, actor, critic)
    batch = next(batches(PPO, "Pendulum-v1", actor, critic))

    def half(batch):
        return batch._replace(
            state=batch.state._replace(obs=batch.state.obs.half())
        )  # as `ObservationCast` does

    with pytest.raises(DataError, match="leaf obs.*non-finite value"):
        agent.update(half(with_value(batch, "obs", 1e5)))
    agent.update(half(with_value(batch, "obs", 6e4)))


@pytest.mark.slow_but_one
@pytest.mark.parametrize("scale", [1e5, 1e10, 1e15, 1e18])
@pytest.mark.parametrize("cls", ALL)
def test_what_a_learner_keeps_stays_finite_whatever_the_rewards(cls, scale):
    actor, critic = networks("Pendulum-v1")
    agent = make(cls, actor, critic, **dict(max_grad_norm=None) if cls in GRADIENT else {})
    for batch in itertools.islice(batches(cls, "Pendulum-v1", actor, critic), 3):
        large = batch._replace(state=batch.state._replace(rew=batch.state.rew * scale))
        if batch.adv is not None:
            large = large._replace(adv=batch.adv * scale, ret=batch.ret * scale)
        try:
            agent.update(large)
        except DataError as e:
            assert "finite" in str(e) or "too large" in str(e)
        assert all(
            x.isfinite().all() for x in numbers(agent) if x.is_floating_point() and x.numel() > 1
        )


@pytest.mark.parametrize("cls", [REINFORCE, TRPO, NPG])
def test_a_critic_whose_error_overflows_keeps_its_weights(cls):
    actor, critic = networks("Pendulum-v1")
    plain = (
        nn.Sequential(critic.encoder, nn.Linear(critic.encoder.n_out, 1), nn.Flatten(-2))
        if hasattr(critic, "encoder")
        else None
    )
    agent = make(cls, actor, plain or critic)
    batch = next(batches(cls, "Pendulum-v1", actor, critic))
    before = [x.clone() for x in agent.critic.parameters()]
    with pytest.raises(DataError, match="leaf critic_loss: the critic's error is not finite"):
        agent.update(
            batch._replace(
                ret=torch.full_like(batch.ret, 1.8e19).where(
                    torch.rand(batch.ret.shape) < 0.5, -torch.tensor(1.8e19)
                )
            )
        )
    assert all(torch.equal(x, y) for x, y in zip(before, agent.critic.parameters()))
