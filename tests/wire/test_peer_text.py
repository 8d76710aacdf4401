"""Tests that text from a peer is made safe in errors, in the log and in the client."""

from __future__ import annotations

import io
import json
import logging
import sys
import time

import grpc
import pytest
import structlog
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st

from baton.cli.output import print_json, print_text
from baton.codec import inference_load_from_wire, model_info_from_wire
from baton.errors import error_from_rpc
from baton.v1 import inference_pb2, types_pb2
from common.peer_text import MAX_PEER_TEXT_BYTES, peer_text
from common.rpc.errors import connection_words
from common.telemetry.logs import configure_logs
from gateway.errors import api_error_of, invalid, messages_error, openai_error

HOSTILE = "\x1b[2J\r\n\u202e\ud800" + "é" * 4000


@given(st.text(st.characters(), max_size=300), st.integers(64, 400))
def test_it_is_printable_and_bounded_and_escaped_once(text: str, max_bytes: int) -> None:
    shown = peer_text(text, max_bytes)
    assert shown.isprintable() and len(shown.encode()) <= max_bytes
    assert peer_text(shown, max_bytes) == shown
    if text.isprintable() and len(text.encode(errors="replace")) <= max_bytes:
        assert shown == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Grüße, 你好 🎉", "Grüße, 你好 🎉"),
        ("a\nb\tc\x1b[31m\x00\x7f\x9b", r"a\nb\tc\x1b[31m\x00\x7f\x9b"),
        ("\u2028\u202e\u200b\ufeff", r"\u2028\u202e\u200b\ufeff"),
        ("\ud800\U000e0001", r"\ud800\U000e0001"),
        ("x" * 513, "x" * 497 + "... (513 bytes)"),
    ],
    ids=["plain", "controls", "directions", "no characters", "long"],
)
def test_what_is_not_printable_is_escaped_as_python_does(text: str, shown: str) -> None:
    assert peer_text(text) == shown


def test_megabytes_cost_nothing() -> None:
    text = "\x1b" * 64_000_000
    begin_s = time.thread_time()
    assert peer_text(text).endswith("... (64000000 bytes)")
    assert time.thread_time() - begin_s < 1.0


def is_harmless(text: str, max_bytes: int = MAX_PEER_TEXT_BYTES) -> bool:
    return text.isprintable() and len(text.encode()) <= max_bytes


# ---- the log --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_no_field_of_a_log_line_is_long_or_commands_a_terminal(log_format: str) -> None:
    stream = io.StringIO()
    configure_logs("info", log_format, stream=stream)  # type: ignore[arg-type]
    logging.getLogger("foreign").warning("replica says %s", "\x1b[2J\nforged" + "x" * 100_000)
    structlog.get_logger("ours").warning("told", reason="\x1b[2J\nforged" + "x" * 100_000)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2 and "\x1b" not in stream.getvalue()
    assert all(line.isprintable() and len(line) < 10_000 for line in lines)
    if log_format == "json":
        foreign, ours = map(json.loads, lines)
        assert foreign["event"].startswith("replica says \\x1b[2J\\nforged")
        assert ours["reason"].startswith("\\x1b[2J\\nforged")


def test_tracebacks_stay_as_they_are() -> None:
    stream = io.StringIO()
    configure_logs("info", stream=stream)
    try:
        raise ValueError("x" * 5000)
    except ValueError:
        structlog.get_logger("ours").exception("a defect")
    line = json.loads(stream.getvalue())
    assert line["exception"].count("\n") >= 3 and "x" * 5000 in line["exception"]


# ---- a terminal -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_terminal", [True, False])
def test_codes_in_a_models_text_command_no_terminal_and_stay_where_it_is_piped(
    is_terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    print_text("a\tb\n\x1b[2J\x9b1mé👩‍👩‍👧\r")
    text = capsys.readouterr().out
    assert text == ("a\tb\n\\x1b[2J\\x9b1mé👩‍👩‍👧\\r" if is_terminal else "a\tb\n\x1b[2J\x9b1mé👩‍👩‍👧\r")


def test_a_line_of_json_has_no_such_codes_and_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    print_json("delta", text="a\n\x1b\x7f\x9b1mé")
    line = capsys.readouterr().out
    assert line.removesuffix("\n").isprintable()
    assert json.loads(line) == {"event": "delta", "text": "a\n\x1b\x7f\x9b1mé"}


# ---- the client and the gateway --------------------------------------------------------------------------------------


class Failed(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode, details: str, info: error_details_pb2.ErrorInfo) -> None:
        packed = any_pb2.Any()
        packed.Pack(info)
        self._code, self._details = code, details
        self._status = status_pb2.Status(code=code.value[0], message=details, details=[packed])

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> list[tuple[str, bytes]]:
        return [("grpc-status-details-bin", self._status.SerializeToString())]


@pytest.mark.parametrize("code", [grpc.StatusCode.INTERNAL, grpc.StatusCode.INVALID_ARGUMENT], ids=str)
def test_a_servers_words_are_harmless_to_the_client_and_to_who_asks_the_gateway(code: grpc.StatusCode) -> None:
    hostile = HOSTILE.replace("\ud800", "")
    info = error_details_pb2.ErrorInfo(reason=hostile, metadata={"field": hostile, hostile: hostile})
    error = error_from_rpc(Failed(code, hostile, info))
    assert error.code is code and str(error).startswith(r"\x1b[2J\r\n\u202e")
    assert is_harmless(str(error), 1024) and is_harmless(error.reason)
    assert all(map(is_harmless, (*error.metadata, *error.metadata.values())))
    told = api_error_of(error, {})
    for body in (openai_error(told), messages_error(told, "id")):
        assert all(is_harmless(str(value), 1024) for value in body["error"].values())


def test_a_field_that_a_caller_made_up_is_cut_in_the_answer() -> None:
    error = invalid("x" * 1_000_000, "is not served")
    assert is_harmless(str(error), 1024) and is_harmless(str(error.param))


def test_what_a_server_says_of_itself_is_harmless() -> None:
    hostile = HOSTILE.replace("\ud800", "")
    group = types_pb2.LayerGroup(name=hostile, num_layers=1, dtype=hostile)
    info = model_info_from_wire(
        inference_pb2.GetModelInfoResponse(
            model=hostile,
            architecture=hostile,
            device=hostile,
            dtype=hostile,
            version=hostile,
            fingerprint=types_pb2.Fingerprint(layer_groups=[group]),
        )
    )
    assert all(map(is_harmless, (info.model, info.architecture, info.device, info.dtype, info.version)))
    assert all(map(is_harmless, info.layer_groups))
    replica = inference_pb2.PrefillReplica(address=hostile, reason=hostile)
    load = inference_load_from_wire(
        inference_pb2.GetInferenceLoadResponse(instance_id=hostile, prefill_replicas=[replica])
    )
    (seen,) = load.prefill_replicas
    assert is_harmless(load.instance_id) and is_harmless(seen.address) and is_harmless(seen.reason, 1024)


@pytest.mark.parametrize("removed", ["{}", "Stream removed ({})"])
@pytest.mark.parametrize(
    ("details", "words"),
    [
        ("Deadline Exceeded", "no answer came in time"),
        ("Socket closed", "the connection broke: the server ended, or cannot be reached any more"),
        ("Cancelling all calls", "the server stopped"),
        ("ping timeout", "the server has not answered: it hangs or cannot be reached"),
        ("tokens: are odd", "tokens: are odd"),
    ],
)
def test_what_grpc_says_of_a_broken_call_is_put_in_words(removed: str, details: str, words: str) -> None:
    assert connection_words(removed.format(details)) == words


@pytest.mark.parametrize(
    "why", ["connect failed: addr: ipv4:9.9.9.9:5 error: {}", "Failed to connect to remote host: {}"]
)
def test_a_host_that_cannot_be_reached_wants_no_certificate(why: str) -> None:
    told = f"failed to connect to all addresses; last error: UNKNOWN: ipv4:9.9.9.9:5: {why}"
    assert (
        connection_words(told.format("Network is unreachable")) == "9.9.9.9:5 cannot be reached: Network is unreachable"
    )


@pytest.mark.parametrize(
    ("why", "words"),
    [
        (
            "UNAVAILABLE: {}: Handshake read failed (Endpoint closing)",
            "takes connections and answers none: it hangs, or is no gRPC service",
        ),
        (
            "{}: health check call failed; will retry after backoff",
            "does not say whether it is ready: health check call failed; will retry after backoff",
        ),
        ("UNAVAILABLE: {}: Socket closed", "closed the connection at once"),
        ("UNAVAILABLE: {}: recvmsg:Connection reset by peer (104)", "closed the connection at once"),
        ("UNAVAILABLE: {}: Tls handshake failed: SSLV3_ALERT_HANDSHAKE_FAILURE: OK", "closed the connection at once"),
        ("UNAVAILABLE: {}: Unwrap failed (TSI_DATA_CORRUPTED)", "closed the connection at once"),
        ("UNKNOWN: {}: something new", "cannot be used: something new"),
    ],
    ids=["hangs", "health", "closed", "reset", "alert", "alert of TLS 1.3", "unknown"],
)
def test_a_connection_that_fails_is_told_for_what_it_is(why: str, words: str) -> None:
    told = connection_words(f"failed to connect to all addresses; last error: {why.format('ipv4:9.9.9.9:5')}")
    assert told.startswith(f"9.9.9.9:5 {words}")
