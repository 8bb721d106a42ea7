"Engines: an actor answers the same through ONNX Runtime as through torch, whatever it is, and whatever happens to its weights."

import copy
import gc
import importlib.util
import logging
import math
import multiprocessing
import pickle
import random
import sys
import weakref
from argparse import Namespace
from collections import deque
from functools import partial
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from test_laws_of_networks import ACTORS, ACTS, STATE, Dreams, assert_close, streams

from rollpipe.layers import (
    Actor,
    CategoricalPolicy,
    MLPPolicy,
    QPolicy,
    RecurrentPolicy,
)
from rollpipe.pipes import EnvStepper, FragmentCollector, ProcessReading, nested, rollouts
from rollpipe.pipes.data.errors import ActorError, DataError
from rollpipe.pipes.engines import checked_actor, compiled
from rollpipe.pipes.engines.checked_actor import CheckedActor
from rollpipe.pipes.engines.interaction import Interaction
from rollpipe.pipes.engines.onnx_graph import open_session, to_onnx
from rollpipe.pipes.engines.pure import PureStep
from rollpipe.pipes.envs.factories import env_factories
from rollpipe.pipes.envs.vector import env_batch
from rollpipe.pipes.graph.modules import bump_version
from rollpipe.pipes.graph.torchdata import DataLoader2

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnx")


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    monkeypatch.setattr(checked_actor, "_logged_reasons", set())


def assert_equal(came, wanted):
    for path, x, y in zip(nested.paths(wanted, "f"), nested.leaves(came), nested.leaves(wanted)):
        assert torch.equal(x, y), path


def learn(actor, scale=0.05):
    "Change all parameters in place, as an optimiser does, and the normaliser's buffers."
    with torch.no_grad():
        for p in actor.parameters():
            p.add_(torch.randn_like(p) * scale)
    if (
        hasattr(actor, "observe")
        and isinstance(getattr(actor, "observation_space", None), Box)
        and actor.obs_norm is not None
    ):
        actor.observe(torch.randn(50, *actor.observation_space.shape) * 2 + 1)
    bump_version(actor)


def replaced(actor):
    actor.trunk.hidden[0].weight = torch.nn.Parameter(
        torch.randn_like(actor.trunk.hidden[0].weight)
    )


def moved(actor):
    actor.trunk.hidden[1].weight.data = torch.randn_like(actor.trunk.hidden[1].weight)


def transposed(actor):
    actor.trunk.hidden[1].weight.data = torch.randn_like(actor.trunk.hidden[1].weight).t()


def viewed(actor):
    actor.trunk.hidden[1].weight.data = actor.trunk.hidden[1].weight.data.t()


def strided(actor):
    actor.trunk.hidden[1].bias.data = torch.randn(128)[::2]


def filled(actor):
    transposed(actor)
    yield
    with torch.no_grad():
        actor.trunk.hidden[1].weight.copy_(torch.randn(64, 64))


def loaded(actor):
    actor.load_state_dict({k: x + 1 for k, x in actor.state_dict().items()}, assign=True)


def bare(actor):
    actor.head.logits.weight.data.mul_(-1)  # torch does not count it


def activation(actor):
    actor.trunk.activation = torch.nn.ReLU()


def deeper(actor):
    actor.trunk.hidden.append(torch.nn.Linear(64, 64))


def wider(actor):
    actor.trunk.hidden[0] = torch.nn.Linear(4, 32)
    actor.trunk.hidden[1] = torch.nn.Linear(32, 64)


def tied(actor):
    "Two layers share a weight, and later they do not."
    first, second, *_ = actor.trunk.hidden
    actor.trunk.hidden[0] = torch.nn.Linear(4, 64)
    third = torch.nn.Linear(64, 64)
    actor.trunk.hidden.append(third)
    for weight in (second.weight, torch.nn.Parameter(second.weight.detach() * -1)):
        third.weight = weight
        yield
        second.weight.data.mul_(2)
        yield


@pytest.mark.parametrize(
    "change",
    [
        tied,
        replaced,
        moved,
        transposed,
        viewed,
        strided,
        filled,
        loaded,
        bare,
        activation,
        deeper,
        wider,
    ],
)
def test_whatever_happens_to_the_weights_the_next_fragment_uses_them(change):
    actor = MLPPolicy.for_env((STATE, ACTS), seed=0)
    torch.nn.init.normal_(actor.head.logits.weight)
    pair = streams(actor)
    for _ in range(2):
        before = [next(stream) for stream in pair]
    assert_close(before[1], before[0])
    for _ in change(actor) or [None]:
        after = [next(stream) for stream in pair]
        assert_close(after[1], after[0])
    reports = [stream.actor["dist"] for stream in (before[1], after[1])]
    assert not torch.allclose(*reports)


class Slow(CategoricalPolicy):
    "Has constants in attributes: a number, and a list."

    def __init__(self):
        super().__init__(STATE, ACTS)
        self.temperature = 1.0
        self.shifts = [1.0, 3.0, 5.0]

    def params(self, *args, **kwargs):
        params, hx = super().params(*args, **kwargs)
        return params / self.temperature + sum(self.shifts), hx


SCALE = 1.0
TABLE = [1.0]
CONFIG = SimpleNamespace(scale=1.0, inner=SimpleNamespace(scales=[1.0]))
ARGS = Namespace(scale=1.0)
outside = ModuleType("outside")
outside.SCALE, outside.outside = 1.0, outside  # modules import one another
log = logging.getLogger("an actor's")


def scaled(x):
    return x * SCALE


class Shared:
    scale = 1.0


class Slotted:
    __slots__ = ("scale",)

    def __init__(self):
        self.scale = 1.0


class Reader(CategoricalPolicy):
    "Its reports are scaled by all that an actor may read besides its weights."

    scale = 1.0
    scales = {"a": 1.0}
    twice = property(lambda self: scaled(1.0))

    def __init__(self):
        super().__init__(STATE, ACTS)
        torch.nn.init.normal_(self.head.logits.weight)
        self.config = SimpleNamespace(scale=1.0, inner=[[1.0]])
        self.slotted = Slotted()
        self.shared = Shared()
        by = [1.0]
        self.by = by
        self.closed = lambda x: x * by[0]
        self.own = [1.0]
        self.counts = np.ones(2)
        self.last = deque([1.0])

    def params(self, *args, **kwargs):
        params, hx = super().params(*args, **kwargs)
        log.debug("a logger notes whether anybody listens")
        factors = (
            self.scale,
            self.scales["a"],
            TABLE[0],
            CONFIG.scale,
            CONFIG.inner.scales[0],
            outside.outside.SCALE,
            Shared.scale,
            self.twice,
            self.config.scale,
            self.config.inner[0][0],
            self.slotted.scale,
            self.shared.scale,
            self.own[0],
            float(self.counts[0]),
            self.last[0],
            ARGS.scale,
        )
        return self.closed(scaled(params)) * math.prod(factors), hx


OUTSIDE = {
    "a class attribute": lambda actor: (Reader, "scale"),
    "in a class attribute": lambda actor: (Reader.scales, "a"),
    "a global": lambda actor: (globals(), "SCALE"),
    "in a global": lambda actor: (TABLE, 0),
    "of a global": lambda actor: (CONFIG, "scale"),
    "deep in a global": lambda actor: (CONFIG.inner.scales, 0),
    "of a module": lambda actor: (outside, "SCALE"),
    "of a class": lambda actor: (Shared, "scale"),
    "of an object": lambda actor: (actor.config, "scale"),
    "deep in an object": lambda actor: (actor.config.inner[0], 0),
    "of slots": lambda actor: (actor.slotted, "scale"),
    "in an array": lambda actor: (actor.counts, 0),
    "in a deque": lambda actor: (actor.last, 0),
    "of arguments": lambda actor: (ARGS, "scale"),
    "in a list": lambda actor: (actor.own, 0),
    "in a closure": lambda actor: (actor.by, 0),
}


class Slots(torch.nn.Module):
    "Has a weight that is filled later, or emptied."

    uses_past = False

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
        self.bare = torch.nn.Linear(4, 2, bias=False)
        self.register_buffer("mean", None)

    def draw_noise(self, lead, generator):
        return torch.rand(*lead, generator=generator)

    def reset(self, hx, at):
        return hx

    def step(self, stepno, obs, act, rew, fin, hx=None, virtual=False, noise=None):
        obs = obs if self.mean is None else obs - self.mean
        logits = self.layer(obs) + self.bare(obs)
        return (
            (noise < logits.softmax(-1)[..., 0]).long() if noise is not None else logits.argmax(-1),
            (),
            dict(logits=logits),
        )


@pytest.mark.parametrize(
    "change",
    [
        lambda a: setattr(a, "mean", torch.ones(4)),
        lambda a: setattr(a.layer, "bias", None),
        lambda a: setattr(a.bare, "bias", torch.nn.Parameter(torch.ones(2))),
    ],
)
def test_a_weight_that_is_filled_or_emptied_is_noticed(change):
    found = {}
    for engine in "torch", "onnxruntime":
        torch.manual_seed(0)
        stream = iter(
            FragmentCollector(
                EnvStepper("CartPole-v1", actor := Slots(), 2, seed=0, engine=engine), 8
            )
        )
        before = next(stream).actor["logits"]
        change(actor)
        found[engine] = before, next(stream).actor["logits"]
    torch.testing.assert_close(*found.values(), rtol=0, atol=1e-5)


@pytest.mark.slow_but_one
@pytest.mark.parametrize("optimize", [True, False])
@pytest.mark.parametrize("where", OUTSIDE)
def test_what_an_actor_reads_besides_its_weights(where, optimize, caplog):
    actor = Reader()
    holder, key = OUTSIDE[where](actor)
    put = holder.__setitem__ if hasattr(holder, "__setitem__") else partial(setattr, holder)
    pair = streams(actor, optimize=optimize)
    try:
        for value in (1.0, 2.0, 2.0, 0.5):
            put(key, value)
            wanted, came = map(next, pair)
            assert_close(came, wanted)
        said = [
            r.getMessage() for r in caplog.records if "changed, so ONNX Runtime" in r.getMessage()
        ]
        assert len(said) == 1 and "Reader" in said[0], caplog.text
    finally:
        put(key, 1.0)


def test_a_graph_serves_all_lanes_and_iterations_of_its_actor(monkeypatch):
    made = []
    pure = compiled.PureStep
    monkeypatch.setattr(compiled, "PureStep", lambda *args: made.append(1) or pure(*args))
    actor = Reader()
    for k in range(3):
        for stream in streams(actor, lanes=4):
            next(stream)
        learn(actor)
        assert len(made) == 1, k
    next(streams(actor, n_envs=5)[1])  # another form
    assert len(made) == 2

    def collected():
        other = Reader()
        next(streams(other)[1])
        return weakref.ref(other)

    ref = collected()
    assert len(made) == 3
    gc.collect()
    assert ref() is None  # nothing keeps an actor


def test_an_unseen_change_is_noticed_when_an_iteration_begins(monkeypatch):
    actor = Slow()
    wanted, came = map(next, streams(actor))
    assert_close(came, wanted)
    monkeypatch.setattr(compiled.Constants, "changed", lambda self: None)
    actor.temperature = 5.0
    wanted, came = map(next, streams(actor))
    assert_close(came, wanted)


def test_what_changes_again_and_again_runs_with_torch(caplog):
    actor = Slow()
    wanted, auto, strict = streams(actor, engines=("torch", "auto", "onnxruntime"))
    for k in range(8):
        actor.temperature = 1.0 + k
        fragments = [next(stream) for stream in (wanted, auto, strict)]
        assert_close(fragments[1], fragments[0])
        assert_close(fragments[2], fragments[0])
    assert (
        "torch runs the actor: attribute temperature of Slow changes again and again" in caplog.text
    )


class Double(CategoricalPolicy):
    "Computes in the dtype of its weights."

    def __init__(self):
        super().__init__(STATE, ACTS)

    def params(self, obs, *args, **kwargs):
        return super().params(obs.to(self.head.logits.weight.dtype), *args, **kwargs)


def test_an_actor_that_changes_to_another_dtype():
    "ONNX Runtime would need other rows. With 'auto', torch takes over, and does what it does without the other engine."
    actor = Double()
    stream, auto, torchs = streams(actor, engines=["onnxruntime", "auto", "torch"])
    for items in (stream, auto, torchs):
        next(items)
    actor.double()
    refusal = r"the actor changes a dtype. Expected float32 \[1, 3, 3\], got float64 \[1, 3, 3\]"
    if sys.version_info < (3, 11):  # its last ONNX Runtime, 1.23, cannot multiply these matrices
        refusal = "NotImplemented.*FusedMatMul"
    with pytest.raises(ActorError, match=refusal) as e:
        next(stream)
    assert e.value.lane == 0
    came = next(auto)
    wanted = next(torchs)
    assert (
        came.actor["logp"].dtype == wanted.actor["logp"].dtype
        and (came.state.act == wanted.state.act).all()
    )


def test_training_mode_of_the_actor_does_not_matter():
    actor = ACTORS["torch's gru"].make()
    pair = streams(actor)
    for mode in (True, False, True):
        actor.train(mode)
        wanted, came = map(next, pair)
        assert_close(came, wanted)
        assert actor.training is mode


def test_epsilon_is_read_anew():
    actor = QPolicy.for_env((STATE, ACTS), epsilon=0.0, seed=0)
    pair = streams(actor, n_envs=8, n_steps=40)
    greedy = next(pair[1])
    next(pair[0])
    assert torch.equal(greedy.state.act[1:], greedy.actor["q"][:-1].argmax(-1) + 1)
    actor.epsilon.fill_(1.0)
    wanted, came = map(next, pair)
    assert_close(came, wanted)
    assert (came.state.act[1:] != came.actor["q"][:-1].argmax(-1) + 1).float().mean() > 0.3


# Where an actor cannot be exported


class Own(CategoricalPolicy):
    "Subclasses do something in `extra` that a graph cannot repeat."

    def __init__(self):
        super().__init__(STATE, ACTS)
        self.layer = torch.nn.Linear(4, 3)
        self.held = torch.ones(3)
        self.calls = 0
        self.random = np.random.default_rng(0)
        self.curve = Bessel()
        self.register_buffer("seen", torch.zeros(()))

    def params(self, obs, *args, **kwargs):
        params, hx = super().params(obs, *args, **kwargs)
        return params + self.extra(obs), hx


class Bessel(torch.nn.Module):
    def forward(self, x):
        return torch.special.bessel_j0(x)


class Silent(Actor):
    "Draws, but has no `draw_noise`."

    uses_past = False

    def forward(self, obs, act, rew, fin, *, hx, stepno, virtual):
        return torch.randint(1, 4, fin.shape), (), {}


def count_calls(self, obs):
    self.calls += 1
    return 0.0


def watch(self, obs):
    self.seen += 1
    return 0.0


# name of the class -> what it does besides, and why that cannot be exported
REFUSED = {
    "Deciding": (
        lambda self, obs: self.layer(obs) if obs.sum() > 0 else 0.0,
        "`_local_scalar_dense` in Deciding hands a value to Python",
    ),
    "Selecting": (lambda self, obs: obs[obs > 0].sum(), "`index` in Selecting gives a shape"),
    "Rolling": (lambda self, obs: torch.rand(3), "`rand` in Rolling draws random numbers"),
    "Numpy": (
        lambda self, obs: torch.from_numpy(obs.numpy()[..., :3]),
        "`Tensor.numpy` in Numpy hands values to Python",
    ),
    "Holding": (
        lambda self, obs: self.held,
        "`add` in Holding reads a tensor that is no input, parameter or buffer",
    ),
    "Counting": (count_calls, "changes while it answers (attribute calls)"),
    "Watching": (watch, "changes while it answers (Watching.seen)"),
    "Drawing": (
        lambda self, obs: self.random.normal(),
        "changes while it answers (attribute random)",
    ),
    "Tossing": (
        lambda self, obs: float(np.random.rand() < 1e-6),
        "draws from the global random numbers",
    ),
    "Choosing": (
        lambda self, obs: float(random.random() < 1e-6),
        "draws from the global random numbers",
    ),
    "Unknown": (
        lambda self, obs: self.curve(obs[..., :3]),
        "ONNX has no operator for `special_bessel_j0` in Unknown.curve",
    ),
    "Hooked": (lambda self, obs: self.layer(obs), "Hooked.layer has hooks"),
    "Silent": (None, "Silent.step cannot be exported: it has no `draw_noise`"),
}


def refused(name):
    "An actor that cannot be exported."
    extra, _ = REFUSED[name]
    if extra is None:
        return Silent()
    actor = type(name, (Own,), dict(extra=extra))()
    if name == "Hooked":
        actor.layer.register_forward_hook(lambda *args: None)
    return actor


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_exported_is_refused_with_the_reason_or_runs_with_torch(name, caplog, capfd):
    _, reason = REFUSED[name]
    for _ in range(2):  # the second stream says nothing more
        torch.manual_seed(0)
        actor = refused(name)
        ticks = {}
        for engine in ("auto", "torch"):
            torch.manual_seed(1)
            stream = iter(EnvStepper(Dreams, copy.deepcopy(actor), 2, seed=0, engine=engine))
            ticks[engine] = [next(stream).actor for _ in range(5)]
        assert_equal(ticks["auto"], ticks["torch"])
        with pytest.raises(ActorError) as e:
            next(iter(EnvStepper(Dreams, actor, engine="onnxruntime")))
        assert (
            reason in str(e.value)
            and "cannot be exported" in str(e.value)
            and e.value.pipe == "EnvStepper"
            and e.value.lane == 0
        )
    said = [r.getMessage() for r in caplog.records if r.name == "rollpipe"]
    assert len(said) == 1 and said[0].startswith("torch runs the actor: ") and reason in said[0]
    assert capfd.readouterr() == (
        "",
        "",
    )  # torch's exporter prints the graphs that it cannot export


def test_an_actor_that_becomes_one_that_cannot_be_exported(caplog):
    actor = refused("Holding")
    actor.extra = lambda obs: 0.0  # in the place of what its class does
    auto, torchs, strict = streams(actor, engines=("auto", "torch", "onnxruntime"))
    for stream in (auto, torchs, strict):
        next(stream)
    del actor.extra
    assert_close(next(auto), next(torchs))
    with pytest.raises(ActorError, match="reads a tensor that is no input"):
        next(strict)
    assert "torch runs the actor: Holding.step" in caplog.text


def test_a_graph_that_answers_differently_is_refused(monkeypatch):
    actor = Slow()
    other = Slow()
    other.shifts = [9.001]
    made = compiled.PureStep
    monkeypatch.setattr(compiled, "PureStep", lambda actor, inputs: made(other, inputs))
    other.load_state_dict(actor.state_dict())
    with pytest.raises(
        ActorError, match=r"leaf info\['dist'\]: Slow.step answers differently in ONNX Runtime"
    ):
        next(streams(actor)[1])


def test_small_numbers_beside_large_ones_may_differ_by_the_rounding_of_these():
    "Values of some thousand, as after a training, have a rounding of 1e-4; infinite ones stand for forbidden actions."
    q = torch.tensor([[3000.0, -math.inf, 0.01], [math.nan, -2000.0, 4.0]])
    other = torch.tensor([[0.0, 0.0, 2e-3], [0.0, 0.0, 0.0]])

    def check(came, wanted=q):
        compiled.check_answers("Some", (came.numpy(), (), ()), (wanted, (), ()))

    check(q + other)
    for came in (
        q + 30 * other,
        q[:, :2],
        torch.where(q == -math.inf, -3e38, q),
        q.double(),
        q.nan_to_num(nan=4.0),
    ):
        with pytest.raises(ActorError, match="Some.step answers differently"):
            check(came)
    with pytest.raises(ActorError, match="differently"):
        check(torch.tensor([900_000, 1]), torch.tensor([900_000, 2]))


def test_an_engine_that_is_unknown_or_not_installed(monkeypatch, caplog):
    actor = MLPPolicy.for_env("CartPole-v1")
    with pytest.raises(
        DataError,
        match=r"EnvStepper, leaf engine: unknown engine. Expected 'torch' or 'onnxruntime' or 'auto', got 'jit'",
    ):
        rollouts("CartPole-v1", actor, engine="jit")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ImportError, match=r"needs onnxruntime and onnx: pip install 'rollpipe\[fast\]'"
    ):
        rollouts("CartPole-v1", actor, engine="onnxruntime")
    with pytest.raises(ImportError, match=r"pip install 'rollpipe\[fast\]'"):
        open_session(b"")  # as by a resume of a run that began with it
    auto, torchs = streams(actor := MLPPolicy.for_env((STATE, ACTS)), engines=("auto", "torch"))
    assert_equal(next(auto), next(torchs))
    assert "pip install 'rollpipe[fast]'" in caplog.text


# Loops, workers, learners


@pytest.mark.slow_but_one
@pytest.mark.parametrize("cls", [MLPPolicy, RecurrentPolicy])
def test_the_stream_does_not_depend_on_the_number_of_workers(cls):
    found = []
    for n_workers in (0, 1, 2):
        actor = cls.for_env((STATE, ACTS), seed=0)
        pipe = rollouts(Dreams, actor, n_envs=2, n_steps=8, lanes=4, seed=3, engine="onnxruntime")
        torch.manual_seed(0)
        with DataLoader2(
            pipe, reading_service=ProcessReading(n_workers) if n_workers else None
        ) as loader:
            batches = []
            for _, batch in zip(range(4), loader):
                batches.append(nested.map(torch.clone, batch))
                learn(actor)
        found.append(batches)
    for other in found[1:]:
        assert_equal(other, found[0])


def test_virtual_reactions_are_those_of_torch(monkeypatch):
    "torch answers only what is virtual: once for the structure, and per fragment for the look-ahead and for the truncated ends."
    actor = MLPPolicy.for_env((STATE, ACTS), seed=0)
    asked = []
    answer = CheckedActor.answer

    def noted(self, seen, hx, virtual=False):
        asked.append(virtual)
        return answer(self, seen, hx, virtual)

    monkeypatch.setattr(CheckedActor, "answer", noted)
    stream = streams(actor)[1]
    next(stream)
    assert all(asked)
    asked.clear()
    batch = next(stream)
    assert asked == [True] * (1 + bool(len(batch.final.t)))


def test_sticky_environments_vectors_and_the_deterministic_action():
    actor = MLPPolicy.for_env("CartPole-v1", seed=0)
    learn(actor)
    for kwargs in (
        dict(sticky=12),
        dict(vector="sync"),
        dict(explore=False),
        dict(vector="vector_entry_point"),
    ):
        wanted, came = (
            iter(
                FragmentCollector(
                    EnvStepper("CartPole-v1", actor, 3, seed=0, engine=e, **kwargs), 36
                )
            )
            for e in ("torch", "onnxruntime")
        )
        for _ in range(2):
            assert_close(next(came), next(wanted), 1e-4)


def test_a_pipeline_that_has_run_can_be_copied_pickled_and_forked():
    actor = RecurrentPolicy.for_env((STATE, ACTS), seed=0)
    pipe = rollouts(Dreams, actor, n_envs=2, n_steps=8, lanes=2, seed=3, engine="onnxruntime")
    first = next(iter(pipe))
    assert list(copy.deepcopy(actor).state_dict()) == list(actor.state_dict())
    assert pickle.loads(pickle.dumps(actor)).training == actor.training
    assert all(
        isinstance(p, torch.nn.Parameter) for m in actor.modules() for p in m._parameters.values()
    )
    assert_equal(next(iter(copy.deepcopy(pipe))), first)
    assert_equal(next(iter(pickle.loads(pickle.dumps(pipe)))), first)
    running = iter(pipe)
    next(running)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        theirs = pool.apply(_leaves_of_next, [pipe])
    for x, y in zip(theirs, nested.leaves(first)):
        assert np.array_equal(x, y.numpy())
    next(running)


def _leaves_of_next(pipe):
    return [x.numpy() for x in nested.leaves(next(iter(pipe)))]


def test_one_thread_and_sequential():
    options = compiled.open_session(to_onnx(PureStep(*_example()))).get_session_options()
    assert options.intra_op_num_threads == options.inter_op_num_threads == 1
    assert options.execution_mode == onnxruntime.ExecutionMode.ORT_SEQUENTIAL


def _example():
    actor = MLPPolicy.for_env((STATE, ACTS), seed=0)
    return actor, (
        (
            torch.zeros(1, 2, dtype=torch.long),
            torch.zeros(1, 2, 4),
            torch.zeros(1, 2, dtype=torch.long),
            torch.zeros(1, 2),
            torch.zeros(1, 2, dtype=torch.bool),
        ),
        (),
        actor.draw_noise((1, 2)),
    )


def test_convolutions_are_counted_and_large_ones_run_with_torch(caplog):
    obs = Box(0, 255, (84, 84, 4), np.uint8)
    actor = MLPPolicy.for_env((obs, ACTS), seed=0, encoder={"images": "conv"})
    names = {}
    for n_envs in (1, 4):
        envs = env_batch(
            env_factories(lambda: Dreams(obs, ACTS), n_envs),
            np.random.SeedSequence(1),
            pipe="loop",
            lane=0,
        )
        engine = Interaction(actor, envs, np.random.SeedSequence(2), engine="auto").start().engine
        names[n_envs] = engine.name
        if n_envs == 1:
            assert (
                engine.convolutions
                == 20 * 20 * 32 * 8 * 8 * 4 + 9 * 9 * 64 * 4 * 4 * 32 + 7 * 7 * 64 * 3 * 3 * 64
            )
    assert names == {1: "onnxruntime", 4: "torch"} and "convolutions so large" in caplog.text
