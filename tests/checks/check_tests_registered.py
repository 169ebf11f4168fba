#!/usr/bin/env python3
"""Fails when a test in tests/ is known to no CMakeLists.txt, and would so never run."""

import pathlib
import re

from source_tree import files_of, run_check

TEST_ENDINGS = ("_test.cc", "_fuzz.cc", "_test.py")


def words_of(cmake_file: pathlib.Path) -> set[str]:
    """What the file names, also through a function of its own: where that takes `${name}_test.cc`, a
    call some_test(ledger ...) names ledger_test.cc, and where it takes `${room}/${name}_test.cc`, a
    call some_test(job ledger ...) names job/ledger_test.cc."""
    text = re.sub(r"#.*", "", cmake_file.read_text())
    words = {word.strip('"').replace("${CMAKE_CURRENT_SOURCE_DIR}/", "")
             for word in re.split(r"[\s()]+", text)}
    for pattern in [word for word in words if word.startswith("${name}")]:
        words |= {call + pattern.removeprefix("${name}")
                  for call in re.findall(r"\w+_(?:test|fuzz)\(\s*(\w+)", text)}
    for pattern in [word for word in words if word.startswith("${room}/${name}")]:
        words |= {f"{room}/{name}" + pattern.removeprefix("${room}/${name}")
                  for room, name in re.findall(r"\w+_(?:test|fuzz)\(\s*(\w+)\s+(\w+)", text)}
    return words


def unregistered_tests(root: pathlib.Path) -> list[str]:
    files = files_of(root)
    words = {file.parent: words_of(root / file) for file in files
             if file.name == "CMakeLists.txt" and file.parts[0] == "tests"}
    findings = []
    for file in files:
        if file.parts[0] != "tests" or not file.name.endswith(TEST_ENDINGS):
            continue
        by = next((folder for folder in file.parents
                   if str(file.relative_to(folder)) in words.get(folder, set())), None)
        if by is None:
            findings.append(f"{file}: no CMakeLists.txt in tests/ names it, so it never runs; "
                            f"add it to {file.parent}/CMakeLists.txt")
        elif len(by.parts) > 1 and by.parts[1] not in words.get(by.parents[-2], set()):
            findings.append(f"{file}: registered in {by}/CMakeLists.txt, which "
                            "tests/CMakeLists.txt does not add; add the folder there")
    return findings


if __name__ == "__main__":
    run_check(unregistered_tests)
