"""An engine's report of one step, and counts of forwards. Uses the standard library only: engines import it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class ForwardCounts:
    """The number of a model's forwards since it got a program (a faster way to compute them).

    `num_fused` were computed by the program. `num_declined` were computed by operators, because the program declined
    them. One thread counts; any thread may read.
    """

    num_fused: int = 0
    num_declined: int = 0

    def count(self, *, is_taken: bool) -> bool:
        """Counts one forward, and returns `is_taken`: whether the program computes it."""
        if is_taken:
            self.num_fused += 1
        else:
            self.num_declined += 1
        return is_taken


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """A step of a service that has a draft head.

    `num_levels` is how many tokens ahead the step drafted: the depth of the draft tree, or 0 if it drafted nothing.
    `accept_lens` has the number of tokens that each drafting row gained. `num_forced` says, for the same rows, of how
    many levels the drafts came from a grammar; it is empty if none did. `draft_s`, `verify_s` and `extend_s` are the
    durations of the step's parts. `idle_s` is how long the forward stream was idle between the previous step and this
    one. It is None if no step was in flight when this one was launched.
    """

    num_levels: int
    accept_lens: tuple[int, ...]
    draft_s: float
    verify_s: float
    extend_s: float
    idle_s: float | None = None
    num_forced: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class MaskStats:
    """A step in which grammars constrain the draws of `num_rows` rows.

    Computing the masks took `mask_s`. The draws of the step came `wait_s` after its forward had ended, because they
    waited for masks.
    """

    num_rows: int
    mask_s: float
    wait_s: float


@dataclass(frozen=True, slots=True)
class StepStats:
    """One forward: how many rows it had, how many tokens it computed, and the seconds from its launch to its result.

    `speculation` is None in a prefill service, and without a draft head. `masks` is None in a prefill service, and
    without grammars.
    """

    batch_size: int
    num_tokens: int
    step_s: float
    speculation: SpeculationStats | None = None
    masks: MaskStats | None = None


OnStep = Callable[[StepStats], None]
