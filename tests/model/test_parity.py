"""Tests that a target model over the paged pool computes the same as transformers, and reads only its own rows' KV."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from common.model.target import TargetModel
from tests.model.conftest import Reference
from tests.model.paged_model import PagedModel
from tests.support.models import ARCHITECTURES, SPECIAL_TOKENS, VOCAB_SIZE

Targets = Callable[[str], TargetModel]
References = Callable[[str], Reference]

QUICK = ("llama", "phi3, windows", "mixtral")
each_architecture = pytest.mark.parametrize(
    "architecture", [pytest.param(each, marks=() if each in QUICK else pytest.mark.thorough) for each in ARCHITECTURES]
)


def prompt_of(num_tokens: int, *, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + num_tokens)
    return torch.randint(len(SPECIAL_TOKENS), VOCAB_SIZE, (num_tokens,), generator=generator).tolist()


@each_architecture
@pytest.mark.parametrize("chunk", [1, 16, 41], ids=lambda chunk: f"chunk{chunk}")
def test_a_prompt_in_chunks_gives_every_token_the_reference_logits(
    architecture: str, chunk: int, tiny_target: Targets, reference: References
) -> None:
    prompt = prompt_of(41)
    paged = PagedModel(tiny_target(architecture), num_rows=1, scattered=chunk != 16)  # else, slots follow each other
    logits = []
    for start in range(0, len(prompt), chunk):
        tokens = prompt[start : start + chunk]
        logits.append(paged.extend({1: tokens}, logits_rows=range(len(tokens))))
    torch.testing.assert_close(torch.cat(logits), reference(architecture).logits(prompt), atol=1e-4, rtol=1e-4)


@each_architecture
def test_rows_that_share_forwards_do_not_see_each_other(
    architecture: str, tiny_target: Targets, reference: References
) -> None:
    prompts = {3: prompt_of(37, seed=1), 1: prompt_of(5, seed=2), 4: prompt_of(18, seed=3), 2: prompt_of(1, seed=4)}
    paged = PagedModel(tiny_target(architecture), num_rows=4)
    outputs: dict[int, list[int]] = {}

    def note(rows: list[int], logits: torch.Tensor) -> None:
        for row, token in zip(rows, logits.argmax(-1).tolist(), strict=True):
            outputs.setdefault(row, []).append(token)

    paged.extend({3: prompts[3][:16]})
    ending = {1: prompts[1], 4: prompts[4], 2: prompts[2]}
    logits = paged.extend({3: prompts[3][16:32], **ending})
    note(list(ending), logits[1:])
    note([1, 2], paged.decode({1: outputs[1][-1], 2: outputs[2][-1]}))
    note([3], paged.extend({3: prompts[3][32:]}))
    for step in range(30):
        rows = [4, 1, 3, 2] if step % 2 else [2, 3, 4]
        note(rows, paged.decode({row: outputs[row][-1] for row in rows}))

    expected = {row: reference(architecture).generate(prompts[row], len(outputs[row])) for row in outputs}
    assert outputs == expected


@pytest.mark.parametrize("tokens", [{1: 7}, {1: 7, 2: 8}], ids=["one_row", "two_rows"])
def test_a_longer_bound_than_the_longest_row_changes_nothing(tokens: dict[int, int], tiny_target: Targets) -> None:
    exact, bounded = (PagedModel(tiny_target("llama"), num_rows=2) for _ in range(2))
    for paged in (exact, bounded):
        paged.extend({1: prompt_of(9), 2: prompt_of(4)})
    torch.testing.assert_close(exact.decode(tokens), bounded.decode(tokens, max_seq_len=50))


def test_a_forward_without_wanted_logits_still_writes_its_kv(tiny_target: Targets, reference: References) -> None:
    prompt = prompt_of(12)
    paged = PagedModel(tiny_target("llama"), num_rows=1)
    assert paged.extend({1: prompt[:8]}, logits_rows=()).shape == (0, VOCAB_SIZE)
    logits = paged.extend({1: prompt[8:]})
    torch.testing.assert_close(logits[0], reference("llama").logits(prompt)[-1], atol=1e-4, rtol=1e-4)


def test_logits_come_for_the_wanted_tokens_in_the_wanted_order(tiny_target: Targets, reference: References) -> None:
    prompt = prompt_of(10)
    logits = PagedModel(tiny_target("qwen2"), num_rows=1).extend({1: prompt}, logits_rows=(7, 2))
    torch.testing.assert_close(logits, reference("qwen2").logits(prompt)[[7, 2]], atol=1e-4, rtol=1e-4)
