"""API-Bank as a workload: the facts of a dialogue dealt over agents, its calls replayed."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from skeletons.api_bank.dialogues import (
    Api,
    Called,
    Dialogue,
    Recordings,
    Said,
    call_key,
    read_dialogues,
    read_table,
    shown_result,
)
from skeletons.reading import STEMS, sha256
from splice.errors import DataError, SettingsError
from splice.executor import NodeInput
from splice.prompts import one_line
from splice.queries import Split
from splice.records import Document, Edge, Query
from splice.text import contains, sentences
from splice.workflow import Agent, Function, Tool, Workflow, load_workflow
from splice.workload import Example, Options, Workload, choose

METRICS = ("calls", "f1")

N_DISTRACTORS = 3
"""APIs offered beside those that a dialogue uses: the tools of one request stay below some 500
tokens."""

TABLE = "apis.json"

ACCOUNT = ("username", "password")
"""Arguments that some users of the original never state, as if it knew who they were."""

IDENTITY = (*ACCOUNT, "old_password", "email", "account", "patient_name", "user_id")
"""Arguments by which a user's turn is taken to be about the user."""

GAP: Edge = ("profile", "caller")

_RECEIPT = re.compile(r"(?<![0-9a-z])[0-9a-f]{8}(?![0-9a-z])")
_NO_CALLS = "NO CALLS"


class Notes(NamedTuple):
    """What the two note holders know of a dialogue."""

    profile: tuple[str, ...]
    request: tuple[str, ...]


class CallReport:
    """The output node: writes out the calls of which the caller gives a receipt."""

    def __init__(self, recordings: Recordings) -> None:
        """Know receipts by the recordings."""
        self._recordings = recordings

    async def __call__(self, given: NodeInput) -> str:
        """Each call once, in the order of the receipts, with its result."""
        found = dict.fromkeys(_RECEIPT.findall(given.parents.get("caller", "").lower()))
        calls = [call for text in found if (call := self._recordings.by_receipt(text))]
        lines = [f"{call_line(call)}\nRESULT {shown_result(call)}" for call in calls]
        return "\n".join(lines) or _NO_CALLS


def call_line(call: Called) -> str:
    """A call as the answer states it."""
    return f"CALL {call.api_name} {call.key}"


def stated_calls(answer: str | None) -> frozenset[tuple[str, str]]:
    r"""The calls that an answer states, by API and compared arguments.

    >>> stated_calls('CALL Wiki {"keyword": "tea"}\nRESULT "CALL"\nCALL Wiki tea')
    frozenset({('Wiki', '{"keyword": "tea"}')})
    """
    found = set()
    for line in (answer or "").split("\n"):
        word, _, rest = line.partition(" ")
        api, _, text = rest.partition(" ")
        if word != "CALL":
            continue
        try:
            arguments = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(arguments, dict):
            found.add((api, call_key(arguments)))
    return frozenset(found)


def score(example: Example, answer: str | None) -> dict[str, float]:
    """`calls`: 1 if the answer states the gold calls and no other, else 0; `f1`: of both sets."""
    gold = {(call["name"], call_key(call["arguments"])) for call in example.reference["calls"]}
    stated = stated_calls(answer)
    n_right = len(gold & stated)
    return {"calls": float(gold == stated), "f1": 2 * n_right / (len(gold) + len(stated))}


def load(data: Path | None, *, split: Split, options: Options) -> Workload:
    """API-Bank's dialogues.

    Args:
        data: folder with `apis.json` and the split files, of which those that are there are all
            read for recordings; or one JSONL file of dialogues, with `apis.json` beside it.
        split: which file the requests come from; of no account for a single file.
        options: there are none.

    Raises:
        DataError: a file is missing or malformed, or a call has two recorded results.
        SettingsError: an option is given, or no data.
    """
    choose(options, {})
    if data is None:
        raise SettingsError("api_bank needs data: a folder with apis.json and the split files")
    asked, paths = _paths(data, split)
    rows = {path: read_dialogues(path) for path in paths}
    table_path = asked.parent / TABLE
    table = read_table(table_path)
    recordings = Recordings(
        (f"{place} turns.{number}", turn)
        for found in rows.values()
        for place, dialogue in found
        for number, turn in enumerate(dialogue.turns)
        if isinstance(turn, Called)
    )
    tools = {api: recordings.tool(api, table) for api in recordings.apis}
    host = load_workflow(
        Path(__file__).with_name("workflow.toml"),
        functions={"report": CallReport(recordings)},
    )
    host = _with(host, recordings, ())
    dialogues = [dialogue for _, dialogue in rows[asked]]
    examples = [made for d in dialogues if (made := _example(d, host, recordings, tools, table))]
    if not examples:
        raise DataError(f"{asked}: no dialogue has a user's turn before a recorded call")
    return Workload(
        name="api_bank",
        about=(
            f"API-Bank: {len(examples)} of {len(dialogues)} dialogues (the rest have no call). The "
            "user's first words are everybody's; the later ones are dealt over two note holders, "
            "of whom the caller hears one. Subtasks are the same for all. Calls are answered from "
            f"{len(recordings)} recordings and scored by exact match of API and arguments."
        ),
        workflow=host,
        examples=tuple(examples),
        metrics=METRICS,
        score=score,
        sources={path.name: sha256(path) for path in (*paths, table_path)},
    )


def _paths(data: Path, split: Split) -> tuple[Path, tuple[Path, ...]]:
    """The file that is asked for, and all files that hold recordings."""
    if not data.is_dir():
        return data, (data,)
    files = {name: data / f"{stem}.jsonl" for name, stem in STEMS.items()}
    asked, others = files[split], files.values()
    return asked, tuple(path for path in others if path == asked or path.is_file())


def _with(host: Workflow, recordings: Recordings, tools: Sequence[Tool]) -> Workflow:
    """The host with `tools` in the caller's hands."""
    nodes: list[Agent | Function] = []
    for node in host.nodes:
        if isinstance(node, Function):
            nodes.append(node.model_copy(update={"version": recordings.version}))
        elif node.id == "caller":
            names = tuple(tool.spec.name for tool in tools)
            nodes.append(node.model_copy(update={"tools": names}))
        else:
            nodes.append(node)
    return host.changed(nodes=tuple(nodes), tools=tuple(tools))


def _example(
    dialogue: Dialogue,
    host: Workflow,
    recordings: Recordings,
    tools: Mapping[str, Tool],
    table: Mapping[str, Api],
) -> Example | None:
    """A dialogue as a question; None if it has no request that a call follows."""
    gold = dialogue.gold_calls
    if not gold or not isinstance(dialogue.turns[0], Said) or dialogue.turns[0].role != "User":
        return None
    opening = dialogue.turns[0].text
    if not opening.strip():
        return None
    notes = deal(dialogue)
    rng = random.Random(f"api_bank/{dialogue.id}")
    offered = _offered(gold, tools, rng)
    listed = [f"{api}: {one_line(tools[api].spec.description, limit=120)}" for api in offered]
    context = {
        "profile": tuple(Document(text=note) for note in notes.profile),
        "request": tuple(Document(text=note) for note in notes.request),
        "finder": (Document(title="APIs", text="\n".join(listed)),),
    }
    return Example(
        query=Query(id=dialogue.id, text=opening, context=context),
        reference={"calls": [_gold(call) for call in gold]},
        kind=f"level {dialogue.level}",
        gap_edges=gap_edges(opening, notes, gold),
        workflow=_with(host, recordings, [tools[api] for api in offered]),
    )


def _gold(call: Called) -> dict[str, Any]:
    return {
        "name": call.api_name,
        "arguments": dict(call.param_dict),
        "result": call.result.output,
    }


def _offered(
    gold: Sequence[Called], tools: Mapping[str, Tool], rng: random.Random
) -> tuple[str, ...]:
    """The APIs of the gold calls and some others with recordings, shuffled."""
    needed = list(dict.fromkeys(call.api_name for call in gold))
    others = sorted(tools.keys() - set(needed))
    offered = needed + rng.sample(others, min(N_DISTRACTORS, len(others)))
    rng.shuffle(offered)
    return tuple(offered)


def deal(dialogue: Dialogue) -> Notes:
    """Deal the user's later turns, up to the last gold call, over the two note holders.

    A turn that states an argument of `IDENTITY` goes to the profile, the others to the request. If
    no turn does, every second turn goes to the profile. What an API needs to know of the account
    and no turn says, not even the first, is on file in the profile.
    """
    gold = dialogue.gold_calls
    turns = _user_turns(dialogue, gold[-1])
    identity = [str(c.param_dict[name]) for c in gold for name in IDENTITY if name in c.param_dict]
    is_profile = [any(contains(note, value) for value in identity) for note in turns[1:]]
    if not any(is_profile):
        is_profile = [place % 2 == 1 for place in range(len(turns) - 1)]
    dealt = list(zip(turns[1:], is_profile, strict=True))
    profile = [note for note, is_own in dealt if is_own]
    for call in gold:
        for name in ACCOUNT:
            value = str(call.param_dict.get(name, ""))
            line = f"On file: {name} {value}"
            if value and line not in profile and not any(contains(n, value) for n in turns):
                profile.append(line)
    return Notes(tuple(profile), tuple(note for note, is_own in dealt if not is_own))


def _user_turns(dialogue: Dialogue, last: Called) -> list[str]:
    """What the user said before the last gold call, each with the question that it answers."""
    turns: list[str] = []
    asked = ""
    for turn in dialogue.turns:
        if isinstance(turn, Called):
            if turn is last:
                break
        elif turn.role == "AI":
            asked = _question(turn.text)
        else:
            turns.append(f"Asked: {asked}\nUser: {turn.text}" if asked else f"User: {turn.text}")
            asked = ""
    return turns


def _question(text: str) -> str:
    """The closing question of what the assistant said; what stands before it may retell results."""
    spans = sentences(text)
    last = text[slice(*spans[-1])].strip() if spans else ""
    return last if last.endswith("?") else ""


def gap_edges(opening: str, notes: Notes, gold: Sequence[Called]) -> tuple[Edge, ...] | None:
    """`profile -> caller` if a gold argument stands in the profile and nowhere else.

    Elsewhere: in the user's first words, in the notes of the request, or in the result of an
    earlier call, from which the caller could recover it. None if nothing tells: an argument stands
    nowhere in the same words (a date in another form), and the profile holds notes.
    """
    public = [opening, *notes.request]
    hidden: list[str] = []
    for call in gold:
        values = map(str, call.param_dict.values())
        hidden += [value for value in values if not any(contains(t, value) for t in public)]
        public.append(shown_result(call))
    if any(contains(note, value) for value in hidden for note in notes.profile):
        return (GAP,)
    return None if hidden and notes.profile else ()
