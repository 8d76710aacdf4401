"""TLS and mutual TLS, with certificates made only for these tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from typer.testing import CliRunner

from baton import AsyncClient, Client, Tls, errors
from baton.cli.main import app
from baton.server_info import HealthStatus
from tests.client.scripted_inference import ScriptedServer

CERTIFICATES = Path(__file__).with_name("certificates")
MUTUAL = Tls(
    ca_file=CERTIFICATES / "ca.pem",
    cert_file=CERTIFICATES / "client.pem",
    key_file=CERTIFICATES / "client.key",
    server_name="baton-test-server",
)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    """A server that requires a client certificate of the test CA."""
    pair = ((CERTIFICATES / "server.key").read_bytes(), (CERTIFICATES / "server.pem").read_bytes())
    credentials = grpc.ssl_server_credentials([pair], (CERTIFICATES / "ca.pem").read_bytes(), require_client_auth=True)
    server = ScriptedServer(credentials)
    yield server
    server.stop()


async def test_both_clients_speak_mutual_tls(server: ScriptedServer) -> None:
    with Client(server.address, tls=MUTUAL) as client:
        assert client.health() is HealthStatus.SERVING
    async with AsyncClient(server.address, tls=MUTUAL) as async_client:
        assert await async_client.health() is HealthStatus.SERVING


@pytest.mark.parametrize(
    ("tls", "words"),
    [
        pytest.param(None, "closed the connection at once: it wants TLS", id="plain text"),
        pytest.param(
            Tls(ca_file=MUTUAL.ca_file, server_name=MUTUAL.server_name),
            "closed the connection at once: it wants TLS, or a client certificate",
            id="no client certificate",
        ),
        pytest.param(
            Tls(cert_file=MUTUAL.cert_file, key_file=MUTUAL.key_file, server_name=MUTUAL.server_name),
            "is not trusted",
            id="the system's authorities",
        ),
        pytest.param(Tls(ca_file=Path(__file__)), "no TLS with these files", id="no CA"),
    ],
)
def test_a_connection_that_cannot_be_trusted_is_unavailable_and_says_why(
    server: ScriptedServer, tls: Tls | None, words: str
) -> None:
    with Client(server.address, tls=tls) as client, pytest.raises(errors.Unavailable) as refusal:
        client.health()
    assert server.address in str(refusal.value) and words in str(refusal.value)


def test_tls_to_a_server_without_it_says_so() -> None:
    server = ScriptedServer()
    with Client(server.address, tls=MUTUAL) as client, pytest.raises(errors.Unavailable) as refusal:
        client.health()
    server.stop()
    assert str(refusal.value).startswith(f"{server.address} does not speak TLS")


def test_a_file_that_cannot_be_read_is_refused_by_name() -> None:
    with pytest.raises(errors.InvalidArgument, match=r"ca_file: /no/such\.pem: No such file") as refusal:
        Client("127.0.0.1:1", tls=Tls(ca_file=Path("/no/such.pem")))
    assert refusal.value.field == "ca_file"


@pytest.mark.parametrize("alone", ["cert_file", "key_file"])
def test_a_certificate_and_its_key_go_together(alone: str) -> None:
    with pytest.raises(errors.InvalidArgument, match="cert_file and key_file go together") as refusal:
        Client("127.0.0.1:1", tls=Tls(**{alone: getattr(MUTUAL, alone)}))
    assert refusal.value.field == alone


def test_the_command_line_takes_the_same_files(server: ScriptedServer) -> None:
    flags = {
        "--ca-file": MUTUAL.ca_file,
        "--cert-file": MUTUAL.cert_file,
        "--key-file": MUTUAL.key_file,
        "--server-name": MUTUAL.server_name,
    }
    arguments = [str(part) for pair in flags.items() for part in pair]
    assert CliRunner().invoke(app, ["health", "--address", server.address, *arguments]).stdout == "serving\n"
