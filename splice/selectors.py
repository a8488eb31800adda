"""Selectors and learned parts by name or folder, whichever tier they are of."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from splice.errors import WeightsError
from splice.learned import Learned, load_learned, shipped
from splice.selector import RuleSelector, Selector

RULES: Final = "rules"
"""Name of hand-set scores and documented rules, where a folder is expected."""

SHIPPED: Final = "shipped"
"""Name of the learned parts that come with the package."""


def open_parts(given: str | Path | None) -> Learned | None:
    """The learned parts that are meant; None: hand-set scores and rules.

    Args:
        given: a folder; `shipped`: the parts that come with the package; None or `rules`: none. On
            the sample's workflow, which is unlike those that the shipped parts were fitted on, they
            choose worse queries than the hand-set scores (docs/results.md): they are no default.

    Raises:
        WeightsError: as `splice.learned.load_learned` raises it.
    """
    if given is None or str(given) == RULES:
        return None
    return shipped() if str(given) == SHIPPED else load_learned(given)


def open_selector(given: Selector | str | Path | None) -> Selector:
    """The selector that is meant.

    Args:
        given: a selector; `rules`, or None, for the documented rules; else a folder, of learned
            parts or of a trained language model.

    Raises:
        WeightsError: the folder holds neither, or not what its card says.
        SettingsError: a language model needs the extra `train`.
    """
    if given is None or given == RULES:
        return RuleSelector()
    if isinstance(given, Selector):
        return given
    folder = Path(given)
    if (folder / "selector.json").exists():
        from splice.language import LanguageSelector

        return LanguageSelector(folder)
    if not (folder / "card.json").exists():
        raise WeightsError(
            f"{folder} holds no selector: neither card.json (learned parts) nor selector.json "
            "(a language model). For the documented rules say 'rules'"
        )
    found = load_learned(folder).selector
    if found is None:
        raise WeightsError(f"the learned parts in {folder} hold no selector")
    return found
