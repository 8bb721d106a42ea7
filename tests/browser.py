"A browser without a window, driven by chromedriver over the WebDriver protocol (https://www.w3.org/TR/webdriver2/)."

import base64
import json
import shutil
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path
from urllib.request import Request, urlopen

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
DRIVER = shutil.which("chromedriver")
WHY_NONE = None if CHROMIUM and DRIVER else "no chromium with chromedriver is installed"
_OPTIONS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-sync "
    "--disable-component-update --disable-dev-shm-usage"
).split()
_ELEMENT = (
    "element-6066-11e4-a52e-4f735466cecf"  # the key of the protocol for the name of an element
)


class Browser:
    "A page. `seen` are the addresses that it has asked for."

    def __init__(self, address):
        self.address = address

    def send(self, path, method="POST", **content):
        data = json.dumps(content).encode() if method == "POST" else None
        with urlopen(
            Request(self.address + path, data, {"Content-Type": "application/json"}, method=method),
            timeout=60,
        ) as answer:
            return json.load(answer)["value"]

    def begin(self, folder):
        chrome = dict(binary=CHROMIUM, args=[*_OPTIONS, f"--user-data-dir={folder}"])
        wishes = {
            "goog:chromeOptions": chrome,
            "goog:loggingPrefs": dict(performance="ALL", browser="ALL"),
        }
        self.address += (
            "/session/" + self.send("/session", capabilities=dict(alwaysMatch=wishes))["sessionId"]
        )

    def open(self, url):
        self.send("/url", url=url)

    def script(self, text):
        return self.send("/execute/sync", script=text, args=[])

    def find(self, css):
        return self.send("/element", using="css selector", value=css)[_ELEMENT]

    def click(self, css):
        self.send(f"/element/{self.find(css)}/click")

    def type(self, css, text):
        self.send(f"/element/{self.find(css)}/value", text=text)

    def frame(self, css):
        self.send("/frame", id=None if css is None else {_ELEMENT: self.find(css)})

    def command(self, name, **params):
        return self.send("/goog/cdp/execute", cmd=name, params=params)

    def size(self, width, height):
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def picture(self, path):
        Path(path).write_bytes(base64.b64decode(self.send("/screenshot", "GET")))

    def logs(self, kind):
        return self.send("/se/log", type=kind)

    def seen(self):
        "The addresses that pages have asked for since the last call."
        events = [json.loads(line["message"])["message"] for line in self.logs("performance")]
        return [
            x["params"]["request"]["url"]
            for x in events
            if x["method"] == "Network.requestWillBeSent"
        ]


@contextmanager
def browser():
    "A `Browser` with a profile of its own, which is removed at the end."
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        subprocess.Popen(
            [DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as driver,
    ):
        try:
            port = next(
                line.rpartition("port ")[2].strip(" .\n")
                for line in driver.stdout
                if "started successfully on port" in line
            )
            page = Browser(f"http://127.0.0.1:{port}")
            page.begin(folder)
            try:
                yield page
            finally:
                page.send("", "DELETE")
        finally:
            driver.terminate()
