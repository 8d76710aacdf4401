"""Where there is no GPU, Triton's kernels run in its interpreter. To be imported before anything that imports triton.

Triton decides for each kernel, its own ones too, when it is defined; processes that a test starts do not inherit it.
"""

from __future__ import annotations

import importlib.util
import os

import torch

if not torch.cuda.is_available() and importlib.util.find_spec("triton") is not None:
    os.environ["TRITON_INTERPRET"] = "1"
    import triton

    del os.environ["TRITON_INTERPRET"]
    triton.knobs.runtime.interpret = True
