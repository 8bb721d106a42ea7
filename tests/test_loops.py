"A loop in Python that `resumed` and `saved` keep in a file: the whole equals a part and the rest, bit for bit."

import os
import re
import shutil
import signal
from functools import partial

import gymnasium as gym
import pytest
import torch
from gallery import in_a_process, refused
from reference import snapshot

from rollpipe.agents import DQN, PPO, checkpoint
from rollpipe.agents.checkpoint import save_checkpoint
from rollpipe.agents.intrinsic import RND, Distillation
from rollpipe.layers import Critic, MLPPolicy, QPolicy
from rollpipe.pipes import (
    CheckpointError,
    EnvError,
    FragmentCollector,
    Lanes,
    Pipe,
    ProcessReading,
    on_policy,
    replayed,
    with_rewards,
)
from rollpipe.pipes.data.nested import first_difference
from rollpipe.pipes.keeping.files import decode, encode
from rollpipe.runs import resumed, saved
from rollpipe.runs.folder import load_run
from rollpipe.runs.locks import locked, owner_of

pytestmark = pytest.mark.timeout(300)

POLE = "CartPole-v1"


def ppo(hidden=8, env=POLE, lr=1e-3, **options):
    torch.manual_seed(0)
    actor = MLPPolicy.for_env(POLE, hidden=(hidden,), seed=0)
    critic = Critic.for_env(POLE, hidden=(hidden,), seed=1)
    pipe = on_policy(
        env, actor, critic, n_steps=16, n_envs=2, lanes=2 if env == POLE else 1, seed=0, **options
    )
    return pipe, PPO(actor, critic, epochs=1, lr=lr)


def dqn(env=POLE):
    torch.manual_seed(0)
    actor = QPolicy.for_env(POLE, hidden=(8,), seed=0)
    return replayed(
        env, actor, n_steps=4, n_envs=2, lanes=2, capacity=64, batch_size=8, warmup=16, seed=0
    ), DQN(actor)


class Shrinking:
    "A learner that the library does not know: it keeps weights alone, and halves them."

    def __init__(self, actor):
        self.actor = actor

    def state_dict(self):
        return dict(actor=self.actor.state_dict())

    def load_state_dict(self, state):
        self.actor.load_state_dict(state["actor"])

    def update(self, batch):
        with torch.no_grad():
            for p in self.actor.parameters():
                p.mul_(0.5)
        return {}


def shrinking():
    pipe, agent = ppo()
    return pipe, Shrinking(agent.actor)


def rnd():
    add = RND.inserter(after=Lanes, network=Distillation.for_env(POLE, hidden=(8,), seed=2))
    return ppo(edits=[add], terminal_obs=True)


def go_on(path, make, until, workers=0, every=1, **options):
    "Batches, metrics and weights of a loop up to so many updates."
    pipe, agent = make()
    service = ProcessReading(workers, **options) if workers else None
    found = []
    with resumed(path, pipe, agent, service) as (loader, done):
        for update, batch in zip(range(done, until), loader):
            seen = (
                snapshot(getattr(batch, "fresh", batch)),
                [snapshot(x) for x in getattr(batch, "samples", ())],
            )
            metrics = agent.update(batch)
            found.append(
                (seen, {name: x for name, x in metrics.items() if not name.startswith("seconds")})
            )
            if update % every == every - 1:
                saved(path, loader, agent, update + 1)
    return found, decode(encode(agent.state_dict(), tensors := {}), tensors)


def assert_equal(a, b):
    assert (found := first_difference(a, b)) is None, found


@pytest.mark.slow_but_one
@pytest.mark.parametrize("workers", [(0, 0), (0, 2), (2, 0)])
@pytest.mark.parametrize("make", [ppo, dqn, rnd])
def test_the_whole_equals_a_part_and_the_rest(make, workers, tmp_path):
    check_parts(tmp_path, make, (2, 5), workers)


def check_parts(folder, make, ends, workers, **options):
    "A loop that goes on up to each of the updates gives what it gives in one go."
    whole, weights = go_on(folder / "whole.safetensors", make, ends[-1], **options)
    found = []
    for until, n_workers in zip(ends, workers):
        more, last = go_on(folder / "run.safetensors", make, until, n_workers, **options)
        found += more
    assert_equal((whole, weights), (found, last))


@pytest.mark.slow_but_one
@pytest.mark.parametrize("make", [ppo, dqn])
def test_a_loop_goes_on_many_times(make, tmp_path):
    check_parts(tmp_path, make, (1, 2, 3, 4, 5), (0, 1, 2, 0, 1))


def test_versions_go_on_whatever_the_learner_is(tmp_path):
    check_parts(tmp_path, shrinking, (3, 5), (0, 0))
    with resumed(tmp_path / "run.safetensors", *shrinking()) as (loader, _):
        assert next(loader).version.tolist() == [5, 5, 5, 5]


def test_what_came_after_the_file_is_repeated(tmp_path):
    whole, _ = go_on(tmp_path / "run.safetensors", ppo, 5, every=3)
    rest, _ = go_on(tmp_path / "run.safetensors", ppo, 5, every=3)
    assert_equal(whole[3:], rest)


@pytest.mark.slow
def test_a_lagging_stream_goes_on_and_another_lag_is_refused(tmp_path):
    path = tmp_path / "run.safetensors"
    whole, weights = go_on(tmp_path / "whole.safetensors", ppo, 5, 1, lag=1)
    first, _ = go_on(path, ppo, 2, 2, lag=1)
    refused("lag=1 when it was saved, and now 0", go_on, path, ppo, 5, 2)
    refused(r"and now 0 \(without workers the lag is always 0", go_on, path, ppo, 5, 0)
    rest, found = go_on(path, ppo, 5, 1, lag=1)
    assert_equal((whole, weights), (first + rest, found))


def test_chunks_that_no_file_names_are_removed(tmp_path):
    path = tmp_path / "run.safetensors"
    for n in (3, 4, 5):
        go_on(path, dqn, n)
        named = {name.decode() for name in re.findall(rb"[0-9a-f]{64}\.chunk", path.read_bytes())}
        assert named and {*os.listdir(f"{path}.replay")} == named


@pytest.mark.parametrize("every", [1, 2])
def test_a_save_that_fails_leaves_a_file_that_goes_on(every, tmp_path, monkeypatch):
    whole, weights = go_on(tmp_path / "whole.safetensors", dqn, 6)
    path = tmp_path / "run.safetensors"
    first, _ = go_on(path, dqn, 4, every=every)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("rollpipe.runs.loops.save_checkpoint", full)
        refused("No space", go_on, path, dqn, 6, error=OSError)
    rest, found = go_on(path, dqn, 6)
    assert_equal((whole, weights), (first + rest, found))


def killed(path):
    "In a process of its own, which is killed while it writes the file for the third time."
    saves = []

    def half(path, data):
        saves.append(path)
        if len(saves) < 3:
            return write(path, data)
        path.with_name(f".{path.name}.{'0' * 16}.tmp").write_bytes(data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    write, checkpoint.write_atomically = checkpoint.write_atomically, half
    go_on(path, dqn, 6)


def test_a_loop_that_is_killed_while_it_saves_goes_on(tmp_path):
    whole, weights = go_on(tmp_path / "whole.safetensors", dqn, 6)
    path = tmp_path / "run.safetensors"
    in_a_process(lambda: killed(path), -signal.SIGKILL)
    rest, found = go_on(path, dqn, 6)
    assert_equal((whole[2:], weights), (rest, found))
    ends = ("", ".replay", ".journal")
    names = {f"{name}.safetensors{end}" for name in ("whole", "run") for end in ends}
    assert {*os.listdir(tmp_path)} == names


def test_two_processes_do_not_go_on_with_one_file(tmp_path):
    "The second one is refused, also while the file does not exist yet, and goes on as soon as the first one is over."
    path = tmp_path / "run.safetensors"
    expected = f"another process is training with {path}. Expected another file, got process {os.getpid()}."
    pipe, agent = ppo()
    with resumed(path, pipe, agent):
        in_a_process(lambda: refused(re.escape(expected), go_on, path, ppo, 1))
    in_a_process(lambda: go_on(path, ppo, 1))
    assert [x.name for x in tmp_path.glob("*.lock")] == []


# --- what does not fit


def test_files_that_do_not_fit_are_refused_and_stay(tmp_path):
    path = tmp_path / "run.safetensors"
    go_on(path, ppo, 2)
    good = path.read_bytes()
    for other in (partial(ppo, hidden=16), dqn):
        refused("does not fit the agent", go_on, path, other, 3, error=CheckpointError)
    assert path.read_bytes() == good
    for damaged in (good[:-9] + bytes(9), good[:100]):
        path.write_bytes(damaged)
        refused("damaged", go_on, path, ppo, 3, error=CheckpointError)
    save_checkpoint(path, ppo()[1], {}, dict(updates=1))
    refused("not the file of a loop", go_on, path, ppo, 3, error=CheckpointError)
    refused("not the checkpoint of a run", load_run, path, error=CheckpointError)


def test_a_state_of_a_pipe_that_is_gone_is_refused(tmp_path):
    go_on(tmp_path / "run.safetensors", rnd, 2)
    refused(
        "lacks pipes that learned",
        go_on,
        tmp_path / "run.safetensors",
        ppo,
        3,
        error=CheckpointError,
    )


def test_missing_chunks_are_named(tmp_path):
    go_on(tmp_path / "run.safetensors", dqn, 3)
    chunk = next((tmp_path / "run.safetensors.replay").iterdir())
    chunk.unlink()
    refused(chunk.name, go_on, tmp_path / "run.safetensors", dqn, 4, error=CheckpointError)


def test_a_setting_that_changed_is_named_in_the_log(tmp_path, caplog):
    go_on(tmp_path / "run.safetensors", ppo, 2)
    with caplog.at_level("WARNING", "rollpipe"):
        go_on(tmp_path / "run.safetensors", ppo, 3)
    assert not caplog.records
    with caplog.at_level("WARNING", "rollpipe"):
        go_on(tmp_path / "run.safetensors", partial(ppo, lr=1e-5), 4)
    assert "goes on, but not as it was: settings/lr" in caplog.text


@pytest.mark.parametrize("options", [dict(lag=None), dict(lag=1, order="ready")])
def test_the_clock_orders_no_exact_loop(options, tmp_path):
    name = "lag=None" if options["lag"] is None else "order='ready'"
    refused(name, go_on, tmp_path / "run.safetensors", ppo, 2, 1, **options)
    assert not [*tmp_path.iterdir()]


def lent():
    return ppo(env=[gym.make("CartPole-v1") for _ in range(2)])


def test_an_inexact_loop_begins_new_episodes(tmp_path):
    path = tmp_path / "run.safetensors"
    pipe, agent = lent()
    refused("lent", resumed(path, pipe, agent).__enter__)
    for k in range(2):
        with resumed(path, pipe, agent, exact=False) as (loader, update):
            assert update == k
            batch = next(loader)
            assert (batch.state.stepno[0] == 0).all()
            agent.update(batch)
            saved(path, loader, agent, update + 1)
    refused("lent", resumed(path, pipe, agent).__enter__)


def test_an_inexact_file_does_not_go_on_exactly(tmp_path):
    path = tmp_path / "run.safetensors"
    pipe, agent = ppo()
    with resumed(path, pipe, agent, ProcessReading(1, lag=None), exact=False) as (loader, update):
        agent.update(next(loader))
        saved(path, loader, agent, 1)
    refused("lag=None", go_on, path, ppo, 2)


class Forgetful(Pipe):
    "Draws from a generator of its own, which `keep` does not hold."

    reads = 1

    def __init__(self, pipe):
        super().__init__(pipe)
        self.noise = torch.Generator().manual_seed(0)

    def stream(self, items):
        for fragment in items:
            factor = torch.rand((), generator=self.noise)
            yield with_rewards(fragment, fragment.state.rew * factor)


class Remembering(Forgetful):
    def stream(self, items):
        self.keep(noise=self.noise)
        yield from super().stream(items)


@pytest.mark.parametrize(
    "place, workers", [(Lanes, 0), (FragmentCollector, 0), (FragmentCollector, 1)]
)
def test_a_pipe_with_state_that_keep_does_not_hold_is_named(place, workers, tmp_path, caplog):
    forgetful = partial(ppo, edits=[Forgetful.inserter(after=place)])
    refused("Forgetful: the attribute `noise` changes", go_on, tmp_path / "run", forgetful, 2)
    assert not (tmp_path / "run").exists()

    pipe, agent = forgetful()
    with resumed(tmp_path / "run", pipe, agent, ProcessReading(workers), exact=False) as (
        batches,
        _,
    ):
        for update in (1, 2):
            agent.update(next(batches))
            saved(tmp_path / "run", batches, agent, update)
    assert caplog.text.count("the attribute `noise` changes") == 1


def test_a_generator_that_keep_holds_goes_on(tmp_path):
    make = partial(ppo, edits=[Remembering.inserter(after=Lanes)])
    check_parts(tmp_path, make, (2, 4), (0, 0))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "make", [partial(ppo, env="OfAProcess-v0"), partial(dqn, env="OfAProcess-v0")]
)
def test_what_goes_on_otherwise_in_a_new_process_is_told(make, workers, tmp_path, caplog):
    "The file has two updates; the third one, and a fourth, are made once more. A new file is compared with nothing."
    path = tmp_path / "run.safetensors"
    in_a_process(lambda: go_on(path, make, 2) and go_on(path, make, 4, every=9))
    before = path.read_bytes()
    told = "does not go on as it did before: update 3"
    for _ in range(2):
        refused(f"leaf exact: .* {told}: .*state", go_on, path, make, 5, workers)
        assert path.read_bytes() == before
    pipe, agent = make()
    with resumed(path, pipe, agent, exact=False) as (loader, done):
        for _, batch in zip(range(done, 5), loader):
            agent.update(batch)
    assert caplog.text.count(told) == 1
    path.unlink()
    caplog.clear()
    go_on(path, make, 5, workers)
    assert not caplog.messages


class Failing(gym.Wrapper):
    broken = False

    def step(self, action):
        if Failing.broken:
            raise OSError("no answer")
        return super().step(action)


def test_nothing_is_saved_after_an_error_within_a_batch_or_after_the_loop(tmp_path, monkeypatch):
    path = tmp_path / "run.safetensors"
    no_state = "the stream has no state"
    pipe, agent = ppo(env=lambda: Failing(gym.make("CartPole-v1")))
    with resumed(path, pipe, agent) as (loader, update):
        for _ in range(2):
            agent.update(next(loader))
        saved(path, loader, agent, 2)
        good = path.read_bytes()
        monkeypatch.setattr(Failing, "broken", True)
        refused("", next, loader, error=EnvError)
        refused(no_state, saved, path, loader, agent, 3)
    pipe, agent = ppo()
    with resumed(tmp_path / "other.safetensors", pipe, agent) as (loader, update):
        next(loader)
    refused(no_state, saved, path, loader, agent, 3)
    assert path.read_bytes() == good and not (tmp_path / "other.safetensors").exists()


def test_the_lock_of_a_killed_process_does_not_count(tmp_path):
    "Another process may have its number since, in a container above all. Nor does that of the run of which this one is a copy."
    run = tmp_path / "run"
    run.mkdir()
    assert owner_of(run) == ""
    (run / "lock").write_text(f"{os.getppid()}\n")
    assert owner_of(run) == ""
    here = str(os.getpid())

    def check():
        assert owner_of(run) == here
        assert owner_of(shutil.copytree(run, tmp_path / "copy")) == ""

    with locked(run):
        assert owner_of(run) == here
        in_a_process(check)
    assert owner_of(run) == ""
