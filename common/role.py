"""The role of a service's process. This module imports nothing, so that clients, settings and services can share it."""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    """A process is one of these: a prefill or a decode service."""

    PREFILL = "prefill"
    DECODE = "decode"
