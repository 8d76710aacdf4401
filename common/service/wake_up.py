"""How an engine waits for what its streams do: told by those that tell, else by looking often."""

from __future__ import annotations

from collections.abc import Callable

from common.device.stream import Device

_LOOK_WAIT_S = 0.001
_TOLD_WAIT_S = 0.05  # what nobody told of is seen all the same


class WakeUp:
    """The engine's thread sets `wake`, streams' threads call `told`, which do nothing before."""

    def __init__(self, device: Device) -> None:
        self._tells = device.tells_of_events
        self.wake: Callable[[], None] | None = None

    def told(self) -> None:
        """An OnEvent: a stream came to what the engine may wait for."""
        if self.wake is not None:
            self.wake()

    @property
    def wait_s(self) -> float:
        """How long the engine may wait before it looks again."""
        return _TOLD_WAIT_S if self._tells and self.wake is not None else _LOOK_WAIT_S
