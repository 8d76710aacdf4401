"""Invariants I9, I12 and I13 in random lives: requests of every kind share few rows and slots, and the streams run in
random order. Their tokens are those of a sequential computation, and no row or slot is lost.

tests/pair/test_parity_tiny.py shows the same on real models, with chunked prefill.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter

from common.errors import PrefillUnavailable, RowFailure
from common.sampling.params import ResolvedSampling
from decode_service.messages import CallEnded, FinishReason, Replica, ReplicasChanged
from tests.engine.checks import breaking, broken_by, holding
from tests.engine.harness import REPLICA, Outcome, ScriptedEngine
from tests.engine.mutants import draft_backlog, prefixes, relay, rows, tokens
from tests.engine.mutants import local_prefill as local_mutants
from tests.engine.speculating import CHAIN, TREE, RandomDepth, assert_drafted_as_expected
from tests.engine.tags import oracle
from tests.support.scripted_device import ScriptedDevice, pick_with

NUM_LIVES = 18
BEGINNINGS = ((3, 1, 4, 1, 5, 9, 2, 6), (700, 701, 702, 703))
CHUNK_TOKENS = 8
READY, LOST = (ReplicasChanged((Replica(REPLICA, is_ready),)) for is_ready in (True, False))


class RandomLife:
    """A dozen requests of an engine that the seed draws. Some begin alike or continue others, are aborted or refused,
    or end at a stop token. With other seeds the engine speculates, at any depth, computes prompts itself, or loses its
    replica now and then.
    """

    def __init__(self, seed: int) -> None:
        self.numbers = random.Random(seed)
        self.spec_info = (None, CHAIN, TREE)[seed % 3]
        self.is_always_deep = seed % 2 == 0
        self.loses_replica = seed % 4 == 3
        depth = None if self.spec_info is None or self.is_always_deep else RandomDepth(self.spec_info, self.numbers)
        ticks = itertools.count()
        self.scripted = ScriptedEngine(
            headroom_tokens=1,
            fallback_after_s=0.0,
            fallback_chunk_tokens=CHUNK_TOKENS,
            device=ScriptedDevice(on_synchronize=pick_with(self.numbers.choice), on_host_call=self.run_some),
            max_rows=3,
            max_kv_tokens=self.numbers.choice([64, 80]),
            overlap=seed % 5 > 0,
            spec_info=self.spec_info,
            depth=depth,
            clock=(lambda: 0.0) if self.loses_replica else (lambda: next(ticks) / 50),
            local_prefill_tokens=self.numbers.choice([0, CHUNK_TOKENS]),
            prefill_fallback=self.loses_replica,
        )

    def live(self) -> ScriptedEngine:
        scripted, numbers = self.scripted, self.numbers
        said = list(BEGINNINGS)
        for arrival in range(12):
            outcome = self.submit(str(arrival), numbers.choice(said))
            for _ in range(numbers.randint(0, 5)):
                scripted.step()
                self.answer_some()
            if numbers.random() < 0.25:
                scripted.abort(str(numbers.randint(0, arrival)))
            if self.loses_replica and numbers.random() < 0.4:
                self.lose_or_get_replica()
            said.append((*outcome.prompt, *outcome.token_ids))
        scripted.run(advance=run_one_each)
        return scripted

    def submit(self, name: str, text: tuple[int, ...]) -> Outcome:
        numbers = self.numbers
        prompt = (*text[: numbers.randint(1, 12)], *(numbers.randrange(1, 900) for _ in range(numbers.randint(0, 3))))
        temperature = numbers.choice([0.0, 0.0, 1.0])
        greedy = ResolvedSampling(seed=0, max_tokens=6, temperature=0.0)
        ends = tuple(oracle(prompt, 6, greedy)[4:5]) if numbers.random() < 0.3 else ()
        return self.scripted.submit(
            name,
            prompt,
            numbers.choice([1, 2, 6, 20, 40]),
            temperature=temperature,
            seed=int(name),
            stop_token_ids=ends,
            cache_salt=numbers.choice(["salt", "salt", "salt", "", None]),
        )

    def answer_some(self) -> None:
        for name in list(self.scripted.handoffs):
            if (drawn := self.numbers.random()) < 0.6:
                self.scripted.hand_over(name, last=self.numbers.choice(["target", "draft"]))
            elif drawn < 0.7 and not self.loses_replica:
                self.scripted.refuse(name, RowFailure.CAPACITY)

    def lose_or_get_replica(self) -> None:
        if self.numbers.random() < 0.5:
            self.scripted.post(READY)
            return
        self.scripted.post(LOST)
        for call_id in {handoff.call_id for handoff in self.scripted.handoffs.values()}:
            self.scripted.post(CallEnded(call_id, PrefillUnavailable("killed")))
        self.scripted.handoffs.clear()

    def run_some(self, device: ScriptedDevice) -> None:
        while self.numbers.random() < 0.3 and (ready := device.ready_streams()):
            self.numbers.choice(ready).run_next()


def run_one_each(device: ScriptedDevice) -> None:
    for stream in device.ready_streams():
        stream.run_next()


@broken_by(tokens.results_in_another_order, "decoded wrongly")
@broken_by(relay.relay_is_a_ring, "decoded wrongly")
@broken_by(relay.lengths_read_without_waiting, "a decode step published a length of 0")
@broken_by(rows.row_merged_before_its_copies, "decoded wrongly|drafts were not")
@broken_by(rows.aborted_row_leaks, "not over")
@broken_by(tokens.noise_keyed_by_place, "decoded wrongly")
@broken_by(tokens.noise_keyed_by_step, "decoded wrongly")
@broken_by(tokens.reused_row_not_reseeded, "decoded wrongly")
@broken_by(draft_backlog.backlog_has_no_end, "a decode step failed|decoded wrongly")
@broken_by(local_mutants.row_is_not_seeded, "decoded wrongly")
@broken_by(prefixes.evicted_slot_leaks, "not conserved|slots are lost")
@broken_by(prefixes.shared_slots_are_freed_with_the_row, "held twice")
@broken_by(prefixes.kept_slots_stay_the_rows_own, "held twice|not conserved")
@broken_by(prefixes.slots_the_tree_has_already_leak, "not conserved|are lost")
def check_any_life_gives_the_oracles_tokens() -> None:
    happened = Counter[str]()
    for seed in range(NUM_LIVES):
        life = RandomLife(seed)
        scripted = life.live()
        for name, outcome in scripted.outcomes.items():
            assert outcome.error is None, f"seed {seed}: {name} failed: {outcome.error}"
            assert outcome.token_ids == outcome.wanted, f"seed {seed}: {name} was decoded wrongly"
            happened.update(what_happened(outcome, life))
        load = scripted.engine.load()
        happened.update(
            found=load.prefixes.num_found, evicted=load.prefixes.num_evicted, retracted=load.num_retractions
        )
    assert min(happened["found"], happened["evicted"], happened["accepted"], happened["rejected"]) > 200, happened
    assert happened["exactly drafted"] > 20 and happened["retracted"] > 10, happened
    assert min(happened["computed here"], happened["handed over"]) > 50, happened


def what_happened(outcome: Outcome, life: RandomLife) -> Counter[str]:
    """Counts what a finished request did. The drafts of one that always drafted at full depth are checked."""
    happened = Counter[str]()
    if outcome.finished is None:
        return happened
    timings, counts = outcome.finished.timings, outcome.finished.speculation
    happened["handed over" if timings.num_handoff_attempts else "computed here"] += 1
    if counts is None or life.spec_info is None:
        return happened
    happened.update(accepted=counts.num_accepted_tokens, rejected=sum(counts.drafted_at) - counts.num_accepted_tokens)
    was_deep = counts.drafted_at == (counts.num_verify_steps,) * life.spec_info.num_steps
    was_whole = not timings.num_retractions and outcome.finished.reason is FinishReason.LENGTH
    if life.is_always_deep and was_deep and was_whole:
        assert_drafted_as_expected(outcome, life.spec_info)
        happened["exactly drafted"] += 1
    return happened


test_holds = holding(globals())
test_is_broken_by = breaking(globals())
