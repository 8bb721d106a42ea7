"""Habits that make code slow to read are counted, and their counts may only fall.

Lower a number of `MOST` when fewer places are left. CONTRIBUTING.md says what to write instead.
"""

import ast
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "rollpipe"
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "_modidx.py")

# names that say how a value came, and not what it is
VAGUE = {*"found kept made told came wanted own there what given taken left begun stored".split()}
COMPREHENSIONS = ast.ListComp, ast.GeneratorExp, ast.DictComp, ast.SetComp
WIDTH = 100

# habit -> most places in the package
MOST = {
    "three values in one assignment": 0,
    "vague name": 16,
    "walrus within an expression": 0,
    "nested comprehension": 15,
    "nested conditional expression": 0,
    "dense line": 5,
    "long line": 9,
}
LEAST_COMMENTS = 40  # comment lines in 1 000 lines of code


@cache
def parsed(path):
    text = path.read_text(encoding="utf-8")
    return ast.parse(text), text.split("\n")


def docstring_lines(tree):
    "The numbers of all lines of docstrings."
    numbers = set()
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) or not node.body:
            continue
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            numbers.update(range(first.lineno, first.end_lineno + 1))
    return numbers


def assigns_three_values(node):
    is_tuple = isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
    if not is_tuple or len(node.value.elts) < 3:
        return False
    return any(isinstance(target, (ast.Tuple, ast.List)) for target in node.targets)


def has_vague_name(node):
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in VAGUE


def is_nested_comprehension(node):
    if not isinstance(node, COMPREHENSIONS):
        return False
    others = [x for x in ast.walk(node) if isinstance(x, COMPREHENSIONS) and x is not node]
    return len(node.generators) > 1 or bool(others)


def is_nested_condition(node):
    if not isinstance(node, ast.IfExp):
        return False
    return any(isinstance(part, ast.IfExp) for part in (node.test, node.body, node.orelse))


def inner_walruses(tree):
    "Walruses that are not the whole test of an `if` or `while`."
    whole_tests = {id(x.test) for x in ast.walk(tree) if isinstance(x, (ast.If, ast.While))}
    walruses = [x for x in ast.walk(tree) if isinstance(x, ast.NamedExpr)]
    return [x for x in walruses if id(x) not in whole_tests]


def dense_lines(tree):
    "Lines with more than 22 expressions."
    is_docstring = docstring_lines(tree)
    expressions = [x.lineno for x in ast.walk(tree) if isinstance(x, ast.expr)]
    count = Counter(number for number in expressions if number not in is_docstring)
    return [number for number, n in count.items() if n > 22]


def long_lines(tree, lines):
    "Lines wider than the layout allows, but for those that nbdev writes."
    by_nbdev = {1}  # the title of the notebook
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            by_nbdev.update(range(node.lineno, node.end_lineno + 1))
    long = [number for number, text in enumerate(lines, 1) if len(text) > WIDTH]
    return [n for n in long if n not in by_nbdev and not lines[n - 1].startswith("# %% ")]


HABITS = {
    "three values in one assignment": assigns_three_values,
    "vague name": has_vague_name,
    "nested comprehension": is_nested_comprehension,
    "nested conditional expression": is_nested_condition,
}


@cache
def places():
    "habit -> the places where it is found, as `module:line`"
    found_at = {habit: [] for habit in MOST}
    for path in MODULES:
        tree, lines = parsed(path)
        numbers = {
            "walrus within an expression": [node.lineno for node in inner_walruses(tree)],
            "dense line": dense_lines(tree),
            "long line": long_lines(tree, lines),
        }
        for habit, has_habit in HABITS.items():
            numbers[habit] = [node.lineno for node in ast.walk(tree) if has_habit(node)]
        name = path.relative_to(PACKAGE).as_posix()
        for habit, its_numbers in numbers.items():
            found_at[habit] += [f"{name}:{number}" for number in its_numbers]
    return found_at


@pytest.mark.parametrize("habit", MOST)
def test_a_habit_does_not_spread(habit):
    n_places = len(places()[habit])
    assert n_places <= MOST[habit], f"{habit}: {n_places} places, {MOST[habit]} before"


@pytest.mark.parametrize("habit", MOST)
def test_the_numbers_are_those_of_today(habit):
    "So that what was gained is not lost again."
    n_places = len(places()[habit])
    spare = sys.version_info >= (3, 13)  # a line has one node less there
    assert n_places >= 0.9 * MOST[habit] - spare, f"{habit}: lower its number to {n_places}"


def test_paragraphs_say_what_they_are_for():
    n_comments = 0
    n_code = 0
    for path in MODULES:
        tree, lines = parsed(path)
        is_docstring = docstring_lines(tree)
        for number, text in enumerate(lines, 1):
            text = text.strip()
            if text.startswith("#"):
                n_comments += not text.startswith("# %%")
            elif text and number not in is_docstring:
                n_code += 1
    assert n_comments >= LEAST_COMMENTS * n_code / 1000, f"{1000 * n_comments / n_code:.1f}"


def test_a_habit_is_found_where_it_is():
    tree = ast.parse("a, b, c = 1, 2, 3\nfound = [x for y in z for x in y]\nf(n := 1)\n")
    assert [habit for habit, has in HABITS.items() if any(map(has, ast.walk(tree)))] == [
        "three values in one assignment",
        "vague name",
        "nested comprehension",
    ]
    assert len(inner_walruses(tree)) == 1
    assert not inner_walruses(ast.parse("if n := 1:\n    pass"))
    assert dense_lines(ast.parse("x = " + "+".join("abcdefghijklm"))) == [1]
    lines = ["", "x" * 101, "x" * 100, "__all__ = ['" + "x" * 100 + "']"]
    assert long_lines(ast.parse("\n".join(lines)), lines) == [2]
