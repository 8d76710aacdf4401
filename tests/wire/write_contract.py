"""Writes contract.json for the present fields of the handoff. Run it after the protocol's version was raised.

python -m tests.wire.write_contract
"""

from __future__ import annotations

import json
from base64 import b64encode
from pathlib import Path

from common.wire.codec_commands import (
    HandoffCommand,
    PrefillBatch,
    ReleaseSegments,
    encode_cancel_rows,
    encode_prefill_batch,
    encode_release_segments,
)
from common.wire.codec_fingerprint import PROTOCOL_VERSION
from tests.wire.test_wire_contract import CODEC, COMMANDS, CONTRACT, CONTRACT_FILE, FRAMES, digest_of_fields


def main(path: Path = CONTRACT_FILE) -> None:
    sent = {kind: encoded(command) for kind, command in COMMANDS.items()}
    sent |= {kind: bytes(CODEC.encode(frame)) for kind, frame in FRAMES.items()}
    contract = {
        "protocol_version": PROTOCOL_VERSION,
        "digest_of_fields": digest_of_fields(),
        "sent": {kind: b64encode(data).decode() for kind, data in sent.items()},
    }
    path.write_text(json.dumps(contract, indent=2) + "\n")
    print(f"{path.name}: protocol {PROTOCOL_VERSION}; before, it was {CONTRACT['protocol_version']}")


def encoded(command: HandoffCommand) -> bytes:
    if isinstance(command, PrefillBatch):
        return encode_prefill_batch(command.fingerprint, command.rows, pool_secret=command.pool_secret)
    if isinstance(command, ReleaseSegments):
        return encode_release_segments(command.numbers)
    return encode_cancel_rows(command.rows)


if __name__ == "__main__":
    main()
