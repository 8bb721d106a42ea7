"An update that failed, and any update of a run, is made again bit for bit; nothing of the run is changed, and no error is hidden."

import errno
import hashlib
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from command_line import rollpipe, settings
from forked import run_forked

from rollpipe.agents import DQN, PPO, SAC, TRPO
from rollpipe.agents.checkpoint import load_checkpoint
from rollpipe.layers import Critic, RecurrentPolicy
from rollpipe.pipes import on_policy
from rollpipe.pipes.data.errors import CheckpointError, DataError, WorkerError, describe_exception
from rollpipe.pipes.data.nested import first_difference
from rollpipe.pipes.frames import Stacks
from rollpipe.runs import replayed_run, resume, start, train
from rollpipe.runs.moments import verify
from rollpipe.settings.config import make_config
from rollpipe.traces import observers as flight
from rollpipe.traces.observers import CRASH, checksum, read_crash

POLE, PENDULUM = "CartPole-v1", "Pendulum-v1"
SMALL = dict(n_steps=16, n_envs=2, hidden=(8,), engine="torch")
CASES = {
    "trpo": (TRPO, PENDULUM, dict(SMALL, critic_hidden=(8,))),
    "ppo": (PPO, POLE, dict(SMALL, critic_hidden=(8,), epochs=2)),
    "dqn": (
        DQN,
        POLE,
        dict(
            SMALL,
            n_steps=4,
            warmup=32,
            capacity=64,
            batch_size=8,
            prioritized=True,
            beta_steps=200,
            lanes=2,
        ),
    ),
    "sac": (
        SAC,
        PENDULUM,
        dict(
            SMALL,
            n_steps=4,
            warmup=32,
            random_steps=32,
            batch_size=8,
            samples_per_step=0.25,
            critic_hidden=(8,),
        ),
    ),
}


def config_of(name, **run):
    cls, env, options = CASES[name]
    algorithm = {PPO: "ppo", TRPO: "trpo", DQN: "dqn", SAC: "sac"}[cls]
    return make_config(algorithm, env, options, **{"steps": 10_000, "checkpoint_every": 5, **run})


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


def crashed(folder, name, seen=None, at=None, **run):
    "Train until the planted error; returns the run and the error."
    started = start(folder / "run", config_of(name, **run))
    with pytest.raises(DataError, match="planted") as e:
        train(started, progress=False, tensorboard=False)
    return started, e.value


def made_again(moment):
    with pytest.raises(DataError, match="planted") as e:
        moment.agent.update(moment.batch)
    return moment.outcome(error=e.value)


def content(folder):
    "Everything in a folder, with the times of its files."
    paths = sorted(folder.rglob("*"))
    return [
        (
            p,
            p.stat().st_mtime_ns,
            hashlib.sha256(p.read_bytes()).digest() if p.is_file() else os.listdir(p),
        )
        for p in paths
    ]


# -- the update that failed --------------------------------------------------------------------------------------------


@pytest.mark.slow_but_one
@pytest.mark.parametrize(
    "share", [0.005, 1e-9, 1e9], ids=["by the clock", "from the start", "the last batch alone"]
)
@pytest.mark.parametrize("name", CASES)
def test_the_failed_update_is_made_again(name, share, tmp_path, planted, monkeypatch):
    monkeypatch.setattr(flight, "SHARE", share)
    seen = planted(CASES[name][0], at=23)
    run, error = crashed(tmp_path, name)
    if hasattr(error, "__notes__"):
        assert error.__notes__ == [
            f"The update can be made again with: rollpipe replay {run.folder} --crash"
        ]
    before = content(run.folder)
    random = torch.get_rng_state()
    with replayed_run(run.folder) as moment:
        assert moment.update == 23
        assert made_again(moment) == "the error and the learner after it are the same as then"
    assert content(run.folder) == before and torch.equal(torch.get_rng_state(), random)
    held = read_crash(run.folder)["batches"]
    n = len(seen)
    assert n == 23 and len(held) == {1e-9: 23, 1e9: 1}.get(share, len(held))
    assert all(
        x == xs[0] for xs in seen.values() for x in xs
    )  # each update that was made again was the same


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
            run, _ = crashed(tmp_path / name, "ppo")
        assert len(read_crash(run.folder)["batches"]) <= 16
        with replayed_run(run.folder) as moment:
            made_again(moment)
        seen.clear()


@pytest.mark.parametrize("options", [dict(workers=2, lag=None), dict(workers=2, order="ready")])
def test_a_run_that_cannot_be_repeated_has_its_failed_update(options, tmp_path, planted):
    CASES["lanes"] = PPO, POLE, dict(CASES["ppo"][2], lanes=2)
    planted(PPO, at=4)
    run, _ = crashed(tmp_path, "lanes", **options)
    with pytest.raises(
        DataError,
        match="cannot be repeated. Expected an exact run; or --crash.*the clock orders the stream",
    ):
        replayed_run(run.folder, 2).__enter__()
    with replayed_run(run.folder) as moment:
        made_again(moment)


def test_several_ranks_are_refused_by_name(tmp_path):
    run = start(tmp_path / "run", {**config_of("ppo"), "ranks": 2})
    with pytest.raises(DataError, match="several ranks learn together"):
        replayed_run(run.folder, 1).__enter__()


def test_another_outcome_is_told(tmp_path, planted, monkeypatch):
    planted(PPO, at=3)
    run, _ = crashed(tmp_path, "ppo")
    with replayed_run(run.folder) as moment:
        with pytest.raises(
            DataError, match="does not repeat here. Expected DataError: planted.*, got no error"
        ):
            moment.outcome({})
        with torch.no_grad():
            next(moment.agent.actor.parameters()).add_(1)
        with pytest.raises(DataError, match="planted") as e:
            moment.agent.update(moment.batch)
        with pytest.raises(DataError, match="does not repeat here"):
            moment.outcome(error=e.value)
    with pytest.raises(DataError, match="has no update that failed"):
        replayed_run(start(tmp_path / "b", config_of("ppo")).folder).__enter__()


# -- what must not happen when an update fails -------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt, WorkerError])
def test_an_interrupt_and_a_lost_process_are_no_failures(error, tmp_path, planted):
    planted(PPO, at=3, error=lambda loss: error("planted"))
    run = start(tmp_path / "run", config_of("ppo"))
    with pytest.raises(error):
        train(run, progress=False, tensorboard=False)
    assert not (run.folder / "crash").exists()


def test_a_full_disk_hides_no_error(tmp_path, planted, monkeypatch):
    planted(PPO, at=3, error=lambda loss: ZeroDivisionError("planted"))

    def full(path, data):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(flight, "write_atomically", full)
    run = start(tmp_path / "run", config_of("ppo"))
    with pytest.raises(ZeroDivisionError, match="^planted") as e:
        train(run, progress=False, tensorboard=False)
    if hasattr(e.value, "__notes__"):
        assert e.value.__notes__[0].startswith(
            "What the update learned from could not be written (OSError: [Errno 28] No space"
        )
    assert e.traceback[-1].name == "failing" and not (run.folder / "crash" / CRASH[1]).exists()


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
    with pytest.raises(ValueError, match="planted") as e:
        recorded_updates(tmp_path)([object()])
    if hasattr(e.value, "__notes__"):
        assert "leaf crash.batches.0.0: cannot be stored without a pickle" in e.value.__notes__[0]
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
    with pytest.raises(ValueError, match="planted"):
        for k in range(5):
            update(torch.tensor(k))
    assert read_crash(tmp_path)["batches"] == [torch.tensor(2)]


def test_a_second_failure_replaces_the_first_and_a_kill_in_between_leaves_one(tmp_path, planted):
    seen = planted(PPO, at=3)
    run, _ = crashed(tmp_path, "ppo")
    first = run.folder.joinpath(*CRASH).read_bytes()

    def killed():
        os.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)
        recorder = flight.FlightRecorder(
            run.folder, run.config, run.history, run.counters, run.agent, ""
        )
        recorder.around(run.agent.update)(None)

    if not (pid := os.fork()):
        killed()
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    assert (
        run.folder.joinpath(*CRASH).read_bytes() == first
        and len(list((run.folder / "crash").iterdir())) == 2
    )

    seen.clear()
    with pytest.raises(DataError, match="planted"):
        train(resume(run.folder), progress=False, tensorboard=False)
    assert [p.name for p in (run.folder / "crash").iterdir()] == [CRASH[1]] and run.folder.joinpath(
        *CRASH
    ).read_bytes() != first
    with replayed_run(run.folder) as moment:
        made_again(moment)


def test_the_folder_may_be_a_link(tmp_path, planted):
    planted(PPO, at=2)
    (tmp_path / "elsewhere").mkdir()
    run = start(tmp_path / "run", config_of("ppo"))
    (run.folder / "crash").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="planted"):
        train(run, progress=False, tensorboard=False)
    with replayed_run(run.folder) as moment:
        made_again(moment)
    run = start(
        run.folder, config_of("ppo"), overwrite=True
    )  # removes the link, and not what it names
    assert not (run.folder / "crash").exists() and (tmp_path / "elsewhere" / CRASH[1]).exists()
    (run.folder / "crash").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataError, match="planted") as e:
        train(run, progress=False, tensorboard=False)
    if hasattr(e.value, "__notes__"):
        assert "could not be written (FileExistsError" in e.value.__notes__[0]


@pytest.mark.parametrize(
    "damage", [lambda b: b[:100], lambda b: b[:-9] + bytes([b[-9] ^ 1]) + b[-8:], lambda b: b""]
)
def test_a_damaged_file_is_refused(damage, tmp_path, planted):
    planted(PPO, at=2)
    run, _ = crashed(tmp_path, "ppo")
    path = run.folder.joinpath(*CRASH)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CheckpointError, match="damaged"):
        replayed_run(run.folder).__enter__()


def test_another_file_is_refused(tmp_path):
    run = start(tmp_path / "run", config_of("ppo"))
    run.folder.joinpath("crash").mkdir()
    run.folder.joinpath(*CRASH).write_bytes(run.checkpoint.read_bytes())
    with pytest.raises(CheckpointError, match="not of an update that failed"):
        replayed_run(run.folder).__enter__()


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
    seen = planted(CASES[name][0], at=23)
    made, _ = crashed(tmp_path, name, **run)
    then = [xs[0] for xs in seen.values()]
    before = content(made.folder)
    for update in (1, 3, 12, 17, 22, 23):
        seen.clear()
        with replayed_run(made.folder, update) as moment:
            fresh = getattr(moment.batch, "fresh", moment.batch)
            assert (
                len(seen) < update
                and (checksum(moment.agent.state_dict()), checksum(fresh)) == then[update - 1][:2]
            )
            begun = max(n for n in (0, *(10, 15, 20)[-run.get("keep", 1) :]) if n < update)
            assert moment.known.splitlines()[0].endswith(
                f"from the checkpoint of update {begun}" if begun else "from the start"
            )
            if update < 23:
                moment.outcome(moment.agent.update(moment.batch))
            else:
                made_again(moment)
        assert list(seen.values())[-1][-1] == then[update - 1]
    assert content(made.folder) == before
    for update in (0, -1, 24, 10**9):
        with pytest.raises(
            DataError, match=f"leaf update: .* has no such update. Expected 1 to 23, got {update}"
        ):
            replayed_run(made.folder, update).__enter__()


def test_a_run_that_has_lost_its_fingerprint_is_repeated_from_a_checkpoint(tmp_path):
    run = start(tmp_path / "run", config_of("ppo", steps=320, keep=2))
    train(run, progress=False, tensorboard=False)
    (run.folder / "fingerprint.json").unlink()
    with replayed_run(run.folder, 8) as moment:
        assert "from the checkpoint of update 5\nno fingerprint to compare\n" in moment.known
        assert "metrics of update 8 are equal" in moment.outcome(moment.agent.update(moment.batch))


@pytest.mark.slow
def test_a_run_that_is_trained_meanwhile_is_not_disturbed(tmp_path):
    twin = start(tmp_path / "twin", config_of("dqn", steps=400))
    train(twin, progress=False, tensorboard=False)
    again = []

    def look(run, record):
        if record["updates"] not in (4, 13, 17):
            return
        with replayed_run(run.folder, record["updates"] - 2) as moment:
            again.append(moment.outcome(moment.agent.update(moment.batch)))

    run = start(tmp_path / "run", config_of("dqn", steps=400))
    train(run, progress=False, tensorboard=False, callbacks=[look])
    assert len(again) == 3 and checksum(run.agent.state_dict()) == checksum(twin.agent.state_dict())
    assert verify(run.folder).is_equal
    with pytest.raises(
        DataError, match=f"Expected 1 to {run.counters['updates']}, got"
    ):  # a complete run has no next update
        replayed_run(run.folder, run.counters["updates"] + 1).__enter__()


def test_another_number_is_told(tmp_path, planted):
    run = start(tmp_path / "run", config_of("ppo", steps=200))
    train(run, progress=False, tensorboard=False)
    with replayed_run(run.folder, 3) as moment:
        metrics = moment.agent.update(moment.batch)
        other = metrics | dict(loss=metrics["loss"] + 1e-9)
        with pytest.raises(DataError, match="leaf loss: .* does not repeat here"):
            moment.outcome(other)
    with replayed_run(run.folder, 3) as moment:
        with pytest.raises(DataError, match="then, update 3 did not fail"):
            moment.outcome(error=ValueError())


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

    def run(*words):
        return run_forked(["-m", "rollpipe", *words], env, tmp_path)

    options = "--n-envs 2 --n-steps 16 --hidden 8 --critic-hidden 8 --quiet --no-tensorboard --checkpoint-every 3".split()
    failed = run(*"train ppo CartPole-v1 --steps 10k --out r --import planted".split(), *options)
    assert failed.returncode == 2 and failed.stderr.endswith(
        "with: rollpipe replay r --crash --import planted\n"
    )
    assert failed.stderr.startswith("error: leaf loss: non-finite loss.")

    again = run(*"replay r --crash --import planted".split())
    assert (again.returncode, again.stderr) == (0, "")
    assert again.stdout.endswith("the error and the learner after it are the same as then\n")
    assert f"update {at + 1} raises DataError: leaf loss: non-finite loss" in again.stdout
    debug = [
        sys.executable,
        "-m",
        "rollpipe",
        "replay",
        "r",
        "--update",
        str(at + 1),
        "--pdb",
        "--import",
        "planted",
    ]
    stepped = subprocess.run(
        debug, env=env, cwd=tmp_path, text=True, capture_output=True, input="s\nw\nc\np loss\nq\n"
    )
    assert (
        stepped.returncode == 0
        and "--Call--" in stepped.stdout
        and "-> def update(self, batch" in stepped.stdout
    )
    assert (
        "tensor(nan)" in stepped.stdout.partition("raises DataError")[2]
    )  # stopped where it was raised


def test_the_command_refuses_what_is_not_there(tmp_path, capsys):
    run = start(tmp_path / "run", config_of("ppo", steps=100))
    train(run, progress=False, tensorboard=False)
    assert rollpipe("replay", run.folder, "--update", 2) == 0
    out = capsys.readouterr().out
    assert (
        "update 2: a learner with the checksum" in out
        and "loss_value" in out
        and "  adv: float32 [16, 2]" in out
    )
    for words, message in (
        (["--crash"], "has no update that failed"),
        (["--update", 9], "Expected 1 to 4, got 9"),
        ([], "is required"),
        (["--crash", "--update", 2], "not allowed with"),
    ):
        assert rollpipe("replay", run.folder, *words) == 2 and message in capsys.readouterr().err
    assert rollpipe("replay", tmp_path / "none", "--crash") == 2


def test_errors_are_described_without_notes():
    flight.add_note(error := ValueError("a"), "b")
    assert describe_exception(error) == "ValueError: a"
