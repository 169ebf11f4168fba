"""The paths of programs and library: in the installed package, or in a build folder."""

from __future__ import annotations

import os
import pathlib
import shutil

_PACKAGE = pathlib.Path(__file__).resolve().parent
_TREE = _PACKAGE.parents[2]  # The sources' root, if they are used in place.


def _folders() -> list[pathlib.Path]:
    named = os.environ.get("BALLAST_BIN_DIR")
    return [*([pathlib.Path(named)] if named else []), _PACKAGE / "bin", _TREE / "build/release/bin"]


def program(name: str, search_path: bool = True) -> str:
    """The path of `ballastd` or `ballast`. FileNotFoundError names the searched places. search_path: also search
    PATH."""
    for folder in _folders():
        if os.access(folder / name, os.X_OK):
            return str(folder / name)
    found = shutil.which(name) if search_path else None
    if found is None:
        looked = ", ".join(map(str, _folders())) + (" or PATH" if search_path else "")
        raise FileNotFoundError(f"there is no {name} in {looked}; build it, or set BALLAST_BIN_DIR")
    return found


def library() -> str:
    """The path of libballast.so.1."""
    folders = [folder.parent / "lib" for folder in _folders()]
    for folder in folders:
        if (folder / "libballast.so.1").is_file():
            return str(folder / "libballast.so.1")
    looked = ", ".join(map(str, folders))
    raise FileNotFoundError(f"there is no libballast.so.1 in {looked}; build the target ballast_shared, or set "
                            "BALLAST_BIN_DIR to the bin folder beside its lib folder")
