"""Tests that the prefill engine computes only what no earlier prompt has left in its pool, and sends only what the
decode service does not hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import torch

from common.attention.backend import ForwardInput
from common.errors import RowFailure
from common.kv.shared_pool import SharedPool
from common.model.forward_program import OnLayerKv
from common.model.target import TargetOutput
from common.sampling.params import ResolvedSampling
from common.wire.handoff import KvSegment, PrebuiltBatch, RowFailed
from prefill_service.messages import BytesSent, CancelCallRows, CloseCall, SegmentsReturned
from tests.engine.tag_head import DRAFT, TagHead, draft_kv_of, first_seed
from tests.engine.tags import GROUP, TagModel, kv_of, oracle
from tests.support.engines import PrefillHalf
from tests.support.scripted_device import ScriptedDevice

PROMPT = tuple(range(11, 31))
SALT = "salt"
Kind = TypeVar("Kind")
GREEDY = ResolvedSampling(seed=1, max_tokens=4, temperature=0.0)


class DamagedModel(TagModel):
    """A model whose logits are not finite while `is_damaged`."""

    is_damaged = False

    def forward(self, batch: ForwardInput, *, on_layer_kv: OnLayerKv | None = None) -> TargetOutput:
        output = super().forward(batch, on_layer_kv=on_layer_kv)
        if self.is_damaged:
            output.logits.fill_(torch.nan)
        return output


class Reusing(PrefillHalf):
    """A prefill engine whose calls all have the same cache salt. It checks each row that is sent: the KV, the first
    token, and the draft seed. Copies run as early as they can, even while a forward runs.
    """

    def __init__(self, *, has_head: bool = False, **options: object) -> None:
        self.model = DamagedModel()
        self.device = ScriptedDevice(on_host_call=self._run_copies)
        self.prompts: dict[str, Sequence[tuple[int, ...]]] = {}
        self._num_taken = 0
        super().__init__(
            self.model,
            self.device,
            draft=TagHead() if has_head else None,
            **{"chunk_tokens": 4, "max_batch_tokens": 16, **options},
        )

    def ask(
        self, call_id: str, *prompts: tuple[int, ...], salt: str | None = SALT, num_held: int = 0, **options: bool
    ) -> None:
        """Opens a call with these prompts. The decode service holds the first `num_held` tokens of each."""
        self.prompts[call_id] = prompts
        self.open(call_id, prompts, GREEDY, cache_salt=salt, num_held=num_held, **options)

    def run(self) -> None:
        """Runs the engine until all calls have ended and nothing is held."""
        for _ in range(200):
            if self.ended_calls == self.prompts.keys() and self.is_empty:
                self.engine.pool.check_conservation()
                return
            self.go_on()
        raise AssertionError(f"not over: {self.engine.load()}")

    def go_on(self) -> None:
        """Runs one step, and then one piece of each stream that can go on. The step gets back the send budget of all
        segments sent since the last one.
        """
        news = self.frames[self._num_taken :]
        self._num_taken = len(self.frames)
        self.step(
            *(
                BytesSent(ready.call_id, ready.frame.num_bytes)
                for ready in news
                if isinstance(ready.frame, KvSegment) and ready.frame.shared is None
            )
        )
        for stream in self.device.ready_streams():
            if stream.is_ready:
                stream.run_next()

    def serve(self, call_id: str, *prompts: tuple[int, ...], salt: str | None = SALT, num_held: int = 0) -> list[int]:
        """Runs a call to its end, and checks what was sent. Returns for each row how many tokens were cached."""
        self.ask(call_id, *prompts, salt=salt, num_held=num_held)
        self.run()
        return self.check_sent(call_id, num_held=num_held)

    def check_sent(self, call_id: str, *, num_held: int = 0) -> list[int]:
        rows = [self._check_row(call_id, row, prompt, num_held) for row, prompt in enumerate(self.prompts[call_id])]
        return rows

    def _check_row(self, call_id: str, row: int, prompt: tuple[int, ...], num_held: int) -> int:
        (columns,) = (frame for frame in self.sent(call_id, PrebuiltBatch) if row in frame.rows)
        entry = columns.rows.tolist().index(row)
        first = oracle(prompt, 1, GREEDY)
        assert [columns.first_token_ids[entry]] == first, "the first token is wrong"
        whole = {GROUP.name: kv_of(prompt)}
        if DRAFT.name in self.engine.pool.groups:
            whole[DRAFT.name] = draft_kv_of([*prompt[1:], *first])
            seed = first_seed((*prompt, *first), GREEDY, topk=1)
            assert columns.seed_columns["topk_index"][entry].tolist() == seed.topk_index[0].tolist(), "another draft"
        segments = [segment for segment in self.sent(call_id, KvSegment) if segment.row == row]
        for name, kv in whole.items():
            arrived = np.full_like(kv, np.nan)
            for segment in segments:
                if segment.layer_group == name:
                    layers = slice(segment.layer_start, segment.layer_start + segment.num_layers)
                    tokens = slice(segment.token_start, segment.token_start + segment.num_tokens)
                    assert np.isnan(arrived[layers, :, tokens]).all(), "KV was sent twice"
                    sent = np.frombuffer(segment.payload, np.float32)
                    arrived[layers, :, tokens] = sent.reshape(arrived[layers, :, tokens].shape)
            assert np.isnan(arrived[:, :, :num_held]).all(), "KV was sent that the decode service holds"
            assert np.array_equal(arrived[:, :, num_held:], kv[:, :, num_held:]), "wrong KV was sent, or too little"
            num_bytes = sum(segment.num_bytes for segment in segments if segment.layer_group == name)
            assert columns.bytes_sent[name][entry] == num_bytes, "other bytes were sent than reported"
        return int(columns.num_cached_tokens[entry])

    def sent(self, call_id: str, kind: type[Kind]) -> list[Kind]:
        """Returns the frames of this kind that the call has sent."""
        return [ready.frame for ready in self.frames if ready.call_id == call_id and isinstance(ready.frame, kind)]

    def failure(self, call_id: str) -> RowFailed:
        (failed,) = self.sent(call_id, RowFailed)
        return failed

    def num_computed(self) -> int:
        """Returns how many tokens were computed since this was last called."""
        num_tokens = sum(len(forward.input_ids) for forward in self.model.forwards)
        self.model.forwards.clear()
        return num_tokens

    def _run_copies(self, device: ScriptedDevice) -> None:
        sending = device.stream("sending")
        while sending.is_ready:
            sending.run_next()


Make = Callable[..., Reusing]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Reusing] = []

    def make_one(**options: object) -> Reusing:
        made.append(Reusing(**options))  # type: ignore[arg-type]
        return made[-1]

    yield make_one
    for prefill in made:
        prefill.close()


@pytest.mark.parametrize("has_head", [False, True], ids=["no-head", "head"])
@pytest.mark.parametrize("chunk_tokens", [1, 4, 7, 32])
def test_a_warm_prompt_is_sent_like_a_cold_one_and_computed_from_where_they_differ(
    make: Make, chunk_tokens: int, has_head: bool
) -> None:
    prefill = make(chunk_tokens=chunk_tokens, max_batch_tokens=32, has_head=has_head)
    assert prefill.serve("cold", PROMPT) == [0]
    assert prefill.num_computed() == len(PROMPT)
    for name, prompt, num_cached in (
        ("same", PROMPT, len(PROMPT) - 1),
        ("longer", (*PROMPT, 5, 6, 7), len(PROMPT) - has_head),
        ("branching", (*PROMPT[:9], 900, 901), 9 - has_head),
        ("shorter", PROMPT[:6], 5),
        ("other", (7, 8, 9), 0),
    ):
        assert prefill.serve(name, prompt) == [num_cached]
        assert prefill.num_computed() == len(prompt) - num_cached


@pytest.mark.parametrize("early_sending", [True, False], ids=["early", "late"])
@pytest.mark.parametrize("chunk_tokens", [1, 4, 32])
@pytest.mark.parametrize("num_held", [0, 3, 10, 11, 22])
def test_what_the_decode_service_holds_is_not_sent_however_much_is_cached_here(
    make: Make, num_held: int, chunk_tokens: int, early_sending: bool
) -> None:
    """The decode service holds more than is cached here, or less, or the same. What it does not hold is sent, even if
    it was cached long ago.
    """
    prefill = make(
        chunk_tokens=chunk_tokens,
        max_batch_tokens=32,
        early_sending=early_sending,
        max_segment_bytes=3 * GROUP.layer_token_bytes,
    )
    prompt = (*PROMPT, 5, 6, 7)
    assert prefill.serve("cold", prompt, num_held=num_held) == [0]
    assert prefill.num_computed() == len(prompt), "KV that only the decode service has was computed upon"
    branching = (*prompt[:10], *range(800, 813))
    assert prefill.serve("warm", branching, num_held=num_held) == [10]
    assert prefill.num_computed() == len(prompt) - 10


def test_cached_kv_leaves_with_the_first_layers_of_the_first_chunk(make: Make) -> None:
    prefill = make(max_segment_bytes=len(PROMPT) * GROUP.layer_token_bytes)
    prefill.serve("cold", PROMPT)
    prefill.ask("warm", (*PROMPT, 5, 6, 7))
    left = []
    run_copies = prefill.device.on_host_call

    def watch(device: ScriptedDevice) -> None:
        if device.stream("sending").is_ready:
            left.append(len(prefill.model.forwards))
        run_copies(device)

    prefill.device.on_host_call = watch
    num_before = len(prefill.model.forwards)
    prefill.run()
    assert prefill.sent("warm", KvSegment)[0].token_start == 0
    assert left[0] == num_before + 1, "it waited for the end of the forward"
    assert len(prefill.model.forwards) == num_before + 1


def test_a_prompt_waits_for_another_that_computes_its_tokens_and_computes_only_the_rest(make: Make) -> None:
    prefill = make()
    prompts = (PROMPT, PROMPT, (*PROMPT[:12], 1, 2, 3), (501, 502, 503))
    prefill.ask("call", *prompts)
    prefill.run()
    num_cached = prefill.check_sent("call")
    assert num_cached == [0, len(PROMPT) - 1, 12, 0]
    assert prefill.num_computed() == sum(map(len, prompts)) - sum(num_cached)
    (done,) = (i for i, frame in enumerate(prefill.first_tokens) if frame[0] == 3)
    assert done == 0, "a prompt that shares nothing waited too"


def test_a_prompt_that_waits_for_kv_is_overtaken_only_until_that_is_there(make: Make) -> None:
    """Younger prompts keep coming. They use free slots while the older prompt waits for KV, and leave them to it once
    the KV is there.
    """
    prefill = make(max_kv_tokens=64, max_rows=4)
    prefill.ask("first", PROMPT)
    prefill.ask("waits", (*PROMPT, *range(600, 638)))
    younger = [str(number) for number in range(40)]
    for call_id in younger:
        prefill.ask(call_id, *[tuple(range(700, 708))] * 2, salt=None)
        prefill.go_on()
    served = [ready.call_id for ready in prefill.frames if isinstance(ready.frame, PrebuiltBatch)]
    assert "waits" in served, "it starved"
    num_before = served.index("waits") - 1
    assert 0 < num_before < 8, f"{num_before} younger ones were served before it"
    prefill.run()
    assert prefill.check_sent("waits") == [len(PROMPT)]


def test_the_load_counts_what_is_left_to_compute_and_not_what_is_or_will_be_cached(make: Make) -> None:
    prefill = make(max_rows=2, max_kv_tokens=64)
    prefill.serve("before", PROMPT[:8])
    prefill.ask("call", PROMPT, (*PROMPT, 7, 8), (*PROMPT[:8], *range(700, 711)), (501, 502, 503))
    lefts = [prefill.engine.load().num_uncomputed_tokens]
    assert lefts[0] == (20 - 8) + 2 + 11 + 3, "the second waits for the first, and the others wait for rows"
    computed = [prefill.engine.load().num_computed_tokens]
    while prefill.engine.load().num_uncomputed_tokens:
        prefill.go_on()
        lefts.append(prefill.engine.load().num_uncomputed_tokens)
        computed.append(prefill.engine.load().num_computed_tokens)
    assert computed[0] == 8 and all(sum(each) == lefts[0] + 8 for each in zip(lefts, computed, strict=True))
    assert lefts == sorted(lefts, reverse=True) and len(set(lefts)) > 3, "it falls as chunks end"
    prefill.run()
    assert sum(prefill.check_sent("call")) == 8 + 20 + 8


def test_what_a_cancelled_prompt_computed_is_used_by_the_one_that_waited_for_it(make: Make) -> None:
    prefill = make()
    prefill.ask("first", PROMPT)
    prefill.ask("second", PROMPT)
    while len(prefill.model.forwards) < 2:
        prefill.go_on()
    prefill.go_on()
    prefill.step(CancelCallRows("first", (0,)))
    prefill.run()
    (num_cached,) = prefill.check_sent("second")
    assert num_cached in (4, 8), f"{num_cached} tokens were cached"


def test_prompts_that_wait_for_a_failed_one_go_on_alone(make: Make) -> None:
    prefill = make()
    prefill.ask("first", PROMPT)
    prefill.ask("second", PROMPT)
    prefill.model.fails_next = True
    prefill.run()
    assert prefill.failure("first").retryable
    assert prefill.check_sent("second") == [0]


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_chunk_that_failed_leaves_nothing(make: Make, failing: int) -> None:
    """The failed chunk's KV is not cached. KV that the earlier chunks left in the cache stays there."""
    prefill = make(overlap=False)
    prefill.ask("failing", PROMPT)
    while len(prefill.model.forwards) < failing:
        prefill.go_on()
    prefill.model.fails_next = True
    prefill.run()
    failed = prefill.failure("failing")
    assert (failed.reason, failed.retryable) == (RowFailure.COMPUTE, True)
    assert prefill.serve("again", PROMPT) == [4 * failing]


@pytest.mark.parametrize("is_warm", [False, True], ids=["cold", "warm"])
def test_kv_with_which_no_finite_logit_comes_out_is_forgotten(make: Make, is_warm: bool) -> None:
    """A row that began with cached KV may be retried, because that KV may be the reason."""
    prefill = make()
    prefill.serve("elsewhere", (501, 502, 503))
    if is_warm:
        prefill.serve("before", PROMPT)
    prefill.model.is_damaged = True
    prefill.ask("failing", PROMPT)
    prefill.run()
    failed = prefill.failure("failing")
    assert (failed.reason, failed.retryable) == (RowFailure.COMPUTE, is_warm)
    prefill.model.is_damaged = False
    assert prefill.serve("again", PROMPT) == [0], "damaged KV was used"
    assert prefill.serve("once more", PROMPT) == [len(PROMPT) - 1]
    assert prefill.serve("elsewhere again", (501, 502, 503)) == [2], "other KV was forgotten too"


def test_namespaces_share_nothing(make: Make) -> None:
    prefill = make()
    for number, salt in enumerate((None, SALT, "other", "", None)):
        assert prefill.serve(f"{number}", PROMPT, PROMPT, salt=salt) == [0, 0 if salt is None else len(PROMPT) - 1]


def test_prompts_end_in_a_pool_full_of_cached_kv(make: Make) -> None:
    """The least recently used KV is evicted first. The engine checks after every step that no slot is lost."""
    prefill = make(max_kv_tokens=32, max_rows=2)
    for number in range(6):
        prompt = (*PROMPT[:10], *range(100 * number + 100, 100 * number + 110))
        (num_cached,) = prefill.serve(str(number), prompt)
        assert num_cached == (10 if number else 0)
    load = prefill.engine.load()
    assert load.prefixes.num_evicted > 30 and load.slots.free + load.slots.cached == load.slots.total


# ---- shared memory ----------------------------------------------------------------------------------------------


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[SharedPool]:
    memory = SharedPool(groups=[GROUP], num_slots=48, directory=tmp_path)
    yield memory
    memory.close()


def lend(prefill: Reusing, call_id: str, prompt: tuple[int, ...]) -> list[KvSegment]:
    """Runs a call whose receiver has not returned any segment yet, and returns the segments that were lent to it."""
    prefill.ask(call_id, prompt, shares_memory=True)
    while sum(segment.num_bytes for segment in prefill.sent(call_id, KvSegment)) < len(prompt) * GROUP.token_bytes:
        prefill.go_on()
    return prefill.sent(call_id, KvSegment)


def are_current(segments: Sequence[KvSegment]) -> list[bool]:
    return [segment.shared is not None and segment.shared.is_current for segment in segments]


def returned(call_id: str, segments: Sequence[KvSegment]) -> SegmentsReturned:
    return SegmentsReturned(call_id, tuple(segment.shared.ticket.number for segment in segments if segment.shared))


def test_cached_slots_are_lent_with_the_row_and_are_current_until_another_row_gets_them(
    make: Make, memory: SharedPool
) -> None:
    prefill = make(max_kv_tokens=48, max_rows=2, shared_pool=memory)
    cold = lend(prefill, "cold", PROMPT)
    prompt = (*PROMPT, 5, 6, 7)
    warm = lend(prefill, "warm", prompt)
    assert all(are_current([*cold, *warm]))
    for segment in warm:
        assert segment.shared is not None
        lent = segment.shared.layers[:, :, list(segment.shared.ticket.slots)].view(np.float32)
        tokens = slice(segment.token_start, segment.token_start + segment.num_tokens)
        right = kv_of(prompt)[segment.layer_start : segment.layer_start + segment.num_layers, :, tokens]
        assert lent.ravel().tolist() == right.ravel().tolist(), "other KV was lent"
    prefill.step(returned("cold", cold))
    assert prefill.engine.load().slots.cached == 0, "the first row's slots are not held by the second"
    prefill.step(CloseCall("warm"))  # with its segments still lent
    prefill.step()
    assert prefill.engine.load().slots.cached == len(prompt)
    assert all(are_current(warm)), "cached slots still have their KV"
    prefill.prompts = {"hungry": [tuple(range(300, 340))]}
    lend(prefill, "hungry", tuple(range(300, 340)))
    assert not all(are_current(warm)), "who still reads there does not notice"
    stale = [s for s in warm if s.shared is not None and not s.shared.is_current]
    assert {segment.token_start for segment in stale} >= {max(segment.token_start for segment in warm)}


def test_an_engine_does_not_sleep_while_a_prompt_has_what_it_waited_for(make: Make, memory: SharedPool) -> None:
    """A queued prompt waited for the KV of the one before it, which is now there. That KV is only lent, so nothing else
    keeps the engine awake.
    """
    prefill = make(max_kv_tokens=48, max_rows=2, shared_pool=memory)
    prefill.ask("call", PROMPT, PROMPT, shares_memory=True)
    while prefill.engine.load().num_running or not prefill.engine.load().num_steps:
        prefill.step()
        prefill.device.stream("forward").run_all()
    assert prefill.engine.load().num_queued == 1
    assert prefill.engine.idle_timeout_s() == 0.0


def test_an_engine_sleeps_while_a_prompt_has_what_it_waited_for_and_an_older_one_lacks_room(
    make: Make, memory: SharedPool
) -> None:
    prefill = make(max_kv_tokens=48, max_rows=4, shared_pool=memory)
    prefill.ask("call", PROMPT, tuple(range(501, 506)), (*PROMPT, *range(600, 625)), PROMPT, shares_memory=True)
    for _ in range(20):
        prefill.step()
        prefill.device.stream("forward").run_all()
    load = prefill.engine.load()
    assert (load.num_queued, load.num_running, load.rows.free) == (2, 0, 2)
    assert prefill.engine.idle_timeout_s() > 0
    segments = prefill.sent("call", KvSegment)
    prefill.step(returned("call", [segment for segment in segments if segment.row == 1]))
    prefill.step()
    assert not prefill.engine.load().num_queued, "it slept although there was room"
