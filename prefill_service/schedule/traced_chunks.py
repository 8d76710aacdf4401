"""Reports the chunks of an ended forward, for the traces of their prompts."""

from __future__ import annotations

from common.prompts.chunk_batch import ChunkBatch
from prefill_service.messages import ChunkComputed
from prefill_service.prompt import Prompt, PromptPhase


def traced_chunks(batch: ChunkBatch[Prompt], *, start_s: float, end_s: float) -> list[ChunkComputed]:
    """Returns the ChunkComputed events of `batch`, whose forward has ended, for the traces of its prompts.

    A chunk has an event if its prompt is traced and its phase is not ENDED yet. `start_s` and `end_s` are the
    forward's times by the engine's clock.
    """
    return [
        ChunkComputed(
            call_id=chunk.prompt.call_id,
            row=chunk.prompt.index,
            token_start=chunk.start,
            token_stop=chunk.stop,
            num_batch_rows=len(batch.chunks),
            num_batch_tokens=batch.num_tokens,
            start_s=start_s,
            end_s=end_s,
        )
        for chunk in batch.chunks
        if chunk.prompt.is_traced and chunk.prompt.phase is not PromptPhase.ENDED
    ]
