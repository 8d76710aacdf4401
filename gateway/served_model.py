"""The decode service's model under the name that callers use."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from baton import AsyncClient
from baton.errors import BatonError, Unavailable
from baton.server_info import ModelInfo
from common.text.output_formats import FORMATS, NONE, OutputFormat
from gateway.errors import ApiError, answer_of

_MAX_AGE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """The served model. Callers may use any of its `names`; answers have the first."""

    names: tuple[str, ...]
    system_fingerprint: str
    max_context_tokens: int
    output_format: OutputFormat
    template_variables: frozenset[str]
    tokenizer: Mapping[str, Any]
    """The fields of `/tokenizer_info`, except `model_max_length`."""
    created: int

    @property
    def name(self) -> str:
        return self.names[0]

    def check(self, name: str) -> None:
        """Raises ApiError 404 unless `name` is one of this model's names."""
        if name not in self.names:
            served = f"{' and '.join(map(repr, self.names))} {'is' if len(self.names) == 1 else 'are'}"
            raise ApiError(404, f"model: {name[:128]!r} is not served, {served}", param="model", code="model_not_found")

    def as_json(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "baton",
            "max_model_len": self.max_context_tokens,
        }


class ServedModel:
    """Knows which model the decode service serves, and asks again when the answer is old, because the model may change.

    Concurrent callers share one call, and each waits for it for `timeout_s` at most. `names`, if there are any, replace
    the model's own name.
    """

    def __init__(
        self,
        client: AsyncClient,
        *,
        timeout_s: float,
        names: tuple[str, ...] = (),
        max_age_s: float = _MAX_AGE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._names = names
        self._max_age_s = max_age_s
        self._clock = clock
        self._created = int(time.time())
        self._card: ModelCard | None = None
        self._asked_s = 0.0
        self._asking: asyncio.Task[ModelCard | BatonError] | None = None

    def known(self) -> ModelCard | None:
        """Returns the model that the decode service last named, or None, without waiting.

        If the answer is old or there is none, the decode service is asked again in the background.
        """
        if self._card is not None and self._clock() - self._asked_s < self._max_age_s:
            return self._card
        if self._asking is None:
            self._asked_s = self._clock()
            self._asking = asyncio.create_task(self._ask(), name="model_info")
            self._asking.add_done_callback(self._on_answer)
        return self._card

    async def card(self) -> ModelCard:
        """Returns the served model. If nothing is `known` yet, waits for the call, and raises its BatonError, or
        Unavailable if it has not ended in time.
        """
        if (card := self.known()) is not None:
            return card
        asking = self._asking
        assert asking is not None
        await asyncio.wait((asking,), timeout=self._timeout_s)  # who leaves does not cancel the call for the others
        if not asking.done():
            raise Unavailable(f"it has not said within {self._timeout_s:g} s which model it serves")
        if isinstance(answer := asking.result(), BatonError):
            raise answer
        return answer

    async def close(self) -> None:
        """Cancels the call in progress. No caller may be waiting for it."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait((self._asking,))

    async def _ask(self) -> ModelCard | BatonError:
        """Asks for the model. Returns an error instead of raising it, because all callers may have left."""
        try:
            info = await answer_of(self._client.model_info())
        except BatonError as error:
            return error
        self._card = ModelCard(
            names=self._names or (info.model,),
            system_fingerprint=f"fp_{info.digest[:16]}",
            max_context_tokens=info.max_context_tokens,
            output_format=_format_of(info),
            template_variables=frozenset(info.chat_template_variables),
            tokenizer={"chat_template": info.chat_template or None, **info.special_tokens},
            created=self._created,
        )
        return self._card

    def _on_answer(self, _asked: asyncio.Task[ModelCard | BatonError]) -> None:
        self._asking = None


def _format_of(info: ModelInfo) -> OutputFormat:
    """Returns the format that the decode service names. Returns NONE if it is too old to name one, or names an unknown
    one.
    """
    form = FORMATS.get(info.output_format, NONE)
    return form if info.has_reasoning else replace(form, reasoning=None)
