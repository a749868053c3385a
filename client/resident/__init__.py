"""A trainer process that keeps running beside a SuperNode between messages."""
