"""What the checks share: the files of the tree, and the end of a check."""

import os
import pathlib
import subprocess
import sys

# Hidden, built or produced: never part of what a check looks at when there is no git.
SKIPPED_FOLDERS = {"build", "out", "__pycache__"}


def files_of(root: pathlib.Path) -> list[pathlib.PurePosixPath]:
    """The files that git tracks or would add, relative to `root`; without git, all but build output."""
    listing = subprocess.run(
        ["git", "-c", f"safe.directory={root}", "-C", str(root), "ls-files", "-z",
         "--cached", "--others", "--exclude-standard"],
        capture_output=True, check=False) if (root / ".git").exists() else None
    if listing is not None:
        if listing.returncode != 0:
            sys.exit(f"git ls-files in {root} failed: {listing.stderr.decode().strip()}")
        names = [name for name in listing.stdout.decode().split("\0") if name]
        # A file that is deleted but still in the index is not there.
        return sorted(pathlib.PurePosixPath(n) for n in names if (root / n).exists())
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [s for s in subfolders if s not in SKIPPED_FOLDERS]
        found += [pathlib.PurePosixPath((pathlib.Path(folder) / n).relative_to(root)) for n in names]
    return sorted(found)


def run_check(check) -> None:
    """Runs `check(root)` on the tree named on the command line and exits 1 if it finds anything."""
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} ROOT_OF_THE_TREE")
    findings = check(pathlib.Path(sys.argv[1]).resolve())
    for finding in findings:
        print(finding, file=sys.stderr)
    sys.exit(1 if findings else 0)
