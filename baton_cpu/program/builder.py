"""Builds programs: lists of operations over numbered buffers, together with the packed weights that they read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton_cpu.program.kernel.dot_products import PANEL_WIDTH
from baton_cpu.program.kernel.numbers import input_dtype
from baton_cpu.program.kernel.operations import Field, Kind, Store
from baton_cpu.program.weights import WeightMemory, packed, packed_one_by_one
from common.model.capture import HiddenCapture

_LEAVE_INPUT = (Kind.INPUT_NORM, Kind.PREPARE_CHUNKS, Kind.ATTEND_CHUNKS, Kind.ATTEND, Kind.EXPERTS_GATE)
"""Kinds of operations whose target is the input of a matrix product, in the dtype in which it is read. A LINEAR that
stores a gate has such a target too, and ROUTE writes buffer NORMED so.
"""
_READ_INPUT = (Kind.LINEAR, Kind.EXPERTS_GATE, Kind.EXPERTS_DOWN)
"""Kinds of operations that are matrix products."""


LOGITS, STATES, STREAM = 0, 1, 2
"""The first three buffers of every program. LOGITS [R, vocab] is float32. STATES holds the states that the program
returns beside the logits. STREAM is the residual stream in a model's program; in other programs the caller may fill it.
"""


@dataclass(frozen=True, slots=True)
class AttentionSize:
    """The sizes of a model's attention, the same in all its layers, and `scaling`, the factor of its scores."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scaling: float


@dataclass(frozen=True, slots=True)
class ExpertsSize:
    """The sizes of a model's layers of experts, the same in all of them: how many experts a layer has, how many a token
    gets, and the length of an input row.
    """

    num_experts: int
    num_chosen: int
    width: int


@dataclass(frozen=True, slots=True)
class Experts:
    """A layer of experts. `router` [experts, inputs] gives a token's scores, of which a softmax is taken. The token
    goes to the `num_chosen` experts with the largest scores. `gate_up` [experts, 2 * inner, inputs] has the outputs of
    gate, then of up; `down` is [experts, outputs, inner].

    With `weights_add_up` the softmax weights of a token's experts are divided by their sum. With `rounds_weights` they
    are rounded to the model's dtype.
    """

    router: Tensor
    gate_up: Tensor
    down: Tensor
    num_chosen: int
    weights_add_up: bool
    rounds_weights: bool

    @property
    def size(self) -> ExpertsSize:
        return ExpertsSize(self.router.shape[0], self.num_chosen, self.router.shape[1])


@dataclass(frozen=True, slots=True)
class Program:
    """A forward as a list of operations, as the kernel reads it.

    `operations` [n, fields] has the integers of each operation (see Field), and `numbers` [n, 2] its floating-point
    constants: epsilon and scaling. `widths` is the row length of each buffer in elements. `float_buffers` has the
    indices of the buffers that are float32. Some inputs of matrix products are first normalised or converted, or only
    some of their rows are taken; `normed_width` is the largest width of such an input. `kept` holds the tensors whose
    addresses are in `operations`.
    """

    operations: NDArray[np.int64]
    numbers: NDArray[np.float64]
    widths: tuple[int, ...]
    float_buffers: frozenset[int]
    normed_width: int
    attention: AttentionSize
    experts: ExpertsSize | None
    dtype: torch.dtype
    kept: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class FusedDecoder:
    """A model as a program, with rotary tables for every position that it accepts: cosines and sines, each [positions,
    head_dim].

    `unshare` gives the model's modules weights of their own again, if they share the program's. Its argument is called
    between parts of the work and may raise.
    """

    program: Program
    cosines: Tensor
    sines: Tensor
    unshare: Callable[[Callable[[], None]], None] = lambda check: None


def with_capture(decoder: FusedDecoder, capture: HiddenCapture | None) -> FusedDecoder:
    """Returns `decoder` changed so that its program also writes the hidden states that `capture` names, side by side,
    to buffer STATES. Returns it unchanged if `capture` is None.

    The first LINEAR of each of the program's layers must have Field.SHOWS_LAYER set, and the program's last one must
    normalise the output of the last layer.
    """
    if capture is None:
        return decoder
    program = decoder.program
    width = program.widths[STREAM]
    last = int(np.flatnonzero(program.operations[:, Field.KIND] == Kind.LINEAR)[-1])
    begins = [*np.flatnonzero(program.operations[:, Field.SHOWS_LAYER]).tolist(), last]
    copies: dict[int, list[tuple[NDArray[np.int64], NDArray[np.float64]]]] = {}
    for place, layer in enumerate((*capture.layers, *((len(begins) - 1,) if capture.final else ()))):
        fields = np.zeros(len(Field), np.int64)
        is_normed = place == len(capture.layers)
        for field, value in {
            Field.KIND: Kind.NORM,
            Field.SOURCE: STREAM,
            Field.TARGET: STATES,
            Field.TARGET_OFFSET: place * width,
            Field.WIDTH: width,
            Field.NORM: program.operations[last, Field.NORM] if is_normed else 0,
        }.items():
            fields[field] = value
        copies.setdefault(begins[layer], []).append((fields, program.numbers[last]))
    operations, numbers = [], []
    for place, (fields, constants) in enumerate(zip(program.operations, program.numbers, strict=True)):
        for copied, copied_constants in copies.get(place, []):
            operations.append(copied)
            numbers.append(copied_constants)
        operations.append(fields)
        numbers.append(constants)
    widths = tuple(capture.num_states * width if buffer == STATES else own for buffer, own in enumerate(program.widths))
    captured = replace(program, operations=np.stack(operations), numbers=np.stack(numbers), widths=widths)
    return replace(decoder, program=captured)


class ProgramBuilder:
    """Collects the operations, buffers and weights of a program. Buffers are given by number. Weights are [outputs,
    inputs] in `dtype`.

    `check` is called again and again while weights are packed. It may raise an exception to stop the packing.
    """

    def __init__(self, dtype: torch.dtype, check: Callable[[], None] = lambda: None) -> None:
        self._dtype = dtype
        self._check = check
        self._memory = WeightMemory()
        self._operations: list[list[int]] = []
        self._numbers: list[tuple[float, float]] = []
        self._widths: list[int] = []
        self._float_buffers: set[int] = set()
        self._inputs: set[int] = set()
        self._kept: list[Tensor] = []
        self._normed_width = 0
        self._normed: dict[int, int] = {}  # buffers of normed inputs, by width
        self._attention: AttentionSize | None = None
        self._experts: ExpertsSize | None = None
        self._routes = self._gated = 0  # the buffers that layers of experts share

    @property
    def num_operations(self) -> int:
        return len(self._operations)

    def buffer(self, width: int, *, is_float: bool = False, is_input: bool = False) -> int:
        """Adds a buffer with a row of `width` elements for each token. Returns its number.

        Its dtype is the model's, or float32 with `is_float`. With `is_input` it is the dtype in which a matrix product
        (LINEAR) reads its input; attention and gates write to such buffers.
        """
        number = len(self._widths)
        self._widths.append(width)
        if is_input:
            self._inputs.add(number)
        if is_float or (is_input and input_dtype(self._dtype) == torch.float32):
            self._float_buffers.add(number)
        return number

    def embed(self, weight: Tensor, target: int) -> None:
        """Adds the operation EMBED, which writes each token's row of `weight` [vocab, width] to buffer `target`."""
        self._add(Kind.EMBED, {Field.WEIGHT: self._address(weight), Field.WIDTH: weight.shape[1], Field.TARGET: target})

    def norm(
        self, source: int, target: int, weight: Tensor, *, epsilon: float, source_offset: int = 0, offset: int = 0
    ) -> None:
        """Adds the operation NORM, which RMS-normalises a part of each row of buffer `source`: as many elements as
        `weight` has, from `source_offset` on. It writes them to the rows of buffer `target`, from element `offset` on;
        both places may be the same. `epsilon` is added to the mean of the squares.
        """
        fields = {Field.SOURCE: source, Field.SOURCE_OFFSET: source_offset}
        fields |= {Field.TARGET: target, Field.TARGET_OFFSET: offset}
        fields |= {Field.NORM: self._address(weight), Field.WIDTH: weight.shape[0]}
        self._add(Kind.NORM, fields, epsilon=epsilon)

    def copy(self, source: int, target: int, *, width: int, offset: int = 0) -> None:
        """Adds an operation that copies the first `width` elements of each row of buffer `source` to the row of buffer
        `target`, beginning there at element `offset`.
        """
        fields = {Field.SOURCE: source, Field.TARGET: target, Field.TARGET_OFFSET: offset, Field.WIDTH: width}
        self._add(Kind.NORM, fields)

    def linear(
        self,
        source: int,
        target: int,
        weight: Tensor,
        *,
        bias: Tensor | None = None,
        norm: Tensor | None = None,
        epsilon: float = 0.0,
        store: Store = Store.KEEP,
        selected_rows: bool = False,
        shows_layer: bool = False,
    ) -> Tensor:
        """Adds the operation LINEAR, which multiplies the rows of buffer `source` by `weight` [outputs, inputs], adds
        `bias`, and stores the result in buffer `target` as `store` says. Returns the panels into which it packs the
        weight.

        With `norm` [inputs] the rows are RMS-normalised first, with `epsilon`. With `selected_rows` only the rows whose
        logits are wanted are computed. Set `shows_layer` for the first LINEAR of each layer of the model: there the
        kernel counts progress, and `with_capture` copies the layer's input.
        """
        num_outputs, width = weight.shape
        num_panels = -(-num_outputs // PANEL_WIDTH)
        normed = 0
        is_copied = norm is not None or (source not in self._inputs and input_dtype(self._dtype) != self._dtype)
        assert not (source in self._inputs and (is_copied or selected_rows)), "is read as it is"
        if is_copied or selected_rows:
            self._normed_width = max(self._normed_width, width)
        if is_copied and not selected_rows:
            normed = self._normed_buffer(width)
            norming = {Field.SOURCE: source, Field.TARGET: normed, Field.WIDTH: width}
            self._add(Kind.INPUT_NORM, {**norming, Field.NORM: self._address(norm)}, epsilon=epsilon)
        panels = packed(weight, self._memory, self._check)
        fields = {
            Field.SOURCE: source,
            Field.TARGET: target,
            Field.WEIGHT: self._address(panels),
            Field.BIAS: self._address(bias),
            Field.NORM: self._address(norm),
            Field.WIDTH: width,
            Field.NUM_OUTPUTS: num_outputs,
            Field.NUM_PANELS: num_panels,
            Field.STORE: store,
            Field.SELECTED_ROWS: selected_rows,
            Field.SHOWS_LAYER: shows_layer,
            Field.NORMED: normed,
            Field.COPIED: is_copied,
        }
        self._add(Kind.LINEAR, fields, epsilon=epsilon)
        return panels

    def largest(self, logits: int) -> None:
        """Adds the operation LARGEST, which finds the largest number of each row of buffer `logits`.

        It writes the indices to the array that Call.LARGEST points to.
        """
        self._add(Kind.LARGEST, {Field.SOURCE: logits, Field.WIDTH: self._widths[logits]})

    def gate(self, source: int, target: int, gate: Tensor, up: Tensor, *, norm: Tensor, epsilon: float) -> Tensor:
        """Adds a LINEAR that writes silu(gate(x)) * up(x) to buffer `target`, where x are the rows of buffer `source`,
        RMS-normalised with weight `norm` [inputs] and `epsilon`. `gate` and `up` are weights [outputs, inputs].

        Both weights are packed as one. In each panel, the unit of packing, half the outputs are those of `gate`, and
        half those of `up`. So the number of outputs must be a multiple of PANEL_WIDTH / 2. Returns the panels.
        """
        return self.linear(source, target, _interleaved(gate, up), norm=norm, epsilon=epsilon, store=Store.GATE)

    def experts(self, stream: int, experts: Experts, *, norm: Tensor, epsilon: float) -> None:
        """Adds the operations of a layer of experts. The experts read the rows of buffer `stream`, RMS-normalised with
        weight `norm` [inputs] and `epsilon`, and their outputs are added to these rows. All layers of experts must have
        the same sizes. The number of outputs of an expert's gate must be a multiple of PANEL_WIDTH / 2.
        """
        size, inner = experts.size, experts.down.shape[2]
        if self._experts is None:
            self._routes = self.buffer(2 * size.num_chosen, is_float=True)
            self._gated = self.buffer(size.num_chosen * inner, is_input=True)
        assert self._experts in (None, size) and self._widths[self._gated] == size.num_chosen * inner
        self._experts = size
        normed = self._normed_buffer(size.width)
        fields = {Field.NUM_EXPERTS: size.num_experts, Field.NUM_CHOSEN: size.num_chosen, Field.ROUTES: self._routes}
        routing = {
            Field.SOURCE: stream,
            Field.TARGET: self._routes,
            Field.NORMED: normed,
            Field.WIDTH: size.width,
            Field.NORM: self._address(norm),
            Field.WEIGHT: self._address(packed(experts.router, self._memory, self._check)),
            Field.NUM_PANELS: -(-size.num_experts // PANEL_WIDTH),
            Field.WEIGHTS_ADD_UP: experts.weights_add_up,
            Field.ROUNDS_WEIGHTS: experts.rounds_weights,
        }
        self._add(Kind.ROUTE, {**fields, **routing}, epsilon=epsilon)
        pairs = (_interleaved(*both.chunk(2)) for both in experts.gate_up)
        self._product_of_experts(Kind.EXPERTS_GATE, normed, self._gated, pairs, 2 * inner, fields)
        self._product_of_experts(Kind.EXPERTS_DOWN, self._gated, stream, experts.down, size.width, fields)

    def _product_of_experts(
        self,
        kind: Kind,
        source: int,
        target: int,
        weights: Iterable[Tensor],
        num_outputs: int,
        fields: Mapping[Field, int],
    ) -> None:
        """Adds an operation that multiplies the rows of each expert by its weight, and packs these weights."""
        panels = packed_one_by_one(weights, fields[Field.NUM_EXPERTS], self._memory, self._check)
        own = {
            Field.SOURCE: source,
            Field.TARGET: target,
            Field.WEIGHT: self._address(panels),
            Field.WIDTH: panels.shape[2] * panels.shape[4],
            Field.NUM_PANELS: panels.shape[1],
            Field.NUM_OUTPUTS: num_outputs,
        }
        self._add(kind, {**fields, **own})

    def attend(
        self,
        source: int,
        target: int,
        size: AttentionSize,
        *,
        layer: int,
        query_norm: Tensor | None = None,
        key_norm: Tensor | None = None,
        epsilon: float = 0.0,
    ) -> None:
        """Adds the operations of the attention of layer number `layer`, which write its output to buffer `target`. Each
        row of buffer `source` holds a token's query, key and value heads, in this order. `size` must be the same for
        all layers.

        `query_norm` and `key_norm` [head_dim] are the weights of RMS norms of each head, with `epsilon`; None means
        that there is no norm.
        """
        assert self._attention in (None, size), "the layers' attention is of one size"
        self._attention = size
        fields = {
            Field.SOURCE: source,
            Field.TARGET: target,
            Field.LAYER: layer,
            Field.NUM_HEADS: size.num_heads,
            Field.NUM_KV_HEADS: size.num_kv_heads,
            Field.HEAD_DIM: size.head_dim,
            Field.NORM: self._address(query_norm),
            Field.KEY_NORM: self._address(key_norm),
        }
        for kind in (Kind.PREPARE_CHUNKS, Kind.ATTEND_CHUNKS, Kind.ATTEND):
            self._add(kind, fields, epsilon=epsilon, scaling=size.scaling)

    def program(self) -> Program:
        """Returns the program built so far."""
        assert self._attention is not None
        return Program(
            np.array(self._operations, np.int64),
            np.array(self._numbers, np.float64),
            tuple(self._widths),
            frozenset(self._float_buffers),
            self._normed_width,
            self._attention,
            self._experts,
            self._dtype,
            tuple(self._kept),
        )

    def _add(self, kind: Kind, fields: dict[Field, int], *, epsilon: float = 0.0, scaling: float = 0.0) -> None:
        leaves_input = kind in _LEAVE_INPUT or fields.get(Field.STORE) == Store.GATE
        assert kind in _READ_INPUT or fields.get(Field.SOURCE) not in self._inputs, "only products read inputs"
        assert Field.TARGET not in fields or (fields[Field.TARGET] in self._inputs) == leaves_input, "of another dtype"
        row = [0] * len(Field)
        row[Field.KIND] = int(kind)
        for field, value in fields.items():
            row[field] = int(value)
        self._operations.append(row)
        self._numbers.append((epsilon, scaling))

    def _normed_buffer(self, width: int) -> int:
        self._normed[width] = self._normed.get(width) or self.buffer(width, is_input=True)
        return self._normed[width]

    def _address(self, weight: Tensor | None) -> int:
        if weight is None:
            return 0
        assert weight.dtype == self._dtype and weight.is_contiguous()
        self._kept.append(weight)
        return weight.data_ptr()


def _interleaved(gate: Tensor, up: Tensor) -> Tensor:
    """Returns one weight in whose panels half the outputs are of `gate` and half of `up`, both [outputs, inputs]."""
    half = PANEL_WIDTH // 2
    return torch.stack([gate.unflatten(0, (-1, half)), up.unflatten(0, (-1, half))], dim=1).flatten(0, 2)
