"Small networks compute with one of torch's threads, unless the user has chosen a number."

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from rollpipe.agents import DQN, PPO, SAC, TRPO, QLearning, evaluate
from rollpipe.agents.offline import BC
from rollpipe.agents.tabular import TabularQ
from rollpipe.layers import (
    ActionCritic,
    Critic,
    MLPPolicy,
    QPolicy,
    RecurrentPolicy,
    SquashedPolicy,
)
from rollpipe.pipes import (
    DataLoader2,
    EnvStepper,
    FragmentCollector,
    Pipe,
    ProcessReading,
    on_policy,
    replayed,
)
from rollpipe.pipes.graph import modules
from rollpipe.pipes.graph.modules import few_threads, torch_threads
from rollpipe.traces.fingerprint import machine

ROOT = Path(__file__).parents[1]
POLE = "CartPole-v1"


@pytest.fixture
def three(monkeypatch):
    "A machine on which torch begins with three threads, and a user who has chosen nothing."
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(modules, "_NOT_CHOSEN", {3})
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(1)


def watched(network, numbers):
    "The network; `numbers` gets torch's number of threads in each call of one of its layers."
    for layer in network.modules():
        layer.register_forward_pre_hook(lambda *_: numbers.add(torch.get_num_threads()))
    return network


def actor_and_critic(hidden=(16,)):
    return (
        MLPPolicy.for_env(POLE, hidden=hidden, seed=0),
        Critic.for_env(POLE, hidden=hidden, seed=1),
    )


def on_policy_case(cls, **options):
    actor, critic = actor_and_critic()
    return cls(actor, critic, **options), on_policy(POLE, actor, critic, n_steps=16, seed=0)


def dqn_case():
    actor = QPolicy.for_env(POLE, hidden=(16,), seed=0)
    return DQN(actor), replayed(POLE, actor, n_steps=8, batch_size=16, warmup=16, seed=0)


def sac_case():
    actor = SquashedPolicy.for_env("Pendulum-v1", hidden=(16,), seed=0)
    critic = ActionCritic.for_env("Pendulum-v1", hidden=(16,), seed=0)
    return SAC(actor, critic), replayed(
        "Pendulum-v1", actor, n_steps=8, batch_size=16, warmup=16, seed=0
    )


def bc_case():
    actor, critic = actor_and_critic()
    return BC(actor), on_policy(POLE, actor, critic, n_steps=16, seed=0)


LEARNERS = dict(
    ppo=lambda: on_policy_case(PPO, epochs=1),
    trpo=lambda: on_policy_case(TRPO),
    bc=bc_case,
    dqn=dqn_case,
    sac=sac_case,
)


@pytest.mark.parametrize("name", LEARNERS)
def test_an_update_computes_with_one_thread_and_puts_the_number_back(name, three):
    agent, pipe = LEARNERS[name]()
    numbers = set()
    watched(agent.actor, numbers)
    if agent.critic is not None:
        watched(agent.critic, numbers)
    for _, batch in zip(range(3), pipe):
        agent.update(batch)
        assert torch.get_num_threads() == 3
    assert numbers == {1}


def test_the_results_are_those_of_one_thread(three):
    "Initial weights, batches and updates; wide enough that three threads give other bits."

    def learned():
        actor, critic = actor_and_critic((128, 128))
        agent = PPO(actor, critic, epochs=2)
        for _, batch in zip(range(2), on_policy(POLE, actor, critic, n_steps=64, seed=0)):
            agent.update(batch)
        return [*actor.parameters(), *critic.parameters()]

    by_itself = learned()
    torch.set_num_threads(1)
    assert all(map(torch.equal, by_itself, learned()))
    with torch_threads(3):
        assert not all(map(torch.equal, by_itself, learned()))


@pytest.mark.parametrize(
    "choose, expected",
    [
        (lambda env: torch.set_num_threads(2), 2),
        (lambda env: env.setenv("OMP_NUM_THREADS", "3"), 3),
        (lambda env: env.setenv("MKL_NUM_THREADS", "3"), 3),
        (lambda env: env.setattr(modules, "_NOT_CHOSEN", set()), 3),
    ],
    ids=["set_num_threads", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "before the import"],
)
def test_a_number_that_the_user_chose_stays(choose, expected, three, monkeypatch):
    agent, pipe = on_policy_case(PPO, epochs=1)
    numbers = set()
    choose(monkeypatch)
    batch = next(iter(pipe))
    watched(agent.critic, numbers)
    agent.update(batch)
    assert numbers == {expected} and torch.get_num_threads() == expected
    next(iter(pipe))
    assert numbers == {expected}, "the advantages"


def test_a_block_chooses_also_the_number_that_torch_begins_with(three):
    agent, pipe = on_policy_case(PPO, epochs=1)
    numbers = set()
    watched(agent.critic, numbers)
    with torch_threads(3):
        agent.update(next(iter(pipe)))
    assert numbers == {3}
    numbers.clear()
    agent.update(next(iter(pipe)))
    assert numbers == {1} and torch.get_num_threads() == 3


def test_large_networks_keep_torchs_number(three):
    small = nn.Linear(99, 99)
    large = nn.Linear(1000, 1000)
    for holders, expected in (((small,), 1), ((large,), 3), (([small, large],), 3), ((), 1)):
        with few_threads(*holders):
            assert torch.get_num_threads() == expected
        assert torch.get_num_threads() == 3


def test_an_update_that_fails_puts_the_number_back(three):
    class Failing(PPO):
        def update(self, batch):
            assert torch.get_num_threads() == 1
            raise KeyboardInterrupt

    agent = Failing(*actor_and_critic())
    with pytest.raises(KeyboardInterrupt):
        agent.update(None)
    assert torch.get_num_threads() == 3


def test_a_table_is_updated_with_one_thread(three):
    numbers = []

    class Seen(QLearning):
        def explore(self):
            numbers.append(torch.get_num_threads())

    actor = TabularQ.for_env("FrozenLake-v1", seed=0)
    agent = Seen(actor)
    agent.update(next(iter(FragmentCollector(EnvStepper("FrozenLake-v1", actor, seed=0), 8))))
    assert numbers == [3, 1]


class Judge(Pipe):
    "Computes with a network of its own."

    def __init__(self, pipe, network):
        super().__init__(pipe)
        self.network = network

    def stream(self, items):
        for fragment in items:
            self.network(torch.ones(1, 2))
            yield fragment


def test_pipes_of_this_process_compute_with_one_thread(three):
    "Critics, networks of one's own, actors without lanes; between two items the number is the user's."
    actor, critic = actor_and_critic()
    numbers = set()
    for network in (actor, critic, judge := nn.Linear(2, 2)):
        watched(network, numbers)
    pipe = Judge(on_policy(POLE, actor, critic, n_steps=4, lanes=2, seed=0), judge)
    for _, _ in zip(range(3), pipe):
        assert torch.get_num_threads() == 3
    ticks = EnvStepper(POLE, watched(RecurrentPolicy.for_env(POLE, seed=0), numbers), seed=0)
    for _, _ in zip(range(3), ticks):
        assert torch.get_num_threads() == 3
    evaluate(POLE, actor, n_episodes=1, seed=0)
    assert numbers == {1} and torch.get_num_threads() == 3


def test_a_pipe_that_fails_puts_the_number_back(three):
    class Failing(Judge):
        def stream(self, items):
            next(items)
            assert torch.get_num_threads() == 1
            raise RuntimeError("no")
            yield

    actor, critic = actor_and_critic()
    with pytest.raises(RuntimeError, match="no"):
        next(iter(Failing(on_policy(POLE, actor, critic, n_steps=4, seed=0), critic)))
    assert torch.get_num_threads() == 3


def test_a_choice_between_two_items_counts_at_once(three):
    actor, critic = actor_and_critic()
    numbers = []
    critic.register_forward_pre_hook(lambda *_: numbers.append(torch.get_num_threads()))
    items = iter(on_policy(POLE, actor, critic, n_steps=4, seed=0))
    next(items)
    torch.set_num_threads(2)
    next(items)
    assert {*numbers} == {1, 2} and torch.get_num_threads() == 2


@pytest.mark.slow
def test_workers_compute_with_the_threads_that_they_got(three):
    "Also if they got as many as torch begins with."

    def of(threads):
        actor, critic = actor_and_critic()
        actor.complete = lambda act, info: (
            info | {"threads": torch.full(act.shape, torch.get_num_threads())}
        )
        pipe = on_policy(POLE, actor, critic, n_steps=4, seed=0)
        method = "fork" if threads == 1 else "spawn"
        reading = ProcessReading(1, start_method=method, worker_threads=threads)
        with DataLoader2(pipe, reading_service=reading) as loader:
            batch = next(iter(loader))
        assert torch.get_num_threads() == 3
        return {*batch.actor["threads"].flatten().tolist()}

    as_many = max(2, os.cpu_count() or 1)
    assert of(1) == {1}
    assert of(as_many) == {as_many}


def test_a_fingerprint_names_the_threads_that_compute(three):
    assert machine()["threads"] == "1"
    assert machine([nn.Linear(1000, 1000)])["threads"] == "3"


PROGRAM = """
import json, sys
import torch
first = torch.get_num_threads()
if len(sys.argv) > 1: torch.set_num_threads(int(sys.argv[1]))
from rollpipe import PPO, Critic, MLPPolicy, on_policy
actor = MLPPolicy.for_env("CartPole-v1", hidden=(16,), seed=0)
critic = Critic.for_env("CartPole-v1", hidden=(16,), seed=1)
numbers = set()
critic.register_forward_pre_hook(lambda *_: numbers.add(torch.get_num_threads()))
agent = PPO(actor, critic, epochs=1)
agent.update(next(iter(on_policy("CartPole-v1", actor, critic, n_steps=16, seed=0))))
print(json.dumps([first, sorted(numbers), torch.get_num_threads()]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [None, 2 * (os.cpu_count() or 1)])
def test_a_pasted_loop(chosen):
    "In a fresh process, with the number of threads with which torch begins there, or one that is chosen before the import of rollpipe."
    env = {k: x for k, x in os.environ.items() if k not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    words = [sys.executable, "-c", PROGRAM, *([] if chosen is None else [str(chosen)])]
    output = subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout
    first, inside, after = json.loads(output)
    assert (inside, after) == (([1], first) if chosen is None else ([chosen], chosen))
