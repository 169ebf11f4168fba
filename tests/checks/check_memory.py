#!/usr/bin/env python3
"""Fails when the service uses what ends its process where a call has no memory, instead of the call."""

import pathlib
import re

from source_tree import files_of, run_check

# Tables that are destroyed wrongly after std::bad_alloc; texts and iterators that it cannot get out of.
FORBIDDEN = {
    re.compile(r"\babsl::(flat|node)_hash_\w+|absl/container/(flat|node)_hash_\w+"): "std::unordered_map or std::map",
    re.compile(r"\babsl::(StrFormat|StrAppendFormat|FormatUntyped)\b|absl/strings/str_format\.h"): "absl::StrCat",
    re.compile(r"\b(recursive_)?directory_iterator\b|\bfilesystem::remove_all\b"): "VisitNames (visit_names.h)",
}
FOLDERS = ("server", "cpu_optimizer_service")
MAY_END = {"cpu_optimizer_service/self_benchmark.cc"}  # It runs before there is a job.


def fatal_without_memory(root: pathlib.Path) -> list[str]:
    findings = []
    for file in files_of(root):
        if file.parts[0] not in FOLDERS or file.suffix not in (".h", ".cc") or str(file) in MAY_END:
            continue
        for number, line in enumerate((root / file).read_text().splitlines(), start=1):
            code = line.split("//", 1)[0]
            for pattern, instead in FORBIDDEN.items():
                if found := pattern.search(code):
                    findings.append(f"{file}:{number}: {found[0]} ends the process where there is no memory; take {instead}")
    return findings


if __name__ == "__main__":
    run_check(fatal_without_memory)
