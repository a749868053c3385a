"""Writes tables as Markdown and LaTeX, and plain numbers as CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence

from fedcross.analysis.groups import Group
from fedcross.analysis.published import accuracy_cells
from fedcross.analysis.tables import Table, defence_note, rounds_done


def markdown(table: Table) -> str:
    """Return the table as GitHub Markdown with its title and note; columns are padded for reading as text."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (table.header, *table.rows)]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(table.header))]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths)) + " |" for row in cells]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    parts = [f"## {table.title}", "\n".join(lines)]
    return "\n\n".join(parts + ([table.note] if table.note else [])) + "\n"


CSV_FIELDS = (
    "task", "model", "partition", "beta", "method", "settings", "seeds", "rounds", "finished",
    "final_mean", "final_std", "best_mean", "best_std", "smoothed_mean", "smoothed_std", "smoothed_window_std",
    "bytes_mean", "seconds_mean", "published", "published_source", "defence",
)  # fmt: skip


def csv_text(groups: Sequence[Group]) -> str:
    """Return one line of plain numbers per group: accuracies in percent, bytes, seconds; empty where unknown."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_FIELDS)
    for group in groups:
        of = group.settings.get
        final, best = group.over_seeds(lambda run: run.final), group.over_seeds(lambda run: run.best)
        smooth = group.over_seeds(lambda run: run.smoothed.mean)
        numbers = [
            *(100 * v for s in (final, best, smooth) for v in (s.mean, s.std)),
            100 * group.over_seeds(lambda run: run.smoothed.std).mean,
            group.over_seeds(lambda run: run.bytes_total).mean,
            group.over_seeds(lambda run: run.seconds_total).mean,
        ]
        head = [of("task.name"), of("model.name"), of("partition.name"), of("partition.beta"), of("method.name")]
        words = ["" if value is None else value for value in head]
        count = [len(group.runs), rounds_done(group), "yes" if group.finished else "no"]
        paper = [[cell.value, cell.source] for cell in accuracy_cells(group.settings)[:1]] or [["", ""]]
        shown = ["" if math.isnan(v) else f"{v:.10g}" for v in numbers]
        writer.writerow([*words, group.method, *count, *shown, *paper[0], defence_note([group])])
    return text.getvalue()


LATEX = str.maketrans(
    {
        "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}", "\\": r"\textbackslash{}", "±": r"$\pm$", "–": "--", "<": "$<$", ">": "$>$",
    }
)  # fmt: skip


def latex(tables: Sequence[Table]) -> str:
    """Return the tables as LaTeX floats with booktabs rules."""
    parts = ["% Made by fedcross report. Needs \\usepackage{booktabs}."]
    for table in tables:
        rows = [" & ".join(cell.translate(LATEX) for cell in row) + r" \\" for row in (table.header, *table.rows)]
        caption = f"{table.title}. {table.note}".strip().translate(LATEX)
        parts.append(
            "\n".join(
                [
                    r"\begin{table}",
                    r"\centering\footnotesize",
                    rf"\caption{{{caption}}}",
                    rf"\begin{{tabular}}{{{'l' * len(table.header)}}}",
                    r"\toprule",
                    rows[0],
                    r"\midrule",
                    *rows[1:],
                    r"\bottomrule",
                    r"\end{tabular}",
                    r"\end{table}",
                ]
            )
        )
    return "\n\n".join(parts) + "\n"
