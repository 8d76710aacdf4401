"""Runs the `baton` command as `python -m baton`."""

from __future__ import annotations

from baton.cli.main import main

if __name__ == "__main__":
    main()
