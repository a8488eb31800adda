r"""Curating: from interactions and the verdicts of several judges to instances to train on.

    interactions.jsonl  +  verdicts.jsonl of each judge  ->  instances.jsonl, and rows for a person

A label is accepted if at least `k` of the `n` judges give it. An instance is a request, what the
agent was told, and a target: the original reply, or an abstention in its wire form. Rows come out
by id, and neither the order of interactions nor that of judges changes a byte.

Near-duplicates are found with vectors of hashed words and character n-grams, weighted by rarity
(method 1.4). Making them takes time linear in the text. Pairs are found by what they share of their
rarest features, which is few pairs in ordinary text; each of these is then computed exactly.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias, get_args

from pydantic import Field

from splice.abstention import SOLVABLE, parse_reply, wire
from splice.ears.interactions import LABELS, Interaction, Label
from splice.ears.judging import Verdict, interaction_digest
from splice.ears.record_files import numbered_records
from splice.errors import DataError, SettingsError
from splice.files import write_whole
from splice.prompts import without_surrogates
from splice.records import Abstention, AbstentionCategory, NodeRun, Record, Trace, digest
from splice.text import contains, items, norm, token_f1, words
from splice.workflow import Workflow

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


# --- interactions ----------------------------------------------------------------------------


def read_interactions(path: str | Path) -> tuple[Interaction, ...]:
    """Read interactions, one JSON object a line, empty lines aside.

    Raises:
        DataError: the file can't be read, a line is no interaction, an id is there twice, or there
            are none; the message names file, line and field.
    """
    path = Path(path)
    found: list[Interaction] = []
    line_of: dict[str, int] = {}
    for number, interaction in numbered_records(path, Interaction):
        first = line_of.setdefault(interaction.id, number)
        if first != number:
            raise DataError(f"{path}:{number}: id: {interaction.id!r} is that of line {first} too")
        found.append(interaction)
    if not found:
        raise DataError(f"{path}: no interactions")
    return tuple(found)


def from_traces(workflow: Workflow, traces: Iterable[Trace]) -> tuple[Interaction, ...]:
    """Interactions of the agents in recorded runs, in order, each once.

    The request is the user's query, the context all that the agent read, its reply what the model
    wrote. Nodes that were not called, or gave no reply, are left out. What a trial took over from
    its base run is the same interaction.

    Raises:
        TraceMismatch: another workflow recorded a trace.
    """
    agents = {agent.id for agent in workflow.agents}
    found: dict[str, Interaction] = {}
    for trace in traces:
        workflow.check_trace(trace)
        for run in trace.node_runs:
            if run.node in agents and (made := _of_node_run(workflow, trace, run)) is not None:
                found.setdefault(made.id, made)
    return tuple(found.values())


def _of_node_run(workflow: Workflow, trace: Trace, run: NodeRun) -> Interaction | None:
    reply = run.raw if run.raw is not None else run.output
    if not run.input or reply is None:
        return None
    context = without_surrogates("\n\n".join(message.content for message in run.input))
    reply = without_surrogates(reply)
    content = digest(repr((trace.query.text, context, reply)))
    return Interaction(
        id=f"{trace.query.id}:{run.node}:{content[:12]}",
        source=workflow.name,
        agent=run.node,
        context=context,
        query=trace.query.text,
        reply=reply,
    )


# --- curating --------------------------------------------------------------------------------


class CurationSettings(Record):
    """When judges agree, and what becomes of what they don't agree on."""

    k: Annotated[int, Field(ge=1)] | None = None
    """Judges that must give a label for it to be accepted; None: all of them, as in the paper."""
    on_disagreement: Literal["keep", "drop", "human"] = "keep"
    """What becomes of an interaction without an accepted label. `keep`: it is taken as solvable,
    with its original reply, which is what the paper's counts suggest."""


CURATION_SETTINGS: Final = CurationSettings()


class Vote(Record):
    """What one judge said about an interaction, as far as an instance tells it."""

    judge: str
    guideline: str
    """Digest of the guideline that it judged by."""
    label: Label | None
    """None: its reply could not be read. It counts for no label."""
    rationale: str | None = None


Disposition: TypeAlias = Literal["accepted", "kept", "dropped", "human"]
"""`accepted`: with the label that the judges agree on. `kept`: without such a label, as solvable.
`dropped`: not trained on. `human`: not trained on until a person has looked at it."""

Reason: TypeAlias = Literal[
    "agreement", "no_agreement", "no_rationale", "no_reply", "reply_abstains", "conflict"
]
"""Why an interaction got its disposition.

`no_rationale`: the judges agree on an abstention and none of them says why; for a person.
`no_reply`: the original reply would be the target, and there is none; dropped.
`reply_abstains`: the original reply would be the target of a solvable request, and it is an
abstention, well-formed or not; for a person.
`conflict`: the original reply would be the target, and a near-duplicate request was accepted as an
abstention; for a person.
"""


class Curated(Record):
    """One interaction, what became of it, and why."""

    interaction: Interaction
    disposition: Disposition
    reason: Reason
    label: Label | None = None
    """What the target teaches; None: there is no target."""
    target: str | None = None
    """What the agent should reply: its original reply, or an abstention in its wire form. None: it
    is not trained on."""
    conflicts_with: str | None = None
    """Id of the accepted abstention that it is a near-duplicate of."""
    votes: tuple[Vote, ...]
    """By name of the judge."""


class Tally(Record):
    """What became of the interactions that most judges put into one category."""

    category: Label | None
    """The label with most votes; None: there is none, or several have as many."""
    accepted: int
    kept: int
    dropped: int
    human: int


class Curation(Record):
    """What was made of a set of interactions."""

    judges: tuple[str, ...]
    guidelines: tuple[str, ...]
    """Digest of the guideline of each judge."""
    k: int
    settings: CurationSettings
    rows: tuple[Curated, ...]
    """By id."""
    tallies: tuple[Tally, ...]
    """In the order of labels; categories without interactions are left out."""

    @property
    def instances(self) -> tuple[Curated, ...]:
        """What is trained on."""
        return tuple(row for row in self.rows if row.target is not None)

    @property
    def for_human(self) -> tuple[Curated, ...]:
        """What a person should look at."""
        return tuple(row for row in self.rows if row.disposition == "human")


def curate(
    interactions: Sequence[Interaction],
    verdicts: Iterable[Verdict],
    settings: CurationSettings = CURATION_SETTINGS,
) -> Curation:
    """Decide about interactions by the verdicts of any number of judges.

    Known labels of interactions have no say; `splice.ears.ensemble` scores judges against them.

    Args:
        interactions: what was judged.
        verdicts: of all judges; those about other interactions are passed over.
        settings: when judges agree, and what becomes of the rest.

    Raises:
        DataError: an id is there twice.
        SettingsError: a judge has no verdict on an interaction, or verdicts by several guidelines,
            or there are fewer judges than `k`.
    """
    rows = sorted(map(_clean, interactions), key=lambda row: row.id)
    for row, following in pairwise(rows):
        if row.id == following.id:
            raise DataError(f"interaction {row.id!r} is there twice")
    votes = _votes(rows, verdicts)
    judges = {vote.judge: vote.guideline for ballot in votes.values() for vote in ballot}
    k = len(judges) if settings.k is None else settings.k
    if k > len(judges):
        raise SettingsError(f"{k} judges can't agree where there are {len(judges)}")
    agents = frozenset(row.agent for row in rows)
    curated = [_decided(row, votes[row.id], k, settings, agents) for row in rows]
    curated = _without_conflicts(curated)
    return Curation(
        judges=tuple(judges),
        guidelines=tuple(judges.values()),
        k=k,
        settings=settings,
        rows=tuple(curated),
        tallies=_tallies(curated),
    )


def write_curated(path: str | Path, rows: Iterable[Curated]) -> None:
    """Write rows, one a line, whole or not at all; the same rows give the same bytes.

    Raises:
        StoreError: the file can't be written; what was there before is still there.
    """
    write_whole(Path(path), "".join(f"{row.model_dump_json()}\n" for row in rows))


def _clean(interaction: Interaction) -> Interaction:
    """An interaction that can be written: without lone surrogates."""
    texts = {
        name: without_surrogates(value)
        for name, value in interaction
        if isinstance(value, str) and not value.isascii()
    }
    return interaction.model_copy(update=texts) if texts else interaction


def _votes(
    rows: Sequence[Interaction], verdicts: Iterable[Verdict]
) -> Mapping[str, tuple[Vote, ...]]:
    """Votes on each interaction, by its id; one of each judge, by the judge's name."""
    shown = {row.id: interaction_digest(row) for row in rows}
    wanted = set(shown.values())
    ballots: dict[str, dict[str, Vote]] = {place: {} for place in wanted}
    guidelines: dict[str, str] = {}
    for verdict in verdicts:
        if verdict.interaction not in wanted:
            continue
        vote = Vote(
            judge=verdict.judge,
            guideline=verdict.guideline,
            label=verdict.label,
            rationale=verdict.rationale,
        )
        if guidelines.setdefault(vote.judge, vote.guideline) != vote.guideline:
            raise SettingsError(
                f"judge {vote.judge!r} judged by several guidelines: give the verdicts of one"
            )
        if ballots[verdict.interaction].setdefault(vote.judge, vote) != vote:
            raise SettingsError(f"judge {vote.judge!r} has two verdicts on one interaction")
    if not guidelines:
        raise SettingsError("there are no verdicts on these interactions")
    for row in rows:
        missing = guidelines.keys() - ballots[shown[row.id]].keys()
        if missing:
            raise SettingsError(f"judge {min(missing)!r} has no verdict on interaction {row.id!r}")
    names = sorted(guidelines)
    return {id: tuple(ballots[place][name] for name in names) for id, place in shown.items()}


def leading(votes: Sequence[Vote]) -> tuple[Label | None, int]:
    """The label with most votes and their number; None, and how many each has, on a tie."""
    counted = Counter(vote.label for vote in votes if vote.label is not None).most_common(2)
    if not counted:
        return None, 0
    (label, n), *others = counted
    return (None if others and others[0][1] == n else label), n


def agreed(votes: Sequence[Vote], k: int) -> Label | None:
    """The label that at least `k` judges give; None if there is none.

    With `k` of at most half of the judges several labels may have that many votes. Then the one
    with most votes is accepted, and none of several that have as many.
    """
    label, n = leading(votes)
    return label if n >= k else None


def _decided(
    row: Interaction,
    votes: tuple[Vote, ...],
    k: int,
    settings: CurationSettings,
    agents: frozenset[str],
) -> Curated:
    """What becomes of one interaction, looked at alone."""

    def made(disposition: Disposition, reason: Reason, **more: Any) -> Curated:
        return Curated(interaction=row, disposition=disposition, reason=reason, votes=votes, **more)

    label = agreed(votes, k)
    if label is not None and label != SOLVABLE:
        rationale = accepted_rationale(row, label, votes, agents)
        if rationale is None:
            return made("human", "no_rationale")
        target = wire(Abstention(category=label, rationale=rationale))
        return made("accepted", "agreement", label=label, target=target)
    if label is None and settings.on_disagreement != "keep":
        is_dropped = settings.on_disagreement == "drop"
        return made("dropped" if is_dropped else "human", "no_agreement")
    if row.reply is None:
        return made("dropped", "no_reply")
    if parse_reply(row.reply).kind != "output":
        return made("human", "reply_abstains")
    if label is None:
        return made("kept", "no_agreement", label=SOLVABLE, target=row.reply)
    return made("accepted", "agreement", label=SOLVABLE, target=row.reply)


def _tallies(rows: Sequence[Curated]) -> tuple[Tally, ...]:
    found = Counter((leading(row.votes)[0], row.disposition) for row in rows)
    return tuple(
        Tally(
            category=category,
            accepted=found[category, "accepted"],
            kept=found[category, "kept"],
            dropped=found[category, "dropped"],
            human=found[category, "human"],
        )
        for category in (*LABELS, None)
        if any(found[category, disposition] for disposition in get_args(Disposition))
    )


# --- rationales ------------------------------------------------------------------------------


def accepted_rationale(
    interaction: Interaction,
    category: AbstentionCategory,
    votes: Sequence[Vote],
    agents: Iterable[str] = (),
) -> str | None:
    """The shortest rationale of the judges that agree which names what the category requires.

    The shortest of all if none does; None if nobody gave one. Shortest by words, then by
    characters, then by alphabet.

    Args:
        interaction: what was judged.
        category: what the judges agree on.
        votes: of all judges.
        agents: names of agents that there are; see `names_item`.
    """
    agreeing = {vote.rationale for vote in votes if vote.label == category and vote.rationale}
    given = sorted(agreeing, key=lambda text: (len(text.split()), len(text), text))
    agents = tuple(agents)
    for rationale in given:
        if names_item(rationale, category, interaction, agents):
            return rationale
    return given[0] if given else None


def names_item(
    rationale: str,
    category: AbstentionCategory,
    interaction: Interaction,
    agents: Iterable[str] = (),
) -> bool:
    """Whether a rationale names what its category requires.

    * *Insufficient Input*, *Ambiguous Query*: an entity, a number or a content word of the query,
      or a content word of a parameter in the context (see `parameters`).
    * *Misrouting*: another agent that the context names, which is one of `agents` or stands there
      in a list of other agents.
    * *Missing Capability*: any content word.
    """
    if category == "Missing Capability":
        return bool(words(rationale))
    if category == "Misrouting":
        others = {*_listed_agents(interaction.context), *agents} - {interaction.agent}
        return any(
            contains(rationale, name) and contains(interaction.context, name) for name in others
        )
    known = words(interaction.query) | words(" ".join(parameters(interaction.context)))
    return bool(words(rationale) & known) or any(
        contains(rationale, item) for item in items(interaction.query)
    )


_SIGNATURE = re.compile(r"\w\(([^()]{1,2000})\)")
_PARAMETER = re.compile(r"(?<![\w.])[A-Za-z_]\w{0,63}(?=\s*(?:[:=,]|$))")
_FIELD = re.compile(r"[\"']([A-Za-z_]\w{0,63})[\"']\s*:")
_SNAKE = re.compile(r"(?<!\w)[A-Za-z][A-Za-z0-9]{0,63}(?:_[A-Za-z0-9]{1,63})+(?!\w)")
_SCHEMA_NAMES: Final = frozenset(
    {"type", "description", "parameters", "properties", "required", "default", "enum", "items"}
)
"""Quoted names of a JSON Schema that are no parameters."""


def parameters(context: str) -> frozenset[str]:
    """What a context names as a parameter, with spaces in place of `_`.

    That is what stands in the brackets of a function's signature, a quoted name before a colon, and
    any name with `_` inside. A context is free text, so this is a guess that takes in a little more
    than parameters.

    >>> sorted(parameters("book(hotel, check_in: date) needs a {'city': 'str'}"))
    ['check in', 'city', 'date', 'hotel']
    """
    names = {name for name in _FIELD.findall(context) if name not in _SCHEMA_NAMES}
    names.update(_SNAKE.findall(context))
    for inside in _SIGNATURE.findall(context):
        names.update(_PARAMETER.findall(inside))
    return frozenset(name.replace("_", " ").strip() for name in names)


_OTHERS = re.compile(r"other agents", re.IGNORECASE)
_ENTRY = re.compile(r"^[ \t]*[-*][ \t]+([^\s:][^:\n]{0,63}):", re.MULTILINE)


def _listed_agents(context: str) -> list[str]:
    """Names that a list of other agents gives, as `abstention_prompt` writes one."""
    heading = _OTHERS.search(context)
    return _ENTRY.findall(context, heading.end()) if heading else []


# --- near-duplicates -------------------------------------------------------------------------

_NEAR: Final = 0.95
"""Cosine of two queries from which they are near-duplicates (method 3.4)."""

_MOST_COMPARED: Final = 4_000
"""Characters of a query that are compared."""

_N_FEATURES: Final = 1 << 20
_SEED: Final = 20_260
"""Of the hash, so that the same text has the same features everywhere."""

_PAIRS_AT_A_TIME: Final = 1 << 12


def _without_conflicts(rows: Sequence[Curated]) -> list[Curated]:
    """Rows of which those that contradict an accepted abstention go to a person.

    A row does if it keeps its original reply, the same agent was told the same, and its query is a
    near-duplicate of that of an accepted abstention. Told the same: token F1 of the contexts at
    least 0.95. Without that, a request that reached two agents, or one agent with and without the
    function that it takes, would contradict itself, and these pairs are what abstaining is learned
    from. Rows that share a query but no context are compared one by one.
    """
    keeping: dict[str, list[Curated]] = defaultdict(list)
    abstaining: dict[str, list[Curated]] = defaultdict(list)
    for row in rows:
        if row.target is not None:
            side = keeping if row.label == SOLVABLE else abstaining
            side[norm(row.interaction.query[:_MOST_COMPARED])].append(row)
    near: dict[str, list[str]] = defaultdict(list)
    for kept, accepted in near_pairs(sorted(keeping), sorted(abstaining)):
        near[kept].append(accepted)
    changed: dict[str, Curated] = {}
    for text, others in near.items():
        against = [row.interaction for other in others for row in abstaining[other]]
        against.sort(key=lambda interaction: interaction.id)
        for row in keeping[text]:
            id = next((a.id for a in against if _is_told_the_same(row.interaction, a)), None)
            if id is not None:
                changed[row.interaction.id] = Curated(
                    interaction=row.interaction,
                    disposition="human",
                    reason="conflict",
                    conflicts_with=id,
                    votes=row.votes,
                )
    return [changed.get(row.interaction.id, row) for row in rows]


def _is_told_the_same(a: Interaction, b: Interaction) -> bool:
    return a.agent == b.agent and (
        a.context == b.context or token_f1(a.context, b.context) >= _NEAR
    )


def near_pairs(
    left: Sequence[str], right: Sequence[str], threshold: float = _NEAR
) -> Iterator[tuple[str, str]]:
    """Pairs of a text of each side whose cosine reaches the threshold.

    Features are ordered by rarity. If two rows of unit length share nothing among the rarest
    features that make up `1 - threshold**2` of the square of each one's length, their cosine is
    below the threshold; so only pairs that share some of these are computed, and no pair is missed.
    Time is linear in the text plus the number of such pairs.

    Args:
        left: distinct normalised texts.
        right: likewise.
        threshold: of the cosine, in (0, 1].

    Source: Chaudhuri, Ganti and Kaushik 2006 (prefix filter); weights by TF-IDF.
    """
    if not left or not right:
        return
    import numpy as np

    places = {text: place for place, text in enumerate(sorted({*left, *right}))}
    vectors, n_texts_with = _vectors(list(places))
    rare = _rarest(vectors, n_texts_with, threshold)
    at_left = np.array([places[text] for text in left])
    at_right = np.array([places[text] for text in right])
    shared = (rare[at_left] @ rare[at_right].T).tocoo()
    for start in range(0, shared.nnz, _PAIRS_AT_A_TIME):
        i = shared.row[start : start + _PAIRS_AT_A_TIME]
        j = shared.col[start : start + _PAIRS_AT_A_TIME]
        cosines = vectors[at_left[i]].multiply(vectors[at_right[j]]).sum(axis=1)
        # Twelve decimals: the rounding of a sum must not tell equal texts apart.
        is_near = np.round(np.asarray(cosines).ravel(), 12) >= threshold
        for a, b in zip(i[is_near].tolist(), j[is_near].tolist(), strict=True):
            yield left[a], right[b]


_WORD = re.compile(r"\w+")
_GRAM_SIZES: Final = (3, 4, 5)


def _features(text: str) -> Counter[int]:
    """Hashed words and character n-grams of a normalised text, with their counts."""
    padded = f" {text} "
    grams = Counter(f"w{word}" for word in _WORD.findall(text))
    for size in _GRAM_SIZES:
        grams.update(f"c{padded[i : i + size]}" for i in range(len(padded) - size + 1))
    hashed: Counter[int] = Counter()
    for gram, n in grams.items():
        hashed[zlib.crc32(gram.encode("utf-8", "surrogatepass"), _SEED) % _N_FEATURES] += n
    return hashed


def _vectors(texts: Sequence[str]) -> tuple[Any, NDArray[np.int64]]:
    """TF-IDF rows of unit length, and in how many texts each feature occurs.

    Returns:
        (n_texts, n_features) sparse matrix with sorted columns, and (n_features,) counts.
    """
    import numpy as np
    from scipy.sparse import csr_array

    columns: list[int] = []
    values: list[int] = []
    ends = [0]
    for text in texts:
        found = sorted(_features(text).items())
        columns += [column for column, _ in found]
        values += [n for _, n in found]
        ends.append(len(columns))
    at = np.array(columns, dtype=np.int64)
    n_texts_with = np.bincount(at, minlength=_N_FEATURES)
    weights = np.array(values, dtype=np.float64)
    weights *= np.log((1 + len(texts)) / (1 + n_texts_with[at])) + 1.0
    starts = np.array(ends[:-1])
    # A text may be empty, and its row with it: `reduceat` over no entries would give another's.
    lengths = np.ones(len(texts))
    is_filled = np.diff(ends) > 0
    if is_filled.any():
        lengths[is_filled] = np.sqrt(np.add.reduceat(weights**2, starts[is_filled]))
    weights /= np.repeat(lengths, np.diff(ends))
    return csr_array((weights, at, np.array(ends)), shape=(len(texts), _N_FEATURES)), n_texts_with


def _rarest(vectors: Any, n_texts_with: NDArray[np.int64], threshold: float) -> Any:
    """The vectors with only the rarest features that make up `1 - threshold**2` of each row."""
    import numpy as np
    from scipy.sparse import csr_array

    if not vectors.nnz:
        return vectors
    rows = np.repeat(np.arange(vectors.shape[0]), np.diff(vectors.indptr))
    order = np.lexsort((vectors.indices, n_texts_with[vectors.indices], rows))
    rows, columns, weights = rows[order], vectors.indices[order], vectors.data[order]
    before = np.cumsum(weights**2) - weights**2
    before -= before[vectors.indptr[:-1].clip(max=len(before) - 1)][rows]
    # A little more than needed, as these sums are rounded.
    is_needed = before < 1.0 - threshold**2 + 1e-6
    kept = (weights[is_needed], (rows[is_needed], columns[is_needed]))
    return csr_array(kept, shape=vectors.shape)


# --- the flywheel ----------------------------------------------------------------------------


def is_settled(pass_rates: Sequence[float]) -> bool:
    """Whether deploying, curating and training again has stopped paying.

    It has when the overall pass rate won less than 0.2 points in each of the last two cycles.

    Args:
        pass_rates: overall pass rate before the first cycle and after each, in points [0, 100].

    >>> is_settled([68.5, 78.9, 79.0, 79.1]), is_settled([68.5, 78.9, 79.0])
    (True, False)
    """
    gains = [after - before for before, after in pairwise(pass_rates)]
    return len(gains) >= 2 and all(gain < 0.2 for gain in gains[-2:])
