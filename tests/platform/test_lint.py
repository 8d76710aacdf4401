"""Tests that `python -m scripts.lint` finds what breaks a rule of the engines' source, and unknown commands."""

from __future__ import annotations

from functools import partial

import pytest

from scripts.lint.commands import problem_of
from scripts.lint.engine import (
    Finder,
    names_of_devices,
    reads_of_the_relay,
    sums_of_lengths,
    sums_of_timings,
    writes,
)

FINDERS: dict[str, Finder] = {
    "phase": partial(writes, attribute="phase"),
    "timings": sums_of_timings,
    "lengths": sums_of_lengths,
    "relay": partial(reads_of_the_relay, but={"stash", "seeds"}),
    "device": names_of_devices,
}


@pytest.mark.parametrize(
    ("rule", "planted"),
    [
        ("phase", "req.phase = Phase.QUEUE"),
        ("phase", "row.req.phase: Phase = Phase.QUEUE"),
        ("phase", "self._row.req.phase = Phase.QUEUE"),
        ("phase", "req.phase, req.lease = Phase.QUEUE, None"),
        ("phase", 'setattr(req, "phase", Phase.QUEUE)'),
        ("timings", "whole_s = timings.queue_s + timings.prefill_s"),
        ("lengths", "batch.seq_lens_sum = 3"),
        ("lengths", "replace(batch, seq_lens_sum=3)"),
        ("lengths", "seq_lens_sum += 1"),
        ("relay", "tokens = self.future_map.output_tokens"),
        ("relay", "seeds = self.future_map.seeds['states']"),
        ("device", "import torch.cuda"),
        ("device", "torch.cuda.synchronize()"),
        ("device", "from torch.cuda import Event"),
        ("device", "from common.device.cpu import CpuStream"),
        ("device", "isinstance(event, CudaEvent)"),
        ("device", "seq_lens.to('cuda:0')"),
    ],
)
def test_a_place_that_breaks_a_rule_of_the_engine_is_found(rule: str, planted: str) -> None:
    assert FINDERS[rule](f"kept = 1\n{planted}\n") == [2]


@pytest.mark.parametrize(
    ("rule", "allowed"),
    [
        ("phase", "self.phase = Phase.QUEUE"),
        ("phase", "return req.phase"),
        ("timings", "whole_s = began_s + waited_s"),
        ("lengths", "seq_lens_sum: int"),
        ("relay", "self.future_map.stash(tokens, self.future_map.seeds)"),
        ("device", "from common.device.stream import Event"),
    ],
)
def test_what_a_rule_of_the_engine_allows_is_none(rule: str, allowed: str) -> None:
    assert FINDERS[rule](allowed) == []


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("make nothing", "no target nothing"),
        ("baton fly", "no command fly"),
        ("baton generate --warp 9", "no option --warp"),
        ("python -m benchmarks.nothing", "no module benchmarks.nothing"),
        ("python -m decode_service --nothing=1", "no setting --nothing"),
        ("sudo python -m prefill_service --no-tf32", ""),
        (".venv/bin/baton up --prefill-arg=--draft=demo", ""),
        ("make fuzz MINUTES=10", ""),
        ("docker compose up", ""),
    ],
)
def test_a_quoted_command_that_does_not_exist_is_noticed(command: str, problem: str) -> None:
    assert problem_of(command) == problem
