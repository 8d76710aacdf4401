"""Tests that several choices of a prompt that is not cached, and requests that begin alike, receive the common KV once.
The first of them receives it; the others wait for it, share its slots and ask for the rest.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest

from common.model.target import TargetModel
from common.sampling.params import ResolvedSampling
from common.wire.handoff import Frame, KvSegment
from tests.support.drafted import Drafted
from tests.support.pair import InProcessPair, MakePair, Outcome, PairOptions

NUM_CHOICES = 4
NEW_TOKENS = 8
PROMPT = [20 + (place * 7) % 40 for place in range(60)]
SAMPLED = ResolvedSampling(seed=5, max_tokens=NEW_TOKENS, temperature=0.9)

Tiny = Callable[[str], TargetModel]


@dataclass
class Sent:
    """Counts the payload bytes of the segments that leave the prefill engines of `pair`."""

    pair: InProcessPair
    num_bytes: int = 0

    def __post_init__(self) -> None:
        self.pair.tamper = self._count

    def _count(self, frame: Frame) -> Sequence[Frame]:
        if isinstance(frame, KvSegment):
            self.num_bytes += frame.num_bytes
        return (frame,)


def choices(pair: InProcessPair, *, salt: Callable[[int], str | None]) -> list[Outcome]:
    """Sends all choices of the prompt at once, and returns their outcomes. `salt` maps a choice's number to its cache
    salt.
    """
    outcomes = [
        pair.submit(str(number), PROMPT, SAMPLED, choice_index=number, cache_salt=salt(number))
        for number in range(NUM_CHOICES)
    ]
    pair.run()
    return outcomes


def num_received(outcomes: Sequence[Outcome]) -> list[int]:
    return [outcome.finished.timings.kv_bytes if outcome.finished else -1 for outcome in outcomes]


def token_bytes(pair: InProcessPair) -> int:
    return sum(group.token_bytes for group in pair.decode.pool.groups.values())


def assert_handed_over_once(cold: InProcessPair, pair: InProcessPair, *, lookahead: int) -> None:
    apart, sent = choices(cold, salt=lambda _number: None), Sent(pair)
    together = choices(pair, salt=lambda _number: "")
    assert [each.token_ids for each in together] == [each.token_ids for each in apart]
    whole, rest = len(PROMPT) * token_bytes(pair), max(lookahead, 1) * token_bytes(pair)
    assert num_received(apart) == [whole] * NUM_CHOICES
    assert num_received(together) == [whole, *[rest] * (NUM_CHOICES - 1)]
    assert sent.num_bytes == whole + (NUM_CHOICES - 1) * rest
    assert sent.num_bytes + pair.decode.load().held_bytes == NUM_CHOICES * whole
    found = pair.decode.load().prefixes.num_found
    assert found == (NUM_CHOICES - 1) * (len(PROMPT) - max(lookahead, 1)), "slots were not shared"


def test_choices_of_a_cold_prompt_are_handed_over_once(make_pair: MakePair, tiny_target: Tiny) -> None:
    model = tiny_target("llama")
    assert_handed_over_once(make_pair(model), make_pair(model), lookahead=0)


@pytest.mark.parametrize("head", ["leaning", "leaning_layers"])
def test_and_so_is_what_a_draft_head_wrote(head: str, make_pair: MakePair, request: pytest.FixtureRequest) -> None:
    drafted: Drafted = request.getfixturevalue(head)
    cold, pair = (make_pair(drafted.target, draft=drafted.head) for _ in range(2))
    assert_handed_over_once(cold, pair, lookahead=pair.decode.pool.groups["draft"].num_layers)


def test_salts_keep_choices_apart(make_pair: MakePair, tiny_target: Tiny) -> None:
    pair = make_pair(tiny_target("llama"))
    outcomes = choices(pair, salt=str)
    assert num_received(outcomes) == [len(PROMPT) * token_bytes(pair)] * NUM_CHOICES


LEAVES: dict[str, Callable[[InProcessPair], object]] = {
    "aborted": lambda pair: pair.abort("0"),
    "lost with its replica": lambda pair: pair.replicas[0].lose(),
}


@pytest.mark.parametrize("how", LEAVES)
def test_when_the_first_one_leaves_midway_the_others_go_on(how: str, make_pair: MakePair, tiny_target: Tiny) -> None:
    model = tiny_target("llama")
    expected = [outcome.token_ids for outcome in choices(make_pair(model), salt=lambda _number: None)]
    pair = make_pair(model, PairOptions(num_replicas=2, max_segment_bytes=2048, receive_budget_bytes=2048))
    outcomes = [
        pair.submit(str(number), PROMPT, SAMPLED, choice_index=number, cache_salt="") for number in range(NUM_CHOICES)
    ]
    pair.run(until=lambda: pair.decode.load().rows.transferring == 1)
    assert pair.decode.load().num_queued == NUM_CHOICES - 1
    LEAVES[how](pair)
    pair.run()
    is_aborted = how == "aborted"
    assert [outcome.token_ids for outcome in outcomes[is_aborted:]] == expected[is_aborted:]
    received = num_received(outcomes[is_aborted:])
    assert sum(each > token_bytes(pair) for each in received) == 1, "the common KV came more than once"


def test_requests_behind_a_cold_beginning_receive_it_once(make_pair: MakePair, tiny_target: Tiny) -> None:
    draw = random.Random(3)
    prompts = [[*PROMPT, *(draw.randrange(2, 60) for _ in range(5 + number % 4))] for number in range(12)]
    sampling = replace(SAMPLED, temperature=0.0)
    tokens: list[list[list[int]]] = []
    for salt in (None, ""):
        pair = make_pair(tiny_target("llama"))
        outcomes = [
            pair.submit(str(number), prompt, sampling, cache_salt=salt) for number, prompt in enumerate(prompts)
        ]
        pair.run()
        tokens.append([outcome.token_ids for outcome in outcomes])
    assert tokens[0] == tokens[1]
    num_others = sum(len(prompt) - len(PROMPT) for prompt in prompts)
    assert sum(num_received(outcomes)) <= (len(PROMPT) + num_others) * token_bytes(pair)
