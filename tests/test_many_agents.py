"""Agents of parallel environments as columns of one batch, against a plain loop over one environment; policies and learners by group."""

from functools import partial
from itertools import islice

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from hypothesis import example, given, settings
from hypothesis import strategies as st
from reference import assert_same
from toys import Counting, Lively, Memory, Plain, Thrifty

from rollpipe.agents import PPO, RandomActor, evaluate
from rollpipe.layers import Critic, MLPPolicy, RecurrentPolicy
from rollpipe.layers.by_group import ActorByGroup, CriticByGroup
from rollpipe.pipes import (
    ActorError,
    AdvantageBuffer,
    CheckInvariants,
    DataError,
    EnvError,
    Fragment,
    Lanes,
    ProcessReading,
    on_policy,
    replayed,
    rollouts,
)
from rollpipe.pipes.envs.agents import Agents
from rollpipe.pipes.envs.keeping import keeper_for
from rollpipe.pipes.graph.torchdata import DataLoader2
from rollpipe.runs import resumed, saved
from rollpipe.runs.export import FORMATS, export_policy

KINDS = "term", "trunc", "both"


class Play:
    """A parallel environment: an episode of its plan says for each agent when it comes, for how many steps it stays, and how it ends.

    The observation is [tag, number of the episode, step, last action of the agent]; the reward tells the same moment.
    """

    space = Box(-np.inf, np.inf, (4,))

    def __init__(self, plan=(((0, 3, "term"), (0, 5, "trunc")),), tag=0):
        self.plan = plan
        self.tag = tag
        self.episode = -1
        self.closed = False
        self.possible_agents = [f"agent_{i}" for i in range(len(plan[0]))]

    def observation_space(self, agent):
        return self.space

    def action_space(self, agent):
        return Discrete(5)

    def close(self):
        self.closed = True

    def look(self, agent):
        return np.array([self.tag, self.episode, self.n, self.last.get(agent, 0)], np.float32)

    def lives(self):
        return dict(zip(self.possible_agents, self.plan[self.episode % len(self.plan)]))

    def reset(self, seed=None, options=None):
        assert not self.closed
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.episode = self.episode + 1
        self.n = 0
        self.last = {}
        self.agents = [agent for agent, (begin, *_) in self.lives().items() if begin == 0]
        return {agent: self.look(agent) for agent in self.agents}, {
            agent: {} for agent in self.agents
        }

    def step(self, actions):
        assert not self.closed and {*actions} == {*self.agents}
        self.n = self.n + 1
        self.last = {agent: int(action) for agent, action in actions.items()}
        lives = self.lives()
        ends = {
            agent: lives[agent][2] if self.n == sum(lives[agent][:2]) else None for agent in actions
        }
        self.agents = [a for a in actions if ends[a] is None] + [
            a for a, (begin, *_) in lives.items() if begin == self.n
        ]
        return (
            {agent: self.look(agent) for agent in {*actions, *self.agents}},
            {
                agent: 100 * self.episode + self.n + action / 10
                for agent, action in self.last.items()
            },
            {agent: kind in ("term", "both") for agent, kind in ends.items()},
            {agent: kind in ("trunc", "both") for agent, kind in ends.items()},
            {agent: {"n": self.n} for agent in actions},
        )


def walk(env, acts):
    "What the columns of one environment hold, by a loop that knows no arrays: rows for each agent, and the last observations."

    def begin(first=False):
        obs, _ = env.reset(seed=0) if first else env.reset()
        return {agent: obs.get(agent, obs[env.agents[0]]) for agent in env.possible_agents}, {
            *env.agents
        }

    obs, living = begin(True)
    rows = [{agent: (obs[agent], 0, 0.0, True, False) for agent in obs}]
    valid = []
    infos = []
    finals = {}
    for t, act in enumerate(acts):
        new, rew, terms, truncs, info = env.step(
            {a: x for a, x in zip(env.possible_agents, act) if a in living}
        )
        row = {}
        went = living
        for a, (_, stepno, *_) in rows[-1].items():
            if a in went:
                over = terms[a] or truncs[a]
                if truncs[a] and not terms[a]:
                    finals[t, a] = new[a]
                obs[a] = new[a]
                row[a] = [0 if over else stepno + 1, rew[a], over, terms[a]]
            else:
                obs[a] = new[a] if a in env.agents else obs[a]
                row[a] = [0, 0.0, True, False]
        living = {*env.agents}
        if not living:
            obs, living = begin()
        rows.append({a: (obs[a], *row[a]) for a in row})
        valid.append([a in went for a in row])
        infos.append([info[a]["n"] if a in went else 0 for a in row])
    return rows, valid, infos, finals


def collect(make, actor, n_steps=7, n=1, **kwargs):
    return list(
        islice(rollouts(make, actor, n_envs=None, n_steps=n_steps, **{"seed": 0, **kwargs}), n)
    )


@st.composite
def plans(draw):
    k = draw(st.integers(1, 3))
    life = st.tuples(st.integers(0, 3), st.integers(1, 4), st.sampled_from(KINDS))
    episodes = draw(st.lists(st.lists(life, min_size=k, max_size=k), min_size=1, max_size=3))
    return [
        [(0, *first[1:]), *others] for first, *others in episodes
    ]  # one is there when the episode begins


@settings(deadline=None, max_examples=60)
@given(
    plans=st.lists(plans(), min_size=1, max_size=1),
    copies=st.integers(1, 3),
    n_steps=st.integers(1, 9),
)
@example(plans=[[[(0, 1, "trunc"), (0, 2, "term")]]], copies=1, n_steps=9)
def test_equals_a_plain_loop(plans, copies, n_steps):
    "Whoever comes and goes when: each column is that of its agent in its copy."

    def make():
        tags = iter(range(copies))
        return Agents(lambda: Play(plans[0], next(tags)), copies)

    k = len(plans[0][0])
    (f,) = collect(make, Plain(), n_steps, edits=[CheckInvariants.inserter(after=Lanes, rate=1.0)])
    assert f.n_envs == copies * k
    n_final = 0
    for c in range(copies):
        at = slice(c * k, (c + 1) * k)
        rows, valid, infos, finals = walk(Play(plans[0], c), f.state.act[1:, at].tolist())
        for t, row in enumerate(rows):
            for b, (obs, stepno, rew, fin, term) in enumerate(row.values(), c * k):
                assert f.state.obs[t, b].tolist() == obs.tolist()
                assert (f.state.stepno[t, b], f.state.fin[t, b], f.term[t, b]) == (
                    stepno,
                    fin,
                    term,
                )
                assert f.state.rew[t, b] == np.float32(rew)
        assert f.valid[:, at].tolist() == valid and f.env["n"][:, at].tolist() == infos
        found = {
            (int(t), int(b)): x.tolist()
            for t, b, x in zip(f.final.t, f.final.b, f.final.obs)
            if c * k <= b < (c + 1) * k
        }
        assert found == {(t, c * k + int(a[-1])): x.tolist() for (t, a), x in finals.items()}
        n_final += len(found)
    assert len(f.final.t) == n_final


class Alone:
    "A single environment as a parallel one with one agent."

    possible_agents = ["it"]

    def __init__(self, env):
        self.env = env

    def observation_space(self, agent):
        return self.env.observation_space

    def action_space(self, agent):
        return self.env.action_space

    def close(self):
        self.env.close()

    def reset(self, seed=None, options=None):
        self.agents = ["it"]
        return tuple({"it": x} for x in self.env.reset(seed=seed))

    def step(self, actions):
        answer = self.env.step(actions["it"])
        if answer[2] or answer[3]:
            self.agents = []
        return tuple({"it": x} for x in answer)


@pytest.mark.parametrize(
    "env, actor",
    [(Lively, MLPPolicy.for_env(Lively, seed=0)), (Counting, Memory())],
    ids=["Lively", "Counting"],
)
@pytest.mark.parametrize("terminal_obs", [False, True])
def test_one_agent_is_a_single_environment(env, actor, terminal_obs):
    "The same seeds, infos, ends and last observations as in a batch of single environments, bit for bit."
    a = collect(
        lambda: Agents(lambda: Alone(env()), 3), actor, 20, 3, terminal_obs=terminal_obs, seed=5
    )
    b = list(
        islice(rollouts(env, actor, n_envs=3, n_steps=20, terminal_obs=terminal_obs, seed=5), 3)
    )
    assert_same(a, b)


def test_what_environments_use_again_is_recorded_as_it_was():
    def fragments(fresh):
        return collect(lambda: Agents(lambda: Alone(Thrifty(fresh=fresh)), 2), Plain(), 20, 2)

    found = fragments(False)
    assert_same(found, fragments(True))
    assert all(torch.equal(f.env["n"], f.state.stepno[:-1] + 1) for f in found)


@pytest.mark.parametrize("keys", [None, ["episode", "count"]])
def test_infos_of_wrappers_belong_to_their_agents(keys):
    def make():
        return RecordEpisodeStatistics(Agents(lambda: Alone(Counting()), 2))

    for f in collect(make, Plain(), 20, 2, info_keys=keys):
        ended = f.state.fin[1:]
        assert torch.equal(f.env["_episode"], ended) and torch.equal(
            f.env["count"], f.state.stepno[:-1] + 1
        )
        assert torch.equal(f.env["episode"]["l"][ended], f.env["count"][ended])


@pytest.mark.parametrize("copies", [1, 2])
def test_a_game_is_in_one_batch_at_a_time(copies):
    "Also if each batch has an `Agents` of its own around it."
    game = Play()

    def make():
        made = iter([Play(), game][-copies:])
        return Agents(lambda: next(made), copies)

    where = (
        r"lane 0, environment 0 \(agent_0 of"
        if copies == 1
        else r"lane 0, environment 2 \(agent_0 in copy 1 of"
    )
    with pytest.raises(
        EnvError, match=where + ".*: the environment has since been lent to another iteration"
    ):
        collect(make, Plain(), n=2, lanes=2)


def test_seeds_are_given_once_and_differ():
    seeds = []

    class Noting(Play):
        def reset(self, seed=None, options=None):
            seeds.append(seed)
            return super().reset(seed, options)

    collect(lambda: Agents(Noting, 2), Plain(), 12)
    assert len({*seeds[:2]}) == 2 and seeds[:2] != [None, None] and {*seeds[2:]} == {None}


class Partial(Play):
    "Infos of some agents at some times only, of different kinds of numbers."

    def step(self, actions):
        *answer, infos = super().step(actions)
        return *answer, {
            a: {"score": self.n + 0.5} if a == "agent_1" else {"score": 1} for a in infos
        }


def test_infos_keep_their_numbers():
    "An integer of the first agent does not round the number of the second one."
    (f,) = collect(lambda: Agents(Partial), Plain(), 3)
    assert f.env["score"].tolist() == [[1, 1.5], [1, 2.5], [1, 3.5]]


def changed(method, new):
    "A subclass of `Play` whose answers of `method` go through `new(env, answer)`."
    return type(
        "Changed",
        (Play,),
        {
            method: lambda self, *args, **kwargs: new(
                self, getattr(Play, method)(self, *args, **kwargs)
            )
        },
    )


def no_more(env, answer):
    env.agents = []
    return answer


def strangers(env, answer):
    env.agents = ["nobody", *env.agents]
    return answer


def without(i):
    return lambda env, answer: tuple({} if i == k else x for k, x in enumerate(answer))


def with_value(i, x):
    return lambda env, answer: tuple(
        {**y, "agent_1": x} if i == k else y for k, y in enumerate(answer)
    )


def first_or_raise(make):
    return collect(lambda: Agents(make, 2), Plain(), 3)


@pytest.mark.parametrize(
    "make, message",
    [
        (changed("reset", lambda env, answer: answer[0]), "reset.. gave no tuple of 2"),
        (
            changed("reset", without(0)),
            r"environment 0 \(agent_0 in copy 0 of <lambda>\), leaf obs: an agent is missing",
        ),
        (changed("reset", strangers), "environment copy 0, leaf agents: these are other agents"),
        (changed("reset", no_more), r"these are other agents. Expected some of .*, got \[\]"),
        (changed("step", lambda env, answer: answer[:4]), "step.. gave no tuple of 5"),
        (
            changed("step", without(0)),
            r"environment 0 \(agent_0 .*leaf obs: an agent is missing in the answer. Expected an entry 'agent_0'",
        ),
        (changed("step", without(1)), "leaf rew: an agent is missing"),
        (changed("step", without(2)), "leaf terminated: an agent is missing"),
        (changed("step", without(3)), "leaf truncated: an agent is missing"),
        (
            changed("step", with_value(0, np.zeros(3, np.float32))),
            r"environment 1 \(agent_1 in copy 0 .*leaf obs",
        ),
        (
            changed("step", with_value(0, np.full(4, np.nan, np.float32))),
            r"environment 1 \(agent_1 in copy 0 .*non-finite",
        ),
        (
            changed("step", with_value(1, [1, 2])),
            r"environment 1 \(agent_1 in copy 0 .*the reward is no scalar",
        ),
        (
            changed("step", with_value(2, "yes")),
            r"environment 1 \(agent_1 in copy 0 .*whether the episode ends",
        ),
        (
            changed("step", with_value(4, 3)),
            r"environment 1 \(agent_1 in copy 0 .*the info is no dict",
        ),
        (
            changed("step", no_more),
            "`agents` does not fit the ends of episodes. Expected 'agent_0' there if and only if",
        ),
        (changed("step", strangers), "these are other agents"),
        (
            type(
                "Empty",
                (Play,),
                {"possible_agents": property(lambda self: [], lambda self, x: None)},
            ),
            "at least one agent",
        ),
    ],
)
def test_errors_name_the_agent(make, message):
    with pytest.raises((EnvError, DataError), match=message):
        first_or_raise(make)


def test_agents_that_make_no_batch_are_refused():
    class Named(Play):
        space = Dict({"agent": Box(-1, 1)})

    with pytest.raises(EnvError, match=r"leaf obs\['agent'\]"):
        Agents(Named, ids=True)
    with pytest.raises(EnvError, match="many agents is no single one.*Agents"):
        collect(Play, Plain())
    with pytest.raises(EnvError, match="cannot rest"):
        collect(lambda: Agents(Play), Plain(), sticky=True)


def test_all_are_closed_after_an_error():
    made = [Play(), Play(), Play([[(0, 1, "term")]])]
    copies = iter(made)
    with pytest.raises(EnvError):
        Agents(lambda: next(copies), 3)
    assert all(env.closed for env in made)


def make_play():
    return Agents(lambda: Play([[(0, 2, "term"), (0, 5, "trunc"), (1, 2, "both")]]), 2, ids=True)


def groups(kind=MLPPolicy, **kwargs):
    of = ["one", "many", "many"]
    actors = dict(
        one=MLPPolicy.for_env(make_play, hidden=(8,), seed=0),
        many=kind.for_env(make_play, hidden=(8,), seed=1, **kwargs),
    )
    critics = {name: Critic.for_env(make_play, hidden=(8,), seed=2) for name in actors}
    return actors, critics, ActorByGroup(actors, of), CriticByGroup(critics, of)


@pytest.mark.parametrize("kind", [MLPPolicy, RecurrentPolicy])
def test_parts_are_what_their_own_actors_collect(kind):
    "A learner replays its part, and judges it, as if no other agents were there."
    actors, critics, actor, critic = groups(kind)
    batch = next(
        iter(on_policy(make_play, actor, critic, n_envs=None, n_steps=11, lanes=2, seed=0))
    )
    parts = actor.parts(batch)
    assert batch.n_envs == 12 and {name: x.n_envs for name, x in parts.items()} == dict(
        one=4, many=8
    )
    for name, part in parts.items():
        assert {*part.state.obs["agent"].unique().tolist()} == {*dict(one=[0], many=[1, 2])[name]}
        assert len(part.final.t) == (
            0 if name == "one" else (part.state.fin & ~part.term)[1:][part.valid].sum()
        )
        with torch.no_grad():
            again = actors[name].replay(part)
        for key in ("dist", "logp"):
            torch.testing.assert_close(again[key][part.valid], part.actor[key][:-1][part.valid])
        own = AdvantageBuffer(rollouts(make_play, actor), critics[name]).estimate(
            part._replace(adv=None, ret=None)
        )
        torch.testing.assert_close(own.adv, part.adv)
        before = {n: [x.clone() for x in a.parameters()] for n, a in actors.items()}
        PPO(actors[name], critics[name], seed=0).update(part)
        moved = {
            n
            for n, a in actors.items()
            if any((x != y).any() for x, y in zip(before[n], a.parameters()))
        }
        assert moved == {name}


@pytest.mark.parametrize("kind", [MLPPolicy, RecurrentPolicy])
def test_another_engine_answers_the_same(kind):
    pytest.importorskip("onnxruntime")
    actor = groups(kind)[2]
    a, b = (collect(make_play, actor, 9, 2, engine=engine) for engine in ("torch", "onnxruntime"))
    assert_same([x.state for x in a], [x.state for x in b])


def test_a_group_that_rests_has_no_part():
    "Agent 0 is there for two steps of five."
    actor = groups()[2]
    assert [[*actor.parts(batch)] for batch in collect(make_play, actor, 2, 3)] == [
        ["one", "many"],
        ["many"],
        ["one", "many"],
    ]


@pytest.mark.parametrize("n_envs", [None, 1, 4])
def test_an_evaluation_of_a_vector_says_which_number_it_needs(n_envs):
    "`make_play` has two copies of three agents."
    actor = MLPPolicy.for_env(make_play, hidden=(8,), seed=0)
    assert len(evaluate(make_play, actor, 9, n_envs=6, seed=0).returns) == 9
    with pytest.raises(EnvError, match=r"n_envs=\d. Expected n_envs=6, as in the vector"):
        evaluate(make_play, actor, 9, n_envs=n_envs)


def test_batches_of_a_memory_are_not_divided_by_group():
    actor = groups()[2]
    batch = next(iter(replayed(make_play, actor, n_envs=None, capacity=64, batch_size=4, warmup=8)))
    with pytest.raises(DataError, match="memory are not divided by group.*one learner for all"):
        actor.parts(batch)


def test_the_normalisers_of_critics_by_group_see_their_own_agents():
    critic = groups()[3]
    actor = MLPPolicy.for_env(make_play, hidden=(8,), seed=0)
    batch = next(iter(on_policy(make_play, actor, critic, n_envs=None, n_steps=11, seed=0)))
    PPO(actor, critic, epochs=1).update(batch)
    valid = batch.valid
    group = critic.groups_of(batch.state.obs)[:-1]
    assert [member.obs_norm.count for member in critic.members.values()] == [
        (valid & (group == k)).sum() for k in range(2)
    ]
    assert [member.ret_count for member in critic.members.values()] == [
        valid.sum()
    ] * 2  # because the loss has one unit
    torch.testing.assert_close(critic.ret_std, batch.ret[valid].std(correction=0))


@pytest.mark.parametrize("late", [0, 1])
def test_the_lag_of_a_part_is_that_of_its_own_actor(late):
    "Agent 0 rests now and then, and then its actor is not updated."
    actors, critics, actor, critic = groups()
    agents = {name: PPO(actors[name], critics[name], seed=0, epochs=1) for name in actors}
    done = dict(one=0, many=0)
    pipe = on_policy(make_play, actor, critic, n_envs=None, n_steps=2, seed=0)
    with DataLoader2(pipe, reading_service=ProcessReading(1, lag=1) if late else None) as loader:
        for k, batch in enumerate(islice(loader, 6)):
            lag = min(k, late)
            assert set(batch.version.tolist()) == {k - lag}
            for name, part in actor.parts(batch).items():
                assert agents[name].update(part)["lag"] == lag and set(part.version.tolist()) == {
                    done[name] - lag
                }
                done[name] += 1
    assert done["one"] < done["many"] == 6


def test_an_actor_that_draws_by_itself_has_a_place():
    actors = dict(one=RandomActor.for_env(make_play), many=MLPPolicy.for_env(make_play, seed=0))
    actor = ActorByGroup(actors, ["one", "many", "many"])
    a, b = (collect(make_play, actor, 9, 2) for _ in range(2))
    assert_same(a, b)
    part = actor.parts(a[0])["many"]
    assert isinstance(part, Fragment) and {*part.actor} == {"dist", "logp"}


def test_groups_are_checked():
    actors, *_ = groups()
    with pytest.raises(DataError, match="each group needs a member"):
        ActorByGroup(actors, ["one", "few", "few"])
    with pytest.raises(DataError, match="leaf of: each agent needs a group. Expected 3 names"):
        ActorByGroup(actors, ["one", "many"])

    def without():
        return Agents(Play)

    with pytest.raises(ActorError, match="made for other observations"):
        collect(without, ActorByGroup(actors, ["one", "many", "many"]))
    actor = ActorByGroup(
        {name: MLPPolicy.for_env(without) for name in actors}, ["one", "many", "many"]
    )
    with pytest.raises(RuntimeError, match="whose they are.*ids=True"):
        collect(without, actor)


class Forbidding(Play):
    "Its mask allows the action 3, and at the step `stuck` none."

    space = Dict(see=Play.space, action_mask=MultiBinary(5))
    stuck = None

    def look(self, agent):
        return dict(
            see=super().look(agent),
            action_mask=np.eye(5, dtype=np.int8)[3] * (self.n != self.stuck),
        )


class Stuck(Forbidding):
    stuck = 2


def test_a_mask_that_allows_nothing_is_an_error_for_groups_too():
    good, bad = (partial(Agents, cls, ids=True) for cls in (Forbidding, Stuck))
    masked = MLPPolicy.for_env(good, hidden=(8,), action_mask="action_mask")
    members = dict(one=masked, many=RandomActor.for_env(good, action_mask="action_mask"))
    actor = ActorByGroup(members, ["one", "many"])
    for batch in collect(good, actor, 8):
        assert (batch.state.act[1:][batch.valid] == 3).all()
    with pytest.raises(
        EnvError, match=r"agent_0.*leaf obs\['action_mask'\]: the mask allows no action"
    ):
        collect(bad, actor, 8)
    obs = dict(
        see=np.zeros((2, 4), np.float32),
        action_mask=np.eye(5, dtype=np.int8)[[3, 1]],
        agent=np.arange(2),
    )
    assert actor.predict(obs)[0].tolist() == [3, 1]
    obs["action_mask"][1] = 0
    with pytest.raises(DataError, match="environment 1, .*the mask allows no action"):
        actor.predict(obs)
    members["many"] = MLPPolicy.for_env(good, hidden=(8,))
    with pytest.raises(
        DataError,
        match="leaf members: the masks of the members differ.*got {'one': ActionMask.*'many': None}",
    ):
        ActorByGroup(members, ["one", "many"])


@pytest.mark.slow
@pytest.mark.usefixtures("functions_of_onnx")
@pytest.mark.parametrize("to", FORMATS)
def test_groups_are_exported_with_their_memories(to, tmp_path):
    if to == "onnx":
        pytest.importorskip("onnxruntime"), pytest.importorskip("onnxscript")
    assert export_policy(
        groups(RecurrentPolicy)[2], tmp_path / "policy", to
    )  # compared with `predict` for three steps


class Learners:
    "Two learners with one state, for `resumed` and `saved`."

    def __init__(self, agents):
        self.agents = agents

    def state_dict(self):
        return {name: agent.state_dict() for name, agent in self.agents.items()}

    def load_state_dict(self, state):
        return [agent.load_state_dict(state[name]) for name, agent in self.agents.items()]


def train(path, n):
    actors, critics, actor, critic = groups()
    learners = Learners({name: PPO(actors[name], critics[name], seed=3) for name in actors})
    pipe = on_policy(make_play, actor, critic, n_envs=None, n_steps=7, lanes=2, seed=0).map(
        actor.parts
    )
    with resumed(path, pipe, learners) as (loader, update):
        for parts in islice(loader, n - update):
            for name, part in parts.items():
                learners.agents[name].update(part)
            update += 1
            if update == 2:
                saved(path, loader, learners, update)
    return {name: agent.state_dict()["actor"] for name, agent in learners.agents.items()}


@pytest.mark.slow
def test_two_learners_go_on_exactly(tmp_path):
    assert keeper_for(make_play).name == "replay (all)"
    whole = train(tmp_path / "a", 5)
    train(tmp_path / "b", 3)
    assert_same(train(tmp_path / "b", 5), whole)


def test_evaluation_counts_the_episodes_of_each_agent():
    found = evaluate(lambda: Agents(Play, 2), Plain(), 12, n_envs=4, seed=0)
    assert found.lengths.tolist() == [3] * 3 + [5] * 3 + [3] * 3 + [5] * 3
    assert found.terminated.tolist() == ([True] * 3 + [False] * 3) * 2


def test_with_pettingzoo():
    "The real ones: a shared policy learns in simple_spread, and one that takes turns is refused with the name of a wrapper that exists."
    spread = pytest.importorskip("mpe2.simple_spread_v3")
    from pettingzoo.utils.conversions import aec_to_parallel

    with pytest.raises(EnvError, match="take turns"):
        Agents(spread.env)

    def make():
        return Agents(lambda: aec_to_parallel(spread.env()), 2)

    actor = MLPPolicy.for_env(make, seed=0)
    critic = Critic.for_env(make, seed=0)
    batch = next(iter(on_policy(make, actor, critic, n_envs=None, n_steps=30, seed=0)))
    assert (
        batch.n_envs == 6 and batch.valid.all() and len(batch.final.t) == 6 and not batch.term.any()
    )
    PPO(actor, critic, seed=0).update(batch)
