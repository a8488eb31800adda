"""Multi-hop questions put to researchers who may abstain, who use a phrase, or who do neither."""

from __future__ import annotations

import pytest
from test_multihop import DREAM, HOSTS, TWO_WIKI, write

from skeletons.multihop import load
from skeletons.multihop.hosts import RESEARCHERS, WRITER, variant, workflow
from splice import ScriptedModel, run
from splice.abstention import wire
from splice.errors import SettingsError
from splice.records import Abstention

MAY_ABSTAIN = ("second", "third")
WHO = Abstention(category="Insufficient Input", rationale="which person?")


@pytest.mark.parametrize("host", HOSTS)
def test_the_default_is_the_workflow_of_the_file_itself(tmp_path, host):
    path = write(tmp_path, TWO_WIKI)
    default = load(path, split="train", options={"host": host})
    phrase = load(path, split="train", options={"host": host, "abstention": "phrase"})

    assert default == phrase
    assert default.workflow is workflow(host)
    assert default.name == f"multihop/2wiki/{host}/form"
    assert default.about.endswith("holds what both are asked for.")


ROLES = {
    "parallel": (
        "You look up one fact in your documents. If they don't say it, reply: not found",
        "You look up one fact about the person or thing that your task names. If no document is "
        "about it, reply: not found",
    ),
    "chain": (
        "You look up one fact in your documents. If they don't say it, reply: not found",
        "You look up one fact in your documents and your colleague's report. If they don't say "
        "it, reply: not found",
    ),
}


@pytest.mark.parametrize("host", HOSTS)
def test_the_default_asks_what_it_always_asked(host):
    first, later = ROLES[host]
    for name, role in zip(RESEARCHERS, (first, later, later), strict=True):
        node = workflow(host).by_id[name]
        assert (node.role, node.reply) == (role, "Reply with a few words only.")
        assert (node.abstention_phrase, node.may_abstain) == ("not found", False)
        assert node.model.max_tokens == 24


@pytest.mark.parametrize("host", HOSTS)
def test_the_later_researchers_may_abstain_and_are_told_of_no_phrase(host):
    own, typed = workflow(host), variant(host, "typed")

    assert typed.by_id["first"] == own.by_id["first"]
    assert typed.by_id[WRITER] == own.by_id[WRITER]
    for name in MAY_ABSTAIN:
        node = typed.by_id[name]
        assert node.may_abstain
        assert node.abstention_phrase is None
        assert "not found" not in node.role
        assert "you need to be told who or what it is" in node.role
        assert node.role.startswith(own.by_id[name].role.partition(" If ")[0])


@pytest.mark.parametrize("host", HOSTS)
def test_with_none_nobody_is_offered_a_way_out(host):
    none = variant(host, "none")

    for node in none.agents:
        assert (node.abstention_phrase, node.may_abstain) == (None, False)
        assert "not found" not in node.role
        assert node.role.endswith(".")
    for name in RESEARCHERS:
        assert workflow(host).by_id[name].role.startswith(none.by_id[name].role)


@pytest.mark.parametrize("host", HOSTS)
def test_variants_differ_in_nothing_but_how_to_decline(tmp_path, host):
    path = write(tmp_path, TWO_WIKI)
    found = {
        value: load(path, split="train", options={"host": host, "abstention": value})
        for value in ("phrase", "typed", "none")
    }

    for value in ("typed", "none"):
        assert found[value].name == f"multihop/2wiki/{host}/form/{value}"
        assert found[value].examples == found["phrase"].examples
        assert found[value].workflow.edges == workflow(host).edges
        assert found[value].workflow.name == f"multihop-{host}-{value}"
    assert len({one.workflow.fingerprint for one in found.values()}) == 3
    assert "may abstain" in found["typed"].about


def test_an_unknown_way_to_decline_is_refused(tmp_path):
    with pytest.raises(SettingsError, match="phrase, typed, none"):
        load(write(tmp_path, TWO_WIKI), split="train", options={"abstention": "json"})


def test_a_researcher_that_abstains_is_heard_with_its_reason(tmp_path):
    workload = load(write(tmp_path, TWO_WIKI), split="train", options={"abstention": "typed"})
    model = ScriptedModel(
        {"first": ["Ana Lima"], "second": [wire(WHO)], "third": ["not found"], "writer": ["Faro"]}
    )

    trace = run(workload.workflow, workload.examples[0].query, model=model)

    assert trace.by_node["second"].abstention == WHO
    assert trace.by_node["third"].status == "ok"
    user = trace.by_node["second"].input[-1].content
    assert "Reply with a few words only.\n\nIf what you were given" in user
    assert "which person?" in trace.by_node["writer"].input[-1].content
    assert DREAM in trace.by_node["first"].input[-1].content


def test_where_nobody_may_decline_a_refusal_is_an_output(tmp_path):
    workload = load(write(tmp_path, TWO_WIKI), split="train", options={"abstention": "none"})
    replies = {name: ["not found"] for name in RESEARCHERS}

    trace = run(
        workload.workflow,
        workload.examples[0].query,
        model=ScriptedModel({**replies, "writer": ["Faro"]}),
    )

    assert {node.status for node in trace.node_runs} == {"ok"}


def test_the_longest_reason_fits_into_a_reply():
    longest = wire(Abstention(category="Insufficient Input", rationale=" ".join(["person"] * 40)))
    node = variant("parallel", "typed").by_id["second"]

    # English takes four thirds of a token a word, and the JSON around it some twenty.
    assert len(longest.split()) * 4 / 3 + 20 < node.model.max_tokens
