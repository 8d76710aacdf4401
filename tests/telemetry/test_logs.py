from __future__ import annotations

import io
import json
import logging
import sys
import threading
import warnings
from typing import Any

import pytest
import structlog

from common.telemetry.logs import configure_logs, only_log_lines


@pytest.fixture
def stream() -> io.StringIO:
    """The log output of a configured process."""
    stream = io.StringIO()
    configure_logs("info", stream=stream, service="decode_service", instance_id="i1")
    return stream


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


def test_the_requests_of_the_status_page_are_not_told(stream: io.StringIO) -> None:
    logging.getLogger("httpx2").info("HTTP Request: GET http://127.0.0.1:1/metrics")

    assert not stream.getvalue()


def test_an_exception_keeps_its_traceback_on_one_line(stream: io.StringIO) -> None:
    try:
        raise RuntimeError("boom")
    except RuntimeError:
        structlog.get_logger("edge").exception("request_crashed")
        logging.getLogger("engine").exception("engine died")

    assert all("RuntimeError: boom" in line["exception"] for line in lines(stream))
    assert len(lines(stream)) == 2


def test_what_python_itself_has_to_say_is_a_line_too(stream: io.StringIO) -> None:
    def fail() -> None:
        raise RuntimeError("boom")

    class Leaving:
        def __del__(self) -> None:
            raise OSError("late")

    before = threading.excepthook, sys.unraisablehook, warnings.showwarning
    with only_log_lines(), warnings.catch_warnings():
        thread = threading.Thread(target=fail, name="landing")
        thread.start()
        thread.join()
        Leaving()
        warnings.simplefilter("always")
        warnings.showwarning("old", DeprecationWarning, "here.py", 3)
    assert (threading.excepthook, sys.unraisablehook, warnings.showwarning) == before

    crashed, ignored, warning = lines(stream)
    assert (crashed["event"], crashed["thread"]) == ("thread_crashed", "landing")
    assert "RuntimeError: boom" in crashed["exception"]
    assert ignored["event"] == "exception_ignored" and "OSError: late" in ignored["exception"]
    assert (warning["event"], warning["message"], warning["place"]) == ("python_warning", "old", "here.py:3")


def test_lines_for_people_have_the_event_first_and_no_braces(stream: io.StringIO) -> None:
    configure_logs("info", "console", stream=stream, service="decode_service")
    structlog.get_logger("edge").warning("request_finished", queue_s=0.5)
    logging.getLogger("engine").info("%d rows", 3)

    first, second = stream.getvalue().splitlines()
    assert first.split(maxsplit=1)[1] == "[warning  ] request_finished [edge] queue_s=0.5"
    assert second.endswith("3 rows [engine]")
