"""Rules of the engines' source: who writes a phase, who reads the relay, who sums what, and that no device is named."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from common.telemetry.stats import Timings
from scripts.lint.pages import module_name, sources
from scripts.lint.problem import ROOT, Problem, line_of

_LIFECYCLE = {"common/engine.py"}
WRITERS = {"phase": _LIFECYCLE, "lease": _LIFECYCLE, "state": {*_LIFECYCLE, "common/kv/pool.py"}}
"""For each attribute, the files that write it on an object other than their own `self`."""
_RELAYS_METHODS = {
    "publish",
    "publish_nothing",
    "lengths_to_come",
    "stash",
    "resolve_seq_lens",
    "resolve_forward_inputs",
    "bootstrap",
}
_NEUTRAL_DEVICE_MODULES = {f"common.device.{name}" for name in ("stream", "upload")}

Finder = Callable[[str], list[int]]
"""Returns the numbers of the lines of a source text that do something."""


def one_module_writes_phases() -> Iterator[Problem]:
    for attribute, writers in WRITERS.items():
        find = partial(writes, attribute=attribute)
        found = _places("decode_service", "prefill_service", "common", find=find)
        yield from _apart(found, writers, f"`{attribute}` is written by {' and '.join(sorted(writers))} alone")


def timings_alone_add_up_their_fields() -> Iterator[Problem]:
    """A sum made elsewhere would lack a field that Timings gets for time which another field included before."""
    found = _places("baton", "benchmarks", "common", "decode_service", "gateway", "scripts", find=sums_of_timings)
    yield from _apart(found, {"common/telemetry/stats.py"}, "Timings adds up its fields")


def lengths_are_summed_in_one_place() -> Iterator[Problem]:
    found = _places("decode_service", "common", find=sums_of_lengths)
    yield from _apart(found, {"decode_service/forward/forward_batch.py"}, "`seq_lens_sum` is derived in ForwardBatch")
    for path, lines in found.items():
        for line in lines[1:]:
            yield Problem(ROOT / path, line, "`seq_lens_sum` is derived once")


def only_the_relay_reads_what_is_stashed() -> Iterator[Problem]:
    """The scheduler calls the relay's methods, and reads `seeds` for the names in it."""
    scheduler = "decode_service/schedule/scheduler.py"
    found = _places("decode_service", find=partial(reads_of_the_relay, but=_RELAYS_METHODS))
    yield from _apart(found, {scheduler}, "stashed values are read by the next forward alone")
    for line in reads_of_the_relay((ROOT / scheduler).read_text(), but={*_RELAYS_METHODS, "seeds"}):
        yield Problem(ROOT / scheduler, line, "stashed values are read by the next forward alone")


def no_device_is_named() -> Iterator[Problem]:
    """The services' `main` may: it opens the device."""
    rooms = (
        "decode_service/schedule",
        "decode_service/speculate",
        "decode_service/forward",
        "prefill_service/schedule",
    )
    for path, lines in _places(*rooms, "common/kv", find=names_of_devices, is_deep=False).items():
        for line in lines:
            yield Problem(ROOT / path, line, "an engine names no device")


def the_sdk_of_opentelemetry_is_imported_in_one_module_when_wanted() -> Iterator[Problem]:
    """The import contracts treat OpenTelemetry as a single package."""
    for module in sources():
        text, name = module.read_text(), module_name(module)
        for found in re.findall(r"^.*\bopentelemetry\.(?:sdk|exporter)\b.* import .*$", text, re.MULTILINE):
            if name != "common.telemetry.span_export":
                yield Problem(module, line_of(text, found), "only common.telemetry.span_export imports the SDK")
        for found in re.findall(r"^.*\bcommon\.telemetry\.span_export import.*$", text, re.MULTILINE):
            if name != "common.telemetry.tracing" or not found.startswith(" "):
                yield Problem(module, line_of(text, found), "only a function of common.telemetry.tracing imports it")


def _places(*folders: str, find: Finder, is_deep: bool = True) -> dict[str, list[int]]:
    """Returns the lines that `find` finds in the modules of these folders, by path."""
    found: dict[str, list[int]] = {}
    for folder in folders:
        paths: list[Path] = sorted((ROOT / folder).glob("**/*.py" if is_deep else "*.py"))
        assert paths, folder
        found |= {str(path.relative_to(ROOT)): lines for path in paths if (lines := find(path.read_text()))}
    return found


def _apart(found: dict[str, list[int]], wanted: set[str], rule: str) -> Iterator[Problem]:
    """Yields the places outside the files that are wanted, and the files of these that have no place."""
    for path in sorted(found.keys() - wanted):
        for line in found[path]:
            yield Problem(ROOT / path, line, rule)
    for path in sorted(wanted - found.keys()):
        yield Problem(ROOT / path, 0, f"{rule}; here it is not")


def writes(source: str, attribute: str) -> list[int]:
    """Returns the lines that assign to the attribute on any object but `self`."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=owner, attr=name, ctx=ast.Store()) if name == attribute:
                if not (isinstance(owner, ast.Name) and owner.id == "self"):
                    lines.append(node.lineno)
            case ast.Call(func=ast.Name(id="setattr")) if attribute in ast.unparse(node):
                lines.append(node.lineno)
    return lines


def sums_of_timings(source: str) -> list[int]:
    """Returns the lines with an addition that has a duration field of Timings as a term."""
    names = {name for name in Timings.__dataclass_fields__ if name.endswith("_s") and name in source}
    if not names:
        return []
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Add)
        and any(isinstance(term, ast.Attribute) and term.attr in names for term in (node.left, node.right))
    ]


def sums_of_lengths(source: str) -> list[int]:
    """Returns the lines that give `seq_lens_sum` a value."""
    lines: list[int] = []
    if "seq_lens_sum" not in source:
        return lines
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.keyword(arg="seq_lens_sum"):
                lines.append(node.value.lineno)
            case (
                ast.Assign(targets=[target])
                | ast.AugAssign(target=target)
                | ast.AnnAssign(target=target, value=ast.expr())
            ):
                if ast.unparse(target).rpartition(".")[2] == "seq_lens_sum":
                    lines.append(node.lineno)
    return lines


def reads_of_the_relay(source: str, *, but: set[str]) -> list[int]:
    """Returns the lines that access an attribute of an object named future_map, except for these attributes. An
    attribute that is indexed counts always.
    """
    lines = []
    for node in ast.walk(ast.parse(source)):
        accessed = node.value if isinstance(node, ast.Subscript) else node
        if (
            isinstance(accessed, ast.Attribute)
            and ast.unparse(accessed.value).endswith("future_map")
            and (isinstance(node, ast.Subscript) or accessed.attr not in but)
        ):
            lines.append(accessed.lineno)
    return lines


def names_of_devices(source: str) -> list[int]:
    """Returns the lines with a name that belongs to one device only."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.ImportFrom(module=str(module), names=aliases):
                is_device = module.startswith("common.device") and module not in _NEUTRAL_DEVICE_MODULES
                is_found = is_device or any(map(_is_device_name, (module, *(alias.name for alias in aliases))))
            case ast.Import(names=aliases):
                is_found = any(_is_device_name(alias.name) for alias in aliases)
            case ast.Attribute(attr=name) | ast.Name(id=name):
                is_found = _is_device_name(name)
            case ast.Constant(value=str(text)):
                is_found = text.startswith("cuda")
            case _:
                continue
        if is_found:
            lines.append(node.lineno)
    return lines


def _is_device_name(name: str) -> bool:
    return any(word in name.lower() for word in ("cuda", "current_stream", "is_pinned"))
