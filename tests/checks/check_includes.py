#!/usr/bin/env python3
"""Fails when an include points the wrong way.

    gpu_worker -> client -> proto <- server -> cpu_optimizer_service

Every folder may include cpu_optimizer_service/common/. Inside a module the rooms are ordered, top first:
a room may include itself and the rooms below it. Headers at a module's root are its front, sources there
put it together. Files named *_main.cc put a binary together and may include across; tests may include
everything.
"""

import pathlib
import re

from source_tree import files_of, run_check

COMMON = "cpu_optimizer_service/common"

# Who may include whom, besides itself and the common leaf.
ALLOWED = {
    COMMON: set(),
    "cpu_optimizer_service": set(),
    "proto": set(),
    "server": {"proto", "cpu_optimizer_service"},
    "client": {"proto"},
    "gpu_worker": {"client", "proto"},
}
# More than that, for one room.
ALLOWED_ROOMS = {("gpu_worker/muon", "cpu_optimizer_service/kernels")}

# The rooms of a module, top first. "front" is the headers at its root; the sources there are above all.
ROOMS = {
    "cpu_optimizer_service": ("front", "job/impl", "job/update", "job/state", "job/kept", "job/members", "job/core", "job", "job/step",
                              "state", "gradients", "kernels", "host", "common/history",
                              "common/plan", "common/packed", "common/rules", "common/norm", "common/text", "common/system", "common/limits",
                              "common"),
    "server": ("ballastd", "holder", "status", "jobs", "cluster", "members", "train", "shared_memory", "front", "access"),
    "client": ("cli/support", "cli", "cli/terminal", "c_api", "tensors", "calls", "session", "transport", "front"),
    "gpu_worker": ("run", "pipeline", "cpu", "muon", "training", "buckets", "gpt", "cuda/kernels", "cuda", "device",
                   "collective", "base"),
}

GRPC = re.compile(r"(grpc|grpcpp|grpc\+\+)/")
PROTOBUF = re.compile(r"google/protobuf/|.*\.pb\.h$")
FLAGS = re.compile(r"absl/flags/")
CUDA = re.compile(r"(.*/)?(cuda|cublas|cudnn|nccl|nvtx|nvml)[^/]*$|(cuda|cub|thrust|nccl)/")
ENGINE_FORBIDS = ((GRPC, "gRPC"), (PROTOBUF, "protobuf"), (FLAGS, "flags"))

INCLUDE = re.compile(r'^\s*#\s*include\s+([<"])([^>"]+)[>"]')
ENDINGS = (".h", ".cc", ".cu", ".cuh")


def folder_of(path: str) -> str | None:
    """The module that a path from the root of the tree lies in; None for another project's header."""
    if path.startswith(COMMON + "/"):
        return COMMON
    if re.match(r"(ballast/v1|google/rpc)/.*\.pb\.h$", path):
        return "proto"  # Generated from it.
    first = path.split("/", 1)[0]
    return first if first in ALLOWED and "/" in path else None


def room_of(path: str) -> tuple[str, str]:
    """The module and the room in it: "front" for a header at the module's root, "" for a source there."""
    module, _, rest = path.partition("/")
    room = rest.rpartition("/")[0]
    return module, room or ("front" if rest.endswith(".h") else "")


def room_fault(source: str, target: str) -> str | None:
    """Why the room of `source` must not include `target`, a file of the same module, or None."""
    (module, room), (_, other) = room_of(source), room_of(target)
    if module not in ROOMS or room in ("", other):
        return None
    rooms = ROOMS[module]
    for name in (room, other):
        if name not in rooms:
            return f"{module}/{name} is not among the rooms of {module}; add it to check_includes.py"
    if rooms.index(other) < rooms.index(room):
        below = ", ".join(rooms[rooms.index(room) + 1:]) or "nothing"
        return f"{room} is below {other} in {module}; it may include only {below}"
    return None


def may_include_cuda(file: pathlib.PurePosixPath) -> bool:
    return file.parts[0] == "gpu_worker" or (file.parts[0] == "client" and "staging" in file.name)


def fault_of(file: pathlib.PurePosixPath, quoted: bool, target: str) -> str | None:
    """Why `file` must not include `target`, or None."""
    source = folder_of(str(file))
    if quoted and ("/" not in target or target.startswith(".")):
        return "write the path from the root of the tree, and other projects' headers in <>"
    if CUDA.match(target) and folder_of(target) is None and not may_include_cuda(file):
        return "CUDA and NCCL belong to gpu_worker and to client's staging"
    if source in (COMMON, "cpu_optimizer_service"):
        for pattern, name in ENGINE_FORBIDS:
            if pattern.match(target):
                return f"the engine knows no {name}"
    destination = folder_of(target)
    if destination is None or file.name.endswith("_main.cc"):
        return None
    if (destination not in (source, COMMON) and destination not in ALLOWED[source]
            and (str(file.parent), target.rpartition("/")[0]) not in ALLOWED_ROOMS):
        allowed = ", ".join(sorted(ALLOWED[source] | {source, COMMON}))
        return f"{source} may include only {allowed}"
    if target.split("/", 1)[0] == file.parts[0]:
        return room_fault(str(file), target)
    return None


def wrong_includes(root: pathlib.Path) -> list[str]:
    findings = []
    for file in files_of(root):
        if not file.name.endswith(ENDINGS) or folder_of(str(file)) is None:
            continue
        for number, line in enumerate((root / file).read_text().splitlines(), start=1):
            include = INCLUDE.match(line)
            if include is None:
                continue
            fault = fault_of(file, include[1] == '"', include[2])
            if fault:
                findings.append(f"{file}:{number}: includes {include[2]}: {fault}")
    return findings


if __name__ == "__main__":
    run_check(wrong_includes)
