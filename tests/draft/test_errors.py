"""Tests that every defect of a head's checkpoint is an error at load which names the key and the directory. No value is
made up.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from common.errors import DraftMismatch, StartupError
from common.model.target import TargetModel
from tests.draft.cases import BY_NAME
from tests.draft.conftest import Load
from tests.support.draft_heads import save_eagle1_head, save_eagle3_head, save_mtp_head
from tests.support.head_parts import Tensors, load_head, save_head, without
from tests.support.loading import load_draft

OPTIONAL = ("t2d", "embed_tokens.weight", "shared_head.head.weight", "shared_head.output.weight")
"""Tensors that may be missing: `t2d` follows from `d2t`, and the others are taken from the target."""
CASES = ["eagle3-all-norms", "eagle-plain", "mtp-nextn-own-tables"]
"""One head of each kind. The others are tested in depth."""
MORE = ["eagle3-speculators", "eagle3-qkv-bias", "eagle-qwen2", "mtp-step-two-layers", "mtp-mimo", "mtp-mimo-v2"]


@pytest.fixture(params=[*CASES, *(pytest.param(name, marks=pytest.mark.thorough) for name in MORE)])
def good(request: pytest.FixtureRequest, tmp_path: Path, target_dir: Path) -> tuple[dict[str, Any], Tensors]:
    return load_head(BY_NAME[request.param].save(tmp_path / "good", target_dir=target_dir))


class Defects:
    """Saves heads with defects, one after the other, and tries to load them."""

    def __init__(self, load: Load, directory: Path) -> None:
        self._load = load
        self._directory = directory

    def error(self, config: dict[str, Any], tensors: Tensors) -> str:
        with pytest.raises(StartupError) as raised:
            self._load(save_head(self._directory, config, tensors))
        message = str(raised.value)
        assert str(self._directory) in message
        return message


@pytest.fixture
def defects(load: Load, tmp_path: Path) -> Defects:
    return Defects(load, tmp_path / "bad")


def test_a_missing_tensor_is_named(good: tuple[dict[str, Any], Tensors], defects: Defects) -> None:
    config, tensors = good
    for name in tensors:
        if not name.endswith(OPTIONAL):
            assert name in defects.error(config, without(tensors, [name])), name


def test_a_tensor_of_another_shape_is_named(good: tuple[dict[str, Any], Tensors], defects: Defects) -> None:
    config, tensors = good
    for name, tensor in tensors.items():
        for changed in _reshaped(tensor):
            assert name in defects.error(config, {**tensors, name: changed}), (name, changed.shape)


def _reshaped(tensor: Tensor) -> Iterator[Tensor]:
    for dim in range(tensor.dim()):
        yield torch.cat([tensor, tensor.narrow(dim, 0, 1)], dim=dim)
        yield tensor.narrow(dim, 0, tensor.shape[dim] - 1)
    yield tensor.unsqueeze(0)


def test_a_tensor_that_nobody_knows_is_named(good: tuple[dict[str, Any], Tensors], defects: Defects) -> None:
    config, tensors = good
    for name in ("layers.1.input_layernorm.weight", "model.mtp_more.weight", f"{next(iter(tensors))}_scale_inv"):
        assert name in defects.error(config, {**tensors, name: torch.ones(3)})


def test_a_tensor_of_another_kind_of_number_is_named(good: tuple[dict[str, Any], Tensors], defects: Defects) -> None:
    config, tensors = good
    for name, tensor in tensors.items():
        changed = tensor.float() if name in ("d2t", "t2d") else tensor.to(torch.float8_e4m3fn)
        assert name in defects.error(config, {**tensors, name: changed}), name


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_no_number_is_named(
    number: float, good: tuple[dict[str, Any], Tensors], defects: Defects
) -> None:
    config, tensors = good
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            changed = tensor.clone()
            changed.view(-1)[-1] = number
            assert f"{name} has NaN or infinite" in defects.error(config, {**tensors, name: changed})


@pytest.mark.parametrize(
    "key", ["hidden_size", "intermediate_size", "num_attention_heads", "rms_norm_eps", "vocab_size"]
)
def test_a_config_key_that_is_needed_and_not_there_is_named(
    key: str, good: tuple[dict[str, Any], Tensors], defects: Defects
) -> None:
    config, tensors = good
    for where in (config, config.get("transformer_layer_config", {})):
        where.pop(key, None)
    assert f"{key} is missing" in defects.error(config, tensors)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"vocab_size": 300}, "vocab_size is 300"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"num_hidden_layers": 2}, "num_hidden_layers 2"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"kv_lora_rank": 512}, "kv_lora_rank"),
        ({"n_routed_experts": 8}, "n_routed_experts"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"sliding_window": 128}, "sliding_window=128"),
        ({"layer_types": ["sliding_attention"]}, "sliding_attention"),
        ({"is_causal": False}, "non-causal"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"model_type": "qwen3"}, "model_type 'qwen3'"),
        ({"model_type": "step3p5"}, "model_type 'step3p5'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "unheard", "factor": 2.0}}, "unheard"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3]}}, "mrope_section"),
    ],
    ids=str,
)
@pytest.mark.parametrize("save", [save_eagle1_head, save_eagle3_head])
def test_a_config_that_is_not_served_names_the_key(
    save: Any, change: dict[str, Any], named: str, tmp_path: Path, target_dir: Path, defects: Defects
) -> None:
    config, tensors = load_head(save(tmp_path / "good", target_dir=target_dir))
    assert named in defects.error({**config, **change}, tensors)


IDS_KEY = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({IDS_KEY: [0, 1, 7]}, IDS_KEY),
        ({IDS_KEY: [-1, 1, 2]}, IDS_KEY),
        ({IDS_KEY: None, "eagle_config": {IDS_KEY: [0, 1, 6]}}, IDS_KEY),
        ({IDS_KEY: None, "eagle_config": {IDS_KEY: [-2, 1, 5]}}, IDS_KEY),
        ({IDS_KEY: [1, 2, 3], "eagle_config": {IDS_KEY: [1, 2, 3]}}, "disagree"),
        ({"num_aux_hidden_states": 4}, "num_aux_hidden_states is 4"),
        ({IDS_KEY: None, "num_aux_hidden_states": 4}, "num_aux_hidden_states is 4"),
        ({IDS_KEY: [0, 1]}, "fc.weight"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
        ({"target_hidden_size": 32}, "target_hidden_size is 32"),
        ({"draft_vocab_size": 47}, "d2t"),
        ({"draft_vocab_size": 300}, "draft_vocab_size 300"),
        ({"norm_before_fc": True}, "input_norm.weight"),
        ({"fc_norm": True}, "fc_norm.0.weight"),
        ({"norm_output": "yes"}, "norm_output is 'yes'"),
        ({"attention_bias": True}, "self_attn.q_proj.bias"),
        ({"bias": True}, "fc.bias"),
        ({"speculators_model_type": "eagle"}, "speculators_model_type 'eagle'"),
        ({"speculators_model_type": "eagle3", "speculators_config": {"algorithm": "mtp"}}, "algorithm"),
        ({"eagle_config": []}, "eagle_config is []"),
    ],
    ids=str,
)
def test_an_eagle3_config_that_does_not_fit_names_the_key(
    change: dict[str, Any], named: str, tmp_path: Path, target_dir: Path, defects: Defects
) -> None:
    config, tensors = load_head(save_eagle3_head(tmp_path / "good", target_dir=target_dir))
    assert named in defects.error({**config, **change}, tensors)


def test_the_default_layers_must_be_in_the_target(
    tmp_path: Path, target_dir: Path, last_token_model_dir: Path, last_token_target: TargetModel
) -> None:
    """The last captured layer is n - 3 by default, which a target of n = 2 layers does not have."""
    directory = save_eagle3_head(tmp_path, target_dir=last_token_model_dir, captured_layers=None)
    with pytest.raises(DraftMismatch, match=r"\[2, 1, -1\] are not all in a target of 2 layers"):
        load_draft(directory, target=last_token_target, device="cpu", dtype="float32")


def test_d2t_and_t2d_must_be_sound(tmp_path: Path, target_dir: Path, defects: Defects) -> None:
    config, tensors = load_head(save_eagle3_head(tmp_path / "good", target_dir=target_dir, draft_vocab_size=48))
    ids = tensors["t2d"].nonzero().flatten()
    steps = torch.arange(48)
    swapped = ids.clone()
    swapped[[3, 4]] = ids[[4, 3]]
    twice = ids.clone()
    twice[4] = ids[3]
    inverted = ~tensors["t2d"]
    for changed, named in (
        ({"d2t": swapped - steps}, "d2t: the target ids i + d2t[i] are not strictly ascending"),
        ({"d2t": twice - steps}, "not strictly ascending"),
        ({"d2t": tensors["d2t"] + 268}, "d2t leads outside the target's 268 ids"),
        ({"d2t": tensors["d2t"] - 268}, "d2t leads outside"),
        ({"d2t": torch.zeros(48, dtype=torch.int64)}, "t2d marks other target ids"),
        ({"d2t": ids}, "d2t"),
        ({"t2d": inverted}, "t2d marks other target ids"),
    ):
        assert named in defects.error(config, {**tensors, **changed})


@pytest.mark.parametrize("draft_vocab_size", [48, 267])
def test_a_missing_lm_head_is_an_error(
    draft_vocab_size: int, tmp_path: Path, target_dir: Path, defects: Defects
) -> None:
    good = save_eagle3_head(
        tmp_path / "good", target_dir=target_dir, own_lm_head=False, draft_vocab_size=draft_vocab_size
    )
    assert "lm_head.weight is missing" in defects.error(*load_head(good))


def test_a_head_of_one_format_does_not_pass_as_one_of_another(
    tmp_path: Path, target_dir: Path, defects: Defects
) -> None:
    first, first_tensors = load_head(save_eagle1_head(tmp_path / "1", target_dir=target_dir, fc_bias=False))
    third, third_tensors = load_head(save_eagle3_head(tmp_path / "3", target_dir=target_dir, draft_vocab_size=None))
    for config, tensors, named in (
        (first, third_tensors, r"fc\.weight is \[64, 192\].*an EAGLE-1 head.*\[64, 128\]"),
        (third, first_tensors, r"fc\.weight is \[64, 128\].*an EAGLE-3 head.*\[64, 192\]"),
    ):
        assert re.search(named, defects.error(config, tensors))


def test_a_full_vocabulary_with_offsets_is_not_full(tmp_path: Path, target_dir: Path, defects: Defects) -> None:
    config, tensors = load_head(save_eagle3_head(tmp_path / "good", target_dir=target_dir, draft_vocab_size=None))
    offsets = torch.zeros(268, dtype=torch.int64)
    offsets[-1] = 1
    assert "d2t" in defects.error(config, {**tensors, "d2t": offsets})


@pytest.mark.parametrize("draft_vocab_size", [None, 48])
def test_a_head_of_another_width_needs_tables_of_its_own(
    draft_vocab_size: int | None, tmp_path: Path, target_dir: Path, defects: Defects
) -> None:
    config, tensors = load_head(
        save_eagle3_head(
            tmp_path / "good",
            target_dir=target_dir,
            hidden_size=32,
            own_embedding=True,
            draft_vocab_size=draft_vocab_size,
        )
    )
    assert "embed_tokens.weight is missing" in defects.error(config, without(tensors, ["embed_tokens.weight"]))
    assert "lm_head.weight is missing" in defects.error(config, without(tensors, ["lm_head.weight"]))


@pytest.mark.parametrize("layout", ["mimo", "mimo_v2", "nextn"])
def test_mtp_layers_must_all_be_there_and_no_others(
    layout: Any, tmp_path: Path, target_dir: Path, defects: Defects
) -> None:
    config, tensors = load_head(save_mtp_head(tmp_path / "good", target_dir=target_dir, layout=layout, num_layers=2))
    assert "num_nextn_predict_layers" in config
    message = defects.error({**config, "num_nextn_predict_layers": 3}, tensors)
    assert "num_nextn_predict_layers 3" in message if layout == "mimo" else "is missing" in message
    if layout != "mimo":
        assert "not known" in defects.error({**config, "num_nextn_predict_layers": 1}, tensors)


def test_an_mtp_head_of_another_width_is_refused(tmp_path: Path, target_dir: Path, defects: Defects) -> None:
    config, tensors = load_head(save_mtp_head(tmp_path / "good", target_dir=target_dir, layout="nextn"))
    assert "hidden_size is 128" in defects.error({**config, "hidden_size": 128}, tensors)


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({}, "config.json"),
        ({"config.json": "{"}, "config.json"),
        ({"config.json": "[]"}, "config.json is not an object"),
        ({"config.json": "{}"}, "no .safetensors file"),
        ({"config.json": "{}", "model.safetensors": "not tensors"}, "model.safetensors"),
    ],
    ids=str,
)
def test_a_directory_that_holds_no_head_is_named(files: dict[str, str], named: str, tmp_path: Path, load: Load) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(DraftMismatch, match=re.escape(str(tmp_path))) as raised:
        load(tmp_path)
    assert named in str(raised.value)


def test_a_tensor_in_two_files_is_named(tmp_path: Path, target_dir: Path, load: Load) -> None:
    directory = save_eagle3_head(tmp_path, target_dir=target_dir)
    (directory / "more.safetensors").write_bytes((directory / "model.safetensors").read_bytes())
    with pytest.raises(DraftMismatch, match=r"d2t is in model\.safetensors and in more\.safetensors"):
        load(directory)
