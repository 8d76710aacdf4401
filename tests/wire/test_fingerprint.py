"""Tests that two fingerprints either allow KV to move, or differ in a field that the error names."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from common.kv.layer_group import LayerGroupSpec, SeedColumnSpec
from common.wire.fingerprint import Fingerprint, first_difference
from tests.wire.strategies import DRAFT, PLAIN

CHANGES: dict[str, object] = {
    "protocol_version": 99,
    "config_digest": "other",
    "target_weights_digest": "other",
    "draft_weights_digest": "other",
    "algorithm": "eagle",
    "layer_groups": (DRAFT,),
    "tokenizer_digest": "other",
    "dtype": "other",
    "seed_columns": (SeedColumnSpec("topk_p", "float32", (4,)),),
}


IN_WORDS = {
    "protocol_version": (str(PLAIN.protocol_version), "99"),
    "algorithm": ("none", "eagle"),
    "layer_groups": ("target", "draft"),
    "seed_columns": ("none", "topk_p float32[4]"),
}


def test_equal_fingerprints_do_not_differ() -> None:
    assert first_difference(PLAIN, replace(PLAIN)) is None


def test_every_field_counts() -> None:
    assert set(CHANGES) == {member.name for member in fields(Fingerprint)}


@pytest.mark.parametrize("field", CHANGES)
def test_a_difference_is_named_with_both_values(field: str) -> None:
    theirs = replace(PLAIN, **{field: CHANGES[field]})
    assert first_difference(PLAIN, theirs) == (field, *IN_WORDS.get(field, (getattr(PLAIN, field) or "none", "other")))


def test_the_protocol_version_is_compared_first() -> None:
    theirs = replace(PLAIN, config_digest="other", protocol_version=99)
    difference = first_difference(PLAIN, theirs)
    assert difference is not None
    assert difference[0] == "protocol_version"


LAYER_GROUP_CHANGES: dict[str, object] = {
    "num_layers": 99,
    "num_planes": 1,
    "num_heads": 99,
    "head_dim": 99,
    "dtype": "float16",
    "window": 99,
}


def test_every_member_of_a_layer_group_counts() -> None:
    assert set(LAYER_GROUP_CHANGES) == {member.name for member in fields(LayerGroupSpec)} - {"name"}


@pytest.mark.parametrize("member", LAYER_GROUP_CHANGES)
def test_a_difference_within_a_layer_group_names_the_group_and_the_member(member: str) -> None:
    ours = PLAIN.layer_groups[0]
    changed = replace(ours, **{member: LAYER_GROUP_CHANGES[member]})
    theirs = replace(PLAIN, layer_groups=(changed, *PLAIN.layer_groups[1:]))
    assert first_difference(PLAIN, theirs) == (
        f"layer_groups[{ours.name}].{member}",
        str(getattr(ours, member)),
        str(LAYER_GROUP_CHANGES[member]),
    )
