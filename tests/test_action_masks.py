"Masks of actions: the distribution of the allowed actions alone, nothing else is ever drawn, and a mask that allows nothing is an error."

from functools import partial
from itertools import islice

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st

from rollpipe.agents import (
    A2C,
    DQN,
    NPG,
    PPO,
    QRDQN,
    REINFORCE,
    TRPO,
    RandomActor,
    VTrace,
    evaluate,
)
from rollpipe.agents.offline import BC
from rollpipe.agents.tabular import TabularQ
from rollpipe.agents.td import td
from rollpipe.layers import (
    CategoricalPolicy,
    Critic,
    GaussianPolicy,
    MLPPolicy,
    QPolicy,
    QuantilePolicy,
    RecurrentPolicy,
    RecurrentQPolicy,
)
from rollpipe.layers.heads import Categorical, MultiCategorical
from rollpipe.pipes import (
    DataError,
    DataLoader2,
    EnvError,
    EnvStepper,
    FragmentCollector,
    Lanes,
    ProcessReading,
    SpaceError,
    TensorEnv,
    WorkerError,
    nested,
    on_policy,
    replayed,
    rollouts,
)
from rollpipe.pipes.data.action_masks import ActionMask, WithActionMask, mask_sizes, mask_space
from rollpipe.settings.config import build, make_config
from rollpipe.testing import check_actor, check_env
from rollpipe.testing.tasks import Gates

fast = settings(deadline=None, max_examples=30)
KEYED = dict(action_mask="action_mask")
MASKED = (MLPPolicy, RecurrentPolicy, QPolicy, QuantilePolicy, RecurrentQPolicy)
SPACES = {
    "discrete": Discrete(4),
    "start": Discrete(4, start=-2),
    "multi": MultiDiscrete([2, 3, 2]),
    "matrix": MultiDiscrete([[2, 3], [4, 2]], start=[[0, 1], [5, 0]]),
    "dict": Dict(
        go=MultiDiscrete([3, 2]), push=Box(-1, 1, (2,)), say=Discrete(3), deep=Dict(a=Discrete(2))
    ),
}


def random_mask(sizes, rng):
    "A mask that allows at least one value of each integer."
    if isinstance(sizes, dict):
        return {k: random_mask(x, rng) for k, x in sizes.items()}
    rows = [rng.random(n) < 0.4 for n in sizes]
    for row in rows:
        row[rng.integers(len(row))] = True
    return np.concatenate(rows).astype(np.int8)


def is_allowed(space, action, mask):
    "Slowly, integer by integer."
    if isinstance(space, Dict):
        return all(is_allowed(space[k], action[k], mask[k]) for k in mask)
    numbers = np.ravel(np.asarray(action) - space.start)
    sizes = mask_sizes(space)
    return all(
        part[i] for i, part in zip(numbers, np.split(np.asarray(mask), np.cumsum(sizes)[:-1]))
    )


class Forbidding(gym.Env):
    "Draws a mask at each step, and raises at a forbidden action. Episodes of `length` steps terminate or are truncated by turns."

    def __init__(self, space=SPACES["discrete"], length=5, key="obs", stuck_at=None):
        self.action_space = space
        self.length = length
        self.sizes = mask_sizes(space)
        self.key = key
        self.stuck_at = stuck_at
        self.episode = 0
        see = Box(-1, 1, (2,))
        self.observation_space = (
            Dict(see=see, action_mask=mask_space(self.sizes)) if key == "obs" else see
        )

    def look(self):
        self.mask = random_mask(self.sizes, self.np_random)
        if self.t == self.stuck_at:
            self.mask = nested.map(np.zeros_like, self.mask)
        see = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        if self.key == "obs":
            return dict(see=see, action_mask=self.mask), {}
        return see, dict(info=self.mask) if self.key == "info" else {}

    def action_masks(self):
        return self.mask

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        self.episode = self.episode + 1
        return self.look()

    def step(self, action):
        assert is_allowed(self.action_space, action, self.mask), (
            f"{action} is forbidden by {self.mask}"
        )
        self.t += 1
        obs, info = self.look()
        over = self.t == self.length
        ends = self.episode % 2 == 0
        if over and ends and self.key == "obs":
            obs["action_mask"] = nested.map(np.zeros_like, self.mask)  # nobody moves after the end
        return obs, float(self.np_random.normal()), over and ends, over and not ends, info


# --- the distribution of the allowed values


def subset_of(logits, mask):
    "The distribution over the allowed values, and the number of each value there."
    at = mask.nonzero()[:, 0]
    return torch.distributions.Categorical(logits=logits[at]), {int(k): i for i, k in enumerate(at)}


@fast
@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4), seed=st.integers(0, 10_000))
def test_log_probability_entropy_and_divergence_are_those_of_the_allowed_values(sizes, seed):
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    dist = Categorical(sizes[0]) if len(sizes) == 1 else MultiCategorical(tuple(sizes))
    mask = ActionMask("m", tuple(sizes))
    allowed = torch.from_numpy(random_mask(tuple(sizes), rng))
    raw, other = (
        torch.randn(sum(sizes), generator=generator, dtype=torch.float64).requires_grad_()
        for _ in range(2)
    )
    p, q = (mask.masked(x, dict(m=allowed)) for x in (raw, other))
    act = dist.sample(p.expand(50, -1), dist.noise((50,), generator))
    rows = [act] if len(sizes) == 1 else act.unbind(-1)
    parts = [subset_of(x, m) for x, m in zip(raw.split(sizes), allowed.split(sizes))]
    others = [subset_of(x, m)[0] for x, m in zip(other.split(sizes), allowed.split(sizes))]
    assert all(m[row].all() for row, m in zip(rows, allowed.split(sizes)))
    logp = sum(
        d.log_prob(torch.tensor([number[int(k)] for k in row]))
        for row, (d, number) in zip(rows, parts)
    )
    entropy = sum(d.entropy() for d, _ in parts)
    kl = sum(torch.distributions.kl_divergence(d, e) for (d, _), e in zip(parts, others))
    for ours, theirs in (
        (dist.log_prob(p.expand(50, -1), act), logp),
        (dist.entropy(p), entropy),
        (dist.kl(p, q), kl),
    ):
        torch.testing.assert_close(ours, theirs)
        grads = [
            torch.autograd.grad(x.sum(), [raw, other], retain_graph=True, allow_unused=True)
            for x in (ours, theirs)
        ]
        for a, b in zip(
            *([torch.zeros_like(raw) if x is None else x for x in found] for found in grads)
        ):
            torch.testing.assert_close(a, b)
    tangent = torch.randn(sum(sizes), generator=generator, dtype=torch.float64)
    assert (dist.fisher(p, tangent)[allowed == 0] == 0).all() and dist.fisher(
        p, tangent
    ).isfinite().all()


def test_the_network_does_not_see_the_mask():
    spaces = Dict(see=Discrete(2), action_mask=MultiBinary(3)), Discrete(3)
    assert MLPPolicy(*spaces, hidden=(), **KEYED).trunk.n_in == 2


# --- nothing that is forbidden is ever drawn


def test_each_allowed_action_is_equally_likely_at_random():
    actor = QPolicy.for_env(Forbidding, seed=0, epsilon=1.0, **KEYED)
    mask = torch.tensor([1, 0, 1, 1]).expand(1, 6000, 4)
    obs = dict(see=torch.zeros(1, 6000, 2), action_mask=mask)
    noise = actor.draw_noise((1, 6000), torch.Generator().manual_seed(0))
    act, *_ = actor(obs, None, None, None, hx=(), stepno=None, virtual=False, noise=noise)
    share = act.flatten().bincount(minlength=4) / 6000
    torch.testing.assert_close(share, torch.tensor([1 / 3, 0, 1 / 3, 1 / 3]), atol=0.02, rtol=0)


def test_without_its_mask_an_actor_takes_what_is_forbidden():
    actor = RandomActor.for_env(Forbidding, seed=0)
    with pytest.raises(EnvError, match="is forbidden by"):
        list(islice(rollouts(Forbidding, actor, n_envs=3, n_steps=16, seed=5), 4))


def test_a_random_actor_draws_uniformly():
    assert evaluate(
        lambda: Gates(3, in_obs=True),
        RandomActor.for_env(lambda: Gates(3, in_obs=True), seed=0, **KEYED),
        2000,
    ).mean == pytest.approx(Gates(3).value(0, p=0.5), abs=0.02)


@pytest.mark.slow_but_one
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
@pytest.mark.parametrize("key", ["obs", "info", "method"])
def test_vectors_and_their_resets(mode, key):
    "In NEXT_STEP the actor is also asked about the last observation of an episode, whose mask allows nothing."
    name = dict(obs="action_mask", info="info", method="action_masks")[key]

    def one():
        return Forbidding(key=key) if key == "obs" else WithActionMask(Forbidding(key=key), name)

    def make():
        return SyncVectorEnv([one] * 3, autoreset_mode=mode)

    actor = MLPPolicy.for_env(one, action_mask=name, seed=0)
    for f in islice(FragmentCollector(EnvStepper(make, actor, seed=0), 16), 3):
        assert f.actor["logp"].isfinite().all() and f.actor["dist"].isnan().sum() == 0
    check_env(lambda: WithActionMask(one(), name))  # it plays what is allowed


@pytest.mark.parametrize("sticky", [True, False])
def test_replays_keep_the_mask(sticky):
    env = lambda: WithActionMask(Forbidding(key="info"), "info")
    actor = QPolicy.for_env(env, action_mask="info", seed=0)
    for batch in islice(
        replayed(env, actor, warmup=40, n_envs=3, n_steps=8, batch_size=16, seed=0, sticky=sticky),
        8,
    ):
        for sample in batch.samples:
            before = sample.fragment.state.obs["info"][0]
            act = sample.fragment.state.act[1]
            assert before.gather(-1, act[:, None])[sample.fragment.valid[0]].all()


# --- learning


def test_targets_by_hand():
    "Maxima over allowed actions, that of the true last observation at a truncation; the double one takes the actor's choice."
    env = partial(Forbidding, length=4)
    actor, target = (QPolicy.for_env(env, seed=seed, epsilon=1.0, **KEYED) for seed in (1, 2))
    for net in (actor, target):
        with torch.no_grad():
            net.head.last.weight.mul_(100)
    f = next(iter(FragmentCollector(EnvStepper(env, actor, 3, seed=0), 12)))
    assert len(f.final.t) and f.term.any()

    def q(net, see):
        return net.head(net.trunk(net.encoder(dict(see=see))))

    last = {(int(t), int(b)): k for k, (t, b) in enumerate(zip(f.final.t, f.final.b))}
    for double in (False, True):
        errors = td(f, actor, target, gamma=0.9, double=double)[2]
        for t in range(f.n_steps):
            for b in range(f.n_envs):
                k = last.get((t, b))
                obs = f.state.obs
                see, mask = (
                    obs[name][t + 1, b] if k is None else f.final.obs[name][k]
                    for name in ("see", "action_mask")
                )
                free = mask.nonzero()[:, 0]
                chooser = actor if double else target
                best = free[q(chooser, see)[free].argmax()] if len(free) else 0
                value = 0.0 if f.term[t + 1, b] else 0.9 * q(target, see)[best].item()
                goal = float(f.state.rew[t + 1, b]) + value
                own = q(actor, obs["see"][t, b])[f.state.act[t + 1, b]].item()
                assert float(errors[t, b]) == pytest.approx(goal - own, abs=1e-4)


def actor_critic(kind, policy=MLPPolicy, stream=on_policy, n_steps=32, memory=None, **options):
    "A learner of a policy, and its batches."

    def make():
        return Gates(4, in_obs=True)

    actor = policy.for_env(make, hidden=(16,), seed=0, **memory or {}, **KEYED)
    critic = Critic.for_env(make, hidden=(16,), seed=1)
    parts = (actor,) if stream is rollouts else (actor, critic)
    return kind(actor, critic, **options), stream(make, *parts, n_envs=8, n_steps=n_steps, seed=0)


def replaying(kind, policy, length=1):
    "A learner of values, and its batches."

    def make():
        return Gates(4, in_obs=True)

    actor = policy.for_env(make, hidden=(32,), seed=0, **KEYED)
    stream = dict(n_envs=4, n_steps=8, batch_size=32, warmup=100, length=length, seed=0)
    return kind(actor, eps_steps=500, target_every=50), replayed(make, actor, **stream)


# name -> learner with its batches, and number of updates
LEARNERS = {
    "reinforce": (partial(actor_critic, REINFORCE), 60),
    "a2c": (partial(actor_critic, A2C, lr=3e-3), 60),
    "ppo": (partial(actor_critic, PPO, lr=3e-3), 60),
    "trpo": (partial(actor_critic, TRPO), 60),
    "npg": (partial(actor_critic, NPG), 60),
    "vtrace, memory": (
        partial(actor_critic, VTrace, RecurrentPolicy, rollouts, 16, dict(memory=16), lr=5e-3),
        80,
    ),
    "dqn": (partial(replaying, DQN, QPolicy), 160),
    "dqn, memory": (partial(replaying, DQN, RecurrentQPolicy, 8), 160),
    "qr_dqn": (partial(replaying, QRDQN, QuantilePolicy), 160),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LEARNERS)
def test_learners_open_all_gates(name):
    make, n_updates = LEARNERS[name]
    agent, pipe = make()
    for batch in islice(pipe, n_updates):
        metrics = agent.update(batch)
    assert all(np.isfinite(x) for x in metrics.values() if isinstance(x, float) and x == x)
    assert evaluate(lambda: Gates(4, in_obs=True), agent.actor, 8).mean == pytest.approx(1.0)


def test_cloning_counts_allowed_actions_only():
    def make():
        return Gates(4, in_obs=True)

    teacher, actor = (MLPPolicy.for_env(make, hidden=(16,), seed=seed, **KEYED) for seed in (0, 1))
    batch = next(iter(rollouts(make, teacher, n_envs=8, n_steps=32, seed=0)))
    metrics = BC(actor).update(batch)
    assert metrics["loss"] == pytest.approx(np.log(2), abs=0.02) and metrics[
        "entropy"
    ] == pytest.approx(np.log(2), abs=0.02)


# --- nothing is allowed

STUCK = r"leaf obs\['action_mask'\]: the mask allows no action\. Expected an allowed value of each integer, got \[0 0 0 0\]"


@pytest.mark.parametrize("engine", ["torch", "onnxruntime"])
@pytest.mark.parametrize("stuck_at", [0, 3])
def test_a_mask_that_allows_nothing_names_lane_and_environment(engine, stuck_at):
    if engine == "onnxruntime":
        pytest.importorskip("onnxruntime")

    def good():
        return Forbidding()

    def bad():
        return Forbidding(stuck_at=stuck_at)

    for actor in (MLPPolicy.for_env(good, seed=0, **KEYED), QPolicy.for_env(good, seed=0, **KEYED)):
        with pytest.raises(EnvError, match=r"lane 1, environment 1 \(.*" + STUCK):
            list(
                islice(
                    Lanes(
                        FragmentCollector(EnvStepper(Split(good, bad), actor, 2, engine=engine), 8),
                        2,
                        0,
                    ),
                    4,
                )
            )
    with pytest.raises(EnvError, match=STUCK):
        evaluate(bad, RandomActor.for_env(bad, **KEYED), 1)


class Split:
    "A factory whose fourth environment is the bad one: environment 1 of lane 1."

    def __init__(self, good, bad):
        self.good = good
        self.bad = bad
        self.n = 0

    __name__ = "Split"

    def __call__(self):
        self.n += 1
        return (self.bad if self.n == 4 else self.good)()


def test_a_worker_and_a_vector_name_it_too():
    def bad():
        return Forbidding(stuck_at=3)

    actor = MLPPolicy.for_env(bad, seed=0, **KEYED)
    pipe = rollouts(bad, actor, lanes=2, n_envs=1, seed=0)
    with (
        pytest.raises((WorkerError, EnvError), match=STUCK),
        DataLoader2(pipe, reading_service=ProcessReading(2)) as loader,
    ):
        next(iter(loader))
    for mode in (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP):
        with pytest.raises(EnvError, match=STUCK):
            list(
                islice(
                    FragmentCollector(
                        EnvStepper(
                            lambda mode=mode: SyncVectorEnv([bad] * 2, autoreset_mode=mode), actor
                        ),
                        8,
                    ),
                    2,
                )
            )


class Turns(TensorEnv):
    "The action must be the parity of the step; at step `stuck_at` nothing is allowed in environment 1."

    observation_space = Dict(t=Box(0, 99, (1,)), action_mask=MultiBinary(2))
    action_space = Discrete(2)

    def __init__(self, stuck_at=None):
        self.n_envs, self.stuck_at = 3, stuck_at

    def look(self):
        mask = torch.zeros(3, 2, dtype=torch.int8)
        mask[:, self.t % 2] = 1
        if self.t == self.stuck_at:
            mask[1] = 0
        return dict(t=torch.full((3, 1), float(self.t)), action_mask=mask)

    def reset(self, seed):
        self.t = 0
        return self.look()

    def step(self, act):
        assert self.t == self.stuck_at or (act == self.t % 2).all()
        self.t += 1
        zeros = torch.zeros(3)
        return self.look(), zeros, zeros > 0, zeros > 0, None, {}


def test_environments_made_of_tensors():
    actor = MLPPolicy.for_env(Turns(), seed=0, **KEYED)
    for f in islice(rollouts(Turns(), actor, n_envs=None, n_steps=8, seed=0), 2):
        assert (f.actor["logp"] == 0).all()
    with pytest.raises(
        EnvError, match=r"environment 1 .*leaf obs\['action_mask'\]: the mask allows no action"
    ):
        list(islice(rollouts(Turns(11), actor, n_envs=None, n_steps=8, seed=0), 2))


# --- one answer, wherever it is given


def test_predict():
    env = Forbidding(SPACES["dict"])
    actor = RecurrentPolicy.for_env(env, seed=0, **KEYED)
    (obs, _) = env.reset(seed=0)
    state = None
    for deterministic in [True, False] * 10:
        act, state = actor.predict(obs, state, deterministic=deterministic)
        obs, _, term, trunc, _ = env.step(act)
        if term or trunc:
            (obs, _) = env.reset()
            state = None
    obs["action_mask"]["say"][:] = 0
    with pytest.raises(
        DataError,
        match=r"environment 0, leaf obs\['action_mask'\]\['say'\]: the mask allows no action",
    ):
        actor.predict(obs)
    check_actor(actor, env)


# --- refusals


def test_refusals():
    see = Box(-1, 1, (2,))
    for cls in MASKED:
        with pytest.raises(SpaceError, match="there is no mask of the actions beside other"):
            cls.for_env((see, Discrete(2)), **KEYED)
        wrong = Dict(see=see, action_mask=MultiBinary(3))
        with pytest.raises(SpaceError, match=r"as in MultiBinary\(2\)"):
            cls.for_env((wrong, Discrete(2)), **KEYED)
    with pytest.raises(SpaceError, match="there are no masks for such actions"):
        GaussianPolicy.for_env((Dict(see=see, action_mask=see), see), **KEYED)
    with pytest.raises(SpaceError, match="there are no masks for such actions"):
        WithActionMask(gym.make("Pendulum-v1"))
    with pytest.raises(SpaceError, match="there are no masks for such actions"):
        MLPPolicy.for_env((Dict(see=see, action_mask=see), Tuple([Discrete(2)])), **KEYED)
    with pytest.raises(SpaceError, match="TabularQ: unsupported observation.*a table has no masks"):
        TabularQ.for_env(lambda: Gates(in_obs=True))
    assert CategoricalPolicy.for_env(lambda: Gates(in_obs=True), **KEYED).action_mask == ActionMask(
        "action_mask", (5,)
    )


# --- runs

gym.register("Gates-v0", Gates)


@pytest.mark.slow_but_one
@pytest.mark.parametrize("algorithm", ["ppo", "a2c", "vtrace", "trpo", "dqn", "qr_dqn"])
@pytest.mark.parametrize("env_kwargs", [{}, dict(in_obs=True)], ids=["info", "obs"])
def test_a_run_knows_its_mask(algorithm, env_kwargs):
    config = make_config(
        algorithm, "Gates-v0", dict(action_mask="action_mask", n_envs=2), env_kwargs
    )
    assert config["env_kwargs"] == dict(env_kwargs, with_action_mask="action_mask")
    again = make_config(algorithm, "Gates-v0", config["options"], config["env_kwargs"])
    assert again.having(origins={}) == config.having(origins={})
    agent, pipe = build(config)
    assert agent.actor.action_mask == ActionMask("action_mask", (5,))
    next(iter(pipe))
    assert 0 <= evaluate("Gates-v0", agent.actor, 2, env_kwargs=config["env_kwargs"]).mean <= 1


def test_runs_without_a_mask_are_as_they_were():
    assert make_config("ppo", "Gates-v0")["env_kwargs"] == {}
    with pytest.raises(DataError, match="there is no option 'action_mask'"):
        make_config("sac", "Pendulum-v1", KEYED)


@pytest.mark.parametrize("vector", ["sync", "async"])
def test_a_vector_of_an_id(vector):
    kwargs = dict(with_action_mask="action_mask")
    actor = MLPPolicy.for_env("Gates-v0", env_kwargs=kwargs, seed=0, **KEYED)
    batch = next(
        iter(
            rollouts(
                "Gates-v0", actor, n_envs=2, n_steps=16, vector=vector, env_kwargs=kwargs, seed=0
            )
        )
    )
    assert set(batch.state.obs) == {"obs", "action_mask"} and "action_mask" not in batch.env
    with pytest.raises(
        EnvError, match="such a vector takes no wrapper for the mask of the actions"
    ):
        next(iter(rollouts("CartPole-v1", actor, vector="vector_entry_point", env_kwargs=kwargs)))
