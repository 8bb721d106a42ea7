"Should torch drop its datapipes: what is missing then, and that a stand-in of a few lines is enough."

import subprocess
import sys

import pytest
from worker_cases import environment

GONE = """
import sys
import torch.utils.data as data
for name in [n for n in sys.modules if n.startswith(("torch.utils.data.datapipes", "torch.utils.data.graph"))]: sys.modules[name] = None
for name in ("IterDataPipe", "MapDataPipe", "DFIterDataPipe", "functional_datapipe", "datapipes", "graph"): vars(data).pop(name, None)
sys.modules["torchdata"] = None      # its old versions stand on them, too
"""

STAND_IN = """
import without_datapipes
sys.modules["rollpipe.pipes.loading.datapipes"] = without_datapipes
"""

TRAIN = """
import hashlib, sys
from rollpipe.agents import TRPO, evaluate
from rollpipe.layers import Critic, GaussianPolicy
from rollpipe.pipes import (
    AdvantageBuffer, DataLoader2, EnvStepper, FragmentCollector, FragmentStacker, Lanes, ProcessReading, RewardScaler, draw,
)

actor, critic = GaussianPolicy.for_env("Pendulum-v1", hidden=(8,), seed=0), Critic.for_env("Pendulum-v1", hidden=(8,), seed=1)
pipe = EnvStepper("Pendulum-v1", actor, n_envs=2)
pipe = FragmentCollector(pipe, n_steps=32)
pipe = Lanes(pipe, n=2, seed=0)
pipe = AdvantageBuffer(pipe, critic, gamma=0.99, lam=0.95)
pipe = FragmentStacker(pipe, n=2)
print(draw(RewardScaler.inserter(after=FragmentCollector)(pipe)))
trpo = TRPO(actor, critic, max_kl=0.01)
for service in (None, ProcessReading(num_workers=2, start_method="fork")):
    with DataLoader2(pipe, reading_service=service) as loader:
        for update, batch in zip(range(2), loader): print(trpo.update(batch)["kl"])
first, second = iter(pipe), iter(pipe)
next(second)
try: next(first)
except RuntimeError as error: print("invalidated" in str(error))
print(evaluate("Pendulum-v1", actor, n_episodes=1, seed=0))
"""


def run(code):
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.slow_but_one
@pytest.mark.parametrize("name", ["IterDataPipe"])
def test_the_import_names_what_is_missing(name):
    done = run(GONE + "import rollpipe.pipes")
    assert done.returncode and f"cannot import name '{name}' from 'torch.utils.data'" in done.stderr
    assert done.stderr.rindex("datapipes.py") > done.stderr.rindex("torchdata.py"), (
        "it is missed at the one door"
    )


@pytest.mark.slow
def test_a_stand_in_gives_the_same_numbers():
    expected = run(TRAIN)
    found = run(GONE + STAND_IN + TRAIN)
    assert (expected.returncode, expected.stderr) == (0, "")
    assert (found.returncode, found.stderr) == (0, "")
    assert expected.stdout.count("\n") > 10 and found.stdout == expected.stdout
