"""Selectors by name or folder, whichever tier they are of."""

from __future__ import annotations

from pathlib import Path

from splice.errors import WeightsError
from splice.learned import load_learned
from splice.selector import RuleSelector, Selector


def open_selector(given: Selector | str | Path | None) -> Selector:
    """The selector that is meant.

    Args:
        given: a selector; `rules`, or None, for the documented rules; else a folder, of learned
            parts or of a trained language model.

    Raises:
        WeightsError: the folder holds neither, or not what its card says.
        SettingsError: a language model needs the extra `train`.
    """
    if given is None or given == "rules":
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
