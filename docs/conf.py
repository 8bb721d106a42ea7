"How Sphinx makes the site. `prepare.py` has written all pages into its source folder before; `make docs` calls both."

import importlib.metadata
import inspect
import sys
from importlib.util import find_spec
from pathlib import Path

import math_core
from docutils import nodes
from sphinx.transforms.post_transforms import SphinxPostTransform

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
from prepare import NOTEBOOK, as_rst, page_of

from rollpipe.agents.shared_options import args_section, meanings

project, author, copyright = (
    "rollpipe",
    "The rollpipe developers",
    "2026 onwards, the rollpipe developers",
)
release = version = importlib.metadata.version("rollpipe")
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_codeautolink",
]
nb_execution_mode, nb_merge_streams = "off", True  # the stored outputs
myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence", "deflist"]
myst_heading_anchors = 3
default_role = "py:obj"  # `name` in a docstring
smartquotes = False  # 'sync' stays as it is typed
autodoc_member_order = "bysource"
add_module_names = napoleon_numpy_docstring = False
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"
codeautolink_concat_default = True  # the cells of a page see the imports of those before
html_theme, html_title, html_math_renderer = "pydata_sphinx_theme", "rollpipe", "mathml"
html_theme_options = dict(
    logo=dict(text="rollpipe"),
    navbar_align="left",
    navigation_with_keys=False,
    show_nav_level=1,
    show_toc_level=2,
    search_as_you_type=True,
    secondary_sidebar_items=["page-toc"],
    footer_start=["copyright"],
    footer_end=[],
)
MATH_FONT = (
    Path(find_spec("ziamath").origin).parent / "fonts" / "STIXTwoMath-Regular.ttf"
)  # without it brackets do not stretch
html_static_path, html_css_files = ["_static", str(MATH_FONT)], ["rollpipe.css"]
html_sidebars = {
    page: [] for page in ("index", "quickstart", "glossary", "results", "architecture")
}  # pages without siblings
html_show_sourcelink = html_copy_source = False
html_search_scorer = str(HERE / "scorer.js")  # guides above sources


def written_here(method):
    "Does the docstring of a method, perhaps an inherited one, come from this package?"
    cls = sys.modules[method.__module__]
    for name in method.__qualname__.split(".")[:-1]:
        cls = getattr(cls, name, None)
    bases = [
        base
        for base in getattr(cls, "__mro__", ())
        if getattr(vars(base).get(method.__name__), "__doc__", None)
    ]
    return not bases or bases[0].__module__.startswith("rollpipe")


def add_passed_on(obj, lines):
    "Put the parameters that a function passes on to another one in the place of its `**kwargs`."
    at = next((i for i, line in enumerate(lines) if line.startswith("    **")), None)
    if at is None:
        return
    known, own = meanings(obj), args_section("\n".join(lines))
    more = [
        f"    {name}: {known[name]}"
        for name in inspect.signature(obj).parameters
        if name in known and name not in own
    ]
    if more:
        lines[at : at + 1] = more


def lines_as_rst(lines):
    "Paragraphs of Markdown as reStructuredText. The code of a doctest stays as it is."
    out = []
    paragraph = []
    in_doctest = False
    for line in [*lines, ""]:
        in_doctest = bool(line.strip()) and (in_doctest or line.lstrip().startswith(">>>"))
        if in_doctest or not line.strip():
            # `name` may go on in the next line of its paragraph.
            out += as_rst("\n".join(paragraph)).split("\n") if paragraph else []
            paragraph = []
            out.append(line)
        else:
            paragraph.append(line)
    return out[:-1]


def docstring(app, what, name, obj, options, lines):
    "Docstrings are Markdown. napoleon, which comes later, reads their `Args:`."
    if what == "data":
        lines.clear()  # it is that of the class of the value
    if what == "method" and not written_here(obj):
        del lines[1:]  # the summary of another library is enough
    if any("``" in line for line in lines):
        return  # it is reStructuredText
    if what in ("class", "function"):
        add_passed_on(obj, lines)
    lines[:] = lines_as_rst(lines)
    end = next(
        (i for i, x in enumerate(lines) if x in ("Args:", "Returns:", "Raises:")), len(lines)
    )
    for i in range(end - 1, 0, -1):  # reStructuredText wants an empty line around an indented block
        a, b = (len(x) - len(x.lstrip()) for x in lines[i - 1 : i + 1])
        if lines[i].strip() and lines[i - 1].strip() and a != b:
            lines.insert(i, "")


class Names(SphinxPostTransform):
    "`EnvStepper` anywhere in the text of a page is a link to its reference, and `tutorials/00_tour` a link to that page."

    default_priority = 20  # what Sphinx itself can resolve is a reference by now
    unresolved = {"xref", "py", "py-obj"}

    def run(self):
        names = self.env.temp_data.get("rollpipe") or self.env.temp_data.setdefault(
            "rollpipe", self.collect()
        )
        for node in list(self.document.findall(nodes.literal)):
            if isinstance(node.parent, nodes.reference) or not self.unresolved.issuperset(
                node.get("classes")
            ):
                continue
            text = node.astext()
            notebook = NOTEBOOK.fullmatch(text)
            page, anchor = (
                (page_of(notebook[1]), "")
                if notebook
                else names.get(text.split("(")[0], (None, ""))
            )
            if page not in self.env.found_docs or (page == self.env.docname and not anchor):
                continue
            uri = self.app.builder.get_relative_uri(self.env.docname, page)
            link = nodes.reference("", "", internal=True, refuri=uri + anchor)
            node.replace_self(link)
            link += node

    def collect(self):
        "Name, long or short -> (page, anchor)."
        found = {}
        for name, entry in self.env.domains["py"].objects.items():
            short = (
                {name.split(".")[-1], ".".join(name.split(".")[-2:])}
                if entry.objtype in ("class", "function", "exception")
                else set()
            )
            for key in {name} | short:
                found.setdefault(key, (entry.docname, "#" + entry.node_id))
        return found


def mathml(self, node):
    "Formulas become MathML when the site is built: no script, no font from elsewhere, no network."
    self.body.append(
        LATEX.convert_with_local_state(node.astext(), displaystyle=node.tagname == "math_block")
    )
    raise nodes.SkipNode


LATEX = math_core.LatexToMathML()


def setup(app):
    app.connect("autodoc-process-docstring", docstring, priority=400)
    app.add_post_transform(Names)
    app.add_html_math_renderer("mathml", (mathml, None), (mathml, None))
    return dict(parallel_read_safe=False, parallel_write_safe=False)
