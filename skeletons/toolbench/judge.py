"""A judge model that says whether an answer solves a request."""

from __future__ import annotations

import re
from collections import Counter
from typing import Final, Literal, TypeAlias

from splice.models.default import default_model
from splice.models.protocol import ChatModel
from splice.prompts import quote, render
from splice.records import ChatMessage, ModelSettings, Request
from splice.workflow import Workflow
from splice.workload import Example

Outcome: TypeAlias = Literal["solved", "unsolved", "unsure", "unparsed"]

METRICS = ("solved",)

PACKAGE = "skeletons.toolbench"
"""Where the judge's prompt stands."""

_SCORES: Final[dict[Outcome, float]] = {
    "solved": 1.0,
    "unsure": 0.5,
    "unsolved": 0.0,
    "unparsed": 0.0,
}
_MENU: Final[dict[str, Outcome]] = {
    "solved": "solved",
    "unsolved": "unsolved",
    "unsure": "unsure",
}
_LINE = re.compile(r"^[ \t*_]*VERDICT[ \t*_]*:(.*)$", re.IGNORECASE | re.MULTILINE)
_SETTINGS = ModelSettings(max_tokens=256)


class JudgeScorer:
    """Scores an answer by asking a model: solved 1, unsure 0.5, unsolved 0.

    No answer is unsolved without a call. A reply without a verdict that was offered is *unparsed*
    and scores 0; `outcomes` counts such replies, so that a figure can be read with them in mind.
    """

    def __init__(
        self, model: ChatModel | None, *, workflow: Workflow, name: str | None = None
    ) -> None:
        """Keep the judge.

        Args:
            model: who judges; None: the default model of the environment, at the first score.
            workflow: what is judged; the default model depends on it.
            name: name of the default model.
        """
        self._model = model
        self._workflow = workflow
        self._name = name
        self.outcomes: Counter[Outcome] = Counter()
        """How many answers came out as what, `unparsed` included."""

    async def __call__(self, example: Example, answer: str | None) -> dict[str, float]:
        """Judge one answer.

        Raises:
            ModelError: the judge gave no usable reply.
            SettingsError: there is no model to ask.
        """
        outcome: Outcome = "unsolved"
        if answer is not None and answer.strip():
            outcome = parse_verdict(await self._ask(example, answer))
        self.outcomes[outcome] += 1
        return {"solved": _SCORES[outcome]}

    async def _ask(self, example: Example, answer: str) -> str:
        if self._model is None:
            self._model = default_model(self._workflow, self._name)
        prompt = render("judge", PACKAGE, request=quote(example.query.text), answer=quote(answer))
        request = Request(
            messages=(ChatMessage(role="user", content=prompt),),
            settings=_SETTINGS,
            stage="judge",
            query_id=example.query.id,
        )
        completion = await self._model.complete(request, lambda *_: None)
        return completion.text


def parse_verdict(reply: str) -> Outcome:
    r"""What a judge's last verdict line says.

    >>> parse_verdict("VERDICT: solved\nNo.\nVERDICT: **unsolved**"), parse_verdict("Solved!")
    ('unsolved', 'unparsed')
    """
    lines = _LINE.findall(reply)
    # The menu is checked after the match, or a verdict that was not offered would be passed over
    # for one that stands earlier.
    return _MENU.get(lines[-1].strip(" \t\r*_.`").lower(), "unparsed") if lines else "unparsed"
