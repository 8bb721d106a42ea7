"""Evaluation in a process of its own: start methods, signals, and what happens when something goes wrong.

What a worker of a cluster promises as well is in `test_evaluation_contract.py`.
"""

import copy
import faulthandler
import gc
import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from functools import partial
from itertools import islice

import pytest
from evaluation_cases import (
    PATIENCE,
    Constant,
    Fails,
    Locked,
    Pays,
    begun,
    check_same_as_here,
    kill,
    leave,
    same,
    train,
)
from worker_cases import descriptors, environment, gone, runs

from rollpipe.agents import TRPO, ParallelEvaluation, evaluate
from rollpipe.layers import CategoricalPolicy, Critic
from rollpipe.pipes import ProcessReading, on_policy
from rollpipe.pipes.data.errors import ActorError, EnvError, WorkerError
from rollpipe.pipes.graph.modules import version_of
from rollpipe.pipes.graph.torchdata import DataLoader2

# what is evaluated


@pytest.mark.slow
def test_same_as_here_when_spawned():
    check_same_as_here(partial(ParallelEvaluation, start_method="spawn"))


def test_without_a_seed_episodes_are_fresh():
    actor = CategoricalPolicy.for_env("CartPole-v1", hidden=())
    with ParallelEvaluation("CartPole-v1", actor, 8, start_method="fork") as evaluation:
        evaluation.request()
        [first] = evaluation.wait(PATIENCE)
        evaluation.request()
        [second] = evaluation.wait(PATIENCE)
    assert (
        first.version == second.version
        and first.evaluation.returns.tolist() != second.evaluation.returns.tolist()
    )


# who waits for what


def test_requests_that_come_before_it_begins_are_one():
    "The process stands still meanwhile. It evaluates the weights of the latest request, once."
    actor = Constant()
    with ParallelEvaluation(Pays, actor, 1, start_method="fork") as evaluation:
        begun(evaluation)
        os.kill(evaluation.worker.pid, signal.SIGSTOP)
        for _ in range(2):
            train(actor)
            evaluation.request()
        os.kill(evaluation.worker.pid, signal.SIGCONT)
        assert [a.version for a in evaluation.wait(PATIENCE)] == [2] and not evaluation.busy


def test_two_at_once():
    first = Constant()
    second = Constant()
    train(second)
    with ParallelEvaluation(Pays, first, 1) as a, ParallelEvaluation(Pays, second, 1) as b:
        a.request()
        b.request()
        assert [x.wait(PATIENCE)[0].evaluation.returns[0] for x in (a, b)] == [0, 1]


def test_beside_worker_lanes():
    "Collecting, learning and evaluating in four processes; one that is killed disturbs no other."
    actor = CategoricalPolicy.for_env("CartPole-v1", hidden=(8,))
    critic = Critic.for_env("CartPole-v1", hidden=(8,))
    trpo = TRPO(actor, critic)
    versions = []
    pipe = on_policy("CartPole-v1", actor, critic, n_envs=2, n_steps=16, lanes=2, seed=0)
    with DataLoader2(pipe, reading_service=ProcessReading(2, start_method="fork")) as loader:
        evaluation = ParallelEvaluation("CartPole-v1", actor, 2, start_method="fork")
        for k, batch in enumerate(islice(loader, 6)):
            assert (batch.version == k).all()
            trpo.update(batch)
            if k < 3:
                evaluation.request()
                versions += [answer.version for answer in evaluation.wait(PATIENCE)]
            elif k == 3:
                os.kill(evaluation.worker.pid, signal.SIGKILL)
                evaluation.worker.process.join()
                with pytest.raises(WorkerError, match="SIGKILL"):
                    evaluation.request()
    assert versions == [1, 2, 3] and version_of(actor) == 6


@pytest.mark.gpu
def test_an_actor_on_a_device():
    "It is evaluated in host memory, in a process that does not touch the device."
    actor = CategoricalPolicy.for_env("CartPole-v1", hidden=(8,))
    expected = evaluate("CartPole-v1", copy.deepcopy(actor), 3, seed=0)
    actor.to("cuda")
    with ParallelEvaluation("CartPole-v1", actor, 3, seed=0) as evaluation:
        evaluation.request()
        [answer] = evaluation.wait(PATIENCE)
    assert same(answer.evaluation, expected) and next(actor.parameters()).is_cuda


# faults


def raising_factory():
    raise ZeroDivisionError("no environment")


class Broken(Constant):
    def forward(self, *args, **kwargs):
        raise ZeroDivisionError("no answer")


@pytest.mark.parametrize(
    "env, actor, error, match",
    [
        (raising_factory, Constant, EnvError, "no environment"),
        (Pays, Broken, ActorError, "no answer"),
        (Pays, Constant, EnvError, "does not end"),
    ],
)
def test_other_exceptions(env, actor, error, match):
    with pytest.raises(error, match=match):
        with ParallelEvaluation(
            env,
            actor(),
            3,
            n_envs=1,
            max_steps=2 if "end" in match else 100,
            on_limit="raise",
            start_method="fork",
        ) as evaluation:
            evaluation.request()
            evaluation.wait(PATIENCE)


def segv():
    faulthandler.disable()  # pytest's
    os.kill(os.getpid(), signal.SIGSEGV)


@pytest.mark.parametrize(
    "function, told, method",
    [
        (kill, "killed by SIGKILL", "fork"),
        (kill, "killed by SIGKILL", "forkserver"),
        (segv, "killed by SIGSEGV", "fork"),
        (leave, "exit code 3", "fork"),
    ],
)
def test_a_process_that_ends(function, told, method):
    actor = Constant()
    train(actor)
    evaluation = ParallelEvaluation(
        partial(Fails, function), actor, 2, n_envs=1, start_method=method
    )
    evaluation.request()
    with pytest.raises(WorkerError, match=f"evaluation .*{told} while it evaluated version 1"):
        evaluation.wait(PATIENCE)


def test_what_cannot_be_pickled():
    make = partial(Locked, threading.Lock())
    with pytest.raises(WorkerError, match="evaluation cannot be started by spawn"):
        ParallelEvaluation(make, Constant(), 1, start_method="spawn")
    with ParallelEvaluation(make, Constant(), 1, start_method="fork") as evaluation:
        evaluation.request()
        assert len(evaluation.wait(PATIENCE)) == 1


def test_episodes_that_are_cut_off():
    "The same as here, and the record says how many."
    options = dict(n_envs=2, seed=0, max_steps=8, on_limit="cut")
    policy = CategoricalPolicy.for_env("CartPole-v1", seed=0)
    with ParallelEvaluation("CartPole-v1", policy, 5, start_method="fork", **options) as evaluation:
        evaluation.request()
        [found] = evaluation.wait(PATIENCE)
    expected = evaluate("CartPole-v1", policy, 5, **options)
    assert (found.evaluation.returns == expected.returns).all() and (
        found.evaluation.cut_off == expected.cut_off
    ).all()
    assert found.metrics.get("eval_cut_off", 0) == expected.cut_off.sum() > 0


# life and death


def test_nothing_is_left():
    "Neither descriptors nor, as after every test, processes: after close, and after being forgotten."

    def once(close):
        evaluation = ParallelEvaluation(Pays, Constant(), 1, start_method="fork")
        evaluation.request()
        evaluation.wait(PATIENCE)
        if close:
            evaluation.close()

    once(True)
    gc.collect()
    before = descriptors()
    for close in (True, False):
        once(close)
    gc.collect()
    assert descriptors() == before


SCRIPT = """
import signal, sys
import torch
from functools import partial
from pathlib import Path
from evaluation_cases import Constant, Gated, begun
from rollpipe.agents import ParallelEvaluation

if __name__ == "__main__":
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    evaluations = [ParallelEvaluation(partial(Gated, Path("nowhere")), Constant(), 1, start_method=m) for m in ("fork", "spawn")]
    for evaluation in evaluations:
        evaluation.request()
        begun(evaluation)
    print(*[evaluation.worker.pid for evaluation in evaluations], flush=True)
    if sys.argv[1] == "wait": evaluation.wait()
"""


@contextmanager
def program(tmp_path, then):
    "A program that evaluates in a forked and a spawned process: `(program, their pids)`."
    (tmp_path / "program.py").write_text(SCRIPT)
    with subprocess.Popen(
        [sys.executable, "program.py", then],
        cwd=tmp_path,
        env=environment(),
        text=True,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as parent:
        try:
            yield parent, list(map(int, parent.stdout.readline().split()))
        finally:
            try:
                os.killpg(parent.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # as it should be


@pytest.mark.slow
def test_the_end_of_the_program(tmp_path):
    with program(tmp_path, "end") as (parent, pids):
        _, err = parent.communicate(timeout=PATIENCE)
        assert len(pids) == 2 and (parent.returncode, err, gone(pids, 0)) == (0, "", [])


@pytest.mark.slow
def test_a_parent_that_is_killed(tmp_path):
    with program(tmp_path, "wait") as (parent, pids):
        assert all(map(runs, pids))
        parent.kill()
        parent.wait()
        assert gone(pids, 2) == []


@pytest.mark.slow
def test_ctrl_c(tmp_path):
    "To the whole group: only the parent says so."
    with program(tmp_path, "wait") as (parent, pids):
        os.killpg(parent.pid, signal.SIGINT)
        _, err = parent.communicate(timeout=PATIENCE)
        assert err.count("Traceback") == err.count("KeyboardInterrupt") == 1
        assert parent.returncode == -signal.SIGINT and gone(pids, 0) == []
