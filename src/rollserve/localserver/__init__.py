"""A small inference server on PyTorch and transformers: the embedded default of the demo and the tests.

It speaks the part of vLLM's HTTP API that rollserve uses (token ids in, token ids and logprobs out,
weight versions per token, pause, in-place weight update), so that one client adapter serves both. It
batches requests of many sessions between decode steps. It is meant to be correct, readable and good
enough for small models on a CPU or one GPU; it does not compete with vLLM.

::

    python -m rollserve.localserver --model DIR --port 8300 --served-model-name tiny

Layers, each importing only those above it::

    request   bodies of the routes, sampling parameters and what of them is not supported   (no torch)
    sequence  one request while it is being served                                          (no torch)
    cache     keys and values of the running batch, one slot a row
    model     the transformers model behind one call: a range of slots forward
    sampler   logits → token, logprob, rank
    weights   checkpoint files: read, check, copy in
    engine    what runs in the next step; pause, abort, weight update
    worker    the engine's thread
    server    HTTP
"""
