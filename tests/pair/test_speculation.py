"""Speculation changes how fast tokens come, never which: greedy and seeded output in every mode (I12, I13)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from common.draft.head import DraftHead
from common.draft.load import load_draft
from common.model.loader import load_target
from common.model.sampling_params import ResolvedSampling
from common.model.target import TargetModel
from tests.conftest import MakePair
from tests.support.draft_heads import save_copy_head, save_eagle3_head, save_mtp_head
from tests.support.greedy_parity import check_tokens_equal_generate
from tests.support.models import SMALL_VOCAB_SIZE, save_last_token_model
from tests.support.pair import InProcessPair, Outcome, PairOptions


@dataclass(frozen=True, slots=True)
class Drafted:
    """A target that captures what its head reads."""

    directory: Path
    target: TargetModel
    head: DraftHead


def _load(target_dir: Path, head_dir: Path) -> Drafted:
    target = load_target(target_dir, device="cpu", dtype="float32")
    head = load_draft(head_dir, target=target, device="cpu", dtype="float32")
    target.capture_hidden(head.capture)
    return Drafted(target_dir, target, head)


@pytest.fixture(scope="module")
def sure_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A last-token-only target that gives its choice nearly all probability, so that a tree goes deep along it."""
    return save_last_token_model(tmp_path_factory.mktemp("sure"), logits_std=12.0)


@pytest.fixture(scope="module")
def copying(sure_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Drafted:
    """A head whose proposals are the target's own choices: drafts are accepted."""
    head_dir = save_copy_head(tmp_path_factory.mktemp("copy"), target_dir=sure_model_dir, family="eagle3")
    return _load(sure_model_dir, head_dir)


@pytest.fixture(scope="module")
def copying_layers(sure_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Drafted:
    """The same with a layer for each of five drafts, each fed the one before it."""
    head_dir = save_copy_head(
        tmp_path_factory.mktemp("layers"), target_dir=sure_model_dir, family="nextn", num_layers=5
    )
    return _load(sure_model_dir, head_dir)


@pytest.fixture(scope="module")
def copying_part(last_token_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Drafted:
    """The same with a draft vocabulary of 50 of the target's 64 ids: what is drawn of the others is rejected."""
    head_dir = save_copy_head(
        tmp_path_factory.mktemp("part"), target_dir=last_token_model_dir, family="eagle3", draft_vocab_size=50
    )
    return _load(last_token_model_dir, head_dir)


@pytest.fixture(scope="module")
def guessing(tiny_model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Drafted:
    """A random head for a random target: drafts are rejected, but for chance."""
    target_dir = tiny_model_dir("llama")
    return _load(target_dir, save_eagle3_head(tmp_path_factory.mktemp("random"), target_dir=target_dir))


@pytest.fixture(scope="module")
def guessing_layers(tiny_model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Drafted:
    """Five random layers, each fed the target's own states."""
    target_dir = tiny_model_dir("llama")
    head_dir = save_mtp_head(tmp_path_factory.mktemp("layers"), target_dir=target_dir, layout="mimo_v2", num_layers=5)
    return _load(target_dir, head_dir)


CHAINS = {f"chain-{length}": {"num_draft_tokens": length} for length in range(1, 6)}
TREES = {
    "tree-2x2-4": {"draft_topk": 2, "num_draft_steps": 2, "num_draft_tokens": 4},
    "tree-2x4-9": {"draft_topk": 2, "num_draft_steps": 4, "num_draft_tokens": 9},
    "tree-4x3-15": {"draft_topk": 4, "num_draft_steps": 3, "num_draft_tokens": 15},
}
DRAFTED = [
    *((head, shape) for head in ("copying", "guessing") for shape in (*CHAINS, *TREES)),
    *(("copying_layers", shape) for shape in CHAINS),
    ("guessing_layers", "chain-5"),
]


@pytest.mark.parametrize("chunk_tokens", [16, 512])
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
@pytest.mark.parametrize("mode", ["alone", "crowd"])
@pytest.mark.parametrize(("head", "shape"), DRAFTED)
def test_greedy_tokens_equal_generate(
    head: str,
    shape: str,
    mode: str,
    overlap: bool,
    chunk_tokens: int,
    make_pair: MakePair,
    request: pytest.FixtureRequest,
) -> None:
    drafted: Drafted = request.getfixturevalue(head)
    options = PairOptions(overlap=overlap, chunk_tokens=chunk_tokens, **{**CHAINS, **TREES}[shape])
    pair = make_pair(drafted.target, options, draft=drafted.head)
    vocab_size = SMALL_VOCAB_SIZE if head.startswith("copying") else 260
    check_tokens_equal_generate(
        pair,
        drafted.directory,
        crowd=mode == "crowd",
        chunk_tokens=chunk_tokens,
        vocab_size=vocab_size,
        num_tokens=64,  # enough that requests meet, at several tokens a step
    )
    if head.startswith("copying"):
        assert tokens_per_step(pair) > 0.9 * options.spec_info.max_accept_len, "the drafts were not used"
    else:
        assert tokens_per_step(pair) < 1.5, "a random head was believed"


SAMPLED = {
    "plain": {},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.05, "top_k": 40},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.2, "frequency_penalty": 0.3},
    "bias": {"logit_bias": ((7, 3.0), (9, -4.0)), "num_logprobs": 3},
    "ends": {"min_tokens": 6, "eos_token_ids": (11, 12, 13), "stop_token_ids": (20, 21)},
}


@pytest.mark.parametrize("shape", ["chain-1", "chain-4", "tree-4x3-15"])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("options", SAMPLED)
def test_a_seed_gives_the_same_output_with_and_without_drafts(
    options: str, temperature: float, shape: str, copying_part: Drafted, make_pair: MakePair
) -> None:
    def run(draft: DraftHead | None) -> InProcessPair:
        pair = make_pair(copying_part.target, PairOptions(**{**CHAINS, **TREES}[shape]), draft=draft)
        for number in range(12):
            sampling = ResolvedSampling(seed=number, max_tokens=30, temperature=temperature, **SAMPLED[options])  # type: ignore[arg-type]
            pair.submit(str(number), [4 + (5 * number + i) % 50 for i in range(3 + 4 * number)], sampling)
        pair.run()
        return pair

    plain, speculating = run(None), run(copying_part.head)
    for name, expected in plain.outcomes.items():
        assert_same(speculating.outcomes[name], expected)
    num_drafted, num_accepted = drafts(speculating)
    assert num_accepted > 0
    if temperature > 0:
        assert num_accepted < num_drafted, "nothing was rejected"


def assert_same(outcome: Outcome, expected: Outcome) -> None:
    assert outcome.token_ids == expected.token_ids
    assert outcome.finished is not None and expected.finished is not None
    assert (outcome.finished.reason, outcome.finished.stop_token_id, outcome.finished.num_completion_tokens) == (
        expected.finished.reason,
        expected.finished.stop_token_id,
        expected.finished.num_completion_tokens,
    )
    assert [logprobs.top_ids for logprobs in outcome.logprobs] == [logprobs.top_ids for logprobs in expected.logprobs]
    assert [logprobs.chosen for logprobs in outcome.logprobs] == pytest.approx(
        [logprobs.chosen for logprobs in expected.logprobs], abs=1e-4
    )


def drafts(pair: InProcessPair) -> tuple[int, int]:
    """Drafted and accepted tokens of all the pair's requests."""
    counts = [outcome.finished.speculation for outcome in pair.outcomes.values() if outcome.finished]
    held = [count for count in counts if count is not None]
    return sum(count.num_drafted_tokens for count in held), sum(count.num_accepted_tokens for count in held)


def tokens_per_step(pair: InProcessPair) -> float:
    counts = [outcome.finished.speculation for outcome in pair.outcomes.values() if outcome.finished]
    steps = sum(count.num_verify_steps for count in counts if count is not None)
    return 1 + drafts(pair)[1] / steps


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
@pytest.mark.parametrize("shape", ["chain-5", "tree-4x3-15"])
def test_a_request_may_fill_the_context_and_the_pool(
    shape: str, overlap: bool, copying: Drafted, make_pair: MakePair
) -> None:
    """Drafts past the last token have slots of their own, and no step is launched for them alone."""
    sizes = PairOptions(overlap=overlap, context_tokens=64, **{**CHAINS, **TREES}[shape])
    options = replace(sizes, decode_tokens=64 + sizes.spec_info.num_slots - 1)
    for max_tokens in range(20, 32):
        sampling = ResolvedSampling(seed=0, max_tokens=max_tokens, temperature=0.0)
        plain, speculating = make_pair(copying.target, options), make_pair(copying.target, options, draft=copying.head)
        for pair in (plain, speculating):
            pair.submit("full", [4 + i % 50 for i in range(64 - max_tokens)], sampling)
            pair.run()
        assert speculating.outcomes["full"].token_ids == plain.outcomes["full"].token_ids
        assert len(plain.outcomes["full"].token_ids) == max_tokens
        assert speculating.decode.load().num_retractions == 0
        assert len(speculating.decode_steps) <= -(-max_tokens // options.spec_info.max_accept_len) + overlap
