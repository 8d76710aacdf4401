"""Tests of `resume=True`: a broken stream continues in another call, and its caller sees a single stream."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Any

import pytest
from google.rpc import code_pb2

from baton import AsyncClient, Client, Delta, Event, Finished, Started, errors
from baton.client import EventStream
from baton.client import generation as generation_module
from baton.client.generation import MAX_BREAKS, Generation, Progress
from baton.client.servers import BlockingServers
from baton.events import PromptLogprobs, Usage
from baton.v1 import inference_pb2
from tests.client.either_client import EitherClient
from tests.client.scripted_inference import BOUND_S, ScriptedServer, delta, failure, finished, prompt_tokens, started

LOST = failure(code_pb2.UNAVAILABLE, "Socket closed")
CUT = failure(code_pb2.CANCELLED, "the server shuts down")
DRAINING = failure(code_pb2.UNAVAILABLE, "stopped", reason="DRAINING")
FULL = failure(code_pb2.RESOURCE_EXHAUSTED, "full", reason="QUEUE_FULL")
TOO_LONG = failure(code_pb2.INVALID_ARGUMENT, "prompt: no room", reason="CONTEXT_EXCEEDED")
LIVE = failure(code_pb2.ALREADY_EXISTS, "live", reason="DUPLICATE_REQUEST_ID")


MakeClient = Callable[..., EitherClient]


@pytest.fixture
async def make_client(open_client: MakeClient, server: ScriptedServer) -> MakeClient:
    """A function that opens a client of either kind, which resumes unless it is told otherwise."""
    return lambda **options: open_client(server.address, **{"resume": True, **options})


@pytest.fixture
async def resuming(make_client: MakeClient) -> EitherClient:
    return make_client()


async def read(client: EitherClient, **options: Any) -> tuple[list[Event], errors.BatonError | None, Progress]:
    """Returns the events of a generation, the error that ended it or None, and the stream's progress."""
    events: list[Event] = []
    stream = client.generate("Hi", **options)
    try:
        async for event in stream:
            events.append(event)
    except errors.BatonError as error:
        return events, error, stream.progress
    return events, None, stream.progress


def requests(server: ScriptedServer) -> Iterator[inference_pb2.GenerateRequest]:
    while not server.inference.requests.empty():
        yield server.inference.requests.get()


@pytest.mark.parametrize("broken_by", [LOST, DRAINING, CUT], ids=["lost", "draining", "cut"])
async def test_a_broken_stream_goes_on_with_its_seed_and_what_came(
    server: ScriptedServer, resuming: EitherClient, broken_by: Any
) -> None:
    server.inference.scripts.extend(
        [
            [started("first", seed=7), delta([5, 6], "Hel"), broken_by],
            [started("second", seed=7), delta([8], "lo"), broken_by],
            [started("third", seed=7), finished(num_completion_tokens=4)],
        ]
    )
    events, error, progress = await read(
        resuming, generated_token_ids=[4], choice_index=3, cache_salt="tenant", temperature=0.5
    )

    assert error is None
    assert events[:-1] == [Started("first", 3, 7), Delta((5, 6), "Hel", ()), Delta((8,), "lo", ())]
    assert isinstance(events[-1], Finished) and events[-1].usage == Usage(3, 4)
    assert progress == Progress(7, (4, 5, 6, 8))
    first, second, third = requests(server)
    assert not first.sampling.HasField("seed")
    for request, token_ids in ((first, [4]), (second, [4, 5, 6]), (third, [4, 5, 6, 8])):
        assert (request.text, request.choice_index, request.sampling.temperature) == ("Hi", 3, 0.5)
        assert request.cache_salt == "tenant"
        assert list(request.generated_token_ids) == token_ids
        assert not request.HasField("request_id")
    assert (second.sampling.seed, third.sampling.seed) == (7, 7)


async def test_what_the_request_leaves_open_stays_as_the_first_server_had_it(
    server: ScriptedServer, resuming: EitherClient
) -> None:
    first, again = started(), started()
    first.started.sampling.temperature, first.started.sampling.top_k = 0.25, 40
    again.started.sampling.temperature, again.started.sampling.top_k = 1.0, 0
    server.inference.scripts.extend([[first, LOST], [again, LOST], [again, finished()]])
    await read(resuming, temperature=0.5, stop=["x"])
    asked = [request.sampling for request in requests(server)]
    assert [each.HasField("top_k") for each in asked] == [False, True, True]
    assert [(each.temperature, each.top_k, list(each.stop)) for each in asked[1:]] == [(0.5, 40, ["x"])] * 2


async def test_tokens_of_the_prompt_come_once_whenever_the_stream_breaks(
    server: ScriptedServer, resuming: EitherClient
) -> None:
    first, second, third = (5, b"a", None), (6, b"b", -0.5), (7, b"c", -1.5)
    server.inference.scripts.extend(
        [
            [started(), prompt_tokens(0, first), prompt_tokens(1, second), LOST],
            [started(), prompt_tokens(0, first), LOST],
            [started(), prompt_tokens(0, first), prompt_tokens(1, second, third), LOST],
            [started(), prompt_tokens(0, first, second, third), delta([8], "d"), LOST],
            [started(), finished(num_completion_tokens=1)],
        ]
    )
    events, error, _ = await read(resuming, prompt_logprobs=0)
    assert error is None
    parts = [event for event in events if isinstance(event, PromptLogprobs)]
    assert [(part.start, [token.token_id for token in part.tokens]) for part in parts] == [(0, [5]), (1, [6]), (2, [7])]
    assert [type(event) for event in events] == [Started, *[PromptLogprobs] * 3, Delta, Finished]


async def test_a_call_that_broke_before_started_is_made_again(server: ScriptedServer, resuming: EitherClient) -> None:
    server.inference.scripts.extend([[LOST], [started("second", seed=9), delta([5], "a"), finished()]])
    completion = await resuming.complete("Hi")

    assert (completion.request_id, completion.seed, completion.token_ids) == ("second", 9, (5,))
    assert [request.sampling.HasField("seed") for request in requests(server)] == [False, False]


async def test_a_status_lost_behind_finished_breaks_nothing(server: ScriptedServer, resuming: EitherClient) -> None:
    server.inference.scripts.append([started(), finished(), LOST])
    events, error, _ = await read(resuming)

    assert (len(events), error) == (2, None)
    assert len(list(requests(server))) == 1


async def test_refusals_due_to_the_break_pass(server: ScriptedServer, resuming: EitherClient) -> None:
    """A dying server may still hold the caller's request id, and the others may be busy with the streams that it lost.
    Both refuse the request for a while, and the client tries again.
    """
    server.inference.scripts.extend([[started(), delta([5], "a"), LOST], [LIVE], [FULL], [started(), finished()]])
    events, error, _ = await read(resuming, request_id="mine")

    assert (len(events), error) == (3, None)
    assert [request.request_id for request in requests(server)] == ["mine"] * 4


async def test_a_server_whose_context_is_too_small_for_what_it_would_resume_is_passed_over(
    server: ScriptedServer, resuming: EitherClient
) -> None:
    server.inference.scripts.extend([[started(), delta([5], "a"), LOST], [TOO_LONG], [started(), finished()]])
    events, error, _ = await read(resuming)

    assert (len(events), error) == (3, None)


async def test_a_stream_that_is_too_long_for_every_server_ends_in_words(
    server: ScriptedServer, make_client: MakeClient
) -> None:
    server.inference.scripts.extend([[started(), delta([5], "a"), LOST], *[[TOO_LONG]] * 20])
    _, error, progress = await read(make_client(resume_timeout_s=0.2))

    assert isinstance(error, errors.Unavailable) and "no server was found whose context" in str(error)
    assert progress.generated_token_ids == (5,)


async def test_a_request_that_was_too_long_from_the_start_is_told_at_once(
    server: ScriptedServer, resuming: EitherClient
) -> None:
    server.inference.scripts.extend([[LOST], [TOO_LONG]])
    _, error, _ = await read(resuming)

    assert isinstance(error, errors.InvalidArgument) and error.reason == "CONTEXT_EXCEEDED"


@pytest.mark.parametrize(
    "status",
    [
        failure(code_pb2.INVALID_ARGUMENT, "no"),
        failure(code_pb2.INTERNAL, "no", reason="ENGINE_FAULT"),
        failure(code_pb2.RESOURCE_EXHAUSTED, "no"),
        failure(code_pb2.ALREADY_EXISTS, "no"),
        failure(code_pb2.DEADLINE_EXCEEDED, "no"),
        failure(code_pb2.CANCELLED, "the client reads nothing", reason="CANCELLED"),
    ],
    ids=lambda status: code_pb2.Code.Name(status.code),
)
@pytest.mark.parametrize("is_resumed", [False, True], ids=["first call", "second call"])
async def test_what_another_server_would_say_too_is_raised(
    server: ScriptedServer, resuming: EitherClient, status: Any, is_resumed: bool
) -> None:
    if is_resumed:
        server.inference.scripts.append([started(), delta([5], "a"), LOST])
    server.inference.scripts.append([status])
    _, error, progress = await read(resuming)

    assert error is not None and error.code.value[0] == status.code
    assert progress.generated_token_ids == ((5,) if is_resumed else ())
    assert len(list(requests(server))) == 1 + is_resumed


@pytest.mark.parametrize("status", [FULL, LIVE], ids=["full", "live"])
async def test_a_refusal_that_no_break_explains_is_raised(
    server: ScriptedServer, resuming: EitherClient, status: Any
) -> None:
    server.inference.scripts.append([status])
    _, error, _ = await read(resuming, request_id="mine")

    assert isinstance(error, errors.ResourceExhausted | errors.AlreadyExists)


async def test_another_prompt_length_is_another_model(server: ScriptedServer, resuming: EitherClient) -> None:
    server.inference.scripts.extend([[started(num_prompt_tokens=3), LOST], [started(num_prompt_tokens=4), finished()]])
    _, error, _ = await read(resuming)

    assert isinstance(error, errors.Internal) and "another model" in str(error)


async def test_it_gives_up_in_time_with_the_last_error(server: ScriptedServer, make_client: MakeClient) -> None:
    server.inference.scripts.append([started(seed=7), delta([5], "a"), LOST])
    server.inference.script = [DRAINING]

    _, error, progress = await read(make_client(resume_timeout_s=0.3))

    assert isinstance(error, errors.Unavailable) and error.reason == "DRAINING"
    assert progress == Progress(7, (5,))
    assert 2 <= len(list(requests(server))) <= 6


async def test_before_it_is_admitted_it_may_give_up_sooner(server: ScriptedServer, make_client: MakeClient) -> None:
    client = make_client(resume_timeout_s=60.0, admission_timeout_s=0.3)
    server.inference.script = [DRAINING]
    events, error, _ = await read(client)
    assert events == [] and isinstance(error, errors.Unavailable)
    assert len(list(requests(server))) <= 6


def test_once_it_is_admitted_it_has_the_longer_time() -> None:
    now_s, lost = 0.0, errors.Unavailable("lost")
    generation = Generation(
        inference_pb2.GenerateRequest(),
        timeout_s=None,
        resume_timeout_s=60.0,
        admission_timeout_s=0.3,
        clock=lambda: now_s,
        jitter=lambda: 1.0,
    )
    generation.next_call()
    generation.accept(started())
    generation.pause_s_after(lost)
    generation.next_call()
    now_s = 50.0
    generation.pause_s_after(lost)
    now_s = 60.1
    with pytest.raises(errors.Unavailable):
        generation.pause_s_after(lost)


@pytest.mark.parametrize(("told", "num_calls"), [({"retry_after_s": "0"}, 2), ({"retry_after_s": "7"}, 1), ({}, 1)])
async def test_with_a_time_for_admission_it_comes_again_when_it_was_told_to(
    server: ScriptedServer, make_client: MakeClient, told: dict[str, str], num_calls: int
) -> None:
    server.inference.scripts.append([failure(code_pb2.RESOURCE_EXHAUSTED, "full", reason="QUEUE_FULL", **told)])
    server.inference.script = [started(), finished()]
    _, error, _ = await read(make_client(resume_timeout_s=60.0, admission_timeout_s=5.0))
    assert (error is None) == (num_calls == 2)
    assert len(list(requests(server))) == num_calls


@pytest.mark.parametrize(("told", "seconds"), [("9" * 5000, 10**9), ("-1", None), ("1.5", None)])
def test_a_time_to_come_again_is_a_whole_number_of_any_length(told: str, seconds: int | None) -> None:
    assert errors.ResourceExhausted("full", metadata={"retry_after_s": told}).retry_after_s == seconds


def test_those_who_were_told_the_same_second_do_not_all_come_at_once() -> None:
    full = errors.ResourceExhausted("full", reason="QUEUE_FULL", metadata={"retry_after_s": "3"})
    pauses = []
    for number in range(5):
        generation = Generation(
            inference_pb2.GenerateRequest(),
            timeout_s=None,
            resume_timeout_s=60.0,
            admission_timeout_s=5.0,
            jitter=lambda number=number: number / 4,  # type: ignore[misc]
        )
        pauses.append(generation.pause_s_after(full))
    assert len(set(pauses)) == 5
    assert (pauses[0], pauses[-1] < 4.0) == (3.0, True), "never too early, and while the place is kept"


def test_the_next_call_comes_at_the_earliest_time_that_a_full_server_named() -> None:
    def full(told_s: int) -> errors.ResourceExhausted:
        return errors.ResourceExhausted("full", reason="QUEUE_FULL", metadata={"retry_after_s": str(told_s)})

    def refused(*told_s: int, admission_timeout_s: float | None = 5.0) -> Generation:
        """Returns a generation that was refused by each of several ready servers but the last."""
        generation = Generation(
            inference_pb2.GenerateRequest(),
            timeout_s=None,
            resume_timeout_s=60.0,
            admission_timeout_s=admission_timeout_s,
            clock=lambda: 7.0,
            jitter=lambda: 0.0,
        )
        for each_s in told_s:
            assert generation.pause_s_after(full(each_s), is_another_ready=True) == 0.0
        return generation

    assert refused(4, 3).pause_s_after(full(2)) == refused(2, 3).pause_s_after(full(4)) == 2.0
    for last in (6, 9):
        for admission_timeout_s in (5.0, None):
            with pytest.raises(errors.ResourceExhausted) as refusal:
                refused(8, 15 - last, admission_timeout_s=admission_timeout_s).pause_s_after(full(last))
            assert refusal.value.retry_after_s == 6
    for is_another_ready, pause_s in ((True, 4.0), (False, 5.0)):  # else each server is asked again
        broken = refused(4)
        assert broken.pause_s_after(errors.Unavailable("gone"), is_another_ready=is_another_ready) == 0.0
        assert broken.pause_s_after(full(5)) == pause_s


async def test_the_deadline_covers_all_calls(server: ScriptedServer, resuming: EitherClient) -> None:
    now_s = 7.0
    generation = Generation(inference_pb2.GenerateRequest(), timeout_s=5.0, resume_timeout_s=60.0, clock=lambda: now_s)
    assert generation.next_call()[1] == 5.0
    generation.accept(started())
    now_s = 10.0
    generation.pause_s_after(errors.Unavailable("gone"))
    assert generation.next_call()[1] == 2.0, "a later call has what is left"

    server.inference.script = [LOST]
    _, error, _ = await read(resuming, timeout_s=0.3)
    assert isinstance(error, errors.DeadlineExceeded)


async def test_without_resume_the_stream_still_says_how_to_go_on(
    server: ScriptedServer, make_client: MakeClient
) -> None:
    server.inference.scripts.append([started(seed=7), delta([5, 6], "a"), LOST])
    client = make_client(resume=False)

    events, error, progress = await read(client, generated_token_ids=[4])

    assert isinstance(error, errors.Unavailable) and len(events) == 2
    assert progress == Progress(seed=7, generated_token_ids=(4, 5, 6))
    assert len(list(requests(server))) == 1


def test_closing_ends_the_wait_for_the_next_call(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_module, "FIRST_PAUSE_S", 2 * BOUND_S)
    monkeypatch.setattr(generation_module, "MAX_PAUSE_S", 2 * BOUND_S)
    is_pausing = threading.Event()

    def jitter() -> float:
        is_pausing.set()
        return 1.0

    server.inference.script = [LOST]
    request = inference_pb2.GenerateRequest(text="Hi")
    raised: list[errors.BatonError] = []
    with closing(BlockingServers(server.address)) as servers:
        generation = Generation(request, timeout_s=None, resume_timeout_s=10 * BOUND_S, jitter=jitter)
        stream = EventStream(generation, servers)

        def read() -> None:
            try:
                next(stream)
            except errors.BatonError as error:
                raised.append(error)

        reading = threading.Thread(target=read)
        reading.start()
        assert is_pausing.wait(BOUND_S)
        stream.close()
        reading.join(BOUND_S)
        assert not reading.is_alive()
    assert isinstance(raised[0], errors.Cancelled)


async def test_cancelling_the_reading_task_ends_the_wait_for_the_next_call(server: ScriptedServer) -> None:
    server.inference.script = [LOST]
    async with AsyncClient(server.address, resume=True) as client:
        reading = asyncio.create_task(client.complete("Hi"))
        for _ in range(3):
            await asyncio.to_thread(server.inference.requests.get, timeout=BOUND_S)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading


async def test_a_closed_client_resumes_nothing(server: ScriptedServer) -> None:
    server.inference.scripts.append([started(), delta([5], "a"), server.inference.HOLD])
    client = Client(server.address, resume=True)
    stream = client.generate("Hi")
    next(stream)
    client.close()
    with pytest.raises(errors.Cancelled):
        list(stream)
    with pytest.raises(errors.Cancelled):
        client.generate("Hi")

    async_client = AsyncClient(server.address, resume=True)
    await async_client.close()
    with pytest.raises(errors.Cancelled):
        async_client.generate("Hi")


def test_what_was_not_admitted_is_sent_again_without_a_copy() -> None:
    """A copy of the request would be expensive: a prompt may have megabytes, and a caller may want many choices of
    it.
    """
    request = inference_pb2.GenerateRequest(text="Hi", generated_token_ids=[1, 2])
    generation = Generation(request, timeout_s=None, resume_timeout_s=10.0)
    for _ in range(2):
        assert generation.next_call()[0] is request
    generation.accept(started(seed=7))
    again, _ = generation.next_call()
    assert (again.sampling.seed, again.generated_token_ids, request.sampling.HasField("seed")) == (7, [1, 2], False)


def test_servers_that_have_no_prefill_service_are_asked_for_no_longer_than_others() -> None:
    now_s = 0.0
    generation = Generation(
        inference_pb2.GenerateRequest(), timeout_s=None, resume_timeout_s=60.0, clock=lambda: now_s, jitter=lambda: 1.0
    )
    generation.next_call()
    generation.accept(started())
    for _ in range(6):
        now_s += 11.0
        generation.pause_s_after(errors.Unavailable("none is ready", reason="NO_PREFILL"))
        generation.next_call()
        generation.accept(started())
    now_s += 11.0
    with pytest.raises(errors.Unavailable):
        generation.pause_s_after(errors.Unavailable("none is ready", reason="NO_PREFILL"))


def test_the_time_to_give_up_begins_anew_once_for_each_server_that_accepted_the_request() -> None:
    now_s, lost = 0.0, errors.Unavailable("lost")
    generation = Generation(
        inference_pb2.GenerateRequest(), timeout_s=None, resume_timeout_s=10.0, clock=lambda: now_s, jitter=lambda: 1.0
    )
    generation.next_call()
    generation.accept(started())
    generation.pause_s_after(lost)
    generation.next_call()
    generation.accept(started())
    now_s = 100.0
    generation.pause_s_after(lost)
    now_s = 106.0
    generation.pause_s_after(lost)
    now_s = 112.0
    with pytest.raises(errors.Unavailable):
        generation.pause_s_after(lost)


def test_pauses_grow_to_a_bound_and_begin_anew_with_each_event() -> None:
    now_s = 0.0
    generation = Generation(
        inference_pb2.GenerateRequest(), timeout_s=None, resume_timeout_s=10.0, clock=lambda: now_s, jitter=lambda: 1.0
    )
    generation.next_call()
    generation.accept(started())
    lost = errors.Unavailable("lost")

    now_s = 100.0
    pauses = [generation.pause_s_after(lost) for _ in range(8)]
    assert pauses == [0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    now_s = 108.0
    assert generation.pause_s_after(lost) == 2.0
    now_s = 108.1
    with pytest.raises(errors.Unavailable):
        generation.pause_s_after(lost)

    generation.next_call()
    assert generation.accept(started()) is None, "a further Started is no event of the caller's"
    now_s = 200.0  # the request waited there, admitted, until that service was lost too
    assert generation.pause_s_after(lost) == 2.0, "pauses stay as long until output comes"
    for _ in range(MAX_BREAKS):
        generation.next_call()
        generation.accept(started())
        with suppress(errors.Unavailable):
            generation.pause_s_after(lost)
    with pytest.raises(errors.Unavailable):
        generation.pause_s_after(lost)
    generation.next_call()
    generation.accept(started())
    generation.accept(delta([5], "a"))
    assert generation.pause_s_after(lost) == 0.0
