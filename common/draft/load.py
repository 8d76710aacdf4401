"""Loads a draft head from a directory with its config.json and .safetensors files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from common.attention.choice import AttentionKind
from common.draft.checkpoint import Checkpoint
from common.draft.eagle import EagleHead
from common.draft.eagle3 import Eagle3Head
from common.draft.formats import read_spec
from common.draft.mtp import MtpHead, belongs_to_target
from common.draft.paged_head import HeadEngine, HeadParts, PagedHead
from common.draft.spec import DraftSpec, Eagle3Spec, EagleSpec, MtpSpec
from common.errors import DraftMismatch
from common.model.loader import DTYPES
from common.model.model_files import CONFIG, FileVersion, ModelFiles
from common.model.stored_tensor import StoredTensor, read_header
from common.model.target import TargetModel


def load_draft(
    directory: Path,
    *,
    target: TargetModel,
    device: str,
    dtype: str,
    attention: AttentionKind = "kernels",
    cpu_engine: HeadEngine | None = None,
    fuses: bool = False,
) -> PagedHead:
    """Loads the draft head in `directory`. `device` and `dtype` must be those of `target`.

    The head uses the target's embedding if it has none of its own. `attention` is the kind of the head's attention
    backend. On a CPU, `cpu_engine` computes the head's layers, or PyTorch's operators without it. `fuses` prepares the
    head to be compiled into programs, if `cpu_engine` supports its format; then the checkpoint's tensors stay in memory
    until it is compiled.

    Raises DraftMismatch if tensors or config keys are missing, unknown, or do not fit each other or the target, and
    UnsupportedModel for traits that are not supported. It never initialises weights at random.
    """
    torch_device = torch.device(device)
    assert torch_device.type == target.torch_device.type, "the head and its target share a device"
    assert DTYPES[dtype] == target.dtype, "hidden states and embeddings go from one to the other as they are"
    config, files = _read_files(directory)
    spec = read_spec(config, files.tensors.keys(), directory=str(directory), num_target_layers=target.num_layers)
    names = [name for name in files.tensors if not (isinstance(spec, MtpSpec) and belongs_to_target(name, spec))]
    checkpoint = Checkpoint(
        {name: _read_tensor(files.tensors[name]) for name in names},
        directory=str(directory),
        kind=_KINDS[type(spec)],
        dtype=target.dtype,
        device=torch_device,
    )
    of_programs = checkpoint.untaken()
    kv_dtype = target.layer_group.dtype
    head = _make(HeadParts(checkpoint, target, files, dtype, kv_dtype, attention, cpu_engine), spec)
    checkpoint.finish()
    if fuses and kv_dtype == dtype and isinstance(spec, Eagle3Spec) and cpu_engine is not None:
        head.new_programs = cpu_engine.new_head_programs(of_programs, spec, target)
    return head


_KINDS: dict[type[DraftSpec], str] = {
    EagleSpec: "an EAGLE-1 head",
    Eagle3Spec: "an EAGLE-3 head",
    MtpSpec: "an MTP head",
}


def _make(parts: HeadParts, spec: DraftSpec) -> PagedHead:
    """Returns the head of the class that fits `spec`."""
    if isinstance(spec, EagleSpec):
        return EagleHead(parts, spec)
    if isinstance(spec, Eagle3Spec):
        return Eagle3Head(parts, spec)
    return MtpHead(parts, spec)


def _read_files(directory: Path) -> tuple[dict[str, Any], ModelFiles]:
    """Returns the config, and a description of the directory's files: the file, shape and type of each tensor.

    Notes each file's version before it opens the file, so that a later change is noticed.
    """
    path = directory / CONFIG
    try:
        versions = {path: FileVersion.of(path)}
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DraftMismatch(f"{directory}: no config.json to read: {error}") from error
    if not isinstance(config, dict):
        raise DraftMismatch(f"{directory}: config.json is not an object")
    tensors: dict[str, StoredTensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with _read_errors(path):
            versions[path] = FileVersion.of(path)
            for name, stored in read_header(path).items():
                if name in tensors:
                    raise DraftMismatch(f"{directory}: {name} is in {tensors[name].file.name} and in {path.name}")
                tensors[name] = stored
    if not tensors:
        raise DraftMismatch(f"{directory}: no .safetensors file with tensors")
    return config, ModelFiles(directory, tensors, versions)


def _read_tensor(stored: StoredTensor) -> Tensor:
    with _read_errors(stored.file):
        return stored.read()


@contextmanager
def _read_errors(path: Path) -> Iterator[None]:
    """Wraps code that reads the file `path`, and raises its errors as DraftMismatch."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise DraftMismatch(f"{path}: {error}") from error
