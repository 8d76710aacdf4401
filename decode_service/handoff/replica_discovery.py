"""Looks up the addresses behind a name again and again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from common.addresses import Name
from common.rpc.name_lookup import LookedUpName, LookUp

_log = structlog.get_logger(__name__)


class NameWatch:
    """Keeps the addresses behind one name up to date. For the event loop only.

    `found` are the addresses of the last successful look-up. `error` says why the last look-up failed, and is empty if
    it succeeded. `on_look_up` is called after each look-up.
    """

    def __init__(
        self,
        *,
        name: Name,
        look_up: LookUp,
        interval_s: float,
        timeout_s: float,
        on_look_up: Callable[[], None],
    ) -> None:
        self.name = name
        self._looked_up = LookedUpName(name=name, look_up=look_up, timeout_s=timeout_s)
        self._interval_s = interval_s
        self._on_look_up = on_look_up
        self._is_failing = False

    @property
    def found(self) -> tuple[str, ...]:
        return self._looked_up.found

    @property
    def error(self) -> str:
        return self._looked_up.error

    async def watch(self) -> None:
        """Looks the name up repeatedly until the task is cancelled."""
        while True:
            await self._looked_up.refresh()
            self._log_changes()
            self._on_look_up()
            await asyncio.sleep(self._interval_s)

    def _log_changes(self) -> None:
        if self.error and not self._is_failing:
            _log.warning("looking up %s failed, what was found stays: %s", self.name, self.error)
        elif self._is_failing and not self.error:
            _log.info("looking up %s succeeds again", self.name)
        self._is_failing = bool(self.error)
