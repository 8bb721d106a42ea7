"Steps along a gradient: Adam against its formulas, what is not finite, what is clipped."

import copy
import math
import os
import pickle
import subprocess
import sys

import pytest
import torch
from command_line import settings
from test_learner import Part
from torch import nn

from rollpipe.agents import A2C
from rollpipe.agents.gradient_learner import Adam, GradientLearner, descend
from rollpipe.layers import CategoricalPolicy, ConvTrunk, Critic
from rollpipe.pipes import on_policy
from rollpipe.pipes.data.errors import DataError


@pytest.mark.slow_but_one
@pytest.mark.parametrize("shape", [(10, 10, 4), (4, 10, 10), (36, 36, 3), (2, 36, 36)])
def test_steps_are_adams_whatever_the_layout_of_a_gradient_is(shape):
    "The gradient of a convolution has the layout of its input, and torch's fused kernel would take it for that of the weights."
    net = ConvTrunk(shape, 8)
    x = torch.randint(0, 256, (4, *shape), dtype=torch.uint8)
    target = torch.rand(4, 8)
    twin = copy.deepcopy(net)
    fused, plain = (
        kind([*part.parameters()], lr=0.01, fused=kind is Adam)
        for kind, part in ((Adam, net), (torch.optim.Adam, twin))
    )
    for _ in range(3):
        descend([*net.parameters()], fused, None, (net(x) - target).square().mean())
        plain.zero_grad()
        (twin(x) - target).square().mean().backward()
        plain.step()
    for p, like in zip(net.parameters(), twin.parameters()):
        torch.testing.assert_close(p, like, rtol=1e-4, atol=1e-5)


def test_the_gradient_is_clipped_and_every_parameter_counts_once():
    "With the learning rate of the actor, if both have it."
    common = nn.Parameter(torch.tensor([3.0, -1.0], dtype=torch.double))
    actor = Part(1.0, -2.0, shared=nn.ParameterList([common]))
    critic = Part(0.5, shared=nn.ParameterList([common]))
    agent = GradientLearner(actor, critic, lr=0.1, critic_lr=0.02, max_grad_norm=2.0)
    assert [id(p) for p in agent.params] == [id(p) for p in (actor.w, common, critic.w)]
    w, both, v = copy.deepcopy([actor.w, common, critic.w])
    adam = torch.optim.Adam([dict(params=[w, both], lr=0.1), dict(params=[v], lr=0.02)])
    for _ in range(5):
        found = agent.step(actor.total() + 0.5 * (critic.w**2).sum())["grad_norm"]
        adam.zero_grad()
        ((w**2).sum() + (both**2).sum() + 0.5 * (v**2).sum()).backward()
        norm = nn.utils.clip_grad_norm_([w, both, v], 2.0)
        adam.step()
        assert found == pytest.approx(float(norm))
        for mine, other in zip(agent.params, (w, both, v)):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    "loss, word",
    [
        (lambda w: w.sum() / 0, "non-finite loss"),
        (lambda w: w.sum() * math.nan, "non-finite loss"),
        (lambda w: (w - w.detach()).sum().sqrt(), "non-finite gradient"),
    ],
)
def test_what_is_not_finite_leaves_parameters_and_optimiser_alone(loss, word):
    actor = Part(1.0, -2.0)
    agent = GradientLearner(actor, lr=0.1)
    agent.step(actor.total())
    before = copy.deepcopy(agent.state_dict())
    with pytest.raises(DataError, match=f"surrogate.*{word}|{word}.*surrogate"):
        agent.step(loss(actor.w), "surrogate")
    torch.testing.assert_close(agent.state_dict(), before, rtol=0, atol=0)
    assert agent.step(actor.total())["grad_norm"] > 0 and torch.isfinite(actor.w).all()


def test_without_a_limit_nothing_is_clipped_and_frozen_parameters_stay():
    actor = Part(300.0, 400.0, shared=Part(7.0))
    actor.shared.w.requires_grad_(False)
    agent = GradientLearner(actor, max_grad_norm=None)
    assert agent.step(actor.total() / 2)["grad_norm"] == pytest.approx(500)
    assert actor.w.grad.tolist() == [300, 400]
    assert actor.shared.w.item() == 7 and len(agent.params) == 1


# --- Adam against torch's own


def weights(kind, **options):
    "Two parameters, and an optimiser of both in one group, or of each in a group of its own."
    w = [nn.Parameter(torch.tensor([1.0, -2.0])), nn.Parameter(torch.tensor([[3.0]]))]
    split = options.pop("split", False)
    return w, kind(
        [dict(params=[x]) for x in w] if split else w, **{**dict(lr=0.1, fused=True), **options}
    )


def steps(w, adam, present, first=0):
    "One step for each of `present`, which says which parameters have a gradient."
    for k, chosen in enumerate(present, first):
        for x, yes in zip(w, chosen):
            x.grad = torch.cos(x.detach() * (k + 1)) if yes else None
        adam.step()


def same_state(one, other):
    torch.testing.assert_close(
        [[x.detach() for x in one[0]], one[1].state_dict()],
        [[x.detach() for x in other[0]], other[1].state_dict()],
        rtol=0,
        atol=0,
    )


BOTH = (True, True)
FIRST = (True, False)
SECOND = (False, True)


@pytest.mark.parametrize(
    "present", [[BOTH] * 4, [FIRST, FIRST, BOTH, SECOND, BOTH], [SECOND, FIRST, BOTH, BOTH]]
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(split=True),
        dict(weight_decay=0.1, eps=1e-3, betas=(0.5, 0.9)),
        dict(amsgrad=True),
        dict(maximize=True),
        dict(fused=False),
        dict(lr=torch.tensor(0.1)),
    ],
)
def test_adam_makes_the_steps_of_torchs(present, options):
    mine = weights(Adam, **options)
    other = weights(torch.optim.Adam, **options)
    before = [p._version for p in mine[0]]
    for each in (mine, other):
        steps(*each, present)
    same_state(mine, other)
    assert all(
        p._version >= old + sum(there) for p, old, there in zip(mine[0], before, zip(*present))
    )


@pytest.mark.parametrize(
    "kinds", [(Adam, torch.optim.Adam), (torch.optim.Adam, Adam), (Adam, Adam)]
)
def test_either_adam_goes_on_from_the_state_of_the_other(kinds):
    whole, first, second = weights(torch.optim.Adam), *(weights(kind) for kind in kinds)
    steps(*whole, [BOTH, FIRST, BOTH, BOTH, SECOND])
    steps(*first, [BOTH, FIRST])
    steps(*second, [BOTH])  # what it knows is not what it loads
    for x, y in zip(second[0], first[0]):
        x.data.copy_(y.data)
    second[1].load_state_dict(copy.deepcopy(first[1].state_dict()))
    steps(*second, [BOTH, BOTH, SECOND], first=2)
    same_state(second, whole)


def replace_average(adam, w):
    adam.state[w[0]]["exp_avg"] = torch.ones(2)


def replace_count(adam, w):
    adam.state[w[0]]["step"] = torch.tensor(7.0)


def replace_state(adam, w):
    adam.state[w[1]] = {k: x + 1 for k, x in adam.state[w[1]].items()}


def forget(adam, w):
    adam.state.clear()


def forget_one(adam, w):
    del adam.state[w[0]]


def other_options(adam, w):
    adam.param_groups[0].update(lr=0.3, betas=(0.5, 0.5), eps=0.1, maximize=True)


def exchange_parameters(adam, w):
    adam.param_groups[0]["params"].reverse()


def add_group(adam, w):
    w.append(nn.Parameter(torch.tensor(5.0)))
    adam.add_param_group(dict(params=[w[2]], lr=0.2))


@pytest.mark.parametrize(
    "change",
    [
        replace_average,
        replace_count,
        replace_state,
        forget,
        forget_one,
        other_options,
        exchange_parameters,
        add_group,
    ],
)
def test_adam_notices_what_changes_by_hand(change):
    results = []
    for w, adam in (weights(Adam), weights(torch.optim.Adam)):
        steps(w, adam, [BOTH, BOTH, BOTH])
        change(adam, w)
        steps(w, adam, [[True] * len(w)] * 2)
        results.append((w, adam))
    same_state(*results)


def test_adam_calls_hooks_closures_and_schedulers():
    w, adam = weights(Adam)
    steps(w, adam, [BOTH, BOTH])
    seen = []

    def noting(word):
        return lambda *_: seen.append(word)

    handles = [
        adam.register_step_pre_hook(noting("before")),
        adam.register_step_post_hook(noting("after")),
    ]
    steps(w, adam, [BOTH])
    assert seen == ["before", "after"]
    for handle in handles:
        handle.remove()
    assert adam.step(lambda: seen.append("closure") or torch.tensor(4.0)) == 4 and seen[2:] == [
        "closure"
    ]
    schedule = torch.optim.lr_scheduler.LambdaLR(adam, lambda k: 0.5**k)
    steps(w, adam, [BOTH])
    schedule.step()
    assert adam.param_groups[0]["lr"] == 0.05
    other = weights(torch.optim.Adam)
    for part in ([BOTH, BOTH], [BOTH]):
        steps(*other, part)
    other[1].step()
    steps(*other, [BOTH])
    for x, y in zip(w, other[0]):
        assert torch.equal(x, y)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_of_adam_goes_on_by_itself(copied):
    one = weights(Adam)
    steps(*one, [BOTH, BOTH])
    other = copied(one)
    kept = copy.deepcopy(one[1].state_dict())
    steps(*other, [BOTH])
    torch.testing.assert_close(one[1].state_dict(), kept, rtol=0, atol=0)
    steps(*one, [BOTH])
    same_state(one, other)


def test_torch_makes_only_steps_that_are_rare(monkeypatch):
    (w, adam) = weights(Adam)
    calls = []
    of_torch = torch.optim.Adam.step

    def counted(self, closure=None):
        calls.append(self)
        return of_torch(self, closure)

    counted.hooked = True
    monkeypatch.setattr(torch.optim.Adam, "step", counted)
    steps(w, adam, [FIRST] * 5)
    steps(w, adam, [BOTH, SECOND, BOTH, FIRST])
    adam.load_state_dict(copy.deepcopy(adam.state_dict()))
    steps(w, adam, [BOTH] * 3)
    assert len(calls) == 0
    adam.param_groups[0]["maximize"] = True
    steps(w, adam, [BOTH] * 3)
    assert len(calls) == 3


@pytest.mark.slow
def test_a_training_does_not_import_torchs_compiler(tmp_path):
    "It takes a second of each command."
    code = (
        "import sys; from rollpipe.cli.main import main; "
        "code = main(); main(['train', '--resume', 'run', '--steps', '192', '--quiet']); "
        "sys.exit(code or 'torch._dynamo' in sys.modules)"
    )
    words = "train trpo CartPole-v1 --n-envs 2 --n-steps 32 --steps 128 --out run --quiet".split()
    assert (
        subprocess.run(
            [sys.executable, "-c", code, *words],
            cwd=tmp_path,
            env={**os.environ, **settings()},
            timeout=200,
        ).returncode
        == 0
    )


def test_a_state_that_was_loaded_is_not_shared():
    "Further steps of one learner change neither the state that it loaded nor the learner that this state came from."
    actor, critic = (
        net.for_env("CartPole-v1", hidden=(4,), seed=0) for net in (CategoricalPolicy, Critic)
    )
    batch = next(iter(on_policy("CartPole-v1", actor, critic, n_envs=2, n_steps=4, seed=0)))
    first, second = (A2C(copy.deepcopy(actor), copy.deepcopy(critic)) for _ in range(2))
    first.update(batch)
    state = first.state_dict()
    before = copy.deepcopy(state["optimizer"])
    second.load_state_dict(state)
    second.update(batch)
    found = first.state_dict()["optimizer"]["state"]
    assert before["state"] and all(
        torch.equal(found[k][name], x)
        for k, slots in before["state"].items()
        for name, x in slots.items()
    )
