"""SAC, CrossQ, TD3 and DDPG: densities, losses and updates against independent computations.

And what happens at the ends of episodes.
"""

import copy
from itertools import islice
from unittest.mock import MagicMock, patch

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from toys import Stepped

from rollpipe.agents import DDPG, SAC, TD3, evaluate
from rollpipe.agents.metrics import check_metrics
from rollpipe.agents.off_policy.action_learner import (
    action_value_loss,
    deterministic_policy_loss,
    smoothed_target,
    soft_policy_loss,
    soft_target,
)
from rollpipe.agents.off_policy.crossq import CrossQ, RenormCritic, RenormPolicy
from rollpipe.agents.offline import IQL, state_value_loss
from rollpipe.agents.td import td_targets
from rollpipe.cli.main import main
from rollpipe.layers import ActionCritic, DeterministicPolicy, MLPPolicy, SquashedPolicy
from rollpipe.layers.critic import StackedMLP
from rollpipe.layers.heads import GaussianParams
from rollpipe.layers.policies import SquashedGaussian, UnitBox
from rollpipe.pipes import DataError, Fragment
from rollpipe.pipes.data.errors import SpaceError
from rollpipe.pipes.data.nested import first_difference
from rollpipe.pipes.recipes import replayed, rollouts
from rollpipe.pipes.replay.memory import ReplayMemory, Sample
from rollpipe.pipes.replay.pipe import Replayed
from rollpipe.settings.config import build, make_config

SPACES = Box(-1, 1, (3,)), Box(np.float32([-1, 2]), np.float32([3, 2.5]))
POLICIES = {
    SAC: SquashedPolicy,
    CrossQ: RenormPolicy,
    TD3: DeterministicPolicy,
    DDPG: DeterministicPolicy,
}
each_algorithm = pytest.mark.parametrize("algorithm", POLICIES)


def small(cls, seed=0, env=SPACES, hidden=(8,), **options):
    return cls.for_env(env, hidden=hidden, seed=seed, **options)


def make(algorithm, env=SPACES, hidden=(8,), n_critics=2, **options):
    critic = RenormCritic if algorithm is CrossQ else ActionCritic
    return algorithm(
        small(POLICIES[algorithm], 0, env, hidden),
        small(critic, 0, env, hidden, n_critics=n_critics),
        **options,
    )


def random_fragment(T=4, B=5, seed=0, spaces=SPACES, invalid=True):
    "Random steps with terminations, truncations and rows that are not valid."
    rng = np.random.default_rng(seed)
    space, low, high = spaces[0], *map(torch.from_numpy, (spaces[1].low, spaces[1].high))

    def floats(*shape):
        return torch.from_numpy(rng.normal(size=shape).astype(np.float32))

    def chance(p):
        return torch.from_numpy(rng.random((T, B)) < p)

    act = low + (high - low) * torch.from_numpy(rng.random((T, B, *spaces[1].shape), np.float32))
    term = chance(0.25)
    cut = chance(0.25)
    valid = chance(0.85) if invalid else torch.ones(T, B, dtype=torch.bool)
    valid[0, 0] = True
    cut = cut & ~term & valid
    return Fragment.from_steps(
        floats(T + 1, B, *space.shape),
        act,
        floats(T, B),
        term,
        cut,
        valid=valid,
        last_obs=floats(int(cut.sum()), *space.shape),
    )


def successor(fragment, t, b):
    "The observation that a step led to."
    final = fragment.final
    at = ((final.t == t) & (final.b == b)).nonzero().flatten().tolist()
    return final.obs[at[0]] if at else fragment.state.obs[t + 1, b]


# --- distribution


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-100, 100), st.floats(0.01, 1000)), min_size=1, max_size=4),
    st.integers(0, 99),
)
def test_density_agrees_with_torch_and_actions_stay_in_bounds(bounds, seed):
    low, width = map(np.float32, zip(*bounds))
    space = Box(low, low + width)
    n = len(bounds)
    dist = SquashedGaussian(UnitBox(space))
    g = torch.Generator().manual_seed(seed)
    mean, log_std, noise, sides = torch.randn(4, 6, n, generator=g)
    params = GaussianParams(mean, log_std - 1)
    act, logp = dist.sample_with_log_prob(params, noise)
    assert all(space.contains(x) for x in act.numpy())
    corner = dist.sample(params, 1e6 * sides.sign())
    assert all(space.contains(x) for x in corner.numpy())

    # The same in float64 by another library, at the same u: the action near a bound does not
    # determine it.
    D = torch.distributions
    normal = D.Normal(mean.double(), params.log_std.double().exp())
    u = normal.mean + normal.stddev * noise.double()
    low, high = (torch.from_numpy(x).double() / 2 for x in (space.low, space.high))
    tanh = D.TanhTransform(cache_size=1)
    scale = D.AffineTransform(high + low, high - low, cache_size=1)
    expected = D.TransformedDistribution(normal, [tanh, scale])
    y = scale(tanh(u))
    torch.testing.assert_close(logp.double(), expected.log_prob(y).sum(-1), rtol=1e-3, atol=1e-2)


def test_density_integrates_to_one_over_the_plane():
    dist = SquashedGaussian(UnitBox(SPACES[1]))
    n = 300
    middle = (torch.arange(n) + 0.5) / n
    grid = torch.stack(torch.meshgrid(-1 + 4 * middle, 2 + 0.5 * middle, indexing="ij"), -1)
    params = GaussianParams(torch.tensor([0.4, -0.6]), torch.tensor([-0.5, -0.2]))
    density = dist.log_prob(params, grid).double().exp()
    assert density.mean().item() * 4 * 0.5 == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize(
    "space, text",
    [
        (Box(0, np.inf, (2,)), "finite bounds"),
        (Discrete(3), "Box of floats"),
        (Box(0, 9, (2,), int), "Box"),
        (Dict(a=Box(0, 1)), "Box"),
        (Box(np.float32([0, 1]), np.float32([1, 1])), r"action_space\[1\]"),
    ],
)
@pytest.mark.parametrize("cls", [SquashedPolicy, DeterministicPolicy, ActionCritic])
def test_other_actions_are_refused(cls, space, text):
    with pytest.raises(SpaceError, match=text) as e:
        cls.for_env((SPACES[0], space))
    assert cls.__name__ in str(e.value)


@st.composite
def boxes(draw):
    "A Box of one component, of float32 or float64, whose middle is up to 1000 half-ranges from 0."
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    half = draw(st.floats(1e-4, 1e4))
    center = draw(st.floats(-1000, 1000)) * half
    low, high = (np.full(1, x, dtype) for x in (center - half, center + half))
    return Box(low, high, dtype=dtype)


@settings(max_examples=300, deadline=None)
@given(boxes(), st.lists(st.floats(-1, 1, width=32), max_size=20))
def test_a_cube_fills_its_box(space, at):
    """Against `low + (at + 1) * half` in float64.

    The errors are those of float32 numbers as large as the bounds, and nothing is outside.
    """
    low = float(space.low[0])
    high = float(space.high[0])
    half = (high - low) / 2
    error = 2.0**-23 * max(abs(low), abs(high))
    box = UnitBox(space)
    at = torch.tensor([-1, 1, *at], dtype=torch.float32)[:, None]
    act = box(at)
    assert all(space.contains(x.astype(space.dtype)) for x in act.numpy())

    # Three roundings lead to each of `center` and `half_range`: of a bound, of their middle, and so
    # that nothing is outside.
    expected = low + (at.double() + 1) * half
    torch.testing.assert_close(act.double(), expected, rtol=0, atol=4 * error)
    torch.testing.assert_close(box.position(act), at, rtol=0, atol=error / half + 4 * 2.0**-23)
    assert box.log_volume.item() == pytest.approx(np.log(half), abs=4 * error / half + 1e-5)


def test_bounds_that_float32_cannot_tell_apart_are_refused():
    for low, high in ((1, 1 + 1e-9), (1e9, 1e9 + 1)):
        with pytest.raises(SpaceError, match="two finite bounds that float32 can tell apart"):
            UnitBox(Box(low, high, (1,), np.float64))


# --- targets and losses


@pytest.mark.parametrize("n_steps", [1, 2, 4])
def test_targets_are_sums_over_steps(n_steps):
    fragment = random_fragment(T=5, B=6, seed=3)
    gamma = 0.9
    g = torch.Generator().manual_seed(0)
    value, bonus = torch.randn(2, 5, 6, generator=g)
    targets = td_targets(fragment, value, gamma, n_steps, bonus)
    usable_bonus, usable_value = bonus * fragment.valid, value * fragment.valid
    for t, b in fragment.valid.nonzero().tolist():
        total = 0.0
        for k in range(t, min(t + n_steps, 5)):
            factor = gamma ** (k - t)
            total += factor * float(fragment.state.rew[k + 1, b])
            if fragment.term[k + 1, b]:
                break
            total += gamma * factor * float(usable_bonus[k, b])
            if fragment.state.fin[k + 1, b]:
                break
        if not fragment.term[k + 1, b]:
            total += gamma * factor * float(usable_value[k, b])
        assert float(targets[t, b]) == pytest.approx(total, rel=1e-5, abs=1e-5), (t, b)


def close(numbers):
    return pytest.approx(numbers, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("seed", range(3))
def test_soft_losses_are_sums_over_rows(seed):
    fragment = random_fragment(seed=seed)
    state = fragment.state
    actor = small(SquashedPolicy, 1)
    critic = small(ActionCritic, 2)
    target = small(ActionCritic, 3)
    noise = torch.randn(4, 5, 2)
    weight = torch.rand(5)
    temperature = 0.3
    goal = soft_target(fragment, actor, target, noise, temperature, gamma=0.9)
    loss, _, errors = action_value_loss(fragment, critic, goal, weight)
    policy, metrics = soft_policy_loss(fragment, actor, critic, noise, temperature)

    def soft_value(net, obs, t, b):
        "The value of a state with that of the entropy, and the density of the action."
        act, logp = actor.sample(obs, noise[t, b][None])
        volume = float(np.log(2 * 0.25))
        return float(net(obs, act).min()) - temperature * (float(logp) + volume), float(logp)

    terms = []
    with torch.no_grad():
        for t, b in fragment.valid.nonzero().tolist():
            soft, _ = soft_value(target, successor(fragment, t, b)[None], t, b)
            y = float(state.rew[t + 1, b]) + 0.9 * soft * (not fragment.term[t + 1, b])
            obs = state.obs[t, b][None]
            difference = y - critic(obs, state.act[t + 1, b][None])[:, 0].double().numpy()
            expected = [y, np.abs(difference).mean()]
            assert [float(goal[t, b]), float(errors[t, b])] == close(expected)
            value, logp = soft_value(critic, obs, t, b)
            terms.append((0.5 * float(weight[b]) * (difference**2).sum(), -value, -logp))
    means = np.mean(terms, axis=0).tolist()
    assert [loss.item(), policy.item(), float(metrics["entropy"])] == close(means)


def test_deterministic_losses_are_sums_over_rows():
    fragment = random_fragment(seed=5)
    actor = small(DeterministicPolicy, 1)
    critic = small(ActionCritic, 2)
    shift = torch.randn(4, 5, 2)
    goal = smoothed_target(fragment, actor, critic, shift, gamma=0.9)
    loss = deterministic_policy_loss(fragment, actor, critic)[0]
    center = torch.tensor([1.0, 2.25])
    half = torch.tensor([2.0, 0.25])
    total = 0.0
    with torch.no_grad():
        for t, b in fragment.valid.nonzero().tolist():
            obs = successor(fragment, t, b)[None]
            act = center + half * ((actor.act(obs) - center) / half + shift[t, b]).clamp(-1, 1)
            soft = float(critic(obs, act).min()) * (not fragment.term[t + 1, b])
            assert float(goal[t, b]) == close(float(fragment.state.rew[t + 1, b]) + 0.9 * soft)
            obs = fragment.state.obs[t, b][None]
            total -= float(critic(obs, actor.act(obs))[0])
    assert loss.item() == pytest.approx(total / int(fragment.valid.sum()), rel=1e-4)


class Opposite(ActionCritic):
    def forward(self, obs, act):
        return -super().forward(obs, act)


class Halves(torch.nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net, self.k = net, net.k

    def forward(self, x):
        return self.net(x / 2)


def as_it_is(critic):
    return critic


def hooked(critic):
    critic.register_forward_hook(lambda module, args, q: -3 * q)
    return critic


def with_own_net(critic):
    critic.net = Halves(critic.net)
    return critic


@pytest.mark.parametrize("cls", [ActionCritic, Opposite])
@pytest.mark.parametrize("change", [as_it_is, hooked, with_own_net])
def test_the_policy_climbs_the_first_value_of_the_critic_as_it_is(cls, change):
    """A critic can give its first value alone.

    One with a hook, or with a `forward` or networks of its own, gives that of its own.
    """
    fragment = random_fragment(seed=6)
    actor = small(DeterministicPolicy, 1)
    critic = change(cls(*SPACES, hidden=(8,)))

    def loss_and_gradient(critic):
        loss, _ = deterministic_policy_loss(fragment, actor, critic)
        return loss, *torch.autograd.grad(loss, list(actor.parameters()))

    expected = loss_and_gradient(lambda obs, act: critic(obs, act))
    torch.testing.assert_close(loss_and_gradient(critic), expected)


def apart(stacked, x, activation):
    "What the perceptrons of a `StackedMLP` answer one by one, layer by layer."
    outputs = []
    for k in range(3):
        y = x
        for i, (w, b) in enumerate(zip(stacked.weights, stacked.biases)):
            y = getattr(torch, activation)(y) if i else y
            y = y @ w[k] + b[k, 0]
        outputs.append(y)
    return torch.stack(outputs)


@pytest.mark.parametrize(
    "n_rows, hidden", [(7, (5, 6)), (512, (64, 3)), (511, (64, 70)), (64, (600,)), (40_000, ())]
)
@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_stacked_perceptrons_are_as_those_apart(n_rows, hidden, activation):
    """Outputs and gradients, in two cases.

    Small layers are computed at once, and large ones one by one.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        three = StackedMLP(3, 4, hidden, 2, activation)
        x = torch.randn(n_rows, 4, requires_grad=True)
        for b in three.biases:
            torch.nn.init.normal_(b)
        scale = torch.randn(3, n_rows, 2)
    near = dict(rtol=1e-4, atol=1e-3)
    together, one_by_one = (
        (out, *torch.autograd.grad((out * scale).sum(), [x, *three.parameters()]))
        for out in (three(x), apart(three, x, activation))
    )
    torch.testing.assert_close(together, one_by_one, **near)
    torch.testing.assert_close(three(x, 2), together[0][:2], **near)


# --- whole updates beside an implementation with ordinary modules


def one_of(stacked, k):
    "One of the stacked critics as a sequence of torch's layers, in float64."
    layers = []
    for w, b in zip(stacked.weights, stacked.biases):
        layer = torch.nn.Linear(w.shape[1], w.shape[2]).double()
        layer.load_state_dict(dict(weight=w[k].T, bias=b[k, 0]))
        layers += [layer, torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


class PlainSAC:
    "The learner `agent` once more, of torch's modules in float64."

    def __init__(self, agent, lr, tau):
        self.tau = tau
        both = torch.nn.ModuleList(one_of(agent.critic.net, k) for k in range(2))
        self.critics = both
        self.targets = copy.deepcopy(both)
        self.actor = copy.deepcopy(agent.actor).double()
        self.log_alpha = torch.zeros((), dtype=torch.float64, requires_grad=True)
        trained = both.parameters(), self.actor.parameters(), [self.log_alpha]
        self.optimizers = [torch.optim.Adam(params, lr) for params in trained]

    def act(self, obs, noise):
        mean, log_std = self.actor.head(self.actor.trunk(obs)).chunk(2, -1)
        normal = torch.distributions.Normal(mean, log_std.exp())
        u = mean + log_std.exp() * noise.double()
        return u.tanh(), (normal.log_prob(u) - (1 - u.tanh() ** 2).log()).sum(-1)

    def values(self, nets, obs, position):
        return torch.stack([net(torch.cat([obs, position], -1))[..., 0] for net in nets])

    def learn(self, f, first, second):
        obs = f.state.obs[0].double()
        after = torch.stack([successor(f, 0, b) for b in range(f.n_envs)]).double()
        alpha = self.log_alpha.detach().exp()
        with torch.no_grad():
            position, logp = self.act(after, first[0])
            soft = self.values(self.targets, after, position).amin(0) - alpha * logp
            y = f.state.rew[1].double() + 0.9 * ~f.term[1] * soft
        error = self.values(self.critics, obs, f.state.act[1].double() / 2) - y
        self.step(0, 0.5 * error.square().mean(1).sum())
        position, logp = self.act(obs, second[0])
        self.step(1, (alpha * logp - self.values(self.critics, obs, position).amin(0)).mean())
        self.step(2, -self.log_alpha * (logp.detach().mean() - 1))
        for p, q in zip(self.critics.parameters(), self.targets.parameters()):
            q.data.lerp_(p.data, self.tau)

    def step(self, k, loss):
        self.optimizers[k].zero_grad()
        loss.backward()
        self.optimizers[k].step()


def test_three_updates_of_sac_beside_plain_torch():
    spaces = SPACES[0], Box(-2, 2, (1,))
    agent = make(SAC, spaces, lr=0.01, tau=0.1, gamma=0.9)
    other = PlainSAC(agent, lr=0.01, tau=0.1)
    noises = iter(torch.randn(6, 1, 16, 1, generator=torch.Generator().manual_seed(1)))
    drawn = []
    agent.noise = lambda fragment: drawn.append(next(noises)) or drawn[-1]
    for seed in range(3):
        f = random_fragment(1, 16, seed, spaces, invalid=False)
        agent.learn(Sample(f, None, None))
        other.learn(f, *drawn[-2:])

    pairs = [(agent.actor.double(), other.actor)]
    for k in range(2):
        pairs.append((one_of(agent.critic.net, k), other.critics[k]))
        pairs.append((one_of(agent.target.net, k), other.targets[k]))
    for ours, theirs in pairs:
        parameters = [*ours.parameters()], [*theirs.parameters()]
        torch.testing.assert_close(*parameters, rtol=2e-3, atol=2e-4)
    assert agent.log_temperature.item() == pytest.approx(other.log_alpha.item(), abs=1e-5)


def test_what_would_be_without_effect_or_change_another_network_is_refused():
    told = "SAC, leaf target_entropy: a temperature that is given has no target"
    with pytest.raises(DataError, match=told):
        make(SAC, temperature=0.2, target_entropy=-1.0)
    agent = make(SAC)
    agent.critic.encoder = agent.actor.encoder = torch.nn.Linear(3, 3)
    told = r"critic.encoder.weight: SAC: a step of the critic would change the policy"
    with pytest.raises(DataError, match=told):
        SAC(agent.actor, agent.critic)
    agent.actor.encoder.requires_grad_(False)
    SAC(agent.actor, agent.critic)  # what does not learn may be shared


def test_temperature_rises_while_there_is_too_little_entropy():
    fragment = random_fragment()
    for entropy, sign in ((100.0, 1), (-100.0, -1)):
        agent = make(SAC, target_entropy=entropy)
        agent.improve_policy(fragment)
        assert np.sign(agent.log_temperature.item()) == sign


def test_td3_delays_its_policy_and_smooths_its_targets():
    agent = make(TD3, policy_every=3, smoothing=0.2, smoothing_limit=0.3)
    seen = []
    loss = agent.improve_policy
    agent.improve_policy = lambda fragment: seen.append(agent.gradient_steps) or loss(fragment)
    for seed in range(7):
        agent.learn(Sample(random_fragment(seed=seed), None, None))
    assert seen == [3, 6] and agent.target_updates == 2
    state = agent.generator.get_state()
    fragment = random_fragment(50, 40)
    shift = agent.shift(fragment)
    agent.generator.set_state(state)
    assert torch.equal(shift, (0.2 * agent.noise(fragment)).clamp(-0.3, 0.3))
    assert (shift.abs() == torch.tensor(0.3)).any()
    assert make(DDPG).shift(fragment) is None


# --- from the stream


class Ending(Stepped):
    """The state is the number of the step.

    Episodes of 3 steps end by termination, those of 4 by a limit, in turn.
    """

    observation_space = Box(0, 9, (1,))
    action_space = Box(-2, 6, (1,))
    episode = -1

    def begin(self):
        self.episode += 1

    def pay(self, action):
        assert self.action_space.contains(action)
        return 1.0

    def ends(self):
        odd = self.episode % 2
        return not odd and self.count == 3, bool(odd and self.count == 4)


@each_algorithm
def test_fresh_steps_that_are_none_are_only_counted(algorithm):
    "Both environments end together, and their vector resets them in a step of its own."

    class Cut(Ending):
        def ends(self):
            return False, self.count == 3

    agent = make(algorithm, Cut, random_steps=0)
    n_fresh = []

    def vector():
        return gym.vector.SyncVectorEnv([Cut] * 2, autoreset_mode="NextStep")

    sizes = dict(n_envs=None, n_steps=1, warmup=0, batch_size=4)
    for batch in islice(replayed(vector, agent.actor, **sizes, seed=0), 9):
        metrics = check_metrics(agent.update(batch))
        n_fresh.append(int(batch.fresh.valid.sum()))
        assert np.isfinite([*metrics.values()]).all()
    assert n_fresh == [2, 2, 2, 0] * 2 + [2] and (agent.steps, agent.gradient_steps) == (14, 9)
    with pytest.raises(DataError, match="no valid row in the batch"):
        agent.update(batch.fresh._replace(valid=~batch.fresh.valid))


@each_algorithm
def test_random_actions_first_then_the_policy(algorithm):
    agent = make(algorithm, Ending, random_steps=400)
    acts = []
    random = []
    pipe = replayed(Ending, agent.actor, n_envs=4, n_steps=25, warmup=10_000, seed=0)
    for batch in islice(pipe, 8):
        random.append(agent.update(batch)["epsilon"])
        acts.append(batch.fresh.state.act[1:])
    assert random == [1.0] * 4 + [0.0] * 4
    acts = torch.cat(acts)
    assert ((torch.histc(acts[:100], 4, -2, 6) - 100).abs() < 40).all()
    assert acts[100:].std() < (3.5 if algorithm in (SAC, CrossQ) else 1.0)
    assert (acts <= 6).all()


@pytest.mark.slow_but_one
@each_algorithm
@pytest.mark.parametrize("options", [dict(length=3, prioritized=True), dict(samples_per_step=0.5)])
def test_steps_priorities_ratio_and_nested_observations(algorithm, options):
    class Nested(Ending):
        observation_space = Dict(place=Box(0, 9, (1,)), kind=Discrete(3))

        def look(self):
            return dict(place=np.full(1, self.count, np.float32), kind=2 if self.count else 1)

    agent = make(algorithm, Nested, multi_step=options.get("length", 1), beta_steps=100)
    sizes = dict(n_envs=2, n_steps=10, warmup=20, batch_size=16)
    n_prioritized = 0
    for batch in islice(replayed(Nested, agent.actor, **sizes, seed=0, **options), 6):
        prioritize = MagicMock(wraps=batch.memory.prioritize)
        with patch.object(batch.memory, "prioritize", prioritize):
            metrics = check_metrics(agent.update(batch))
        n_prioritized += prioritize.call_count
    assert np.isfinite(list(metrics.values())).all()
    is_prioritized = "length" in options
    assert (n_prioritized, agent.gradient_steps) == ((6, 6) if is_prioritized else (0, 60))


def test_the_replay_ratio_counts_transitions():
    zeros = torch.zeros(5, dtype=torch.int64)
    fresh = random_fragment(8, 5)._replace(lane=zeros, seq=zeros)
    memory = ReplayMemory(100, length=3, seed=0)
    memory.add(fresh)
    sample = memory.sample(64)
    valid = sample.fragment.valid
    metrics = make(SAC).update(Replayed(fresh, iter([sample]), memory))
    assert not valid.all()
    assert metrics["replay_ratio"] == int(valid.sum()) / int(fresh.valid.sum())


@pytest.mark.parametrize(
    "algorithm, env, words, told",
    [
        ("sac", "Pendulum-v1", "--multi-step 3", "multi_step = 3, got 1 steps"),
        ("crossq", "Pendulum-v1", "--multi-step 3", "multi_step = 3, got 1 steps"),
        ("td3", "Pendulum-v1", "--multi-step 3", "multi_step = 3, got 1 steps"),
        ("ddpg", "Pendulum-v1", "--multi-step 3", "multi_step = 3, got 1 steps"),
        ("dqn", "CartPole-v1", "--multi-step 3 --preset none", "multi_step = 3, got 1 steps"),
        ("qr_dqn", "CartPole-v1", "--multi-step 3 --preset none", "multi_step = 3, got 1 steps"),
        (
            "dqn",
            "CartPole-v1",
            "--burn-in 5 --length 5 --multi-step 2",
            "burn_in + multi_step = 7, got 5 steps",
        ),
    ],
)
def test_a_memory_of_too_short_samples_is_refused_before_anything_runs(
    algorithm, env, words, told, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert main(["train", algorithm, env, *words.split(), "--steps", "64"]) == 2
    err = capsys.readouterr().err
    assert f"samples are too short. Expected a memory with length >= {told}." in err
    assert not list(tmp_path.iterdir())
    build(make_config(algorithm, env, dict(length=3, multi_step=3)))
    if "dqn" in algorithm:
        build(make_config(algorithm, env, dict(length=3, burn_in=2)))


def test_a_critic_that_is_not_finite_leaves_the_policy_alone():
    agent = make(SAC)
    before = copy.deepcopy(agent.actor.state_dict())
    with torch.no_grad():
        agent.critic.net.biases[0].fill_(torch.nan)
    with pytest.raises(DataError, match="non-finite"):
        agent.learn(Sample(random_fragment(), None, None))
    assert first_difference(agent.actor.state_dict(), before) is None


# --- learning


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm, enough", [(SAC, -250), (CrossQ, -250), (TD3, -250), (DDPG, -300)]
)
def test_the_pendulum_is_swung_up(algorithm, enough):
    "10 000 steps; a policy that does nothing gets about -1200, the best one -150."
    agent = make(
        algorithm, "Pendulum-v1", hidden=(64, 64), lr=1e-3, n_critics=1 if algorithm is DDPG else 2
    )
    about = dict(n_envs=1, n_steps=8, samples_per_step=1.0, seed=0)
    for batch in replayed("Pendulum-v1", agent.actor, **about):
        agent.update(batch)
        if agent.steps >= 10_000:
            break
    assert evaluate("Pendulum-v1", agent.actor, 20, seed=1000).mean > enough


@pytest.mark.parametrize("algorithm", ["dqn", "qr_dqn", "sac", "td3", "ddpg"])
def test_targets_know_the_normalisers_before_their_first_update(algorithm):
    """What the warm-up has shown of observations is known to all networks.

    Values of raw observations would be learnt otherwise.
    """
    by_value = algorithm.endswith("dqn")
    env = "CartPole-v1" if by_value else "Pendulum-v1"
    options = dict(normalize=True, warmup=24, n_envs=2, n_steps=4, hidden=(4,), batch_size=4)
    if not by_value:
        options |= dict(critic_normalize=True, critic_hidden=(4,), samples_per_step=1 / 8)
    agent, pipe = build(make_config(algorithm, env, options))
    for batch in islice(pipe, 2):
        agent.update(batch)  # the memory is not warm yet
    assert not agent.target_updates
    pairs = [(agent.target, agent.actor if by_value else agent.critic)]
    if hasattr(agent, "target_actor"):
        pairs.append((agent.target_actor, agent.actor))
    for target, net in pairs:
        counts = [float(x) for name, x in net.named_buffers() if name.endswith("count")]
        assert counts and max(counts) == 16
        assert first_difference([*target.buffers()], [*net.buffers()]) is None


class Unsqueezed(nn.Module):
    "A critic whose author forgot to remove the last dimension."

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)

    def forward(self, obs, act):
        return self.net(torch.cat([obs, act], -1)).unsqueeze(0)

    def value(self, obs):
        return self.net(torch.cat([obs, obs[..., :1]], -1))


@pytest.mark.parametrize(
    "learner, policy", [(SAC, SquashedPolicy), (TD3, DeterministicPolicy), (IQL, MLPPolicy)]
)
def test_a_critic_that_answers_in_another_shape_is_refused(learner, policy):
    "Its values would be broadcast against the rows of the sample, so that each row learns from all of them."
    actor = policy.for_env("Pendulum-v1", seed=0)
    pipe = rollouts("Pendulum-v1", actor, n_envs=3, n_steps=4, seed=0, terminal_obs=True)
    fragment = next(iter(pipe))
    with pytest.raises(DataError, match=r"leaf Q\(s, a\): critic: wrong shape.*\[4, 3\]"):
        learner(actor, Unsqueezed()).update(fragment)
    with pytest.raises(DataError, match=r"leaf V\(s\)"):
        state_value_loss(fragment, Unsqueezed(), Unsqueezed(), 0.7)
