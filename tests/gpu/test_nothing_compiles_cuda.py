"""Tests that Triton compiles nothing on a device once a pair has started. tests/pair compares the kernel variants that
are used with those compiled; here Triton itself reports what it compiles.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import triton

from common.device.factory import open_device
from common.sampling.params import ResolvedSampling
from decode_service.speculate.depth import AdaptiveDepth
from tests.gpu.drafted import load_drafted
from tests.support.drafted import SAMPLED, SHAPES
from tests.support.pair import InProcessPair, PairOptions

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("replays_forwards", [True, False], ids=["graphs", "no-graphs"])
@pytest.mark.parametrize(
    ("family", "num_layers", "shape"), [("eagle3", 1, "chain-4"), ("eagle3", 1, "tree-4x3-15"), ("nextn", 5, "chain-5")]
)
def test_requests_compile_nothing(
    family: str,
    num_layers: int,
    shape: str,
    replays_forwards: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, target, head = load_drafted(tmp_path, family, num_layers, logits_std=1.5)
    options = PairOptions(decode_rows=7, replays_forwards=replays_forwards, new_depth=AdaptiveDepth, **SHAPES[shape])
    pair = InProcessPair(target, new_device=lambda: open_device("cuda", num_threads=1), draft=head, options=options)
    compiled: list[object] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **told: compiled.append(told["repr"]))
    try:
        for number in range(13):
            parts = list(SAMPLED.values())[number % len(SAMPLED)]
            sampling = ResolvedSampling(
                seed=number, max_tokens=3 + 2 * number, temperature=0.7 if number % 2 else 0.0, **parts
            )
            pair.submit(str(number), [4 + (5 * number + place) % 50 for place in range(1 + 13 * number)], sampling)
        pair.run()
        assert all(outcome.finished for outcome in pair.outcomes.values()) and not compiled
    finally:
        pair.close()
