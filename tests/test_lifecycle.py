"Every pipe, from its first item to its last: iterated twice, copied, pickled, traversed, broken off, failed, collected."

import gc
import pickle
from functools import partial
from itertools import islice
from pathlib import Path

import gymnasium as gym
import pytest
import torch
from forked import run_forked
from reference import assert_same, snapshot
from toys import Counting, Failing, Learning, Ledger, Limit, Lively, Shaky

from rollpipe.layers import Critic, GaussianPolicy, MLPPolicy
from rollpipe.pipes import (
    AdvantageBuffer,
    EnvError,
    EnvStepper,
    FragmentCollector,
    FragmentStacker,
    Lanes,
    Minibatcher,
    on_policy,
)
from rollpipe.pipes.data.errors import PipeError
from rollpipe.pipes.data.fragment import Tick
from rollpipe.pipes.graph.modules import bump_version
from rollpipe.pipes.graph.torchdata import DataLoader2, InProcessReadingService, traverse_dps

pytestmark = pytest.mark.usefixtures("nothing_stays_open")
HERE = Path(__file__).parent


def policy():
    return GaussianPolicy.for_env((Lively.observation_space, Lively.action_space), seed=0)


def stepper(seed=None):
    return EnvStepper(lambda: Lively(), policy(), 2, seed=seed)


def lanes():
    return Lanes(FragmentCollector(stepper(), 3), 2, seed=1)


def critic():
    return Critic.for_env((Lively.observation_space, Lively.action_space), seed=0)


PIPES = {
    "EnvStepper": lambda: stepper(1),
    "FragmentCollector": lambda: FragmentCollector(stepper(1), 3),
    "Lanes": lanes,
    "AdvantageBuffer": lambda: AdvantageBuffer(lanes(), critic()),
    "FragmentStacker": lambda: FragmentStacker(lanes(), 2),
    "Minibatcher": lambda: Minibatcher(lanes(), 4, 2, seed=3),
    "on_policy": lambda: on_policy(
        lambda: Lively(), policy(), critic(), n_envs=2, n_steps=3, lanes=2, seed=1
    ),
}
each_pipe = pytest.mark.parametrize("name", PIPES)


def frozen(item):
    return snapshot(item[:10] if isinstance(item, Tick) else item)


def take(pipe, n=4):
    return [frozen(x) for x in islice(pipe, n)]


# --- iterating


@pytest.mark.slow_but_one
@each_pipe
@pytest.mark.parametrize("service", [None, InProcessReadingService])
def test_under_data_loader(name, service):
    pipe = PIPES[name]()
    expected = take(pipe)
    with DataLoader2(pipe, reading_service=service and service()) as loader:
        assert_same(take(loader), expected)
        assert_same(take(loader), expected)
    assert_same(take(pipe), expected)


@each_pipe
def test_len_says_why_there_is_none(name):
    with pytest.raises(
        TypeError, match=f"^{'FragmentStacker' if name == 'on_policy' else name} has no length: .*"
    ):
        len(PIPES[name]())
    if name != "EnvStepper":
        return
    with pytest.raises(TypeError, match="stepped without end"):
        len(PIPES[name]())


@each_pipe
def test_a_pipe_is_true_and_has_a_short_text(name):
    pipe = PIPES[name]()
    assert pipe and len(repr(pipe)) < 200 and type(pipe).__name__ in repr(pipe)


@each_pipe
def test_a_new_iterator_ends_the_older_one(name):
    pipe = PIPES[name]()
    old = iter(pipe)
    next(old)
    new = iter(pipe)
    next(new)
    with pytest.raises(RuntimeError):
        next(old)
    del old
    next(new)
    del new


# --- copies


@pytest.mark.slow_but_one
@each_pipe
@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_pickles(name, protocol):
    "By standard pickle, with lambdas as factories; before, within and after an iteration."
    pipe = PIPES[name]()
    text = pickle.dumps(pipe, protocol)
    expected = take(pipe)
    assert_same(take(pickle.loads(text)), expected)
    stream = iter(pipe)
    next(stream)
    assert_same(take(pickle.loads(pickle.dumps(pipe, protocol))), expected)
    next(stream)
    del stream
    assert_same(take(pickle.loads(pickle.dumps(pipe, protocol))), expected)


@each_pipe
def test_traverses(name):
    def names(graph):
        return [type(p).__name__ for p, above in graph.values()] + [
            n for _, above in graph.values() for n in names(above)
        ]

    chain = ["FragmentStacker", "AdvantageBuffer", "Lanes", "FragmentCollector", "EnvStepper"]
    expected = {
        "Minibatcher": ["Minibatcher", *chain[2:]],
        "FragmentStacker": [chain[0], *chain[2:]],
        "on_policy": chain,
    }
    pipe = PIPES[name]()
    assert names(traverse_dps(pipe)) == expected.get(
        name, chain[chain.index(name) :] if name in chain else None
    )
    assert Ledger.made == []  # looking at a graph makes no environment


CHILD = """
import pickle, sys
from itertools import islice
from test_lifecycle import take
with open(sys.argv[1], 'rb') as file: pipes = pickle.load(file)
with open(sys.argv[1], 'wb') as file: pickle.dump({k: take(p) for k, p in pipes.items()}, file)
"""


def test_another_process_gets_a_working_copy(tmp_path):
    "Lambdas, environments and actors made in this very function included."

    class Mine(Lively):
        observation_space = Lively.observation_space

    class Own(Shaky):
        def forward(self, *args, **kwargs):
            act, hx, info = super().forward(*args, **kwargs)
            return act * 0.5, hx, {**info, "own": act * 2}

    pipes = {name: make() for name, make in PIPES.items()}
    pipes["local"] = FragmentCollector(EnvStepper([lambda: Mine(), Mine], Own(), 2, seed=4), 5)
    trained = policy()
    with torch.no_grad():
        trained.head.log_std.add_(1)
    pipes["trained"] = FragmentCollector(EnvStepper(Lively, trained, 2, seed=4), 5)
    file = tmp_path / "pipes"
    file.write_bytes(pickle.dumps(pipes))
    done = run_forked(["-c", CHILD, file], cwd=HERE)
    assert done.returncode == 0, done.stderr
    found = pickle.loads(file.read_bytes())
    for name, pipe in pipes.items():
        assert_same(found[name], take(pipe))


def test_training_the_users_actor_changes_what_the_copy_of_a_loader_collects():
    actor = Learning(0.0)
    pipe = on_policy(Counting, actor, lambda obs: obs[..., 2], n_envs=2, n_steps=3, lanes=2, seed=0)
    with DataLoader2(pipe, reading_service=InProcessReadingService()) as loader:
        for k, f in enumerate(islice(loader, 4)):
            assert (
                (f.actor["weight"] == k).all()
                and (f.state.act[1:] == k).all()
                and (f.version == k).all()
            )
            with torch.no_grad():
                actor.weight.fill_(k + 1.0)
            bump_version(actor)


def test_training_the_users_critic_changes_what_the_copy_of_a_loader_tells():
    judge = torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.Flatten(-2))
    torch.nn.init.zeros_(judge[0].weight)
    pipe = on_policy(Counting, Learning(), judge, n_envs=2, n_steps=3, seed=0)
    with DataLoader2(pipe) as loader:
        for k, f in enumerate(islice(loader, 4)):
            if k:
                assert torch.allclose(f.ret - f.adv, torch.full((3, 2), float(k)), atol=1e-4)
            with torch.no_grad():
                judge[0].bias.fill_(k + 1.0)


def test_a_copy_survives_the_original_pipe_and_actor():
    "The loader's copy keeps what it needs alive."
    pipe = PIPES["on_policy"]()
    expected = take(pipe)
    loader = DataLoader2(pipe)
    del pipe
    gc.collect()
    assert_same(take(loader), expected)
    loader.shutdown()
    del loader


# --- ends of an iteration


@each_pipe
def test_no_environment_is_made_before_the_first_item(name):
    pipe = PIPES[name]()
    iter(pipe)
    assert Ledger.made == []


@each_pipe
def test_break_closes(name):
    for _ in PIPES[name]():
        break
    assert Ledger.made and Ledger.open() == 0


@each_pipe
def test_the_end_closes(name):
    assert len(list(Limit(PIPES[name](), 3))) == 3
    assert Ledger.made and Ledger.open() == 0


@each_pipe
def test_a_finite_source_closes_when_it_ends(name):
    "Limited at the very top, each pipe comes to an end by itself."
    from rollpipe.pipes.graph.edits import insert_after

    if name == "EnvStepper":
        return
    assert list(insert_after(PIPES[name](), EnvStepper, partial(Limit, n=4)))
    assert Ledger.made and Ledger.open() == 0


@each_pipe
def test_an_iterator_can_be_closed(name):
    stream = iter(PIPES[name]())
    next(stream)
    stream.close()
    assert Ledger.made and Ledger.open() == 0


@each_pipe
def test_a_failing_loop_closes_while_its_traceback_is_held(name):
    def loop():
        for _ in PIPES[name]():
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as kept:
        loop()
    assert kept.tb and Ledger.made and Ledger.open() == 0


def fail(x):
    raise ZeroDivisionError("a function of the user")


DOWNSTREAM = {
    "pipe": lambda pipe: Failing(pipe, 1),
    "map": lambda pipe: pipe.map(fail),
    "batch of map": lambda pipe: pipe.map(fail).batch(2),
}


@each_pipe
@pytest.mark.parametrize("below", DOWNSTREAM)
def test_a_failing_pipe_below_closes_while_its_traceback_is_held(name, below):
    with pytest.raises(ZeroDivisionError) as kept:
        for _ in DOWNSTREAM[below](PIPES[name]()):
            pass
    assert kept.tb and Ledger.made and Ledger.open() == 0


@pytest.mark.parametrize("fault", [ZeroDivisionError, KeyboardInterrupt, SystemExit, StopIteration])
@pytest.mark.parametrize("call", ["factory", "first reset", "step", "later reset"])
def test_a_failing_environment_closes_all(call, fault):
    "Whatever is raised, wherever; interrupts keep their type."

    class Fails(Counting):
        def __init__(self):
            if call == "factory" and len(Ledger.made) == 1:
                raise fault("x")
            super().__init__([(2, "term")])
            self.calls = 0

        def reset(self, **kwargs):
            out = super().reset(**kwargs)
            if Ledger.made[-1] is self and call == {0: "first reset", 1: "later reset"}.get(
                self.episode
            ):
                raise fault("x")
            return out

        def step(self, action):
            if Ledger.made[-1] is self and call == "step":
                raise fault("x")
            return super().step(action)

    expected = EnvError if issubclass(fault, Exception) else fault
    pipe = on_policy(
        lambda: Fails(), Learning(), lambda obs: obs[..., 0], n_envs=2, n_steps=9, lanes=1, seed=0
    )
    with pytest.raises(expected) as kept:
        for _ in pipe:
            pass
    assert kept.tb and len(Ledger.made) == (1 if call == "factory" else 2) and Ledger.open() == 0


def test_a_failing_actor_closes_all():
    class Fails(Shaky):
        def forward(self, obs, act, rew, fin, *, hx, stepno, virtual):
            if stepno[0, 0] > 1:
                raise ValueError("lost")
            return super().forward(obs, act, rew, fin, hx=hx, stepno=stepno, virtual=virtual)

    with pytest.raises(RuntimeError, match="lost") as kept:
        for _ in Lanes(FragmentCollector(EnvStepper(Lively, Fails(), 2), 50), 2, 0):
            pass
    assert kept.tb and Ledger.made and Ledger.open() == 0


@pytest.mark.parametrize(
    "source, n_envs",
    [(lambda: Counting(), 2), (lambda: gym.vector.SyncVectorEnv([Counting, Counting]), None)],
)
@pytest.mark.parametrize(
    "actor, info_keys", [(MLPPolicy.for_env("Pendulum-v1", seed=0), None), (Learning(), [["a"]])]
)
def test_what_cannot_begin_closes_the_environments_that_are_made(source, n_envs, actor, info_keys):
    "An actor for other spaces, and a name of an info that is a list."
    with pytest.raises((PipeError, TypeError)) as kept:
        next(iter(EnvStepper(source, actor, n_envs, info_keys=info_keys)))
    assert kept.tb and len(Ledger.made) == 2 and Ledger.open() == 0


@each_pipe
def test_a_pipe_can_be_used_again_after_a_failure(name):
    pipe = PIPES[name]()
    expected = take(pipe)
    with pytest.raises(ZeroDivisionError):
        for _ in Failing(pipe, 2):
            pass
    assert_same(take(pipe), expected)


# --- the same under DataLoader2

services = pytest.mark.parametrize(
    "service", [None, InProcessReadingService], ids=["plain", "in process"]
)


@each_pipe
@services
def test_a_loader_that_is_broken_off_closes_at_the_end_of_with(name, service):
    with DataLoader2(PIPES[name](), reading_service=service and service()) as loader:
        for _ in loader:
            break
    assert Ledger.made and Ledger.open() == 0


@services
def test_a_loader_that_is_shut_down_closes(service):
    loader = DataLoader2(PIPES["on_policy"](), reading_service=service and service())
    stream = iter(loader)
    next(stream), next(stream)
    loader.shutdown()
    assert Ledger.made and Ledger.open() == 0


@services
def test_a_loader_whose_loop_fails_closes_at_the_end_of_with(service):
    with pytest.raises(ZeroDivisionError) as kept:
        with DataLoader2(PIPES["on_policy"](), reading_service=service and service()) as loader:
            for _ in loader:
                raise ZeroDivisionError
    assert kept.tb and Ledger.made and Ledger.open() == 0


@each_pipe
def test_a_loader_whose_pipe_fails_closes(name):
    with pytest.raises(ZeroDivisionError) as kept:
        with DataLoader2(Failing(PIPES[name](), 2)) as loader:
            for _ in loader:
                pass
    assert kept.tb and Ledger.made and Ledger.open() == 0


def test_a_collected_loader_closes():
    loader = DataLoader2(PIPES["on_policy"]())
    next(iter(loader))
    assert Ledger.open() > 0
    del loader
    gc.collect()
    assert Ledger.open() == 0


def test_a_second_iteration_of_a_loader_closes_the_first():
    with DataLoader2(PIPES["on_policy"]()) as loader:
        for _ in range(3):
            for _ in islice(loader, 2):
                pass
            assert Ledger.open() <= 4
    assert Ledger.open() == 0


def test_a_loader_that_came_to_its_end_closes():
    with DataLoader2(Limit(PIPES["on_policy"](), 2)) as loader:
        assert len(list(loader)) == 2 and Ledger.open() == 0
        assert len(list(loader)) == 2 and Ledger.open() == 0


@pytest.mark.parametrize("make", [stepper, lambda: FragmentCollector(stepper(), 3)])
def test_an_iterator_in_a_cycle_closes_its_environments_when_it_is_collected(make, recwarn):
    Ledger.clear()
    items = iter(make())
    next(items)
    cycle = [items]
    cycle.append(
        cycle
    )  # as the traceback of an exception that holds the frame in which it was caught
    del items, cycle
    gc.collect()
    assert len(Ledger.made) == len(Ledger.closed) == 2 and not list(recwarn)
