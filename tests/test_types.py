"What users call is annotated: every public function, constructor and method of the names in a module's `__all__`."

import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "rollpipe"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def public_functions(tree):
    "(name, node, has it a `self`?) of the functions, constructors and methods that `__all__` makes public."
    exported = {
        name
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        for name in ast.literal_eval(node.value)
    }
    for node in tree.body:
        if getattr(node, "name", None) not in exported:
            continue
        if isinstance(node, FUNCTIONS):
            yield node.name, node, False
        if not isinstance(node, ast.ClassDef):
            continue
        for f in node.body:
            if isinstance(f, FUNCTIONS) and (f.name == "__init__" or not f.name.startswith("_")):
                yield (
                    f"{node.name}.{f.name}",
                    f,
                    "staticmethod" not in map(ast.unparse, f.decorator_list),
                )


def missing(source):
    "`f(x)` for every parameter without annotation, `f ->` for every result."
    for name, f, has_self in public_functions(ast.parse(source)):
        a = f.args
        params = [*a.posonlyargs, *a.args][has_self:] + [
            x for x in (a.vararg, *a.kwonlyargs, a.kwarg) if x
        ]
        yield from (f"{name}({x.arg})" for x in params if not x.annotation)
        is_setter = any(ast.unparse(d).endswith(".setter") for d in f.decorator_list)
        if not (f.returns or is_setter or f.name == "__init__"):
            yield f"{name} ->"


def test_what_counts_as_public_and_annotated():
    source = """
__all__ = ["f", "C", "D"]
def f(a, b: int, *args, c=1, **kwargs: int): pass
def g(a): pass
class C:
    def __init__(self, x): pass
    def run(self, y: int): pass
    def _run(self, y): pass
    def __len__(self): pass
    @staticmethod
    def make(z) -> int: pass
    @property
    def size(self) -> int: pass
    @size.setter
    def size(self, n: int): pass
class _D:
    def run(self, y): pass
"""
    assert list(missing(source)) == [
        "f(a)",
        "f(args)",
        "f(c)",
        "f ->",
        "C.__init__(x)",
        "C.run ->",
        "C.make(z)",
    ]


def test_public_signatures_are_annotated():
    paths = {
        p.relative_to(PACKAGE).as_posix(): p
        for p in sorted(PACKAGE.rglob("*.py"))
        if p.name != "_modidx.py"
    }
    lacking = {
        name: found
        for name, p in paths.items()
        if (found := list(missing(p.read_text(encoding="utf-8"))))
    }
    assert not lacking
