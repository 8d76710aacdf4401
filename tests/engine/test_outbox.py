"""Tests that an engine hands over each event once and as early as it may."""

from __future__ import annotations

from typing import Any

import pytest

from common.device.stream import Event as DeviceEvent
from decode_service.messages import Event, Finished, RowTaken, StartHandoff, Tokens
from decode_service.schedule.dispatcher import PrefillDispatcher
from decode_service.schedule.step import LaunchedStep, SealedStep
from decode_service.speculate.spec_info import SpecInfo
from tests.engine.harness import ScriptedEngine
from tests.support.scripted_device import ScriptedDevice, run_needed

SPEC_INFOS = [None, SpecInfo.chain(2)]


def delivering(spec_info: SpecInfo | None) -> tuple[ScriptedEngine, list[Event]]:
    """Returns an engine in which one request runs, and the list of events it delivers from then on."""
    scripted = ScriptedEngine(spec_info=spec_info, delivers=True)
    scripted.submit("first", [5, 6, 7], 12)
    scripted.start("first")
    scripted.delivered.clear()
    return scripted, scripted.delivered


@pytest.mark.parametrize("spec_info", SPEC_INFOS)
def test_a_handoff_does_not_wait_for_the_forward_in_flight(spec_info: SpecInfo | None) -> None:
    scripted, heard = delivering(spec_info)
    heard_at_waits: list[list[Event]] = []

    def note_and_run(device: ScriptedDevice, event: DeviceEvent) -> None:
        heard_at_waits.append(list(heard))
        run_needed(device, event)

    scripted.device.on_synchronize = note_and_run
    scripted.submit("second", [8, 9], 4)
    scripted.step()
    assert [type(event) for event in heard_at_waits[0]] == [RowTaken, StartHandoff]


@pytest.mark.parametrize(
    ("spec_info", "has_published"), [(None, False), (SpecInfo.chain(2), False), (SpecInfo.chain(2), True)]
)
def test_tokens_wait_until_the_next_step_is_launched_or_waits(
    spec_info: SpecInfo | None, has_published: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With drafts a step waits before its launch for the lengths of the one before, unless they are there."""
    scripted, heard = delivering(spec_info)
    scripted.step()
    assert not heard, "the edge is told while a forward is to be launched"
    if has_published:
        scripted.forward.run_all()
    launched: list[bool] = []
    seal = LaunchedStep.seal

    def note_and_seal(self: LaunchedStep, **given: Any) -> SealedStep:
        launched.append(bool(heard))
        return seal(self, **given)

    monkeypatch.setattr(LaunchedStep, "seal", note_and_seal)
    scripted.step()
    assert any(isinstance(event, Tokens) for event in heard)
    assert launched == [spec_info is not None and not has_published]


@pytest.mark.parametrize("spec_info", SPEC_INFOS)
def test_nothing_is_held_back_while_the_engine_waits_for_commands(spec_info: SpecInfo | None) -> None:
    scripted, heard = delivering(spec_info)
    while scripted.engine.idle_timeout_s() == 0:
        scripted.step()
    assert isinstance(heard[-1], Finished)


@pytest.mark.parametrize("spec_info", SPEC_INFOS)
def test_everything_is_delivered_once(spec_info: SpecInfo | None) -> None:
    scripted, _ = delivering(spec_info)
    second = scripted.submit("second", [8, 9], 4)
    scripted.run()
    first = scripted.outcomes["first"]
    assert (first.token_ids, second.token_ids) == (first.expected, second.expected)


def ended_beside_another(spec_info: SpecInfo | None) -> tuple[ScriptedEngine, list[Event]]:
    """Returns an engine that keeps the end of a request until its next step, because another request's forward is in
    flight.
    """
    scripted, heard = delivering(spec_info)
    scripted.submit("second", [8, 9], 40)
    scripted.step()
    scripted.hand_over("second")
    scripted.step()
    scripted.landing.run_all()
    for _ in range(20):
        scripted.step()
        if "first" not in scripted.engine.lives.requests:
            break
    assert scripted.outcomes["first"].finished is None, "nothing is kept"
    return scripted, heard


@pytest.mark.parametrize("spec_info", SPEC_INFOS)
def test_who_has_ended_hears_so_when_the_next_step_raises(
    spec_info: SpecInfo | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted, heard = ended_beside_another(spec_info)

    def fail(_dispatcher: PrefillDispatcher) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(PrefillDispatcher, "collect", fail)
    with pytest.raises(RuntimeError, match="planted"):
        scripted.step()
    first = scripted.outcomes["first"]
    assert first.token_ids == first.expected and isinstance(heard[-1], Finished)


@pytest.mark.parametrize("spec_info", SPEC_INFOS)
def test_who_has_ended_hears_so_when_the_engine_is_closed(spec_info: SpecInfo | None) -> None:
    scripted, heard = ended_beside_another(spec_info)
    scripted.engine.close()
    first = scripted.outcomes["first"]
    assert first.token_ids == first.expected and isinstance(heard[-1], Finished)
