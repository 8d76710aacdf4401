"""Tests of both services with fused forwards of the target, with experts or without, and the draft head. The tokens
equal `generate`'s for any chunks and drafts, and no forward runs on operators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from baton.events import Completion
from baton.full_speed import await_fused
from baton.local_pair import LocalPair
from tests.storm.pairs import Models
from tests.support.fused import assert_all_fused, forwards
from tests.support.models import save_tiny_model
from tests.support.reference import generate_greedily
from tests.support.running_pair import BOUND_S, RunningPair, running_pair

pytestmark = pytest.mark.thorough

NEW_TOKENS = 16
CHUNK_TOKENS = 48
CHAIN = ("--num-draft-tokens=3", "--no-adaptive-depth")
TREE = ("--num-draft-steps=3", "--num-draft-tokens=9", "--no-adaptive-depth")


@dataclass(frozen=True, slots=True)
class Case:
    """A pair with or without a draft head. `drafts` are options of its decode service, and `topk` is the number of
    candidates per level of a draft tree. With `chooses_experts` its model is a mixture of experts.
    """

    drafts: tuple[str, ...] = ()
    topk: int = 1
    chooses_experts: bool = False

    @property
    def shared_args(self) -> tuple[str, ...]:
        return (f"--draft-topk={self.topk}",) if self.drafts else ()


CASES = {"no-head": Case(), "chain": Case(CHAIN), "tree": Case(TREE, topk=3), "experts": Case(chooses_experts=True)}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models.save(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES.keys())
def case(request: pytest.FixtureRequest) -> Case:
    chosen: Case = request.param
    return chosen


@pytest.fixture(scope="module")
def target(case: Case, models: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("experts"), "mixtral") if case.chooses_experts else models.target


@pytest.fixture(scope="module")
def pair(case: Case, target: Path, models: Models, forked: Callable[..., LocalPair]) -> Iterator[RunningPair]:
    with running_pair(
        target,
        kind=forked,
        shared_args=(f"--draft={models.head}", *case.shared_args) if case.drafts else (),
        prefill_args=(f"--chunk-tokens={CHUNK_TOKENS}",),
        decode_args=case.drafts,
        exposes_metrics=True,
    ) as running:
        yield running


def prompt(length: int) -> list[int]:
    return [4 + (number * number + length) % 56 for number in range(length)]


@pytest.mark.timeout(700)  # compilers share the cores with all else
def test_tokens_are_those_of_generate(pair: RunningPair, target: Path, case: Case) -> None:
    addresses = pair.processes.metrics_addresses
    assert await_fused(addresses, timeout_s=600)  # compiled first, if that has not happened before
    lengths = (5, 47, 130, 70)
    before = [forwards(address) for address in addresses]

    def ask(length: int) -> Completion:
        options = {"max_tokens": NEW_TOKENS, "temperature": 0.0, "ignore_eos": True}
        return pair.client.complete(token_ids=prompt(length), timeout_s=BOUND_S, **options)

    with ThreadPoolExecutor(len(lengths)) as pool:  # at once, so that chunks of several prompts share a forward
        answers = dict(zip(lengths, pool.map(ask, lengths), strict=True))
    for length, answer in answers.items():
        assert list(answer.token_ids) == generate_greedily(target, prompt(length), NEW_TOKENS).token_ids
    for address, earlier in zip(addresses, before, strict=True):
        assert_all_fused(forwards(address) - earlier, drafts=bool(case.drafts))
    speculated = [answer.speculation for answer in answers.values() if answer.speculation is not None]
    assert len(speculated) == (len(lengths) if case.drafts else 0)
    assert all(counts.num_accepted_tokens > 0 for counts in speculated)
