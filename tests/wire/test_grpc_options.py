"""Keepalive: often enough to notice a dead peer, and never too often for the server."""

from __future__ import annotations

from baton.client import channel
from common.wire.grpc_options import channel_options, server_options


def test_servers_take_as_many_pings_as_either_client_sends() -> None:
    """A server counts pings that come sooner than it allows, and ends the connection (GOAWAY) after some of them."""
    server = dict(server_options())
    assert server["grpc.http2.max_ping_strikes"] == 0, "pings are counted against the client"
    for client in (dict(channel_options()), dict(channel.channel_options(None, None))):
        assert int(client["grpc.keepalive_time_ms"]) >= server["grpc.http2.min_recv_ping_interval_without_data_ms"]


def test_both_ends_look_for_a_dead_peer() -> None:
    for options in (dict(server_options()), dict(channel_options())):
        assert 0 < options["grpc.keepalive_time_ms"] <= 10_000
        assert 0 < options["grpc.keepalive_timeout_ms"] <= 5_000
    assert dict(channel_options())["grpc.keepalive_permit_without_calls"] == 1
