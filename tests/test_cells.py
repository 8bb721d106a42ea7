"What a notebook exports is followed by a cell that shows it."

import ast
import json
import re
from pathlib import Path

NOTEBOOKS = Path(__file__).resolve().parents[1] / "nbs"
SHOWN_WITH_NEXT = {"from_steps"}  # a constructor apart from its class, which is asserted with it


def code_cells(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def is_exported(cell):
    return re.match(r"#\|\s*export", cell) is not None


def definitions(cell):
    "The names that an exported cell defines."
    body = cell.partition("\n")[2].strip()
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [node.name for node in ast.walk(ast.parse(body)) if isinstance(node, kinds)]


def test_what_a_cell_defines_is_asserted_in_the_next_cell():
    bare = set()
    for path in sorted(NOTEBOOKS.rglob("[0-9]*.ipynb")):
        cells = code_cells(path)
        for cell, next_cell in zip(cells, [*cells[1:], ""]):
            is_followed = next_cell and not is_exported(next_cell)
            if is_exported(cell) and not is_followed and (names := definitions(cell)):
                bare.add((path.relative_to(NOTEBOOKS).as_posix(), names[0]))
    assert {name for _, name in bare} <= SHOWN_WITH_NEXT, f"no cell of examples follows: {bare}"
