"""Tests of rules for the fields of all messages of the contract. They also hold for fields that are added later."""

from __future__ import annotations

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from baton.v1 import inference_pb2, prefill_pb2, types_pb2

FILES = (inference_pb2.DESCRIPTOR, prefill_pb2.DESCRIPTOR, types_pb2.DESCRIPTOR)


def messages(within: Descriptor) -> list[Descriptor]:
    """Returns the message type and all types its fields contain, once each."""
    found: dict[str, Descriptor] = {}

    def add(message: Descriptor) -> None:
        if message.full_name not in found:
            found[message.full_name] = message
            for field in message.fields:
                if field.message_type is not None:
                    add(field.message_type)

    add(within)
    return list(found.values())


def fields_of_all() -> list[FieldDescriptor]:
    every = [message for file in FILES for message in file.message_types_by_name.values()]
    return [field for top in every for message in messages(top) for field in message.fields]


def test_no_event_of_a_stream_has_a_field_for_an_error() -> None:
    names = [field.name for message in messages(inference_pb2.GenerateEvent.DESCRIPTOR) for field in message.fields]
    assert "token_ids" in names and "stop_string" in names
    assert [name for name in names if "error" in name or "status" in name or name == "code"] == []


def test_ids_are_text_and_seeds_have_64_bits() -> None:
    """A token id is an index in a vocabulary, and does not count as an id here. Nor does a row's number."""
    fields = fields_of_all()
    ids = [field for field in fields if field.name.endswith("_id") and field.name not in ("token_id", "stop_token_id")]
    assert {"request_id", "instance_id"} <= {field.name for field in ids}
    wide = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_UINT64)
    assert [field.full_name for field in ids if field.type not in wide] == []
    growing = ("seed", "num_steps", "num_row_retries")
    numbers = [
        field
        for field in fields
        if field.type != FieldDescriptor.TYPE_MESSAGE
        and (field.name in growing or field.name.endswith(("bytes", "left_ms")))
    ]
    assert {*growing, "unsent_bytes", "time_left_ms"} <= {field.name for field in numbers}
    of_64_bits = (FieldDescriptor.TYPE_UINT64, FieldDescriptor.TYPE_FIXED64)
    assert [field.full_name for field in numbers if field.type not in of_64_bits] == []


def test_every_sampling_option_may_be_absent() -> None:
    fields = types_pb2.SamplingParams.DESCRIPTOR.fields
    assert len(fields) > 10
    lists = {"stop", "stop_token_ids", "logit_bias", "shown_special_tokens", "bad_words", "allowed_token_ids"}
    assert {field.name for field in fields if not field.has_presence} == lists
