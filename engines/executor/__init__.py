"""Runs a SuperNode and answers its messages in a process that stays: Flower starts a process per message.

::

    supervisor   starts the SuperNode and asks it for work
    node         Flower's SuperNode with shorter pauses
    crew         starts and ends the worker, hands it tasks, reports a worker that died
    worker       one process for one app bundle; answers one message after another
    flower_runtime   the only file that uses classes of Flower's Runtime API
    program      the command line of both

The folder needs Flower and nothing of fedcross, and imports its own files under a name of its own: the worker loads
fedcross (or another app) from the bundle that the server has sent, and must not have imported another one before.
"""
