"""The build script. Every fact comes from settings.ini; nothing is repeated here."""
import shlex
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).resolve().parent
parser = ConfigParser()
parser.read(here / "settings.ini", encoding="utf-8")
cfg = parser["DEFAULT"]

LICENSES = {"apache2": "Apache-2.0"}
STATUS = {"1": "1 - Planning", "2": "2 - Pre-Alpha", "3": "3 - Alpha", "4": "4 - Beta", "5": "5 - Production/Stable"}
EXTRA = "_requirements"

setup(
    name=cfg["lib_name"],
    version=cfg["version"],
    description=cfg["description"],
    long_description=(here / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author=cfg["author"],
    author_email=cfg["author_email"],
    url=cfg["git_url"],
    license=LICENSES[cfg["license"]],
    keywords=cfg["keywords"],
    classifiers=[
        f"Development Status :: {STATUS[cfg['status']]}",
        f"Intended Audience :: {cfg['audience']}",
        f"Natural Language :: {cfg['language']}",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in (10, 11, 12)),
    ],
    python_requires=f">={cfg['min_python']},<3.13",
    packages=find_packages(include=[cfg["lib_name"], f"{cfg['lib_name']}.*"]),
    package_data={cfg["lib_name"]: ["py.typed"]},  # tells type checkers to read the annotations
    install_requires=shlex.split(cfg["requirements"]),
    extras_require={key[: -len(EXTRA)]: shlex.split(value) for key, value in cfg.items() if key.endswith(EXTRA)},
    entry_points={"console_scripts": cfg["console_scripts"].split()},
    zip_safe=False,
)
