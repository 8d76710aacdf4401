from __future__ import annotations

import io
import json
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from common.telemetry.logs import configure_logs


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """What a configured process writes; pytest's own logging is put back."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    stream = io.StringIO()
    configure_logs("info", stream=stream, service="decode_service", instance_id="i1")
    yield stream
    root.handlers, root.level = handlers, level
    structlog.reset_defaults()


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_is_one_json_object_with_its_fields(stream: io.StringIO) -> None:
    structlog.get_logger("edge").info("request_finished", request_id="r1", queue_s=0.5)

    (line,) = lines(stream)
    assert (line["event"], line["request_id"], line["queue_s"]) == ("request_finished", "r1", 0.5)
    assert (line["level"], line["logger"]) == ("info", "edge")
    assert (line["service"], line["instance_id"]) == ("decode_service", "i1")
    assert line["timestamp"].endswith("Z")


def test_the_standard_librarys_lines_look_alike_on_every_thread(stream: io.StringIO) -> None:
    thread = threading.Thread(target=lambda: logging.getLogger("engine").warning("%d rows", 3))
    thread.start()
    thread.join()

    (line,) = lines(stream)
    assert (line["event"], line["level"], line["service"]) == ("3 rows", "warning", "decode_service")


def test_below_the_level_nothing_is_written(stream: io.StringIO) -> None:
    structlog.get_logger("edge").debug("detail")
    logging.getLogger("engine").debug("detail")

    assert not stream.getvalue()


def test_an_exception_keeps_its_traceback_on_one_line(stream: io.StringIO) -> None:
    try:
        raise RuntimeError("boom")
    except RuntimeError:
        structlog.get_logger("edge").exception("request_crashed")
        logging.getLogger("engine").exception("engine died")

    assert all("RuntimeError: boom" in line["exception"] for line in lines(stream))
    assert len(lines(stream)) == 2
