"""gRPC options of servers and channels: limits of message sizes, and keepalive pings that detect a dead peer."""

from __future__ import annotations

from collections.abc import Sequence

# Enough for a PrefillBatch or PrebuiltBatch of many rows. KV segments have a lower limit.
MAX_MESSAGE_BYTES = 16 << 20
MAX_SEGMENT_BYTES = 8 << 20  # small, because each occupies both engines and both event loops for a while

# How many bytes a sender may send to a receiver that does not read. It is fixed, because gRPC's automatic window grows
# to many messages, and then the receive budget would limit little.
STREAM_WINDOW_BYTES = 1 << 20

# Calls with more metadata end as RESOURCE_EXHAUSTED. gRPC's soft and hard limits are both set to this, because between
# them gRPC refuses calls at random.
MAX_METADATA_BYTES = 16 << 10

HANDSHAKE_TIMEOUT_S = 10.0
IDLE_TIMEOUT_S = 300.0
_MAX_STREAMS_PER_CONNECTION = 4096
_KEEPALIVE_MS = 10_000
_KEEPALIVE_TIMEOUT_MS = 5_000
_MAX_RECONNECT_BACKOFF_MS = 1_000
_MIN_RECONNECT_BACKOFF_MS = 100

Options = Sequence[tuple[str, int | str]]
Metadata = tuple[tuple[str, str], ...]


def server_options(
    *,
    max_receive_bytes: int = MAX_MESSAGE_BYTES,
    handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S,
    idle_timeout_s: float = IDLE_TIMEOUT_S,
    connection_age_s: float | None = None,
    max_connections: int | None = None,
    shares_port: bool = False,
) -> Options:
    """Returns the gRPC options of a server.

    - A message above `max_receive_bytes` ends its call as RESOURCE_EXHAUSTED.
    - A connection without a call for `idle_timeout_s` is closed. The client connects again for its next call.
    - After `connection_age_s` a client is asked to connect again, which makes it look up the server's name anew.
      Running calls go on where they are.
    - New connections beyond `max_connections` are closed.
    - A port that another process listens on is an error, unless the server `shares_port`.

    Keepalive pings of clients never make the server close the connection.
    """
    age = () if connection_age_s is None else (("grpc.max_connection_age_ms", round(connection_age_s * 1000)),)
    most = () if max_connections is None else (("grpc.max_allowed_incoming_connections", max_connections),)
    return (
        *age,
        *most,
        ("grpc.max_receive_message_length", max_receive_bytes),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.max_concurrent_streams", _MAX_STREAMS_PER_CONNECTION),
        ("grpc.server_handshake_timeout_ms", round(handshake_timeout_s * 1000)),
        ("grpc.max_connection_idle_ms", round(idle_timeout_s * 1000)),
        ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.ping_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", _KEEPALIVE_MS // 2),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.so_reuseport", int(shares_port)),
    )


def channel_options(*, max_receive_bytes: int = MAX_MESSAGE_BYTES, server_name: str | None = None) -> Options:
    """Returns the gRPC options of a client's channel.

    The channel shares its connection with no other, and connects again within a second after a failure. Over TLS the
    server's certificate must be for `server_name`, or if that is None, for the host in the address.
    """
    return (
        *([("grpc.ssl_target_name_override", server_name)] if server_name is not None else []),
        ("grpc.max_receive_message_length", max_receive_bytes),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", STREAM_WINDOW_BYTES),
        ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.ping_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.initial_reconnect_backoff_ms", _MIN_RECONNECT_BACKOFF_MS),
        ("grpc.min_reconnect_backoff_ms", _MAX_RECONNECT_BACKOFF_MS),
        ("grpc.max_reconnect_backoff_ms", _MAX_RECONNECT_BACKOFF_MS),
    )
