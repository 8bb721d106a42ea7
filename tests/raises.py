"""Which `raise` statements of the package no test and no notebook reaches: `python tests/raises.py FILE`.

While the variable ROLLPIPE_RAISES names a file, the tests and `notebooks.py` write there which statements they
reach; `make raises` does so and compares. Before each `raise` of the package stands then a call of `sys.audit`,
which a hook of this process and its forks hears. A process with an interpreter of its own hears nothing.
"""

import ast
import os
import sys
from collections import Counter
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EVENT = "rollpipe.raise"
FILE = os.environ.get("ROLLPIPE_RAISES")


def call_before(node, event, value):
    "A statement that calls `sys.audit`, on the line of `node`, so that tracebacks stay as they are."
    call = ast.parse(f"__import__('sys').audit({event!r}, {value!r})").body[0]
    for part in ast.walk(call):
        ast.copy_location(part, node)
    return call


class Marks(ast.NodeTransformer):
    """Puts a call before each `raise`, which says `module:function:number`.

    The number counts the statements of a function, so it is the same in a module and in a notebook's cell.
    """

    def __init__(self, module):
        self.module = module
        self.scope = []
        self.counts = Counter()
        self.lines = {}  # place -> line

    def visit_FunctionDef(self, node):
        self.scope.append(node.name)
        self.generic_visit(node)
        self.scope.pop()
        return node

    visit_AsyncFunctionDef = visit_FunctionDef
    visit_ClassDef = visit_FunctionDef

    def visit_Raise(self, node):
        scope = ".".join(self.scope)
        place = f"{self.module}:{scope}:{self.counts[scope]}"
        self.counts[scope] += 1
        self.lines[place] = node.lineno
        return [call_before(node, EVENT, place), node]


class MarkedModule(SourceFileLoader):
    "Compiles a module with its marks; the compiled form is not kept."

    def get_code(self, name):
        tree = ast.parse(self.get_data(self.path))
        return compile(Marks(name).visit(tree), self.path, "exec", dont_inherit=True)


class MarkedPackage:
    """Finds the modules of rollpipe, and no others.

    Args:
        loader: `loader(name, path)`: a loader that compiles a module with its marks
    """

    def __init__(self, loader=MarkedModule):
        self.loader = loader

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] != "rollpipe":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = self.loader(spec.loader.name, spec.loader.path)
        return spec


def listen():
    "Write each place that is reached, once, into the file."
    file = os.path.abspath(FILE)
    reached = set()

    def hear(event, arguments):
        if event != EVENT or arguments[0] in reached:
            return
        reached.add(arguments[0])
        with open(file, "a") as lines:
            lines.write(f"{arguments[0]}\n")

    sys.addaudithook(hear)
    sys.meta_path.insert(0, MarkedPackage())


def never_reached(reached):
    "The `file:line: source` of the statements that are not among the places reached, and the number of all."
    missing = []
    n_statements = 0
    for path in sorted((ROOT / "rollpipe").rglob("*.py")):
        name = path.relative_to(ROOT).with_suffix("")
        text = path.read_text(encoding="utf-8")
        marks = Marks(".".join(name.parts).removesuffix(".__init__"))
        marks.visit(ast.parse(text))
        n_statements += len(marks.lines)
        for place, line in marks.lines.items():
            if place not in reached:
                source = text.splitlines()[line - 1].strip()
                missing.append(f"{path.relative_to(ROOT)}:{line}: {source}")
    return missing, n_statements


def main():
    reached = {*Path(sys.argv[1]).read_text().splitlines()}
    missing, n_statements = never_reached(reached)
    for line in missing:
        print(line)
    print(f"{len(missing)} of {n_statements} raise statements were reached by no test or notebook")


if __name__ == "__main__":
    main()
elif FILE:
    listen()
