"The runner of notebooks tells each that does not pass, whatever it does, and ends what it has started."

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from worker_cases import gone

ROOT = Path(__file__).resolve().parent.parent
CELLS = {
    "passes": [
        "import os, sys",
        "assert __name__ == '__main__' and vars(sys.modules['__main__']) is globals() and 'rollpipe' not in sys.modules",
        "import atexit, pathlib; atexit.register(pathlib.Path('passed').absolute().write_text, 'passed')",
    ],
    "fails": ["print('said before')", "assert False, 'planted'"],
    "hangs": ["import time; time.sleep(600)"],
    "is killed": ["import os, signal; os.kill(os.getpid(), signal.SIGKILL)"],
    "leaves": ["import os; os._exit(0)"],
    "draws another graph": ["print('○ Graph')"],
    "leaves a process": [
        "import subprocess; print(subprocess.Popen(['sleep', '600']).pid, file=open('pid', 'w'))"
    ],
}
DRAWN = [
    dict(output_type="stream", name="stdout", text=["○ Another\n"])
]  # is stored with what draws
WANTED = {
    "passes": "ok",
    "leaves a process": "ok",
    "fails": "status 1",
    "draws another graph": "status 1",
    "leaves": "status 0",
    "is killed": "signal 9",
    "hangs": "more than 5.0 s",
}


def notebook(path, cells):
    cells = [
        dict(
            cell_type="code",
            id=f"c{k}",
            execution_count=None,
            metadata={},
            outputs=DRAWN if "○" in x else [],
            source=x,
        )
        for k, x in enumerate(cells)
    ]
    path.write_text(json.dumps(dict(cells=cells, metadata={}, nbformat=4, nbformat_minor=5)))
    return path


@pytest.mark.slow
def test_each_notebook_is_told(tmp_path):
    paths = [notebook(tmp_path / f"{name}.ipynb", cells) for name, cells in CELLS.items()]
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "notebooks.py", "--limit", "5", *paths],
        cwd=ROOT,
        text=True,
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"},
    )
    told = [
        line
        for line in done.stdout.splitlines()
        if line.startswith(("notebook ok: ", "NOTEBOOK FAILED: "))
    ]
    assert done.returncode == 1 and "5 of 7 have not passed" in done.stderr and len(told) == 7, (
        done.stdout,
        done.stderr,
    )
    for name, word in WANTED.items():
        (line,) = (line for line in told if f"/{name}.ipynb" in line)
        assert (
            line.startswith("notebook ok" if word == "ok" else "NOTEBOOK FAILED") and word in line
        ), line
    assert "it drew ['○ Graph'], but stored is ['○ Another']" in done.stdout
    assert (
        "planted" in done.stdout
        and "said before" not in done.stderr
        and "time.sleep" not in done.stderr
    )
    assert "line 1 in <module>" in done.stdout  # where the one that hangs was
    assert (tmp_path / "passed").read_text() == "passed" and gone(
        [int((tmp_path / "pid").read_text())], 5
    ) == []
