"""What a reference says of a request, and what is read from it: score, gold output, rationale."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from skeletons.abstention.calls import Call, arguments_match, read_call
from splice.ears.interactions import Label
from splice.records import NodeId, Record
from splice.workload import Example

METRICS = ("correct", "well_formed")


class RightCall(Record):
    """The calls that are right for a request that can be carried out."""

    names: tuple[str, ...]
    """Functions any of which is right."""
    accepted: Mapping[str, tuple[Any, ...] | None] | None = None
    """Accepted values by parameter, as `arguments_match` takes them; None: arguments are not
    compared."""

    def allows(self, call: Call) -> bool:
        """Whether a call is right."""
        return call.name in self.names and (
            self.accepted is None or arguments_match(call.arguments, self.accepted)
        )


class Asked(Record):
    """One row of any of the data sets."""

    id: str
    text: str
    kind: str
    """What the data set calls it."""
    agent: NodeId
    """Who received it."""
    role: str
    abilities: tuple[str, ...] = ()
    """What the agent is told that it can do, where its role does not say so."""
    label: Label
    also_right: tuple[Label, ...] = ()
    call: RightCall | None = None
    """None unless it can be carried out."""
    gold_output: str | None = None
    """A right call as JSON; None: there is none, or the source gives none."""
    rationale: str | None = None
    """Why it is right to abstain, from the annotation; None: the source does not say."""
    rationale_has: str | None = None
    """What a right rationale names."""
    elsewhere: Mapping[str, str] = {}
    """Other agents by name, and what each does."""

    def reference(self) -> dict[str, Any]:
        """What only a scorer sees of it, as JSON can write it."""
        return self.model_dump(
            mode="json",
            include={"label", "also_right", "call", "gold_output", "rationale", "rationale_has"},
            exclude_none=True,
        )


def written(name: str, arguments: Mapping[str, Any]) -> str:
    """A call as an agent should write it.

    >>> written("find", {"city": "Rome"})
    '{"name": "find", "arguments": {"city": "Rome"}}'
    """
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


def score(example: Example, answer: str | None) -> Mapping[str, float]:
    """`correct`: 1.0 if the answer is a call that is right; `well_formed`: if it is a call at all.

    Nothing is right for a request that should not be carried out.
    """
    call = None if answer is None else read_call(answer)
    right = example.reference.get("call")
    is_right = (
        call is not None and right is not None and RightCall.model_validate(right).allows(call)
    )
    return {"correct": float(is_right), "well_formed": float(call is not None)}


def gold_output(example: Example) -> str | None:
    """A call that is right, as an agent should write it; None if there is none or none is known."""
    output: str | None = example.reference.get("gold_output")
    return output


def gold_rationale(example: Example) -> str | None:
    """Why it is right to abstain, in at most 12 words; None if it is not, or nothing says why."""
    rationale: str | None = example.reference.get("rationale")
    return rationale
