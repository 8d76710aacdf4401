"""Keeps a constant number of requests running through the client while something else is measured."""

from __future__ import annotations

import asyncio
import itertools
from types import TracebackType
from typing import Self

from baton.client import AsyncClient
from baton.events import Delta
from baton.load_generator import Workload

BOUND_S = 120.0
LOOK_INTERVAL_S = 0.02


class SteadyLoad:
    """Keeps `concurrency` greedy requests of `num_new_tokens` each running: one that ends is followed by another.

    Use it with `async with`. Entering the block waits until all requests decode at the same time. Short requests may
    never do that; then it waits until `concurrency` requests have ended. `num_tokens` and `num_begun` count the tokens
    received and the requests begun so far. Leaving the block cancels all requests.
    """

    def __init__(
        self, client: AsyncClient, *, concurrency: int, num_prompt_tokens: int, num_new_tokens: int, vocab_size: int
    ) -> None:
        self._client = client
        self._concurrency = concurrency
        self._num_new_tokens = num_new_tokens
        prompts = Workload(concurrency, concurrency, num_prompt_tokens, num_new_tokens).prompts(vocab_size)
        self._prompts = itertools.cycle(prompts)
        self._tasks: list[asyncio.Task[None]] = []
        self.num_tokens = 0
        self.num_begun = 0

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._ask()) for _ in range(self._concurrency)]
        async with asyncio.timeout(BOUND_S):
            while self.num_begun < 2 * self._concurrency and await self._num_running() < self._concurrency:
                self.check()
                await asyncio.sleep(LOOK_INTERVAL_S)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks, timeout=BOUND_S)
        async with asyncio.timeout(BOUND_S):
            while await self._num_running():  # noqa: ASYNC110 - it can only be looked at
                await asyncio.sleep(LOOK_INTERVAL_S)

    def check(self) -> None:
        """Raises the error of a failed request, if there is one."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def _num_running(self) -> int:
        return (await self._client.load()).num_running

    async def _ask(self) -> None:
        while True:
            self.num_begun += 1
            events = self._client.generate(
                token_ids=next(self._prompts), max_tokens=self._num_new_tokens, temperature=0.0, ignore_eos=True
            )
            async with events:
                async for event in events:
                    if isinstance(event, Delta):
                        self.num_tokens += len(event.token_ids)
