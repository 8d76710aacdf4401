"""Tests that every two features of the pair work together, token for token, or that both together are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from baton.local_pair import LocalPair
from common.config.settings import DecodeSettings, PrefillSettings
from common.errors import StartupError
from common.model.loader import KvDtype
from common.service.runtime import open_runtime
from tests.features.matrix import EITHER, FEATURES, PAGE, REFUSED, UNTESTED, cells, table
from tests.features.runs import SHAPES, WAYS, Runs
from tests.support.fp8_kv import fp8_attention
from tests.support.greedy_parity import check_tokens_equal_generate
from tests.support.loading import load_target
from tests.support.models import SMALL_VOCAB_SIZE
from tests.support.pair import MakePair, PairOptions

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, forked: Callable[..., LocalPair]) -> Runs:
    return Runs(tmp_path_factory.mktemp("features"), kind=forked)


@pytest.mark.parametrize("kv_dtype", ["unquantized", "fp8_e4m3"])
def test_the_model_of_all_runs_is_that_of_transformers(kv_dtype: KvDtype, runs: Runs, make_pair: MakePair) -> None:
    target = load_target(runs.models.target.directory, device="cpu", dtype="float32", kv_dtype=kv_dtype)
    pair = make_pair(target, PairOptions(chunk_tokens=16))
    check_tokens_equal_generate(
        pair,
        runs.models.target.whole_dir,
        crowd=True,
        chunk_tokens=16,
        vocab_size=SMALL_VOCAB_SIZE,
        attention=fp8_attention() if kv_dtype == "fp8_e4m3" else "eager",
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_are_the_same_with_all_features_at_once(shape: str, way: str, runs: Runs) -> None:
    assert runs.used(way, shape)


def test_every_two_features_were_used_by_one_request_and_the_page_says_so(runs: Runs) -> None:
    every = runs.every()
    assert [pair for pair, cell in cells(every).items() if cell == UNTESTED] == []
    assert table(every) in PAGE.read_text(), "python -m tests.features writes it"


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_that_no_request_used_is_seen(feature: str, runs: Runs) -> None:
    without = [[used - {feature} for used in run] for run in runs.every()]
    untested = [pair for pair, cell in cells(without).items() if cell == UNTESTED]
    assert untested and all(feature in pair for pair in untested)


@pytest.mark.parametrize(("pair", "setting"), EITHER.items())
def test_features_that_exclude_each_other_are_values_of_one_setting(pair: frozenset[str], setting: str) -> None:
    assert len(pair) == 2
    assert setting in DecodeSettings.model_fields or setting in PrefillSettings.model_fields


@pytest.mark.parametrize(("pair", "setting"), REFUSED.items())
def test_features_that_are_refused_are_refused_by_name(pair: frozenset[str], setting: str, runs: Runs) -> None:
    assert pair == {"trees of drafts", "draft heads of several layers"}, "how is this pair configured?"
    settings = DecodeSettings(
        model=str(runs.models.target.directory), draft=str(runs.models.heads["layers"]), dtype="float32", draft_topk=2
    )
    with pytest.raises(StartupError, match=f"^{setting}: .* chains, not trees"):
        open_runtime(settings)
