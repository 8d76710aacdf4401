"""Makes Triton's kernels run in its interpreter where there is no GPU. Import it before anything that imports triton.

Triton chooses between compiler and interpreter when a kernel is defined, for its own kernels too. Processes that a test
starts do not inherit the choice.

The interpreter stores bfloat16 as integer bit patterns. In matrix products it multiplies those integers, and it
truncates float32 instead of rounding. This module corrects both faults.
"""

from __future__ import annotations

import importlib.util
import os

import torch


def _mend_bfloat16() -> None:
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    create_dot, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl
    tensor_types = {tl.float32: torch.float32, tl.float16: torch.float16, tl.bfloat16: torch.bfloat16}

    def converted(handle: TensorHandle, to: tl.dtype) -> TensorHandle:
        """Converts a tensor to another type, and rounds to nearest as devices do."""
        tensor = torch.from_numpy(np.ascontiguousarray(handle.data)).view(tensor_types[handle.dtype.scalar])
        result = tensor.to(tensor_types[to])
        return TensorHandle((result.view(torch.uint16) if to == tl.bfloat16 else result).numpy(), to)

    def dot(self, a, b, *arguments):  # type: ignore[no-untyped-def]
        if a.dtype.scalar == tl.bfloat16:
            a, b = converted(a, tl.float32), converted(b, tl.float32)
        return create_dot(self, a, b, *arguments)

    def cast_impl(self, source, to):  # type: ignore[no-untyped-def]
        if tl.bfloat16 in (source.dtype.scalar, to.scalar) and {source.dtype.scalar, to.scalar} <= {*tensor_types}:
            return converted(source, to.scalar)
        return cast(self, source, to)

    InterpreterBuilder.create_dot = dot
    InterpreterBuilder.cast_impl = cast_impl
    InterpreterBuilder.create_fp_to_fp = lambda self, source, to, rounding: cast_impl(self, source, to)


if not torch.cuda.is_available() and importlib.util.find_spec("triton") is not None:
    os.environ["TRITON_INTERPRET"] = "1"
    import triton

    triton.knobs.runtime.interpret = True  # sets the variable, too
    del os.environ["TRITON_INTERPRET"]
    _mend_bfloat16()
