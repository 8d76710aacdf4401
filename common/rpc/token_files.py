"""Reads files of tokens, for services, the gateway and the command line alike."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from common.errors import ConfigError

_MAX_FILE_BYTES = 1 << 20
_MIN_TOKEN_CHARS = 8


def read_token_file(setting: str, path: Path) -> tuple[tuple[str, ...], int]:
    """Returns the tokens in a file, without duplicates, and the file's mode. The file has one token per line.

    Raises ConfigError, which names `setting`, if the file is invalid or everybody may write to it. The error never
    quotes the file's contents.
    """

    def wrong(reason: str | None) -> ConfigError:
        return ConfigError(f"{setting}: {path}: {reason}")

    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(_MAX_FILE_BYTES + 1)
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise wrong(error.strerror) from None
    except UnicodeDecodeError:
        raise wrong("is not text") from None
    if len(data) > _MAX_FILE_BYTES:
        raise wrong("is too large for a file of tokens")
    if mode & stat.S_IWOTH and stat.S_ISREG(mode):
        raise wrong("everybody may write to it: chmod 600")
    tokens: dict[str, None] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not (token := line.strip(" \t\r")):
            continue
        if not token.isascii() or not token.isprintable() or " " in token:
            raise wrong(f"line {number} has spaces, or characters other than printable ASCII")
        if len(token) < _MIN_TOKEN_CHARS:
            raise wrong(f"line {number} is shorter than {_MIN_TOKEN_CHARS} characters: it can be guessed")
        tokens[token] = None
    if not tokens:
        raise wrong("holds no token")
    return tuple(tokens), mode


def is_open_to_others(mode: int) -> bool:
    """Returns True if users other than the owner may access a regular file of this mode."""
    return stat.S_ISREG(mode) and bool(mode & (stat.S_IRWXG | stat.S_IRWXO))
