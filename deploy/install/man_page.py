#!/usr/bin/env python3
"""Writes a program's manual page, whose text is what the program says of itself: so the two never differ.

    man_page.py --name ballastd --section 8 --version 0.1.0 --summary "..." --out FILE -- PROGRAM ARGUMENT ...

The text of each command that it lists becomes a section of its own.
"""

import argparse
import subprocess
import sys


def escaped(text: str) -> str:
    """As roff shows it: nothing at the beginning of a line is a request, and a hyphen stays one."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return "\n".join("\\&" + line if line[:1] in (".", "'") else line for line in text.splitlines())


def said(command: list[str]) -> str:
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, check=False, timeout=60)
    if not done.stdout.strip():
        sys.exit(f"man_page.py: {' '.join(command)} says nothing of itself")
    return done.stdout.strip()


def sections(command: list[str]) -> list[tuple[str, str]]:
    text = said(command)
    _, _, listed = text.partition("\ncommands:\n")
    names = [line.split()[0] for line in listed.partition("\n\n")[0].splitlines()]
    return [("DESCRIPTION", text)] + [(name.upper(), said([*command, name])) for name in names if name != command[-1]]


def page(name: str, section: str, version: str, summary: str, texts: list[tuple[str, str]]) -> str:
    parts = [f'.TH "{escaped(name.upper())}" "{section}" "" "Ballast {version}" "Ballast"',
             f".SH NAME\n{escaped(name)} \\- {escaped(summary)}"]
    parts += [f'.SH "{escaped(heading)}"\n.nf\n{escaped(text)}\n.fi' for heading, text in texts]
    return "\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    for flag in ("--name", "--section", "--version", "--summary", "--out"):
        parser.add_argument(flag, required=True)
    split = sys.argv.index("--")
    options = parser.parse_args(sys.argv[1:split])
    text = page(options.name, options.section, options.version, options.summary, sections(sys.argv[split + 1:]))
    with open(options.out, "w", encoding="utf-8") as file:
        file.write(text)


if __name__ == "__main__":
    main()
