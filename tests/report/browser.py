"""A real Chromium for tests of pages, with a given screen, colour scheme and paper."""

import base64
import shutil
from contextlib import contextmanager

from forked import free_port
from run_log import GIVE_UP_S, wait_until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")


class Browser:
    """A Chromium window."""

    def __init__(self):
        from selenium import webdriver

        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,1000"):
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        service = webdriver.ChromeService(DRIVER, port=free_port())
        self.driver = webdriver.Chrome(options=options, service=service)
        self.driver.set_script_timeout(GIVE_UP_S)
        self.driver.set_page_load_timeout(GIVE_UP_S)

    def open(self, uri, *, ready="return true"):
        self.driver.get(uri)
        self.wait_for(ready)

    def js(self, script, *arguments):
        return self.driver.execute_script(script, *arguments)

    def cdp(self, command, **arguments):
        return self.driver.execute_cdp_cmd(command, arguments)

    def wait_for(self, condition):
        """Wait until a condition is true, however long that takes."""
        wait_until(lambda: self.js(condition), condition)

    def resize(self, width):
        self.cdp("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 900)
        self.wait_for(f"return window.innerWidth === {width}")
        self.settle()

    def prefer(self, scheme):
        self.cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.wait_for(f"return matchMedia('(prefers-color-scheme: {scheme})').matches")
        self.settle()

    def settle(self):
        """Wait for two frames, in which resize observers run."""
        self.driver.execute_async_script(
            "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 0)))"
        )

    def pdf(self):
        return base64.b64decode(self.cdp("Page.printToPDF", preferCSSPageSize=True, printBackground=True)["data"])

    def complaints(self):
        return [entry for entry in self.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]

    @contextmanager
    def default_screen(self):
        """Restore screen and colour scheme at the end."""
        try:
            yield self
        finally:
            self.cdp("Emulation.clearDeviceMetricsOverride")
            self.cdp("Emulation.setEmulatedMedia", features=[])
