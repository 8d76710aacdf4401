"""Makes text from peers safe for logs, errors and terminals.

A replica, client or server can send megabytes, text that imitates log lines, terminal control codes, or characters that
reverse text.
"""

from __future__ import annotations

MAX_PEER_TEXT_BYTES = 512


def peer_text(text: str, max_bytes: int = MAX_PEER_TEXT_BYTES) -> str:
    """Returns `text` on one line of at most `max_bytes` bytes of UTF-8, with unprintable characters escaped as in
    Python.

    A text that was cut ends with its original number of bytes. Applying this twice changes nothing.
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
