"""Comments in signatures become sections of docstrings at export, and do not flow back into the notebooks."""
import ast
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
from args_sections import ArgsError, with_args, without_args, without_docstrings
from fastcore.docments import docments
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[1]

FUNCTION = '''\
# scales
@decorated(1, "(")
async def scale(
    x, /,              # what is scaled, [T, B]
    by: float = max((2., 3.)),  # factor
    key=lambda by, x: (by, x),  # of the order; "quotes" and a \\n
    text="a # b, x",   # no comment inside a string
    table=dict(
        a=1,
    ),  # ends on another line
    *rest,             # more factors
    # above the parameter,
    # on two lines
    exact=False,
    plain=None,  # noqa: B006
    **options,         # for `np.multiply`
) -> dict[str, int]:   # name -> product
    "Multiply."
    # not a parameter
    return x*by  # nor this
'''
DOCSTRING = '''\
Multiply.

Args:
    x: what is scaled, [T, B]
    by: factor
    key: of the order; "quotes" and a \\n
    text: no comment inside a string
    table: ends on another line
    *rest: more factors
    exact: above the parameter, on two lines
    **options: for `np.multiply`

Returns:
    dict[str, int]: name -> product'''


def doc(source, name=None):
    "The docstring of the function or class of that name, or of the only one."
    nodes = [n for n in ast.walk(ast.parse(source)) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))]
    found = [n for n in nodes if name in (None, n.name)]
    assert len(found) == 1
    return ast.get_docstring(found[0])


def test_every_kind_of_parameter():
    assert doc(with_args(FUNCTION)) == DOCSTRING


def test_only_docstrings_differ():
    exported = with_args(FUNCTION)
    assert exported != FUNCTION and without_docstrings(exported) == without_docstrings(FUNCTION)
    assert without_docstrings("def f(): 1") != without_docstrings("def f(): 2")


def test_the_parameters_of_a_constructor_are_listed_by_its_class():
    source = '''\
class Pipe:
    """Moves things.

    Raises:
        ValueError: always.
    """
    def __init__(
        self, source,  # where from
        n: int = 1,    # how many
    ): pass

    def move(
        self,
        to,  # where to
    ):
        "Move."
'''
    exported = with_args(source)
    assert doc(exported, "Pipe") == "Moves things.\n\nArgs:\n    source: where from\n    n: how many\n\nRaises:\n    ValueError: always."
    assert doc(exported, "move") == "Move.\n\nArgs:\n    to: where to"
    assert ast.get_docstring(ast.parse(exported).body[0].body[1]) is None


@pytest.mark.parametrize("head", ["class Pair(NamedTuple):", "@dataclass(frozen=True)\nclass Pair:"])
def test_the_fields_of_a_record_are_its_parameters(head):
    source = f'{head}\n    "Two."\n    a: int  # first\n    b: int = 0  # second\n    def sum(self): return self.a + self.b  # both\n'
    assert doc(with_args(source), "Pair") == "Two.\n\nArgs:\n    a: first\n    b: second"


def test_fields_of_other_classes_are_no_parameters():
    source = 'class C:\n    "One."\n    a: int  # first\n'
    assert with_args(source) == source


@pytest.mark.parametrize("source", [
    "def f(x, y):  # why\n    'One line.'\n",
    "def _f(\n    x,  # private\n):\n    'Help shows it to nobody.'\n",
    "def f():\n    def g(\n        x,  # inner\n    ): 'Nobody else sees it.'\n",
    "def f(\n    x,  # type: ignore\n):\n    'For a tool.'\n",
    "# about it\ndef f(x,\n      y):\n    'Above the def, not a parameter.'\n",
    "x = 1  # number\n"])
def test_left_alone(source):
    assert with_args(source) == source


def test_the_hand_written_and_the_comments_are_merged_in_the_order_of_the_signature():
    source = '''\
def f(
    a,  # first
    b,
    c=0,  # third
):
    """Do.

    Args:
        b, d: second,
            on two lines.
        e: last

    Raises:
        ValueError: never.
    """
'''
    args = "Args:\n    a: first\n    b, d: second,\n        on two lines.\n    c: third\n    e: last"
    assert doc(with_args(source)) == f"Do.\n\n{args}\n\nRaises:\n    ValueError: never."
    assert without_args(with_args(source), source) == source


@pytest.mark.parametrize("section", ["Args:\n        a: by hand", "Args:\n        b, a: by hand", "Returns:\n        by hand"])
def test_what_is_said_twice_is_an_error_that_names_the_function(section):
    source = f'class C:\n  def move(\n    self,\n    a,  # first\n  ) -> int:  # sum\n    """Do.\n\n    {section}\n    """\n'
    with pytest.raises(ArgsError, match=r"C\.move.* (a|return);"): with_args(source)


def test_comments_without_a_docstring_are_an_error_that_names_the_function():
    with pytest.raises(ArgsError, match="f has comments"): with_args("def f(\n    a,  # first\n): pass\n")


def test_delegated_parameters_are_referred_to():
    source = "@delegates(rollouts)\ndef f(\n    a,  # first\n    **kwargs,\n):\n    'Do.'\n"
    assert doc(with_args(source)) == "Do.\n\nArgs:\n    a: first\n    **kwargs: see `rollouts`"
    by_hand = '@delegates(rollouts)\ndef f(\n    a,\n    **kwargs,\n):\n    """Do.\n\n    Args:\n        **kwargs: others\n    """\n'
    assert with_args(by_hand) == by_hand


@pytest.mark.parametrize("before, after", [
    ("'it' 's'", None), ("'it\\'s'", "it's"), ('r"\\d"', r"\d"), ('"é ₜ"; 1', "é ₜ"), ("'''Two\n    lines.'''", "Two\nlines.")])
def test_docstrings_in_every_quotation(before, after):
    source = f"def f(\n    a,  # ₜ 'x' \"y\" \\d\n): \n    {before}\n"
    if after is None:
        with pytest.raises(ArgsError, match="one string"): with_args(source)
        return
    assert doc(with_args(source)) == f"{after}\n\nArgs:\n    a: ₜ 'x' \"y\" \\d"
    assert without_args(with_args(source), source) == source


def test_three_quotes_do_not_end_the_docstring():
    assert doc(with_args("def f(\n    a,  # as in \"\"\"x\"\"\"\n):\n    'Do.'\n")).endswith('a: as in """x"""')


def test_long_comments_are_wrapped():
    long = " ".join(["word-and-word"]*40)
    exported = with_args(f"def f(\n    a,  # {long}\n):\n    'Do.'\n")
    assert all(len(line) <= 140 for line in exported.split("\n")[3:])
    assert " ".join(doc(exported).split()) == f"Do. Args: a: {long}"


NAMES = st.lists(st.sampled_from("abcdefgh"), unique=True, max_size=5)
COMMENT = st.none() | st.text("ab:#('\"\\ ,=é", min_size=1, max_size=12).map(lambda s: "x" + s.strip())
DEFAULT = st.sampled_from(["", "=1", "=(1, 2)", "='#'", "=lambda a: a", ": int", ": dict = {'a': [1]}"])


@st.composite
def signatures(draw):
    "(source, name -> comment): all parameters are keyword-only, so that any may have a default."
    names = draw(NAMES.filter(len))
    comments = {n: draw(COMMENT) for n in names}
    lines = [f"    {n}{draw(DEFAULT)},{f'  # {c}' if c else ''}" for n, c in comments.items()]
    quote = draw(st.sampled_from(['"', "'", '"""']))
    return "\n".join(["def f(", "    *,", *lines, "):", f"    {quote}Do.{quote}", ""]), {k: v for k, v in comments.items() if v}


@given(signatures())
def test_any_signature(drawn):
    source, comments = drawn
    exported = with_args(source)
    space = {}
    exec(exported, space)
    _, _, section = inspect.getdoc(space["f"]).partition("Args:\n")
    assert section.splitlines() == [f"    {k}: {v}" for k, v in comments.items()]
    assert without_args(exported, source) == source


def test_the_same_as_fastcore_reads(tmp_path, monkeypatch):
    source = """def f(a, # one
    b=1,  # two
    # three,
    # and more
    c=(2, 3),
    *, d: int = 4,  # four
    e="# 5",
) -> int:  # sum
    "Add."
"""
    (tmp_path/"read_by_fastcore.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    from read_by_fastcore import f
    expected = {k: v.replace("\n", " ").split() for k, v in docments(f).items() if v and k != "return"}
    said = [line.strip().partition(": ") for line in doc(with_args(source)).split("\n\n")[1].splitlines()[1:]]
    assert {k: v.split() for k, _, v in said} == expected and len(said) == 4


# --- edits of an exported module


EDITS = {
    "the code": ("return x*by", "return by*x", "return by*x"),
    "a comment": ("x, /,              # what is scaled, [T, B]", "x, /,  # what", "x, /,  # what"),
    "the docstring": ('"""Multiply.', '"""Multiply all.', '"Multiply all."'),
    "the name of a parameter": ("text=", "note=", "note="),
    "a parameter is dropped": ("    plain=None,  # noqa: B006\n", "", "exact=False,\n    **options"),
    "a comment is dropped": ("  # no comment inside a string", "", 'text="a # b, x", '),
    "an entry is added": ("    *rest: more", "    plain: nothing\n        *rest: more", "        plain: nothing\n    \"\"\""),
    "a section is added": ("int]: name -> product\n", "int]: name -> product\n\n    Raises:\n        KeyError: never\n", "KeyError: never"),
    "the name of the function": ("def scale(", "def scaled(", "def scaled("),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_goes_back_without_the_sections(edit):
    old, new, there = EDITS[edit]
    exported = with_args(FUNCTION)
    assert old in exported
    back = without_args(exported.replace(old, new), FUNCTION)
    assert there in back and "Returns:" not in back
    assert ("Args:" in back) == (edit == "an entry is added")
    assert without_args(with_args(back), back) == back


def test_an_edited_entry_is_an_error_unless_the_comment_says_the_same():
    edited = with_args(FUNCTION).replace("by: factor", "by: the factor")
    with pytest.raises(ArgsError, match="scale: .* by;"): with_args(without_args(edited, FUNCTION))
    both = without_args(edited.replace("# factor", "# the factor"), FUNCTION)
    assert both == FUNCTION.replace("# factor", "# the factor")


# --- the commands, in a small project


SETTINGS = """[DEFAULT]
repo = small
lib_name = small
version = 0
user = u
author = a
branch = main
nbs_path = nbs
lib_path = small
doc_path = _docs
recursive = True
put_version_in_init = True
update_pyproject = False
"""
CELLS = ["#| default_exp inner.scale",
         "#| export\nimport numpy as np\nfrom small import a\nfrom small.inner import b\nfrom small.c import d",
         f"#| export\n{FUNCTION}", f"#| exporti\n{FUNCTION}", "#| export\n#| eval: false\nif __name__ == '__main__': print(1)"]


@pytest.fixture
def project(tmp_path):
    "A folder with one notebook, not yet exported."
    (tmp_path/"settings.ini").write_text(SETTINGS)
    (tmp_path/"nbs/inner").mkdir(parents=True)
    cells = [dict(cell_type="code", id=f"cell{i}", metadata={}, outputs=[], execution_count=None, source=s) for i, s in enumerate(CELLS)]
    metadata = dict(kernelspec=dict(name="python3", language="python", display_name=""))
    (tmp_path/"nbs/inner/00_scale.ipynb").write_text(json.dumps(dict(cells=cells, metadata=metadata, nbformat=4, nbformat_minor=5)))
    return tmp_path


def command(project, *args):
    res = subprocess.run([sys.executable, ROOT/"tools/export.py", *args], cwd=project, capture_output=True, text=True, timeout=120)
    return res.returncode, res.stdout + res.stderr


def sources(project): return ["".join(c["source"]) for c in json.loads((project/"nbs/inner/00_scale.ipynb").read_text())["cells"]]


def test_export_and_update(project):
    assert command(project) == (0, "")
    module = project/"small/inner/scale.py"
    text = module.read_text()
    assert "from .. import a\nfrom . import b\nfrom ..c import d\n" in text
    assert text.count("    Args:\n") == 2 and (project/"small/_modidx.py").exists() and (project/"small/inner/__init__.py").exists()
    assert command(project, "--update") == (0, "") and sources(project) == CELLS
    module.write_text(text.replace("x*by", "by*x").replace("# factor", "# the factor"))
    assert command(project, "--update") == (0, "")
    assert sources(project) == [s.replace("x*by", "by*x").replace("# factor", "# the factor") for s in CELLS]
    assert command(project) == (0, "") and "by: the factor" in module.read_text()


def test_an_update_that_would_not_export_changes_no_notebook(project):
    command(project)
    module = project/"small/inner/scale.py"
    module.write_text(module.read_text().replace("    by: factor", "    by: the factor"))
    code, message = command(project, "--update")
    assert code == 1 and "scale: " in message and "by" in message and "Traceback" not in message
    assert sources(project) == CELLS
