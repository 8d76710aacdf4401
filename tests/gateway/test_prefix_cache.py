"""Tests that the options of the prefix cache reach the decode service, that the usage says what was cached, and that
chats stay with the service that has them cached.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from baton.codec import event_from_wire
from baton.events import Started
from gateway.apis.api import Tally
from gateway.apis.completions import parse_completion
from tests.client.scripted_inference import BOUND_S, ScriptedServer, delta, finished, started
from tests.gateway.gateway_here import Answer, GatewayHere, gateway_here
from tests.support.loop_thread import LoopThread
from tests.support.running_pair import wait_until

PROMPTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
}


def ask(edge: GatewayHere, path: str, **fields: Any) -> Answer:
    answer = edge.ask("POST", path, {"model": "demo", **PROMPTS[path], **fields})
    assert answer.status == 200, answer.body
    return answer


def script(server: ScriptedServer, *num_cached_tokens: int) -> None:
    """Makes the server's next calls end with these counts of cached tokens, in the order in which they begin. Each
    prompt has three tokens.
    """
    for number in num_cached_tokens:
        end = finished(num_completion_tokens=1, num_cached_tokens=number)
        server.inference.scripts.append([started(), delta([5], "a"), end])


@pytest.mark.parametrize("path", PROMPTS)
def test_salt_and_switch_travel_and_without_them_the_decode_service_decides(
    edge: GatewayHere, scripted: ScriptedServer, path: str
) -> None:
    script(scripted, 0, 0, 0)
    ask(edge, path, cache_salt="tenant", cache_prompt=False, n=2)
    ask(edge, path, cache_salt=None)
    *both, free = (scripted.inference.requests.get(timeout=BOUND_S) for _ in range(3))
    for request in both:
        assert (request.cache_salt, request.HasField("cache_prompt"), request.cache_prompt) == ("tenant", True, False)
    assert not free.HasField("cache_salt") and not free.HasField("cache_prompt")


@pytest.mark.parametrize("path", PROMPTS)
def test_the_usage_has_what_was_cached_for_every_choice_once_the_output_has_ended(
    edge: GatewayHere, scripted: ScriptedServer, path: str
) -> None:
    script(scripted, 3, 2, 2, 3, 2, 2)
    usage = {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "draft_tokens": 0,
            "accepted_draft_tokens": 0,
            "forced_draft_tokens": 0,
        },
    }
    assert ask(edge, path, n=2).json["usage"] == usage
    *chunks, last = ask(edge, path, n=2, stream=True, stream_options={"include_usage": True}).chunks
    assert (last["usage"], last["choices"]) == (usage, [])
    assert all(chunk["choices"] and chunk["usage"] is None for chunk in chunks)
    assert not any("usage" in chunk for chunk in ask(edge, path, stream=True).chunks)

    chunks = ask(edge, path, stream=True, stream_options={"continuous_usage_stats": True}).chunks
    assert all(chunk["choices"] for chunk in chunks), "the chunk without choices is for include_usage"
    totals = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert totals == sorted(totals) and (totals[0] if "chat" in path else 0, totals[-1]) == (0, 1)
    counts = [chunk["usage"]["prompt_tokens_details"]["cached_tokens"] for chunk in chunks]
    assert (set(counts[:-1]), counts[-1]) == ({0}, 2)


def test_what_several_prompts_had_cached_adds_up(edge: GatewayHere, scripted: ScriptedServer) -> None:
    script(scripted, 3, 2)
    counted = ask(edge, "/v1/completions", prompt=["hi", "ho"]).json["usage"]
    assert (counted["prompt_tokens"], counted["prompt_tokens_details"]) == (6, {"cached_tokens": 5})


def test_choices_count_with_their_own_prompt() -> None:
    plan = parse_completion(b'{"model": "demo", "prompt": ["hi", "ho"], "n": 2}')
    first = Started(request_id="r", num_prompt_tokens=3, seed=7)
    tally = Tally(plan, [first] * 4)
    for index, num_cached_tokens in enumerate([3, 2, 1, 3]):
        tally.add(index, event_from_wire(finished(num_cached_tokens=num_cached_tokens)))
    assert (tally.counts.num_prompt, tally.counts.num_cached) == (6, 2 + 1)


@pytest.fixture
def both(loop: LoopThread) -> Iterator[tuple[GatewayHere, list[ScriptedServer]]]:
    """A gateway and its two decode services, once it has connected to both."""
    servers = [ScriptedServer() for _ in range(2)]
    try:
        for server in servers:
            server.inference.script = [started(), delta([5], "Yes."), finished(num_completion_tokens=1)]
            server.become_ready()
        with gateway_here(loop, *(server.address for server in servers)) as gateway:

            def are_used() -> bool:
                for _ in servers:
                    ask(gateway, "/v1/completions", cache_prompt=False)
                return all(num_asked(servers))

            wait_until(are_used)
            yield gateway, servers
    finally:
        for server in servers:
            server.stop()


def num_asked(servers: list[ScriptedServer]) -> list[int]:
    """Returns how many calls each service has got since this was last called."""
    nums = []
    for server in servers:
        nums.append(server.inference.requests.qsize())
        for _ in range(nums[-1]):
            server.inference.requests.get()
    return nums


@pytest.mark.parametrize("path", PROMPTS)
def test_the_choices_of_a_prompt_go_to_one_decode_service(
    both: tuple[GatewayHere, list[ScriptedServer]], path: str
) -> None:
    gateway, servers = both
    for _ in range(3):
        ask(gateway, path, n=8)
        assert sorted(num_asked(servers)) == [0, 8]


def test_those_of_another_prompt_go_to_another_and_those_that_share_nothing_spread(
    both: tuple[GatewayHere, list[ScriptedServer]],
) -> None:
    gateway, servers = both
    ask(gateway, "/v1/completions", prompt=["hi", "ho"], n=4)
    assert num_asked(servers) == [4, 4]
    ask(gateway, "/v1/completions", n=8, cache_prompt=False)
    assert num_asked(servers) == [4, 4]


def test_turns_of_a_chat_go_to_the_decode_service_that_has_it_and_other_chats_spread(
    both: tuple[GatewayHere, list[ScriptedServer]],
) -> None:
    gateway, servers = both

    def asked(*messages: dict[str, str]) -> ScriptedServer:
        """Sends a chat, and returns the service that the gateway asked for the answer."""
        ask(gateway, "/v1/chat/completions", messages=messages)
        return servers[num_asked(servers).index(1)]

    def chat(number: int, *, num_turns: int) -> list[dict[str, str]]:
        question = {"role": "user", "content": f"Question {number}?"}
        return [question, {"role": "assistant", "content": "Yes."}] * num_turns + [question]

    homes = [asked(*chat(number, num_turns=0)) for number in range(6)]
    assert homes.count(servers[0]) == homes.count(servers[1]) == 3
    for num_turns in (1, 2):
        for number in (5, 4, 2, 3, 1, 0):
            assert asked(*chat(number, num_turns=num_turns)) is homes[number]
