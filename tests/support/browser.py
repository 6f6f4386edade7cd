"""A real Chromium for tests of pages, with the screen, colour scheme and paper they ask for."""

import base64
import shutil
import time
from contextlib import contextmanager

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")


class Browser:
    """One window of Chromium."""

    def __init__(self):
        from selenium import webdriver

        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,1000"):
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
        self.driver.set_script_timeout(60)

    def open(self, uri, *, ready="return true"):
        self.driver.get(uri)
        self.wait_for(ready)

    def js(self, script, *arguments):
        return self.driver.execute_script(script, *arguments)

    def cdp(self, command, **arguments):
        return self.driver.execute_cdp_cmd(command, arguments)

    def wait_for(self, condition, timeout_s=60):
        """Wait until a condition is true; how long that may take is no part of a test."""
        deadline = time.monotonic() + timeout_s
        while not self.js(condition):
            assert time.monotonic() < deadline, f"never came true: {condition}; {self.complaints()}"
            time.sleep(0.02)

    def resize(self, width, height=900):
        self.cdp(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 900
        )
        self.wait_for(f"return window.innerWidth === {width}")
        self.settle()

    def prefer(self, scheme):
        self.cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.wait_for(f"return matchMedia('(prefers-color-scheme: {scheme})').matches")
        self.settle()

    def settle(self):
        """Wait for two frames, in which observers of sizes run."""
        self.driver.execute_async_script(
            "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 0)))"
        )

    def pdf(self):
        return base64.b64decode(self.cdp("Page.printToPDF", preferCSSPageSize=True, printBackground=True)["data"])

    def complaints(self):
        return [entry for entry in self.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]

    @contextmanager
    def default_screen(self):
        """Put screen and colour scheme back at the end."""
        try:
            yield self
        finally:
            self.cdp("Emulation.clearDeviceMetricsOverride")
            self.cdp("Emulation.setEmulatedMedia", features=[])
