"A run over two ranks that is killed and resumed is the run that was never interrupted; and what it says if its parts do not fit together."

import os
import shutil
import signal
import sys
from pathlib import Path

import gymnasium
import pytest
from gymnasium.envs.classic_control import CartPoleEnv
from test_ranks import run

from rollpipe.agents.checkpoint import load_checkpoint
from rollpipe.pipes import DataError, EnvError, WorkerError, passes
from rollpipe.pipes.envs.kept import Keeper, Kept
from rollpipe.pipes.keeping.chunks import ChunkFolder, chunk_names
from rollpipe.runs import folder as folders
from rollpipe.runs import resume, start, train
from rollpipe.runs.folder import load_run
from rollpipe.runs.joint import joint
from rollpipe.runs.locks import unlock
from rollpipe.runs.signals import Stopped, stop_signals
from rollpipe.settings.config import make_config

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import guillotine


class Fails(CartPoleEnv):
    "Breaks after so many steps; None: never."

    left = None

    def step(self, action):
        if Fails.left is not None:
            Fails.left -= 1
        if Fails.left == 0:
            raise RuntimeError("the environment is broken")
        return super().step(action)


gymnasium.register("Fails-v0", Fails, max_episode_steps=500)
FRAGMENTS = dict(lanes=4, n_envs=2, n_steps=32, hidden=(8,), critic_hidden=(8,), engine="torch")
STEPS = dict(
    lanes=2,
    n_envs=2,
    n_steps=16,
    hidden=(8,),
    warmup=100,
    capacity=400,
    batch_size=16,
    engine="torch",
)
CASES = dict(  # algorithm, environment, options; six updates are made
    ppo=("ppo", "CartPole-v1", FRAGMENTS | dict(reward_scale="learn")),
    trpo=("trpo", "Pendulum-v1", FRAGMENTS),
    fails=("ppo", "Fails-v0", FRAGMENTS),
    dqn=("dqn", "CartPole-v1", STEPS),
    sac=("sac", "Pendulum-v1", STEPS | dict(critic_hidden=(8,), samples_per_step=0.2)),
)


def config_of(case, n_updates=6, **more):
    algorithm, env, options = CASES[case]
    steps = n_updates * options["lanes"] * options["n_envs"] * options["n_steps"]
    return make_config(
        algorithm, env, options, steps=steps, **dict(checkpoint_every=2) | more
    ) | dict(ranks=2)


def nth(n, action, function):
    "A function that does `action` before the `n`-th call of `function`."
    left = [n]

    def counted(*args, **kwargs):
        left[0] -= 1
        if not left[0]:
            action()
        return function(*args, **kwargs)

    return counted


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def ask():
    os.kill(os.getpid(), signal.SIGTERM)


def cannot_tell():
    raise EnvError("the state of an object cannot be written down", leaf="env.tasks")


def prepare(rank, where):
    "What happens to a rank, at the second checkpoint or in the fifth batch."
    if where == "manifest" and rank == 0:
        folders.Checkpoint.data = nth(2, die, folders.Checkpoint.data)  # all parts are written
    if where == "part" and rank == 1:
        ChunkFolder.write = nth(2, die, ChunkFolder.write)
    if where == "sweep" and rank == 1:
        ChunkFolder.sweep = nth(2, die, ChunkFolder.sweep)  # the checkpoint is written
    if where == "signal" and rank == 1:
        ChunkFolder.sweep = nth(2, ask, ChunkFolder.sweep)
    if where == "object" and rank == 1:
        Kept.state = nth(5, cannot_tell, Kept.state)
    if where == "batch" and rank == 1:
        Fails.left = 4 * 2 * 2 * 32 + 50


def trained(rank, group, folder, case, where=None, workers=None, **more):
    "Train a run to its end, or to where it is stopped. It goes on if it has begun."

    def make():
        if not (folder / "config.json").exists():
            return start(folder, config_of(case, workers=workers or 0, **more))
        return resume(folder, workers=workers, steps=config_of(case, **more)["steps"])

    if where == "test" and rank == 1:
        passes.keeper_for = lambda *_, **__: Keeper("none", dict(own="no way"))
    try:
        with stop_signals():
            joined = joint(make, {}, dict)
            prepare(rank, where)
            train(joined, progress=False, tensorboard=False)
    except Stopped as e:
        return e.args[0]


def attempt(folder, case, where=None, workers=None, more=()):
    "What the ranks return or raise. Each attempt has a process group of its own."
    group = folder.with_name(f"{folder.name}-{len(list(folder.parent.iterdir()))}")
    group.mkdir(parents=True)
    return run(with_options, group, folder, case, where, workers, dict(more))


def with_options(rank, group, folder, case, where, workers, more):
    return trained(rank, group, folder, case, where, workers, **more)


def updates(folder):
    return load_checkpoint(folder / "checkpoint.safetensors").counters["updates"]


def assert_twins(one, twin):
    assert guillotine.differences(guillotine.numbers(twin), guillotine.numbers(one)) == []
    assert (one / "journal.jsonl").read_bytes() == (twin / "journal.jsonl").read_bytes()
    assert load_checkpoint(one / "checkpoint.safetensors").counters["resumes"] == 0


# --- the same numbers


@pytest.mark.slow
@pytest.mark.parametrize(
    "case, where, workers, after",
    [
        ("ppo", "manifest", (0, 2), 2),
        ("trpo", "part", (1, 0), 2),
        ("dqn", "sweep", (0, 0), 4),
        ("sac", "manifest", (0, 1), 2),
    ],
)
def test_a_run_that_is_killed_goes_on_exactly(case, where, workers, after, tmp_path):
    "The old checkpoint and its parts stay valid until the new one is written."
    one = tmp_path / "one"
    twin = tmp_path / "twin"
    assert attempt(twin, case) == [None, None]
    found = attempt(one, case, where, workers[0])
    assert sum(isinstance(x, WorkerError) for x in found) == 1 and updates(one) == after, found
    assert attempt(one, case, workers=workers[1]) == [None, None]
    assert_twins(one, twin)
    for rank in "01":  # nothing is left of other updates
        files = {p.name for p in (one / "ranks" / rank).iterdir()}
        parts = {*chunk_names(one / "checkpoint.safetensors")} & files
        assert len(parts) == 1 and files == parts | {
            x for part in parts for x in chunk_names(one / "ranks" / rank / part)
        }


@pytest.mark.slow
def test_a_signal_to_one_rank_ends_all_of_them_after_the_same_update(tmp_path):
    "It arrives when the ranks have agreed to go on, while they save, so that they end after the next update."
    one = tmp_path / "one"
    twin = tmp_path / "twin"
    assert attempt(twin, "ppo") == [None, None]
    assert attempt(one, "ppo", "signal") == [signal.SIGTERM, signal.SIGTERM] and updates(one) == 5
    assert attempt(one, "ppo") == [None, None]
    assert guillotine.differences(guillotine.numbers(twin), guillotine.numbers(one)) == []


@pytest.mark.slow
def test_a_batch_that_breaks_in_one_rank_leaves_the_last_checkpoint(tmp_path):
    one = tmp_path / "one"
    twin = tmp_path / "twin"
    assert attempt(twin, "fails") == [None, None]
    lost, broken = attempt(one, "fails", "batch")
    assert (
        isinstance(lost, WorkerError)
        and "the environment is broken" in str(broken)
        and updates(one) == 4
    )
    assert attempt(one, "fails") == [None, None]
    assert_twins(one, twin)


@pytest.mark.parametrize("every, is_exact", [(3, False), (4, True)])
def test_a_batch_that_breaks_in_one_process_leaves_the_last_update(
    every, is_exact, tmp_path, monkeypatch
):
    "It is saved without its stream, unless it was saved before with it."
    alone = start(tmp_path / "one", config_of("fails", checkpoint_every=every) | dict(ranks=1))
    monkeypatch.setattr(Fails, "left", 4 * 4 * 2 * 32 + 50)
    with pytest.raises(EnvError, match="the environment is broken"):
        train(alone, progress=False, tensorboard=False)
    found = load_checkpoint(alone.checkpoint)
    assert (found.counters["updates"], found.stream is not None) == (4, is_exact)


@pytest.mark.slow
def test_a_run_that_is_not_exact_goes_on_with_new_episodes(tmp_path):
    more = dict(order="ready", lag=1)
    assert attempt(tmp_path / "one", "ppo", workers=1, more=more) == [None, None]
    assert not (tmp_path / "one/ranks").exists()
    assert attempt(tmp_path / "one", "ppo", more=more | dict(n_updates=8)) == [None, None]
    assert load_checkpoint(tmp_path / "one/checkpoint.safetensors").counters["resumes"] == 1


def test_all_ranks_turn_inexact_with_one(tmp_path):
    "The second time that one rank tells its state, one of its environments cannot be written down."
    folder = tmp_path / "one"
    assert attempt(folder, "ppo", "object", more=dict(keep=3)) == [None, None]
    kept = [load_run(path) for path in sorted((folder / "checkpoints").iterdir())]
    assert [x.counters["updates"] for x in kept] == [2, 4, 6]
    assert [x.stream is not None for x in kept] == [True, False, False]
    assert kept[0].history.inexact is None
    assert all("leaf env.tasks" in x.history.inexact for x in kept[1:])


# --- what is refused


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    "A run with the checkpoints of two updates, and the parts of both."
    folder = tmp_path_factory.mktemp("kept") / "one"
    assert attempt(folder, "ppo", more=dict(keep=2)) == [None, None]
    return folder


@pytest.mark.slow_but_one
@pytest.mark.parametrize(
    "how, text",
    [
        ("missing", "there is no such chunk"),
        ("damaged", "the chunk is damaged"),
        ("older", "the chunk is damaged, or is that of another training"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_part_that_does_not_fit_is_refused_by_all_ranks(kept, how, text, rank, tmp_path):
    folder = tmp_path / "one"
    shutil.copytree(kept, folder)
    older, newest = (
        folder / "ranks" / str(rank) / chunk_names(path)[rank]
        for path in sorted((folder / "checkpoints").iterdir())
    )
    assert chunk_names(folder / "checkpoint.safetensors")[rank] == newest.name
    if how == "missing":
        newest.unlink()
    else:
        newest.write_bytes(
            older.read_bytes() if how == "older" else newest.read_bytes()[:-1] + b"?"
        )
    for error in attempt(folder, "ppo", more=dict(n_updates=8)):
        assert (
            isinstance(error, DataError)
            and f"rank {rank}: " in str(error)
            and text in str(error)
            and newest.name in str(error)
        ), error
    assert updates(folder) == 6 and not (folder / "lock").exists()


def test_a_rank_that_cannot_keep_its_environments_is_told_by_all(tmp_path):
    for error in attempt(tmp_path / "one", "ppo", "test"):
        assert isinstance(
            error, DataError
        ) and "leaf inexact: rank 1: environments that are kept in another way" in str(error), error
        assert "Expected None, as on rank 0, got " in str(error) and "no way" in str(error)
    assert not (tmp_path / "one").exists()


def test_a_run_that_was_killed_before_its_first_checkpoint_survives_a_resume_that_fails(tmp_path):
    run = start(tmp_path / "one", config_of("ppo"))
    run.best.write_text("the best checkpoint")
    unlock(run.folder)
    for error in attempt(run.folder, "ppo", "test"):
        assert isinstance(error, DataError) and "no way" in str(error), error
    assert run.best.exists() and updates(run.folder) == 0 and not (run.folder / "lock").exists()
