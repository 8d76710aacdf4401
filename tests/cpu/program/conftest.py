from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.draft.conftest import one_thread, target, target_dir  # noqa: F401 -- fixtures

_GUARD_BYTES = 1 << 20


@pytest.fixture
def guards(monkeypatch: pytest.MonkeyPatch) -> list[NDArray[np.uint8]]:
    """Lets programs set aside memory with a guard behind it. Returns the guards: what a program made writes there is no
    longer 7.
    """
    from baton_cpu.program import forward as forward_module  # its kernel is looked for where it is imported first

    made: list[NDArray[np.uint8]] = []

    class Guarded(forward_module.Memory):
        def __init__(self, num_bytes: int) -> None:
            super().__init__(num_bytes + _GUARD_BYTES)
            self.num_bytes = num_bytes
            start = self.address - self._bytes.ctypes.data + num_bytes
            guard: NDArray[Any] = self._bytes[start : start + _GUARD_BYTES]
            guard[:] = 7
            made.append(guard)

    monkeypatch.setattr(forward_module, "Memory", Guarded)
    monkeypatch.setattr(forward_module._Workspace, "of", lambda _, num_bytes: Guarded(num_bytes))
    return made
