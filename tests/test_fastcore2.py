"""nbdev holds the developers' fastcore below 2, users get the newest: so the package and its command run with that."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
UNREACHABLE = re.compile(
    r"ConnectionError|NewConnection|Max retries|timed? ?out|name resolution|Network is unreachable"
    r"|Could not fetch URL",
    re.I,
)


@pytest.fixture(scope="module")
def newest(tmp_path_factory):
    "A folder with the newest fastcore from the package index and nothing else"
    to = tmp_path_factory.mktemp("fastcore")
    env = {k: v for k, v in os.environ.items() if k not in ("PIP_CONSTRAINT", "PIP_USER")}
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--disable-pip-version-check",
        "--retries",
        "2",
    ]
    res = subprocess.run(
        [*pip, "--no-deps", "--target", str(to), "fastcore>=2"],
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
    )
    if res.returncode and UNREACHABLE.search(res.stderr) and os.environ.get("CI") != "true":
        pytest.skip(
            f"no package index to take the newest fastcore from: {res.stderr.strip().splitlines()[-1]}"
        )
    assert res.returncode == 0, res.stderr
    return to


def python(newest, *args):
    "Run Python in the project's root with the newest fastcore in front"
    res = subprocess.run(
        [sys.executable, *args],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(newest)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert res.returncode == 0, res.stdout + res.stderr
    return res.stdout


@pytest.mark.slow
def test_the_newest_fastcore_is_the_one_imported(newest):
    out = python(
        newest, "-c", "import rollpipe, fastcore; print(fastcore.__version__, fastcore.__file__)"
    )
    version, file = out.split(maxsplit=1)
    assert int(version.split(".")[0]) >= 2 and Path(file.strip()).is_relative_to(newest)


@pytest.mark.slow
def test_every_module_imports(newest):
    code = (
        "import importlib, pkgutil, rollpipe\n"
        "for m in pkgutil.walk_packages(rollpipe.__path__, 'rollpipe.'):\n"
        "    importlib.import_module(m.name); print(m.name)"
    )
    assert "rollpipe.pipes.data.nested" in python(newest, "-c", code).split()


@pytest.mark.slow
def test_the_command_line_answers(newest):
    assert "train" in python(newest, "-m", "rollpipe", "--help")
    assert "--max" in python(
        newest, "-m", "rollpipe", "train", "trpo", "--help"
    )  # options made from signatures
