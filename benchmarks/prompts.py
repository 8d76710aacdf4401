"""Text prompts: the project's own, and outside ones, which are not part of the repository."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from tests.parity.prompts import PROMPTS

OUTSIDE_TURNS = tuple(Path(f"../shared/prompts/{name}.jsonl") for name in ("mt_bench", "humaneval"))
"""Files of outside prompts: JSON lines, each with a list `turns`."""

Prompts = list[list[int]]


def first_turns(path: Path, max_turns: int | None = None) -> list[str]:
    return [json.loads(line)["turns"][0] for line in path.read_text().splitlines()][:max_turns]


class ChatTokens:
    """Turns texts into token ids for the model at `model_dir`."""

    def __init__(self, model_dir: Path) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model_dir, trust_remote_code=False)

    def of_chat(self, text: str) -> list[int]:
        """Returns the tokens of a chat whose first user message is `text` and in which the model is to answer next."""
        messages = [{"role": "user", "content": text}]
        return list(self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))

    def of_text(self, text: str) -> list[int]:
        return list(self._tokenizer(text)["input_ids"])

    def of_chats(self, texts: Sequence[str]) -> Prompts:
        return [self.of_chat(text) for text in texts]

    def of_project(self) -> Prompts:
        """Returns the tokens of each of the project's own prompts, without the long ones."""
        short = [prompt for prompt in PROMPTS if not prompt.name.startswith("long")]
        return [self.of_chat(prompt.text) if prompt.is_chat else self.of_text(prompt.text) for prompt in short]
