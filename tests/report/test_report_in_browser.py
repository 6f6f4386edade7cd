"""Pages in a real browser: they are drawn at any width, in light and dark and on paper."""

import json
import re

import pytest
from browser import CHROMIUM, DRIVER, Browser
from live_records import iteration, started, write
from run_folders import MICRO_BATCHES, RANKS, write_auto_run

from perseus_ds.cli.main import main
from perseus_ds.report.figures import PALETTE

pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="no Chromium here: apt-get install chromium chromium-driver"
)
DRAWN = """
    const plots = [...document.querySelectorAll(".plot")], timeline = document.getElementById("timeline");
    return plots.every(plot => plot.querySelector(".main-svg")) && (!timeline || timeline.querySelector(".bar"));
"""
SCREENS = [
    (390, "dark"),
    *(pytest.param(width, "light", marks=pytest.mark.extended) for width in (844, 1280)),
]
PLOTS = {"frontier", "history", "profile-time", "profile-energy", "profile-power"}


@pytest.fixture(scope="module")
def pages(tmp_path_factory, job):
    folder = tmp_path_factory.mktemp("run")
    write_auto_run(folder / "run", job)
    assert main(["report", str(folder / "run")]) == 0
    for name, phase, energy_j, plan in (("default", "observe", 100.0, None), ("planned", "run", 85.0, 0)):
        write(folder / name, [started(), *(iteration(n, phase, 1.0, energy_j, plan=plan) for n in (1, 2))])
    assert main(["compare", str(folder / "default"), str(folder / "planned"), "--out", f"{folder}"]) == 0
    return {"report": (folder / "run/report.html").as_uri(), "comparison": (folder / "comparison.html").as_uri()}


@pytest.fixture(scope="module")
def page(pages):
    return pages["report"]


@pytest.fixture(scope="module")
def browser():
    window = Browser()
    yield window
    window.driver.quit()


@pytest.fixture
def opened(browser, page):
    with browser.default_screen():
        browser.open(page, ready=DRAWN)
        yield browser


def titles(browser):
    return browser.js("return document.getElementById('timeline').panels.map(p => p.title.join(': '))")


def bars(browser, panel):
    """Return start, length and clock of the passes of a timeline."""
    found = browser.js(
        """return document.getElementById("timeline").panels[arguments[0]].bars
             .filter(b => b.clock !== null).map(b => [b.start, b.end - b.start, b.clock])""",
        panel,
    )
    assert len(found) == RANKS * MICRO_BATCHES * 2
    return found


def choose(browser, plan):
    browser.js(
        "const s = document.getElementById('plan'); s.value = arguments[0]; s.dispatchEvent(new Event('input'))", plan
    )
    browser.wait_for(
        f"return document.getElementById('timeline').panels[1].title[0].startsWith('Plan {plan},')"
        f" && document.querySelectorAll('#timeline .title')[1].textContent.startsWith('Plan {plan},')"
    )


def test_it_draws_everything_without_a_complaint_or_a_request(browser, page, job):
    with browser.default_screen():
        browser.driver.get_log("performance")
        browser.open(page, ready=DRAWN)
        assert set(browser.js("return [...document.querySelectorAll('.plot')].map(p => p.id)")) == PLOTS
        before, after, measured = titles(browser)
        default, plan = job.frontier.baseline, job.frontier.plans[2]
        highest = "Everything at the highest clock, predicted"
        assert before == f"{highest}: {default.time_s:.3f} s, {default.energy_j:.1f} J"
        assert after == f"Plan 2, predicted: {plan.time_s:.3f} s, {plan.energy_j:.1f} J"
        assert measured.startswith("Measured: plan 2, iteration 8 of ")
        assert f"{plan.time_s:.3f} s" in measured
        assert requests(browser) <= {page, "data:,"}
        assert browser.complaints() == []


def requests(browser):
    messages = [json.loads(entry["message"])["message"] for entry in browser.driver.get_log("performance")]
    return {m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"}


def test_the_slider_shows_the_same_timelines_as_the_profile_and_a_click_chooses_a_plan(opened, job):
    last = len(job.frontier.plans) - 1
    ends, energies = {}, {}
    for number in range(last):
        choose(opened, number)
        ends[number] = max(start + length for start, length, _ in bars(opened, 1))
        energies[number] = sum(opened.js("return energyOf(document.getElementById('timeline').panels[1])"))
    assert ends == pytest.approx({n: plan.time_s for n, plan in enumerate(job.frontier.plans[:-1])})
    assert energies == pytest.approx({n: plan.energy_j for n, plan in enumerate(job.frontier.plans[:-1])}, rel=1e-4)
    rows = opened.js("return [...document.querySelectorAll('#slack tbody tr')].map(r => r.innerText)")
    assert len(rows) == RANKS
    assert all(re.search(r"\d+ %.* J.*MHz", row, re.S) for row in rows)
    x, y = opened.js(
        """
        const plot = document.getElementById("frontier");
        plot.scrollIntoView({ block: "center" });
        const trace = plot.data.find(t => t.meta === "plans"), { xaxis, yaxis } = plot._fullLayout;
        const box = plot.getBoundingClientRect(), plan = arguments[0];
        const [x, y] = [xaxis._offset + xaxis.d2p(trace.x[plan]), yaxis._offset + yaxis.d2p(trace.y[plan])];
        return [box.left + x, box.top + y];
        """,
        last,
    )
    for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
        opened.cdp("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
    opened.wait_for(f"return document.getElementById('timeline').panels[1].title[0].startsWith('Plan {last},')")
    assert opened.js("return document.getElementById('plan').value") == str(last)
    spoken = opened.js("return document.getElementById('plan').getAttribute('aria-valuetext')")
    assert spoken.startswith(f"Plan {last}: {job.frontier.plans[-1].time_s:.4f} s")
    assert opened.complaints() == []


def test_colour_shows_clock_or_power_the_pointer_a_tip_and_zooming_less_time(opened, job):
    plan = job.frontier.plans[2]
    fills = """
        const shown = [...document.querySelectorAll(".panel")[1].querySelectorAll(".bar[fill]")];
        return new Set(shown.map(bar => bar.getAttribute("fill"))).size;
    """
    assert opened.js(fills) == len({clock for stream in plan.clocks_mhz for clock in stream})
    opened.js("document.querySelector('[name=colour][value=power]').click()")
    opened.wait_for("return document.getElementById('scale').textContent.includes(' W')")
    rows = [job.profile.at(i.stage, i.kind, clock_mhz) for i, clock_mhz in plan.clock_of_mhz.items()]
    assert opened.js(fills) == len({round(row.energy_j / row.time_s, 3) for row in rows})
    opened.js("document.getElementById('timeline').scrollIntoView({ block: 'center' })")
    x, y = opened.js(
        """
        const box = document.getElementById("timeline").getBoundingClientRect(), g = view.geometry;
        const bar = view.panels[1].bars.find(b => b.rank === 1 && b.clock !== null);
        return [box.left + g.x((bar.start + bar.end) / 2), box.top + g.y(1, 1) + g.row / 2];
        """
    )
    opened.cdp("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    opened.wait_for("return !document.getElementById('tip').hidden")
    tip = opened.js("return document.getElementById('tip').innerText")
    assert re.match(r"forward of micro-batch 0, stage 1\n.* ms, from .* s\n\d+ MHz, \d+ W, [\d.]+ J", tip)
    shown_s = "return view.geometry.to - view.geometry.from"
    whole_s = opened.js(shown_s)
    opened.js("document.querySelector('[data-zoom=in]').click()")
    assert opened.js(shown_s) == pytest.approx(whole_s / 2)
    for kind, dx in (("mousePressed", 0), ("mouseMoved", 60), ("mouseReleased", 60)):
        opened.cdp("Input.dispatchMouseEvent", type=kind, x=x + dx, y=y, button="left", buttons=1, clickCount=1)
    assert opened.js(shown_s) < whole_s / 4
    opened.js("document.querySelector('[data-zoom=all]').click()")
    assert opened.js(shown_s) == pytest.approx(whole_s)


HEIGHTS = """
    const drawn = plot => plot.querySelector(".main-svg").getBoundingClientRect().height;
    return Object.fromEntries([...document.querySelectorAll(".plot")].map(p => [p.id, [p.clientHeight, drawn(p)]]));
"""
# Elements that require horizontal scrolling or are not visible.
CUT_OFF = """
    const scrolled = [...document.querySelectorAll(".scroll")].filter(e => e.scrollWidth > e.clientWidth);
    const wide = [...document.querySelectorAll("main *")].filter(e => e.getBoundingClientRect().right > innerWidth + 1);
    return [...scrolled, ...wide.filter(e => !e.closest("svg"))].map(e => e.tagName + ": " + e.innerText.slice(0, 60));
"""


@pytest.mark.parametrize("name", ["report", "comparison"])
@pytest.mark.parametrize(("width", "scheme"), SCREENS)
def test_a_page_fits_every_screen_in_light_and_dark_and_is_accessible(browser, pages, name, width, scheme):
    from axe_core_python.selenium import Axe

    with browser.default_screen():
        browser.open(pages[name], ready=DRAWN)  # an empty page of a mobile screen has another width
        browser.prefer(scheme)
        browser.resize(width)
        browser.open(pages[name], ready=DRAWN)
        assert browser.js("return document.documentElement.scrollWidth") <= width
        assert browser.js(CUT_OFF) == []
        for plot, (box, drawn) in browser.js(HEIGHTS).items():
            assert box == drawn > 200, plot
        ink, surface = (PALETTE[colour][scheme == "dark"] for colour in ("ink", "surface"))
        colours = browser.js(
            "const l = document.querySelector('.plot')._fullLayout; return [l.paper_bgcolor, l.font.color]"
        )
        assert colours == [surface, ink]
        assert browser.js("return getComputedStyle(document.querySelector('h1')).color") == rgb(ink)
        violations = Axe().run(browser.driver)["violations"]
        assert [(v["id"], v["impact"], [node["html"][:100] for node in v["nodes"]]) for v in violations] == []
        assert browser.complaints() == []


def rgb(colour):
    return "rgb({}, {}, {})".format(*(int(colour[at : at + 2], 16) for at in (1, 3, 5)))


BACKGROUND = "return document.getElementById('frontier')._fullLayout.paper_bgcolor"


def test_a_change_of_scheme_is_followed_and_paper_is_light(opened):
    opened.prefer("dark")
    assert opened.js(BACKGROUND) == PALETTE["surface"][1]
    before = opened.js(HEIGHTS)
    opened.js(
        f"addEventListener('beforeprint', () => {{ window.seen = [(() => {{ {BACKGROUND} }})(), "
        f"(() => {{ {HEIGHTS} }})()] }})"
    )
    assert len(opened.pdf()) > 30_000
    background, heights = opened.js("return window.seen")
    assert background == PALETTE["surface"][0]
    for name, (box, drawn) in heights.items():
        assert 200 < box == drawn <= 340, f"{name} on paper"
    opened.settle()
    assert (opened.js(BACKGROUND), opened.js(HEIGHTS)) == (PALETTE["surface"][1], before)
    opened.prefer("light")
    assert opened.js(BACKGROUND) == PALETTE["surface"][0]
