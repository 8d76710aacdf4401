"""Takes docs/status-page.png: a picture of the status page while a pair is under load, with Debian's chromium.

Two prefill services and a decode service serve the demo model with its draft head. After the picture it prints the
page's figures (/status.json) and the metrics of each service, so that one can compare them with the picture.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2

from baton.client import AsyncClient
from baton.load_generator import Workload, run_workload
from baton.local_pair import LocalPair
from common.text.chat_messages import ChatMessage
from gateway.status.collector import INTERVAL_S

PICTURE = Path(__file__).parents[1] / "docs" / "status-page.png"
SHARED_ARGS = ("--draft=demo", "--max-rows=16", "--max-kv-tokens=8192")
NUM_ASKERS = 6
QUESTIONS = (
    "Explain in detail why the sky is blue.",
    "Write a short story about a lighthouse.",
    "List ten facts about whales, each in one sentence.",
    "Explain how a bicycle stays upright.",
)
WRONG = {"model": "another", "messages": [{"role": "user", "content": "Hello"}]}
"""A chat that the gateway refuses, so that the picture has an error."""
LONG_PROMPTS = Workload(concurrency=4, num_requests=1000, num_prompt_tokens=1000, num_new_tokens=4)
BROWSER_TIMEOUT_S = 60.0
BROWSED_MS = 6000
"""How long the browser shows the page before it takes the picture, in milliseconds of its virtual time."""


@dataclass(frozen=True, slots=True)
class Served:
    decode: str
    metrics: tuple[str, ...]
    page: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="under load, before the picture")
    parser.add_argument("--more", type=Path, metavar="DIRECTORY", help="a dark and a narrow picture too, into here")
    args = parser.parse_args()
    pictures: list[tuple[Path, str, tuple[str, ...]]] = [(PICTURE, "1100,1670", ())]
    if args.more:
        pictures += [
            (args.more / "dark.png", "1024,1670", ("--blink-settings=preferredColorScheme=0",)),
            (args.more / "narrow.png", "500,3150", ()),
        ]
    with serve_pair() as served:
        asyncio.run(photograph(served, args.seconds, pictures))


@contextmanager
def serve_pair() -> Iterator[Served]:
    """Runs two prefill services, a decode service and the gateway, each as a process of its own."""
    with LocalPair(
        num_prefill=2, prefill_args=SHARED_ARGS, decode_args=SHARED_ARGS, gateway_listen="127.0.0.1:0"
    ) as pair:
        yield Served(pair.decode_addresses[0], pair.metrics_addresses, f"{pair.gateway_url}/")


async def photograph(served: Served, seconds: float, pictures: list[tuple[Path, str, tuple[str, ...]]]) -> None:
    async with AsyncClient(served.decode) as client, httpx2.AsyncClient() as viewer:
        vocab_size = (await client.model_info()).vocab_size
        async with asyncio.TaskGroup() as group:
            background = [
                group.create_task(run_workload([client], LONG_PROMPTS, vocab_size=vocab_size)),
                *(group.create_task(ask(client, first)) for first in range(NUM_ASKERS)),
                group.create_task(look(viewer, served.page)),
            ]
            async with asyncio.timeout(seconds + len(pictures) * BROWSER_TIMEOUT_S):
                await viewer.post(f"{served.page}v1/chat/completions", json=WRONG)
                await asyncio.sleep(seconds)
                for path, size, flags in pictures:
                    await browse(served.page, path, size, flags)
                await compare(viewer, served)
            for task in background:
                task.cancel()


async def ask(client: AsyncClient, first: int) -> None:
    for question in itertools.islice(itertools.cycle(QUESTIONS), first, None):
        await client.complete(chat=[ChatMessage("user", question)], max_tokens=128, temperature=0.0)


async def look(viewer: httpx2.AsyncClient, url: str) -> None:
    """Polls the figures as an open page does, so that they cover a full time window when the browser opens the page."""
    while True:
        await viewer.get(f"{url}status.json")
        await asyncio.sleep(INTERVAL_S)


async def browse(url: str, path: Path, size: str, flags: tuple[str, ...]) -> None:
    with tempfile.TemporaryDirectory() as profile:
        browser = await asyncio.create_subprocess_exec(
            shutil.which("chromium") or "chromium",
            "--headless",
            "--no-sandbox",
            "--hide-scrollbars",
            f"--user-data-dir={profile}",
            f"--virtual-time-budget={BROWSED_MS}",
            f"--window-size={size}",
            f"--screenshot={path}",
            *flags,
            url,
        )
        try:
            async with asyncio.timeout(BROWSER_TIMEOUT_S):
                await browser.wait()
        finally:
            if browser.returncode is None:
                browser.kill()
                await browser.wait()


async def compare(viewer: httpx2.AsyncClient, served: Served) -> None:
    print(json.dumps((await viewer.get(f"{served.page}status.json")).json(), indent=1))
    for address in served.metrics:
        print(f"# {address}", (await viewer.get(f"http://{address}/metrics")).text, sep="\n")


if __name__ == "__main__":
    main()
