"""Two fingerprints differ in a named field, or KV may move."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from common.wire.fingerprint import Fingerprint, SeedColumnSpec, first_difference
from tests.wire.strategies import DRAFT, PLAIN

CHANGES: dict[str, object] = {
    "protocol_version": 99,
    "config_digest": "other",
    "target_weights_digest": "other",
    "draft_weights_digest": "other",
    "algorithm": "eagle",
    "layer_groups": (DRAFT,),
    "tokenizer_digest": "other",
    "seed_columns": (SeedColumnSpec("topk_p", "float32", (4,)),),
}


def test_equal_fingerprints_do_not_differ() -> None:
    assert first_difference(PLAIN, replace(PLAIN)) is None


def test_every_field_counts() -> None:
    assert set(CHANGES) == {member.name for member in fields(Fingerprint)}


@pytest.mark.parametrize("field", CHANGES)
def test_a_difference_is_named_with_both_values(field: str) -> None:
    theirs = replace(PLAIN, **{field: CHANGES[field]})
    assert first_difference(PLAIN, theirs) == (field, str(getattr(PLAIN, field)), str(CHANGES[field]))


def test_the_protocol_version_is_compared_first() -> None:
    theirs = replace(PLAIN, config_digest="other", protocol_version=99)
    difference = first_difference(PLAIN, theirs)
    assert difference is not None
    assert difference[0] == "protocol_version"
