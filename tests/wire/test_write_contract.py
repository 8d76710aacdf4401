"""Tests of the command that writes the contract of a new protocol version."""

from __future__ import annotations

import json
from base64 import b64decode
from pathlib import Path

from common.wire.codec_commands import decode_command
from common.wire.codec_fingerprint import PROTOCOL_VERSION
from tests.wire import write_contract
from tests.wire.strategies import comparable
from tests.wire.test_wire_contract import CODEC, COMMANDS, FRAMES, ROW, digest_of_fields


def test_it_writes_the_version_and_every_message(tmp_path: Path) -> None:
    path = tmp_path / "contract.json"
    write_contract.main(path)
    contract = json.loads(path.read_text())
    sent = {kind: b64decode(text) for kind, text in contract["sent"].items()}
    assert (contract["protocol_version"], contract["digest_of_fields"]) == (PROTOCOL_VERSION, digest_of_fields())
    assert {kind: decode_command(sent[kind]) for kind in COMMANDS} == COMMANDS
    assert comparable(CODEC.decode(sent["row_failed"], (ROW, ROW))) == comparable(FRAMES["row_failed"])
    assert set(sent) == {*COMMANDS, *FRAMES}
