"Sizes that somebody typed, or that stand in a file, are compared with the available memory before anything is built."
import pytest
from toys import Counting, Plain

from rollpipe.agents.checkpoint import save_checkpoint
from rollpipe.config import make_config
from rollpipe.pipes import DataError, EnvStepper, FragmentCollector, Replay, ReplayMemory, errors, replayed
from rollpipe.pipes.errors import CheckpointError
from rollpipe.runs import load_run, resume, start
from rollpipe.train import train


def fragments(): return FragmentCollector(EnvStepper(Counting, Plain(), 2, seed=0), 4)


@pytest.mark.parametrize("options", [dict(capacity=10 ** 14), dict(capacity=10 ** 14, prioritized=True), dict(batch_size=10 ** 14),
                                     dict(batch_size=10 ** 9, length=10 ** 4, capacity=10 ** 4)], ids=str)
def test_a_replay_that_no_machine_has_room_for_is_refused_when_it_is_made(options):
    with pytest.raises(DataError) as e: Replay(fragments(), **{"capacity": 2000, **options})
    name = next(name for name in ("batch_size", "capacity") if options.get(name, 0) > 10 ** 8)
    assert e.value.pipe in ("Replay", "ReplayMemory") and "not enough memory" in str(e.value)
    assert f"{name}={options[name]:,}, which needs" in e.value.got


def test_the_ring_is_compared_with_the_memory_that_there_is(monkeypatch):
    size = ReplayMemory(100)
    size.add(next(iter(fragments())))
    needed = size.store.records.nbytes
    for free in (needed, needed - 1):
        monkeypatch.setattr(errors, "available_memory", lambda free=free: free)
        memory = ReplayMemory(100)
        if free == needed: memory.add(next(iter(fragments())))
        else:
            with pytest.raises(DataError, match=f"ReplayMemory: not enough memory.*got capacity=100, which needs {needed:,} bytes"):
                memory.add(next(iter(fragments())))


def test_samples_are_compared_when_the_size_of_a_step_is_known(monkeypatch):
    pipe = replayed(Counting, Plain(), n_envs=2, n_steps=4, capacity=20, batch_size=300, warmup=0, seed=0)
    monkeypatch.setattr(errors, "available_memory", lambda: 300 * 2 * 100)
    with pytest.raises(DataError, match="Replay: not enough memory.*got batch_size=300, which needs"): next(iter(pipe))


def test_a_file_replay_needs_no_memory(tmp_path, monkeypatch):
    memory = ReplayMemory(100, path=tmp_path)
    monkeypatch.setattr(errors, "available_memory", lambda: 100)
    ReplayMemory(100, path=tmp_path)
    memory.add(next(iter(fragments())))


@pytest.fixture(scope="module")
def dqn(tmp_path_factory):
    options = dict(capacity=1000, warmup=10, batch_size=8, n_steps=8, n_envs=2, hidden=(8,))
    run = start(tmp_path_factory.mktemp("dqn")/"run", make_config("dqn", "CartPole-v1", options, {}, steps=100))
    train(run, progress=False, tensorboard=False)
    return run


HARMS = [dict(capacity=10 ** 12), dict(capacity=10 ** 18), dict(batch_size=10 ** 12), dict(length=10 ** 12), dict(hidden=[8] * 10 ** 5),
         dict(n_envs=10 ** 12), dict(lanes=10 ** 12), dict(n_steps=10 ** 12)]


@pytest.mark.parametrize("learnt", [True, False])
@pytest.mark.parametrize("harm", HARMS, ids=lambda harm: next(iter(harm)))
def test_a_checkpoint_that_asks_for_too_much_is_refused_before_anything_is_built(harm, learnt, dqn, monkeypatch):
    if learnt: counters = dict(dqn.counters, steps=10 ** 17, updates=1)     # whoever writes such a file writes such counters, too
    else: counters = dict(dqn.counters, steps=0, updates=0)
    config = dict(dqn.config, steps=10 ** 18, options={**dqn.config["options"], **harm})
    save_checkpoint(dqn.checkpoint, dqn.agent, config, counters)
    monkeypatch.setattr("rollpipe.runs.build", lambda *args: pytest.fail("something was built"))
    for load in (load_run, resume):
        with pytest.raises(CheckpointError, match=f"not a configuration that was saved.*{next(iter(harm))}"): load(dqn.folder)


def test_the_file_itself_is_accepted(dqn):
    save_checkpoint(dqn.checkpoint, dqn.agent, dqn.config, dqn.counters)
    assert load_run(dqn.folder).config["options"]["capacity"] == 1000
