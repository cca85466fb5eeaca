"""The live view in a real browser: it draws, it is driven by keys, and it is readable in the dark."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from served import KEPT_THREADS, Server, request, wait_until, words

from tinykv_plugin import page_map
from tinykv_plugin.serving import live

Serve = Callable[..., Server]
Driver = Any

# One browser.

SCREENSHOTS = os.environ.get("TINYKV_SCREENSHOTS")
"""A folder to write the documentation's pictures to."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    selenium = pytest.importorskip("selenium.webdriver", reason="the Python package selenium is not installed")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    driver = shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("chromium and chromedriver (Debian packages chromium, chromium-driver) are not installed")
    options = selenium.ChromeOptions()
    options.binary_location = chromium
    for flag in ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"):
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('browser')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = selenium.Chrome(options, selenium.ChromeService(driver))
    found.set_window_size(1100, 1000)
    yield found
    found.quit()


@pytest.fixture
def opened(browser: Driver, serve: Serve, no_stops: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """``opened(max_pages=…)``: a server, and the browser on its page."""
    monkeypatch.setattr(live, "INTERVAL", 0.05)

    def start(**settings: Any) -> Server:
        server = serve(**settings)
        browser.get(f"http://127.0.0.1:{server.port}/kv")
        wait_until(lambda: text(browser, "#status") == "live", what="the page")
        return server

    yield start
    # What the page had to say against itself, such as a policy that it breaks.
    severe = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    browser.get("about:blank")
    # Chromium keeps spare connections, on which it asks for nothing.
    KEPT_THREADS.update(thread for thread in threading.enumerate() if "process_request_thread" in thread.name)
    assert severe == []


def find(browser: Driver, selector: str) -> Any:
    return browser.find_element("css selector", selector)


def text(browser: Driver, selector: str) -> str:
    return str(find(browser, selector).text)


def pixel(browser: Driver, cell: int, right: float = 0.5, down: float = 0.5) -> str:
    """The colour of a place, by default the middle, in a cell of the first map, as ``#rrggbb``."""
    return str(
        browser.execute_script(
            """const [map] = maps.values(), scale = devicePixelRatio || 1;
            const x = (arguments[0] % map.columns + arguments[1]) * map.side * scale;
            const y = (Math.floor(arguments[0] / map.columns) + arguments[2]) * map.side * scale;
            const [r, g, b] = map.canvas.getContext("2d").getImageData(x, y, 1, 1).data;
            return "#" + [r, g, b].map(part => part.toString(16).padStart(2, "0")).join("");""",
            cell,
            right,
            down,
        )
    )


def colour(browser: Driver, name: str) -> str:
    script = "return getComputedStyle(document.documentElement).getPropertyValue(arguments[0])"
    return str(browser.execute_script(script, f"--{name}")).strip()


def test_pages_are_drawn_in_the_colour_of_their_state(opened: Any, browser: Driver) -> None:
    server = opened(max_pages=500)
    assert text(browser, "#model") == "llama"
    server.complete(words(40), max_tokens=4)  # stored: 11 pages are cached
    wait_until(lambda: text(browser, "#n3") == "11", what="cached pages")
    assert text(browser, "#idle") == "No request is running or waiting."
    assert pixel(browser, 0) == colour(browser, "cached")
    long: dict[str, Any] = {"stream": True, "max_tokens": 800}
    with request(server, words(40), **long), request(server, words(40), **long):
        wait_until(lambda: len(browser.find_elements("css selector", "#rows tr")) == 2, what="two requests")
        wait_until(lambda: int(text(browser, "#n1")) > 4 and int(text(browser, "#n2")) > 0, what="used pages")
        wait_until(lambda: pixel(browser, 0) == colour(browser, "shared"), what="a shared page")
        find(browser, "#pause").click()
        drawn = browser.execute_script("return [...maps.values()].map(map => [...map.cells])")[0]
        for cell in range(0, len(drawn) // 3, 7):
            used, shared, cached = drawn[3 * cell : 3 * cell + 3]
            name = "used" if used else "shared" if shared else "cached" if cached else "free"
            assert pixel(browser, cell) == colour(browser, name), cell
        find(browser, "#pause").click()
    wait_until(lambda: text(browser, "#running") == "0", what="the end")


def test_hovering_and_keys_tell_whose_a_page_is(opened: Any, browser: Driver) -> None:
    from selenium.webdriver import ActionChains, Keys

    server = opened(max_pages=500)
    long: dict[str, Any] = {"stream": True, "max_tokens": 800}
    with request(server, words(40), **long), request(server, words(40, 1), **long):
        wait_until(lambda: len(browser.find_elements("css selector", "#rows tr")) == 2, what="two requests")
        wait_until(lambda: all(int(row.text.split()[6]) >= 11 for row in rows(browser)), what="their pages")
        find(browser, "body").send_keys("p")
        assert text(browser, "#status") == "paused"
        canvas = find(browser, "canvas")
        ActionChains(browser).move_to_element_with_offset(
            canvas, -canvas.size["width"] // 2 + 5, -canvas.size["height"] // 2 + 5
        ).perform()
        about = text(browser, "#about")
        assert about.startswith("Page 0: used, of request "), about
        (row,) = browser.find_elements("css selector", "#rows tr.chosen")
        assert about.endswith(f"of request {row.get_attribute('data-id')}.")
        # By keys alone: to the map, along it, and out of it.
        browser.execute_script("document.activeElement.blur(); document.querySelector('#pause').focus()")
        ActionChains(browser).send_keys(Keys.TAB).perform()
        assert browser.switch_to.active_element == canvas
        ActionChains(browser).send_keys(Keys.HOME, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT).perform()
        assert text(browser, "#about").startswith("Page 2: ")
        ActionChains(browser).send_keys(Keys.ARROW_DOWN, Keys.ARROW_UP, Keys.ARROW_LEFT).perform()
        assert text(browser, "#about").startswith("Page 1: ")
        ActionChains(browser).send_keys(Keys.END, Keys.ARROW_RIGHT).perform()
        last = browser.execute_script("return [...maps.values()][0].group.pages") - 1
        assert text(browser, "#about").startswith(f"Page {last}: ")
        ActionChains(browser).send_keys(Keys.TAB).perform()
        first = find(browser, "#rows tr")
        assert browser.switch_to.active_element == first
        assert text(browser, "#about").startswith(f"Request {first.get_attribute('data-id')} holds ")
        ActionChains(browser).send_keys(Keys.ESCAPE).perform()
        assert text(browser, "#about") == "Point at a page to see who holds it."
        find(browser, "body").send_keys("p")
        assert text(browser, "#status") == "live"


def test_many_pages_share_cells(opened: Any, browser: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MOST_CELLS", 16)
    server = opened(max_pages=4000, memory="64MiB")
    with request(server, words(900), stream=True):
        wait_until(lambda: "to a cell" in text(browser, "figcaption"), what="a map of many pages")
        wait_until(lambda: int(text(browser, "#rows td:nth-child(7)")) > 200, what="whose they are")
        find(browser, "#pause").click()
        canvas = find(browser, "canvas")
        browser.execute_script("arguments[0].focus()", canvas)
        about = text(browser, "#about")
        assert about.startswith("Pages 0 to "), about
        assert about.endswith(", of request 1."), about
        find(browser, "#pause").click()


def test_pages_of_quantized_numbers_lack_a_corner(
    opened: Any, browser: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_map, "_storage", lambda pool: ("8 bits", True))
    server = opened(max_pages=500)
    server.complete(words(40), max_tokens=4)
    wait_until(lambda: text(browser, "#n3") == "11", what="cached pages")
    assert text(browser, "#packed") == "quantized 11"
    assert ", 8 bits)" in text(browser, "figcaption")
    assert pixel(browser, 0) == colour(browser, "cached")
    assert pixel(browser, 0, 0.85, 0.15) == expanded(colour(browser, "panel"))
    assert pixel(browser, 60, 0.85, 0.15) == colour(browser, "free")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_readable_in_both_schemes(opened: Any, browser: Driver, scheme: str) -> None:
    features = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", features)
    try:
        server = opened(memory="3MiB", prompt_cache_size=4)
        server.complete(words(300), max_tokens=40)
        server.complete(words(200, 5), max_tokens=40)
        with (
            request(server, words(300), stream=True, max_tokens=400),
            request(server, words(300), stream=True, max_tokens=350),
            request(server, words(60, 1), stream=True, max_tokens=300),
            request(server, words(150, 2), stream=True, max_tokens=500),
        ):
            wait_until(lambda: len(browser.find_elements("css selector", "#rows tr")) == 4, what="requests")
            wait_until(lambda: all(row.text.split()[1] == "answering" for row in rows(browser)), what="answers")
            find(browser, "body").send_keys("p")
        assert int(text(browser, "#n2")) > 50
        for foreground, background in (("text", "ground"), ("text", "panel"), ("quiet", "panel"), ("mark", "ground")):
            assert contrast(colour(browser, foreground), colour(browser, background)) >= 4.5, (foreground, background)
        for name in ("used", "shared", "cached"):
            assert contrast(colour(browser, name), colour(browser, "panel")) >= 3, name
        assert luminance(colour(browser, "ground")) > 0.5 if scheme == "light" else luminance("#12161c") < 0.1
        if SCREENSHOTS:
            browser.save_screenshot(str(Path(SCREENSHOTS) / f"live-view-{scheme}.png"))
        find(browser, "body").send_keys("p")
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_a_server_that_comes_back_is_found_again(opened: Any, browser: Driver) -> None:
    server = opened()
    server.generator.live.close()
    wait_until(lambda: text(browser, "#status") == "no connection, trying again", what="the loss")
    server.generator.live._closed.clear()
    wait_until(lambda: text(browser, "#status") == "live", what="the page")


def test_a_hidden_page_asks_for_nothing(opened: Any, browser: Driver) -> None:
    server = opened()
    assert server.generator.live.watched
    script = """Object.defineProperty(document, "hidden", {get: () => arguments[0], configurable: true});
    document.dispatchEvent(new Event("visibilitychange"))"""
    browser.execute_script(script.replace("arguments[0]", "true"))
    wait_until(lambda: not server.generator.live.watched, what="the page to leave")
    browser.execute_script(script.replace("arguments[0]", "false"))
    wait_until(lambda: server.generator.live.watched, what="the page to come back")


def rows(browser: Driver) -> list[Any]:
    return list(browser.find_elements("css selector", "#rows tr"))


def expanded(colour: str) -> str:
    """``#rgb`` as ``#rrggbb``."""
    digits = colour.removeprefix("#")
    return "#" + ("".join(2 * digit for digit in digits) if len(digits) == 3 else digits)


def luminance(colour: str) -> float:
    """WCAG's relative luminance of ``#rgb`` or ``#rrggbb``."""
    digits = expanded(colour).removeprefix("#")
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """WCAG's contrast ratio."""
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)
