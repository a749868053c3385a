"""The content of a report on groups of runs: tables, ablation grids, notes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedcross.analysis.ablation import Grid
    from fedcross.analysis.groups import Group
    from fedcross.analysis.tables import Table
    from fedcross.analysis.visits import Visits


@dataclass(frozen=True)
class Report:
    """The content of a report: groups of runs, tables, ablation grids and notes about folders."""

    groups: list[Group]
    tables: list[Table]
    grids: list[Grid]
    notes: list[str]
    visits: Sequence[Visits] = ()

    def markdown(self) -> str:
        """Return the text of ``report.md``."""
        from fedcross.analysis.formats import markdown

        pictures = ["![Test accuracy](curves.png)\n"] + (["![Ablation](ablation.png)\n"] if self.grids else [])
        pictures += ["![Visits](visits.png)\n"] if self.visits else []
        parts = [*map(markdown, self.tables), *pictures]
        if self.notes:
            parts.append("## Notes\n\n" + "".join(f"- {note}\n" for note in self.notes))
        return "# Report\n\n" + "\n".join(parts)


def build(
    groups: Sequence[Group], notes: Sequence[str], targets: Sequence[float] = (), at: Sequence[int] = ()
) -> Report:
    """Return everything a report shows about `groups`; `targets` and `at` as in :func:`write_report`."""
    from fedcross.analysis import tables
    from fedcross.analysis.ablation import grids
    from fedcross.analysis.visits import read_visits, visits_table

    wanted = list(targets) or [t for t in [tables.default_target(groups)] if t == t]
    found, visits = grids(groups), [one for one in map(read_visits, groups) if one is not None]
    parts = [
        tables.accuracy_table(groups),
        tables.at_table(groups, at) if at else None,
        tables.width_table(groups),
        tables.published_table(groups),
        tables.target_table(groups, wanted) if wanted else None,
        tables.significance_table(groups),
        *tables.ablation_tables(found),
        visits_table(visits) if visits else None,
    ]
    said = tables.defence_note(groups)
    short = [tables.compact(part) for part in parts if part is not None]
    shown = [replace(one, note=f"{one.note} {said}".strip()) for one in short]
    return Report(list(groups), shown, found, list(notes), visits)
