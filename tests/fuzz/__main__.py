"""`make fuzz`: runs each target for its share of the time. Exits with status 1 when an input broke a target's
contract; that input is kept.
"""

from __future__ import annotations

import argparse
import sys
import time

import structlog

from tests.fuzz.catalogue import TARGETS
from tests.fuzz.hunt import Findings, guided, has_atheris, structured


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="for all targets together")
    parser.add_argument("--target", choices=sorted(TARGETS), action="append", help="repeatable; default: all")
    options = parser.parse_args()
    structlog.configure(processors=[lambda *_: _drop()])
    targets = [TARGETS[name] for name in options.target or TARGETS]
    is_guided = has_atheris()
    if not is_guided:
        print("atheris is not installed: no run is guided by coverage")
    hunts = [
        (target, how)
        for target in targets
        for how in ((structured, guided) if target.is_pure and is_guided else (structured,))
    ]
    share_s = options.minutes * 60 / len(hunts)
    crashes = []
    print(f"{'target':18} {'inputs':>10} {'a second':>9} {'new entries':>12} {'crashes':>8}")
    for target, how in hunts:
        began_s = time.monotonic()
        found = how(target, share_s)
        took_s = time.monotonic() - began_s
        _print(f"{target.name} {'+' if how is guided else ''}", found, took_s)
        if found.crash is not None:
            crashes.append(found.crash)
            print(f"{found.report}\nthe input: {found.crash}", file=sys.stderr)
    print(f"crashes {len(crashes)}   (+: guided by coverage)")
    return 1 if crashes else 0


def _print(name: str, found: Findings, took_s: float) -> None:
    num_crashes = 0 if found.crash is None else 1
    print(
        f"{name:18} {found.num_inputs:10} {found.num_inputs / took_s:9.1f} {found.num_new_entries:12} {num_crashes:8}",
        flush=True,
    )


def _drop() -> dict[str, object]:
    raise structlog.DropEvent


if __name__ == "__main__":
    sys.exit(main())
