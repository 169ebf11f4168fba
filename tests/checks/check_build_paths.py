"""Fails when a binary that is given away names the folder in which it was built."""
import pathlib
import sys

NEEDED = ("ballast", "ballastd")


def binaries_with(text, folder):
    """Names of the files in `folder` that have the bytes `text`."""
    return [file.name for file in sorted(folder.iterdir()) if file.is_file() and text in file.read_bytes()]


def main(source, folder):
    missing = [name for name in NEEDED if not (folder / name).is_file()]
    if missing:
        print(f"{folder} has no {', '.join(missing)}: build the binaries first")
        return 1
    bad = binaries_with(str(source).encode(), folder)
    for name in bad:
        print(f"{folder / name} has the path {source}; compile with -ffile-prefix-map (CMakeLists.txt)")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2])))
