"""Decides whether the output that a resumed request brings along is already complete."""

from __future__ import annotations

from collections.abc import Sequence

from common.errors import InvalidRequest
from common.sampling.params import ResolvedSampling
from common.telemetry.stats import Timings
from decode_service.edge.live_request import Ending
from decode_service.edge.text.output import OutputProcessor
from decode_service.messages import FinishReason


def ending_of_brought(
    token_ids: Sequence[int], *, sampling: ResolvedSampling, output: OutputProcessor, num_prompt_tokens: int
) -> Ending | None:
    """Returns the ending of a resumed request whose output is already complete, or None if the output goes on.

    It is the ending that the earlier stream would have sent if it had not broken; that stream sent all text.
    `token_ids` is the output that the request brings along, and `output` has processed it. A request that brings no
    output along is not complete, even if it wants none. Raises InvalidRequest if tokens follow the end.
    """
    if not token_ids:
        return None
    ends = [index + 1 for index, token_id in enumerate(token_ids) if _ends(token_id, index, sampling)]
    ends.append(sampling.max_tokens)
    if output.match is not None:
        ends.append(output.match.num_output_tokens)
    num_output_tokens = min(ends)
    if len(token_ids) < num_output_tokens:
        return None
    if len(token_ids) > num_output_tokens:
        raise InvalidRequest(
            "generated_token_ids", f"the output ended after {num_output_tokens} tokens, {len(token_ids)} were given"
        )
    reason, stop_token_id, stop_string = FinishReason.LENGTH, None, None
    last = token_ids[-1]
    if output.match is not None:
        reason, stop_string = FinishReason.STOP_STRING, output.match.stop_string
    elif _ends(last, len(token_ids) - 1, sampling):
        is_eos = last in sampling.eos_token_ids
        reason, stop_token_id = (FinishReason.EOS, None) if is_eos else (FinishReason.STOP_TOKEN, last)
    return Ending(
        reason=reason,
        num_prompt_tokens=num_prompt_tokens,
        num_completion_tokens=num_output_tokens,
        num_reasoning_tokens=output.num_reasoning_tokens,
        timings=Timings(),
        stop_token_id=stop_token_id,
        stop_string=stop_string,
    )


def _ends(token_id: int, index: int, sampling: ResolvedSampling) -> bool:
    return index >= sampling.min_tokens and token_id in sampling.end_token_ids
