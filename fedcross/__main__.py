"""``python -m fedcross`` is the ``fedcross`` command."""

from fedcross.server.commands.main import run

run()
