"""Prints one requirement of pyproject.toml, so that it can be installed before the others.

python scripts/requirement.py torch
"""

import re
import sys
import tomllib
from pathlib import Path

name = sys.argv[1]
project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
print(next(line for line in lines if re.split(r"[<>=\[]", line)[0] == name))
