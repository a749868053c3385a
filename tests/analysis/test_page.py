"""The HTML page: what it holds, and what a browser makes of it."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import subcommand
from tests.support.fake import config, write_run

main = subcommand("report")

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
)  # fmt: skip

WATCH = """<script>
window.faults = [];
addEventListener("error", (event) => faults.push(`error: ${event.message}`));
addEventListener("unhandledrejection", (event) => faults.push(`rejection: ${event.reason}`));
addEventListener("securitypolicyviolation", (event) => faults.push(`blocked: ${event.blockedURI}`));
for (const level of ["error", "warn"]) console[level] = (...words) => faults.push(`${level}: ${words.join(" ")}`);
</script>"""

TRY = """<script>
(async () => {
  const root = document.documentElement;
  const pause = () => new Promise((done) => setTimeout(done, 25));
  const wait = async (test) => { for (let i = 0; i < 200 && !test(); i++) await pause(); };
  const lines = (plot) => plot.querySelectorAll(".scatterlayer path.js-line").length;
  const column = (table, n) => [...table.tBodies[0].rows].map((row) => row.cells[n].textContent);
  const press = (element) => element.click();
  await wait(() => root.dataset.drawn);
  const seen = { drawn: root.dataset.drawn, width: innerWidth };
  seen.overflow = document.scrollingElement.scrollWidth - innerWidth;
  seen.lines = [...document.querySelectorAll(".plot")].map(lines);
  seen.plots = [...document.querySelectorAll(".plot .main-svg")].map((svg) => svg.getBoundingClientRect().right);
  seen.heat = document.querySelectorAll(".heat .heatmaplayer image").length;
  const table = document.querySelector("table.sortable");
  const heads = [...table.tHead.rows[0].cells];
  seen.heads = heads.map((cell) => cell.textContent);
  seen.sorted = {};
  for (const [n, head] of heads.entries()) {
    const button = head.querySelector("button");
    press(button);
    const down = column(table, n);
    const aria = head.getAttribute("aria-sort");
    press(button);
    seen.sorted[head.textContent] = { down, up: column(table, n), aria: [aria, head.getAttribute("aria-sort")] };
  }
  seen.titles = {};
  for (const button of document.querySelectorAll("[data-axis]")) {
    press(button);
    await wait(() => root.dataset.drawn === button.dataset.axis);
    seen.titles[button.dataset.axis] = document.querySelector("#plot-0 .xtitle").textContent;
  }
  const colour = () => getComputedStyle(document.body).backgroundColor;
  seen.background = [colour()];
  press(document.getElementById("theme"));
  seen.background.push(colour());
  press(document.getElementById("smooth"));
  press(document.querySelector(".legend button"));
  await wait(() => lines(document.getElementById("plot-0")) < seen.lines[0]);
  seen.hidden = lines(document.getElementById("plot-0"));
  seen.requests = performance.getEntriesByType("resource").map((entry) => entry.name);
  seen.faults = faults;
  parent.postMessage(JSON.stringify(seen), "*");
})();
</script>"""

SHOW = """<script>
addEventListener("message", (event) => {
  const result = document.createElement("pre");
  result.id = "result";
  result.textContent = event.data;
  document.body.append(result);
});
</script>"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    curve = [0.1, 0.3, 0.5]
    for seed in (1, 2):
        write_run(folder / f"a{seed}", curve, config("fedavg", seed, 3))
        for alpha in (0.5, 0.99):
            for selection in ("in_order", "lowest"):
                values = config("fedcross", seed, 3, method__alpha=alpha, method__selection=selection)
                write_run(folder / f"x{seed}{alpha}{selection}", [v + 0.1 * alpha for v in curve], values, seconds=50.0)
    write_run(folder / "long", [0.001 * i for i in range(120)], config("<b>moon</b>", 1, 120))
    assert main([str(folder), "--out", str(folder / "out")]) == 0
    return folder / "out" / "report.html"


@pytest.mark.slow
def test_the_page_is_one_file_without_requests(written: Path):
    text = written.read_text()
    own = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)  # without plotly's and our code
    assert not re.search(r"""(?:src|href)=(?!["']?data:)""", own)
    assert "default-src 'none'" in own
    assert "<b>moon" not in text  # names from run folders are text, never markup
    assert "&lt;b&gt;moon" in own


def test_the_page_says_where_every_run_came_from(written: Path):
    text = written.read_text()
    assert text.count("<td>0123abc</td>") == 11
    assert "flwr 1.41.0, torch 2.15.0" in text
    assert "train.lr: 0.01" in text
    assert str(written.parent.parent / "x10.99lowest") in text


def browser() -> str:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"no browser on this machine (looked for {', '.join(BROWSERS)}): install Chromium to test the page")
    return found


def visit(page: Path, folder: Path, width: int, *flags: str) -> dict[str, Any]:
    """Open a copy of the page that watches itself and uses every control; return what it saw.

    The copy lies in a frame, because a browser's window cannot be as narrow as a phone.
    """
    policy = re.compile(r"<meta http-equiv[^>]*>")
    watched = policy.sub(lambda found: found[0] + WATCH, page.read_text(), count=1).replace("</body>", TRY + "</body>")
    (folder / "copy.html").write_text(watched)
    (folder / "frame.html").write_text(f"<body>{SHOW}<iframe width={width} height=900 src=copy.html></iframe></body>")
    command = [
        browser(), *FLAGS, f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=30000", *flags, "--dump-dom",
        (folder / "frame.html").as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    found = re.search(r'<pre id="result">(.*?)</pre>', done.stdout, flags=re.DOTALL)
    assert found, f"the page did not finish: {done.stderr[-2000:]}"
    return dict(json.loads(html.unescape(found[1])))


@pytest.mark.slow
def test_a_browser_sorts_draws_and_reports_no_fault(written: Path, tmp_path: Path):
    seen = visit(written, tmp_path, 1280)
    assert seen["faults"] == []
    assert seen["requests"] == []
    assert seen["drawn"] == "rounds"
    # Five groups of two seeds: a band edge above, one below and the mean; the long run: raw values and their mean.
    assert seen["lines"][0] >= 5 + 2
    assert seen["heat"] == 1
    smoothed = seen["sorted"]["smoothed %"]
    assert smoothed["aria"] == ["descending", "ascending"]
    numbers = [float(cell.split()[0]) for cell in smoothed["down"]]
    assert numbers == sorted(numbers, reverse=True)
    assert [float(cell.split()[0]) for cell in smoothed["up"]] == sorted(numbers)
    # 3 rounds of 2 s, 3 of 50 s and 120 of 2 s: units are understood.
    assert seen["sorted"]["time"]["up"] == ["6.0 s", *["2m 30s"] * 4, "4m 00s"]
    assert seen["sorted"]["time"]["down"] == ["4m 00s", *["2m 30s"] * 4, "6.0 s"]
    assert seen["sorted"]["moved"]["up"][-1] == "180.0 MB"
    assert seen["sorted"]["method"]["up"][0] == "<b>moon</b> rounds=120"
    assert seen["titles"]["bytes"].startswith("bytes moved")
    assert set(seen["titles"]) == {"rounds", "visits", "bytes", "epochs", "seconds", "exchanges"}
    assert seen["background"] == ["rgb(255, 255, 255)", "rgb(20, 24, 30)"]
    assert seen["hidden"] < seen["lines"][0]


@pytest.mark.slow
def test_a_dark_browser_gets_a_dark_page_that_can_be_made_light(written: Path, tmp_path: Path):
    seen = visit(written, tmp_path, 1280, "--blink-settings=preferredColorScheme=0")
    assert seen["faults"] == []
    assert seen["background"] == ["rgb(20, 24, 30)", "rgb(255, 255, 255)"]


@pytest.mark.slow
def test_a_phone_needs_no_sideways_scrolling_of_the_page(written: Path, tmp_path: Path):
    seen = visit(written, tmp_path, 390)
    assert seen["faults"] == []
    assert seen["width"] == 390
    assert seen["overflow"] <= 0
    assert seen["plots"]
    assert max(seen["plots"]) <= 390
