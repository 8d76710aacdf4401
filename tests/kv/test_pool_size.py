"""Tests of the default size of a KV pool, for cards and hosts that are not present here, and of the sizes that settings
may ask for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from common.config.settings import DecodeSettings, PrefillSettings
from common.device.cpu import CpuDevice
from common.device.stream import DeviceMemory, PieceFailed
from common.errors import StartupError
from common.kv.pool_size import LEAST_TOKENS, MemoryBeside, PoolBytes, PoolLimits, PoolSize, room_beside_pool, size_pool
from common.service.runtime import open_runtime
from decode_service import main as decode_main
from decode_service.forward.forward_side import recorded_bytes
from decode_service.speculate.depth import AdaptiveDepth, FixedDepth
from decode_service.speculate.spec_info import NO_DRAFTS, SpecInfo
from prefill_service import main as prefill_main
from tests.support.engines import Received

GIB = 1 << 30
GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
WEIGHTS = 16 * GIB
CONTEXT = 131072
VOCAB = 128256
TOKEN_BYTES = 128 << 10
"""KV bytes per token of Llama-3.1-8B in bfloat16. The other numbers here are also those of that model."""
CARD = DeviceMemory(total_bytes=79 * GIB, free_bytes=62 * GIB, held_bytes=WEIGHTS)
LIMITS = PoolLimits(max_rows=None, max_kv_tokens=None, memory_share=0.9, context_tokens=CONTEXT)
NOTHING = MemoryBeside(row_bytes=1, peak_bytes=lambda num_rows: num_rows)


def beside(
    kind: type[DecodeSettings | PrefillSettings],
    *,
    spec_info: SpecInfo = NO_DRAFTS,
    torch_device: torch.device = GPU,
    **options: Any,
) -> Any:
    """Returns the memory that a service with this model needs beside its pool, on a device that records graphs."""
    model = SimpleNamespace(
        vocab_size=VOCAB,
        hidden_size=4096,
        max_context_tokens=CONTEXT,
        dtype=torch.bfloat16,
        torch_device=torch_device,
        windows=(),
    )
    draft = None if not spec_info.has_drafts else SimpleNamespace(capture=SimpleNamespace(num_states=3))
    runtime: Any = SimpleNamespace(model=model, draft=draft, device=SimpleNamespace(graphs="there are"), ranks=None)
    settings: Any = kind(**options)
    if kind is PrefillSettings:
        return prefill_main.memory_beside_pool(settings, runtime, prefill_main.engine_config(settings))
    new_depth = AdaptiveDepth if spec_info.has_drafts else FixedDepth
    config = replace(decode_main.engine_config(settings, None), spec_info=spec_info, new_depth=new_depth)
    return decode_main.memory_beside_pool(settings, runtime, config)


def sized(
    memory: DeviceMemory | None,
    *,
    beside: MemoryBeside = NOTHING,
    device: torch.device = GPU,
    token_bytes: int = TOKEN_BYTES,
    **limits: Any,
) -> PoolSize:
    return size_pool(
        replace(LIMITS, **limits),
        pool=PoolBytes(token_bytes=token_bytes),
        beside=beside,
        memory=memory,
        torch_device=device,
    )


# ---- a GPU ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("service", "least_tokens"),
    [
        (beside(PrefillSettings), 400_000),
        (beside(DecodeSettings), 400_000),
        (beside(DecodeSettings, spec_info=SpecInfo.chain(4)), 300_000),
    ],
    ids=["prefill", "decode", "with drafts"],
)
def test_a_large_card_has_room_for_hundreds_of_thousands_of_tokens(service: MemoryBeside, least_tokens: int) -> None:
    size = sized(CARD, beside=service)
    assert size.max_rows == 256 and size.max_kv_tokens > least_tokens and size.max_context_tokens == CONTEXT
    assert size.decided_by == "memory_share"
    used = WEIGHTS + (size.max_kv_tokens + 1) * TOKEN_BYTES + service.peak_bytes(256)
    assert 0.9 * CARD.total_bytes - TOKEN_BYTES < used <= 0.9 * CARD.total_bytes


def test_a_smaller_card_takes_fewer_rows_and_tokens() -> None:
    card = DeviceMemory(total_bytes=24 * GIB, free_bytes=7 * GIB, held_bytes=WEIGHTS)
    service = beside(DecodeSettings, spec_info=SpecInfo.chain(4))
    size = sized(card, beside=service)
    assert 8 <= size.max_rows < 256
    assert size.max_context_tokens == size.max_kv_tokens > 10_000
    assert (size.max_kv_tokens + 1) * TOKEN_BYTES + service.peak_bytes(size.max_rows) <= card.free_bytes


def test_two_services_that_share_a_card_by_their_settings_both_get_their_share() -> None:
    service = beside(DecodeSettings)
    first = sized(CARD, beside=service, memory_share=0.45)
    taken = WEIGHTS + (first.max_kv_tokens + 1) * TOKEN_BYTES + service.peak_bytes(first.max_rows)
    after = DeviceMemory(CARD.total_bytes, CARD.free_bytes - taken, WEIGHTS)
    assert sized(after, beside=service, memory_share=0.45) == first


def test_logits_that_recorded_forwards_keep_are_counted() -> None:
    """Graphs are recorded for 1, 2, 4, 8 and 9 rows, with one token and with three tokens each."""
    levels = [SpecInfo.chain(2).at_depth(0), SpecInfo.chain(2)]
    kept = (1 + 2 + 4 + 8 + 9) * (1 + 3) * (VOCAB * 4 + 7)
    assert recorded_bytes(9, levels, vocab_size=VOCAB, state_bytes=7) == kept
    assert recorded_bytes(9, [NO_DRAFTS], vocab_size=VOCAB, state_bytes=0) == (1 + 2 + 4 + 8 + 9) * VOCAB * 4

    records, replays_nothing = beside(DecodeSettings), beside(DecodeSettings, disabled_fast_paths="cuda_graphs")
    assert records.peak_bytes(256) - replays_nothing.peak_bytes(256) == 511 * VOCAB * 4
    assert sized(CARD, beside=records).max_kv_tokens < sized(CARD, beside=replays_nothing).max_kv_tokens


# ---- a CPU ----------------------------------------------------------------------------------------------------------


def host(num_bytes: int) -> DeviceMemory:
    return DeviceMemory(num_bytes, num_bytes)


@pytest.mark.parametrize("memory", [host(512 * GIB), None], ids=["plenty", "unknown"])
def test_a_host_gives_what_it_always_gave_where_there_is_plenty_or_nobody_says(memory: DeviceMemory | None) -> None:
    size = sized(memory, device=CPU)
    assert (size.max_rows, size.max_kv_tokens) == (32, 32768)


def test_two_services_that_start_at_once_do_not_take_the_same_memory_twice() -> None:
    size = sized(host(2 * GIB), device=CPU)
    assert 2 * (size.max_kv_tokens + 1) * TOKEN_BYTES < 2 * GIB
    assert size.max_kv_tokens > 6000 and size.decided_by == "memory_share"


def test_where_the_share_is_less_than_one_request_needs_it_takes_that_if_it_is_there() -> None:
    needed = (LEAST_TOKENS + 1) * TOKEN_BYTES + 32
    assert sized(host(needed), device=CPU, max_rows=32).max_kv_tokens == LEAST_TOKENS
    with pytest.raises(StartupError, match=r"^memory_share: of cpu's memory 0\.13 GiB are left .* needs 0\.13 GiB"):
        sized(host(needed - 1), device=CPU, max_rows=32)
    assert sized(host(GIB // 100), device=CPU, context_tokens=16).max_kv_tokens >= 16


# ---- settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", [CARD, host(GIB // 8), None], ids=["plenty", "little", "unknown"])
def test_what_a_setting_says_is_taken(memory: DeviceMemory | None) -> None:
    size = sized(memory, device=CPU, max_rows=7, max_kv_tokens=130)
    assert size == PoolSize(
        max_rows=7, max_kv_tokens=130, max_window_tokens=0, max_context_tokens=130, decided_by="max_kv_tokens"
    )


def test_a_pool_that_holds_no_request_is_refused() -> None:
    with pytest.raises(StartupError, match=r"^max_kv_tokens: 5 hold no request: the shortest needs 6, and one of"):
        sized(None, max_kv_tokens=5, tokens_ahead=4)
    assert sized(None, max_kv_tokens=6, tokens_ahead=4).max_kv_tokens == 6


def test_no_more_tokens_than_all_rows_can_hold() -> None:
    size = sized(CARD, max_rows=3, context_tokens=512, tokens_ahead=4)
    assert (size.max_kv_tokens, size.max_context_tokens, size.decided_by) == (3 * 516, 512, "max_rows")


@pytest.mark.parametrize("device", [GPU, CPU], ids=str)
def test_tokens_that_do_not_fit_are_refused_with_what_would(device: torch.device) -> None:
    memory = DeviceMemory(24 * GIB, 7 * GIB, WEIGHTS)
    service = beside(DecodeSettings)
    with pytest.raises(StartupError, match=r"^max_kv_tokens: 100000 tokens take 12\.21 GiB on .*would fit$") as refused:
        sized(memory, beside=service, device=device, max_rows=8, max_kv_tokens=100_000)
    would_fit = int(str(refused.value).split()[-3])
    assert 40_000 < would_fit < 7 * GIB // TOKEN_BYTES
    sized(memory, beside=service, device=device, max_rows=8, max_kv_tokens=would_fit)


@pytest.mark.parametrize("tokens_ahead", [0, 4], ids=["no drafts", "drafts"])
def test_a_pool_that_holds_no_request_is_refused_with_what_would(tokens_ahead: int) -> None:
    shortest = 2 + tokens_ahead
    with pytest.raises(StartupError, match=rf"^max_kv_tokens: {shortest - 1} hold no .* {shortest}, .* 131072"):
        sized(CARD, max_kv_tokens=shortest - 1, tokens_ahead=tokens_ahead)
    assert sized(CARD, max_kv_tokens=shortest, tokens_ahead=tokens_ahead).max_context_tokens == 2


def test_rows_that_do_not_fit_are_refused_with_what_would() -> None:
    service = beside(DecodeSettings)
    with pytest.raises(StartupError, match=r"^max_rows: 1000000 rows take .* on cuda:0 beside their KV") as refused:
        sized(CARD, beside=service, max_rows=1_000_000)
    half = int(str(refused.value).split()[-5])
    sized(CARD, beside=service, max_rows=half, max_kv_tokens=1000)


@given(
    total=st.integers(0, 200 * GIB),
    free=st.floats(0, 1),
    held=st.floats(0, 1),
    share=st.floats(0.01, 1),
    token_bytes=st.integers(1, 1 << 22),
    context=st.integers(1, 1 << 20),
    rows=st.none() | st.integers(1, 4096),
    device=st.sampled_from([GPU, CPU]),
)
def test_whatever_is_left_the_pool_and_what_is_beside_it_fit_or_it_is_refused_by_name(
    total: int,
    free: float,
    held: float,
    share: float,
    token_bytes: int,
    context: int,
    rows: int | None,
    device: torch.device,
) -> None:
    memory = DeviceMemory(total, int(free * total), int(held * (total - free * total)))
    service = MemoryBeside(row_bytes=1 << 16, peak_bytes=lambda num_rows: (num_rows + 1) << 20)
    options: dict[str, Any] = {"memory_share": share, "context_tokens": context, "max_rows": rows}
    try:
        size = sized(memory, beside=service, device=device, token_bytes=token_bytes, **options)
    except StartupError as error:
        assert str(error).startswith(("memory_share: ", "max_rows: "))
        return
    used = (size.max_kv_tokens + 1) * token_bytes + service.peak_bytes(size.max_rows)
    assert used <= memory.free_bytes
    assert size.max_context_tokens == min(context, size.max_kv_tokens) > 0
    assert size.max_kv_tokens >= min(LEAST_TOKENS, context)
    assert size.max_rows == rows or size.max_rows in (1, 2, 4, 8, 16, 32, 64, 128, 256)


# ---- a service ----------------------------------------------------------------------------------------------------


class SmallHost(CpuDevice):
    def memory(self) -> DeviceMemory:
        return host(32 << 20)


def test_memory_of_edges_stays_free_on_a_cpu() -> None:
    alone, with_edges = (
        beside(DecodeSettings, torch_device=CPU, edge_processes=number).peak_bytes(8) for number in (0, 2)
    )
    assert with_edges - alone == 2 * (1 << 29)


@pytest.mark.parametrize("kind", [PrefillSettings, DecodeSettings])
def test_a_service_says_what_it_takes_and_why(
    kind: type[PrefillSettings | DecodeSettings], tiny_model_dir: Callable[[str], Path]
) -> None:
    settings = kind(
        model=str(tiny_model_dir("llama")), dtype="float32", num_threads=1, disabled_fast_paths="fused_forwards"
    )
    opened = open_runtime(settings)
    opened.device.close(5.0)
    runtime = replace(opened, device=SmallHost(num_threads=1))
    service: MemoryBeside
    if isinstance(settings, PrefillSettings):
        service = prefill_main.memory_beside_pool(settings, runtime, prefill_main.engine_config(settings))
    else:
        service = decode_main.memory_beside_pool(settings, runtime, decode_main.engine_config(settings, None))
    with capture_logs() as logs:
        size = runtime.size_pool(settings, service, num_in_flight=64)
    (told,) = logs
    assert told["event"] == "pool_sized" and told["max_kv_tokens"] == size.max_kv_tokens < 32768
    assert (told["max_rows"], told["decided_by"], told["free_bytes"]) == (size.max_rows, "memory_share", 32 << 20)
    assert told["pool_bytes"] == (size.max_kv_tokens + 1) * told["token_bytes"]
    assert told["bytes_beside"] == service.peak_bytes(size.max_rows)
    runtime.device.close(5.0)


def test_a_pool_that_does_not_hold_the_longest_request_is_told_with_what_would(
    tiny_model_dir: Callable[[str], Path],
) -> None:
    options = {"model": str(tiny_model_dir("llama")), "dtype": "float32", "num_threads": 1}
    runtime = open_runtime(DecodeSettings(**options, disabled_fast_paths="fused_forwards"))
    context = runtime.model.max_context_tokens
    for max_kv_tokens, told in ((9, [(5, context, context + 4)]), (context + 4, [])):
        settings = DecodeSettings(**options, max_kv_tokens=max_kv_tokens)
        service = decode_main.memory_beside_pool(settings, runtime, decode_main.engine_config(settings, None))
        with capture_logs() as logs:
            runtime.size_pool(settings, service, num_in_flight=64, tokens_ahead=4)
        assert [
            (line["max_context_tokens"], line["allowed_tokens"], line["needed_kv_tokens"])
            for line in logs
            if line["event"] == "pool_shortens_context"
        ] == told
    runtime.device.close(5.0)


@pytest.mark.parametrize("main", [prefill_main, decode_main])
@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 0.30 GiB"), MemoryError("0.30 GiB")],
    ids=repr,
)
def test_an_engine_that_there_is_no_room_for_beside_its_pool_is_refused_by_the_setting(
    main: ModuleType, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def take_too_much(*_: Any, **options: Any) -> None:
        raise error

    size = PoolSize(
        max_rows=2, max_kv_tokens=64, max_window_tokens=0, max_context_tokens=64, decided_by="max_kv_tokens"
    )
    process: Any = SimpleNamespace(runtime=SimpleNamespace(parts=None, cpu_engine=None))
    options: dict[str, Any] = {"outbox": Received(), "on_step": lambda stats: None}
    with pytest.raises(StartupError, match=r"^memory_share: beside the KV pool .*0\.30 GiB. Lower it"):
        if main is prefill_main:
            monkeypatch.setattr(prefill_main, "PrefillEngine", take_too_much)
            config = prefill_main.engine_config(PrefillSettings())
            prefill_main.new_engine(config, process, size, None, returned=tuple, **options)
        else:
            monkeypatch.setattr(decode_main, "DecodeEngine", take_too_much)
            settings = DecodeSettings()
            config = decode_main.engine_config(settings, None)
            decode_main.new_engine(settings, process, config, size, **options)


def test_memory_that_is_short_while_forwards_are_recorded_is_told_as_that() -> None:
    with pytest.raises(StartupError, match=r"^memory_share: .*no room"), room_beside_pool():
        raise PieceFailed("recording") from torch.OutOfMemoryError("no room")
    with pytest.raises(PieceFailed), room_beside_pool():
        raise PieceFailed("recording") from RuntimeError("operation not permitted")


@pytest.mark.parametrize(("max_rows", "num_tokens", "num_window_tokens"), [(2, 1000, 200), (64, 1000, 1000)])
def test_groups_with_a_window_have_slots_for_all_rows_or_for_all_tokens(
    max_rows: int, num_tokens: int, num_window_tokens: int
) -> None:
    pool = PoolBytes(token_bytes=1000, window_token_bytes=3000, row_window_tokens=100)
    num_bytes = (num_tokens + 1) * 1000 + (num_window_tokens + 1) * 3000
    assert pool.of(max_rows, num_tokens) == num_bytes
    assert (pool.fitting(max_rows, num_bytes), pool.fitting(max_rows, num_bytes - 1)) == (num_tokens, num_tokens - 1)
    size = size_pool(
        replace(LIMITS, max_rows=max_rows, max_kv_tokens=num_tokens),
        pool=pool,
        beside=NOTHING,
        memory=None,
        torch_device=GPU,
    )
    assert size.max_window_tokens == num_window_tokens


def test_layers_with_windows_alone_leave_the_number_of_tokens_to_other_limits() -> None:
    pool = PoolBytes(token_bytes=0, window_token_bytes=3000, row_window_tokens=100)
    assert pool.fitting(2, 1 << 20) > 1 << 30
    assert pool.fitting(2, 1000) == 0
