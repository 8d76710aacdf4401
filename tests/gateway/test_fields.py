"""Tests of field values that ask for nothing special, in the many forms in which callers write them."""

from __future__ import annotations

import codecs
import json
import time
from typing import Any

import pytest

from baton.v1.types_pb2 import SamplingParams
from common.sampling.params import NUMBER_OPTIONS
from common.text.chat_messages import ChatMessage
from gateway.apis.chat import ChatFields, parse_chat
from gateway.apis.completions import CompletionFields, parse_completion
from gateway.errors import ApiError
from gateway.fields import ASKS_FOR_NOTHING
from gateway.plan import Plan
from tests.client.scripted_inference import BOUND_S, ScriptedServer, finished, started
from tests.gateway.gateway_here import COMPLETIONS, GatewayHere

TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def to_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def completion(**fields: Any) -> Plan:
    return parse_completion(to_json({"model": "demo", "prompt": "x", **fields}))


def chat(**message: Any) -> Plan:
    return parse_chat(to_json({"model": "demo", "messages": [{"role": "user", "content": "x", **message}]}))


def test_no_field_is_both_served_and_listed_as_unsupported() -> None:
    """A field in the list of unsupported ones has no effect there once it is served, so it must be removed from the
    list.
    """
    kinds = (ChatFields, CompletionFields)
    served = [{*NUMBER_OPTIONS, *kind.model_fields} for kind in kinds]
    assert not set.intersection(*served) & set(ASKS_FOR_NOTHING)
    for kind, names in zip(kinds, served, strict=True):
        assert not names & set(kind.asks_for_nothing)


@pytest.mark.parametrize("options", [{"include_usage": None}, {"include_usage": None, "include_obfuscation": None}, {}])
def test_an_option_of_a_stream_that_is_null_is_absent(options: dict[str, Any]) -> None:
    assert not completion(stream=True, stream_options=options).includes_usage


@pytest.mark.parametrize("options", [{}, {"include_usage": False, "continuous_usage_stats": False}])
def test_options_of_a_stream_that_ask_for_nothing_need_no_stream(options: dict[str, Any]) -> None:
    assert completion(stream_options=options) == completion()


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": []},
        {"tools": [], "tool_choice": "auto"},
        {"tools": [TOOL], "tool_choice": "none", "parallel_tool_calls": True},
        {"tools": [{**TOOL, "defer_loading": False, "async": False}], "tool_choice": "none"},
        {"tools": [{**TOOL, "function": {**TOOL["function"], "return": {"type": "string"}}}], "tool_choice": "none"},
        {"functions": [TOOL["function"]], "function_call": "none"},
        {"functions": []},
        {"length_penalty": 1.0, "use_beam_search": False, "early_stopping": False, "best_of": 1},
        {"spaces_between_special_tokens": True, "detokenize": True},
        {"reasoning": {}, "thinking": None, "enable_thinking": None},
        {
            "reasoning_effort": None,
            "verbosity": "medium",
            "include_reasoning": True,
            "separate_reasoning": True,
            "modalities": ["text"],
        },
        {"response_format": {"type": "text"}, "guided_json": None, "guided_choice": None, "structured_outputs": None},
        {"echo": False, "suffix": "", "prompt_logprobs": None},
        {"service_tier": "auto", "store": False, "metadata": {}, "user": "u", "prompt_cache_key": "k"},
        {"add_generation_prompt": True, "continue_final_message": False, "chat_template_kwargs": {}, "documents": []},
        {"mirostat": 0, "typical_p": 1, "repeat_penalty": 1.0, "n_probs": 0, "grammar": ""},
        {"request_id": "a", "session_id": "b", "truncation_side": "left", "media_io_kwargs": {}, "watermarking": False},
        {"rid": "a", "return_meta_info": False, "return_routed_experts": False, "use_audio_in_video": False},
        {"return_prompt_text": False, "return_cached_tokens_details": False},
        {"top_k": None, "min_p": None, "logit_bias": None, "stop": None, "nobody_knows_it": None},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_fields_that_ask_for_nothing_change_nothing(fields: dict[str, Any]) -> None:
    plain = {"model": "demo", "messages": [{"role": "user", "content": "x"}]}
    assert parse_chat(to_json({**plain, **fields})) == parse_chat(to_json(plain))
    assert completion(**fields) == completion()


def test_the_priority_and_the_options_of_the_prefix_cache_are_taken() -> None:
    fields = {"priority": 7, "cache_salt": "tenant", "cache_prompt": False}
    chat = parse_chat(to_json({"model": "demo", "messages": [{"role": "user", "content": "x"}], **fields}))
    for plan in (completion(**fields), chat):
        assert (plan.priority, plan.cache_salt, plan.cache_prompt) == (7, "tenant", False)
    assert (completion().cache_salt, completion().cache_prompt) == (None, None)


@pytest.mark.parametrize("name", ["n", "best_of"])
def test_a_number_of_choices_that_cannot_be_shown_is_refused(name: str) -> None:
    with pytest.raises(ApiError) as refused:
        completion(prompt=["x"] * 10, **{name: 10**4299})
    assert refused.value.param == name


def test_an_empty_stop_string_stops_nothing_and_the_top_of_minus_one_is_all_tokens() -> None:
    assert completion(stop="").sampling["stop"] == []
    assert completion(top_k=-1).sampling["top_k"] == 0


def test_a_whole_number_may_have_a_point() -> None:
    whole = {"max_tokens": 16, "seed": -1, "top_k": -1, "n": 2, "temperature": 1}
    pointed = {name: float(value) for name, value in whole.items()}
    assert completion(**pointed) == completion(**whole)
    with pytest.raises(ApiError, match=r"^max_tokens: input should be a valid integer, not 16.5"):
        completion(max_tokens=16.5)


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"stop": 16.0}, "stop"),
        ({"n": 0.0}, "n"),
        ({"ignore_eos": 1.0}, "ignore_eos"),
        ({"response_format": {"type": 16.0}}, "response_format.type"),
    ],
)
def test_a_wrong_number_is_shown_as_it_was_sent(fields: dict[str, Any], place: str) -> None:
    with pytest.raises(ApiError, match=rf"^{place}: .*, not [0-9]+\.0$"):
        completion(**fields)


def test_special_tokens_are_added_to_prompts_and_not_to_chats() -> None:
    plain = {"model": "demo", "messages": [{"role": "user", "content": "x"}]}
    assert parse_chat(to_json({**plain, "add_special_tokens": False})) == parse_chat(to_json(plain))
    assert completion(add_special_tokens=True) == completion()


def test_no_log_probabilities_beside_none_are_no_mistake() -> None:
    plain = {"model": "demo", "messages": [{"role": "user", "content": "x"}]}
    assert parse_chat(to_json({**plain, "logprobs": False, "top_logprobs": 0})) == parse_chat(to_json(plain))


@pytest.mark.parametrize(("logprobs", "expected"), [(None, None), (False, None), (0, 0), (5, 5)])
def test_false_log_probabilities_of_a_completion_are_none(logprobs: Any, expected: int | None) -> None:
    assert completion(logprobs=logprobs).sampling["logprobs"] == expected


def test_a_field_of_an_object_inside_an_object_that_is_null_is_absent() -> None:
    schema = {"schema": {"enum": [None]}}
    named = {**schema, "name": None, "value": None}
    plans = [completion(response_format={"type": "json_schema", "json_schema": each}) for each in (schema, named)]
    assert plans[0] == plans[1] and plans[0].sampling["json_schema"] == '{"enum": [null]}'


def test_true_is_no_number_of_them() -> None:
    with pytest.raises(ApiError, match=r"^logprobs: "):
        completion(logprobs=True)


@pytest.mark.parametrize("key", ["1_0", " 7 ", "+7", "-7", "07", "٣", "", "1" * 5000])
def test_a_key_of_logit_bias_is_a_number_as_json_would_write_it(key: str) -> None:
    with pytest.raises(ApiError, match=r"^logit_bias: .* is no token id, as its keys must be"):
        completion(logit_bias={key: 1})


def test_other_keys_are_token_ids() -> None:
    assert completion(logit_bias={"0": 1, "70": -5}).sampling["logit_bias"] == {0: 1, 70: -5}


@pytest.mark.parametrize("name", [None, "", "Ada", "a" * 64])
def test_a_name_of_who_speaks_changes_nothing(name: str | None) -> None:
    (prompt,) = chat(name=name).prompts
    assert prompt.arguments == {"chat": (ChatMessage("user", "x"),)}


@pytest.mark.parametrize("name", [7, ["Ada"], "a" * 65])
def test_what_is_no_name_is_refused(name: Any) -> None:
    with pytest.raises(ApiError, match=r"^messages\[0\].name: "):
        chat(name=name)


def test_a_name_that_comes_twice_among_very_many_is_found_at_once() -> None:
    """Parsing blocks the event loop. Comparing each name with all others would block it for half a minute."""
    names = ", ".join(f'"{number}": 0' for number in (*range(60_000), 59_999))
    began_s = time.thread_time()
    with pytest.raises(ApiError, match="comes twice in one object"):
        parse_completion(f'{{"model": "demo", "prompt": "x", "metadata": {{{names}}}}}'.encode())
    assert time.thread_time() - began_s < 3.0


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999", "1E+0400", f"-1{'0' * 400}.0", f"1{'0' * 250}e99"])
@pytest.mark.parametrize(
    ("more", "param"),
    [
        ('"temperature": ?', "temperature"),
        ('"chat_template_kwargs": {"a": [0, ?]}', "chat_template_kwargs.a[1]"),
        ('"messages": [{"role": "user", "content": [{"input": {"a": ?}}]}]', "messages[0].content[0].input.a"),
        ('"metadata": {"a": ?}', "metadata.a"),
    ],
)
def test_a_number_that_json_lacks_is_refused_by_its_place(number: str, more: str, param: str) -> None:
    with pytest.raises(ApiError, match="is a number that JSON lacks, or larger than any double") as refused:
        parse_chat(f'{{"model": "demo", {more.replace("?", number)}}}'.encode())
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (r"\ud83d", "\ufffd"),
        (r"a\uDE00\ud83d\ude00\ud83d", "a\ufffd\U0001f600\ufffd"),
        (r"\\ud83d\ude00 \\\ud83d \\\\ud83d\n", "\\ud83d\ufffd \\\ufffd \\\\ud83d\n"),
    ],
)
def test_half_of_a_surrogate_pair_is_read_as_no_known_character(written: str, read: str) -> None:
    """JavaScript writes it where it cuts a text in two."""
    assert completion(prompt=read) == parse_completion(f'{{"model": "demo", "prompt": "{written}"}}'.encode())


def test_a_body_may_begin_with_a_byte_order_mark_and_no_more() -> None:
    body = to_json({"model": "demo", "prompt": "x"})
    assert parse_completion(codecs.BOM_UTF8 + body) == completion()
    with pytest.raises(ApiError, match=r"^the body is not JSON: "):
        parse_completion(2 * codecs.BOM_UTF8 + body)


def test_a_prompt_may_speak_of_such_numbers() -> None:
    assert chat(content="NaN, Infinity and 1e999").prompts


OPTIONS: dict[str, Any] = {
    "seed": -3,
    "temperature": 0.75,
    "top_p": 0.875,
    "top_k": 40,
    "min_p": 0.125,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "repetition_penalty": 1.25,
    "min_tokens": 4,
    "stop_token_ids": [7],
    "bad_words": ["x"],
    "allowed_token_ids": [7, 20],
    "ignore_eos": True,
    "skip_special_tokens": False,
    "include_stop_str_in_output": True,
    "speculate": False,
}


@pytest.mark.parametrize("stop", ["a", ["a", "b"]], ids=["a text", "a list"])
@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions"])
def test_every_option_reaches_the_decode_service(
    edge: GatewayHere, scripted: ScriptedServer, path: str, stop: Any
) -> None:
    scripted.inference.script = [started(), finished()]
    scripted.inference.has_reasoning, scripted.inference.output_format = False, "none"
    is_chat = path != COMPLETIONS
    prompt = {"messages": [{"role": "user", "content": "x"}]} if is_chat else {"prompt": "x"}
    bound = {"max_completion_tokens" if is_chat else "max_tokens": 20}
    more = {"logit_bias": {"20": 4}, "stop": stop, "truncate_prompt_tokens": 9, **bound}
    assert edge.ask("POST", path, {"model": "demo", **prompt, **OPTIONS, **more}).status == 200
    request = scripted.inference.requests.get(timeout=BOUND_S)
    assert request.truncate_prompt_tokens == 9
    assert request.sampling == SamplingParams(
        **{**OPTIONS, "seed": 2**64 - 3}, logit_bias={20: 4.0}, stop=list(stop), max_tokens=20
    )
