"""Converts GGUF files to model directories exactly, or refuses them and names the unsupported key or tensor.

`python -m common.gguf.convert FILE DIRECTORY DTYPE` converts a file. If it is refused, the reason is printed on one
line.
"""

from __future__ import annotations

import sys
from pathlib import Path

import gguf

from common.gguf.config import ROPE_FACTORS, Metadata, RefusedFile, Tensors, config_fields, read_values


def convert_gguf(path: Path, out_dir: Path, dtype: str) -> None:
    """Converts the file `path` to the directory `out_dir`: safetensors in `dtype`, config, generation config and
    tokenizer.

    Raises RefusedFile if a key or tensor cannot be converted exactly, or one that the model needs is missing.
    """
    reader = _read(path)
    keys = Metadata({name: field.contents() for name, field in reader.fields.items()})
    stored = {tensor.name: tensor for tensor in reader.tensors}
    _check_file(keys)
    tensors = Tensors({name: tuple(int(size) for size in reversed(one.shape)) for name, one in stored.items()})
    factors = {name: read_values(stored.pop(name)).reshape(-1) for name in ROPE_FACTORS if name in stored}
    fields = config_fields(keys, tensors, factors)
    keys.refuse_unknown(f"{keys.architecture}.")

    import torch  # these take seconds to import, and most unsupported files are refused above

    from common.gguf.tokenizer import build_tokenizer, special_tokens
    from common.gguf.weights import write_model

    tokenizer, special = build_tokenizer(keys, fields["vocab_size"]), special_tokens(keys)
    keys.refuse_unknown()
    write_model(stored, fields, special, out_dir, architecture=keys.architecture, dtype=getattr(torch, dtype))
    tokenizer.save_pretrained(str(out_dir))


def _read(path: Path) -> gguf.GGUFReader:
    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError, MemoryError, OSError) as error:
        reason = str(error) if isinstance(error, ValueError | KeyError) else "it ends too early"
        raise RefusedFile(f"no GGUF file that can be read: {reason}") from error
    if reader.byte_order != "I":
        raise RefusedFile("a file for machines of the other byte order is not supported")
    end = reader.data_offset
    for tensor in reader.tensors:
        if tensor.data_offset != end:
            raise RefusedFile(f"the tensor {tensor.name} begins at byte {tensor.data_offset}, not at {end}")
        end += -(-tensor.n_bytes // reader.alignment) * int(reader.alignment)
    return reader


def _check_file(keys: Metadata) -> None:
    if keys.take("general.type", str, "model") != "model":
        raise keys.refuse("general.type", "is no model")
    if keys.take("split.count", int, 0) > 1:
        raise keys.refuse("split.count", "files of one model are not supported; merge them with llama-gguf-split")


if __name__ == "__main__":
    try:
        convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
    except RefusedFile as refused:
        sys.exit(str(refused))
