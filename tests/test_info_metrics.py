"Infos of environments become metrics: of each step, and of each episode, wherever the run collects and however often it is resumed."

import gymnasium as gym
import numpy as np
import pytest
from command_line import rollpipe
from test_mailbox import trained as train_with_edits

from rollpipe.agents import EpisodeInfos
from rollpipe.layers import MLPPolicy
from rollpipe.pipes import rollouts
from rollpipe.pipes.data.errors import DataError
from rollpipe.runs import fork, make_config, read_metrics, resume, start, train
from rollpipe.runs.evaluations import read_evaluations
from rollpipe.runs.mailbox import view
from rollpipe.runs.moments import verify

N_STEPS = 7
NAMES = [
    f"info/{name}_{ending}" for name in ("cost", "solved") for ending in ("mean", "sum", "last")
]


class Reports(gym.Env):
    """Its episodes have 3, 4, 5, 3, 4, 5, ... steps. Step t costs t, counted from 1; the last one says whether the
    length is odd.
    """

    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = gym.spaces.Discrete(2)
    episodes = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.length = 3 + self.episodes % 3
        self.episodes += 1
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.t += 1
        is_over = self.t == self.length
        info = {"cost": float(self.t), "label": "a text"}
        if is_over:
            info["solved"] = self.length % 2 == 1
        return np.zeros(2, np.float32), 1.0, is_over, False, info


class ReportsSuccess(Reports):
    "It is silent about an episode that is not solved."

    def step(self, action):
        *answer, info = super().step(action)
        return *answer, {"solved": True} if info.get("solved") else {}


gym.register("Reports-v0", Reports)
gym.register("ReportsSuccess-v0", ReportsSuccess)


def expected(n_updates, n_steps=N_STEPS):
    "The metrics of each update, by hand: all environments do the same, so one of them is enough."
    episode = 0
    t = 0
    records = []
    for _ in range(n_updates):
        costs = []
        sums = []
        lasts = []
        solved = []
        for _ in range(n_steps):
            t += 1
            costs.append(t)
            length = 3 + episode % 3
            if t == length:
                sums.append(length * (length + 1) / 2)
                lasts.append(length)
                solved.append(length % 2)
                episode += 1
                t = 0
        means = [np.mean(x) for x in (costs, sums, lasts, solved, solved, solved)]
        records.append(means)
    return np.array(records)


def config_of(algorithm="ppo", steps=N_STEPS * 4 * 6, info="cost,solved", **run):
    options = dict(n_envs=2, n_steps=N_STEPS, hidden=(4,))
    if algorithm == "dqn":
        options.update(capacity=100, batch_size=8, warmup=8, n_envs=4)
    else:
        options.update(lanes=2, epochs=1)
    return make_config(algorithm, "Reports-v0", options, steps=steps, info=info, **run)


def trained(folder, config):
    run = start(folder, config)
    train(run, progress=False, tensorboard=False)
    return run.folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    "The folder of a run that many tests look at, and none changes."
    return trained(tmp_path_factory.mktemp("runs") / "plain", config_of(checkpoint_every=2, keep=5))


def check(folder):
    metrics = read_metrics(folder)
    found = np.stack([metrics[name] for name in NAMES], 1)
    np.testing.assert_allclose(found, expected(6))


@pytest.mark.parametrize("algorithm, workers", [("ppo", 2), ("dqn", 0)])
def test_the_metrics_are_those_by_hand(algorithm, workers, tmp_path):
    check(trained(tmp_path / "run", config_of(algorithm, workers=workers)))


def test_an_open_episode_goes_on_in_a_resumed_run(plain, tmp_path):
    parts = trained(tmp_path / "parts", config_of(steps=N_STEPS * 4 * 2))
    train(resume(parts, steps=N_STEPS * 4 * 6), progress=False, tensorboard=False)
    check(plain)
    check(parts)
    one = read_metrics(plain)
    two = read_metrics(parts)
    for name in NAMES:
        np.testing.assert_array_equal(one[name], two[name])


@pytest.mark.slow
def test_a_run_is_verified_edited_and_forked_with_the_numbers_of_its_infos(plain, tmp_path):
    "The fork begins between two checkpoints, and within episodes."
    assert verify(plain).is_equal
    whole = read_metrics(plain)

    edited = start(tmp_path / "edited", config_of(checkpoint_every=2, keep=5))
    train_with_edits(edited, {3: [dict(set=dict(lr=0.01))]})
    assert [event["event"] for event in edited.history][-1] == "edited"
    new = fork(plain, tmp_path / "fork", 3)
    train(resume(new), progress=False, tensorboard=False)
    for folder in (edited.folder, new):
        metrics = read_metrics(folder)
        for name in NAMES:
            np.testing.assert_array_equal(metrics[name][-3:], whole[name][-3:])


def test_a_fork_with_new_episodes_may_ask_for_other_infos(plain, tmp_path):
    other = dict(info="cost", steps=N_STEPS * 4 * 8)
    with pytest.raises(DataError, match="cannot have another info.*a fork with --new-episodes"):
        fork(plain, tmp_path / "refused", **other)
    new = fork(plain, tmp_path / "fork", new_episodes=True, **other)
    train(resume(new), progress=False, tensorboard=False)
    last = {name: x[-1] for name, x in read_metrics(new).items() if name in NAMES}
    assert np.isfinite(last["info/cost_sum"])
    assert not any(np.isfinite(last[name]) for name in set(NAMES[3:]) & last.keys())


def test_a_loop_of_ones_own_has_them_too():
    infos = EpisodeInfos(["cost"])
    batches = iter(
        rollouts("Reports-v0", MLPPolicy.for_env("Reports-v0"), n_envs=2, n_steps=N_STEPS)
    )
    for means in expected(3)[:, :3]:
        infos.add(next(batches))
        metrics = infos.metrics()
        np.testing.assert_allclose([metrics[name] for name in NAMES[:3]], means)


def test_an_info_that_nobody_reports_is_named_once(tmp_path, caplog):
    metrics = read_metrics(trained(tmp_path / "run", config_of(info="csot")))
    assert not any(name.startswith("info/") for name in metrics)
    (said,) = [r.message for r in caplog.records if "csot" in r.message]
    assert "No environment has reported the info csot" in said and "numbers: cost, solved." in said


def test_episodes_that_last_leaves_out_are_counted_once(caplog):
    "A mean over successes alone would be a rate of 1."

    class Successes(Reports):
        def step(self, action):
            *answer, info = super().step(action)
            if not info.get("solved", True):
                del info["solved"]
            return *answer, info

    infos = EpisodeInfos(["cost", "solved"])
    actor = MLPPolicy.for_env("Reports-v0")
    for _, batch in zip(range(4), rollouts(Successes, actor, n_envs=2, n_steps=N_STEPS)):
        infos.add(batch)
    assert infos.metrics()["info/solved_last"] == 1
    (said,) = [r.message for r in caplog.records if "solved_last" in r.message]
    assert "The last steps of 2 of 4 episodes did not report the info solved" in said
    assert "Report it in the last step of every episode, a failure as False or 0." in said


# Of twelve episodes in eight environments, the first eight have three steps, and the others four.
EVALUATED = {
    "eval_info/cost_mean": (8 * 2 + 4 * 2.5) / 12,
    "eval_info/cost_sum": (8 * 6 + 4 * 10) / 12,
    "eval_info/cost_last": (8 * 3 + 4 * 4) / 12,
    "eval_info/solved_last": 8 / 12,
}


@pytest.mark.parametrize("eval_every, n_evaluations", [(2, 2), (f"{N_STEPS * 8} steps", 3)])
def test_evaluations_have_the_infos_too(eval_every, n_evaluations, tmp_path, capsys):
    options = dict(eval_every=eval_every, eval_episodes=12, final_episodes=12)
    folder = trained(tmp_path / "run", config_of(steps=N_STEPS * 4 * 2, **options))
    train(resume(folder, steps=N_STEPS * 4 * 4), progress=False, tensorboard=False)
    metrics = read_metrics(folder)
    for name, number in EVALUATED.items():
        evaluated = metrics[name][np.isfinite(metrics[name])]
        np.testing.assert_allclose(evaluated, [number] * n_evaluations)
    for line in read_evaluations(folder):
        assert line["info"]["solved_last"] == pytest.approx(8 / 12)

    # Also those of the command line
    assert rollpipe("evaluate", folder, "--episodes", "12", "--seed", "0") == 0
    assert "info/solved_last: 0.6667" in capsys.readouterr().out


def test_a_rate_of_some_episodes_names_their_number(tmp_path, capsys):
    options = dict(n_envs=2, n_steps=N_STEPS, hidden=(4,))
    config = make_config("ppo", "ReportsSuccess-v0", options, steps=14, info="solved")
    folder = trained(tmp_path / "run", config)
    assert rollpipe("evaluate", folder, "--episodes", "12", "--seed", "0") == 0
    assert "info/solved_last: 1 (of 8 of 12 episodes)" in capsys.readouterr().out


def test_data_have_no_infos(tmp_path):
    trained(tmp_path / "run", config_of(record=True))
    data = dict(data=str(tmp_path / "run/recording"), batch_size=8, hidden=(4,))
    with pytest.raises(DataError, match="leaf info: bc learns from data, and plays no episodes"):
        start(tmp_path / "bc", make_config("bc", "Reports-v0", data, info="cost"))


def test_the_command_line_names_infos(tmp_path, capsys):
    words = "train ppo Reports-v0 --import test_info_metrics --steps 200 --n-steps 7 --quiet"
    command = [*words.split(), "--out", tmp_path / "run", "--info"]
    assert rollpipe(*command, "cost,,solved") == 2
    assert "--info: not a list of infos" in capsys.readouterr().err
    assert rollpipe(*command, "cost") == 0
    assert "info/cost_mean" in read_metrics(tmp_path / "run")


def test_the_numbers_of_all_ranks_are_joined(monkeypatch):
    "Each rank has its own episodes; the mean is over all of them, as if one process had seen them."
    actor = MLPPolicy.for_env("Reports-v0")
    batch = next(iter(rollouts("Reports-v0", actor, n_envs=2, n_steps=N_STEPS)))
    longer = next(iter(rollouts("Reports-v0", actor, n_envs=1, n_steps=5 * N_STEPS)))
    ranks = [EpisodeInfos(["cost"]), EpisodeInfos(["cost"])]
    parts = []
    monkeypatch.setattr(
        "rollpipe.ranks.gathered_objects", lambda part: parts.append(part) or list(parts)
    )
    for rank, seen in zip(ranks, (batch, longer)):
        rank.add(seen)
        metrics = rank.metrics()
    by_hand = [expected(1)[0], expected(1, 5 * N_STEPS)[0]]
    of_step = (14 * by_hand[0][0] + 35 * by_hand[1][0]) / (14 + 35)
    of_episode = (4 * by_hand[0][1] + 8 * by_hand[1][1]) / (4 + 8)
    found = [metrics["info/cost_mean"], metrics["info/cost_sum"]]
    np.testing.assert_allclose(found, [of_step, of_episode])


@pytest.mark.slow
def test_the_live_page_draws_them(plain, tmp_path):
    without = trained(tmp_path / "run", config_of(info=None))
    assert view(plain).count("<svg") == view(without).count("<svg") + len(NAMES)
