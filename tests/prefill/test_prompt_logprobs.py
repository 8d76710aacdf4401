"""Log-probabilities of prompts wait for their receivers within the send budget."""

from __future__ import annotations

from common.sampling.params import ResolvedSampling
from common.wire.handoff import KvSegment, RowLogprobs, unsent_bytes
from prefill_service.messages import BytesSent, CancelCallRows, Command
from tests.engine.tags import GROUP, TagModel
from tests.support.engines import PrefillHalf
from tests.support.scripted_device import ScriptedDevice

PROMPT = range(11, 35)
CHUNK_TOKENS = 4
SCORED = ResolvedSampling(seed=1, max_tokens=0, num_prompt_logprobs=4)
TOKEN_BYTES = 12 * (1 + 4)
FORWARD_BYTES = CHUNK_TOKENS * TOKEN_BYTES


class Scoring(PrefillHalf):
    """A prefill engine that scores prompts for receivers that have all KV."""

    def __init__(self, *, send_budget_bytes: int) -> None:
        self.device = ScriptedDevice()
        super().__init__(
            TagModel(),
            self.device,
            chunk_tokens=CHUNK_TOKENS,
            max_batch_tokens=CHUNK_TOKENS,
            max_kv_tokens=128,
            send_budget_bytes=send_budget_bytes,
        )

    def ask(self, call_id: str) -> None:
        self.open(call_id, [PROMPT], SCORED, num_held=len(PROMPT))

    def go_on(self, *commands: Command) -> None:
        """Take the commands, and step as long as the engine has anything to do."""
        self.step(*commands)
        for _ in range(200):
            for stream in self.device.ready_streams():
                while stream.is_ready:
                    stream.run_next()
            self.step()
        assert self.engine.idle_timeout_s() > 0, "it waits without asking again and again"

    def kv_bytes(self, call_id: str) -> int:
        segments = [ready.frame for ready in self.frames if ready.call_id == call_id]
        return sum(len(segment.payload) for segment in segments if isinstance(segment, KvSegment))

    def scored_bytes(self, call_id: str) -> int:
        return sum(unsent_bytes(ready.frame) for ready in self.frames if ready.call_id == call_id)


def test_prompts_are_computed_no_further_while_their_log_probabilities_fill_the_budget() -> None:
    prefill = Scoring(send_budget_bytes=FORWARD_BYTES)
    prefill.ask("slow")
    prefill.go_on()
    held = prefill.scored_bytes("slow")
    assert held == prefill.engine.load().unsent_bytes == 2 * FORWARD_BYTES, "two forwards are launched at once"

    prefill.ask("other")
    prefill.go_on()
    assert prefill.scored_bytes("other") == 2 * FORWARD_BYTES, "each call may have some"
    prefill.go_on(CancelCallRows("other", (0,)), BytesSent("other", 2 * FORWARD_BYTES))

    while "slow" not in prefill.ended_calls:
        taken = prefill.scored_bytes("slow")
        prefill.go_on(BytesSent("slow", held))
        held = prefill.scored_bytes("slow") - taken
        assert 0 < held <= 2 * FORWARD_BYTES
    assert prefill.scored_bytes("slow") == (len(PROMPT) - 1) * TOKEN_BYTES
    frames = [ready.frame for ready in prefill.frames if isinstance(ready.frame, RowLogprobs)]
    assert all(each.logprobs.top_values.base is None for each in frames), "they keep no others of their forward alive"
    prefill.go_on(BytesSent("slow", held))
    assert prefill.is_empty
    prefill.close()


def test_the_log_probabilities_of_a_call_that_sends_nothing_else_may_fill_the_budget() -> None:
    prefill = Scoring(send_budget_bytes=6 * FORWARD_BYTES)
    prefill.ask("scored")
    prefill.go_on()
    assert prefill.scored_bytes("scored") == (len(PROMPT) - 1) * TOKEN_BYTES, "the prompt's six forwards"
    prefill.close()


def test_a_call_that_sends_kv_and_one_that_only_scores_take_a_quarter_of_the_budget_each() -> None:
    segment_bytes = CHUNK_TOKENS * GROUP.token_bytes
    prefill = Scoring(send_budget_bytes=11 * segment_bytes)
    assert 2 * segment_bytes < 11 * segment_bytes // 4 < min(3 * segment_bytes, 2 * FORWARD_BYTES)
    prefill.open("kv", [range(100, 160)])
    prefill.go_on()
    assert prefill.kv_bytes("kv") == 11 * segment_bytes, "it is alone"

    prefill.go_on(BytesSent("kv", segment_bytes))
    prefill.ask("scored")
    prefill.go_on()
    assert prefill.scored_bytes("scored") == 2 * FORWARD_BYTES, "two forwards are launched at once"

    prefill.go_on(BytesSent("kv", 9 * segment_bytes))
    assert prefill.kv_bytes("kv") == 12 * segment_bytes, "two segments are left, and three exceed its share"
    assert prefill.scored_bytes("scored") == 2 * FORWARD_BYTES, "they exceed its share"
    prefill.close()
