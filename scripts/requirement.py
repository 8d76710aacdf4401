"""Prints a requirement of pyproject.toml, to install it ahead of the others: `python scripts/requirement.py torch`."""

import re
import sys
import tomllib
from pathlib import Path

name = sys.argv[1]
project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
print(next(line for line in project["dependencies"] if re.split(r"[<>=\[]", line)[0] == name))
