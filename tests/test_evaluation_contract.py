"""What every evaluation of a training promises, whoever evaluates: another process, or a worker of a Ray cluster.

What only processes have is in `test_parallel_evaluation.py`; what only a cluster has is at the end.
"""

import copy
import logging
import os
import re
import signal
import threading
import time
from functools import partial
from itertools import islice

import pytest
import torch
from evaluation_cases import (
    PATIENCE,
    Constant,
    Counts,
    Fails,
    Gated,
    Locked,
    Luck,
    Pays,
    Plain,
    begun,
    boom,
    check_same_as_here,
    kill,
    odd,
    same,
    train,
    until,
)
from worker_cases import gone, slack

from rollpipe.agents import TRPO, ParallelEvaluation, evaluate
from rollpipe.layers import CategoricalPolicy, Critic
from rollpipe.pipes import on_policy
from rollpipe.pipes.cluster.door import lease
from rollpipe.pipes.data.errors import ActorError, DataError, EnvError, WorkerError
from rollpipe.pipes.graph.modules import version_of

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def nodes(cluster):
    "The cluster, to which this process stays connected."
    release = lease(cluster.address, cluster)
    yield cluster
    release()


def evaluation_in(place, request):
    "The class that evaluates in this place."
    if place == "process":
        return partial(ParallelEvaluation, start_method="fork")
    return partial(ParallelEvaluation, ray=dict(address=request.getfixturevalue("nodes").address))


@pytest.fixture(scope="module", params=["process", pytest.param("ray", marks=pytest.mark.slow)])
def Evaluation(request):
    return evaluation_in(request.param, request)


def started(evaluation):
    "The number of the process that evaluates, as soon as it is known."
    until(lambda: not evaluation.poll() and evaluation.worker.has_started)
    return evaluation.worker.pid


# --- what is evaluated


def test_same_as_here(Evaluation):
    check_same_as_here(Evaluation)


def test_global_generators_begin_anew_each_time(Evaluation):
    actor = Constant()
    with Evaluation(Luck, actor, 3, seed=1) as evaluation:
        for _ in range(2):
            evaluation.request()
            [answer] = evaluation.wait(PATIENCE)
            assert same(answer.evaluation, evaluate(Luck, actor, 3, seed=1))


def test_of_the_version_it_says_while_training_goes_on(Evaluation):
    "With a learner that never waits every answer still is the evaluation of its version."
    actor = CategoricalPolicy.for_env("CartPole-v1", hidden=(8,))
    critic = Critic.for_env("CartPole-v1", hidden=(8,))
    trpo = TRPO(actor, critic)
    then = {0: copy.deepcopy(actor)}
    answers = []
    options = dict(n_episodes=2, seed=3)
    with Evaluation("CartPole-v1", actor, **options) as evaluation:
        for batch in islice(
            on_policy("CartPole-v1", actor, critic, n_envs=4, n_steps=32, seed=0), 8
        ):
            trpo.update(batch)
            then[version_of(actor)] = copy.deepcopy(actor)
            evaluation.request()
            answers += evaluation.poll()
        answers += evaluation.wait(PATIENCE)
    versions = [answer.version for answer in answers]
    assert versions[-1] == 8 and versions == sorted(set(versions))
    for answer in answers:
        assert same(answer.evaluation, evaluate("CartPole-v1", then[answer.version], **options))


def test_never_half_of_one_version(Evaluation):
    "The weights are too large to be sent with a request."
    actor = Constant(200_000)
    answers = []
    with Evaluation(Pays, actor, 1) as evaluation:
        for _ in range(150):
            train(actor)
            evaluation.request()
            answers += evaluation.poll()
        answers += evaluation.wait(PATIENCE)
    assert len(answers) > 1 and answers[-1].version == 150
    assert all(answer.evaluation.returns == [answer.version] for answer in answers)


@pytest.mark.parametrize("deterministic", [True, False])
def test_fresh_and_greedy(deterministic, Evaluation):
    "Neither environments nor recurrent states are carried over, and nothing explores unless it is asked to."
    actor = Counts().train()
    expected = evaluate(Pays, actor, 3, n_envs=1, deterministic=deterministic)
    with Evaluation(Pays, actor, 3, n_envs=1, deterministic=deterministic) as evaluation:
        for _ in range(2):
            evaluation.request()
            [answer] = evaluation.wait(PATIENCE)
            assert same(answer.evaluation, expected) and answer.evaluation.lengths.tolist() == [
                1,
                2,
                3,
            ]
            assert (answer.evaluation.returns < 100).all() == deterministic
    assert actor.training


def test_an_actor_without_weights(Evaluation):
    with Evaluation(Pays, Plain(), 2, n_envs=1) as evaluation:
        evaluation.request()
        [answer] = evaluation.wait(PATIENCE)
    assert answer.version == 0 and answer.evaluation.returns.tolist() == [1, 2]


# --- who waits for what


def test_the_newest_weights_win(tmp_path, Evaluation):
    "One is under way; of those asked for meanwhile the last comes next. Asking never waits, however often."
    gate = tmp_path / "gate"
    actor = Constant()
    with Evaluation(partial(Gated, gate), actor, 1) as evaluation:
        assert not evaluation.busy and evaluation.wait() == []
        train(actor)
        evaluation.request()
        begun(evaluation, gate)
        for _ in range(2000):
            train(actor)
            evaluation.request()
        assert evaluation.wait(0.05) == [] and evaluation.busy
        gate.touch()
        answers = evaluation.wait(PATIENCE)
        assert (
            [a.version for a in answers] == [1, 2001]
            and not evaluation.busy
            and evaluation.poll() == []
        )
        assert [a.evaluation.returns.tolist() for a in answers] == [[1.0], [2001.0]]


# --- faults


def test_an_exception_arrives_with_its_traceback(Evaluation):
    evaluation = Evaluation(partial(Fails, boom), Constant(), 2)
    evaluation.request()
    with pytest.raises(EnvError, match="boom") as e:
        evaluation.wait(PATIENCE)
    assert "in evaluation" in str(e.value.__cause__) and "in boom" in str(e.value.__cause__)
    for call in (evaluation.request, evaluation.poll, evaluation.wait):
        with pytest.raises(EnvError, match="boom"):
            call()
    evaluation.close()  # was told


def test_an_exception_that_cannot_be_read_here(Evaluation):
    with pytest.raises(EnvError, match="Odd"):
        with Evaluation(partial(Fails, odd), Constant(), 3) as evaluation:
            evaluation.request()
            evaluation.wait(PATIENCE)


def test_a_death_is_told_with_the_version(Evaluation):
    actor = Constant()
    train(actor)
    evaluation = Evaluation(partial(Fails, kill), actor, 2, n_envs=1)
    evaluation.request()
    with pytest.raises(
        WorkerError, match=r"^evaluation \(pid \d+\).* while it evaluated version 1"
    ):
        evaluation.wait(PATIENCE)


@pytest.mark.parametrize("call", ["request", "poll", "wait", "close"])
def test_a_death_is_told_soon(tmp_path, call, Evaluation):
    "By the next call, and by one that waits while it happens."
    gate = tmp_path / "gate"
    evaluation = Evaluation(partial(Gated, gate), Constant(), 1)
    evaluation.request()
    begun(evaluation, gate)
    threading.Timer(
        0.2 if call == "wait" else 0, os.kill, (pid := started(evaluation), signal.SIGKILL)
    ).start()
    if call != "wait":
        assert gone([pid], 10) == []
        until(lambda: evaluation.worker.poll(0.1))
    begin = time.monotonic()
    with pytest.raises(
        WorkerError, match=rf"evaluation \(pid {pid}\).* while it evaluated version 0"
    ):
        getattr(evaluation, call)()
    assert time.monotonic() - begin < 2 * slack() and not evaluation.busy


def test_answers_from_before_are_not_lost(Evaluation):
    actor = Constant()
    evaluation = Evaluation(Pays, actor, 1)
    evaluation.request()
    until(lambda: not evaluation._listen(0.1) and evaluation.answers)
    os.kill(pid := evaluation.worker.pid, signal.SIGKILL)
    assert gone([pid], 10) == []
    assert [a.version for a in evaluation.poll()] == [0]
    with pytest.raises(WorkerError, match=rf"evaluation \(pid {pid}\)"):
        evaluation.request()
        evaluation.wait(PATIENCE)


def test_close_raises_what_was_not_told(Evaluation):
    "An error that arrived after the last call; but not if another one is on its way."

    def fail():
        evaluation = Evaluation(partial(Fails, boom), Constant(), 2)
        started(evaluation)
        evaluation.request()
        assert evaluation.worker.poll(PATIENCE)
        return evaluation

    with pytest.raises(EnvError, match="boom"):
        fail().close()
    with pytest.raises(KeyError), fail():
        raise KeyError


def test_silence(tmp_path, caplog, Evaluation):
    gate = tmp_path / "gate"
    with Evaluation(partial(Gated, gate), Constant(), 1, silence=0.3) as evaluation:
        evaluation.request()
        with caplog.at_level(logging.WARNING, "rollpipe"):
            until(lambda: evaluation.wait(0.1) == [] and "in reset" in caplog.text)
        assert "evaluation (pid" in caplog.text and "has been silent for" in caplog.text
        gate.touch()
        assert len(evaluation.wait(PATIENCE)) == 1
    gate.unlink()
    with Evaluation(
        partial(Gated, gate), Constant(), 1, silence=0.3, on_silence="raise"
    ) as evaluation:
        started(evaluation)
        time.sleep(0.4)
        assert evaluation.poll() == []  # nothing to say is no silence
        evaluation.request()
        with pytest.raises(WorkerError, match="has been silent for"):
            evaluation.wait(PATIENCE)


def test_weights_that_change_their_form(Evaluation):
    actor = Constant()
    with Evaluation(Pays, actor, 1) as evaluation:
        actor.weight = torch.nn.Parameter(torch.zeros(2))
        with pytest.raises(ActorError, match="changed the form"):
            evaluation.request()


@pytest.mark.parametrize(
    "change, error, match",
    [
        (dict(n_episodes=0), DataError, "n_episodes"),
        (dict(silence=0), DataError, "silence"),
        (dict(grace=-1), DataError, "grace"),
        (dict(on_silence="stop"), DataError, "on_silence"),
        (dict(on_limit="stop"), DataError, "leaf on_limit"),
        (dict(max_steps=0), DataError, "leaf max_steps"),
        (dict(env="CartPole-v99"), EnvError, "CartPole"),
        (dict(actor=1), ActorError, "step"),
        (dict(start_method="thread"), WorkerError, "start method"),
        (
            dict(ray=3),
            DataError,
            "leaf ray: out of range. Expected a dict with some of address, resources, runtime_env",
        ),
        (dict(ray=dict(adress="auto")), DataError, "leaf ray: out of range.*adress"),
        (dict(ray=dict(address="head")), DataError, "leaf address: out of range"),
        (dict(ray={}, start_method="fork"), DataError, "leaf start_method"),
        (dict(ray={}, record="x.gif"), DataError, "leaf record.* it would stay"),
        (dict(ray=dict(resources=dict(num_cpus=-1))), DataError, "leaf resources"),
    ],
)
def test_options_that_do_not_fit(change, error, match):
    whose = "ParallelEvaluation, .*" if error is DataError else ""
    with pytest.raises(error, match=f"{whose}{match}"):
        ParallelEvaluation(**{"env": Pays, "actor": Constant(), **change})


# --- life and death


def test_close_in_the_middle(tmp_path, Evaluation):
    "Environments are closed, and closing twice is allowed."
    gate = tmp_path / "gate"
    evaluation = Evaluation(partial(Gated, gate), Constant(), 1)
    evaluation.request()
    begun(evaluation, gate)
    pid = started(evaluation)
    until(lambda: "in reset" in evaluation.worker.current_traceback())
    evaluation.close()
    evaluation.close()
    assert gate.with_suffix(".closed").exists() and gone([pid], 10) == [] and not evaluation.busy
    with pytest.raises(WorkerError, match="closed"):
        evaluation.request()


def test_one_that_is_forgotten_ends(Evaluation):
    evaluation = Evaluation(Pays, Constant(), 1)
    pid = started(evaluation)
    del evaluation
    assert gone([pid], 10) == []


# --- what only a cluster has


def test_what_cannot_be_had(nodes):
    "A lock in another process, a node of that kind, another cluster: all is told before anything starts."
    there = dict(address=nodes.address)
    for env, ray, match in (
        (
            partial(Locked, threading.Lock()),
            there,
            "evaluation cannot be sent to a cluster: TypeError: cannot pickle",
        ),
        (
            Pays,
            dict(there, resources=dict(far=3)),
            "no room for 1 worker in .* Expected room for 3 far",
        ),
        (
            Pays,
            dict(address="10.0.0.7:6379"),
            f"another Ray cluster. Expected address='{nodes.address}'",
        ),
    ):
        with pytest.raises(WorkerError, match=f"^ParallelEvaluation: .*{match}"):
            ParallelEvaluation(env, Constant(), 1, ray=ray)


def test_its_node_is_lost(nodes):
    "It is told within seconds, and another evaluation goes on elsewhere."
    actor = Constant()
    third = nodes.add(third=1)
    there = ParallelEvaluation(
        partial(Gated, nodes.folder / "gate"),
        actor,
        1,
        ray=dict(address=nodes.address, resources=dict(third=1)),
    )
    with ParallelEvaluation(
        Pays, actor, 1, ray=dict(address=nodes.address, resources=dict(far=1))
    ) as elsewhere:
        for evaluation in (there, elsewhere):
            evaluation.request()
        begun(there, nodes.folder / "gate")
        started(there)
        assert there.worker.node == third.node_id
        nodes.kill(third)
        begin = time.monotonic()
        with pytest.raises(
            WorkerError,
            match=r"^evaluation \(pid \d+\) on node .* died \(.*\) while it evaluated version 0",
        ):
            there.wait(PATIENCE)
        assert time.monotonic() - begin < 10 * slack()
        [answer] = elsewhere.wait(PATIENCE)
        assert elsewhere.worker.node == nodes.far.node_id and answer.evaluation.returns == [0]
        assert re.search(r"evaluation \(pid \d+\) on node", repr(elsewhere))
