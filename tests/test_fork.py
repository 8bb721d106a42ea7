"A fork stands exactly where its parent stood. Without other options it equals it from there on; what its state does not fit is refused."

import errno
import json
import os
import re
import signal
import sys
import time

import gymnasium as gym
import numpy as np
import pytest
from command_line import rollpipe
from test_crash import CASES, POLE, config_of, content

from rollpipe.pipes import FragmentCollector, RewardScaler
from rollpipe.pipes.data.errors import CheckpointError, DataError, EnvError
from rollpipe.pipes.data.nested import first_difference
from rollpipe.pipes.keeping import files
from rollpipe.runs import fork, load_agent, replayed_run, resume, start, train
from rollpipe.runs.commands import find_run
from rollpipe.runs.evaluations import read_evaluations
from rollpipe.runs.folder import load_run
from rollpipe.runs.locks import unlock
from rollpipe.runs.logs import read_records
from rollpipe.runs.moments import verify
from rollpipe.runs.states import edited
from rollpipe.settings.config import make_config
from rollpipe.traces.differences import diff
from rollpipe.traces.history import History
from rollpipe.traces.journal import read_journal

CASES["decay"] = CASES["ppo"][0], POLE, dict(CASES["ppo"][2], decay_steps=10_000)


def trained(folder, name="ppo", steps=800, edits=(), **run):
    made = start(folder, config_of(name, steps=steps, **run))
    train(edited(made, *edits), progress=False, tensorboard=False)
    return made


def gone_on(folder, *edits, **given):
    run = edited(resume(folder, **given), *edits)
    train(run, progress=False, tensorboard=False)
    return run


def numbers(folder):
    "The metrics of a run, without those of the clock and of the workers."
    return [
        {
            name: x
            for name, x in r.items()
            if not name.startswith(("seconds", "steps_per_s", "workers"))
        }
        for r in read_records(folder)
    ]


def check_same(a, b):
    "All numbers of two runs are equal: journal, metrics, learner, stream."
    found = diff(a, b)
    one = load_run(a)
    other = load_run(b)
    lines = [
        {e.updates: (e.batch, e.weights) for e in read_journal(x / "journal.jsonl")} for x in (a, b)
    ]
    assert found.is_equal and found.common == one.counters["updates"] == other.counters["updates"]
    assert lines[0].keys() & lines[1].keys() and all(
        lines[1][n] == x for n, x in lines[0].items() if n in lines[1]
    )
    assert repr(numbers(a)) == repr(numbers(b))
    assert first_difference(one.agent_state, other.agent_state) is None
    for x in (one, other):
        x.stream["pipes"].pop("Recorder", None)  # each has a recording of its own
    assert first_difference(one.stream, other.stream) is None


# -- equal to the parent -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, run",
    [
        ("ppo", dict(keep=2)),
        ("trpo", {}),
        ("dqn", {}),
        ("dqn", dict(keep=3, workers=2, lag=1)),
        ("sac", {}),
        ("decay", {}),
    ],
)
def test_a_fork_without_an_edit_equals_its_parent(name, run, tmp_path):
    "From its newest checkpoint, a kept one, or the start; also a fork of a fork. The parent is not changed."
    steps = 320 if CASES[name][2].get("n_steps") != 16 else 480
    parent = trained(tmp_path / "run", name, steps, **run)
    before = content(parent.folder)
    last = parent.counters["updates"]
    for k, at in enumerate((1, 7, last - 3)):
        out = fork(parent.folder, tmp_path / f"fork{k}", at)
        found = load_run(out)
        records = read_records(out)
        assert (
            found.counters["updates"]
            == at
            == records[-1]["updates"]
            == read_journal(out / "journal.jsonl")[-1].updates
        )
        assert (
            found.counters["steps"] == records[-1]["steps"]
            and found.counters["seconds"] == records[-1]["seconds"]
        )
        assert json.loads((out / "config.json").read_text()) == found.config
        origin = found.history.origin
        assert (origin["run"], origin["at"], origin["set"]) == (str(parent.folder), at, {})
        gone_on(out)
        check_same(parent.folder, out)
    again = fork(tmp_path / "fork1", tmp_path / "again", 9)
    gone_on(again, workers=0 if "lag" not in run else 1)
    check_same(parent.folder, again)
    assert content(parent.folder) == before and verify(again, 3).is_equal
    assert not list(tmp_path.glob(".*"))


def test_the_newest_checkpoint_is_where_a_fork_begins_if_nothing_is_said(tmp_path):
    parent = trained(tmp_path / "run", steps=320)
    out = fork(parent.folder, tmp_path / "fork", steps=640)
    assert load_run(out).counters["updates"] == 10
    with pytest.raises(DataError, match="is complete"):
        resume(fork(parent.folder, tmp_path / "end"))
    gone_on(out)
    gone_on(parent.folder, steps=640)
    check_same(parent.folder, out)


@pytest.mark.slow
@pytest.mark.parametrize("path", [None, "memory"])
def test_the_memories_of_parent_and_fork_are_apart(path, tmp_path, monkeypatch):
    "Both go on, with chunks that have two names."
    monkeypatch.chdir(tmp_path)
    CASES["mapped"] = CASES["dqn"][0], POLE, dict(CASES["dqn"][2], path=path)
    twin, parent = (trained(tmp_path / name, "mapped", 400) for name in ("twin", "run"))
    out = fork(parent.folder, tmp_path / "fork", 22)
    other = fork(parent.folder, tmp_path / "other", 24, lr=0.01)
    for folder in (parent.folder, out, other, twin.folder):
        gone_on(folder, steps=800)
    check_same(twin.folder, parent.folder)
    check_same(twin.folder, out)
    assert (
        first_difference(load_run(twin.folder).agent_state, load_run(other).agent_state) is not None
    )


@pytest.mark.slow
def test_the_parent_may_be_in_training(tmp_path):
    twin = trained(tmp_path / "twin", "dqn", 400)

    def look(run, record):
        if record["updates"] in (4, 13, 17):
            fork(run.folder, tmp_path / f"at{record['updates']}", record["updates"] - 2)

    parent = start(tmp_path / "run", config_of("dqn", steps=400))
    train(parent, progress=False, tensorboard=False, callbacks=[look])
    check_same(twin.folder, parent.folder)
    for n in (4, 13, 17):
        gone_on(tmp_path / f"at{n}")
        check_same(twin.folder, tmp_path / f"at{n}")


@pytest.mark.slow
def test_forks_beside_a_training_that_saves_all_the_time(tmp_path):
    "In a process of its own, which removes checkpoints and chunks while they are read."
    config = config_of("dqn", steps=1600, checkpoint_every=1, keep=2)
    if not (pid := os.fork()):
        try:
            train(start(tmp_path / "run", config), progress=False, tensorboard=False)
        finally:
            os._exit(0)
    while (
        not (tmp_path / "run" / "config.json").exists()
        or not load_run(tmp_path / "run").counters["updates"]
    ):
        time.sleep(0.05)
    outs = []
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        outs.append(fork(tmp_path / "run", tmp_path / f"fork{len(outs)}"))
    assert len(outs) > 2 and load_run(tmp_path / "run").counters["steps"] == 1600
    for out in (outs[0], outs[len(outs) // 2]):
        gone_on(out)
        check_same(tmp_path / "run", out)


@pytest.mark.slow
def test_chunks_that_the_training_removes_meanwhile(tmp_path, monkeypatch):
    "The parent saves between the reading of its checkpoint and the naming of the chunks."
    module = sys.modules["rollpipe.runs.moments"]
    parent = trained(tmp_path / "run", "dqn", 400)
    link = module._hard_link
    moved = []

    def moving(source, path):
        if not moved:
            moved.append(gone_on(parent.folder, steps=480))
        link(source, path)

    monkeypatch.setattr(module, "_hard_link", moving)
    out = fork(parent.folder, tmp_path / "fork")
    assert load_run(out).counters["updates"] == parent.counters["updates"] + 5
    gone_on(out, steps=800), gone_on(parent.folder, steps=800)
    check_same(parent.folder, out)


@pytest.mark.slow
def test_a_fork_has_the_evaluations_up_to_there_and_a_recording_of_its_own(tmp_path):
    parent = trained(
        tmp_path / "run",
        "ppo",
        640,
        eval_every="160 steps",
        eval_episodes=2,
        final_episodes=2,
        record=True,
        keep=2,
    )
    for k, at in enumerate((7, 15)):
        out = fork(parent.folder, tmp_path / f"fork{k}", at)
        gone_on(out)
        check_same(parent.folder, out)
        lines = [[r | dict(seconds=0) for r in read_evaluations(x)] for x in (parent.folder, out)]
        assert lines[0] == lines[1]
        assert sorted((out / "recording").glob("0*"))[0].name.startswith("000000000-")


@pytest.mark.slow
@pytest.mark.parametrize("keep", [30, 0])
def test_a_fork_has_the_best_policy_of_its_time(keep, tmp_path):
    "That of the run may be a later one. If the run has not kept it, the policy of the fork is the best one until the next evaluation."
    parent = trained(
        tmp_path / "run",
        "ppo",
        960,
        eval_every="128 steps",
        eval_episodes=3,
        final_episodes=2,
        keep=keep,
        checkpoint_every=1,
    )
    last = load_run(parent.folder, best=True)
    at = int(last.counters["updates"]) - 2
    made = [
        r for r in read_evaluations(parent.folder) if r["kind"] == "training" and r["updates"] <= at
    ]
    then = max(made, key=lambda r: r["mean"])
    assert 0 < then["updates"] < at
    out = fork(
        parent.folder, tmp_path / "short", at, lr=1.0, steps=(at + 1) * 32
    )  # it ends before its first evaluation
    best = load_run(out, best=True)
    assert best.counters["updates"] == (then["updates"] if keep else at)
    if keep:
        assert best.evaluated["eval_return_mean"] == then["mean"]
    gone_on(out)
    assert [r["updates"] for r in read_evaluations(out) if r["kind"] == "best"] == [
        best.counters["updates"]
    ]
    out = fork(parent.folder, tmp_path / "worse", at, lr=1.0)
    gone_on(out)
    found = load_run(out, best=True)
    since = 0 if keep else at
    made = [r for r in read_evaluations(out) if r["kind"] == "training" and r["updates"] > since]
    assert found.evaluated["eval_return_mean"] == max(r["mean"] for r in made)
    assert found.counters["updates"] == max(made, key=lambda r: r["mean"])["updates"]
    gone_on(out := fork(parent.folder, tmp_path / "same", at))
    assert first_difference(load_run(out, best=True).agent_state, last.agent_state) is None
    check_same(parent.folder, out)


@pytest.mark.slow
def test_a_run_that_was_extended(tmp_path):
    "The checkpoint of its old end says that it is complete, as does that with which a fork of this end begins."
    parent, twin = (trained(tmp_path / name, steps=320, keep=9) for name in ("run", "twin"))
    late = fork(parent.folder, tmp_path / "late")
    for folder in (parent.folder, late):
        gone_on(folder, steps=640)
    assert verify(late, 3).common >= 13
    for k, (folder, at) in enumerate(
        [(parent.folder, 10), (parent.folder, 12), (late, 10), (late, 12)]
    ):
        with replayed_run(folder, at + 1) as moment:
            moment.outcome(moment.agent.update(moment.batch))
        gone_on(out := fork(folder, tmp_path / f"fork{k}", at))
        check_same(parent.folder, out)


@pytest.mark.slow
def test_an_old_end_does_not_end_a_run_that_was_extended(tmp_path):
    "Its checkpoint lacks the last evaluations, which the longer run has dropped. To make them is no reason to lose what came after it."
    run = trained(
        tmp_path / "run",
        "ppo",
        320,
        eval_every="160 steps",
        eval_episodes=1,
        final_episodes=1,
        keep=9,
    )
    gone_on(run.folder, steps=640)
    before = (run.folder / "checkpoint.safetensors").read_bytes()
    (old,) = (run.folder / "checkpoints").glob("*320.safetensors")
    with pytest.raises(DataError, match="is complete"):
        resume(old)
    assert (run.folder / "checkpoint.safetensors").read_bytes() == before and load_run(
        run.folder
    ).counters["steps"] == 640
    train(resume(old, steps=480), progress=False, tensorboard=False)
    assert load_run(run.folder).counters["steps"] == 480


@pytest.mark.slow_but_one
@pytest.mark.parametrize(
    "name, value", [("steps", 640.0), ("steps", np.int64(640)), ("steps", 0), ("workers", -1)]
)
def test_a_resume_with_an_option_that_cannot_be_leaves_the_run_as_it_is(name, value, tmp_path):
    "Its checkpoint, with the new options, could not be read any more."
    run = trained(tmp_path / "run", steps=320)
    before = content(run.folder)
    with pytest.raises(DataError, match=f"leaf {name}: .*wrong type|an integer {name} >= "):
        resume(run.folder, **{"steps": 640, name: value})
    assert content(run.folder) == before and gone_on(run.folder, steps=352).counters["steps"] == 352


@pytest.mark.parametrize(
    "name, value", [("steps", 64.0), ("seed", "3"), ("imports", "json"), ("checkpoint_every", 0)]
)
def test_a_configuration_with_an_option_that_cannot_be_begins_no_run(name, value, tmp_path):
    "It would be trained, and its checkpoint could not be read."
    with pytest.raises(DataError, match=name):
        start(tmp_path / "run", {**config_of("ppo", steps=64), name: value})
    assert not os.listdir(tmp_path)


def test_one_module_may_be_imported(tmp_path):
    run = start(tmp_path / "run", config_of("ppo", steps=64, imports="json"))
    assert load_run(run.folder).config["imports"] == ["json"]


@pytest.mark.slow
def test_updates_without_a_step_are_recorded_once(tmp_path):
    "They have the number of steps of the checkpoint before them. Vectors reset in a step that is no transition."
    options = dict(
        n_envs=1,
        n_steps=1,
        vector="vector_entry_point",
        warmup=8,
        capacity=64,
        batch_size=8,
        hidden=(8,),
    )

    def config(steps):
        return make_config("dqn", "CartPole-v1", options, steps=steps, checkpoint_every=1, keep=99)

    parent = start(tmp_path / "run", config(32))
    train(parent, progress=False, tensorboard=False)
    records = read_records(parent.folder)
    at = next(int(x["updates"]) for x, y in zip(records, records[1:]) if x["steps"] == y["steps"])
    out = fork(parent.folder, tmp_path / "fork", at)
    assert [r["updates"] for r in read_records(out)] == [*range(1, at + 1)]
    gone_on(out)
    check_same(parent.folder, out)


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
    options = dict(n_envs=2, n_steps=16)
    made = start(
        folder,
        make_config("ppo", "TwoDoors-v0", options, steps=128, engine="torch", eval_every=0, **run),
    )
    train(made, progress=False, tensorboard=False)
    monkeypatch.setattr(TwoDoors, "more", True)
    return made


@pytest.mark.slow_but_one
@pytest.mark.parametrize("exact", [False, True])
def test_a_run_whose_environment_was_changed_goes_on_with_new_episodes(
    exact, tmp_path, monkeypatch, caplog
):
    parent = changed_corridor(tmp_path / "run", monkeypatch, exact=exact)
    with pytest.raises(
        EnvError, match=r"environment 0.*leaf TwoDoors\.toll: the state lacks an attribute"
    ):
        gone_on(parent.folder, steps=256)
    out = fork(parent.folder, tmp_path / "out", new_episodes=True, steps=256)
    assert load_run(out).stream is None and not (out / "fork.safetensors").exists()
    before = content(parent.folder)
    run = resume(out)
    assert "The run begins new episodes: it is a fork that was made so" in caplog.text
    assert (
        first_difference(load_run(parent.folder).agent_state, run.agent.state_dict()) is None
        and run.counters["resumes"] == 1
    )
    train(run, progress=False, tensorboard=False)
    found = load_run(out)
    assert (
        found.stream is not None
        and found.history.inexact is None
        and found.config["exact"] is exact
    )
    lines = diff(parent.folder, out)
    assert lines.parting is None and "out was resumed after update 4, with new episodes" in str(
        lines
    )
    assert numbers(out)[:4] == numbers(parent.folder) and len(numbers(out)) == 8
    with pytest.raises(DataError, match="1 times new episodes"):
        fork(out, tmp_path / "again", 6)
    for best in (found, load_run(parent.folder)):  # such a fork is as exact as others
        best = best._replace(
            config=found.config, stream=None, evaluated=dict(eval_return_mean=1.0, episodes=1)
        )
        (out / "best.safetensors").write_bytes(best.data())
        if exact:
            with pytest.raises(DataError, match="got the best checkpoint has no state"):
                resume(out / "best.safetensors", steps=320)
        else:
            unlock(resume(out / "best.safetensors", steps=320).folder)
            assert (
                caplog.messages[-1]
                == "The run begins new episodes: the best checkpoint has no state of the stream"
            )
            (out / "checkpoint.safetensors").write_bytes(found.data())
    onward = fork(out, tmp_path / "onward", steps=320)  # it is exact from its newest checkpoint on
    assert gone_on(onward).counters["resumes"] == 1 and content(parent.folder) == before


def test_the_command_names_the_way_out(tmp_path, monkeypatch, capsys):
    parent = changed_corridor(tmp_path / "run", monkeypatch)
    assert rollpipe("train", "--resume", parent.folder, "--steps", "256", "--quiet") == 2
    words = f"rollpipe fork {parent.folder} --new-episodes --out OUT"
    assert f"Expected `{words}`, which learns on in new episodes." in capsys.readouterr().err
    assert rollpipe(*words.replace("OUT", str(tmp_path / "out")).split()[1:]) == 0
    assert "after update 4, and begins new episodes" in capsys.readouterr().out
    assert rollpipe("train", "--resume", tmp_path / "out", "--steps", "256", "--quiet") == 0


@pytest.mark.slow_but_one
@pytest.mark.parametrize(
    "name, options",
    [("ppo", dict(n_envs=3, gamma=0.9, lr=3e-3)), ("dqn", dict(capacity=300, n_envs=1, noise=1))],
)
def test_new_episodes_allow_other_numbers_of_environments_and_steps(name, options, tmp_path):
    parent = trained(tmp_path / "run", name, 320)
    out = fork(parent.folder, tmp_path / "out", new_episodes=True, steps=640, **options)
    run = gone_on(out)
    assert run.counters["steps"] >= 640 and all(
        run.config["options"][x] == y for x, y in options.items() if x != "noise"
    )
    with pytest.raises(DataError, match="cannot have another hidden. Expected .8., with which"):
        fork(parent.folder, tmp_path / "more", new_episodes=True, hidden=(7,))


def test_a_fork_that_could_not_go_on_exactly_is_not_exact(tmp_path, monkeypatch):
    parent = trained(tmp_path / "run", steps=320)
    monkeypatch.setattr("rollpipe.runs.states.why_inexact", lambda pipe, config: "for a test")
    with pytest.raises(DataError, match="leaf exact: .*got for a test"):
        fork(parent.folder, tmp_path / "out", new_episodes=True, steps=640, exact=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_new_episodes_from_an_earlier_update_and_of_an_inexact_run(tmp_path):
    parent = trained(tmp_path / "run", steps=320)
    out = fork(parent.folder, tmp_path / "out", 3, new_episodes=True)
    assert load_run(out).counters["updates"] == 3 and gone_on(out).counters["steps"] >= 320
    lent = start(tmp_path / "lent", config_of("ppo", steps=320))
    began = {**lent.history[0], "inexact": "for a test"}
    lent = lent._replace(history=History([began]), stream=lent.stream.__class__("for a test"))
    train(lent, progress=False, tensorboard=False)
    with pytest.raises(DataError, match="cannot be repeated"):
        fork(lent.folder, tmp_path / "more")
    for name in (None, "metrics.jsonl", "journal.jsonl"):  # a pack has neither
        if name:
            (lent.folder / name).unlink()
        out = fork(lent.folder, tmp_path / f"more{name}", new_episodes=True, steps=640)
        assert gone_on(out).counters["steps"] >= 640


# -- edits -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_other_options_and_where_the_runs_part(tmp_path):
    parent = trained(tmp_path / "run", "trpo", 800)
    out = fork(parent.folder, tmp_path / "fork", 8, max_kl=0.5, critic_lr=1e-4)
    run = gone_on(out)
    assert run.agent.max_kl == 0.5 and {g["lr"] for g in run.agent.optimizer.param_groups} == {1e-4}
    text = str(found := diff(parent.folder, out))
    assert found.parting.after >= 8 and str(found.parting).startswith(
        "between the updates 9 and 10"
    )
    assert (
        f"{out} is a fork of {parent.folder} after update 8, with max_kl=0.5, critic_lr=0.0001"
        in text
    )
    assert (
        f"{out} went on with another fingerprint after update 8" in text
        and "settings/max_kl: 0.01 != 0.5" in text
    )
    again = fork(
        parent.folder,
        tmp_path / "again",
        8,
        max_kl=0.5,
        critic_lr=1e-4,
        critic_epochs=parent.config["options"]["critic_epochs"],
    )
    gone_on(again)
    check_same(out, again)
    assert load_run(again).history.origin["set"] == dict(max_kl=0.5, critic_lr=1e-4)


@pytest.mark.slow
def test_a_decaying_rate_begins_where_the_option_says(tmp_path):
    parent = trained(tmp_path / "run", "decay", 800)
    run = gone_on(fork(parent.folder, tmp_path / "a", 8, lr=1e-2))
    assert {g["initial_lr"] for g in run.agent.optimizer.param_groups} == {
        1e-2,
        parent.config["options"]["critic_lr"] or 1e-2,
    }
    run = gone_on(fork(parent.folder, tmp_path / "b", 8, decay_steps=0))
    assert {g["lr"] for g in run.agent.optimizer.param_groups} == {
        g["initial_lr"] for g in parent.agent.optimizer.param_groups
    }
    gone_on(
        out := fork(parent.folder, tmp_path / "c", 8, steps=1200)
    )  # the rates are those of the parent
    gone_on(parent.folder, steps=1200)
    check_same(parent.folder, out)


@pytest.mark.slow_but_one
@pytest.mark.parametrize(
    "name, options",
    [
        (
            "ppo",
            dict(
                hidden=(16,),
                critic_hidden=(4,),
                activation="relu",
                n_envs=3,
                n_steps=8,
                lanes=2,
                seed=3,
                normalize=False,
                intrinsic=0.1,
                sticky=True,
                terminal_obs=True,
            ),
        ),
        (
            "dqn",
            dict(
                capacity=128,
                batch_size=4,
                warmup=8,
                prioritized=False,
                alpha=0.1,
                lanes=1,
                hidden=(4,),
                n_envs=1,
                seed=1,
                length=2,
            ),
        ),
        ("sac", dict(critic_hidden=(4,), capacity=100, n_steps=2, seed=2)),
    ],
)
def test_what_the_state_does_not_fit_is_refused_by_name(name, options, tmp_path):
    parent = trained(tmp_path / "run", name, 320)
    before = content(parent.folder)
    for option, x in options.items():
        assert x != {**parent.config, **parent.config["options"]}[option]
        with pytest.raises(
            DataError, match=f"leaf {option}: a fork of .* cannot have another {option}"
        ):
            fork(parent.folder, tmp_path / "fork", **{option: x})
    assert os.listdir(tmp_path) == ["run"] and content(parent.folder) == before


@pytest.mark.slow
def test_what_has_been_learned_since_is_refused(tmp_path):
    parent = trained(tmp_path / "run", "sac", 320)
    with pytest.raises(DataError, match="leaf first_temperature: .*or a new run, got 0.5"):
        fork(parent.folder, tmp_path / "fork", first_temperature=0.5)
    trpo = trained(tmp_path / "trpo", "trpo", 320)
    with pytest.raises(DataError, match="leaf log_std: .*"):
        fork(trpo.folder, tmp_path / "fork", log_std=0.3)


@pytest.mark.slow
def test_a_learned_temperature_may_become_a_fixed_one_but_not_the_other_way_round(tmp_path):
    parent = trained(tmp_path / "run", "sac", 320)
    run = gone_on(fixed := fork(parent.folder, tmp_path / "fixed", 8, temperature=0.5))
    assert float(run.agent.entropy_weight) == 0.5
    with pytest.raises(DataError, match="leaf temperature.*lacks a part of the learner"):
        fork(fixed, tmp_path / "learned", temperature=None, steps=640)


@pytest.mark.slow
def test_impossible_values_are_refused(tmp_path):
    parent = trained(tmp_path / "run", "ppo", 320)
    cases = {
        "there is no option 'max_kl'": dict(max_kl=0.1),
        "Expected clip": dict(clips=0.1),
        "leaf clip": dict(clip="a"),
        "lr": dict(lr=-1.0),
        "leaf steps: .* would be complete. Expected more than 320, got 100": dict(steps=100),
        "decay_steps": dict(decay_steps=300),
        "workers": dict(workers=3),
        "checkpoint_every": dict(checkpoint_every=0),
        "eval_every": dict(eval_every="x"),
        "there is no option 'preset'": dict(preset="none"),
    }
    for text, options in cases.items():
        with pytest.raises(DataError, match=text):
            fork(parent.folder, tmp_path / "fork", **options)
    lanes = trained(tmp_path / "lanes", "dqn", 320, workers=2, lag=1)
    for options in (dict(lag=0), dict(workers=0), dict(order="ready")):
        with pytest.raises(DataError, match=f"leaf {next(iter(options))}: .*the stream of"):
            fork(lanes.folder, tmp_path / "fork", **options)
    assert sorted(os.listdir(tmp_path)) == ["lanes", "run"]


@pytest.mark.slow
def test_an_impossible_option_is_refused_before_the_run_is_repeated(tmp_path, monkeypatch):
    parent = trained(tmp_path / "run", "ppo", 320, keep=1)

    def never(*_, **__):
        raise AssertionError("the run is repeated")

    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["rollpipe.runs.fork"], "moment", never)
        for name, x in dict(
            clips=0.1, clip="a", lr=-1.0, n_envs=3, hidden=(7,), steps=64, workers=3, eval_every="x"
        ).items():
            with pytest.raises(DataError, match=name):
                fork(parent.folder, tmp_path / "fork", 3, **{name: x})
        for options in (dict(steps=128), dict(new_episodes=True, n_envs=3), dict(noise=1, lr=0.01)):
            with pytest.raises(AssertionError, match="is repeated"):
                fork(parent.folder, tmp_path / "fork", 3, **options)
    assert (
        gone_on(
            fork(parent.folder, tmp_path / "fork", 3, steps=128, n_envs=3, new_episodes=True)
        ).counters["updates"]
        == 4
    )


@pytest.mark.slow
def test_edits_of_the_graph(tmp_path):
    "Those that the parent had are needed to repeat it; another one works from the update on."
    edit = RewardScaler.inserter(after=FragmentCollector)
    parent = trained(tmp_path / "run", "ppo", 640, edits=[edit])
    out = fork(parent.folder, tmp_path / "fork", 8, edits=[edit])
    gone_on(out, edit)
    check_same(parent.folder, out)
    plain = trained(tmp_path / "plain", "ppo", 640)
    gone_on(out := fork(plain.folder, tmp_path / "other", 8), edit)
    assert diff(plain.folder, out).parting.after >= 8 and "RewardScaler" in str(
        diff(plain.folder, out)
    )


# -- what cannot be forked ---------------------------------------------------------------------------------------------


def test_refused_runs(tmp_path):
    for name, x in dict(lag=None, order="ready").items():
        run = start(tmp_path / name, config_of("dqn", workers=2, **{name: x}))
        with pytest.raises(
            DataError, match=f"{name} cannot be repeated. Expected an exact run, got {name}={x!r}"
        ):
            fork(run.folder, tmp_path / "f", 1)
    run = start(tmp_path / "ranks", {**config_of("ppo"), "ranks": 2})
    with pytest.raises(DataError, match="several ranks learn together"):
        fork(run.folder, tmp_path / "f", 1)
    run = trained(tmp_path / "run", steps=320)
    for at in (0, -1, 11, 10**9):
        with pytest.raises(
            DataError, match=f"leaf update: .* has no such update. Expected 1 to 10, got {at}"
        ):
            fork(run.folder, tmp_path / "f", at)
    with pytest.raises(DataError, match="no such run"):
        fork(tmp_path / "nowhere", tmp_path / "f")
    assert not (tmp_path / "f").exists() and not list(tmp_path.glob(".*"))


@pytest.mark.slow
def test_a_fork_knows_what_it_did_not_make(tmp_path):
    run = trained(tmp_path / "run", steps=640)
    gone_on(out := fork(run.folder, tmp_path / "fork", 8, lr=0.01))
    with replayed_run(out, 9) as moment:
        moment.outcome(moment.agent.update(moment.batch))
    with replayed_run(out, 17) as moment:
        moment.outcome(moment.agent.update(moment.batch))
    assert verify(out, 5).common >= 13
    with pytest.raises(
        DataError, match="leaf update: .*is a fork.*Expected 9 to 20, or the run .*/run, got 8"
    ):
        replayed_run(out, 8).__enter__()
    with pytest.raises(
        DataError, match="leaf update: .*is a fork.*Expected 8 to 20, or the run .*/run, got 7"
    ):
        fork(out, tmp_path / "again", 7)
    gone_on(again := fork(out, tmp_path / "again", 8))
    check_same(out, again)
    with pytest.raises(
        DataError,
        match="its run is a fork of .*/run. Expected rollpipe train --resume .*/fork, or another folder",
    ):
        find_run(
            out, make_config("ppo", POLE, dict(CASES["ppo"][2]), steps=640, checkpoint_every=5)
        )


# -- the folder --------------------------------------------------------------------------------------------------------


def test_a_folder_is_replaced_only_if_it_is_a_run(tmp_path):
    parent = trained(tmp_path / "run", steps=320)
    other = trained(tmp_path / "other", steps=320)
    with pytest.raises(DataError, match="other exists already. Expected another folder, or --over"):
        fork(parent.folder, other.folder, 4)
    (other.folder / "mine.txt").touch()
    with pytest.raises(DataError, match="with nothing else in it, got mine.txt"):
        fork(parent.folder, other.folder, 4, overwrite=True)
    (other.folder / "mine.txt").unlink()
    fork(parent.folder, other.folder, 4, overwrite=True)
    assert load_run(other.folder).history.origin["at"] == 4 and sorted(os.listdir(tmp_path)) == [
        "other",
        "run",
    ]
    for out in (parent.folder, parent.folder / "sub"):
        with pytest.raises(DataError, match="is the run itself, or in its folder"):
            fork(parent.folder, out, 4, overwrite=True)
    (tmp_path / "link").symlink_to(other.folder)
    with pytest.raises(DataError, match="cannot be replaced"):
        fork(parent.folder, tmp_path / "link", 4, overwrite=True)


@pytest.mark.parametrize(
    "overwrite, text",
    [(False, "fork exists already"), (True, "with nothing else in it, got mine.txt")],
)
def test_what_appears_in_the_folder_meanwhile_stays(overwrite, text, tmp_path, monkeypatch):
    parent = trained(tmp_path / "run", steps=160)
    module = sys.modules["rollpipe.runs.fork"]
    copy_past = module._copy_past

    def late(*args):
        copy_past(*args)
        unlock(start(tmp_path / "fork", config_of("ppo")).folder)
        if overwrite:
            (tmp_path / "fork" / "mine.txt").touch()

    monkeypatch.setattr(module, "_copy_past", late)
    with pytest.raises(DataError, match=text):
        fork(parent.folder, tmp_path / "fork", 4, overwrite=overwrite)
    assert load_run(tmp_path / "fork").counters["updates"] == 0 and sorted(
        os.listdir(tmp_path)
    ) == ["fork", "run"]


@pytest.mark.slow
def test_a_kill_leaves_no_half_run(tmp_path):
    parent = trained(
        tmp_path / "run", "dqn", 320, keep=9
    )  # a checkpoint of update 15 spares each fork 15 updates
    before = content(parent.folder)
    for n in range(1, 100):
        if not (pid := os.fork()):
            _die_in_the_fork(n, parent.folder, tmp_path / "fork")
        if not os.WIFSIGNALED(os.waitpid(pid, 0)[1]):
            break
        assert not (tmp_path / "fork").exists()
    assert n > 8 and load_run(tmp_path / "fork").counters["updates"] == 17
    assert sorted(os.listdir(tmp_path)) == ["fork", "run"] and content(parent.folder) == before


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


def test_a_full_disk_names_the_file(tmp_path, monkeypatch):
    parent = trained(tmp_path / "run", "dqn", 320)

    def full(fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device: '.*/.fork.fork/run/"):
        fork(parent.folder, tmp_path / "fork", 17)
    assert os.listdir(tmp_path) == ["run"]


def test_a_damaged_chunk_is_told(tmp_path):
    parent = trained(tmp_path / "run", "dqn", 320)
    for path in (parent.folder / "replay").glob("*.chunk"):
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    out = fork(parent.folder, tmp_path / "fork", steps=640)
    with pytest.raises(CheckpointError, match="the chunk is damaged"):
        gone_on(out)


def test_a_file_system_without_second_names(tmp_path, monkeypatch):
    parent = trained(tmp_path / "run", "dqn", 320)
    monkeypatch.setattr(
        os,
        "link",
        lambda *names: (_ for _ in ()).throw(OSError(errno.EXDEV, "Invalid cross-device link")),
    )
    gone_on(out := fork(parent.folder, tmp_path / "fork", 12))
    check_same(parent.folder, out)
    assert all(path.stat().st_nlink == 1 for path in (out / "replay").glob("*"))


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command(tmp_path, capsys):
    parent = trained(tmp_path / "run", steps=640)
    out = tmp_path / "fork"
    words = ["fork", parent.folder, "--at", 8, "--out", out]
    assert rollpipe(*words, "--set", "lr=1e-2", "--set", "c-entropy=0.1", "--steps", "1k") == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{out} stands where {parent.folder} stood after update 8, and has lr=0.01, "
        "c_entropy=0.1, steps=1000",
        f"train it:     rollpipe train --resume {out}",
    ]
    assert (
        load_run(out).history.origin["set"] == dict(lr=0.01, c_entropy=0.1, steps=1000)
        and load_agent(out).steps == 8 * 32
    )
    for more, text in [
        ([], "exists already"),
        (["--overwrite", "--set", "n_envs=3"], "--set n_envs: a fork of"),
        (["--overwrite", "--set", "max_kl=1"], "there is no option 'max_kl'"),
        (["--set", "lr"], "NAME=VALUE"),
        (["--set", "lr=x"], "--set lr: wrong type of value"),
        (["--overwrite", "--set", "at=3"], "there is no option 'at'"),
        (["--overwrite", "--set", "edits=ab"], "there is no option 'edits'"),
    ]:
        assert rollpipe(*words, *more) == 2 and text in capsys.readouterr().err
    assert rollpipe("train", "--resume", out, "--quiet", "--no-tensorboard") == 0
    assert rollpipe("diff", parent.folder, out) == 0
    told = capsys.readouterr().out
    assert f"{out} is a fork of" in told and re.search(
        "^between the updates (9|1[0-9]) and", told, re.M
    )
