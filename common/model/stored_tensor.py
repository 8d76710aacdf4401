"""The tensors of safetensors files.

Files are read, not mapped. The pages of a mapped file would count as the process's memory beside what is made of them,
and a file that is shortened while it is mapped ends the process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from common.errors import StartupError, UnsupportedModel
from common.peer_text import peer_text

WEIGHT_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The types of plain weights, by the names that safetensors has for them."""
STORED_DTYPES = WEIGHT_DTYPES | {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
"""All types of tensors that can be read."""
_LENGTH_BYTES = 8  # at the start of a file: the length of its header
PART_BYTES = 16 << 20  # read at once


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor's file, and what the file's header says of it. `dtype` is safetensors' name, such as BF16. Its numbers
    are the `num_bytes` from byte `start` of the file on.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str
    start: int
    num_bytes: int

    @property
    def place(self) -> str:
        """The names of the model directory and the file, for errors."""
        return f"{self.file.parent.name}/{self.file.name}"

    def read(self, on_read: Callable[[int], None] = lambda num_bytes: None) -> Tensor:
        """Returns the tensor, in memory of its own. `on_read` is called with the number of bytes read, after each part.

        Raises StartupError if the file is shorter than its header says.
        """
        tensor = torch.empty(self.shape, dtype=STORED_DTYPES[self.dtype])
        content = tensor.view(-1).view(torch.uint8).numpy().data
        with self.file.open("rb", buffering=0) as file:
            file.seek(self.start)
            for begin in range(0, self.num_bytes, PART_BYTES):
                part = content[begin : begin + PART_BYTES]
                self._fill(part, file)
                on_read(len(part))
        return tensor

    def parts(self) -> Iterator[memoryview]:
        """Reads the tensor's bytes in parts of some megabytes. A part is valid until the next one is read.

        Raises StartupError if the file is shorter than its header says.
        """
        buffer = memoryview(bytearray(min(PART_BYTES, self.num_bytes)))
        with self.file.open("rb", buffering=0) as file:
            file.seek(self.start)
            for begin in range(0, self.num_bytes, PART_BYTES):
                part = buffer[: self.num_bytes - begin]
                self._fill(part, file)
                yield part

    def _fill(self, part: memoryview, file: FileIO) -> None:
        while part:
            num_read = file.readinto(part)
            if not num_read:
                raise StartupError(f"{self.place}: became shorter while it was read; start again")
            part = part[num_read:]


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Returns the tensors that the header of `file` describes, by name.

    Raises UnsupportedModel, naming the tensor, for a type that cannot be read. A file that is malformed, or shorter
    than its header says, raises what safetensors raises.
    """
    with safe_open(str(file), framework="pt") as checked:
        names = list(checked.keys())
    with file.open("rb") as opened:
        num_header_bytes = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
        header = json.loads(opened.read(num_header_bytes))
    tensors = {}
    for name in names:
        shape, dtype, (start, stop) = (header[name][key] for key in ("shape", "dtype", "data_offsets"))
        stored = StoredTensor(file, tuple(shape), dtype, _LENGTH_BYTES + num_header_bytes + start, stop - start)
        if dtype not in STORED_DTYPES:
            raise UnsupportedModel(f"{stored.place}: {peer_text(name)} is of {dtype}, which cannot be read")
        tensors[name] = stored
    return tensors
