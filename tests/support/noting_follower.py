"""A rank's process that writes whether it loads its model with TF32, to the file named by $NOTES."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from common.model.target import TargetModel
from common.ranks import follower

load_target = follower.load_target


def noting_load(directory: Path, **arguments: Any) -> TargetModel:
    switches = (torch.backends.cuda.matmul, torch.backends.cudnn)
    Path(os.environ["NOTES"]).write_text(str([switch.allow_tf32 for switch in switches]))
    return load_target(directory, **arguments)


if __name__ == "__main__":
    follower.load_target = noting_load
    follower.main()
