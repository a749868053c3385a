"""Partitions of a task over clients: one module per procedure, each with ``Params`` and ``split(params, task, seed)``.

``split`` returns a :class:`tasks.base.Partition`; it is a pure function of its arguments.
"""

from fedcross.core.paths import extra_folders

__path__ += extra_folders("tasks.partition")
