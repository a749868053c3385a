"""The first eight minutes on a GPU: does everything run there, how exact is it, and where does the time go.

::

    python -m benchmarks.gpu                              # all items in order, outputs/gpu.json and outputs/gpu.log
    python -m benchmarks.gpu --only accuracy --only steps
    python -m benchmarks.gpu --device cpu --tiny          # the program itself, without a GPU

Each item has a process of its own, and writes a line as soon as it is known. Where a fault breaks the GPU for its
process, or ends it, or a line takes too long, a new process goes on with the next line. A second call goes on as well:
it keeps the lines that are as expected, and measures the others (``--anew``: all).

Exit code 0: all that was asked for was measured and is as expected (benchmarks/gpu/expected.py). 1: something is not,
or was not reached. 2: nothing can be measured, for want of a GPU above all. Needs torch and the packages of fedcross,
no data.
"""
