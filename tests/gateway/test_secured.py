"""TLS on both sides, the decode service's token, and settings that cannot be followed."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest

import gateway.server
from common.config.gateway_settings import GatewaySettings
from common.errors import ConfigError, StartupError
from gateway.server import GatewayServer
from tests.client.scripted_inference import BOUND_S, ScriptedServer, delta, finished, started
from tests.gateway.gateway_here import gateway_here
from tests.security.certificates import Authority
from tests.support.loop_thread import LoopThread


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "ours")


def test_https_outside_and_mutual_tls_with_a_token_inside(
    loop: LoopThread, authority: Authority, tmp_path: Path
) -> None:
    files, inner = authority.issue("gateway"), authority.issue("decode")
    (tmp_path / "token").write_text("inner-token\nold-token\n")
    credentials = grpc.ssl_server_credentials(
        [(inner.key.read_bytes(), inner.certificate.read_bytes())],
        root_certificates=authority.ca.read_bytes(),
        require_client_auth=True,
    )
    decode = ScriptedServer(credentials)
    decode.inference.script = [started(), delta([1], "a"), finished()]
    try:
        with gateway_here(
            loop,
            decode.address,
            tls_cert=files.certificate,
            tls_key=files.key,
            decode_tls=True,
            decode_tls_ca=authority.ca,
            decode_token_file=tmp_path / "token",
        ) as here:
            trusting = ssl.create_default_context(cafile=str(authority.ca))
            with openai.OpenAI(
                base_url=f"https://127.0.0.1:{here.port}/v1",
                api_key="none",
                max_retries=0,
                http_client=openai.DefaultHttpxClient(verify=trusting),
            ) as client:
                assert client.completions.create(model="demo", prompt="hi").choices[0].text == "a"
            with pytest.raises(OSError):
                here.ask("GET", "/health/live")
    finally:
        decode.stop()
    assert decode.inference.metadata.get(timeout=BOUND_S)["authorization"] == "Bearer inner-token"


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"api_key_file": "absent"}, "api_key_file"),
        ({"decode_token_file": "absent"}, "decode_token_file"),
        ({"tls_cert": "absent", "tls_key": "absent"}, "tls_cert"),
        ({"decode_tls": True, "decode_tls_ca": "absent"}, "decode_tls"),
        ({"decode_tls": True, "decode": ("127.0.0.1:1", "127.0.0.1:2")}, "decode"),
        ({"listen": "192.0.2.1:1"}, "listen"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_followed_is_named(
    loop: LoopThread, settings: dict[str, Any], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    async def start() -> None:
        server = GatewayServer(GatewaySettings(**{"listen": "127.0.0.1:0", **settings}))
        try:
            await server.start()
        finally:
            await server.stop()

    with pytest.raises(ConfigError, match=rf"^{named}: "):
        loop.run(start())


def test_a_certificate_that_cannot_be_read_leaves_no_client_behind(
    loop: LoopThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[GatewaySettings] = []
    monkeypatch.setattr(gateway.server, "open_decode_client", opened.append)
    absent = tmp_path / "absent"

    async def build() -> None:
        GatewayServer(GatewaySettings(listen="127.0.0.1:0", tls_cert=absent, tls_key=absent))

    with pytest.raises(ConfigError, match=r"^tls_cert: "):
        loop.run(build())
    assert opened == []


def test_hosts_that_nobody_knows_end_the_start(loop: LoopThread) -> None:
    async def build() -> None:
        GatewayServer(GatewaySettings(listen="127.0.0.1:0", decode=("a..b:1", "a..c:2")))

    with pytest.raises(StartupError, match=r"^decode: "):
        loop.run(build())
