"""Invariant I13: a token depends only on its logits and on noise keyed by seed, choice, position and token id.

tests/sampling tests the noise itself; these tests go through the engine.
"""

from __future__ import annotations

from tests.engine.checks import breaking, broken_by, holding
from tests.engine.harness import ScriptedEngine
from tests.engine.mutants import tokens

PROMPTS = ([1, 2, 3], [4], [5, 6, 7, 8], [9, 10], [11])


@broken_by(tokens.noise_keyed_by_place, "depend on the company")
@broken_by(tokens.noise_keyed_by_step, "depend on the company")
@broken_by(tokens.reused_row_not_reseeded, "depend on the company")
def check_draws_do_not_depend_on_company() -> None:
    """Several sampled requests run together. Their rows, batch indices and steps are others than when each runs alone,
    and rows are reused.
    """
    for overlap in (True, False):
        scripted = ScriptedEngine(max_rows=3, overlap=overlap)
        for number, prompt in enumerate(PROMPTS):
            scripted.submit(f"greedy {number}", [number + 20], 3 + number)
            scripted.submit(f"drawn {number}", prompt, 8, temperature=1.0, seed=number)
        scripted.run()
        for request_id, outcome in scripted.outcomes.items():
            assert outcome.token_ids == outcome.expected, f"tokens depend on the company: {request_id}"


@broken_by(tokens.noise_keyed_by_step, "depend on the retraction")
def check_draws_do_not_depend_on_retraction() -> None:
    """The pool is too small for both requests. The younger one gives up its KV, and after its return prefill draws its
    next token.
    """
    scripted = ScriptedEngine(max_rows=2, max_kv_tokens=48)
    for number in range(2):
        scripted.submit(str(number), PROMPTS[number], 30, temperature=1.0, seed=number)
    scripted.run()
    assert scripted.engine.load().num_retractions > 0, "nothing was retracted"
    for outcome in scripted.outcomes.values():
        assert outcome.token_ids == outcome.expected, "tokens depend on the retraction"


@broken_by(tokens.noise_without_seed, "draw alike")
def check_the_seed_matters() -> None:
    scripted = ScriptedEngine()
    outcomes = [scripted.submit(str(seed), [1, 2, 3], 3, temperature=1.0, seed=seed) for seed in range(4)]
    scripted.run()
    assert len({tuple(outcome.token_ids) for outcome in outcomes}) == 4, "requests of different seeds draw alike"


test_holds = holding(globals())
test_is_broken_by = breaking(globals())
