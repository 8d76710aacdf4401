"""The command-line options that several commands share."""

from __future__ import annotations

import functools
import inspect
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from baton.cli.output import text_console
from baton.client import Client, Tls
from baton.errors import BatonError, Unavailable, Unimplemented
from baton.free_ports import LOOPBACK
from baton.requests import SamplingOptions
from baton.running_pairs import running_pairs
from common.addresses import is_listened_on
from common.errors import ConfigError
from common.rpc.token_files import is_open_to_others, read_token_file
from common.sampling.params import NUMBER_OPTIONS

LOADING_S = 60.0
_LOADING_LOOK_S = 0.2
_NOT_SERVED = "NOT_SERVED"
_TOKEN_FILE = "--token-file"
DEFAULT_ADDRESS = "127.0.0.1:50051"

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")]
Address = Annotated[
    str | None,
    typer.Option(
        "--address",
        "-a",
        envvar="BATON_ADDRESS",
        help="HOST:PORT of the decode service, or of several with commas. The pair that `baton up` runs here, else "
        f"{DEFAULT_ADDRESS}.",
    ),
]
ServiceAddress = Annotated[
    str,
    typer.Option("--address", "-a", envvar="BATON_ADDRESS", help="HOST:PORT of the service, whichever kind it is."),
]
ServiceAddresses = Annotated[
    list[str],
    typer.Option("--address", "-a", help="HOST:PORT of services of either kind, with commas; repeatable."),
]

_TLS = "Connection"
TokenFile = Annotated[
    Path | None,
    typer.Option(
        envvar="BATON_TOKEN_FILE", help="File with the token to show, on its first line.", rich_help_panel=_TLS
    ),
]
OtherTokenFile = Annotated[
    Path | None,
    typer.Option(help="File with the token to show where that one is refused.", rich_help_panel=_TLS),
]

_SAMPLING = "Sampling"


def _option(*names: str, help: str, default: object, **more: Any) -> Any:
    """Declares a sampling option, which is sent only if the user gives it.

    `default` is shown in the help text: it names the value that the server uses otherwise.
    """
    return typer.Option(*names, help=help, rich_help_panel=_SAMPLING, show_default=str(default), **more)


SAMPLING: Mapping[str, Any] = {
    **{
        name: Annotated[option.kind | None, _option(help=option.help, default=option.default_text)]
        for name, option in NUMBER_OPTIONS.items()
    },
    "seed": Annotated[int | None, _option(help="The same seed draws the same tokens.", default="random")],
    "max_tokens": Annotated[int | None, _option(help="Tokens of output, at most.", default="what the context leaves")],
    "stop": Annotated[list[str] | None, _option(help="Text that ends the output; repeatable.", default="none")],
    "stop_token_ids": Annotated[
        list[int] | None, _option("--stop-token-id", help="Token that ends the output; repeatable.", default="none")
    ],
    "speculate": Annotated[
        bool | None,
        _option("--speculate/--no-speculate", help="Use the draft head.", default="speculate, where there is a head"),
    ],
    "ignore_eos": Annotated[
        bool | None, _option("--ignore-eos", help="Go on after the model's end tokens.", default="end there")
    ],
    "logit_bias": Annotated[
        list[str] | None, _option(metavar="ID=VALUE", help="Added to a token's logit; repeatable.", default="none")
    ],
    "logprobs": Annotated[
        int | None,
        _option(help="Report log-probabilities and this many alternatives, with --json.", default="none"),
    ],
    "prompt_logprobs": Annotated[
        int | None, _option(help="The same for the tokens of the prompt, with --json.", default="none")
    ],
}
"""The command-line option for each sampling option, by the sampling option's name."""

TLS: Mapping[str, Any] = {
    "use_tls": Annotated[bool | None, typer.Option("--tls", help="Use TLS.", rich_help_panel=_TLS)],
    "ca_file": Annotated[Path | None, typer.Option(help="Trust these roots (PEM).", rich_help_panel=_TLS)],
    "cert_file": Annotated[Path | None, typer.Option(help="Certificate for mutual TLS (PEM).", rich_help_panel=_TLS)],
    "key_file": Annotated[Path | None, typer.Option(help="Key of --cert-file (PEM).", rich_help_panel=_TLS)],
    "server_name": Annotated[str | None, typer.Option(help="Name in the server's certificate.", rich_help_panel=_TLS)],
}
"""The command-line options of a connection over TLS."""


def _tls(*, use_tls: bool | None, **files: Any) -> Tls | None:
    """Returns the TLS settings, or None for a plain connection. Giving any of them turns TLS on."""
    return Tls(**files) if use_tls or any(files.values()) else None


def _logit_bias(entries: list[str] | None) -> dict[int, float] | None:
    if not entries:
        return None
    biases: dict[int, float] = {}
    for entry in entries:
        token_id, _, value = entry.partition("=")
        try:
            biases[int(token_id)] = float(value)
        except ValueError:
            raise typer.BadParameter(f"{entry[:64]!r} is not ID=VALUE", param_hint="--logit-bias") from None
    return biases


def _sampling(**given: Any) -> SamplingOptions:
    return SamplingOptions(**{**given, "logit_bias": _logit_bias(given["logit_bias"])})  # type: ignore[typeddict-item]


_GROUPS: Mapping[str, tuple[Mapping[str, Any], Callable[..., Any]]] = {
    "tls": (TLS, _tls),
    "sampling": (SAMPLING, _sampling),
}
"""The arguments of commands for which several flags stand, with these and what makes the argument of their values."""


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Returns `command` with flags in the place of its arguments `tls` and `sampling`."""
    own = inspect.signature(command, eval_str=True).parameters
    groups = {name: _GROUPS[name] for name in own if name in _GROUPS}

    @functools.wraps(command)
    def run(**values: Any) -> None:
        for name, (flags, made_of) in groups.items():
            values[name] = made_of(**{flag: values.pop(flag) for flag in flags})
        command(**values)

    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters: list[inspect.Parameter] = []
    for name, parameter in own.items():
        flags = groups[name][0] if name in groups else {}
        parameters += [inspect.Parameter(flag, keyword, default=None, annotation=kind) for flag, kind in flags.items()]
        if name not in groups:
            parameters.append(parameter.replace(kind=keyword))
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    del run.__wrapped__
    return run


_PAIR = "Services"
Model = Annotated[str, typer.Option(help='"demo", a directory, a hub id or a GGUF file.', rich_help_panel=_PAIR)]
Draft = Annotated[
    str | None,
    typer.Option(
        help='Draft head of both kinds of service: "demo", a directory or a hub id; "none" for no drafts. The demo '
        "model's own where none is named.",
        rich_help_panel=_PAIR,
    ),
]
NumPrefill = Annotated[int, typer.Option("--prefill", min=1, help="Prefill processes.", rich_help_panel=_PAIR)]
NumDecode = Annotated[int, typer.Option("--decode", min=1, help="Decode processes.", rich_help_panel=_PAIR)]
Device = Annotated[str | None, typer.Option(help="cpu or cuda.", rich_help_panel=_PAIR)]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.", rich_help_panel=_PAIR)]
PrefillArgs = Annotated[
    list[str] | None,
    typer.Option("--prefill-arg", help="Passed to prefill services, as --prefill-arg=--flag=value; repeatable."),
]
DecodeArgs = Annotated[
    list[str] | None,
    typer.Option("--decode-arg", help="Passed to decode services, as --decode-arg=--flag=value; repeatable."),
]


def all_of(given: list[str]) -> list[str]:
    """Returns the addresses that were given, of which each option may name several. Raises BadParameter if one is there
    twice.
    """
    addresses = [address for each in given for part in each.split(",") if (address := part.strip())]
    if twice := sorted({address for address in addresses if addresses.count(address) > 1}):
        raise typer.BadParameter(f"{twice[0]} is named twice", param_hint="--address")
    if given and not addresses:
        raise typer.BadParameter("names no address", param_hint="--address")
    return addresses


@contextmanager
def decode_client(given: str | None, tls: Tls | None, token: str | None) -> Iterator[Client]:
    """Yields a client for the address `given`. Without it, the client is for a pair that `baton up` runs on this
    machine, or if there is none, for the default address, which is then printed.

    Waits while a pair of `baton up` at that address loads. Raises Unavailable if that takes longer than `LOADING_S`.
    Every error that is raised in this context names the address.
    """
    found = [] if given else running_pairs()
    address = given or (found[0] if found else DEFAULT_ADDRESS)
    if len(found) > 1:
        others = ", ".join(found[1:])
        text_console().print(f"{len(found)} pairs run here: this is {found[0]}, not {others}", style="dim")
    if _is_announced(address):
        _wait_loaded(address)
    with Client(address, tls=tls, token=token) as client:
        try:
            yield client
        except BatonError as error:
            words = _named(error, address)
            is_wrong_place = isinstance(error, Unavailable | Unimplemented) and error.reason in ("", _NOT_SERVED)
            if is_wrong_place and not found:  # with another reason, a decode service answered
                pairs = running_pairs()
                if pairs and not _is_announced(address):
                    words = f"{words}; the pair of `baton up` here is at {pairs[0]}"
                elif not given and isinstance(error, Unavailable):
                    words = f"no pair of `baton up` runs here, and {address} does not answer: {error}; give --address"
            raise _with_words(error, words) from error
        if not given and not found:
            text_console().print(f"no pair of `baton up` runs here: {address} was asked", style="dim")


@contextmanager
def naming(address: str) -> Iterator[None]:
    """Every error that is raised in this context names the address."""
    try:
        yield
    except BatonError as error:
        raise _with_words(error, _named(error, address)) from error


def _named(error: BatonError, address: str) -> str:
    return str(error) if address in str(error) else f"{address}: {error}"


def _with_words(error: BatonError, words: str) -> BatonError:
    return type(error)(words, reason=error.reason, metadata=error.metadata, code=error.code)


def _is_announced(address: str) -> bool:
    """Returns whether all hosts in `address` are decode services of one pair that `baton up` runs."""
    parts = set(address.replace("localhost:", f"{LOOPBACK}:").split(","))
    return any(parts <= set(pair.split(",")) for pair in running_pairs())


def _wait_loaded(pair: str) -> None:
    """Waits until one of the decode services in `pair` listens; `pair` is their addresses, separated by commas.

    Raises Unavailable if the pair ends or takes longer than `LOADING_S`.
    """
    is_told = False
    deadline_s = time.monotonic() + LOADING_S
    idle = threading.Event()
    while not any(map(is_listened_on, pair.split(","))):
        if not _is_announced(pair):
            raise Unavailable(f"the pair of `baton up` at {pair} ended before it was ready: its terminal says why")
        if time.monotonic() > deadline_s:
            raise Unavailable(
                f"the pair of `baton up` at {pair} is still loading after {LOADING_S:g} s: try again once its terminal "
                "says that it is ready"
            )
        if not is_told:
            is_told = True
            text_console().print(f"the pair of `baton up` at {pair} is loading: waiting up to {LOADING_S:g} s for it")
        idle.wait(_LOADING_LOOK_S)


def read_token(path: Path | None) -> str | None:
    """Returns the first token in the file, which has the format of the services' token files; None without a file."""
    if path is None:
        return None
    try:
        tokens, mode = read_token_file(_TOKEN_FILE, path)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None
    if is_open_to_others(mode):
        text_console().print(f"{_TOKEN_FILE}: {path}: others may read it: chmod 600", style="yellow", markup=False)
    return tokens[0]


def parse_token_ids(text: str | None, flag: str) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(token_id) for token_id in text.split(",") if token_id.strip()]
    except ValueError:
        raise typer.BadParameter(f"{text[:64]!r} is not numbers with commas between them", param_hint=flag) from None
