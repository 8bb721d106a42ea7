"""Write the source folder of the site: `python docs/prepare.py build/docs`.

The pages that people wrote are copied from this folder. The others are made: notebooks without their directives, a page of the reference
for every module, the glossary out of its table, the page of ARCHITECTURE.md, and the cards of the algorithms.
"""

import ast
import importlib
import inspect
import re
import sys
from itertools import takewhile
from pathlib import Path

import nbformat
from cards import cards

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PACKAGES = {
    "rollpipe.pipes": "Pipes",
    "rollpipe.layers": "Layers",
    "rollpipe.agents": "Agents",
    "rollpipe.testing": "Testing",
}
ROOMS = {
    "cli": "Command line",
    "runs": "Runs",
    "settings": "Settings",
    "pipes": "Pipes",
    "pipes/00_data": "Data",
    "pipes/01_keeping": "Keeping",
    "pipes/02_loading": "Loading",
    "pipes/03_graph": "Graphs",
    "pipes/10_envs": "Environments",
    "pipes/11_engines": "Engines",
    "pipes/24_replay": "Replay",
    "pipes/25_tensors": "Tensors",
    "pipes/29_recording": "Recording",
    "pipes/30_workers": "Workers",
    "pipes/31_profiling": "Profiling",
    "pipes/32_cluster": "Clusters",
    "layers": "Layers",
    "agents": "Agents",
    "agents/14_off_policy": "Learners from a replay memory",
    "ranks": "Learning over several ranks",
    "tuning": "Search for settings",
    "results": "Results",
    "traces": "Traces",
    "testing": "Testing",
}
NOTEBOOK = re.compile(r"(?:nbs/)?((?:\w+/)*\d\d_\w+)(?:\.ipynb)?")
DIRECTIVE = re.compile(r"^#\|.*\n?", re.M)


class Folder:
    "The source folder. A page is written only if it changed, so that Sphinx builds no other page again."

    def __init__(self, path):
        self.path, self.written = Path(path).resolve(), set()

    def write(self, name, text):
        path = self.path / name
        self.written.add(path)
        data = text if isinstance(text, bytes) else text.encode()
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_bytes() != data:
            path.write_bytes(data)

    def drop_others(self):
        "Remove the pages of an earlier build that this one did not write."
        for path in self.path.rglob("*"):
            if path.is_file() and path not in self.written:
                path.unlink()


def as_rst(text):
    "A paragraph of Markdown as reStructuredText: `name` is a reference if there is such a name, all else is plain."
    text = re.sub(r"\[([^\]]*)\]\(([^)\s]*)\)", r"\1", text)
    parts = re.split("`([^`]*)`", text)
    plain = [re.sub(r"[*|]|_(?!\w)", r"\\\g<0>", x) for x in parts[::2]]
    code = [
        f"\\ :py:obj:`{x}`\\ "
        if re.fullmatch(r"[\w.]+", x)
        else f"\\ ``{x}``\\ "
        if x.strip()
        else x
        for x in parts[1::2]
    ]
    return "".join(x for pair in zip(plain, code + [""]) for x in pair)


# -- notebooks ---------------------------------------------------------------------------------------------------------


def page_of(notebook):
    "The page of a notebook, whose path is relative to nbs/ and has no suffix."
    return notebook if notebook.startswith("tutorials/") else f"literate/{notebook}"


def folded(cell, prompt):
    "The cell with its code hidden behind a prompt."
    cell.metadata["tags"] = ["hide-input"]
    cell.metadata["mystnb"] = {"code_prompt_show": prompt, "code_prompt_hide": prompt}
    return cell


def is_check(step):
    "Is it an assertion, or a call of a test function such as `test_eq`?"
    call = step.value if isinstance(step, ast.Expr) else None
    return (
        isinstance(step, ast.Assert)
        or isinstance(call, ast.Call)
        and ast.unparse(call.func).startswith("test_")
    )


def with_checks_folded(cell):
    "The cell of a tutorial, and a folded one with the checks at its end, if there are any."
    try:
        steps = ast.parse(cell.source).body
    except SyntaxError:
        return [cell]  # a magic command
    checks = [*takewhile(is_check, reversed(steps))]
    if not checks:
        return [cell]
    if len(checks) == len(steps):
        return [folded(cell, "Checks")]
    lines, at = cell.source.split("\n"), checks[-1].lineno - 1
    if steps[-len(checks) - 1].end_lineno > at:
        return [cell]  # they share a line
    while lines[at - 1].startswith("#"):
        at -= 1  # comments about the first one
    cell.source = "\n".join(lines[:at]).rstrip()
    return [cell, folded(nbformat.v4.new_code_cell("\n".join(lines[at:])), "Checks")]


def without_directives(nb, tutorial):
    "The notebook as a page, with the imports of a module and the checks of a tutorial folded; and the module that it exports."
    cells, module = [], None
    for cell in nb.cells:
        words = (
            re.findall(r"^#\|\s*(\S+)\s*(\S*)", cell.source, re.M)
            if cell.cell_type == "code"
            else []
        )
        module = next(
            ("rollpipe." + value for word, value in words if word == "default_exp"), module
        )
        if any(word in ("hide", "default_exp") for word, _ in words):
            continue
        if cell.cell_type == "code":
            cell.source = DIRECTIVE.sub("", cell.source)
            if cell.source.startswith(("import ", "from ")) and words:
                folded(cell, "Imports")
        cells += with_checks_folded(cell) if tutorial and cell.cell_type == "code" else [cell]
    for i, cell in enumerate(cells):
        cell["id"] = f"c{i}"
    nb.cells = cells
    nb.metadata["kernelspec"] = dict(name="python3", display_name="Python 3", language="python")
    return nb, module


def toctree(pages, caption="", options=":maxdepth: 1"):
    return "\n".join(
        [
            "```{toctree}",
            options,
            *([f":caption: {caption}"] if caption else []),
            "",
            *pages,
            "```",
            "",
        ]
    )


def notebooks(out):
    "Write the notebooks; returns module -> (page, title)."
    found, rooms = {}, {}
    for path in sorted((ROOT / "nbs").rglob("[0-9]*.ipynb")):
        if ".ipynb_checkpoints" in path.parts:
            continue
        nb, module = without_directives(nbformat.read(path, 4), path.parent.name == "tutorials")
        name = path.relative_to(ROOT / "nbs").with_suffix("").as_posix()
        title = re.search(r"^# (.+)$", nb.cells[0].source, re.M)[1]
        rooms.setdefault(path.parent.relative_to(ROOT / "nbs").as_posix().lstrip("."), []).append(
            name
        )
        if module:
            found[module] = (page_of(name), title)
        out.write(f"{page_of(name)}.ipynb", nbformat.writes(nb))
    trees = [toctree(rooms.pop(room), caption) for room, caption in ROOMS.items()]
    tutorials = [name.removeprefix("tutorials/") for name in rooms.pop("tutorials")]
    assert not rooms, f"these folders of notebooks have no caption in ROOMS: {sorted(rooms)}"
    out.write(
        "literate/index.md",
        "# Literate source\n\nThe library as it is written: the text, the code, and the examples that check "
        "it, one idea a page. The order within a room is that of the imports.\n\n"
        + "\n".join(trees),
    )
    out.write(
        "tutorials/index.md",
        "# Tutorials\n\nThe outputs and the pictures are those of a full run. Begin with the tour.\n\n"
        + toctree(tutorials),
    )
    return found


# -- reference ---------------------------------------------------------------------------------------------------------


def heading(names):
    "The title of a page: the names that it documents."
    return ", ".join(names[:2]) + (", ..." if names[2:] else "")


def summary(obj):
    "The first sentence of the docstring, fit for a table."
    doc = "" if isinstance(obj, (dict, tuple, list, str)) else inspect.getdoc(obj) or ""
    return re.split(r"(?<=[.:;])\s|\n\n", doc, maxsplit=1)[0].replace("\n", " ").replace("|", "\\|")


def directive(package, name):
    "The lines that have a public name documented."
    obj = getattr(importlib.import_module(package), name)
    if inspect.ismodule(obj):
        return [f".. automodule:: {obj.__name__}", "   :members:", ""]
    if inspect.isclass(obj):
        return [f".. autoclass:: {package}.{name}", "   :members:", "   :show-inheritance:", ""]
    if callable(obj):
        return [f".. autofunction:: {package}.{name}", ""]
    return [f".. autodata:: {package}.{name}", "   :no-value:", ""]


def module_page(module, names, package, found, out):
    "Write the page of one module under the name of the package from which users import; returns the name of the page."
    whole = importlib.import_module(module)
    page, title = found.get(module, (None, module))
    lines = [
        f"# {heading(names) if names and module != package else module}",
        "",
        whole.__doc__ or "",
        "",
    ]
    if page:
        lines += [f"How it is made: {{doc}}`{title} </{page}>`.", ""]
    lines += [
        "```{eval-rst}",
        *([f".. module:: {module}"] if module == package and package not in PACKAGES else []),
        f".. currentmodule:: {package}",
        "",
    ]
    for name in names:
        lines += directive(package, name)
    shown = module == package or any(
        inspect.ismodule(getattr(importlib.import_module(package), name)) for name in names
    )
    others = [
        name
        for name in getattr(whole, "__all__", ())
        if name not in names
        and not shown
        and getattr(getattr(whole, name), "__module__", module) == module
    ]
    if others:
        lines += [f".. currentmodule:: {module}", ""]
    for name in others:
        lines += directive(module, name)
    stem = module if module != package or package not in PACKAGES else f"{module}.other"
    out.write(f"api/{stem}.md", "\n".join([*lines, "```", ""]))
    return stem


def public_names(package, found):
    "module -> the names that users import from `package` and that are written there, also for modules from which there are none."
    whole, homes = importlib.import_module(package), {}
    for name in getattr(whole, "__all__", None) or [n for n in vars(whole) if n[0] != "_"]:
        obj = getattr(whole, name)
        home = obj.__name__ if inspect.ismodule(obj) else getattr(obj, "__module__", package)
        if home.startswith("torchdata") or (
            package == "rollpipe.testing" and inspect.ismodule(obj)
        ):
            continue
        homes.setdefault(home if home.startswith("rollpipe") else package, []).append(name)
    return {m: [] for m in found if m.rpartition(".")[0] == package} | homes


def reference(found, out):
    "Write a page for every module that gives public names, and tables of the names of each package."
    packages = []
    for package, title in PACKAGES.items():
        doc = importlib.import_module(package).__doc__
        homes = sorted(
            public_names(package, found).items(), key=lambda x: found.get(x[0], ("~",))[0]
        )
        pages = [
            f"{heading(names) if names else home} <{module_page(home, names, package, found, out)}>"
            for home, names in homes
        ]
        rows = [
            f"| `{package}.{n}` | {summary(getattr(importlib.import_module(package), n))} |"
            for _, names in homes
            for n in names
        ]
        out.write(
            f"api/{package}.md",
            "\n".join(
                [
                    f"# {title}",
                    "",
                    "```{eval-rst}",
                    f".. module:: {package}",
                    "```",
                    "",
                    doc,
                    "",
                    "| Name | Meaning |",
                    "| --- | --- |",
                    *rows,
                    "",
                    toctree(pages, options=":hidden:"),
                ]
            ),
        )
        packages.append(package)
    singles = [m for m in found if m.count(".") == 1]
    for module in singles:
        module_page(module, importlib.import_module(module).__all__, module, found, out)
    out.write(
        "api/index.md",
        "# Reference\n\nEvery public class and function, with its signature and the meaning and shape of every "
        "parameter.\n\n"
        + toctree(packages, "To compose")
        + "\n"
        + toctree(singles, "The command line, and what it is made of"),
    )


# -- hand-written texts ------------------------------------------------------------------------------------------------


def glossary(text):
    "The table of glossary.md as a glossary, to whose words a page refers with {term}."
    rows = [
        [x.strip() for x in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in text.splitlines()
        if line.startswith("|")
    ][2:]
    if not rows:
        sys.exit("docs/glossary.md has no table, which the site shows")
    lines = [
        *text[: text.index("|")].splitlines(),
        "```{eval-rst}",
        ".. currentmodule:: rollpipe.pipes",
        "",
        ".. glossary::",
        "",
    ]
    for words, meaning, elsewhere in rows:
        lines += [f"   {word.strip(' `')}" for word in re.split("[,;]", words)]
        lines += [f"      {as_rst(meaning)}.", ""] + (
            [f"      *Elsewhere:* {as_rst(elsewhere)}.", ""] if elsewhere != "-" else []
        )
    return "\n".join([*lines, "```", ""])


PICTURE = re.compile(r"!\[[^\]]*\]\(([^)\s]+)\)")


def pages(out):
    """Copy the pages of this folder, and the pictures that they show.

    A link that leaves the folder stays within the site's. A picture that a page shows and that is not there ends the build.
    """
    for path in sorted([*HERE.glob("*.md"), *HERE.glob("howto/*.md")]):
        text = path.read_text(encoding="utf-8")

        # Pictures of the repository lie in the site under the path that they have in the repository.
        for target in PICTURE.findall(text):
            picture = (path.parent / target).resolve()
            root = HERE if picture.is_relative_to(HERE) else ROOT
            out.write(picture.relative_to(root).as_posix(), picture.read_bytes())

        text = text.replace("](../benchmarks/", "](benchmarks/")
        text = text.replace("../nbs/tutorials/", "tutorials/")
        is_glossary = path.name == "glossary.md"
        out.write(path.relative_to(HERE).as_posix(), glossary(text) if is_glossary else text)


def architecture(out):
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    out.write("architecture.md", text.replace("](docs/", "](").replace("```imports", "```text"))


def main(target):
    out = Folder(target)
    pages(out)
    reference(notebooks(out), out)
    architecture(out)
    cards(out)
    out.drop_others()


if __name__ == "__main__":
    main(sys.argv[1])
