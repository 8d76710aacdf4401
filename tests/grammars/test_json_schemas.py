"""Tests that every schema is served, or refused with a reason, and that no output that ends by itself breaks the schema
under which it was drawn.

`python -m tests.grammars` draws more outputs, also for schemas from elsewhere.
"""

from __future__ import annotations

import pytest

from common.checkpoints.demo_model import ensure_demo_model
from common.text.tokenizer import TextTokenizer
from tests.grammars.schema_cases import CASES, Case
from tests.grammars.schema_checks import SchemaChecks

MAX_TOKENS = 60
SERVED = [case for case in CASES if not case.refused]


@pytest.fixture(scope="module")
def checks() -> SchemaChecks:
    tokenizer = TextTokenizer.from_directory(ensure_demo_model())
    return SchemaChecks(tokenizer, vocab_size=49_152, eos_token_ids=[2])


@pytest.mark.parametrize("case", [case for case in CASES if case.refused], ids=str)
def test_a_schema_that_is_not_served_is_refused_by_name(checks: SchemaChecks, case: Case) -> None:
    assert case.refused in checks.refusal(case.schema)


@pytest.mark.parametrize("case", SERVED, ids=str)
def test_instances_are_allowed_as_the_schema_has_it(checks: SchemaChecks, case: Case) -> None:
    assert [each for each in case.valid if not checks.accepts(case.schema, each)] == []
    assert [each for each in (*case.invalid, *case.narrow) if checks.accepts(case.schema, each)] == []


@pytest.mark.parametrize("num_walks", [2, pytest.param(6, marks=pytest.mark.thorough)])
def test_no_output_that_ends_breaks_its_schema(checks: SchemaChecks, num_walks: int) -> None:
    checks.counts.clear()
    for case in filter(lambda case: case.is_drawn, SERVED):
        assert list(checks.wrong_outputs(case.schema, num_walks=num_walks, max_tokens=MAX_TOKENS)) == [], case
    assert checks.counts["ended"] > checks.counts["cut"] + checks.counts["failed"]
