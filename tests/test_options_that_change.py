"Options that change: schedules have the values that a reader can compute, and a run that is interrupted, forked or repeated has the same."

import pytest
from command_line import rollpipe
from test_fork import check_same, gone_on, trained

from rollpipe.agents import PPO, TRPO
from rollpipe.agents.offline import IQL
from rollpipe.agents.shared_options import Schedule
from rollpipe.layers import Critic, MLPPolicy
from rollpipe.pipes.data.errors import DataError
from rollpipe.pipes.data.nested import first_difference
from rollpipe.runs import fork, replayed_run, resume, start, train
from rollpipe.runs.logs import read_records
from rollpipe.runs.moments import verify
from rollpipe.settings.config import build, make_config
from rollpipe.traces.differences import diff

ONLINE = {
    name: "CartPole-v1"
    for name in ("trpo", "npg", "reinforce", "a2c", "ppo", "vtrace", "dqn", "qr_dqn")
} | {name: "Pendulum-v1" for name in ("sac", "crossq", "td3", "ddpg")}
SMALL = dict(n_envs=2, n_steps=16)
MEMORY = dict(SMALL, warmup=32, batch_size=8)


def config_for(algorithm, steps=512, options=None, **run):
    small = MEMORY if ONLINE[algorithm] == "Pendulum-v1" or "dqn" in algorithm else SMALL
    random = (
        dict(random_steps=0, samples_per_step=0.25)
        if algorithm in ("sac", "crossq", "td3", "ddpg")
        else {}
    )
    return make_config(
        algorithm,
        ONLINE[algorithm],
        {**small, **random, **(options or {})},
        steps=steps,
        checkpoint_every=3,
        **run,
    )


def quietly(run, **kwargs):
    return train(run, progress=False, tensorboard=False, **kwargs)


# -- values ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_values_at_the_first_the_last_and_a_resumed_update(tmp_path):
    "512 steps in 16 updates of 32. The schedule of the learning rate ends with the run, that of the clip after 8 updates."
    options = dict(lr="linear:8e-4:0", clip="cosine:.3:.1:256", c_entropy="linear:0:.01:512")
    run = start(tmp_path / "run", config_for("ppo", options=options))
    assert [run.config["options"][name] for name in options] == [
        "linear:0.0008:0.0:512",
        "cosine:0.3:0.1:256",
        "linear:0.0:0.01:512",
    ]

    def end(run, record):
        if record["updates"] == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quietly(run, callbacks=[end])
    run = resume(run.folder)
    assert run.agent.steps == 160
    quietly(run)
    records = read_records(run.folder)
    assert [r["option/lr"] for r in records] == pytest.approx(
        [8e-4 * (1 - k / 16) for k in range(16)]
    )  # the last one is 5e-5
    assert [r["option/c_entropy"] for r in records] == pytest.approx(
        [0.01 * k / 16 for k in range(16)]
    )
    clips = [r["option/clip"] for r in records]
    assert [clips[k] for k in (0, 4, 8, 15)] == pytest.approx([0.3, 0.2, 0.1, 0.1]) and clips[
        5
    ] < clips[4]
    assert [g["lr"] for g in run.agent.optimizer.param_groups] == pytest.approx([5e-5])
    quietly(whole := start(tmp_path / "whole", config_for("ppo", options=options)))
    check_same(whole.folder, run.folder)
    assert verify(run.folder).is_equal and not diff(whole.folder, run.folder).fingerprints


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm, options",
    [
        ("trpo", dict(max_kl="cosine:.02:0", critic_lr="linear:1e-2:1e-3", damping="linear:.2:.1")),
        ("dqn", dict(lr="linear:1e-3:0", gamma="linear:.9:.99", tau="linear:.1:.2")),
        ("sac", dict(lr="cosine:1e-3:1e-4", critic_lr="linear:2e-3:1e-3")),
    ],
)
def test_runs_of_all_kinds_are_repeated_forked_and_resumed(algorithm, options, tmp_path):
    parent = start(tmp_path / "run", config_for(algorithm, 640, options))
    quietly(parent)
    assert verify(parent.folder).is_equal
    gone_on(fork(parent.folder, tmp_path / "fork", 7))
    check_same(parent.folder, tmp_path / "fork")
    with replayed_run(parent.folder, 6) as moment:
        assert "equal" in moment.outcome(moment.agent.update(moment.batch))
    first, *_, last = read_records(parent.folder)
    for name, text in options.items():
        schedule = Schedule.of(text, 640)
        assert first[f"option/{name}"] == schedule.start and last[f"option/{name}"] == schedule(
            last["steps"] - 32
        )


def test_learning_rates_reach_the_optimisers():
    "A critic with a schedule of its own has a group of its own, also where both begin alike. All else follows `lr`."

    def rates(agent):
        return [group["lr"] for group, _ in agent.rates()]

    ppo, pipe = build(
        config_for("ppo", options=dict(lr="linear:1e-3:0", critic_lr="linear:1e-3:2e-3"))
    )
    sac, _ = build(config_for("sac", options=dict(lr="linear:1e-3:0")))
    for agent in (ppo, sac):
        agent.steps = 256
    assert (ppo.update(next(iter(pipe)))["option/lr"], sac.set_rates()) == (
        5e-4,
        {"option/lr": 5e-4},
    )
    assert (
        rates(ppo) == [5e-4, 1.5e-3] and rates(sac) == [5e-4] * 3
    )  # critic, policy and temperature
    assert [name for _, name in sac.rates()] == ["lr"] * 3


def test_any_function_of_the_steps_is_a_schedule():
    agent, pipe = build(config_for("trpo"))
    agent.set_option("max_kl", lambda steps: 0.02 * 0.5 ** (steps // 32))
    found = [agent.update(batch) for _, batch in zip(range(3), pipe)]
    assert [m["option/max_kl"] for m in found] == [0.02, 0.01, 0.005] and all(
        m["kl"] <= m["option/max_kl"] for m in found
    )
    made = TRPO(agent.actor, agent.critic, max_kl=Schedule("linear", 0.1, 0.05, 100))
    assert (made.max_kl, [*made.schedules]) == (0.1, ["max_kl"])


# -- between two updates -----------------------------------------------------------------------------------------------


def test_a_rate_that_policy_and_critic_share_is_changed_for_both_or_not_at_all():
    def made(**options):
        return PPO(
            MLPPolicy.for_env("CartPole-v1"), Critic.for_env("CartPole-v1"), lr=1e-3, **options
        )

    both = made()
    apart = made(critic_lr=2e-3)
    equal = made(critic_lr=1e-3)
    for agent, expected in ((both, [1e-5]), (apart, [1e-5, 2e-3])):
        agent.set_option("lr", 1e-5)
        assert [g["lr"] for g in agent.optimizer.param_groups] == expected
    with pytest.raises(
        DataError,
        match="leaf lr: PPO: lr and critic_lr were equal .*Expected a learner with another critic_lr",
    ):
        equal.set_option("lr", "linear:1e-3:0:1000")
    assert equal.lr == 1e-3 and not equal.schedules and equal.set_rates() == {}


RATES = [
    (1e-3, 0),
    (1e-4, 0),
    (1e-3, 90),
    (1e-4, 90),
    ("linear:1e-3:1e-4:90", 0),
]  # lr, decay_steps


@pytest.mark.slow_but_one
@pytest.mark.parametrize("new", RATES)
@pytest.mark.parametrize("old", RATES)
def test_a_loaded_learner_has_its_own_learning_rates(old, new):
    "The state has those of the learner that was saved, and with the same options the next update has the same ones, bit for bit."

    def made(rate, algorithm=PPO, **options):
        options = dict(lr=rate[0]) if algorithm is PPO else dict(critic_lr=rate[0])
        return algorithm(
            MLPPolicy.for_env("CartPole-v1"),
            Critic.for_env("CartPole-v1"),
            decay_steps=rate[1],
            **options,
        )

    for algorithm in (PPO, TRPO):
        saved = made(old, algorithm)
        fresh = made(new, algorithm)
        loaded = made(new, algorithm)
        for saved.steps in (0, 30):
            saved.set_rates()
        loaded.load_state_dict(saved.state_dict())
        if old == new:
            assert first_difference(saved.state_dict(), loaded.state_dict()) is None
        fresh.set_rates()  # as one that learned with these options from the start
        for agent in (fresh, loaded):
            agent.steps = 60
            agent.set_rates()
        assert (
            loaded.optimizer.param_groups[0]["lr"]
            == fresh.optimizer.param_groups[0]["lr"]
            == (
                pytest.approx(4e-4)
                if isinstance(new[0], str)
                else pytest.approx(new[0] / (3 if new[1] else 1))
            )
        )


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, text",
    [
        (
            dict(lr="lineer:1e-3:0"),
            "leaf lr: ppo: not a schedule. Expected linear:START:END:STEPS or cosine:..., got 'lineer:1e-3:0'",
        ),
        (
            dict(epochs="linear:3:1"),
            "leaf epochs: ppo: wrong type of value. Expected int, got 'linear:3:1'",
        ),
        (dict(n_steps="linear:3:1"), "leaf n_steps: ppo: wrong type of value"),
        (dict(lr="linear:1e-3:-1e-3"), "leaf lr: PPO: out of range"),
        (dict(lr="linear:1e-3:0:-5"), "leaf lr: ppo: not a schedule"),
        (dict(lr="linear:1e-3:inf"), "leaf lr: ppo: not a schedule"),
        (
            dict(lr="cosine:1e-3:0:100"),
            "leaf lr: the schedule falls to 0 before the training ends. Expected an end above 0, or at least",
        ),
    ],
)
def test_nonsense_is_refused_before_a_run_begins(options, text, tmp_path):
    with pytest.raises(DataError, match=text):
        start(tmp_path / "run", config_for("ppo", options=options))
    assert not (tmp_path / "run").exists()


def test_the_command_line_reads_schedules_and_says_what_is_wrong(tmp_path, monkeypatch, capsys):
    words = "train ppo CartPole-v1 --steps 128 --n-envs 2 --n-steps 32 --preset none --quiet --no-tensorboard --out run".split()
    monkeypatch.chdir(tmp_path)
    assert rollpipe(*words, "--lr", "linear:3e-4:1e-5:1k", "--critic-lr", "cosine:1e-3:0") == 0
    assert read_records(tmp_path / "run")[-1]["option/lr"] == pytest.approx(
        3e-4 - 64 / 1000 * 2.9e-4
    )
    for flag, value, text in (
        (
            "--lr",
            "line:1:0",
            "argument --lr: not a schedule: 'line:1:0'; expected linear:START:END",
        ),
        (
            "--epochs",
            "linear:9:1",
            "argument --epochs: this option takes no schedule: 'linear:9:1'; expected int",
        ),
    ):
        assert rollpipe(*words[:-1], "other", flag, value) == 2 and text in capsys.readouterr().err
    assert rollpipe("train", "--resume", "run", "--steps", "256") == 2
    assert (
        "--critic-lr: the schedule falls to 0 before the training ends" in capsys.readouterr().err
    )


@pytest.mark.slow
def test_a_fork_may_have_another_schedule_and_one_that_does_not_fit_is_refused(tmp_path):
    parent = trained(tmp_path / "run", "ppo", 640)
    run = gone_on(fork(parent.folder, tmp_path / "a", 8, lr="linear:1e-2:0"))
    steps = parent.config["steps"]
    assert run.config["options"]["lr"] == f"linear:0.01:0.0:{steps}"
    made = [r for r in read_records(tmp_path / "a") if "option/lr" in r]
    assert made[0]["updates"] == 9 and made[0]["option/lr"] == pytest.approx(
        0.01 * (1 - read_records(tmp_path / "a")[7]["steps"] / steps)
    )
    run = gone_on(fork(tmp_path / "a", tmp_path / "b", 10, lr=1e-4))  # and none any more
    assert run.agent.optimizer.param_groups[0]["lr"] == 1e-4 and not run.agent.schedules
    for options, text in (
        (dict(lr="linear:1:-1"), "lr: PPO: out of range"),
        (dict(epochs="linear:1:2"), "leaf epochs"),
        (dict(lr="linear:1e-3:0:99"), "falls to 0 before"),
    ):
        with pytest.raises(DataError, match=text):
            fork(parent.folder, tmp_path / "c", 8, **options)


def test_the_schedule_of_iql_for_decay_steps_is_that_of_its_authors():
    from math import cos, pi

    from rollpipe.layers.critic import QVCritic

    actor = MLPPolicy.for_env("Pendulum-v1", seed=0)
    critic = QVCritic.for_env("Pendulum-v1", seed=1)
    agent = IQL(actor, critic, lr=3e-4, decay_steps=1000)
    agent.steps = 300
    assert agent.set_rates() == dict(rate_left=(1 - cos(pi * 0.7)) / 2)
    rates = {name: x.param_groups[0]["lr"] for name, x in agent.optimizers.items()}
    assert rates == dict(policy=3e-4 * (1 - cos(pi * 0.7)) / 2, critic=3e-4)


def test_a_learner_without_a_schedule_leaves_its_optimiser_alone():
    agent = PPO(MLPPolicy.for_env("CartPole-v1"), Critic.for_env("CartPole-v1"))
    agent.optimizer.param_groups[0]["lr"] = 0.5
    assert agent.set_rates() == {} and agent.optimizer.param_groups[0] == {
        **agent.optimizer.param_groups[0],
        "lr": 0.5,
    }
