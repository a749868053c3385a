"use strict";
// A click on a table's head sorts its rows: "54.78 ± 0.56", "3.0 GB" and "1h 06m" as numbers, other cells as text.
const UNITS = { B: 1, kB: 1e3, MB: 1e6, GB: 1e9, TB: 1e12 };
const amount = (text) => {
  const times = [...text.matchAll(/(\d+(?:\.\d+)?)\s?([hms])(?![a-z])/g)];
  if (times.length) return times.reduce((sum, t) => sum + Number(t[1]) * { h: 3600, m: 60, s: 1 }[t[2]], 0);
  const found = text.match(/^(?:< )?([+-]?\d+(?:\.\d+)?)\s?(kB|MB|GB|TB|B)?/);
  return found ? Number(found[1]) * (UNITS[found[2]] ?? 1) : null;
};
document.querySelectorAll("th").forEach((head) => head.addEventListener("click", () => {
  const body = head.closest("table").tBodies[0];
  const down = head.getAttribute("aria-sort") === "ascending";
  const value = (row) => row.cells[head.cellIndex].textContent.trim();
  const rows = [...body.rows].sort((a, b) => {
    const [p, q] = [amount(value(a)), amount(value(b))];
    if (p === null && q === null) return value(a).localeCompare(value(b));
    if (p === null || q === null) return (p === null) - (q === null);
    return down ? q - p : p - q;
  });
  body.append(...(down && rows.every((row) => amount(value(row)) === null) ? rows.reverse() : rows));
  [...head.parentNode.cells].forEach((cell) => cell.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
}));
