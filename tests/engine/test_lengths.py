"""Invariants I1 and I5: lengths on the device and on the CPU agree, share no memory, and are replaced rather than
changed in place.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from common.attention.backend import ForwardInput
from common.draft.head import DraftOutput
from common.sampling.params import ResolvedSampling
from common.wire.handoff import PrebuiltBatch
from decode_service.messages import Submit
from decode_service.schedule.request import Request
from decode_service.schedule.schedule_batch import ReadyRows, ScheduleBatch
from decode_service.speculate.spec_info import AcceptedPath, DraftTree, SpecInfo
from tests.engine.checks import breaking, broken_by, holding
from tests.engine.harness import ScriptedEngine
from tests.engine.mutants import lengths
from tests.engine.relay_rig import make_batch, make_pool
from tests.engine.speculating import CHAIN, SEED, TREE, ScriptedDepth, a_step_that_tells
from tests.engine.tag_head import TagHead

ROOT = Path(__file__).parents[2]
BOUND_S = 100.0


def prebuilt_batch() -> ScheduleBatch:
    """Returns a batch of two rows fresh from a handoff, with 3 and 2 tokens."""
    pool = make_pool()
    sampling = ResolvedSampling(seed=0, max_tokens=8, temperature=0.0)
    reqs = []
    for arrival, length in enumerate((3, 2)):
        req = Request.of(Submit(str(arrival), (1,) * length, length, sampling), arrival=arrival, now_s=0.0)
        req.lease = pool.reserve(length)
        reqs.append(req)
    columns = PrebuiltBatch(
        rows=np.array([0, 1]),
        seq_lens=np.array([3, 2]),
        first_token_ids=np.array([7, 8]),
        bytes_sent={},
        queue_s=np.zeros(2),
        compute_s=np.zeros(2),
        num_cached_tokens=np.zeros(2, np.int64),
        first_token_logprobs=(None, None),
    )
    return ScheduleBatch.prepare_for_prebuilt([ReadyRows(columns, np.array([0, 1]), tuple(reqs))], torch.device("cpu"))


def grown_batch() -> ScheduleBatch:
    """Returns a batch of two rows that is prepared for its first decode step: its out_cache_loc is set."""
    pool = make_pool()
    batch = prebuilt_batch()
    for req, length in zip(batch.reqs, (3, 2), strict=True):
        req.lease = pool.reserve(length)
    assert batch.prepare_for_decode(pool)
    return batch


@broken_by(lengths.twins_share_storage, "share storage from a handoff")
@broken_by(lengths.relayed_twins_share_storage, "share storage relayed")
def check_twins_are_apart() -> None:
    batch = prebuilt_batch()
    relayed = torch.tensor([9, 9])
    for place in ("from a handoff", "relayed"):
        batch.seq_lens.fill_(4)
        batch.req_pool_indices.fill_(4)
        assert batch.seq_lens_cpu.tolist() != [4, 4], f"seq_lens and seq_lens_cpu share storage {place}"
        assert batch.req_pool_indices_cpu.tolist() != [4, 4], f"the row twins share storage {place}"
        batch.set_seq_lens(relayed)


@broken_by(lengths.cpu_twin_not_updated, "seq_lens and seq_lens_cpu differ")
def check_twins_agree_at_every_launch() -> None:
    scripted = ScriptedEngine()
    for number, max_tokens in enumerate((3, 9, 5, 7, 2, 6)):
        scripted.submit(str(number), range(1, number + 2), max_tokens)
    scripted.run()


def errors_beside_a_wrong_length(lie: int, *, overlap: bool = True, is_accepted: bool = False) -> list[str]:
    """Runs three requests together, and lets one step publish the length `lie` for the first of them. Returns the error
    of each request. With `is_accepted` the step instead claims to have accepted `lie` tokens.

    An error is "" for a request that finished correctly, and "wrong tokens" for one that did not.
    """
    with a_step_that_tells(partial(_with_first, lie), number=3, of_accepted=is_accepted):
        scripted = ScriptedEngine(max_kv_tokens=200, spec_info=CHAIN, overlap=overlap)
        outcomes = [scripted.submit(str(number), [number + 1, 7, 5], 24) for number in range(3)]
        scripted.run()
    return [
        str(outcome.error) if outcome.error else "" if outcome.token_ids == outcome.expected else "wrong tokens"
        for outcome in outcomes
    ]


def _with_first(lie: int, lengths: Tensor) -> Tensor:
    return torch.cat([torch.tensor([lie]), lengths[1:]])


@broken_by(lengths.lengths_are_not_looked_at, "was launched")
def check_no_length_is_a_sentinel() -> None:
    """The engine launches no step with a length that no step can have produced. Such a length fails its own row and no
    other.
    """
    for lie in (0, -1, 3, 1 << 40):
        for overlap in (True, False):
            errors = errors_beside_a_wrong_length(lie, overlap=overlap)
            assert errors == [f"a decode step published a length of {lie}", "", ""], f"length {lie} was launched"


@broken_by(lengths.snapshot_aliases_lengths, "schedule side's lengths")
@broken_by(lengths.snapshot_aliases_rows, "schedule side's rows")
@broken_by(lengths.snapshot_aliases_rows_on_the_host, "schedule side's rows")
@broken_by(lengths.snapshot_aliases_slots, "schedule side's slots")
def check_a_snapshot_is_the_forwards_own() -> None:
    batch = grown_batch()
    snapshot = batch.snapshot()
    assert batch.out_cache_loc is not None
    slots = batch.out_cache_loc.tolist()
    for tensor in (batch.seq_lens, batch.seq_lens_cpu, batch.req_pool_indices, batch.out_cache_loc):
        tensor.fill_(99)
    batch.req_pool_indices_cpu.fill_(99)
    batch.reqs.clear()
    assert snapshot.seq_lens.tolist() == [4, 3], "the forward reads the schedule side's lengths"
    assert snapshot.seq_lens_cpu.tolist() == [4, 3] and snapshot.positions.tolist() == [3, 2]
    assert snapshot.rows.tolist() == [1, 2], "the forward reads the schedule side's rows"
    assert snapshot.req_pool_indices.tolist() == [1, 2], "the forward reads the schedule side's rows"
    assert snapshot.out_cache_loc.tolist() == slots, "the forward reads the schedule side's slots"


@broken_by(lengths.sum_is_stale, "the sum is not")
def check_the_sum_is_that_of_the_lengths_launched() -> None:
    batch = grown_batch()
    for _ in range(2):
        launched = batch.snapshot()
        assert launched.seq_lens_sum == int(launched.seq_lens.sum()), "the sum is not that of the lengths launched"


@broken_by(lengths.lengths_changed_in_place, "in place")
def check_lengths_are_replaced() -> None:
    batch = make_batch([], [])
    batch.merge_batch(prebuilt_batch())
    pool = make_pool()
    for req, length in zip(batch.reqs, (3, 2), strict=True):
        req.lease = pool.reserve(length)
    held, held_cpu = batch.seq_lens, batch.seq_lens_cpu
    assert batch.prepare_for_decode(pool)
    assert held.tolist() == [3, 2], "seq_lens was changed in place"
    assert held_cpu.tolist() == [3, 2], "seq_lens_cpu was changed in place"
    assert batch.seq_lens.tolist() == batch.seq_lens_cpu.tolist() == [4, 3]


@broken_by(lengths.lengths_changed_in_place_under_the_forward, "lengths moved")
def check_a_late_forward_sees_the_lengths_it_was_launched_with() -> None:
    """Every forward runs as late as possible, after the next step was prepared."""
    scripted = ScriptedEngine(debug_checks=False)
    outcome = scripted.submit("a", [1, 2, 3], 6)
    scripted.run()
    assert [seen.seq_lens for seen in scripted.model.forwards] == [[4], [5], [6], [7], [8]], "lengths moved under it"
    assert outcome.token_ids == outcome.expected


@broken_by(lengths.resolve_always_waits, "waited for a forward")
def check_lengths_do_not_wait_for_the_device() -> None:
    """Without speculation, two further steps are scheduled before any forward has run."""
    scripted = ScriptedEngine()
    scripted.submit("a", [1, 2, 3], 6)
    scripted.start("a")
    batch = make_batch([1], [3])
    assert scripted.engine.future_map.resolve_seq_lens(batch.req_pool_indices) is None
    assert not scripted.model.forwards, "the schedule side waited for a forward"
    scripted.run()


@pytest.mark.parametrize("lie", [0, -1, CHAIN.max_accept_len + 1, 1 << 40])
def test_a_number_of_accepted_tokens_that_cannot_be_fails_its_row_alone(lie: int) -> None:
    errors = errors_beside_a_wrong_length(lie, is_accepted=True)
    assert errors == ["a decode step relayed or produced no valid token", "", ""]


class WatchedHead(TagHead):
    """A tag head that records in `foreign` the indices at which it was told to read another row's tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.foreign: list[int] = []

    def extend(self, batch: ForwardInput, captured: Tensor) -> DraftOutput:
        assert batch.extend_lens is not None and batch.logits_rows is not None
        stops = itertools.accumulate(batch.extend_lens)
        each = zip(batch.logits_rows.tolist(), batch.extend_lens, stops, strict=False)
        self.foreign += [place for place, length, stop in each if not stop - length <= place < stop]
        return super().extend(batch, captured)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("spec_info", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("lie", [0, -1, CHAIN.max_accept_len + 1, 1 << 40])
def test_a_tree_that_accepts_what_cannot_be_fails_its_row_alone(
    lie: int, spec_info: SpecInfo, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the step with the false result, the head must read no other row's tokens either: on a GPU, an index past the
    end would kill the process.
    """
    accept, num_trees, head = DraftTree.accept, itertools.count(1), WatchedHead()

    def lying(tree: DraftTree, target_ids: Tensor) -> AcceptedPath:
        accepted = accept(tree, target_ids)
        if next(num_trees) == 3:
            accepted.accept_lens[0] = lie
        return accepted

    monkeypatch.setattr(DraftTree, "accept", lying)
    scripted = ScriptedEngine(max_kv_tokens=200, spec_info=spec_info, head=head, overlap=overlap)
    outcomes = [scripted.submit(str(number), [number + 1, 7, 5], 24) for number in range(3)]
    scripted.run()
    assert head.foreign == []
    told, *others = [str(outcome.error) if outcome.error else "" for outcome in outcomes]
    assert told in (
        f"a decode step published a length of {len(outcomes[0].prompt) + len(outcomes[0].token_ids) - 1 + lie}",
        "a decode step relayed or produced no valid token",
    )
    assert others == ["", ""]
    assert all(outcome.token_ids == outcome.expected for outcome in outcomes[1:])


@pytest.mark.parametrize("overlap", [True, False])
def test_rows_of_a_step_that_published_nothing_fail_with_its_own_error(overlap: bool) -> None:
    """Steps without drafts come before the failing step, so the rows' last published lengths are old."""

    def lose(lengths: Tensor) -> Tensor:
        raise RuntimeError("the lengths are lost")

    depth = ScriptedDepth([SEED, SEED, CHAIN], deepest=CHAIN)
    with a_step_that_tells(lose, number=1):
        scripted = ScriptedEngine(max_kv_tokens=200, spec_info=CHAIN, depth=depth, overlap=overlap)
        outcomes = [scripted.submit(str(number), [number + 1, 7, 5], 24) for number in range(3)]
        scripted.run()
    assert {str(outcome.error) for outcome in outcomes} == {"a decode step failed: the lengths are lost"}


_WITHOUT_ASSERTIONS = """
    import sys
    from importlib.machinery import FileFinder, SourceFileLoader

    class Loader(SourceFileLoader):
        def get_code(self, fullname):
            return compile(self.get_data(self.path), self.path, "exec", dont_inherit=True, optimize=1)

    def finder(directory, own=tuple(sys.argv[1:])):
        if not directory.startswith(own):
            raise ImportError
        return FileFinder(directory, (Loader, [".py"]))

    sys.path_hooks.insert(0, finder)
    from tests.engine import test_lengths

    print(test_lengths.errors_beside_a_wrong_length(0))
"""
"""A program that compiles the modules in the directories of its arguments without assertions. `python -O` would compile
all of PyTorch too, which takes ten seconds.
"""


@pytest.mark.thorough
def test_lengths_are_looked_at_without_assertions_too() -> None:
    own = [str(ROOT / package) for package in ("common", "decode_service", "tests")]
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_WITHOUT_ASSERTIONS), *own],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=True,
    )
    assert ran.stdout.strip() == str(["a decode step published a length of 0", "", ""])


test_holds = holding(globals())
test_is_broken_by = breaking(globals())
