"""What a start finds out about environments: which way keeps them, whether a process may have several, and at which price."""

import os
import re
import warnings
from collections import Counter
from functools import partial

import gymnasium as gym
import lonely_envs as lonely
import pytest
import torch
from command_line import QUIET, rollpipe
from gallery import check_same, refused
from tensor_worlds import CartPole

from rollpipe.agents.evaluate import RandomActor, evaluate
from rollpipe.agents.parallel_evaluation import ParallelEvaluation
from rollpipe.pipes import EnvError, EnvStepper, FragmentCollector, Lanes
from rollpipe.pipes.envs.factories import spaces_of
from rollpipe.pipes.envs.keeping import keeper_for
from rollpipe.pipes.passes import keep_environments
from rollpipe.pipes.tensors.collector import TensorCollector
from rollpipe.runs.folder import load_run, start
from rollpipe.runs.logs import read_evaluations, read_metrics
from rollpipe.settings.config import make_config
from rollpipe.testing import check_env
from rollpipe.testing.env_rules import ENV_CLOSE, ENV_UNDISTURBED
from rollpipe.tuning.tune import returns_of_training

RUN = f"--n-envs 1 --n-steps 32 --hidden 8 --critic-hidden 8 {QUIET}"


RETURNS = [30.0]


@pytest.fixture(autouse=True)
def nothing_is_open():
    yield
    lonely.OnlyOne.alive = 0
    lonely.OnlyOneRuns.taken.clear()


def trained(folder, kind, more="", steps=64):
    "Train on the command line."
    words = f"train ppo {kind.__name__}-v0 --import lonely_envs --steps {steps}"
    assert rollpipe(f"{words} {more} --out {folder} {RUN}") == 0
    return folder


def resumed(run, steps):
    assert rollpipe(f"train --resume {run} --steps {steps} {QUIET}") == 0
    return run


def of_pole(seed=0):
    return RandomActor(gym.spaces.Discrete(2), seed=seed)


def vector_of(kind):
    return lambda: gym.vector.SyncVectorEnv([kind] * 2)


def random_actor():
    return RandomActor(lonely.Walk.action_space, seed=0)


# -- several in one process -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [lonely.OneClock, lonely.OneWorld])
def test_environments_that_disturb_one_another_are_named(kind, caplog):
    assert "reward" in keeper_for(kind).disturbed or "obs" in keeper_for(kind).disturbed
    [broken] = check_env(kind, raises=False)
    assert broken.rule == ENV_UNDISTURBED
    keep_environments(EnvStepper(kind, random_actor(), 2))
    assert "disturb one another" in caplog.text and "its 2 environments" in caplog.text


@pytest.mark.parametrize(
    "kind", [lonely.Walk, lonely.OneCounter, lonely.OneDice, lonely.GlobalDice, lonely.Clocked]
)
def test_chance_and_infos_are_no_disturbance(kind, caplog):
    keeper = keeper_for(kind)
    assert keeper.alone is None
    keep_environments(EnvStepper(kind, random_actor(), 2))
    assert "disturb" not in caplog.text


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1", "FrozenLake-v1"])
def test_common_environments_do_not_disturb_one_another(name):
    assert keeper_for(lambda: gym.make(name)).alone is None


@pytest.mark.slow
def test_vectors_and_tensors_may_disturb_one_another_too():
    class Shared(CartPole):
        "All instances pay what the clock says, which belongs to the class."

        clock = [0.0]

        def step(self, act):
            self.clock[0] += 1
            seen = getattr(self, "seen", self.clock[0] - 1)
            obs, rew, *rest = super().step(act)
            self.seen = self.clock[0]
            return obs, rew * 0 + (self.clock[0] - seen), *rest

    for make in (vector_of(lonely.OneClock), partial(Shared, 2)):
        assert "reward" in keeper_for(make).disturbed
    for make in (vector_of(lonely.Walk), partial(CartPole, 2)):
        assert keeper_for(make).alone is None
    assert [x.rule for x in check_env(Shared, raises=False)] == [ENV_UNDISTURBED]


def test_an_evaluation_plays_one_at_a_time_where_others_would_disturb_it(caplog):
    for source in ("OneClock-v0", lonely.OneClock):
        assert evaluate(source, random_actor(), 4, seed=1).returns.tolist() == RETURNS * 4
        assert "disturb one another" in caplog.text and "one at a time" in caplog.text
        caplog.clear()

    # It does what it is told, and says what comes of it.
    assert evaluate("OneClock-v0", random_actor(), 4, n_envs=2, seed=1).mean > 30
    assert "n_envs=2" in caplog.text
    with ParallelEvaluation("OneClock-v0", random_actor(), 4, seed=1) as evaluation:
        evaluation.request()
        [answer] = evaluation.wait()
    assert answer.evaluation.returns.tolist() == RETURNS * 4


def test_other_evaluations_stay_side_by_side():
    beside = evaluate("CartPole-v1", of_pole(), 8, seed=3)
    eight = evaluate("CartPole-v1", of_pole(), 8, seed=3, n_envs=8)
    assert beside.returns.tolist() == eight.returns.tolist()


@pytest.mark.slow_but_one
@pytest.mark.parametrize("every", ["1", "32 steps"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_training_and_its_evaluations_do_not_disturb_one_another(tmp_path, every, workers):
    more = f"--eval-every '{every}' --eval-episodes 4 --final-episodes 4 --workers {workers}"
    run = trained(tmp_path / "run", lonely.OneClock, more, steps=128)
    assert {x for x in read_metrics(run)["return_mean"] if x == x} == {30.0}
    assert load_run(run, best=True).evaluated["eval_return_mean"] == 30.0
    if every != "1":
        assert {x for r in read_evaluations(run) for x in r["returns"]} == {30.0}


def test_the_trials_of_a_search_do_not_disturb_their_evaluations():
    options = dict(n_envs=1, n_steps=32, hidden=(4,), critic_hidden=(4,))
    config = make_config("ppo", "OneClock-v0", options, steps=64)
    assert [*returns_of_training(config, 2)] == [30.0, 30.0]


def test_the_evaluation_on_the_command_line_plays_one_at_a_time(tmp_path, capsys):
    run = trained(tmp_path / "run", lonely.OneClock)
    for more, is_alone in (("", True), ("--n-envs 1", True), ("--n-envs 4", False)):
        assert rollpipe(f"evaluate {run} --episodes 4 {more}") == 0
        assert ("return 30.0" in capsys.readouterr().out) == is_alone


# -- only one in a process --------------------------------------------------------------------------------------------


@pytest.mark.slow_but_one
@pytest.mark.parametrize(
    "kind, inexact",
    [(lonely.OnlyOne, False), (lonely.OnlyOneRuns, False), (lonely.OnlyOneHidden, True)],
)
def test_an_environment_of_which_a_process_has_one_can_be_trained(tmp_path, kind, inexact, caplog):
    more = "--eval-every '32 steps' --eval-episodes 2 --final-episodes 2"
    run = trained(tmp_path / "run", kind, more, steps=96)
    assert "a process can have only one" in caplog.text
    assert (load_run(run).history.inexact is not None) == inexact
    assert inexact or "begin new episodes" not in caplog.text
    resumed(run, 128)
    assert rollpipe(f"evaluate {run} --episodes 3") == 0


@pytest.mark.slow
def test_an_exact_run_with_only_one_environment_goes_on_exactly(tmp_path):
    whole = trained(tmp_path / "whole", lonely.OnlyOne, "--exact", steps=128)
    parts = resumed(trained(tmp_path / "parts", lonely.OnlyOne, "--exact", steps=64), 128)
    check_same(whole, parts)


@pytest.mark.parametrize("kind", [lonely.OnlyOne, lonely.OnlyOneRuns])
def test_an_evaluation_plays_the_only_one(kind):
    assert evaluate(kind, random_actor(), 3, seed=1).returns.tolist() == [30.0] * 3


@pytest.mark.parametrize("kind", [lonely.OnlyOne, lonely.OnlyOneRuns])
def test_check_env_says_that_a_process_has_only_one(kind, caplog):
    assert check_env(kind) == []
    assert "a process can have only one" in caplog.text


# -- errors of close --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_error_of_close_is_a_warning_everywhere(tmp_path):
    "Whoever closes the environment."
    play = partial(evaluate, n_envs=1)
    run = tmp_path / "run"

    def warned(call, *args):
        with pytest.warns(UserWarning, match=r"CloseFails.*close\(\) raised AttributeError"):
            return call(*args)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warned(trained, run, lonely.CloseFails)
        warned(rollpipe, f"evaluate {run} --episodes 2")
        warned(trained, tmp_path / "two", lonely.CloseFails, "--workers 2 --lanes 2")
    warned(spaces_of, "CloseFails-v0")
    warned(play, lonely.CloseFails, random_actor(), 2)
    assert warned(keeper_for, lonely.CloseFails).name == "replay (episode)"

    def CloseFailsVector():
        return gym.vector.SyncVectorEnv([lonely.CloseFails])

    warned(play, CloseFailsVector, random_actor(), 2)
    with pytest.warns(UserWarning, match="close"), pytest.raises(EnvError, match="filmed"):
        evaluate(lonely.CloseFails, random_actor(), 1, record=tmp_path / "film.gif")
    assert {x.rule for x in check_env(lonely.CloseFails, raises=False)} == {ENV_CLOSE}


def test_an_error_of_the_close_of_tensors_is_a_warning():
    class Stuck(CartPole):
        def close(self):
            raise OSError("busy")

    told = r"Stuck.*close\(\) raised OSError: busy"
    items = iter(TensorCollector(Stuck, RandomTensors(), 3, 2))
    next(items)
    with pytest.warns(UserWarning, match=told):
        items.close()
    with pytest.warns(UserWarning, match=told):
        assert keeper_for(partial(Stuck, 2)).name == "copy"


def seeing(kind):
    "An environment that notes the seeds of its episodes, and the list of them."
    seen = []

    class Seen(kind):
        def begin(self, seed):
            seen.append(seed)
            super().begin(seed)

    return Seen, seen


class RandomTensors:
    def step(self, stepno, obs, act, rew, fin, /, *, hx, virtual):
        return torch.zeros(fin.shape, dtype=torch.int64), (), {}

    def reset(self, hx, at):
        return hx


# -- the stream's own seeds and options -------------------------------------------------------------------------------


def kept(stepper, n_lanes=None):
    pipe = FragmentCollector(stepper, 4)
    [keeper] = keep_environments(pipe if n_lanes is None else Lanes(pipe, n_lanes, seed=5)).values()
    return keeper.name


def test_the_test_of_keeping_plays_with_the_seeds_of_the_stream(tmp_path):
    Seen, seen = seeing(lonely.IfSeed)
    assert kept(EnvStepper(Seen, random_actor(), 2), 3) == "replay (all)"
    assert kept(EnvStepper(Seen, random_actor(), seed=4)) == "replay (all)"
    assert 0 not in seen
    seen.clear()
    pipe = Lanes(FragmentCollector(EnvStepper(Seen, random_actor(), 2), 4), 3, seed=5)
    keep_environments(pipe)
    first = seen[0]
    seen.clear()
    next(iter(pipe))
    assert seen[0] == first
    run = trained(tmp_path / "run", lonely.IfSeed)
    assert load_run(run).history.inexact is None


def test_seed_0_is_never_given():
    class Refuses(lonely.Walk):
        def begin(self, seed):
            assert seed is None or seed > 0
            super().begin(seed)

    assert kept(EnvStepper(Refuses, random_actor(), 2), 3) == "replay (episode)"


@pytest.mark.parametrize(
    "kind, options, name",
    [
        (lonely.NeedsSeed, {}, "none"),
        (lonely.NeedsSeed, dict(episode_seeds=True), "replay (all)"),
        (lonely.Clocked, {}, "none"),
        (lonely.Clocked, dict(info_keys=()), "replay (episode)"),
        (lonely.Clocked, dict(info_keys=["noise"]), "none"),
    ],
)
def test_the_test_of_keeping_has_the_options_of_the_stream(kind, options, name):
    assert kept(EnvStepper(kind, random_actor(), seed=1, **options)) == name


def test_texts_among_the_infos_do_not_matter():
    class Named(lonely.Clocked):
        def step(self, action):
            *answer, infos = super().step(action)
            return *answer, {"name": infos["name"]}

    assert keeper_for(Named).name == "replay (episode)"


def test_a_vector_is_tested_with_the_seeds_of_its_stream():
    Seen, seen = seeing(lonely.Walk)
    stepper = EnvStepper(vector_of(Seen), random_actor(), seed=3)
    keep_environments(stepper)
    tested = seen[:2]
    seen.clear()
    next(iter(stepper))
    assert seen[:2] == tested and None not in tested


# -- the price --------------------------------------------------------------------------------------------------------


@pytest.fixture
def counted(monkeypatch, tmp_path):
    "Calls something, and returns how many environments this process has made meanwhile, and the others."

    def count(call, *args, **kwargs):
        file = tmp_path / "counted.txt"
        file.unlink(missing_ok=True)
        monkeypatch.setenv("COUNTED", str(file))
        call(*args, **kwargs)
        of_process = Counter(file.read_text().split())
        return of_process.pop(str(os.getpid())), sorted(of_process.values())

    return count


# -- the price --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_start_makes_three_environments(tmp_path, counted):
    "Two in the test, and that of the training."
    assert counted(trained, tmp_path / "alone", lonely.Counted) == (3, [])
    assert counted(trained, tmp_path / "episodes", lonely.Counted, "--intrinsic 0.1") == (3, [])
    more = "--workers 2 --lanes 2"
    assert counted(trained, tmp_path / "workers", lonely.Counted, more) == (2, [1, 1])
    assert counted(check_env, "Counted-v0") == (4, [])


def test_a_resumed_run_makes_two_environments(tmp_path, counted):
    "That of its spaces, and that of the training."
    run = tmp_path / "run"
    counted(trained, run, lonely.Counted)
    assert counted(resumed, run, 128) == (2, [])


def test_a_slow_test_says_what_it_has_cost(monkeypatch, caplog):
    stepper = EnvStepper(lonely.Walk, random_actor())
    keep_environments(stepper)
    assert caplog.text == ""
    monkeypatch.setattr("rollpipe.pipes.passes.SLOW", 0.0)
    keep_environments(stepper)
    assert re.search(r"Walk.* took \d+\.\d s", caplog.text)


def test_nothing_stays_open_after_a_start(tmp_path):
    alive = set()

    class Open(lonely.Walk):
        def __init__(self):
            alive.add(self)

        def close(self):
            alive.remove(self)

    gym.register("Open-v0", Open)
    config = make_config("ppo", "Open-v0", dict(n_envs=1, n_steps=8), steps=8)
    start(tmp_path / "run", config)
    assert not alive
    refused(
        "Lanes",
        start,
        tmp_path / "other",
        {**config, "options": {**config["options"], "lanes": 0}},
        error=Exception,
    )
    assert not alive
    del gym.registry["Open-v0"]
