"Learning curves in a notebook."
import json
import pickle
import subprocess
import sys

import pytest

from rollpipe.runs.plots import learning_curve, svg

FIRST_CELL = """
import sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
found = shell.run_cell(f"from rollpipe.runs.plots import learning_curve; learning_curve({sys.argv[1]!r})")
assert "matplotlib.pyplot" not in sys.modules
shell.display_formatter.active_types = shell.display_formatter.format_types  # as in a notebook
shell.display_formatter.active_types = shell.display_formatter.format_types  # as in a notebook
shown = shell.display_formatter.format(found.result)[0]
print("shown:", sorted(shown), shown.get("image/png", b"")[:4])
"""


@pytest.fixture
def run(tmp_path):
    (tmp_path/"config.json").write_text(json.dumps(dict(algorithm="trpo", env="Toy", options={})))
    (tmp_path/"metrics.jsonl").write_text('{"steps": 1, "return_mean": 1}\n{"steps": 2, "return_mean": 2}\n')
    return tmp_path


def test_the_first_cell_of_a_notebook_shows_a_picture(run):
    done = subprocess.run([sys.executable, "-c", FIRST_CELL, str(run)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "image/png" in done.stdout and "PNG" in done.stdout


def test_a_curve_can_be_pickled(run):
    assert pickle.loads(pickle.dumps(learning_curve(run)))._repr_png_()[:4] == b"\x89PNG"


def test_names_are_no_formulas_and_none_is_left_out(run):
    "A dollar sign would begin a formula, and matplotlib leaves out what begins with `_`."
    for name in ("_a", "b $\\frac$"):
        (run/name).mkdir()
        (run/name/"config.json").write_text(json.dumps(dict(algorithm="trpo", env="Toy", name=name)))
        (run/name/"metrics.jsonl").write_text((run/"metrics.jsonl").read_text())
    text = svg(learning_curve([run/"_a", run/"b $\\frac$"]), "x")
    assert "> _a</text>" in text and ">b $\\frac$</text>" in text
