"""The options of the decode engine, and the sizes that follow from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from common.engine import EngineConfig
from decode_service.speculate.depth import Depth, FixedDepth
from decode_service.speculate.spec_info import MAX_UNREAD, NO_DRAFTS, SpecInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig(EngineConfig):
    """The options of the decode engine.

    `spec_info` is the deepest speculation of a step, and `new_depth` makes the policy that decides how deep each step
    drafts. A chunk of a prompt has room for `least_chunk_tokens`, one for each layer of the draft head. With
    `prefix_routing` the choice of a prefill service weighs what it has cached against its load. The engine itself
    computes a prompt, between its steps, if at most `local_prefill_tokens` tokens are left of it and of the other short
    prompts here together; 0 switches that off. With `prefill_fallback` it computes prompts of any length while no
    prefill replica is ready. With `replays_forwards` the steps' forwards are recorded as graphs when the engine is
    created, if the device can record them.

    A request fails after `max_handoff_attempts` consecutive lost handoffs, or, without `prefill_fallback`, if no
    replica takes it for `prefill_timeout_s`. Waiting makes no request's priority better than `best_priority`. Clients
    share the rows and slots in proportion to `client_weights`, by default 1 each. A request that has waited for
    `reclaim_after_s` takes a row and slots from clients that hold more than its own; 0 switches that off.
    """

    spec_info: SpecInfo = NO_DRAFTS
    new_depth: Callable[[SpecInfo], Depth] = FixedDepth
    least_chunk_tokens: int = 1
    prefix_routing: bool = True
    local_prefill_tokens: int = 0
    prefill_fallback: bool = False
    replays_forwards: bool = False
    max_handoff_attempts: int = 3
    prefill_timeout_s: float = 10.0
    best_priority: int = 0
    client_weights: Mapping[str, float] = field(default_factory=dict)
    reclaim_after_s: float = 1.0
    headroom_tokens: int = 16
    """Slots that stay free for each row in use when a request gets a row, so that a new request does not soon cause a
    retraction.
    """
    fallback_after_s: float = 1.0
    """For how long no replica must be ready before prompts of any length are computed here. A replica that has lost a
    call, or was never polled, counts as not ready until its next poll. This is twice the interval of polls, so that no
    long prompt is computed here only because a poll has not come yet.
    """
    fallback_chunk_tokens: int = 256
    """The most tokens in a forward while no replica is ready. Computing so many takes longer than reading the model's
    weights from memory, and a CPU's fused forward takes no more at once.
    """
    max_catch_up_tokens: int = 4096
    """The most unread tokens of all rows together that the draft head reads in one forward when it catches up, unless
    there are more rows. By default a prefill service on a GPU computes as many in two forwards.
    """
    left_together: int = 16
    """A row's tokens leave its windows in groups of at least this many, because each group costs time."""

    @property
    def max_chunk_tokens(self) -> int:
        """The most prompt tokens that one forward computes here."""
        fallback_tokens = self.fallback_chunk_tokens if self.prefill_fallback else 0
        return max(self.local_prefill_tokens, fallback_tokens, self.least_chunk_tokens)

    @property
    def spec_infos(self) -> Sequence[SpecInfo]:
        """The speculation of each depth that a step may have, the deepest last."""
        return self.new_depth(self.spec_info).spec_infos

    def max_unread(self, max_rows: int) -> int:
        """Returns how many unread tokens of a row are too many with `max_rows` rows: the draft head reads before."""
        return max(1, min(MAX_UNREAD, self.max_catch_up_tokens // max_rows))

    @property
    def num_step_slots(self) -> int:
        """The most tokens of a row that one step writes."""
        return self.spec_info.num_slots

    @property
    def max_depth(self) -> int:
        """The most drafts of a row that one step may accept."""
        return self.spec_info.num_steps

    @property
    def tokens_ahead(self) -> int:
        """For how many tokens beyond its request's limit a row has slots."""
        return self.num_step_slots - 1

    @property
    def tokens_in_flight(self) -> int:
        """The most tokens of a row that may be written past those known to be computed.

        These are the tokens of three steps: one that is launched, one in flight, and one that has ended, but whose
        tokens the pool does not count as computed yet, because it is told of at least `left_together` at once. Of a
        row's prompt at most one chunk is in flight.
        """
        return max(self.left_together + 3 * self.num_step_slots, self.max_chunk_tokens)
