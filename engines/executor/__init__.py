"""Does the work of a SuperNode, and of a SuperExec, in processes that are there before: Flower starts new ones.

A SuperNode's messages are answered in a process that stays:

::

    supervisor   starts the SuperNode and asks it for work
    node         Flower's SuperNode with shorter pauses, whose process ends with its loop
    fleet        its calls to the SuperLink, which outlast passing errors
    link         when the SuperLink last answered; the health check
    crew         starts and ends the worker, hands it tasks, reports a worker that died
    worker       one process for one app bundle; answers one message after another
    flower_runtime   the only file that uses classes of Flower's Runtime API
    program      the command line of all parts

A SuperExec's run begins in a process that has imported what it needs, and ends with it:

::

    superexec    Flower's SuperExec asks here before it starts a process
    ready        keeps one process ready: when there is one, and when Flower starts one after all
    serverapp    that process
    partner      a process and the line to it; the worker is one too

A SuperLink asks here what it takes from a device (:mod:`engines.guarded`):

::

    punctual     closes a connection on which no request comes
    entry        reads no body of a caller that it does not know
    operators    the token of those who start and stop runs
    door         stands before Flower's application: sends away, or lets in when a place is free
    fair         who is next, and how much of the SuperLink's time one caller gets
    share        how often a device calls
    announced    the tree that is announced
    replies      the message itself
    ledger       how much a device stores
    claims       whose word counts about an object
    rows         what Flower's store has of an object
    instead      an error for the server in the place of what is refused
    sweep        deletes what is over

The folder needs Flower and nothing of fedcross, and imports its own files under a name of its own: the worker loads
fedcross (or another app) from the bundle that the server has sent, and must not have imported another one before.
"""
