"""The HTML page: its text, its layout in a browser (desktop, phone, dark, print), its size, and the
sample in the docs."""

import dataclasses
import html
import json
import math
import pathlib
import re
import subprocess

import pytest

import maxbench as mb
from benchmarks import thousand_runs
from maxbench.reporting import compare, details, diagnosis, page, plots
from tests.conftest import needs
from tests.reporting.test_report import H100, nemo, ours, planned_run, program, rows
from tests.traces import made
from tools import sample_report

__all__ = ["program"]  # a fixture
# Reports text that is too faint or too small, the width of the page, and results of its script.
PROBE = """
const lum = c => { const [r, g, b] = c.match(/[0-9.]+/g).map(x => x / 255)
  .map(x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const ratio = (a, b) => { const [x, y] = [lum(a), lum(b)].sort((p, q) => q - p);
  return (x + 0.05) / (y + 0.05); };
const behind = e => { const c = getComputedStyle(e).backgroundColor;
  return c === "rgba(0, 0, 0, 0)" ? behind(e.parentElement) : c; };
document.querySelectorAll("details").forEach(e => { e.open = true; });
const faint = [], small = [];
for (const e of document.querySelectorAll("body *")) {
  const own = [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim());
  if (!own || !e.getClientRects().length || /^(SCRIPT|title|OPTION)$/.test(e.tagName)) continue;
  const style = getComputedStyle(e), drawn = e.ownerSVGElement;
  const scale = drawn ? drawn.getBoundingClientRect().width / drawn.viewBox.baseVal.width : 1;
  const named = `${e.tagName}.${e.getAttribute("class")} ${e.textContent.trim().slice(0, 30)}`;
  if (parseFloat(style.fontSize) * scale < 11) small.push(named);
  if (ratio(drawn ? style.fill : style.color, behind(e)) < 4.5) faint.push(named);
}
const found = { faint, small };
const body = document.querySelector("table.sorted").tBodies[0];
const names = () => [...body.rows].filter(r => !r.hidden)
  .map(r => r.querySelector("a").textContent);
const find = document.querySelector("input");
find.value = "16 gpus pass"; find.dispatchEvent(new Event("input")); found.filtered = names();
find.value = ""; find.dispatchEvent(new Event("input"));
const sort = [...document.querySelectorAll("th button")].find(x => x.textContent === "Step, s");
found.sortable = sort.getClientRects().length;
sort.click(); sort.click(); found.sorted = names();
const [first, second] = document.querySelectorAll("select");
const choose = (select, text) => { select.selectedIndex =
  [...select.options].findIndex(option => option.textContent.includes(text)); };
choose(first, "16 GPUs, GBS 256, run 1"); choose(second, "8 GPUs, GBS 128, run 2");
first.dispatchEvent(new Event("change"));
found.pair = Object.fromEntries([...document.querySelectorAll("#pair tbody tr")]
  .map(r => [r.cells[0].textContent, r.cells[1].textContent + " | " + r.cells[2].textContent]));
const svg = document.querySelector("#overlay ~ .card svg.frame");
const line = svg.querySelector(".line0");
const at = new DOMPoint(line.points[5].x, line.points[5].y).matrixTransform(svg.getScreenCTM());
svg.dispatchEvent(new PointerEvent("pointermove", { clientX: at.x, clientY: at.y }));
found.tip = document.getElementById("tip").textContent;
found.scopes = document.querySelectorAll("th:not([scope])").length;
found.wide = [document.documentElement.scrollWidth, innerWidth];
parent.document.body.append(Object.assign(parent.document.createElement("pre"), { id: "probe",
  textContent: JSON.stringify(found) }));
"""


def page_of(folder: pathlib.Path) -> str:
    return page.html(rows(folder), H100)


def browser(file: pathlib.Path, *flags: str) -> str:
    """Output of Chromium for a page."""
    chromium = needs("chromium", "chromium-browser", "google-chrome")
    command = [chromium, "--headless=new", "--no-sandbox", "--disable-gpu", *flags]
    command += [f"--user-data-dir={file.parent}/profile", file.as_uri()]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


@pytest.mark.parametrize(("wide", "scheme"), [(1280, 1), (390, 1), (1280, 0)])
def test_page_is_legible_and_its_script_works_in_a_browser(tmp_path, wide, scheme):
    """Nothing is fetched; no text is too wide, small or faint; sorting, filtering and the
    comparison of two runs work."""
    ours(tmp_path)
    ours(tmp_path, gpus=16, gbs=256, step_s=11.5)
    ours(tmp_path, gpus=16, gbs=256, step_s=lambda i: 9.4 + 0.3 * (i % 2), stamp=2)
    nemo(tmp_path / "log-pretrain_llama31_8b_fp8_8_1.out", 20, 9.4)
    text = page_of(tmp_path)
    assert not re.search(r'src\s*=|href="?[^#"]|https?://|@import|url\(', text)
    file = tmp_path / "probe.html"
    inner = html.escape(text.replace("</body>", f"<script>{PROBE}</script></body>"))
    # In a frame: no window of Chromium is narrower than 500 px.
    file.write_text(f'<iframe width="{wide}" height="1600" srcdoc="{inner}"></iframe>')
    flags = ["--hide-scrollbars", "--window-size=1400,1700", "--dump-dom"]
    dom = browser(file, *flags, f"--blink-settings=preferredColorScheme={scheme}")
    found = json.loads(html.unescape(re.search(r'<pre id="probe">(.*?)</pre>', dom)[1]))
    assert (found["faint"], found["small"], found["scopes"]) == ([], [], 0)
    assert found["wide"][0] <= found["wide"][1] == wide
    assert found["sortable"]
    assert found["filtered"] == ["Llama 3.1 8B fp8, 16 GPUs, GBS 256, run 2"]
    assert [x.partition(",")[2] for x in found["sorted"]] == [
        " 16 GPUs, GBS 256, run 1", " 16 GPUs, GBS 256, run 2", " 8 GPUs, GBS 128, run 2",
        " 8 GPUs, GBS 128, run 1",
    ]  # fmt: skip
    assert found["pair"]["run.layout.gbs"] == "256 | 128"
    assert "config.layout.cp" not in found["pair"]  # the same
    assert found["tip"] == "Llama 3.1 8B fp8, 16 GPUs, GBS 256, run 1: step 6, 11.50 seconds"


def test_the_table_has_every_run_worst_first_and_no_empty_column(tmp_path):
    ours(tmp_path, device={"platform": "cpu", "kind": "cpu", "count": 8})
    nemo(tmp_path / "log-pretrain_llama31_8b_bf16_8_1.out", 0, 9.4, end="MemoryError: 3\n")
    table = page_of(tmp_path).partition('<table class="sorted">')[2].partition("</table>")[0]
    first, second = re.findall(r"<tr><th scope=\"row\">.*?(?=<tr>|$)", table, re.DOTALL)[-2:]
    assert "DIED" in first
    assert "MemoryError" in first
    assert 'data-sort="0"' in first
    assert "DIED" not in second
    heads = re.findall(r'<th scope="col">([^<]*)', table)
    assert heads == ["Run", "Verdict", "Step times", "Step, s", "Tokens/s", "GiB", "Loss"]


def test_print_includes_folded_sections(tmp_path):
    """Even without scripts: a page whose sections stay folded has fewer sheets."""
    for stamp in range(4):
        ours(tmp_path, stamp=stamp)
    text, sheets = page_of(tmp_path).replace("<script", "<template"), []
    for style in (text, text.replace("details::details-content", "details::no")):
        file, pdf = tmp_path / "page.html", tmp_path / "page.pdf"
        file.write_text(style)
        browser(file, f"--print-to-pdf={pdf}")
        sheets.append(len(re.findall(rb"/Type /Page\b", pdf.read_bytes())))
    assert sheets[0] > sheets[1] > 0


def test_text_of_logs_is_escaped(tmp_path):
    ours(tmp_path, slow_hosts=["<script>"], versions={"<i>": "&"}, hosts={"<script>": {}})
    nemo(tmp_path / "log-pretrain_a<b>.out", 3, 9.4, end="ValueError: <script>'\"&\n")
    text = page_of(tmp_path)
    assert text.count("<script") == 1
    assert "<i>" not in text
    assert "pretrain_a&lt;b&gt;" in text
    assert "ValueError: &lt;script&gt;&#39;&#34;&amp;" in text


def test_answer_names_slow_runs_and_their_reasons(tmp_path):
    ours(tmp_path)
    ours(tmp_path, gpus=16, gbs=256, step_s=11.4, slow_hosts=["node3"])
    ours(tmp_path, gpus=32, gbs=512, step_s=lambda i: 9.4 if i != 40 else 40.0)
    text = re.sub(r"<[^>]+>|\s+", " ", page_of(tmp_path))
    answer = text.partition("3 runs, created")[2]
    assert re.search(
        r"1 of 3 runs are as fast as published; +Llama 3.1 8B fp8, 32 GPUs, GBS 512 +is at 76%, "
        r"because a few of its steps are slow: with its median step it would be at \d+%",
        re.sub(" +", " ", answer),
    )
    assert re.search(r"16 GPUs, GBS 256 +is at 8\d%, because it has slow hosts \(node3\)", answer)
    tile = re.search(r"FAIL +Llama 3.1 8B fp8, 32 GPUs", answer)
    assert tile  # a link, not only a count


@pytest.mark.parametrize(
    ("predicted", "why"),
    [
        (9.3, "its step takes 29% longer than plan predicts"),
        (11.7, "plan predicts no more than 80% for this layout, and plan attributes 20% of the "
               "step to communication"),
    ],
)  # fmt: skip
def test_reasons_from_the_prediction(tmp_path, predicted, why):
    ours(tmp_path, step_s=12.0)
    (row,) = found = rows(tmp_path)
    parts = {"gemm": 0.8 * predicted, "exposed": 0.2 * predicted}
    row.planned = {"step_s": predicted, "parts_s": parts}
    assert ", and ".join(diagnosis.reasons(row, found, [])).startswith(why)
    assert diagnosis.split(parts).keys() == {"computing", "communication"}


def test_a_profile_names_the_cause(tmp_path):
    """The profile of a run of the same name, as a job with a profiler has no verdict."""
    ours(tmp_path, step_s=12.0)
    profiled = ours(tmp_path, stamp=2)
    content = json.loads((profiled / "result.json").read_text())
    content["run"]["profile"]["tool"] = "xplane"
    (profiled / "result.json").write_text(json.dumps(content))
    folder = profiled / "xplane/plugins/profile/1"
    folder.mkdir(parents=True)
    made.xplane(folder / "host.xplane.pb", [made.steps(3)])
    report = mb.report(tmp_path, gpu_type="h100")
    cause = "profile: communication is exposed for 30% of the step"
    assert cause in report.text()
    text = html.unescape(re.sub(r"<[^>]+>|\s+", " ", report.text("html")))
    assert f"because its {cause}" in re.sub(" +", " ", text)
    assert "Measured parts of a step, from its profile" in text
    assert "communication, exposed 0.003 s 30%" in re.sub(" +", " ", text)
    (folder / "host.xplane.pb").write_bytes(b"damaged")
    assert "its profile is not read: " in mb.report(tmp_path, gpu_type="h100").text()


def test_without_evidence_no_reason_is_guessed(tmp_path):
    ours(tmp_path, step_s=10.5)
    assert "is at 89%, and its data does not show why" in page_of(tmp_path)
    ours(tmp_path, stamp=2)
    assert "because another run of it reached 99%" in page_of(tmp_path)
    assert "No run can be compared with a published figure: GBS 64, published 128" in page.html(
        rows(ours(tmp_path, gbs=64)), H100
    )


def test_mfu_is_compared_in_the_published_convention(tmp_path):
    (row,) = rows(ours(tmp_path))
    published_mfu = row.baseline.mfu_pct / 100
    assert page.mfu(row)["full"] == (row.mfu["full"], published_mfu)
    row.baseline = compare.dataclasses.replace(row.baseline, convention="full, 16 KV heads")
    own, published = page.mfu(row)["full, 16 KV heads"]
    assert own == pytest.approx(published * row.share)


def test_differences_from_the_recipe_are_listed(tmp_path, program):
    path = planned_run(tmp_path, overrides={})
    result = json.loads((path / "result.json").read_text())
    (row,) = rows(tmp_path)
    assert details.recipe_differences(row) == ("llama31_8b, 8 h100, fp8", [])
    for section in ("config", "run"):
        result[section]["layout"] |= {"cp": 1, "dp": 8}
    (path / "result.json").write_text(json.dumps(result))
    (row,) = rows(tmp_path)
    assert details.recipe_differences(row)[1] == [
        ("layout.cp", "1", "2"),
        ("layout.dp", "8", "4"),
    ]


def test_common_settings_are_listed_once():
    settings = [{"config.a": "1", "config.b": str(i // 2)} for i in range(3)]
    common = details.most_common(settings)
    assert common == {"config.a": "1", "config.b": "0"}
    assert [details.unusual(one, common) for one in settings] == [{}, {}, {"config.b": "1"}]
    assert details.unusual({"gpus": "8"}, common | {"gpus": "8"}) == {}  # a log that names few


def test_constant_runs_are_folded_and_lines_are_thinned(tmp_path):
    ours(tmp_path)
    ours(tmp_path, gpus=16, gbs=256, step_s=lambda i: 9.4 + 0.05 * i)
    text = page_of(tmp_path)
    assert "1 run with constant step times" in text
    points = [(i, float(i % 7)) for i in range(9999)]
    kept = plots.thin(points, 100)
    assert 50 < len(kept) <= 100
    assert kept == sorted(kept)
    assert {y for _, y in kept} == {0.0, 6.0}


def test_losses_have_dots_of_held_out_data_over_steps_or_tokens(tmp_path):
    evaluations = [{"step": i, "loss": 2.5 - i / 100} for i in (9, 19)]
    folders = [ours(tmp_path / "a", evaluations=evaluations), ours(tmp_path / "b", gbs=256)]
    a, b = (rows(folder)[0].record for folder in folders)
    a.loss |= {i: 9.0 - i / 10 for i in range(50)}
    one = plots.of_loss({"loss": a}, "loss of a")
    assert (one.names, len(one.lines["loss"])) == (("step", "loss"), 50)
    assert one.dots == {"loss": [(9, 2.41), (19, 2.31)]}
    assert one.note == "dots: held-out data; a step is 1,048,576 tokens"
    both = plots.of_loss({"line0": a, "line1": b}, "losses", {"line0": "a", "line1": "b"})
    assert both.names == ("tokens", "loss")
    assert both.lines["line0"][0] == (128 * 8192, 9.0)
    assert both.lines["line1"][-1][0] == 2 * both.lines["line0"][-1][0] == 50 * 256 * 8192
    assert [*both.xs.values()] == ["25M", "50M", "75M", "100M"]
    assert plots.of_loss({"loss": dataclasses.replace(a, loss={})}, "none") is None
    text = page_of(tmp_path / "a")
    assert text.count("held-out loss 2.4100 at step 9") == 2  # of the run, and of its workload


def test_invalid_figures_break_no_plot(tmp_path):
    hosts = {"a": 1, "b": {"gemm_tflops": ["x", math.nan, True]}, "<c>": {"step_s": -1}}
    path = ours(tmp_path, hosts=hosts, slow_hosts=[["a"]], ended=1e300, started=-5)
    lines = (path / "metrics.jsonl").read_text().replace("2.0", "1.7e308", 9).replace("2.0", "-1")
    (path / "metrics.jsonl").write_text(lines)
    assert "&lt;c&gt;" in page_of(tmp_path)
    assert plots.finite({0: math.nan, 1: -math.inf, 2: 1e300, 3: 1.0}) == {3: 1.0}


@pytest.mark.exhaustive
def test_page_of_a_thousand_runs_is_small(tmp_path):
    """Less than 3 MB, in less than 500 MB of memory; benchmarks/thousand_runs.py has its time."""
    done = thousand_runs.report(tmp_path)
    assert done.loaded == ""
    assert done.peak_bytes < 500e6
    assert done.page_bytes < 3e6


def test_sample_in_the_docs_is_current():
    """Otherwise run: python -m tools.sample_report."""
    assert sample_report.PAGE.read_text() == sample_report.html()


def test_changes_that_round_to_nothing_have_no_sign(tmp_path):
    """In the strips: steps of one time, and one that drifts by less than it says."""
    ours(tmp_path, step_s=lambda i: 9.4 - 1e-6 * i)
    ours(tmp_path, step_s=lambda i: 9.4 + 0.3 * (i % 2), stamp=2)
    text = page_of(tmp_path)
    assert "p10 to p90 0.0% to 0.0%, drift 0.0%" in text
    assert not re.search(r"[+-]0\.0 ?%", text)


def test_printed_page_keeps_a_heading_with_its_chart_and_repeats_no_header(tmp_path):
    """In Chromium's layout for print: a repeated header would lack its buttons."""
    for i in range(12):
        ours(tmp_path, gpus=8, stamp=i + 1)
    file = tmp_path / "page.html"
    file.write_text(page_of(tmp_path).replace("@media print", "@media all"))
    probe = "getComputedStyle(document.querySelector('thead')).display + '|' + getComputedStyle("
    probe += "document.querySelector('h2 + p')).breakAfter"
    text = file.read_text().replace("</body>", f"<script>document.title={probe}</script></body>")
    file.write_text(text)
    dom = browser(file, "--dump-dom")
    assert re.search(r"<title>(.*?)</title>", dom)[1] == "table-row-group|avoid"
