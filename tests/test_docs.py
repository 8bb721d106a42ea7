"What the texts show is what the code does, and references lead somewhere."

import contextlib
import importlib
import inspect
import io
import json
import os
import re
import shlex
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
from forked import run_forked

ROOT = Path(__file__).resolve().parents[1]
NBS = ROOT / "nbs"
NOTEBOOKS = sorted(p for p in NBS.rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts)
PAGES = sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("docs/howto/*.md")])  # of the site
TEXTS = [*NOTEBOOKS, *ROOT.glob("*.md"), *ROOT.glob("benchmarks/*.md"), *PAGES]


def prose(path):
    "The text of a Markdown file, or of the Markdown cells of a notebook."
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return text
    return "\n".join(
        "".join(cell["source"])
        for cell in json.loads(text)["cells"]
        if cell["cell_type"] == "markdown"
    )


def run(text, names=None):
    "What the code prints in this process, with its global `names`; an assertion or error stops it."
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(
            compile(text, "<snippet>", "exec"), {"__name__": "__main__"} if names is None else names
        )
    return printed.getvalue()


def test_references_to_notebooks_lead_to_one():
    named = {
        (path.name, name)
        for path in TEXTS
        for name in re.findall(r"`(?:nbs/)?((?:\w+/)*\d\d_\w+)(?:\.ipynb)?`", prose(path))
    }
    missing = {
        (text, name)
        for text, name in named
        if not (NBS / f"{name}.ipynb").is_file() and not (NBS / name).is_dir()
    }
    assert not missing


def test_make_has_each_target_that_a_text_or_a_workflow_names():
    targets = set(re.findall(r"^(\w+):.*##", (ROOT / "Makefile").read_text(), re.M))
    texts = [*TEXTS, *ROOT.glob(".github/workflows/*.yml"), ROOT / ".ci/run"]
    for path in texts:
        text = path.read_text(encoding="utf-8") if path.suffix != ".ipynb" else prose(path)
        commands = re.findall(
            r"`(make [^`]+)`|^(?:.*run: )?(make [\w=. ]+?) *(?:#.*)?$", text, re.M
        )
        named = [words for pair in commands for words in pair if words]
        # `make PYTHON=python3.12 setup`: what is no variable is a target
        words = {word for command in named for word in command.split()[1:] if "=" not in word}
        assert words <= targets, path


README = ROOT / "README.md"
SHORTER = dict(
    train="--steps 600 --n-steps 32 --quiet --no-tensorboard",
    resume="--steps 1200 --quiet --no-tensorboard",
    evaluate="--episodes 2",
    seeds="--seeds 0-1",
    ray="--reading processes --workers 1",
    watch="--record film.gif",
    profile="--seconds .1",
    autotune="--seconds .1",
    tune="--trials 1 --jobs 1 --seeds 0 --evaluations 1 --steps 600 --n-steps 32",
)
NEEDS = dict(export="onnx", tune="optuna", watch="pygame")
RUNS = dict(
    README=2, command_line=7, ranks=1
)  # the folders that the commands of a text leave in `runs`


def snippets(path):
    "(language, text) of the blocks of a text, in turn."
    blocks = re.findall(
        r"^( *)```([^\n`]*)\n(.*?)^ *```", path.read_text(encoding="utf-8"), re.M | re.S
    )
    return [
        (language, re.sub(rf"^{indent}", "", text, flags=re.M)) for indent, language, text in blocks
    ]


def shorter(text):
    return re.sub(r"range\(\d\d+\)", "range(2)", text)


def command(line):
    "Run a command in this process, or that of each rank; `#` begins a comment. It is shortened, and workers are processes."
    from rollpipe.cli.main import build_parser, main

    first, *words = shlex.split(line.partition(" -m ")[2] or line, comments=True)
    assert first == "rollpipe", line
    if "--import" not in words:
        build_parser().parse_args(words)
    kind = "resume" if "--resume" in words else words[0]
    needs = "torch" if {"torchscript", "pt2"} & {*words} else NEEDS.get(kind, "rollpipe")
    if find_spec(needs) is None:
        return
    words = [
        name
        for word in words
        for name in (sorted(map(str, Path().glob(word))) if "*" in word else [word])
    ]
    more = [
        SHORTER.get(name, "")
        for name in (kind, *(word.strip("-") for word in words if word in ("--seeds", "ray")))
    ]
    with contextlib.redirect_stdout(io.StringIO()):
        assert main([*words, *" ".join(more).split()]) == 0, line


def commands(text):
    for line in filter(lambda line: line.startswith(("rollpipe ", "torchrun ")), text.splitlines()):
        command(line)


def runs_left(path):
    assert path.stem not in RUNS or len([*Path("runs").iterdir()]) == RUNS[path.stem]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_readme_works_from_top_to_bottom(tmp_path, monkeypatch, packages):
    """In an empty folder. Every snippet runs in a file of its own, and prints what the README shows after it.

    Loops of ten and more rounds have two, so what the first training prints is compared by a slow test.
    """
    monkeypatch.chdir(tmp_path)
    blocks = snippets(README)
    printed = None
    compared = 0
    for language, text in blocks:
        if language == "python":
            Path("snippet.py").write_text(shorter(text), encoding="utf-8")
            res = run_forked(["snippet.py"])
            assert res.returncode == 0, res.stderr[-2000:]
            printed = None if "TRPO(actor" in text else res.stdout
        elif language == "text":
            if printed is not None:
                assert printed.strip() == text.strip()
            compared = compared + (printed is not None)
            printed = None
        else:
            commands(text)
    assert (sum(language == "python" for language, _ in blocks), compared) == (4, 2)
    runs_left(README)


# words
LONGEST = {"README.md": 1500, "ARCHITECTURE.md": 1340}


@pytest.mark.parametrize("name", LONGEST)
def test_a_text_of_the_root_is_one_page(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    # The block of import directions is a table for `test_imports.py`, and has a line for each room.
    text = re.sub(r"```imports\n.*?```", "", text, flags=re.S)
    assert len(text.split()) <= LONGEST[name]


def test_the_readme_has_a_drawing_and_leads_to_every_how_to_page():
    text = README.read_text(encoding="utf-8")
    assert re.search(r"^ *○ \w+", text, re.M)  # a drawing
    targets = {target for target in re.findall(r"\]\(([^)#]+)", text) if "://" not in target}
    assert not {target for target in targets if not (ROOT / target).is_file()}
    assert {
        f"docs/howto/{page.name}"
        for page in PAGES
        if page.parent.name == "howto" and page.stem != "index"
    } <= targets


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_the_first_training_of_the_readme_is_solved_with_every_seed(seed):
    blocks = snippets(README)
    first = next(
        i
        for i, (language, text) in enumerate(blocks)
        if language == "python" and "TRPO(actor" in text
    )
    printed = run(
        re.sub(r"seed=(\d)", lambda match: f"seed={seed + int(match[1])}", blocks[first][1])
    )
    last = printed.splitlines()[-1]
    shown = blocks[first + 1][1].strip()
    assert (
        float(re.match(r"return (\S+) \+- ", last)[1]) >= 475
    )  # the threshold of gymnasium's registry
    if seed == 0:
        assert last == shown


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", [p for p in PAGES if snippets(p)], ids=lambda p: p.stem)
def test_the_snippets_of_a_page_run_and_print_what_the_page_shows(
    path, tmp_path, monkeypatch, packages
):
    """In an empty folder. A block of text is what the block of Python before it prints. One that begins with a file name is that file.

    Loops of ten and more rounds have two.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    names = {"__name__": "__main__"}
    printed = None
    for language, text in snippets(path):
        file = re.match(r"# (\w+\.(?:py|toml))\n", text)
        if file:
            Path(file[1]).write_text(text, encoding="utf-8")
        elif language == "python":
            if "onnx" in text:
                pytest.importorskip("onnxruntime")
            if "minari" in text:
                pytest.importorskip("h5py")
            printed = run(shorter(text), names)
        elif language == "sh":
            commands(text)
        elif language == "text":
            assert printed is not None and printed.strip() == text.strip()
            printed = None
    runs_left(path)


def test_each_algorithm_has_a_card_with_its_source_its_options_and_its_actions():
    import cards

    from rollpipe.settings.algorithms import ALGORITHMS, options_for
    from rollpipe.settings.files import read_table

    written = read_table(ROOT / "docs/cards.toml")
    assert written.keys() == ALGORITHMS.keys()
    for name, entry in written.items():
        page = cards.card(name, entry, has_picture=False)
        assert re.search(r"\| source \| .*\d{4}", page), name
        assert re.search(r"\| actions \| .*(Discrete|Box)", page), name
        own = [option.flag for option in options_for(name) if option.part == "learner"]
        assert all(f"| `{flag}` |" in page for flag in own)
    drawn = {name for name in written if cards.curves_of(name)}
    assert drawn == written.keys() - {"bc", "iql", "td3bc"}


def test_the_site_has_every_public_name_and_its_pages_refer_to_pages_and_terms_that_are_there(
    tmp_path,
):
    import prepare

    prepare.main(tmp_path)
    pages = {
        p.relative_to(tmp_path).with_suffix("").as_posix(): p.read_text(encoding="utf-8")
        for p in tmp_path.rglob("*.*")
        if p.suffix in (".md", ".ipynb")
    }
    assert {
        prepare.page_of(p.relative_to(NBS).with_suffix("").as_posix()) for p in NOTEBOOKS
    } <= set(pages)

    documented = set(re.findall(r"^\.\. auto\w+:: (\S+)", "\n".join(pages.values()), re.M))
    for package in prepare.PACKAGES:
        public = importlib.import_module(package)
        names = {
            n
            for n in getattr(public, "__all__", vars(public))
            if n[0] != "_" and n != "DataLoader2"
        }
        assert {
            f"{package}.{n}" for n in names if not inspect.ismodule(getattr(public, n))
        } <= documented

    for path in PAGES:
        page = path.relative_to(ROOT / "docs")
        text = path.read_text(encoding="utf-8")
        targets = re.findall(r"\{doc\}`([^`]+)`", text) + re.findall(r"^:link: (.+)$", text, re.M)
        found = [os.path.normpath(t[1:] if t[0] == "/" else page.parent / t) for t in targets]
        assert set(found) <= set(pages), path
        shown = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", pages[page.with_suffix("").as_posix()])
        assert all((tmp_path / page.parent / picture).is_file() for picture in shown), path
        links = re.findall(r"\]\(([^)#\s]+)", re.sub(r"```.*?```", "", text, flags=re.S))
        assert all("://" in link or (path.parent / link).exists() for link in links), path
        terms = [
            re.sub(r".*<(.*)>", r"\1", term) for term in re.findall(r"\{term\}`([^`]+)`", text)
        ]
        assert all(re.search(rf"^   {term}$", pages["glossary"], re.M) for term in terms), path


@pytest.mark.parametrize(
    "source, shown, checks",
    [
        (
            "x = 1\nprint(x)\n# One\n# is one.\nassert x == 1\nassert x < 2, (\n  x)",
            "x = 1\nprint(x)",
            "# One\n# is one.\nassert x == 1\nassert x < 2, (\n  x)",
        ),
        ("f(x)\ntest_eq(x, 1)", "f(x)", "test_eq(x, 1)"),
        ("assert x", None, "assert x"),
        ("x = 1; assert x", "x = 1; assert x", None),
        ("assert x\nx = 2", "assert x\nx = 2", None),
        ("%time x", "%time x", None),
        ("if x:\n    assert x", "if x:\n    assert x", None),
        ("", "", None),
    ],
)
def test_the_checks_at_the_end_of_a_cell_are_folded(source, shown, checks):
    import nbformat
    import prepare

    outputs = [nbformat.v4.new_output("stream", text="1")]
    found = prepare.with_checks_folded(nbformat.v4.new_code_cell(source, outputs=outputs))
    assert [x.source for x in found] == [text for text in (shown, checks) if text is not None]
    assert ["tags" in x.metadata for x in found] == [False] * (shown is not None) + [True] * (
        checks is not None
    )
    assert found[0].outputs == outputs


@pytest.mark.parametrize(
    "bad",
    [
        '<a href="gone.html">',
        '<a href="#gone">',
        '<a href="b.html#gone">',
        '<img src="gone.png">',
        '<script src="https://example.org/x.js">',
    ],
)
def test_the_site_is_refused_if_a_link_is_broken_or_something_is_loaded_from_elsewhere(
    bad, tmp_path, capsys
):
    import check_links

    good = '<h1 id="top">A</h1><a href="b.html#top">b</a><a href="#top">up</a><a href="https://example.org">there</a>'
    for name in "ab":
        (tmp_path / f"{name}.html").write_text(good)
    assert not check_links.main(tmp_path)
    (tmp_path / "a.html").write_text(good + bad)
    assert check_links.main(tmp_path) and "a.html: " in capsys.readouterr().out


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_search_of_the_site_puts_guides_above_sources():
    pages = dict(
        guide=["howto/images", 5],
        reference=["api/rollpipe.pipes.frames", 5],
        literate=["literate/pipes/22_frames", 15],
        exact=["api/rollpipe.pipes.frames", 26],
    )
    code = (
        f"{(ROOT / 'docs' / 'scorer.js').read_text()}; const score = ([page, n]) => Scorer.score([page, '', '', '', n, '', 'text']);"
        f"console.log(JSON.stringify(Object.entries({json.dumps(pages)}).sort((a, b) => score(b[1]) - score(a[1])).map(x => x[0])))"
    )
    assert json.loads(
        subprocess.run(["node", "-e", code], capture_output=True, text=True, check=True).stdout
    ) == ["exact", "guide", "reference", "literate"]
