"Trainings that are killed at random instants and resumed give the numbers of trainings that were never interrupted."

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import guillotine

NEEDS = {
    **dict.fromkeys(("halfcheetah", "hopper", "walker2d", "ant", "humanoid"), "mujoco"),
    **dict.fromkeys(("lunar", "bipedal"), "Box2D"),
    "pong": "ale_py",
}


@pytest.mark.timeout(900)
@pytest.mark.slow
@pytest.mark.parametrize("name", guillotine.CASES)
def test_a_killed_training_gives_the_numbers_of_its_twin(name):
    "Killed at a random instant, at once after a resume, and while it saves."
    if name in NEEDS and find_spec(NEEDS[name]) is None:
        pytest.skip(f"needs {NEEDS[name]}")
    # A process that has used Ray before, for another test, cannot be forked any more.
    if name == "ray":
        command = [sys.executable, guillotine.__file__, *"--only ray --rounds 1 --kills 3".split()]
        result = subprocess.run(command, capture_output=True, text=True, timeout=800)
        assert result.returncode == 0, result.stdout + result.stderr
        assert re.search(r"same +ray round 0, killed [1-9]\d* times", result.stdout)
        return
    (line,) = guillotine.try_case(name, guillotine.CASES[name], rounds=1, kills=3, seed=0)
    assert line.differ == [] and line.killed >= 1


@pytest.mark.parametrize(
    "x, y, same",
    [
        (0.0, -0.0, False),
        (float("nan"), float("nan"), True),
        (1, 1.0, True),
        (torch.zeros(2), torch.zeros(3), False),
        (torch.zeros(1), -torch.zeros(1), False),
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), True),
        (torch.zeros(1), torch.zeros(1, dtype=torch.float64), False),
    ],
)
def test_numbers_are_compared_bit_for_bit(x, y, same):
    assert guillotine.same(x, y) == same
