"""Tests of how clients share the service by tokens, in proportion to their weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from decode_service.schedule.shares import OTHERS, Shares
from tests.engine.harness import ScriptedEngine

NUM_OUTPUT = {"short": 2, "long": 12}


class Contest:
    """A decode engine with two rows, and clients that always have two requests waiting. `run` returns the output tokens
    of each client.
    """

    def __init__(self, weights: Mapping[str, float] | None) -> None:
        self.scripted = ScriptedEngine(max_rows=2, client_weights=weights, debug_checks=False)
        self._num_submitted = Counter[str]()

    def run(self, num_steps: int, *clients: str) -> Counter[str]:
        before = self._tokens()
        for _ in range(num_steps):
            for client in clients:
                self._keep_two_waiting(client)
            self.scripted.step_and_hand_over()
            self.scripted.landing.run_all()
        return self._tokens() - before

    def _keep_two_waiting(self, client: str) -> None:
        live = [name for name in self.scripted.outcomes if name.startswith(f"{client} ")]
        waiting = [name for name in live if not self.scripted.outcomes[name].token_ids]
        while len(waiting) < 2:
            number = self._num_submitted[client]
            self._num_submitted[client] += 1
            kind = client.split()[0]
            name = f"{client} {number}"
            self.scripted.submit(name, [1 + number % 50, 2], NUM_OUTPUT[kind], client=client)
            waiting.append(name)

    def _tokens(self) -> Counter[str]:
        tokens = Counter[str]()
        for name, outcome in self.scripted.outcomes.items():
            tokens[name.rpartition(" ")[0]] += len(outcome.prompt) * bool(outcome.token_ids) + len(outcome.token_ids)
        return tokens


def test_clients_of_equal_weights_are_served_as_many_tokens() -> None:
    """By turns of requests, the client of long requests is served several times as many."""
    in_turn = Contest(None).run(160, "long a", "short b")
    shared = Contest({OTHERS: 1}).run(160, "long a", "short b")
    assert in_turn["long a"] > 3 * in_turn["short b"]
    assert 0.85 < shared["long a"] / shared["short b"] < 1.2, shared


def test_clients_are_served_in_proportion_to_their_weights() -> None:
    shared = Contest({"short a": 3, OTHERS: 1}).run(200, "short a", "short b")
    assert 2.6 < shared["short a"] / shared["short b"] < 3.4, shared


def test_a_client_that_asked_for_nothing_has_saved_nothing_up() -> None:
    contest = Contest({OTHERS: 1})
    contest.run(20, "short a", "short b")
    assert contest.run(120, "short a")["short a"] > 80
    shared = contest.run(60, "short a", "short b")
    assert 0.7 < shared["short a"] / shared["short b"] < 1.4, shared


def test_the_counts_of_clients_that_left_are_bounded() -> None:
    shares = Shares({})
    for number in range(5000):
        client = str(number)
        shares.begin_to_wait(client)
        shares.end_to_wait(client)
        shares.charge(client, 10 + number)
    assert shares.num_counts <= 1025


def test_new_clients_do_not_pass_one_that_waits_for_ever() -> None:
    shares = Shares({})
    shares.begin_to_wait("busy")
    shares.begin_to_wait("old")
    shares.charge("old", 1000)
    for number in range(500):
        new = str(number)
        shares.begin_to_wait(new)
        if shares.count("old") < shares.count(new):
            break
        shares.end_to_wait(new)
        shares.charge(new, 10)
    else:
        raise AssertionError("it waits for ever")
    assert number > 50, "others have their turns meanwhile"
