"""`make release` builds the sdist and the wheel into `dist/`, and checks both as a user would meet them.

Nothing is tagged and nothing is uploaded. It stops at the first thing that is wrong, and says which.
"""

import configparser
import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"


def run(*command, cwd=ROOT):
    "The standard output of a command, which must succeed."
    command = [str(word) for word in command]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"release: {' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def version_and_notes():
    "The version of `settings.ini`, and what the changelog says of it, if all files agree."
    settings = configparser.ConfigParser()
    settings.read(ROOT / "settings.ini", encoding="utf-8")
    version = settings["DEFAULT"]["version"]

    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    section = re.search(
        rf"^## \[{re.escape(version)}\] - (\d{{4}}-\d\d-\d\d)\n(.*?)(?=^## \[|\Z)",
        changelog,
        re.MULTILINE | re.DOTALL,
    )
    if section is None:
        sys.exit(f"release: CHANGELOG.md has no line '## [{version}] - YEAR-MONTH-DAY'")

    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    for line in (f"version: {version}", f"date-released: {section[1]}"):
        if line not in citation.splitlines():
            sys.exit(f"release: CITATION.cff has no line '{line}'")
    return version, f"# rollpipe {version}\n{section[2].rstrip()}\n"


def build():
    "The sdist and the wheel that is built from it."
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", DIST)
    run(sys.executable, "-m", "twine", "check", "--strict", *DIST.iterdir())
    (sdist,) = DIST.glob("*.tar.gz")
    (wheel,) = DIST.glob("*.whl")
    return sdist, wheel


def check_contents(sdist, wheel):
    "The wheel holds the package as git has it, and the sdist every file but those of git itself."
    tracked = {name for name in run("git", "ls-files").splitlines() if not name.startswith(".")}
    with zipfile.ZipFile(wheel) as archive:
        installed = {name for name in archive.namelist() if ".dist-info/" not in name}
    with tarfile.open(sdist) as archive:
        source = {member.name.partition("/")[2] for member in archive if member.isfile()}
    package = {name for name in tracked if name.startswith("rollpipe/")}
    generated = {name for name in source if name.startswith("rollpipe.egg-info/")}
    generated |= {"PKG-INFO", "setup.cfg"}
    for where, names, expected in (
        (wheel.name, installed, package),
        (sdist.name, source - generated, tracked),
    ):
        if names != expected:
            sys.exit(
                f"release: {where} lacks {sorted(expected - names)}, "
                f"and has {sorted(names - expected)} beside it"
            )


def first_example():
    "The first example of the README, and the last line that it prints."
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    code, output = re.search(r"```python\n(.*?)```\n```text\n(.*?)```", readme, re.DOTALL).groups()
    return code, output.strip().splitlines()[-1]


def check_install(wheel):
    "In an empty environment the wheel runs the first example, and with `fast` another engine."
    code, last_line = first_example()
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        venv.create(home / "env", with_pip=True)
        python = home / "env/bin/python"
        install = (python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt")
        run(*install, wheel, cwd=home)
        (home / "example.py").write_text(code, encoding="utf-8")
        printed = run(python, "example.py", cwd=home).splitlines()
        if printed[-1] != last_line:
            sys.exit(f"release: README promises {last_line!r}, and the wheel says {printed[-1]!r}")

        run(*install, f"rollpipe[fast] @ {wheel.as_uri()}", cwd=home)
        (home / "fast.py").write_text(
            code.replace("seed=0)\n\n", 'seed=0, engine="onnxruntime")\n\n', 1), encoding="utf-8"
        )
        assert "onnxruntime" in (home / "fast.py").read_text(encoding="utf-8")
        run(python, "fast.py", cwd=home)


def main():
    if run("git", "status", "--porcelain"):
        sys.exit("release: the checkout has changes that are not committed")
    version, notes = version_and_notes()
    sdist, wheel = build()
    check_contents(sdist, wheel)
    check_install(wheel)

    # What the page of the release says, with the checksums of what it offers.
    sums = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}" for path in (sdist, wheel)
    ]
    notes += "\n## Checksums (SHA-256)\n\n```\n" + "\n".join(sums) + "\n```\n"
    (DIST / "NOTES.md").write_text(notes, encoding="utf-8")
    print(f"rollpipe {version} is in dist: {sdist.name}, {wheel.name}, NOTES.md")
    print("Nothing was tagged or uploaded. CONTRIBUTING.md says how a release is published.")


if __name__ == "__main__":
    main()
