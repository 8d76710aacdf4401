"""A loaded target model, with the interface that the engines call."""

from __future__ import annotations

import re
import threading
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from common.attention.backend import AttentionBackend, AttentionPlan, ForwardInput, LayerAttention
from common.device.stream import DeviceLost, GraphRecorder
from common.errors import UnsupportedModel
from common.kv.kv_shard import WHOLE, KvShard, OneDevice, PoolTensors
from common.kv.layer_group import LayerGroupSpec, WindowLayers
from common.model.capture import HiddenCapture
from common.model.cutting import CutHead
from common.model.forward_program import ForwardProgram, NewProgram, OnLayerKv
from common.model.model_files import ModelFiles
from common.model.part import Part
from common.sampling.operators import Largest
from common.telemetry.stats import ForwardCounts

_FINAL = -1  # key of the final norm's output among the captured states
_ROUTES = re.compile(r"expert|router|moe")
"""Matches the names of modules that send a token to other modules, as in a mixture of experts."""


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """The output of one forward of T tokens.

    `logits` are [R, vocab] float32, for the R tokens whose logits are wanted. `hidden` are the captured states [T,
    states * hidden_size] in the model's dtype, None if none are captured. `largest` has the token with the largest
    logit, for each of the R tokens; None if the forward did not look for it.
    """

    logits: Tensor
    hidden: Tensor | None
    largest: Largest | None = None


class Target(Protocol):
    """The part of a target model that a decode step uses."""

    @property
    def layer_group(self) -> LayerGroupSpec: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def torch_device(self) -> torch.device: ...

    def forward(self, batch: ForwardInput) -> TargetOutput:
        """Computes the batch's tokens, writes their KV to `batch.kv`, and returns logits and captured hidden states."""

    def prepare(self, batch: ForwardInput) -> Callable[[], TargetOutput]:
        """Does the first part of `forward`, and returns a function that does the rest.

        Unless `batch` has a tree mask, the first part reads none of its tensors. So `prepare` may be called before the
        tensors are filled, on any thread. Call each returned function once, one at a time.
        """


class Followers(Protocol):
    """The other ranks of a model that is cut, which compute each forward together with this one."""

    def begin(self, batch: ForwardInput) -> None:
        """Tells these ranks to compute this forward, whose pool's tensors `zeros` and `kv` made."""

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns zeros for a table of a pool, which these ranks read too."""

    def kv(self, shape: Sequence[int], dtype: torch.dtype, heads: Sequence[range]) -> Sequence[KvShard]:
        """Returns zeros for KV, in shards. `shape` is of all KV (see PoolTensors). Rank r computes `heads[r]`."""

    def recorder(self, recorder: GraphRecorder) -> GraphRecorder:
        """Returns a recorder whose graphs may contain a forward, which these ranks replay too."""

    def share(self, memory: Tensor, file: int) -> None:
        """Lets these ranks map `memory` [N] uint8, which the open `file` holds from its start."""

    def give_up(self, error: BaseException) -> str:
        """Counts these ranks as lost, because this process failed in a forward that they wait for. Ranks on GPUs end
        with this process, the others at once. Returns which rank failed first, and how.
        """


class _TensorsOfRanks(PoolTensors):
    def __init__(
        self, followers: Followers, kv_heads: Mapping[LayerGroupSpec, Sequence[range]], torch_device: torch.device
    ) -> None:
        self.torch_device = torch_device
        self._followers = followers
        self._heads = {group.name: heads for group, heads in kv_heads.items()}

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self._followers.zeros(shape, dtype)

    def kv(self, group_name: str, shape: Sequence[int], dtype: torch.dtype) -> Sequence[KvShard]:
        if group_name in self._heads:
            return self._followers.kv(shape, dtype, self._heads[group_name])
        return (KvShard(WHOLE, self._followers.zeros(shape, dtype)),)  # a draft head's, which this rank alone computes


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetShape:
    """The sizes of a model, and what else is known of it besides its weights.

    `layer_group` is the shape of the KV of layers that attend all tokens, and `windows` are the layers that attend a
    window. `kv_heads[g][r]` are the KV heads of rank r in layer group g, `layer_group` first. `max_context_tokens` is
    the longest context that is served, and `rotation` names the rotation that follows from it (see rotation.py), "" if
    none does. `num_positions` is None if the model computes its rotation at any position; otherwise it may look
    positions up in a table, which has that many rows. `eos_token_ids` are the ids that end the model's output.
    """

    layer_group: LayerGroupSpec
    windows: tuple[WindowLayers, ...] = ()
    kv_heads: Sequence[Sequence[range]]
    hidden_size: int
    vocab_size: int
    max_context_tokens: int
    rotation: str = ""
    num_positions: int | None = None
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype
    torch_device: torch.device


class TargetModel:
    """A decoder-only model of a TargetShape.

    `attention` is the attention backend of its layers. `new_decoder` compiles the model into a ForwardProgram; it is
    None if no program is wanted, or none supports the model. `new_decoder` keeps parts of the model in memory: set it
    to None when no longer needed. `files` are the files that the model was loaded from. If the model is cut, `part` is
    what this process computes. `input_embeddings` maps ids [T] to [T, hidden_size], `output_head` maps hidden states
    after the final norm to logits. Any thread may call `prepare`, at any time: the engine thread prepares steps while
    the forward stream computes prompts. Run one forward at a time.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        backend: AttentionBackend,
        shape: TargetShape,
        new_decoder: NewProgram | None = None,
        files: ModelFiles | None = None,
        part: Part | None = None,
    ) -> None:
        self.files = files
        self._part = part
        self._rank = 0 if part is None else part.rank
        groups = (shape.layer_group, *(each.group for each in shape.windows))
        self._kv_heads = dict(zip(groups, shape.kv_heads, strict=True))
        self._followers: Followers | None = None
        self.new_decoder = new_decoder
        self._model = model
        self.attention = backend
        self.layer_group = shape.layer_group
        self.windows = shape.windows
        self.hidden_size = shape.hidden_size
        self.vocab_size = shape.vocab_size
        self.max_context_tokens = shape.max_context_tokens
        self.rotation = shape.rotation
        self._num_positions = shape.num_positions
        self.eos_token_ids = shape.eos_token_ids
        self.dtype = shape.dtype
        self.torch_device = shape.torch_device
        self._capture: HiddenCapture | None = None
        self._num_layers_begun = 0
        self._program: ForwardProgram | None = None
        self._preparing = threading.Lock()
        self.forward_counts = ForwardCounts()

    @property
    def num_layers_begun(self) -> int:
        """The number of layers begun (on CUDA: enqueued) in all forwards so far. It grows while one runs. Any thread
        may read it.
        """
        return self._num_layers_begun + (0 if self._program is None else self._program.num_layers_begun)

    @property
    def capture(self) -> HiddenCapture | None:
        return self._capture

    @property
    def runs_program(self) -> bool:
        """Whether a ForwardProgram is set. If so, it computes the forwards that it accepts; operators do the rest."""
        return self._program is not None

    def lead(self, followers: Followers) -> None:
        """From now on lets `followers` compute each forward too. Call it before the first one."""
        self._followers = followers

    @property
    def pool_tensors(self) -> PoolTensors:
        """Makes the tensors of a pool for this model."""
        if self._followers is None:
            return OneDevice(self.torch_device)
        return _TensorsOfRanks(self._followers, self._kv_heads, self.torch_device)

    def recorder(self, recorder: GraphRecorder) -> GraphRecorder:
        """Returns a recorder for graphs with a forward of this model, made from the device's `recorder`."""
        return recorder if self._followers is None else self._followers.recorder(recorder)

    def share(self, memory: Tensor, file: int) -> None:
        """Lets a pool for this model lie in `memory` [N] uint8, which is the mapped open `file`."""
        if self._followers is not None:
            self._followers.share(memory, file)

    def own_heads(self, layer: int) -> tuple[slice, slice]:
        """Returns the KV heads of a layer that this process computes: their numbers in the model, and in its pool.

        The layer is numbered as in the model.
        """
        group = next(group for group, of_group in self.parts_of(range(layer, layer + 1)) if of_group)
        heads, first = self._kv_heads[group][self._rank], self.heads_in_pool(group).start
        return slice(heads.start, heads.stop), slice(heads.start - first, heads.stop - first)

    def heads_in_pool(self, group: LayerGroupSpec) -> range:
        """Returns the KV heads of a layer group that the pool of this process's forwards has.

        A draft head's group has all heads.
        """
        is_whole = self._part is None or not self._part.has_own_kv or group not in self._kv_heads
        return range(group.num_heads) if is_whole else self._kv_heads[group][self._rank]

    def run_program(self, program: ForwardProgram) -> None:
        """From the next forward on, lets `program` compute the forwards that it accepts.

        Any thread may call this, also during a forward.
        """
        self._program = program

    @property
    def architecture(self) -> str:
        """The name of the model's class in transformers."""
        return type(self._model).__name__

    @property
    def num_layers(self) -> int:
        return self.layer_group.num_layers + sum(len(window.layers) for window in self.windows)

    @property
    def layer_groups(self) -> tuple[LayerGroupSpec, ...]:
        return (self.layer_group, *(window.group for window in self.windows))

    def parts_of(self, layers: range) -> list[tuple[LayerGroupSpec, range]]:
        """Returns each layer group with the range of its own layers that are among `layers`, which may be empty.

        `layers` are numbered as in the model.
        """
        parts, num_before = [], (layers.start, layers.stop)
        for window in self.windows:
            within = range(bisect_left(window.layers, layers.start), bisect_left(window.layers, layers.stop))
            parts.append((window.group, within))
            num_before = (num_before[0] - within.start, num_before[1] - within.stop)
        return [(self.layer_group, range(*num_before)), *parts]

    @property
    def chooses_experts(self) -> bool:
        """Whether the model has parts that send each token to a few of several modules. If so, rounding may change a
        token's choice, and then its results differ by more than rounding.
        """
        return any(_ROUTES.search(name) for name, _ in self.modules_of(nn.Module))

    def modules_of(self, kind: type[nn.Module]) -> list[tuple[str, nn.Module]]:
        """Returns the model's modules of this class, each with its name."""
        return [(name, module) for name, module in self._model.named_modules() if isinstance(module, kind)]

    @property
    def input_embeddings(self) -> nn.Module:
        embeddings: nn.Module = self._model.get_input_embeddings()  # type: ignore[operator]
        return embeddings

    @property
    def output_head(self) -> nn.Module:
        head: Any = self._model.get_output_embeddings()  # type: ignore[operator]
        return head.whole_layer if isinstance(head, CutHead) else head

    def logits_of(self, hidden: Tensor) -> Tensor:
        """Returns the output layer's logits [T, vocab] of hidden states [T, hidden_size] after the final norm.

        Draft heads call this and do not keep the layer, because a program may replace it.
        """
        logits: Tensor = self.output_head(hidden)
        return logits

    def capture_hidden(self, capture: HiddenCapture) -> None:
        """Makes every later forward return the hidden states that `capture` selects. Call it once, before the first
        forward.

        Raises UnsupportedModel if the model has no single list of layers to capture from.
        """
        assert self._capture is None, "states are captured already"
        self._capture = capture
        layers = self._decoder_layers()
        for layer in capture.layers:
            if layer < self.num_layers:
                layers[layer].register_forward_pre_hook(partial(_keep_input, layer), with_kwargs=True)
            else:
                layers[-1].register_forward_hook(partial(_keep_output, layer), with_kwargs=True)
        if capture.final:
            _base(self._model).register_forward_hook(partial(_keep_output, _FINAL), with_kwargs=True)

    def forward(self, batch: ForwardInput, *, on_layer_kv: OnLayerKv | None = None) -> TargetOutput:
        """Computes the batch's tokens, writes their KV to `batch.kv`, and returns logits and captured hidden states.

        `on_layer_kv` has callbacks by layer. Each is called on the calling thread when the KV of its layer and of all
        earlier layers is written (on CUDA: enqueued). On CUDA everything is enqueued on the current stream, and nothing
        waits for it.
        """
        return self.prepare(batch, on_layer_kv=on_layer_kv)()

    def prepare(self, batch: ForwardInput, *, on_layer_kv: OnLayerKv | None = None) -> Callable[[], TargetOutput]:
        program = self._program
        if self._followers is not None:
            return partial(self._forward_together, self._followers, batch, on_layer_kv)
        if program is None:
            return partial(self._forward_by_operators, batch, on_layer_kv)
        with self._preparing:  # a program keeps buffers for all its forwards, and may replace them now
            if not self.forward_counts.count(is_taken=program.takes(batch)):
                return partial(self._forward_by_operators, batch, on_layer_kv)
            compute = program.prepare(batch, on_layer_kv=on_layer_kv)
        return lambda: TargetOutput(*compute())

    def forward_to_compare(self, batch: ForwardInput) -> TargetOutput:
        """Computes a forward with PyTorch's operators, even if a ForwardProgram is set, as a reference for comparison.

        The forward does not count in `num_layers_begun`. Any thread may call this, also during other forwards. If the
        model is cut, all ranks must call it, so it must not be called after `lead`.
        """
        assert self._followers is None, "the other ranks do not compute this"
        return self._forward_by_operators(batch, None, on_layer=lambda: None)

    def _forward_together(
        self, followers: Followers, batch: ForwardInput, on_layer_kv: OnLayerKv | None
    ) -> TargetOutput:
        """Computes a forward together with the other ranks. Raises DeviceLost if that fails: then no rank can go on."""
        try:
            followers.begin(batch)
            return self._forward_by_operators(batch, on_layer_kv)
        except Exception as error:
            raise DeviceLost(followers.give_up(error)) from error

    @torch.inference_mode()
    def _forward_by_operators(
        self, batch: ForwardInput, on_layer_kv: OnLayerKv | None, *, on_layer: Callable[[], None] | None = None
    ) -> TargetOutput:
        every_token: int | Tensor = 0
        states: dict[int, Tensor] = {}
        plan = _ToldPlan(
            self.attention.plan(batch), on_layer or self._count_layer, on_layer_kv or {}, is_cut=self._part is not None
        )
        output: Any = self._model(
            input_ids=batch.input_ids.unsqueeze(0),
            position_ids=self._within_tables(batch.positions).unsqueeze(0),
            use_cache=False,
            logits_to_keep=every_token if batch.logits_rows is None else batch.logits_rows,
            attention_plan=plan,
            **({} if self._capture is None else {"captured_states": states}),
        )
        plan.tell_rest()
        return TargetOutput(output.logits[0].float(), self._ordered(states))

    def _within_tables(self, positions: Tensor) -> Tensor:
        """Returns the positions [T], those past the end of the model's tables as their last row.

        Drafts may go past the context's end. Nothing of them counts, but looking them up would fail the other rows too.
        """
        return positions if self._num_positions is None else positions.clamp(max=self._num_positions - 1)

    def _count_layer(self) -> None:
        self._num_layers_begun += 1

    def _ordered(self, states: dict[int, Tensor]) -> Tensor | None:
        if self._capture is None:
            return None
        ids = (*self._capture.layers, *((_FINAL,) if self._capture.final else ()))
        return torch.cat([states[layer] for layer in ids], dim=-1)[0]

    def _decoder_layers(self) -> nn.ModuleList:
        lists = [
            module
            for module in _base(self._model).modules()
            if isinstance(module, nn.ModuleList) and len(module) == self.num_layers
        ]
        if len(lists) != 1:
            raise UnsupportedModel(f"{type(self._model).__name__}: its decoder layers cannot be told for a draft head")
        return lists[0]


class _ToldPlan(AttentionPlan):
    """An attention plan that reports progress, so that a watchdog can tell a long forward from one that hangs.

    It calls `on_layer` before each layer's attention. After the attention, when the layer's KV is written (on CUDA:
    enqueued), it calls the callback that `on_layer_kv` has for this layer, if any. If the model is cut (`is_cut`), the
    other ranks have written their KV only when the outputs are summed. The callback is then called at the next layer.
    """

    def __init__(
        self, plan: AttentionPlan, on_layer: Callable[[], None], on_layer_kv: OnLayerKv, *, is_cut: bool
    ) -> None:
        self._plan = plan
        self._on_layer = on_layer
        self._on_layer_kv = on_layer_kv
        self._is_cut = is_cut
        self._untold: int | None = None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: LayerAttention) -> Tensor:
        self.tell_rest()
        self._on_layer()
        output = self._plan.attend(layer, query, key, value, how)
        self._untold = layer
        if not self._is_cut:
            self.tell_rest()
        return output

    def tell_rest(self) -> None:
        """Calls the callback of the last layer, if it was not called. Call this after the forward."""
        layer, self._untold = self._untold, None
        if layer is not None and (tell := self._on_layer_kv.get(layer)) is not None:
            tell()


def _base(model: nn.Module) -> nn.Module:
    base: nn.Module = model.base_model  # type: ignore[assignment]
    return base


def _keep_input(layer: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    kwargs["captured_states"][layer] = args[0] if args else kwargs["hidden_states"]


def _keep_output(layer: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    kwargs["captured_states"][layer] = output if isinstance(output, Tensor) else output[0]
