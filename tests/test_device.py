"""Actors that live elsewhere: what they are shown goes there, what they answer comes back, and the record is on the host."""

import sys
from contextlib import nullcontext
from itertools import islice

import numpy as np
import pytest
import torch
from command_line import rollpipe
from recordings import recorded
from reference import assert_same
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from toys import Counting

from rollpipe.agents.checkpoint import save_checkpoint
from rollpipe.layers import MLPPolicy, RecurrentPolicy
from rollpipe.pipes import (
    CheckpointError,
    DataError,
    EnvStepper,
    FragmentCollector,
    ToDevice,
    find,
    nested,
    on_policy,
    rollouts,
)
from rollpipe.pipes.graph.edits import nodes
from rollpipe.pipes.graph.modules import checked_device
from rollpipe.runs import load_agent
from rollpipe.runs.folder import load_run, restore, start
from rollpipe.runs.logs import read_metrics
from rollpipe.runs.training import train
from rollpipe.settings.algorithms import ALGORITHMS, options_for
from rollpipe.settings.config import build, device_named, make_config


class Elsewhere:
    "An actor whose inputs must be on the meta device; its memory stays there, its answers need no numbers from there."

    def step(self, stepno, obs, act, rew, fin, /, *, hx, virtual):
        tensors = [
            stepno,
            rew,
            fin,
            *nested.leaves(obs),
            *nested.leaves(act),
            *nested.leaves(() if hx is None else hx),
        ]
        assert {x.device.type for x in tensors} == {"meta"}
        self.asked = getattr(self, "asked", 0) + 1
        hx = torch.zeros(2, fin.shape[1], 3, device="meta")
        return torch.zeros(fin.shape, dtype=torch.long), hx, dict(value=torch.ones(fin.shape))

    def reset(self, hx, at):
        assert hx.device.type == "meta"
        return hx.clone()


@pytest.mark.slow
def test_inputs_and_memory_are_where_the_actor_is():
    actor = Elsewhere()
    for tick in islice(
        EnvStepper(lambda: Counting([(3, "trunc"), (2, "term")]), actor, 2, device="meta"), 12
    ):
        assert nested.leaves(tick.actor)[0].device.type == "cpu" and tick.hx.device.type == "meta"
        for _, hx in tick.final.values():
            assert hx.device.type == "meta" and hx.shape == (2, 1, 3)
    assert actor.asked >= 12


@pytest.mark.parametrize("policy", [MLPPolicy, RecurrentPolicy])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_device_does_not_change_the_record(policy, device):
    actor = policy.for_env("Pendulum-v1", seed=0)
    plain = list(islice(FragmentCollector(EnvStepper("Pendulum-v1", actor, 3, seed=1), 7), 3))
    actor = actor.to(device)
    moved = list(
        islice(FragmentCollector(EnvStepper("Pendulum-v1", actor, 3, seed=1, device=device), 7), 3)
    )
    for a, b in zip(plain, moved):
        assert {x.device.type for x in nested.leaves(b)} == {"cpu"}
        if device == "cpu":
            assert_same(a, b)


@pytest.mark.parametrize(
    "make",
    [
        lambda d: EnvStepper("Pendulum-v1", MLPPolicy.for_env("Pendulum-v1"), device=d),
        lambda d: on_policy("Pendulum-v1", MLPPolicy.for_env("Pendulum-v1"), device=d),
        lambda d: rollouts("Pendulum-v1", MLPPolicy.for_env("Pendulum-v1"), device=d),
    ],
)
@pytest.mark.parametrize(
    "device",
    [
        "nonsense",
        "cuda:99",
        "",
        3.5,
        "cuda:-1",
        "hpu",
        pytest.param(
            "cuda", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here")
        ),
    ],
)
def test_a_device_that_is_not_there_is_named_at_construction(make, device):
    with pytest.raises(DataError) as e:
        make(device)
    assert (
        e.value.pipe == "EnvStepper"
        and e.value.leaf == "device"
        and repr(device) in e.value.got
        and e.value.expected.startswith("cpu")
    )


@pytest.mark.parametrize(
    "n, expected",
    [(0, "cpu (torch sees no GPU)"), (1, "cpu or cuda:0"), (2, "cpu or cuda:0 or cuda:1")],
)
def test_what_is_there_is_said(n, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: n)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(DataError) as e:
        checked_device("cuda:99")
    assert e.value.expected == expected and e.value.got == "'cuda:99'"
    with pytest.raises(DataError) as e:
        checked_device("nonsense")
    assert e.value.expected == expected.split(" (")[0]
    monkeypatch.setattr(torch.version, "cuda", None)
    if n == 0:
        with pytest.raises(DataError, match="because this torch is made for CPUs"):
            checked_device("cuda")


def test_asking_for_a_device_does_not_begin_to_use_it():
    checked_device("cpu")
    if torch.cuda.is_available():
        checked_device("cuda")
    assert not torch.cuda.is_initialized()


# -- training on a device ----------------------------------------------------------------------------------------------


class There(torch.Tensor):
    """A tensor that pretends to be on the meta device but has its numbers, in `here`, so that a training can run there on any machine.

    Like a real device it computes with its own tensors alone: any other tensor of one or more dimensions is an error.
    """

    @staticmethod
    def __new__(cls, here):
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            here.shape,
            strides=here.stride(),
            storage_offset=here.storage_offset(),
            dtype=here.dtype,
            device="meta",
            requires_grad=here.requires_grad,
        )
        self.here = here
        return self

    def __repr__(self):
        return f"There({self.here})"

    def tolist(self):
        return self.here.tolist()

    def numpy(self, **_):
        raise TypeError("can't convert a tensor on the device to numpy")

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return compute(func, args, kwargs or {})


# Tensors of a real device take indices of the host, and those of the host take none of a device.
INDEXING = {
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put_.default,
    torch.ops.aten.index_put.default,
}
MOVED = {
    torch.ops.aten._to_copy.default,
    torch.ops.aten.copy_.default,
    torch.ops.aten.new_empty.default,
}


def compute(func, args, kwargs):
    "What `func` gives: on the device if an argument is there, or if it makes a tensor there."
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    there = any(isinstance(x, There) for x in tensors)
    device = kwargs.get("device")
    if device is not None:
        there = torch.device(device).type == "meta"
    takes_indices = func in INDEXING and isinstance(args[0], There)
    mixed = (
        func not in MOVED
        and not takes_indices
        and there
        and any(not isinstance(x, There) and x.ndim for x in tensors)
    )
    assert not mixed, (
        f"{func} with tensors here and there: {[(type(x).__name__, tuple(x.shape)) for x in tensors]}"
    )
    if device is not None:
        kwargs = {**kwargs, "device": "cpu"}
    inside = tree_map(lambda x: x.here if isinstance(x, There) else x, (args, kwargs))
    out = func(*inside[0], **inside[1])
    if (
        func is torch.ops.aten._to_copy.default
        and not there
        and any(isinstance(x, There) for x in tensors)
    ):
        return out
    given = {
        id(x.here): x for x in tensors if isinstance(x, There)
    }  # an operation in place returns its argument
    if func is torch.ops.aten.copy_.default:
        return args[0]
    return tree_map(
        lambda x: (
            given[id(x)]
            if id(x) in given
            else There(x)
            if isinstance(x, torch.Tensor) and there
            else x
        ),
        out,
    )


class PretendDevice(TorchDispatchMode):
    "In this block the meta device computes, see `There`."

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return compute(func, args, kwargs or {})


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "ppo gru", "trpo gru", "a2c lstm", "dqn lstm"])
def test_a_training_on_a_device_mixes_nothing_and_gives_the_same_numbers(
    algorithm, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        sys.modules["torch.optim.optimizer"],
        "_get_fused_kernels_supported_devices",
        lambda: ["cpu", "meta"],
    )
    tiny = dict(
        n_envs=4,
        n_steps=16,
        hidden=(8,),
        critic_hidden=(8,),
        epochs=2,
        minibatch=32,
        warmup=32,
        batch_size=16,
        prioritized=True,
        samples_per_step=0.25,
    )
    algorithm, _, recurrent = algorithm.partition(" ")
    if recurrent:
        tiny |= dict(
            recurrent=recurrent, state_size=8, lanes=2, fvp_subsample=0.5, length=8, n_steps=8
        )
        monkeypatch.setattr(
            "rollpipe.runs.states.Stream.state", lambda self: None
        )  # it cannot write down what only pretends
    has = {o.name for o in options_for(algorithm)}
    env = "CartPole-v1"
    if algorithm in ("sac", "crossq", "td3", "ddpg", "iql", "td3bc"):
        env = "Pendulum-v1"
    if "data" in has:
        tiny |= dict(data=str(recorded(tmp_path / "data", env)), batch_size=64)

    def metrics(device):
        config = make_config(
            algorithm, env, {k: v for k, v in tiny.items() if k in has}, steps=192, device=device
        )
        with PretendDevice() if device == "meta" else nullcontext():
            run = start(tmp_path / device, config)
            assert {p.device.type for p in run.agent.actor.parameters()} == {device}
            train(run, progress=False, tensorboard=False)
        return {
            k: v
            for k, v in read_metrics(run.folder).items()
            if not k.startswith(("seconds", "steps_per"))
        }

    here = metrics("cpu")
    there = metrics("meta")
    assert list(here) == list(there)
    for name in here:
        atol = (
            1 if name == "cg_iterations" else 1e-5
        )  # whether a last iteration changes anything is decided by the last bits
        np.testing.assert_allclose(there[name], here[name], rtol=1e-3, atol=atol, err_msg=name)


# -- the option --------------------------------------------------------------------------------------------------------

SMALL = "--n-envs 4 --n-steps 16 --hidden 8 --critic-hidden 8 --steps 64 --quiet --no-tensorboard".split()


@pytest.fixture
def no_accelerator(monkeypatch):
    for name in ("cuda.is_available", "backends.mps.is_available"):
        monkeypatch.setattr(f"torch.{name}", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)


@pytest.mark.parametrize("device", ["cuda:1", "mps", "gpu", ""])
def test_a_name_that_is_no_device_here_is_refused(device, no_accelerator):
    with pytest.raises(DataError, match="no such device here.*Expected cpu"):
        make_config("trpo", "CartPole-v1", device=device)


@pytest.mark.slow_but_one
@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize(
    "words",
    [
        ["train", "trpo", "CartPole-v1", *SMALL],
        ["train", "dqn", "CartPole-v1"],
        ["demo"],
        ["evaluate", "RUN"],
        ["train", "--resume", "RUN", "--steps", 128],
    ],
)
def test_a_device_that_is_not_there_is_refused_before_anything_begins(
    words, device, tmp_path, no_accelerator, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert rollpipe("train", "trpo", "CartPole-v1", *SMALL, "--out", tmp_path / "RUN") == 0
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    capsys.readouterr()
    assert rollpipe(*words, "--device", device) == 2
    err = capsys.readouterr().err
    assert (
        "no such device here" in err
        and "Expected cpu" in err
        and repr(device) in err
        and err.count("\n") == 1
    )
    assert before == {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}


@pytest.mark.slow
def test_the_device_is_stored_and_a_run_from_elsewhere_can_be_used_here(
    tmp_path, no_accelerator, capsys
):
    run = tmp_path / "run"
    assert rollpipe("train", "trpo", "CartPole-v1", *SMALL, "--device", "cpu", "--out", run) == 0
    found = load_run(run)
    assert found.config["device"] == "cpu"

    # As a GPU leaves it.
    config = {**found.config, "device": "cuda"}
    file = run / "checkpoint.safetensors"
    save_checkpoint(file, load_agent(run), config, found.counters, history=found.history)
    assert rollpipe("evaluate", run, "--episodes", 1) == 0
    assert rollpipe("export", run, "--to", "torchscript") == 0
    assert load_agent(run).actor.predict(np.zeros(4, np.float32))[0] in (0, 1)

    # It goes on only where it is told to.
    capsys.readouterr()
    words = ["train", "--resume", run, *"--steps 128 --quiet --no-tensorboard".split()]
    assert rollpipe(*words) == 2
    assert "no such device here" in capsys.readouterr().err
    assert rollpipe(*words, "--device", "cpu") == 0
    assert load_run(run).config["device"] == "cpu" and load_run(run).counters["steps"] == 128


def test_runs_from_before_the_option_are_on_the_host(tmp_path):
    run = start(tmp_path / "run", make_config("trpo", "CartPole-v1", steps=64))
    found = load_run(run.folder)
    config = {name: x for name, x in found.config.items() if name != "device"}
    agent, _ = restore(found._replace(config=config))
    assert {p.device.type for p in agent.actor.parameters()} == {"cpu"}


@pytest.mark.parametrize(
    "cuda, mps, expected",
    [(True, False, "cuda"), (False, True, "mps"), (False, False, "cpu"), (True, True, "cuda")],
)
def test_auto_takes_what_is_there(cuda, mps, expected, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: cuda)
    monkeypatch.setattr("torch.cuda.device_count", lambda: int(cuda))
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: mps)
    assert device_named("auto") == torch.device(expected) == device_named(expected)
    assert (
        make_config("trpo", "CartPole-v1", device="auto")["device"] == "auto"
    )  # decided anew on each machine


def test_what_a_stored_device_may_be(tmp_path):
    run = start(tmp_path / "run", make_config("trpo", "CartPole-v1", steps=64))
    save_checkpoint(
        run.checkpoint,
        run.agent,
        {**run.config, "device": 3},
        run.counters,
        history=run.history,
    )
    with pytest.raises(CheckpointError, match="device"):
        load_run(run.folder)


def test_where_things_are_in_the_graph():
    tiny = {"n_envs": 2, "n_steps": 4}
    agent, pipe = build(make_config("ppo", "CartPole-v1", tiny, device="meta"))
    names = [type(p).__name__ for p in nodes(pipe)]
    assert names == [
        "EnvStepper",
        "FragmentCollector",
        "Lanes",
        "ToDevice",
        "AdvantageBuffer",
        "FragmentStacker",
    ]
    assert {
        p.device.type for module in (agent.actor, agent.critic) for p in module.parameters()
    } == {"meta"}
    assert {p.device.type for group in agent.optimizer.param_groups for p in group["params"]} == {
        "meta"
    }
    assert find(pipe, EnvStepper)[0].device.type == "meta"
    assert [
        type(p).__name__ for p in nodes(build(make_config("dqn", "CartPole-v1", device="meta"))[1])
    ][-2:] == ["Replay", "ToDevice"]
    assert not find(build(make_config("ppo", "CartPole-v1", tiny))[1], ToDevice)
