"""The demo's policy: a Qwen3-architecture model of a few hundred thousand parameters, and its task.

``python -m rollserve.trainers.tiny --out DIR`` makes the model and warm-starts it (half a minute on one
thread): it then has every skill the task needs, and a mixture of behaviours of which about four in ten
succeed. What is left for reinforcement learning is to select. ``--check`` proves that it can, offline.

::

    task            the task, as data
    rendering       conversation → tokens, as the service does it
    demonstrations  the mixture the warm start imitates
    model           make, save, and score token by token
    warmstart       supervised training
    selfcheck       GRPO against a simulated sandbox
"""
