"""Two services that differ in weights or in speculation serve nothing, and tell every caller why."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baton import errors
from baton.local_pair import LocalPair
from baton.server_info import HealthStatus
from tests.support.draft_heads import save_copy_head
from tests.support.models import save_tiny_model
from tests.support.running_pair import BOUND_S, RunningPair, running_pair, wait_until

pytestmark = pytest.mark.thorough

FIELDS = {
    "other-weights": "target_weights_digest",
    "no-head": "layer_groups",
    "kv-in-fp8": "layer_groups[target].dtype",
    "another-topk": "seed_columns",
}
ALIKE = {"other-weights": "model", "no-head": "draft", "kv-in-fp8": "kv_dtype", "another-topk": "draft and draft_topk"}
TREE = ("--draft-topk=3", "--num-draft-steps=3", "--num-draft-tokens=9")
Arguments = tuple[str, ...]


@pytest.fixture(scope="module")
def arguments(
    tiny_model_dir: Callable[[str], Path], last_token_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Arguments, Arguments]]:
    """Arguments of a prefill and a decode service that do not match, by the name of what differs."""
    other = save_tiny_model(tmp_path_factory.mktemp("other-weights"), "llama", seed=1)
    head_dir = save_copy_head(
        tmp_path_factory.mktemp("head"), target_dir=last_token_model_dir, family="eagle3", draft_vocab_size=50
    )
    target, head = f"--model={last_token_model_dir}", f"--draft={head_dir}"
    return {
        "other-weights": ((f"--model={other}",), (f"--model={tiny_model_dir('llama')}",)),
        "no-head": ((target,), (target, head)),
        "kv-in-fp8": ((target,), (target, "--kv-dtype=fp8_e4m3")),
        "another-topk": ((target, head), (target, head, *TREE)),
    }


@pytest.fixture(scope="module", params=FIELDS)
def pair(
    request: pytest.FixtureRequest,
    arguments: dict[str, tuple[Arguments, Arguments]],
    forked: Callable[..., LocalPair],
) -> Iterator[RunningPair]:
    prefill_args, decode_args = arguments[request.param]
    with running_pair(
        None,
        kind=forked,
        prefill_args=prefill_args,
        decode_args=(*decode_args, "--prefill-timeout-s=1"),
        waits_ready=False,
    ) as running:
        yield running


@pytest.fixture
def field(pair: RunningPair, request: pytest.FixtureRequest) -> str:
    return FIELDS[request.node.callspec.params["pair"]]


@pytest.fixture
def alike(pair: RunningPair, request: pytest.FixtureRequest) -> str:
    return ALIKE[request.node.callspec.params["pair"]]


def test_a_mismatch_is_named_in_load_log_and_every_request_and_decode_is_not_ready(
    pair: RunningPair, field: str, alike: str
) -> None:
    wait_until(lambda: field in pair.load().prefill_replicas[0].reason, about=pair.load)
    (replica,) = pair.load().prefill_replicas
    assert replica.error_reason == "FINGERPRINT_MISMATCH"
    assert replica.reason.endswith(f"; give both the same {alike}") and "(" not in replica.reason
    assert pair.prefill_load().rows.free > 0, "the prefill service itself is well"
    assert not pair.is_ready()
    assert pair.client.health("") is HealthStatus.SERVING
    (decode,) = pair.processes.decode
    assert f"cannot serve: fingerprints differ in {field}" in decode.log_file.read_text()

    for number in range(2):
        with pytest.raises(errors.FailedPrecondition, match=re.escape(field)) as refused:
            pair.client.complete(token_ids=[10, 11 + number], timeout_s=BOUND_S)
        assert refused.value.field == field
        assert refused.value.metadata["decode"] != refused.value.metadata["prefill"]
    assert pair.prefill_load().num_steps == 0, "the prefill service computed for a stranger"
