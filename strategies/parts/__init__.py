"""Building blocks that several methods share: objectives, averaging, prototypes, schedules, matching."""
