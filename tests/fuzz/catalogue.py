"""The list of all fuzz targets."""

from __future__ import annotations

from tests.fuzz.edge_targets import EDGE_TARGETS
from tests.fuzz.engine_target import REPLICA_FRAMES
from tests.fuzz.grammar_target import GRAMMAR
from tests.fuzz.pure_targets import PURE_TARGETS
from tests.fuzz.target import Target

TARGETS: dict[str, Target] = {target.name: target for target in (*PURE_TARGETS, REPLICA_FRAMES, GRAMMAR, *EDGE_TARGETS)}
