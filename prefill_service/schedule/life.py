"""One life of a prompt: its phases, what it holds in each, and the one place that moves it from phase to phase.

QUEUED ─▶ COMPUTING ─▶ SENDING ─▶ ENDED; every phase may also end at once, when the row fails or its call is closed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from common.kv.pool import KvPool, LeaseState, RowLease
from prefill_service.prompt import Prompt, PromptPhase


@dataclass(frozen=True, slots=True)
class Rule:
    """A phase's rule: the state of the row's lease, and the phases that may come next.

    `lease` is None where the prompt holds no row. After ENDED a prompt still names the lease that was released, for
    the forward that it takes part in.
    """

    lease: LeaseState | None
    following: frozenset[PromptPhase]


RULES: Mapping[PromptPhase, Rule] = {
    PromptPhase.QUEUED: Rule(None, frozenset((PromptPhase.COMPUTING, PromptPhase.ENDED))),
    PromptPhase.COMPUTING: Rule(LeaseState.RUNNING, frozenset((PromptPhase.SENDING, PromptPhase.ENDED))),
    PromptPhase.SENDING: Rule(LeaseState.TRANSFERRING, frozenset((PromptPhase.ENDED,))),
    PromptPhase.ENDED: Rule(None, frozenset()),
}


class PromptLives:
    """Every live prompt, by phase in the order of entering it, and the only writer of a prompt's phase and lease.

    Only the engine thread calls it. `ended` is called when a prompt ends, before its row is released.
    """

    def __init__(self, pool: KvPool, *, ended: Callable[[Prompt], None]) -> None:
        self._pool = pool
        self._ended = ended
        self._members: dict[PromptPhase, dict[Prompt, None]] = {phase: {} for phase in PromptPhase}

    def admit(self, prompt: Prompt) -> None:
        """Take in a new prompt, which is queued."""
        self._members[PromptPhase.QUEUED][prompt] = None

    def in_phase(self, phase: PromptPhase) -> list[Prompt]:
        return list(self._members[phase])

    def num_in(self, phase: PromptPhase) -> int:
        return len(self._members[phase])

    def enter(self, prompt: Prompt, phase: PromptPhase, *, lease: RowLease | None = None) -> None:
        """Move the prompt to `phase`, and release a row that this phase does not hold.

        `lease` is the row it holds from now on, if it held none. Raises AssertionError if the phase cannot follow the
        present one.
        """
        before, after = RULES[prompt.phase], RULES[phase]
        assert phase in before.following, f"row {prompt.index}: {phase} does not follow {prompt.phase}"
        self._members[prompt.phase].pop(prompt, None)
        if lease is not None:
            assert prompt.lease is None, f"row {prompt.index} holds a row of the pool already"
            prompt.lease = lease
        prompt.phase = phase
        if phase is PromptPhase.ENDED:
            self._ended(prompt)
        else:
            self._members[phase][prompt] = None
        if prompt.lease is None:
            assert after.lease is None, f"row {prompt.index} holds no row of the pool in {phase}"
        elif after.lease is None:
            self._pool.release(prompt.lease)
        else:
            prompt.lease.state = after.lease
