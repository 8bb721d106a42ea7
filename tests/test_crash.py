"An update that failed, and any update of a run, is made again bit for bit; nothing of the run is changed, and no error is hidden."

import errno
import os
import signal
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch
from command_line import QUIET, error_of, rollpipe, settings
from forked import run_forked
from gallery import POLE, again, check_same, config_of, content, gone_on, quietly, refused

from rollpipe.agents import DQN, PPO, SAC, TRPO
from rollpipe.agents.checkpoint import load_checkpoint
from rollpipe.layers import Critic, RecurrentPolicy
from rollpipe.pipes import on_policy
from rollpipe.pipes.data.errors import CheckpointError, DataError, WorkerError, describe_exception
from rollpipe.pipes.data.nested import first_difference
from rollpipe.pipes.frames import Stacks
from rollpipe.runs import replayed_run, start
from rollpipe.traces import observers as flight
from rollpipe.traces.observers import CRASH, checksum, read_crash

LEARNERS = dict(ppo=PPO, trpo=TRPO, dqn=DQN, sac=SAC)


@pytest.fixture
def planted(monkeypatch):
    "Make a learner fail in its update number `at`, when it has learned from the batch. Returns what each update saw and did."

    def plant(cls, at, error=lambda loss: DataError("planted", got=loss)):
        update = cls.update
        seen = {}
        fails = []

        def failing(agent, batch):
            n = agent.steps
            before = checksum(agent.state_dict())
            metrics = update(agent, batch)
            found = {name: x for name, x in metrics.items() if not name.startswith("seconds")}
            seen.setdefault(n, []).append(
                (
                    before,
                    checksum(getattr(batch, "fresh", batch)),
                    repr(found),
                    checksum(agent.state_dict()),
                )
            )
            if len(seen) == at and not fails:
                fails.append(n)
            if n in fails:
                raise error(repr(found))
            return metrics

        monkeypatch.setattr(cls, "update", failing)
        return seen

    return plant


def crashed(folder, name="ppo", **run):
    "Train until the planted error; returns the run and the error."
    started = start(folder / "run", config_of(name, **run))
    return started, refused("planted", quietly, started)


def made_again(moment):
    return moment.outcome(error=refused("planted", moment.agent.update, moment.batch))


def crash_again(folder):
    "Make the update of a run that failed again."
    with replayed_run(folder) as moment:
        return made_again(moment)


def crash_of(run):
    return run.folder.joinpath(*CRASH)


# -- the update that failed --------------------------------------------------------------------------------------------


@pytest.mark.slow_but_one
@pytest.mark.parametrize(
    "share", [0.005, 1e-9, 1e9], ids=["by the clock", "from the start", "the last batch alone"]
)
@pytest.mark.parametrize("name", LEARNERS)
def test_the_failed_update_is_made_again(name, share, tmp_path, planted, monkeypatch):
    monkeypatch.setattr(flight, "SHARE", share)
    seen = planted(LEARNERS[name], at=23)
    run, error = crashed(tmp_path, name)
    note = f"The update can be made again with: rollpipe replay {run.folder} --crash"
    assert notes_of(error) in (None, [note])
    before = content(run.folder)
    random = torch.get_rng_state()
    with replayed_run(run.folder) as moment:
        assert moment.update == 23
        assert made_again(moment) == "the error and the learner after it are the same as then"
    assert content(run.folder) == before and torch.equal(torch.get_rng_state(), random)

    # Each update that was made again was the same.
    held = read_crash(run.folder)["batches"]
    assert len(seen) == 23 and len(held) == {1e-9: 23, 1e9: 1}.get(share, len(held))
    assert all(x == xs[0] for xs in seen.values() for x in xs)


def test_a_recurrent_learner_is_made_again(tmp_path, planted):
    "Its recurrent state is in the batch."

    def made():
        torch.manual_seed(0)
        actor = RecurrentPolicy.for_env(POLE, hidden=(8,), seed=0)
        return (
            actor,
            PPO(actor, critic := Critic.for_env(POLE, hidden=(8,), seed=1), epochs=2),
            critic,
        )

    actor, agent, critic = made()
    seen = planted(PPO, at=5)
    counters = dict(updates=0, steps=0, resumes=0)
    recording = flight.FlightRecorder(tmp_path, {}, [], counters, agent, "")
    with pytest.raises(DataError, match="planted"):
        for batch in on_policy(POLE, actor, critic, n_steps=8, n_envs=2, seed=0):
            recording.around(agent.update)(batch)
    crash = read_crash(tmp_path)
    again = made()[1]
    again.load_state_dict(load_checkpoint(tmp_path.joinpath(*CRASH)).agent_state)
    assert len(seen) == 5 and batch.hx[0].any() if isinstance(batch.hx, tuple) else batch.hx.any()
    with pytest.raises(DataError, match="planted") as e:
        for batch in crash["batches"]:
            again.update(batch)
    assert (describe_exception(e.value), checksum(again.state_dict())) == (
        crash["error"],
        crash["state"],
    )


@pytest.mark.slow
def test_bytes_and_number_of_the_batches_are_bounded(tmp_path, planted, monkeypatch):
    monkeypatch.setattr(flight, "SHARE", 1e-9)
    seen = planted(PPO, at=23)
    for name, least in dict(MOST=8, BYTES=30_000).items():
        with monkeypatch.context() as patch:
            patch.setattr(flight, name, least)
            run, _ = crashed(tmp_path / name)
        assert len(read_crash(run.folder)["batches"]) <= 16
        crash_again(run.folder)
        seen.clear()


@pytest.mark.parametrize("options", [dict(workers=2, lag=None), dict(workers=2, order="ready")])
def test_a_run_that_cannot_be_repeated_has_its_failed_update(options, tmp_path, planted):
    planted(PPO, at=4)
    run, _ = crashed(tmp_path, "lanes", **options)
    told = "cannot be repeated. Expected an exact run; or --crash.*the clock orders the stream"
    refused(told, replayed_run(run.folder, 2).__enter__)
    crash_again(run.folder)


def test_another_outcome_is_told(tmp_path, planted):
    planted(PPO, at=3)
    run, _ = crashed(tmp_path)
    with replayed_run(run.folder) as moment:
        told = "does not repeat here. Expected DataError: planted.*, got no error"
        refused(told, moment.outcome, {})
        with torch.no_grad():
            next(moment.agent.actor.parameters()).add_(1)
        refused("does not repeat here", made_again, moment)
    fresh = start(tmp_path / "b", config_of("ppo")).folder
    refused("has no update that failed", replayed_run(fresh).__enter__)


# -- what must not happen when an update fails -------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt, WorkerError])
def test_an_interrupt_and_a_lost_process_are_no_failures(error, tmp_path, planted):
    planted(PPO, at=3, error=lambda loss: error("planted"))
    run = start(tmp_path / "run", config_of("ppo"))
    with pytest.raises(error):
        quietly(run)
    assert not (run.folder / "crash").exists()


def test_a_full_disk_hides_no_error(tmp_path, planted, monkeypatch):
    planted(PPO, at=3, error=lambda loss: ZeroDivisionError("planted"))

    def full(path, data):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(flight, "write_atomically", full)
    run = start(tmp_path / "run", config_of("ppo"))
    with pytest.raises(ZeroDivisionError, match="^planted") as e:
        quietly(run)
    told = "What the update learned from could not be written (OSError: [Errno 28] No space"
    assert (notes_of(e.value) or [told])[0].startswith(told)
    assert e.traceback[-1].name == "failing" and not crash_of(run).exists()


class Failing:
    "A learner without weights, whose updates fail from number `at` on."

    def __init__(self, at=1):
        self.at, self.n = at, 0

    def state_dict(self):
        return dict(n=self.n)

    def update(self, batch):
        self.n += 1
        if self.n >= self.at:
            raise ValueError("planted")


def recorded_updates(folder, at=1, **config):
    agent = Failing(at)
    counters = dict(updates=0, steps=0, resumes=0)
    return flight.FlightRecorder(folder, config, [], counters, agent, "").around(agent.update)


def test_a_batch_that_cannot_be_stored_hides_no_error(tmp_path):
    error = refused("planted", recorded_updates(tmp_path), [object()], error=ValueError)
    told = "leaf crash.batches.0.0: cannot be stored without a pickle"
    assert told in (notes_of(error) or [told])[0]
    assert not list(tmp_path.rglob("*.*"))


def test_a_batch_may_hold_all_kinds_of_numbers(tmp_path):
    stacks = Stacks(
        torch.arange(24.0).reshape(6, 2, 2),
        torch.zeros(1, 2, 2),
        torch.tensor([[0, 1], [2, 3], [-1, 5]]),
    )
    batch = dict(
        stacks=stacks,
        wide=torch.ones(1, 3).expand(2, 3),
        turned=torch.arange(6).reshape(2, 3).T,
        array=np.arange(3, dtype="f4")[::2],
        none=torch.zeros(0, 3),
        more=[None, 1, "a", np.float32(2)],
    )
    with pytest.raises(ValueError, match="planted"):
        recorded_updates(tmp_path)(batch)
    (found,) = read_crash(tmp_path)["batches"]
    assert isinstance(found["stacks"], Stacks) and torch.equal(
        found.pop("stacks").dense(), batch.pop("stacks").dense()
    )
    assert first_difference(found, batch) is None
    assert all(found[name].stride() == batch[name].stride() for name in ("wide", "turned"))


def test_a_rank_keeps_its_last_batch_alone(tmp_path):
    update = recorded_updates(tmp_path, at=3, ranks=2)
    for k in range(2):
        update(torch.tensor(k))
    refused("planted", update, torch.tensor(2), error=ValueError)
    assert read_crash(tmp_path)["batches"] == [torch.tensor(2)]


def test_a_second_failure_replaces_the_first_and_a_kill_in_between_leaves_one(tmp_path, planted):
    seen = planted(PPO, at=3)
    run, _ = crashed(tmp_path)
    path = crash_of(run)
    first = path.read_bytes()
    if not (pid := os.fork()):
        os.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)
        about = (run.folder, run.config, run.history, run.counters, run.agent, "")
        flight.FlightRecorder(*about).around(run.agent.update)(None)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    assert path.read_bytes() == first and len(os.listdir(path.parent)) == 2

    seen.clear()
    refused("planted", gone_on, run.folder)
    assert os.listdir(path.parent) == [CRASH[1]] and path.read_bytes() != first
    crash_again(run.folder)


def test_the_folder_may_be_a_link(tmp_path, planted):
    planted(PPO, at=2)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    run = start(tmp_path / "run", config_of("ppo"))
    link = run.folder / "crash"
    link.symlink_to(elsewhere)
    refused("planted", quietly, run)
    crash_again(run.folder)

    # A new run removes the link, and not what it names.
    run = start(run.folder, config_of("ppo"), overwrite=True)
    assert not link.exists() and (elsewhere / CRASH[1]).exists()
    link.symlink_to(tmp_path / "nowhere")
    told = "could not be written (FileExistsError"
    assert told in (notes_of(refused("planted", quietly, run)) or [told])[0]


@pytest.mark.parametrize(
    "damage", [lambda b: b[:100], lambda b: b[:-9] + bytes([b[-9] ^ 1]) + b[-8:], lambda b: b""]
)
def test_a_damaged_file_is_refused(damage, tmp_path, planted):
    planted(PPO, at=2)
    run, _ = crashed(tmp_path)
    path = crash_of(run)
    path.write_bytes(damage(path.read_bytes()))
    refused("damaged", replayed_run(run.folder).__enter__, error=CheckpointError)


def test_another_file_is_refused(gallery, tmp_path):
    folder = gallery.copy("ppo", tmp_path / "run")
    folder.joinpath("crash").mkdir()
    folder.joinpath(*CRASH).write_bytes((folder / "checkpoint.safetensors").read_bytes())
    told = "not of an update that failed"
    refused(told, replayed_run(folder).__enter__, error=CheckpointError)


# -- any update --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, run",
    [
        ("ppo", {}),
        ("dqn", {}),
        ("dqn", dict(workers=2, lag=1)),
        ("dqn", dict(keep=2)),
        ("trpo", dict(keep=3, record=True)),
    ],
)
def test_any_update_is_made_again(name, run, tmp_path, planted):
    "From the last checkpoint, a kept one, or the start: the learner, its batch, metrics and weights are those of the run."
    seen = planted(LEARNERS[name], at=23)
    folder = crashed(tmp_path, name, **run)[0].folder
    then = [xs[0] for xs in seen.values()]
    before = content(folder)
    for update in (1, 3, 12, 17, 22, 23):
        seen.clear()
        with replayed_run(folder, update) as moment:
            fresh = getattr(moment.batch, "fresh", moment.batch)
            state = (checksum(moment.agent.state_dict()), checksum(fresh))
            assert len(seen) < update and state == then[update - 1][:2]

            # It begins at the newest checkpoint before it.
            begun = max(n for n in (0, *(10, 15, 20)[-run.get("keep", 1) :]) if n < update)
            told = f"from the checkpoint of update {begun}" if begun else "from the start"
            assert moment.known.splitlines()[0].endswith(told)
            if update < 23:
                moment.outcome(moment.agent.update(moment.batch))
            else:
                made_again(moment)
        assert list(seen.values())[-1][-1] == then[update - 1]
    assert content(folder) == before
    for update in (0, -1, 24, 10**9):
        told = f"leaf update: .* has no such update. Expected 1 to 23, got {update}"
        refused(told, replayed_run(folder, update).__enter__)


def test_a_run_that_has_lost_its_fingerprint_is_repeated_from_a_checkpoint(gallery, tmp_path):
    folder = gallery.copy("ppo", tmp_path / "run")
    (folder / "fingerprint.json").unlink()
    with replayed_run(folder, 8) as moment:
        assert "from the checkpoint of update 5\nno fingerprint to compare\n" in moment.known
        assert "metrics of update 8 are equal" in moment.outcome(moment.agent.update(moment.batch))


@pytest.mark.slow
def test_a_run_that_is_trained_meanwhile_is_not_disturbed(gallery, tmp_path):
    twin = gallery.original("dqn")
    looks = (4, 13, 17)
    told = []

    def look(run, record):
        if record["updates"] in looks:
            told.append(again(run.folder, record["updates"] - 2))

    run = start(tmp_path / "run", config_of("dqn", steps=320, keep=9))
    quietly(run, callbacks=[look])
    assert len(told) == 3
    check_same(twin, run.folder)
    last = run.counters["updates"]  # a complete run has no next update
    refused(f"Expected 1 to {last}, got", replayed_run(run.folder, last + 1).__enter__)


def test_another_number_is_told(gallery):
    folder = gallery.original("ppo")
    with replayed_run(folder, 3) as moment:
        metrics = moment.agent.update(moment.batch)
        other = metrics | dict(loss=metrics["loss"] + 1e-9)
        refused("leaf loss: .* does not repeat here", moment.outcome, other)
    with replayed_run(folder, 3) as moment:
        refused("then, update 3 did not fail", partial(moment.outcome, error=ValueError()))


# -- the command -------------------------------------------------------------------------------------------------------


PLANTED = """
from rollpipe.agents import PPO
improve = PPO.improve
def failing(agent, batch):
    if agent.steps >= {at} * 32: batch = batch._replace(adv=batch.adv * float("nan"))
    return improve(agent, batch)
PPO.improve = failing
"""


@pytest.mark.slow
@pytest.mark.parametrize("at", [0, 7])
def test_the_command_shows_what_failed(at, tmp_path):
    "In processes of their own: the training names the command, and the debugger steps into the update, and stops at its error."
    (tmp_path / "planted.py").write_text(PLANTED.format(at=at))
    env = {**os.environ, **settings()}
    env["PYTHONPATH"] += os.pathsep + str(tmp_path)

    def run(line):
        return run_forked(["-m", "rollpipe", *line.split()], env, tmp_path)

    options = f"--n-envs 2 --n-steps 16 --hidden 8 --critic-hidden 8 {QUIET} --checkpoint-every 3"
    failed = run(f"train ppo CartPole-v1 --steps 10k --out r --import planted {options}")
    assert failed.returncode == 2 and failed.stderr.endswith(
        "with: rollpipe replay r --crash --import planted\n"
    )
    assert failed.stderr.startswith("error: leaf loss: non-finite loss.")

    again = run("replay r --crash --import planted")
    assert (again.returncode, again.stderr) == (0, "")
    assert again.stdout.endswith("the error and the learner after it are the same as then\n")
    assert f"update {at + 1} raises DataError: leaf loss: non-finite loss" in again.stdout

    # The debugger stops where the error was raised.
    debug = f"-m rollpipe replay r --update {at + 1} --pdb --import planted"
    streams = dict(text=True, capture_output=True, input="s\nw\nc\np loss\nq\n")
    stepped = subprocess.run([sys.executable, *debug.split()], env=env, cwd=tmp_path, **streams)
    assert stepped.returncode == 0
    assert "--Call--" in stepped.stdout and "-> def update(self, batch" in stepped.stdout
    assert "tensor(nan)" in stepped.stdout.partition("raises DataError")[2]


def test_the_command_refuses_what_is_not_there(gallery, tmp_path, capsys):
    folder = gallery.original("ppo")
    assert rollpipe(f"replay {folder} --update 2") == 0
    out = capsys.readouterr().out
    for text in ("update 2: a learner with the checksum", "loss_value", "  adv: float32 [16, 2]"):
        assert text in out
    for words, message in {
        "--crash": "has no update that failed",
        "--update 11": "Expected 1 to 10, got 11",
        "": "is required",
        "--crash --update 2": "not allowed with",
    }.items():
        assert message in error_of(capsys, f"replay {folder} {words}")
    error_of(capsys, f"replay {tmp_path}/none --crash")


def test_errors_are_described_without_notes():
    flight.add_note(error := ValueError("a"), "b")
    assert describe_exception(error) == "ValueError: a"


def notes_of(error):
    "The notes of an error, which Python 3.10 does not keep."
    return getattr(error, "__notes__", None)
