"""The role of a service's process."""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    """What a process is: a prefill or a decode service."""

    PREFILL = "prefill"
    DECODE = "decode"
