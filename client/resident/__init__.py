"""A trainer process that stays beside a SuperNode between messages."""
