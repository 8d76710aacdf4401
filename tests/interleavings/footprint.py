"""Measures which memory code touches while it runs. Two pieces (units of stream work) commute if their footprints do
not conflict.

A TorchDispatchMode sees every tensor operation. Buffers that live as long as the engine are tracked by slot, row or
element. Any other tensor counts as a whole; its name says which step made it, so it has the same name in every run. A
read through numpy counts when the array is made. Writes through numpy are not seen.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from common.device.stream import Cell

Unit = Hashable
HOST = "host"
_aten = torch.ops.aten


@dataclass(slots=True)
class Footprint:
    reads: set[Unit] = field(default_factory=set)
    writes: set[Unit] = field(default_factory=set)

    def conflicts_with(self, other: Footprint) -> bool:
        return not (
            self.writes.isdisjoint(other.writes)
            and self.writes.isdisjoint(other.reads)
            and self.reads.isdisjoint(other.writes)
        )


@dataclass(slots=True)
class Transition:
    """Everything one process did between two choices. `after` holds the transitions that had to come first."""

    process: str
    name: str
    enabled: tuple[str, ...]
    footprint: Footprint = field(default_factory=Footprint)
    after: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Shared:
    """A buffer that both the host and streams touch. It is tracked by index along `unit_dim`, or by element if that is
    None.

    With `is_written_by_host_alone` the host reads only what it wrote itself, so its reads need not wait for the
    schedule side.
    """

    name: str
    tensor: Tensor
    unit_dim: int | None = None
    is_written_by_host_alone: bool = False


@dataclass(frozen=True, slots=True)
class _Buffer:
    """A buffer that is tracked in units. `places` maps each element of its storage to the index of its unit; None makes
    the whole buffer one unit. A unit is identified by `name` and that index.
    """

    name: Hashable
    places: Tensor | None = None


def _index(table: Tensor, indices: Sequence[Tensor | None], *_: Any) -> Tensor:
    return table[tuple(slice(None) if index is None else index for index in indices)]


def _index_select(table: Tensor, dim: int, index: Tensor, *_: Any) -> Tensor:
    return table.index_select(dim, index)


_CHOICES: dict[Any, Callable[..., Tensor]] = {
    _aten.index.Tensor: _index,
    _aten.index_put_.default: _index,
    _aten._index_put_impl_.default: _index,
    _aten.index_select.default: _index_select,
    _aten.index_select.out: _index_select,
    _aten.index_copy_.default: _index_select,
    _aten.index_add_.default: _index_select,
    _aten.index_fill_.int_Scalar: _index_select,
    _aten.gather.default: lambda table, dim, index, *_: table.gather(dim, index),
}
"""Operations that touch only the indexed part of their first tensor, each with a function that finds that part."""

_ALLOCATIONS = frozenset(
    (
        _aten.empty.memory_format,
        _aten.empty_like.default,
        _aten.empty_strided.default,
        _aten.new_empty.default,
        _aten.new_empty_strided.default,
    )
)
"""Operations that allocate memory without writing to it."""


class Memory(TorchDispatchMode):
    """A mode that records memory accesses while it is entered. Accesses go to the footprint that `now()` returns, and
    `owner()` names the process.

    `on_shared` is called before each operation on a named buffer, with the operation and whether it writes to one. It
    returns True if it has postponed the operation.
    """

    def __init__(self, now: Callable[[], Footprint], owner: Callable[[], Hashable], *, lets_go: bool = False) -> None:
        """Creates the mode. With `lets_go`, unnamed tensors are not kept alive, and `on_freed` is called when the last
        reference to one is dropped.
        """
        super().__init__()
        self._lets_go = lets_go
        self._writers: dict[int, Hashable] = {}
        self.on_made: Callable[[Unit, bool], None] | None = None
        self.on_freed: Callable[[Unit, Any], None] = lambda unit, maker: None
        self.on_host_read: Callable[[Iterable[Unit], Any], None] | None = None
        self._now = now
        self._owner = owner
        self._buffers: dict[int, _Buffer] = {}
        self._kept: list[torch.UntypedStorage] = []  # kept alive so that no address is reused
        self._cells: dict[int, tuple[Hashable, Cell[Any]]] = {}
        self._num_made: dict[Hashable, int] = {}
        # By address, size, strides and offset of a view of a tracked buffer.
        self._units_of_view: dict[tuple[Hashable, ...], frozenset[Unit]] = {}
        self._shadows: dict[int, Tensor] = {}
        self.reads_shadows: Callable[[], bool] = lambda: False
        self.on_shared: Callable[[Callable[[], object], bool], bool] = lambda operation, writes: False
        self._is_paused = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Tells PyTorch not to disable dynamo around each call. Nothing is compiled here, and that default wrapper
        costs time.
        """
        return False

    def name(self, tensor: Tensor, name: str, *, unit_dim: int | None) -> None:
        """Tracks a buffer by index along `unit_dim`, or by element if that is None."""
        assert tensor.is_contiguous() and tensor.storage_offset() == 0
        if unit_dim is None:
            places = torch.arange(tensor.numel())
        else:
            shape = [-1 if dim == unit_dim else 1 for dim in range(tensor.dim())]
            places = torch.arange(tensor.shape[unit_dim]).view(shape).expand_as(tensor).flatten()
        self._put(tensor, _Buffer(name, places))

    def shadow(self, tensor: Tensor) -> None:
        """Keeps a copy of the tensor. From now on `reads_shadows` decides whether reads see the copy, which contains no
        postponed operation.
        """
        self._shadows[tensor.untyped_storage()._cdata] = tensor.clone()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Records tensor operations, reads by Python or numpy, and accesses to cells.

        With `lets_go` it does not record cells, because remembering a cell would keep its content alive.
        """
        to_list, to_numpy, cell_get, cell_set = Tensor.tolist, Tensor.numpy, Cell.get, Cell.set
        memory = self

        def tolist(tensor: Tensor) -> Any:
            return to_list(memory._read(tensor))

        def numpy(tensor: Tensor, **arguments: Any) -> Any:
            return to_numpy(memory._read(tensor), **arguments)

        def get(cell: Cell[Any]) -> Any:
            memory._now().reads.add(memory._cell_name(cell))
            return cell_get(cell)

        def set(cell: Cell[Any], value: Any) -> None:
            memory._now().writes.add(memory._cell_name(cell))
            cell_set(cell, value)

        with (
            mock.patch.object(Tensor, "tolist", tolist),
            mock.patch.object(Tensor, "numpy", numpy),
            contextlib.ExitStack() as cells,
            self,
        ):
            if not self._lets_go:
                cells.enter_context(mock.patch.object(Cell, "get", get))
                cells.enter_context(mock.patch.object(Cell, "set", set))
            yield

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Records nothing within the block, in which a test computes and not the engine."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_paused:
            return func(*args, **kwargs)
        if not (_is_view(func) or func in _ALLOCATIONS):
            reads, writes = _operands(func, args, kwargs)
            if not writes and self._shadows and self.reads_shadows():
                args = tuple(self._in_shadow(value) for value in args)
                reads, _ = _operands(func, args, kwargs)
            writes_shared = any(map(self._is_shared, writes))
            if writes_shared or any(map(self._is_shared, reads)):
                operation = functools.partial(func, *map(self._as_now, args), **kwargs) if writes_shared else func
                with self:  # functions called from here are not seen by this mode
                    is_put_off = self.on_shared(operation, writes_shared)
                if is_put_off:
                    if (shadow := self._in_shadow(args[0])) is not args[0]:
                        func(shadow, *args[1:], **kwargs)
                    self._note([tensor for tensor in reads if not self._is_shared(tensor)], ())
                    return args[0]
            self._note(reads, writes, func, args)
        result = func(*args, **kwargs)
        for made in result if isinstance(result, tuple | list) else (result,):
            if isinstance(made, Tensor) and made.untyped_storage()._cdata not in self._buffers:
                buffer = _Buffer(self._new_name())
                self._put(made, buffer)
                if self.on_made is not None:
                    self.on_made((buffer.name, 0), func not in _ALLOCATIONS)
        return result

    def _read(self, tensor: Tensor) -> Tensor:
        if self._is_paused:
            return tensor
        if self._shadows and self.reads_shadows():
            tensor = self._in_shadow(tensor)
        if self._is_shared(tensor):
            self.on_shared(lambda: None, False)
        elif self.on_host_read is not None:
            units = self._units(tensor, None, ())
            self.on_host_read(units, self._writers[tensor.untyped_storage()._cdata])
            return tensor
        self._note((tensor,), ())
        return tensor

    def _in_shadow(self, value: Any) -> Any:
        copy = self._shadows.get(value.untyped_storage()._cdata) if isinstance(value, Tensor) else None
        return value if copy is None else copy.as_strided(value.size(), value.stride(), value.storage_offset())

    def _as_now(self, value: Any) -> Any:
        """Returns an operand for a postponed operation: a copy of its present value, except that shared buffers are
        passed as they are and read later.
        """
        if isinstance(value, tuple | list):
            return [self._as_now(each) for each in value]
        return value.clone() if isinstance(value, Tensor) and not self._is_shared(value) else value

    def _is_shared(self, tensor: Tensor) -> bool:
        buffer = self._buffers.get(tensor.untyped_storage()._cdata)
        return buffer is not None and buffer.places is not None

    def _note(self, reads: Sequence[Tensor], writes: Sequence[Tensor], func: Any = None, args: Any = ()) -> None:
        footprint = self._now()
        for tensor in reads:
            footprint.reads.update(self._units(tensor, func, args))
        for tensor in writes:
            footprint.writes.update(self._units(tensor, func, args))
            self._writers[tensor.untyped_storage()._cdata] = self._owner()

    def _units(self, tensor: Tensor, func: Any, args: Any) -> Iterable[Unit]:
        storage = tensor.untyped_storage()._cdata
        if storage not in self._buffers:
            self._put(tensor, _Buffer(self._new_name()))
        buffer = self._buffers[storage]
        if buffer.places is None:
            return ((buffer.name, 0),)
        # Apply the same view or index to a table of unit indices: the result holds the units touched.
        view = tensor.size(), tensor.stride(), tensor.storage_offset()
        if args and args[0] is tensor and (choose := _CHOICES.get(func)) is not None:
            return _units_at(buffer.name, choose(buffer.places.as_strided(*view), *args[1:]))
        units = self._units_of_view.get((storage, *view))
        if units is None:
            units = self._units_of_view[storage, *view] = _units_at(buffer.name, buffer.places.as_strided(*view))
        return units

    def _put(self, tensor: Tensor, buffer: _Buffer) -> None:
        storage = tensor.untyped_storage()
        self._buffers[storage._cdata] = buffer
        self._writers[storage._cdata] = self._owner()
        if self._lets_go and buffer.places is None:
            weakref.finalize(storage, self._forget, storage._cdata, self._owner()).atexit = False
        else:
            self._kept.append(storage)

    def _forget(self, address: int, maker: Hashable) -> None:
        buffer = self._buffers.pop(address)
        self._writers.pop(address)
        if not self._is_paused:
            self.on_freed((buffer.name, 0), maker)

    def _new_name(self) -> Hashable:
        owner = self._owner()
        self._num_made[owner] = self._num_made.get(owner, 0) + 1
        return (owner, self._num_made[owner])

    def _cell_name(self, cell: Cell[Any]) -> Hashable:
        if id(cell) not in self._cells:
            self._cells[id(cell)] = (("cell", self._new_name()), cell)
        return self._cells[id(cell)][0]


def _units_at(name: Hashable, places: Tensor) -> frozenset[Unit]:
    return frozenset((name, place) for place in places.flatten().tolist())


def _operands(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    written = _written_arguments(func)
    for place, value in enumerate(args):
        _put_operand(value, writes if place in written else reads)
    for name, value in kwargs.items():
        _put_operand(value, writes if name in written else reads)
    return reads, writes


def _put_operand(value: Any, operands: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        operands.append(value)
    elif isinstance(value, tuple | list):
        operands += [each for each in value if isinstance(each, Tensor)]


@functools.cache
def _written_arguments(func: Any) -> frozenset[int | str]:
    """Returns the arguments that the operation writes, by position and by name."""
    written = [
        (place, argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return frozenset(key for keys in written for key in keys)


@functools.cache
def _is_view(func: Any) -> bool:
    return any(result.alias_info is not None and not result.alias_info.is_write for result in func._schema.returns)
