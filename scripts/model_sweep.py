"""Checks for every causal architecture of transformers that Baton computes the same as transformers or refuses it.

    python -m scripts.model_sweep                  all, as a Markdown table
    python -m scripts.model_sweep llama mbart      only these

Each architecture is built small, with random weights, in two variants: with its own defaults, and plain, with features
that Baton does not serve switched off where its config can. Each variant is saved, loaded as a service does, and run
through the KV pool: two prompts together, in chunks of which some begin in the middle of a prompt, then token by token.
Logits are compared with those of transformers' own forward over the whole sequence, and greedy tokens likewise. The
exit status is 1 if a variant computes something else, or fails after it was loaded.
"""

from __future__ import annotations

import argparse
import inspect
import multiprocessing
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from baton_cpu.compiler.kernel_cache import keep_kernels
from common.checkpoints.cache import kernels_cache_dir
from common.errors import StartupError, UnsupportedModel
from common.model.model_files import one_line
from common.model.traits import check_config
from tests.model.paged_model import PagedModel
from tests.support.loading import load_target

EQUAL, REFUSED, NOT_BUILT, WRONG, FAILS = "equal", "refused", "could not be built", "wrong", "ready and failing"
_TIMEOUT_S = 90.0
_PROMPT_LEN, _CHUNK, _NUM_DECODED = 40, 16, 6
_TOLERANCE = 2e-3  # relative to the norm of the logits, in float32

_SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "head_dim": 16,
    "kv_channels": 16,
    "decoder_layers": 2,
    "encoder_layers": 2,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_ffn_dim": 96,
    "encoder_ffn_dim": 96,
    "ffn_dim": 96,
    "ffn_hidden_size": 96,
    "n_inner": 96,
    "word_embed_proj_dim": 64,
    "embedding_size": 64,
    "rotary_dim": 8,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "moe_top_k": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "qk_head_dim": 32,
    "v_head_dim": 16,
    "mamba_d_state": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "state_size": 8,
    "attention_hidden_size": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 320,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "dtype": None,
}
_PLAIN: dict[str, Any] = {
    "is_decoder": True,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "use_cache": True,
    "sliding_window": None,
    "use_sliding_window": False,
    "attention_chunk_size": None,
    "attn_logit_softcapping": None,
    "alibi": False,
    "layer_types": ["full_attention", "full_attention"],
    "no_rope_layers": None,
}


@dataclass(frozen=True, slots=True)
class Outcome:
    kind: str
    why: str = ""


def _configs(model_type: str) -> dict[str, dict[str, Any]]:
    """Returns small configs of this architecture by variant: with its own features, and plain."""
    defaults = transformers.CONFIG_MAPPING[model_type]()
    defaults.allow_global_per_layer_attribute_access = True  # else asking for a field that differs between layers fails
    derived = {name for name, member in inspect.getmembers(type(defaults)) if isinstance(member, property)}
    has = [name for name in (*_SMALL, *_PLAIN) if name not in derived and hasattr(defaults, name)]
    small = {name: _SMALL[name] for name in has if name in _SMALL}
    if "kv_lora_rank" in small:
        small["num_key_value_heads"] = small["num_attention_heads"]
    if "layer_types" in has and defaults.layer_types:
        small["layer_types"] = (list(defaults.layer_types) * 2)[:2]
    return {"as it is": small, "plain": {**small, **{name: _PLAIN[name] for name in has if name in _PLAIN}}}


def _config(model_type: str, fields: dict[str, Any]) -> Any:
    """Builds a config from `fields`. An architecture that rejects `sliding_window=None` keeps its default window."""
    kind = transformers.CONFIG_MAPPING[model_type]
    try:
        return kind(**fields)
    except Exception:
        if fields.get("sliding_window", 1) is not None:
            raise
        return kind(**{name: value for name, value in fields.items() if name != "sliding_window"})


def _save(config: Any, directory: Path) -> None:
    """Saves a model with random weights, large enough that a wrong position or a lost token shows in the logits."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            if "norm" in name.lower() and parameter.dim() == 1:
                parameter.copy_((1.0 if name.endswith("weight") else 0.0) + 0.1 * noise)
            elif parameter.dim() < 2:
                parameter.copy_(0.1 * noise)
            else:
                parameter.copy_(noise * 1.5 * parameter.shape[-1] ** -0.5)
    model.save_pretrained(str(directory))


def _try(model_type: str, fields: dict[str, Any], directory: Path) -> Outcome:
    try:
        config = _config(model_type, fields)
        check_config(config, name=model_type)
        _save(config, directory)
        reference = transformers.AutoModelForCausalLM.from_pretrained(
            str(directory), dtype=torch.float32, trust_remote_code=False
        ).eval()
        prompts = [_tokens(seed, reference.config.vocab_size) for seed in (0, 1)]
        expected = [_greedy(reference, prompt) for prompt in prompts]
    except UnsupportedModel as error:
        return Outcome(REFUSED, str(error).removeprefix(f"{model_type}: "))
    except Exception as error:
        return Outcome(NOT_BUILT, one_line(error))
    try:
        target = load_target(directory, device="cpu", dtype="float32")
    except StartupError as error:
        return Outcome(REFUSED, str(error).removeprefix(f"{directory.name}: "))
    try:
        return _compare(PagedModel(target, num_rows=2), prompts, expected)
    except Exception as error:
        return Outcome(FAILS, one_line(error))


def _tokens(seed: int, vocab_size: int) -> list[int]:
    drawn = torch.randint(3, vocab_size, (_PROMPT_LEN,), generator=torch.Generator().manual_seed(seed))
    return [int(token_id) for token_id in drawn]


@torch.inference_mode()
def _greedy(model: Any, prompt: Sequence[int]) -> tuple[list[int], Tensor]:
    """Decodes greedily, without a KV cache. Returns the tokens, and their logits [_NUM_DECODED, vocab]."""
    tokens, rows = list(prompt), []
    for _ in range(_NUM_DECODED):
        rows.append(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].float())
        tokens.append(int(rows[-1].argmax()))
    return tokens[len(prompt) :], torch.stack(rows)


def _compare(paged: PagedModel, prompts: list[list[int]], expected: list[tuple[list[int], Tensor]]) -> Outcome:
    """Runs the prompts through the KV pool, and compares logits and tokens with the expected ones.

    The second prompt begins after the first one's first chunk, so that the rows of a forward are at different
    positions.
    """
    chunks = [prompts[0][:_CHUNK], prompts[0][_CHUNK:-1], prompts[0][-1:]]
    paged.extend({1: chunks[0]})
    paged.extend({1: chunks[1], 2: prompts[1][:7]})
    last = paged.extend({2: prompts[1][7:], 1: chunks[2]})
    logits = {2: [last[0]], 1: [last[1]]}
    for step in range(_NUM_DECODED - 1):
        row_logits = paged.decode({row: expected[row - 1][0][step] for row in (1, 2)})
        for index, row in enumerate((1, 2)):
            logits[row].append(row_logits[index])
    for row in (1, 2):
        tokens, wanted = expected[row - 1]
        seen = torch.stack(logits[row])
        apart = float((seen - wanted).norm() / wanted.norm())
        if not apart <= _TOLERANCE:
            return Outcome(WRONG, f"logits differ by {apart:.2g} of their size")
        if seen.argmax(dim=-1).tolist() != tokens and apart > _TOLERANCE / 100:
            return Outcome(WRONG, "other tokens")
    return Outcome(EQUAL)


def _in_child(model_type: str, answers: Connection) -> None:
    with tempfile.TemporaryDirectory(prefix="sweep-") as scratch:
        try:
            made_with = _configs(model_type)
        except Exception as error:
            made_with = {}
            answers.send(("as it is", Outcome(NOT_BUILT, one_line(error))))
        for variant, fields in made_with.items():
            directory = Path(scratch) / variant.replace(" ", "-") / model_type
            directory.mkdir(parents=True)
            answers.send((variant, _try(model_type, fields, directory)))


def sweep(model_type: str) -> dict[str, Outcome]:
    """Tests one architecture and returns the outcome of each variant.

    It runs in a process of its own, because some architectures crash and some take all memory.
    """
    context = multiprocessing.get_context("fork")
    answers, ours = context.Pipe(duplex=False)
    child = context.Process(target=_in_child, args=(model_type, ours))
    child.start()
    ours.close()
    outcomes: dict[str, Outcome] = {}
    try:
        while answers.poll(_TIMEOUT_S):
            variant, outcome = answers.recv()
            outcomes[variant] = outcome
        outcomes.setdefault("as it is", Outcome(NOT_BUILT, f"not within {_TIMEOUT_S:g} s"))
    except EOFError:
        outcomes.setdefault("as it is", Outcome(NOT_BUILT, "its process crashed"))
    finally:
        child.kill()
        child.join()
    return outcomes


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_types", nargs="*", help="all, unless named")
    wanted = parser.parse_args(argv).model_types or list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity(50)
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    keep_kernels(kernels_cache_dir())
    counts: Counter[str] = Counter()
    print("| type | as it is | plain |\n|---|---|---|", flush=True)
    for model_type in wanted:
        outcomes = sweep(model_type)
        counts[_best(outcomes)] += 1
        cells = [f"{each.kind}{': ' if each.why else ''}{each.why}" for each in outcomes.values()]
        print(f"| {model_type} | {' | '.join(cells)} |", flush=True)
    counted = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
    print(f"\n{counted}; transformers {transformers.__version__}")
    return 1 if counts[WRONG] or counts[FAILS] else 0


def _best(outcomes: dict[str, Outcome]) -> str:
    """Returns one outcome for both variants: a fault if there is one, else the better result."""
    kinds = {outcome.kind for outcome in outcomes.values()}
    return next(kind for kind in (WRONG, FAILS, EQUAL, REFUSED, NOT_BUILT) if kind in kinds)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
