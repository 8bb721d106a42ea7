"The house's measures: a module, a function and a cell each fit into one look."
import ast
import json
import re
import statistics
from collections import Counter
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODULE, FUNCTION, CELL, USUAL_CELL = 250, 40, 100, 20  # lines; the last one is for the median


def exported(path):
    "The exported cells of a notebook, without the directive; and for each the code cell that follows it."
    nb = json.loads(path.read_text(encoding="utf-8"))
    sources = ["".join(c["source"]) for c in nb["cells"] if c["cell_type"] == "code"]
    cells = [(s, after) for s, after in zip(sources, [*sources[1:], ""]) if re.match(r"#\|\s*export", s)]
    return [(s.split("\n", 1)[1].strip(), after) for s, after in cells]


@cache
def exported_cells():
    "(notebook, cell, the cell after it)"
    paths = sorted((ROOT/"nbs").rglob("[0-9]*.ipynb"))
    return [(path.relative_to(ROOT/"nbs").with_suffix("").as_posix(), *cells) for path in paths for cells in exported(path)]


SHOWN_WITH_NEXT = {"from_steps"}  # a constructor apart from its class, which is asserted with it


@cache
def length(text): return len(text.splitlines()) - in_sections(ast.parse(text))


def in_sections(node):
    "The lines of docstrings from `Args:` or `Returns:` on. They are looked up, as a table is, and do not count."
    texts = [ast.get_docstring(x) or "" for x in ast.walk(node) if isinstance(x, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))]
    return sum(len(re.search(r"(?ms)^(Args|Returns):\n.*|\Z", text)[0].splitlines()) for text in texts)


def definitions(text): return [x for x in ast.walk(ast.parse(text)) if isinstance(x, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))]


def test_modules_are_short():
    lines = Counter()
    for name, cell, _ in exported_cells(): lines[name] += length(cell)
    long = {name: n for name, n in lines.items() if n > MODULE}
    assert not long


def test_functions_are_short():
    functions = [(name, x) for name, cell, _ in exported_cells() for x in definitions(cell) if not isinstance(x, ast.ClassDef)]
    long = {(name, f.name): n for name, f in functions if (n := f.end_lineno - f.lineno + 1 - in_sections(f)) > FUNCTION}
    assert not long


def test_cells_are_short_and_what_they_define_is_asserted_next():
    long = {(name, cell.splitlines()[0]): n for name, cell, _ in exported_cells() if (n := length(cell)) > CELL}
    assert not long
    followed_by_none = [(name, cell) for name, cell, after in exported_cells() if not after or re.match(r"#\|\s*export", after)]
    bare = {(name, found[0].name) for name, cell in followed_by_none if (found := definitions(cell))}
    assert {name for _, name in bare} <= SHOWN_WITH_NEXT, f"no cell of examples follows: {bare}"


def test_the_usual_cell_is_a_few_lines():
    assert statistics.median(length(cell) for _, cell, _ in exported_cells()) <= USUAL_CELL
