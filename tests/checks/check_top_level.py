#!/usr/bin/env python3
"""Fails when the top level of the tree has anything but the entries named here."""

import pathlib

from source_tree import files_of, run_check

REQUIRED = {"proto", "server", "client", "gpu_worker", "cpu_optimizer_service", "deploy", "tests",
            "CMakeLists.txt", "CMakePresets.json", "README.md", "LICENSE"}
OPTIONAL = {".ci", ".clang-format", ".clang-tidy", ".dockerignore", ".editorconfig",
            ".gitattributes", ".github", ".gitignore"}


def top_level_faults(root: pathlib.Path) -> list[str]:
    found = {file.parts[0] for file in files_of(root)} - {".git"}
    findings = [f"{name}: is not one of the top level's entries; move it into one of the folders"
                for name in sorted(found - REQUIRED - OPTIONAL)]
    findings += [f"{name}: is missing from the top level" for name in sorted(REQUIRED - found)]
    return findings


if __name__ == "__main__":
    run_check(top_level_faults)
