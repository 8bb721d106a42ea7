"""Which small changes of a module there are, and how one is found again in a later text: a part of `mutants.py`.

A mutant is found by the function it is in, the text of its statement and the place within this text, never by a
line alone. So the same mutant can be made in a notebook's cell, and in a later state of the package.
"""

import ast
import json
import random
import re
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

KINDS = "operator", "condition", "statement", "argument"
LEAST = 6  # mutants of a room

COMPARISONS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
ARITHMETIC = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.Pow: ("**", "*"),
    ast.BitOr: ("|", "&"),
    ast.BitAnd: ("&", "|"),
}
BOOLEAN = {ast.And: ("and", "or"), ast.Or: ("or", "and")}
OPERATORS = {**COMPARISONS, **ARITHMETIC, **BOOLEAN}

# Functions whose arguments are messages or types, or for which their order hardly ever counts
MESSAGES = {*"warn print log TypeVar NewType cast describe shortened debug info".split()}
ANY_ORDER = {
    *"isinstance issubclass min max maximum minimum add mul equal allclose isclose".split()
}
ANY_ORDER |= {*"getattr setattr hasattr gcd logical_and logical_or union intersection".split()}

# Names of numbers of which one more is as good: waiting times and sizes of what is shown
LENIENT = re.compile(
    r"timeout|seconds|interval|width|indent|digits|stacklevel|patience|limit|fontsize|figsize|dpi"
    r"|linewidth|alpha|height|size_of_chunk|buffering|maxsize|grace|most|depth",
    re.I,
)
FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef


class Mutant(NamedTuple):
    "One change; `before` becomes `after` at `offset` (bytes) within `statement`, in `scope`."

    room: str
    file: str
    line: int
    kind: str
    scope: str
    statement: str
    occurrence: int  # of this statement among equal ones in the scope
    offset: int
    before: str
    after: str


class Statement(NamedTuple):
    "A statement, of which `text` leaves out the block below it; `start` is its place in bytes."

    scope: str
    node: ast.stmt
    start: int
    text: str
    occurrence: int


class Source:
    "The text of a module or of a cell, with its statements."

    def __init__(self, text):
        self.bytes = text.encode()
        self.tree = ast.parse(text)
        self.line_starts = [0]
        for line in self.bytes.splitlines(keepends=True):
            self.line_starts.append(self.line_starts[-1] + len(line))
        self.statements = []
        self.counts = defaultdict(int)
        self._add(self.tree.body, "")

    def start(self, node):
        return self.line_starts[node.lineno - 1] + node.col_offset

    def end(self, node):
        return self.line_starts[node.end_lineno - 1] + node.end_col_offset

    def between(self, start, end):
        return self.bytes[start:end].decode()

    def _add(self, body, scope):
        for node in body:
            if _is_passed_over(node):
                continue
            self._add_statement(node, scope)
            below = scope
            if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
                below = f"{scope}.{node.name}".lstrip(".")
                if node.name == "__repr__":
                    continue
            for block in _blocks(node):
                self._add(block, below)

    def _add_statement(self, node, scope):
        start = self.start(node)
        end = self.end(node)
        blocks = [block for block in _blocks(node) if block]
        if blocks:
            first = blocks[0][0]
            decorators = getattr(first, "decorator_list", [])
            end = min(self.start(x) for x in (first, *decorators))
            if decorators:
                end -= 1  # the sign before it
        text = self.between(start, end).rstrip()
        occurrence = self.counts[scope, text]
        self.counts[scope, text] += 1
        self.statements.append(Statement(scope, node, start, text, occurrence))


def _is_passed_over(node):
    "What no mutant is made of: imports, docstrings, `__all__`, blocks for type checkers."
    if isinstance(node, (ast.Import, ast.ImportFrom, ast.Assert, ast.Global, ast.Nonlocal)):
        return True
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True
    if isinstance(node, (ast.Assign, ast.AugAssign)):
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        return isinstance(target, ast.Name) and target.id == "__all__"
    if isinstance(node, ast.If):
        names = {x.id for x in ast.walk(node.test) if isinstance(x, ast.Name)}
        return bool(names & {"TYPE_CHECKING", "__name__"})
    return False


def _blocks(node):
    "The lists of statements below a statement."
    blocks = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
    for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
        blocks.insert(1, part.body)
    return [block for block in blocks if isinstance(block, list)]


def _name_of(call):
    "The last name of what is called."
    function = call.func
    return getattr(function, "attr", getattr(function, "id", ""))


def _expressions(node):
    "The expressions in a statement, with what they are a part of; messages and types are left out."
    if isinstance(node, FUNCTIONS):
        arguments = node.args
        roots = [x for x in (*arguments.defaults, *arguments.kw_defaults) if x is not None]
    elif isinstance(node, ast.AnnAssign):
        roots = [node.value] if node.value else []
    elif isinstance(node, (ast.ClassDef, ast.Raise, ast.Try, ast.Match)):
        roots = []
    else:
        roots = [x for x in ast.iter_child_nodes(node) if not isinstance(x, ast.stmt)]

    waiting = [(root, node) for root in reversed(roots)]
    while waiting:
        part, parent = waiting.pop()
        if isinstance(part, (ast.JoinedStr, ast.excepthandler, ast.match_case)):
            continue
        yield part, parent
        children = [*ast.iter_child_nodes(part)]
        if isinstance(part, ast.Call):
            name = _name_of(part)
            if name in MESSAGES or name.endswith(("Error", "Warning")):
                children = [part.func]
        if isinstance(part, ast.arguments):
            children = [x for x in (*part.defaults, *part.kw_defaults) if x is not None]
        waiting += [(child, part) for child in reversed(children)]


def _is_text(node):
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes))
    )


def changes(source, statement):
    "All (kind, start, end, after) of a statement."
    node = statement.node
    yield from _dropped(source, node)
    for part, parent in _expressions(node):
        yield from _operators(source, part, statement.scope)
        yield from _conditions(source, part)
        yield from _constants(source, part, parent, node)
        yield from _swaps(source, part)
    yield from _conditions(source, node)
    yield from _operators(source, node, statement.scope)


def _dropped(source, node):
    targets = [*getattr(node, "targets", ()), *filter(None, [getattr(node, "target", None)])]
    is_assignment = isinstance(node, (ast.Assign, ast.AugAssign)) and all(
        isinstance(target, (ast.Attribute, ast.Subscript)) for target in targets
    )
    is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    if is_assignment or is_call or isinstance(node, ast.Raise):
        yield "statement", source.start(node), source.end(node), "pass"


def _operators(source, node, scope):
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        operator, left, right = node.ops[0], node.left, node.comparators[0]
    elif isinstance(node, ast.BinOp):
        operator, left, right = node.op, node.left, node.right
        is_type = isinstance(operator, ast.BitOr) and not scope
        if is_type or _is_text(left) or _is_text(right):
            return
    elif isinstance(node, ast.BoolOp):
        operator, left, right = node.op, node.values[0], node.values[1]
    elif isinstance(node, ast.AugAssign):
        operator, left, right = node.op, node.target, node.value
        if _is_text(right):
            return
    elif isinstance(node, ast.UnaryOp):
        is_dropped = isinstance(node.op, (ast.USub, ast.Not))
        if is_dropped and not isinstance(node.operand, ast.Constant):
            yield "operator", source.start(node), source.start(node.operand), ""
        return
    else:
        return

    # The text between both sides is the operator, besides brackets
    if type(operator) not in OPERATORS:
        return
    old, new = OPERATORS[type(operator)]
    start = source.end(left)
    gap = source.between(start, source.start(right))
    written = f"{old}=" if isinstance(node, ast.AugAssign) else old
    if " ".join(re.sub(r"[()\\]", " ", gap).split()) == written and gap.count(old) == 1:
        begin = start + len(gap[: gap.index(old)].encode())
        yield "operator", begin, begin + len(old), new


def _conditions(source, node):
    tests = []
    if isinstance(node, (ast.If, ast.While, ast.IfExp)):
        tests.append(node.test)
    if isinstance(node, ast.comprehension):
        tests += node.ifs
    for test in tests:
        if isinstance(test, ast.Constant):
            continue
        start = source.start(test)
        end = source.end(test)
        yield "condition", start, end, f"not ({source.between(start, end)})"
        has_walrus = any(isinstance(x, ast.NamedExpr) for x in ast.walk(test))
        if not has_walrus:
            yield "condition", start, end, "False"
        if not has_walrus and not isinstance(node, ast.While):
            yield "condition", start, end, "True"


def _constants(source, node, parent, statement):
    if not isinstance(node, ast.Constant) or not isinstance(node.value, (bool, int, float)):
        return

    # Numbers of which one more is as good
    names = [getattr(parent, "arg", None)]
    for target in (*getattr(statement, "targets", ()), getattr(statement, "target", None)):
        names.append(getattr(target, "attr", getattr(target, "id", None)))
    if isinstance(statement, FUNCTIONS):
        names.append(_name_of_default(statement.args, node))
    if any(LENIENT.search(name) for name in names if name):
        return

    start = source.start(node)
    end = source.end(node)
    written = source.between(start, end)
    if isinstance(node.value, bool):
        after = str(not node.value)
    elif isinstance(node.value, float) and 0 < abs(node.value) < 1e-3:
        return  # such small numbers keep a division from failing
    else:
        after = f"({written} + 1)" if not written.isdigit() else str(node.value + 1)
    yield "argument", start, end, after


def _name_of_default(arguments, default):
    positional = [*arguments.posonlyargs, *arguments.args]
    if arguments.defaults:
        positional = positional[-len(arguments.defaults) :]
    pairs = [
        *zip(positional, arguments.defaults),
        *zip(arguments.kwonlyargs, arguments.kw_defaults),
    ]
    return next((name.arg for name, value in pairs if value is default), None)


def _swaps(source, node):
    if not isinstance(node, ast.Call) or _name_of(node) in ANY_ORDER | MESSAGES:
        return
    if _name_of(node).endswith(("Error", "Warning")):
        return
    for left, right in zip(node.args, node.args[1:]):
        if isinstance(left, ast.Starred) or isinstance(right, ast.Starred):
            continue
        texts = [source.between(source.start(x), source.end(x)) for x in (left, right)]
        if texts[0] == texts[1]:
            continue
        middle = source.between(source.end(left), source.start(right))
        if middle.strip(", \n") == "":
            after = f"{texts[1]}{middle}{texts[0]}"
            yield "argument", source.start(left), source.end(right), after


def mutants_in(text, room, file):
    "All mutants of a module."
    source = Source(text)
    mutants = []
    for statement in source.statements:
        for kind, start, end, after in changes(source, statement):
            before = source.between(start, end)
            offset = start - statement.start
            if offset + len(before.encode()) > len(statement.text.encode()):
                continue
            line = source.bytes[:start].count(b"\n") + 1
            place = statement.scope, statement.text, statement.occurrence, offset
            mutants.append(Mutant(room, file, line, kind, *place, before, after))
    return mutants


def place_of(mutant, text):
    "Where the mutant's statement begins in a text [bytes], or None."
    try:
        source = Source(text)
    except SyntaxError:
        return None
    for statement in source.statements:
        place = statement.scope, statement.text, statement.occurrence
        if place == (mutant.scope, mutant.statement, mutant.occurrence):
            return statement.start
    return None


def changed(mutant, text):
    "The text with this change; None if its statement is not there."
    start = place_of(mutant, text)
    if start is None:
        return None
    content = text.encode()
    begin = start + mutant.offset
    end = begin + len(mutant.before.encode())
    assert content[begin:end].decode() == mutant.before
    return (content[:begin] + mutant.after.encode() + content[end:]).decode()


def differs(mutant, text):
    "Is the changed text another program, which Python can read?"
    new = changed(mutant, text)
    try:
        compile(new, mutant.file, "exec")
    except SyntaxError:
        return False
    return ast.dump(ast.parse(new)) != ast.dump(ast.parse(text))


# ---------------------------------------------------------------------------------------- sampling


def rooms_of(architecture):
    "The rooms that ARCHITECTURE.md names."
    block = re.search(r"^```imports\n(.*?)^```", architecture.read_text(), re.M | re.S)
    return [line.split("->")[0].strip() for line in block[1].splitlines() if "->" in line]


def modules_by_room(package, rooms):
    "room -> its modules; aggregates, which define nothing, are left out."
    modules = defaultdict(list)
    for path in sorted(package.rglob("*.py")):
        if path.name in ("__init__.py", "__main__.py", "_modidx.py", "all.py", "fluent.py"):
            continue
        folder = ".".join(path.relative_to(package).parts[:-1])
        fitting = [room for room in rooms if f"{folder}.".startswith(f"{room}.")]
        modules[max(fitting, key=len)].append(path)
    return modules


def numbers_of(weights, total):
    "How many mutants each room has: in proportion to its weight, and not less than `LEAST`."
    fixed = {}
    while True:
        left = total - LEAST * len(fixed)
        weight = sum(w for room, w in weights.items() if room not in fixed)
        shares = {r: left * w / weight for r, w in weights.items() if r not in fixed}
        small = [room for room, share in shares.items() if share < LEAST]
        if not small:
            break
        fixed.update(dict.fromkeys(small, LEAST))

    # What rounding down leaves goes to the largest remainders
    numbers = {**fixed, **{room: int(share) for room, share in shares.items()}}
    by_remainder = sorted(shares, key=lambda room: int(shares[room]) - shares[room])
    for room in by_remainder[: total - sum(numbers.values())]:
        numbers[room] += 1
    return numbers


def sample(root, total, seed):
    "The mutants, of which any first part has all rooms."
    package = root / "rollpipe"
    modules = modules_by_room(package, rooms_of(root / "ARCHITECTURE.md"))
    texts = {path: path.read_text() for paths in modules.values() for path in paths}
    weights = {}
    for room, paths in modules.items():
        nodes = (node for path in paths for node in ast.walk(ast.parse(texts[path])))
        weights[room] = sum(isinstance(node, (ast.stmt, ast.expr)) for node in nodes)

    # One mutant of a statement at most, and as many of each kind
    chosen = []
    for room, number in numbers_of(weights, total).items():
        candidates = defaultdict(list)
        for path in modules[room]:
            file = path.relative_to(root).as_posix()
            for mutant in mutants_in(texts[path], room, file):
                candidates[mutant.kind].append(mutant)
        for kind in KINDS:
            random.Random(f"{seed} {room} {kind}").shuffle(candidates[kind])

        in_room = []
        statements = set()
        turn = 0
        while len(in_room) < number and any(candidates.values()):
            kind = KINDS[turn % len(KINDS)]
            turn += 1
            while candidates[kind]:
                mutant = candidates[kind].pop()
                statement = mutant.file, mutant.scope, mutant.statement, mutant.occurrence
                if statement in statements or not differs(mutant, texts[root / mutant.file]):
                    continue
                statements.add(statement)
                in_room.append(mutant)
                break
        chosen += [(n / number, mutant) for n, mutant in enumerate(in_room)]
    chosen.sort(key=lambda pair: (pair[0], pair[1].room))
    return [mutant for _, mutant in chosen]


def write(mutants, path):
    path.write_text(json.dumps([m._asdict() for m in mutants], indent=1, ensure_ascii=False) + "\n")


def read(path):
    return [Mutant(**fields) for fields in json.loads(path.read_text())]


# --------------------------------------------------------------------------------------- notebooks


def notebooks_by_module(notebooks):
    "module as `rollpipe/pipes/steps.py` -> its notebook."
    found = {}
    for path in sorted(Path(notebooks).rglob("*.ipynb")):
        export = re.search(r"#\|\s*default_exp\s+([\w.]+)", path.read_text())
        if export and ".ipynb_checkpoints" not in path.parts:
            found[f"rollpipe/{export[1].replace('.', '/')}.py"] = path
    return found


def changed_notebook(mutant, text):
    "The text of a notebook with the change in its exported cell; None if this is not there."
    notebook = json.loads(text)
    if not mutant.scope:  # statements of a module are counted cell by cell
        mutant = mutant._replace(occurrence=0)
    for cell in notebook["cells"]:
        code = "".join(cell["source"])
        if cell["cell_type"] != "code" or not re.search(r"^#\|\s*exports?i?\b", code, re.M):
            continue
        new_code = changed(mutant, code)
        if new_code is not None:
            cell["source"] = new_code.splitlines(keepends=True)
            return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
    return None
