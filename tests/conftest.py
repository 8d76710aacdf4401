"""Fixtures that every test may use."""

from __future__ import annotations

import gc
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import tests.support.triton_interpreter  # noqa: F401 -- first: what follows imports triton
from common.checkpoints.cache import kernels_cache_dir
from common.model.target import TargetModel
from tests.support.loading import load_target
from tests.support.models import save_last_token_model, save_tiny_model
from tests.support.pair import MakePair, pairs_that_keep_all

if TYPE_CHECKING:  # not installed where only tests/gpu runs
    from baton.local_pair import LocalPair


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", metavar="K[,K]/N", help="run the K-th of N parts of the tests that are selected")
    parser.addoption("--write-costs", action="store_true", help="write what the tests cost into benchmarks/tests.md")


def pytest_configure(config: pytest.Config) -> None:
    """Sets up hypothesis without a deadline, since test processes share the cores and an example may have to wait for
    one.
    """
    if find_spec("hypothesis") is not None:  # not installed where only tests/gpu runs
        import hypothesis

        hypothesis.settings.register_profile("baton", deadline=None)
        hypothesis.settings.load_profile("baton")
    if find_spec("numba") is not None and find_spec("platformdirs") is not None:
        from baton_cpu.compiler.kernel_cache import keep_kernels

        keep_kernels(kernels_cache_dir())
    if find_spec("psutil") is not None:
        from tests.support.costs import TestCosts

        config.pluginmanager.register(TestCosts(config))
    elif config.getoption("part") or config.getoption("write_costs"):
        raise pytest.UsageError("--part and --write-costs need psutil")
    num_processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, torch.get_num_threads() // num_processes))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Makes the garbage collector ignore the objects that imports and collection leave, about a million of them that
    are never freed. Visiting them took a tenth of the suite's time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def temporary_files_go_with_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Puts what tests and their processes leave among temporary files, such as logs of pairs that did not start, into
    pytest's own folder, which is removed if no test failed.
    """
    directory = tmp_path_factory.mktemp("tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(directory))
        patch.setattr(tempfile, "tempdir", None)
        yield


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Undoes what a test's program sets up for its logs: the test's output, where they go, is closed after it."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield
    if root.handlers is not handlers:
        import structlog

        root.handlers = handlers
        root.setLevel(level)
        structlog.reset_defaults()


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function from an architecture to the directory of a tiny random model, which is made once."""
    made: dict[str, Path] = {}

    def make(architecture: str) -> Path:
        if architecture not in made:
            made[architecture] = save_tiny_model(tmp_path_factory.mktemp(architecture), architecture)
        return made[architecture]

    return make


@pytest.fixture(scope="session")
def last_token_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_last_token_model(tmp_path_factory.mktemp("last-token"))


@pytest.fixture(scope="session")
def tiny_target(tiny_model_dir: Callable[[str], Path]) -> Callable[[str], TargetModel]:
    loaded: dict[str, TargetModel] = {}

    def load(architecture: str) -> TargetModel:
        if architecture not in loaded:
            loaded[architecture] = load_target(tiny_model_dir(architecture), device="cpu", dtype="float32")
        return loaded[architecture]

    return load


@pytest.fixture(scope="session")
def last_token_target(last_token_model_dir: Path) -> TargetModel:
    return load_target(last_token_model_dir, device="cpu", dtype="float32")


@pytest.fixture(scope="session")
def forked() -> Iterator[Callable[..., LocalPair]]:
    """A stand-in for LocalPair that forks its services from a warm process. Tests that start many services use it."""
    from tests.support.forked_services import ForkServer, forked_pairs

    with ForkServer() as server:
        yield forked_pairs(server)


@pytest.fixture
def make_pair() -> Iterator[MakePair]:
    with pairs_that_keep_all() as make:
        yield make
