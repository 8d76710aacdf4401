"""Tests of the gRPC transport with replicas that break the protocol, stall, disagree, leave and return."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from dataclasses import replace

import grpc
import pytest
from grpc_health.v1 import health_pb2

from baton.v1 import prefill_pb2
from common.errors import EngineFault, FingerprintMismatch, PrefillUnavailable, RowFailure
from common.service.server import ServerLimits
from common.wire.codec_fingerprint import encode_fingerprint
from common.wire.codec_frames import FrameCodec
from common.wire.framing import seal_bytes
from common.wire.handoff import Accepted, RowFailed
from decode_service.handoff.grpc_transport import GrpcTransport
from decode_service.handoff.transport import HandoffTimeouts
from decode_service.messages import CallEnded, FrameArrived, Replica, ReplicasChanged, StartHandoff
from tests.handoff.homes import FAST
from tests.handoff.raw_replica import RawReplica
from tests.handoff.samples import FINGERPRINT, ROOMY_BUDGET_BYTES, failed, prebuilt, row, segment
from tests.handoff.scripted_prefill import RecordingDecode
from tests.support.free_ports import free_ports
from tests.support.loop_thread import LoopThread
from tests.support.prefill_edge import start_prefill_edge
from tests.support.running_pair import wait_until
from tests.wire.strategies import VOCAB_SIZE

CODEC = FrameCodec(fingerprint=FINGERPRINT, vocab_size=VOCAB_SIZE)
ACCEPTED = CODEC.encode(Accepted("raw"))
OTHER = replace(FINGERPRINT, target_weights_digest="other")


class Rig:
    """A transport, the decode engine that gets its reports, and the replicas that the test starts."""

    def __init__(self) -> None:
        self.loop = LoopThread()
        self.decode = RecordingDecode()
        self._replicas: list[RawReplica] = []

    def bring_up(self, replica: RawReplica) -> str:
        self.loop.run(replica.start())
        self._replicas.append(replica)
        return f"127.0.0.1:{replica.port}"

    def connect(self, *addresses: str, timeouts: HandoffTimeouts = FAST, num_channels: int = 2) -> GrpcTransport:
        async def build() -> GrpcTransport:
            transport = GrpcTransport(
                post=self.decode.post,
                addresses=addresses,
                fingerprint=FINGERPRINT,
                vocab_size=VOCAB_SIZE,
                receive_budget_bytes=ROOMY_BUDGET_BYTES,
                timeouts=timeouts,
                num_channels_per_replica=num_channels,
            )
            await transport.open()
            return transport

        self.transport = self.loop.run(build())
        return self.transport

    def call(self, replica: RawReplica, *, timeouts: HandoffTimeouts = FAST) -> RecordingDecode:
        """Starts a replica and, once it is ready, a call named "call" to it. Returns the decode side's record."""
        address = self.bring_up(replica)
        transport = self.connect(address, timeouts=timeouts)
        self.decode.latest_replica(is_ready)
        transport.start(StartHandoff("call", address, (row(),)))
        return self.decode

    def close(self) -> None:
        self.loop.run(self.transport.close())
        for replica in self._replicas:
            self.loop.run(replica.stop())
        self.loop.close()


def is_ready(replica: Replica) -> bool:
    return replica.is_ready


def is_not_ready(replica: Replica) -> bool:
    return not replica.is_ready


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.close()


# ---- a replica that sends hostile text -------------------------------------------------------------------------------


HOSTILE = '\x1b[2J\x1b]0;pwned\x07\n{"event": "a line of its own"}\r\u202egnp.exe\x00' + "x" * 1_900_000


def assert_harmless(*texts: object) -> None:
    for text in map(str, texts):
        assert text.isprintable() and len(text.encode()) < 1024, text[:200]


def test_a_message_of_a_row_that_failed_is_cut_and_escaped_where_the_frame_is_decoded(rig: Rig) -> None:
    replica = RawReplica(instance_id="\x1b[1m" + "i" * 10_000)
    replica.frames = [CODEC.encode(Accepted(HOSTILE)), CODEC.encode(replace(failed(0), message=HOSTILE))]
    decode = rig.call(replica)
    assert decode.ended("call").error is None
    accepted, last = decode.arrived("call")
    assert isinstance(accepted, Accepted) and isinstance(last, RowFailed)
    assert_harmless(accepted.instance_id, last.message)
    assert last.message.startswith("\\x1b[2J") and last.message.endswith(f"... ({len(HOSTILE.encode())} bytes)")


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INVALID_ARGUMENT], ids=str)
def test_the_details_of_a_status_are_cut_and_escaped(rig: Rig, code: grpc.StatusCode) -> None:
    replica = RawReplica()
    replica.status, replica.details = code, HOSTILE[:4000]
    error = rig.call(replica).ended("call").error
    assert code.name in str(error) and "\\x1b[2J" in str(error)
    assert_harmless(error)


def test_what_a_replica_answers_to_a_look_is_harmless_in_the_log(rig: Rig, logged: Callable[[], str]) -> None:
    replica = RawReplica(instance_id=HOSTILE[:100_000])
    answer = prefill_pb2.GetFingerprintResponse(
        fingerprint=encode_fingerprint(FINGERPRINT), instance_id=replica.instance_id, kv_pool=HOSTILE[:100_000]
    )
    replica.answers = {"GetFingerprint": answer.SerializeToString()}
    rig.connect(rig.bring_up(replica))
    rig.decode.latest_replica(is_ready)
    told = [line for line in logged().splitlines() if "prefill replica" in line]
    assert any("is instance" in line for line in told) and any("is not the name of a pool" in line for line in told)
    assert_harmless(*told)


def test_a_fingerprint_of_hostile_words_is_named_and_harmless(rig: Rig) -> None:
    replica = RawReplica(replace(FINGERPRINT, algorithm=HOSTILE[:100_000]))
    rig.connect(rig.bring_up(replica))
    replica_seen = rig.decode.latest_replica(lambda seen: isinstance(seen.error, FingerprintMismatch))
    assert_harmless(*vars(replica_seen.error).values() if replica_seen.error else ())


# ---- a replica that breaks the protocol -----------------------------------------------------------------------------


MALFORMED = {
    "crc32c": CODEC.encode(segment(0, 0))[:-1] + b"\0",
    "HandoffFrame": seal_bytes(b"\xff\xff"),
    "frame": seal_bytes(b""),
    "kv_segment.row": CODEC.encode(replace(segment(0, 0), row=1)),
    "kv_segment.payload": CODEC.encode(replace(segment(0, 0), payload=b"")),
    "prebuilt_batch.seq_lens": CODEC.encode(prebuilt(0, num_tokens=5)),
    "accepted": ACCEPTED,
}


@pytest.mark.parametrize("field", MALFORMED)
def test_a_malformed_frame_fails_the_call_naming_the_field(rig: Rig, field: str) -> None:
    replica = RawReplica()
    replica.frames = (ACCEPTED, CODEC.encode(segment(0, 0)), MALFORMED[field], CODEC.encode(segment(0, 1)))
    end = rig.call(replica).ended("call")
    assert isinstance(end.error, EngineFault)
    assert f"broke the protocol: {field}: " in str(end.error)
    assert len(rig.decode.arrived("call")) == 2


def test_a_frame_before_accepted_fails_the_call(rig: Rig) -> None:
    replica = RawReplica()
    replica.frames = (CODEC.encode(segment(0, 0)), ACCEPTED)
    end = rig.call(replica).ended("call")
    assert isinstance(end.error, EngineFault)
    assert "is not Accepted" in str(end.error)
    assert rig.decode.arrived("call") == []


def test_an_oversized_frame_fails_the_call(rig: Rig) -> None:
    replica = RawReplica()
    replica.frames = (ACCEPTED, b"\0" * (17 << 20))
    end = rig.call(replica).ended("call")
    assert isinstance(end.error, EngineFault)
    assert "larger than max" in str(end.error)


def test_a_broken_call_leaves_the_next_one_well(rig: Rig) -> None:
    replica = RawReplica()
    replica.frames = (ACCEPTED, b"\xff\xff")
    rig.call(replica).ended("call")
    replica.frames = (ACCEPTED, CODEC.encode(segment(0, 0)), CODEC.encode(prebuilt(0)))
    rig.transport.start(StartHandoff("next", f"127.0.0.1:{replica.port}", (row(),)))
    assert rig.decode.ended("next").error is None


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, PrefillUnavailable),
        (grpc.StatusCode.CANCELLED, PrefillUnavailable),
        (grpc.StatusCode.INTERNAL, PrefillUnavailable),
        (grpc.StatusCode.UNKNOWN, EngineFault),
        (grpc.StatusCode.UNIMPLEMENTED, EngineFault),
    ],
)
def test_a_status_without_details_is_a_lost_peer_or_a_fault(
    rig: Rig, status: grpc.StatusCode, kind: type[Exception]
) -> None:
    replica = RawReplica()
    replica.frames = (ACCEPTED,)
    replica.status = status
    end = rig.call(replica).ended("call")
    assert type(end.error) is kind
    assert f"{status.name}: the script says so" in str(end.error)


def test_a_replica_without_room_for_a_call_refuses_its_rows_and_stays_ready(rig: Rig) -> None:
    edge = rig.loop.run(start_prefill_edge(server_limits=ServerLimits(max_streams=1)))
    transport = rig.connect(edge.address)
    rig.decode.latest_replica(is_ready)
    transport.start(StartHandoff("first", edge.address, (row(),)))
    edge.engine.opened()
    transport.start(StartHandoff("second", edge.address, (row(), row("2"))))
    assert rig.decode.ended("second").error is None
    refused = [frame for frame in rig.decode.arrived("second") if isinstance(frame, RowFailed)]
    assert [(each.row, each.reason, each.retryable, each.retry_after_ms) for each in refused] == [
        (number, RowFailure.CAPACITY, True, 1000) for number in range(2)
    ]
    assert rig.decode.latest_replica(lambda _: True).is_ready
    rig.loop.run(edge.server.stop(0))


# ---- a replica that stalls ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("is_silent", "timeout", "words"),
    [(True, "answer_timeout_s", "no answer within 0.05 s"), (False, "accept_timeout_s", "no frame within 0.05 s")],
    ids=["no head", "no Accepted"],
)
def test_no_accepted_in_time_ends_the_call(rig: Rig, is_silent: bool, timeout: str, words: str) -> None:
    replica = RawReplica()
    replica.hangs, replica.is_silent = True, is_silent
    end = rig.call(replica, timeouts=replace(FAST, **{timeout: 0.05})).ended("call")
    assert isinstance(end.error, PrefillUnavailable)
    assert words in str(end.error)
    assert rig.decode.arrived("call") == []


def test_no_progress_in_time_ends_the_call(rig: Rig) -> None:
    replica = RawReplica()
    replica.frames = (ACCEPTED, CODEC.encode(segment(0, 0)))
    replica.hangs = True
    end = rig.call(replica, timeouts=replace(FAST, progress_timeout_s=0.05)).ended("call")
    assert isinstance(end.error, PrefillUnavailable)
    assert "no frame within 0.05 s" in str(end.error)


def test_a_replica_that_sends_nothing_keeps_its_call_while_its_engine_steps_and_no_longer(rig: Rig) -> None:
    replica = RawReplica()
    replica.frames, replica.hangs, replica.is_stepping = (ACCEPTED,), True, True
    rig.call(replica, timeouts=replace(FAST, progress_timeout_s=1.0))
    num_steps = replica.num_steps
    rig.decode.latest_replica(lambda state: state.num_uncomputed_tokens > num_steps + 1.5 / FAST.poll_interval_s)
    assert rig.decode.num_ends("call") == 0
    replica.is_stepping = False
    end = rig.decode.ended("call")
    assert isinstance(end.error, PrefillUnavailable)
    assert "no frame within 1.0 s" in str(end.error)


def test_a_replica_that_listens_but_never_answers_is_not_ready(rig: Rig) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        rig.connect(address, timeouts=replace(FAST, poll_timeout_s=0.05))
        replica = rig.decode.latest_replica(lambda replica: "not looked" not in str(replica.error))
        assert "DEADLINE_EXCEEDED" in str(replica.error)
        assert not replica.is_ready


# ---- readiness ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("instance_id", ["raw", ""])
def test_a_mismatched_replica_is_never_ready_and_the_field_is_named(
    rig: Rig, logged: Callable[[], str], instance_id: str
) -> None:
    address = rig.bring_up(RawReplica(fingerprint=OTHER, instance_id=instance_id))
    transport = rig.connect(address)
    error = rig.decode.latest_replica(lambda replica: "not looked" not in str(replica.error)).error
    assert isinstance(error, FingerprintMismatch)
    assert (error.field, error.ours, error.theirs) == ("target_weights_digest", "beef", "other")
    assert "fingerprints differ in target_weights_digest" in logged()
    transport.start(StartHandoff("call", address, (row(),)))
    assert isinstance(rig.decode.ended("call").error, FingerprintMismatch)


@pytest.mark.parametrize("method", ["Check", "GetLoad", "GetFingerprint"])
def test_a_replica_that_answers_something_else_is_not_ready_and_its_answer_named(rig: Rig, method: str) -> None:
    raw = RawReplica()
    raw.answers = {method: b"\xff"}
    rig.connect(rig.bring_up(raw))
    replica = rig.decode.latest_replica(lambda replica: "not looked" not in str(replica.error))
    assert not replica.is_ready
    assert "answered something else: " in str(replica.error)


@pytest.mark.parametrize(
    ("answer", "words"),
    [(b"\xff", "answered something else: "), (grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE: the script says so")],
)
def test_a_replica_that_is_asked_for_its_pool_in_vain_stays_ready(
    rig: Rig, logged: Callable[[], str], answer: bytes | grpc.StatusCode, words: str
) -> None:
    raw = RawReplica()
    without_pool = prefill_pb2.GetFingerprintResponse(
        fingerprint=encode_fingerprint(FINGERPRINT), instance_id=raw.instance_id, nixl_pool=prefill_pb2.NixlPool()
    )
    raw.answers = {"GetFingerprint": without_pool.SerializeToString()}
    rig.connect(rig.bring_up(raw), timeouts=replace(FAST, pool_retry_s=0.05))
    rig.decode.latest_replica(is_ready)
    raw.answers = {"GetFingerprint": answer}
    wait_until(lambda: words in logged())
    raw.num_free_slots = 3
    rig.decode.latest_replica(lambda replica: replica.num_free_slots == 3)
    states = [report.replicas[0].is_ready for report in rig.decode.reports.all() if isinstance(report, ReplicasChanged)]
    assert all(states[states.index(True) :])


def test_a_call_accepted_with_another_fingerprint_ends_naming_the_field(rig: Rig) -> None:
    replica = RawReplica()
    replica.frames = (FrameCodec(fingerprint=OTHER, vocab_size=VOCAB_SIZE).encode(Accepted("raw")),)
    end = rig.call(replica).ended("call")
    assert isinstance(end.error, FingerprintMismatch)
    assert end.error.field == "target_weights_digest"


def test_a_replica_whose_fingerprint_still_agrees_is_ready_again_after_such_a_call(rig: Rig) -> None:
    replica = RawReplica()
    replica.frames = (FrameCodec(fingerprint=OTHER, vocab_size=VOCAB_SIZE).encode(Accepted("raw")),)
    rig.call(replica).ended("call")
    rig.decode.latest_replica(is_ready)
    reports = rig.decode.reports.all()
    end = next(i for i, report in enumerate(reports) if isinstance(report, CallEnded))
    before = [report for report in reports[:end] if isinstance(report, ReplicasChanged)]
    assert not before[-1].replicas[0].is_ready, "the engine would choose it again"
    assert not isinstance(before[-1].replicas[0].error, FingerprintMismatch), "the engine would give up on it"


def test_a_replica_that_is_not_ready_says_so_until_it_is(rig: Rig) -> None:
    raw = RawReplica()
    raw.health = health_pb2.HealthCheckResponse.NOT_SERVING
    rig.connect(rig.bring_up(raw))
    replica = rig.decode.wait_for_replica(lambda replica: "is not ready" in str(replica.error))
    assert isinstance(replica.error, PrefillUnavailable)
    raw.health = health_pb2.HealthCheckResponse.SERVING
    assert rig.decode.latest_replica(is_ready).error is None


def test_the_load_is_followed(rig: Rig) -> None:
    raw = RawReplica()
    rig.connect(rig.bring_up(raw))
    rig.decode.latest_replica(lambda replica: replica.num_uncomputed_tokens == 0 and replica.is_ready)
    raw.num_free_slots, raw.max_cached_tokens, raw.num_evicted_tokens = 3, 7, 11
    raw.num_uncomputed_tokens = 5
    replica = rig.decode.latest_replica(lambda replica: replica.num_uncomputed_tokens == 5 and replica.takes(1 << 20))
    assert (replica.instance_id, replica.num_free_slots) == ("raw", 3)
    assert (replica.max_cached_tokens, replica.num_evicted_tokens) == (7, 11)
    raw.max_context_tokens = 100
    rig.decode.latest_replica(lambda replica: replica.takes(100) and not replica.takes(101))


def test_start_order_does_not_matter(rig: Rig) -> None:
    raw = RawReplica(port=free_ports(1)[0])
    address = rig.bring_up(raw)
    rig.loop.run(raw.stop())
    rig.connect(address)
    rig.decode.wait_for_replica(lambda replica: "UNAVAILABLE" in str(replica.error))
    rig.loop.run(raw.start())
    rig.decode.latest_replica(is_ready)


def test_a_restarted_replica_serves_again(rig: Rig) -> None:
    raw = RawReplica(port=free_ports(1)[0])
    raw.frames, raw.hangs = (ACCEPTED,), True
    rig.call(raw)
    rig.decode.reports.wait_until(lambda reports: any(isinstance(report, FrameArrived) for report in reports))
    rig.loop.run(raw.stop())
    assert isinstance(rig.decode.ended("call").error, PrefillUnavailable)
    raw.instance_id, raw.frames, raw.hangs = "again", (ACCEPTED, CODEC.encode(prebuilt(0))), False
    rig.loop.run(raw.start())
    rig.decode.latest_replica(is_ready)
    rig.transport.start(StartHandoff("next", f"127.0.0.1:{raw.port}", (row(),)))
    assert rig.decode.ended("next").error is None


def test_a_replica_that_returns_as_another_model_is_refused(rig: Rig) -> None:
    raw = RawReplica()
    rig.connect(rig.bring_up(raw))
    rig.decode.latest_replica(is_ready)
    raw.fingerprint, raw.instance_id = OTHER, "another"
    rig.decode.latest_replica(lambda replica: isinstance(replica.error, FingerprintMismatch))


def test_one_replica_does_not_hide_another(rig: Rig) -> None:
    good, bad = rig.bring_up(RawReplica()), rig.bring_up(RawReplica(fingerprint=OTHER))
    rig.connect(good, bad)
    rig.decode.wait_for_replica(lambda replica: replica.address == good and replica.is_ready)
    rig.decode.wait_for_replica(
        lambda replica: replica.address == bad and isinstance(replica.error, FingerprintMismatch)
    )


def test_calls_take_turns_on_as_many_connections_as_were_asked_for(rig: Rig) -> None:
    replica = RawReplica()
    replica.frames = [ACCEPTED, CODEC.encode(prebuilt(0))]
    address = rig.bring_up(replica)
    transport = rig.connect(address, num_channels=3)
    rig.decode.latest_replica(is_ready)
    for number in range(6):
        transport.start(StartHandoff(f"call {number}", address, (row(),)))
        assert rig.decode.ended(f"call {number}").error is None
    assert len(set(replica.peers)) == 3
    assert replica.peers[:3] == replica.peers[3:]
