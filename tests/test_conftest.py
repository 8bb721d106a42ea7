"The tests say which versions they were run with."

import platform
from types import SimpleNamespace

import conftest
import gymnasium
import numpy as np
import optree
import torch


def test_the_summary_names_python_and_the_packages_with_their_versions():
    lines = []
    conftest.pytest_terminal_summary(SimpleNamespace(write_line=lines.append))
    [line] = lines
    parts = dict(part.split() for part in line.removeprefix("versions: ").split(", "))
    assert parts["python"] == platform.python_version()
    for package in (gymnasium, np, optree, torch):
        assert parts[package.__name__] == package.__version__
    assert [*parts] == ["python", *conftest.NAMED_PACKAGES]
