"""The output of transformers' `generate` for the parity prompts, and a comparison of our output with it.

A divergence counts as a tie only if the reference's two best logits there are closer than TIE_GAP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.parity.prompts import ParityPrompt

TIE_GAP = 1e-4
MAX_TIES_PER_TOKEN = 1 / 5000
MAX_PADDED = 2
"""The longest prompt of a batch may have at most this many times the tokens of the shortest."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first index at which an output differs from the reference. If it is a tie, the rest of that output cannot be
    compared.
    """

    name: str
    place: int
    wanted: int
    got: int | None
    gap: float

    @property
    def is_tie(self) -> bool:
        return self.got is not None and self.gap < TIE_GAP

    def __str__(self) -> str:
        kind = "tie" if self.is_tie else "DIVERGENCE"
        return (
            f"{kind}: {self.name}, token {self.place}: {self.wanted} wanted, {self.got} got, top-2 gap {self.gap:.2e}"
        )


class Reference:
    """The greedy float32 output of `generate` for one model."""

    def __init__(self, model_dir: Path, *, new_tokens: int) -> None:
        self.new_tokens = new_tokens
        self.model_dir = model_dir
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)
        self._outputs: dict[tuple[int, ...], list[int]] = {}

    @cached_property
    def _model(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.model_dir, dtype=torch.float32).eval()

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        ids = self._model.generation_config.eos_token_id
        return tuple(ids) if isinstance(ids, list) else (ids,)

    def prompt_ids(self, prompt: ParityPrompt) -> list[int]:
        """Returns the prompt's tokens. Where a model has no chat template, a chat's text is the prompt."""
        if not prompt.is_chat or self._tokenizer.chat_template is None:
            return list(self._tokenizer(prompt.text)["input_ids"])
        messages = [{"role": "user", "content": prompt.text}]
        return list(self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))

    def tokens(self, prompt_ids: Sequence[int]) -> list[int]:
        """Returns `generate`'s tokens for this prompt. They are computed now, for this prompt alone, unless `compute`
        has computed them.
        """
        self.compute([prompt_ids])
        return self._outputs[tuple(prompt_ids)]

    def compute(self, prompts: Sequence[Sequence[int]]) -> None:
        """Computes `generate`'s tokens for the prompts that are not known yet. Prompts of similar length form one
        batch, padded on the left.
        """
        missing = sorted({tuple(ids) for ids in prompts} - self._outputs.keys(), key=len)
        while missing:
            batch = [ids for ids in missing if len(ids) <= MAX_PADDED * len(missing[0])]
            self._generate(batch)
            missing = missing[len(batch) :]

    def _generate(self, batch: Sequence[tuple[int, ...]]) -> None:
        width, padding = max(map(len, batch)), self.eos_token_ids[0]
        outputs = self._model.generate(
            torch.tensor([[padding] * (width - len(ids)) + list(ids) for ids in batch]),
            attention_mask=torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in batch]),
            do_sample=False,
            max_new_tokens=self.new_tokens,
            pad_token_id=padding,
        )
        for ids, output in zip(batch, outputs[:, width:].tolist(), strict=True):
            end = next((place for place, token in enumerate(output) if token in self.eos_token_ids), len(output))
            self._outputs[ids] = output[: end + 1]

    def compare(self, name: str, prompt_ids: Sequence[int], got: Sequence[int]) -> Divergence | None:
        """Returns the first divergence of `got` from the reference, or None if all tokens agree. `name` names the
        prompt.
        """
        wanted = self.tokens(prompt_ids)
        if list(got) == wanted:
            return None
        place = next(
            (i for i, (a, b) in enumerate(zip(wanted, got, strict=False)) if a != b), min(len(wanted), len(got))
        )
        if place >= len(wanted):
            return Divergence(name, place, -1, got[place], float("inf"))
        prefix = torch.tensor([[*prompt_ids, *wanted[:place]]])
        with torch.inference_mode():
            best = self._model(prefix, use_cache=False, logits_to_keep=1).logits[0, -1].topk(2).values
        return Divergence(
            name, place, wanted[place], got[place] if place < len(got) else None, float(best[0] - best[1])
        )
