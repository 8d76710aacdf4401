"""One draft head for each format and variant. The contract tests run with all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.draft.reference import ReferenceEagle1, ReferenceEagle3, ReferenceHead, ReferenceMtp
from tests.support.draft_heads import save_eagle1_head, save_eagle3_head, save_mtp_head


@dataclass(frozen=True)
class Case:
    name: str
    save: Callable[..., Path]
    reference: type[ReferenceHead]
    num_layers: int = 1
    algorithm: str = "eagle3"
    num_states: int = 3

    def __str__(self) -> str:
        return self.name


def _eagle3(name: str, **options: Any) -> Case:
    return Case(f"eagle3-{name}", partial(save_eagle3_head, **options), ReferenceEagle3)


def _eagle1(name: str, **options: Any) -> Case:
    return Case(f"eagle-{name}", partial(save_eagle1_head, **options), ReferenceEagle1, algorithm="eagle", num_states=1)


def _mtp(name: str, num_layers: int = 1, **options: Any) -> Case:
    save = partial(save_mtp_head, num_layers=num_layers, **options)
    return Case(f"mtp-{name}", save, ReferenceMtp, num_layers=num_layers, algorithm="mtp", num_states=1)


CASES = [
    _eagle3("midlayer"),
    _eagle3("layers", style="layers"),
    _eagle3("sglang", style="sglang"),
    _eagle3("speculators", style="speculators", own_embedding=True),
    _eagle3("norm-before-fc", norm_before_fc=True),
    _eagle3("fc-norm", fc_norm=True),
    _eagle3("norm-output", norm_output=True),
    _eagle3("norm-before-residual", norm_before_residual=True),
    _eagle3("all-norms", norm_before_fc=True, fc_norm=True, norm_output=True, norm_before_residual=True),
    _eagle3("narrow", hidden_size=32, own_embedding=True),
    _eagle3("wide", hidden_size=96, own_embedding=True, style="speculators"),
    _eagle3("full-vocabulary", draft_vocab_size=None),
    _eagle3("target-lm-head", draft_vocab_size=None, own_lm_head=False),
    _eagle3("tied-lm-head", draft_vocab_size=None, own_lm_head=False, own_embedding=True, tie_word_embeddings=True),
    _eagle3("qkv-bias", qkv_bias=True),
    _eagle1("plain"),
    _eagle1("no-bias", fc_bias=False),
    _eagle1("target-embedding", own_embedding=False),
    _eagle1("qwen2", qkv_bias=True),
    _mtp("nextn", layout="nextn"),
    _mtp("nextn-own-tables", layout="nextn", own_embedding=True, own_output_head=True),
    _mtp("nextn-three-layers", num_layers=3, layout="nextn"),
    _mtp("step-two-layers", num_layers=2, layout="nextn", step_spelling=True, own_output_head=True),
    _mtp("with-its-target", num_layers=2, layout="nextn", with_target=True),
    _mtp("mimo", layout="mimo", qkv_bias=True),
    _mtp("mimo-with-its-target", layout="mimo", with_target=True),
    _mtp("mimo-v2", num_layers=3, layout="mimo_v2"),
]
BY_NAME = {case.name: case for case in CASES}
