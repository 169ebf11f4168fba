"""The texts of a component's errors, which stand in one golden file: for Python's tests what messages.h is for C++.

    with refused(self, ballast.AbortedError, "NEW_GENERATION"):
        optimizer.step()
    says(self, text)  # Of a process or another rank.

BALLAST_UPDATE_GOLDEN=1 in the environment writes the lines of the tests that run.
"""

import contextlib
import inspect
import os
import pathlib
import re
import tempfile

TESTS = pathlib.Path(__file__).resolve().parents[1]
MASKS = ((r"(127\.0\.0\.[0-9]+|\[::1\]):[0-9]+", r"\1:PORT"),
         (rf"(/tmp|{re.escape(tempfile.gettempdir())})/[\w.-]+", "/tmp/DIR"),
         (r"\b[0-9a-f]{32,}\b", "UID"), (r"\b[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9:.]+", "TIME"),
         (r"\b(needed|needs|used|limit) [1-9][0-9]* bytes", r"\1 N bytes"), ("\n", r"\\n"))
_taken = {}  # The messages of the tests that run, by Class.test.


def _read(file: pathlib.Path) -> dict[str, list[str]]:
    messages = {}
    for line in file.read_text().splitlines():
        name, message = line.split(": ", 1)
        messages.setdefault(name, []).append(message)
    return messages


def _end(test, name: str) -> None:
    source = pathlib.Path(inspect.getfile(type(test))).resolve()
    file = TESTS / source.relative_to(TESTS).parts[0] / "messages.txt"
    golden, taken = _read(file), _taken.pop(name)
    if "BALLAST_UPDATE_GOLDEN" not in os.environ:
        test.maxDiff = None
        test.assertEqual(taken, golden.get(name, []), f"{file}: if it is right, set BALLAST_UPDATE_GOLDEN=1")
        return
    golden[name] = taken
    file.write_text("".join(f"{each}: {line}\n" for each in sorted(golden) for line in golden[each]))


def says(test, *texts: str) -> None:
    """They are the test's next lines in the golden file, with which they are compared when the test ends."""
    name = ".".join(test.id().split(".")[-2:])
    if name not in _taken:
        _taken[name] = []
        test.addCleanup(_end, test, name)
    for text in texts:
        for mask, masked in MASKS:
            text = re.sub(mask, masked, text)
        _taken[name].append(text)


@contextlib.contextmanager
def refused(test, kind: type, reason: str = "", code: int | None = None, varies: bool = False):
    """Of exactly this kind, with its code and the reason; with the golden file's text, unless that varies."""
    with test.assertRaises(kind) as raised:
        yield
    error = raised.exception
    if not varies:
        says(test, str(error))
    expected = (kind, code or getattr(kind, "code", None), reason)
    test.assertEqual((type(error), getattr(error, "code", None), getattr(error, "reason", "")), expected, error)
