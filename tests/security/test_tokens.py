"""Tests that callers which send a known token are served, and that all others get UNAUTHENTICATED. Health checks need
no token.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from structlog.testing import capture_logs
from typer.testing import CliRunner

from baton import AsyncClient, Client, errors
from baton.cli.main import app
from baton.client import PrefillClient
from baton.server_info import HealthStatus
from common.addresses import is_loopback
from common.errors import ConfigError
from common.rpc.bearer_tokens import authorization, read_tokens
from common.rpc.errors import error_info
from common.service.server import ServiceServer
from decode_service.handoff.grpc_replica import PrefillAccess
from decode_service.messages import Replica
from tests.decode_edge.edge_under_test import running_edge
from tests.security.transports import looking_at
from tests.support.prefill_edge import running_prefill_edge

OLD, NEW = "old-0123456789", "new-9876543210"


@pytest.fixture
async def decode() -> AsyncIterator[str]:
    """The address of a decode edge."""
    async with running_edge([], tokens=(OLD, NEW)) as edge:
        yield edge.address


@pytest.fixture
async def prefill() -> AsyncIterator[str]:
    """The address of a prefill edge."""
    async with running_prefill_edge(tokens=(OLD, NEW)) as edge:
        yield edge.address


@pytest.mark.parametrize("token", [OLD, NEW])
async def test_every_token_of_the_file_is_known(decode: str, prefill: str, token: str) -> None:
    async with AsyncClient(decode, token=token) as client:
        assert (await client.model_info()).model == "tiny"
    with Client(decode, token=token) as blocking:
        assert (await asyncio.to_thread(blocking.model_info)).model == "tiny"
    with PrefillClient(prefill, token=token) as operator:
        assert (await asyncio.to_thread(operator.load)).instance_id == "instance"


@pytest.mark.parametrize("token", [None, OLD[:-1], OLD + "x", OLD.upper(), "Bearer"])
async def test_without_a_known_token_every_call_but_health_is_refused(decode: str, token: str | None) -> None:
    async with AsyncClient(decode, token=token) as client:
        assert await client.health() is HealthStatus.SERVING
        for call in (client.model_info(), client.load(), client.complete("Hi")):
            with pytest.raises(errors.Unauthenticated) as refusal:
                await call
            assert (refusal.value.reason, refusal.value.field) == ("UNAUTHENTICATED", "authorization")
            assert "old" not in str(refusal.value)


async def test_reflection_needs_a_token(decode: str) -> None:
    async with grpc.aio.insecure_channel(decode) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await stub.ServerReflectionInfo(iter([asked])).read()
        assert refusal.value.code() == grpc.StatusCode.UNAUTHENTICATED
        answer = await stub.ServerReflectionInfo(iter([asked]), metadata=authorization(NEW)).read()
        assert answer.list_services_response.service


async def test_a_handoff_needs_a_token(prefill: str) -> None:
    async with grpc.aio.insecure_channel(prefill) as channel:
        call = channel.stream_stream("/baton.v1.Prefill/Handoff")(metadata=(("authorization", f"Basic {OLD}"),))
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await call.read()  # without a write, which gRPC reports as INTERNAL if the call has ended before it
        info = error_info(refusal.value)
        assert refusal.value.code() == grpc.StatusCode.UNAUTHENTICATED
        assert info is not None and info.reason == "UNAUTHENTICATED"


async def test_two_tokens_at_once_are_none(decode: str) -> None:
    async with grpc.aio.insecure_channel(decode) as channel:
        call = channel.unary_unary("/baton.v1.Inference/GetLoad")
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await call(b"", metadata=(*authorization("guess"), *authorization(OLD)))
        assert refusal.value.code() == grpc.StatusCode.UNAUTHENTICATED


async def looked_at(prefill: str, token: str | None) -> Replica:
    """Returns the state in which a decode service that sends `token` sees the prefill service."""
    shown = () if token is None else authorization(token)
    decode, transport = await looking_at(prefill, access=PrefillAccess(None, shown))

    def is_looked_at(replica: Replica) -> bool:
        return "not looked" not in str(replica.error)

    try:
        return await asyncio.to_thread(decode.latest_replica, is_looked_at)
    finally:
        await transport.close()


async def test_a_decode_service_that_shows_a_token_is_ready_and_one_that_does_not_says_why(prefill: str) -> None:
    assert (await looked_at(prefill, NEW)).is_ready
    for token in (None, "wrong"):
        replica = await looked_at(prefill, token)
        assert not replica.is_ready
        assert "UNAUTHENTICATED" in str(replica.error)


def written(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_a_file_holds_one_token_a_line(tmp_path: Path) -> None:
    text = f"\ufeff{OLD}\r\n\r\n  {NEW}\t\n{OLD}\n{NEW}"
    assert read_tokens("auth_token_file", written(tmp_path / "tokens", text)) == (OLD, NEW)


@pytest.mark.parametrize(
    ("mode", "warns"), [(0o600, False), (0o400, False), (0o640, True), (0o644, True), (0o664, True)]
)
def test_a_file_that_others_may_read_is_warned_about(tmp_path: Path, mode: int, warns: bool) -> None:
    path = written(tmp_path / "tokens", OLD)
    path.chmod(mode)
    with capture_logs() as log:
        assert read_tokens("auth_token_file", path) == (OLD,)
    assert [(line["event"], line["mode"]) for line in log] == [("secret_open_to_others", f"{mode:o}")] * warns
    assert OLD not in str(log)


def test_a_file_that_everybody_may_write_to_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "tokens", OLD)
    path.chmod(0o666)
    with pytest.raises(ConfigError, match="everybody may write to it"):
        read_tokens("auth_token_file", path)


BAD_FILES: dict[str, str | bytes] = {
    "empty": "",
    "blank": " \n\n",
    "not text": b"\xff\xfe",
    "a space": "top secret\n",
    "not ASCII": "sécret-sécret\n",
    "short": "secret\n",
    "a form feed": "top\x0csecret-secret\n",
    "a line separator": "top\u2028secret-secret\n",
    "a mark inside": "secret-\ufeffsecret\n",
    "huge": "secret-secret\n" * 100_000,
}


@pytest.mark.parametrize("kind", [*BAD_FILES, "absent", "a directory", "endless"])
def test_a_file_without_tokens_is_refused_by_its_key_and_never_quoted_and_by_the_command_line_in_the_same_words(
    tmp_path: Path, kind: str
) -> None:
    if kind in BAD_FILES:
        path = written(tmp_path / "tokens", BAD_FILES[kind])
    else:
        path = {"absent": tmp_path / "absent", "a directory": tmp_path, "endless": Path("/dev/zero")}[kind]
    with pytest.raises(ConfigError, match=r"^auth_token_file: ") as refusal:
        read_tokens("auth_token_file", path)
    assert "cret" not in str(refusal.value)
    result = CliRunner().invoke(app, ["info", "--address=127.0.0.1:1", f"--token-file={path}"])
    assert result.exit_code == 2
    words = "".join(str(refusal.value).replace("auth_token_file", "--token-file").split())
    assert words in "".join(result.output.replace("│", "").split()), "wherever its lines are broken"


def test_the_command_line_looks_at_the_file_s_mode(tmp_path: Path) -> None:
    path = written(tmp_path / "tokens", f"\ufeff{OLD}\r\n")
    for mode, words, code in ((0o600, "", 1), (0o644, "others may read it: chmod 600", 1), (0o666, "everybody may", 2)):
        path.chmod(mode)
        result = CliRunner().invoke(app, ["info", "--address=127.0.0.1:1", f"--token-file={path}"])
        assert (result.exit_code, words in result.output, OLD in result.output) == (code, True, False)


@pytest.mark.parametrize("token", ["", "two words", "line\nfeed", "sécret"])
def test_a_client_refuses_a_token_that_cannot_travel(token: str) -> None:
    with pytest.raises(ValueError, match="token") as refusal:
        Client("127.0.0.1:1", token=token)
    assert not token or token not in str(refusal.value)


async def test_the_command_line_reads_its_token_from_a_file(decode: str, tmp_path: Path) -> None:
    def info(*arguments: str, **environment: str) -> tuple[int, str]:
        result = CliRunner(env=environment).invoke(app, ["info", "--json", "--address", decode, *arguments])
        return result.exit_code, result.output

    known = str(written(tmp_path / "token", f"{NEW}\n"))
    code, output = await asyncio.to_thread(info, "--token-file", known)
    assert (code, '"model"' in output) == (0, True), output
    assert (await asyncio.to_thread(info, BATON_TOKEN_FILE=known))[0] == 0
    code, output = await asyncio.to_thread(info)
    assert code == 1
    assert "UNAUTHENTICATED" in output
    assert (await asyncio.to_thread(info, "--token-file", str(tmp_path / "absent")))[0] == 2


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:1", True),
        ("127.8.8.8:1", True),
        ("[::1]:1", True),
        ("localhost:1", True),
        ("dns:///localhost:1", True),
        ("dns:///prefill:1", False),
        ("0.0.0.0:1", False),
        ("[::]:1", False),
        ("10.0.0.1:1", False),
        ("decode.example:1", False),
    ],
)
def test_what_is_loopback(address: str, expected: bool) -> None:
    assert is_loopback(address) is expected


# The second address belongs to nobody (RFC 5737). Listening on it fails, but that does not matter here.
@pytest.mark.parametrize(
    ("host", "protection", "expected"),
    [
        ("192.0.2.1", {"tokens": (OLD,)}, ["tokens_in_plain_text"]),
        ("192.0.2.1", {}, ["open_to_all"]),
        ("192.0.2.1", {"checks_certificates": True}, []),
        ("127.0.0.1", {"tokens": (OLD,)}, []),
        ("127.0.0.1", {}, []),
        ("localhost", {}, []),
    ],
)
async def test_a_service_that_is_open_beyond_this_machine_says_so_once(
    host: str, protection: dict[str, Any], expected: list[str]
) -> None:
    server = ServiceServer(service_name="baton.v1.Nothing", **protection)
    with capture_logs() as log, suppress(ConfigError):
        await server.start(f"{host}:0")
    await server.stop(0)
    assert [line["event"] for line in log if line["log_level"] == "warning"] == expected
    assert OLD not in str(log)
