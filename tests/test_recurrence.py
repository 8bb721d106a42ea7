"The option `recurrent`: policies with memory from the command line, for every learner that can; the networks are those made in Python."

import pytest
import torch
from command_line import rollpipe
from test_fork import check_same
from test_stops import quietly

from rollpipe.agents import PPO
from rollpipe.layers import LSTM, MemoryCritic, RecurrentPolicy
from rollpipe.layers.q_networks import RecurrentQPolicy
from rollpipe.pipes.data.errors import DataError
from rollpipe.pipes.data.nested import first_difference
from rollpipe.pipes.recipes import on_policy
from rollpipe.runs import fork, load_agent, resume, start
from rollpipe.runs.folder import load_run
from rollpipe.runs.moments import verify
from rollpipe.settings.algorithms import ALGORITHMS, options_for
from rollpipe.settings.config import build, make_config
from rollpipe.tuning.tune import Choice, space_for

RECALL = "rollpipe.testing:Recall-v0"
SMALL = dict(n_envs=4, n_steps=24, hidden=(8,), state_size=6)
ON_POLICY = dict(SMALL, critic_hidden=(8,))
CASES = dict(
    trpo=ON_POLICY,
    npg=ON_POLICY,
    reinforce=ON_POLICY,
    a2c=ON_POLICY,
    vtrace=ON_POLICY,
    ppo=dict(ON_POLICY, minibatch=48, epochs=2),
    dqn=dict(SMALL, n_steps=8, length=8, burn_in=2, warmup=96, batch_size=4, capacity=960),
)
OTHERS = {"qr_dqn", "sac", "crossq", "td3", "ddpg", "bc", "iql", "td3bc"}


def config_for(name, recurrent="gru", steps=400, env=RECALL, **options):
    return make_config(
        name,
        env,
        {**CASES[name], "recurrent": recurrent, **options},
        steps=steps,
        checkpoint_every=2,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_every_learner_that_can_trains_one_exactly(name, cell, tmp_path):
    "Interrupted and resumed, repeated, and read again."
    whole = quietly(start(tmp_path / "whole", config_for(name, cell)))
    memory = whole.agent.actor.memory
    assert type(memory).__name__ == cell.upper() and memory.n_out == 6
    if name != "dqn":
        assert (
            isinstance(whole.agent.critic, MemoryCritic) and whole.agent.critic.net.n_in == 6 + 6
        )  # cue, memory

    def end(run, record):
        if record["updates"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quietly(start(tmp_path / "run", config_for(name, cell)), callbacks=[end])
    quietly(resume(tmp_path / "run"))
    check_same(whole.folder, tmp_path / "run")
    assert verify(whole.folder).is_equal
    assert (
        first_difference(
            load_agent(whole.folder).actor.state_dict(), whole.agent.actor.state_dict()
        )
        is None
    )


def test_the_option_builds_the_networks_that_one_builds_in_python():
    agent, pipe = build(config_for("ppo", "lstm", span=16.0, past=True))
    actor, critic = agent.actor, agent.critic
    assert (
        isinstance(actor, RecurrentPolicy)
        and isinstance(actor.memory, LSTM)
        and actor.uses_past
        and actor.report
    )
    torch.manual_seed(0)
    own = RecurrentPolicy.for_env(
        RECALL, hidden=(8,), memory=6, cell="lstm", span=16.0, past=True, report=True, seed=1
    )
    assert {k: x.shape for k, x in own.state_dict().items()} == {
        k: x.shape for k, x in actor.state_dict().items()
    }
    made = MemoryCritic.for_env(RECALL, memory=6, hidden=(8,), seed=2)
    assert {k: x.shape for k, x in made.state_dict().items()} == {
        k: x.shape for k, x in critic.state_dict().items()
    }
    own.load_state_dict(actor.state_dict())
    made.load_state_dict(critic.state_dict())
    stream = on_policy(
        RECALL, own, made, n_envs=4, n_steps=24, seed=pipe.seed if hasattr(pipe, "seed") else 0
    )
    batch = next(iter(stream))
    other = PPO(own, made, minibatch=48, epochs=2, seed=agent.seed)
    told = [
        {k: x for k, x in learner.update(batch).items() if "seconds" not in k}
        for learner in (agent, other)
    ]
    assert told[0] == told[1] and first_difference(actor.state_dict(), own.state_dict()) is None
    assert isinstance(build(config_for("dqn"))[0].actor, RecurrentQPolicy)


def test_nothing_changes_without_it():
    "The names and seeds of all parts are those that they were."
    for name in CASES:
        config = make_config(
            name, RECALL, {k: x for k, x in CASES[name].items() if k != "state_size"}
        )
        old = {
            **config,
            "options": {
                k: x
                for k, x in config["options"].items()
                if k not in ("recurrent", "state_size", "span", "past")
            },
        }
        # a run of an earlier version has no such options
        (one, _) = build(config)
        (two, _) = build(old)
        assert (
            first_difference(one.state_dict(), two.state_dict()) is None
            and type(one.actor) is ALGORITHMS[name].policy
        )
    assert all(
        not {"recurrent", "state_size"} & {o.name for o in options_for(name)} for name in OTHERS
    )
    ours = {
        name for name, x in ALGORITHMS.items() if x.learner.__module__.startswith("rollpipe.")
    }  # other tests register more
    assert OTHERS | CASES.keys() == ours


@pytest.mark.parametrize(
    "name, options, text",
    [
        (
            "ppo",
            dict(recurrent="rnn"),
            "leaf recurrent: unknown kind of memory. Expected gru, lstm, none, got rnn",
        ),
        (
            "ppo",
            dict(recurrent=None),
            "leaf state_size: this option is of a policy with memory. Expected state_size=64, or recurrent=gru",
        ),
        (
            "ppo",
            dict(recurrent=None, state_size=64, past=True),
            "leaf past: this option is of a policy with memory",
        ),
        (
            "dqn",
            dict(length=1, burn_in=0),
            "leaf length: a memory learns nothing from single steps. Expected --length 2 or more, got 1",
        ),
        ("ppo", dict(state_size=0), "n_out"),
        ("ppo", dict(span=1.0), "span"),
    ],
)
def test_what_could_not_work_is_refused(name, options, text, tmp_path):
    with pytest.raises((DataError, ValueError), match=text):
        start(tmp_path / "run", config_for(name, **options))
    assert not (tmp_path / "run").exists()


def test_a_fork_cannot_get_another_memory(tmp_path):
    run = quietly(start(tmp_path / "run", config_for("ppo")))
    for options in (dict(recurrent="lstm"), dict(state_size=7)):
        with pytest.raises(DataError, match="cannot have another (recurrent|state_size)"):
            fork(run.folder, tmp_path / "fork", 2, **options)


@pytest.mark.slow
def test_the_command_line_a_file_and_the_search_know_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = [
        "train",
        "ppo",
        RECALL,
        "--steps",
        "500",
        "--quiet",
        "--no-tensorboard",
        "--config",
        "own.toml",
        "--out",
    ]
    (tmp_path / "own.toml").write_text(
        '[Recall-v0]\nactions = "Discrete"\nrecurrent = "gru"\nstate_size = 32\nhidden = [8]\n'
    )
    assert rollpipe(*words, "a") == 0
    options = load_run("a").config["options"]
    assert (options["recurrent"], options["state_size"]) == ("gru", 32)
    assert rollpipe(*words, "b", "--recurrent", "lstm", "--state-size", "16", "--n-envs", "4") == 0
    assert (
        isinstance(load_agent("b").actor.memory, LSTM) and load_agent("b").actor.memory.n_out == 16
    )
    assert rollpipe("evaluate", "b", "--episodes", "3") == 0
    assert (
        rollpipe("train", "sac", "Pendulum-v1", "--recurrent", "gru") == 2
        and "unknown argument --recurrent" in capsys.readouterr().err
    )
    assert space_for("ppo", {}, dict(recurrent="gru"))["state_size"] == Choice([32, 64, 128])
    assert {*space_for("a2c", {}, {})} - {*space_for("a2c", {}, dict(shared=True))} == {
        "critic_lr"
    }  # every trial was refused
    assert "state_size" not in space_for("ppo", {}, {}) and "state_size" not in space_for(
        "ppo", dict(state_size=8), dict(recurrent="gru")
    )
