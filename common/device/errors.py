"""Errors of devices and their streams. A request that is affected by one ends with an EngineFault.

EngineFault
├── DeviceTimeout     an event or a stream did not finish within its bound
├── PieceFailed       a piece (a unit of work on a stream) raised; its exception is the cause
├── StreamClosed      the stream was closed, or died, before it reached this work
└── DeviceLost        the device faulted and runs nothing any more
"""

from __future__ import annotations

from common.errors import EngineFault


class DeviceTimeout(EngineFault):
    """An event or a stream did not finish in time. The work may still be running; event and stream stay usable."""


class PieceFailed(EngineFault):
    """A piece (a unit of work on a stream) has failed. The exception that it raised is the `__cause__`."""

    @property
    def is_of_device(self) -> bool:
        """True if the device or the stream itself failed, so that no later work on it can succeed either."""
        return is_of_device(self.__cause__)


class StreamClosed(EngineFault):
    """The stream was closed, or its thread ended, before it reached this work."""


class DeviceLost(EngineFault):
    """The device faulted and runs nothing any more."""


def is_of_device(error: BaseException | None) -> bool:
    """Returns True if `error` means that the whole device or stream failed, not only one piece of work."""
    return isinstance(error, DeviceLost | StreamClosed)
