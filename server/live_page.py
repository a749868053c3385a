"""The live page: one HTML text with its style and script, because Flower's bundles carry Python files only."""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>fedcross</title>
<link rel="icon" href="data:,">
<style>
:root { --ink: #1c2430; --soft: #5d6b7c; --line: #d9e0e8; --back: #f5f7fa; --card: #fff; --main: #1f6feb;
  --good: #1a7f37; --bad: #c4320a; --second: #b35c00; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9aa7b4; --line: #303a46; --back: #0f141a;
  --card: #171e26; --main: #58a6ff; --good: #3fb950; --bad: #ff7b54; --second: #e3a04f; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 72rem; background: var(--back); color: var(--ink);
  font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.25rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1rem; margin: 0 0 .5rem; }
header p { margin: .2rem 0 1rem; color: var(--soft); overflow-wrap: anywhere; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .8rem; margin: 0 0 1rem;
  min-width: 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); gap: .6rem; margin-bottom: 1rem; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .5rem .7rem; }
.tile b { display: block; font-size: 1.1rem; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.tile span { color: var(--soft); font-size: .85rem; }
.two { display: grid; gap: 0 1rem; }
@media (min-width: 52rem) { .two { grid-template-columns: 1fr 1fr; } }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .25rem .5rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 600; font-size: .85rem; }
td.state { text-align: left; } th.state { text-align: left; }
.good { color: var(--good); } .bad { color: var(--bad); } .soft { color: var(--soft); }
svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--soft); font-size: 12px; } svg line { stroke: var(--line); }
.accuracy { stroke: var(--main); fill: none; stroke-width: 2; } .similarity { stroke: var(--second); fill: none;
  stroke-width: 2; stroke-dasharray: 5 3; }
.bar { height: 6px; background: var(--line); border-radius: 3px; margin: 0 0 1rem; overflow: hidden; }
.bar i { display: block; height: 100%; width: 0; background: var(--main); }
</style>
</head>
<body>
<header><h1 id="title">fedcross</h1><p id="under">connecting ...</p></header>
<div class="bar" role="progressbar" aria-label="rounds done" aria-valuemin="0"><i id="progress"></i></div>
<div class="tiles" id="tiles"></div>
<section><h2>Accuracy <span class="soft" id="legend"></span></h2><div id="curve"></div></section>
<div class="two">
<section><h2>Slots</h2><div class="scroll"><table id="slots"></table></div></section>
<section><h2>Devices <span class="soft" id="known"></span></h2>
<div class="scroll"><table id="devices"></table></div></section>
</div>
<script>
"use strict";
const at = (id) => document.getElementById(id);
const make = (name, text, kind) => {
  const one = document.createElement(name);
  if (text !== undefined) one.textContent = text;
  if (kind) one.className = kind;
  return one;
};
const span = (s) => s < 1 ? "0 s" : s < 90 ? `${Math.round(s)} s` : s < 5400 ? `${Math.round(s / 60)} min`
  : s < 129600 ? `${(s / 3600).toFixed(1)} h` : `${(s / 86400).toFixed(1)} days`;
const size = (n) => n < 1e3 ? `${n} B` : n < 1e6 ? `${(n / 1e3).toFixed(1)} kB` : n < 1e9 ? `${(n / 1e6).toFixed(1)} MB`
  : `${(n / 1e9).toFixed(2)} GB`;
const percent = (x) => `${(100 * x).toFixed(2)} %`;
let state = null, skew = 0, lost = false;
const now = () => Date.now() / 1000 - skew;

function table(id, heads, rows) {
  const head = make("thead"), body = make("tbody"), line = make("tr");
  for (const name of heads) line.append(make("th", name, name === "state" ? "state" : ""));
  head.append(line);
  for (const row of rows) {
    const one = make("tr");
    for (const [text, kind] of row) one.append(make("td", text, kind));
    body.append(one);
  }
  at(id).replaceChildren(head, body);
}

function curve(points) {
  const box = at("curve"), shape = (name, values) => {
    const one = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(values)) one.setAttribute(key, value);
    return one;
  };
  if (!points.length) { box.replaceChildren(make("p", "No round has been evaluated yet.", "soft")); return; }
  const w = Math.max(320, Math.min(box.clientWidth, 1100)), h = Math.max(180, Math.min(w / 3, 300));
  const left = 42, low = 24;
  const first = points[0].round, last = Math.max(points.at(-1).round, first + 1);
  const x = (r) => left + (w - left - 10) * (r - first) / (last - first), y = (v) => 8 + (h - low - 8) * (1 - v);
  const svg = shape("svg", { viewBox: `0 0 ${w} ${h}`, role: "img", "aria-label": "accuracy by round" });
  for (const v of [0, .25, .5, .75, 1]) {
    svg.append(shape("line", { x1: left, x2: w - 10, y1: y(v), y2: y(v) }));
    const text = shape("text", { x: left - 6, y: y(v) + 4, "text-anchor": "end" });
    text.textContent = `${100 * v} %`;
    svg.append(text);
  }
  for (const r of [first, last]) {
    const text = shape("text", { x: x(r), y: h - 6, "text-anchor": r === first ? "start" : "end" });
    text.textContent = `round ${r}`;
    svg.append(text);
  }
  const draw = (name, kept) => kept.length && svg.append(
    shape("polyline", { class: name, points: kept.map(([r, v]) => `${x(r)},${y(v)}`).join(" ") }),
    shape("circle", { class: name, cx: x(kept.at(-1)[0]), cy: y(kept.at(-1)[1]), r: 3 }));
  draw("accuracy", points.map((p) => [p.round, p.accuracy]));
  const similar = points.filter((p) => p.similarity != null).map((p) => [p.round, Math.max(0, p.similarity)]);
  draw("similarity", similar);
  at("legend").textContent = `${percent(points.at(-1).accuracy)}`
    + (similar.length ? `, dashed: the pool's similarity ${similar.at(-1)[1].toFixed(3)}` : "");
  box.replaceChildren(svg);
}

function show() {
  if (!state) return;
  const s = state, run = s.run, t = now();
  document.title = `${s.round}/${run.rounds ?? "?"} ${run.method ?? "fedcross"}`;
  at("title").textContent = run.method ? `${run.method} on ${run.task}` : "fedcross";
  const over = /^(finished|stopped|ended)/.test(s.state);
  const silent = "The server does not answer: the run has ended, or the connection is lost. Last heard: ";
  const away = lost && !over ? silent : "";
  at("under").textContent = `${away}${s.state}, `
    + `engine ${run.engine ?? "?"}, seed ${run.seed ?? "?"}, ${run.folder ?? ""}`;
  at("under").className = (lost && !over) || s.state.startsWith("ended") ? "bad" : "";
  const share = run.rounds ? (s.last.round ?? run.after_round) / run.rounds : 0;
  at("progress").style.width = `${100 * share}%`;
  at("progress").parentElement.setAttribute("aria-valuenow", Math.round(100 * share));
  const until = s.waiting && s.waiting.until > t ? `${span(s.waiting.until - t)} at most` : "now";
  const waits = s.waiting ? `${s.waiting.what}, ${until}` : "nothing";
  const rejected = Object.values(s.rejected).reduce((a, b) => a + b, 0);
  const tiles = [
    ["round", `${s.round} / ${run.rounds ?? "?"}`], ["time left", s.left_s == null ? "-" : span(s.left_s)],
    ["waits for", waits], ["connected when the round began", s.online == null ? "-" : s.online],
    ["sent, received", `${size(s.totals.bytes_down ?? 0)}, ${size(s.totals.bytes_up ?? 0)}`],
    ["slots lost, replies rejected", `${s.totals.dropped ?? 0}, ${rejected}`],
    ["last checkpoint", s.checkpoint ? `${span(t - s.checkpoint)} ago` : "-"],
  ];
  at("tiles").replaceChildren(...tiles.map(([name, value]) => {
    const one = make("div", undefined, "tile");
    one.append(make("b", value), make("span", name));
    return one;
  }));
  curve(s.curve);
  const kind = (name) => name === "accepted" ? "state good" : name === "out" ? "state" : "state bad";
  table("slots", ["slot", "client", "since", "state"], s.slots.map((one) => [
    [one.slot], [one.client], [one.state === "out" ? span(t - one.since) : ""],
    [one.state === "out" ? "with the device" : one.state, kind(one.state)]]));
  table("devices", ["client", "heard", "visits", "s each", "sent us", "rejected", "node"], s.devices.map((one) => [
    [one.client], [one.seen ? `${span(t - one.seen)} ago` : "never"], [one.visits],
    [one.visits ? (one.seconds / one.visits).toFixed(1) : "-"], [size(one.bytes_up)],
    [one.rejected, one.rejected ? "bad" : ""], [one.node]]));
  const shown = s.devices.length;
  at("known").textContent = s.devices_known > shown ? `the last ${shown} of ${s.devices_known}` : "";
  document.documentElement.dataset.drawn = s.round;
}

function take(news) {
  state = news;
  skew = Date.now() / 1000 - state.now;
  lost = false;
  show();
}
const source = new EventSource("events");
source.onmessage = (event) => take(JSON.parse(event.data));
source.onerror = () => { lost = true; show(); };
setInterval(show, 1000);
addEventListener("resize", show);
</script>
</body>
</html>
"""
