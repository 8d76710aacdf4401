"""Tests that a model is refused at load if its forward fails, or if its result depends on how a prompt is split into
chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.masking_utils import create_sliding_window_causal_mask

from common.errors import UnsupportedModel
from common.model.forward_probe import far_positions
from common.model.loader import target_of
from common.model.target import TargetModel
from common.model.traits import PROBE_NAME
from common.service.cpu_engine import cpu_engine
from tests.model.paged_model import PagedModel
from tests.support.loading import load_target

each_dtype = pytest.mark.parametrize(
    "dtype", ["float32", *(pytest.param(dtype, marks=pytest.mark.thorough) for dtype in ("float16", "bfloat16"))]
)
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
    "bart": hf.BartConfig(**DECODER),
    "marian": hf.MarianConfig(**{**DECODER, "decoder_start_token_id": 1}),
    "pegasus": hf.PegasusConfig(**DECODER),
    "roberta": hf.RobertaConfig(**ENCODER),
}


@each_dtype
@pytest.mark.parametrize("name", WITHOUT_POSITIONS)
def test_a_model_with_positions_of_its_own_is_refused(name: str, dtype: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(WITHOUT_POSITIONS[name]).save_pretrained(str(tmp_path))
    with pytest.raises(UnsupportedModel, match=r"position 16 .* told this position: (queries|keys|values) of layer 0"):
        load_target(tmp_path, device="cpu", dtype=dtype)


def llama(**changes: Any) -> Any:
    """Returns a llama with weights as small as at the start of training, so that positions hardly affect its logits."""
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
    engine = cpu_engine(torch.device("cpu"))
    return target_of(model.to(getattr(torch, dtype)), name="tiny", device="cpu", dtype=dtype, cpu_engine=engine)


def when_served(change: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a hook that applies `change` only where the model is called as Baton calls it."""
    return lambda module, args, keywords: change(module, args, keywords) if "attention_plan" in keywords else None


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


@each_dtype
@pytest.mark.parametrize("positions", WRONG_POSITIONS)
def test_wrong_positions_are_seen_however_small_the_weights_are(positions: str, dtype: str) -> None:
    change, where = WRONG_POSITIONS[positions]
    model = llama()
    model.model.register_forward_pre_hook(when_served(change), with_kwargs=True)
    with pytest.raises(UnsupportedModel, match=where):
        served(model, dtype)


@each_dtype
@pytest.mark.parametrize("initializer_range", [1e-4, 0.3])
def test_rounding_refuses_nothing(initializer_range: float, dtype: str) -> None:
    assert served(llama(initializer_range=initializer_range, num_hidden_layers=12), dtype).num_layers == 12


def test_layers_that_attend_alike_with_keys_of_different_shapes_are_refused() -> None:
    model = llama()
    attention = model.model.layers[1].self_attn
    attention.k_proj, attention.v_proj = (nn.Linear(64, 16, bias=False) for _ in range(2))
    attention.num_key_value_groups = 4
    with pytest.raises(UnsupportedModel, match="different attention shapes"):
        served(model)


def test_tokens_that_read_their_neighbours_are_seen() -> None:
    model = llama(initializer_range=0.1)

    def shifted(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        return output + output.roll(1, dims=1)

    model.model.layers[0].mlp.register_forward_hook(shifted)
    with pytest.raises(UnsupportedModel, match="prompts side by side"):
        served(model)


def test_one_token_of_many_is_seen() -> None:
    model = llama(initializer_range=0.1)

    def change_the_third(_module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output * torch.where(torch.arange(output.shape[-2]) == 2, 1.1, 1.0)[:, None]

    model.model.layers[0].mlp.register_forward_hook(change_the_third)
    with pytest.raises(UnsupportedModel, match=r"side by side .* of layer 1 differ"):
        served(model)


@pytest.mark.parametrize("kept", [0, 3])
def test_a_model_that_keeps_other_logits_than_those_asked_for_is_seen(kept: int) -> None:
    model = llama()

    def keep(_module: nn.Module, args: Any, keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        asked = keywords.get("logits_to_keep")
        return args, {**keywords, **({"logits_to_keep": kept} if isinstance(asked, Tensor) else {})}

    model.register_forward_pre_hook(keep, with_kwargs=True)
    with pytest.raises(UnsupportedModel, match=r"side by side.*: logits"):
        served(model)


# ---- positions far into a context ------------------------------------------------------------------------------------

FAR: dict[str, Any] = {"max_position_embeddings": 4096, "initializer_range": 0.1}


def kept_below(bound: int) -> Callable[..., Any]:
    def change(_module: nn.Module, args: Any, keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**keywords, "position_ids": keywords["position_ids"].clamp(max=bound - 1)}

    return change


def halved_when_one_is_far(_module: nn.Module, args: Any, keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    positions: Tensor = keywords["position_ids"]
    return args, {**keywords, "position_ids": positions / 2 if positions.max() >= 2048 else positions}


def wrong_at(position: int) -> Callable[..., Any]:
    def change(_module: nn.Module, args: Any, keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        positions: Tensor = keywords["position_ids"]
        return args, {**keywords, "position_ids": torch.where(positions == position, 0, positions)}

    return change


@each_dtype
@pytest.mark.parametrize(
    ("change", "fields", "where"),
    [
        (kept_below(4000), {}, "one by one|side by side"),
        (wrong_at(4095), {}, "one by one"),
        (wrong_at(512), {"local_window": 512}, "side by side|one by one"),
        (
            wrong_at(1024),
            {"rope_parameters": {**hf.LlamaConfig().rope_parameters, "old_length": 1024}},
            "one by one|side",
        ),
    ],
)
def test_a_model_that_is_served_with_other_positions_far_away_is_refused(
    change: Callable[..., Any], fields: dict[str, Any], where: str, dtype: str
) -> None:
    model = llama(**FAR, **fields)
    model.model.register_forward_pre_hook(when_served(change), with_kwargs=True)
    with pytest.raises(UnsupportedModel, match=rf"tokens at positions 0, 16, .*({where}).* differ"):
        served(model, dtype)


@each_dtype
def test_a_rotation_that_depends_on_what_shares_the_forward_is_refused(dtype: str) -> None:
    model = llama(**FAR)
    model.model.rotary_emb.register_forward_pre_hook(halved_when_one_is_far, with_kwargs=True)
    with pytest.raises(UnsupportedModel, match=r"tokens at positions 0, 16, 4092 .* differ"):
        served(model, dtype)


@each_dtype
def test_attention_that_grows_with_the_length_that_a_cache_tells_is_refused(dtype: str, tmp_path: Path) -> None:
    """Llama 4's attention asks transformers' cache how many tokens came before, but our pool is no such cache."""
    config = hf.Llama4TextConfig(
        **SIZES,
        hidden_size=32,
        intermediate_size=32,
        intermediate_size_mlp=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_local_experts=2,
        max_position_embeddings=256,
        attention_chunk_size=None,
        layer_types=["full_attention"] * 4,
        floor_scale=64,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(str(tmp_path))
    with pytest.raises(UnsupportedModel, match=r"at position 62 .* told this position: queries of layer 3"):
        load_target(tmp_path, device="cpu", dtype=dtype)


@pytest.mark.parametrize("window", [3000, 100])
def test_a_window_that_only_a_mask_shows_is_refused(window: int) -> None:
    model = llama(**FAR)

    def look_back(_module: nn.Module, args: Any, keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        mask = create_sliding_window_causal_mask(
            config=SlidingConfig(model.config, window),
            inputs_embeds=args[0],
            attention_mask=None,
            cache=keywords.get("cache"),
        )
        return args, {**keywords, "attention_mask": mask}

    for layer in model.model.layers:
        layer.register_forward_pre_hook(look_back, with_kwargs=True)
    with pytest.raises(UnsupportedModel, match="an attention mask of the model's own"):
        served(model)


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"sliding_window": 100}, "a sliding window that its mask lacks"),
        ({"sliding_window": 0}, "a sliding window of 0"),
        ({"softcap": 0.0}, r"attention with a soft cap of 0\.0"),
    ],
    ids=str,
)
def test_attention_that_is_told_what_cannot_be_is_refused(told: dict[str, Any], why: str) -> None:
    model = llama(**FAR)
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda _module, args, keywords: (args, {**keywords, **told}), with_kwargs=True)
    with pytest.raises(UnsupportedModel, match=why):
        served(model)


class SlidingConfig:
    """A model's config with a sliding window, in the field that transformers' code for masks reads."""

    def __init__(self, config: Any, window: int) -> None:
        self._config, self.sliding_window = config, window

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


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


def test_a_number_of_layers_is_no_limit_of_positions() -> None:
    config = hf.Qwen2Config(
        max_position_embeddings=32768, max_window_layers=21, use_sliding_window=True, sliding_window=4096
    )
    assert far_positions(config) == [16, 4094, 32764]
