"""Builds the response of GetModelInfo, which does not change during the process's life."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version

from baton.v1 import inference_pb2, types_pb2
from common.config.settings import DecodeSettings
from common.kv.pool_size import PoolSize
from common.service.runtime import Runtime
from common.text.chat_template import ChatRefused
from common.text.output_formats import FORMATS, NONE, OutputFormat, format_of_template
from common.text.tokenizer import TextTokenizer
from common.wire.fingerprint import encode_fingerprint

DISTRIBUTION = "baton-serve"


def model_info(
    settings: DecodeSettings,
    runtime: Runtime,
    size: PoolSize,
    tokenizer: TextTokenizer,
    *,
    sampling_defaults: Mapping[str, float],
) -> inference_pb2.GetModelInfoResponse:
    form = output_format_of(settings, tokenizer)
    try:
        (template, special_tokens), variables = tokenizer.chat_template(), tokenizer.chat_template_variables()
    except ChatRefused:
        template, special_tokens, variables = "", {}, ()
    return inference_pb2.GetModelInfoResponse(
        model=settings.model,
        architecture=runtime.architecture,
        vocab_size=runtime.model.vocab_size,
        max_context_tokens=size.max_context_tokens,
        eos_token_ids=runtime.model.eos_token_ids,
        device=settings.device,
        dtype=settings.dtype,
        version=version(DISTRIBUTION),
        fingerprint=encode_fingerprint(runtime.fingerprint),
        output_format=form.name,
        has_reasoning=form.reasoning is not None,
        chat_template_variables=variables,
        chat_template=template,
        special_tokens=special_tokens,
        sampling_defaults=types_pb2.SamplingParams(**sampling_defaults),  # type: ignore[arg-type]
    )


def output_format_of(settings: DecodeSettings, tokenizer: TextTokenizer) -> OutputFormat:
    """Returns the form in which the model writes reasoning and calls: the configured one, or else the one that its chat
    template shows.
    """
    if settings.output_format != "auto":
        return FORMATS[settings.output_format]
    try:
        source, _ = tokenizer.chat_template()
    except ChatRefused:
        return NONE
    return format_of_template(source)
