"""Tests that output under a grammar on CUDA, in float32 without TF32, is that of the masked distribution: with and
without drafts, overlap and a cached prefix, alone and beside rows without a grammar.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from common.device.factory import open_device
from common.draft.head import DraftHead
from tests.gpu.drafted import load_drafted
from tests.support.drafted import SHAPES, Counts
from tests.support.languages import LANGUAGES, LanguageMatcher, submit_all
from tests.support.models import END_ID
from tests.support.pair import InProcessPair, PairOptions

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(
    ("family", "num_layers", "shape"), [("eagle3", 1, "chain-4"), ("eagle3", 1, "tree-4x3-15"), ("nextn", 5, "chain-5")]
)
def test_output_is_the_same_in_every_mode(
    family: str, num_layers: int, shape: str, temperature: float, tmp_path: Path
) -> None:
    _, target, head = load_drafted(tmp_path, family, num_layers, context_weight=0.05)
    options = PairOptions(**SHAPES[shape])

    def outputs(options: PairOptions, draft: DraftHead | None, *, at_once: bool) -> InProcessPair:
        pair = InProcessPair(
            target,
            new_device=lambda: open_device("cuda", num_threads=1),
            draft=draft,
            options=options,
            new_matcher=LanguageMatcher.of,
        )
        try:
            submit_all(pair, temperature=temperature, at_once=at_once, min_tokens=30)
            pair.settle()
        finally:
            pair.close()
        return pair

    cold = replace(options, prefill_caches=False, decode_caches=False, overlap=False, replays_forwards=False)
    plain = outputs(cold, None, at_once=False)
    modes = {
        "at once": outputs(options, head, at_once=True),
        "alone": outputs(options, head, at_once=False),
        "without overlap": outputs(replace(options, overlap=False), head, at_once=True),
        "local": outputs(replace(options, local_prefill_tokens=40), head, at_once=True),
        "without drafts": outputs(options, None, at_once=True),
    }
    bound = [name for name in plain.outcomes if name.endswith("bound")]
    for name in bound:
        output_ids = [token_id for token_id in plain.outcomes[name].token_ids if token_id != END_ID]
        language = LANGUAGES[int(name.split()[0]) % len(LANGUAGES)]
        for place, token_id in enumerate(output_ids):
            assert token_id in language.allowed_after(output_ids[:place]), name
    for mode, pair in modes.items():
        for name, outcome in plain.outcomes.items():
            assert pair.outcomes[name].token_ids == outcome.token_ids, (mode, name)
    counts = Counts.of(modes["at once"].outcomes[name] for name in bound)
    assert counts.num_accepted > 0 and counts.num_rejected > 20
