"""Derives the shape of the speculation from the settings and the draft head."""

from __future__ import annotations

from dataclasses import replace

from common.config.settings import DecodeSettings
from common.draft.head import DraftHead
from common.errors import StartupError
from decode_service.speculate.spec_info import MAX_UNREAD, SpecInfo, num_drafted

_DEFAULT_CHAIN = 4
MAX_CATCH_UP_TOKENS = 4096
"""The largest number of unread tokens that the head reads in one forward when it catches up.

By default that is about as many as the target prefills in two forwards.
"""


def speculation_of(settings: DecodeSettings, head: DraftHead) -> SpecInfo:
    """Returns the speculation that the settings ask for. Raises StartupError, naming the setting, if the head does not
    fit.
    """
    topk, num_layers = settings.draft_topk, head.layer_group.num_layers
    max_steps = num_layers if num_layers > 1 else None
    if topk == 1:
        return _chain(settings, max_steps)
    if settings.num_draft_steps is None or settings.num_draft_tokens is None:
        raise StartupError("draft_topk: a tree needs num_draft_steps and num_draft_tokens")
    most = num_drafted(settings.num_draft_steps, topk)
    if not settings.num_draft_steps <= settings.num_draft_tokens <= most:
        raise StartupError(
            f"num_draft_tokens: {settings.num_draft_tokens} of a tree that has {settings.num_draft_steps} levels and "
            f"{most} drafts"
        )
    return SpecInfo(settings.num_draft_steps, settings.num_draft_tokens, topk)


def within_rows(spec_info: SpecInfo, max_rows: int) -> SpecInfo:
    """Returns `spec_info` with a new `max_unread`, the number of tokens per row that the head may leave unread.

    It is MAX_CATCH_UP_TOKENS / `max_rows`, because the head reads what all rows have left in one forward, but at least
    1 and at most MAX_UNREAD.
    """
    return replace(spec_info, max_unread=max(1, min(MAX_UNREAD, MAX_CATCH_UP_TOKENS // max_rows)))


def _chain(settings: DecodeSettings, max_steps: int | None) -> SpecInfo:
    wanted = settings.num_draft_tokens or settings.num_draft_steps
    if settings.num_draft_steps not in (None, wanted):
        raise StartupError("num_draft_steps: in a chain it is num_draft_tokens, or not set")
    if wanted is None:
        wanted = min(_DEFAULT_CHAIN, max_steps or _DEFAULT_CHAIN)
    if max_steps is not None and wanted > max_steps:
        name = "num_draft_steps" if settings.num_draft_tokens is None else "num_draft_tokens"
        raise StartupError(f"{name}: {wanted}, but the head has {max_steps} layers, each for one draft")
    return replace(SpecInfo.chain(wanted), reads_drafts=max_steps is None)
