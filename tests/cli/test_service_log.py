"""Tests of the log lines of services, as `baton up` shows them to its user."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.service_log import ServiceLog, log_tail, why_it_ended


def line(event: str, level: str = "info", **fields: object) -> str:
    return json.dumps({"event": event, "level": level, **fields})


def test_a_log_is_followed_from_where_it_ends_line_by_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "prefill-0.log"
    assert ServiceLog(path).new_words() == []
    path.write_text(line("loading_model") + "\n")
    log = ServiceLog(path)
    assert log.new_words() == []
    with path.open("a") as file:
        whole, begun = line("loading_draft", draft="demo"), line("fused_forward_ready", seconds=1.5)
        file.write(f"{whole}\n{line('config', model='demo')}\nno line of ours\n{begun[:20]}")
        file.flush()
        assert log.new_words() == ["loads the draft head"]
        file.write(f"{begun[20:]}\n")
        file.flush()
        assert log.new_words() == ["is at full speed"]
    assert log.new_words() == []


def test_failures_that_end_no_process_are_told_and_other_lines_where_they_help(
    tmp_path: Path,
) -> None:
    path = tmp_path / "decode-0.log"
    log = ServiceLog(path)
    said = [
        line("kernels_not_kept", "warning", error="read-only"),
        line("prefill replica p:1 cannot serve: fingerprints differ", "error"),
        line("cannot_start", "critical", error="device: no"),
        line("preparing_model", stage="converting"),
        line("preparing_model"),
        line("pool_sized", max_rows=32, max_kv_tokens=32768),
        line("engine_stalled", "error", part="stream forward", still_s=3.5),
        line("engine_moves_again", part="stream forward", still_s=12.0),
        line("fused_forward_failed", "warning", error="no space is left"),
        "[]",
        '"text"',
    ]
    path.write_text("\n".join(said) + "\n")
    assert log.new_words() == [
        "prefill replica p:1 cannot serve: fingerprints differ",
        "converting",
        "has room for 32 requests with 32768 tokens of KV in all",
        "stalls: stream forward has not moved for 3.5 s",
        "goes on: stream forward moves again, after 12.0 s",
        "serves by PyTorch's operators: no space is left",
    ]


@pytest.mark.parametrize(
    ("tail", "why"),
    [
        ("", ""),
        (line("serving"), ""),
        (f"{line('config')}\n{line('cannot_start', 'critical', error='model: no')}", "model: no"),
        (f"{line('ended', 'critical', reason='the engine died')}\n{line('draining')}", "the engine died"),
        (f"{line('serving')}\nSegmentation fault", "Segmentation fault"),
        ("Traceback\n  somewhere\nMemoryError", "MemoryError"),
        (line("engine_stalled", "error"), "engine_stalled"),
        (f"{line('engine_stalled', 'error')}\n{line('engine_moves_again')}", ""),
    ],
)
def test_why_a_process_ended_is_its_last_failure(tail: str, why: str) -> None:
    assert why_it_ended(tail) == why


def test_a_tail_is_of_one_start(tmp_path: Path) -> None:
    path = tmp_path / "decode-0.log"
    assert log_tail(path) == ""
    path.write_text("first start\n")
    start = path.stat().st_size
    assert log_tail(path, start=start) == ""
    with path.open("a") as file:
        file.write("second start\n")
    assert log_tail(path, start=start) == "second start"
