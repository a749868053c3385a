"""The live page: one HTML text with its style and script, because Flower's bundles carry Python files only."""
# ruff: noqa: E501

PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>fedcross</title><link rel="icon" href="data:,">
<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark"><style>
body { margin: 0 auto; padding: 1rem; max-width: 72rem; font: 15px/1.45 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.25rem; margin: 0; } h2 { font-size: 1rem; } .soft { opacity: .7; } .bad { color: #d1450b; }
#tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .6rem; }
#tiles div { border: 1px solid #8886; border-radius: 8px; padding: .4rem .7rem; } #tiles b { display: block; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .2rem .6rem; border-bottom: 1px solid #8886; white-space: nowrap; }
svg { width: 100%; height: 220px; } polyline { fill: none; stroke: #1f6feb; stroke-width: 2; vector-effect: non-scaling-stroke; }
.similarity { stroke: #b35c00; stroke-dasharray: 5 3; } progress { width: 100%; }
</style></head><body><h1 id="title">fedcross</h1><p id="under" class="soft">connecting ...</p><progress id="progress" aria-label="rounds done" max="1" value="0"></progress>
<div id="tiles"></div><h2>Accuracy <span class="soft" id="legend"></span></h2><svg id="curve" viewBox="0 0 100 100" preserveAspectRatio="none" role="img" aria-label="accuracy by round"></svg>
<h2>Slots</h2><div class="scroll"><table id="slots"></table></div><h2>Devices</h2><div class="scroll"><table id="devices"></table></div>
<script>"use strict"; const at = (id) => document.getElementById(id);
const make = (name, text, kind) => Object.assign(document.createElement(name), { textContent: text, className: kind ?? "" });
const span = (s) => s < 90 ? `${Math.round(s)} s` : s < 5400 ? `${Math.round(s / 60)} min` : `${(s / 3600).toFixed(1)} h`;
const size = (n) => n < 1e6 ? `${(n / 1e3).toFixed(1)} kB` : `${(n / 1e6).toFixed(1)} MB`;
const percent = (x) => `${(100 * x).toFixed(2)} %`;
const row = (kind, cells) => { const one = make("tr", ""); one.append(...cells.map((cell) => make(kind, cell))); return one; };
const table = (id, heads, rows) => at(id).replaceChildren(row("th", heads), ...rows.map((cells) => row("td", cells)));
function line(kind, points, first, last) {
  const one = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
  one.setAttribute("class", kind); one.setAttribute("points", points.map(([r, v]) => `${100 * (r - first) / (last - first)},${100 * (1 - v)}`).join(" "));
  return one; }
function show(s) {
  const run = s.run, done = s.last.round ?? run.after_round ?? 0, curve = s.curve;
  document.title = `${s.round}/${run.rounds ?? "?"} ${run.method ?? "fedcross"}`;
  at("title").textContent = run.method ? `${run.method} on ${run.task}` : "fedcross";
  at("under").textContent = `${s.state}, engine ${run.engine ?? "?"}, seed ${run.seed ?? "?"}, ${run.folder ?? ""}`;
  at("under").className = s.state.startsWith("ended") ? "bad" : "soft";
  at("progress").value = run.rounds ? done / run.rounds : 0;
  const rejected = Object.values(s.rejected).reduce((a, b) => a + b, 0);
  const tiles = { "round": `${s.round} / ${run.rounds ?? "?"}`, "time left": s.left_s == null ? "-" : span(s.left_s),
    "waits for": s.waiting ?? "nothing", "connected": s.online ?? "-",
    "sent, received": `${size(s.totals.bytes_down ?? 0)}, ${size(s.totals.bytes_up ?? 0)}`,
    "slots lost, replies rejected": `${s.totals.dropped ?? 0}, ${rejected}`,
    "last checkpoint": s.checkpoint ? `${span(s.now - s.checkpoint)} ago` : "-" };
  at("tiles").replaceChildren(...Object.entries(tiles).map(([name, value]) => {
    const one = make("div", ""); one.append(make("b", value), make("span", name, "soft")); return one; }));
  if (curve.length) {
    const first = curve[0].round, last = Math.max(curve.at(-1).round, first + 1), alike = curve.filter((p) => p.similarity != null);
    at("curve").replaceChildren(line("", curve.map((p) => [p.round, p.accuracy]), first, last),
      line("similarity", alike.map((p) => [p.round, Math.max(0, p.similarity)]), first, last));
    at("legend").textContent = percent(curve.at(-1).accuracy) + (alike.length ? `, dashed: similarity ${alike.at(-1).similarity.toFixed(3)}` : "");
  }
  table("slots", ["slot", "client", "since", "state"], s.slots.map((one) => [one.slot, one.client,
    one.state === "out" ? span(s.now - one.since) : "", one.state === "out" ? "with the device" : one.state]));
  table("devices", ["client", "heard", "visits", "s each", "sent us", "rejected", "node"], s.devices.map((one) => [one.client,
    one.seen ? `${span(s.now - one.seen)} ago` : "never", one.visits, one.visits ? (one.seconds / one.visits).toFixed(1) : "-",
    size(one.bytes_up), one.rejected, one.node]));
}
async function look() {
  try { show(await (await fetch("state")).json()); } catch { at("under").textContent = "The server does not answer."; }
  setTimeout(look, 1000); }
look();
</script></body></html>
"""
