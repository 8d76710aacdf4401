"""Shows one request's trace as a collector receives it, and checks that the times add up.

    python -m benchmarks.trace_of_request

The trace has every span of caller, decode service and prefill service.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial

from baton.client import Client
from baton.local_pair import LocalPair
from benchmarks.benchmark_run import BenchmarkRun
from common.config.settings import GatewaySettings
from common.telemetry.tracing import process_tracer
from tests.support.otlp_receiver import OtlpReceiver, ReceivedSpan, children_of, otlp_receiver

LIMIT = 0.05
"""The largest permitted difference between the sum of a request's stages and its whole time, as a share of that time.
"""
STAGES = ("tokenize", "queue", "prefill", "transfer", "bootstrap", "first_decode", "decode", "delivery")
SHOWN = ("baton.token_start", "baton.token_stop", "baton.kv_bytes", "gen_ai.usage.output_tokens", "baton.replica")
WARM_UP_TOKENS = 8


def trace_one(receiver: OtlpReceiver, *, prompt_tokens: int, new_tokens: int, chunk_tokens: int) -> None:
    """Sends one request from a caller that has its own span, after a warm-up. Returns once all spans have been
    exported.
    """
    traced = f"--otlp-endpoint={receiver.endpoint}"
    settings = GatewaySettings(otlp_endpoint=receiver.endpoint)
    with (
        process_tracer(settings, service="caller", instance_id="benchmark") as tracer,
        LocalPair(
            draft="none",
            prefill_args=(traced, f"--chunk-tokens={chunk_tokens}"),
            decode_args=(traced, "--local-prefill-tokens=0"),
        ) as pair,
        Client(pair.decode_addresses[0]) as client,
    ):
        prompt = [1000 + place % 5000 for place in range(prompt_tokens)]
        complete = partial(
            client.complete, token_ids=prompt, temperature=1.0, top_p=1.0, ignore_eos=True, cache_prompt=False
        )
        complete(max_tokens=WARM_UP_TOKENS)
        with tracer.start_as_current_span("request"):
            complete(max_tokens=new_tokens, request_id="traced")


def lines_of(span: ReceivedSpan, spans: Sequence[ReceivedSpan], start_ns: int, depth: int = 0) -> Iterator[str]:
    """Yields table rows for a span and all spans below it."""
    about = ", ".join(f"{name.rpartition('.')[2]}={span.attributes[name]}" for name in SHOWN if name in span.attributes)
    indent = "&nbsp;" * 4 * depth
    start_ms, ms = (span.start_ns - start_ns) / 1e6, span.seconds * 1e3
    yield f"| {indent}`{span.name}` | {span.service} | {start_ms:.2f} | {ms:.2f} | {about} |"
    for child in sorted(children_of(span, spans), key=lambda child: (child.start_ns, child.end_ns)):
        yield from lines_of(child, spans, start_ns, depth + 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt-tokens", type=int, default=2000)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--no-save", action="store_true", help="print only")
    args = parser.parse_args()
    with otlp_receiver() as receiver:
        trace_one(
            receiver,
            prompt_tokens=args.prompt_tokens,
            new_tokens=args.new_tokens,
            chunk_tokens=args.chunk_tokens,
        )
        (root,) = [span for span in receiver.spans if span.name == "request"]
        spans = [span for span in receiver.spans if span.trace_id == root.trace_id]
    (generate,) = [span for span in spans if span.name == "Generate"]
    sum_s = sum(span.seconds for span in children_of(generate, spans) if span.name in STAGES)
    off = {name: abs(sum_s / whole.seconds - 1) for name, whole in (("Generate", generate), ("request", root))}
    run = BenchmarkRun.of("trace_of_request")
    table = "\n".join(
        [
            *run.heading(
                "The trace of one request",
                f"the demo model, {args.prompt_tokens} prompt tokens in chunks of {args.chunk_tokens}, "
                f"{args.new_tokens} new ones; times in ms, of a warm pair's request, as a collector received them.",
            ),
            "",
            "| span | service | start | duration | |",
            "|---|---|---|---|---|",
            *lines_of(root, spans, root.start_ns),
            "",
            f"{len(spans)} spans, one trace. The stages ({', '.join(STAGES)}) add up to {sum_s * 1e3:.2f} ms: "
            + " and ".join(
                f"{share:.2%} off `{name}`'s {whole.seconds * 1e3:.2f} ms"
                for (name, share), whole in zip(off.items(), (generate, root), strict=True)
            )
            + ".",
        ]
    )
    print(table)
    if not args.no_save:
        run.save("trace-of-request", table)
    return 1 if max(off.values()) > LIMIT else 0


if __name__ == "__main__":
    sys.exit(main())
