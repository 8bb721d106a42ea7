"The house's measures: a module, a function and a cell each fit into one look."
import ast
import json
import re
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MODULE, FUNCTION, CELL, USUAL_CELL = 250, 40, 100, 20  # lines; the last one is for the median


def exported(path):
    "The exported cells of a notebook, without the directive; and for each the code cell that follows it."
    nb = json.loads(path.read_text(encoding="utf-8"))
    sources = ["".join(c["source"]) for c in nb["cells"] if c["cell_type"] == "code"]
    cells = [(s, after) for s, after in zip(sources, [*sources[1:], ""]) if re.match(r"#\|\s*export", s)]
    return [(s.split("\n", 1)[1].strip(), after) for s, after in cells]


MODULES = {p.relative_to(ROOT/"nbs").with_suffix("").as_posix(): exported(p) for p in sorted((ROOT/"nbs").rglob("[0-9]*.ipynb"))}
MODULES = {name: cells for name, cells in MODULES.items() if cells}
each_module = pytest.mark.parametrize("name", MODULES)


SHOWN_WITH_NEXT = {"from_steps"}  # a constructor apart from its class, which is asserted with it


def length(text): return len(text.splitlines()) - in_sections(ast.parse(text))


def in_sections(node):
    "The lines of docstrings from `Args:` or `Returns:` on. They are looked up, as a table is, and do not count."
    texts = [ast.get_docstring(x) or "" for x in ast.walk(node) if isinstance(x, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))]
    return sum(len(re.search(r"(?ms)^(Args|Returns):\n.*|\Z", text)[0].splitlines()) for text in texts)


def definitions(text): return [x for x in ast.walk(ast.parse(text)) if isinstance(x, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))]


@each_module
def test_a_module_is_short(name):
    assert sum(length(cell) for cell, _ in MODULES[name]) <= MODULE


@each_module
def test_functions_are_short(name):
    functions = [x for cell, _ in MODULES[name] for x in definitions(cell) if not isinstance(x, ast.ClassDef)]
    long = {f.name: n for f in functions if (n := f.end_lineno - f.lineno + 1 - in_sections(f)) > FUNCTION}
    assert not long


@each_module
def test_cells_are_short_and_what_they_define_is_asserted_next(name):
    long = [(cell.splitlines()[0], length(cell)) for cell, _ in MODULES[name] if length(cell) > CELL]
    assert not long
    followed_by_none = [cell for cell, after in MODULES[name] if not after or re.match(r"#\|\s*export", after)]
    bare = {found[0].name for cell in followed_by_none if (found := definitions(cell))}
    assert bare <= SHOWN_WITH_NEXT, f"no cell of examples follows: {bare}"


def test_the_usual_cell_is_a_few_lines():
    assert statistics.median(length(cell) for cells in MODULES.values() for cell, _ in cells) <= USUAL_CELL
