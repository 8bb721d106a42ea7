"""What a user installs: the wheel and the sdist hold what they should, and the wheel works without the source beside it."""

import configparser
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
NO_SOURCE = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PIP_"))} | dict(
    OMP_NUM_THREADS="1", MPLBACKEND="Agg"
)
PIP = (sys.executable, "-m", "pip", "--isolated", "--disable-pip-version-check", "--no-cache-dir")
JUNK = [
    "build/lib/rollpipe/gone.py",
    "dist/rollpipe-0.0.1-py3-none-any.whl",
    "runs/demo/config.json",
    "nbs/runs/a/metrics.csv",
    "nbs/pipes/.ipynb_checkpoints/07_data.ipynb",
    "rollpipe/__pycache__/cli.cpython-310.pyc",
    "rollpipe/runs/b/checkpoint.safetensors",
    "tests/__pycache__/toys.cpython-310.pyc",
    "benchmarks/runs/c/config.json",
    "_docs/index.html",
    ".venv/lib/site.py",
]

settings = configparser.ConfigParser()
settings.read(ROOT / "settings.ini", encoding="utf-8")
settings = settings["DEFAULT"]


def run(*command, cwd):
    "Standard output of a command, which must succeed and sees neither the source nor the caller's settings."
    res = subprocess.run(
        [str(c) for c in command],
        cwd=cwd,
        env=NO_SOURCE,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert res.returncode == 0, f"{shlex.join(map(str, command))}:\n{res.stdout}{res.stderr}"
    return res.stdout


def build_wheel(tree, to):
    run(
        *PIP,
        "wheel",
        "-q",
        "--no-index",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        to,
        tree,
        cwd=to,
    )
    return next(to.glob("*.whl"))


def members(wheel):
    "name -> content"
    with zipfile.ZipFile(wheel) as z:
        return {n: z.read(n) for n in z.namelist()}


@pytest.fixture(scope="module")
def sources():
    "The files of the project, without git's own."
    if not (ROOT / ".git").exists():
        pytest.skip("what belongs to the project is known only in a git checkout")
    names = run(
        "git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT
    ).splitlines()
    return {n for n in names if not n.startswith(".") and (ROOT / n).exists()}


@pytest.fixture(scope="module")
def tree(sources, tmp_path_factory):
    "A copy of the checkout, with everything in it that work leaves behind."
    to = tmp_path_factory.mktemp("tree")
    for name in [*sources, *JUNK]:
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        if name in sources:
            shutil.copy2(ROOT / name, to / name)
        else:
            (to / name).write_text("junk = True\n")
    return to


@pytest.fixture(scope="module")
def sdist(tree, tmp_path_factory):
    to = tmp_path_factory.mktemp("sdist")
    run(
        sys.executable,
        "-c",
        "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])",
        to,
        cwd=tree,
    )
    return next(to.glob("*.tar.gz"))


@pytest.fixture(scope="module")
def wheel(tree, sdist, tmp_path_factory):
    return build_wheel(tree, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def metadata(wheel):
    found = [text for name, text in members(wheel).items() if name.endswith(".dist-info/METADATA")]
    return HeaderParser().parsestr(found[0].decode())


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    "The interpreter of a new environment: the wheel is installed in it, and its requirements are those of the tests' environment."
    home = tmp_path_factory.mktemp("venv")
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin/python"
    run(*PIP, "--python", python, "install", "-q", "--no-index", "--no-deps", wheel, cwd=home)
    own = Path(
        run(
            python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=home
        ).strip()
    )
    (own / "requirements.pth").write_text(
        "\n".join({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    )
    return python


# -- what is in them ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(sources, wheel):
    found = members(wheel)
    package = {n for n in sources if n.startswith("rollpipe/")}
    assert {
        "rollpipe/py.typed",
        "rollpipe/_modidx.py",
        "rollpipe/pipes/workers/process.py",
    } <= package
    info = f"rollpipe-{settings['version']}.dist-info"
    about = {
        f"{info}/{n}"
        for n in (
            "METADATA",
            "RECORD",
            "WHEEL",
            "entry_points.txt",
            "licenses/LICENSE",
            "top_level.txt",
        )
    }
    assert found.keys() == package | about
    assert all(found[n] == (ROOT / n).read_bytes() for n in package)
    assert found[f"{info}/licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()


def test_the_sdist_holds_the_source_and_nothing_else(sources, sdist):
    with tarfile.open(sdist) as tar:
        found = {m.name.partition("/")[2] for m in tar if m.isfile()}
    made = {n for n in found if n.startswith("rollpipe.egg-info/")} | {"PKG-INFO", "setup.cfg"}
    assert sources - found == set(), "MANIFEST.in leaves them out"
    assert found - sources - made == set(), "MANIFEST.in lets them in"


@pytest.mark.slow
def test_the_sdist_builds_the_same_wheel(sdist, wheel, tmp_path):
    run(sys.executable, "-m", "tarfile", "-e", sdist, tmp_path / "source", cwd=tmp_path)
    again = build_wheel(next((tmp_path / "source").iterdir()), tmp_path)
    assert again.name == wheel.name and members(again) == members(wheel)


def test_the_metadata_says_what_settings_ini_says(metadata):
    assert (metadata["Name"], metadata["Version"], metadata["License"]) == (
        "rollpipe",
        settings["version"],
        "Apache-2.0",
    )
    assert (
        metadata.get_payload().strip() == (ROOT / "README.md").read_text(encoding="utf-8").strip()
    )
    required = {
        str(Requirement(r)) for r in metadata.get_all("Requires-Dist") if "extra ==" not in r
    }
    assert required == {str(Requirement(r)) for r in shlex.split(settings["requirements"])}
    assert set(metadata.get_all("Provides-Extra")) == {
        k.removesuffix("_requirements") for k in settings if k.endswith("_requirements")
    }


def test_no_address_is_made_up(metadata, wheel):
    "A project without a public host names none: neither a placeholder, nor what nbdev would guess."
    assert (
        metadata["Home-page"] == (settings["git_url"] or None) and metadata["Author-email"] is None
    )
    address = re.compile(rb"example\.(invalid|com|org)|rollpipe\.github\.io|github\.com/rollpipe")
    assert not {name for name, text in members(wheel).items() if address.search(text)}


@pytest.mark.slow_but_one
@pytest.mark.parametrize(
    "version, fits",
    {"3.9": False, "3.10": True, "3.11": True, "3.12": True, "3.13": True, "3.14": True}.items(),
)
def test_pip_refuses_older_versions_of_python(version, fits, metadata, wheel, tmp_path):
    command = [
        *PIP,
        "download",
        "--no-index",
        "--no-deps",
        "-d",
        tmp_path,
        "--python-version",
        version,
        wheel,
    ]
    res = subprocess.run(
        command, cwd=tmp_path, env=NO_SOURCE, capture_output=True, text=True, timeout=120
    )
    assert (res.returncode == 0) == fits, res.stderr
    said = rf"'rollpipe' requires a different Python: {re.escape(version)}\S* not in '>=3\.10'"
    assert fits or re.search(said, res.stderr)
    assert (
        f"Programming Language :: Python :: {version}" in metadata.get_all("Classifier")
    ) == fits


@pytest.mark.parametrize(
    "version, fits",
    {(3, 9, 18): False, (3, 10, 0): True, (3, 13, 0): True, (3, 14, 0): True}.items(),
)
def test_the_source_refuses_older_versions_before_anything_is_downloaded(version, fits, tree):
    if version >= (3, 11):
        pytest.importorskip("tomllib")  # setuptools takes it from a Python that says it is so new
    code = f"import runpy, setuptools, sys; sys.version_info, sys.argv = {version}, ['setup.py', '--name']; runpy.run_path('setup.py')"
    res = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tree,
        env=NO_SOURCE,
        capture_output=True,
        text=True,
        timeout=120,
    )
    said = "rollpipe needs Python 3.10 or later, and this is {}.{}.\n".format(*version)
    assert (res.returncode, res.stdout, res.stderr) == (
        (0, "rollpipe\n", "") if fits else (1, "", said)
    )


def test_torchdata_is_required_where_it_has_a_loader(metadata):
    (required,) = (
        r for r in map(Requirement, metadata.get_all("Requires-Dist")) if r.name == "torchdata"
    )
    for python, wanted in {"3.10": True, "3.12": True, "3.13": False, "3.14": False}.items():
        assert required.marker.evaluate(dict(python_version=python)) == wanted


# -- what they do ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_module_imports_from_where_it_is_installed(python, sources, tmp_path):
    code = (
        "import importlib, importlib.metadata, pkgutil, rollpipe\n"
        "for m in pkgutil.walk_packages(rollpipe.__path__, 'rollpipe.'): print(m.name, importlib.import_module(m.name).__file__)\n"
        "print('version', importlib.metadata.version('rollpipe'))"
    )
    found = dict(
        line.split(maxsplit=1) for line in run(python, "-c", code, cwd=tmp_path).splitlines()
    )
    assert found.pop("version") == settings["version"]
    modules = {
        n.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for n in sources
        if re.match(r"rollpipe/.*\.py$", n)
    }
    assert found.keys() == modules - {"rollpipe"}
    assert all(Path(file).is_relative_to(python.parents[1]) for file in found.values())


@pytest.mark.slow
def test_the_command_trains_and_evaluates(python, tmp_path):
    command = python.with_name("rollpipe")
    assert run(command, "--version", cwd=tmp_path) == f"rollpipe {settings['version']}\n"
    run(
        command,
        "train",
        "trpo",
        "CartPole-v1",
        "--steps",
        512,
        "--n-envs",
        4,
        "--n-steps",
        64,
        "--quiet",
        cwd=tmp_path,
    )
    assert "episodes" in run(
        command, "evaluate", "runs/trpo-CartPole-v1-s0", "--episodes", 2, cwd=tmp_path
    )
    assert [p.name for p in tmp_path.iterdir()] == ["runs"]


@pytest.mark.slow
def test_another_nbdev_project_finds_what_it_may_link_to(python, tmp_path):
    (tmp_path / "settings.ini").write_text(
        "[DEFAULT]\nrepo = other\nlib_path = other\nuser = u\nauthor = a\nbranch = main\n"
    )
    code = (
        "from importlib.metadata import entry_points; from nbdev.doclinks import NbdevLookup\n"
        "found, = entry_points(group='nbdev', name='rollpipe')\n"
        "print(found.load()['syms']['rollpipe.agents.natural_gradient']['rollpipe.agents.natural_gradient.TRPO'][1])\n"
        "print(NbdevLookup().linkify('See `rollpipe.agents.natural_gradient.TRPO`.'))"
    )
    module, line = run(python, "-c", code, cwd=tmp_path).splitlines()
    assert module == "rollpipe/agents/natural_gradient.py"
    assert (
        line == "See [`rollpipe.agents.natural_gradient.TRPO`]"
        "(/rollpipe/agents/natural_gradient.html#trpo)."
    )  # on the host of that project, until we have one
