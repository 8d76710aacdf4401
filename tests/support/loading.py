"""Loads models and draft heads as a service does: on a CPU they compute by the compiled engine, if it is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from common.draft import load
from common.draft.paged_head import PagedHead
from common.model import loader
from common.model.target import TargetModel
from common.service.cpu_engine import cpu_engine


def load_target(directory: Path, *, device: str, **arguments: Any) -> TargetModel:
    return loader.load_target(directory, device=device, cpu_engine=cpu_engine(torch.device(device)), **arguments)


def load_draft(directory: Path, *, device: str, **arguments: Any) -> PagedHead:
    return load.load_draft(directory, device=device, cpu_engine=cpu_engine(torch.device(device)), **arguments)
