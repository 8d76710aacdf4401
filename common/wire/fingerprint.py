"""The fingerprint of a service: two services exchange KV only if theirs are equal."""

from __future__ import annotations

from dataclasses import dataclass, fields

from common.kv.layer_group import LayerGroupSpec, SeedColumnSpec
from common.peer_text import peer_text

NO_SPECULATION = "none"


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Everything about a service that decides the values and the layout of its KV.

    Services with equal fingerprints can exchange KV. The limit of the context length is not part of it and may differ,
    unless it decides the rotary embedding: then `config_digest` names the rotation. `dtype` is that of the weights.
    """

    config_digest: str
    target_weights_digest: str
    tokenizer_digest: str
    dtype: str
    layer_groups: tuple[LayerGroupSpec, ...]
    protocol_version: int
    draft_weights_digest: str = ""
    algorithm: str = NO_SPECULATION
    seed_columns: tuple[SeedColumnSpec, ...] = ()


def first_difference(ours: Fingerprint, theirs: Fingerprint) -> tuple[str, str, str] | None:
    """Returns the first field in which two fingerprints differ, or None if they are equal.

    The result is (field, our value, their value), as text; long values are cut. The protocol version is compared first,
    because with another version the other fields may have another meaning. If both have layer groups of the same names,
    the field is a member of one group, for example `layer_groups[target].dtype`.
    """
    names = sorted((member.name for member in fields(Fingerprint)), key=lambda name: name != "protocol_version")
    for name in names:
        our_value, their_value = getattr(ours, name), getattr(theirs, name)
        if our_value != their_value:
            in_a_group = _layer_group_difference(our_value, their_value) if name == "layer_groups" else None
            field, ours_text, theirs_text = in_a_group or (name, _in_words(our_value), _in_words(their_value))
            return peer_text(field), peer_text(ours_text), peer_text(theirs_text)
    return None


def _in_words(value: object) -> str:
    """Returns the value of a field as text for people."""
    if not isinstance(value, tuple):
        return str(value) or "none"
    names = [
        f"{each.name} {each.dtype}{list(each.row_shape)}" if isinstance(each, SeedColumnSpec) else str(each.name)
        for each in value
    ]
    return " and ".join(names) or "none"


def _layer_group_difference(
    ours: tuple[LayerGroupSpec, ...], theirs: tuple[LayerGroupSpec, ...]
) -> tuple[str, str, str] | None:
    """Returns (field, our value, their value) for the first member of a group that differs.

    Returns None if the groups do not have the same names in the same order.
    """
    if [group.name for group in ours] != [group.name for group in theirs]:
        return None
    for our_group, their_group in zip(ours, theirs, strict=True):
        for member in fields(LayerGroupSpec):
            our_value, their_value = getattr(our_group, member.name), getattr(their_group, member.name)
            if our_value != their_value:
                return f"layer_groups[{our_group.name}].{member.name}", str(our_value), str(their_value)
    return None
