"""Speculation changes how fast tokens come, never which: greedy and seeded output in every mode (I12, I13)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from common.draft.head import DraftHead
from common.draft.load import load_draft
from common.model.loader import load_target
from common.model.sampling_params import ResolvedSampling
from common.model.target import TargetModel
from tests.conftest import MakePair
from tests.support.draft_heads import save_copy_head, save_eagle3_head
from tests.support.greedy_parity import check_tokens_equal_generate
from tests.support.models import SMALL_VOCAB_SIZE
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
def copying(last_token_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Drafted:
    """A head whose proposals are the target's own choices: drafts are accepted."""
    head_dir = save_copy_head(tmp_path_factory.mktemp("copy"), target_dir=last_token_model_dir, family="eagle3")
    return _load(last_token_model_dir, head_dir)


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


@pytest.mark.parametrize("chunk_tokens", [16, 512])
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
@pytest.mark.parametrize("mode", ["alone", "crowd"])
@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("head", ["copying", "guessing"])
def test_greedy_tokens_equal_generate(
    head: str,
    num_draft_tokens: int,
    mode: str,
    overlap: bool,
    chunk_tokens: int,
    make_pair: MakePair,
    request: pytest.FixtureRequest,
) -> None:
    drafted: Drafted = request.getfixturevalue(head)
    options = PairOptions(overlap=overlap, chunk_tokens=chunk_tokens, num_draft_tokens=num_draft_tokens)
    pair = make_pair(drafted.target, options, draft=drafted.head)
    vocab_size = SMALL_VOCAB_SIZE if head == "copying" else 260
    check_tokens_equal_generate(
        pair,
        drafted.directory,
        crowd=mode == "crowd",
        chunk_tokens=chunk_tokens,
        vocab_size=vocab_size,
        num_tokens=64,  # enough that requests meet, at several tokens a step
    )
    if head == "copying":
        assert tokens_per_step(pair) > 0.9 * (num_draft_tokens + 1), "the drafts were not used"
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


@pytest.mark.parametrize("num_draft_tokens", [1, 4])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("options", SAMPLED)
def test_a_seed_gives_the_same_output_with_and_without_drafts(
    options: str, temperature: float, num_draft_tokens: int, copying_part: Drafted, make_pair: MakePair
) -> None:
    def run(draft: DraftHead | None) -> InProcessPair:
        pair = make_pair(copying_part.target, PairOptions(num_draft_tokens=num_draft_tokens), draft=draft)
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
