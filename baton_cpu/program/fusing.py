"""Turns models into programs that run their forwards: compiles the kernels once on a machine, and checks that a program
computes what its model does.

model.new_decoder ──▶ packed weights, operations ─┐
compiled kernel, made or found on the disk ───────┼─▶ FusedForward ─▶ compared with the model ─▶ model.run_program
a team of threads ────────────────────────────────┘
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import numba
import numpy as np
import torch

from baton_cpu.compiler.jit import Kernel
from baton_cpu.compiler.kernel_cache import kept_in, kernels_dir, kernels_key
from baton_cpu.log import NO_LOG, Log
from baton_cpu.program.builder import FusedDecoder, with_capture
from baton_cpu.program.comparison import difference, head_difference, target_tolerance, tolerance
from baton_cpu.program.eagle3_head import HeadPrograms
from baton_cpu.program.forward import NUM_CALL_WORDS, FusedForward, FusedHead
from baton_cpu.program.kernel.run import take_part
from baton_cpu.program.kernel.team import Team
from common.checkpoints.cache import CannotBeMade, check_disk, make_once, run_python
from common.draft.head import HeadProgram
from common.draft.paged_head import PagedHead
from common.errors import StartupError
from common.host.memory import return_freed_memory
from common.model.forward_program import ForwardProgram
from common.model.target import TargetModel

_BITS = {torch.bfloat16: np.uint16, torch.float32: np.float32}
_CLOSE_TIMEOUT_S = 5.0
COMPILE_TIMEOUT_S = 900.0  # compiling takes some 20 s of a core of its own, at low priority

_KERNELS: dict[torch.dtype, Kernel] = {}
"""The kernels that this process has loaded, by the model's dtype."""

Check = Callable[[], None]


def fuse(
    model: TargetModel,
    draft: PagedHead | None = None,
    *,
    num_threads: int,
    max_tokens: int,
    niceness: int = 0,
    check: Check = lambda: None,
    log: Log = NO_LOG,
) -> float:
    """Makes `model` run its forwards as one program, and `draft` as well if it has programs. Returns the largest
    relative difference between the results of the target's program and those of the model's modules (see `difference`).

    `CpuEngine.fuse` explains the arguments and exceptions. If the results of the head's programs differ too much from
    those of its layers, the head keeps running its layers.
    """
    with ExitStack() as undo:  # unless all goes well
        try:
            _load_kernels(model.dtype, niceness, check, log)
            assert model.new_decoder is not None
            decoder = model.new_decoder(check)
            assert isinstance(decoder, FusedDecoder), "another engine's"
            undo.callback(decoder.unshare, check)
            decoders = [with_capture(decoder, model.capture), *_head_decoders(draft, check, log)]
        finally:
            model.new_decoder = None
            if draft is not None:
                draft.new_programs = None
        forward, *of_head = new_forwards(decoders, num_threads=num_threads, max_tokens=max_tokens)
        undo.callback(forward.close, _CLOSE_TIMEOUT_S)
        apart = difference(model, forward, check=check)
        if not apart <= target_tolerance(model):
            raise StartupError(f"fused forwards differ from the model's by {apart:.3g} of the logits")
        check()
        head = _compared_head(draft, of_head, model, log) if draft is not None and of_head else None
        undo.pop_all()
    return_freed_memory()
    if draft is not None and head is not None:
        draft.run_program(head)
    model.run_program(forward)
    return apart


def _head_decoders(draft: PagedHead | None, check: Check, log: Log) -> list[FusedDecoder]:
    """Returns the draft head's programs, for extend and for step. There are none if it has none, or if there is too
    little memory for them.
    """
    if draft is None or draft.new_programs is None:
        return []
    try:
        programs = draft.new_programs(check)
    except OSError as error:  # too little memory
        log.warning("fused_draft_head_failed", error=str(error))
        return []
    assert isinstance(programs, HeadPrograms), "another engine's"
    return [programs.extend, programs.step]


def _compared_head(
    draft: PagedHead, forwards: Sequence[ForwardProgram], model: TargetModel, log: Log
) -> HeadProgram | None:
    """Returns a draft head that computes with the compiled programs in `forwards`: one for extending over computed
    tokens, one for drafting a further token. Their logits are compared with those of the PyTorch head `draft`. If they
    differ too much, it logs a warning and returns None, and the service goes on with `draft`. `model` is the target.
    """
    head = FusedHead(*forwards)
    captured_size = draft.capture.num_states * model.hidden_size
    apart = head_difference(draft, head, captured_size=captured_size, dtype=model.dtype)
    if apart <= tolerance(model.dtype):
        return head
    log.warning("fused_draft_head_failed", error=f"it differs from the head's layers by {apart:.3g} of the logits")
    return None


def new_forwards(decoders: Sequence[FusedDecoder], *, num_threads: int, max_tokens: int) -> list[ForwardProgram]:
    """Returns a ForwardProgram for each decoder, in their order. They share one team of `num_threads`, so only one of
    them may run at a time. Each takes forwards of up to `max_tokens` new tokens. `load_kernels` must have been called
    before.
    """
    dtype = decoders[0].program.dtype
    kernel, like = _KERNELS[dtype], np.zeros(1, _BITS[dtype])
    team = Team(
        num_threads=num_threads,
        max_operations=max(len(decoder.program.operations) for decoder in decoders),
        num_call_words=NUM_CALL_WORDS,
        take_part=lambda *arguments: kernel(*arguments, like),
    )
    try:
        return [FusedForward(decoder, team, max_tokens=max_tokens) for decoder in decoders]
    except BaseException:
        team.close(_CLOSE_TIMEOUT_S)
        raise


def _load_kernels(dtype: torch.dtype, niceness: int, check: Check, log: Log) -> None:
    """Loads the kernels for `dtype` from the directory in which this process keeps kernels. Compiles them first, in a
    process of its own at `niceness`, if they are missing or damaged. `check` is called while it waits, and may raise.

    Kernels that cannot be kept there are compiled for this process alone. Raises StartupError if they cannot be
    compiled.
    """
    if (kept := kernels_dir()) is not None:
        try:
            return _load_kernels_from(kept, dtype, niceness, check, log)
        except CannotBeMade as error:
            log.warning("kernels_not_kept", directory=str(kept), error=str(error))
    with tempfile.TemporaryDirectory(prefix="baton-kernels-") as directory:
        _load_kernels_from(Path(directory), dtype, niceness, check, log)


def _load_kernels_from(kept: Path, dtype: torch.dtype, niceness: int, check: Check, log: Log) -> None:
    name = str(dtype).removeprefix("torch.")
    directory = kept / f"{kernels_key()}-{name}"
    give_up_s = time.monotonic() + COMPILE_TIMEOUT_S

    def look() -> None:
        check()
        if time.monotonic() > give_up_s:
            raise StartupError(f"kernels were not compiled within {COMPILE_TIMEOUT_S:g} s")

    def compile_kernels(scratch: Path, out: Path) -> None:
        log.info("compiling_kernels", dtype=name)
        arguments = ["-m", "baton_cpu.program.compile", name, str(out), str(niceness)]
        error = run_python(arguments, on_wait=look)
        if error is not None:
            check_disk(error)
            raise StartupError(f"kernels could not be compiled: {error}")
        if next(out.rglob("*.nbc"), None) is None:
            raise StartupError("compiled kernels were not kept")

    def made() -> Path:
        return make_once(directory, compile_kernels, lambda stage, num_done, num_total: look())

    kernels = made()
    try:
        is_from_cache = load_kernels(kernels, dtype)
    except Exception as error:  # reading a damaged file may raise anything
        log.warning("kernels_damaged", error=repr(error))
        shutil.rmtree(directory, ignore_errors=True)
        is_from_cache = load_kernels(made(), dtype)
    if not is_from_cache:
        log.warning("kernels_compiled_beside_serving", directory=str(directory))


def load_kernels(directory: Path, dtype: torch.dtype) -> bool:
    """Loads the kernels for models of `dtype` from `directory`, or compiles them and keeps them there. `new_forwards`
    uses them from then on. Returns False if they had to be compiled.

    A damaged file there may raise any exception.
    """
    array, word = numba.types.Array, numba.types.int64
    words, like = array(word, 1, "C"), array(numba.from_dtype(np.dtype(_BITS[dtype])), 1, "C")
    signature = (word, word, words, word, word, word, like)
    kernel = kept_in(directory, take_part)
    kernel.compile(signature)
    _KERNELS[dtype] = kernel
    return signature not in kernel.stats.cache_misses
