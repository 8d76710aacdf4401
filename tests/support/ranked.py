"""Models that are cut among ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.checkpoints.cache import kernels_cache_dir
from common.model.loader import LoadArguments, load_target
from common.model.target import TargetModel
from common.ranks.leader import Ranks, devices_of, load_together, lost_ranks_named
from common.service.cpu_engine import cpu_engine


class NoCollective:
    """A Collective that no rank comes to."""

    def sum_up(self, values: Tensor) -> None:
        raise AssertionError

    def joined(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        raise AssertionError

    def give_up(self) -> None:
        raise AssertionError

    def counts(self) -> list[int]:
        raise AssertionError


@contextmanager
def ranked_model(
    directory: Path,
    num_ranks: int,
    *,
    on_start: Callable[[Ranks], None] = lambda ranks: None,
    own_kv_on: str | None = None,
    **changed: Any,
) -> Iterator[tuple[TargetModel, Ranks]]:
    """Loads the model on `num_ranks` ranks, each with one thread, in float32. `changed` are other LoadArguments.
    `on_start` is called when the ranks have been started. With `own_kv_on`, "cpu" or "cuda", each rank has KV of its
    own there.
    """
    torch_device = torch.device(own_kv_on or "cpu")
    engine = cpu_engine(torch_device)
    arguments = LoadArguments(
        device=str(torch_device),
        dtype="float32",
        kv_dtype="auto",
        max_context_tokens=None,
        attention="kernels",
        cpu_engine=engine,
        optimizes_modules=True,
    )
    arguments.update(changed)  # type: ignore[typeddict-item]
    ranks = Ranks(
        None if own_kv_on else engine,
        devices_of(torch_device, num_ranks),
        directory,
        arguments,
        num_threads=1,
        kernels_dir=kernels_cache_dir(),
        tf32=False,
    )
    try:
        with lost_ranks_named(ranks):
            on_start(ranks)
            target = load_together(lambda: load_target(directory, **arguments, part=ranks.part), ranks)
        target.lead(ranks)
        yield target, ranks
    finally:
        ranks.close()
