#!/usr/bin/env python3
"""Writes a program's manual page, whose text is what the program says of itself: so the two never differ.

    man_page.py --name ballastd --section 8 --version 0.1.0 --summary "..." --out FILE -- PROGRAM [ARGUMENT ...]
                [--and HEADING PROGRAM ARGUMENT ...] ...

The text of each further command becomes a section of its own.
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


def commands_of(words: list[str]) -> list[tuple[str, list[str]]]:
    commands = [("DESCRIPTION", [])]
    words = iter(words)
    for word in words:
        if word == "--and":
            commands.append((next(words).upper(), []))
        else:
            commands[-1][1].append(word)
    return commands


def page(name: str, section: str, version: str, summary: str, commands: list[tuple[str, list[str]]]) -> str:
    parts = [f'.TH "{escaped(name.upper())}" "{section}" "" "Ballast {version}" "Ballast"',
             f".SH NAME\n{escaped(name)} \\- {escaped(summary)}"]
    parts += [f'.SH "{escaped(heading)}"\n.nf\n{escaped(said(command))}\n.fi' for heading, command in commands]
    return "\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    for flag in ("--name", "--section", "--version", "--summary", "--out"):
        parser.add_argument(flag, required=True)
    split = sys.argv.index("--")
    options = parser.parse_args(sys.argv[1:split])
    text = page(options.name, options.section, options.version, options.summary, commands_of(sys.argv[split + 1:]))
    with open(options.out, "w", encoding="utf-8") as file:
        file.write(text)


if __name__ == "__main__":
    main()
