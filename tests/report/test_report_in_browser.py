"""The report in a real browser: it draws itself, and a click on a plan shows that plan's timeline."""

import json
import re
import shutil
import time

import pytest
from run_folders import MICRO_BATCHES, RANKS, make_job, write_auto_run

from perseus_ds.cli.main import main

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="no Chromium here: apt-get install chromium chromium-driver"
)


@pytest.fixture(scope="module")
def job():
    return make_job()


@pytest.fixture(scope="module")
def page(tmp_path_factory, job):
    folder = tmp_path_factory.mktemp("run")
    write_auto_run(folder, job)
    assert main(["report", str(folder)]) == 0
    return (folder / "report.html").as_uri()


@pytest.fixture(scope="module")
def browser():
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,1000"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_script_timeout(20)
    yield driver
    driver.quit()


@pytest.fixture
def opened(browser, page):
    browser.get(page)
    wait_for(browser, "return document.querySelectorAll('#timeline .barlayer .point').length > 0")
    return browser


def wait_for(browser, condition, timeout_s=20):
    deadline = time.monotonic() + timeout_s
    while not browser.execute_script(condition):
        assert time.monotonic() < deadline, f"never came true: {condition}; {browser.get_log('browser')}"
        time.sleep(0.02)


def titles(browser):
    return browser.execute_script(
        "return document.getElementById('timeline').layout.annotations.map(a => a.text.replace(/<[^>]*>/g, ''))"
    )


def complaints(browser):
    return [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def click_on_plan(browser, number):
    """Click where the plan's point is, as a person would."""
    where = browser.execute_script(
        """
        const plot = document.getElementById("frontier");
        plot.scrollIntoView({ block: "center" });
        const trace = plot.data.find(t => t.meta === "plans"), { xaxis, yaxis } = plot._fullLayout;
        const box = plot.getBoundingClientRect(), plan = arguments[0];
        const [x, y] = [trace.x, trace.y].map(values => Array.from(values._inputArray || values)[plan]);
        return [box.left + xaxis._offset + xaxis.d2p(x), box.top + yaxis._offset + yaxis.d2p(y)];
        """,
        number,
    )
    at = {"x": where[0], "y": where[1], "button": "left", "clickCount": 1}
    for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
        browser.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": kind, **at})


def test_it_draws_everything_without_a_complaint(opened, job):
    plots = opened.execute_script(
        "return [...document.querySelectorAll('.plot')].map(p => [p.id, !!p.querySelector('svg')])"
    )
    assert {name for name, drawn in plots if drawn} == {
        "frontier", "timeline", "history", "profile-time", "profile-energy", "profile-power"
    }  # fmt: skip
    before, after, measured = titles(opened)
    default, plan = job.frontier.baseline, job.frontier.plans[2]
    assert before == f"Everything at the highest clock, predicted: {default.time_s:.3f} s, {figure(default.energy_j)} J"
    assert after == f"Plan 2, predicted: {plan.time_s:.3f} s, {figure(plan.energy_j)} J"
    assert measured.startswith("Measured: plan 2, iteration 8 of ")
    assert f"{plan.time_s:.3f} s" in measured
    rows = opened.execute_script("return [...document.querySelectorAll('#slack tbody tr')].map(r => r.innerText)")
    assert len(rows) == RANKS
    assert all(re.search(r"\d+ %.*MHz", row) for row in rows)
    assert complaints(opened) == []


def test_a_click_on_a_plan_shows_its_timeline(opened, job):
    last = len(job.frontier.plans) - 1
    shown = bars(opened)
    click_on_plan(opened, last)
    wait_for(opened, f"return document.getElementById('timeline').layout.annotations[1].text.includes('Plan {last},')")
    assert f"{job.frontier.plans[-1].time_s:.3f} s" in titles(opened)[1]
    assert opened.find_element("id", "plan").get_attribute("value") == str(last)
    assert bars(opened) != shown
    assert complaints(opened) == []


def test_what_the_page_works_out_is_what_the_profile_says_of_every_plan(opened, job):
    ends = {}
    for number in range(len(job.frontier.plans)):
        opened.execute_script(
            "const s = document.getElementById('plan'); s.value = arguments[0]; s.dispatchEvent(new Event('input'))",
            number,
        )
        wait_for(
            opened, f"return document.getElementById('timeline').layout.annotations[1].text.includes('Plan {number},')"
        )
        ends[number] = max(base + length for base, length, _ in bars(opened, "y2"))
    assert ends == pytest.approx({n: plan.time_s for n, plan in enumerate(job.frontier.plans)})


def bars(browser, axis="y2"):
    """Start, length and colour of the instructions on one of the timelines."""
    found = browser.execute_script(
        """
        const plain = a => Array.from((a && a._inputArray) || a || []);
        return JSON.stringify(document.getElementById("timeline").data
          .filter(t => t.type === "bar" && t.yaxis === arguments[0] && Array.isArray(t.marker.color))
          .flatMap(t => t.base.map((b, i) => [b, t.x[i], t.marker.color[i]])));
        """,
        axis,
    )
    found = json.loads(found)
    assert len(found) == RANKS * MICRO_BATCHES * 2
    return found


def test_colour_tells_clock_or_power(opened, job):
    clocks = {colour for _, _, colour in bars(opened)}
    assert clocks == {clock for stream in job.frontier.plans[2].clocks_mhz for clock in stream}
    opened.execute_script("document.querySelector('[name=colour][value=power]').click()")
    wait_for(opened, "return document.getElementById('timeline').layout.coloraxis.colorbar.title.text.includes('[W]')")
    rows = [job.profile.options(*key) for key in job.profile.keys]
    powers = sorted(float(power) for row in rows for power in row.energy_j / row.time_s)
    for _, _, colour in bars(opened):
        assert min(abs(power - colour) for power in powers) < 0.01


@pytest.mark.extended
@pytest.mark.parametrize(
    ("gone", "drawn"),
    [
        (["profile.csv", "profile.json"], ["frontier", "timeline", "history"]),
        (["frontier.json"], ["timeline", "history", "profile-time", "profile-energy", "profile-power"]),
        (["timeline.json", "run.jsonl", "profile.csv", "profile.json"], ["frontier"]),
    ],
)
def test_what_there_is_is_drawn(browser, tmp_path, job, gone, drawn):
    write_auto_run(tmp_path, job)
    for name in gone:
        (tmp_path / name).unlink()
    assert main(["report", str(tmp_path)]) == 0
    browser.get((tmp_path / "report.html").as_uri())
    plots = "[...document.querySelectorAll('.plot')]"
    wait_for(browser, f"return {plots}.length && {plots}.every(plot => plot.querySelector('svg'))")
    assert browser.execute_script(f"return {plots}.map(plot => plot.id)") == drawn
    if "timeline" in drawn:
        assert titles(browser)[0].startswith("Measured: ")
    assert complaints(browser) == []


def test_it_fits_a_phone_and_paper(opened, page):
    opened.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    )
    try:
        opened.get(page)
        wait_for(opened, "return document.querySelectorAll('#timeline .barlayer .point').length > 0")
        assert opened.execute_script("return document.documentElement.scrollWidth") == 390
    finally:
        opened.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    pdf = opened.execute_cdp_cmd("Page.printToPDF", {"preferCSSPageSize": True, "printBackground": True})
    assert len(pdf["data"]) > 30_000
    assert complaints(opened) == []


def figure(value):
    return f"{value:,.0f}".replace(",", "\N{NARROW NO-BREAK SPACE}")
