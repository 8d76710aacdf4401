"""The base class of draft heads: attention over paged KV, rotary positions, and the use of compiled programs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from common.attention.backend import AttentionPlan, ForwardInput
from common.attention.choice import AttentionEngine, AttentionKind, new_attention
from common.attention.fp8_kv import Fp8Attention
from common.draft.checkpoint import Checkpoint
from common.draft.head import DraftOutput, HeadProgram, output_of
from common.draft.kernels import Kernels, Op, Rotation, TorchKernels
from common.draft.spec import BlockSpec, Eagle3Spec
from common.errors import DraftMismatch
from common.kv.layer_group import DRAFT_GROUP, KV_FP8, LayerGroupSpec
from common.model.capture import HiddenCapture
from common.model.forward_program import NewProgram
from common.model.model_files import ModelFiles
from common.model.target import TargetModel
from common.telemetry.stats import ForwardCounts


class HeadEngine(AttentionEngine, Protocol):
    """The part of a compiled engine for CPUs that draft heads use."""

    def head_kernels(self) -> Kernels:
        """Returns the kernels that the layers of draft heads use."""

    def new_head_programs(self, checkpoint: Checkpoint, spec: Eagle3Spec, target: TargetModel) -> NewProgram | None:
        """Returns the function that compiles the draft head in `checkpoint`, whose tensors fit `spec` and `target`.

        Returns None if the engine does not support the head's dtype, sizes or variant.
        """


@dataclass(frozen=True, slots=True)
class HeadParts:
    """The sources from which a head is built: its checkpoint and files, and the target whose parts it shares.

    `dtype` is the name of the target's dtype, and `kv_dtype` that of the target's KV. `cpu_engine` computes the layers
    on a CPU; None if PyTorch's operators do.
    """

    checkpoint: Checkpoint
    target: TargetModel
    files: ModelFiles
    dtype: str
    kv_dtype: str
    attention: AttentionKind
    cpu_engine: HeadEngine | None

    @property
    def directory(self) -> str:
        return str(self.files.directory)

    def require(self, key: str, ours: int, theirs: int) -> None:
        """Raises DraftMismatch unless the head's value of `key` (`ours`) equals the target's (`theirs`)."""
        if ours != theirs:
            raise DraftMismatch(
                f"{self.directory}: holds {self.checkpoint.kind} for another model: config.json: {key} is {ours}, the "
                f"target's is {theirs}"
            )


class PagedHead(ABC):
    """The base class of draft heads, whose KV lies in the slots of a KV pool. Subclasses implement DraftHead.

    Positions have no limit, because rotations are computed for the positions of each batch. `files` are the files from
    which the head was loaded. `new_programs` compiles the head into programs; None if it cannot be compiled.
    """

    def __init__(
        self,
        parts: HeadParts,
        spec: BlockSpec,
        *,
        algorithm: str,
        num_layers: int,
        capture: HiddenCapture,
        token_ids: Tensor,
        feeds_target_hidden: bool = False,
    ) -> None:
        self.files = parts.files
        self.new_programs: NewProgram | None = None
        self.algorithm = algorithm
        self.dtype = parts.dtype
        self.layer_group = LayerGroupSpec(
            name=DRAFT_GROUP,
            num_layers=num_layers,
            num_planes=2,
            num_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=parts.kv_dtype,
        )
        self.capture = capture
        self.hidden_size = spec.hidden_size
        self.token_ids = token_ids
        self.feeds_target_hidden = feeds_target_hidden
        self._kernels: Kernels = TorchKernels() if parts.cpu_engine is None else parts.cpu_engine.head_kernels()
        attention = new_attention(
            parts.attention,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=parts.target.dtype,
            torch_device=parts.target.torch_device,
            fp8_kv=parts.kv_dtype == KV_FP8,
            cpu_engine=parts.cpu_engine,
        )
        self.attention = Fp8Attention(attention) if parts.kv_dtype == KV_FP8 else attention
        self._rope = LlamaRotaryEmbedding(spec.rope).to(parts.target.torch_device)
        self._program: HeadProgram | None = None
        self.forward_counts = ForwardCounts()

    @abstractmethod
    def fuse(self, captured: Tensor) -> Tensor: ...

    @abstractmethod
    def forward(self, batch: ForwardInput, hidden: Tensor, *, layer: int = 0) -> Tensor: ...

    @abstractmethod
    def logits(self, hidden: Tensor, *, layer: int = 0) -> Tensor: ...

    def run_program(self, program: HeadProgram) -> None:
        """Makes later `extend` and `step` calls use `program`, for the batches that it supports.

        Any thread may call this, also while a forward runs.
        """
        self._program = program

    @property
    def runs_program(self) -> bool:
        """True once `run_program` was called."""
        return self._program is not None

    @torch.inference_mode()
    def extend(self, batch: ForwardInput, captured: Tensor) -> DraftOutput:
        program = self._program_for(batch)
        return output_of(self, batch, self.fuse(captured)) if program is None else program.extend(batch, captured)

    @torch.inference_mode()
    def step(self, batch: ForwardInput, hidden: Tensor) -> DraftOutput:
        program = self._program_for(batch)
        return output_of(self, batch, hidden) if program is None else program.step(batch, hidden)

    def _program_for(self, batch: ForwardInput) -> HeadProgram | None:
        """Returns the program if there is one and it supports this batch, else None.

        If there is one, `forward_counts` counts whether it supports the batch.
        """
        program = self._program
        if program is None or not self.forward_counts.count(is_taken=program.takes(batch)):
            return None
        return program

    def _prepare(self, batch: ForwardInput, hidden: Tensor) -> tuple[Rotation, AttentionPlan]:
        """Returns the batch's rotary embedding, in the dtype of `hidden`, and its attention plan."""
        rotation: Rotation = self._rope(hidden, batch.positions.unsqueeze(0))
        return rotation, self.attention.plan(batch)


def read_embedding(parts: HeadParts, name: str, hidden_size: int) -> Op:
    """Returns the embedding: a function from token ids [T] to [T, hidden_size].

    It is the head's own, from the tensor `name`, or the target's if the checkpoint has no such tensor. Raises
    DraftMismatch if the target's embedding is needed and is not `hidden_size` wide.
    """
    weight = parts.checkpoint.take_if_there(name, parts.target.vocab_size, hidden_size)
    if weight is not None:
        return lambda ids: torch.nn.functional.embedding(ids, weight)
    if hidden_size != parts.target.hidden_size:
        raise DraftMismatch(
            f"{parts.directory}: {name} is missing: the target's is {parts.target.hidden_size} wide, not {hidden_size}"
        )
    return parts.target.input_embeddings
