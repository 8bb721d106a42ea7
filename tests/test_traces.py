"""Every planted change of a training is told at its leaf, and a difference is found in its update.

Equal trainings are equal everywhere.
"""

import errno
import functools
import json
import logging
import os
import platform
import re
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from command_line import rollpipe as command
from gallery import (
    content,
    gone_on,
    in_a_process,
    interrupted,
    killed_in,
    quietly,
    refused,
    updates_of,
)
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

import rollpipe
from rollpipe.agents import PPO
from rollpipe.agents.checkpoint import kept_checkpoints
from rollpipe.layers import Critic, MLPPolicy
from rollpipe.pipes import Lanes, Pipe, Tap, on_policy
from rollpipe.pipes.data.errors import DataError, EnvError
from rollpipe.pipes.data.nested import first_difference
from rollpipe.runs.folder import discard, load_run, resume, start
from rollpipe.runs.fork import fork
from rollpipe.runs.locks import owner_of, unlock
from rollpipe.runs.logs import read_records
from rollpipe.runs.moments import numbers, verify
from rollpipe.runs.training import Wish, train
from rollpipe.settings.config import make_config
from rollpipe.traces import fingerprint as module
from rollpipe.traces import journal as journals
from rollpipe.traces.differences import FINGERPRINTS, JOURNAL, diff, read_fingerprints
from rollpipe.traces.fingerprint import Description, Fingerprint, fingerprint
from rollpipe.traces.journal import Journal, cut, read_journal

# -- planted changes ---------------------------------------------------------------------------------------------------


def made(
    hidden=(8,),
    activation=torch.nn.Tanh,
    env_kwargs=None,
    nudge=None,
    edit=None,
    pipeline=None,
    **options,
):
    "The fingerprint of a small training."
    env = dict(env_kwargs=env_kwargs)
    collection = {"n_envs": 2, "n_steps": 8, "seed": 0, **(pipeline or {}), **env}
    actor = MLPPolicy.for_env("CartPole-v1", seed=0, hidden=hidden, activation=activation, **env)
    critic = Critic.for_env("CartPole-v1", seed=1, hidden=(8,), **env)
    if nudge:
        with torch.no_grad():
            x = dict(actor.named_parameters(), **dict(critic.named_buffers()))[nudge].view(-1)
        x.data[0] = torch.nextafter(x[0].detach(), torch.tensor(9.0))
    pipe = on_policy("CartPole-v1", actor, critic, **collection)
    return fingerprint(pipe if edit is None else edit(pipe), PPO(actor, critic, **options))


OPTIONS = dict(
    clip=0.1,
    epochs=2,
    minibatch=8,
    lr=1e-4,
    critic_lr=1e-4,
    max_grad_norm=None,
    c_entropy=0.01,
    c_value=0.4,
    clip_value=0.2,
    target_kl=0.1,
    normalize_adv="minibatch",
    decay_steps=1000,
)


@pytest.fixture(scope="module")
def base():
    return made()


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_of_the_learner_is_told(base, name):
    assert list(base.differs(made(**{name: OPTIONS[name]}))) == [f"settings/{name}"]


# leaf of the fingerprint -> what is otherwise in the pipeline, and in other parts of the training
OF_PIPELINE = {
    "seeds/Lanes": dict(seed=1),
    "graph/EnvStepper/n_envs": dict(n_envs=3),
    "graph/FragmentCollector/n_steps": dict(n_steps=9),
    "graph/Lanes/n": dict(lanes=2),
    "graph/AdvantageBuffer/gamma": dict(gamma=0.9),
    "graph/AdvantageBuffer/lam": dict(lam=0.9),
    "graph/EnvStepper/sticky": dict(sticky=2),
    "graph/EnvStepper/terminal_obs": dict(terminal_obs=True),
    "graph/EnvStepper/engine": dict(engine="onnxruntime"),
}
OF_TRAINING = {leaf: dict(pipeline=change) for leaf, change in OF_PIPELINE.items()} | {
    "seeds/learner": dict(seed=5),
    "graph/EnvStepper/env_kwargs/max_episode_steps": dict(env_kwargs=dict(max_episode_steps=9)),
    "networks/actor/trunk/n_out": dict(hidden=(9,)),
    "networks/actor/trunk.hidden.1": dict(hidden=(8, 8)),
    "networks/actor/trunk.activation/class": dict(activation=torch.nn.ReLU),
    "weights/actor/trunk.hidden.0.weight": dict(nudge="trunk.hidden.0.weight"),
    "weights/actor/head.logits.bias": dict(nudge="head.logits.bias"),
    "weights/critic/ret_std": dict(nudge="ret_std"),
}


@pytest.mark.parametrize("leaf", OF_TRAINING)
def test_a_change_of_the_training_is_told(base, leaf):
    assert leaf in base.differs(made(**OF_TRAINING[leaf]))


def another():
    return "another"


@pytest.mark.parametrize(
    "leaf, owner, name, value",
    [
        *(
            (f"versions/{package.__name__}", package, "__version__", "0.0.1")
            for package in (rollpipe, torch, gym, np)
        ),
        ("versions/python", platform, "python_version", another),
        ("versions/rollpipe", module, "source_digest", another),
        ("machine/processor", module, "_processor", another),
        ("versions/CartPole-v1/max_episode_steps", gym.spec("CartPole-v1"), "max_episode_steps", 9),
    ],
)
def test_a_version_and_the_machine_are_told(base, leaf, owner, name, value, monkeypatch):
    monkeypatch.setattr(owner, name, value)
    assert list(base.differs(made())) == [leaf]


def test_threads_that_the_user_has_chosen_are_told(base):
    "A number that torch does not begin with is one that the user has chosen."
    before = torch.get_num_threads()
    torch.set_num_threads(before + os.cpu_count())
    try:
        assert list(base.differs(made())) == ["machine/threads"]
    finally:
        torch.set_num_threads(before)


def test_the_engine_of_an_environment_has_its_version(tmp_path, monkeypatch):
    "A package as in site-packages, with an environment that imports another one."
    place = tmp_path / "site-packages"
    texts = dict(
        an_engine="__version__ = '1'",
        its_envs="import an_engine, gymnasium as g\n__version__ = '5'\nclass Env(g.Env): pass",
    )
    for name, text in texts.items():
        (place / name).mkdir(parents=True)
        (place / name / "__init__.py").write_text(text)
    monkeypatch.syspath_prepend(str(place))
    spec = gym.envs.registration.EnvSpec("Its-v0", entry_point="its_envs:Env")
    monkeypatch.setitem(gym.registry, "Its-v0", spec)
    pipe = Pretending()
    before = fingerprint(pipe)
    versions = dict(an_engine="1", its_envs="5")
    assert before.leaves.items() >= {f"versions/{x}": n for x, n in versions.items()}.items()
    monkeypatch.setattr(sys.modules["an_engine"], "__version__", "2")
    module.version_of_package.cache_clear()
    assert list(before.differs(fingerprint(pipe))) == ["versions/an_engine"]


class Pretending(Pipe):
    "A pipe that is said to make environments by their id."

    def __init__(self):
        self.factories = [type("Factory", (), dict(source="Its-v0"))]

    def stream(self, items):
        yield 1


# -- planted changes of code -------------------------------------------------------------------------------------------

FACTOR = 2

TABLE = {"a": 1}


def helper(x):
    return x + 1


def calls(item):
    return helper(item)


def reads(item):
    return item * FACTOR


def looks_up(item):
    return TABLE["a"]


def default(item, by=2):
    return item * by


def keyword(item, *, by=2):
    return item * by


def closure(k):
    return lambda item: item * k


def nested(k):
    return lambda item: [x * k for x in item]


class Scale:
    "Something that is called."

    unit = 1

    def __init__(self, by, of=None):
        self.by, self.of = by, of

    def __call__(self, item):
        return item * self.by

    def method(self, item):
        return item


class Child(Scale):
    def method(self, item):
        return item + 1


def tap(see):
    return made(edit=lambda pipe: Tap.inserter(after=Lanes, see=see)(pipe))


holder = functools.partial(Scale, 1)


def itself(see):
    return see


@pytest.mark.slow_but_one
@pytest.mark.parametrize(
    "make, a, b, leaf",
    [
        (itself, lambda item: item + 1, lambda item: item - 1, ""),
        (itself, lambda item: "a", lambda item: "b", ""),
        (itself, lambda item: item.rew, lambda item: item.obs, ""),
        (itself, lambda item: item in {"a", "b"}, lambda item: item in {"a", "c"}, ""),
        (closure, np.zeros(2), np.ones(2), "/k"),
        (closure, {"a", "b"}, {"a", "c"}, "/k"),
        (closure, [1, 2], [1, 3], "/k/1"),
        (nested, 1, 2, "/k"),
        (lambda by: functools.partial(default, by=by), 3, 4, "/keywords/by"),
        (Scale, 1, 2, "/by"),
        (holder, {"x": 1.0}, {"x": 2.0}, "/of/x"),
        (holder, torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]), "/of"),
        (holder, Scale(1), Scale(2), "/of/by"),
        (holder, torch.float32, torch.float64, "/of"),
        (lambda by: Scale(by).method, 1, 2, "/of/by"),
        (lambda kind: kind(1), Scale, Child, "/class"),
        (itself, len, sum, ""),
        (itself, torch.sum, torch.mean, ""),
        (lambda n: n.__add__, 1, 2, "/of"),
    ],
)
def test_a_change_of_an_edit_is_told(make, a, b, leaf):
    one = tap(make(a))
    assert f"graph/Tap/see{leaf}" in one.differs(tap(make(b))) and not one.differs(tap(make(a)))


def test_a_generator_of_an_edit_is_told_among_the_seeds():
    one, same, other = (tap(holder(np.random.default_rng(seed))) for seed in (1, 1, 2))
    assert "seeds/Tap/see/of" in one.differs(other) and not one.differs(same)


HERE = sys.modules[__name__]


@pytest.mark.parametrize(
    "see, owner, name, value, leaf",
    [
        (calls, HERE, "helper", lambda x: x + 2, "/helper"),
        (reads, HERE, "FACTOR", 3, "/FACTOR"),
        (looks_up, HERE, "TABLE", {"a": 2}, "/TABLE/a"),
        (default, default, "__defaults__", (3,), "/by"),
        (keyword, keyword, "__kwdefaults__", dict(by=3), "/by"),
        (Scale(1), Scale, "__call__", lambda self, item: 0, "/class/__call__"),
        (Scale(1), Scale, "unit", 2, "/class/unit"),
        (Child(1), Scale, "__call__", lambda self, item: 0, "/class/Scale.__call__"),
        (functools.lru_cache(helper), helper, "__code__", (lambda x: x + 2).__code__, ""),
    ],
)
def test_a_change_of_code_and_of_what_it_reads_is_told(see, owner, name, value, leaf, monkeypatch):
    before = tap(see)
    monkeypatch.setattr(owner, name, value)
    assert f"graph/Tap/see{leaf}" in before.differs(tap(see))


class First(Pipe):
    def stream(self, items):
        yield from items


class Second(First):
    pass


def test_a_pipe_its_place_and_its_code_are_told(base, monkeypatch):
    def both(*kinds):
        def edit(pipe):
            for kind in kinds:
                pipe = kind.inserter(after=Lanes)(pipe)
            return pipe

        return made(edit=edit)

    before = both(First)
    told = "graph/AdvantageBuffer/inputs: Lanes != First; graph/First: missing != First"
    assert str(base.differs(before)) == told
    leaves = set(both(First, Second).differs(both(Second, First)))
    assert {"graph/First/inputs", "graph/Second/inputs"} <= leaves
    assert all(leaf.endswith("/inputs") for leaf in leaves)
    monkeypatch.setattr(First, "stream", lambda self, items: iter(items))
    assert set(before.differs(both(First))) == {"graph/First/class/stream"}


def test_what_cannot_be_known_never_equals(base):
    locked = tap(holder({1, threading.Lock()}))
    assert list(locked.differs(locked)) == ["graph/Tap/see/of"] and locked != locked
    unseeded = made(pipeline=dict(seed=None))
    assert set(unseeded.differs(unseeded)) == {"seeds/EnvStepper", "seeds/Lanes"} and base == base


def test_addresses_and_the_order_of_sets_make_no_difference():
    assert not tap(holder(object())).differs(tap(holder(object())))
    assert not tap(closure({"b", "a"})).differs(tap(closure({"a", "b"})))


class Noisy(gym.spaces.Box):
    "A space with a generator of its own, and a text that it makes when it is printed."

    def __init__(self, size):
        super().__init__(0, 1, (size,))
        self.noise = np.random.default_rng()

    @functools.cached_property
    def text(self):
        return f"{self.shape[0]} numbers"

    def __repr__(self):
        return self.text


BOX = functools.partial(gym.spaces.Box, -1, 1)

SPACES = dict(
    Box=BOX,
    Discrete=lambda shape: gym.spaces.Discrete(shape[0]),
    MultiDiscrete=lambda shape: gym.spaces.MultiDiscrete(shape),
    MultiBinary=lambda shape: gym.spaces.MultiBinary(shape),
    Text=lambda shape: gym.spaces.Text(shape[0], charset=frozenset("abcdef")),
    Charset=lambda shape: gym.spaces.Text(9, charset="abcdef"[: shape[0]]),
    Dict=lambda shape: gym.spaces.Dict(a=BOX(shape), b=gym.spaces.Discrete(2)),
    Tuple=lambda shape: gym.spaces.Tuple([BOX(shape), gym.spaces.Discrete(2)]),
    Graph=lambda shape: gym.spaces.Graph(BOX(shape), gym.spaces.Discrete(2)),
    Sequence=lambda shape: gym.spaces.Sequence(BOX(shape), stack=True),
    OneOf=lambda shape: gym.spaces.OneOf([BOX(shape), gym.spaces.Discrete(2)]),
    Noisy=lambda shape: Noisy(shape[0]),
)


@pytest.mark.parametrize("name", SPACES)
def test_a_space_that_was_printed_and_drawn_from_is_described_by_what_it_means(name):
    make = SPACES[name]
    used = make((3,))
    used.seed(5)
    assert used.contains(used.sample()) and str(used)
    fresh, again, other = (tap(holder(dict(goal=x))) for x in (make((3,)), used, make((2,))))
    assert not fresh.differs(again)
    assert fresh.differs(other, "graph")


def lent_single():
    space = gym.spaces.Box(0, 9, (3,))
    return gym.wrappers.TransformObservation(gym.make("Pendulum-v1"), np.abs, space)


def lent_vector():
    return gym.wrappers.vector.RecordEpisodeStatistics(gym.make_vec("Pendulum-v1", 2))


@pytest.mark.parametrize("make", [lent_single, lent_vector])
def test_an_environment_that_somebody_has_looked_at_is_described_as_before(make):
    used = make()
    assert str((used.observation_space, used.action_space, used.spec, used.np_random))
    assert str([(env.spec, env.np_random) for env in getattr(used.unwrapped, "envs", ())])
    assert not tap(holder(make())).differs(tap(holder(used)))


PROGRAM = """
import json, torch
torch.set_num_threads(1)
import test_traces
print(json.dumps([x.leaves for x in test_traces.several()]))
"""


def several():
    edits = closure({"a", "b", "c", (1, "x")}), Scale(1, {Scale, Child}), calls
    return made(), *map(tap, edits), made(edit=First.inserter(after=Lanes))


@pytest.mark.slow
def test_two_processes_agree():
    "With another seed of hashes, and so another order of sets; and with other addresses."
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    for leaves, here in zip(json.loads(done.stdout), several(), strict=True):
        assert not Fingerprint(leaves).differs(here)


# -- runs --------------------------------------------------------------------------------------------------------------

SMALL = dict(lanes=2, n_envs=3, n_steps=256, epochs=1, engine="torch")


def configured(algorithm="ppo", steps=6000, options=None, env="CartPole-v1", **run):
    options = SMALL if options is None else {"engine": "torch", **options}
    return make_config(algorithm, env, options, steps=steps, **run)


def trained(folder, *args, edits=(), **kwargs):
    return quietly(start(folder, configured(*args, **kwargs)), *edits).folder


def journal_of(folder):
    return read_journal(folder / JOURNAL)


def updates_in(path):
    "The updates that have a line in the journal."
    return [entry.updates for entry in read_journal(path)]


NUDGE = dict(after=Lanes, item=5, at=(77, 2, 1))


class Nudge(Pipe):
    "Changes one number of one observation of an item by one unit in the last place."

    reads = 1

    def __init__(self, pipe, item, at):
        super().__init__(pipe)
        self.item, self.at = item, at

    def stream(self, items):
        for n, item in enumerate(items):
            if n == self.item:
                number = item.state.obs[self.at]
                number.copy_(torch.nextafter(number, torch.tensor(9.0)))
            yield item


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("whole") / "run")


@pytest.mark.slow
def test_one_unit_in_the_last_place_is_found(whole, tmp_path):
    """The sixth item is lane 1's part of the third update.

    Its columns 3, 4 and 5 of the batch are the environments 0, 1 and 2.
    """
    nudge = Nudge.inserter(**NUDGE)
    other = trained(tmp_path / "run", edits=[nudge])
    difference = diff(whole, other)
    at = difference.parting
    assert (at.after, at.by, at.leaves[0], at.place) == (2, 3, ".state.obs", (77, 5, 1, 2))
    assert str(difference).endswith(
        "update 3: .state.obs differs first (row 77, column 5: lane 1, environment 2 of it), "
        "the weights were equal before: collection differs"
    )
    assert list(difference.fingerprints) == ["graph/AdvantageBuffer/inputs", "graph/Nudge"]
    assert str(verify(whole, 2)) == "fingerprints are equal\nall updates are equal up to 2"
    assert verify(other, 3).parting.by == 3 and verify(other, 3, nudge).is_equal


LEARNING_DIFFERS = "the weights of actor, critic differ, and the batches do not: learning differs"


@pytest.mark.slow
def test_a_change_in_learning_is_told_from_one_in_collection(whole, tmp_path):
    run = start(tmp_path / "run", configured())

    def callback(run, record):
        if record["updates"] == 2:
            run.agent.lr = run.agent.optimizer.param_groups[0]["lr"] = 0.01

    quietly(run, callbacks=[callback])
    parting = diff(whole, run.folder).parting
    assert str(parting) == f"update 3: {LEARNING_DIFFERS}"
    refused("does not repeat here", numbers, whole, run.folder, parting)


OF_DQN = dict(warmup=100)
SLOWER = dict(lr=1e-4)
SLOWER_PPO = dict(options={**SMALL, **SLOWER})
SLOWER_DQN = dict(options={**OF_DQN, **SLOWER})


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm, steps, options, change, told",
    [
        ("ppo", 1536, SMALL, dict(seed=3), r"update 1: batch\.state\.obs\[0, 0, 0\]"),
        (
            "ppo",
            1536,
            SMALL,
            SLOWER_PPO,
            r"the weights after it: \['actor'\]\['head\.logits\.bias'\]\[0\]",
        ),
        ("dqn", 4200, OF_DQN, SLOWER_DQN, r"update \d+: batch\.actor\['q'\]\[0, 0, 0\]"),
    ],
)
def test_both_numbers_are_told_when_both_runs_make_them_once_more(
    algorithm, steps, options, change, told, tmp_path
):
    a = trained(tmp_path / "a", algorithm, steps, options)
    b = trained(tmp_path / "b", algorithm, steps, **{"options": options, **change})
    at = diff(a, b).parting
    both = re.fullmatch(told + r": (\S+) != (\S+)", numbers(a, b, at))
    assert both and float(both[1]) != float(both[2])
    assert numbers(a, a, at) == "the updates are equal when they are made once more"


@pytest.mark.slow
def test_small_batches_have_lines_by_steps_and_at_checkpoints(tmp_path):
    a = trained(tmp_path / "a", "dqn", 10_000, OF_DQN, checkpoint_every=1000)
    lines = journal_of(a)
    assert [e.steps for e in lines if e.place] == [4096, 8192]
    assert [e.updates for e in lines] == [128, 256, 313]
    b = trained(tmp_path / "b", "dqn", 10_000, **SLOWER_DQN, checkpoint_every=50)
    at = diff(a, b).parting
    assert (at.after, at.by) == (0, 128) and "collection" not in str(at)
    assert str(at).startswith("between the updates 1 and 128: .state.")


@pytest.mark.slow
def test_the_weights_after_the_last_of_small_batches_are_compared(tmp_path):
    "They are in no batch that follows. A run of so few steps has no regular line."
    options = dict(n_envs=2, n_steps=16)
    a = trained(tmp_path / "a", "ppo", 320, options)
    assert [(e.updates, e.place) for e in journal_of(a)] == [(10, None)]
    b = gone_on(fork(a, tmp_path / "b", 9, lr=0.5)).folder
    assert not diff(a, b).is_equal
    assert str(diff(a, b)).endswith(f"update 10: {LEARNING_DIFFERS}")
    other = trained(tmp_path / "other", "ppo", 320, {**options, "lr": 1e-2}, checkpoint_every=1)
    same = trained(tmp_path / "same", "ppo", 320, options, checkpoint_every=1)
    assert str(diff(same, other).parting) == f"update 1: {LEARNING_DIFFERS}"
    assert verify(a, 10).is_equal and diff(a, same).is_equal


@pytest.mark.slow
def test_an_interrupted_journal_goes_on_as_if_nothing_had_been(whole, tmp_path):
    run = start(tmp_path / "run", configured())
    unlock(run.folder)
    interrupted(run.folder, 2)
    path = run.folder / JOURNAL
    before = path.read_text()
    assert before == "".join((whole / JOURNAL).read_text().splitlines(True)[:2])
    path.write_text(before + before[:40])  # killed while it wrote a line
    gone_on(run.folder)
    assert path.read_bytes() == (whole / JOURNAL).read_bytes() and verify(run.folder, 9).is_equal


@pytest.mark.slow_but_one
@pytest.mark.parametrize("lacks", [{}, dict(RND={})])
def test_a_training_that_has_ended_is_resumed_and_not_trained_again(lacks, tmp_path):
    "Its folder is not locked any more. It was interrupted, or it could not begin."
    run = start(tmp_path / "run", configured(steps=3072))

    def callback(run, record):
        raise KeyboardInterrupt

    error = DataError if lacks else KeyboardInterrupt
    refused("", quietly, run._replace(waiting=lacks), callbacks=[callback], error=error)
    refused("this training has ended. Expected .*resume", quietly, run)
    gone_on(run.folder)
    assert verify(run.folder, 9).common == 2


@pytest.mark.slow
def test_small_batches_go_on_in_the_middle_of_a_line(tmp_path):
    options = ("a2c", 9000, dict(n_envs=4, n_steps=32))
    whole = trained(tmp_path / "whole", *options)
    folder = start(tmp_path / "run", configured(*options)).folder
    unlock(folder)
    interrupted(folder, 43)
    gone_on(folder)
    a = {e.updates: e for e in journal_of(whole)}
    b = {e.updates: e for e in journal_of(folder)}
    added = b.pop(43)
    assert added.updates not in a and {32, 64} < a.keys()
    assert a == b


@pytest.mark.slow
def test_new_episodes_are_told(whole, tmp_path):
    run = start(tmp_path / "run", configured(steps=3072))
    quietly(run._replace(stream=None))  # the checkpoint has no state of the stream
    gone_on(run.folder, steps=6000)
    resumes = [(e.updates, e.resumes) for e in journal_of(run.folder)]
    assert resumes == [(1, 0), (2, 0), (3, 1), (4, 1)]
    difference = diff(whole, run.folder)
    assert difference.parting.by == 3
    assert difference.notes == [f"{run.folder} was resumed after update 2, with new episodes"]
    assert verify(run.folder, 9).common == 2


@pytest.mark.slow
def test_a_resumed_run_says_what_changed(tmp_path, monkeypatch, caplog):
    run = trained(tmp_path / "run", steps=1536)
    with caplog.at_level(logging.WARNING, "rollpipe"):
        gone_on(run, steps=3072)
        assert not caplog.records and list(read_fingerprints(run)) == [0]
        monkeypatch.setattr(np, "__version__", "9.9")
        gone_on(run, steps=4608)
    assert f"{run} goes on, but not as it was: versions/numpy: " in caplog.text
    assert caplog.text.strip().endswith("!= 9.9")
    assert list(read_fingerprints(run)) == [0, 2]
    (run / FINGERPRINTS).write_text("{")
    refused("fingerprint.json: damaged", read_fingerprints, run)


def of_a_process(folder, **run):
    return start(folder, configured(env="OfAProcess-v0", **run))


def test_an_exact_run_of_small_batches_does_not_go_on_otherwise(tmp_path):
    """Its journal has a line at a checkpoint.

    The line that differed was written at the second try, at the end, and so was the checkpoint.
    """
    folder = tmp_path / "run"
    about = dict(options=TINY, steps=160, checkpoint_every=2, keep=9, exact=True)
    in_a_process(lambda: quietly(of_a_process(folder, **about)))
    first = min((folder / "checkpoints").iterdir())
    for path in (first, folder):
        refused(f"leaf exact: .* {OTHERWISE}", lambda path=path: gone_on(path))
        assert updates_of(folder) == 2


# -- a run that goes on otherwise in a new process ---------------------------------------------------------------------

TINY = dict(SMALL, n_steps=8)  # 48 steps in an update

REPLAYED = dict(n_envs=2, warmup=100, engine="torch")


OTHERWISE = "does not go on as it did before"


def until(update):
    return lambda run, record: Wish(stop=record["updates"] == update)


@pytest.mark.slow_but_one
@pytest.mark.parametrize(
    "options, killed, every, last, told",
    [
        # It is told in the first row after the state that was restored.
        (
            SMALL,
            5,
            2,
            8,
            "update 5: .state.obs differs first (row 1, column 0: lane 0, environment 0 of it)",
        ),
        (TINY, 9, 6, 12, "update 7: .state.obs differs first"),
    ],
)
def test_the_first_update_that_differs_is_named(
    options, killed, every, last, told, tmp_path, caplog
):
    "Updates that were made before are made once more, and their numbers are others."
    folder = tmp_path / "run"
    about = dict(options=options, steps=12_000, checkpoint_every=every)
    killed_in(killed, lambda: of_a_process(folder, **about))
    run = resume(folder)
    assert run.history.inexact is None
    quietly(run, callbacks=[until(last)])
    (message,) = [x for x in caplog.messages if "before" in x]
    assert message.startswith(f"{folder} {OTHERWISE}: {told}")
    assert message.endswith(", the weights were equal before: collection differs")
    first = int(re.search(r"update (\d+)", told)[1])
    inexact = [record.get("inexact", 0) for record in read_records(folder)]
    assert inexact == [0] * (first - 1) + [1] * (last - first + 1)


@pytest.mark.slow_but_one
@pytest.mark.parametrize(
    "algorithm, options, every, update, run",
    [
        ("ppo", SMALL, 2, 5, {}),
        ("ppo", TINY, 2, 3, {}),
        ("ppo", TINY, 1, 2, {}),
        ("ppo", TINY, 20, 39, {}),
        ("ppo", TINY, 1000, 37, {}),
        ("ppo", TINY, 2, 3, dict(workers=2)),
        ("ppo", dict(SMALL, n_steps=160), 3, 5, {}),
        ("dqn", REPLAYED, 2, 3, {}),
        ("dqn", REPLAYED, 5, 9, dict(workers=1, lag=1)),
    ],
)
def test_a_process_that_differs_is_found_for_any_size_of_updates_and_distance_of_checkpoints(
    algorithm, options, every, update, run, tmp_path, caplog
):
    """The newest update of a killed run is in its journal, also far from a regular line.

    If its first update differs, it stays as it was.
    """
    folder = tmp_path / "run"
    about = dict(algorithm=algorithm, options=options, checkpoint_every=every, **run)
    killed_in(update, lambda: of_a_process(folder, steps=9000, exact=True, **about))
    assert journal_of(folder)[-1].updates == update
    assert updates_of(folder) == (update - 1) // every * every
    (folder / "lock").unlink()
    before = content(folder)
    for _ in range(2):
        refused(f"leaf exact: .* {OTHERWISE}: .*update", gone_on, folder)
        if options is SMALL:  # otherwise updates before the one that differs may be equal
            assert content(folder) == before
    inexact = resume(folder)
    inexact.config["exact"] = False
    about = dict(progress=False, tensorboard=False, callbacks=[until(update)])
    assert train(inexact, **about)["inexact"] == 1
    assert caplog.text.count(OTHERWISE) == 1


def test_a_learner_that_differs_after_a_small_update_does_not_blame_collection(tmp_path, caplog):
    "The weights after a small update are compared by what comes of them, so it may be either of two updates."
    run = start(tmp_path / "run", configured(options=TINY, steps=9000, checkpoint_every=6))
    killed_in(9, lambda: run)
    again = resume(run.folder)
    update = again.agent.update

    def other_update(batch):
        metrics = update(batch)
        torch.nn.init.constant_(next(again.agent.actor.parameters()), 0.0)
        return metrics

    again.agent.update = other_update
    quietly(again, callbacks=[until(12)])
    (message,) = [x for x in caplog.messages if "before" in x]
    assert "between the updates 7 and 9: .state." in message and "collection" not in message


@pytest.mark.slow
def test_what_was_not_compared_yet_outlives_another_kill(tmp_path, caplog):
    "And the journal of the run, which has been killed three times, is that of its twin."
    options = dict(steps=2400, options=TINY, checkpoint_every=6)
    whole = trained(tmp_path / "whole", **options)
    folder = tmp_path / "run"
    path = folder / JOURNAL
    killed_in(9, lambda: start(folder, configured(**options)))
    killed_in(8, lambda: resume(folder))
    assert updates_in(path)[-1] == 9
    killed_in(17, lambda: resume(folder))
    assert updates_in(path) == [6, 12, 13, 14, 15, 16, 17]
    gone_on(folder)
    assert not caplog.messages
    assert path.read_bytes() == (whole / JOURNAL).read_bytes()


def test_a_resume_that_fails_leaves_the_lock_of_a_run_that_has_begun(tmp_path):
    run = start(tmp_path / "run", configured(steps=3072))
    refused("workers", resume, run.folder, workers=50)
    assert owner_of(run.folder) == str(os.getpid())
    discard(run)
    assert not owner_of(run.folder)


@pytest.mark.slow_but_one
@pytest.mark.parametrize("exact", [True, False])
def test_an_exact_run_that_is_stopped_within_a_batch_keeps_its_checkpoint(
    whole, tmp_path, monkeypatch, exact
):
    "Then it goes on from there. Others begin new episodes after the last complete update."
    run = start(tmp_path / "run", configured(checkpoint_every=2, exact=exact))
    broken = []

    def step(self, action, step=CartPoleEnv.step):
        if broken:
            raise RuntimeError("planted")
        return step(self, action)

    def callback(run, record):
        broken.extend([1] * (record["updates"] == 3))

    with monkeypatch.context() as patch:
        patch.setattr(CartPoleEnv, "step", step)
        refused("planted", quietly, run, callbacks=[callback], error=EnvError)
    checkpoint = load_run(run.folder)
    expected = (True, 2) if exact else (False, 3)
    assert (checkpoint.stream is not None, checkpoint.counters["updates"]) == expected
    gone_on(run.folder)
    assert (diff(whole, run.folder).parting is None) == exact


@pytest.mark.slow
def test_an_exact_run_is_not_resumed_from_its_best_checkpoint(tmp_path, caplog):
    "It has no state of the stream. What the message names goes on from there."
    evaluated = dict(eval_every="1536 steps", eval_episodes=1, final_episodes=1)
    run, other = (
        trained(tmp_path / name, steps=1600, exact=name == "exact", **evaluated)
        for name in ("exact", "other")
    )
    before = (run / "checkpoint.safetensors").read_bytes()
    told = "exact: .* cannot go on exactly.* `rollpipe fork .*best.* got the best checkpoint has no"
    error = refused(told, resume, run / "best.safetensors", steps=3000)
    words = re.search("`rollpipe (.* --out) OUT`", str(error))[1]
    assert (run / "checkpoint.safetensors").read_bytes() == before
    out = tmp_path / "out"
    assert command(f"{words} {out} --steps 3000") == 0
    gone_on(out)
    assert load_run(out).stream and diff(run, out).is_equal
    resume(other / "best.safetensors", steps=3000)
    told = "The run begins new episodes: the best checkpoint has no state of the stream"
    assert caplog.messages[-1] == told


def test_a_run_without_a_journal_begins_one(whole, tmp_path):
    run = trained(tmp_path / "run", steps=3072)
    for name in (JOURNAL, FINGERPRINTS):
        (run / name).unlink()
    gone_on(run, steps=4608)
    assert [(e.updates, e.since) for e in journal_of(run)] == [(3, 2)]
    told = "no fingerprint to compare\nthe journals have no line of the same update"
    assert str(diff(whole, run)) == told
    refused("a journal from the first update on", verify, run)


@pytest.mark.slow
def test_a_journal_that_has_lost_lines_is_told_and_not_called_equal(whole, tmp_path, caplog):
    run = trained(tmp_path / "run", steps=4608, keep=9, checkpoint_every=1)
    path = run / JOURNAL
    lines = path.read_text().splitlines(True)
    path.write_text(lines[0])
    told = "lost lines of its journal. Expected at most 1, got 20, and checksums of the updates up to 1 of 3"
    refused(told, verify, run)
    assert verify(run, 1).common == 1 and not caplog.messages

    # What is trained further has a gap.
    gone_on(run, steps=6000)
    told = f"{path} has lost what comes after update 1; its checksums begin anew after update 3"
    assert caplog.messages == [told]
    assert [(e.updates, e.since) for e in journal_of(run)] == [(1, 0), (4, 3)]
    refused("checksums of the updates up to 1 of 4", verify, run, 60)
    assert verify(run, 1).common == 1

    # The journal still reaches the first checkpoint.
    caplog.clear()
    first, *_ = kept_checkpoints(run / "checkpoints").values()
    gone_on(first, steps=6000)
    assert path.read_text() == (whole / JOURNAL).read_text() and not caplog.messages
    assert verify(run, 60).common == 4


# -- the file ----------------------------------------------------------------------------------------------------------


START = dict(updates=0, steps=0, resumes=0)


def learned(journal, k):
    "Write an update of 2048 steps into a journal."
    journal.saw(dict(x=np.full(3, k)), 2048 * k)
    journal.learned(dict(START, updates=k, steps=2048 * k))


def written(path, n, begin=0):
    counters = dict(START, updates=begin, steps=2048 * begin)
    with Journal(path, counters, dict(net=torch.nn.Identity())) as journal:
        for k in range(begin + 1, begin + n + 1):
            learned(journal, k)
    return path.read_text()


def test_every_damage_is_named(tmp_path):
    path = tmp_path / JOURNAL
    text = written(path, 6)
    first, second, third, *others = text.splitlines(True)

    # One letter of the third line, or all of it
    for k in range(0, len(first) - 1, 7):
        for letter in "5x":
            letter = letter if third[k] != letter else "6"
            damaged = third[:k] + letter + third[k + 1 :]
            path.write_text("".join([first, second, damaged, *others]))
            refused("journal.jsonl, line [34]: damaged", read_journal, path)
    path.write_text("".join([first, second, *others]))
    refused("line 3: damaged, or a line before it is missing", read_journal, path)

    # A kill at any byte is no damage
    for k in range(len(third)):
        path.write_text(first + second + third[:k])
        assert updates_in(path) == [1, 2]
    cut(path, 1)
    assert path.read_text() == first and updates_in(path) == [1]
    assert written(path, 5, begin=1) == text


def test_a_full_disk_ends_the_training_and_leaves_a_journal_that_goes_on(tmp_path):
    path = tmp_path / JOURNAL
    with pytest.raises(OSError, match="No space") as e, Journal(path, START, {}) as journal:
        learned(journal, 1)
        journal.file = Full(journal.file)
        learned(journal, 2)
    assert e.value.filename == str(path) and updates_in(path) == [1]

    # A part of the second line was written.
    text = path.read_text()
    assert text.count("\n") == 1 and text[-1] != "\n"
    written(path, 2, begin=1)
    assert updates_in(path) == [1, 2, 3]


class Full:
    "A file that has room for a few more bytes."

    def __init__(self, file):
        self.file, self.name = file, file.name

    def write(self, text):
        self.file.write(text[:9])

    def flush(self):
        self.file.flush()
        raise OSError(errno.ENOSPC, "No space left on device")

    def close(self):
        self.file.close()


def test_an_update_that_fails_does_not_count(tmp_path):
    with Journal(tmp_path / "other", START, {}) as journal:
        learned(journal, 1)
        journal.mark()
    with pytest.raises(ValueError), Journal(tmp_path / JOURNAL, START, {}) as journal:
        learned(journal, 1)
        try:
            journal.saw(dict(x=np.zeros(3)), 20)
            raise ValueError
        finally:
            journal.mark()
    (entry,) = read_journal(tmp_path / JOURNAL)
    assert entry == read_journal(tmp_path / "other")[0] and entry.updates == 1


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.bfloat16, torch.float16, torch.float64, torch.complex64],
)
def test_places_and_checksums_of_every_dtype(dtype):
    x = torch.ones(4, 2, 3).to(dtype)
    y = x.clone()
    y[2, 1, 0] = 0
    assert journals.running(0, x) != journals.running(0, y)
    assert first_difference(x, y).at == (2, 1, 0)
    sums = journals._sums(dict(x=x)) != journals._sums(dict(x=y))
    assert np.argwhere(sums).tolist() == [[2, 1]]


# --- objects among the arguments of an environment


class Table:
    """As a table of pandas: cells of any kind, and a reference to itself.

    Its index is made when it is first asked for.
    """

    def __init__(self, last=1.5):
        self.cells = np.array(["a", None, last], dtype=object)
        self.owner = weakref.ref(self)
        self.index = None

    def __getstate__(self):
        return dict(cells=self.cells)

    def find(self, cell):
        if self.index is None:
            self.index = {x: i for i, x in enumerate(self.cells)}
        return self.index[cell]


class Linked:
    "Two objects that refer to each other."

    def __init__(self, value):
        self.value = value
        self.other = Other(self)


class Other:
    def __init__(self, owner):
        self.owner = weakref.ref(owner)
        self.gone = weakref.ref(Table())


def looped(last):
    cells = np.array([1, last, None], dtype=object)
    cells[2] = cells
    return cells


def with_references(value):
    keys = [Linked(k) for k in range(2)]
    return keys, weakref.WeakKeyDictionary({key: value + k for k, key in enumerate(keys)})


def record(cell):
    return np.array([(1, cell)], dtype=[("n", int), ("o", object)])


# name -> what makes an object, and the values of two that differ
TABLES = {
    "table": (Table, 1.5, 2.5),
    "many cells": (lambda x: np.array([*map(str, range(29_999)), x], object), "29999", "x"),
    "objects in objects": (
        lambda last: np.array([Linked(k) for k in [*range(59), last]], object),
        59,
        7,
    ),
    "records": (record, "a", "b"),
    "one record": (lambda cell: record(cell)[0], "a", "b"),
    "times": (lambda begin: np.arange(begin, begin + 5, dtype="M8[s]"), 0, 1),
    "time": (lambda n: np.datetime64(n, "s"), 3, 4),
    "references": (Linked, 1, 2),
    "keys": (with_references, 1, 2),
    "tuples as keys": (lambda k: {(0, k): 2}, 1, 2),
    "in itself": (looped, 0, 1),
}


def described(x):
    description = Description()
    description.add("x", x)
    return description.leaves


@pytest.mark.parametrize("name", TABLES)
def test_tables_and_references_are_known(name):
    make, a, b = TABLES[name]
    leaves = described(make(a))
    assert leaves == described(make(a)) != described(make(b))
    assert not any("unknown" in text for text in [*leaves, *leaves.values()]), leaves


def test_what_a_table_has_remembered_is_no_change():
    table = Table()
    before = described(table)
    table.find("a")
    assert described(table) == before


class Times:
    "As times of pandas: what is pickled has what was remembered."

    def __init__(self, n=3):
        self.cache = {}
        self.n = n

    def __reduce__(self):
        state = (np.arange(self.n), *([dict(_cache=self.cache)] if self.cache else []))
        return Times, (), state


def test_what_is_pickled_with_its_cache():
    times = Times()
    before = described(times)
    times.cache["unit"] = 9
    assert described(times) == before != described(Times(4))


class WithTable(CartPoleEnv):
    def __init__(self, table):
        super().__init__()
        self.table = table


def test_a_run_whose_environment_has_a_table(tmp_path, caplog):
    "It goes on as it was, and a changed cell is named."
    table = Table()
    gym.register("WithTable-v0", WithTable, kwargs=dict(table=table), max_episode_steps=50)
    options = dict(n_steps=16, n_envs=1, lanes=1, hidden=(4,))
    try:
        folder = trained(tmp_path / "run", "ppo", 32, options, "WithTable-v0", seed=0)
        caplog.clear()
        gone_on(folder, steps=64)
        assert "not as it was" not in caplog.text
        table.cells[2] = 2.5
        gone_on(folder, steps=96)
        assert "not as it was" in caplog.text and "table" in caplog.text
    finally:
        gym.registry.pop("WithTable-v0")
