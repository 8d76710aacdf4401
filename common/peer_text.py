"""Text that somebody else wrote, made fit for logs, errors and terminals where it comes in.

A replica, a client or a server sends what it likes: megabytes, lines that look like the log's own, codes that command a
terminal, characters that turn the direction of what follows.
"""

from __future__ import annotations

MAX_PEER_TEXT_BYTES = 512


def peer_text(text: str, max_bytes: int = MAX_PEER_TEXT_BYTES) -> str:
    """`text` on one line, within `max_bytes` of UTF-8: what is not printable is written as Python escapes it.

    What was cut ends with how many bytes there were. Text that went through this before is not changed.
    """
    shown = _escaped(text[:max_bytes])
    if len(text) <= max_bytes and len(shown.encode()) <= max_bytes:
        return shown
    cut = f"... ({len(text.encode(errors='replace'))} bytes)"
    return shown.encode()[: max_bytes - len(cut)].decode(errors="ignore") + cut


def _escaped(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )
