"""The first eight minutes on a GPU: does everything run there, how exact is it, and where does the time go.

::

    python -m benchmarks.gpu                              # all items in order, outputs/gpu.json
    python -m benchmarks.gpu --only accuracy --only steps
    python -m benchmarks.gpu --device cpu --tiny          # the program itself, without a GPU

Each item has a process of its own and writes a line as soon as it is known, so an interrupted run keeps what it has
found. Where a fault breaks the GPU for its process, or ends it, a new process goes on with the next line. The exit code
is 1 if anything failed. Needs torch and the packages of fedcross, no data.
"""
