"""The phases of a prompt, what the prompt holds in each of them, and the one place that moves it to another phase.

QUEUED ─▶ COMPUTING ─▶ SENDING ─▶ ENDED; every phase may also end at once, when the row fails or its call is closed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from common.engine import PhaseRule
from common.kv.pool import KvPool, LeaseState, RowLease
from common.priority import Ageing
from prefill_service.prompt import Prompt, PromptPhase

RULES: Mapping[PromptPhase, PhaseRule[PromptPhase]] = {
    PromptPhase.QUEUED: PhaseRule(None, frozenset((PromptPhase.COMPUTING, PromptPhase.ENDED))),
    PromptPhase.COMPUTING: PhaseRule(LeaseState.RUNNING, frozenset((PromptPhase.SENDING, PromptPhase.ENDED))),
    PromptPhase.SENDING: PhaseRule(LeaseState.TRANSFERRING, frozenset((PromptPhase.ENDED,))),
    PromptPhase.ENDED: PhaseRule(None, frozenset()),
}


class PromptLives:
    """Holds every live prompt by phase, in the order of entering it, and moves prompts from phase to phase.

    Only the engine thread calls it. It is the only writer of a prompt's phase and lease. `ended` is called when a
    prompt ends, before its row is released. `ageing` says how waiting changes priorities.
    """

    def __init__(self, pool: KvPool, *, ageing: Ageing, ended: Callable[[Prompt], None]) -> None:
        self._pool = pool
        self._ageing = ageing
        self._ended = ended
        self._members: dict[PromptPhase, dict[Prompt, None]] = {phase: {} for phase in PromptPhase}
        self._ends: dict[str, int] = {}  # by client, the tag that its next prompt would have
        self._present = 0  # the largest tag that a prompt had when its computation ended

    def admit(self, prompt: Prompt) -> None:
        """Adds a new prompt to the queue."""
        self._members[PromptPhase.QUEUED][prompt] = None

    def in_phase(self, phase: PromptPhase) -> list[Prompt]:
        return list(self._members[phase])

    def in_turn(self, phase: PromptPhase, now_s: float) -> list[Prompt]:
        """Returns the prompts in `phase` in the order of service at `now_s`, a time of the engine's clock.

        A prompt of a better level goes before one of a worse one: its priority, which waiting makes better, but not
        better than 0 or than it was. Prompts of one level go in the order of their tags (start-time fair queueing), and
        of equal tags the one with less left. The tag of a client's first prompt is the smallest of those that are
        computed now, and each further one's is as many tokens later as the client's prompts before it have to compute.
        It grows with the tokens that are computed. So clients get as many tokens computed, and one that comes goes
        before what others have waiting or left. The prompts of one client are in the order in which they are due.
        """
        prompts = sorted(self._members[phase], key=lambda prompt: prompt.due_s)
        if phase is PromptPhase.QUEUED:
            computing = self._members[PromptPhase.COMPUTING]
            present = min([prompt.next_tag for prompt in computing], default=self._present)
            ends = {client: end for client, end in self._ends.items() if end > present}
            self._ends = dict(ends)
            for prompt in prompts:
                prompt.tag = ends.get(prompt.client, present)
                ends[prompt.client] = prompt.tag + prompt.num_uncomputed
        return sorted(
            prompts,
            key=lambda each: (
                self._ageing.level(each.due_s, now_s=now_s, best=each.best_level),
                each.next_tag,
                each.num_left,
            ),
        )

    def num_in(self, phase: PromptPhase) -> int:
        return len(self._members[phase])

    def enter(self, prompt: Prompt, phase: PromptPhase, *, lease: RowLease | None = None) -> None:
        """Moves the prompt to `phase`, and releases its pool row if it holds none in that phase. An ended prompt still
        refers to its released lease, because a forward in flight may use it.

        `lease` is given to a prompt that gets a row now. Raises AssertionError if the phase cannot follow the prompt's
        current one.
        """
        RULES[prompt.phase].check_followed_by(phase, who=f"row {prompt.index} in {prompt.phase}")
        self._members[prompt.phase].pop(prompt, None)
        if prompt.phase is PromptPhase.COMPUTING:
            self._present = max(self._present, prompt.next_tag)
        if phase is PromptPhase.COMPUTING:
            self._ends[prompt.client] = prompt.tag + prompt.num_uncomputed
        if lease is not None:
            assert prompt.lease is None, f"row {prompt.index} holds a row of the pool already"
            prompt.lease = lease
        prompt.phase = phase
        if phase is PromptPhase.ENDED:
            self._ended(prompt)
        else:
            self._members[phase][prompt] = None
        RULES[phase].settle(prompt.lease, self._pool, who=f"row {prompt.index} in {phase}")
