"""Tests of what a request leaves in the metrics of both services and in the decode service's log."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from structlog.testing import capture_logs

from tests.support.services_here import pair_here


async def test_a_request_is_counted_by_both_services_and_told_in_one_line(
    tiny_model_dir: Callable[[str], Path],
) -> None:
    with capture_logs() as lines:
        async with pair_here(tiny_model_dir("llama")) as pair:
            await pair.decode.client.complete(token_ids=[10, 11], max_tokens=3, ignore_eos=True, request_id="r1")
            prefill, decode = (service.registry.get_sample_value for service in (pair.prefill, pair.decode))
            assert decode("baton_requests_total", {"outcome": "length"}) == 1
            assert prefill("baton_requests_total", {"outcome": "prebuilt"}) == 1
            assert decode("baton_transfer_seconds_count") == 1
            for value in (prefill, decode):
                assert value("baton_batch_size_count")
                assert value("baton_rows", {"state": "reserved"}) == 0
    (line,) = [line for line in lines if line["event"] == "request_finished"]
    assert "no_draft_head" in [line["event"] for line in lines]
    assert (line["request_id"], line["num_output_tokens"], line["outcome"]) == ("r1", 3, "length")
