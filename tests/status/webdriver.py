"""A browser without a window, driven by what W3C's WebDriver and Chromium's own protocol need: Python alone."""

import base64
import json
import pathlib
import shutil
import subprocess
import time
import urllib.error
import urllib.request

from processes import PATIENCE

BROWSER, DRIVER = "chromium", "chromedriver"
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
KEYS = {"Tab": "\ue004", "Enter": "\ue007", "Left": "\ue012", "Home": "\ue011", "Backspace": "\ue003"}


def missing():
    """Why there is no browser to test with; empty if there is one."""
    absent = [name for name in (BROWSER, DRIVER) if shutil.which(name) is None]
    return f"{' and '.join(absent)} not found: apt-get install chromium chromium-driver" if absent else ""


class Browser:
    def __init__(self, folder):
        self.log = open(pathlib.Path(folder, "chromedriver.log"), "wb")
        # Its output is read as it comes, from a pipe.
        self.driver = subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=self.log, text=True)
        for line in self.driver.stdout:
            if "started successfully on port" in line:
                self.address = "http://127.0.0.1:" + line.rstrip(".\n").rpartition(" ")[2]
                break
        else:
            raise AssertionError("chromedriver did not start")
        answer = self._call("POST", "/session", {"capabilities": {"alwaysMatch": {
            "browserName": "chrome",
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
            "goog:chromeOptions": {"binary": shutil.which(BROWSER), "args": [
                "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
                "--disable-background-networking", "--disable-component-update", "--no-first-run",
                f"--user-data-dir={folder}/profile", "--window-size=1180,900"]}}}})
        self.session = f"/session/{answer['sessionId']}"

    def _call(self, method, path, body=None):
        request = urllib.request.Request(
            self.address + path, method=method, headers={"Content-Type": "application/json"},
            data=None if body is None else json.dumps(body).encode())
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(json.load(error)["value"]["message"].splitlines()[0]) from error

    def post(self, path, **body):
        return self._call("POST", self.session + path, body)

    def open(self, url):
        self.post("/url", url=url)

    def run(self, script, *arguments):
        """What a function body returns in the page."""
        return self.post("/execute/sync", script=script, args=list(arguments))

    def devtools(self, command, **parameters):
        return self.post("/goog/cdp/execute", cmd=command, params=parameters)

    def screen(self, width, height=900, dark=False, scale=1):
        self.devtools("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale,
                      mobile=width < 600)
        self.devtools("Emulation.setEmulatedMedia",
                      features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])

    def picture(self, path):
        """The whole page."""
        shot = self.devtools("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        pathlib.Path(path).write_bytes(base64.b64decode(shot["data"]))

    def press(self, *keys):
        """Keys of the keyboard, to whatever has the focus."""
        strokes = []
        for key in keys:
            strokes += [{"type": kind, "value": KEYS.get(key, key)} for kind in ("keyDown", "keyUp")]
        self.post("/actions", actions=[{"type": "key", "id": "keyboard", "actions": strokes}])

    def drag(self, left, right, y):
        """The mouse, pressed, from one place of what is seen to another."""
        moves = [("pointerMove", left), ("pointerDown", left), ("pointerMove", (left + right) / 2), ("pointerMove", right),
                 ("pointerUp", right)]
        self.post("/actions", actions=[{"type": "pointer", "id": "mouse", "actions": [
            {"type": kind, "button": 0} if kind != "pointerMove" else {"type": kind, "x": round(x), "y": round(y), "duration": 20}
            for kind, x in moves]}])

    def messages(self):
        """What the page has written to the console since the last call, errors of loading included."""
        return [entry["message"] for entry in self.post("/se/log", type="browser")]

    def requests(self):
        """The addresses that the page has asked for since the last call."""
        events = (json.loads(entry["message"])["message"] for entry in self.post("/se/log", type="performance"))
        return [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]

    def await_(self, what, script, *arguments, seconds=PATIENCE):
        begin = time.monotonic()
        while True:
            value = self.run(script, *arguments)
            if value:
                return value
            if time.monotonic() - begin > seconds:
                raise AssertionError(f"{what} is not there after {seconds} s")
            time.sleep(0.02)

    def close(self):
        try:
            self._call("DELETE", self.session)
        except (AssertionError, OSError, AttributeError):
            pass
        self.driver.terminate()
        self.driver.wait(PATIENCE)
        self.driver.stdout.close()
        self.log.close()
