"""Actors that live elsewhere: what they are shown goes there, what they answer comes back, and the record is on the host."""
from itertools import islice

import pytest
import torch
from reference import assert_same
from toys import Counting

from rollpipe.layers import MLPPolicy, RecurrentPolicy
from rollpipe.pipes import DataError, EnvStepper, FragmentCollector, nested, on_policy, rollouts
from rollpipe.pipes.modules import checked_device


class Elsewhere:
    "An actor whose inputs must be on the meta device; its memory stays there, its answers need no numbers from there."
    def step(self, stepno, obs, act, rew, fin, /, *, hx, virtual):
        tensors = [stepno, rew, fin, *nested.leaves(obs), *nested.leaves(act), *nested.leaves(() if hx is None else hx)]
        assert {x.device.type for x in tensors} == {'meta'}
        self.asked = getattr(self, 'asked', 0) + 1
        hx = torch.zeros(2, fin.shape[1], 3, device='meta')
        return torch.zeros(fin.shape, dtype=torch.long), hx, dict(value=torch.ones(fin.shape))

    def reset(self, hx, at):
        assert hx.device.type == 'meta'
        return hx.clone()


def test_inputs_and_memory_are_where_the_actor_is():
    actor = Elsewhere()
    for tick in islice(EnvStepper(lambda: Counting([(3, "trunc"), (2, "term")]), actor, 2, device='meta'), 12):
        assert nested.leaves(tick.actor)[0].device.type == 'cpu' and tick.hx.device.type == 'meta'
        for _, hx in tick.final.values(): assert hx.device.type == 'meta' and hx.shape == (2, 1, 3)
    assert actor.asked >= 12


@pytest.mark.parametrize("policy", [MLPPolicy, RecurrentPolicy])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA"))])
def test_the_device_does_not_change_the_record(policy, device):
    actor = policy.for_env("Pendulum-v1", seed=0)
    plain = list(islice(FragmentCollector(EnvStepper("Pendulum-v1", actor, 3, seed=1), 7), 3))
    actor = actor.to(device)
    moved = list(islice(FragmentCollector(EnvStepper("Pendulum-v1", actor, 3, seed=1, device=device), 7), 3))
    for a, b in zip(plain, moved):
        assert {x.device.type for x in nested.leaves(b)} == {'cpu'}
        if device == "cpu": assert_same(a, b)


@pytest.mark.parametrize("make", [lambda d: EnvStepper("Pendulum-v1", MLPPolicy.for_env("Pendulum-v1"), device=d),
                                  lambda d: on_policy("Pendulum-v1", MLPPolicy.for_env("Pendulum-v1"), device=d),
                                  lambda d: rollouts("Pendulum-v1", MLPPolicy.for_env("Pendulum-v1"), device=d)])
@pytest.mark.parametrize("device", ["nonsense", "cuda:99", "", 3.5, "cuda:-1", "hpu",
                                    pytest.param("cuda", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here"))])
def test_a_device_that_is_not_there_is_named_at_construction(make, device):
    with pytest.raises(DataError) as e: make(device)
    assert e.value.pipe == "EnvStepper" and e.value.leaf == "device" and repr(device) in e.value.got and e.value.expected.startswith("cpu")


def test_asking_for_a_device_does_not_begin_to_use_it():
    checked_device("cpu")
    if torch.cuda.is_available(): checked_device("cuda")
    assert not torch.cuda.is_initialized()
