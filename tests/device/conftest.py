"""Fixtures: a device of each kind, with the controls that a test needs to drive it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from common.device.stream import Stream
from tests.device.rigs import BOUND_S, KINDS, Rig, open_rig


@pytest.fixture(params=KINDS)
def rig(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    rig = open_rig(request.param, monkeypatch)
    yield rig
    rig.release()
    rig.device.close(BOUND_S)


@pytest.fixture(params=["worker", "schedule"])
def stream(rig: Rig, request: pytest.FixtureRequest) -> Stream:
    """Each kind of stream in turn: a new stream of the device, and its schedule stream."""
    return rig.device.schedule_stream if request.param == "schedule" else rig.device.new_stream("forward")
