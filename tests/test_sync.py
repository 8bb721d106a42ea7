"""Notebooks and modules say the same thing: one notebook, one module, exported and clean."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted(
    p for p in (ROOT / "nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts
)
AGGREGATORS = {
    "__init__.py",
    "__main__.py",
    "_modidx.py",
    "all.py",
    "fluent.py",
}  # written by hand, or by nbdev itself
TUTORIALS = ROOT / "nbs/tutorials"  # they show plots, and export nothing


@cache
def contents_of(path):
    return json.loads(path.read_text(encoding="utf-8"))


def cells(path):
    "The sources of one notebook's cells with code."
    return ["".join(c["source"]) for c in contents_of(path)["cells"] if c["cell_type"] == "code"]


def default_exp(path):
    "The module that a notebook exports, as `pipes.nested`, or None."
    found = re.findall(r"^#\|[ \t]*default_exp[ \t]+(\S+)", "\n".join(cells(path)), re.M)
    assert len(found) <= 1, f"{path.name} has {len(found)} default_exp lines"
    return found[0] if found else None


def exported():
    "module -> its notebook"
    modules = {}
    for path in NOTEBOOKS:
        module = default_exp(path)
        if module is None:
            continue
        assert module not in modules, f"{path.name} and {modules[module].name} both export {module}"
        modules[module] = path
    return modules


def contents(folder):
    "path -> bytes of every source file under nbs/ and rollpipe/"
    return {
        p.relative_to(folder).as_posix(): p.read_bytes()
        for top in ("nbs", "rollpipe")
        for p in sorted((folder / top).rglob("*"))
        if p.suffix in (".py", ".ipynb") and ".ipynb_checkpoints" not in p.parts
    }


def run(program, cwd):
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    res = subprocess.run(
        [sys.executable, program], cwd=cwd, env=env, capture_output=True, text=True, timeout=240
    )
    assert res.returncode == 0, f"{program.name} failed:\n{res.stdout}{res.stderr}"


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    "A copy of the tree, so that no test writes into the one under work."
    to = tmp_path_factory.mktemp("tree")
    for name in ("settings.ini", "pyproject.toml"):
        shutil.copy2(ROOT / name, to)
    for name in ("nbs", "rollpipe"):
        shutil.copytree(
            ROOT / name,
            to / name,
            ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints"),
        )
    return to


def test_clean_and_export_change_nothing(copy):
    before = contents(copy)
    run(Path(sys.executable).with_name("nbdev_clean"), copy)
    run(Path(sys.executable).with_name("nbdev_export"), copy)
    after = contents(copy)
    stale = sorted(p for p in before.keys() | after.keys() if before.get(p) != after.get(p))
    assert not stale, (
        f"not clean or not exported: {stale}; `make export`, or `make update` if a module was edited"
    )


def unnumbered(name):
    return re.sub(r"^\d\d_", "", name)


def test_notebooks_are_numbered_and_numbers_are_unique():
    assert NOTEBOOKS and all(re.match(r"\d\d_\w+$", p.stem) for p in NOTEBOOKS), [
        p.name for p in NOTEBOOKS
    ]
    for folder in {
        p.parent for p in NOTEBOOKS
    }:  # a numbered sub-folder has its place in the same order, after the notebook of its number
        names = sorted(
            {(p.name, p.is_dir()) for p in folder.iterdir() if re.match(r"\d\d_", p.name)}
        )
        assert len({(name[:2], kind) for name, kind in names}) == len(names), (
            f"two in {folder.name} share a number: {names}"
        )


def test_a_notebook_lies_where_its_module_does():
    def module(path):
        return ".".join(map(unnumbered, path.relative_to(ROOT / "nbs").with_suffix("").parts))

    wrong = {p.as_posix(): m for m, p in exported().items() if module(p) != m}
    assert not wrong, wrong


def test_tutorials_export_nothing_and_all_others_do():
    assert {p for p in NOTEBOOKS if default_exp(p) is None} == {
        p for p in NOTEBOOKS if p.parent == TUTORIALS
    }


def test_every_module_comes_from_one_notebook():
    from_notebooks = {f"{m.replace('.', '/')}.py" for m in exported()}
    files = [p.relative_to(ROOT / "rollpipe") for p in (ROOT / "rollpipe").rglob("*.py")]
    there = {p.as_posix() for p in files if p.name not in AGGREGATORS}
    assert there - from_notebooks == set(), (
        "modules without a notebook: delete them, or write the notebook"
    )
    assert from_notebooks - there == set(), "notebooks that were not exported: run `make export`"


def test_no_cell_exports_to_another_module():
    other = {
        p.name: m
        for p in NOTEBOOKS
        for m in re.findall(r"^#\|[ \t]*exports?i?[ \t]+(\S+)", "\n".join(cells(p)), re.M)
    }
    assert not other, f"one notebook, one module: {other}"


def test_index_lists_the_modules():
    index = ast.parse((ROOT / "rollpipe/_modidx.py").read_text(encoding="utf-8")).body[0].value
    by_hand = {"rollpipe.pipes.fluent"}  # listed, with nothing in it
    assert set(ast.literal_eval(index)["syms"]) - by_hand == {f"rollpipe.{m}" for m in exported()}


def test_notebooks_assert_what_they_say():
    def checks(path):
        return [
            c
            for c in cells(path)
            if not re.search(r"^#\|\s*export", c, re.M)
            and re.search(
                r"^\s*(assert\b|test_\w+\(|with (expect_fail|ExceptionExpected)\b)", c, re.M
            )
        ]

    bare = {p.name for p in NOTEBOOKS if p.parent != TUTORIALS and not checks(p)}
    assert not bare, f"they explain and export, but assert nothing: {bare}"


def test_notebooks_hold_no_absolute_path():
    places = "home|root|tmp|work|Users|usr|opt|mnt|var|private"
    absolute = re.compile(rf"(?<![\w.:/])/(?:{places})/[\w.-]*|\b[A-Z]:\\\\\w+")
    found = {
        p.name: paths
        for p in NOTEBOOKS
        if (paths := absolute.findall(p.read_text(encoding="utf-8")))
    }
    assert not found


def test_notebooks_store_no_image():
    "Plots are shown in the tutorials."

    def kinds(path):
        return {
            k
            for c in contents_of(path)["cells"]
            for o in c.get("outputs", ())
            for k in o.get("data", ())
        }

    images = {
        p.name: found
        for p in NOTEBOOKS
        if p.parent != TUTORIALS and (found := {k for k in kinds(p) if k.startswith("image/")})
    }
    assert not images


def test_notebooks_do_not_import_their_own_module():
    "They would test a stale copy of themselves."

    def imports_itself(module, path):
        room, _, name = f"rollpipe.{module}".rpartition(".")
        return re.search(
            rf"^\s*(from rollpipe\.{re.escape(module)} import|import rollpipe\.{re.escape(module)}\b"
            rf"|from {re.escape(room)} import .*\b{re.escape(name)}\b)",
            "\n".join(cells(path)),
            re.M,
        )

    wrong = {p.name for m, p in exported().items() if imports_itself(m, p)}
    assert not wrong


def test_no_pipe_is_registered_by_name():
    "The registry of torchdata is global to the process: a cell could run only once, and two notebooks would clash."
    wrong = {
        p.name
        for p in NOTEBOOKS
        if re.search(r"^\s*@\s*(\w+\.)*functional_datapipe\b", "\n".join(cells(p)), re.M)
    }
    assert not wrong
