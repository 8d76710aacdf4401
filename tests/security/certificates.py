"""Certificates for loopback, made for one test run."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import trustme

HERE = "127.0.0.1"
LONG_AGO = datetime(2001, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Files:
    certificate: Path
    key: Path


class Authority:
    """A certificate authority that signs whatever a test asks for. Peers that trust the file `ca` trust its
    certificates.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._name = name
        self._authority = trustme.CA()
        self.ca = directory / f"{name}-ca.pem"
        self._authority.cert_pem.write_to_path(str(self.ca))

    def issue(self, purpose: str, *, host: str = HERE, expires: datetime | None = None) -> Files:
        issued = self._authority.issue_cert(
            host, not_before=expires and datetime(2000, 1, 1, tzinfo=UTC), not_after=expires
        )
        files = Files(self._directory / f"{self._name}-{purpose}.pem", self._directory / f"{self._name}-{purpose}.key")
        issued.private_key_pem.write_to_path(str(files.key))
        for blob in issued.cert_chain_pems:
            blob.write_to_path(str(files.certificate), append=files.certificate.exists())
        return files
