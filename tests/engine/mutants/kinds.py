"""The type of a mutant: a function that takes one rule out of the engine. The rule's check must fail with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from common.device.stream import Event, Stream
from common.kv.rows import RowColumns

Mutant = Callable[[pytest.MonkeyPatch], None]


def instead_of(owner: object, name: str) -> Callable[[Callable[..., Any]], Mutant]:
    """Makes a mutant of the function below: it is called instead of the function `name` of a class or module, with that
    sound function before the arguments.
    """

    def mutant_of(unsound: Callable[..., Any]) -> Mutant:
        def mutant(patch: pytest.MonkeyPatch) -> None:
            sound = getattr(owner, name)
            patch.setattr(owner, name, lambda *args, **options: unsound(sound, *args, **options))

        mutant.__name__, mutant.__module__, mutant.__doc__ = unsound.__name__, unsound.__module__, unsound.__doc__
        return mutant

    return mutant_of


def arguments_given(patch: pytest.MonkeyPatch, kind: type) -> Callable[[object], Mapping[str, Any]]:
    """Records the keyword arguments with which each object of `kind` is built from now on. Returns a function that
    looks them up for an object.
    """
    made: dict[int, tuple[object, Mapping[str, Any]]] = {}  # keeps the object too, so that its id is not reused
    init = kind.__init__  # type: ignore[misc]

    def noting(self: object, **arguments: Any) -> None:
        made[id(self)] = self, arguments
        init(self, **arguments)

    patch.setattr(kind, "__init__", noting)
    return lambda it: made[id(it)][1]


def newest(patch: pytest.MonkeyPatch, kind: type) -> Callable[[], Any]:
    """Returns a function that returns the object of `kind` that was built last, from now on."""
    made: list[object] = []
    init = kind.__init__  # type: ignore[misc]

    def noting(self: object, *args: Any, **options: Any) -> None:
        made[:] = [self]
        init(self, *args, **options)

    patch.setattr(kind, "__init__", noting)
    return lambda: made[0]


def use_not_noted(stream_name: str) -> Mutant:
    """Returns a mutant in which the pool does not know of the work of one stream on its rows."""

    @instead_of(RowColumns, "use_until")
    def does_not_note(
        use_until: Callable[..., None], self: RowColumns, rows: object, event: Event, stream: Stream
    ) -> None:
        if stream.name != stream_name:
            use_until(self, rows, event, stream)

    return does_not_note


def name_of(value: object) -> str:
    """Returns a test id: the name of a check or a mutant, and "-" for a symptom."""
    return getattr(value, "__name__", "-")
