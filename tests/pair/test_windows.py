"""Tests that layers with a window have slots for it alone, and that this changes no token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from common.sampling.params import ResolvedSampling
from common.wire.handoff import Frame, KvSegment
from tests.support.loading import load_target
from tests.support.models import save_tiny_model
from tests.support.pair import InProcessPair, MakePair, PairOptions
from tests.support.reference import generate_greedily

WINDOW, GROUP = 24, "target_24"
CHUNK_TOKENS = 64
FAMILIES = ["mistral, windows", "gemma3_text", "gemma4_text"]
"""One in which all layers have a window, one in which some have, and one in which these have other heads."""


def greedy(num_tokens: int) -> ResolvedSampling:
    return ResolvedSampling(seed=0, temperature=0.0, max_tokens=num_tokens)


class Watched:
    """The most slots that the rows of both services had for windows, and the bytes that were sent for each group."""

    def __init__(self, pair: InProcessPair) -> None:
        self._pools = {"decode": pair.decode.pool, "prefill": pair.prefill.pool}
        self.most_held = dict.fromkeys(self._pools, 0)
        self.num_bytes: Counter[str] = Counter()
        pair.tamper = self._count

    def _count(self, frame: Frame) -> Sequence[Frame]:
        if isinstance(frame, KvSegment):
            self.num_bytes[frame.layer_group] += frame.num_bytes
        return (frame,)

    def note(self) -> bool:
        for name, pool in self._pools.items():
            self.most_held[name] = max(self.most_held[name], pool.windows[GROUP].counts().running)
        return False


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
def test_slots_and_bytes_of_windows_stay_the_same_while_a_context_grows_to_8000_tokens(
    family: str, make_pair: MakePair, tmp_path: Path
) -> None:
    directory = save_tiny_model(tmp_path / "model", family, max_position_embeddings=8192)
    model = load_target(directory, device="cpu", dtype="float32")
    prompt, num_new = [4 + 37 * place % 250 for place in range(7800)], 200
    options = PairOptions(prefill_tokens=8192, decode_tokens=8192, context_tokens=8192, chunk_tokens=CHUNK_TOKENS)
    pair = make_pair(model, options)
    watched = Watched(pair)
    outcome = pair.submit("long", prompt, greedy(num_new))
    pair.run(until=lambda: watched.note() or outcome.has_ended, bound_s=300)
    assert outcome.token_ids == generate_greedily(directory, prompt, num_new).token_ids
    window = model.windows[0].group
    assert watched.num_bytes[GROUP] == WINDOW * window.token_bytes
    assert watched.num_bytes["target"] == len(prompt) * model.layer_group.token_bytes
    for name, num_in_flight in {"decode": 16 + 3, "prefill": 2 * CHUNK_TOKENS}.items():
        assert WINDOW <= watched.most_held[name] <= WINDOW + 1 + num_in_flight, name
    assert pair.decode.pool.windows[GROUP].row_slots == WINDOW + 1 + 16 + 3
    pair.settle()
    for pool in (pair.decode.pool, pair.prefill.pool):
        pool.check_conservation()
        assert pool.windows[GROUP].counts().running == 0


@pytest.mark.parametrize(
    ("family", "window_tokens"),
    [
        ("gemma3_text", 80),
        pytest.param("gemma3_text", 2048, marks=pytest.mark.thorough),
        *(pytest.param(family, 80, marks=pytest.mark.thorough) for family in FAMILIES if family != "gemma3_text"),
    ],
)
def test_requests_that_share_prefixes_and_lack_slots_get_the_same_tokens(
    family: str, window_tokens: int, make_pair: MakePair, tiny_model_dir: Callable[[str], Path]
) -> None:
    """With few slots, prefixes lose their windows all the time, and rows wait or are retracted for lack of slots."""
    directory = tiny_model_dir(family)
    shared = [4 + 31 * place % 250 for place in range(50)]
    prompts = [
        [*shared[: (12, 50 - number)[number > 3]], *range(40 + 3 * number, 46 + 4 * number)] for number in range(8)
    ]
    options = PairOptions(
        decode_window_tokens=window_tokens,
        prefill_window_tokens=max(window_tokens, WINDOW + 2 * 16),
        chunk_tokens=16,
        local_prefill_tokens=8,
    )
    pair = make_pair(load_target(directory, device="cpu", dtype="float32"), options)
    for attempt in range(2):
        outcomes = [
            pair.submit(f"{attempt}-{number}", prompt, greedy(40), cache_salt="")
            for number, prompt in enumerate(prompts)
        ]
        pair.finish_prefill()
        pair.run(bound_s=120)
        for outcome, prompt in zip(outcomes, prompts, strict=True):
            assert outcome.token_ids == generate_greedily(directory, prompt, 40).token_ids
    assert pair.decode.pool.prefix_counts.num_found > 0 and pair.prefill.pool.prefix_counts.num_found > 0
    assert (pair.decode.load().num_retractions > 0) == (window_tokens == 80)
