"""The stages of traced requests, for the edge's spans."""

from __future__ import annotations

from collections.abc import Callable

from decode_service.messages import Event, Stage, StageBegan
from decode_service.schedule.request import Request


class StageLog:
    """Posts what traced requests come to; of others nothing. Only the engine thread calls it."""

    def __init__(self, post: Callable[[Event], None]) -> None:
        self._post = post

    def began(self, req: Request, stage: Stage, at_s: float) -> None:
        if req.is_traced:
            self._post(StageBegan(req.request_id, stage, at_s))

    def handed_off(self, req: Request, at_s: float, *, replica: str, attempt: int) -> None:
        if req.is_traced:
            self._post(StageBegan(req.request_id, Stage.PREFILL, at_s, replica=replica, attempt=attempt))

    def waits_again(self, req: Request, at_s: float, *, lost: str = "", was_retracted: bool = False) -> None:
        if req.is_traced:
            self._post(StageBegan(req.request_id, Stage.QUEUE, at_s, lost=lost, was_retracted=was_retracted))
