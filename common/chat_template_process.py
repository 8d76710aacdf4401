"""The process that renders a model's chat template: `python -m common.chat_template_process TIMEOUT_S MEMORY_BYTES`.

A template is a program, of a model's author, that what a client says runs through. Here it can be stopped, and has
only so much memory. It is asked in JSON (see `common.answering`): first the arguments of ChatTemplate, then for each
conversation its messages. It answers DONE and `parts_roles`, then the texts; otherwise a status below, and why.
"""

from __future__ import annotations

import json
import os
import resource
import sys

from common.answering import DONE, FAILED, Asker
from common.chat_template import ChatRefused, ChatTemplate, TextTooLong

TOO_LONG = FAILED + 1


def main() -> None:
    asker = Asker(float(sys.argv[1]))
    resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]),) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    template: ChatTemplate | None = None
    max_chars = 0
    try:
        while True:
            command = asker.command()
            assert command is not None
            try:
                asked = json.loads(command)
                if template is None:
                    max_chars = asked.pop("max_chars")
                    template = ChatTemplate(**asked)
                    text = json.dumps(sorted(template.parts_roles))
                else:
                    text = template.render(asked, max_chars=max_chars)
                status, content = DONE, text.encode()
            except TextTooLong as error:
                status, content = TOO_LONG, str(error).encode()
            except ChatRefused as error:
                status, content = FAILED, str(error).encode(errors="replace")
            except UnicodeError:
                status, content = FAILED, b"the model's chat template makes what is no text of it"
            except MemoryError:
                status, content = FAILED, b"the model's chat template needs too much memory for it"
            del command
            asker.answer(status, content)
    except (EOFError, OSError):  # the service is gone
        os._exit(0)


if __name__ == "__main__":
    main()
