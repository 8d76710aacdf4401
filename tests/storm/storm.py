"""Sends many requests at once to services with faults. Some clients leave early, and the end of every request is
counted.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, fields

from baton.client import AsyncClient
from baton.errors import BatonError
from baton.events import Delta, Finished
from tests.storm.oracle import Case
from tests.support.running_pair import RECONNECT_AT_ONCE

REQUEST_BOUND_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Storm:
    """A storm of requests. For a share `abort_share` of them, the client leaves after some events or after some time.

    With `resumes`, clients continue a broken stream in another call.
    """

    num_requests: int
    concurrency: int = 32
    abort_share: float = 0.3
    resumes: bool = False
    seed: int = 0


LEFT = "left"


@dataclass(frozen=True, slots=True)
class ClientEnd:
    """The end of a request as its client saw it.

    `outcome` is the reason why the request finished or failed, as a service logs it, or LEFT if the client left.
    `has_started` says whether the client saw an event.
    """

    request_id: str
    outcome: str
    has_started: bool


@dataclass(slots=True)
class StormReport:
    """The result of a storm. `ends` has each request's end as its client saw it, `wrong` describes wrong outputs,
    `failed` counts errors by code and reason, and `texts` has the errors' texts.

    `num_shared_tokens` counts the cached tokens of requests whose prompt was new in their namespace: they were left by
    requests with other prompts.
    """

    num_finished: int = 0
    num_aborted: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    texts: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    ends: list[ClientEnd] = field(default_factory=list)
    num_retractions: int = 0
    num_attempts: int = 0
    num_handed_off: int = 0
    num_cached_tokens: int = 0
    num_shared_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_constrained: int = 0

    @property
    def num_ended(self) -> int:
        return self.num_finished + self.num_aborted + self.failed.total()

    def add(self, other: StormReport) -> None:
        for entry in fields(self):
            setattr(self, entry.name, getattr(self, entry.name) + getattr(other, entry.name))

    def count(self, finished: Finished, *, is_first: bool, is_constrained: bool) -> None:
        self.num_finished += 1
        self.num_constrained += is_constrained
        self.num_retractions += finished.timings.num_retractions
        self.num_attempts += finished.timings.num_handoff_attempts
        self.num_handed_off += finished.timings.num_handoff_attempts > 0
        self.num_cached_tokens += finished.timings.num_cached_tokens
        self.num_shared_tokens += is_first * finished.timings.num_cached_tokens
        if finished.speculation is not None:
            self.num_drafted += finished.speculation.num_drafted_tokens
            self.num_accepted += finished.speculation.num_accepted_tokens


async def send_storm(address: str, cases: Sequence[Case], storm: Storm) -> StormReport:
    """Sends random cases, as many as the storm wants, and reports how each request ends.

    The last quarter of the cases is not sent before the middle of the storm, when much is cached.
    """
    draw = random.Random(storm.seed)
    num_early, num_before = len(cases) - len(cases) // 4, storm.num_requests // 2
    drawn = [draw.choice(cases[:num_early]) for _ in range(num_before)]
    drawn = [*drawn, *cases[num_early:], *(draw.choice(cases) for _ in range(num_before))][: storm.num_requests]
    requests = [(case, _Leave.draw(draw, storm.abort_share)) for case in drawn]
    report = StormReport()
    sent: set[Hashable] = set()
    port = address.rpartition(":")[-1]
    waiting = ((f"storm-{port}-{storm.seed}-{number}", *request) for number, request in enumerate(requests))
    async with AsyncClient(address, resume=storm.resumes, channel_overrides=RECONNECT_AT_ONCE) as client:

        async def keep_sending() -> None:
            for request_id, case, leave in waiting:
                is_first = case.cache_key not in sent
                sent.add(case.cache_key)
                await _send(client, request_id, case, leave, report, is_first=is_first)

        await asyncio.gather(*(keep_sending() for _ in range(storm.concurrency)))
    return report


@dataclass(frozen=True, slots=True)
class _Leave:
    """The moment when a client leaves: after a number of events, or after some seconds. With neither, it stays."""

    num_events: int | None = None
    seconds: float | None = None

    @classmethod
    def draw(cls, draw: random.Random, abort_share: float) -> _Leave:
        if draw.random() >= abort_share:
            return cls()
        return cls(num_events=draw.randint(1, 20)) if draw.random() < 0.5 else cls(seconds=draw.uniform(0.0, 0.5))


async def _send(
    client: AsyncClient, request_id: str, case: Case, leave: _Leave, report: StormReport, *, is_first: bool
) -> None:
    token_ids: list[int] = []
    logprobs: list[float] = []
    finished: Finished | None = None
    num_read = 0
    stream = client.generate(
        token_ids=case.prompt,
        request_id=request_id,
        timeout_s=REQUEST_BOUND_S,
        choice_index=case.choice_index,
        cache_salt=case.cache_salt,
        cache_prompt=None if case.is_cached else False,
        **case.sampling,
    )
    try:
        async with stream, asyncio.timeout(leave.seconds):
            async for event in stream:
                num_read += 1
                match event:
                    case Delta():
                        token_ids += event.token_ids
                        logprobs += [position.chosen.logprob for position in event.logprobs]
                    case Finished():
                        finished = event
                if finished is None and num_read == leave.num_events:
                    break
    except TimeoutError:
        finished = None
    except BatonError as error:
        finished = None
        report.failed[f"{error.code.name} {error.reason}"] += 1
        report.texts.append(str(error))
        report.ends.append(ClientEnd(request_id, error.reason.lower(), num_read > 0))
        _check(case, token_ids, logprobs, None, report)
        return
    outcome = LEFT if finished is None else finished.reason.value
    report.ends.append(ClientEnd(request_id, outcome, num_read > 0))
    if finished is None:
        report.num_aborted += 1
    else:
        report.count(finished, is_first=is_first, is_constrained="regex" in case.sampling)
        if not case.is_cached and finished.timings.num_cached_tokens:
            report.wrong.append(f"case {case.number}: cached KV was used, and it asked for none")
    _check(case, token_ids, logprobs, finished, report)


def _check(
    case: Case, token_ids: list[int], logprobs: list[float], finished: Finished | None, report: StormReport
) -> None:
    wrong = case.check(token_ids, logprobs, is_whole=finished is not None)
    if wrong is None and finished is not None and finished.usage.num_completion_tokens != len(case.token_ids):
        wrong = f"case {case.number}: usage says {finished.usage.num_completion_tokens} tokens"
    if wrong is not None:
        report.wrong.append(wrong)
