"""Slots of the KV ring on the prefill side: whose they are, until when, and what a call does that finds none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from common.device.cpu import CpuDevice
from common.wire.kv_ring import BLOCK_BYTES, KvRing
from prefill_service.segment_memory import SegmentMemory, SegmentPlace


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[KvRing]:
    ring = KvRing(num_bytes=3 * BLOCK_BYTES, directory=tmp_path)
    yield ring
    ring.close()


@pytest.fixture
def memory(ring: KvRing) -> SegmentMemory:
    return SegmentMemory(ring)


def taken(memory: SegmentMemory, call_id: str, *, is_written: bool = True) -> SegmentPlace:
    place = memory.take(call_id, BLOCK_BYTES)
    assert place is not None
    if is_written:
        memory.written(place)
    return place


def generation(place: SegmentPlace) -> int:
    assert place.slot is not None
    return place.slot.ticket.generation


def test_only_a_receiver_that_has_mapped_the_ring_gets_slots(memory: SegmentMemory) -> None:
    memory.share("near")
    assert taken(memory, "near").slot is not None
    assert taken(memory, "far").slot is None


def test_what_is_written_to_the_memory_is_in_the_slot(memory: SegmentMemory) -> None:
    memory.share("near")
    place = taken(memory, "near")
    device = CpuDevice(num_threads=1)
    place.memory(device).fill_(7)
    device.close(10.0)
    assert place.slot is not None and set(place.slot.payload.tolist()) == {7}


def test_a_call_waits_for_its_own_slots_and_one_without_any_sends_payload(memory: SegmentMemory) -> None:
    memory.share("greedy")
    memory.share("late")
    places = [taken(memory, "greedy") for _ in range(3)]
    assert memory.take("greedy", BLOCK_BYTES) is None
    assert taken(memory, "late").slot is None
    memory.give_back(generation(places[1]))
    assert taken(memory, "greedy").slot is not None


def test_a_lost_call_frees_its_slots_and_no_others(memory: SegmentMemory, ring: KvRing) -> None:
    for call_id in ("lost", "kept"):
        memory.share(call_id)
        taken(memory, call_id)
    memory.forget_call("lost")
    assert ring.num_free_bytes == 2 * BLOCK_BYTES
    assert taken(memory, "lost").slot is None, "it is forgotten"


def test_a_slot_that_is_still_being_written_is_free_only_after_that(memory: SegmentMemory, ring: KvRing) -> None:
    memory.share("lost")
    place = taken(memory, "lost", is_written=False)
    memory.forget_call("lost")
    assert ring.num_free_bytes == 2 * BLOCK_BYTES
    memory.written(place)
    assert ring.num_free_bytes == 3 * BLOCK_BYTES


def test_a_slot_comes_back_once_whoever_returns_it(memory: SegmentMemory, ring: KvRing) -> None:
    memory.share("call")
    place = taken(memory, "call")
    memory.give_back(generation(place))
    memory.give_back(generation(place))
    memory.forget_call("call")
    assert ring.num_free_bytes == 3 * BLOCK_BYTES


def test_the_slots_of_a_call_that_has_ended_well_are_free_when_they_come_back(
    memory: SegmentMemory, ring: KvRing
) -> None:
    memory.share("call")
    place = taken(memory, "call")
    memory.end_call("call")
    assert ring.num_free_bytes == 2 * BLOCK_BYTES
    memory.give_back(generation(place))
    assert ring.num_free_bytes == 3 * BLOCK_BYTES
