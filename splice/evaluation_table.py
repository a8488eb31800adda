"""An evaluation as a page of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from splice.evaluation import DiagnosisResult, EvaluationResult, KindResult, PolicyResult
from splice.report.abstentions import NodeAbstentions, abstention_table
from splice.report.display import WIDTH, aligned, visible, wrap


def evaluation_text(result: EvaluationResult) -> str:
    """What was evaluated, the table of policies, and what the diagnosis foresaw."""
    return "\n".join(
        [
            *_head(result),
            "",
            *policy_table(result.policies),
            "",
            *_legend(result),
            *_metrics(result),
            *_kinds(result.kinds),
            *_foreseen(result.diagnosis),
            *_abstentions(result.abstentions),
        ]
    )


def _head(result: EvaluationResult) -> Iterator[str]:
    settings = result.settings
    yield visible(
        f"{result.workload}, {result.split}: {result.n_questions} questions"
        + (f", {settings.repeats} runs of each" if settings.repeats > 1 else "")
    )
    yield from wrap(result.about, WIDTH)
    names = ", ".join(sorted(f"{model.name} ({model.provider})" for model in result.models))
    yield visible(f"model: {names or 'none'}; metric: {result.metric}; seed: {settings.seed}")
    if settings.parts is not None:
        yield f"base scores, edges and selector: learned parts {settings.parts[:12]}"


_COLUMNS = (
    "policy",
    "b",
    "n",
    "score",
    "gain",
    "95% interval",
    "p",
    "fixed",
    "broken",
    "changed",
    "kept",
    "trials",
    "decisive",
    "cost",
    "per net fixed",
)


def policy_table(policies: Sequence[PolicyResult]) -> list[str]:
    """The table of policies, a line each."""
    return aligned([_COLUMNS, *map(_policy_cells, policies)])


def _policy_cells(result: PolicyResult) -> tuple[str, ...]:
    net = result.tokens_per_net_fixed
    return (
        result.policy + ("*" if result.is_half else ""),
        "-" if result.budget is None else f"{result.budget:g}",
        f"{result.n}",
        f"{result.score:.3f}",
        f"{result.gain.mean:+.3f}",
        f"{result.gain.interval:+.3f}",
        f"{result.p_mcnemar:.3f}",
        f"{result.fixed}",
        f"{result.broken}",
        f"{result.changed}",
        f"{result.kept}",
        f"{result.n_trials}",
        f"{result.n_decisive}",
        "-" if result.cost_multiple is None else f"{result.cost_multiple:.2f}x",
        "-" if net is None else f"{net:,.0f}",
    )


def _legend(result: EvaluationResult) -> Iterator[str]:
    yield from wrap(
        "gain: over the base answers to the same questions; interval: paired bootstrap over "
        "questions; p: exact McNemar, fixed against broken, not corrected for the number of "
        "policies; changed: another answer of the same score; cost: all tokens over those of the "
        "base runs; per net fixed: tokens beyond the base runs for each net fixed question.",
        WIDTH,
    )
    halves = [policy for policy in result.policies if policy.is_half]
    if halves:
        score = halves[0].base_score
        yield from wrap(
            f"* on a random half of the questions ({halves[0].n}), where the base answers score "
            f"{score:.3f}.",
            WIDTH,
        )
    uncounted = max((policy.n_uncounted for policy in result.policies), default=0)
    if uncounted:
        yield f"Costs are lower bounds: up to {uncounted} calls of a policy have no token count."
    if result.failed_nodes:
        yield f"{result.failed_nodes} node runs of the base runs failed; they count as they are."


def _metrics(result: EvaluationResult) -> Iterator[str]:
    names = list(result.policies[0].all_scores)
    if len(names) < 2:
        return
    rows = [
        (
            policy.policy + ("*" if policy.is_half else ""),
            "-" if policy.budget is None else f"{policy.budget:g}",
            *(f"{policy.all_scores[name]:.3f}" for name in names),
        )
        for policy in result.policies
    ]
    yield from ("", "Every score:", *aligned([("policy", "b", *names), *rows]))


def _kinds(kinds: Sequence[KindResult]) -> Iterator[str]:
    shown = [kind for kind in kinds if kind.policy in ("splice", "always", "oracle")]
    if not shown:
        return
    rows = [
        (
            visible(kind.kind),
            kind.policy,
            "-" if kind.budget is None else f"{kind.budget:g}",
            f"{kind.n}",
            f"{kind.base_score:.3f}",
            f"{kind.score:.3f}",
            f"{kind.fixed}",
            f"{kind.broken}",
        )
        for kind in sorted(shown, key=lambda kind: kind.kind)
    ]
    head = ("kind", "policy", "b", "n", "base", "score", "fixed", "broken")
    yield from ("", "By kind of question:", *aligned([head, *rows]))


def _foreseen(diagnosis: DiagnosisResult) -> Iterator[str]:
    if diagnosis.edge_choice:
        rows = [
            (
                choice.ranker,
                f"{choice.share.n}",
                f"{choice.share.value:.2f}",
                f"{choice.share.interval:.2f}",
            )
            for choice in diagnosis.edge_choice
        ]
        head = ("ranker", "n", "precision@1", "95% interval")
        yield from ("", "First edge is a true gap edge:", *aligned([head, *rows]))
    if diagnosis.calibration:
        rows = [
            (f"{place}", f"{b.n}", f"{b.mean_predicted:.2f}", f"{b.mean_actual:.2f}")
            for place, b in enumerate(diagnosis.calibration, 1)
        ]
        head = ("quintile", "n", "predicted", "actual")
        yield from ("", "Predicted base score:", *aligned([head, *rows]))
    known = [
        f"{name} {value:+.2f}"
        for name, value in (("Spearman", diagnosis.spearman), ("AUC", diagnosis.auc))
        if value is not None
    ]
    if known:
        yield f"predicted against actual: {', '.join(known)}"


def _abstentions(nodes: Sequence[NodeAbstentions]) -> Iterator[str]:
    if nodes:
        yield from ("", "Abstentions by node, in the base runs:", *abstention_table(nodes))
