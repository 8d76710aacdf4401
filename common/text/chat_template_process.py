"""A process that renders a model's chat template: `python -m common.text.chat_template_process FILE TIMEOUT_S`.

A template is a program by the model's author, and its input is written by clients. In a process of its own it can be
stopped, and its memory is limited. Requests are JSON (see `common.host.answering`). The first request has the limits
and the arguments of ChatTemplates; its answer is DONE. Each later request has one conversation, and its answer is DONE
with the rendered text. If a request fails, the answer has another status; FAILED comes with a JSON list, of the field
at fault and the reason. SIGPROF ends the process if a template uses too much CPU time. Clock time is not limited,
because a busy machine is not the template's fault.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys

from common.host.answering import DONE, FAILED, Asker
from common.host.cores import leave_service
from common.host.memory import limit_own_memory
from common.peer_text import peer_text
from common.text.chat_messages import chat_from_json
from common.text.chat_template import ChatRefused, ChatTemplates, TextTooLong

TOO_LONG = FAILED + 1
START_CPU_S = 10.0
"""The CPU time for compiling a template and for its first trial renderings."""


def main() -> None:
    asker = Asker(int(sys.argv[1]), float(sys.argv[2]))
    leave_service()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    templates: ChatTemplates | None = None
    max_chars = 0
    cpu_s = START_CPU_S
    try:
        while True:
            command = asker.command()
            assert command is not None
            signal.setitimer(signal.ITIMER_PROF, cpu_s)
            try:
                asked = json.loads(command)
                if templates is None:
                    max_chars = asked.pop("max_chars")
                    limit_own_memory(asked.pop("memory_bytes"))
                    render_cpu_s = asked.pop("cpu_s")
                    templates = ChatTemplates(**asked)
                    cpu_s = render_cpu_s
                    text = ""
                else:
                    text = templates.render(*chat_from_json(asked), max_chars=max_chars)
                status, content = DONE, text.encode()
            except TextTooLong as error:
                status, content = TOO_LONG, str(error).encode()
            except ChatRefused as error:
                status, content = FAILED, _refusal(error)
            except UnicodeError:
                status, content = FAILED, _refusal(ChatRefused("the model's chat template makes what is no text of it"))
            except MemoryError:
                status, content = (
                    FAILED,
                    _refusal(ChatRefused("the model's chat template needs too much memory for it")),
                )
            signal.setitimer(signal.ITIMER_PROF, 0)
            del command
            asker.answer(status, content)
    except (EOFError, OSError):  # the service has ended
        os._exit(0)


def _refusal(error: ChatRefused) -> bytes:
    return json.dumps([error.field, peer_text(error.reason)]).encode()


if __name__ == "__main__":
    main()
