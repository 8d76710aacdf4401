"""The model that the decode service serves, under the name that callers know it by."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from baton import AsyncClient
from baton.errors import BatonError
from gateway.errors import ApiError

_MAX_AGE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    name: str
    system_fingerprint: str
    max_context_tokens: int
    created: int

    def check(self, name: str) -> None:
        """Raises ApiError 404 for the name of another model."""
        if name != self.name:
            raise ApiError(
                404, f"model: {name[:128]!r} is not served, {self.name!r} is", param="model", code="model_not_found"
            )

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "baton",
            "max_model_len": self.max_context_tokens,
        }


class ServedModel:
    """Asks the decode service, and again once the answer is old: another model may be behind the address by then.

    `name` overrides the service's own.
    """

    def __init__(
        self,
        client: AsyncClient,
        *,
        name: str = "",
        max_age_s: float = _MAX_AGE_S,
        clock: Callable[[], float] = time.monotonic,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        self._client = client
        self._name = name
        self._max_age_s = max_age_s
        self._clock = clock
        self._created = int(unix_time())
        self._card: ModelCard | None = None
        self._asked_s = 0.0
        self._asking = asyncio.Lock()

    async def card(self) -> ModelCard:
        """What was known last, while nobody answers. Raises the BatonError when nothing was."""
        async with self._asking:
            if self._card is not None and self._clock() - self._asked_s < self._max_age_s:
                return self._card
            self._asked_s = self._clock()
            try:
                info = await self._client.model_info()
            except BatonError:
                if self._card is None:
                    raise
                return self._card
            self._card = ModelCard(
                name=self._name or info.model,
                system_fingerprint=f"fp_{info.digest[:16]}",
                max_context_tokens=info.max_context_tokens,
                created=self._created,
            )
            return self._card
