"""The report and the page of a trace in a real browser: Debian's chromium (or a Chrome), driven by playwright."""

from __future__ import annotations

import shutil

import pytest
from reports import arriving, made_up

from tilestream_tools.report import page
from tilestream_tools.trace import page as frame

pytestmark = pytest.mark.slow

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

#: Texts that are seen, with the contrast of their colour to what is behind them.
CONTRASTS = """() => {
  const linear = (x) => (x /= 255) <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
  const parts = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const luminance = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const found = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!own || !node.getClientRects().length || ["SCRIPT", "NOSCRIPT", "title"].includes(node.tagName)) continue;
    const style = getComputedStyle(node);
    const front = parts(node instanceof SVGElement ? style.fill : style.color);
    let ground = [255, 0, 0], at = node;
    for (; at; at = at.parentElement) {
      const colour = parts(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) { ground = colour; break; }
    }
    const [low, high] = [luminance(front), luminance(ground)].sort((a, b) => a - b);
    found.push([node.textContent.trim().slice(0, 40), (high + 0.05) / (low + 0.05), parseFloat(style.fontSize)]);
  }
  return found;
}"""
#: Texts of charts that leave their chart, or lie over one another.
COLLISIONS = """() => {
  const found = [];
  for (const svg of document.querySelectorAll("svg[role=img]")) {
    const frame = svg.getBoundingClientRect();
    const boxes = [...svg.querySelectorAll("text")].map((text) => [text.textContent, text.getBoundingClientRect()]);
    boxes.forEach(([text, box], i) => {
      const beside = Math.max(frame.left - box.left, box.right - frame.right);
      if (Math.max(beside, frame.top - box.top, box.bottom - frame.bottom) > 1)
        found.push(`${text} leaves its chart`);
      for (const [other, its] of boxes.slice(i + 1)) {
        const wide = Math.min(box.right, its.right) - Math.max(box.left, its.left);
        const high = Math.min(box.bottom, its.bottom) - Math.max(box.top, its.top);
        if (wide > 1 && high > 3) found.push(`${text} and ${other}`);
      }
    });
  }
  return found;
}"""
VIEW = "() => timelines[0].view"
#: Different colours on the first timeline.
PAINTED = """() => {
  const canvas = document.querySelector("canvas");
  const pixels = new Uint32Array(canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.buffer);
  return new Set(pixels).size;
}"""


@pytest.fixture(scope="module")
def browser():
    sync = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright")
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"no browser here: none of {', '.join(BROWSERS)}")
    with sync.sync_playwright() as playwright:
        # In a container the user is root, and has no sandbox.
        made = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    found = {device: page.write(made_up(device), folder / f"{device}.html")[0] for device in ("cpu", "h100")}
    found["trace"] = frame.write([arriving(), arriving(workers=2)], folder / "trace.html", title="Timelines of a trace")
    return found


@pytest.fixture
def opened(browser, files):
    """Opens a page; at the test's end nothing may have been complained of, or asked of the network."""
    pages, complaints = [], []

    def show(name, scheme="light", width=800):
        made = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        made.on("console", lambda message: complaints.append(f"console: {message.type}: {message.text}"))
        made.on("pageerror", lambda error: complaints.append(f"error: {error}"))
        made.on("request", lambda asked: asked.url.startswith(("file:", "data:")) or complaints.append(asked.url))
        made.goto(files[name].as_uri())
        pages.append(made)
        return made

    yield show
    for made in pages:
        made.close()
    assert not complaints


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["cpu", "h100", "trace"])
def test_loads_is_readable_and_fits(opened, name, scheme):
    shown = opened(name, scheme)
    texts = shown.evaluate(CONTRASTS)
    assert len(texts) > 10
    assert not [text for text in texts if text[1] < 4.5]
    assert not [text for text in texts if text[2] < 11.5], "pixels at 800"
    assert shown.evaluate(COLLISIONS) == []
    assert shown.evaluate(PAINTED) > 20
    ground = shown.evaluate("() => getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(255, 255, 255)") == (scheme == "light")


@pytest.mark.parametrize("width", [400, 800, 1600])
@pytest.mark.parametrize("name", ["cpu", "h100", "trace"])
def test_nothing_overflows(opened, name, width):
    shown = opened(name, width=width)
    assert shown.evaluate("() => document.documentElement.scrollWidth") <= width
    if width >= 800:
        hidden = "() => [...document.querySelectorAll('.scroll')].filter((x) => x.scrollWidth > x.clientWidth).length"
        assert shown.evaluate(hidden) == 0, "tables fit without scrolling"


def test_the_check_of_collisions_sees_one(opened):
    shown = opened("cpu")
    shown.evaluate("""() => {
        const text = document.querySelector("svg[role=img] text");
        text.parentElement.append(text.cloneNode(true));
    }""")
    assert shown.evaluate(COLLISIONS)


def length(shown):
    begin, end = shown.evaluate(VIEW)
    return end - begin


def test_zoomed_and_panned_by_keyboard_alone(opened):
    shown = opened("trace")
    for _ in range(8):
        shown.keyboard.press("Tab")
        if shown.evaluate("() => document.activeElement.tagName") == "CANVAS":
            break
    else:
        pytest.fail("the canvas is not reached by Tab")
    whole = shown.evaluate(VIEW)
    shown.keyboard.press("+")
    shown.keyboard.press("+")
    assert length(shown) == pytest.approx((whole[1] - whole[0]) / 4)
    before = shown.evaluate(VIEW)
    shown.keyboard.press("ArrowRight")
    after = shown.evaluate(VIEW)
    assert after[0] - before[0] == pytest.approx(0.2 * (before[1] - before[0]))
    assert shown.text_content("output.range") != ""
    shown.keyboard.press("-")
    assert length(shown) == pytest.approx((whole[1] - whole[0]) / 2)
    shown.keyboard.press("0")
    assert shown.evaluate(VIEW) == pytest.approx(whole)
    for _ in range(40):
        shown.keyboard.press("+")
    assert length(shown) == pytest.approx((whole[1] - whole[0]) / 1e5), "a zoom has an end"
    for _ in range(60):
        shown.keyboard.press("ArrowRight")
    assert shown.evaluate(VIEW)[1] <= whole[1] + 1e-6, "and so has the timeline"


def test_items_are_chosen_and_told_by_keyboard(opened):
    shown = opened("trace")
    shown.focus("canvas")
    shown.keyboard.press("n")
    first = shown.text_content(".chosen")
    assert first.startswith("worker 0 · tile (0, 0) · chunk 0 · 300 us")
    shown.keyboard.press("n")
    second = shown.text_content(".chosen")
    assert second != first
    shown.keyboard.press("p")
    assert shown.text_content(".chosen") == first
    shown.keyboard.press("ArrowDown")
    assert shown.text_content(".chosen").startswith("worker 1 · ")
    shown.keyboard.press("ArrowUp")
    shown.keyboard.press("ArrowUp")
    assert shown.text_content(".chosen").startswith("worker 0 · ")
    shown.keyboard.press("+")
    begin, end = shown.evaluate(VIEW)
    assert begin < 150 < end, "zooms in on what is chosen"


def test_the_buttons_work_by_keyboard_and_mouse(opened):
    shown = opened("trace")
    whole = length(shown)
    shown.focus("button[data-do=in]")
    shown.keyboard.press("Enter")
    assert length(shown) == pytest.approx(whole / 2)
    shown.click("button[data-do=out]")
    assert length(shown) == pytest.approx(whole)
    shown.click("button[data-do=in]")
    before = shown.evaluate(VIEW)
    shown.click("button[data-do=left]")
    assert shown.evaluate(VIEW)[0] < before[0]
    shown.click("button[data-do=all]")
    assert length(shown) == pytest.approx(whole)


def test_dragged_and_wheeled(opened):
    shown = opened("trace")
    whole = length(shown)
    box = shown.locator("canvas").first.bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + 60
    shown.mouse.move(x, y)
    shown.mouse.wheel(0, -100)
    assert length(shown) == pytest.approx(whole), "the wheel alone scrolls the page"
    shown.keyboard.down("Control")
    shown.mouse.wheel(0, -100)
    shown.keyboard.up("Control")
    shown.wait_for_function(f"() => timelines[0].view[1] - timelines[0].view[0] < {0.9 * whole}")
    before = shown.evaluate(VIEW)
    shown.mouse.down()
    shown.mouse.move(x - 100, y, steps=4)
    shown.mouse.up()
    after = shown.evaluate(VIEW)
    assert after[0] > before[0]
    assert after[1] - after[0] == pytest.approx(before[1] - before[0])
    shown.mouse.dblclick(x, y)
    assert length(shown) < after[1] - after[0]


def test_what_is_under_the_pointer_is_told(opened):
    shown = opened("trace")
    box = shown.locator("canvas").first.bounding_box()
    shown.mouse.move(box["x"] + 84 + 60, box["y"] + 40)
    assert "worker " in shown.text_content(".chosen")


def test_colours_follow_the_scheme_while_the_page_is_open(opened):
    shown = opened("trace")
    image = shown.evaluate("() => document.querySelector('canvas').toDataURL()")
    shown.emulate_media(color_scheme="dark")
    shown.wait_for_function("image => document.querySelector('canvas').toDataURL() !== image", arg=image)


def test_the_report_s_sections_and_plans_are_reached_by_keyboard(opened):
    shown = opened("h100")
    shown.keyboard.press("Tab")
    assert shown.evaluate("() => document.activeElement.className") == "skip"
    summary = shown.locator("summary").first
    assert not shown.locator("details").first.evaluate("x => x.open")
    summary.focus()
    shown.keyboard.press("Enter")
    assert shown.locator("details").first.evaluate("x => x.open")
    for link in shown.locator("nav a").all():
        assert shown.locator(link.get_attribute("href")).count() == 1


def test_printed_it_has_its_figures_and_no_controls(opened):
    shown = opened("cpu")
    shown.emulate_media(media="print")
    assert not shown.locator(".tools").first.is_visible()
    assert shown.locator("canvas").first.is_visible()
