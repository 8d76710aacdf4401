"""What goes wrong on a device. A request that meets one ends as an EngineFault.

EngineFault
├── DeviceTimeout     an event or a stream did not finish within its bound
├── PieceFailed       the work an event covers raised: the piece's own exception is the cause
├── StreamClosed      the stream was closed, or died, before it reached this work
└── DeviceLost        the device faulted and runs nothing any more
"""

from __future__ import annotations

from common.errors import EngineFault


class DeviceTimeout(EngineFault):
    """An event or stream did not finish in time. Its work may still be running, and both stay usable."""


class PieceFailed(EngineFault):
    """Raised `from` the exception of the piece that failed first."""

    @property
    def is_of_device(self) -> bool:
        """Whether the device or the stream failed, not only the piece: then nothing there can succeed."""
        return is_of_device(self.__cause__)


class StreamClosed(EngineFault):
    pass


class DeviceLost(EngineFault):
    pass


def is_of_device(error: BaseException | None) -> bool:
    return isinstance(error, DeviceLost | StreamClosed)
