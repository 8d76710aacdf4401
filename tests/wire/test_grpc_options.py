"""Tests of keepalive pings: they are frequent enough to notice a dead peer, and never too frequent for the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc

from baton.client import channel
from common.rpc.grpc_options import channel_options, server_options
from tests.decode_edge.fake_engine import until
from tests.security.raw_http2 import ACK, GOAWAY, PING, RawHttp2, frame

NUM_PINGS = 20
BOUND_S = 10.0


def test_servers_take_as_many_pings_as_either_client_sends() -> None:
    """A server counts pings that come sooner than it allows, and ends the connection (GOAWAY) after a few of them."""
    server = dict(server_options())
    assert server["grpc.http2.max_ping_strikes"] == 0, "pings are counted against the client"
    for client in (dict(channel_options()), dict(channel.channel_options(None, None))):
        assert int(client["grpc.keepalive_time_ms"]) >= server["grpc.http2.min_recv_ping_interval_without_data_ms"]


def test_both_ends_look_for_a_dead_peer() -> None:
    for options in (dict(server_options()), dict(channel_options())):
        assert 0 < options["grpc.keepalive_time_ms"] <= 10_000
        assert 0 < options["grpc.keepalive_timeout_ms"] == options["grpc.http2.ping_timeout_ms"] <= 5_000
    assert dict(channel_options())["grpc.keepalive_permit_without_calls"] == 1


async def test_a_long_stream_outlives_any_number_of_pings() -> None:
    """A server with gRPC's default options would end the connection at the third ping."""
    server = grpc.aio.server(options=server_options())

    async def generate(_request: bytes, _context: object) -> AsyncIterator[bytes]:
        await asyncio.sleep(BOUND_S)
        yield b""

    handler = grpc.unary_stream_rpc_method_handler(generate)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("long", {"Generate": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    client = await RawHttp2.connect(f"127.0.0.1:{port}")
    try:
        stream = client.open("/long/Generate", b"")
        for number in range(NUM_PINGS):
            client.send(frame(PING, 0, 0, number.to_bytes(8, "big")))
        await until(lambda: len(answered(client)) >= NUM_PINGS or client.is_closed.is_set())
        assert client.of(0, GOAWAY) == [] and not client.is_closed.is_set() and not client.has_ended(stream)
    finally:
        await client.close()
        await server.stop(0)


def answered(client: RawHttp2) -> list[bytes]:
    return [payload for kind, flags, _, payload in client.frames if kind == PING and flags & ACK]
