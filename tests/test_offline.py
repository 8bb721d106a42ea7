"BC, IQL and TD3BC: losses and one step against independent computations, data of all kinds, resuming, and going online."

import copy
import json
import shutil
from functools import partial
from itertools import islice

import pytest
import torch
from command_line import rollpipe
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete
from recordings import recorded
from reference import assert_same, snapshot
from test_off_policy import SPACES, random_fragment, successor
from toys import Scripted, sampled

from rollpipe.agents import evaluate
from rollpipe.agents.offline import BC, IQL, TD3BC, cloning_loss
from rollpipe.layers import ActionCritic, Critic, DeterministicPolicy, MLPPolicy, RecurrentPolicy
from rollpipe.layers.critic import QVCritic
from rollpipe.pipes import (
    DataError,
    EnvStepper,
    EpisodeCollector,
    Fragment,
    Lanes,
    Recorder,
    Source,
    nested,
    on_policy,
    replayed,
    rollouts,
)
from rollpipe.pipes.data.errors import CheckpointError
from rollpipe.pipes.data.fragment_ops import transitions
from rollpipe.pipes.graph.pipe import restore_stream, stream_state
from rollpipe.pipes.invariants import check_alignment
from rollpipe.pipes.recording.data_sampler import DataSampler, from_data, return_scale
from rollpipe.pipes.recording.replayer import Replayer
from rollpipe.pipes.replay.memory import Sample
from rollpipe.runs import load_agent
from rollpipe.runs.folder import load_run, resume, start
from rollpipe.runs.fork import fork
from rollpipe.runs.logs import read_metrics
from rollpipe.runs.training import train
from rollpipe.settings.config import build, make_config

PARTS = {IQL: (MLPPolicy, QVCritic), TD3BC: (DeterministicPolicy, ActionCritic)}


def make(algorithm, env=SPACES, seed=0, hidden=(8,), **options):
    if algorithm is BC:
        return BC(MLPPolicy.for_env(env, hidden=hidden, seed=seed), seed=seed, **options)
    return algorithm(
        *(part.for_env(env, hidden=hidden, seed=seed) for part in PARTS[algorithm]),
        seed=seed,
        **options,
    )


def steps_of(fragment):
    "What each valid step of a fragment shows, as flat tensors: observation, action, reward, next observation, termination."
    s = fragment.state
    rows = fragment.valid.nonzero().tolist()
    act = s.act[1:]
    rew = s.rew[1:]
    found = [
        (
            s.obs[t, b],
            act[t, b],
            rew[t, b],
            successor(fragment, t, b),
            fragment.term[t + 1, b].float(),
        )
        for t, b in rows
    ]
    return map(torch.stack, zip(*found))


# --- losses and one step


@pytest.mark.parametrize("alpha", [0.0, 2.5])
def test_a_step_of_td3bc_is_that_of_the_equations(alpha):
    fragment = random_fragment(seed=1)
    gamma = 0.9
    agent = make(TD3BC, alpha=alpha, gamma=gamma, policy_every=1, smoothing=0.0, lr=1e-2)
    actor, critic, target, target_actor = map(
        copy.deepcopy, (agent.actor, agent.critic, agent.target, agent.target_actor)
    )
    agent.learn(Sample(fragment, None, None))

    obs, act, rew, after, term = steps_of(fragment)
    critic_adam, actor_adam = (
        torch.optim.Adam(net.parameters(), lr=1e-2) for net in (critic, actor)
    )
    with torch.no_grad():
        goal = rew + gamma * (1 - term) * target(after, target_actor.act(after)).min(0).values
    sum(((goal - values) ** 2).mean() for values in critic(obs, act)).div(2).backward()
    critic_adam.step()
    low, high = map(torch.from_numpy, (SPACES[1].low, SPACES[1].high))
    own = actor.act(obs)
    q = critic(obs, own)[0]
    (
        -alpha / q.abs().mean().detach() * q.mean()
        + torch.nn.functional.mse_loss(2 * own / (high - low), 2 * act / (high - low))
    ).backward()
    actor_adam.step()
    for mine, other in ((agent.critic, critic), (agent.actor, actor)):
        torch.testing.assert_close(
            list(mine.parameters()), list(other.parameters()), rtol=1e-4, atol=1e-5
        )


def test_a_critic_values_the_action_that_was_executed():
    "An environment gets an action clipped to its bounds."
    fragment = random_fragment(seed=1)
    low, high = map(torch.from_numpy, (SPACES[1].low, SPACES[1].high))
    drawn = 2 * fragment.state.act - (low + high) / 2
    clipped = drawn.clamp(low, high)
    assert not torch.equal(drawn, clipped)
    metrics = []
    for act in (drawn, clipped):
        rows = fragment._replace(state=fragment.state._replace(act=act))
        agent = make(TD3BC, policy_every=1)
        learned = agent.learn(Sample(rows, None, None))
        metrics.append({name: float(x) for name, x in learned.items()})
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-4)


ACTIONS = [
    Discrete(3, start=2),
    MultiDiscrete([2, 3]),
    Box(-2, 2, (2,)),
    Dict(gear=Discrete(3, start=1), steer=Box(-2, 2, (2,))),
]


@pytest.mark.parametrize("act", ACTIONS, ids=str)
def test_bc_makes_recorded_actions_of_any_kind_more_likely(act):
    def env():
        seen = Box(-1, 1, (3,))
        return Scripted([(99, "trunc")], observation_space=seen, action_space=act, see=sampled)

    def policy(seed):
        return MLPPolicy.for_env(env, hidden=(8,), normalize=False, seed=seed)

    batch = next(iter(rollouts(env, policy(0), n_envs=4, n_steps=8, seed=0)))
    agent = BC(policy(1), lr=3e-3)
    before = agent.actor.replay(batch)["logp"].mean()
    for _ in range(30):
        agent.update(batch)
    assert agent.actor.replay(batch)["logp"].mean() > before + 0.02
    agent.update(next(iter(from_data(env, data=Kept([batch]), batch_size=4, seed=0))))

    # Numbers that the environment does not have
    if isinstance(act, Box):
        return
    wrong = nested.map(lambda x: x if x.is_floating_point() else x + 9, batch.state.act)
    other = batch._replace(state=batch.state._replace(act=wrong))
    told = "leaf act.*the data are of another environment. Expected a number of"
    with pytest.raises(DataError, match=told):
        next(iter(from_data(env, data=Kept([other]))))


@pytest.mark.parametrize("algorithm", [BC, IQL])
def test_a_memory_needs_segments_and_begins_empty(algorithm):
    critic = [QVCritic.for_env(SPACES, hidden=(8,), seed=1)] * (algorithm is IQL)
    agent = algorithm(
        RecurrentPolicy.for_env(SPACES, hidden=(8,), memory=6, seed=0),
        *critic,
        **dict(beta=0.0) if critic else {},
    )
    fragment = random_fragment(T=6)
    with torch.no_grad():
        expected, _ = cloning_loss(fragment, agent.actor)
    assert agent.update(fragment)["loss_policy" if critic else "loss"] == pytest.approx(
        expected.item(), rel=1e-5
    )
    single = transitions(fragment, fragment.valid.flatten().nonzero()[:, 0])
    with pytest.raises(DataError, match="nothing from single steps"):
        agent.update(single)


# --- the stream of data


class Kept(Source):
    "Fragments in a list."

    def __init__(self, fragments):
        self.fragments = fragments

    def stream(self, items):
        yield from self.fragments


def collected(env="Pendulum-v1", n=6, **options):
    return list(
        islice(
            rollouts(
                env,
                MLPPolicy.for_env(env, seed=0),
                n_envs=3,
                n_steps=50,
                seed=0,
                terminal_obs=True,
                **options,
            ),
            n,
        )
    )


def test_true_last_observations_and_ends_come_through():
    "Pendulum is cut off after 200 steps, CartPole ends."
    for env in ("Pendulum-v1", "CartPole-v1"):
        fragments = collected(env)
        known = {}
        for f in fragments:
            for t, b in f.valid.nonzero().tolist():
                seen = (f.state.rew[t + 1, b], f.term[t + 1, b], f.state.fin[t + 1, b])
                known[f.state.obs[t, b].numpy().tobytes()] = successor(f, t, b), *seen
        sample = next(iter(from_data(env, data=Kept(fragments), batch_size=2000, seed=0)))
        ends = 0
        for b in range(2000):
            after, rew, term, fin = known[sample.state.obs[0, b].numpy().tobytes()]
            assert (
                torch.equal(successor(sample, 0, b), after) or term
            )  # which has no next observation
            assert (sample.state.rew[1, b], sample.term[1, b], sample.state.fin[1, b]) == (
                rew,
                term,
                fin,
            )
            ends += int(fin)
        assert ends


def rows_of(fragment):
    "Observation, reward and termination of each valid step, as a set."
    s = fragment.state
    return {
        *map(
            tuple,
            torch.cat([s.obs[:-1], s.rew[1:, :, None], fragment.term[1:, :, None]], 2)[
                fragment.valid
            ].tolist(),
        )
    }


@pytest.mark.parametrize("batch", [1, 4])
def test_segments_go_on_from_one_whole_episode_to_the_next(batch, caplog):
    "So each step can be drawn, although most episodes are shorter than a segment."
    actor = MLPPolicy.for_env("CartPole-v1", seed=0)
    pipe = EpisodeCollector(
        EnvStepper("CartPole-v1", actor, 2, seed=0, terminal_obs=True), batch=batch, pad=True
    )
    episodes = list(islice(pipe, 12 // batch))
    assert sum(f.valid.sum(0).lt(32).sum() for f in episodes) > 9
    drawn = list(islice(DataSampler(Kept(episodes), 64, length=32, seed=0), 60))
    for sample in drawn[:9]:
        check_alignment(sample)
    assert set.union(*map(rows_of, drawn)) == set.union(*map(rows_of, episodes))
    assert not caplog.records


@pytest.mark.parametrize("ends", [True, False])
def test_the_log_says_how_many_steps_can_be_drawn(ends, caplog):
    "Fragments without numbers follow one another only where an episode has ended."

    def steps(n):
        over = torch.tensor([[False]] * (n - 1) + [[ends]])
        return Fragment.from_steps(
            torch.randn(n + 1, 1, 4), torch.zeros(n, 1, dtype=torch.int64), torch.ones(n, 1), over
        )

    data = [steps(5), steps(2), steps(4)]
    drawn = list(islice(DataSampler(Kept(data), 64, length=3, seed=0), 4))
    assert len(set.union(*map(rows_of, drawn))) == (11 if ends else 9)
    assert [r.message.partition(",")[0] for r in caplog.records] == (
        [] if ends else ["DataSampler: only 9 of 11 steps can be drawn"]
    )


@pytest.mark.parametrize("record", ["lanes", "batches", "replayed"])
def test_data_may_be_recorded_at_any_edge(record, tmp_path):
    actor = MLPPolicy.for_env("CartPole-v1", seed=0)
    options = dict(n_envs=2, n_steps=5, lanes=2, seed=0)
    recorder = partial(Recorder, path=tmp_path / "data")
    if record == "replayed":
        pipe = replayed("CartPole-v1", actor, warmup=10, batch_size=4, edits=[recorder], **options)
    elif record == "batches":
        pipe = on_policy(
            "CartPole-v1", actor, Critic.for_env("CartPole-v1", seed=0), edits=[recorder], **options
        )
    else:
        pipe = rollouts(
            "CartPole-v1",
            actor,
            edits=[Recorder.inserter(after=Lanes, path=tmp_path / "data")],
            **options,
        )
    for item in islice(pipe, 4):
        if record == "replayed":
            list(item.samples)
    sample = next(
        iter(from_data("CartPole-v1", data=tmp_path / "data", batch_size=8, length=7, seed=0))
    )
    assert (sample.n_steps, sample.n_envs, sample.adv, sample.version, sample.actor) == (
        7,
        8,
        None,
        None,
        {},
    )


def test_a_stream_of_data_goes_on_from_a_checkpoint_and_only_with_the_same_data(tmp_path):
    recorded(tmp_path / "data", "CartPole-v1")

    def pipe(data=tmp_path / "data"):
        return from_data("CartPole-v1", data=data, batch_size=8, seed=3)

    first = pipe()
    items = iter(first)
    for _ in range(4):
        next(items)
    state = stream_state(first)
    rest = [next(items) for _ in range(4)]
    assert_same(snapshot(rest), snapshot(list(islice(restore_stream(pipe(), state), 4))))
    less = [*Replayer(tmp_path / "data")][:-1]
    with pytest.raises(CheckpointError, match="not those that the stream began with"):
        next(iter(restore_stream(pipe(Kept(less)), state)))


def test_true_last_observations_and_the_rows_ahead_are_part_of_the_data():
    fragments = collected()

    def pipe(data):
        return from_data("Pendulum-v1", data=Kept(data), batch_size=8, seed=3)

    next(items := iter(first := pipe(fragments)))
    state = stream_state(first)
    items.close()
    ended = next(k for k, f in enumerate(fragments) if len(f.final.t))
    last = fragments[ended]
    ahead = fragments[-1]
    last = last._replace(final=last.final._replace(obs=last.final.obs + 1))
    ahead = ahead._replace(
        state=ahead.state._replace(obs=ahead.state.obs + torch.eye(51)[-1, :, None, None])
    )
    for other in ([*fragments[:ended], last, *fragments[ended + 1 :]], [*fragments[:-1], ahead]):
        with pytest.raises(CheckpointError, match="not those that the stream began with"):
            next(iter(restore_stream(pipe(other), state)))


# --- the size of the rewards


@pytest.mark.parametrize("lanes, n_envs", [(1, 1), (2, 1), (2, 3)])
def test_the_scale_of_rewards_is_that_of_whole_episodes(lanes, n_envs):
    "Pendulum is cut off after 200 steps, and the last 100 of 500 steps are no whole episode."
    actor = MLPPolicy.for_env("Pendulum-v1", seed=0)
    pipe = rollouts("Pendulum-v1", actor, n_envs=n_envs, n_steps=50, lanes=lanes, seed=0)
    fragments = list(islice(pipe, 10))
    rewards = torch.cat([f.state.rew[1:].double() for f in fragments])
    returns = rewards[:400].reshape(2, 200, lanes * n_envs).sum(1)
    scale = return_scale(fragments)
    assert scale == pytest.approx(200 / -float(returns.min()), rel=1e-6)
    assert return_scale(fragments[:8]) == scale


def test_the_range_of_returns_includes_zero():
    "So data of one good policy, whose returns are nearly equal, do not get enormous rewards."

    def data(*rewards):
        ends = torch.tensor([[False], [True]] * len(rewards))
        rew = torch.tensor([[x / 2] for x in rewards for _ in range(2)])
        return Fragment.from_steps(
            torch.zeros(len(rew) + 1, 1, 3), torch.zeros(len(rew), 1, 1), rew, ends
        )

    assert return_scale([data(10.0, 10.5)]) == pytest.approx(2 / 10.5)
    assert return_scale([data(-10.0, -9.0)]) == pytest.approx(2 / 10)
    assert return_scale([data(-10.0, 5.0)]) == pytest.approx(2 / 15)


@pytest.mark.parametrize("ends, reward", [(False, 1.0), (True, 0.0)])
def test_without_returns_the_rewards_stay_and_the_log_says_so(ends, reward, caplog):
    over = torch.tensor([[False], [False], [ends]])
    rew = torch.full((3, 1), reward)
    steps = Fragment.from_steps(torch.zeros(4, 1, 3), torch.zeros(3, 1, 1), rew, over)
    sample = next(iter(from_data("Pendulum-v1", data=Kept([steps]), reward_scale="returns")))
    assert (sample.state.rew[1] == reward).all()
    assert "the rewards stay as they are" in caplog.text


def test_iql_by_its_defaults_does_not_depend_on_the_unit_of_the_rewards(tmp_path):
    "Rewards that are eight times as large are a change of unit. Powers of two are exact."
    fragments = collected()

    def trained(name, factor, **options):
        data = [f._replace(state=f.state._replace(rew=factor * f.state.rew)) for f in fragments]
        for _ in Recorder(Kept(data), tmp_path / name):
            pass
        options |= dict(data=str(tmp_path / name), hidden=(8,), critic_hidden=(8,), batch_size=16)
        config = make_config("iql", "Pendulum-v1", options, seed=0)
        agent, pipe = build(config)
        for batch in islice(pipe, 5):
            agent.update(batch)
        return snapshot(agent.actor.state_dict())

    usual = trained("usual", 1)
    assert_same(usual, trained("large", 8))
    with pytest.raises(AssertionError):
        assert_same(usual, trained("unscaled", 8, reward_scale=None))


@pytest.mark.parametrize("scale", ["learn", "sign", 0, -1.0, float("nan"), [1.0]])
def test_a_scale_of_data_that_is_none_is_refused(scale):
    with pytest.raises(DataError, match="reward_scale.*a number above 0, 'returns' or None"):
        from_data("Pendulum-v1", data=Kept([]), reward_scale=scale)
    with pytest.raises(DataError, match="reward_scale"):
        DataSampler(Kept([]), reward_scale=scale)


def test_rewards_are_not_scaled_for_a_policy_that_sees_them():
    actor = RecurrentPolicy.for_env("Pendulum-v1", hidden=(4,), memory=4, past=True)
    for scale in (None, 1):
        from_data("Pendulum-v1", actor, data=Kept([]), reward_scale=scale)
    with pytest.raises(DataError, match="the policy sees its past"):
        from_data("Pendulum-v1", actor, data=Kept([]), reward_scale="returns")


# --- learners and runs


@pytest.mark.parametrize(
    "algorithm, env", [("bc", "CartPole-v1"), ("iql", "Pendulum-v1"), ("td3bc", "Pendulum-v1")]
)
def test_a_run_from_data_goes_on_exactly_and_its_policy_needs_no_data(algorithm, env, tmp_path):
    data = recorded(tmp_path / "data", env)
    options = dict(data=str(data), batch_size=32, hidden=(8,)) | (
        {} if algorithm == "bc" else dict(critic_hidden=(8,))
    )
    config = make_config(algorithm, env, options, steps=320, checkpoint_every=5, exact=True)
    for name in ("whole", "parts"):
        run = start(tmp_path / name, dict(config, steps=320 if name == "whole" else 160))
        train(run, progress=False, tensorboard=False)
    assert load_run(tmp_path / "parts").history.inexact is None
    train(resume(tmp_path / "parts", steps=320), progress=False, tensorboard=False)
    whole, parts = (load_run(tmp_path / name) for name in ("whole", "parts"))
    assert_same(snapshot(whole.agent_state), snapshot(parts.agent_state))
    assert whole.counters["updates"] == 10 and parts.counters["resumes"] == 0
    assert (
        json.loads((tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()[-1])["episodes"]
        == 0
    )
    assert not {"return_mean", "length_mean"} & set(
        read_metrics(tmp_path / "whole")
    )  # samples are no episodes
    shutil.rmtree(data)
    assert len(evaluate(env, load_agent(tmp_path / "whole").actor, 2, seed=0).returns) == 2
    with pytest.raises(DataError, match="no recording here"):
        train(resume(tmp_path / "whole", steps=640), progress=False, tensorboard=False)


def test_a_fork_goes_on_with_data_that_were_moved_and_with_no_others(tmp_path):
    def went_on(folder):
        train(resume(folder, steps=320), progress=False, tensorboard=False)
        return snapshot(load_run(folder).agent_state)

    data = recorded(tmp_path / "data", "CartPole-v1")
    config = make_config(
        "bc", "CartPole-v1", dict(data=str(data), batch_size=32, hidden=(8,)), steps=160
    )
    train(start(tmp_path / "run", config), progress=False, tensorboard=False)
    shutil.copytree(tmp_path / "run", tmp_path / "whole")
    whole = went_on(tmp_path / "whole")
    moved = data.rename(tmp_path / "elsewhere")
    assert_same(
        whole, went_on(fork(tmp_path / "run", tmp_path / "fork", data=str(moved), steps=320))
    )
    other = recorded(tmp_path / "other", "CartPole-v1", n=5)
    with pytest.raises(CheckpointError, match="not those that the stream began with"):
        went_on(fork(tmp_path / "run", tmp_path / "wrong", data=str(other), steps=320))


def test_a_run_learns_from_the_recording_of_another_run(tmp_path):
    small = "--hidden 8 --critic-hidden 8 --batch-size 16 --quiet --preset none --no-tensorboard".split()
    assert (
        rollpipe(
            "train",
            "sac",
            "Pendulum-v1",
            "--record",
            "--steps",
            64,
            "--warmup",
            32,
            "--out",
            tmp_path / "sac",
            *small,
        )
        == 0
    )
    assert (
        rollpipe(
            "train",
            "iql",
            "Pendulum-v1",
            "--data",
            tmp_path / "sac",
            "--steps",
            64,
            "--out",
            tmp_path / "iql",
            *small,
        )
        == 0
    )
    assert load_run(tmp_path / "iql").counters["updates"] == 4
    assert (
        rollpipe(
            "train",
            "iql",
            "Pendulum-v1",
            "--data",
            tmp_path / "iql",
            "--steps",
            64,
            "--out",
            tmp_path / "x",
            *small,
        )
        == 2
    )


# --- mistakes


@pytest.mark.parametrize(
    "words, told",
    [
        ("iql Pendulum-v1", "there are no data to learn from. Expected a path (--data PATH)"),
        ("iql Pendulum-v1 --data nowhere", "nowhere: no recording here"),
        ("bc MountainCar-v0 --data {data}", "the data are of another environment"),
        (
            "iql Pendulum-v1 --data {data} --multi-step 3",
            "a memory with length >= multi_step = 3, got 1 steps",
        ),
        ("iql CartPole-v1 --data {data}", "unsupported action space"),
        ("bc CartPole-v1 --data {data} --intrinsic 1", "bc learns from a memory"),
        ("bc CartPole-v1 --data {data} --workers 1", "Lanes"),
    ],
)
def test_mistakes_are_told_and_leave_nothing(words, told, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recorded(tmp_path / "data", "CartPole-v1")
    assert (
        rollpipe(
            "train",
            *words.format(data=tmp_path / "data").split(),
            "--steps",
            64,
            "--quiet",
            "--preset",
            "none",
        )
        == 2
    )
    assert told in capsys.readouterr().err
    assert [x.name for x in tmp_path.iterdir() if x.name != "runs"] == ["data"] and not [
        *tmp_path.glob("runs/*")
    ]


def test_there_is_no_way_to_collect_faster(capsys):
    assert rollpipe("autotune", "bc", "CartPole-v1", "--seconds", 1) == 2
    assert "bc collects nothing, so there is nothing to try" in capsys.readouterr().err


def test_data_that_cannot_be_used_are_refused():
    fragments = collected("CartPole-v1", n=1)
    with pytest.raises(DataError, match="too few steps"):
        next(iter(DataSampler(Kept(fragments), length=151)))
    with pytest.raises(DataError, match="DataSampler.*Fragments are wanted"):
        next(iter(DataSampler(Kept([None]))))
    with pytest.raises(DataError, match="length"):
        DataSampler(Kept(fragments), length=0)
    recurrent = random_fragment()._replace(hx=torch.zeros(1, 5, 6))
    for algorithm in PARTS:
        with pytest.raises(DataError, match="actors with memory are not supported"):
            make(algorithm).update(recurrent)
