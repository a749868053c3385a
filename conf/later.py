"""Settings that came with later versions, and what older runs, which lack them, did instead."""

from __future__ import annotations

from typing import Any

#: Group -> setting -> the value that stands for the old behaviour. A setting with that value is left out of a run's
#: identity, so that sweeps find the folders of older versions, and counts as equal to a missing one in reports. A new
#: setting belongs here if those folders are to keep their names, or if its default is not the old behaviour.
LATER: dict[str, dict[str, Any]] = {
    "method": {
        "independent_start": False,
        "unit": False,
        "ramp": None,
        "strategy": None,
        "arguments": {},
        "host_lr": None,
        "mixing": "batch",
        "widths": [],
        "shares": [],
        "whole": 0,
        "nested": False,
        "nested_steps": "in_turn",
        "sharpness": 4.0,
        "limit": None,
        "shrink": 0.0,
        "memory_mb": 0,
        "masked": False,
    },
    "partition": {"sampler": "keyed", "authors_seed": 1, "count": "train"},
    "devices": {"widths": None},
    "train": {"deterministic": False, "only": [], "base": None, "base_sha256": None},
}


def as_before(plain: dict[str, Any]) -> None:
    """Change `plain`, the settings of a run, to what an older version would have written for the same run."""
    for group, settings in LATER.items():
        own = plain.get(group, {})
        for name in [name for name, value in settings.items() if name in own and own[name] == value]:
            del own[name]
    if plain["method"].get("mode") == "cross" and "propeller_weighting" in plain["method"]:
        plain["method"]["propeller_weighting"] = "alpha"  # has no effect here; write the default of older versions
