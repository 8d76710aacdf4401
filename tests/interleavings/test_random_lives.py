"""Lives that hypothesis draws, each in an order drawn too: how many requests, how long, how they end, what is short.

The draws are the same in every run (`derandomize`). What fails is told as a life and a script, to be run with
`replay(life.scenario.program, Script.parse(script))`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from decode_service.spec_info import SpecInfo
from tests.engine.mutants import rows
from tests.engine.speculating import CHAIN, TREE
from tests.interleavings.explorer import Failure, Script, random_order, replay, shorten
from tests.interleavings.scenarios import ExploredEngine, Scenario

NUM_EXAMPLES = 40
NAMES = "abcd"


@dataclass(frozen=True)
class Request:
    """`ending`: "abort", "stop" or "lost" (its first handoff); None: it decodes to its end."""

    prompt: tuple[int, ...]
    max_tokens: int
    ending: str | None
    after_tokens: int


@dataclass(frozen=True)
class Life:
    requests: tuple[Request, ...]
    max_rows: int
    spec_info: SpecInfo | None
    spare_slots: int
    overlap: bool
    lags: bool
    order: int

    @property
    def scenario(self) -> Scenario:
        needs = [len(each.prompt) + each.max_tokens for each in self.requests]
        is_plain = self.spec_info is None
        return Scenario(
            self.body,
            self.max_rows,
            max(needs) + self.spare_slots if is_plain else sum(needs) + 16 * self.max_rows,
            self.spec_info,
            overlap=self.overlap,
            lags=self.lags,
            headroom_tokens=1,
        )

    def body(self, engine: ExploredEngine) -> None:
        for name, each in zip(NAMES, self.requests, strict=False):
            engine.submit(name, each.prompt, each.max_tokens)
            if each.ending == "abort":
                engine.abort_some_time(name, after_tokens=each.after_tokens)
            elif each.ending == "stop":
                engine.stop_some_time(name)
            elif each.ending == "lost":
                engine.lose_handoff_once(name)


def requests() -> st.SearchStrategy[Request]:
    return st.builds(
        Request,
        prompt=st.lists(st.integers(1, 900), min_size=1, max_size=4).map(tuple),
        max_tokens=st.integers(1, 7),
        ending=st.sampled_from([None, None, "abort", "stop", "lost"]),
        after_tokens=st.integers(0, 3),
    )


def lives() -> st.SearchStrategy[Life]:
    return st.builds(
        Life,
        requests=st.lists(requests(), min_size=1, max_size=len(NAMES)).map(tuple),
        max_rows=st.integers(1, 3),
        spec_info=st.sampled_from([None, None, CHAIN, TREE]),
        spare_slots=st.integers(0, 6),
        overlap=st.sampled_from([True, True, False]),
        lags=st.booleans(),
        order=st.integers(0, 1 << 32),
    )


def check_life(life: Life) -> None:
    found = random_order(life.scenario.program, str(life.order))
    if found.error is not None:
        short = shorten(life.scenario.program, Failure(found.script, found.error, 1))
        raise AssertionError(f"{short.error}\n{life}\nscript: {short.script}")


def drawn(check: Callable[[Life], None], *, phases: tuple[Phase, ...] = tuple(Phase)) -> None:
    settings(max_examples=NUM_EXAMPLES, derandomize=True, deadline=None, phases=phases)(given(lives())(check))()


def test_any_life_comes_to_the_oracles_tokens_in_any_order() -> None:
    drawn(check_life)


def test_a_rule_taken_out_is_found_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[Life] = []

    def check(life: Life) -> None:
        failed.append(life)
        check_life(life)

    with monkeypatch.context() as patch:
        rows.quarantine_skipped(patch)
        with pytest.raises(AssertionError, match=r"a race for .*token table") as caught:
            drawn(check, phases=(Phase.generate,))
        script = Script.parse(str(caught.value).partition("script: ")[2])
        assert replay(failed[-1].scenario.program, script) is not None
    assert replay(failed[-1].scenario.program, script) is None
