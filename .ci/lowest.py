"Print the lowest version of each requirement in `settings.ini` that names one, as pip takes them."

import configparser
import shlex
from pathlib import Path

from packaging.requirements import Requirement

settings = configparser.ConfigParser()
settings.read(Path(__file__).resolve().parents[1] / "settings.ini", encoding="utf-8")
for text in shlex.split(settings["DEFAULT"]["requirements"]):
    requirement = Requirement(text)
    if requirement.marker is not None and not requirement.marker.evaluate():
        continue
    lowest = [x.version for x in requirement.specifier if x.operator == ">="]
    if lowest:
        print(f"{requirement.name}=={lowest[0]}")
