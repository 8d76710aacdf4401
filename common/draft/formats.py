"""Recognises the format of a draft head from its config.json, and reads it into a DraftSpec.

| format | recognised by |
|---|---|
| speculators | `speculators_model_type` |
| EAGLE-3 | an architecture named for it, `draft_vocab_size` or `eagle_config` |
| MTP | `num_nextn_predict_layers`, or tensors named as in MiMo's |
| EAGLE-1, EAGLE-2 | none of these |
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from common.draft.config_block import ConfigReader, read_block
from common.draft.spec import DraftSpec, Eagle3Spec, EagleSpec, MtpLayout, MtpSpec
from common.errors import DraftMismatch

_EAGLE3_KEYS = ("draft_vocab_size", "eagle_config", "eagle_aux_hidden_state_layer_ids", "num_aux_hidden_states")
_DEFAULT_NUM_CAPTURED = 3
_MIMO, _MIMO_V2, _NEXTN = "model.mtp_layers.", "model.mtp.layers.", "model.layers."


def read_spec(
    config: Mapping[str, Any], tensor_names: Collection[str], *, directory: str, num_target_layers: int
) -> DraftSpec:
    """Returns the specification of the head that the config describes.

    `num_target_layers` is the target model's number of layers. Raises DraftMismatch or UnsupportedModel, which name the
    key and `directory`.
    """
    reader = ConfigReader(config, directory)
    if "speculators_model_type" in config:
        return _read_speculators(reader, num_target_layers)
    architectures = " ".join(reader.value("architectures", list, []))
    if "eagle3" in architectures.lower() or any(config.get(key) is not None for key in _EAGLE3_KEYS):
        return _read_eagle3(reader, reader, num_target_layers)
    if config.get("num_nextn_predict_layers") or any(name.startswith((_MIMO, _MIMO_V2)) for name in tensor_names):
        return _read_mtp(reader, tensor_names)
    if "fc.weight" not in tensor_names:
        raise DraftMismatch(
            f"{directory}: holds {architectures or 'tensors'} and no draft head: fc.weight is missing, which an "
            "EAGLE-1 head needs"
        )
    _require_one_layer(reader)
    return EagleSpec(
        block=read_block(reader),
        vocab_size=reader.size("vocab_size"),
        fc_bias=reader.value("bias", bool, True),
    )


def _read_speculators(reader: ConfigReader, num_target_layers: int) -> Eagle3Spec:
    """Returns the spec of an EAGLE-3 head in the format of the library `speculators`."""
    kind = reader.required("speculators_model_type", str)
    if kind != "eagle3":
        raise reader.unsupported(f"speculators_model_type {kind!r}")
    algorithm = reader.nested("speculators_config").value("algorithm", str, "eagle3")
    if algorithm != "eagle3":
        raise reader.mismatch(f"speculators_config.algorithm is {algorithm!r}, speculators_model_type 'eagle3'")
    return _read_eagle3(reader, reader.nested("transformer_layer_config"), num_target_layers)


def _read_eagle3(reader: ConfigReader, layer: ConfigReader, num_target_layers: int) -> Eagle3Spec:
    """Returns the spec of an EAGLE-3 head. `layer` reads the object in the config that has the Llama fields."""
    _require_one_layer(layer)
    if not reader.nested("eagle_config").value("use_aux_hidden_state", bool, True):
        raise reader.unsupported("eagle_config.use_aux_hidden_state false")
    block = read_block(layer)
    vocab_size = layer.size("vocab_size")
    return Eagle3Spec(
        block=block,
        vocab_size=vocab_size,
        draft_vocab_size=reader.size("draft_vocab_size", vocab_size),
        target_hidden_size=reader.size("target_hidden_size", block.hidden_size),
        captured_layers=_captured_layers(reader, num_target_layers),
        fc_bias=reader.value("bias", bool, False),
        norm_before_fc=_flag(reader, "norm_before_fc"),
        fc_norm=_flag(reader, "fc_norm") or _flag(reader, "use_aux_norm"),
        norm_before_residual=_flag(reader, "norm_before_residual"),
        norm_output=_flag(reader, "norm_output"),
        tied_head=reader.value("tie_word_embeddings", bool, False),
    )


def _flag(reader: ConfigReader, key: str) -> bool:
    """Returns a boolean of the config, at the top level or else in `eagle_config`; False if it is absent."""
    return bool(reader.value(key, bool, reader.nested("eagle_config").value(key, bool, False)))


def _captured_layers(reader: ConfigReader, num_target_layers: int) -> tuple[int, ...]:
    """Returns the target layers whose input residual streams the head reads.

    In the config, ids at the top level mean the stream ENTERING a layer; those in `eagle_config` the OUTPUT of a layer.
    If there are none, the head reads the streams entering three layers: 2, n // 2 and n - 3 of n = `num_target_layers`.
    """
    key = "eagle_aux_hidden_state_layer_ids"
    entering: list[int] | None = reader.value(key, list, None)
    outputs: list[int] | None = reader.nested("eagle_config").value(key, list, None)
    if outputs is not None:
        from_outputs = [layer + 1 for layer in outputs]
        if entering is not None and entering != from_outputs:
            raise reader.mismatch(f"{key} {entering} (entering) and eagle_config.{key} {outputs} (outputs) disagree")
        entering = from_outputs
    num_captured = reader.value("num_aux_hidden_states", int, len(entering or ()) or _DEFAULT_NUM_CAPTURED)
    if entering is None:
        if num_captured != _DEFAULT_NUM_CAPTURED:
            raise reader.mismatch(f"num_aux_hidden_states is {num_captured}, but {key} does not say which")
        entering = [2, num_target_layers // 2, num_target_layers - 3]
    if len(entering) != num_captured:
        raise reader.mismatch(f"num_aux_hidden_states is {num_captured}, {key} has {len(entering)} layers")
    if not all(0 <= layer <= num_target_layers for layer in entering):
        raise reader.mismatch(
            f"{key}: the streams entering layers {entering} are not all in a target of {num_target_layers} layers"
        )
    return tuple(entering)


def _read_mtp(reader: ConfigReader, tensor_names: Collection[str]) -> MtpSpec:
    """Returns the spec of a multi-token-prediction head. The names of its tensors decide the layout."""
    num_target_layers = reader.value("num_hidden_layers", int, 0)
    layout, parent, first = MtpLayout.NEXTN, _NEXTN, num_target_layers
    for each, prefix in ((MtpLayout.MIMO, _MIMO), (MtpLayout.MIMO_V2, _MIMO_V2)):
        if any(name.startswith(prefix) for name in tensor_names):
            layout, parent, first = each, prefix, 0
    if layout is MtpLayout.NEXTN and num_target_layers == 1:  # an export of the draft layer alone
        num_target_layers = first = 0
    of_layers = {name.removeprefix(parent).partition(".")[0] for name in tensor_names if name.startswith(parent)}
    num_layers = reader.value("num_nextn_predict_layers", int, len(of_layers))
    if layout is MtpLayout.MIMO and num_layers != 1:
        raise reader.unsupported(f"num_nextn_predict_layers {num_layers} with tensors named {_MIMO}")
    return MtpSpec(
        block=read_block(reader),
        vocab_size=reader.size("vocab_size"),
        layout=layout,
        prefixes=tuple(f"{parent}{first + layer}." for layer in range(num_layers)),
        num_target_layers=num_target_layers,
    )


def _require_one_layer(reader: ConfigReader) -> None:
    num_layers = reader.value("num_hidden_layers", int, 1)
    if num_layers != 1:
        raise reader.unsupported(f"num_hidden_layers {num_layers}")
