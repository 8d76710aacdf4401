"""Fuzz targets without network or engine: request checks, codecs and tokenizers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from hypothesis import strategies as st

from baton.v1 import inference_pb2, prefill_pb2, types_pb2
from common.errors import BatonError, FingerprintMismatch, InvalidRequest
from common.grammar.grammar import Grammar, GrammarKind
from common.rpc.errors import status_of
from common.rpc.messages import ProtocolError, parse
from common.text.chat_messages import ChatMessage
from common.text.chat_template import ChatRefused
from common.text.grammars import GrammarRefused, Grammars
from common.wire.codec_commands import PrefillBatch, decode_command
from common.wire.codec_fingerprint import PROTOCOL_VERSION, decode_fingerprint, encode_fingerprint
from common.wire.codec_frames import FrameCodec
from common.wire.fingerprint import first_difference
from common.wire.framing import MessageT, seal, seal_bytes
from common.wire.handoff import HandoffRow, RowFailed
from decode_service.edge.request_checks import ChatPrompt, ModelLimits, TextPrompt, check_lengths, check_request
from decode_service.edge.text.output import OutputProcessor
from prefill_service.edge import call
from tests.decode_edge.tokenizers_for_tests import byte_fallback, byte_level, eos_id, vocab_size
from tests.fuzz.target import Run, Target, join, split
from tests.fuzz.wire_strategies import TEXTS, hostile_messages
from tests.wire.strategies import PLAIN, SPECULATIVE, VOCAB_SIZE
from tests.wire.wire_samples import LOGPROBS_ROW, PLAIN_ROW

CORPUS_VERSION = 1
"""The protocol version written in the corpus. It does not change with ours, so that the inputs keep reaching the same
code.
"""
PAYLOAD_FIELD = 8
"""The protobuf field in which the corpus' segments hold their payload, as in the protocol version of the corpus."""
MAX_STATUS_BYTES = 4096
"""The largest size of a status with its details, in bytes. gRPC guarantees room for 8 KiB of metadata, and carries a
status in it twice.
"""


def assert_travels(error: BatonError) -> None:
    """Asserts that the error can be sent to a client: its status fits gRPC's metadata, and INVALID_ARGUMENT names its
    field.
    """
    status = status_of(error)
    assert status.ByteSize() <= MAX_STATUS_BYTES, f"a status of {status.ByteSize()} bytes"
    if isinstance(error, InvalidRequest):
        assert error.field and error.metadata["field"] == error.field


@contextmanager
def generate_request() -> Iterator[Run]:
    """Yields the target for a GenerateRequest. It runs all checks up to the tokens and sampling options for the
    engine.
    """
    tokenizer = byte_level()
    limits = ModelLimits(vocab_size=vocab_size(tokenizer), max_context_tokens=64, eos_token_ids=(eos_id(tokenizer),))

    def run(data: bytes) -> None:
        try:
            request = parse(inference_pb2.GenerateRequest, data)
            checked = check_request(request, limits)
            match checked.prompt:
                case TextPrompt(text):
                    token_ids = tokenizer.encode(text)
                case ChatPrompt(messages, options):
                    token_ids = tokenizer.encode_chat(messages, options)
                case prompt:
                    token_ids = prompt.token_ids
            sampling = check_lengths(checked, token_ids, limits)
        except ProtocolError:
            return
        except ChatRefused as error:
            assert_travels(InvalidRequest(error.field, error.reason))
            return
        except InvalidRequest as error:
            assert_travels(error)
            return
        num_tokens = len(token_ids) + sampling.max_tokens
        assert num_tokens <= limits.max_context_tokens
        assert all(0 <= token_id < limits.vocab_size for token_id in token_ids)

    yield run


@contextmanager
def handoff_command() -> Iterator[Run]:
    """Yields the target for a HandoffCommand. It corrects the checksum, checks the rows, and renumbers the rows that
    remain when some are refused.
    """
    limits = call.ReplicaLimits(vocab_size=VOCAB_SIZE, max_context_tokens=256)

    def run(data: bytes) -> None:
        try:
            command = decode_command(checksummed(prefill_pb2.HandoffCommand, data))
        except ProtocolError as error:
            assert_travels(InvalidRequest(error.field, error.message))
            return
        except FingerprintMismatch as error:  # of a peer with another protocol version
            assert_travels(error)
            return
        if not isinstance(command, PrefillBatch):
            return
        difference = first_difference(command.fingerprint, PLAIN)
        if difference is not None:
            assert_travels(FingerprintMismatch(*difference))
        rows = [
            call.check_row(index, row, limits, group_names=["target"]) if isinstance(row, HandoffRow) else row
            for index, row in enumerate(command.rows)
        ]
        numbering = call.RowNumbering(rows)
        assert len(numbering.refused) + len(numbering.accepted) == len(rows)
        codec = FrameCodec(fingerprint=PLAIN, vocab_size=VOCAB_SIZE)
        for failed in numbering.refused:
            sent = codec.encode(failed)
            assert len(sent) <= MAX_STATUS_BYTES
            assert isinstance(codec.decode(sent, [PLAIN_ROW] * len(rows)), RowFailed)

    yield run


@contextmanager
def handoff_frame() -> Iterator[Run]:
    """Yields the target for a frame. It decodes the frame as it is and with a corrected checksum, with and without
    speculation.
    """
    rows = (PLAIN_ROW, LOGPROBS_ROW)
    codecs = [FrameCodec(fingerprint=fingerprint, vocab_size=VOCAB_SIZE) for fingerprint in (PLAIN, SPECULATIVE)]

    def run(data: bytes) -> None:
        for codec in codecs:
            for sent in (data, checksummed(prefill_pb2.HandoffFrame, data)):
                try:
                    frame = codec.decode(sent, rows)
                except ProtocolError as error:
                    assert len(str(error)) <= MAX_STATUS_BYTES
                except FingerprintMismatch as error:
                    assert_travels(error)
                else:
                    codec.encode(frame)

    yield run


def checksummed(kind: type[MessageT], data: bytes) -> bytes:
    """Returns the bytes with a correct checksum, and with our protocol version instead of the corpus', so that they
    reach the code after those checks. A fingerprint of the corpus also gets the fields that came later.
    """
    try:
        message = kind.FromString(data)
    except DecodeError:
        return seal_bytes(data)
    payload = b""
    for field, part in message.ListFields():  # at most one: the field set in the oneof
        if field.name in ("prefill_batch", "accepted") and part.HasField("fingerprint"):
            raise_version(part.fingerprint)
        if field.name == "kv_segment":
            fields = [each.data for each in UnknownFieldSet(part) if each.field_number == PAYLOAD_FIELD]
            payload = next((each for each in reversed(fields) if isinstance(each, bytes)), b"")
            part.DiscardUnknownFields()
    return seal(message, payload)


def raise_version(message: types_pb2.Fingerprint) -> None:
    if message.protocol_version == CORPUS_VERSION:
        message.protocol_version = PROTOCOL_VERSION
        message.dtype = message.dtype or PLAIN.dtype


@contextmanager
def fingerprint() -> Iterator[Run]:
    """Yields the target for a fingerprint. A fingerprint with few entries must decode, and the description of its
    difference from ours must be short.
    """

    def run(data: bytes) -> None:
        try:
            message = parse(types_pb2.Fingerprint, data)
            raise_version(message)
            theirs = decode_fingerprint(message)
        except ProtocolError:
            return
        assert decode_fingerprint(encode_fingerprint(theirs)) == theirs
        for ours in (PLAIN, SPECULATIVE):
            difference = first_difference(ours, theirs)
            assert (difference is None) == (ours == theirs)
            if difference is not None:
                assert_travels(FingerprintMismatch(*difference))

    yield run


@contextmanager
def text() -> Iterator[Run]:
    """Yields the target for text. It sends (role, content) messages through tokenizers and chat templates, and turns
    any token ids back into text.
    """
    tokenizers = [byte_level(), byte_fallback()]

    def run(data: bytes) -> None:
        texts = [part.decode(errors="replace") for part in split(data)] or [""]
        for tokenizer in tokenizers:
            size = vocab_size(tokenizer)
            token_ids = [*tokenizer.encode(texts[0])]
            assert all(0 <= token_id < size for token_id in token_ids)
            chat = tokenizer.encode_chat([ChatMessage("user", content) for content in texts])
            assert all(0 <= token_id < size for token_id in chat)
            output = OutputProcessor(decoder=tokenizer, stop_strings=[part for part in texts[1:] if part][:4])
            for token_id in (*token_ids[:64], *(byte * 7 % (size + 3) for byte in data[:64])):
                output.push([token_id])
            output.finish()

    yield run


def _texts(seeds: tuple[bytes, ...]) -> st.SearchStrategy[bytes]:
    one = st.sampled_from(TEXTS).map(str.encode) | st.text(max_size=12).map(str.encode) | st.binary(max_size=12)
    return st.lists(one, min_size=1, max_size=4).map(join) | st.sampled_from(seeds)


_EBNF_PARTS = (
    "root",
    "x",
    "::=",
    "|",
    "(",
    ")",
    "*",
    "+?",
    "{2}",
    "{0,3}",
    '"a"',
    '"\\u00e9"',
    "[a-z]",
    "[^\\]a-]",
    ".",
    "#",
    "\n",
)


@contextmanager
def ebnf() -> Iterator[Run]:
    """Yields the target for a grammar in EBNF, which is compiled, or refused with a reason."""
    tokenizer = byte_level()
    grammars = Grammars(lambda: tokenizer, vocab_size=vocab_size(tokenizer), eos_token_ids=[eos_id(tokenizer)])

    def run(data: bytes) -> None:
        with suppress(GrammarRefused):
            grammars.matcher(Grammar(GrammarKind.EBNF, data.decode(errors="replace")))

    yield run


def _grammars(seeds: tuple[bytes, ...]) -> st.SearchStrategy[bytes]:
    parts = st.lists(st.sampled_from(_EBNF_PARTS), max_size=40)
    return st.sampled_from(seeds) | parts.map(lambda each: " ".join(("root ::=", *each)).encode())


PURE_TARGETS = (
    Target(
        name="generate_request",
        inputs=lambda seeds: hostile_messages(inference_pb2.GenerateRequest.DESCRIPTOR, seeds),
        open=generate_request,
        is_pure=True,
    ),
    Target(
        name="handoff_command",
        inputs=lambda seeds: hostile_messages(prefill_pb2.HandoffCommand.DESCRIPTOR, seeds),
        open=handoff_command,
        is_pure=True,
    ),
    Target(
        name="handoff_frame",
        inputs=lambda seeds: hostile_messages(prefill_pb2.HandoffFrame.DESCRIPTOR, seeds),
        open=handoff_frame,
        is_pure=True,
    ),
    Target(
        name="fingerprint",
        inputs=lambda seeds: hostile_messages(types_pb2.Fingerprint.DESCRIPTOR, seeds),
        open=fingerprint,
        is_pure=True,
    ),
    Target(name="text", inputs=_texts, open=text, is_pure=True),
    Target(name="ebnf", inputs=_grammars, open=ebnf, is_pure=True),
)
