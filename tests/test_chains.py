"The environments of known optimum: their formulas against dynamic programming and play, and what is computed and learned on them."

from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import Acts

from rollpipe.agents.policy_gradient import PPO
from rollpipe.agents.tabular import QLearning, TabularQ
from rollpipe.layers import Critic, GaussianPolicy
from rollpipe.pipes import (
    AdvantageBuffer,
    DataError,
    EnvStepper,
    FragmentCollector,
    NStep,
    StepMerger,
    on_policy,
    returns,
)
from rollpipe.pipes.batches import values
from rollpipe.pipes.steps import Steps
from rollpipe.testing import NarrowPath, Steering, check_env

fast = settings(deadline=None, max_examples=40)
paths = dict(
    length=st.integers(1, 9), cost=st.floats(0, 0.99), gamma=st.sampled_from([0.0, 0.3, 0.9, 1.0])
)


# --- the formulas


def outcome(path, place, action):
    "(reward, place, terminated), by playing one step."
    path.reset()
    path.place = place
    after, reward, terminated, truncated, _ = path.step(action)
    assert not truncated
    return reward, after, terminated


def swept(path, gamma, choose):
    "Values of all places by dynamic programming from the end; `choose` makes one value of the two actions' values."
    v = np.zeros(path.length + 1)
    for place in reversed(range(path.length)):
        steps = [outcome(path, place, action) for action in (0, 1)]
        v[place] = choose(
            *(reward + gamma * (not terminated) * v[after] for reward, after, terminated in steps)
        )
    return v


@fast
@given(**paths, p=st.floats(0, 1))
def test_values_of_the_path_against_dynamic_programming(length, cost, gamma, p):
    path = NarrowPath(length, cost)
    places = np.arange(length + 1)
    np.testing.assert_allclose(path.value(places, gamma), swept(path, gamma, max), atol=1e-9)
    np.testing.assert_allclose(
        path.value(places, gamma, p),
        swept(path, gamma, lambda stop, go: (1 - p) * stop + p * go),
        atol=1e-9,
    )


def test_a_random_policy_hardly_ever_gets_to_the_end():
    assert NarrowPath(10, cost=0.0).value(0, p=0.5) == 2.0**-10
    assert NarrowPath(10).value(0) == pytest.approx(0.99) and NarrowPath(10).value(0, p=0.5) < 0


@fast
@given(effort=st.floats(0.1, 10), gamma=st.sampled_from([0.0, 0.5, 0.99, 1.0]))
def test_the_best_gain_against_riccati_iteration(effort, gamma):
    p = 0.0
    for _ in range(3000):
        p = 1 + gamma * p * effort / (effort + gamma * p)
    env = Steering(effort)
    assert env.best_gain(gamma) == pytest.approx(gamma * p / (effort + gamma * p), rel=1e-6)
    assert env.value(np.array([1.0]), gamma) == pytest.approx(-p, rel=1e-6)
    assert 0 <= env.best_gain(gamma) < 1  # so no best action is beyond the limits


def played(env, x, gamma, gain):
    "Discounted return from `x` of the policy a = -gain x, by playing until nothing more counts."
    env.reset()
    env.x, total = x, 0.0
    for t in range(400):
        total += gamma**t * env.step([-gain * env.x])[1]
    return total


@fast
@given(
    effort=st.floats(0.1, 10),
    gamma=st.sampled_from([0.0, 0.5, 0.99, 1.0]),
    gain=st.floats(0.05, 0.99),
    x=st.floats(-1, 1),
)
def test_values_of_steering_against_play(effort, gamma, gain, x):
    env = Steering(effort)
    obs = np.array([x])
    assert env.value(obs, gamma, gain) == pytest.approx(
        played(env, x, gamma, gain), rel=1e-6, abs=1e-9
    )
    assert env.value(obs, gamma) == pytest.approx(
        played(env, x, gamma, env.best_gain(gamma)), rel=1e-6, abs=1e-9
    )
    assert env.value(obs, gamma, gain) <= env.value(obs, gamma) + 1e-9


def test_pushes_are_limited_and_episodes_are_cut_off():
    env = Steering(effort=1.0, max_steps=2)
    env.reset(seed=0)
    env.x = 3.0
    assert (
        env.step([-9.0])[1:4] == (-10.0, False, False)
        and env.step([1.0])[1:4] == (-5.0, False, True)
        and env.x == 3.0
    )


def test_tensors_and_arrays_have_the_same_values():
    places = torch.arange(8).reshape(4, 2)
    x = torch.linspace(-2, 2, 6, dtype=torch.float64).reshape(3, 2, 1)
    for value, obs in ((NarrowPath(7).value, places), (Steering().value, x)):
        for args in ((), (0.9,), (0.9, 0.4)):
            out = value(obs, *args)
            assert isinstance(out, torch.Tensor) and out.shape == (
                obs.shape if obs is places else obs.shape[:-1]
            )
            np.testing.assert_allclose(out.numpy(), value(obs.numpy(), *args), rtol=1e-5)


@pytest.mark.parametrize(
    "make, message",
    [
        (
            lambda: NarrowPath(0),
            "NarrowPath: out of range. Expected an integer length >= 1, got length=0",
        ),
        (
            lambda: NarrowPath(cost=1.0),
            "NarrowPath: out of range. Expected 0 <= cost < 1, got cost=1.0",
        ),
        (
            lambda: Steering(effort=-1.0),
            "Steering: out of range. Expected effort > 0, got effort=-1.0",
        ),
        (lambda: Steering(max_steps=0), "an integer max_steps >= 1"),
        (
            lambda: Steering().value(np.zeros(1), gain=2.0),
            r"gain: infinite return. Expected gamma \(1 - gain\)\^2 < 1, got gain=2.0",
        ),
    ],
)
def test_bad_arguments_are_named(make, message):
    with pytest.raises(DataError, match=message):
        make()


@pytest.mark.parametrize(
    "env", [NarrowPath, Steering, lambda: NarrowPath(1), lambda: Steering(0.1, 1)]
)
def test_the_chains_are_sound_environments(env):
    assert check_env(env) == []


# --- what the pipes compute on them


CHAINS = {
    "path": (lambda: NarrowPath(5), Acts(1), lambda obs: NarrowPath(5).value(obs, 0.9).float()),
    "steering": (
        lambda: Steering(max_steps=5),
        Acts(lambda x: -0.3 * x.obs),
        lambda obs: Steering().value(obs, 0.9, 0.3),
    ),
}


def fragments(name, n_steps=33):
    make, actor, critic = CHAINS[name]
    return FragmentCollector(EnvStepper(make, actor, 3, seed=0), n_steps), critic


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
def test_true_values_have_no_errors(name, lam):
    "Over terminations and truncations: TD errors and advantages are 0, and every return is the value."
    source, critic = fragments(name)
    f = next(iter(AdvantageBuffer(source, critic, 0.9, lam)))
    v_t, v_tp1 = values(f, critic)
    assert f.state.fin[1:-1].any() and f.term.any() == (name == "path")
    torch.testing.assert_close(f.adv, torch.zeros_like(f.adv), rtol=0, atol=1e-5)
    torch.testing.assert_close(f.ret, v_t, rtol=0, atol=1e-5)
    discount = 0.9 * ~f.term[1:]
    cut = f.state.fin[1:]
    out = returns.vtrace(f.state.rew[1:], v_t, v_tp1, discount, 1.0, lam, cut=cut)
    torch.testing.assert_close(out.vs, v_t, rtol=0, atol=1e-5)
    whole = returns.discounted_returns(f.state.rew[1:], discount, v_tp1[-1], cut, v_tp1)
    torch.testing.assert_close(whole, v_t, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("n", [1, 3, 8])
def test_n_step_targets_are_the_true_values(name, n):
    source, critic = fragments(name)
    s = next(iter(NStep(source, n, 0.9)))
    v = critic(s.fragment.state.obs)
    torch.testing.assert_close(s.target(v, critic(s.fragment.final.obs)), v[:-1], rtol=0, atol=1e-5)
    for x in islice(StepMerger(Steps(source), n, 0.9), 60):
        torch.testing.assert_close(
            x.reward + x.discount * critic(x.next_state), critic(x.state), rtol=0, atol=1e-5
        )


def test_a_limit_that_is_taken_for_an_end_is_noticed():
    "With the truncations as terminations the same test fails: it can."
    source, critic = fragments("steering")
    f = next(iter(source))
    v_t, v_tp1 = values(f, critic)
    ends = f.state.fin[1:]
    wrong = returns.td_errors(f.state.rew[1:], v_t, v_tp1, 0.9 * ~ends)
    assert ends.any() and wrong[ends].abs().max() > 0.01 and wrong[~ends].abs().max() < 1e-5


# --- learning, in seconds


@pytest.mark.slow_but_one
@pytest.mark.parametrize("seed", range(2))
def test_a_table_learns_the_best_values_of_the_path(seed):
    "From actions at random: each entry is the reward and the discounted best value of the place reached."
    actor = TabularQ.for_env(NarrowPath)
    agent = QLearning(actor, lr=0.5, gamma=0.9, eps_start=1.0, eps_end=1.0)
    for batch in islice(FragmentCollector(EnvStepper(NarrowPath, actor, 16, seed=seed), 8), 150):
        agent.update(batch)
    with torch.no_grad():
        q = actor.q(torch.arange(6)[None], None, None, None, hx=None)[0][0]
    path = NarrowPath()
    expected = [
        [
            outcome(path, place, a)[0]
            + 0.9 * (not outcome(path, place, a)[2]) * path.value(outcome(path, place, a)[1], 0.9)
            for a in (0, 1)
        ]
        for place in range(6)
    ]
    torch.testing.assert_close(q, torch.tensor(expected), rtol=0, atol=1e-3)


def regret(actor):
    "What the greedy policy earns less than the best one, in the mean over first positions."
    env = Steering()
    x = torch.linspace(-1, 1, 21)[None, :, None]
    total = 0.0
    best = env.value(x).mean()
    fin = torch.zeros(1, 21, dtype=torch.bool)
    for _ in range(env.max_steps):
        with torch.no_grad():
            a = actor.eval()(x, None, None, fin, hx=None, stepno=None, virtual=False)[0].clamp(
                -1, 1
            )
        total = total - (x**2 + env.effort * a**2).mean()
        x = x + a
    return float(best - total)


@pytest.mark.slow
def test_ppo_steers_all_but_perfectly():
    actor = GaussianPolicy.for_env(Steering, hidden=(16,), seed=0)
    critic = Critic.for_env(Steering, hidden=(16,), seed=0)
    agent = PPO(actor, critic)
    before = regret(actor)
    for batch in islice(on_policy(Steering, actor, critic, n_envs=16, n_steps=64, seed=0), 30):
        agent.update(batch)
    assert before > 3 and 0 <= regret(actor) < 0.05
