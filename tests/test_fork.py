"""A fork stands exactly where its parent stood. What its state does not fit is refused.

That it equals its parent from there on, if it has no other options, is the law of `test_gallery.py`.
"""

import errno
import json
import os
import re
import signal
import sys
import time
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from command_line import QUIET, rollpipe
from gallery import (
    CASES,
    OF_PPO,
    POLE,
    check_same,
    config_of,
    content,
    gone_on,
    numbers,
    quietly,
    refused,
    trained,
    updates_of,
)

from rollpipe.pipes import FragmentCollector, RewardScaler
from rollpipe.pipes.data.errors import CheckpointError, EnvError
from rollpipe.pipes.data.nested import first_difference
from rollpipe.pipes.keeping import files
from rollpipe.runs import fork, load_agent, replayed_run, resume, start
from rollpipe.runs.commands import find_run
from rollpipe.runs.evaluations import read_evaluations
from rollpipe.runs.folder import load_run
from rollpipe.runs.locks import unlock
from rollpipe.runs.logs import read_records
from rollpipe.runs.moments import verify
from rollpipe.settings.config import make_config
from rollpipe.traces.differences import diff
from rollpipe.traces.history import History
from rollpipe.traces.journal import read_journal

MODULE = sys.modules["rollpipe.runs.fork"]
MOMENTS = sys.modules["rollpipe.runs.moments"]


@pytest.fixture
def ppo(gallery, tmp_path):
    "A run of ten updates of 32 steps."
    return gallery.copy("ppo", tmp_path / "run")


@pytest.fixture
def dqn(gallery, tmp_path):
    "A run of 18 updates with a memory, and checkpoints of each fifth one."
    return gallery.copy("dqn", tmp_path / "run")


# -- equal to the parent -----------------------------------------------------------------------------------------------


@pytest.mark.slow_but_one
@pytest.mark.parametrize("name, at", [("ppo", 1), ("ppo", 7), ("dqn", 17), ("trpo", 7)])
def test_a_fork_has_what_its_parent_had_then(name, at, gallery, tmp_path):
    parent = gallery.original(name)
    out = fork(parent, tmp_path / "fork", at)
    found = load_run(out)
    last = read_records(out)[-1]
    then = next(record for record in read_records(parent) if record["updates"] == at)
    assert last == then
    assert read_journal(out / "journal.jsonl")[-1].updates == found.counters["updates"] == at
    assert found.counters["steps"] == then["steps"]
    assert found.counters["seconds"] == then["seconds"]
    assert json.loads((out / "config.json").read_text()) == found.config
    origin = found.history.origin
    assert (origin["run"], origin["at"], origin["set"]) == (str(parent), at, {})


def test_a_fork_of_the_end_is_complete(ppo, tmp_path):
    out = fork(ppo, tmp_path / "end")
    assert updates_of(out) == 10
    refused("is complete", resume, out)


@pytest.mark.slow
@pytest.mark.parametrize("path", [None, "memory"])
def test_the_memories_of_parent_and_fork_are_apart(path, tmp_path, monkeypatch):
    "Both go on, with chunks that have two names."
    monkeypatch.chdir(tmp_path)
    mapped = CASES["dqn"]._replace(options=dict(CASES["dqn"].options, path=path))
    monkeypatch.setitem(CASES, "mapped", mapped)
    twin, parent = (trained(tmp_path / name, "mapped", 400).folder for name in ("twin", "run"))
    out = fork(parent, tmp_path / "fork", 22)
    other = fork(parent, tmp_path / "other", 24, lr=0.01)
    for folder in (parent, out, other, twin):
        gone_on(folder, steps=800)
    check_same(twin, parent)
    check_same(twin, out)
    assert first_difference(load_run(twin).agent_state, load_run(other).agent_state) is not None


@pytest.mark.slow
def test_the_parent_may_be_in_training(tmp_path):
    twin = trained(tmp_path / "twin", "dqn", 400).folder
    run = start(tmp_path / "run", config_of("dqn", steps=400))
    outs = {n: tmp_path / f"at{n}" for n in (4, 13, 17)}

    def look(run, record):
        n = record["updates"]
        if n in outs:
            fork(run.folder, outs[n], n - 2)

    quietly(run, callbacks=[look])
    check_same(twin, run.folder)
    for out in outs.values():
        check_same(twin, gone_on(out).folder)


@pytest.mark.slow
def test_forks_beside_a_training_that_saves_all_the_time(tmp_path):
    "In a process of its own, which removes checkpoints and chunks while they are read."
    folder = tmp_path / "run"
    config = config_of("dqn", steps=1600, checkpoint_every=1, keep=2)
    if not (pid := os.fork()):
        try:
            quietly(start(folder, config))
        finally:
            os._exit(0)
    while not (folder / "config.json").exists() or not updates_of(folder):
        time.sleep(0.05)
    outs = []
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        outs.append(fork(folder, tmp_path / f"fork{len(outs)}"))
    assert len(outs) > 2 and load_run(folder).counters["steps"] == 1600
    for out in (outs[0], outs[len(outs) // 2]):
        check_same(folder, gone_on(out).folder)


@pytest.mark.slow
def test_chunks_that_the_training_removes_meanwhile(tmp_path, monkeypatch):
    "The parent saves between the reading of its checkpoint and the naming of the chunks."
    parent = trained(tmp_path / "run", "dqn", 400).folder
    before = updates_of(parent)
    link = MOMENTS._hard_link
    moved = []

    def moving(source, path):
        if not moved:
            moved.append(gone_on(parent, steps=480))
        link(source, path)

    monkeypatch.setattr(MOMENTS, "_hard_link", moving)
    out = fork(parent, tmp_path / "fork")
    assert updates_of(out) == before + 5
    for folder in (out, parent):
        gone_on(folder, steps=800)
    check_same(parent, out)


@pytest.mark.slow
@pytest.mark.parametrize("keep", [30, 0])
def test_a_fork_has_the_best_policy_of_its_time(keep, tmp_path):
    "That of the run may be a later one. If the run has not kept it, the policy of the fork is the best one until the next evaluation."
    evaluated = dict(eval_every="128 steps", eval_episodes=3, final_episodes=2)
    parent = trained(tmp_path / "run", "ppo", 960, **evaluated, keep=keep, checkpoint_every=1)
    parent = parent.folder

    def best_of(folder, since, until=10**9):
        "The best evaluation between two updates."
        return max(
            (
                record
                for record in read_evaluations(folder)
                if record["kind"] == "training" and since < record["updates"] <= until
            ),
            key=lambda record: record["mean"],
        )

    last = load_run(parent, best=True)
    at = int(last.counters["updates"]) - 2
    then = best_of(parent, -1, at)
    assert 0 < then["updates"] < at

    # This fork ends before its first evaluation.
    out = fork(parent, tmp_path / "short", at, lr=1.0, steps=(at + 1) * 32)
    best = load_run(out, best=True)
    assert best.counters["updates"] == (then["updates"] if keep else at)
    if keep:
        assert best.evaluated["eval_return_mean"] == then["mean"]
    gone_on(out)
    (of_best,) = (record for record in read_evaluations(out) if record["kind"] == "best")
    assert of_best["updates"] == best.counters["updates"]

    # This one becomes worse, and this one is its parent.
    out = gone_on(fork(parent, tmp_path / "worse", at, lr=1.0)).folder
    found = load_run(out, best=True)
    expected = best_of(out, -1 if keep else at)
    assert found.evaluated["eval_return_mean"] == expected["mean"]
    assert found.counters["updates"] == expected["updates"]
    out = gone_on(fork(parent, tmp_path / "same", at)).folder
    assert first_difference(load_run(out, best=True).agent_state, last.agent_state) is None
    check_same(parent, out)


@pytest.mark.slow
def test_an_old_end_does_not_end_a_run_that_was_extended(gallery, tmp_path):
    "Its checkpoint lacks the last evaluations, which the longer run has dropped. To make them is no reason to lose what came after it."
    folder = gallery.copy("evaluated", tmp_path / "run")
    gone_on(folder, steps=640)
    before = (folder / "checkpoint.safetensors").read_bytes()
    (old,) = (folder / "checkpoints").glob("*320.safetensors")
    refused("is complete", resume, old)
    assert (folder / "checkpoint.safetensors").read_bytes() == before
    quietly(resume(old, steps=480))
    assert load_run(folder).counters["steps"] == 480


@pytest.mark.parametrize(
    "name, value", [("steps", 640.0), ("steps", np.int64(640)), ("steps", 0), ("workers", -1)]
)
def test_a_resume_with_an_option_that_cannot_be_leaves_the_run_as_it_is(name, value, ppo):
    "Its checkpoint, with the new options, could not be read any more."
    before = content(ppo)
    told = f"leaf {name}: .*wrong type|an integer {name} >= "
    refused(told, resume, ppo, **{"steps": 640, name: value})
    assert content(ppo) == before and gone_on(ppo, steps=352).counters["steps"] == 352


@pytest.mark.parametrize(
    "name, value", [("steps", 64.0), ("seed", "3"), ("imports", "json"), ("checkpoint_every", 0)]
)
def test_a_configuration_with_an_option_that_cannot_be_begins_no_run(name, value, tmp_path):
    "It would be trained, and its checkpoint could not be read."
    refused(name, start, tmp_path / "run", {**config_of("ppo", steps=64), name: value})
    assert not os.listdir(tmp_path)


def test_one_module_may_be_imported(tmp_path):
    run = start(tmp_path / "run", config_of("ppo", steps=64, imports="json"))
    assert load_run(run.folder).config["imports"] == ["json"]


@pytest.mark.slow
def test_updates_without_a_step_are_recorded_once(tmp_path):
    "They have the number of steps of the checkpoint before them. Vectors reset in a step that is no transition."
    options = dict(n_envs=1, n_steps=1, vector="vector_entry_point", hidden=(8,))
    options |= dict(warmup=8, capacity=64, batch_size=8)
    config = make_config("dqn", POLE, options, steps=32, checkpoint_every=1, keep=99)
    parent = quietly(start(tmp_path / "run", config)).folder
    records = read_records(parent)
    at = next(int(x["updates"]) for x, y in zip(records, records[1:]) if x["steps"] == y["steps"])
    out = fork(parent, tmp_path / "fork", at)
    assert [record["updates"] for record in read_records(out)] == [*range(1, at + 1)]
    check_same(parent, gone_on(out).folder)


# -- new episodes ------------------------------------------------------------------------------------------------------


class TwoDoors(gym.Env):
    "A walk to one of two doors. The class gets another attribute while a run rests."

    more = False
    observation_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self):
        if self.more:
            self.toll = 0.5
        self.x = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x = 0
        return np.float32([0]), {}

    def step(self, action):
        self.x += 2 * action - 1
        return np.float32([self.x]), 1.0, abs(self.x) > 3, False, {}


gym.register("TwoDoors-v0", TwoDoors, max_episode_steps=50)


def changed_corridor(folder, monkeypatch, **run):
    "A run whose environment was changed after it."
    options = dict(n_envs=2, n_steps=16, engine="torch")
    quietly(start(folder, make_config("ppo", "TwoDoors-v0", options, steps=128, **run)))
    monkeypatch.setattr(TwoDoors, "more", True)
    return folder


@pytest.mark.slow_but_one
@pytest.mark.parametrize("exact", [False, True])
def test_a_run_whose_environment_was_changed_goes_on_with_new_episodes(
    exact, tmp_path, monkeypatch, caplog
):
    parent = changed_corridor(tmp_path / "run", monkeypatch, exact=exact)
    lacks = r"environment 0.*leaf TwoDoors\.toll: the state lacks an attribute"
    refused(lacks, gone_on, parent, steps=256, error=EnvError)
    out = fork(parent, tmp_path / "out", new_episodes=True, steps=256)
    assert load_run(out).stream is None and not (out / "fork.safetensors").exists()

    # It learns on with the weights of its parent.
    before = content(parent)
    run = resume(out)
    assert "The run begins new episodes: it is a fork that was made so" in caplog.text
    assert first_difference(load_run(parent).agent_state, run.agent.state_dict()) is None
    assert run.counters["resumes"] == 1
    quietly(run)
    found = load_run(out)
    assert found.stream is not None and found.history.inexact is None
    assert found.config["exact"] is exact
    lines = diff(parent, out)
    assert lines.parting is None
    assert "out was resumed after update 4, with new episodes" in str(lines)
    assert numbers(out)[:4] == numbers(parent) and len(numbers(out)) == 8
    refused("1 times new episodes", fork, out, tmp_path / "again", 6)

    # Such a fork is as exact as others: its best checkpoint has no state of the stream.
    best = out / "best.safetensors"
    told = "The run begins new episodes: the best checkpoint has no state of the stream"
    for checkpoint in (found, load_run(parent)):
        evaluated = dict(eval_return_mean=1.0, episodes=1)
        checkpoint = checkpoint._replace(config=found.config, stream=None, evaluated=evaluated)
        best.write_bytes(checkpoint.data())
        if exact:
            refused("got the best checkpoint has no state", resume, best, steps=320)
        else:
            unlock(resume(best, steps=320).folder)
            assert caplog.messages[-1] == told
            (out / "checkpoint.safetensors").write_bytes(found.data())
    onward = fork(out, tmp_path / "onward", steps=320)  # it is exact from its newest checkpoint on
    assert gone_on(onward).counters["resumes"] == 1 and content(parent) == before


def test_the_command_names_the_way_out(tmp_path, monkeypatch, capsys):
    parent = changed_corridor(tmp_path / "run", monkeypatch)
    assert rollpipe(f"train --resume {parent} --steps 256 {QUIET}") == 2
    words = f"fork {parent} --new-episodes --out OUT"
    told = f"Expected `rollpipe {words}`, which learns on in new episodes."
    assert told in capsys.readouterr().err
    assert rollpipe(words.replace("OUT", f"{tmp_path}/out")) == 0
    assert "after update 4, and begins new episodes" in capsys.readouterr().out
    assert rollpipe(f"train --resume {tmp_path}/out --steps 256 {QUIET}") == 0


class Stride(gym.Env):
    "A walk that is kept by its actions, because nothing copies its iterator."

    observation_space = gym.spaces.Box(-9, 9, (1,))
    action_space = gym.spaces.Discrete(2)
    length = 0.1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = 0.0
        self.clock = iter(range(99))
        return np.float32([self.place]), {}

    def step(self, action):
        self.place += self.length * (action + 1)
        return np.float32([self.place]), 1.0, next(self.clock) > 20, False, {}


gym.register("Stride-v0", Stride)


def test_the_way_out_is_named_if_actions_no_longer_give_the_same(tmp_path, monkeypatch, capsys):
    options = dict(n_envs=2, n_steps=16, engine="torch")
    run = start(tmp_path / "run", make_config("ppo", "Stride-v0", options, steps=64))
    quietly(run)
    monkeypatch.setattr(Stride, "length", 0.2)
    assert rollpipe(f"train --resume {run.folder} --steps 256 {QUIET}") == 2
    told = capsys.readouterr().err
    assert "its code has changed, or depends on more than its seed" in told
    assert f"`rollpipe fork {run.folder} --new-episodes --out OUT`" in told


@pytest.mark.slow_but_one
@pytest.mark.parametrize(
    "name, options",
    [("ppo", dict(n_envs=3, gamma=0.9, lr=3e-3)), ("dqn", dict(capacity=300, n_envs=1, noise=1))],
)
def test_new_episodes_allow_other_numbers_of_environments_and_steps(
    name, options, gallery, tmp_path
):
    parent = gallery.original(name)
    run = gone_on(fork(parent, tmp_path / "out", new_episodes=True, steps=640, **options))
    assert run.counters["steps"] >= 640
    changed = {name: x for name, x in options.items() if name != "noise"}
    assert run.config["options"].items() >= changed.items()
    told = "cannot have another hidden. Expected .8., with which"
    refused(told, fork, parent, tmp_path / "more", new_episodes=True, hidden=(7,))


def test_a_fork_that_could_not_go_on_exactly_is_not_exact(ppo, tmp_path, monkeypatch):
    monkeypatch.setattr("rollpipe.runs.states.why_inexact", lambda pipe, config: "for a test")
    new = dict(new_episodes=True, steps=640, exact=True)
    refused("leaf exact: .*got for a test", fork, ppo, tmp_path / "out", **new)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_new_episodes_from_an_earlier_update_and_of_an_inexact_run(ppo, tmp_path):
    out = fork(ppo, tmp_path / "out", 3, new_episodes=True)
    assert updates_of(out) == 3 and gone_on(out).counters["steps"] >= 320
    lent = start(tmp_path / "lent", config_of("ppo", steps=320))
    began = {**lent.history[0], "inexact": "for a test"}
    stream = lent.stream.__class__("for a test")
    lent = quietly(lent._replace(history=History([began]), stream=stream)).folder
    refused("cannot be repeated", fork, lent, tmp_path / "more")
    for name in (None, "metrics.jsonl", "journal.jsonl"):  # a pack has neither
        if name:
            (lent / name).unlink()
        out = fork(lent, tmp_path / f"more{name}", new_episodes=True, steps=640)
        assert gone_on(out).counters["steps"] >= 640


# -- edits -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_other_options_and_where_the_runs_part(tmp_path):
    parent = trained(tmp_path / "run", "trpo", 800).folder
    options = dict(max_kl=0.5, critic_lr=1e-4)
    run = gone_on(fork(parent, out := tmp_path / "fork", 8, **options))
    assert run.agent.max_kl == 0.5 and {g["lr"] for g in run.agent.optimizer.param_groups} == {1e-4}
    found = diff(parent, out)
    assert found.parting.after >= 8
    assert str(found.parting).startswith("between the updates 9 and 10")
    for text in (
        f"{out} is a fork of {parent} after update 8, with max_kl=0.5, critic_lr=0.0001",
        f"{out} went on with another fingerprint after update 8",
        "settings/max_kl: 0.01 != 0.5",
    ):
        assert text in str(found)

    # An option with the value that the parent has is no other option.
    same = load_run(parent).config["options"]["critic_epochs"]
    again = gone_on(fork(parent, tmp_path / "again", 8, critic_epochs=same, **options)).folder
    check_same(out, again)
    assert load_run(again).history.origin["set"] == options


def test_a_fork_of_a_complete_run_names_the_option_for_more_steps(ppo, tmp_path):
    told = "would be complete. Expected more than 320, as by --steps, got 320"
    refused(told, fork, ppo, tmp_path / "out", clip=0.1)


def test_what_a_fork_changes_is_no_surprise(ppo, tmp_path, monkeypatch, caplog):
    "The history has it, so the log tells other changes alone, and a repetition is named by its run."
    out = fork(ppo, tmp_path / "out", 4, clip=0.1, gamma=0.9)
    monkeypatch.setattr(np, "__version__", "9.9")
    gone_on(out)
    [message] = caplog.messages
    assert message.startswith(f"{out} goes on, but not as it was: versions/numpy: ")
    assert message.endswith("!= 9.9")

    monkeypatch.chdir(tmp_path)
    told = str(verify("out"))
    assert len(caplog.messages) == 1
    for name in ("out", "the repetition of out"):
        assert f"\n{name} went on with another fingerprint after update 4: graph/" in told
    refused("^leaf update: out has no such update", replayed_run("out", 99).__enter__)


@pytest.mark.slow
def test_a_decaying_rate_begins_where_the_option_says(tmp_path):
    parent = trained(tmp_path / "run", "decay", 800)
    groups = parent.agent.optimizer.param_groups

    def rates_of_a_fork(name, key, **options):
        run = gone_on(fork(parent.folder, tmp_path / name, 8, **options))
        return {group[key] for group in run.agent.optimizer.param_groups}

    of_critic = parent.config["options"]["critic_lr"] or 1e-2
    assert rates_of_a_fork("a", "initial_lr", lr=1e-2) == {1e-2, of_critic}
    assert rates_of_a_fork("b", "lr", decay_steps=0) == {group["initial_lr"] for group in groups}
    rates_of_a_fork("c", "lr", steps=1200)  # the rates are those of the parent
    check_same(gone_on(parent.folder, steps=1200).folder, tmp_path / "c")


@pytest.mark.slow
def test_a_learned_temperature_may_become_a_fixed_one_but_not_the_other_way_round(
    gallery, tmp_path
):
    fixed = fork(gallery.original("sac"), tmp_path / "fixed", 8, temperature=0.5)
    assert float(gone_on(fixed).agent.entropy_weight) == 0.5
    told = "leaf temperature.*lacks a part of the learner"
    refused(told, fork, fixed, tmp_path / "learned", temperature=None, steps=640)


def other(name):
    return f"leaf {name}: a fork of .* cannot have another {name}"


# What a fork of each run refuses: an option with a value, and the text of the error if it is not that of `other`
OF_A_MEMORY = dict(capacity=128, batch_size=4, warmup=8, prioritized=False, alpha=0.1, length=2)
UNFIT = dict(
    ppo=dict(
        **dict(hidden=(16,), critic_hidden=(4,), activation="relu", n_envs=3, n_steps=8, lanes=2),
        **dict(seed=3, normalize=False, intrinsic=0.1, sticky=True, terminal_obs=True),
    ),
    dqn=dict(OF_A_MEMORY, lanes=1, hidden=(4,), n_envs=1, seed=1),
    sac=dict(critic_hidden=(4,), capacity=100, n_steps=2, seed=2),
)
IMPOSSIBLE = [
    ("ppo", dict(max_kl=0.1), "there is no option 'max_kl'"),
    ("ppo", dict(clips=0.1), "Expected clip"),
    ("ppo", dict(clip="a"), "leaf clip"),
    ("ppo", dict(lr=-1.0), "lr"),
    ("ppo", dict(steps=100), "leaf steps: .* would be complete. Expected more than 224.*, got 100"),
    ("ppo", dict(decay_steps=300), "decay_steps"),
    ("ppo", dict(workers=3), "workers"),
    ("ppo", dict(checkpoint_every=0), "checkpoint_every"),
    ("ppo", dict(eval_every="x"), "eval_every"),
    ("ppo", dict(preset="none"), "there is no option 'preset'"),
    ("ppo", dict(eval_every=0, stop_at_return=9.0), "leaf stop_at_return: the training stops only"),
    ("lagging", dict(lag=0), "leaf lag: .*the stream of"),
    ("lagging", dict(workers=0), "leaf workers: .*the stream of"),
    ("lagging", dict(order="ready"), "leaf order: .*the stream of"),
    ("sac", dict(first_temperature=0.5), "leaf first_temperature: .*or a new run, got 0.5"),
    ("trpo", dict(log_std=0.3), "leaf log_std: .* no effect after the start; or a new run"),
]
UNFIT = [(name, {key: x}, other(key)) for name, keys in UNFIT.items() for key, x in keys.items()]


@pytest.mark.parametrize("name, options, told", UNFIT + IMPOSSIBLE)
def test_what_a_fork_cannot_have_is_refused_before_the_run_is_repeated(
    name, options, told, gallery, tmp_path, monkeypatch
):
    parent = gallery.original(name)
    before = content(parent)
    monkeypatch.setattr(MODULE, "moment", lambda *_, **__: pytest.fail("the run is repeated"))
    refused(told, fork, parent, tmp_path / "fork", 7, **options)
    assert not os.listdir(tmp_path) and content(parent) == before


@pytest.mark.parametrize(
    "options", [dict(steps=256), dict(new_episodes=True, n_envs=3), dict(noise=1, lr=0.01)]
)
def test_what_a_fork_can_have_is_not_refused(options, ppo, tmp_path):
    steps = dict(steps=256, **options) if "steps" not in options else options
    assert gone_on(fork(ppo, tmp_path / "fork", 7, **steps)).counters["updates"] == 8


@pytest.mark.slow
def test_edits_of_the_graph(tmp_path):
    "Those that the parent had are needed to repeat it; another one works from the update on."
    edit = RewardScaler.inserter(after=FragmentCollector)
    parent = trained(tmp_path / "run", "ppo", 640, edits=[edit]).folder
    check_same(parent, gone_on(fork(parent, tmp_path / "fork", 8, edits=[edit]), edit).folder)
    plain = trained(tmp_path / "plain", "ppo", 640).folder
    gone_on(out := fork(plain, tmp_path / "other", 8), edit)
    assert diff(plain, out).parting.after >= 8 and "RewardScaler" in str(diff(plain, out))


# -- what cannot be forked ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, ranks, told",
    [
        (dict(lag=None), 1, "run cannot be repeated. Expected an exact run, got lag=None"),
        (
            dict(order="ready"),
            1,
            "run cannot be repeated. Expected an exact run, got order='ready'",
        ),
        (dict(workers=0), 2, "several ranks learn together"),
    ],
)
def test_runs_that_cannot_be_repeated_are_refused(change, ranks, told, tmp_path):
    config = {**config_of("dqn", **{"workers": 2, **change}), "ranks": ranks}
    folder = start(tmp_path / "run", config).folder
    refused(told, fork, folder, tmp_path / "f", 1)
    assert os.listdir(tmp_path) == ["run"]
    if ranks > 1:
        refused(told, replayed_run(folder, 1).__enter__)


@pytest.mark.parametrize("at", [0, -1, 11, 10**9])
def test_an_update_that_is_not_there_is_refused(at, ppo, tmp_path):
    told = f"leaf update: .* has no such update. Expected 1 to 10, got {at}"
    refused(told, fork, ppo, tmp_path / "f", at)
    refused(told, replayed_run(ppo, at).__enter__)
    refused("no such run", fork, tmp_path / "nowhere", tmp_path / "f")
    assert os.listdir(tmp_path) == ["run"]


@pytest.mark.slow
def test_a_fork_knows_what_it_did_not_make(tmp_path):
    run = trained(tmp_path / "run", steps=640).folder
    out = gone_on(fork(run, tmp_path / "fork", 8, lr=0.01)).folder
    for update in (9, 17):
        with replayed_run(out, update) as moment:
            moment.outcome(moment.agent.update(moment.batch))
    assert verify(out, 5).common >= 13
    told = "leaf update: .*is a fork.*Expected {} to 20, or the run .*/run, got {}"
    refused(told.format(9, 8), replayed_run(out, 8).__enter__)
    refused(told.format(8, 7), fork, out, tmp_path / "again", 7)
    check_same(out, gone_on(fork(out, tmp_path / "again", 8)).folder)
    told = (
        "its run is a fork of .*/run. Expected rollpipe train --resume .*/fork, or another folder"
    )
    refused(told, find_run, out, make_config("ppo", POLE, OF_PPO, steps=640, checkpoint_every=5))


# -- the folder --------------------------------------------------------------------------------------------------------


def test_a_folder_is_replaced_only_if_it_is_a_run(ppo, gallery, tmp_path):
    other = gallery.copy("ppo", tmp_path / "other")
    replace = partial(fork, ppo, at=4, overwrite=True)
    refused("other exists already. Expected another folder, or --over", fork, ppo, other, 4)
    (other / "mine.txt").touch()
    refused("with nothing else in it, got mine.txt", replace, other)
    (other / "mine.txt").unlink()
    replace(other)
    assert load_run(other).history.origin["at"] == 4
    assert sorted(os.listdir(tmp_path)) == ["other", "run"]
    for out in (ppo, ppo / "sub"):
        refused("is the run itself, or in its folder", replace, out)
    (tmp_path / "link").symlink_to(other)
    refused("cannot be replaced", replace, tmp_path / "link")


@pytest.mark.parametrize(
    "overwrite, text",
    [(False, "fork exists already"), (True, "with nothing else in it, got mine.txt")],
)
def test_what_appears_in_the_folder_meanwhile_stays(overwrite, text, ppo, tmp_path, monkeypatch):
    copy_past = MODULE._copy_past
    out = tmp_path / "fork"

    def late(*args):
        copy_past(*args)
        unlock(start(out, config_of("ppo")).folder)
        if overwrite:
            (out / "mine.txt").touch()

    monkeypatch.setattr(MODULE, "_copy_past", late)
    refused(text, fork, ppo, out, 4, overwrite=overwrite)
    assert updates_of(out) == 0 and sorted(os.listdir(tmp_path)) == ["fork", "run"]


@pytest.mark.slow
def test_a_kill_leaves_no_half_run(dqn, tmp_path):
    "A checkpoint of update 15 spares each fork 15 updates."
    before = content(dqn)
    for n in range(1, 100):
        if not (pid := os.fork()):
            _die_in_the_fork(n, dqn, tmp_path / "fork")
        if not os.WIFSIGNALED(os.waitpid(pid, 0)[1]):
            break
        assert not (tmp_path / "fork").exists()
    assert n > 8 and updates_of(tmp_path / "fork") == 17
    assert sorted(os.listdir(tmp_path)) == ["fork", "run"] and content(dqn) == before


def _die_in_the_fork(n, folder, out):
    "Kill this process when it has to wait for the disk the n-th time."
    fsync = os.fsync
    left = [None] * n

    def dying(fd):
        left.pop()
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        fsync(fd)

    os.fsync = dying
    try:
        fork(folder, out, 17, lr=0.01)
    finally:
        os._exit(0)


def failing(number, text):
    "A function that raises this error of the system, whatever it gets."

    def fail(*args):
        raise OSError(number, text)

    return fail


def test_a_full_disk_names_the_file(dqn, tmp_path, monkeypatch):
    monkeypatch.setattr(files.os, "fsync", failing(errno.ENOSPC, "No space left on device"))
    told = "No space left on device: '.*/.fork.fork/run/"
    refused(told, fork, dqn, tmp_path / "fork", 17, error=OSError)
    assert os.listdir(tmp_path) == ["run"]


def test_a_damaged_chunk_is_told(dqn, tmp_path):
    for path in (dqn / "replay").glob("*.chunk"):
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    out = fork(dqn, tmp_path / "fork", steps=640)
    refused("the chunk is damaged", gone_on, out, error=CheckpointError)


def test_a_file_system_without_second_names(dqn, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", failing(errno.EXDEV, "Invalid cross-device link"))
    out = gone_on(fork(dqn, tmp_path / "fork", 12)).folder
    check_same(dqn, out)
    assert all(path.stat().st_nlink == 1 for path in (out / "replay").glob("*"))


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command(ppo, tmp_path, capsys):
    out = tmp_path / "fork"
    words = f"fork {ppo} --at 8 --out {out}"
    assert rollpipe(f"{words} --set lr=1e-2 --set c-entropy=0.1 --steps 1k") == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{out} stands where {ppo} stood after update 8, and has lr=0.01, "
        "c_entropy=0.1, steps=1000",
        f"train it:     rollpipe train --resume {out}",
    ]
    assert load_run(out).history.origin["set"] == dict(lr=0.01, c_entropy=0.1, steps=1000)
    assert load_agent(out).steps == 8 * 32
    for more, text in {
        "": "exists already",
        "--overwrite --set n_envs=3": "--set n_envs: a fork of",
        "--overwrite --set max_kl=1": "there is no option 'max_kl'",
        "--set lr": "NAME=VALUE",
        "--set lr=x": "--set lr: wrong type of value",
        "--overwrite --set at=3": "there is no option 'at'",
        "--overwrite --set edits=ab": "there is no option 'edits'",
    }.items():
        assert rollpipe(f"{words} {more}") == 2 and text in capsys.readouterr().err
    assert rollpipe(f"train --resume {out} {QUIET}") == 0
    assert rollpipe(f"diff {ppo} {out}") == 0
    told = capsys.readouterr().out
    assert f"{out} is a fork of" in told
    assert re.search("^(between the updates (9|1[0-9]) and|update (9|10):)", told, re.M)
