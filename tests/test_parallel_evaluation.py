"Evaluation in its own process: the same as in this one, of the version it says, and what happens when something goes wrong."
import copy
import faulthandler
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch

from rollpipe.agents import TRPO, ParallelEvaluation, evaluate
from rollpipe.layers import Actor, CategoricalPolicy, Critic, GaussianPolicy
from rollpipe.pipes import ProcessReading, on_policy
from rollpipe.pipes.errors import ActorError, DataError, EnvError, WorkerError
from rollpipe.pipes.torchdata import DataLoader2
from rollpipe.pipes.modules import bump_version, version_of

PATIENCE = 60  # seconds after which a test that waits has failed
both = pytest.mark.parametrize("method", ["fork", "spawn"])


class Pays(gym.Env):
    "Pays the action at each step; episode `n` of an environment has `n` steps."
    observation_space, action_space = gym.spaces.Box(0, np.inf, (1,)), gym.spaces.Box(-np.inf, np.inf, ())
    length = 0

    def reset(self, *, seed=None, options=None):
        self.length, self.t = self.length + 1, 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.full(1, self.t, np.float32), float(action), self.t == self.length, False, {}


class Gated(Pays):
    "Begins when there is a file, and leaves a note when it is closed."
    def __init__(self, gate): self.gate = gate

    def reset(self, **kwargs):
        while not self.gate.exists(): time.sleep(.01)
        return super().reset(**kwargs)

    def close(self): self.gate.with_suffix(".closed").touch()


class Fails(Pays):
    "Calls a function before it pays."
    def __init__(self, function): self.function = function

    def step(self, action):
        self.function()
        return super().step(action)


class Constant(Actor):
    "The action is the weight, which is there many times over; -1 if they differ."
    def __init__(self, n=1):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(n))

    def forward(self, obs, act, rew, fin, *, hx, stepno, virtual):
        same = (self.weight == self.weight[0]).all()
        return torch.where(same, self.weight[0], -1.).expand(fin.shape), (), {}


def train(actor):
    "One update: the weights are those of the version."
    with torch.no_grad(): actor.weight += 1
    bump_version(actor)


def until(condition):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(.01)


def begun(evaluation):
    "Wait until the request is under way."
    def heard():
        assert evaluation.poll() == []
        return not evaluation.process.pending
    until(heard)


def same(found, expected): return all((x == y).all() for x, y in zip(found, expected))


# what is evaluated

@both
def test_same_as_here(method):
    "Each answer is what `evaluate` gives for a copy of the weights of its version; evaluating changes nothing here."
    torch.manual_seed(1)
    actor, options = GaussianPolicy.for_env("Pendulum-v1", hidden=(8,), normalize=True), dict(n_episodes=3, n_envs=2, seed=5)
    options["env_kwargs"] = dict(max_episode_steps=20)
    states, before = {}, torch.get_rng_state()
    with ParallelEvaluation("Pendulum-v1", actor, **options, start_method=method) as evaluation:
        for k in range(3):
            with torch.no_grad():
                for x in actor.parameters(): x.add_(.1*k)
            for x in actor.buffers():
                if x.is_floating_point(): x.add_(.1*k)
            bump_version(actor)
            states[version_of(actor)] = copy.deepcopy(actor)
            evaluation.request()
            [answer] = evaluation.wait(PATIENCE)
            assert answer.version == version_of(actor) == k + 1 and answer.seconds > 0 and actor.training
        assert (torch.get_rng_state() == before).all()
        evaluation.request()
        [again] = evaluation.wait(PATIENCE)
    assert same(again.evaluation, answer.evaluation)
    returns = [evaluate("Pendulum-v1", x, **options).returns for x in states.values()]
    assert (returns[-1] == answer.evaluation.returns).all() and (returns[0] != returns[-1]).any()


def test_of_the_version_it_says_while_training_goes_on():
    "With a learner that never waits every answer still is the evaluation of its version."
    actor, critic = CategoricalPolicy.for_env("CartPole-v1", hidden=(8,)), Critic.for_env("CartPole-v1", hidden=(8,))
    trpo, then, answers = TRPO(actor, critic), {0: copy.deepcopy(actor)}, []
    options = dict(n_episodes=2, seed=3)
    with ParallelEvaluation("CartPole-v1", actor, **options, start_method="fork") as evaluation:
        for batch in islice(on_policy("CartPole-v1", actor, critic, n_envs=4, n_steps=32, seed=0), 8):
            trpo.update(batch)
            then[version_of(actor)] = copy.deepcopy(actor)
            evaluation.request()
            answers += evaluation.poll()
        answers += evaluation.wait(PATIENCE)
    versions = [answer.version for answer in answers]
    assert versions[-1] == 8 and versions == sorted(set(versions))
    for answer in answers: assert same(answer.evaluation, evaluate("CartPole-v1", then[answer.version], **options))


def test_never_half_of_one_version():
    actor = Constant(200_000)
    answers = []
    with ParallelEvaluation(Pays, actor, 1, start_method="fork") as evaluation:
        for _ in range(150):
            train(actor)
            evaluation.request()
            answers += evaluation.poll()
        answers += evaluation.wait(PATIENCE)
    assert len(answers) > 1 and answers[-1].version == 150
    assert all(answer.evaluation.returns == [answer.version] for answer in answers)


class Counts(Actor):
    "Acts what it counts in its recurrent state, and much more in training mode, or with noise."
    def forward(self, obs, act, rew, fin, *, hx, stepno, virtual, noise=None):
        hx = torch.zeros(1, fin.shape[1], 1) if hx is None else hx + 1
        return hx[..., 0] + 100*self.training + (0 if noise is None else 1000*noise), hx, {}

    def reset(self, hx, at):
        hx = hx.clone()
        hx[:, at] = 0
        return hx

    def draw_noise(self, lead, generator): return torch.ones(lead)


@pytest.mark.parametrize("deterministic", [True, False])
def test_fresh_and_greedy(deterministic):
    "Neither environments nor recurrent states are carried over, and nothing explores unless it is asked to."
    actor = Counts().train()
    expected = evaluate(Pays, actor, 3, n_envs=1, deterministic=deterministic)
    with ParallelEvaluation(Pays, actor, 3, n_envs=1, deterministic=deterministic, start_method="fork") as evaluation:
        for _ in range(2):
            evaluation.request()
            [answer] = evaluation.wait(PATIENCE)
            assert same(answer.evaluation, expected) and answer.evaluation.lengths.tolist() == [1, 2, 3]
            assert (answer.evaluation.returns < 100).all() == deterministic
    assert actor.training


def test_without_a_seed_episodes_are_fresh():
    actor = CategoricalPolicy.for_env("CartPole-v1", hidden=())
    with ParallelEvaluation("CartPole-v1", actor, 8, start_method="fork") as evaluation:
        evaluation.request()
        [first] = evaluation.wait(PATIENCE)
        evaluation.request()
        [second] = evaluation.wait(PATIENCE)
    assert first.version == second.version and first.evaluation.returns.tolist() != second.evaluation.returns.tolist()


class Plain:
    "No module."
    def step(self, stepno, obs, act, rew, fin, /, *, hx, virtual): return torch.ones(fin.shape), (), {}
    def reset(self, hx, at): return hx


def test_an_actor_without_weights():
    with ParallelEvaluation(Pays, Plain(), 2, n_envs=1, start_method="fork") as evaluation:
        evaluation.request()
        [answer] = evaluation.wait(PATIENCE)
    assert answer.version == 0 and answer.evaluation.returns.tolist() == [1, 2]


# who waits for what

def test_the_newest_weights_win(tmp_path):
    "One is under way; of those asked for meanwhile the last comes next. Asking never waits, however often."
    gate, actor = tmp_path/"gate", Constant()
    with ParallelEvaluation(partial(Gated, gate), actor, 1, start_method="fork") as evaluation:
        assert not evaluation.busy and evaluation.wait() == []
        train(actor)
        evaluation.request()
        begun(evaluation)
        for _ in range(2000):
            train(actor)
            evaluation.request()
        assert evaluation.wait(.05) == [] and evaluation.busy
        gate.touch()
        answers = evaluation.wait(PATIENCE)
        assert [a.version for a in answers] == [1, 2001] and not evaluation.busy and evaluation.poll() == []
        assert [a.evaluation.returns.tolist() for a in answers] == [[1.], [2001.]]


def test_a_request_that_crosses_the_beginning(monkeypatch):
    "The process had begun with version 1, and this side did not know when version 2 was requested: it is not forgotten."
    actor = Constant()
    with ParallelEvaluation(Pays, actor, 1, start_method="fork") as evaluation:
        until(lambda: evaluation.process.listen(.1) or evaluation.process.worker.has_started)
        train(actor)
        evaluation.request()
        assert evaluation.process.worker.link.poll(PATIENCE)
        train(actor)
        with monkeypatch.context() as patch:
            patch.setattr(evaluation.process, "listen", lambda: None)
            evaluation.request()
        assert [a.version for a in evaluation.wait(PATIENCE)] == [1, 2]


def test_two_at_once():
    first, second = Constant(), Constant()
    train(second)
    with ParallelEvaluation(Pays, first, 1) as a, ParallelEvaluation(Pays, second, 1) as b:
        a.request(); b.request()
        assert [x.wait(PATIENCE)[0].evaluation.returns[0] for x in (a, b)] == [0, 1]


def test_beside_worker_lanes():
    "Collecting, learning and evaluating in four processes; one that is killed disturbs no other."
    actor, critic = CategoricalPolicy.for_env("CartPole-v1", hidden=(8,)), Critic.for_env("CartPole-v1", hidden=(8,))
    trpo, versions = TRPO(actor, critic), []
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
                os.kill(evaluation.process.worker.pid, signal.SIGKILL)
                evaluation.process.worker.process.join()
                with pytest.raises(WorkerError, match="SIGKILL"): evaluation.request()
    assert versions == [1, 2, 3] and version_of(actor) == 6


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no such device")
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

class Odd(Exception):
    "Cannot be unpickled."
    def __init__(self, a, b): super().__init__(a)


def boom(): raise ZeroDivisionError("boom")
def odd(): raise Odd(1, 2)
def kill(): os.kill(os.getpid(), signal.SIGKILL)
def leave(): os._exit(3)


def segv():
    faulthandler.disable()  # pytest's
    os.kill(os.getpid(), signal.SIGSEGV)


@both
def test_an_exception_arrives_with_its_traceback(method):
    evaluation = ParallelEvaluation(partial(Fails, boom), Constant(), 2, start_method=method)
    evaluation.request()
    with pytest.raises(EnvError, match="boom") as e: evaluation.wait(PATIENCE)
    assert "in evaluation" in str(e.value.__cause__) and "def boom" in str(e.value.__cause__)
    for call in (evaluation.request, evaluation.poll, evaluation.wait):
        with pytest.raises(EnvError, match="boom"): call()
    evaluation.close()  # was told


def raising_factory(): raise ZeroDivisionError("no environment")


class Broken(Constant):
    def forward(self, *args, **kwargs): raise ZeroDivisionError("no answer")


@pytest.mark.parametrize("env, actor, error, match", [
    (raising_factory, Constant, EnvError, "no environment"), (Pays, Broken, ActorError, "no answer"),
    (partial(Fails, odd), Constant, EnvError, "Odd"), (partial(Pays), partial(Constant), EnvError, "does not end")])
def test_other_exceptions(env, actor, error, match):
    with pytest.raises(error, match=match):
        with ParallelEvaluation(env, actor(), 3, n_envs=1, max_steps=2 if "end" in match else 100, start_method="fork") as evaluation:
            evaluation.request()
            evaluation.wait(PATIENCE)


@pytest.mark.parametrize("function, told, method", [
    (kill, "killed by SIGKILL", "fork"), (kill, "killed by SIGKILL", "spawn"), (segv, "killed by SIGSEGV", "fork"),
    (leave, "exit code 3", "fork")])
def test_a_process_that_ends(function, told, method):
    actor = Constant()
    train(actor)
    evaluation = ParallelEvaluation(partial(Fails, function), actor, 2, n_envs=1, start_method=method)
    evaluation.request()
    with pytest.raises(WorkerError, match=f"evaluation .*{told} while it evaluated version 1"): evaluation.wait(PATIENCE)


@pytest.mark.parametrize("call", ["request", "poll", "wait", "close"])
def test_a_process_that_was_killed(tmp_path, call):
    "The next call tells, and so does one that waits while it happens."
    evaluation = ParallelEvaluation(partial(Gated, tmp_path/"gate"), Constant(), 1, start_method="fork")
    evaluation.request()
    begun(evaluation)
    threading.Timer(.2 if call == "wait" else 0, os.kill, (evaluation.process.worker.pid, signal.SIGKILL)).start()
    if call != "wait": os.waitid(os.P_PID, evaluation.process.worker.pid, os.WEXITED | os.WNOWAIT)
    begin = time.monotonic()
    with pytest.raises(WorkerError, match="was killed by SIGKILL"): getattr(evaluation, call)()
    assert time.monotonic() - begin < (2 if call == "wait" else 1)


def test_answers_from_before_are_not_lost():
    actor = Constant()
    evaluation = ParallelEvaluation(Pays, actor, 1, start_method="fork")
    evaluation.request()
    until(lambda: evaluation.process.worker.link.poll(.1) and not evaluation.process.listen() and evaluation.process.answers)
    os.kill(evaluation.process.worker.pid, signal.SIGKILL)
    evaluation.process.worker.process.join()
    assert [a.version for a in evaluation.poll()] == [0]
    with pytest.raises(WorkerError, match="SIGKILL"): evaluation.poll()


def test_close_raises_what_was_not_told():
    "An error that arrived after the last call; but not if another one is on its way."
    def fail():
        evaluation = ParallelEvaluation(partial(Fails, boom), Constant(), 2, start_method="fork")
        evaluation.request()
        evaluation.process.worker.process.join()
        return evaluation
    with pytest.raises(EnvError, match="boom"): fail().close()
    with pytest.raises(KeyError), fail(): raise KeyError


def test_silence(tmp_path, caplog):
    gate = tmp_path/"gate"
    with ParallelEvaluation(partial(Gated, gate), Constant(), 1, start_method="fork", silence=.3) as evaluation:
        evaluation.request()
        with caplog.at_level(logging.WARNING, "rollpipe"): until(lambda: evaluation.wait(.1) == [] and "in reset" in caplog.text)
        assert "evaluation (pid" in caplog.text and "has been silent for" in caplog.text
        gate.touch()
        assert len(evaluation.wait(PATIENCE)) == 1
    gate.unlink()
    with ParallelEvaluation(partial(Gated, gate), Constant(), 1, start_method="fork", silence=.3, on_silence="raise") as evaluation:
        time.sleep(.4)
        assert evaluation.poll() == []  # nothing to say is no silence
        evaluation.request()
        with pytest.raises(WorkerError, match="has been silent for"): evaluation.wait(PATIENCE)


def test_weights_that_change_their_form():
    actor = Constant()
    with ParallelEvaluation(Pays, actor, 1, start_method="fork") as evaluation:
        actor.weight = torch.nn.Parameter(torch.zeros(2))
        with pytest.raises(ActorError, match="changed the form"): evaluation.request()


class Locked(Pays):
    def __init__(self, lock): pass


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
    assert (found.evaluation.returns == expected.returns).all() and (found.evaluation.cut_off == expected.cut_off).all()
    assert found.metrics.get("eval_cut_off", 0) == expected.cut_off.sum() > 0


@pytest.mark.parametrize("change, error, match", [
    (dict(n_episodes=0), DataError, "n_episodes"), (dict(silence=0), DataError, "silence"), (dict(grace=-1), DataError, "grace"),
    (dict(on_silence="stop"), DataError, "on_silence"), (dict(on_limit="stop"), DataError, "ParallelEvaluation, leaf on_limit"),
    (dict(max_steps=0), DataError, "ParallelEvaluation, leaf max_steps"), (dict(env="CartPole-v99"), EnvError, "CartPole"),
    (dict(actor=1), ActorError, "step"), (dict(start_method="thread"), WorkerError, "start method")])
def test_refused(change, error, match):
    with pytest.raises(error, match=match): ParallelEvaluation(**{"env": Pays, "actor": Constant(), **change})


# life and death

def test_close_in_the_middle(tmp_path):
    "Environments are closed, and closing twice is allowed."
    gate = tmp_path/"gate"
    evaluation = ParallelEvaluation(partial(Gated, gate), Constant(), 1, start_method="fork")
    evaluation.request()
    begun(evaluation)
    until(lambda: "in reset" in evaluation.process.worker.current_traceback())
    evaluation.close()
    evaluation.close()
    assert gate.with_suffix(".closed").exists() and not evaluation.process.worker.process.is_alive() and not evaluation.busy
    with pytest.raises(WorkerError, match="closed"): evaluation.request()


def test_nothing_is_left():
    "Neither descriptors nor, as after every test, processes: after close, and after being forgotten."
    def once(close):
        evaluation = ParallelEvaluation(Pays, Constant(), 1, start_method="fork")
        evaluation.request()
        evaluation.wait(PATIENCE)
        if close: evaluation.close()
    def descriptors():
        gc.collect()
        return len(os.listdir("/proc/self/fd"))
    once(True)
    before = descriptors()
    for close in (True, False): once(close)
    assert descriptors() == before


SCRIPT = """
import signal, sys
import torch
from functools import partial
from pathlib import Path
from test_parallel_evaluation import Constant, Gated, ParallelEvaluation, begun

if __name__ == "__main__":
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    evaluations = [ParallelEvaluation(partial(Gated, Path("nowhere")), Constant(), 1, start_method=m) for m in ("fork", "spawn")]
    for evaluation in evaluations:
        evaluation.request()
        begun(evaluation)
    print(*[evaluation.process.worker.pid for evaluation in evaluations], flush=True)
    if sys.argv[1] == "wait": evaluation.wait()
"""


@contextmanager
def program(tmp_path, then):
    "A program that evaluates in a forked and a spawned process: `(program, their pids)`."
    (tmp_path/"program.py").write_text(SCRIPT)
    here = Path(__file__).parent
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(here), str(here.parent)]))
    with subprocess.Popen([sys.executable, "program.py", then], cwd=tmp_path, env=env, text=True, start_new_session=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE) as parent:
        try: yield parent, list(map(int, parent.stdout.readline().split()))
        finally:
            try: os.killpg(parent.pid, signal.SIGKILL)
            except ProcessLookupError: pass  # as it should be


def alive(pids):
    "Those that run."
    def runs(pid):
        try: return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError: return False
    return [pid for pid in pids if runs(pid)]


def test_the_end_of_the_program(tmp_path):
    with program(tmp_path, "end") as (parent, pids):
        _, err = parent.communicate(timeout=PATIENCE)
        assert len(pids) == 2 and (parent.returncode, err, alive(pids)) == (0, "", [])


def test_a_parent_that_is_killed(tmp_path):
    with program(tmp_path, "wait") as (parent, pids):
        assert alive(pids) == pids
        parent.kill()
        parent.wait()
        deadline = time.monotonic() + 2
        while alive(pids) and time.monotonic() < deadline: time.sleep(.02)
        assert not alive(pids)


def test_ctrl_c(tmp_path):
    "To the whole group: only the parent says so."
    with program(tmp_path, "wait") as (parent, pids):
        os.killpg(parent.pid, signal.SIGINT)
        _, err = parent.communicate(timeout=PATIENCE)
        assert err.count("Traceback") == err.count("KeyboardInterrupt") == 1
        assert parent.returncode == -signal.SIGINT and not alive(pids)
