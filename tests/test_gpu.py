"""Trainings whose networks are on a GPU: resumed and verified exactly, and used on the host (`make gpu`); and what must not touch a GPU."""

import math
import os
import pickle
import subprocess
import sys
from functools import partial
from itertools import islice
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
import torch
from command_line import settings
from reference import assert_same
from tensor_worlds import CartPole, Pendulum

from rollpipe.agents import PPO, evaluate
from rollpipe.layers import Critic, MLPPolicy, RecurrentPolicy
from rollpipe.pipes import (
    AdvantageBuffer,
    DataError,
    DataLoader2,
    ProcessReading,
    nested,
    on_policy,
    rollouts,
)
from rollpipe.pipes.graph import modules
from rollpipe.pipes.invariants import check_advantages, check_ratio
from rollpipe.pipes.tensors.collector import TensorCollector
from rollpipe.pipes.workers import crew
from rollpipe.pipes.workers.crew import pickled_for
from rollpipe.runs import load_agent
from rollpipe.runs.loops import resumed, saved
from rollpipe.settings.config import device_named
from rollpipe.traces.fingerprint import machine

GPU = "cuda"
BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
SMALL = " --n-steps 64 --n-envs 2 --lanes 2"
OFF = " --warmup 200"
QUIET = " --quiet --no-tensorboard"
KINDS = dict(
    trpo="trpo Pendulum-v1" + SMALL,
    npg="npg CartPole-v1" + SMALL,
    reinforce="reinforce CartPole-v1" + SMALL,
    a2c="a2c Pendulum-v1" + SMALL,
    ppo="ppo CartPole-v1" + SMALL,
    vtrace="vtrace CartPole-v1" + SMALL,
    gru="ppo CartPole-v1 --recurrent gru" + SMALL,
    lstm="dqn CartPole-v1 --recurrent lstm --preset none --length 8" + OFF,
    workers="ppo Pendulum-v1 --workers 2" + SMALL,
    rnd="ppo CartPole-v1 --intrinsic 0.1" + SMALL,
    masked="ppo Taxi-v4 --action-mask action_mask" + SMALL,
    dqn="dqn CartPole-v1 --prioritized" + OFF,
    qr_dqn="qr_dqn CartPole-v1" + OFF,
    sac="sac Pendulum-v1" + OFF,
    crossq="crossq Pendulum-v1" + OFF,
    td3="td3 Pendulum-v1" + OFF,
    ddpg="ddpg Pendulum-v1" + OFF,
)


def printed(folder, *words, timeout=600):
    "The exit code of a Python program with these words, in a process of its own, and what it prints."
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=folder,
        env=os.environ | settings(),
        timeout=timeout,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout


def command(folder, words):
    "What `rollpipe` prints in a process of its own."
    code, text = printed(folder, "-m", "rollpipe", *words.split())
    assert code == 0, text
    return text


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_on_a_gpu_is_verified_and_its_policy_is_used_on_the_host(kind, tmp_path):
    train = f"train {KINDS[kind]} --steps 700 --device cuda --out run --exact --checkpoint-every 2"
    command(tmp_path, train + " --final-episodes 2" + QUIET)
    assert "fingerprints are equal" in command(tmp_path, "verify run --updates 3")
    agent = load_agent(tmp_path / "run")
    assert {x.device.type for x in agent.actor.parameters()} == {"cpu"}
    if kind != "masked":
        env = KINDS[kind].split()[1]
        assert math.isfinite(evaluate(env, agent.actor, 2, seed=0).mean)
    command(tmp_path, "evaluate run --episodes 2")
    command(tmp_path, "evaluate run --episodes 2 --device cuda")
    command(tmp_path, "train --resume run --steps 900 --device cpu" + QUIET)


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["ppo", "trpo", "rnd", "scaled", "recurrent", "dqn", "sac", "td3"])
def test_killed_on_a_gpu(name, tmp_path):
    words = f"--only {name} --rounds 1 --device cuda".split()
    code, text = printed(tmp_path, BENCHMARKS / "guillotine.py", *words, timeout=800)
    assert code == 0, text


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_two_ranks_and_one_gpu(device, tmp_path):
    launch = "-m torch.distributed.run --standalone --nproc-per-node 2 -m rollpipe train"
    words = f"ppo CartPole-v1 --steps 512 --device {device} --out run{SMALL}{QUIET}"
    code, text = printed(tmp_path, *launch.split(), *words.split(), timeout=300)
    is_refused = device == "cuda" and torch.cuda.device_count() < 2 and "GPU" in text
    assert code == 0 or is_refused, text


@pytest.mark.gpu
def test_a_training_on_the_host_touches_no_gpu(tmp_path):
    program = """if True:
        import torch
        from rollpipe.cli.main import main
        words = "train ppo CartPole-v1 --steps 512 --workers 2 --n-envs 2 --n-steps 64 --lanes 2 --quiet --no-tensorboard --out r"
        assert main(words.split()) == 0
        assert not torch.cuda.is_initialized()"""
    code, text = printed(tmp_path, "-c", program, timeout=300)
    assert code == 0, text


def test_the_fingerprint_names_a_gpu_only_if_it_is_used(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_name",
        lambda device=None: pytest.fail("a GPU that nobody uses is touched"),
    )
    assert machine([torch.nn.Linear(2, 2)])["accelerator"] == machine()["accelerator"] == "None"


WORLDS = dict(CartPole=CartPole, Pendulum=Pendulum)


@pytest.mark.gpu
@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize("policy", [MLPPolicy, RecurrentPolicy])
def test_the_host_agrees_with_a_record_of_a_gpu(name, policy):
    "On the host, every step of the record is one of the dynamics, and likelihoods, values and advantages are those of the networks."
    actor, critic = (c.for_env(WORLDS[name](1), seed=0) for c in (policy, Critic))
    pipe = AdvantageBuffer(
        TensorCollector(partial(WORLDS[name], 16, 20, device=GPU), actor.to(GPU), 30, seed=3),
        critic.to(GPU),
        0.99,
        0.9,
    )
    there = list(islice(pipe, 2))
    actor.cpu(), critic.cpu()
    world = WORLDS[name](16)
    for f in there:
        assert {x.device.type for x in nested.leaves((f.state, f.actor, f.adv))} == {GPU}
        f = nested.map(torch.Tensor.cpu, f)
        check_ratio(f, actor)
        check_advantages(f, critic, 0.99, 0.9)
        last = {(t, b): k for k, (t, b) in enumerate(zip(f.final.t.tolist(), f.final.b.tolist()))}
        for t in range(30):
            obs = f.state.obs[t]
            state = (
                obs.t()
                if name == "CartPole"
                else torch.stack([torch.atan2(obs[:, 1], obs[:, 0]), obs[:, 2]])
            )
            world.state = state
            after, rew, term = world.move(f.state.act[t + 1])
            torch.testing.assert_close(f.state.rew[t + 1], rew, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(f.term[t + 1], term)
            for b, over in enumerate(f.state.fin[t + 1].tolist()):
                if over and (t, b) not in last:
                    continue  # a true end: nobody needs its observation
                found = f.final.obs[last[t, b]] if over else f.state.obs[t + 1, b]
                torch.testing.assert_close(found, world.look(after)[b], atol=1e-3, rtol=1e-3)
    assert last


@pytest.mark.gpu
@pytest.mark.parametrize("name", WORLDS)
def test_a_loop_of_environments_on_a_gpu_goes_on_exactly(name, tmp_path):
    def learner():
        actor, critic = (c.for_env(WORLDS[name](1), seed=0).to(GPU) for c in (MLPPolicy, Critic))
        agent = PPO(actor, critic, epochs=2, minibatch=64, seed=0)
        return agent, AdvantageBuffer(
            TensorCollector(lambda: WORLDS[name](8, 20, device=GPU), actor, 16, seed=1), critic
        )

    def weights(agent):
        return [x.detach().cpu().clone() for x in agent.actor.parameters()]

    agent, pipe = learner()
    with resumed(tmp_path / "whole", pipe, agent) as (loader, _):
        for batch in islice(loader, 6):
            agent.update(batch)
    whole = weights(agent)
    for part in range(3):
        agent, pipe = learner()
        with resumed(tmp_path / "parts", pipe, agent) as (loader, begun):
            assert begun == 2 * part
            for k, batch in enumerate(islice(loader, 2), begun + 1):
                agent.update(batch)
                saved(tmp_path / "parts", loader, agent, k)
    assert_same(weights(agent), whole)


@pytest.mark.gpu
def test_a_policy_acts_on_a_gpu_as_on_the_host():
    for policy in MLPPolicy, RecurrentPolicy:
        actor = policy.for_env("Pendulum-v1", seed=0)
        obs = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
        there = actor.predict(obs)[0]
        np.testing.assert_allclose(actor.to(GPU).predict(obs)[0], there, atol=1e-5)


class Touched(Exception):
    "A GPU is touched."


@pytest.fixture
def a_gpu(monkeypatch):
    "torch believes in a GPU, and whoever begins to use it gets an error."

    def begin(*_):
        raise Touched

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "_lazy_init", begin)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_touches_no_gpu(workers, a_gpu):
    actor = MLPPolicy.for_env("CartPole-v1", seed=0)
    service = ProcessReading(workers, start_method="fork") if workers else None
    with pytest.raises((Touched, AssertionError)):
        torch.zeros(1, device="cuda")  # this is what counts as touching
    with DataLoader2(rollouts("CartPole-v1", actor, n_steps=8), reading_service=service) as loader:
        assert next(iter(loader)).valid.all() and next(iter(loader)).valid.all()


def test_each_rank_of_a_machine_has_a_gpu_of_its_own(a_gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    launched = dict(RANK="5", WORLD_SIZE="8", MASTER_ADDR="here", MASTER_PORT="1")
    for name, device in launched.items():
        monkeypatch.setenv(name, device)
    for rank, device in (("0", "cuda:0"), ("1", "cuda:1")):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert device_named("cuda") == device_named("auto") == torch.device(device)
        assert device_named("cuda:1") == torch.device("cuda:1") and device_named(
            "cpu"
        ) == torch.device("cpu")
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(
        DataError, match="no GPU of its own. Expected at most 2 ranks on .* got LOCAL_RANK=2"
    ):
        device_named("cuda")
    monkeypatch.delenv("LOCAL_RANK")
    with pytest.raises(DataError, match="got LOCAL_RANK="):
        device_named("cuda")
    monkeypatch.setattr(
        torch.cuda, "device_count", lambda: 1
    )  # the launcher shows each rank one GPU
    assert device_named("cuda") == torch.device("cuda:0")
    monkeypatch.delenv("RANK")
    assert device_named("cuda") == torch.device("cuda")


class There(torch.nn.Linear):
    "A layer on another device, which the host takes back without its numbers."

    def cpu(self):
        return self.to_empty(device="cpu")


def test_a_worker_on_the_host_gets_networks_in_host_memory(monkeypatch):
    "Its machine may have no GPU, and one that has one need not begin to use it."
    layer = There(2, 3, device="meta")
    monkeypatch.setattr(
        crew, "state_of", lambda found: dict(layer.named_parameters())
    )  # which refuses tensors without numbers

    def sent():
        return cloudpickle.loads(pickle.loads(pickle.dumps(modules._Payload(layer))).content)

    for device, found in ((None, "meta"), ("meta", "meta"), ("cpu", "cpu")):
        with pickled_for(device):
            assert sent().weight.device.type == found
    assert sent().weight.device.type == layer.weight.device.type == "meta"


def test_the_global_generators_of_gpus_go_on(tmp_path, monkeypatch):
    "A learner may draw from them, as by dropout."
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda,
        "get_rng_state_all",
        lambda: [torch.arange(3, dtype=torch.uint8) + k for k in range(2)],
    )
    put: dict = {}
    monkeypatch.setattr(
        torch.cuda, "set_rng_state", lambda x, device: put.update({device: x.tolist()})
    )
    for begun in range(2):
        actor, critic = (c.for_env("CartPole-v1", seed=0) for c in (MLPPolicy, Critic))
        agent = PPO(actor, critic, epochs=1, seed=0)
        with resumed(
            tmp_path / "loop",
            on_policy("CartPole-v1", actor, critic, n_envs=2, n_steps=8, seed=0),
            agent,
        ) as (loader, updates):
            assert updates == begun
            agent.update(next(iter(loader)))
            saved(tmp_path / "loop", loader, agent, updates + 1)
        assert put == ({0: [0, 1, 2], 1: [1, 2, 3]} if begun else {})
