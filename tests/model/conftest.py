from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM


class Reference:
    """The reference: an unchanged transformers model, one prompt at a time, with its own attention and cache."""

    def __init__(self, directory: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            str(directory), dtype=torch.float32, attn_implementation="eager"
        )

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Returns the logits of all positions, [len(tokens), vocab]."""
        logits: Tensor = self._model(torch.tensor([list(tokens)]), use_cache=False).logits
        return logits[0]

    @torch.inference_mode()
    def generate(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Returns the greedy tokens after the prompt. EOS does not end the output."""
        ids = torch.tensor([list(prompt)])
        output = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, eos_token_id=None
        )
        return output[0, len(prompt) :].tolist()


@pytest.fixture(scope="session")
def reference(tiny_model_dir: Callable[[str], Path]) -> Callable[[str], Reference]:
    loaded: dict[str, Reference] = {}

    def load(architecture: str) -> Reference:
        if architecture not in loaded:
            loaded[architecture] = Reference(tiny_model_dir(architecture))
        return loaded[architecture]

    return load
