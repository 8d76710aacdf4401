"""Rules of sizes and names: constructors with many parameters, long functions, and classes of one name.

python -m scripts.lint.sizes      prints the largest, and the reasons of the long ones
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from scripts.lint.pages import sources
from scripts.lint.problem import ROOT, Problem

MOST_PARAMETERS = 10
MOST_LINES = 60
_FOLDERS = ("common", "decode_service", "prefill_service")

KERNEL = "a kernel: Triton compiles it as one function"
WIRING = "builds its parts one after the other"
REASONS = {
    "common/attention/triton_attention.py:_TritonPlan._attend_rows": "chooses a kernel's parameters and launches it",
    "common/attention/triton_kernels.py:attend": KERNEL,
    "common/model/layers_triton.py:multiply": KERNEL,
    "common/model/loader.py:target_of": "changes a model step by step, each of which needs the one before",
    "common/model/model_files.py:load_causal_lm": "a loader's steps in order, with the errors of each",
    "common/model/traits.py:probe_attention": "calls a model's attention once, and reads each trait off that call",
    "common/prompts/chunk_batch.py:ChunkBatch.of": "fills one column of the batch after the other",
    "common/ranks/leader.py:Ranks.__init__": "starts processes, and ends them again if one fails",
    "common/sampling/triton_draws.py:draw": KERNEL,
    "common/service/runtime.py:open_runtime": WIRING,
    "decode_service/edge/assembly.py:opened_edge": WIRING,
    "decode_service/edge/inference.py:InferenceServicer._run": "follows one request from its admission to its end",
    "decode_service/forward/eagle_drafter.py:EagleDrafter._draft_branches": "one tree, level by level",
    "decode_service/forward/forward_side.py:ForwardSide.open": WIRING,
    "decode_service/forward/worker.py:Worker.forward": "the pieces of a step, in their order",
    "decode_service/main.py:assembled": WIRING,
    "decode_service/schedule/scheduler.py:DecodeEngine.__init__": WIRING,
    "prefill_service/main.py:assembled": WIRING,
    "prefill_service/schedule/scheduler.py:PrefillEngine.__init__": WIRING,
}
"""Why a function has more than MOST_LINES lines."""

WIRES = {
    "BatonError",
    "DeadlineExceeded",
    "FinishReason",
    "Finished",
    "PromptLogprobs",
    "RoleState",
    "Unauthenticated",
}
"""Names that two classes have because both stand for one thing of the wire, on its two sides."""

Sized = tuple[int, Path, int, str]
"""A size, and where it was found: the file, the line, and the name of the function or class."""


def constructors_have_few_parameters() -> Iterator[Problem]:
    for num, path, line, name in _constructors():
        if num > MOST_PARAMETERS:
            yield Problem(path, line, f"{name} takes {num} parameters, more than {MOST_PARAMETERS}")


def long_functions_have_a_reason() -> Iterator[Problem]:
    long = {_key(path, name): (path, line, num) for num, path, line, name in _functions() if num > MOST_LINES}
    for key, (path, line, num) in long.items():
        if key not in REASONS:
            yield Problem(path, line, f"{key} has {num} lines, more than {MOST_LINES}, without a reason in REASONS")
    for key in REASONS.keys() - long.keys():
        yield Problem(Path(__file__), 0, f"REASONS names {key}, which is not long")


def no_two_classes_have_one_name() -> Iterator[Problem]:
    """A leading underscore makes no other name."""
    seen: dict[str, Path] = {}
    for path in (*sources(), *sorted((ROOT / "training").rglob("*.py"))):
        if path.parent.name == "v1":  # generated
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                other = seen.setdefault(node.name.lstrip("_"), path)
                if other != path and node.name not in WIRES:
                    yield Problem(path, node.lineno, f"{node.name} is a class of {other.relative_to(ROOT)} too")


def _constructors() -> Iterator[Sized]:
    for path, owner, function in _definitions():
        if function.name == "__init__":
            arguments = function.args
            num = len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs) - 1
            yield num, path, function.lineno, owner


def _functions() -> Iterator[Sized]:
    for path, owner, function in _definitions():
        name = f"{owner}.{function.name}" if owner else function.name
        yield (function.end_lineno or 0) - function.lineno + 1, path, function.lineno, name


def _definitions() -> Iterator[tuple[Path, str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yields each function of the services with its file and its class, "" if it is in none."""
    for folder in _FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            tree = ast.parse(path.read_text())
            owners = {
                id(each): node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for each in node.body
            }
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield path, owners.get(id(node), ""), node


def _key(path: Path, name: str) -> str:
    return f"{path.relative_to(ROOT)}:{name}"


def main() -> None:
    print("constructors with the most parameters")
    for num, path, _, name in sorted(_constructors(), key=lambda sized: -sized[0])[:10]:
        print(f"{num:4} {name} ({path.relative_to(ROOT)})")
    print(f"functions of more than {MOST_LINES} lines")
    for num, path, _, name in sorted(_functions(), key=lambda sized: -sized[0]):
        if num > MOST_LINES:
            print(f"{num:4} {_key(path, name)}: {REASONS.get(_key(path, name), '')}")


if __name__ == "__main__":
    main()
