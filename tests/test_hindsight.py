"Goals in hindsight against whole episodes in plain Python: each sampled step is looked up in its episode, and so is its new goal."

from collections import Counter
from functools import partial
from itertools import islice

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import assert_same, snapshot
from test_replay import Drawn

from rollpipe.agents import DQN, evaluate
from rollpipe.agents.unroll import next_observations
from rollpipe.layers import DeterministicPolicy, MLPPolicy, QPolicy, RecurrentQPolicy
from rollpipe.pipes import (
    DataError,
    EnvError,
    ProcessReading,
    Recorder,
    Replay,
    Replayer,
    ReplayMemory,
    RewardScaler,
    find,
    replayed,
    rollouts,
)
from rollpipe.pipes.data.fragment_ops import strands
from rollpipe.pipes.graph.pipe import Source
from rollpipe.pipes.graph.torchdata import DataLoader2
from rollpipe.pipes.replay.hindsight import GoalRules, Hindsight, steps_ahead
from rollpipe.testing import check_env, check_pipe
from rollpipe.testing.tasks import BitFlip, PointReach


class Coarse(PointReach):
    "Episodes of 7 steps, which terminate where the goal is achieved."

    max_steps, ends = 7, True

    def __init__(self):
        super().__init__(radius=0.7)


class Kept(Source):
    "A source of the items of a list."

    def __init__(self, kept):
        self.items_of = kept

    def stream(self, items):
        yield from self.items_of


WORLDS = dict(bits=partial(BitFlip, 3), coarse=Coarse, endless=PointReach)


def collected(world, n, n_steps, lanes=2, seed=0, **options):
    actor = MLPPolicy.for_env(WORLDS[world], hidden=(4,), seed=0)
    return list(
        islice(
            rollouts(
                WORLDS[world],
                actor,
                n_envs=2,
                n_steps=n_steps,
                lanes=lanes,
                seed=seed,
                terminal_obs=True,
                **options,
            ),
            n,
        )
    )


class Episodes:
    "All steps by serial number, and for each the rest of its episode as far as it has been stored without a gap."

    def __init__(self):
        self.steps = []
        self.columns = {}

    def add(self, f):
        where = {(int(t), int(b)): k for k, (t, b) in enumerate(zip(f.final.t, f.final.b))}
        for lane, seq, columns in strands(f):
            for b in range(columns.start, columns.stop):
                key = (lane, b - columns.start)
                before = self.columns.get((lane, b - columns.start))
                mine = before[1] if before is not None and before[0] == seq - 1 else []
                for t in range(f.n_steps):
                    k = where.get((t, b))
                    after = {
                        name: x[t + 1, b] if k is None else f.final.obs[name][k]
                        for name, x in f.state.obs.items()
                    }
                    step = dict(
                        obs={name: x[t, b] for name, x in f.state.obs.items()},
                        after=after,
                        act=f.state.act[t + 1, b],
                        rew=f.state.rew[t + 1, b],
                        term=bool(f.term[t + 1, b]),
                        ends=bool(f.state.fin[t + 1, b]),
                        rest=[],
                    )
                    self.steps.append(step)
                    mine.append(step)
                    for x in mine:
                        x["rest"].append(step)
                    if step["ends"]:
                        mine = []
                self.columns[key] = seq, mine


def check(sample, episodes, env):
    "Every step of a sample; returns how often the goal is another one."
    f, changed = sample.fragment, 0
    reached = next_observations(f)
    for j, serial in enumerate(sample.index.tolist()):
        step = episodes.steps[serial]
        goal = f.state.obs["desired_goal"][0, j]
        for name in ("observation", "achieved_goal"):
            assert torch.equal(f.state.obs[name][0, j], step["obs"][name]) and torch.equal(
                reached[name][0, j], step["after"][name]
            )
        assert torch.equal(f.state.act[1, j], step["act"])
        assert torch.equal(reached["desired_goal"][0, j], goal)
        if torch.equal(goal, step["obs"]["desired_goal"]):
            rew = float(step["rew"])
            term = step["term"]
        else:
            changed += 1
            assert any(torch.equal(goal, later["after"]["achieved_goal"]) for later in step["rest"])
            pair = step["after"]["achieved_goal"].numpy(), goal.numpy(), {}
            rew = float(env.compute_reward(*pair))
            term = bool(env.compute_terminated(*pair))
        assert (float(f.state.rew[1, j]), bool(f.term[1, j])) == (rew, term)
        assert bool(f.state.fin[1, j]) == (step["ends"] or term)
    return changed


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(sorted(WORLDS)),
    st.integers(1, 5),
    st.integers(40, 300),
    st.booleans(),
    st.sets(st.integers(0, 11), max_size=3),
    st.integers(1, 6),
    st.sampled_from([1, 17, 64]),
)
def test_it_is_what_whole_episodes_say(world, n_steps, capacity, prioritized, gaps, k, batch_size):
    "Rings that wrap around, episodes without a beginning or an end, fragments that are missing, priorities."
    fragments = collected(world, 12, n_steps)
    episodes = Episodes()
    env = WORLDS[world]()
    changed = 0
    kept = [f for i, f in enumerate(fragments) if i not in gaps]
    replay = Replay(
        Kept(kept), capacity, batch_size, n_batches=2, warmup=0, prioritized=prioritized, seed=0
    )
    for item in Hindsight(replay, GoalRules(WORLDS[world]), k):
        episodes.add(item.fresh)
        for sample in item.samples:
            before = [snapshot(step["after"]) for step in episodes.steps[-3:]]
            changed += check(sample, episodes, env)
            assert_same(before, [snapshot(step["after"]) for step in episodes.steps[-3:]])
            if prioritized:
                item.memory.prioritize(sample.index, torch.rand(batch_size))
    assert changed or world == "bits" or batch_size == 1


def test_a_file_of_steps_makes_no_difference(tmp_path):
    def drawn(path):
        replay = Replay(Kept(collected("bits", 20, 4)), 100, 9, warmup=0, seed=3, path=path)
        return [
            snapshot(tuple(sample))
            for item in Hindsight(replay, GoalRules(WORLDS["bits"]))
            for sample in item.samples
        ]

    assert_same(drawn(None), drawn(tmp_path))


def test_every_later_step_is_equally_likely():
    memory = ReplayMemory(500, seed=0)
    episodes = Episodes()
    for f in collected("endless", 9, 8):
        memory.add(f)
        episodes.add(f)
    for serial in (3, 40, 200, 287):
        n = len(episodes.steps[serial]["rest"])
        drawn = steps_ahead(
            memory.store,
            memory.store.ring.slot(np.full(2000 * n, serial)),
            np.random.default_rng(1),
        )
        numbers = {id(step): i for i, step in enumerate(episodes.steps)}
        counts = Counter(memory.store.ring.serial(drawn).tolist())
        assert sorted(counts) == sorted(
            numbers[id(step)] for step in episodes.steps[serial]["rest"]
        )
        assert sum((x - 2000) ** 2 / 2000 for x in counts.values()) < n + 5 * (2 * n) ** 0.5


def episodes_of(fragments):
    found = Episodes()
    for f in fragments:
        found.add(f)
    return found.steps


# --- the pipeline


def bits(n=4, **options):
    actor = QPolicy.for_env(partial(BitFlip, n), hidden=(8,), seed=0)
    return replayed(
        partial(BitFlip, n),
        actor,
        **dict(
            n_envs=2,
            n_steps=3,
            lanes=2,
            seed=0,
            capacity=90,
            batch_size=5,
            warmup=30,
            n_sampled_goal=4,
        )
        | options,
    )


def test_workers_make_no_difference():
    def run(service):
        with DataLoader2(bits(), reading_service=service) as loader:
            return [
                snapshot((item.fresh._replace(version=None), [tuple(x) for x in item.samples]))
                for item in islice(loader, 12)
            ]

    first = run(None)
    assert sum(len(samples) for _, samples in first) > 5
    assert_same(first, run(ProcessReading(2)))


def test_the_contract_of_pipes():
    check_pipe(lambda: Drawn(bits()), n_items=6)


@pytest.mark.slow_but_one
@pytest.mark.parametrize("env", [BitFlip, PointReach, Coarse])
def test_the_contract_of_environments(env):
    check_env(env)


def test_a_recording_of_samples_has_the_new_goals(tmp_path):
    live = []
    for item in islice(Recorder(bits(), tmp_path), 12):
        live.append([snapshot(tuple(x)) for x in item.samples])
    played = [[snapshot(tuple(x)) for x in item.samples] for item in islice(Replayer(tmp_path), 11)]
    assert_same(played, live[:11])


def test_the_environment_is_made_once_in_an_iteration_and_closed():
    made = []

    class Watched(BitFlip):
        def __init__(self):
            super().__init__(4)
            made.append(self)
            self.closed = False

        def close(self):
            self.closed = True

    actor = QPolicy.for_env(partial(BitFlip, 4), hidden=(8,), seed=0)
    pipe = replayed(
        Watched, actor, n_envs=2, capacity=90, warmup=0, batch_size=5, n_sampled_goal=4, seed=0
    )
    for _ in range(2):
        made.clear()
        items = iter(pipe)
        for item in islice(items, 9):
            list(item.samples)
        assert len(made) == 3 and not any(env.closed for env in made)
        items.close()
        assert all(env.closed for env in made)


def test_an_instance_is_used_as_it_is_and_not_closed():
    env = BitFlip(4)
    actor = QPolicy.for_env(partial(BitFlip, 4), hidden=(8,), seed=0)
    pipe = replayed(
        env, actor, n_envs=None, capacity=90, warmup=0, batch_size=5, n_sampled_goal=4, seed=0
    )
    assert find(pipe, Hindsight)[0].rules.source is env
    assert [len(list(item.samples)) for item in islice(pipe, 3)] == [1, 1, 1]


@pytest.mark.parametrize("vector", [None, "sync"])
def test_ids_lists_and_vectors(vector):
    actor = QPolicy.for_env(
        "rollpipe.testing:BitFlip-v0", env_kwargs=dict(n=4), hidden=(8,), seed=0
    )
    pipe = replayed(
        "rollpipe.testing:BitFlip-v0",
        actor,
        env_kwargs=dict(n=4),
        vector=vector,
        n_envs=2,
        capacity=90,
        warmup=0,
        batch_size=5,
        n_sampled_goal=4,
        seed=0,
    )
    assert [len(list(item.samples)) for item in islice(pipe, 3)] == [1, 1, 1]
    vector = gym.vector.SyncVectorEnv([partial(BitFlip, 4)] * 2)
    for source in (vector, [partial(BitFlip, 4), partial(BitFlip, 4)]):
        assert GoalRules(source)(np.zeros((2, 4)), np.array([[0, 0, 0, 0], [0, 1, 0, 0]]))[
            0
        ].tolist() == [0, -1]
    vector.close()


def test_ends_that_the_goal_does_not_decide_stay():
    "Without `compute_terminated`, a step terminates if it did."

    def rules(achieved, desired):
        return np.where((achieved == desired).all(-1), 0.0, -1.0), None

    fragments = collected("bits", 20, 4)
    ended = [step["term"] for step in episodes_of(fragments)]
    assert any(ended)
    for item in Hindsight(Replay(Kept(fragments), 900, 50, warmup=0, seed=0), rules):
        for sample in item.samples:
            assert sample.fragment.term[1].tolist() == [ended[i] for i in sample.index.tolist()]


def test_an_answer_that_is_used_again():
    "By an environment that judges one step after the other, and by one that judges all at once."
    goals = np.random.default_rng(0).random((2, 5, 2))

    class Each(PointReach):
        answer = np.zeros(())

        def compute_reward(self, achieved_goal, desired_goal, info):
            self.answer[...] = np.abs(achieved_goal - desired_goal).sum()
            return self.answer

        def compute_terminated(self, *args):
            return self.compute_reward(*args) < 1

    class All(Each):
        answer = np.zeros(5)

        def compute_reward(self, achieved_goal, desired_goal, info):
            self.answer[:] = np.abs(achieved_goal - desired_goal).sum(-1)
            return self.answer

        def compute_terminated(self, *args):
            self.answer[:] = self.compute_reward(*args) < 1
            return self.answer

    wanted = np.abs(goals[0] - goals[1]).sum(-1)
    for env in (Each(), All()):
        assert_same(GoalRules(env)(*goals)[0], wanted)


@pytest.mark.parametrize("n", [0, 1, 2, 3, 4, 5])
def test_a_method_for_one_step_is_known_by_its_answer(n):
    "Also with as many steps as there are numbers in a goal, where its answer for all of them could be one for each."

    class One(Silent):
        def compute_reward(self, achieved_goal, desired_goal, info):
            return abs(achieved_goal[0] - desired_goal[0]) + 0

    class All(Silent):
        def compute_reward(self, achieved_goal, desired_goal, info):
            return np.linalg.norm(achieved_goal - desired_goal, axis=1)

    achieved, desired = np.random.default_rng(0).random((2, n, 3))
    assert_same(GoalRules(One())(achieved, desired)[0], abs(achieved - desired)[:, 0])
    assert_same(GoalRules(All())(achieved, desired)[0], np.linalg.norm(achieved - desired, axis=1))


# --- mistakes


class Moody(PointReach):
    "Its reward is not that of `compute_reward`."

    def step(self, action):
        obs, reward, *rest = super().step(action)
        return obs, reward - 1, *rest


class Silent(gym.Env):
    "Goals, but no `compute_reward`."

    action_space = Discrete(2)
    observation_space = Dict(achieved_goal=Box(0, 1, (1,)), desired_goal=Box(0, 1, (1,)))

    def reset(self, *, seed=None, options=None):
        return dict(achieved_goal=np.zeros(1, np.float32), desired_goal=np.ones(1, np.float32)), {}

    def step(self, action):
        return self.reset()[0], -1.0, False, False, {}


class Typed(PointReach):
    "Its goals have the dtypes `achieved` and `desired`."

    def __init__(self, achieved, desired):
        super().__init__()
        self.dtypes = dict(achieved_goal=achieved, desired_goal=desired)
        self.observation_space = Dict(
            observation=Box(-1, 1, (2,)),
            **{name: Box(-1, 1, (2,), x) for name, x in self.dtypes.items()},
        )

    def _obs(self):
        return dict(
            super()._obs(),
            **{name: super(Typed, self)._obs()[name].astype(x) for name, x in self.dtypes.items()},
        )

    def compute_reward(self, achieved_goal, desired_goal, info):
        return -np.abs(achieved_goal - desired_goal).sum(-1)


@pytest.mark.parametrize("dtypes", [(np.float32, np.float64), (np.float64, np.float32)])
def test_goals_may_be_floats_of_two_sizes(dtypes):
    actor = DeterministicPolicy.for_env(lambda: Typed(*dtypes), hidden=(4,), seed=0)
    pipe = replayed(
        lambda: Typed(*dtypes),
        actor,
        n_envs=2,
        n_steps=4,
        n_sampled_goal=4,
        capacity=90,
        batch_size=20,
        warmup=9,
        seed=0,
    )
    samples = [sample.fragment for item in islice(pipe, 6) for sample in item.samples]
    for f in samples:
        reached = next_observations(f)["achieved_goal"][0]
        desired = f.state.obs["desired_goal"][0]
        torch.testing.assert_close(f.state.rew[1], -(reached - desired).abs().sum(-1).float())
    assert samples


class Broken(PointReach):
    broken = False

    def compute_reward(self, achieved_goal, desired_goal, info):
        return info["missing"]

    def step(self, action):
        return self._obs(), -1.0, False, False, {}


def first(env, policy=MLPPolicy, **options):
    actor = policy.for_env(env, hidden=(4,), seed=0)
    stream = dict(
        n_envs=2, n_steps=4, capacity=90, warmup=0, batch_size=5, seed=0, n_sampled_goal=4
    )
    return next(iter(replayed(env, actor, **stream | options)))


@pytest.mark.parametrize(
    "make, error, text",
    [
        (
            lambda: first("CartPole-v1"),
            DataError,
            "Hindsight, leaf obs: the observations have no goals. Expected a dict with arrays",
        ),
        (
            lambda: first(lambda: Typed(np.float32, np.int64), DeterministicPolicy),
            DataError,
            "leaf obs.*one shape, both of floats or of one",
        ),
        (
            lambda: first(Silent),
            EnvError,
            "environment Silent: the environment does not tell the reward of other goals",
        ),
        (
            lambda: first(Broken),
            EnvError,
            "environment Broken: compute_reward failed: KeyError: 'missing'",
        ),
        (
            lambda: first(Moody),
            DataError,
            r"Hindsight, leaf rew: the rules give what the environment did not give. Expected \[-2.0",
        ),
        (
            lambda: first(BitFlip, length=3),
            DataError,
            "Hindsight, leaf length: goals are replaced in single steps. .* length=1, got 3",
        ),
        (
            lambda: first(BitFlip, RecurrentQPolicy, n_steps=1),
            DataError,
            "Hindsight, leaf hx: actors with memory are not supported",
        ),
        (lambda: first(BitFlip, n_sampled_goal=-1), DataError, "n_sampled_goal >= 1"),
        (
            lambda: first(BitFlip, edits=[RewardScaler.inserter(before=Replay, scale=0.5)]),
            DataError,
            "leaf rew: the rules give",
        ),
        (lambda: next(iter(Hindsight(Kept([1]), print))), DataError, "Hindsight.*Replayed"),
    ],
)
def test_what_cannot_work_is_refused_by_name(make, error, text):
    with pytest.raises(error, match=text):
        make()


def test_without_the_last_observations_of_terminated_episodes():
    with pytest.raises(
        DataError,
        match="leaf final: a true last observation is missing. Expected terminal_obs=True",
    ):
        list(islice(bits(n=1, terminal_obs=False), 9))


@pytest.mark.slow
def test_learning():
    "12 bits: 4,096 states. Without hindsight DQN never sees a reward; with it, it finds each goal by the shortest way."

    def train(k, steps=7000):
        actor = QPolicy.for_env(BitFlip, hidden=(256,), seed=0)
        dqn = DQN(actor, gamma=0.98, tau=0.05, eps_start=0.2, eps_steps=20_000, seed=0)
        for batch in replayed(
            BitFlip, actor, warmup=500, batch_size=128, n_batches=8, seed=0, n_sampled_goal=k
        ):
            dqn.update(batch)
            if dqn.steps >= steps:
                return evaluate(BitFlip, actor, n_episodes=50, seed=1)

    assert train(4).mean > -6 and train(0).mean < -11
