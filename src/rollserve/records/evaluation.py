"""What an evaluation run says about its policy, and how two of them differ."""

from __future__ import annotations

import msgspec

from rollserve.records.base import Record


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout, as an evaluation sees it. ``task_key`` is a digest of the task's instruction, image,
    prepare, files, env and grader; ``title`` is for people. ``reward`` is None unless it was graded;
    ``ungraded`` says then why (a failure's kind, or ``open`` where it has not ended). ``seconds`` are
    active."""

    task_key: str
    title: str
    reward: float | None
    ungraded: str | None = None
    sampled_tokens: int = 0
    prompt_tokens: int = 0
    turns: int = 0
    seconds: float = 0.0


class Estimate(Record):
    """A mean over ``tasks`` tasks, each of the same weight. ``low`` and ``high`` bound it with the confidence
    asked for, as if the tasks were drawn from more of their kind; null where the spread between tasks can't
    be told. ``short`` tasks have too few graded rollouts to be in it."""

    value: float | None
    low: float | None = None
    high: float | None = None
    tasks: int
    short: int = 0


class Spread(Record):
    """Of rollouts that have ended, graded or not."""

    mean: float
    median: float
    p90: float
    total: float


class TaskResult(Record):
    """``passed`` of the ``graded`` rollouts have a reward of at least the threshold. ``pass_at`` by k, where
    so many are graded; ``mean_reward`` is of the graded ones."""

    key: str
    title: str
    rollouts: int
    graded: int
    passed: int
    mean_reward: float | None
    pass_at: dict[int, float]


class Evaluation(Record):
    """``ungraded`` counts rollouts without a reward by reason: they are in no estimate, so a value is of what
    was graded. ``open`` among them have not ended: the result is not final. ``pass_at`` by k."""

    run_id: str
    purpose: str
    policy: str
    threshold: float
    confidence: float
    tasks: int
    rollouts: int
    graded: int
    ungraded: dict[str, int]
    mean_reward: Estimate
    pass_at: dict[int, Estimate]
    sampled_tokens: Spread | None
    prompt_tokens: Spread | None
    turns: Spread | None
    seconds: Spread | None


class TaskName(Record):
    key: str
    title: str


class Side(Record):
    """Of one of the two runs: tasks that only it has, and how many; its rollouts without a reward in tasks
    that both have."""

    run_id: str
    only_here: list[TaskName]
    only_here_total: int
    ungraded: int


class Comparison(Record):
    """``ours`` less ``theirs``, task by task, over the tasks that both have. A task is won where its mean
    reward is higher. ``not_graded`` tasks have no graded rollout in one of them."""

    ours: Side
    theirs: Side
    threshold: float
    confidence: float
    tasks: int
    wins: int
    losses: int
    ties: int
    not_graded: list[TaskName]
    not_graded_total: int
    mean_reward: Estimate
    pass_at: dict[int, Estimate]


class TaskDifference(Record):
    """``difference`` is of the mean rewards; null where one has none."""

    key: str
    title: str
    ours: float | None
    theirs: float | None
    difference: float | None
