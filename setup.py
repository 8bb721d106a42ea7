"""The build script. Every fact comes from settings.ini; nothing is repeated here."""

import shlex
import shutil
import sys
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

here = Path(__file__).resolve().parent
parser = ConfigParser()
parser.read(here / "settings.ini", encoding="utf-8")
cfg = parser["DEFAULT"]

LICENSES = {"apache2": "Apache-2.0"}
STATUS = {
    "1": "1 - Planning",
    "2": "2 - Pre-Alpha",
    "3": "3 - Alpha",
    "4": "4 - Beta",
    "5": "5 - Production/Stable",
}
EXTRA = "_requirements"
PYTHONS = [
    (3, minor) for minor in range(int(cfg["min_python"].split(".")[1]), 15)
]  # by hand up to 3.13, 3.14 by a workflow; later ones are allowed


class FreshBuild(build_py):
    "Modules that the source no longer has do not reach the wheel: setuptools alone would take them from an earlier build in build/lib."

    def run(self):
        if not self.editable_mode:
            shutil.rmtree(Path(self.build_lib, cfg["lib_name"]), ignore_errors=True)
        super().run()


if (
    sys.version_info[:2] < PYTHONS[0]
):  # pip compares `python_requires` last, when torch is downloaded
    sys.exit(
        "rollpipe needs Python {}.{} or later, and this is {}.{}.".format(
            *PYTHONS[0], *sys.version_info
        )
    )

setup(
    name=cfg["lib_name"],
    version=cfg["version"],
    description=cfg["description"],
    long_description=(here / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author=cfg["author"],
    url=cfg["git_url"] or None,
    license=LICENSES[cfg["license"]],
    keywords=cfg["keywords"],
    classifiers=[
        f"Development Status :: {STATUS[cfg['status']]}",
        f"Intended Audience :: {cfg['audience']}",
        f"Natural Language :: {cfg['language']}",
        *(f"Programming Language :: Python :: {major}.{minor}" for major, minor in PYTHONS),
    ],
    python_requires=f">={cfg['min_python']}",
    packages=find_packages(include=[cfg["lib_name"], f"{cfg['lib_name']}.*"]),
    package_data={
        cfg["lib_name"]: ["py.typed", "settings/presets/*.toml"]
    },  # the first tells type checkers to read the annotations
    install_requires=shlex.split(cfg["requirements"]),
    extras_require={
        key[: -len(EXTRA)]: shlex.split(value) for key, value in cfg.items() if key.endswith(EXTRA)
    },
    entry_points={
        "console_scripts": cfg["console_scripts"].split(),
        "nbdev": [
            f"{cfg['lib_name']}={cfg['lib_path']}._modidx:d"
        ],  # other nbdev projects find here what their texts may link to
    },
    cmdclass={"build_py": FreshBuild},
    zip_safe=False,
)
