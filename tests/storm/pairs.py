"""Pairs of services for storms, with pools too small for all requests, and with planned faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product, starmap
from pathlib import Path

from baton.local_pair import LocalPair
from tests.faults.plan import FRAME_ACTIONS, Action, Fault, FaultPlan
from tests.support.draft_heads import save_copy_head
from tests.support.models import save_last_token_model
from tests.support.running_pair import RunningPair, running_pair

TEST_BUILD = {"prefill": "tests.faults.prefill_service", "decode": "tests.faults.decode_service"}
FAULT_RATE = 0.05
DELAY_S = 0.05
MAX_ROWS = 32
KV_TOKENS = 130
"""The number of KV slots of a decode service. MAX_ROWS of the usual requests need sixteen times as many, so about
thirty of 160 are retracted.
"""


@dataclass(frozen=True, slots=True)
class Models:
    """Directories of a target and a draft head. Each of the target's tokens depends on all tokens before it, and the
    head often guesses the next one.
    """

    target: Path
    head: Path

    @classmethod
    def save(cls, directory: Path) -> Models:
        target = save_last_token_model(_made(directory / "target"), context_weight=0.05)
        head = save_copy_head(_made(directory / "head"), target_dir=target, family="eagle3")
        return cls(target, head)


@dataclass(frozen=True, slots=True)
class Setting:
    overlap: bool
    speculates: bool
    shares_memory: bool = False
    prefills_locally: bool = False

    def __str__(self) -> str:
        parts = {"overlap": self.overlap, "drafts": self.speculates, "shared memory": self.shares_memory}
        parts["local prefill"] = self.prefills_locally
        return ", ".join(f"{name} {'on' if is_on else 'off'}" for name, is_on in parts.items())

    @property
    def prefill_args(self) -> tuple[str, ...]:
        """The arguments of the prefill service. With shared memory it gives up on a lost ticket after the receiver has
        returned nothing for 2 s.
        """
        return (
            ("--kv-transport=shared_memory", "--stall-timeout-s=2") if self.shares_memory else ("--kv-transport=grpc",)
        )


SETTINGS = (
    *starmap(Setting, product((True, False), (False, True), (False, True))),
    *(Setting(*each, prefills_locally=True) for each in product((True, False), (False, True))),
)

LENT_FAULTS = (
    Fault(point="shared_memory.lent", action=Action.STALL, rate=0.02, seconds=0.05),
    Fault(point="shared_memory.lent", action=Action.REUSE, rate=0.02),
    Fault(point="shared_memory.lent", action=Action.UNLINK, at=50),
    Fault(point="shared_memory.read", action=Action.STALL, rate=0.02, seconds=0.05),
)
"""Faults of KV in shared memory: a stale loan whose slots now belong to another row, a late loan, and a pool whose
socket is gone.
"""


def frame_faults(seed: int) -> FaultPlan:
    """Returns a plan that damages the share `FAULT_RATE` of all frames. Each kind of fault is equally frequent."""
    share = FAULT_RATE / len(FRAME_ACTIONS)
    seconds = {Action.DELAY: DELAY_S}
    faults = tuple(
        Fault(point="handoff.frame", action=action, rate=share, seconds=seconds.get(action, 0.0))
        for action in sorted(FRAME_ACTIONS)
    )
    return FaultPlan(faults=faults, seed=seed)


def lent_and_frame_faults(seed: int) -> FaultPlan:
    """Returns a plan of faults in frames and in shared memory, for a pair that shares memory and so copies no KV out of
    the pool.
    """
    return FaultPlan(faults=(*frame_faults(seed).faults, *LENT_FAULTS), seed=seed)


def faults_everywhere(seed: int, setting: Setting) -> FaultPlan:
    """Returns a plan with faults in frames, and rarer faults at every other point. A failed decode step fails all of
    its requests.

    A call whose PrefillBatch was dropped waits FIRST_COMMAND_TIMEOUT_S for it.
    """

    copied = (
        Fault(point="stream.sending", action=Action.STALL, rate=0.02, seconds=0.05),
        Fault(point="stream.sending.copy_out", action=Action.RAISE, rate=0.005),
    )
    return FaultPlan(
        faults=(
            *frame_faults(seed).faults,
            Fault(point="handoff.command", action=Action.DELAY, rate=0.02, seconds=DELAY_S),
            Fault(point="handoff.command", action=Action.DROP, rate=0.005),
            Fault(point="handoff.command", action=Action.DUPLICATE, rate=0.02),
            Fault(point="handoff.command", action=Action.TRUNCATE, rate=0.02),
            Fault(point="handoff.command", action=Action.CORRUPT, rate=0.02),
            Fault(point="handoff.received", action=Action.TRUNCATE, rate=0.01),
            Fault(point="handoff.received", action=Action.CORRUPT, rate=0.01),
            Fault(point="pool.reserve", action=Action.FAIL, rate=0.05),
            Fault(point="memory.host", action=Action.FAIL, rate=0.002, at_most=3),
            Fault(point="stream.forward", action=Action.STALL, rate=0.005, seconds=0.1),
            Fault(point="stream.landing", action=Action.STALL, rate=0.02, seconds=0.05),
            Fault(point="stream.forward.verify", action=Action.RAISE, rate=0.003, at_most=2),
            Fault(point="stream.forward.forward", action=Action.RAISE, rate=0.01),
            Fault(point="stream.landing.land", action=Action.RAISE, rate=0.005),
            *(LENT_FAULTS if setting.shares_memory else copied),
        ),
        seed=seed,
    )


@contextmanager
def disturbed_pair(
    models: Models,
    setting: Setting,
    plan: FaultPlan,
    directory: Path,
    *,
    kind: Callable[..., LocalPair] = LocalPair,
    num_each: int = 1,
    kv_tokens: int = KV_TOKENS,
) -> Iterator[RunningPair]:
    """Runs `num_each` services of either role, all with this plan of faults. Most points of a plan exist in one role
    only. `kv_tokens` is the size of each decode service's pool.

    The logs stay in `directory`, which no other pair uses. Once the pair has ended, the logs contain the ends of all
    requests.
    """
    path = plan.write(directory / "faults.json")
    decode_args = [f"--max-kv-tokens={kv_tokens}", "--max-handoff-attempts=20", "--prefill-timeout-s=30"]
    if not setting.overlap:
        decode_args.append("--disabled-fast-paths=overlap")
    if setting.prefills_locally:
        decode_args.append("--local-prefill-tokens=12")
    if setting.speculates:
        decode_args += ["--num-draft-tokens=3", "--no-adaptive-depth"]
    with running_pair(
        models.target,
        kind=kind,
        num_prefill=num_each,
        num_decode=num_each,
        log_dir=directory / "logs",
        modules=TEST_BUILD,
        shared_args=(
            f"--faults={path}",
            f"--max-rows={MAX_ROWS}",
            *([f"--draft={models.head}"] if setting.speculates else []),
        ),
        prefill_args=(
            "--max-context-tokens=200",
            "--chunk-tokens=16",
            "--max-batch-tokens=128",
            "--max-segment-bytes=65536",
            *setting.prefill_args,
        ),
        decode_args=decode_args,
    ) as pair:
        yield pair


def _made(directory: Path) -> Path:
    directory.mkdir(parents=True)
    return directory
