"""Write the comments beside the parameters of public signatures into the docstrings, and take them out again.

A meaning is written once, beside the default:

    def scaled(
        x,       # what is scaled, [T, B]
        by=2.,   # factor
    ) -> Tensor:  # [T, B]
        "Multiply."

The exported docstring lists it under `Args:` and `Returns:`, where `help()`, editors, the site and the command line find it. What stands
beside the parameters of `__init__`, or beside the fields of a `NamedTuple` or dataclass, goes to the docstring of the class. Comments on
lines of their own directly above a parameter count if there is none beside it. Private names and signatures on one line are left alone.
"""
import ast
import io
import re
import tokenize
from itertools import accumulate
from textwrap import wrap
from typing import NamedTuple

WIDTH = 140
TITLES = ("Args", "Returns", "Yields", "Raises", "Example", "Examples", "Note", "Notes")  # sections of a docstring, in this order
FOR_TOOLS = re.compile(r"#\s*(noqa|type:|pyright:|mypy:|pragma:).*")
STRING = re.compile(r"""(?s)([rRuU]?)(\"""|'''|"|')((?:\\.|(?!\2).)*)\2""")
ENTRY = re.compile(r"    (\*{0,2}\w+(?:, \*{0,2}\w+)*)(?: \(.*?\))?: ")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class ArgsError(ValueError):
    "The comments of a signature and its docstring do not fit together."


class Owner(NamedTuple):
    "A public function or class, with the comments of its signature."
    name: str                 # as in messages: `EnvStepper.reset`
    text: ast.Constant | None  # its docstring
    indent: str               # of the docstring
    params: list              # names of the parameters, in order
    comments: dict            # parameter or "return" -> comment


def with_args(source: str) -> str:
    "The same code, with the comments listed in its docstrings. Raises `ArgsError` if a docstring is missing or repeats a comment."
    edits = []
    for owner in owners(source):
        if not owner.comments: continue
        if owner.text is None: raise ArgsError(f"{owner.name} has comments beside its parameters, but no docstring to list them in")
        prefix, quote, body = literal(source, owner)
        head, sections = parsed(body, owner.indent)
        args = entries(sections.get("Args", []), owner.indent)
        said = {name for names in args for name in names.split(", ")} | ({"return"} if "Returns" in sections else set())
        if twice := sorted(said & owner.comments.keys()):
            raise ArgsError(f"{owner.name}: the docstring and a comment both explain {', '.join(twice)}; keep the comment")
        quote = quote if len(quote) == 3 else '"""'
        new = {k: entry(owner, k, v, prefix, quote) for k, v in owner.comments.items()}
        if "return" in new: sections["Returns"] = new.pop("return")
        args |= new
        if args: sections["Args"] = [line for k in sorted(args, key=lambda k: position(owner, k)) for line in args[k]]
        edits.append((owner.text, f"{prefix}{quote}{joined(head, sections, owner.indent)}\n{owner.indent}{quote}"))
    result = replaced(source, edits)
    assert without_docstrings(result) == without_docstrings(source), "only docstrings may differ"
    return result


def without_args(source: str, original: str) -> str:
    "The code of an exported cell, perhaps edited, without what `with_args` had added to its `original` in the notebook."
    exported = with_args(original)
    restored = {string(exported, b): string(original, a) for a, b in zip(owners(original), owners(exported)) if b.text}
    both = [*owners(original), *owners(source)]
    added = {plain(entry(owner, k, v, prefix)) for owner in both for k, v in owner.comments.items() for prefix in ("", "r")}
    edits = []
    for owner in owners(source):
        if owner.text is None: continue
        new = restored.get(string(source, owner))
        if new is None: new = without_entries(source, owner, added)
        edits.append((owner.text, new))
    return replaced(source, edits)


def without_entries(source, owner, added):
    "The docstring's literal without the entries in `added`; on one line if only one line is left."
    prefix, quote, body = literal(source, owner)
    head, sections = parsed(body, owner.indent)
    args = {k: lines for k, lines in entries(sections.pop("Args", []), owner.indent).items() if plain(lines) not in added}
    if args: sections["Args"] = [line for lines in args.values() for line in lines]
    if plain(sections.get("Returns", [])) in added: del sections["Returns"]
    text = joined(head, sections, owner.indent)
    if "\n" in text: return f"{prefix}{quote}{text}\n{owner.indent}{quote}"
    quote = quote if '"' in text else '"'
    return f"{prefix}{quote}{text}{quote}"


# --- signatures


def owners(source: str) -> list:
    "Every public function and class of a cell or module, as an `Owner`."
    rows, found = source.split("\n"), []
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    notes = {t.start[0]: (text, not t.line[:t.start[1]].strip()) for t in tokens
             if t.type == tokenize.COMMENT and (text := FOR_TOOLS.sub("", t.string).lstrip("#").strip())}

    def visit(body, outer):
        for node in body:
            if not isinstance(node, (ast.ClassDef, *FUNCTIONS)) or node.name == "__init__": continue
            if node.name.startswith("_") and not node.name.endswith("__"): continue
            places = fields(node) if isinstance(node, ast.ClassDef) else parameters(node, tokens)
            text = docstring(node)
            comments = beside(notes, places)
            if "return" in comments and node.returns: comments["return"] = f"{ast.unparse(node.returns)}: {comments['return']}"
            if (other := delegates(node)) and not (text and "**kwargs:" in text.value): comments.setdefault("**kwargs", f"see `{other}`")
            before = rows[text.lineno - 1][:text.col_offset] if text else ""
            indent = before if text and not before.strip() else " "*(node.col_offset + 4)
            found.append(Owner(outer + node.name, text, indent, [name for name, *_ in places], comments))
            if isinstance(node, ast.ClassDef): visit(node.body, f"{outer}{node.name}.")

    def fields(node):
        init = next((f for f in node.body if isinstance(f, FUNCTIONS) and f.name == "__init__"), None)
        if init: return [place for place in parameters(init, tokens) if place[0] != "return"]
        if not any(re.search(r"\b(NamedTuple|dataclass)\b", ast.unparse(x)) for x in (*node.bases, *node.decorator_list)): return []
        return [(x.target.id, x.lineno, x.end_lineno, node.lineno) for x in node.body if isinstance(x, ast.AnnAssign)]

    visit(ast.parse(source).body, "")
    return found


def parameters(node, tokens) -> list:
    "(name, first line, last line, line of the `def`) of every parameter, and of what is returned, if the signature has several lines."
    start, end = brackets(node, tokens)
    if start == end: return []
    a = node.args
    positional = [*a.posonlyargs, *a.args]
    default = dict(zip(reversed(positional), reversed(a.defaults))) | {k: v for k, v in zip(a.kwonlyargs, a.kw_defaults) if v}
    named = [(x.arg, x) for x in positional] + [(f"*{x.arg}", x) for x in [a.vararg] if x]
    named += [(x.arg, x) for x in a.kwonlyargs] + [(f"**{x.arg}", x) for x in [a.kwarg] if x]
    places = [(name, x.lineno, default.get(x, x).end_lineno, start) for name, x in named if name not in ("self", "cls")]
    if node.returns: places = [place for place in places if place[2] < end]  # `b) -> int:  # sum` is about the result
    if all(last < end for _, _, last, _ in places): places.append(("return", end, node.returns.end_lineno if node.returns else end, end))
    return places


def brackets(node, tokens) -> tuple:
    "The lines of the brackets around the parameters."
    depth, first = 0, None
    for t in tokens:
        if t.type != tokenize.OP or t.start < (node.lineno, node.col_offset): continue
        if t.string in "([{":
            if not depth and t.string == "(": first = t.start[0]
            depth += 1
        elif t.string in ")]}":
            depth -= 1
            if not depth and first: return first, t.start[0]
    raise AssertionError(f"{node.name} has no parameters in brackets")


def beside(notes, places) -> dict:
    "name -> the comment on its lines, or else the lines of comments directly above it."
    found = {}
    for name, first, last, start in places:
        lines = [i for i in range(first, last + 1) if i in notes]
        above = first
        while not lines and above - 1 > start and notes.get(above - 1, ("", False))[1]: above -= 1
        if texts := [notes[i][0] for i in lines or range(above, first)]: found[name] = " ".join(texts)
    return found


def delegates(node):
    "What `**kwargs` are passed on to, according to fastcore's decorator `@delegates(f)`, or None."
    if not isinstance(node, FUNCTIONS) or not node.args.kwarg: return None
    calls = [d for d in node.decorator_list if isinstance(d, ast.Call) and ast.unparse(d.func).endswith("delegates") and d.args]
    return ast.unparse(calls[0].args[0]) if calls else None


# --- docstrings: these functions work on the source text, so that escapes stay as they were typed


def docstring(node):
    "The node of the docstring, or None."
    first = node.body[0]
    found = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    return first.value if found else None


def string(source, owner) -> str: return ast.get_source_segment(source, owner.text)


def literal(source, owner) -> tuple:
    "Prefix, quotes and text of the docstring."
    match = STRING.fullmatch(string(source, owner))
    if not match: raise ArgsError(f"{owner.name}: write the docstring as one string")
    return match.groups()


def parsed(body, indent) -> tuple:
    "The lines before the first section, and those of each: title -> lines."
    head, sections = [], {}
    lines = head
    for line in body.rstrip().split("\n"):
        title = line.strip().removesuffix(":")
        if title in TITLES and line.rstrip() == f"{indent}{title}:": lines = sections.setdefault(title, [])
        else: lines.append(line)
    return head, sections


def entries(lines, indent) -> dict:
    "The entries of an `Args:` section: name, or `name, name` -> lines."
    found, name = {}, ""
    for line in lines:
        if match := ENTRY.match(line.removeprefix(indent)): name = match[1]
        if name or line.strip(): found.setdefault(name, []).append(line)
    return found


def entry(owner, name, comment, prefix="", quote='"""') -> list:
    "The lines of the entry that states a comment."
    text = comment if "r" in prefix.lower() else comment.replace("\\", r"\\")
    text = text.replace(quote, "\\" + quote)
    if name == "return": return wrapped(text, owner.indent + "    ", owner.indent + "    ")
    return wrapped(f"{name}: {text}", owner.indent + "    ", owner.indent + "        ")


def wrapped(text, first, later):
    return wrap(text, WIDTH, initial_indent=first, subsequent_indent=later, break_long_words=False, break_on_hyphens=False)


def position(owner, name):
    first = name.split(", ")[0]
    return owner.params.index(first) if first in owner.params else len(owner.params)


def joined(head, sections, indent) -> str:
    blocks = [head] + [[f"{indent}{title}:", *sections[title]] for title in TITLES if title in sections]
    return "\n\n".join("\n".join(block).rstrip() for block in blocks)


def plain(lines) -> str:
    "The lines as one text, whatever their wrapping."
    return " ".join(" ".join(lines).split())


def replaced(source, edits) -> str:
    "The source with new text in place of some nodes; ast counts columns in bytes."
    data = source.encode()
    starts = [0, *accumulate(map(len, data.splitlines(keepends=True)))]
    for node, new in sorted(edits, key=lambda e: e[0].lineno, reverse=True):
        a, b = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        data = data[:a] + new.encode() + data[b:]
    return data.decode()


def without_docstrings(source) -> str:
    "The code as a syntax tree, for comparison."
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)) and node.body and docstring(node): del node.body[0]
    return ast.dump(tree)
