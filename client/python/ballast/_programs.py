"""The commands `ballastd` and `ballast` of an installed package: the programs that it contains."""

from __future__ import annotations

import os
import sys

from . import _files


def ballastd() -> None:
    _become("ballastd")


def ballast() -> None:
    _become("ballast")


def _become(name: str) -> None:
    try:
        path = _files.program(name, search_path=False)  # PATH would lead to this command itself.
    except FileNotFoundError as error:
        sys.exit(f"{name}: {error}")
    os.execv(path, [name, *sys.argv[1:]])
