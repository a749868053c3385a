"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  let axis = data.axis;
  let smooth = data.curves.some((curve) => curve.mean.length >= data.smoothFrom);

  // Tables -----------------------------------------------------------------
  const UNITS = { B: 1, kB: 1e3, MB: 1e6, GB: 1e9, TB: 1e12, s: 1, m: 60, h: 3600 };

  // "54.78 ± 0.56", "3.0 GB", "1h 06m" and "+1.2" as numbers; null for words and for the dash.
  const amount = (text) => {
    const parts = [...text.matchAll(/(\d+(?:\.\d+)?)([hms])(?![a-z])/g)];
    if (parts.length && /^\d/.test(text)) return parts.reduce((sum, p) => sum + Number(p[1]) * UNITS[p[2]], 0);
    const found = text.match(/^(?:< )?([+-]?\d+(?:\.\d+)?)\s?(kB|MB|GB|TB|B|s|%|±|of|–|\(|$)/);
    return found ? Number(found[1]) * (UNITS[found[2]] ?? 1) : null;
  };

  const sortTable = (table, column, ascending) => {
    const body = table.tBodies[0];
    const value = (row) => row.cells[column].textContent.trim();
    const rows = [...body.rows];
    const numeric = rows.some((row) => amount(value(row)) !== null);
    rows.sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      if (!numeric) return (ascending ? 1 : -1) * x.localeCompare(y, "en", { numeric: true });
      const [p, q] = [amount(x), amount(y)];
      if (p === null || q === null) return (p === null) - (q === null); // unknown values stay at the end
      return ascending ? p - q : q - p;
    });
    body.append(...rows);
    [...table.tHead.rows[0].cells].forEach((cell, i) => {
      if (i === column) cell.setAttribute("aria-sort", ascending ? "ascending" : "descending");
      else cell.removeAttribute("aria-sort");
    });
  };

  document.querySelectorAll("table.sortable").forEach((table) => {
    [...table.tHead.rows[0].cells].forEach((cell, column) => {
      cell.querySelector("button").addEventListener("click", () => {
        sortTable(table, column, cell.getAttribute("aria-sort") === "descending");
      });
    });
  });

  // Plots ------------------------------------------------------------------
  const colours = () => {
    const style = getComputedStyle(root);
    const of = (name) => style.getPropertyValue(name).trim();
    return { fg: of("--fg"), soft: of("--soft"), line: of("--line"), bg: of("--bg"), dark: of("color-scheme") === "dark" };
  };

  const trailing = (values) => {
    let sum = 0;
    return values.map((value, i) => {
      sum += value - (i >= data.window ? values[i - data.window] : 0);
      return sum / Math.min(i + 1, data.window);
    });
  };

  const rgba = (hex, alpha) => {
    const part = (i) => parseInt(hex.slice(i, i + 2), 16);
    return `rgba(${part(1)},${part(3)},${part(5)},${alpha})`;
  };

  const hidden = new Set();

  const traces = (curve, dark) => {
    const x = curve.x[axis];
    const colour = dark ? curve.dark : curve.colour;
    const long = smooth && curve.mean.length >= data.smoothFrom;
    const mean = long ? trailing(curve.mean) : curve.mean;
    const std = long ? trailing(curve.std) : curve.std;
    const common = { x, type: "scatter", mode: "lines", showlegend: false };
    const quiet = { ...common, hoverinfo: "skip" };
    const list = [];
    if (curve.seeds > 1) {
      list.push({ ...quiet, y: mean.map((m, i) => m + std[i]), line: { width: 0 } });
      list.push({
        ...quiet, y: mean.map((m, i) => m - std[i]), line: { width: 0 }, fill: "tonexty", fillcolor: rgba(colour, 0.2),
      });
    }
    if (long) {
      list.push({ ...quiet, y: curve.mean, line: { color: rgba(colour, 0.3), width: 0.7 } });
    }
    list.push({
      ...common, y: mean, name: curve.name, line: { color: colour, dash: curve.dash, width: 2 },
      hovertemplate: `${curve.name}<br>%{y:.2f} % at %{x:.5~g}<extra></extra>`,
    });
    return list;
  };

  const layout = (tone, title, extra) => ({
    paper_bgcolor: tone.bg, plot_bgcolor: tone.bg, font: { color: tone.fg, family: "system-ui, sans-serif", size: 13 },
    margin: { l: 52, r: 12, t: 32, b: 48 },
    xaxis: { title: { text: title }, gridcolor: tone.line, zerolinecolor: tone.line, automargin: true },
    yaxis: { title: { text: "test accuracy, %" }, gridcolor: tone.line, zerolinecolor: tone.line, automargin: true },
    hoverlabel: { bgcolor: tone.bg, bordercolor: tone.soft, font: { color: tone.fg } },
    ...extra,
  });

  const config = { displaylogo: false, responsive: true, modeBarButtonsToRemove: ["select2d", "lasso2d"] };

  // The legend is HTML: it wraps on a phone. A click hides or shows a curve.
  const legend = (dark) => data.problems.forEach((problem, i) => {
    const keys = data.curves.filter((curve) => curve.problem === problem).map((curve) => {
      const key = document.createElement("button");
      const sample = { solid: "", dash: "8 4", dot: "2 3", dashdot: "8 3 2 3" }[curve.dash];
      key.type = "button";
      key.setAttribute("aria-pressed", String(!hidden.has(curve)));
      key.innerHTML = `<svg width="28" height="10" aria-hidden="true"><line x1="0" y1="5" x2="28" y2="5" stroke-width="3"
        stroke="${dark ? curve.dark : curve.colour}" stroke-dasharray="${sample}"/></svg>`;
      key.append(curve.name);
      key.addEventListener("click", () => {
        if (!hidden.delete(curve)) hidden.add(curve);
        draw();
      });
      return key;
    });
    document.getElementById(`legend-${i}`).replaceChildren(...keys);
  });

  const draw = () => {
    const tone = colours();
    legend(tone.dark);
    const jobs = data.problems.map((problem, i) => {
      const lines = data.curves
        .filter((curve) => curve.problem === problem && !hidden.has(curve))
        .flatMap((curve) => traces(curve, tone.dark));
      return Plotly.react(`plot-${i}`, lines, layout(tone, data.axes[axis], {}), config);
    });
    data.grids.forEach((grid, i) => {
      const trace = {
        type: "heatmap", x: grid.selections, y: grid.alphas.map(String), z: grid.values, colorscale: "Cividis",
        text: grid.text, texttemplate: "%{text}", hoverongaps: false,
        hovertemplate: "alpha %{y}, %{x}<br>%{z:.2f} %<extra></extra>",
        colorbar: { title: { text: "%" }, thickness: 14 },
      };
      const axes = {
        xaxis: { title: { text: "selection" }, type: "category", automargin: true },
        yaxis: { title: { text: "alpha" }, type: "category", automargin: true, autorange: "reversed" },
      };
      jobs.push(Plotly.react(`heat-${i}`, [trace], layout(tone, "selection", axes), config));
    });
    return Promise.all(jobs).then(() => { root.dataset.drawn = axis; });
  };

  document.querySelectorAll("[data-axis]").forEach((button) => {
    button.addEventListener("click", () => {
      axis = button.dataset.axis;
      document.querySelectorAll("[data-axis]").forEach((b) => b.setAttribute("aria-pressed", String(b === button)));
      draw();
    });
  });
  const box = document.getElementById("smooth");
  box.hidden = !smooth; // no curve is long enough
  box.setAttribute("aria-pressed", String(smooth));
  box.addEventListener("click", () => {
    smooth = !smooth;
    box.setAttribute("aria-pressed", String(smooth));
    draw();
  });

  // Dark and light ---------------------------------------------------------
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  document.getElementById("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : prefersDark.matches;
    root.dataset.theme = dark ? "light" : "dark";
    draw();
  });
  prefersDark.addEventListener("change", draw);
  draw();
})();
