"""Random lives drawn by hypothesis, which also shrinks failing ones. Each is run in one order, drawn as well.

The draws are the same in every run (`derandomize`). A failure is reported as a life and a script, for
`replay(life.program, Script.parse(script))`. The soak draws from seeds instead (`RandomLife`), because hypothesis
repeats itself: that helps to find small failures, but not to cover many different orders.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.engine.mutants import local_prefill, prefixes, rows
from tests.engine.mutants.kinds import Mutant, name_of
from tests.engine.speculating import CHAIN, TREE
from tests.interleavings.explorer import Failure, RandomOrder, Script, random_order, replay, shorten
from tests.interleavings.random_lives import BEGINNINGS, ENDINGS, NAMES, REPLICAS, SALTS, Life, RandomLife, Request
from tests.interleavings.scenarios import COMPUTED_HERE, EVICTED, LAUNCHED_BESIDE_A_CHUNK, RETRIED, REUSED

NUM_EXAMPLES = 40
NUM_LIVES = 60


def requests() -> st.SearchStrategy[Request]:
    return st.builds(
        Request,
        prompt=st.tuples(st.sampled_from(BEGINNINGS), st.lists(st.integers(1, 900), max_size=2)).map(
            lambda drawn: (*drawn[0], *drawn[1])
        ),
        max_tokens=st.integers(1, 7),
        ending=st.sampled_from([None, *ENDINGS]),
        after_tokens=st.integers(0, 3),
        cache_salt=st.sampled_from(SALTS),
        goes_on=st.sampled_from([False, False, True]),
        is_constrained=st.sampled_from([False, False, False, True]),
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
        local_prefill_tokens=st.sampled_from([0, 0, 2, 4]),
        replica=st.sampled_from(REPLICAS),
        spare_window_slots=st.sampled_from([None, 0, 6]),
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


def orders_of_lives() -> Iterator[RandomOrder]:
    """Yields one order of each life of a sample."""
    for number in range(NUM_LIVES):
        name = f"0/2/{number}"
        yield random_order(RandomLife(name).program, name)


def test_kv_is_shared_and_computed_here_and_gives_way_in_many_lives() -> None:
    witnessed = Counter[str]()
    for order in orders_of_lives():
        assert order.error is None, order.error
        witnessed.update(order.witnessed)
    assert min(witnessed[what] for what in (REUSED, EVICTED, COMPUTED_HERE, RETRIED)) >= NUM_LIVES // 6, witnessed
    assert witnessed[LAUNCHED_BESIDE_A_CHUNK], witnessed


@pytest.mark.parametrize(
    ("mutant", "symptom"),
    [
        (prefixes.namespaces_are_one, "holds KV of another namespace"),
        (prefixes.no_salt_is_the_common_namespace, "holds KV of another namespace"),
        (prefixes.evicted_slot_leaks, "not conserved"),
        (prefixes.prefix_is_found_and_not_held, "decoded wrongly"),
        (local_prefill.fallback_is_forgotten, "not over"),
    ],
    ids=name_of,
)
def test_some_life_shows_a_broken_cache_or_local_prefill(
    mutant: Mutant, symptom: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    error = next((order.error for order in orders_of_lives() if order.error is not None), None)
    assert error is not None and re.search(symptom, str(error)), error


def test_a_seed_draws_the_same_life_again_and_another_seed_another() -> None:
    assert RandomLife("0/1") == RandomLife("0/1")
    lives = {RandomLife(f"0/{number}").life for number in range(100)}
    assert len(lives) == 100
    assert {request.ending for life in lives for request in life.requests} == {None, *ENDINGS}
    assert {request.cache_salt for life in lives for request in life.requests} == {*SALTS}
    assert {life.replica for life in lives} == {*REPLICAS}
    assert {len(life.requests) for life in lives} == {2, 3, 4}
