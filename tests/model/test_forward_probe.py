"""A model that does not compute the same however a prompt is cut is refused at load, as one whose forward fails is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from common.errors import UnsupportedModel
from common.model.loader import load_target, target_of
from common.model.target import TargetModel
from common.model.traits import PROBE_NAME
from tests.model.paged_model import PagedModel

SIZES: dict[str, Any] = {"vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER: dict[str, Any] = {
    **SIZES,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "decoder_attention_heads": 2,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 128,
    "is_encoder_decoder": False,
    "is_decoder": True,
}
ENCODER: dict[str, Any] = {
    **SIZES,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 130,
    "is_decoder": True,
}
WITHOUT_POSITIONS: dict[str, Any] = {
    "mbart": hf.MBartConfig(**DECODER),
    "bart": hf.BartConfig(**DECODER),
    "marian": hf.MarianConfig(**{**DECODER, "decoder_start_token_id": 1}),
    "pegasus": hf.PegasusConfig(**DECODER),
    "blenderbot": hf.BlenderbotConfig(**DECODER),
    "blenderbot-small": hf.BlenderbotSmallConfig(**DECODER),
    "roberta": hf.RobertaConfig(**ENCODER),
    "xlm-roberta": hf.XLMRobertaConfig(**ENCODER),
    "camembert": hf.CamembertConfig(**ENCODER),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", WITHOUT_POSITIONS)
def test_a_model_with_positions_of_its_own_is_refused(name: str, dtype: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(WITHOUT_POSITIONS[name]).save_pretrained(str(tmp_path))
    with pytest.raises(UnsupportedModel, match=r"(side by side|a later part|single tokens).* (keys|values) of layer 0"):
        load_target(tmp_path, device="cpu", dtype=dtype)


def llama(**changes: Any) -> Any:
    """With weights as small as those that training begins with: positions hardly show in its logits."""
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        **{
            **SIZES,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "initializer_range": 1e-3,
            **changes,
        }
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation=PROBE_NAME)


def served(model: Any, dtype: str = "float32") -> TargetModel:
    return target_of(model.to(getattr(torch, dtype)), name="tiny", device="cpu", dtype=dtype)


def positions_from_nought(_module: nn.Module, args: Any, keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    positions = keywords["position_ids"]
    return args, {**keywords, "position_ids": positions - positions.min()}


def positions_by_place(_module: nn.Module, args: Any, keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    positions: Tensor = keywords["position_ids"]
    return args, {**keywords, "position_ids": positions[:, :1] + torch.arange(positions.shape[1])}


def one_position_late(_module: nn.Module, args: Any, keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    positions: Tensor = keywords["position_ids"]
    return args, {**keywords, "position_ids": positions + (positions > 0).long()}


WRONG_POSITIONS: dict[str, tuple[Callable[..., Any], str]] = {
    "that-restart-in-each-forward": (positions_from_nought, "a later part of a prompt"),
    "counted-over-all-rows": (positions_by_place, "prompts side by side"),
    "one-too-far": (one_position_late, "prompts side by side"),
}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("positions", WRONG_POSITIONS)
def test_wrong_positions_are_seen_however_small_the_weights_are(positions: str, dtype: str) -> None:
    change, where = WRONG_POSITIONS[positions]
    model = llama()

    def when_told(module: nn.Module, args: Any, keywords: dict[str, Any]) -> Any:
        return change(module, args, keywords) if "attention_plan" in keywords else None

    model.model.register_forward_pre_hook(when_told, with_kwargs=True)
    with pytest.raises(UnsupportedModel, match=where):
        served(model, dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("initializer_range", [1e-4, 0.3])
def test_rounding_refuses_nothing(initializer_range: float, dtype: str) -> None:
    assert served(llama(initializer_range=initializer_range, num_hidden_layers=12), dtype).num_layers == 12


def test_tokens_that_read_their_neighbours_are_seen() -> None:
    model = llama(initializer_range=0.1)

    def shifted(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        return output + output.roll(1, dims=1)

    model.model.layers[0].mlp.register_forward_hook(shifted)
    with pytest.raises(UnsupportedModel, match="prompts side by side"):
        served(model)


def test_a_forward_that_fails_when_it_decodes_is_seen() -> None:
    model = llama()

    def fail(_module: nn.Module, _args: Any, keywords: dict[str, Any]) -> None:
        if keywords["input_ids"].shape[1] == 2:
            raise IndexError("two tokens\nare too many")

    model.model.register_forward_pre_hook(fail, with_kwargs=True)
    with pytest.raises(UnsupportedModel, match="fails in a forward of single tokens: two tokens are too many"):
        served(model)


def test_a_table_of_positions_that_ends_before_the_context_is_seen() -> None:
    config = hf.GPT2Config(**SIZES, n_embd=32, n_layer=2, n_head=2, n_positions=64)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=PROBE_NAME)
    model.config.n_positions = 65
    with pytest.raises(UnsupportedModel, match=r"max_position_embeddings is 65, and transformer\.wpe has 64 rows"):
        served(model)


def test_a_model_that_reads_the_weight_of_a_layer_is_served(tmp_path: Path) -> None:
    config = hf.HunYuanMoEV1Config(
        **SIZES,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=4,
        moe_topk=2,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(str(tmp_path))
    logits = PagedModel(load_target(tmp_path, device="cpu", dtype="float32"), num_rows=1).extend({1: [9, 40, 41, 5]})
    expected = model(torch.tensor([[9, 40, 41, 5]])).logits[0, -1:]
    torch.testing.assert_close(logits, expected.detach(), atol=1e-5, rtol=1e-4)
