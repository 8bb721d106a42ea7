"""What users call is annotated: every public function, constructor and method of the names in a module's `__all__`.

`python tests/test_types.py` prints how much is missing in each room, and the modules of `NOT_YET`.
"""
import ast
from collections import Counter
from pathlib import Path
from textwrap import wrap

import pytest

PACKAGE = Path(__file__).resolve().parents[1]/"rollpipe"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
NOT_YET = set("""
agents.a2c agents.checkpoint agents.dqn agents.evaluate agents.learner agents.losses agents.metrics agents.natural_gradient agents.npg
agents.parallel_evaluation agents.ppo agents.reinforce agents.schedules agents.tabular agents.td agents.trpo agents.vtrace cli
layers.actor layers.blocks layers.distributions layers.encoders layers.heads layers.mlp layers.policies layers.q_networks layers.recurrent
logs options pipes.advantage pipes.batches pipes.collecting pipes.crew pipes.data pipes.envs pipes.episodes pipes.errors pipes.fluent
pipes.forms pipes.fragments pipes.frames pipes.graph pipes.invariants pipes.lanes pipes.manual pipes.nested pipes.off_policy pipes.pipe
pipes.pool pipes.reading pipes.recipes pipes.records pipes.replay pipes.shared pipes.slots pipes.sources pipes.stepper pipes.steps
pipes.store pipes.sum_tree pipes.taps pipes.torchdata pipes.transforms pipes.vector pipes.weights pipes.workers plots testing.actor_rules
testing.contract testing.env_rules testing.pipe_rules train
""".split())  # annotate a module, and take it off this list


def public_functions(tree):
    "(name, node, has it a `self`?) of the functions, constructors and methods that `__all__` makes public."
    exported = {name for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
                for name in ast.literal_eval(node.value)}
    for node in tree.body:
        if getattr(node, "name", None) not in exported: continue
        if isinstance(node, FUNCTIONS): yield node.name, node, False
        if not isinstance(node, ast.ClassDef): continue
        for f in node.body:
            if isinstance(f, FUNCTIONS) and (f.name == "__init__" or not f.name.startswith("_")):
                yield f"{node.name}.{f.name}", f, "staticmethod" not in map(ast.unparse, f.decorator_list)


def missing(source):
    "`f(x)` for every parameter without annotation, `f ->` for every result."
    for name, f, has_self in public_functions(ast.parse(source)):
        a = f.args
        params = [*a.posonlyargs, *a.args][has_self:] + [x for x in (a.vararg, *a.kwonlyargs, a.kwarg) if x]
        yield from (f"{name}({x.arg})" for x in params if not x.annotation)
        is_setter = any(ast.unparse(d).endswith(".setter") for d in f.decorator_list)
        if not (f.returns or is_setter or f.name == "__init__"): yield f"{name} ->"


def modules():
    "module -> what its public signatures lack."
    paths = {".".join(p.relative_to(PACKAGE).with_suffix("").parts): p for p in sorted(PACKAGE.rglob("*.py")) if p.name != "_modidx.py"}
    return {name: list(missing(p.read_text(encoding="utf-8"))) for name, p in paths.items()}


MODULES = modules()


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
    assert list(missing(source)) == ["f(a)", "f(args)", "f(c)", "f ->", "C.__init__(x)", "C.run ->", "C.make(z)"]


@pytest.mark.parametrize("module", sorted(MODULES.keys() - NOT_YET))
def test_public_signatures_are_annotated(module):
    assert not MODULES[module], f"{module} lacks annotations: {', '.join(MODULES[module])}"


def test_the_list_holds_only_what_lacks_annotations():
    done = {m for m in NOT_YET if not MODULES.get(m)}
    assert not done, f"annotated, renamed or removed, so take them off NOT_YET: {done}"


if __name__ == "__main__":
    lacking, functions = Counter(), Counter()
    for module, names in MODULES.items():
        room = module.split(".")[0]
        functions[room] += len({n.split("(")[0].split(" ")[0] for n in names})
        lacking[room] += len(names)
    for room in sorted(functions, key=functions.get): print(f"{room:12} {functions[room]:4} functions, {lacking[room]:4} annotations")
    print("\n" + "\n".join(wrap(" ".join(m for m, names in MODULES.items() if names), 138)))
