"""Random lives drawn by hypothesis, which also shrinks failing ones. Each is run in one order, drawn as well.

The draws are the same in every run (`derandomize`). A failure is reported as a life and a script, for
`replay(life.program, Script.parse(script))`. The soak draws from seeds instead (`RandomLife`), because hypothesis
repeats itself: that helps to find small failures, but not to cover many different orders.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.engine.mutants import rows
from tests.engine.speculating import CHAIN, TREE
from tests.interleavings.explorer import Failure, Script, random_order, replay, shorten
from tests.interleavings.random_lives import ENDINGS, NAMES, Life, RandomLife, Request

NUM_EXAMPLES = 40


def requests() -> st.SearchStrategy[Request]:
    return st.builds(
        Request,
        prompt=st.lists(st.integers(1, 900), min_size=1, max_size=4).map(tuple),
        max_tokens=st.integers(1, 7),
        ending=st.sampled_from([None, *ENDINGS]),
        after_tokens=st.integers(0, 3),
    )


def lives() -> st.SearchStrategy[Life]:
    return st.builds(
        Life,
        requests=st.lists(requests(), min_size=1, max_size=len(NAMES)).map(tuple),
        max_rows=st.integers(1, 3),
        spec_info=st.sampled_from([None, None, CHAIN, TREE]),
        spare_slots=st.integers(0, 40),
        overlap=st.sampled_from([True, True, False]),
        lags=st.booleans(),
    )


def check_life(life: Life, order: int) -> None:
    found = random_order(life.program, str(order))
    if found.error is not None:
        short = shorten(life.program, Failure(found.script, found.error, 1))
        raise AssertionError(f"{short.error}\n{life}\nscript: {short.script}")


def drawn(check: Callable[[Life, int], None], *, phases: tuple[Phase, ...] = tuple(Phase)) -> None:
    run = given(lives(), st.integers(0, 1 << 32))(check)
    settings(max_examples=NUM_EXAMPLES, derandomize=True, deadline=None, phases=phases)(run)()


def test_any_life_comes_to_the_oracles_tokens_in_any_order() -> None:
    drawn(check_life)


def test_a_rule_taken_out_is_found_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[Life] = []

    def check(life: Life, order: int) -> None:
        failed.append(life)
        check_life(life, order)

    with monkeypatch.context() as patch:
        rows.quarantine_skipped(patch)
        with pytest.raises(AssertionError, match=r"a race for .*token table") as caught:
            drawn(check, phases=(Phase.generate,))
        script = Script.parse(str(caught.value).partition("script: ")[2])
        assert replay(failed[-1].program, script) is not None
    assert replay(failed[-1].program, script) is None


def test_a_seed_draws_the_same_life_again_and_another_seed_another() -> None:
    assert RandomLife("0/1") == RandomLife("0/1")
    lives = {RandomLife(f"0/{number}").life for number in range(100)}
    assert len(lives) == 100
    assert {request.ending for life in lives for request in life.requests} == {None, *ENDINGS}
    assert {len(life.requests) for life in lives} == {2, 3, 4}
