"""Writes a file as a whole. Nothing beyond the standard library; deploy/bundle.sh takes this file along."""

import os


def write_whole(path, text: str) -> None:
    """Readers find the whole file, or the one that was there before. Errors are those of open() and os.replace()."""
    temporary = f"{path}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(temporary, path)
