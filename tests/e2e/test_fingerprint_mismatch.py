"""Two services with different weights: nothing is served, and everyone who asks is told why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baton import errors
from baton.local_pair import LocalPair
from baton.server_info import HealthStatus
from tests.e2e.running import BOUND_S, COMMON_ARGS, RunningPair, clients_of, wait_until
from tests.support.models import save_tiny_model

FIELD = "target_weights_digest"


@pytest.fixture(scope="module")
def pair(tiny_model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningPair]:
    other = save_tiny_model(tmp_path_factory.mktemp("other-weights"), "llama", seed=1)
    processes = LocalPair(
        model=None,
        dtype="float32",
        prefill_args=(*COMMON_ARGS, f"--model={other}"),
        decode_args=(*COMMON_ARGS, f"--model={tiny_model_dir('llama')}", "--prefill-timeout-s=1"),
    )
    with clients_of(processes) as running:
        try:
            processes.start()
            yield running
        finally:
            processes.stop()


def test_a_mismatch_is_named_in_load_log_and_every_request_and_decode_is_not_ready(pair: RunningPair) -> None:
    wait_until(lambda: FIELD in pair.load().prefill_replicas[0].reason, about=pair.load)
    assert pair.prefill_load().rows.free > 0, "the prefill service itself is well"
    assert not pair.is_ready()
    assert pair.client.health("") is HealthStatus.SERVING
    (decode,) = pair.processes.decode
    assert f"cannot serve: fingerprints differ in {FIELD}" in decode.log_file.read_text()

    for number in range(2):
        with pytest.raises(errors.FailedPrecondition, match=FIELD) as refused:
            pair.client.complete(token_ids=[10, 11 + number], timeout_s=BOUND_S)
        assert refused.value.field == FIELD
        assert refused.value.metadata["decode"] != refused.value.metadata["prefill"]
    assert pair.prefill_load().num_steps == 0, "the prefill service computed for a stranger"
