"""A gateway that dies in the middle of every answer: it starts to send a refusal and closes before the body is
complete.
"""

from __future__ import annotations

import argparse
import socket

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen", required=True)
    host, _, port = parser.parse_known_args()[0].listen.rpartition(":")
    with socket.create_server((host, int(port))) as listener:
        while True:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 99\r\n\r\n{")
