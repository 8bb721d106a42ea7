"Rewards for what is new: beside loops, through workers, checkpoints and the command's configuration, and what it learns with them."

import copy
import csv
import functools
import math

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete
from reference import assert_same, snapshot
from test_laws_of_learners import resting
from torch import nn
from toys import Stepped

from rollpipe.agents import PPO, RND, TRPO, evaluate
from rollpipe.agents.checkpoint import load_checkpoint
from rollpipe.agents.intrinsic import Distillation
from rollpipe.layers import Critic, MLPPolicy, RecurrentPolicy
from rollpipe.pipes import (
    AdvantageBuffer,
    DataError,
    EpisodeStats,
    Fragment,
    FragmentCollector,
    GraphError,
    Lanes,
    ProcessReading,
    RewardScaler,
    nested,
    on_policy,
    replayed,
    rollouts,
)
from rollpipe.pipes.data.errors import CheckpointError
from rollpipe.pipes.data.fragment_ops import ENV_REWARD, env_rewards
from rollpipe.pipes.graph.edits import find_one
from rollpipe.pipes.graph.torchdata import DataLoader2
from rollpipe.runs.folder import load_run, resume, start
from rollpipe.runs.locks import unlock
from rollpipe.runs.logs import read_evaluations, write_evaluations
from rollpipe.runs.states import edited, states_of
from rollpipe.runs.training import train
from rollpipe.settings.config import build, make_config
from rollpipe.testing.tasks import NarrowPath


class Walk(Stepped):
    "A random walk with episodes of all kinds of ends; the observation is nested, partly an integer, and tells the step."

    observation_space = Dict(
        place=Box(-np.inf, np.inf, (2,), np.float64), kind=Discrete(3, start=1)
    )
    action_space = Discrete(2)

    def begin(self):
        self.length = int(self.np_random.integers(1, 6))

    def look(self):
        return dict(
            place=self.np_random.normal(size=2) * 50 + 10 * self.count,
            kind=int(self.np_random.integers(1, 4)),
        )

    def pay(self, action):
        return float(action)

    def ends(self):
        return self.count == self.length and self.length % 2 == 0, self.count == self.length


def networks(env=Walk, seed=2, **options):
    return Distillation.for_env(env, hidden=(6,), n_out=3, seed=seed, **options)


def source(n_steps=5, **options):
    "Fragments of random walks."
    actor = MLPPolicy.for_env(Walk, seed=0)
    stream = dict(n_envs=2, n_steps=n_steps, seed=0, terminal_obs=True)
    return rollouts(Walk, actor, **stream | options)


def walks(lanes=2, n_steps=5, network=None, **options):
    network = networks() if network is None else network
    edits = [RND.inserter(after=Lanes, network=network, **options)]
    return source(n_steps, lanes=lanes, edits=edits)


def reached(fragment):
    "The true observations that the steps led to, row by row."
    ends = {(int(t), int(b)): k for k, (t, b) in enumerate(zip(fragment.final.t, fragment.final.b))}

    def at(t, b):
        return (
            nested.map(lambda x: x[ends[t, b]], fragment.final.obs)
            if (t, b) in ends
            else nested.map(lambda x: x[t + 1, b], fragment.state.obs)
        )

    return {
        (t, b): at(t, b)
        for t in range(fragment.n_steps)
        for b in range(fragment.n_envs)
        if fragment.valid[t, b]
    }


def same_states(a, b):
    def plain(x):
        return {k: plain(y) for k, y in x.items()} if isinstance(x, dict) else x

    assert_same(*(snapshot(nested.leaves(plain(x))) for x in (a, b)))


def perceptron(net, x):
    for layer in net.hidden:
        x = np.maximum(
            layer.weight.detach().double().numpy() @ x + layer.bias.detach().double().numpy(), 0
        )
    return net.last.weight.detach().double().numpy() @ x + net.last.bias.detach().double().numpy()


class Oracle:
    "The same rewards, one number at a time, with all that was seen kept in lists."

    def __init__(self):
        self.seen = []
        self.all_sums = []
        self.sums = {}

    def __call__(self, network, fragment, gamma):
        features = {
            at: np.array(
                [*obs["place"].double().tolist(), *(float(obs["kind"] == k) for k in (1, 2, 3))]
            )
            for at, obs in reached(fragment).items()
        }
        self.seen += [x.copy() for x in features.values()]
        mean = np.mean(self.seen, 0)
        std = np.sqrt(np.var(self.seen, 0) + 1e-8)
        out = np.zeros(tuple(fragment.valid.shape))
        for at, x in features.items():
            x[:2] = np.clip((x - mean) / std, -5, 5)[:2]  # a number in [0, 1] stays as it is
            out[at] = np.mean(
                (perceptron(network.predictor.net, x) - perceptron(network.target.net, x)) ** 2
            )
        for b in range(0, fragment.n_envs, 2):  # a lane has two environments
            for c in (b, b + 1):
                key = (int(fragment.lane[c]), c - b)
                error = out[:, c].copy()
                for t in range(fragment.n_steps):
                    if not fragment.valid[t, c]:
                        continue
                    self.sums[key] = gamma * self.sums.get(key, 0.0) + error[t]
                    self.all_sums.append(self.sums[key])
            out[:, b : b + 2] /= np.std(self.all_sums)
        return out


def test_it_does_not_stand_below_advantages():
    pipe = RND(AdvantageBuffer(source(), Critic.for_env(Walk, seed=0)), networks())
    with pytest.raises(DataError, match="RND.*the advantages are those of other rewards"):
        next(iter(pipe))


@pytest.mark.parametrize("lanes", [1, 2])
def test_rewards_are_those_of_loops(lanes):
    stream = source(lanes=lanes)
    rnd = RND(stream, networks(), weight=0.5, env_weight=2.0, gamma=0.9, lr=0.01, minibatch=4)
    oracle = Oracle()
    for k, fragment in zip(range(6), stream):
        before = copy.deepcopy(rnd.network)
        new = rnd.with_novelty(fragment)
        novelty = oracle(before, fragment, 0.9)
        np.testing.assert_allclose(
            (new.state.rew[1:] - 2 * fragment.state.rew[1:]) / 0.5,
            novelty,
            rtol=2e-3,
            atol=1e-4,
            err_msg=str(k),
        )
        assert (new.state.rew[0] == 2 * fragment.state.rew[0]).all()
        assert (env_rewards(new) == fragment.state.rew[1:]).all()
        trained, fixed = (
            [not torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters())]
            for a, b in (
                (rnd.network.predictor, before.predictor),
                (rnd.network.target, before.target),
            )
        )
        assert any(trained) and not any(fixed)


def test_rows_that_are_no_step_have_no_reward_and_no_influence():
    "Environment 1 rests; nan stands in its rows."
    fragment = next(iter(source(n_steps=6)))
    results = []
    for junk in (0.0, math.nan):
        rnd = RND(on_policy(Walk, MLPPolicy.for_env(Walk)), networks(), seed=5)
        rows = resting(fragment, junk)
        novelty = rnd.with_novelty(rows).state.rew[1:] - env_rewards(rows)
        results.append(snapshot([novelty[:, 0], nested.leaves(rnd.state_dict())]))
        if not junk:
            assert (novelty[rows.valid] > 0).all() and (novelty[~rows.valid] == 0).all()
    assert_same(*results)


def test_a_fragment_without_a_step_teaches_nothing():
    fragment = next(iter(walks()))
    rnd = RND(walks(), networks())
    before = copy.deepcopy(rnd.state_dict())
    new = rnd.with_novelty(fragment._replace(valid=torch.zeros_like(fragment.valid)))
    assert (new.state.rew == fragment.state.rew).all()
    same_states(before, rnd.state_dict())


@pytest.mark.parametrize("lanes", [1, 2])
def test_the_stream_is_that_of_plain_pipes_and_does_not_depend_on_workers(lanes):
    def first(pipe, service=None):
        with DataLoader2(pipe, reading_service=service) as loader:
            return [snapshot(x) for _, x in zip(range(4), loader)]

    def make(optimize):
        return on_policy(
            NarrowPath,
            MLPPolicy.for_env(NarrowPath, seed=0),
            Critic.for_env(NarrowPath, seed=1),
            n_envs=2,
            n_steps=6,
            lanes=lanes,
            seed=0,
            terminal_obs=True,
            edits=[RND.inserter(after=Lanes, network=networks(NarrowPath))],
            optimize=optimize,
        )

    plain = first(make(False))
    for other in (first(make(True)), first(make(True), ProcessReading(lanes))):
        for a, b in zip(plain, other):
            assert_same(a, b)


def test_two_pipelines_with_the_same_seeds_are_the_same_and_copies_share_what_is_learned():
    (a, x), (b, y) = (
        (pipe, [snapshot(f) for _, f in zip(range(3), pipe)])
        for pipe in (walks(seed=1), walks(seed=1))
    )
    for p, q in zip(x, y):
        assert_same(p, q)
    same_states(states_of(a), states_of(b))
    other = [f for _, f in zip(range(3), walks(seed=2))]
    assert not torch.equal(
        torch.as_tensor(other[2].state.rew),
        next(f for k, f in enumerate(walks(seed=1)) if k == 2).state.rew,
    )


def test_a_memory_has_the_novelty_of_every_step():
    "Row 0 of a fragment repeats the reward of the step before without its novelty."
    edits = [RND.inserter(after=Lanes, network=networks())]
    pipe = replayed(
        Walk,
        MLPPolicy.for_env(Walk, seed=0),
        n_envs=2,
        n_steps=1,
        lanes=2,
        warmup=0,
        seed=0,
        edits=edits,
    )
    batch = [x for _, x in zip(range(6), pipe)][-1]
    sample = batch.memory.sample(200).fragment
    assert (sample.state.rew[1:] > env_rewards(sample)).all()


@pytest.mark.slow_but_one
@pytest.mark.parametrize("scale", ["sign", 0.1, "learn"])
def test_a_scale_that_would_be_that_of_the_novelty_too_is_refused(scale):
    def pipe(after):
        edits = [RND.inserter(after=after, network=networks())]
        return on_policy(
            Walk,
            MLPPolicy.for_env(Walk),
            Critic.for_env(Walk),
            terminal_obs=True,
            reward_scale=scale,
            edits=edits,
        )

    with pytest.raises(
        GraphError,
        match=r"RewardScaler.*Expected RND.inserter\(after=RewardScaler, ...\), got RND above it",
    ):
        next(iter(pipe(Lanes)))
    next(iter(pipe(RewardScaler)))


# --- in a run


def configured(**options):
    return make_config(
        "ppo",
        "CartPole-v1",
        dict(n_envs=2, n_steps=8, engine="torch"),
        steps=64,
        intrinsic=0.5,
        **options,
    )


@pytest.mark.parametrize("scale", ["sign", 0.1, "learn"])
def test_the_scale_of_rewards_is_not_that_of_the_novelty(scale):
    def rewards(**options):
        config = make_config(
            "ppo", "Pendulum-v1", dict(n_envs=2, n_steps=8, engine="torch"), **options
        )
        return next(iter(build(config)[1])).state.rew[1:]

    novelty = rewards(intrinsic=0.5) - rewards()
    assert (novelty > 0).all()
    torch.testing.assert_close(
        rewards(intrinsic=0.5, reward_scale=scale) - rewards(reward_scale=scale),
        novelty,
        rtol=1e-3,
        atol=1e-4,
    )


def test_a_run_keeps_what_its_pipe_has_learned(tmp_path):
    run = start(tmp_path / "run", configured(checkpoint_every=2))
    train(run, progress=False, tensorboard=False)
    stored = load_checkpoint(run.checkpoint).pipes
    same_states(stored, states_of(run.pipe))
    again = resume(tmp_path / "run", steps=96)
    same_states(states_of(run.pipe), states_of(again.pipe))
    train(again, progress=False, tensorboard=False)
    with open(tmp_path / "run" / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    returns = [
        (float(r["return_mean"]), float(r["length_mean"])) for r in rows if r.get("return_mean")
    ]
    assert returns and all(
        ret == length for ret, length in returns
    )  # CartPole pays 1 for each step


def test_a_pipe_that_python_inserts_goes_on_from_the_checkpoint(tmp_path, caplog):
    def inserted(run, seed):
        return edited(run, RND.inserter(after=Lanes, network=networks("CartPole-v1", seed=seed)))

    config = make_config(
        "ppo", "CartPole-v1", dict(n_envs=2, n_steps=8, engine="torch", terminal_obs=True), steps=32
    )
    run = inserted(start(tmp_path / "run", config), 1)
    train(run, progress=False, tensorboard=False)
    with pytest.raises(
        DataError,
        match=r"lacks pipes that learned or kept something in this run.*edited.*states of RND",
    ):
        train(resume(run.folder, steps=64), progress=False, tensorboard=False)
    again = inserted(resume(run.folder, steps=64), 2)
    assert not caplog.records and not again.waiting
    same_states(states_of(run.pipe), states_of(again.pipe))
    train(again, progress=False, tensorboard=False)
    inserted(
        edited(resume(run.folder, steps=96), lambda pipe: RND(pipe, networks("CartPole-v1"))), 3
    )
    assert "RND 2: the checkpoint has no state" in caplog.text
    unlock(run.folder)


def test_a_last_evaluation_that_is_made_up_leaves_what_pipes_have_learned(tmp_path):
    run = start(
        tmp_path / "run", configured(eval_every="32 steps", eval_episodes=1, final_episodes=1)
    )
    train(run, progress=False, tensorboard=False)
    records = read_evaluations(run.folder)
    stored = load_checkpoint(run.checkpoint).pipes
    write_evaluations(
        run.folder, [r for r in records if r["kind"] == "training"]
    )  # as if it was ended before
    train(resume(run.folder), progress=False, tensorboard=False)
    assert len(read_evaluations(run.folder)) == len(records) > 3
    same_states(load_checkpoint(run.checkpoint).pipes, stored)


@pytest.mark.parametrize(
    "how", [dict(eval_every="16 steps", eval_episodes=1, final_episodes=1), dict(eval_every=1)]
)
def test_the_best_checkpoint_has_the_states_of_its_moment(how, tmp_path, monkeypatch):
    states = {}
    run = start(tmp_path / "run", configured(**how))

    def update(batch, update=run.agent.update):
        metrics = update(batch)
        states[run.agent.steps] = copy.deepcopy(states_of(run.pipe))
        return metrics

    monkeypatch.setattr(run.agent, "update", update)
    train(run, progress=False, tensorboard=False)
    best = load_run(run.folder, best=True)
    same_states(
        best.pipes,
        states.get(best.counters["steps"], best.pipes if not best.counters["steps"] else None),
    )
    again = resume(run.best, steps=200)
    same_states(states_of(again.pipe), best.pipes)
    unlock(run.folder)


def test_a_run_that_is_refused_still_has_the_states_that_wait(tmp_path):
    config = make_config(
        "ppo",
        "CartPole-v1",
        dict(n_envs=2, n_steps=8, engine="torch", terminal_obs=True),
        steps=32,
        eval_every="32 steps",
        eval_episodes=1,
        final_episodes=1,
    )
    run = edited(
        start(tmp_path / "run", config), RND.inserter(after=Lanes, network=networks("CartPole-v1"))
    )
    train(run, progress=False, tensorboard=False)
    stored = load_checkpoint(run.checkpoint).pipes
    with pytest.raises(DataError, match="lacks pipes"):
        train(resume(run.folder, steps=64), progress=False, tensorboard=False)
    resume(run.folder, steps=64).save()
    unlock(run.folder)
    same_states(load_checkpoint(run.checkpoint).pipes, stored)


def test_a_state_that_does_not_fit_is_refused(tmp_path):
    run = start(tmp_path / "run", configured())
    find_one(run.pipe, RND).novelty.network = networks("CartPole-v1")  # smaller ones
    run.save()
    unlock(run.folder)
    with pytest.raises(CheckpointError, match="does not fit the pipe RND"):
        resume(run.folder)


def test_returns_of_episodes_are_those_of_the_environment():
    plain = []
    changed = []
    for ends, pipe in ((plain, source()), (changed, walks(lanes=1))):
        for _ in zip(range(5), EpisodeStats(pipe, ends.append)):
            pass
    assert plain == changed and len(plain) > 5


# --- refused


def fragment_of(obs):
    steps = torch.zeros(len(obs) - 1, 1)
    return Fragment.from_steps(torch.tensor(obs)[..., None, None], steps, steps)


def test_above_the_seam_it_is_refused_in_workers_too():
    pipe = source(edits=[RND.inserter(after=FragmentCollector, network=networks())])
    with pytest.raises(Exception, match="what learns cannot be copied for each lane"):
        with DataLoader2(pipe, reading_service=ProcessReading(1)) as loader:
            next(iter(loader))


def test_a_policy_that_sees_its_rewards_is_refused():
    actor = RecurrentPolicy.for_env(Walk, past=True)
    edits = [RND.inserter(after=Lanes, network=networks())]
    with pytest.raises(GraphError, match="sees its past rewards"):
        next(iter(rollouts(Walk, actor, terminal_obs=True, edits=edits)))


LARGE = r"obs after step \[1, 0\]: too large an observation. Expected at most 1.8e\+19, .*got tensor\(\[1"


@pytest.mark.parametrize(
    "number, told",
    [
        (math.nan, r"RND.*obs after step \[1, 0\].*non-finite observation"),
        (math.inf, r"RND.*obs after step \[1, 0\].*non-finite observation"),
        (1e20, LARGE),
    ],
)
def test_an_observation_without_novelty_is_named(number, told):
    rnd = RND(walks(), Distillation(Box(-1, 1, (1,))))
    with pytest.raises(DataError, match=told):
        rnd.with_novelty(fragment_of([0.0, 1.0, number, 2.0]))
    with pytest.raises(DataError, match="Expected a dict"):
        rnd.with_novelty(fragment_of([0.0, 1.0, 2.0])._replace(env=()))


BAD_OPTIONS = dict(
    network=nn.Linear(1, 1), weight=-1, env_weight=math.nan, fraction=0, lr=0, epochs=0, gamma=2
)


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_an_option_out_of_its_range_is_refused_by_name(name):
    with pytest.raises(DataError, match=name):
        RND(walks(), **dict(network=networks()) | {name: BAD_OPTIONS[name]})


def test_what_no_run_can_have_is_refused():
    with pytest.raises(DataError, match="intrinsic"):
        make_config("ppo", "CartPole-v1", intrinsic=-1)
    with pytest.raises(DataError, match="learns from a memory"):
        build(make_config("dqn", "CartPole-v1", intrinsic=1.0))


def test_a_predictor_that_diverges_is_named():
    rnd = RND(walks(), networks(), lr=1e30)
    with pytest.raises(
        DataError, match="the error of the predictor is not finite. Expected a smaller `lr`"
    ):
        for _, fragment in zip(
            range(9),
            source(),
        ):
            rnd.with_novelty(fragment)


def test_an_environment_without_rewards_of_its_own_name_keeps_them_all():
    fragment = next(iter(walks()))
    assert ENV_REWARD in fragment.env and fragment.env[ENV_REWARD].shape == fragment.valid.shape


# --- what it is for


@pytest.mark.slow
@pytest.mark.parametrize("learner", [PPO, TRPO])
def test_it_finds_the_end_of_a_path_that_chance_does_not(learner):
    env = functools.partial(NarrowPath, length=18)
    found = {}
    for weight in (0.0, 0.5):
        found[weight] = []
        for seed in range(3):
            actor = MLPPolicy.for_env(env, seed=seed)
            critic = Critic.for_env(env, seed=seed + 1)
            edits = (
                [
                    RND.inserter(
                        after=Lanes, network=Distillation.for_env(env, seed=seed + 2), weight=weight
                    )
                ]
                if weight
                else []
            )
            agent = learner(actor, critic, seed=seed)
            pipe = on_policy(
                env, actor, critic, n_envs=8, n_steps=64, seed=seed, terminal_obs=True, edits=edits
            )
            for _, batch in zip(range(58), pipe):
                agent.update(batch)
            found[weight].append(evaluate(env, actor, n_episodes=5).mean)
    assert max(found[0.0]) < 0.1 and np.median(found[0.5]) > 0.9, found
