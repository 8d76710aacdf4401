"""Tests that for any bytes received, a service gives an answer or a documented status, holds nothing afterwards, and
keeps serving others.

`make fuzz` runs the same targets for as long as it is told to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from baton.v1 import prefill_pb2
from common.wire.codec_commands import PrefillBatch, decode_command
from common.wire.codec_frames import FrameCodec
from decode_service.edge.decode_edge import EventRouter
from decode_service.messages import Event, Tokens
from prefill_service.messages import CancelCallRows, OpenCall
from prefill_service.schedule.scheduler import PrefillEngine
from tests.fuzz.catalogue import TARGETS
from tests.fuzz.pure_targets import checksummed
from tests.fuzz.target import CORPUS, Run, Target
from tests.wire.strategies import PLAIN, VOCAB_SIZE
from tests.wire.wire_samples import LOGPROBS_ROW, PLAIN_ROW

NUM_EXAMPLES = {"pure": 60, "edge": 25}


@pytest.fixture(scope="module", params=TARGETS)
def opened(request: pytest.FixtureRequest) -> Iterator[tuple[Target, Run]]:
    target = TARGETS[request.param]
    with target.open() as run:
        yield target, run


def test_every_input_of_the_corpus(opened: tuple[Target, Run]) -> None:
    target, run = opened
    assert list(target.corpus_files())
    for path in target.corpus_files():
        try:
            run(path.read_bytes())
        except Exception as error:
            raise AssertionError(f"{path.relative_to(CORPUS)}: {error}") from error


@pytest.mark.parametrize("name", ["accepted", "segment", "prebuilt"])
def test_well_formed_seeds_are_still_understood(name: str) -> None:
    """If the corpus failed the first check of a frame, it would no longer reach the code after that check."""
    codec = FrameCodec(fingerprint=PLAIN, vocab_size=VOCAB_SIZE)
    frame = (CORPUS / "handoff_frame" / name).read_bytes()
    codec.decode(checksummed(prefill_pb2.HandoffFrame, frame), (PLAIN_ROW, LOGPROBS_ROW))
    batch = (CORPUS / "handoff_command" / "batch").read_bytes()
    command = decode_command(checksummed(prefill_pb2.HandoffCommand, batch))
    assert command == PrefillBatch(PLAIN, (PLAIN_ROW, LOGPROBS_ROW))


def replay(target: str, name: str) -> None:
    with TARGETS[target].open() as run:
        run((CORPUS / target / name).read_bytes())


def test_the_corpus_still_cancels_rows_over_the_real_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is made to start the call only after it has received the cancellation that follows."""
    heard: list[object] = []
    step: Callable[[Any, Sequence[object]], None] = PrefillEngine.step

    def step_with_two(engine: Any, commands: Sequence[object]) -> None:
        heard.extend(commands)
        if len(heard) >= 2:
            step(engine, heard if len(heard) - len(commands) < 2 else commands)

    monkeypatch.setattr(PrefillEngine, "step", step_with_two)
    replay("prefill_edge", "cancelled")
    opened, cancelled, *_ = heard
    assert isinstance(opened, OpenCall)
    assert isinstance(cancelled, CancelCallRows), heard


def test_the_corpus_still_yields_tokens_from_a_replicas_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[object] = []
    deliver = EventRouter.deliver

    def hear(router: EventRouter, delivered: Sequence[Event]) -> None:
        events.extend(delivered)
        deliver(router, delivered)

    monkeypatch.setattr(EventRouter, "deliver", hear)
    replay("replica", "whole")
    assert any(isinstance(event, Tokens) for event in events), events


@pytest.mark.thorough
def test_new_inputs(opened: tuple[Target, Run]) -> None:
    """The inputs are the same in every run."""
    target, run = opened

    @settings(
        max_examples=NUM_EXAMPLES["pure" if target.is_pure else "edge"],
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(target.inputs(target.seeds()))
    def attack(data: bytes) -> None:
        run(data)

    attack()


def test_the_corpus_has_a_folder_for_each_target_and_no_other() -> None:
    assert {path.name for path in CORPUS.iterdir()} == set(TARGETS)
