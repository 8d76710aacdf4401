"""Tensors are read from safetensors files as they were stored, in memory of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from structlog.testing import capture_logs

from common.errors import StartupError, UnsupportedModel
from common.model import stored_tensor
from common.model.stored_tensor import STORED_DTYPES, read_header
from common.service.runtime import LoggedBytes
from tests.support.loading import load_target
from tests.support.models import save_tiny_model


@pytest.mark.parametrize("dtype", STORED_DTYPES.values(), ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (7,), (), (0, 4)], ids=str)
def test_tensors_of_every_type_are_read_as_they_were_stored(
    dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path
) -> None:
    tensors = {name: torch.randint(0, 2, shape).to(dtype) for name in "ab"}
    save_file(tensors, tmp_path / "x.safetensors")
    stored = read_header(tmp_path / "x.safetensors")
    assert stored.keys() == tensors.keys()
    for name, expected in tensors.items():
        seen = stored[name].read()
        assert (seen.dtype, seen.shape) == (dtype, shape)
        assert seen.view(-1).view(torch.uint8).tolist() == expected.view(-1).view(torch.uint8).tolist()
        assert b"".join(stored[name].parts()) == bytes(expected.view(-1).view(torch.uint8).tolist())


def test_what_was_read_belongs_to_no_file(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    save_file({"a": torch.arange(1000)}, file)
    tensor = read_header(file)["a"].read()
    file.write_bytes(b"")
    assert torch.equal(tensor, torch.arange(1000))


def test_a_file_that_becomes_shorter_is_named(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    save_file({"a": torch.arange(1000)}, file)
    stored = read_header(file)["a"]
    file.write_bytes(file.read_bytes()[:-1])
    for read in (stored.read, lambda: list(stored.parts())):
        with pytest.raises(StartupError, match=rf"{tmp_path.name}/x.safetensors: became shorter"):
            read()


def test_a_type_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F8_E4M3FNUZ", "shape": [2], "data_offsets": [0, 2]}}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(2))
    with pytest.raises(UnsupportedModel, match="a is of F8_E4M3FNUZ"):
        read_header(tmp_path / "x.safetensors")


def test_loading_a_model_tells_how_much_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_tensor, "PART_BYTES", 1000)
    directory = save_tiny_model(tmp_path, "llama")
    num_bytes = sum(stored.num_bytes for stored in read_header(directory / "model.safetensors").values())
    told: list[tuple[int, int]] = []
    load_target(directory, device="cpu", dtype="float32", on_progress=lambda done, total: told.append((done, total)))
    done = [each for each, _ in told]
    assert done == sorted(set(done)) and done[0] <= 1000 and told[-1] == (num_bytes, num_bytes)


def test_a_file_that_is_cut_while_a_model_is_loaded_ends_the_start(tmp_path: Path) -> None:
    file = save_tiny_model(tmp_path, "llama") / "model.safetensors"

    def cut(num_done: int, num_total: int) -> None:
        if file.stat().st_size > num_total // 2:
            file.write_bytes(file.read_bytes()[: num_total // 2])

    with pytest.raises(StartupError, match=r"model\.safetensors: (changed|became shorter) while it was read"):
        load_target(tmp_path, device="cpu", dtype="float32", on_progress=cut)


def test_progress_is_logged_every_few_seconds_only() -> None:
    now_s = 0.0
    progress = LoggedBytes(lambda: now_s)
    with capture_logs() as logs:
        for now_s in (1.0, 4.9, 5.0, 6.0, 9.9, 10.5):
            progress(int(now_s * 10), 200)
    assert [(line["event"], line["bytes_done"], line["bytes_total"]) for line in logs] == [
        ("reading_weights", 50, 200),
        ("reading_weights", 105, 200),
    ]
