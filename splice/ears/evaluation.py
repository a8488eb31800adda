"""Evaluating agents that may abstain: several arms over the same labelled requests.

    labelled workload -> each arm asks its agent -> replies.jsonl -> grades -> scores, comparisons

An arm is the agent of each example in one mode, with one model. All of them run through the engine,
so that prompts are those of real runs. Replies are kept as they come: whoever is stopped goes on
with the same command, and nothing is asked twice. What got no answer has no line; it is asked again
the next time, and until then its example is left out for every arm.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import isawaitable
from pathlib import Path
from typing import Annotated, Final, Literal, NamedTuple, TypeAlias, get_args

from pydantic import Field, ValidationError

from splice._version import __version__
from splice.abstention import SOLVABLE, parse_reply, short_rationale
from splice.concurrency import each
from splice.ears.interactions import LABELS, Interaction, Label
from splice.ears.judging import Progress
from splice.ears.metrics import (
    Comparison,
    Graded,
    Scores,
    compare,
    grade,
    scores,
    scores_by_source,
    scores_text,
)
from splice.ears.record_files import RecordFile, problem_of_line
from splice.errors import DataError, ModelError, SettingsError
from splice.executor import execute, memo_key
from splice.files import write_whole
from splice.ledger import Account, Spending, spending
from splice.models.protocol import ChatModel
from splice.records import (
    CallRecord,
    ChatMessage,
    FailureKind,
    ModelIdentity,
    NodeId,
    NodeRun,
    Query,
    Record,
)
from splice.rendering import documents_block, others_list, question_block, render_input
from splice.report.display import WIDTH, aligned, visible, wrap
from splice.statistics import Share, share
from splice.text import contains
from splice.workflow import Agent, Workflow
from splice.workload import Example, Workload

Mode: TypeAlias = Literal["baseline", "prompted"]
"""`baseline`: the agent is told nothing about abstaining. `prompted`: it may abstain, and is told
how. An agent that was trained to abstain is `prompted`, with another model."""

MODES: Final[tuple[Mode, ...]] = get_args(Mode)

CORRECT: Final = "correct"
"""The score that says whether a task output was what was wanted."""
WELL_FORMED: Final = "well_formed"
"""The score that says whether a task output can be read, where a workload has one."""

_OWN_FAULTS: Final[frozenset[FailureKind]] = frozenset(
    {"abstention_syntax", "empty", "too_large", "tool_rounds"}
)
"""Failures that are what the agent did; after any other there is no reply."""

_MOST_AGENTS: Final = 10
"""Agents that are listed as over-abstaining."""


class Arm(Record):
    """An agent that is evaluated: in a mode, with a model."""

    name: str
    mode: Mode
    model: str | None = None
    """As whoever opens models knows it; None: the default one."""


DEFAULT_ARMS: Final = (Arm(name="baseline", mode="baseline"), Arm(name="prompted", mode="prompted"))


# --- examples --------------------------------------------------------------------------------


def agent_of(workflow: Workflow) -> Agent:
    """The one agent of a labelled example's workflow.

    Raises:
        SettingsError: there is another node, or no agent.
    """
    node = workflow.by_id[workflow.output]
    if len(workflow.nodes) > 1 or not isinstance(node, Agent):
        raise SettingsError(
            f"workflow {workflow.name!r} is not one agent alone: abstention is evaluated one agent "
            "at a time"
        )
    return node


def in_mode(workflow: Workflow, mode: Mode) -> Workflow:
    """The workflow of one agent, with the agent in a mode.

    An abstention is the typed form alone, so a phrase that stands for one is taken away.
    """
    agent = agent_of(workflow)
    may_abstain = mode == "prompted"
    changed = agent.model_copy(
        update={
            "may_abstain": may_abstain,
            "structured_replies": may_abstain and agent.structured_replies,
            "abstention_phrase": None,
        }
    )
    return workflow.changed(nodes=(changed,))


def messages_of(workflow: Workflow, query: Query) -> tuple[ChatMessage, ...]:
    """What the one agent of a workflow reads about a query, as the engine shows it."""
    agent = agent_of(workflow)
    documents = workflow.private(agent.id, query)
    blocks = [documents_block(documents)] if documents else []
    if agent.reads_query:
        blocks.append(question_block(query))
    return render_input(workflow, agent, blocks, workflow.subtask(agent.id, query), None)


def interaction_of(workload: Workload, example: Example) -> Interaction:
    """A labelled example as an interaction that nobody has replied to.

    Its context is what the agent reads where it is told nothing about abstaining, and which other
    agents there are.

    Raises:
        DataError: the example has no label, or none that there is.
        SettingsError: its workflow is not one agent alone.
    """
    workflow = in_mode(workload.workflow_of(example), "baseline")
    reference = example.reference
    label, rationale = reference.get("label"), reference.get("rationale")
    if label not in LABELS:
        raise DataError(
            f"{workload.name}: example {example.query.id!r}: label: {label!r} is none of "
            f"{', '.join(LABELS)}"
        )
    try:
        return Interaction(
            id=example.query.id,
            source=workload.name,
            agent=workflow.output,
            context=_context(workflow, example.query),
            query=example.query.text,
            label=label,
            also_right=reference.get("also_right", ()),
            rationale=short_rationale(rationale) if isinstance(rationale, str) else None,
        )
    except ValidationError as error:
        raise DataError(
            f"{workload.name}: example {example.query.id!r}: {problem_of_line(error)}"
        ) from None


def _context(workflow: Workflow, query: Query) -> str:
    told = [message.content for message in messages_of(workflow, query)]
    # Only the rules of abstaining name them to an agent; a judge sees no misrouting without.
    if others := others_list(workflow, workflow.output):
        told.insert(1, others)
    return "\n\n".join(told)


def source_of(workload: Workload, example: Example) -> str:
    """Where an example comes from: what stands before the first `/` of its id, or the workload."""
    source, slash, _ = example.query.id.partition("/")
    return source if slash and source else workload.name


# --- replies ---------------------------------------------------------------------------------


class AgentReply(Record):
    """What an agent replied to one example: one line of `replies.jsonl`."""

    mode: Mode
    model: ModelIdentity
    example: str
    """Id of the example's query."""
    prompt: str
    """Digest of what was asked for: the agent's definition, its model and what it read; the key
    under which the engine knows the run."""
    text: str
    """As the model wrote it; empty: it wrote nothing that can be used, see `problem`."""
    answer: str | None
    """What the workflow's rule takes from a task output; None: there is none."""
    problem: str | None = None
    """What the engine has against the reply; None: nothing."""
    is_truncated: bool = False
    calls: tuple[CallRecord, ...] = ()
    """Every attempt at a call."""
    elapsed_s: float

    @property
    def key(self) -> ReplyKey:
        """What makes it this reply."""
        return ReplyKey(self.mode, self.model, self.example, self.prompt)


class ReplyKey(NamedTuple):
    """What was asked, of whom, and how: one and the same is never asked twice."""

    mode: Mode
    model: ModelIdentity
    example: str
    prompt: str


class ReplyFile(RecordFile[AgentReply]):
    """Replies in a file that only grows. All arms share it."""

    kind = AgentReply


class Replies(NamedTuple):
    """What became of the examples of a workload in one arm, by id."""

    found: Mapping[str, AgentReply]
    problems: Mapping[str, str]
    """Why there is no reply, where there is none."""


class _Asked(NamedTuple):
    """An example with what its agent is in the mode that is asked for."""

    example: Example
    workflow: Workflow
    key: ReplyKey


async def reply_all(
    workload: Workload,
    mode: Mode,
    model: ChatModel,
    known: ReplyFile,
    *,
    concurrency: int = 8,
    account: Account | None = None,
    progress: Progress | None = None,
) -> Replies:
    """Ask the agent of each example in one mode.

    A reply is written as soon as it came, so that whoever is killed loses what is in flight. A
    model that gives no answer about one example is told in the result and costs no other.

    Args:
        workload: examples, each with the workflow of one agent.
        mode: whether the agent may abstain.
        model: what answers.
        known: replies that are there already, and where new ones go.
        concurrency: examples in flight.
        account: spending to reserve calls from.
        progress: told of each example that is done, and of those that were at the beginning.

    Raises:
        SettingsError: a workflow is not one agent alone. Raised before the first call.
        QueryError: a query does not fit its workflow; likewise.
        StoreError: the file of replies can't be written; what was written before is safe.
    """
    todo: list[_Asked] = []
    found: dict[str, AgentReply] = {}
    problems: dict[str, str] = {}
    for example in workload.examples:
        asked = _asked(workload, example, mode, model)
        reply = known.find(asked.key)
        if reply is None:
            todo.append(asked)
        else:
            found[reply.example] = reply

    def tell() -> None:
        if progress is not None:
            progress(len(found) + len(problems), len(workload.examples))

    async def ask(asked: _Asked) -> None:
        query = asked.example.query
        trace = await execute(asked.workflow, query, model, account=account)
        (run,) = trace.node_runs
        if run.failure is not None and run.failure.kind not in _OWN_FAULTS:
            problems[query.id] = run.failure.message
        else:
            reply = _reply(asked.key, run, trace.answer, trace.calls)
            known.put(reply)
            found[query.id] = reply
        tell()

    tell()
    await each(todo, ask, concurrency, None, mode)
    return Replies(found, problems)


def _asked(workload: Workload, example: Example, mode: Mode, model: ChatModel) -> _Asked:
    workflow = in_mode(workload.workflow_of(example), mode)
    workflow.check_query(example.query)
    agent = agent_of(workflow)
    identity = model.identity(agent.model.name)
    fingerprint = workflow.node_fingerprints[agent.id]
    prompt = memo_key(fingerprint, identity, 0, messages_of(workflow, example.query))
    return _Asked(example, workflow, ReplyKey(mode, identity, example.query.id, prompt))


def _reply(
    key: ReplyKey, run: NodeRun, answer: str | None, calls: tuple[CallRecord, ...]
) -> AgentReply:
    return AgentReply(
        **key._asdict(),
        text=(run.output if run.raw is None else run.raw) or "",
        answer=answer,
        problem=None if run.failure is None else f"{run.failure.kind}: {run.failure.message}",
        is_truncated=run.is_truncated,
        calls=calls,
        elapsed_s=run.elapsed_s,
    )


# --- grades ----------------------------------------------------------------------------------


async def grade_all(
    workload: Workload, replies: Mapping[str, AgentReply], *, concurrency: int = 8
) -> tuple[Graded, ...]:
    """Grade replies, in the order of the examples; an example without a reply is left out.

    A task output is right if the workload's score `correct` is 1, and well-formed if its score
    `well_formed` is, where it has one. A rationale is right if it names what the reference says it
    should (`rationale_has`); where the category is another one that is as right, or the reference
    says nothing, the category alone counts.

    Raises:
        DataError: an example has no label.
        SettingsError: the workload has no score `correct`, or the scorer leaves one out.
    """
    _check_metrics(workload)

    async def graded(example: Example) -> Graded:
        reply = replies[example.query.id]
        interaction = interaction_of(workload, example)
        read = parse_reply(reply.text)
        found = await _scored(workload, example, reply) if read.kind == "output" else {}
        return grade(
            interaction.model_copy(update={"source": source_of(workload, example)}),
            reply.text,
            is_right=found.get(CORRECT) == 1.0,
            is_rationale_right=_is_rationale_right(example, interaction.label, reply.text),
            is_well_formed=lambda output: (
                bool(output.strip()) and found.get(WELL_FORMED, 1.0) == 1.0
            ),
        )

    answered = [example for example in workload.examples if example.query.id in replies]
    return tuple(await each(answered, graded, concurrency, None, "grade"))


async def _scored(workload: Workload, example: Example, reply: AgentReply) -> Mapping[str, float]:
    coming = workload.score(example, reply.answer)
    found = await coming if isawaitable(coming) else coming
    if found.keys() != set(workload.metrics):
        raise SettingsError(
            f"the scorer of {workload.name!r} gave {sorted(found)}, not {workload.metrics}"
        )
    return found


def _is_rationale_right(example: Example, label: Label | None, text: str) -> bool | None:
    wanted = example.reference.get("rationale_has")
    abstention = parse_reply(text).abstention
    if not isinstance(wanted, str) or abstention is None or abstention.category != label:
        return None
    return contains(abstention.rationale, wanted)


def _check_metrics(workload: Workload) -> None:
    if CORRECT not in workload.metrics:
        raise SettingsError(
            f"workload {workload.name!r} has no score {CORRECT!r}, which says whether a task "
            f"output is right; it has {', '.join(workload.metrics)}"
        )


# --- results ---------------------------------------------------------------------------------


class OverAbstention(Record):
    """How often one agent abstained from what it could do."""

    agent: NodeId
    n_abstained: int
    share: Share
    """Of its solvable examples."""


class ArmResult(Record):
    """How one arm did on the examples that every arm has a reply to."""

    arm: Arm
    model: ModelIdentity
    n_missing: int
    """Examples that it gave no answer about."""
    problem: str | None = None
    """What was wrong with the first of these; None: there is none."""
    scores: Scores
    by_source: Mapping[str, Scores]
    over_abstaining: tuple[OverAbstention, ...]
    """Agents that abstained from something solvable, the worst first; at most 10."""
    spending: Spending
    elapsed_s: float
    """From asking to the reply, waiting for a free place included, summed over the examples."""


class ArmComparison(Record):
    """What one arm gains over another; None for a part without examples."""

    base: str
    other: str
    overall: Comparison
    solvable: Comparison | None
    """Over the examples that can be carried out."""
    abstention: Comparison | None
    """Over the examples that call for an abstention."""


class AbstentionResult(Record):
    """An evaluation of agents that may abstain, as it stands in `result.json`."""

    schema_version: Literal[1] = 1
    engine_version: str
    workload: str
    about: str
    split: str
    sources: Mapping[str, str]
    """SHA-256 by name of each data file."""
    seed: int
    n_examples: int
    n_compared: Annotated[int, Field(ge=1)]
    """Examples that every arm has a reply to; all scores are over these."""
    arms: tuple[ArmResult, ...]
    comparisons: tuple[ArmComparison, ...]
    """Each later arm with the first and with the one before it."""

    def text(self) -> str:
        """The evaluation as a page of text."""
        return "\n".join(
            [
                *_head(self),
                "",
                *_arm_table(self),
                "",
                *_comparison_table(self.comparisons),
                *_source_table(self.arms),
                *(line for result in self.arms for line in _arm_page(result)),
            ]
        )


OpenModel: TypeAlias = Callable[[str | None], ChatModel]
"""Opens a model by its name; None: the default one."""


async def run(
    workload: Workload,
    arms: Sequence[Arm],
    open_model: OpenModel,
    folder: str | Path,
    *,
    split: str,
    seed: int = 0,
    concurrency: int = 8,
    account: Account | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> AbstentionResult:
    """Ask every arm about the same examples, grade the replies and compare the arms.

    One model is open at a time. Each is opened and closed once before the first call, so that one
    that is not there costs nothing.

    Args:
        workload: labelled examples, each with the workflow of one agent.
        arms: agents to compare, in the order of the tables.
        open_model: opens the model of an arm.
        folder: of `replies.jsonl`, what it holds already is not asked again; and of `result.json`.
        split: of the examples; written into the result.
        seed: of the resampling.
        concurrency: examples in flight.
        account: spending to reserve calls from.
        progress: told of each example that is done; stages are the names of the arms.

    Raises:
        DataError: an example has no label. Raised before the first call, as the next two are.
        SettingsError: two arms have one name, there is no example, a workflow is not one agent
            alone, or a score or a model is missing.
        QueryError: a query does not fit its workflow.
        ModelError: no example got an answer for every arm; what there is is kept.
        StoreError: the folder can't be written, or another command works on it.
    """
    _check(workload, arms)
    folder = Path(folder)
    for name in dict.fromkeys(arm.model for arm in arms):
        await open_model(name).aclose()
    replies: list[Replies] = []
    with ReplyFile(folder / "replies.jsonl") as known:
        for arm in arms:
            model = open_model(arm.model)
            try:
                replies.append(
                    await reply_all(
                        workload,
                        arm.mode,
                        model,
                        known,
                        concurrency=concurrency,
                        account=account,
                        progress=_stage(progress, arm.name),
                    )
                )
            finally:
                await model.aclose()
    result = await _result(workload, arms, replies, split, seed, concurrency)
    write_whole(folder / "result.json", f"{result.model_dump_json(indent=1)}\n")
    return result


def _check(workload: Workload, arms: Sequence[Arm]) -> None:
    names = [arm.name for arm in arms]
    if not names or len(set(names)) < len(names):
        raise SettingsError(f"arms need names of their own, not {', '.join(names) or 'none'}")
    if not workload.examples:
        raise SettingsError(f"workload {workload.name!r} has no example in this split")
    _check_metrics(workload)
    for example in workload.examples:
        interaction_of(workload, example)
        workload.workflow_of(example).check_query(example.query)


def _stage(
    progress: Callable[[str, int, int], None] | None, name: str
) -> Callable[[int, int], None] | None:
    if progress is None:
        return None
    return lambda n_done, n_all: progress(name, n_done, n_all)


async def _result(
    workload: Workload,
    arms: Sequence[Arm],
    replies: Sequence[Replies],
    split: str,
    seed: int,
    concurrency: int,
) -> AbstentionResult:
    common = set.intersection(*(set(part.found) for part in replies))
    if not common:
        told = [
            f"{arm.name}: {next(iter(part.problems.values()))}"
            for arm, part in zip(arms, replies, strict=True)
            if part.problems
        ]
        raise ModelError(
            f"no example got an answer for every arm ({'; '.join(told)}); the replies that came "
            "are kept",
            reason="no_answer",
        )
    results: list[ArmResult] = []
    graded: list[tuple[Graded, ...]] = []
    for arm, part in zip(arms, replies, strict=True):
        own = {id: reply for id, reply in part.found.items() if id in common}
        graded.append(await grade_all(workload, own, concurrency=concurrency))
        results.append(_arm_result(workload, arm, own, part.problems, graded[-1]))
    return AbstentionResult(
        engine_version=__version__,
        workload=workload.name,
        about=workload.about,
        split=split,
        sources=workload.sources,
        seed=seed,
        n_examples=len(workload.examples),
        n_compared=len(common),
        arms=tuple(results),
        comparisons=tuple(
            _compared(arms[base].name, arms[other].name, graded[base], graded[other], seed)
            for other in range(1, len(arms))
            for base in dict.fromkeys((0, other - 1))
        ),
    )


def _arm_result(
    workload: Workload,
    arm: Arm,
    replies: Mapping[str, AgentReply],
    problems: Mapping[str, str],
    graded: Sequence[Graded],
) -> ArmResult:
    agents = {
        example.query.id: workload.workflow_of(example).output for example in workload.examples
    }
    calls = tuple(call for reply in replies.values() for call in reply.calls)
    return ArmResult(
        arm=arm,
        model=next(iter(replies.values())).model,
        n_missing=len(problems),
        problem=next(iter(problems.values()), None),
        scores=scores(graded),
        by_source=scores_by_source(graded),
        over_abstaining=over_abstaining(graded, agents),
        spending=spending(calls),
        elapsed_s=sum(reply.elapsed_s for reply in replies.values()),
    )


def over_abstaining(
    graded: Sequence[Graded], agents: Mapping[str, NodeId]
) -> tuple[OverAbstention, ...]:
    """Agents that abstained from something solvable, the worst first, at most 10.

    They are ranked by the lower end of the interval of their share: one of one is less than eight
    of ten.

    Args:
        graded: replies to examples.
        agents: the agent by the example's id.
    """
    solvable: dict[NodeId, list[bool]] = defaultdict(list)
    for row in graded:
        if row.label == SOLVABLE:
            solvable[agents[row.id]].append(row.predicted not in (None, SOLVABLE))
    found = [
        OverAbstention(agent=agent, n_abstained=sum(abstained), share=part)
        for agent, abstained in solvable.items()
        if any(abstained) and (part := share(sum(abstained), len(abstained))) is not None
    ]
    found.sort(key=lambda row: (-row.share.interval.low, row.agent))
    return tuple(found[:_MOST_AGENTS])


def _compared(
    base: str, other: str, before: Sequence[Graded], after: Sequence[Graded], seed: int
) -> ArmComparison:
    def part(is_solvable: bool) -> Comparison | None:
        old, new = (
            [row for row in rows if (row.label == SOLVABLE) == is_solvable]
            for rows in (before, after)
        )
        return compare(old, new, seed=seed) if old else None

    return ArmComparison(
        base=base,
        other=other,
        overall=compare(before, after, seed=seed),
        solvable=part(True),
        abstention=part(False),
    )


# --- for people ------------------------------------------------------------------------------


def _head(result: AbstentionResult) -> Iterator[str]:
    yield visible(
        f"{result.workload}, {result.split}: {result.n_compared:,} examples; seed: {result.seed}"
    )
    yield from wrap(result.about, WIDTH)
    for found in result.arms:
        model = found.model
        yield visible(f"{found.arm.name}: {found.arm.mode}, {model.name} ({model.provider})")
    if n_left_out := result.n_examples - result.n_compared:
        yield from wrap(
            f"Left out for every arm, as one of them got no answer: {n_left_out:,} of "
            f"{result.n_examples:,} examples. The same command asks again.",
            WIDTH,
        )
    for found in result.arms:
        if found.problem is not None:
            yield from wrap(
                f"{found.arm.name}: no answer about {found.n_missing:,}: {found.problem}", WIDTH
            )


_ARM_COLUMNS = (
    "arm",
    "overall",
    "95% interval",
    "syntax",
    "label right",
    "abstention right",
    "over",
    "under",
    "calls",
    "tokens",
    "seconds",
)


def _arm_table(result: AbstentionResult) -> list[str]:
    return [
        *aligned([_ARM_COLUMNS, *map(_arm_cells, result.arms)]),
        *wrap(
            "over: abstained, of what could be done; under: carried out, of what called for "
            "abstention.",
            WIDTH,
        ),
    ]


def _arm_cells(found: ArmResult) -> tuple[str, ...]:
    made = found.scores
    return (
        visible(found.arm.name),
        _value(made.overall),
        _interval(made.overall),
        _value(made.syntax),
        _value(made.accuracy),
        _value(made.abstention_ok),
        _value(made.over_abstention),
        _value(made.under_abstention),
        f"{found.spending.n_calls:,}",
        f"{found.spending.tokens:,}" + ("+" if found.spending.n_uncounted else ""),
        f"{found.elapsed_s:,.0f}",
    )


def _value(found: Share | None) -> str:
    return "-" if found is None else f"{found.value:.3f}"


def _interval(found: Share | None) -> str:
    return "-" if found is None else f"{found.interval:.3f}"


_COMPARISON_COLUMNS = (
    "comparison",
    "part",
    "n",
    "before",
    "after",
    "gain",
    "95% interval",
    "p",
    "fixed",
    "broken",
)


def _comparison_table(found: Sequence[ArmComparison]) -> list[str]:
    rows = [
        _comparison_cells(f"{one.other} over {one.base}", name, part)
        for one in found
        for name, part in (
            ("all", one.overall),
            ("solvable", one.solvable),
            ("abstention", one.abstention),
        )
        if part is not None
    ]
    if not rows:
        return []
    return [
        *aligned([_COMPARISON_COLUMNS, *rows]),
        *wrap(
            "gain: paired bootstrap over examples; p: exact McNemar, fixed against broken.", WIDTH
        ),
    ]


def _comparison_cells(name: str, part: str, found: Comparison) -> tuple[str, ...]:
    low, high = found.gain.interval.low, found.gain.interval.high
    return (
        visible(name),
        part,
        f"{found.gain.n:,}",
        _value(found.base),
        _value(found.other),
        f"{found.gain.mean:+.3f}",
        f"[{low:+.3f}, {high:+.3f}]",
        f"{found.p_mcnemar:.3f}",
        f"{found.counts.n_fixed:,}",
        f"{found.counts.n_broken:,}",
    )


def _source_table(found: Sequence[ArmResult]) -> list[str]:
    """Each source with each arm; nothing where there is but one source."""
    sources = list(dict.fromkeys(source for result in found for source in result.by_source))
    if len(sources) < 2:
        return []
    head = ("source", "arm", "n", "overall", "95% interval", "abstention right", "over", "under")
    rows = [
        _source_cells(source, result.arm.name, result.by_source[source])
        for source in sources
        for result in found
    ]
    return ["", *aligned([head, *rows])]


def _source_cells(source: str, arm: str, found: Scores) -> tuple[str, ...]:
    return (
        visible(source),
        visible(arm),
        f"{found.n:,}",
        _value(found.overall),
        _interval(found.overall),
        _value(found.abstention_ok),
        _value(found.over_abstention),
        _value(found.under_abstention),
    )


def _arm_page(found: ArmResult) -> Iterator[str]:
    """All scores of one arm."""
    yield from ("", visible(f"Arm {found.arm.name}"), "")
    yield scores_text(found.scores)
    yield ""
    if not found.over_abstaining:
        yield "No agent abstained from what it could do."
        return
    yield from aligned(
        [
            ("over-abstaining", "solvable", "abstained", "share", "95% interval"),
            *(
                (
                    row.agent,
                    f"{row.share.n:,}",
                    f"{row.n_abstained:,}",
                    _value(row.share),
                    _interval(row.share),
                )
                for row in found.over_abstaining
            ),
        ]
    )
