"""Runs a peer: a program that measures another inference library, for comparison with Baton.

The library is called directly, without a server or streaming. The program receives the sizes as `--prompt`,
`--generate` and `--batch`, and `--threads` if the benchmark sets it. It prints one JSON object with `peer` (a name),
`dtype`, `threads`, and `rows`: a list of objects with `batch`, `decode_tokens_per_s` and `prefill_tokens_per_s`.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

PeerFigures = dict[str, Any]
"""The JSON object that the peer printed."""


def add_peer_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--peer", help="a program with its arguments, which prints its figures as one JSON object; run in each round"
    )


def run_peer(
    command: str,
    *,
    dtype: str,
    num_prompt_tokens: int,
    num_new_tokens: int,
    batches: Sequence[int],
    num_threads: int | None = None,
) -> PeerFigures | None:
    """Runs the peer and returns its figures.

    Prints the reason and returns None if the peer fails; a caller counts the bound on the ratio to it as missed. Raises
    SystemExit if the peer computes in another dtype, because a ratio to it would mean nothing.
    """
    arguments = ["--prompt", str(num_prompt_tokens), "--generate", str(num_new_tokens)]
    arguments += ["--batch", ",".join(map(str, batches))]
    if num_threads is not None:
        arguments += ["--threads", str(num_threads)]
    try:
        ended = subprocess.run([*shlex.split(command), *arguments], check=False, capture_output=True, text=True)
    except OSError as error:
        print(f"the peer cannot be run: {error}", file=sys.stderr)
        return None
    if ended.returncode != 0:
        print(f"the peer failed with {ended.returncode}:\n{ended.stderr}", file=sys.stderr)
        return None
    try:
        measured: Any = json.loads(ended.stdout)
    except ValueError:
        print(f"the peer printed no JSON:\n{ended.stdout}", file=sys.stderr)
        return None
    if not isinstance(measured, dict):
        print(f"the peer printed no JSON object:\n{ended.stdout}", file=sys.stderr)
        return None
    if measured.get("dtype") != dtype:
        raise SystemExit(f"the peer computes in {measured.get('dtype')}, this run in {dtype}: they cannot be compared")
    return measured


def peer_row(measured: PeerFigures | None, batch: int) -> dict[str, float] | None:
    """Returns the peer's figures for `batch` sequences at a time. None if the peer has no such row, or failed."""
    rows = measured.get("rows", []) if measured else []
    return next((row for row in rows if row["batch"] == batch), None)
