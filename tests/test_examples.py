"""Each file in `examples/` runs as a user runs it, and reaches what it is there to show."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"

# Name of the file -> (what `main` returns, in words; a test of it).
# The best mean return of the delivery is 0.67: two of ten houses are 3.3 steps apart on average, each costs 0.1, and the last
# action pays 1. The 50 episodes that are played may be a little luckier.
REACHED = {
    "auxiliary_loss": ("the last error over the first one", lambda x: x < 0.5),
    "callbacks": ("one line and one metric an update", lambda x: x is True),
    "fork_and_compare": ("the last update at which both are equal", lambda x: x >= 4),
    "image_policy": ("the share of dots that are caught", lambda x: x > 0.5),
    "own_algorithm": ("the return of CartPole", lambda x: x > 200),
    "own_environment": ("the return of the delivery", lambda x: 0.5 < x <= 0.75),
    "own_pipe": ("the divergence of the last update", lambda x: 0 <= x < 0.1),
    "ray_cluster": ("equal weights", lambda x: x is True),
    "record_and_learn": ("the return of the student", lambda x: x > 400),
    "two_groups_of_agents": ("rewards that add up to 1", lambda x: abs(x - 1) < 1e-5),
}


def test_every_example_says_what_it_reaches_and_is_short():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == REACHED.keys()
    for path in EXAMPLES.glob("*.py"):
        lines = path.read_text(encoding="utf-8").splitlines()
        assert len(lines) < 80 and lines[0].startswith('"""'), path.name


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(REACHED))
def test_an_example_runs_and_reaches_what_it_shows(name, tmp_path):
    if name == "ray_cluster":
        pytest.importorskip("ray")
    code = f"import sys; sys.path.insert(0, {str(EXAMPLES)!r}); import {name}; print(repr({name}.main()))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "MPLBACKEND": "Agg"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    reached = eval(done.stdout.splitlines()[-1], {})
    meaning, holds = REACHED[name]
    assert holds(reached), f"{meaning}: {reached}"
