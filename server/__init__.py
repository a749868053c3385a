"""The server's part of a run, and the ``fedcross`` command."""

#: Each is a module of :mod:`server.commands` with a ``main(arguments)``.
SUBCOMMANDS = ("report", "export", "analyse", "partition", "record", "audit", "doctor", "deploy", "new-method")
