"""Makes TLS credentials of servers and clients from certificate files, and checks the files."""

from __future__ import annotations

import ssl
from pathlib import Path

import grpc

from common.errors import ConfigError
from common.rpc.bearer_tokens import warn_if_open


def server_credentials(
    certificate: Path | None, key: Path | None, client_ca: Path | None
) -> grpc.ServerCredentials | None:
    """Returns a server's gRPC credentials, or None if there is no certificate or no key.

    With `client_ca`, clients must present a certificate that this authority signed. Raises ConfigError if a file cannot
    be used.
    """
    if certificate is None or key is None:
        return None
    server_tls(certificate, key)  # checks the files: gRPC itself would only report that it cannot listen
    if client_ca is not None:
        _check_authority("tls_ca", client_ca)
    return grpc.ssl_server_credentials(
        [(_read("tls_key", key), _read("tls_cert", certificate))],
        root_certificates=None if client_ca is None else _read("tls_ca", client_ca),
        require_client_auth=client_ca is not None,
    )


def server_tls(certificate: Path, key: Path) -> ssl.SSLContext:
    """Returns an SSL context for a server. Raises ConfigError if a file cannot be used."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key, password="")  # without it, OpenSSL asks for one on a terminal
        mode = key.stat().st_mode
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        raise ConfigError(f"tls_cert: {certificate} with tls_key {key}: {error}") from error
    warn_if_open("tls_key", key, mode)
    return context


def _check_authority(setting: str, path: Path) -> None:
    """Raises ConfigError, which names `setting`, if no certificate can be read from the file. Does not check that it is
    an authority's.
    """
    try:
        ssl.create_default_context().load_verify_locations(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{setting}: {path}: {error}") from error


def channel_credentials(ca: Path | None, certificate: Path | None, key: Path | None) -> grpc.ChannelCredentials:
    """Returns a client's gRPC credentials.

    `ca` is the authority that it trusts (None: the system's authorities). `certificate` and `key` are its own, for
    servers that ask for them. Raises ConfigError if a file cannot be used.
    """
    if ca is not None:
        _check_authority("prefill_tls_ca", ca)
    return grpc.ssl_channel_credentials(
        root_certificates=None if ca is None else _read("prefill_tls_ca", ca),
        private_key=None if key is None else _read("tls_key", key),
        certificate_chain=None if certificate is None else _read("tls_cert", certificate),
    )


def _read(setting: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{setting}: {error}") from error
