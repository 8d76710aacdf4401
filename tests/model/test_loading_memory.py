"""A model takes little more memory than its weights, from its files to the program that runs its forwards."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.support.models import VOCAB_SIZE, make_tokenizer, save_tiny_model

_PROCESS = """
    import sys
    from pathlib import Path

    from common.checkpoints.digest import compute_fingerprint
    from common.host.memory import keep_freed_memory
    from tests.support.loading import load_target

    def memory(field):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))

    def load(directory):
        target = load_target(Path(directory), device="cpu", dtype="bfloat16", fuses=True)
        compute_fingerprint(Path(directory), target, protocol_version=1, cache_dir=Path(cache_dir))
        program = target.new_decoder(lambda: None)
        return target, program

    tiny, model, cache_dir = sys.argv[1:]
    keep_freed_memory()
    kept = load(tiny)
    Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM to VmRSS
    before = memory("VmRSS")
    kept = load(model)
    print(memory("VmHWM") - before)
"""
_BESIDE = 48 << 20
"""Memory beside the weights: parts of files and of weights that are read or copied at a time, and operators' own."""


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux' /proc")
def test_loading_a_sharded_model_and_packing_it_takes_a_fifth_and_48_mib_more_than_its_weights(tmp_path: Path) -> None:
    tiny, large = save_tiny_model(tmp_path / "tiny", "llama"), tmp_path / "large"
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=768, intermediate_size=2048, num_hidden_layers=14, num_attention_heads=12
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    assert num_bytes > 190_000_000
    model.save_pretrained(str(large), max_shard_size="60MB")
    assert len(list(large.glob("*.safetensors"))) > 3
    make_tokenizer(VOCAB_SIZE).save_pretrained(str(large))
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_PROCESS), str(tiny), str(large), str(tmp_path / "cache")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(process.stdout) < 1.2 * num_bytes + _BESIDE
