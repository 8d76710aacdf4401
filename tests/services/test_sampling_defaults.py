"""Tests that options which a request leaves open are those of the model's generation config, unless a setting says
otherwise.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from baton.server_info import HealthStatus
from baton.service_process import READY_SERVICE
from common.config.settings import DecodeSettings
from common.errors import UnsupportedModel
from common.model.generation_config import read_sampling_defaults
from decode_service import main as decode_main
from tests.support.free_ports import free_address
from tests.support.services_here import serving_here

GREEDY = {"temperature": 0.0, "top_k": 5, "top_p": None, "max_new_tokens": 7}


def write(directory: Path, content: dict[str, Any]) -> Path:
    (directory / "generation_config.json").write_text(json.dumps(content))
    return directory


@pytest.mark.parametrize(("generation_config", "expected"), [("auto", {"temperature": 0.0, "top_k": 5}), ("none", {})])
async def test_what_a_request_leaves_open_is_the_models(
    generation_config: str, expected: dict[str, float], tiny_model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    model = write(shutil.copytree(tiny_model_dir("llama"), tmp_path / "model"), GREEDY)
    settings = DecodeSettings(
        model=str(model),
        dtype="float32",
        num_threads=1,
        max_kv_tokens=1024,
        listen=free_address(),
        prefill=(free_address(),),
        prefill_fallback=True,
        local_prefill_tokens=64,
        generation_config=generation_config,
    )
    with capture_logs() as lines:
        async with serving_here(decode_main, settings, READY_SERVICE["decode"]) as decode:
            await decode.turns(HealthStatus.SERVING)
            client = decode.client
            assert (await client.model_info()).sampling_defaults == expected
            first, second = [
                (await client.complete("the other", seed=seed, max_tokens=16)).token_ids for seed in (1, 2)
            ]
            warm = [
                (await client.complete("the other", seed=seed, max_tokens=16, temperature=1.0, top_k=0)).token_ids
                for seed in (1, 2)
            ]
    assert (first == second) == bool(expected)
    assert warm[0] != warm[1], "a request's own values count"
    told = [line for line in lines if line["event"] == "sampling_defaults"]
    assert [{name: line[name] for name in expected} for line in told] == [expected] * bool(expected)


@pytest.mark.parametrize(
    "content",
    [
        {"temperature": -1},
        {"temperature": "warm"},
        {"top_p": 1.5},
        {"top_k": 2.5},
        {"top_k": -2},
        {"top_k": True},
        {"min_p": []},
    ],
)
def test_a_value_that_no_request_could_have_is_refused_by_name(content: dict[str, Any], tmp_path: Path) -> None:
    (name,) = content
    with pytest.raises(UnsupportedModel, match=rf"generation_config\.json: {name}: .*generation_config=none"):
        read_sampling_defaults(write(tmp_path, content))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_p": 0, "temperature": 0.7}, {"top_p": 0.0, "temperature": 0.7}),
        ({"top_k": -1.0}, {"top_k": 0}),
        ({"top_k": 50.0}, {"top_k": 50}),
        ({"temperature": 1}, {"temperature": 1.0}),
        ({"do_sample": False, "temperature": 0.7, "top_p": 0.8}, {"temperature": 0.0, "top_p": 0.8}),
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"do_sample": True, "temperature": 0.7}, {"temperature": 0.7}),
        ({"do_sample": None, "temperature": 0.7}, {"temperature": 0.7}),
    ],
    ids=str,
)
def test_values_mean_what_they_mean_to_those_they_are_written_for(
    content: dict[str, Any], expected: dict[str, float], tmp_path: Path
) -> None:
    read = read_sampling_defaults(write(tmp_path, content))
    assert [(name, type(value), value) for name, value in sorted(read.items())] == [
        (name, type(value), value) for name, value in sorted(expected.items())
    ]


def test_what_transformers_has_under_no_such_name_is_ignored(tmp_path: Path) -> None:
    known = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.5}
    content = {**known, "max_new_tokens": 7, "frequency_penalty": 1.0, "num_beams": 4}
    assert read_sampling_defaults(write(tmp_path, content)) == known


def test_a_model_without_one_has_no_defaults(tmp_path: Path) -> None:
    assert read_sampling_defaults(tmp_path) == {}
