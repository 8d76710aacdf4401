"""Runs a service of Baton as a child process of a Serve replica, and tells the services of one application where the
others listen.
"""

from __future__ import annotations

import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import structlog

from baton.client import Client
from baton.client.prefill import PrefillClient
from baton.errors import StartTimedOut
from baton.local_pair import MODULES
from baton.server_info import InferenceLoad
from baton.service_log import ServiceLog, serving_port
from baton.service_process import ProcessRole, ServiceProcess
from common.addresses import address_of
from common.host.replaced_file import replaced
from common.rpc.token_files import read_token_file

ANNOUNCEMENT_INTERVAL_S = 1.0
EXCHANGE_TIMEOUT_S = 5.0
"""How long a service waits for the directory's answer."""
SETTLING_S = EXCHANGE_TIMEOUT_S + ANNOUNCEMENT_INTERVAL_S + 1.0
"""How long a new directory lists nobody: until every service has given up on the directory before it, and has announced
itself here. An incomplete list would take services away from their callers.
"""
EXPIRY_S = 10.0
"""How long a service stays listed after it last announced itself."""
PROBE_TIMEOUT_S = 5.0
KILL_TIMEOUT_S = 10.0
_POLL_INTERVAL_S = 0.1
_FINDS: Mapping[ProcessRole, ProcessRole] = {"decode": "prefill", "gateway": "decode"}
"""The kind that each kind of service calls, and the name of its setting for their addresses."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Announcement:
    """A service tells the directory its `role`, the `name` of its replica, and the "HOST:PORT" that it listens on."""

    role: str
    name: str
    address: str


class Directory:
    """Lists the services that have announced themselves within the last `EXPIRY_S`.

    Services announce themselves every `ANNOUNCEMENT_INTERVAL_S`, so a directory that was started anew knows all of them
    after `SETTLING_S`. Until then it lists none, and callers keep those they found before.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s = clock()
        self._listed: dict[str, tuple[Announcement, float]] = {}

    def exchange(self, announcement: Announcement, wanted: str) -> tuple[str, ...]:
        """Lists the service, and returns the addresses of those whose role is `wanted`, in the order of their first
        announcements; none before `SETTLING_S`.
        """
        now_s = self._clock()
        self._listed[announcement.name] = (announcement, now_s)
        self._listed = {name: entry for name, entry in self._listed.items() if now_s - entry[1] < EXPIRY_S}
        if now_s - self._began_s < SETTLING_S:
            return ()
        return tuple(each.address for each, _ in self._listed.values() if each.role == wanted)


Exchange = Callable[[Announcement, str], Sequence[str]]
"""Asks the application's directory, see `Directory.exchange`. It blocks, for a bounded time, and may raise."""


class Service:
    """One service, which runs from `start` to `stop` and ends with this process.

    It listens on a free port of `host`. Its output goes to a file in `log_dir`. Every `exchange_interval_s` it is
    announced in the directory, and the directory's addresses of the services that it calls are written to another file
    in `log_dir`, which it reads as `file:///PATH`. It has `stop_timeout_s` to end by itself. If its callers need a
    token, `token_file` has the accepted tokens, of which health and load checks send the first. Raises ConfigError if
    that file is invalid.
    """

    def __init__(
        self,
        *,
        role: ProcessRole,
        name: str,
        host: str,
        flags: Sequence[str],
        log_dir: Path,
        exchange: Exchange,
        start_timeout_s: float,
        stop_timeout_s: float,
        token_file: Path | None = None,
        exchange_interval_s: float = ANNOUNCEMENT_INTERVAL_S,
        new_process: Callable[..., ServiceProcess] = ServiceProcess,
    ) -> None:
        self.role: ProcessRole = role
        self.name = name
        self._host = host
        self._exchange = exchange
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._exchange_interval_s = exchange_interval_s
        self._token = None if token_file is None else read_token_file("auth_token_file", token_file)[0][0]
        self._wanted = _FINDS.get(role)
        self._found = log_dir / f"baton-{role}-{name}.found"
        finds = [] if self._wanted is None else [f"--{self._wanted}=file://{self._found}"]
        self._process = new_process(
            role=role,
            name=f"{role}-{name}",
            address=address_of(host, 0),
            arguments=("-m", MODULES[role], *flags, f"--listen={address_of(host, 0)}", "--log-format=json", *finds),
            log_file=log_dir / f"baton-{role}-{name}.log",
        )
        self._words = ServiceLog(self._process.log_file)
        self._probe: Probe | None = None
        self._address = ""
        self._listed: tuple[str, ...] = ()
        self._is_failing = False
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"baton-{role}", daemon=True)

    @property
    def address(self) -> str:
        """The "HOST:PORT" that the service listens on."""
        assert self._address, "not started"
        return self._address

    def start(self) -> None:
        """Starts the service and waits until it answers. It may not be ready to serve yet.

        Raises ServiceDied if it ends instead, and StartTimedOut after `start_timeout_s`; then it has been stopped.
        """
        self._thread.start()
        try:
            self._process.start()
            self._wait_until_it_answers()
        except BaseException:
            self.stop()
            raise

    def check(self) -> None:
        """Raises an error if the service has ended or does not answer."""
        self._process.check()
        assert self._probe is not None, "not started"
        self._probe.check()

    def load(self) -> float:
        """Returns the load, as docs/ray.md defines it for each kind of service. Raises an error if none is reported."""
        assert self._probe is not None, "not started"
        return self._probe.load()

    def stop(self) -> None:
        """Lets the service finish its requests and end, within `stop_timeout_s`, and kills it after that.

        Further calls do nothing.
        """
        if self._is_stopping.is_set():
            return
        self._is_stopping.set()
        self._thread.join()
        if self._probe is not None:
            self._probe.close()
        self._found.unlink(missing_ok=True)

    def _wait_until_it_answers(self) -> None:
        deadline_s = time.monotonic() + self._start_timeout_s
        while True:
            self._process.check()
            port = serving_port(self._process.log_tail())
            if port is not None:
                break
            if time.monotonic() > deadline_s:
                raise StartTimedOut({self._process.name: ""}, self._start_timeout_s, self._process.log_file.parent)
            time.sleep(_POLL_INTERVAL_S)
        address = address_of(self._host, port)
        self._probe = _PROBES[self.role](address, self._token)
        self._probe.check()
        self._address = address

    def _run(self) -> None:
        while not self._is_stopping.wait(self._exchange_interval_s):
            try:
                self._log_words()
                if self._address:
                    self._ask_directory()
                self._is_failing = False
            except Exception as error:  # of Ray's, or a full disk: what was found stays, and the next time may succeed
                if not self._is_failing:
                    _log.warning("directory_fails", service=self._process.name, error=str(error))
                self._is_failing = True
        self._process.terminate()
        if not self._process.wait(self._stop_timeout_s):
            self._process.kill()
            self._process.wait(KILL_TIMEOUT_S)

    def _log_words(self) -> None:
        for words in self._words.new_words():
            _log.info("service_says", service=self._process.name, words=words)

    def _ask_directory(self) -> None:
        """Announces the service, and writes the addresses of those it calls to its file."""
        found = tuple(self._exchange(Announcement(self.role, self.name, self._address), self._wanted or ""))
        if found and found != self._listed:  # a directory that has just started lists nobody yet
            with replaced(self._found) as new:
                new.write_text("".join(f"{address}\n" for address in found))
            self._listed = found


class Probe(Protocol):
    """Asks one running service whether it answers, and for its load. Every call is bounded."""

    def check(self) -> None: ...

    def load(self) -> float: ...

    def close(self) -> None: ...


class _PrefillProbe:
    def __init__(self, address: str, token: str | None) -> None:
        self._client = PrefillClient(address, token=token, rpc_timeout_s=PROBE_TIMEOUT_S)

    def check(self) -> None:
        self._client.load()

    def load(self) -> float:
        """Returns the prompt tokens that are queued or being computed."""
        return float(self._client.load().num_uncomputed_tokens)

    def close(self) -> None:
        self._client.close()


class _DecodeProbe:
    def __init__(self, address: str, token: str | None) -> None:
        self._client = Client(address, token=token, rpc_timeout_s=PROBE_TIMEOUT_S)

    def check(self) -> None:
        self._client.health()

    def load(self) -> float:
        return decode_load(self._client.load())

    def close(self) -> None:
        self._client.close()


class _GatewayProbe:
    def __init__(self, address: str, token: str | None) -> None:
        self._url = f"http://{address}/health/live"
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def check(self) -> None:
        with self._opener.open(self._url, timeout=PROBE_TIMEOUT_S):
            pass

    def load(self) -> float:
        """Returns 0, because Serve itself counts the gateway's requests."""
        return 0.0

    def close(self) -> None:
        self._opener.close()


_PROBES: Mapping[ProcessRole, Callable[[str, str | None], Probe]] = {
    "prefill": _PrefillProbe,
    "decode": _DecodeProbe,
    "gateway": _GatewayProbe,
}


def decode_load(load: InferenceLoad) -> float:
    """Returns the share of the decode service that is in use: of its rows or of its KV slots, whichever is more, plus
    what the queued requests would add to its rows.
    """
    held = max(load.rows.held / load.rows.total, load.slots.held / load.slots.total)
    return held + load.num_queued / load.rows.total
