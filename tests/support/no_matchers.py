"""A NewMatcher for services without a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

from common.errors import InvalidRequest
from common.grammar.grammar import Grammar
from common.grammar.matcher import Matcher
from common.grammar.reasoning import Reasoning


async def no_matchers(
    grammar: Grammar | None,
    output_ids: Sequence[int],
    reasoning: Reasoning | None,
    *,
    client: str = "",
    tenant: str = "",
) -> Matcher:
    """Raises InvalidRequest for every request."""
    field = "sampling.reasoning" if grammar is None else grammar.request_field
    raise InvalidRequest(field, "is not served here")
