#!/usr/bin/env python3
"""Fails when a folder holds more files than one listing can show, or holds many and no README.md.

What counts are the files in the folder itself, without README.md and CMakeLists.txt. tests/ mirrors the
other folders and adds what their tests share, so its folders may hold some more.
"""

import collections
import pathlib

from source_tree import files_of, run_check

MOST_FILES = 30
MOST_FILES_IN_TESTS = 36
MOST_SOURCES_WITHOUT_README = 10

NOT_COUNTED = {"README.md", "CMakeLists.txt"}
SOURCE_ENDINGS = (".h", ".cc", ".cu", ".cuh", ".proto", ".py", ".sh")


def folder_faults(root: pathlib.Path) -> list[str]:
    names = collections.defaultdict(set)
    for file in files_of(root):
        names[file.parent].add(file.name)
    findings = []
    for folder, here in sorted(names.items()):
        most = MOST_FILES_IN_TESTS if folder.parts[:1] == ("tests",) else MOST_FILES
        count = len(here - NOT_COUNTED)
        if count > most:
            findings.append(f"{folder}: holds {count} files, at most {most} are allowed; part it by subject")
        sources = sum(name.endswith(SOURCE_ENDINGS) for name in here)
        if sources > MOST_SOURCES_WITHOUT_README and "README.md" not in here:
            findings.append(f"{folder}: holds {sources} source files and no README.md; say there what each is for")
    return findings


if __name__ == "__main__":
    run_check(folder_faults)
