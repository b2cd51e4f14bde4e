// Sorts and filters the table, opens the run that a link names, labels the point under the mouse,
// compares two runs. The page is readable without it.
"use strict";
const all = (selector, root = document) => [...root.querySelectorAll(selector)];
const make = (name, text = "", properties = {}) => Object.assign(document.createElement(name), { textContent: text }, properties);

const table = document.querySelector("table.sorted");
if (table) {
  const body = table.tBodies[0], rows = [...body.rows], find = document.getElementById("find");
  const text = row => row.textContent.toLowerCase();
  find.hidden = false;
  find.querySelector("input").addEventListener("input", e => {
    const words = e.target.value.toLowerCase().split(/\s+/);
    const kept = rows.filter(row => !(row.hidden = !words.every(word => text(row).includes(word))));
    find.querySelector("output").textContent = kept.length < rows.length ? `${kept.length || "none"} of ${rows.length} runs` : "";
  });
  const value = (row, i) => {
    const cell = row.cells[i].dataset.sort ?? row.cells[i].innerText.trim(), number = parseFloat(cell.replace(/,/g, ""));
    return i < 1 || isNaN(number) ? cell : number;
  };
  all("thead th", table).forEach((head, i) => {
    if (head.textContent === "Step times") return;
    const button = make("button", head.textContent);
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const down = head.ariaSort === "ascending" ? -1 : 1;
      all("thead th", table).forEach(other => { other.ariaSort = null; });
      head.ariaSort = down > 0 ? "ascending" : "descending";
      const keys = new Map(rows.map(row => [row, value(row, i)]));
      const order = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(b, "en", { numeric: true }));
      const blank = row => keys.get(row) === ""; // last in both directions
      body.append(...rows.sort((a, b) => blank(a) - blank(b) || down * order(keys.get(a), keys.get(b))));
    });
  });
}

const open = () => { const target = document.getElementById(location.hash.slice(1)); if (target?.tagName === "DETAILS") { target.open = true; target.scrollIntoView(); } };
addEventListener("hashchange", open);
open();

const tip = make("div", "", { id: "tip", hidden: true });
document.body.append(tip);
all("svg.frame").forEach(svg => svg.addEventListener("pointermove", e => {
  const [left, right, bottom, top, x0, x1, y0, y1] = svg.dataset.box.split(" ").map(Number);
  const at = new DOMPoint(e.clientX, e.clientY).matrixTransform(svg.getScreenCTM().inverse());
  const near = all("polyline", svg).flatMap(line => [...line.points].map(p => [Math.hypot(p.x - at.x, p.y - at.y), p, line]))
    .reduce((a, b) => (b[0] < a[0] ? b : a), [25]);
  tip.hidden = near.length < 2;
  if (tip.hidden) return;
  const x = x0 + (near[1].x - left) / (right - left) * (x1 - x0), y = y0 + (near[1].y - bottom) / (top - bottom) * (y1 - y0);
  const [across, up] = svg.dataset.names.split("|");
  tip.textContent = `${near[2].textContent}: ${across} ${Math.round(across === "GPUs" ? 2 ** x : x)}, ${up === "seconds" || up === "loss" ? `${y.toPrecision(4)} ${up}` : `${(100 * y).toFixed(1)} %`}`;
  tip.style.left = `${Math.min(e.pageX + 12, scrollX + innerWidth - tip.offsetWidth - 4)}px`;
  tip.style.top = `${e.pageY + 16}px`;
}));
document.addEventListener("pointerover", e => { if (!e.target.closest("svg.frame")) tip.hidden = true; });

const runs = all("details.run"), pair = document.getElementById("pair");
const pairs = list => new Map(all("dt", list).map(name => [name.textContent, name.nextElementSibling.textContent]));
const properties = run => {
  const link = table && all("tbody th > a", table).find(a => a.hash === `#${run.id}`);
  const cells = link ? all("td", link.closest("tr")).map(td => [td.dataset.name, td.innerText.trim().replace(/\s*\n\s*/g, "; ")]) : [];
  const common = run.matches(".whole") ? pairs(document.getElementById("common")) : []; // another program's log names few settings
  return new Map([...cells, ...common, ...all(":scope > dl", run).flatMap(list => [...pairs(list)])]);
};
if (runs.length > 1) {
  const pick = n => { const select = make("select", "", { ariaLabel: `run ${n + 1}` }); select.append(...runs.map(run => make("option", run.querySelector("summary").textContent.trim()))); select.selectedIndex = n; return select; };
  const picks = [pick(0), pick(1)], result = make("div", "", { className: "scroll" });
  const show = () => {
    const [a, b] = picks.map(select => properties(runs[select.selectedIndex]));
    const names = [...new Set([...a.keys(), ...b.keys()])].filter(name => (a.get(name) ?? "") !== (b.get(name) ?? ""));
    const head = make("tr"), grid = make("table"), top = make("thead"), below = make("tbody");
    head.append(...["Difference", "first", "second"].map(text => make("th", text, { scope: "col" })));
    top.append(head);
    below.append(...names.map(name => {
      const row = make("tr"), cells = [[a, "first"], [b, "second"]].map(([run, side]) => { const td = make("td"); td.dataset.name = side; td.append(make("span", run.get(name) ?? "")); return td; });
      row.append(make("th", name, { scope: "row" }), ...cells);
      return row;
    }));
    grid.append(top, below);
    result.replaceChildren(names.length ? grid : make("p", "No difference in what both name."));
  };
  picks.forEach(select => select.addEventListener("change", show));
  pair.replaceChildren(...picks, result);
  show();
} else {
  pair.textContent = "There is only one run.";
}
