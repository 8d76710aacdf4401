"""Tests that the trained head equals the served one: the exported head computes the same over the paged pool as the
trainer's module.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, GraniteConfig, GraniteForCausalLM, PhiConfig, PhiForCausalLM

from common.errors import ConfigError, DraftMismatch, UnsupportedModel
from common.model.target import TargetModel
from tests.draft.paged_draft import PagedDraft
from tests.support.loading import load_draft
from tests.support.loading import load_target as load_served
from tests.support.models import save_tiny_model
from training import head_files
from training.head import TrainableHead, initialize
from training.head_files import export_head, head_config, head_spec
from training.target import FrozenTarget, load_target
from training.vocabulary import DraftVocabulary

_NUM_STEPS, _LENGTH = 4, 10


@pytest.fixture(scope="module", params=["llama", "qwen3", "phi3"])
def architecture_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose head dimension is not hidden size / heads (Qwen3), or whose weights are fused (Phi-3)."""
    return save_tiny_model(tmp_path_factory.mktemp("target"), request.param, num_hidden_layers=6)


@pytest.fixture(scope="module")
def trained(architecture_dir: Path) -> FrozenTarget:
    return load_target(architecture_dir, device="cpu")


@pytest.fixture(scope="module")
def served(architecture_dir: Path) -> TargetModel:
    return load_served(architecture_dir, device="cpu", dtype="float32")


def _head(target: FrozenTarget, vocabulary: DraftVocabulary) -> tuple[TrainableHead, dict[str, Any]]:
    """Returns a head with random weights that bfloat16 represents exactly, so that the export loses nothing."""
    config = head_config(target.config, draft_vocab=vocabulary.token_ids.size, layers=None)
    spec = head_spec(config, target.config, target.directory)
    head = TrainableHead(spec, max_length=_LENGTH + _NUM_STEPS, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in head.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            value = 1 + 0.2 * noise if weight.dim() == 1 else noise * weight.shape[1] ** -0.5
            weight.copy_(value.to(torch.bfloat16))
    return head, config


def test_every_step_of_every_chain_is_what_the_services_compute(
    tmp_path: Path, trained: FrozenTarget, served: TargetModel
) -> None:
    generator = torch.Generator().manual_seed(2)
    token_ids = torch.randperm(served.vocab_size, generator=generator)[:40].sort().values
    vocabulary = DraftVocabulary(token_ids.numpy(), served.vocab_size)
    head, config = _head(trained, vocabulary)
    export_head(tmp_path, config, head, vocabulary)
    draft = load_draft(tmp_path, target=served, device="cpu", dtype="float32")
    assert draft.capture.layers == (2, 3, 3)
    assert torch.equal(draft.token_ids, token_ids)

    tokens = torch.randint(0, served.vocab_size, (_LENGTH + _NUM_STEPS,), generator=generator)
    aux = torch.randn(_LENGTH, 3 * served.hidden_size, generator=generator)
    embedding = served.input_embeddings
    with torch.no_grad():
        steps = list(
            head.chain(aux[None], lambda step: embedding(tokens[None, 1 + step : 1 + step + _LENGTH]), _NUM_STEPS)
        )
        trained_logits = torch.stack([head.logits(hidden[0]) for hidden in steps])

    for row in range(_LENGTH):
        torch.testing.assert_close(
            trained_logits[:, row], _served_chain(draft, tokens, aux[: row + 1]), rtol=1e-3, atol=1e-4
        )


def _served_chain(draft: Any, tokens: Tensor, aux: Tensor) -> Tensor:
    """Returns the served head's logits [steps, Vd]. It extends over a prompt, whose last row drafts, and then drafts a
    chain in which it is fed the following tokens.
    """
    paged, length = PagedDraft(draft, num_rows=1), aux.shape[0]
    hidden = paged.extend({1: (tokens[1 : 1 + length].tolist(), draft.fuse(aux))})[1][-1:]
    logits = [draft.logits(hidden)]
    for step in range(1, _NUM_STEPS):
        hidden = paged.decode({1: (int(tokens[length + step]), hidden)})[1]
        logits.append(draft.logits(hidden))
    return torch.cat(logits)


def test_it_starts_from_the_target_s_last_layer_where_that_is_llama_s(trained: FrozenTarget) -> None:
    vocabulary = DraftVocabulary(torch.arange(3, 43).numpy(), trained.config.vocab_size)
    head, _ = _head(trained, vocabulary)
    fitted = initialize(head, trained, torch.from_numpy(vocabulary.token_ids), seed=0)
    assert fitted == (trained.config.model_type != "phi3")
    assert torch.equal(head.lm_head.weight, trained.output_rows(torch.arange(3, 43)).float())
    weights = trained.model.state_dict()
    if fitted:
        assert torch.equal(head.norm.weight, weights["model.norm.weight"].float())
        attn, size = head.midlayer.self_attn, trained.config.hidden_size
        for name in ("q_proj", "k_proj", "v_proj"):
            own = getattr(attn, name).weight[:, size:]
            assert torch.equal(own, weights[f"model.layers.5.self_attn.{name}.weight"].float())
        assert torch.equal(head.midlayer.mlp.down_proj.weight, weights["model.layers.5.mlp.down_proj.weight"].float())
        assert (head.fc.weight[:, 2 * size :] - torch.eye(size)).abs().max() < 0.05


def test_its_positions_turn_as_the_target_s(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 1024
    config = AutoConfig.from_pretrained(save_tiny_model(tmp_path, "llama", num_hidden_layers=6, rope_parameters=rope))
    spec = head_spec(head_config(config, draft_vocab=8, layers=None), config, tmp_path)
    assert spec.block.rope.rope_parameters == rope


def test_an_export_replaces_an_older_one_and_keeps_nothing_else(tmp_path: Path, target: FrozenTarget) -> None:
    vocabulary = DraftVocabulary(torch.arange(5, 45).numpy(), target.config.vocab_size)
    head, config = _head(target, vocabulary)
    sizes = [export_head(tmp_path, config, head, vocabulary) for _ in range(2)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert sizes == [(tmp_path / "model.safetensors").stat().st_size] * 2


def test_a_disk_that_an_export_fills_is_named(
    tmp_path: Path, target: FrozenTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    vocabulary = DraftVocabulary(torch.arange(5, 45).numpy(), target.config.vocab_size)
    head, config = _head(target, vocabulary)
    monkeypatch.setattr(head_files, "save_file", full)
    with pytest.raises(OSError, match="No space left on device"):
        export_head(tmp_path, config, head, vocabulary)


@pytest.mark.parametrize(
    ("layers", "error", "message"),
    [
        ((0, 2, 6), ConfigError, r"layers: \[0, 2, 6\] are not all below 6"),
        ((0, 2, 9), DraftMismatch, "eagle_aux_hidden_state_layer_ids"),
    ],
)
def test_layers_that_the_target_has_not_are_refused(
    target: FrozenTarget, layers: tuple[int, ...], error: type[Exception], message: str
) -> None:
    config = head_config(target.config, draft_vocab=8, layers=layers)
    with pytest.raises(error, match=message):
        head_spec(config, target.config, target.directory)


def test_the_streams_of_other_layers_can_be_chosen(target: FrozenTarget) -> None:
    config = head_config(target.config, draft_vocab=8, layers=(0, 5))
    assert head_spec(config, target.config, target.directory).captured_layers == (0, 5)


def test_a_target_that_scales_its_logits_is_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
    torch.manual_seed(0)
    GraniteForCausalLM(
        GraniteConfig(vocab_size=50, num_key_value_heads=2, logits_scaling=8.0, **sizes)
    ).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="logits that are not the output layer's"):
        load_target(tmp_path, device="cpu")


def test_a_target_without_what_a_llama_layer_has_is_refused_by_name() -> None:
    config = SimpleNamespace(model_type="gpt2", num_attention_heads=2, hidden_size=32)
    with pytest.raises(UnsupportedModel, match="intermediate_size"):
        head_config(config, draft_vocab=40, layers=None)


def test_a_target_whose_output_layer_has_a_bias_is_refused(tmp_path: Path, target: FrozenTarget) -> None:
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    PhiForCausalLM(PhiConfig(num_attention_heads=2, **shape)).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="an output layer with a bias"):
        load_target(tmp_path, device="cpu")
