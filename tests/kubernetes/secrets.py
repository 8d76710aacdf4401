"""The Secrets that components/secured asks for, made for one run."""

from __future__ import annotations

from collections.abc import Mapping
from secrets import token_urlsafe

import trustme

Secrets = Mapping[str, Mapping[str, bytes]]
"""The content of each key, by the Secret's name."""


def make_secrets() -> Secrets:
    """Returns certificates of one authority for prefill, decode and the gateway, and tokens for all who call."""
    authority = trustme.CA()
    made: dict[str, dict[str, bytes]] = {}
    for name in ("prefill", "decode", "gateway"):
        issued = authority.issue_cert(name)
        made[f"{name}-tls"] = {
            "tls.crt": b"".join(blob.bytes() for blob in issued.cert_chain_pems),
            "tls.key": issued.private_key_pem.bytes(),
            "ca.crt": authority.cert_pem.bytes(),
        }
    prefill, gateway, key = (token_urlsafe(32).encode() for _ in range(3))
    made["tokens"] = {"prefill": prefill, "clients": gateway, "gateway": gateway, "api-keys": key}
    return made
