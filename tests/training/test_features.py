"""Tests of the target's hidden states on disk: their values, and when they are computed again."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from common.errors import ConfigError
from tests.training.cases import make_conversations, quiet
from training import features as module
from training.data import Conversations
from training.features import FeaturesKey, compute_features, features_key, is_complete, mark_complete, open_features
from training.target import FrozenTarget

_LAYERS = (2, 3, 5)


@pytest.fixture
def conversations() -> Conversations:
    random = np.random.default_rng(0)
    return make_conversations([random.integers(0, 200, size).tolist() for size in (9, 4, 17, 9)], [1, 1, 1, 1])


@pytest.fixture
def key(conversations: Conversations, target: FrozenTarget) -> FeaturesKey:
    return features_key(conversations, target, _LAYERS)


def test_they_are_the_streams_entering_the_layers_and_what_leaves_the_final_norm(
    tmp_path: Path, conversations: Conversations, key: FeaturesKey, target: FrozenTarget, target_dir: Path
) -> None:
    compute_features(tmp_path, key, conversations, target, quiet())
    features = open_features(tmp_path, key)
    model = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.bfloat16)
    entering: dict[int, Tensor] = {}
    for layer in _LAYERS:
        model.model.layers[layer].register_forward_pre_hook(
            lambda _, args, layer=layer: entering.__setitem__(layer, args[0])
        )
    for start, stop in zip(conversations.offsets[:-1], conversations.offsets[1:], strict=True):
        with torch.no_grad():
            final = model.model(torch.from_numpy(conversations.tokens[None, start:stop])).last_hidden_state[0]
            logits = model.lm_head(final)
        expected = torch.cat([entering[layer][0] for layer in _LAYERS], dim=-1)
        _assert_near(features.aux[start:stop], expected)
        _assert_near(features.final[start:stop], final)
        best = torch.from_numpy(features.argmax[start:stop]).long()
        assert bool((logits.gather(1, best[:, None])[:, 0] >= logits.max(-1).values - 0.5).all())


def _assert_near(bits: np.ndarray, states: Tensor) -> None:
    """Asserts that the stored states are close to `states`. Rounding to bfloat16 differs between a batch and a single
    conversation, but the states of other layers are far away.
    """
    stored = torch.from_numpy(bits).view(torch.bfloat16).float()
    for ours, theirs in zip(stored.split(64, dim=-1), states.float().split(64, dim=-1), strict=True):
        assert (ours - theirs).norm() < 0.05 * theirs.norm()


def test_an_interrupted_computation_is_done_anew(
    tmp_path: Path, conversations: Conversations, key: FeaturesKey, target: FrozenTarget
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    hook = target.model.model.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        compute_features(tmp_path, key, conversations, target, quiet())
    hook.remove()
    assert not is_complete(tmp_path, key)
    compute_features(tmp_path, key, conversations, target, quiet())
    assert is_complete(tmp_path, key)
    assert open_features(tmp_path, key).aux.any(axis=1).all()


def test_files_that_are_links_to_others_are_not_written_to(
    tmp_path: Path, conversations: Conversations, key: FeaturesKey, target: FrozenTarget
) -> None:
    original, linked = tmp_path / "original.bin", tmp_path / "features" / "aux.bin"
    original.write_bytes(b"precious")
    linked.parent.mkdir()
    os.link(original, linked)
    compute_features(linked.parent, key, conversations, target, quiet())
    assert original.read_bytes() == b"precious"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": [2, 3, 4]}, r"has layers \[2, 3, 4\], this run \[2, 3, 5\]"),
        ({"data_digest": "other"}, "has data_digest other, this run"),
        ({"target_digest": "other"}, "has target_digest other, this run"),
    ],
)
def test_those_of_something_else_are_refused(
    tmp_path: Path,
    conversations: Conversations,
    key: FeaturesKey,
    target: FrozenTarget,
    changes: dict[str, object],
    message: str,
) -> None:
    compute_features(tmp_path, key, conversations, target, quiet())
    (tmp_path / "complete.json").write_text(module.json.dumps({**key.as_json(), **changes}))
    with pytest.raises(ConfigError, match=message):
        is_complete(tmp_path, key)


def test_a_file_of_another_size_is_neither_marked_nor_read(
    tmp_path: Path, conversations: Conversations, key: FeaturesKey, target: FrozenTarget
) -> None:
    compute_features(tmp_path, key, conversations, target, quiet())
    with (tmp_path / "final.bin").open("ab") as file:
        file.write(b"more")
    for act in (mark_complete, is_complete):
        with pytest.raises(ConfigError, match=r"final\.bin is not a file of \d+ bytes"):
            act(tmp_path, key)
    (tmp_path / "complete.json").write_text("{")
    with pytest.raises(ConfigError, match=r"complete\.json"):
        is_complete(tmp_path, key)
