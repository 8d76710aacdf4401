"""Parts of prompts' KV, each as large as one segment, and the interface of their senders."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from common.device.stream import Event
from common.kv.layer_group import LayerGroupSpec
from common.kv.pool import KvPool, RowLease
from common.prompts.chunk_batch import Chunk
from common.wire.handoff import KvSegment
from prefill_service.prompt import Prompt


def first_sent(prompt: Prompt, pool: KvPool, group_name: str) -> int:
    """Returns the first token of a prompt whose KV of a layer group is sent: the receiver lacks it, and will use it."""
    return max(prompt.row.num_held_of(group_name), pool.first_kept(group_name, prompt.num_tokens))


def sent_bytes(prompt: Prompt, pool: KvPool, group_name: str) -> int:
    """Returns the size of a prompt's KV of a layer group that is sent."""
    return pool.groups[group_name].token_bytes * (prompt.num_tokens - first_sent(prompt, pool, group_name))


def sent_tokens(chunk: Chunk[Prompt], first: int) -> range:
    """Returns the tokens whose KV is sent with a chunk: those up to its end from the token `first` on.

    A prompt's first chunk is sent together with the KV that the prefix cache had.
    """
    return range(max(0 if chunk.is_first else chunk.start, first), chunk.stop)


@dataclass(slots=True, eq=False)
class UnsentKv:
    """A part of one prompt's KV: a range of layers and tokens. The KV is in the pool when the event `written` is done.

    `forward` is the number of the forward that writes it, counted from 0. A queued part belongs to its sender, which
    may add layers to it.
    """

    prompt: Prompt
    lease: RowLease
    group: LayerGroupSpec
    layer_start: int
    num_layers: int
    token_start: int
    num_tokens: int
    written: Event
    forward: int

    @property
    def num_bytes(self) -> int:
        return self.group.layer_token_bytes * self.num_layers * self.num_tokens

    @property
    def tokens(self) -> slice:
        return slice(self.token_start, self.token_start + self.num_tokens)

    @property
    def layers(self) -> slice:
        return slice(self.layer_start, self.layer_start + self.num_layers)

    @property
    def segment(self) -> KvSegment:
        """The segment that carries the part, without the KV itself."""
        return KvSegment(
            row=self.prompt.index,
            layer_group=self.group.name,
            layer_start=self.layer_start,
            num_layers=self.num_layers,
            token_start=self.token_start,
            num_tokens=self.num_tokens,
        )

    def split(self, max_segment_bytes: int) -> list[UnsentKv]:
        """Splits the part into parts of at most `max_segment_bytes`, or of one token of one layer if that is more."""
        if self.num_bytes <= max_segment_bytes:
            return [self]
        num_layers, num_tokens = segment_shape(self.group, max_segment_bytes, layers=self.num_layers)
        token_stop, layer_stop = self.token_start + self.num_tokens, self.layer_start + self.num_layers
        return [
            replace(
                self,
                layer_start=layer,
                num_layers=min(num_layers, layer_stop - layer),
                token_start=token,
                num_tokens=min(num_tokens, token_stop - token),
            )
            for token in range(self.token_start, token_stop, num_tokens)
            for layer in range(self.layer_start, layer_stop, num_layers)
        ]


@dataclass(frozen=True, slots=True)
class SentKv:
    """A segment of a prompt that is ready to be sent, or the error with which its copy failed. One of both is None."""

    prompt: Prompt
    segment: KvSegment | None
    error: BaseException | None


class SegmentSender(ABC):
    """Turns parts of KV into segments. Only the engine thread calls it, and nothing here blocks."""

    def __init__(self, *, max_segment_bytes: int) -> None:
        self._max_segment_bytes = max_segment_bytes
        self._num_unsent: dict[Prompt, int] = {}

    @property
    @abstractmethod
    def is_busy(self) -> bool:
        """Whether parts are on their way, so that `poll` may soon return their segments."""

    def num_unsent(self, prompt: Prompt) -> int:
        """Returns how many parts of the prompt still need the pool."""
        return self._num_unsent.get(prompt, 0)

    def queue(self, whole: UnsentKv) -> None:
        parts = whole.split(self._max_segment_bytes)
        self._num_unsent[whole.prompt] = self.num_unsent(whole.prompt) + len(parts)
        self._take(parts)

    def forget(self, prompt: Prompt) -> None:
        """Drops the parts of this prompt that are not sent."""
        self._num_unsent.pop(prompt, None)

    @abstractmethod
    def poll(self) -> Iterator[SentKv]:
        """Yields the segments that are ready, in order. For a segment whose copy failed it yields the error instead.

        KV that a failed forward did not write is left out: that forward's end fails its prompts. Raises the error of a
        failed device or stream.
        """

    @abstractmethod
    def _take(self, parts: Sequence[UnsentKv]) -> None: ...

    def _is_wanted(self, part: UnsentKv) -> bool:
        """Returns whether to send the part: its prompt is not forgotten, and its KV was written.

        Call it only when the event `written` is done.
        """
        return part.prompt in self._num_unsent and part.written.error is None


def segment_shape(group: LayerGroupSpec, max_segment_bytes: int, *, layers: int) -> tuple[int, int]:
    """Returns how many layers and tokens the largest segment of a part with `layers` layers has.

    It has all layers of as many tokens as fit in `max_segment_bytes`. If not even one token fits, it has one token, and
    as many layers as fit, at least one.
    """
    num_tokens = max_segment_bytes // (group.layer_token_bytes * layers)
    if num_tokens:
        return layers, num_tokens
    return max(1, max_segment_bytes // group.layer_token_bytes), 1
