"The command line over several ranks: one run, whoever starts the processes, whatever ends them."

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from forked import Forked, run_forked
from reference import assert_same, snapshot

from rollpipe.agents.checkpoint import load_checkpoint
from rollpipe.cli.main import main
from rollpipe.pipes import DataError, nested
from rollpipe.ranks import divided
from rollpipe.runs.logs import read_metrics
from rollpipe.settings.algorithms import options_for

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
SMALL = (
    "CartPole-v1 --preset none --lanes 4 --n-envs 2 --n-steps 32 --hidden 8 --critic-hidden 8 --engine torch --quiet "
    "--no-tensorboard"
).split()
DIES = """
import os, signal
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

class Dies(CartPoleEnv):
    "Kills rank 1 after 40 steps, once."
    n = 0
    def step(self, action):
        Dies.n += 1
        if os.environ.get("RANK") == "1" and Dies.n == 300 and not os.path.exists("died"):
            open("died", "w").close()
            os.kill(os.getpid(), int(os.environ["BY"]))
        return super().step(action)

gymnasium.register("Dies-v0", Dies, max_episode_steps=500)
"""


def environment(**more):
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {
        **os.environ,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        **more,
    }


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


def begin(words, cwd, n=2, **more):
    "The processes of `n` ranks, started as a launcher that is not torchrun would."
    return begin_words(["-m", "rollpipe", *words], cwd, n, **more)


def begin_words(words, cwd, n, others=(), **more):
    "`others` are words that the other ranks have besides those of rank 0."
    env = environment(WORLD_SIZE=str(n), MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port(), **more)
    return [
        Forked(
            [*words, *others] if k else words,
            {**env, "RANK": str(k), "LOCAL_RANK": str(k)},
            cwd,
            start_new_session=True,
        )
        for k in range(n)
    ]


def ended(processes):
    "`(exit code, stdout, stderr)` of each."
    try:
        return [
            (p.returncode, *out) for p, out in [(p, p.communicate(timeout=180)) for p in processes]
        ]
    finally:
        for p in processes:
            p.kill()


def run_ranks(*words, cwd, **more):
    return ended(begin(words, cwd, **more))


def run_alone(*words, cwd):
    return run_forked(["-m", "rollpipe", *words], environment(), cwd)


# --- one run


@pytest.mark.parametrize("algorithm, more", [("ppo", []), ("trpo", ["--workers", "2"])])
def test_ranks_learn_what_one_process_learns(algorithm, more, tmp_path):
    words = [
        "train",
        algorithm,
        *SMALL,
        "--steps",
        "1024",
        "--eval-every",
        "512 steps",
        "--eval-episodes",
        "2",
        "--final-episodes",
        "2",
        "--env-kwargs",
        "max_episode_steps=25",
    ]  # so that ranks have different numbers of truncated episodes
    (code, out, err), (other, silence, noise) = run_ranks(
        *words, "--out", "both", *more, cwd=tmp_path
    )
    assert (code, other, silence) == (0, 0, ""), (err, noise)
    assert "1.02k steps" in out and "rollpipe watch both" in out
    assert run_alone(*words, "--out", "one", cwd=tmp_path).returncode == 0
    found = read_metrics(tmp_path / "both")
    expected = read_metrics(tmp_path / "one")
    assert {p.name for p in (tmp_path / "both").iterdir()} == {
        p.name for p in (tmp_path / "one").iterdir()
    } | {"ranks"}
    assert (
        found["steps"].tolist() == expected["steps"].tolist() == [256, 512, 768, 1024, 1024]
    )  # the last one evaluates
    for name in found.keys() - {"workers", "restarts"}:
        if not name.startswith("seconds") and name not in (
            "steps_per_s",
            "cg_residual",
            "cg_iterations",
            "curvature",
            "step_size",
        ):
            assert np.allclose(found[name], expected[name], rtol=5e-3, atol=1e-4, equal_nan=True), (
                name
            )
    both, one = (
        load_checkpoint(tmp_path / name / "checkpoint.safetensors") for name in ("both", "one")
    )
    assert both.config["ranks"] == 2 and "ranks" not in one.config
    for path, x, y in zip(
        nested.paths(both.agent_state), *map(nested.leaves, (both.agent_state, one.agent_state))
    ):
        assert torch.allclose(
            torch.as_tensor(x).double(), torch.as_tensor(y).double(), rtol=1e-3, atol=1e-3
        ), path
    seen = [
        json.loads(line)["kind"]
        for line in (tmp_path / "both/evaluations.jsonl").read_text().splitlines()
    ]
    assert seen.count("last") == seen.count("best") == 1


@pytest.mark.parametrize(
    "task",
    [
        "dqn CartPole-v1",
        "sac Pendulum-v1 --random-steps 600 --n-steps 16 --samples-per-step 0.1 --critic-hidden 8",
    ],
)
def test_ranks_divide_a_memory(task, tmp_path):
    words = f"train {task} --preset none --lanes 2 --n-envs 2 --steps 1200 --hidden 8 --warmup 400 --quiet --no-tensorboard".split()
    (code, _, err), (other, _, noise) = run_ranks(*words, "--out", "both", cwd=tmp_path)
    assert (code, other) == (0, 0), err + noise
    assert run_alone(*words, "--out", "one", cwd=tmp_path).returncode == 0
    found = read_metrics(tmp_path / "both")
    expected = read_metrics(tmp_path / "one")
    for name in ("steps", "epsilon", "replay_size", "replay_ratio", "target_updates"):
        assert np.allclose(found[name], expected[name], equal_nan=True), name


# --- a loop of one's own

LOOP = """
import sys
from itertools import islice
import torch
from rollpipe.agents import TRPO
from rollpipe.layers import Critic, GaussianPolicy
from rollpipe.pipes import DataLoader2, ProcessReading, RayReading, on_policy
from rollpipe.ranks import distributed, divided, rank

def from_a_loader(service):
    with DataLoader2(divided(pipe), reading_service=service) as loader: yield from islice(loader, 4)

actor, critic = GaussianPolicy.for_env("Pendulum-v1", hidden=(8,), seed=0), Critic.for_env("Pendulum-v1", hidden=(8,), seed=1)
trpo = TRPO(actor, critic, seed=0)
pipe = on_policy("Pendulum-v1", actor, critic, n_envs=2, n_steps=32, lanes=4, seed=0)
with distributed(trpo):
    for batch in BATCHES: trpo.update(batch)
    if rank() == 0: torch.save((trpo.state_dict(), batch.lane), sys.argv[1])
assert not torch.distributed.is_initialized()
"""


def run_loop(path, batches="islice(divided(pipe), 4)", n=None):
    "The state after the loop, the lanes of rank 0, and what was written to stderr."
    path.with_suffix(".py").write_text(LOOP.replace("BATCHES", batches))
    words = [path.with_suffix(".py"), path]
    if n is None:
        done = run_forked(words, environment(), path.parent)
        assert done.returncode == 0, done.stderr
        return *torch.load(path), done.stderr
    found = ended(begin_words(words, path.parent, n))
    assert [code for code, *_ in found] == [0] * n, found
    return *torch.load(path), "".join(err for *_, err in found)


def test_a_loop_runs_alone_and_with_ranks(tmp_path):
    "The same script learns the same, and its block makes the process group."
    (one, lanes, _) = run_loop(tmp_path / "one")
    (both, first, err) = run_loop(tmp_path / "both", n=2)
    assert (sorted({*lanes.tolist()}), sorted({*first.tolist()})) == (
        [0, 1, 2, 3],
        [0, 1],
    ) and "same batch" not in err
    for path, x, y in zip(nested.paths(one), *map(nested.leaves, (one, both))):
        assert torch.allclose(
            torch.as_tensor(x).double(), torch.as_tensor(y).double(), rtol=1e-3, atol=1e-3
        ), path


def test_each_rank_has_workers_of_its_own(tmp_path):
    "Worker processes, or a Ray: the state is the same, bit for bit."
    pytest.importorskip("ray")
    state, *_ = run_loop(tmp_path / "plain", n=2)
    for name, service in (("processes", "ProcessReading(2)"), ("ray", "RayReading(1)")):
        found, lanes, _ = run_loop(tmp_path / f"by_{name}", f"from_a_loader({service})", n=2)
        assert sorted({*lanes.tolist()}) == [0, 1]
        assert_same(snapshot(found), snapshot(state))


def test_lanes_are_divided_in_the_block_only(monkeypatch):
    for name, value in dict(
        RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1"
    ).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DataError, match="called before the ranks know one another"):
        divided(None)


def test_ranks_that_collect_the_same_are_told(tmp_path):
    *_, err = run_loop(tmp_path / "both", "islice(pipe, 4)", n=2)
    assert (
        err.count(
            "rank 1 has the same batch as rank 0. `ranks.divided(pipe)` gives each rank lanes of its own"
        )
        == 1
    )


# --- what is refused


def test_what_cannot_be_divided_leaves_no_run(tmp_path):
    (code, _, err), (other, _, noise) = run_ranks(
        "train", "ppo", *SMALL, "--lanes", "3", "--out", "run", cwd=tmp_path
    )
    assert (
        code == 2
        and "3 lanes cannot be divided among 2 ranks. Expected 2 lanes, or a multiple (`--lanes`)"
        in err
    )
    assert "Traceback" not in err
    assert (other, noise) == (0, "") and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "others, told",
    [
        (
            "--lr 0.5",
            "(leaf lr|--lr): rank 1: another option than on rank 0. Expected 0.25, as on rank 0, got 0.5",
        ),
        (
            "--env-kwargs max_episode_steps=7",
            "(leaf env_kwargs|--env-kwargs): rank 1: .* Expected {}, as on rank 0, got {'max_episode_steps': 7}",
        ),
        (
            "--overwrite",
            "(leaf overwrite|--overwrite): rank 1: .* Expected False, as on rank 0, got True",
        ),
        (
            "--config none.toml",
            "(leaf config|--config): rank 1: .* Expected None, as on rank 0, got 'none.toml'",
        ),
    ],
)
def test_options_that_only_some_ranks_have_are_refused_by_all(others, told, tmp_path):
    found = run_ranks(
        "train",
        "a2c",
        *SMALL,
        "--lr",
        "0.25",
        "--steps",
        "512",
        "--out",
        "run",
        cwd=tmp_path,
        others=others.split(),
    )
    for code, _, err in found:
        assert code == 2 and re.search(told, err) and err.count("error: ") == 1, err
    assert list(tmp_path.iterdir()) == []


def test_ranks_with_different_environments_or_runs_are_refused(tmp_path):
    def told(mine, other):
        env = environment(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port())
        return ended(
            [
                Forked(
                    ["-m", "rollpipe", "train", *x.split()],
                    {**env, "RANK": str(k), "LOCAL_RANK": str(k)},
                    tmp_path,
                )
                for k, x in enumerate((mine, other))
            ]
        )

    for mine, other, expected in (
        (
            "ppo CartPole-v1",
            "ppo Acrobot-v1",
            "(leaf env|--env): rank 1: .* Expected 'CartPole-v1', as on rank 0, got 'Acrobot-v1'",
        ),
        (
            "--resume a --steps 7",
            "--resume a",
            "(leaf steps|--steps): rank 1: .* Expected 7, as on rank 0, got nothing",
        ),
        (
            "--resume a",
            "ppo CartPole-v1",
            "(leaf resume|--resume): rank 1: .* Expected 'a', as on rank 0, got None",
        ),
    ):
        for code, _, err in told(mine, other):
            assert code == 2 and re.search(expected, err) and "Traceback" not in err, err
    assert list(tmp_path.iterdir()) == []


def test_what_only_shows_may_differ_between_ranks(tmp_path):
    "Also the same value, whether it is typed or left out."
    default = {o.name: o.default for o in options_for("a2c")}["lr"]
    found = run_ranks(
        "train",
        "a2c",
        *SMALL,
        "--steps",
        "256",
        "--out",
        "run",
        cwd=tmp_path,
        others=["--debug", "--lr", str(default)],
    )
    assert [code for code, *_ in found] == [0, 0], found


def test_ranks_whose_memories_get_rows_that_are_no_steps_draw_equally_often(tmp_path):
    "The rows after ends of sticky environments differ from rank to rank."
    words = "--preset none --lanes 2 --n-envs 2 --sticky --n-steps 16 --hidden 8 --warmup 400 --steps 1500 --quiet --no-tensorboard".split()
    for code, _, err in run_ranks(
        "train", "dqn", "CartPole-v1", *words, "--out", "run", cwd=tmp_path
    ):
        assert code == 0, err


def test_several_runs_are_not_started_by_torchrun(monkeypatch, capsys):
    for name, value in dict(
        RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1"
    ).items():
        monkeypatch.setenv(name, value)
    assert (
        main(["train", "ppo", "CartPole-v1", "--seeds", "0-1"]) == 2
        and "torchrun starts one run" in capsys.readouterr().err
    )


def test_a_learner_that_cannot_is_refused_by_all_ranks(tmp_path):
    (code, _, err), (other, _, noise) = run_ranks(
        "train", "trpo", *SMALL, "--fvp-subsample", "0.5", "--out", "run", cwd=tmp_path
    )
    assert (
        code == other == 2
        and "cannot estimate the Fisher matrix from some rows over several ranks" in err
    )
    assert not (tmp_path / "run").exists() and "Traceback" not in err + noise


def test_a_run_goes_on_with_as_many_ranks_as_it_had(tmp_path):
    words = ["train", "a2c", *SMALL, "--reward-scale", "learn", "--out", "run"]
    assert [code for code, *_ in run_ranks(*words, "--steps", "512", cwd=tmp_path)] == [0, 0]
    before = (tmp_path / "run/config.json").read_bytes()
    alone = run_alone("train", "--resume", "run", "--steps", "1024", cwd=tmp_path)
    assert (
        alone.returncode == 2
        and "another number of ranks. Expected 2, as by torchrun --nproc-per-node 2" in alone.stderr
    )
    (code, _, err), *_ = run_ranks("train", "--resume", "run", "--steps", "1024", cwd=tmp_path, n=3)
    assert (
        code == 2
        and "another number of ranks. Expected 2" in err
        and "lanes cannot be divided" not in err
    )
    assert (tmp_path / "run/config.json").read_bytes() == before
    assert [
        code for code, *_ in run_ranks("train", "--resume", "run", "--steps", "1024", cwd=tmp_path)
    ] == [0, 0]
    assert read_metrics(tmp_path / "run")["steps"].tolist() == [256, 512, 768, 1024]
    assert load_checkpoint(tmp_path / "run/checkpoint.safetensors").pipes["RewardScaler"][
        "count"
    ] == pytest.approx(1024, abs=1)
    complete, (other, *_) = run_ranks(*words, "--steps", "1024", "--continue", cwd=tmp_path)
    assert (complete[0], other) == (0, 0) and "run is complete" in complete[1]


# --- what ends it


def test_ctrl_c_saves_in_rank_0(tmp_path):
    processes = begin(["train", "ppo", *SMALL, "--steps", "10m", "--out", "run"], tmp_path)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and len(read_lines(tmp_path / "run/metrics.jsonl")) < 3:
        time.sleep(0.2)
    for p in processes[::-1]:
        p.send_signal(signal.SIGINT)
    (code, _, err), (other, _, noise) = ended(processes)
    assert code == other == 130 and "Traceback" not in err + noise
    assert (
        "continue with: torchrun --standalone --nproc-per-node 2 -m rollpipe train --resume run"
        in err
    )
    assert (
        load_checkpoint(tmp_path / "run/checkpoint.safetensors").counters["steps"]
        == read_metrics(tmp_path / "run")["steps"][-1]
    )


STOPPED_BETWEEN_BATCHES = """
import os, signal
import rollpipe.ranks as ranks
from rollpipe.runs.training import Updates
goes_on, gathered = Updates.goes_on, ranks.gathered_objects

def interrupted(x):
    ranks.gathered_objects = gathered
    os.kill(os.getpid(), signal.SIGINT)
    return gathered(x)

def ask(self):
    if self.run.counters["updates"] == 3 and os.environ["RANK"] == os.environ["HIT"]: ranks.gathered_objects = interrupted
    return goes_on(self)

Updates.goes_on = ask
"""


@pytest.mark.parametrize("hit", ["0", "1"])
def test_a_signal_for_one_rank_between_two_batches_stops_all_after_the_next(hit, tmp_path):
    (tmp_path / "stopping.py").write_text(STOPPED_BETWEEN_BATCHES)
    words = ["train", "ppo", *SMALL, "--steps", "10m", "--out", "run", "--import", "stopping"]
    (code, _, err), (other, _, noise) = run_ranks(*words, cwd=tmp_path, HIT=hit)
    assert code == other == 130 and "Traceback" not in err + noise
    assert (
        load_checkpoint(tmp_path / "run/checkpoint.safetensors").counters["updates"]
        == len(read_metrics(tmp_path / "run")["steps"])
        == 4
    )


SLEEPS = """
import os, time
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

class Sleeps(CartPoleEnv):
    "Sleeps in rank 0, in the batch after three updates."
    def step(self, action):
        if os.environ.get("RANK") == "0" and os.path.exists("run/metrics.jsonl") and open("run/metrics.jsonl").read().count("\\n") == 3:
            open("asleep", "w").close()
            time.sleep(60)
        return super().step(action)

gymnasium.register("Sleeps-v0", Sleeps, max_episode_steps=500)
"""


def test_a_second_ctrl_c_leaves_the_last_checkpoint_of_all_ranks(tmp_path):
    (tmp_path / "sleeps.py").write_text(SLEEPS)
    words = [
        "train",
        "ppo",
        "Sleeps-v0",
        "--import",
        "sleeps",
        *SMALL[1:],
        "--steps",
        "10k",
        "--checkpoint-every",
        "2",
        "--out",
        "run",
    ]
    processes = begin(words, tmp_path)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (tmp_path / "asleep").exists():
        time.sleep(0.1)
    for _ in range(2):
        processes[0].send_signal(signal.SIGINT)
        time.sleep(0.5)
    (code, _, err), (other, _, noise) = ended(processes)
    assert (code, other) == (
        130,
        2,
    ) and "interrupted after 768 steps and saved after 512; continue with: torchrun" in err, err
    assert "rank 1: another rank has ended" in noise
    found = load_checkpoint(tmp_path / "run/checkpoint.safetensors")
    assert found.counters["steps"] == 512 and found.stream["ranks"]


def read_lines(path):
    return path.read_text().splitlines() if path.exists() else []


def test_torchrun_starts_all_ranks_anew(tmp_path):
    (tmp_path / "dies.py").write_text(DIES)
    words = [
        "--standalone",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "1",
        "-m",
        "rollpipe",
        "train",
        "ppo",
        "Dies-v0",
        "--import",
        "dies",
        *SMALL[1:],
        "--steps",
        "2048",
        "--checkpoint-every",
        "1",
        "--out",
        "run",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words],
        cwd=tmp_path,
        text=True,
        capture_output=True,
        timeout=240,
        env=environment(BY=str(int(signal.SIGKILL))),
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "died").exists()
    steps = read_metrics(tmp_path / "run")["steps"].tolist()
    assert (
        steps == list(range(256, 2049, 256))
        and load_checkpoint(tmp_path / "run/checkpoint.safetensors").counters["resumes"] == 0
    )
