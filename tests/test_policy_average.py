"The average of a policy's weights: what it is for each learner, that it goes on exactly, and that it is what is evaluated and exported."

import json

import numpy as np
import pytest
import torch
from test_options_that_change import ONLINE, config_for, quietly

from rollpipe.agents import evaluate
from rollpipe.agents.evaluate import policy_of
from rollpipe.cli.main import main
from rollpipe.runs import load_agent, start
from rollpipe.runs.evaluations import read_evaluations
from rollpipe.runs.folder import load_run
from rollpipe.settings.config import build
from rollpipe.traces.journal import read_journal


def weights(network):
    return torch.cat([p.detach().double().flatten() for p in network.parameters()])


@pytest.mark.slow_but_one
@pytest.mark.parametrize("algorithm", ONLINE)
def test_each_learner_keeps_the_mean_that_is_promised(algorithm):
    "With n = 7 the newest weights count 1, 1/2, 1/3, 1/4, 1/4, ...; the mean over six updates is written as one sum."
    agent, pipe = build(
        config_for(
            algorithm,
            options=dict(
                average_policy=7, **(dict(policy_every=1) if algorithm == "crossq" else {})
            ),
        )
    )
    seen = []
    moments = []
    for _, batch in zip(range(6), pipe):
        agent.update(batch)
        seen.append(weights(agent.actor))
        moments.append([x.mean.clone() for x in agent.actor.modules() if hasattr(x, "averaged")])
    shares = np.zeros(6)
    for t in range(6):
        newest = max(1 / (t + 1), 2 / 8)
        shares *= 1 - newest
        shares[t] = newest
    np.testing.assert_allclose(shares, np.array([9, 9, 9, 9, 12, 16]) / 64)
    torch.testing.assert_close(
        weights(agent.average.policy),
        sum(s * x for s, x in zip(shares, seen)),
        rtol=1e-4,
        atol=1e-6,
    )
    assert (
        not any(p.requires_grad for p in agent.average.policy.parameters())
        and policy_of(agent) is agent.average.policy
    )
    assert seen[0].ne(seen[-1]).any()
    own = [part for part in agent.average.policy.modules() if hasattr(part, "averaged")]
    for k, part in enumerate(own):
        torch.testing.assert_close(
            part.mean, sum(float(s) * x[k] for s, x in zip(shares, moments)), rtol=1e-4, atol=1e-6
        )
    if not own:
        assert all(
            torch.equal(x, y)
            for x, y in zip(agent.average.policy.buffers(), agent.actor.buffers(), strict=True)
        )


@pytest.mark.slow
def test_it_is_evaluated_exported_and_in_the_journal_and_collects_nothing(tmp_path, capsys):
    words = "train ppo CartPole-v1 --steps 4096 --n-envs 4 --n-steps 128 --hidden 8 --critic-hidden 8 --preset none".split()
    more = ["--quiet", "--no-tensorboard", "--eval-every", "2048 steps", "--final-episodes", "5"]
    assert main([*words, *more, "--average-policy", "4", "--out", str(tmp_path / "a")]) in (0, None)
    assert main([*words, *more, "--out", str(tmp_path / "b")]) in (0, None)
    one, other = (load_agent(tmp_path / name) for name in "ab")
    assert torch.equal(weights(one.actor), weights(other.actor)) and not torch.equal(
        weights(one.actor), weights(one.average.policy)
    )
    last = next(r for r in read_evaluations(tmp_path / "a") if r["kind"] == "last")
    assert (
        last["returns"]
        == evaluate("CartPole-v1", one.average.policy, 5, seed=last["seed"]).returns.tolist()
    )
    entry, plain = (read_journal(tmp_path / name / "journal.jsonl")[-1] for name in "ab")
    assert (
        set(entry.weights) == {*plain.weights, "average"}
        and entry.weights["actor"] == plain.weights["actor"]
    )
    capsys.readouterr()
    assert main(
        ["evaluate", str(tmp_path / "a"), "--episodes", "5", "--seed", str(last["seed"])]
    ) in (0, None)
    assert f"{last['mean']:.1f}" in capsys.readouterr().out
    assert main(
        ["export", str(tmp_path / "a"), "--to", "torchscript", "--out", str(tmp_path / "x.pt")]
    ) in (0, None)
    obs = torch.randn(200, 4)
    answers = torch.jit.load(tmp_path / "x.pt")(obs)
    expected = [policy.predict(obs.numpy())[0] for policy in (one.average.policy, one.actor)]
    found = (answers[0] if isinstance(answers, tuple) else answers).numpy()
    assert (found == expected[0]).all() and (expected[0] != expected[1]).any()
    assert (
        json.loads((tmp_path / "a" / "config.json").read_text())["options"]["average_policy"] == 4
    )


def test_without_an_average_in_the_checkpoint_it_begins_with_the_weights_of_the_checkpoint(
    tmp_path,
):
    run = start(tmp_path / "run", config_for("a2c", steps=64))
    quietly(run)
    agent, pipe = build(config_for("a2c", options=dict(average_policy=9)))
    agent.load_state_dict(load_run(tmp_path / "run").agent_state)
    assert (
        torch.equal(weights(agent.average.policy), weights(run.agent.actor))
        and int(agent.average.count) == 0
    )
    agent.update(next(iter(pipe)))
    assert (
        torch.equal(weights(agent.average.policy), weights(agent.actor))
        and int(agent.average.count) == 1
    )


def test_updates_before_the_first_step_of_the_optimiser_do_not_count():
    agent, pipe = build(config_for("dqn", options=dict(average_policy=7, warmup=160)))
    counts = []
    for _, batch in zip(range(8), pipe):
        learned = agent.update(batch).get("replay_ratio", 0) > 0
        counts.append((learned, int(agent.average.count)))
        if not learned:
            assert all(
                torch.equal(x, agent.actor.state_dict()[name])
                for name, x in agent.average.policy.state_dict().items()
            )
        if counts[-1] == (True, 1):
            assert torch.equal(weights(agent.average.policy), weights(agent.actor))
    first = [learned for learned, _ in counts].index(True)
    assert first > 1 and [count for _, count in counts] == [0] * first + [*range(1, 9 - first)]
