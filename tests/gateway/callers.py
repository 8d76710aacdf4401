"""Calls the gateway of a real pair with the `openai` package."""

from __future__ import annotations

from typing import Any

import openai

MODEL = "tiny"


class Caller:
    def __init__(self, client: openai.OpenAI) -> None:
        self._client = client

    def chat(self, **options: Any) -> Any:
        return self._client.chat.completions.create(**{"model": MODEL, **options})

    def chat_chunks(self, **options: Any) -> list[Any]:
        return list(self.chat(stream=True, **options))

    def complete(self, **options: Any) -> Any:
        return self._client.completions.create(**{"model": MODEL, **options})

    def completion_chunks(self, **options: Any) -> list[Any]:
        return list(self.complete(stream=True, **options))
