"What the algorithms learn with the defaults of the command line: greedy return over 20 fresh episodes, for three seeds."

from collections import deque
from itertools import islice
from math import inf
from time import perf_counter

import pytest
from toys import Recall

from rollpipe.agents.evaluate import evaluate
from rollpipe.agents.natural_gradient import TRPO
from rollpipe.agents.policy_gradient import PPO
from rollpipe.layers import Critic, MLPPolicy, RecurrentPolicy
from rollpipe.pipes import on_policy
from rollpipe.runs.folder import start
from rollpipe.runs.logs import read_metrics
from rollpipe.runs.training import train
from rollpipe.settings.config import build, make_config

pytestmark = pytest.mark.slow
SEEDS = range(3)
EVERY = 5000
ENOUGH = {"CartPole-v1": 475, "Pendulum-v1": -200}
RUNS = [
    (algorithm, "CartPole-v1", 50_000)
    for algorithm in ("trpo", "npg", "reinforce", "a2c", "ppo", "vtrace")
] + [(algorithm, "Pendulum-v1", 100_000) for algorithm in ("trpo", "ppo")]


def delayed(batches, n):
    "Each batch `n` batches late: the weights that collected it are `n` updates old."
    waiting = deque()
    for batch in batches:
        waiting.append(batch)
        if len(waiting) > n:
            yield waiting.popleft()


def learn(algorithm, env, steps, seed, lag=0):
    """Train for `steps`; returns the last evaluation, the steps after which the goal was reached first and for good (None if it was
    not), and the seconds spent in collecting and in updates."""
    agent, pipe = build(make_config(algorithm, env, seed=seed))
    done = 0
    scores = {}
    seconds = dict(collect=0.0, update=0.0)
    stream = iter(pipe)
    batches = delayed(stream, lag)
    while done < steps:
        begin = perf_counter()
        batch = next(batches)
        middle = perf_counter()
        metrics = agent.update(batch)
        seconds["collect"] += middle - begin
        seconds["update"] += perf_counter() - middle
        assert metrics["lag"] == min(lag, max(0, done // int(batch.valid.sum())))
        assert algorithm != "trpo" or metrics["kl"] <= agent.max_kl
        done += int(batch.valid.sum())
        if done // EVERY > len(scores):
            result = evaluate(env, agent.actor, 20, seed=10_000 + seed)
            scores[done] = result.mean
    stream.close()
    good = [score >= ENOUGH[env] for score in scores.values()]
    first = next((at for at, ok in zip(scores, good) if ok), None)
    for_good = next((at for i, at in enumerate(scores) if all(good[i:])), None)
    return result, first, for_good, seconds


@pytest.mark.parametrize("algorithm, env, steps", RUNS)
def test_learns(algorithm, env, steps, capsys):
    found = []
    for seed in SEEDS:
        result, first, for_good, seconds = learn(algorithm, env, steps, seed)
        found.append((result.mean, first, for_good))
        phases = ", ".join(f"{name} {s:.1f} s" for name, s in seconds.items())
        with capsys.disabled():
            print(
                f"\n{algorithm} on {env}, seed {seed}: {ENOUGH[env]} first after {first} steps, for good after {for_good}; "
                f"after {steps}: {result}; {phases}",
                end="",
            )
    assert all(mean >= ENOUGH[env] and for_good is not None for mean, _, for_good in found), found


@pytest.mark.parametrize("seed", SEEDS)
def test_vtrace_learns_from_old_data(seed, capsys):
    "As free-running workers would deliver them: batches that are four updates old."
    result, first, for_good, _ = learn("vtrace", "CartPole-v1", 50_000, seed, lag=4)
    with capsys.disabled():
        print(
            f"\nvtrace, four updates late, seed {seed}: first after {first} steps, for good after {for_good}; {result}",
            end="",
        )
    assert result.mean >= 475


@pytest.mark.parametrize("seed", SEEDS)
def test_vtrace_learns_from_free_running_workers(seed, capsys, tmp_path):
    run = start(
        tmp_path,
        make_config(
            "vtrace", "CartPole-v1", dict(lanes=2), seed=seed, steps=50_000, workers=2, lag=None
        ),
    )
    train(run, progress=False, tensorboard=False)
    result = evaluate("CartPole-v1", run.agent.actor, 20, seed=10_000 + seed)
    lags = read_metrics(tmp_path)["lag"]
    with capsys.disabled():
        print(
            f"\nvtrace, 2 free-running workers, seed {seed}: mean lag {lags.mean():.1f}; {result}",
            end="",
        )
    assert result.mean >= 475


@pytest.mark.parametrize(
    "learner, updates, memory, seed",
    [
        *(
            (learner, updates, True, seed)
            for learner, updates in ((PPO, 30), (TRPO, 150))
            for seed in SEEDS
        ),
        (TRPO, 150, False, 0),
    ],
)
def test_recurrent_learners_recall_a_cue(learner, updates, memory, seed, capsys):
    """After 20 steps, with their defaults and so many batches of 32 environments with 3 episodes each. Without a memory, TRPO answers
    by chance."""
    if memory:
        actor = RecurrentPolicy.for_env(Recall, hidden=(32,), memory=32, normalize=False, seed=seed)
    else:
        actor = MLPPolicy.for_env(Recall, normalize=False, seed=seed)
    critic = Critic.for_env(Recall, hidden=(32,), normalize=False, seed=seed + 1)
    agent = learner(actor, critic, seed=seed)
    # the answer alone is rewarded: longer advantage estimates would only add the noise of later rows to earlier ones
    batches = iter(
        on_policy(Recall, actor, critic, n_envs=32, n_steps=63, gamma=0.9, lam=0.0, seed=seed)
    )
    for batch in islice(batches, updates):
        assert agent.update(batch).get("kl", 0) <= getattr(agent, "max_kl", inf)
    batches.close()
    right = (evaluate(Recall, actor, 200, seed=1000 + seed).mean + 1) / 2
    with capsys.disabled():
        print(f"\n{learner.__name__}, memory {memory}, seed {seed}: {right:.0%} right", end="")
    assert right > 0.9 if memory else right < 0.4
