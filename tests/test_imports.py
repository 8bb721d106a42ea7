"""Imports run one way: the block in ARCHITECTURE.md, and the numbers of the notebooks."""

import ast
import configparser
import importlib
import json
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "rollpipe"
TEXT = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
TOP = "rollpipe"


def name_of(path):
    "`rollpipe/pipes/data/nested.py` -> `pipes.nested`; a package's `__init__` is the package; the top is ''"
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(p): p for p in sorted(PACKAGE.rglob("*.py")) if p.name != "_modidx.py"}
AGGREGATES = {n for n, p in FILES.items() if p.name in ("__init__.py", "all.py", "fluent.py")}
MODULES = sorted(FILES.keys() - AGGREGATES)


@cache
def imports(module, deep=True):
    "All (dotted name, names) that a module imports, relative ones resolved; `deep`: those inside functions too."
    path = FILES[module]
    base = [TOP, *filter(None, module.split("."))]
    if path.name != "__init__.py":
        base = base[:-1]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = [tree]
    found = []
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            found += [(a.name, ()) for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = base[: len(base) - node.level + 1] if node.level else []
            found.append(
                (
                    ".".join([*start, *filter(None, [node.module])]),
                    tuple(a.name for a in node.names),
                )
            )
        if deep or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            nodes += ast.iter_child_nodes(node)
    return found


def inner(module):
    "The modules and packages of rollpipe that `module` imports, by name"
    out = set()
    for name, names in imports(module):
        if name.split(".")[0] != TOP:
            continue
        name = name[len(TOP) + 1 :]
        submodules = {f"{name}.{n}".lstrip(".") for n in names} & FILES.keys()
        out |= submodules
        if not names or len(submodules) < len(names):
            out.add(name)
    return out - {""}


def rooms():
    "room -> what it may import, from the fenced block"
    block = re.search(r"^```imports\n(.*?)^```", TEXT, re.M | re.S)
    assert block, "ARCHITECTURE.md has no ```imports block"
    pairs = [line.split("->") for line in block[1].splitlines() if line.strip()]
    return {left.strip(): right.split() for left, right in pairs}


def numbers():
    "module -> the numbers of its folders and its notebook, which give its place in the import order of its top room"
    out = {}
    for path in (ROOT / "nbs").rglob("*.ipynb"):
        text = "\n".join(
            "".join(c["source"]) for c in json.loads(path.read_text(encoding="utf-8"))["cells"]
        )
        found = re.search(r"^#\|[ \t]*default_exp[ \t]+(\S+)", text, re.M)
        if found:
            out[found[1]] = tuple(
                part[:2] for part in path.relative_to(ROOT / "nbs").parts if part[:2].isdigit()
            )
    return out


def within(module, place):
    return module == place or module.startswith(f"{place}.")


def top(module):
    return module.split(".")[0]


def room_of(module, table):
    "The innermost room of `table` that `module` is in: the longest name that it begins with"
    return max((room for room in table if within(module, room)), key=len, default=None)


def test_the_table_names_every_room():
    packages = {m for m in AGGREGATES if FILES[m].name == "__init__.py"} - {""}
    there = packages | {m for m in MODULES if "." not in m}
    assert there == set(rooms()), (
        f"ARCHITECTURE.md names {set(rooms()) - there} too many, {there - set(rooms())} too few"
    )


def test_top_rooms_have_no_cycle():
    table = {r: {top(a) for a in allowed} for r, allowed in rooms().items() if "." not in r}
    table = {r: allowed - {r} for r, allowed in table.items()}
    done = set()
    while free := {r for r in table if r not in done and table[r] <= done}:
        done |= free
    assert done == set(table), f"a cycle among {set(table) - done}"


def test_modules_have_no_cycle():
    left = {m: inner(m) & set(MODULES) for m in MODULES}
    while free := {m for m in left if not left[m] & left.keys()}:
        left = {m: i for m, i in left.items() if m not in free}
    assert not left, f"a cycle among {sorted(left)}"


def test_imports_run_in_the_stated_direction():
    table = rooms()

    def may(room, name):
        its = room_of(name, table)
        return its == room or any(within(name, a) and its == room_of(a, table) for a in table[room])

    wrong = {
        m: found
        for m in MODULES
        if (found := {i for i in inner(m) if not may(room_of(m, table), i)})
    }
    assert not wrong, f"more than ARCHITECTURE.md allows: {wrong}"


def test_a_module_imports_only_lower_numbers():
    number = numbers()

    def members(name):
        return [m for m in MODULES if within(m, name)] if name in AGGREGATES else [name]

    wrong = {
        (module, i): number[m]
        for module in MODULES
        for i in inner(module)
        for m in members(i)
        if top(m) == top(module) and number[m] >= number[module]
    }
    assert not wrong


# `rollpipe.runs` alone has what a run needs: its configuration, and how two runs differ.
GATHERED = {("runs", "settings.config"), ("runs", "traces.differences")}


def test_an_aggregate_gathers_its_own_room():
    others = {(m, i) for m in AGGREGATES - {"", "all"} for i in inner(m) if top(i) != top(m)}
    wrong = others - GATHERED
    assert not wrong, f"an `__init__` or `all` imports what is not of its room: {wrong}"


def test_no_folder_is_full():
    count = {room: sum(m.rpartition(".")[0] == room for m in MODULES) for room in AGGREGATES}
    assert max(count.values()) < 25, count


def test_torchdata_has_one_door():
    found = {m for m in FILES for n, _ in imports(m) if n.split(".")[0] == "torchdata"}
    assert found <= {"pipes.graph.torchdata"}, "go through pipes.graph.torchdata"


def test_the_datapipes_of_torch_have_one_door():
    pipes = {"IterDataPipe", "MapDataPipe", "DataLoader2"}
    found = {
        m
        for m in FILES
        for n, names in imports(m)
        if n.startswith(("torch.utils.data.datapipes", "torch.utils.data.graph"))
        or n == "torch.utils.data"
        and pipes & set(names)
    }
    assert found == {"pipes.loading.datapipes"}, "go through pipes.graph.torchdata"


def test_algorithms_do_not_import_one_another():
    shared = re.search(r"\(shared: ([^)]*)\)", TEXT)
    assert shared, "ARCHITECTURE.md does not list what the algorithms share"
    shared = {f"agents.{n}" for n in re.findall(r"`([\w.]+)`", shared[1])}
    algorithms = {m for m in MODULES if top(m) == "agents"} - shared
    wrong = {m: inner(m) & algorithms - {m} for m in algorithms}
    assert not any(wrong.values()), wrong


def test_outside_imports_are_declared():
    cfg = configparser.ConfigParser()
    cfg.read(ROOT / "settings.ini", encoding="utf-8")
    declared = {
        re.match(r"[\w.-]+", r)[0].lower() for r in shlex.split(cfg["DEFAULT"]["requirements"])
    }
    declared |= {"typing_extensions"}  # imported for the type checker alone, which knows it
    outside = {(n.split(".")[0], m) for m in FILES for n, _ in imports(m, deep=False)}
    wrong = {
        (n, m)
        for n, m in outside
        if n not in sys.stdlib_module_names and n != TOP and n.lower() not in declared
    }
    assert not wrong, (
        f"imported at the top of a module, but no requirement in settings.ini: {wrong}"
    )
    unguarded = {m for m in FILES if imports_for_types(m) - guarded_for_types(m)}
    assert not unguarded, "typing_extensions is imported outside of `if TYPE_CHECKING:`"


def imports_for_types(module):
    "The lines of a module that import `typing_extensions`."
    tree = ast.parse(FILES[module].read_text(encoding="utf-8"))
    return lines_that_import_typing_extensions(tree)


def guarded_for_types(module):
    "Those of them in a block `if TYPE_CHECKING:`."
    tree = ast.parse(FILES[module].read_text(encoding="utf-8"))
    blocks = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    return set().union(*map(lines_that_import_typing_extensions, blocks))


def lines_that_import_typing_extensions(tree):
    return {
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "typing_extensions"
    }


def test_the_names_of_a_first_program_are_those_of_the_rooms():
    "What a type checker reads, what `__all__` lists, and what is found, is the same. Nothing is imported before it is asked for."
    tree = ast.parse(FILES[""].read_text(encoding="utf-8"))
    listed = next(
        ast.literal_eval(x.value)
        for x in tree.body
        if isinstance(x, ast.Assign) and ast.unparse(x.targets[0]) == "__all__"
    )
    homes = {
        name: place
        for x in tree.body
        if isinstance(x, ast.If)
        for place, names in imports_of(x)
        for name in names
    }
    assert listed == sorted(set(listed)) and set(listed) == homes.keys()
    code = (
        "import sys, rollpipe; assert 'torch' not in sys.modules and set(rollpipe.__all__) <= set(dir(rollpipe))\n"
        "try: rollpipe.nothing\nexcept AttributeError as e: assert \"'nothing'\" in str(e)\n"
        "from importlib import import_module\n"
        f"for name, place in {homes}.items(): assert getattr(rollpipe, name) is getattr(import_module(place, 'rollpipe'), name), name\n"
        "from rollpipe import *\nfrom rollpipe import pipes, PPO\nassert pipes.EnvStepper is EnvStepper"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=120, cwd=ROOT)


def imports_of(node):
    return [("." * x.level + (x.module or ""), [a.name for a in x.names]) for x in node.body]


def test_the_public_rooms_have_few_names():
    rooms = ("pipes", "layers", "agents", "testing")
    names = [name for room in rooms for name in importlib.import_module(f"rollpipe.{room}").__all__]
    assert 100 < len(names) <= 114


# `cli.start.main` hands over to `cli.main.main`.
SHARED_NAMES = {"main"}


def test_no_public_function_or_class_has_the_name_of_another():
    homes = {}
    for module in MODULES:
        for node in ast.parse(FILES[module].read_text(encoding="utf-8")).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name[0] != "_":
                homes.setdefault(node.name, []).append(module)
    several = {name: modules for name, modules in homes.items() if len(modules) > 1}
    assert {name: several[name] for name in several.keys() - SHARED_NAMES} == {}
    assert several.keys() >= SHARED_NAMES
