"""Services run without `baton_cpu` or the compiler it needs: PyTorch's operators give the same tokens."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from baton_cpu.attention import PagedCpuAttention
from common.attention.torch_attention import TorchAttention
from common.config.settings import DecodeSettings, PrefillSettings, ServiceSettings
from common.sampling.params import ResolvedSampling
from common.service.cpu_engine import cpu_engine
from common.service.runtime import Runtime, open_runtime
from tests.conftest import MakePair, pairs_that_keep_all
from tests.support.draft_heads import save_copy_head
from tests.support.drafted import Counts, load_drafted
from tests.support.models import save_last_token_model
from tests.support.pair import InProcessPair

KINDS = (PrefillSettings, DecodeSettings)
NUM_NEW = 20
PROMPT_LENS = (1, 17, 40, 70)
"""Lengths of prompts: two short ones, one that fills most of a chunk, and one of two chunks."""


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_last_token_model(tmp_path_factory.mktemp("target"), context_weight=0.05)


@pytest.fixture(scope="module")
def head_dir(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head some of whose drafts are accepted, and some rejected."""
    directory = tmp_path_factory.mktemp("head")
    return save_copy_head(directory, target_dir=target_dir, family="eagle3", draft_vocab_size=60)


@pytest.fixture(scope="module")
def by_the_engine(target_dir: Path, head_dir: Path) -> list[list[int]]:
    drafted = load_drafted(target_dir, head_dir)
    assert isinstance(drafted.target.attention, PagedCpuAttention)
    with pairs_that_keep_all() as make:
        return tokens_of(make(drafted.target, draft=drafted.head))


@pytest.fixture
def not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes it appear that nobody has imported `baton_cpu` yet."""
    for name in list(sys.modules):
        if name.partition(".")[0] == "baton_cpu":
            monkeypatch.delitem(sys.modules, name)


@pytest.fixture(params=["baton_cpu", "numba"])
def missing(not_imported: None, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes one of the required packages appear not to be installed."""
    monkeypatch.setitem(sys.modules, request.param, None)


def tokens_of(pair: InProcessPair) -> list[list[int]]:
    numbers = random.Random(5)
    prompts = [[numbers.randrange(64) for _ in range(length)] for length in PROMPT_LENS]
    sampling = ResolvedSampling(seed=0, max_tokens=NUM_NEW, temperature=0.0)
    outcomes = [pair.submit(str(number), prompt, sampling) for number, prompt in enumerate(prompts)]
    pair.run()
    counts = Counts.of(outcomes)
    assert counts.num_accepted and counts.num_rejected
    return [outcome.token_ids for outcome in outcomes]


def opened(kind: type[ServiceSettings], target_dir: Path, head_dir: Path) -> Runtime:
    runtime = open_runtime(kind(model=str(target_dir), draft=str(head_dir), dtype="float32", num_threads=1))
    runtime.device.close(5.0)
    return runtime


def test_a_pair_gives_the_same_tokens(
    by_the_engine: list[list[int]], missing: None, target_dir: Path, head_dir: Path, make_pair: MakePair
) -> None:
    prefill, decode = (opened(kind, target_dir, head_dir) for kind in KINDS)
    pair = make_pair(decode.model, draft=decode.draft, prefill_model=prefill.model, prefill_draft=prefill.draft)
    assert tokens_of(pair) == by_the_engine


@pytest.mark.parametrize("kind", KINDS)
def test_a_service_says_that_it_runs_by_operators(
    kind: type[ServiceSettings], missing: None, target_dir: Path, head_dir: Path
) -> None:
    with capture_logs() as logs:
        runtime = opened(kind, target_dir, head_dir)
    warnings = [line["event"] for line in logs if line["log_level"] == "warning"]
    assert warnings == ["cpu_engine_unavailable"]
    assert isinstance(runtime.model.attention, TorchAttention) and runtime.fusing is None


def test_a_defect_of_the_engine_is_no_missing_package(not_imported: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "baton_cpu.attention", None)
    with pytest.raises(ModuleNotFoundError, match=r"baton_cpu\.attention"):
        cpu_engine(torch.device("cpu"))
