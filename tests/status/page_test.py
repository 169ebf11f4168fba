"""The status page in a real browser, while one job trains and a rank of another one hangs.

    page_test.py BALLASTD PROTO_FOLDER [PICTURES]     pictures of the page are kept in that folder, to be looked at

Chromium and its driver are Debian's. Without them the test says so in one line and is skipped.
"""

import hashlib
import os
import pathlib
import pwd
import re
import subprocess
import sys
import tempfile
import unittest

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "support")]

import webdriver  # noqa: E402
from played_jobs import HANGING_RANK, HANGS_AFTER, played  # noqa: E402
from processes import Service, await_  # noqa: E402
from status_pages import status_address  # noqa: E402

SKIPPED = 77
TEXT = "return document.querySelector('main').innerText"
FOCUSED = "return document.activeElement.innerText || document.activeElement.placeholder || document.activeElement.id"


class Page(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        cls.service = Service(BALLASTD, folder, "--metrics-listen=0", "--memory-limit=1GiB",
                              f"--checkpoint-dir={folder / 'saved'}")
        cls.addClassCleanup(cls.service.stop)
        cls.base = status_address(cls.service)
        cls.enterClassContext(played(cls.service.address, PROTO))
        cls.browser = webdriver.Browser(folder)
        cls.addClassCleanup(cls.browser.close)

    def setUp(self):
        self.browser.screen(1180)
        self.browser.requests()
        self.browser.messages()

    def tearDown(self):
        """Whatever a test did: no error, and nothing from elsewhere."""
        self.assertEqual(self.browser.messages(), [])
        # chrome: its own first page, which it may still be loading.
        own = (self.base + "/", "data:", "chrome:")
        self.assertEqual([url for url in self.browser.requests() if not url.startswith(own) and url != "about:blank"], [])

    def open(self, path):
        self.browser.open(self.base + path)

    def picture(self, name):
        if PICTURES:
            self.browser.picture(pathlib.Path(PICTURES, name + ".png"))

    def see(self, *texts):
        for text in texts:
            self.browser.await_(f"'{text}'", "return document.body.innerText.includes(arguments[0])", text)

    def no_wider_than(self, width):
        # Not innerWidth: a phone zooms out for a page that is too wide.
        self.assertLessEqual(self.browser.run("return document.documentElement.scrollWidth"), width)

    def test_jobs_and_the_rank_that_hangs_are_seen_at_a_glance(self):
        self.open("/")
        self.see("steady", "stuck", f"Rank {HANGING_RANK} has not sealed step {HANGS_AFTER + 1}", "3 of 3")
        # Where this machine pauses a job that trains waits for a rank, too; not for long.
        self.browser.await_("that one job waits", f"{TEXT}.split('has not sealed').length === 2")
        # For less than a second, or less than two steps take.
        for waits, step, said in ((0.9, 0.01, False), (1.1, 0.01, True), (3.9, 2, False), (4.1, 2, True)):
            self.assertEqual(self.browser.run(
                "return import('/service.js').then(page => page.overdue({ ranks: [{ sealed: false }], seconds_since_first_seal: "
                "arguments[0], recent_steps: [{ seconds: arguments[1] }] }))", waits, step), said, (waits, step))
        # Without ranks a job between steps is idle, and no trouble; one that lacks some, or a step that does, is.
        for attached, phase, state, said in ((0, "READY", "idle", None), (2, "READY", "between steps", "1 rank has no process."),
                                             (0, "OPEN", "gathering", "3 ranks have no process."), (3, "READY", "between steps", None)):
            self.assertEqual(self.browser.run(
                "return import('/service.js').then(page => { const job = { ranks: [], saves: [], home_ranks: 3, attached_ranks: "
                "arguments[0], phase: arguments[1] }; return [page.stateOf(job)[0], page.trouble(job)?.[0] ?? null]; })",
                attached, phase), [state, said], (attached, phase))
        self.see("/s")  # The pace, once there are two answers.
        self.picture("jobs")

    def test_a_job_shows_who_is_awaited_and_what_is_missing(self):
        self.open("/?job=stuck")
        self.see(f"Rank {HANGING_RANK} has not sealed step {HANGS_AFTER + 1}", "Gradient norm", "Step time and its parts")
        rows = self.browser.run("return [...document.querySelectorAll('#ranks tbody tr')].map(row => row.innerText)")
        self.assertRegex(rows[0], rf"(?s)^{HANGING_RANK}\s+awaited.*h\.\d")
        self.assertTrue(all("sealed" in row for row in rows[1:]), rows)
        self.see("weights and moments", "no_decay", "Nothing is known to be saved")
        self.picture("stuck")

    def test_members_are_shown_with_whom_the_step_waits_for(self):
        def rows(job):
            return self.browser.run("return import('/job.js').then(page => { const card = page.members(arguments[0]); return card && "
                                    "[...card.querySelectorAll('tbody tr')].map(row => [...row.children].map(cell => cell.textContent)); })", job)

        self.open("/")
        self.assertIsNone(rows({"members": [], "homes": []}))
        unknown = {"linked": False, "seconds_without_link": 0, "problem": "", "memory_bytes": 0, "round_trip_seconds": 0, "waited_for": False}
        self.assertEqual(rows({"answering_member": 1, "homes": [1, 0, 1, 2, 3], "members": [
            {**unknown, "address": "a:7070", "linked": True, "memory_bytes": 2 ** 30, "round_trip_seconds": 0.00025},
            {**unknown, "address": "b:7070", "linked": True, "memory_bytes": 2 ** 30},
            {**unknown, "address": "c:7070", "seconds_without_link": 12, "problem": "nothing listens there", "waited_for": True},
            {**unknown, "address": "d:7070"}]}), [
                ["a:7070", "1", "", "1.00 GiB", "linked", "250 µs", ""],
                ["b:7070", "2", "leads", "1.00 GiB", "this service", "–", ""],
                ["c:7070", "1", "", "–", "none for 12 s: nothing listens there", "–", "awaited"],
                ["d:7070", "1", "", "–", "–", "–", ""]])

    def test_a_job_shows_how_much_is_saved(self):
        for said in ("in 1 checkpoint of this name", "in 2 checkpoints of this name"):
            subprocess.run([pathlib.Path(BALLASTD).with_name("ballast"), "save", "steady",
                            f"--service={self.service.address}"], check=True,
                           stdout=subprocess.DEVNULL)
            self.open("/?job=steady")
            self.see("is saved in", said)

    def test_charts_move_while_a_job_trains(self):
        self.open("/?job=steady")
        self.browser.await_("a curve", "return document.querySelector('#charts path.curve')?.getAttribute('d').length > 60")
        seen = "return [...document.querySelectorAll('#charts path')].map(path => path.getAttribute('d'))"
        before = self.browser.run(seen)
        step = self.browser.run("return document.querySelector('#charts output').textContent")
        self.browser.await_("a newer step", "return document.querySelector('#charts output').textContent !== arguments[0]",
                            step)
        after = self.browser.run(seen)
        self.assertEqual(len(before), len(after))
        self.assertTrue(all(old != new for old, new in zip(before, after)), "a chart stands still")
        self.see("Loss", "Tokens a second", "eval/accuracy", "Gradient norm by group", "Learning rate",
                 "Where the slowest rank's time goes", "this job")
        # Three numbers, norm, clip, two groups, learning rate, four parts of a step and of a rank, two memories.
        self.assertEqual(len(before), 18)

    def drag(self, selector, begin, end):
        """The mouse, over a part of what the selector finds, from and to fractions of its width."""
        left, top, width = self.browser.run(
            "const one = document.querySelector(arguments[0]); one.scrollIntoView({ behavior: 'instant', block: 'center' });"
            "const box = one.getBoundingClientRect(); return [box.left, box.top, box.width]", selector)
        self.browser.drag(left + begin * width, left + end * width, top + 40)

    def test_a_part_of_the_steps_is_looked_at(self):
        self.open("/?job=steady")
        shown = "return (document.querySelector('.ranges span')?.innerText ?? '')"
        self.browser.await_("some steps", f"{shown}.match(/Steps 1 to (\\d+)/)?.[1] > 12")
        self.drag("#charts svg", 0.4, 0.7)
        zoomed = self.browser.await_("fewer steps", f"{shown}.match(/Steps ([2-9]|\\d\\d+) to \\d+.*Double-click for all\\./)?.[0]")
        # Where it has been zoomed to, it stays.
        drawn = "return document.querySelector('#charts output').textContent"
        self.assertEqual(self.browser.run(shown), zoomed)
        self.assertIn(re.findall(r"to (\d+)", zoomed)[0] + ":", self.browser.run(drawn))
        self.picture("zoomed")
        self.browser.run("document.querySelector('#charts svg').focus()")
        self.browser.press("0")
        self.browser.await_("all steps", f"{shown}.startsWith('Steps 1 to')")
        self.browser.run("document.querySelector('[data-range=\"Last 100\"]').click()")
        self.browser.await_("that it is chosen", "return document.querySelector('[data-range=\"Last 100\"]').ariaPressed === 'true'")

    def test_a_parameters_distribution_opens(self):
        self.open("/?job=steady")
        self.browser.await_("parameters", "return document.querySelectorAll('.names button').length === 17")
        self.browser.run("document.querySelector('[data-name=\"h.2.mlp.weight\"]').click()")
        self.see("Weights", "First moment", "Second moment", "4,096 elements in group decay")
        counts = self.browser.run(
            "return [...document.querySelectorAll('.plane')].map(plane => [...plane.querySelectorAll('title')]"
            ".reduce((sum, title) => sum + Number(title.textContent.split(': ')[1]), 0))")
        self.assertEqual(counts, [4096] * 3)
        self.picture("distribution")

    def test_the_timeline_of_a_step_is_recorded(self):
        self.open("/?job=steady")
        self.see("Record the next step")
        for _ in range(20):
            self.browser.run("document.querySelector('#timeline button').click()")
            self.browser.await_("a recording", "return !document.querySelector('#timeline button').disabled && "
                                "document.querySelector('#timeline svg rect') !== null")
            if "sending weights" in self.browser.run(TEXT):
                break  # Where this machine pauses a recording ends, with the commit, before weights are on their way.
        self.assertGreaterEqual(self.browser.run("return document.querySelectorAll('#timeline svg rect').length"), 12)
        self.see("events", "arriving", "updating", "sending weights")
        self.picture("timeline")
        # A part of it, and that part further.
        where = "return document.querySelector('#timeline .tools:nth-of-type(2) span').textContent"
        self.assertIn("whole step", self.browser.run(where))
        self.drag("#timeline svg", 0.3, 0.6)
        self.browser.await_("a part", where + ".startsWith('From ')")
        part = self.browser.run(where)
        self.browser.press("+")
        self.assertNotEqual(self.browser.run(where), part)
        self.picture("timeline_zoomed")
        self.browser.press("0")
        self.assertIn("whole step", self.browser.run(where))

    def test_the_keyboard_is_enough(self):
        self.open("/")
        self.see("stuck")

        def tab_to(text, most=60):
            for _ in range(most):
                self.browser.press("Tab")
                if text in (self.browser.run(FOCUSED) or ""):
                    return
            self.fail(f"the tab key does not lead to {text}")

        tab_to("steady")
        self.browser.press("Enter")
        self.see("Parameters", "h.0.attn.weight")
        self.browser.await_("a chart", "return document.querySelector('#charts svg') !== null")
        self.browser.run("document.querySelector('#charts svg').focus()")
        said = "return document.querySelector('#charts output').textContent"
        self.browser.press("Home")
        first = self.browser.run(said)
        # Meanwhile the page asks again, and draws its charts anew: the chosen step and the focus stay.
        curve = "return document.querySelector('#charts path.curve').getAttribute('d')"
        self.browser.await_("another drawing", f"{curve} !== arguments[0]", self.browser.run(curve))
        self.assertEqual(self.browser.run("return document.activeElement.nodeName"), "svg")
        self.assertTrue(self.browser.run("return document.querySelector('#charts .cursor') !== null"))
        self.assertRegex(first, r"^step \d+: ")
        tab_to("Part of a name")
        self.browser.press("m", "l", "p", ".", "b")
        self.browser.await_("four parameters", "return document.querySelectorAll('.names button').length === 4")
        tab_to("h.0.mlp.bias", 3)
        self.browser.press("Enter")
        self.see("128 elements in group no_decay", "Momentum", "nesterov")
        ring = self.browser.run("return getComputedStyle(document.activeElement).outlineStyle")
        self.assertNotEqual(ring, "none", "the focus is not seen")

    def test_a_phone_is_wide_enough(self):
        for path, text in (("/", "stuck"), ("/?job=stuck", "Gradient norm"), ("/?job=steady", "Gradient norm")):
            with self.subTest(path):
                self.browser.screen(400, dark=path == "/")
                self.open(path)
                self.see(text)
                self.no_wider_than(400)
                small = self.browser.run(
                    "return [...document.querySelectorAll('main p, main td, main dd, main a')]"
                    ".filter(one => one.innerText && parseFloat(getComputedStyle(one).fontSize) < 11).length")
                self.assertEqual(small, 0, "text is too small to be read")
                # No table is wider than the phone: its rows are cards, in which each cell says what it is.
                hidden = self.browser.run("return [...document.querySelectorAll('.scroll')]"
                                          ".filter(one => one.querySelector('table') && one.scrollWidth > one.clientWidth).length")
                self.assertEqual(hidden, 0, "a part of a table is out of sight")
                if path != "/":
                    self.assertIn("Learning rate", self.browser.run(
                        "return [...document.querySelectorAll('#groups td')].map(one => getComputedStyle(one, '::before').content)"
                        ".join()"))
                self.picture("phone" + re.sub(r"\W+", "_", path))

    def test_dark_is_dark_and_its_text_can_be_read(self):
        contrast = """
          const light = (colour) => { const [r, g, b] = colour.match(/[\\d.]+/g).map(Number).map(v => v / 255)
              .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
            return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
          const ground = (one) => { for (; one; one = one.parentElement) { const colour = getComputedStyle(one).backgroundColor;
            if (!/, 0\\)$/.test(colour)) return colour; } return 'rgb(255, 255, 255)'; };
          let worst = [99, ''];
          for (const one of document.querySelectorAll('body *')) {
            if (![...one.childNodes].some(node => node.nodeType === 3 && node.data.trim()) || one.closest('svg, noscript, .skip, :disabled')) continue;
            const [a, b] = [light(getComputedStyle(one).color), light(ground(one))];
            const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
            if (ratio < worst[0]) worst = [ratio, one.innerText];
          }
          return [light(getComputedStyle(document.body).backgroundColor), ...worst];"""
        for dark in (True, False):
            self.browser.screen(1180, dark=dark)
            self.open("/?job=stuck")
            self.see("Gradient norm", "no_decay")
            ground, ratio, text = self.browser.run(contrast)
            with self.subTest(dark=dark):
                self.assertTrue(ground < 0.05 if dark else ground > 0.8)
                self.assertGreaterEqual(ratio, 4.5, f"contrast of '{text}'")
            self.picture("dark" if dark else "light")

    def test_a_job_that_is_not_there_is_said_so(self):
        self.open("/?job=nobody")
        self.see("nobody", "All jobs")
        self.assertTrue(any("404" in message for message in self.browser.messages()))  # The browser's own line.


class PageWithTokens(unittest.TestCase):
    """A service that takes tokens: the page asks for one, once."""

    @classmethod
    def setUpClass(cls):
        folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        (folder / "roles").write_text(f"operator * user:{pwd.getpwuid(os.getuid()).pw_name}\nviewer * token:all\n")
        (folder / "tokens").touch(mode=0o600)
        (folder / "tokens").write_text(f"all {hashlib.sha256(b'secret').hexdigest()}\n")
        cls.service = Service(BALLASTD, folder, "--metrics-listen=0", "--memory-limit=1GiB", f"--roles-file={folder / 'roles'}",
                              f"--tokens-file={folder / 'tokens'}", listen=f"unix:{folder}/socket")
        cls.addClassCleanup(cls.service.stop)
        cls.base = status_address(cls.service)
        cls.enterClassContext(played(cls.service.address, PROTO))
        cls.browser = webdriver.Browser(folder)
        cls.addClassCleanup(cls.browser.close)

    def sees(self, text):
        await_(text, lambda: text in self.browser.run(TEXT))

    def test_it_is_asked_for_and_kept_by_the_tab(self):
        self.browser.open(self.base + "/")
        self.sees("Who looks?")
        for token, seen in (("wrong", "does not know this token"), ("secret", "stuck")):
            self.browser.run("document.getElementById('token').value = arguments[0];"
                             "document.querySelector('form').requestSubmit()", token)
            self.sees(seen)
        self.browser.open(self.base + "/?job=stuck")
        self.sees("step")
        self.assertNotIn("Who looks?", self.browser.run(TEXT))
        self.browser.run("sessionStorage.clear()")
        self.browser.open(self.base + "/#token=secret")
        self.sees("steady")
        self.assertEqual(self.browser.run("return location.href"), self.base + "/")
        self.assertEqual([url for url in self.browser.requests() if "secret" in url.partition("#")[0]], [])


if __name__ == "__main__":
    if webdriver.missing():
        print(f"skipped: {webdriver.missing()}")
        sys.exit(SKIPPED)
    BALLASTD, PROTO = sys.argv[1:3]
    PICTURES = sys.argv[3] if len(sys.argv) > 3 and not sys.argv[3].startswith("-") else None
    unittest.main(argv=sys.argv[:1] + [word for word in sys.argv[3:] if word != PICTURES], verbosity=2)
