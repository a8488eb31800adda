"""Every value that crosses a stage, in the order of the line.

    query -> execute -> trace -> diagnose -> gap items -> message -> trial -> evidence -> select -> decide

All records are frozen and refuse unknown keys; they are also the file format. "Unknown" is `None`
or a literal of its own, never NaN, -1 or an empty string.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache, cached_property
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

SCHEMA_VERSION = 1
"""Version of the records as a file format. Raised when a reader of the old form would misread."""

NodeId: TypeAlias = str
"""Name of a node: a letter, then up to 63 letters, digits, `_`, `.` or `-`. The form is checked
once, where a workflow is made, not in each of the many records that name a node."""

Probability: TypeAlias = Annotated[float, Field(ge=0.0, le=1.0)]
"""A number in [0, 1]."""

Edge: TypeAlias = tuple[NodeId, NodeId]
"""(source, receiver): the receiver reads the source's output."""

Stage: TypeAlias = Literal[
    "run", "diagnose", "generate", "trial", "select", "audit", "route", "judge", "coordinate"
]
"""What a model call was made for."""

NodeStatus: TypeAlias = Literal["ok", "abstained", "failed", "withheld", "skipped"]
"""How a node's run ended. `failed` is never an empty output, `skipped` means it was not called."""

AbstentionCategory: TypeAlias = Literal[
    "Ambiguous Query", "Insufficient Input", "Missing Capability", "Misrouting"
]
"""Why a node can't act (EARS section 3.1)."""


FailureKind: TypeAlias = Literal[
    "model",
    "timeout",
    "run_timeout",
    "budget",
    "empty",
    "too_large",
    "tool_rounds",
    "abstention_syntax",
    "exception",
    "output_type",
    "missing_input",
]
"""Why a node failed or was skipped; `missing_input` and `run_timeout` can mean skipped."""


class Record(BaseModel):
    """A frozen value that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


R = TypeVar("R", bound=Record)

# The setters of a record's slots, as `object.__setattr__` would look each of them up again.
_set_values, _set_names, _set_extra, _set_private = (
    vars(BaseModel)[slot].__set__
    for slot in (
        "__dict__",
        "__pydantic_fields_set__",
        "__pydantic_extra__",
        "__pydantic_private__",
    )
)


@cache
def _template(kind: type[Record]) -> tuple[dict[str, Any], set[str]]:
    """Defaults of all fields in the order of declaration, and the fields' names."""
    defaults = {name: field.default for name, field in kind.model_fields.items()}
    return defaults, set(defaults)


def trusted(kind: type[R], values: dict[str, Any]) -> R:
    """A record of values that the engine made itself, without validating them.

    Validation is half of what a node with nothing to do costs. All fields count as set, and records
    of one kind share the set of their names; nothing changes it, as records are frozen.
    """
    defaults, names = _template(kind)
    record = object.__new__(kind)
    _set_values(record, defaults | values)
    _set_names(record, names)
    _set_extra(record, None)
    _set_private(record, None)
    return record


def digest(text: str) -> str:
    """128 bits of SHA-256 over the UTF-8 bytes of `text`, as 32 hex digits.

    Lone surrogates, which a model or a tool may produce, are hashed as they are.
    """
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


# --- the query -------------------------------------------------------------------------------


class Document(Record):
    """A piece of private material that only one node sees."""

    text: str
    title: str | None = None

    @property
    def shown(self) -> str:
        """Title and text, as the node reads them."""
        return f"[{self.title}]\n{self.text}" if self.title else self.text


def _documents(value: object) -> object:
    """Let plain strings stand for documents without a title."""
    if isinstance(value, str):
        value = (value,)
    if isinstance(value, (list, tuple)):
        return tuple(Document(text=item) if isinstance(item, str) else item for item in value)
    return value


Documents: TypeAlias = Annotated[tuple[Document, ...], BeforeValidator(_documents)]
"""Documents; plain strings are taken as documents without a title."""


class Query(Record):
    """The user's task text, with what each node privately knows about it.

    It holds no reference answer, so nothing that is computed from a query can see one.
    """

    text: str
    id: str = "query"
    context: Mapping[NodeId, Documents] = {}
    """Private material by node, beside what the node brings itself."""
    subtasks: Mapping[NodeId, str] = {}
    """Subtask by node for this query alone, in place of the node's own."""


# --- chat ------------------------------------------------------------------------------------


class ToolRequest(Record):
    """A tool call as the model wrote it."""

    id: str
    name: str
    arguments: str
    """Raw text; nothing says that it is JSON."""


class ChatMessage(Record):
    """One message of a chat request."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    tool_requests: tuple[ToolRequest, ...] = ()
    tool_request_id: str | None = None


class ToolSpec(Record):
    """What a model is told about a tool."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_-]{0,63}$")]
    description: str
    parameters: Mapping[str, Any]
    """JSON Schema of the arguments object."""


class ModelSettings(Record):
    """The model of a node and its sampling parameters."""

    name: str | None = None
    """Model name as its endpoint knows it; None: the one that the run was given."""
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] = 0.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] = 512
    """Most tokens of one reply. Always finite, so that a budget can reserve a call beforehand."""
    seed: int | None = 0
    """Sampling seed of rollout 0; rollout k uses `seed + k`. None: none is sent."""
    stop: tuple[str, ...] = ()
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """Alternatives per token to report with log-probabilities; None: no log-probabilities."""


class Request(Record):
    """One chat request, with the place in the workflow that it serves."""

    messages: tuple[ChatMessage, ...]
    settings: ModelSettings = ModelSettings()
    tools: tuple[ToolSpec, ...] = ()
    response_schema: Mapping[str, Any] | None = None
    """JSON Schema that the reply must follow, where the endpoint can enforce one."""
    stage: Stage = "run"
    node: NodeId | None = None
    query_id: str | None = None
    rollout: Annotated[int, Field(ge=0)] = 0


class Usage(Record):
    """Tokens of one call as the server counted them; None: it did not say."""

    prompt_tokens: int | None = None
    """All prompt tokens, the cached ones included."""
    completion_tokens: int | None = None
    """All generated tokens, the reasoning ones included."""
    cached_tokens: int | None = None
    """Part of `prompt_tokens` that the server read from its cache."""
    reasoning_tokens: int | None = None
    """Part of `completion_tokens` that the reply does not show."""


class TokenLogprob(Record):
    """One generated token with its log-probability and the alternatives to it."""

    token: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


class ModelIdentity(Record):
    """What answered, closely enough to tell whether two answers may be compared."""

    name: str
    provider: str
    """`endpoint`, `local`, `scripted`, or a name of the user's."""
    digest: str | None = None
    """SHA-256 of the weights, where they are known; with an adapter, of both, joined by +."""
    version: str | None = None
    """Version of the software that ran them, where it is known."""


class Completion(Record):
    """A model's answer to one request."""

    text: str
    tool_requests: tuple[ToolRequest, ...] = ()
    finish_reason: Literal["stop", "length", "tool_calls", "content_filter", "other"] = "stop"
    usage: Usage = Usage()
    model: str
    logprobs: tuple[TokenLogprob, ...] | None = None
    is_cached: bool = False
    """Answered from a response cache: nothing was sent and nothing is charged."""


# --- the ledger ------------------------------------------------------------------------------


class Price(Record):
    """Price of a model, in money per million tokens."""

    prompt: Annotated[float, Field(ge=0.0)]
    completion: Annotated[float, Field(ge=0.0)]
    cached: Annotated[float, Field(ge=0.0)] | None = None
    """For prompt tokens read from the server's cache; None: the full price."""


class CallRecord(Record):
    """One attempt at one model call."""

    stage: Stage
    node: NodeId | None = None
    query_id: str | None = None
    model: str
    outcome: Literal["ok", "cached", "retried", "failed", "aborted"]
    """`retried`: this attempt failed and another followed. `aborted`: cancelled by us in flight."""
    usage: Usage = Usage()
    cost: float | None = None
    """In the unit of the price table; None: unknown. A cached call costs 0."""
    status: int | None = None
    """HTTP status; None: no answer came."""
    reason: str | None = None
    elapsed_s: float | None = None


# --- node runs and traces --------------------------------------------------------------------


class Abstention(Record):
    """A node's typed statement that it can't act, and why."""

    category: AbstentionCategory
    rationale: Annotated[str, Field(min_length=1)]
    """At most 40 words: the source of ambiguity, the missing information, the unsupported
    functionality, or the appropriate agent."""


class ToolCall(Record):
    """One tool call that a node made, with what came back."""

    name: str
    arguments: str
    """Canonical JSON if the arguments parsed, else the raw text."""
    result: str
    outcome: Literal["ok", "error", "unknown_tool", "bad_arguments"] = "ok"
    effects: Literal["none", "read", "write"] = "none"
    is_reused: bool = False
    """Answered from the base trace; the tool was not called."""


class NodeFailure(Record):
    """Why a node failed or was skipped."""

    kind: FailureKind
    message: str


class NodeRun(Record):
    """Record of one node's execution."""

    node: NodeId
    status: NodeStatus
    output: str | None = None
    """What the node emitted; an abstaining node emits its typed message. None if it failed."""
    abstention: Abstention | None = None
    failure: NodeFailure | None = None
    input: tuple[ChatMessage, ...] = ()
    """Rendered input, full text: the first request of an agent; for a function one message."""
    expected: tuple[NodeId, ...] = ()
    """Parents by declaration."""
    received: tuple[NodeId, ...] = ()
    """Parents whose output was delivered."""
    tool_calls: tuple[ToolCall, ...] = ()
    raw: str | None = None
    """The model's last reply where it differs from `output`, or where there is no output."""
    usage: Usage | None = None
    """Sum over the node's calls; None for a function. Cached calls are left out."""
    model: ModelIdentity | None = None
    rollout: int = 0
    is_truncated: bool = False
    """The model's reply was cut off at `max_tokens`."""
    key: str | None = None
    """Memo key, where one was needed: digest of definition, model, input and rollout."""
    started_s: float = 0.0
    """Seconds after the start of the run."""
    elapsed_s: float = 0.0


class Trace(Record):
    """All node runs of one run, and the answer."""

    query: Query
    workflow: str
    """Name of the workflow."""
    fingerprint: str
    """Fingerprint of the workflow's definition."""
    node_fingerprints: Mapping[NodeId, str] = {}
    """Fingerprint by node, so that a change of the workflow can be named."""
    node_runs: tuple[NodeRun, ...]
    """In canonical order, one for each node."""
    answer: str | None
    """None if the output node gave nothing to extract an answer from."""
    stop_reason: str | None = None
    """Why the run ended early; None if every node was reached."""
    calls: tuple[CallRecord, ...] = ()
    """Every attempt at a model call, in canonical order of nodes."""
    rollout: int = 0
    elapsed_s: float = 0.0
    schema_version: int = SCHEMA_VERSION
    engine_version: str

    @cached_property
    def by_node(self) -> Mapping[NodeId, NodeRun]:
        """Node runs by node."""
        return {run.node: run for run in self.node_runs}

    @property
    def is_complete(self) -> bool:
        """Whether no node failed, was withheld or skipped."""
        return all(run.status in ("ok", "abstained") for run in self.node_runs)

    @property
    def is_over_budget(self) -> bool:
        """Whether a node could not be asked because a budget was used up."""
        failures = [run.failure for run in self.node_runs]
        return any(failure is not None and failure.kind == "budget" for failure in failures)

    def content(self) -> str:
        """Digest of everything but the times: equal for runs that did the same."""
        timeless = self.model_dump_json(
            exclude={
                "elapsed_s": True,
                "node_runs": {"__all__": {"started_s", "elapsed_s"}},
                "calls": {"__all__": {"elapsed_s"}},
            }
        )
        return digest(timeless)


# --- diagnosis -------------------------------------------------------------------------------


class CandidateEdge(Record):
    """A missing forward edge that could carry what the receiver lacks."""

    source: NodeId
    """Node whose material holds the information; before `receiver` in canonical order."""
    receiver: NodeId
    """Node that answered without it; never an ancestor of `source`."""
    kind: Literal["parallel_branch", "distant_ancestor"]
    """`distant_ancestor` if a path leads from source to receiver already."""

    @property
    def ends(self) -> Edge:
        """Source and receiver, as in the edges of a workflow."""
        return self.source, self.receiver


class EdgeScore(Record):
    """How promising a candidate edge is for one query, and why."""

    edge: CandidateEdge
    p_decisive: Probability
    """Predicted probability that a trial of the edge changes the final answer."""
    features: Mapping[str, float]
    """What the score was computed from; names and ranges in `splice.features`."""
    reason: str
    """One line for people."""
    p_beneficial: Probability | None = None
    """Predicted probability that the trial makes the answer better; None: not predicted."""


class Diagnosis(Record):
    """What the base trace says about room for improvement and missing edges."""

    base_score: Probability
    """Predicted score of the base answer, `s_hat`."""
    base_reasons: tuple[str, ...]
    """What raised or lowered the predicted base score."""
    edges: tuple[EdgeScore, ...]
    """Candidate edges that may be tried, the most promising first."""
    admission: Literal["headroom", "abstention", "never"]
    """`abstention`: a node said that it lacks input, so a trial is admitted first; `never`: a trial
    can't help, as with an ambiguous query."""
    clarifying_questions: tuple[str, ...] = ()
    missing_inputs: tuple[str, ...] = ()
    """What nodes named as missing."""
    unsupported: tuple[str, ...] = ()
    """What no node of the workflow can do."""
    outside: tuple[str, ...] = ()
    """Features that lie outside of what the learned parts were fitted on, if any were used."""

    @property
    def headroom(self) -> float:
        """`1 - base_score`, in [0, 1]."""
        return 1.0 - self.base_score

    @property
    def promise(self) -> float:
        """Predicted probability that a trial of the first edge makes the answer better, in [0, 1].

        Where no part predicts it: that the trial changes the answer, times headroom; 0 without edge.
        """
        if not self.edges:
            return 0.0
        first = self.edges[0]
        if first.p_beneficial is not None:
            return first.p_beneficial
        return self.headroom * first.p_decisive


class GapItem(Record):
    """An entity, a number or a named fact that a receiver lacks."""

    text: str
    named_in: Literal["subtask", "query", "abstention", "source"]
    is_held: bool
    """Whether the source's material contains it."""


class Gap(Record):
    """What the receiver of a candidate edge needs and can't read."""

    edge: CandidateEdge
    items: tuple[GapItem, ...]


# --- message ---------------------------------------------------------------------------------


class Span(Record):
    """A verbatim piece of the source's own material."""

    origin: Annotated[str, StringConstraints(pattern=r"^(output|tool:\d+|document:\d+)$")]
    """`output`, `tool:i` (i-th tool call of the node run) or `document:i` (i-th document)."""
    start: Annotated[int, Field(ge=0)]
    """First character."""
    end: Annotated[int, Field(ge=1)]
    """One past the last character."""
    text: str


class MessageLine(Record):
    """One line of a message with the spans that support it."""

    text: str
    spans: tuple[Span, ...]
    item: str | None = None
    """The gap item that the line answers; None for a line that is there for what it adds."""


class SpliceMessage(Record):
    """The targeted text that a spliced edge delivers."""

    source: NodeId
    receiver: NodeId
    key: MessageLine
    """The key statement: one fact, as one line."""
    lines: tuple[MessageLine, ...] = ()
    focus: str | None = None
    """What the receiver should look for: the item that the message resolves."""
    also: tuple[str, ...] = ()
    """Further such items, where the source has found several at once."""
    not_found: tuple[str, ...] = ()
    """Gap items that the source does not have."""
    n_dropped: int = 0
    """Lines that were left out because a quotation in them was not found verbatim."""
    writer: Literal["extractive", "model", "placebo"]
    """`placebo`: a control of the same size that says nothing about the query."""

    @property
    def text(self) -> str:
        """Everything that is delivered, as plain lines."""
        return "\n".join(line.text for line in (self.key, *self.lines))


# --- trial, evidence, decision ---------------------------------------------------------------


class Receipt(Record):
    """What a trial did with one node, and why."""

    node: NodeId
    action: Literal["reused", "rerun"]
    reason: Literal["message", "input_changed", "resampled", "input_unchanged", "not_reached"]
    changed: tuple[NodeId, ...] = ()
    """Parents whose delivered output differs from the base run's."""


class Trial(Record):
    """The receiver, and what its change reaches, run again with one message."""

    message: SpliceMessage
    trace: Trace
    receipt: tuple[Receipt, ...]
    """In canonical order, one for each node."""
    stop_reason: str | None = None
    """Why the trial could not be finished; then the original answer is kept."""

    @property
    def rerun(self) -> tuple[NodeId, ...]:
        """Nodes that ran again."""
        return tuple(line.node for line in self.receipt if line.action == "rerun")


class Evidence(Record):
    """Process evidence: what a trial changed inside the workflow (method 2.7).

    Computed from the two traces and the message alone, never from a reference answer. Ratios are 0
    when their denominator is 0.
    """

    move_w: Probability
    """Movement of the receiver: 1 - Jaccard index of its words before and after."""
    move_len: float
    """Relative change of the receiver's length in words; at least -1."""
    n_add: int
    n_del: int
    """Content words that the receiver added and dropped."""
    msg_only: Probability
    ctx_only: Probability
    both: Probability
    untraceable: Probability
    """Where the added words come from: message only, own context only, both, neither. They sum to
    1 unless nothing was added."""
    uptake: Probability
    """Share of the message's words that the receiver added."""
    is_ignored: bool
    """The receiver added no word and no number of the message."""
    del_supported: Probability
    """Share of dropped words that the receiver's own context supports."""
    focus_new: Probability
    focus_old: Probability
    """Share of the added, and of the dropped, words and numbers that stand in those of the
    receiver's documents which name what the message is about."""
    num_msg: Probability
    num_ctx: Probability
    num_untraceable: Probability
    """Where added numbers come from: the message, else the own context, else neither."""
    num_dropped: Probability
    """Share of the receiver's numbers that it dropped."""
    survival: tuple[Probability, ...]
    """Share of the added words that reach the descendants at depth 1, 2, ... of the receiver."""
    surv_final: Probability
    """Share of the added words that reach the answer."""
    is_absorbed: bool
    """The receiver moved and the answer is the same after normalisation."""
    ans_change: Probability
    """1 - token F1 of the two answers."""
    ans_len_ratio: float
    """Words of the new answer over words of the old; 0 if either is missing."""
    is_number_changed: bool
    """The numbers in the answer differ."""
    copies_source: Annotated[float, Field(ge=-1.0, le=1.0)]
    """How much nearer the new answer is to the source's answer than the old one was."""
    is_abstention_resolved: bool
    """The receiver abstained before the trial and answers now."""
    is_abstention_new: bool
    """A node abstains that did not before."""
    is_answer_refusal_resolved: bool
    """The old answer declined ("unknown", "not found", nothing), the new one does not."""
    is_answer_refusal_new: bool
    """The new answer declines and the old one did not."""


class Likelihoods(Record):
    """A selector's three outcome probabilities; they sum to 1."""

    beneficial: Probability
    neutral: Probability
    harmful: Probability
    outside: tuple[str, ...] = ()
    """Features that lie outside of what the selector was fitted on, if it was."""
    calls: tuple[CallRecord, ...] = ()
    """Every attempt at a model call that the selector made."""


class Decision(Record):
    """Adopt the candidate answer or retain the original, and why."""

    action: Literal["adopt", "retain"]
    reason: str
    """One line for people."""
    base_score: Probability
    likelihoods: Likelihoods | None = None
    """None if there was no candidate answer to judge."""
    weighting: Literal["headroom", "none"]
    margin: float = 0.0
    gain_side: float | None = None
    """Left side of the rule: `p_beneficial` times headroom, or `p_beneficial`."""
    loss_side: float | None = None
    """Right side of the rule: `p_harmful` times base score, or `p_harmful`."""


class RepairResult(Record):
    """One repaired query: the answer, and everything that led to it."""

    query: Query
    answer: str | None
    base: Trace
    diagnosis: Diagnosis
    edge: EdgeScore | None = None
    gap: Gap | None = None
    message: SpliceMessage | None = None
    trial: Trial | None = None
    evidence: Evidence | None = None
    decision: Decision
    stop_reason: str
    """How far the repair went: `no_trial_admitted`, `no_edge`, `no_message`, `trial_stopped`,
    `not_decisive`, `decided`, or `budget`."""
    calls: tuple[CallRecord, ...]
    """Every attempt at a model call, the base run's first."""

    @property
    def edges(self) -> tuple[Edge, ...]:
        """Edges of the workflow, as the base trace shows them (`edge` is the one that was tried)."""
        return tuple((p, run.node) for run in self.base.node_runs for p in run.expected)

    @property
    def clarifying_questions(self) -> tuple[str, ...]:
        """Questions to the user that nodes found the query too ambiguous without."""
        return self.diagnosis.clarifying_questions

    @property
    def missing_inputs(self) -> tuple[str, ...]:
        """What nodes named as missing, as `node: what`."""
        return self.diagnosis.missing_inputs

    def to_json(self) -> str:
        """The whole result as JSON."""
        return self.model_dump_json()

    def __str__(self) -> str:
        """The result as a page of text."""
        from splice.report.text import result_text

        return result_text(self)

    def _repr_html_(self) -> str:
        """The result as a piece of HTML, for notebooks."""
        from splice.report.html import result_html

        return result_html(self)


class RepairBatch(Record):
    """Many repaired queries under one budget."""

    results: tuple[RepairResult, ...]
    """In the order of the queries."""
    budget_fraction: Probability
    n_trials: int
    """Trials that were made; at most `floor(budget_fraction * n)`."""
    stop_reason: str
    """`done`, or which budget ended the batch."""
    elapsed_s: float = 0.0


# --- coordination ----------------------------------------------------------------------------


class ClarifyingQuestion(Record):
    """One question to the user that may resolve an abstention."""

    node: NodeId
    """The node that can't act."""
    category: AbstentionCategory
    text: str
    """One line, without control characters."""
    options: tuple[str, ...] = ()
    """Answers to offer; any other answer is as good. Empty: none is known."""
    item: str | None = None
    """What is missing, where that is what is asked for and the node named it."""


class Action(Record):
    """What the coordinator did about one abstention."""

    kind: Literal["clarify", "fill", "alternative", "reroute", "handover", "fallback"]
    """Ask the user; deliver what was held elsewhere; offer what is supported instead; send the
    request to another node; leave it to an agent outside; leave it as it is."""
    node: NodeId
    """The node that abstained."""
    abstention: Abstention
    question: ClarifyingQuestion | None = None
    """What the user was asked, or had been asked for another node."""
    answer: str | None = None
    """The user's answer; None: there was none, or nobody was asked."""
    item: str | None = None
    """What a fill was looking for."""
    source: NodeId | None = None
    """The node that held it; None: the question itself did."""
    target: NodeId | None = None
    """Who got the request (reroute), who is to get it (handover), who reads the abstention and
    answers (fallback; None: nobody does)."""
    delivered: str | None = None
    """What was delivered: to the abstaining node, or, by a reroute, to those that read it. None: a
    reroute whose target could not act, or nothing."""
    rerun: tuple[NodeId, ...] = ()
    """Nodes that ran because of it, in canonical order, the target of a reroute first."""
    reason: str | None = None
    """Why it was no more than this; one line for people."""

    @property
    def is_final(self) -> bool:
        """Whether nothing more is done about this abstention in these words."""
        if self.kind == "reroute":
            return self.delivered is not None
        return self.kind in ("handover", "fallback")


CoordinationStop: TypeAlias = Literal["done", "needs_answer", "max_actions", "budget", "failed"]
"""Why a coordinated run ended: every abstention is dealt with; the user has to be asked; as many
actions as there may be; the budget; a node failed that had not before."""


class CoordinationResult(Record):
    """One coordinated run: the answer, what was done about each abstention, what is still open."""

    query: Query
    """As it was asked; that of `trace` also has what was delivered since."""
    answer: str | None
    """That of `trace`; where the output node's request went to another node, what that one said."""
    trace: Trace
    """The last run in which no node failed that had not failed before."""
    actions: tuple[Action, ...] = ()
    """In the order in which they were taken."""
    question: ClarifyingQuestion | None = None
    """What has to be answered before the run can go on; see `resume`."""
    stop_reason: CoordinationStop
    problem: str | None = None
    """What went wrong; one line for people."""
    unfinished: Trace | None = None
    """The run that a failure ended; `resume` goes on from it."""
    earlier: tuple[NodeRun, ...] = ()
    """Node runs that are no part of `trace`: those that later ones replaced, and those of requests
    that another node got. Nothing that was asked before is asked again."""
    calls: tuple[CallRecord, ...]
    """Every attempt at a model call, the base run's first."""

    @property
    def unresolved(self) -> Mapping[NodeId, Abstention]:
        """Abstentions of `trace` whose request no other node took over, by node."""
        taken = [(a.node, a.abstention) for a in self.actions if a.kind == "reroute" and a.is_final]
        return {
            run.node: run.abstention
            for run in self.trace.node_runs
            if run.abstention is not None and (run.node, run.abstention) not in taken
        }

    def to_json(self) -> str:
        """The whole result as JSON; `CoordinationResult.model_validate_json` reads it."""
        return self.model_dump_json()

    def __str__(self) -> str:
        """The result as a few lines of text."""
        from splice.report.display import in_quotes, labelled

        lines = labelled("Query", [in_quotes(self.query.text)])
        for action in self.actions:
            lines += labelled(action.kind.capitalize(), _told(action))
        if self.question is not None:
            options = [f"- {option}" for option in self.question.options]
            lines += labelled("Open", [f"{self.question.node}: {self.question.text}", *options])
        lines += labelled("Answer", [in_quotes(self.answer)])
        lines += labelled("Unresolved", list(self.unresolved))
        problem = f": {self.problem}" if self.problem else ""
        return "\n".join([*lines, *labelled("Ended", [f"{self.stop_reason}{problem}"])])


def _told(action: Action) -> list[str]:
    """An action as lines for people."""
    from splice.report.display import in_quotes, joined

    lines = [
        f"{action.node}: {action.abstention.category}, {in_quotes(action.abstention.rationale)}"
    ]
    if action.question is not None:
        options = f" ({joined(action.question.options)})" if action.question.options else ""
        lines.append(f"asked: {action.question.text}{options}")
        lines.append(f"answered: {in_quotes(action.answer)}")
    elif action.kind in ("fill", "reroute") and action.delivered is not None:
        held = action.target or action.source or "the question"
        lines.append(f"{held}: {in_quotes(action.delivered)}")
    elif action.target is not None:
        lines.append(f"{'sent' if action.kind == 'reroute' else 'left'} to {action.target}")
    if action.reason is not None:
        lines.append(action.reason)
    if action.rerun:
        lines.append(f"ran: {joined(action.rerun)}")
    return lines
