"""Mutants of the prefill in the decode service: chunks that are launched, counted or kept wrongly."""

from __future__ import annotations

from unittest import mock

import pytest

from common.kv.pool import KvPool, RowLease
from common.sampling.state import RowSeed
from decode_service.schedule.local_prefill import LocalPrefill, LocalPrompt


def chunk_holds_no_row(patch: pytest.MonkeyPatch) -> None:
    launch = LocalPrefill.launch

    def mutant(self: LocalPrefill) -> bool:
        with mock.patch.object(RowLease, "use_until"):
            return launch(self)

    patch.setattr(LocalPrefill, "launch", mutant)


def row_is_not_seeded(patch: pytest.MonkeyPatch) -> None:
    """Draw the first token with what sampling knows of the row's last request."""
    patch.setattr(LocalPrompt, "row_seed", property(lambda self: RowSeed(0, self.sampling, 0, (), 0)))


def unwritten_kv_is_kept(patch: pytest.MonkeyPatch) -> None:
    """Take every token of a prompt for computed as soon as its first chunk is launched."""
    launch = LocalPrefill.launch

    def mutant(self: LocalPrefill) -> bool:
        is_launched = launch(self)
        for prompt in self._prompts.values():
            self._pool.keep(prompt.lease, prompt.token_ids, len(prompt.token_ids))
        return is_launched

    patch.setattr(LocalPrefill, "launch", mutant)


def prompts_all_stay(patch: pytest.MonkeyPatch) -> None:
    """Do not count the prompts that are being computed already."""
    patch.setattr(LocalPrefill, "num_left", 0)


def cached_tokens_are_left_to_compute(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KvPool, "num_cached", lambda self, key: 0)
