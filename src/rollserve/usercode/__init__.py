"""Code hosts: killable processes in which Python of the user runs (agents, graders, tools).

A worker keeps one *zygote* (``zygote``), a small single-threaded process that has imported rollserve's
light parts and the user's modules and forks a *host* per use in a few milliseconds. A host speaks
frames (``frames``) with the worker over its own socket pair: the worker side is ``hosts`` and
``host``, the side inside the process ``child``, ``operations`` and ``proxies``. What a host may ask
of the worker is the table of handlers it was opened with.
"""
