"""Draws many outputs under the schemas of this folder, or under those of a checkout of the JSON Schema Test Suite.
Prints how many schemas were served, which were refused for what reason, and every output or instance that contradicts
jsonschema.

python -m tests.grammars [--walks 200] [--suite .../tests/draft2020-12]
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from common.checkpoints.demo_model import ensure_demo_model
from common.text.tokenizer import TextTokenizer
from tests.grammars.schema_cases import CASES, Case
from tests.grammars.schema_checks import SchemaChecks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--walks", type=int, default=200, help="a schema")
    parser.add_argument("--tokens", type=int, default=300, help="the most of a walk")
    parser.add_argument("--suite", type=Path, help="a directory of JSON files of the JSON Schema Test Suite")
    options = parser.parse_args()
    tokenizer = TextTokenizer.from_directory(ensure_demo_model())
    checks = SchemaChecks(tokenizer, vocab_size=49_152, eos_token_ids=[2])
    wrong, reasons, instances = 0, Counter[str](), Counter[str]()
    for case in _suite(options.suite) if options.suite else CASES:
        if reason := checks.refusal(case.schema):
            reasons[re.sub(r"\s+", " ", reason)[:60]] += 1
            continue
        for instance in case.valid:
            instances["valid, allowed" if checks.accepts(case.schema, instance) else "valid, forbidden"] += 1
        for instance in case.invalid:
            if checks.accepts(case.schema, instance):
                wrong += 1
                print(f"{case}: allows {json.dumps(instance)}", flush=True)
        if not case.is_drawn:
            continue
        try:
            for output in checks.wrong_outputs(case.schema, num_walks=options.walks, max_tokens=options.tokens):
                wrong += 1
                print(f"{case}: {output}", flush=True)
        except re.error as error:  # Python cannot read the pattern, so jsonschema cannot check outputs
            print(f"{case}: not checked: {error}", flush=True)
    for reason, count in reasons.most_common():
        print(f"refused {count:4} {reason}")
    print(f"{dict(checks.counts)} {dict(instances)} wrong {wrong}")
    return 1 if wrong else 0


def _suite(directory: Path) -> Iterator[Case]:
    for path in sorted(directory.rglob("*.json")):
        for group in json.loads(path.read_text()):
            tests = group["tests"]
            yield Case(
                f"{path.stem}: {group['description']}",
                group["schema"],
                [test["data"] for test in tests if test["valid"]],
                [test["data"] for test in tests if not test["valid"]],
            )


if __name__ == "__main__":
    sys.exit(main())
