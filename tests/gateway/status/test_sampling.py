"""Tests of sampling targets that restart, vanish, multiply, or answer with something other than metrics."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from common.telemetry.exposition import MetricsServer
from common.telemetry.metrics import EngineMetrics
from gateway.status.figures import Increase, parse_exposition
from gateway.status.watched import MAX_BYTES, Address, ScrapeFailed, Scraper, TargetAddresses
from tests.gateway.status.scene import IDLE, LOAD, Clock, Decode, ExposedDecode, ExposedPrefill, Names, numeric, sampler
from tests.support.stream_server import StreamServer

NUM_POOL_THREADS = 32
"""The most threads in an event loop's own thread pool."""
BOUND_S = 60.0


def test_counters_of_a_process_that_replaced_another_began_at_nothing() -> None:
    before = parse_exposition(
        "# TYPE baton_a_total counter\nbaton_a_total 100\n# TYPE baton_b_total counter\nbaton_b_total 1\n"
    )
    after = parse_exposition(
        "# TYPE baton_a_total counter\nbaton_a_total 7\n# TYPE baton_b_total counter\nbaton_b_total 5\n"
    )

    increase = Increase.between(before, after)

    assert (increase.total("baton_a_total"), increase.total("baton_b_total")) == (7, 5)


async def test_a_target_that_is_gone_says_why_and_the_others_go_on() -> None:
    clock = Clock()
    with ExposedDecode() as stays, ExposedDecode() as leaves:
        sampling = sampler(clock, [leaves.address, stays.address])
        await sampling.sample()
        leaves.requests.output_tokens.inc(10)
        clock.now_s += 2
        await sampling.sample()
        gone = leaves.address
        leaves.__exit__(None, None, None)
        clock.now_s += 2
        await sampling.sample()
        left, stayed = sampling.snapshot.services
        leaves.__enter__()
        await sampling.close()

    assert (left.address, left.is_reachable, left.rows) == (gone, False, None)
    assert left.reason == f"nothing listens at {gone} (connection refused)"
    assert left.figures.output_tokens_per_s == 2.5, "what it had done, over the time until now"
    assert stayed.is_reachable


async def test_a_service_has_the_address_by_which_decode_services_know_it_even_when_it_is_gone() -> None:
    with ExposedPrefill() as prefill:
        sampling = sampler(Clock(), [prefill.address])
        await sampling.sample()
        assert sampling.snapshot.services[0].grpc_address == "", "it does not listen yet"
        prefill.grpc_port = 50052
        await sampling.sample()
        assert sampling.snapshot.services[0].grpc_address == "127.0.0.1:50052"
    await sampling.sample()
    (gone,) = sampling.snapshot.services
    assert (gone.is_reachable, gone.grpc_address) == (False, "127.0.0.1:50052")
    await sampling.close()


async def test_every_address_behind_a_name_is_a_service_and_leaves_with_it() -> None:
    with ExposedDecode() as first, ExposedDecode() as second:
        names = Names(decode=sorted([first.address, second.address]))
        clock = Clock()
        sampling = sampler(clock, ["decode:9100"], look_up=names)
        await sampling.sample()
        assert [each.address for each in sampling.snapshot.services] == sorted([first.address, second.address])

        clock.now_s += 2
        names.addresses["decode"] = [second.address]
        await sampling.sample()
        assert [each.address for each in sampling.snapshot.services] == [second.address]

        await sampling.close()


async def test_the_addresses_in_a_file_are_services_too(tmp_path: Path) -> None:
    (tmp_path / "decode").write_text("10.0.0.1:1\n10.0.0.2:1\n")
    opened: list[Address] = []

    def open_client(address: Address) -> Decode:
        opened.append(address)
        return Decode(LOAD)

    target = f"file://{tmp_path}/decode"
    sampling = sampler(Clock(), [], [target], open_client=open_client)
    await sampling.sample()
    assert opened == [Address(target, f"10.0.0.{number}", f"10.0.0.{number}:1") for number in (1, 2)]
    await sampling.close()


async def test_a_target_whose_name_was_never_found_says_why() -> None:
    sampling = sampler(Clock(), ["decode:9100"], look_up=Names())
    await sampling.sample()
    (unknown,) = sampling.snapshot.services
    assert (unknown.target, unknown.address, unknown.is_reachable) == ("decode:9100", "", False)
    assert "no such name" in unknown.reason
    assert sampling.snapshot.outdated == ()
    await sampling.close()


async def test_who_was_behind_a_name_stays_with_what_it_counted_while_the_name_is_not_found() -> None:
    clock, client = Clock(), Decode(LOAD)
    with ExposedDecode() as decode:
        names = Names(decode=[decode.address])
        sampling = sampler(
            clock, ["decode:9100"], ["dns:///decode:50051"], look_up=names, open_client=lambda address: client
        )
        await sampling.sample()
        decode.requests.output_tokens.inc(10)
        clock.now_s += 2
        behind = names.addresses.pop("decode")
        await sampling.sample()

        seen = sampling.snapshot
        assert [(each.address, each.is_reachable) for each in seen.services] == [(decode.address, True)]
        assert seen.pair.output_tokens_per_s == 5
        assert [each.is_reachable for each in seen.decode] == [True] and not client.is_closed
        assert [(each.target, each.reason) for each in seen.outdated] == [
            ("decode:9100", "not found: no such name"),
            ("dns:///decode:50051", "not found: no such name"),
        ]

        names.addresses["decode"] = behind
        clock.now_s += 2
        await sampling.sample()
        assert sampling.snapshot.outdated == ()
        await sampling.close()


async def test_look_ups_that_hang_are_not_begun_again_and_hold_up_nobody_else() -> None:
    asked: list[str] = []
    is_released, is_healthy_asked = threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def hangs(host: str, port: int) -> Sequence[str]:
        if host == "127.0.0.1":
            loop.call_soon_threadsafe(is_healthy_asked.set)
            return numeric(host, port)
        asked.append(host)
        is_released.wait(BOUND_S)
        raise OSError("released")

    hung = [f"hung-{number}:9100" for number in range(NUM_POOL_THREADS)]
    with ExposedDecode() as decode:
        sampling = sampler(Clock(), [*hung, decode.address], look_up=hangs, timeout_s=BOUND_S)
        first = asyncio.create_task(sampling.sample())
        try:
            async with asyncio.timeout(BOUND_S / 4):
                await is_healthy_asked.wait()
            first.cancel()
            second = asyncio.create_task(sampling.sample())
            await asyncio.sleep(0)
        finally:
            is_released.set()
        await second
        healthy, *others = sampling.snapshot.services
        await sampling.close()

    assert sorted(asked) == sorted(each.removesuffix(":9100") for each in hung), "each once"
    assert healthy.is_reachable
    assert {each.reason for each in others} == {"not found: released"}


async def test_a_look_up_that_takes_too_long_is_the_reason_shown() -> None:
    is_released = threading.Event()

    def hangs(host: str, port: int) -> Sequence[str]:
        is_released.wait(BOUND_S)
        return ()

    sampling = sampler(Clock(), ["decode:9100"], look_up=hangs, timeout_s=0.01)
    await sampling.sample()
    assert sampling.snapshot.services[0].reason == "not found: no answer within 0.01 s"
    is_released.set()
    await sampling.close()


async def test_an_answer_that_comes_late_counts_from_the_next_look_up() -> None:
    is_released = threading.Event()

    def hangs(host: str, port: int) -> Sequence[str]:
        is_released.wait(BOUND_S)
        return ["10.0.0.1:9100"]

    before = threading.enumerate()
    target = TargetAddresses("decode:9100", look_up=hangs, timeout_s=0.01)
    await target.refresh()
    (thread,) = [each for each in threading.enumerate() if each.name.startswith("look-up-") and each not in before]
    is_released.set()
    await asyncio.to_thread(thread.join, BOUND_S)
    await asyncio.sleep(0)  # what the thread handed to the event loop
    assert (target.found, target.reason) == ((), "not found: no answer within 0.01 s")
    await target.refresh()
    assert [each.numeric for each in target.found] == ["10.0.0.1:9100"] and not target.reason


async def test_decode_services_say_whom_they_reach() -> None:
    clients = {"10.0.0.1:50051": Decode(replace(LOAD, is_degraded=True)), "10.0.0.2:50051": Decode()}
    names = Names(decode=list(clients))
    sampling = sampler(Clock(), [], ["dns:///decode:50051"], look_up=names, open_client=lambda a: clients[a.numeric])
    await sampling.sample()

    ready, refused = sampling.snapshot.decode
    replicas = ready.prefill_replicas
    assert [(each.address, each.is_ready, each.num_rows, each.num_known_tokens) for each in replicas] == [
        ("p:1", True, 3, 40),
        ("p:2", False, 0, 0),
    ]
    assert ready.prefill_replicas[1].reason == "connection refused"
    assert (refused.is_reachable, refused.reason) == (False, "connection refused")
    assert (ready.is_degraded, refused.is_degraded) == (True, False)

    names.addresses["decode"] = ["10.0.0.1:50051"]
    await sampling.sample()
    assert clients["10.0.0.2:50051"].is_closed
    await sampling.close()
    assert clients["10.0.0.1:50051"].is_closed


@asynccontextmanager
async def answering(answer: bytes, *, ends: bool = True) -> AsyncIterator[str]:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            if not ends:
                await reader.read()  # until the other side leaves

    server = StreamServer(handle)
    try:
        yield server.address
    finally:
        await server.close()


OK = b"HTTP/1.1 200 OK\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n", "answered 404"),
        (b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n", "answered 302"),
        (OK + b"baton_x 1\n" * (MAX_BYTES // 10 + 1), "more than 262144 bytes"),
        (OK + b"<html>no</html>\n", "not Baton's metrics"),
        (OK + b"other_metric 1\n", "no metric begins with baton_"),
        (OK + b'baton_x{a="b", ="e"} 1\n', "not Baton's metrics"),
        (OK + b"baton_rows NaN\n", "baton_rows is nan"),
        (OK + b"\xff\xfe\n", "not Baton's metrics"),
        (b"garbage\r\n\r\n", "illegal"),
    ],
)
async def test_what_is_not_metrics_is_refused_with_the_reason(answer: bytes, reason: str) -> None:
    async with answering(answer) as address, aclosing(Scraper(timeout_s=BOUND_S)) as scraper:
        with pytest.raises(ScrapeFailed, match=reason):
            await scraper.scrape(address)


async def test_a_target_that_never_ends_its_answer_is_left() -> None:
    async with answering(OK + b"baton_rows 1\n", ends=False) as address, aclosing(Scraper(timeout_s=0.05)) as scraper:
        with pytest.raises(ScrapeFailed, match=r"no whole answer within 0\.05 s"):
            await scraper.scrape(address)


async def test_an_endpoint_of_somebody_else_is_no_service() -> None:
    with MetricsServer("127.0.0.1:0", CollectorRegistry()) as server:
        async with aclosing(Scraper(timeout_s=BOUND_S)) as scraper:
            with pytest.raises(ScrapeFailed, match="no metric begins"):
                await scraper.scrape(f"127.0.0.1:{server.port}")


async def test_an_endpoint_that_wants_a_token_is_shown_it() -> None:
    registry = CollectorRegistry()
    EngineMetrics(registry).watch(lambda: IDLE, is_ready=lambda: True)
    with MetricsServer("127.0.0.1:0", registry, tokens=("some-long-token",)) as server:
        address = f"127.0.0.1:{server.port}"
        async with (
            aclosing(Scraper(timeout_s=BOUND_S)) as stranger,
            aclosing(Scraper(timeout_s=BOUND_S, token="some-long-token")) as known,
        ):
            with pytest.raises(ScrapeFailed, match="answered 401"):
                await stranger.scrape(address)
            await known.scrape(address)
