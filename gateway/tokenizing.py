"""The endpoints that tokenise: vLLM's /tokenize and /detokenize, and Anthropic's count_tokens."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Annotated, Any, Unpack

from pydantic import Field
from starlette.types import Receive, Send

from baton import AsyncClient
from baton.errors import BatonError
from gateway.apis.chat import ChatMessages, TemplateFields, chat_params, chat_prompt
from gateway.apis.messages import ConversationFields, conversation_prompt
from gateway.errors import answer_of, api_error_of, invalid
from gateway.fields import RequestFields, parse_fields
from gateway.open_requests import OpenRequest
from gateway.post_endpoint import PostEndpoint, PostParts, unless_left
from gateway.reasoning import Effort, ReasoningFields, effort_wish
from gateway.request_record import HttpRecord
from gateway.sending import JsonResponse
from gateway.served_model import ModelCard


class TextFields(ReasoningFields, RequestFields):
    """The fields that go with `prompt`. What they say of reasoning means nothing, because the prompt is no chat."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    reasoning_effort: Effort | None = None


class TokenizeFields(TextFields, TemplateFields):
    messages: ChatMessages | None = None


class DetokenizeFields(RequestFields):
    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=1 << 32)]], Field(fail_fast=True)]


class TokenizingEndpoint(PostEndpoint):
    """An endpoint that tokenises. `answer` makes the answer's JSON from the request's body; it may raise ApiError or
    BatonError.
    """

    def __init__(
        self,
        answer: Callable[[bytes, ModelCard, HttpRecord], Coroutine[Any, Any, dict[str, Any]]],
        **common: Unpack[PostParts],
    ) -> None:
        super().__init__(**common)
        self._answer_of = answer

    async def _answer(
        self, body: bytes, open_request: OpenRequest, record: HttpRecord, receive: Receive, send: Send
    ) -> None:
        async with open_request.ends_when_failed():
            card = await self._card(receive)
            try:
                answer = await unless_left(receive, self._answer_of(body, card, record))
            except BatonError as error:
                raise api_error_of(error, {"token_ids": "tokens"}) from None
        await JsonResponse(answer).send_to(send)


class Tokenizing:
    """Tokenises and detokenises with the decode service's tokenizer."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def tokenize(self, body: bytes, card: ModelCard, record: HttpRecord) -> dict[str, Any]:
        fields = parse_fields(body, TokenizeFields)
        if fields.model is not None:
            card.check(fields.model)
        if (fields.prompt is None) == (fields.messages is None):
            raise invalid("prompt", "give either prompt or messages")
        source: dict[str, Any] = {"prompt": fields.prompt}
        params: dict[str, str] = {}
        if fields.messages is None:
            text = parse_fields(body, TextFields)  # refuses what only chats have
            wishes = text.wishes_of_text(effort_wish("reasoning_effort", text.reasoning_effort))
            record.ignored += sorted(wish.field for wish in wishes)
        else:
            prompt = chat_prompt(fields.messages, fields)
            params = chat_params(prompt)
            source = prompt.served_by(card, record.ignored).arguments
        try:
            tokenized = await answer_of(
                self._client.tokenize(
                    **source,
                    add_special_tokens=fields.add_special_tokens,
                    with_pieces=fields.return_token_strs,
                    tenant=record.client or None,
                )
            )
        except BatonError as error:
            raise api_error_of(error, params) from None
        return {
            "count": len(tokenized.token_ids),
            "max_model_len": card.max_context_tokens,
            "tokens": tokenized.token_ids,
            "token_strs": tokenized.pieces if fields.return_token_strs else None,
        }

    async def detokenize(self, body: bytes, card: ModelCard, record: HttpRecord) -> dict[str, Any]:
        fields = parse_fields(body, DetokenizeFields)
        if fields.model is not None:
            card.check(fields.model)
        return {"prompt": await answer_of(self._client.detokenize(fields.tokens, tenant=record.client or None))}

    async def count_tokens(self, body: bytes, card: ModelCard, record: HttpRecord) -> dict[str, Any]:
        fields = parse_fields(body, ConversationFields)
        card.check(fields.model)
        prompt, params = conversation_prompt(fields)
        try:
            prompt = prompt.served_by(card, record.ignored)
            tokenized = await answer_of(self._client.tokenize(**prompt.arguments, tenant=record.client or None))
        except BatonError as error:
            raise api_error_of(error, params) from None
        return {"input_tokens": len(tokenized.token_ids)}
