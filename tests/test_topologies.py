"""The topologies to start from: valid, of the shape that their name says, and pictured as they are."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import networkx as nx
import pytest
from loopback import LoopbackServer, Reply
from typer.testing import CliRunner

import skeletons
import splice
from splice.cli import app
from splice.models.scripted import Responder
from splice.records import Request
from splice.report.text import workflow_text
from splice.workflow import Workflow, generations

FOLDER = Path(__file__).parents[1] / "skeletons" / "topologies"
README = (FOLDER / "README.md").read_text("utf-8")
WORKFLOWS = {name: skeletons.load(name) for name in skeletons.names()}
QUESTION = "Who pays for the night ferry to Sund?"
FACT = "The island council pays for the night ferry to Sund."

each = pytest.mark.parametrize("name", WORKFLOWS)


def graph(name: str) -> nx.DiGraph[str]:
    return WORKFLOWS[name].graph


# --- names and files -------------------------------------------------------------------------


def test_there_are_nine_topologies_in_sorted_order() -> None:
    assert skeletons.names() == (
        "chain",
        "debate",
        "diamond",
        "fork_join",
        "late_join",
        "layered",
        "side_branch",
        "star",
        "tree",
    )


@pytest.mark.parametrize("name", ["ring", "", "chain.toml", "../topologies/chain", "README"])
def test_an_unknown_name_is_refused_with_the_choices(name: str) -> None:
    with pytest.raises(splice.WorkflowError, match=r"there are chain, debate, .*, tree$") as caught:
        skeletons.load(name)
    assert repr(name) in str(caught.value)


@each
def test_a_topology_is_called_what_its_file_is_called_and_says_what_it_is(name: str) -> None:
    assert WORKFLOWS[name].name == name
    assert WORKFLOWS[name].description


@each
def test_a_topology_is_four_to_nine_agents_that_know_role_task_and_reply(name: str) -> None:
    workflow = WORKFLOWS[name]
    assert 4 <= len(workflow.nodes) <= 9
    assert len(workflow.agents) == len(workflow.nodes)
    for agent in workflow.agents:
        assert agent.role
        assert agent.subtask
        assert agent.reply
        assert agent.documents == ()


@each
def test_node_names_can_stand_in_a_mermaid_graph_as_they_are(name: str) -> None:
    for node in WORKFLOWS[name].by_id:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", node)
        assert node not in ("end", "graph", "subgraph", "style", "class", "click", "default")


@each
def test_every_node_reaches_the_output_and_the_output_is_the_only_end(name: str) -> None:
    output = WORKFLOWS[name].output
    assert nx.ancestors(graph(name), output) | {output} == set(graph(name))
    assert [node for node, degree in graph(name).out_degree() if degree == 0] == [output]


@each
def test_at_least_two_edges_are_missing(name: str) -> None:
    assert len(WORKFLOWS[name].candidate_edges) >= 2


@each
def test_the_command_line_finds_the_file_valid(name: str) -> None:
    done = CliRunner().invoke(app, ["validate", str(FOLDER / f"{name}.toml")])
    assert done.exit_code == 0
    assert f"{name}: valid" in done.output


# --- shapes ----------------------------------------------------------------------------------


def test_no_two_topologies_have_the_same_shape() -> None:
    for one, other in itertools.combinations(WORKFLOWS, 2):
        assert not nx.is_isomorphic(graph(one), graph(other)), (one, other)


def test_the_chain_is_a_path() -> None:
    order = WORKFLOWS["chain"].plan.order
    assert set(WORKFLOWS["chain"].edges) == set(itertools.pairwise(order))


def test_the_diamond_is_the_smallest_fork_with_a_join() -> None:
    smallest = nx.DiGraph([("a", "b"), ("a", "c"), ("b", "d"), ("c", "d")])
    assert nx.is_isomorphic(graph("diamond"), smallest)


def test_the_fork_join_spreads_to_at_least_three_nodes_and_joins_them_all() -> None:
    [first], middle, [last] = generations(WORKFLOWS["fork_join"])
    assert len(middle) >= 3
    assert set(graph("fork_join").edges) == {(first, node) for node in middle} | {
        (node, last) for node in middle
    }


def test_the_tree_branches_at_every_inner_node_of_two_levels() -> None:
    away = graph("tree").reverse()
    assert nx.is_arborescence(away)
    assert {degree for _, degree in away.out_degree()} == {0, 2}
    assert nx.dag_longest_path_length(away) == 2


def test_in_the_layered_topology_each_node_reads_the_whole_layer_before_and_nothing_else() -> None:
    layers = generations(WORKFLOWS["layered"])
    pairs = itertools.pairwise(layers)
    expected = {edge for layer, following in pairs for edge in itertools.product(layer, following)}
    assert set(graph("layered").edges) == expected
    assert [len(layer) for layer in layers] == [2, 2, 2, 1]


def test_the_star_has_one_hub_which_answers() -> None:
    hub = WORKFLOWS["star"].output
    rest = set(graph("star")) - {hub}
    assert set(graph("star").edges) == {(node, hub) for node in rest}
    assert len(rest) >= 4


def test_the_late_join_keeps_two_paths_apart_until_the_node_before_the_output() -> None:
    late = graph("late_join")
    output = WORKFLOWS["late_join"].output
    [join] = late.predecessors(output)
    assert [node for node, degree in late.in_degree() if degree > 1] == [join]
    apart = late.copy()
    apart.remove_nodes_from([join, output])
    branches = [apart.subgraph(part) for part in nx.weakly_connected_components(apart)]
    assert len(branches) == 2
    for branch in branches:
        assert nx.dag_longest_path_length(branch) == len(branch) - 1 >= 2


def test_in_the_debate_both_debaters_hear_the_first_round_and_the_judge_the_second() -> None:
    openings, replies, [judge] = generations(WORKFLOWS["debate"])
    assert len(openings) == len(replies) == 2
    assert judge == WORKFLOWS["debate"].output
    assert set(graph("debate").edges) == set(itertools.product(openings, replies)) | {
        (reply, judge) for reply in replies
    }


def test_the_side_branch_leaves_a_deep_pipeline_and_comes_back_late() -> None:
    whole = graph("side_branch")
    pipeline = nx.dag_longest_path(whole)
    side = [node for node in WORKFLOWS["side_branch"].plan.order if node not in pipeline]
    assert len(pipeline) >= 6
    [leaves] = whole.predecessors(side[0])
    [returns] = whole.successors(side[-1])
    assert pipeline.index(returns) - pipeline.index(leaves) > len(side) + 1
    assert set(whole.edges) == {
        *itertools.pairwise(pipeline),
        *itertools.pairwise([leaves, *side, returns]),
    }


# --- runs ------------------------------------------------------------------------------------


def forgetful(first: str) -> Responder:
    """Only `first` finds the fact, and who reads it from there overlooks it.

    The others pass on what a delivered message, or a node that got one, told them.
    """

    def reply(request: Request) -> str:
        prompt = request.messages[-1].content
        reported = re.findall(r"^From (\w+):\n> (.*)$", prompt, re.M)
        if request.node in (None, first) or "additional evidence" in prompt:
            return FACT
        return FACT if any(said == FACT for by, said in reported if by != first) else "not found"

    return reply


@each
def test_a_run_asks_each_agent_once_and_shows_it_the_question(name: str) -> None:
    model = splice.ScriptedModel(lambda request: f"{request.node} says so")
    trace = splice.run(WORKFLOWS[name], QUESTION, model=model)
    assert trace.answer == f"{WORKFLOWS[name].output} says so"
    assert {run.status for run in trace.node_runs} == {"ok"}
    assert sorted(str(request.node) for request in model.requests) == sorted(WORKFLOWS[name].by_id)
    assert all(QUESTION in request.messages[-1].content for request in model.requests)


@each
def test_one_trial_repairs_what_the_first_node_found_and_nobody_took_up(name: str) -> None:
    workflow = WORKFLOWS[name]
    first = workflow.plan.order[0]
    model = splice.ScriptedModel(forgetful(first))
    result = splice.repair(workflow, QUESTION, model=model)
    assert (result.base.answer, result.answer) == ("not found", FACT)
    assert result.edge is not None
    assert result.edge.edge in workflow.candidate_edges
    assert result.edge.edge.source == first
    calls = Counter(request.node for request in model.requests if request.node is not None)
    assert max(calls.values()) == 2


# --- the page of pictures --------------------------------------------------------------------


def section(name: str) -> str:
    """What the page says about one topology."""
    return README.partition(f"\n## {name}\n")[2].partition("\n## ")[0]


def blocks(text: str, language: str) -> list[str]:
    """Code blocks in one language."""
    return re.findall(rf"^```{language}\n(.*?)\n```$", text, re.M | re.S)


def table_row(name: str, workflow: Workflow) -> str:
    kinds = Counter(edge.kind for edge in workflow.candidate_edges)
    cells = (
        f"[{name}](#{name})",
        len(workflow.nodes),
        len(workflow.edges),
        len(generations(workflow)),
        kinds["distant_ancestor"],
        kinds["parallel_branch"],
    )
    return f"| {' | '.join(map(str, cells))} |"


def test_the_page_has_one_section_for_each_topology() -> None:
    assert re.findall(r"^## (.*)$", README, re.M) == list(WORKFLOWS)


@each
def test_the_drawing_is_what_the_command_line_prints(name: str) -> None:
    workflow = WORKFLOWS[name]
    drawn = workflow_text(workflow.plan.order, workflow.edges, workflow.output)
    assert blocks(section(name), "text") == [drawn]


@each
def test_the_mermaid_graph_has_the_edges_of_the_workflow(name: str) -> None:
    edges = [f"    {source} --> {receiver}" for source, receiver in WORKFLOWS[name].edges]
    assert blocks(section(name), "mermaid") == ["\n".join(["graph LR", *edges])]


def test_the_table_counts_nodes_edges_depth_and_candidate_edges_by_kind() -> None:
    rows = [row for row in README.splitlines() if row.startswith("| [")]
    assert rows == [table_row(name, workflow) for name, workflow in WORKFLOWS.items()]


@each
def test_edges_that_the_page_says_go_missing_are_candidates_of_the_kind_it_says(name: str) -> None:
    candidates = {
        (edge.source, edge.receiver): edge.kind.replace("_", " ")
        for edge in WORKFLOWS[name].candidate_edges
    }
    text = section(name)
    named = list(re.finditer(r"`(\w+) -> (\w+)`", text))
    assert named
    for edge in named:
        kind = re.search(r"distant ancestor|parallel branch", text[edge.end() :])
        assert kind is not None
        assert candidates.get((edge[1], edge[2])) == kind[0], edge[0]


def test_the_example_of_the_page_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    [example] = blocks(README, "python")
    with LoopbackServer(lambda request: Reply("not found")) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
        exec(compile(example, "README.md", "exec"), {})
    assert "workflow star" in capsys.readouterr().out


# --- imports ---------------------------------------------------------------------------------


def test_importing_the_skeletons_loads_no_graph_library_and_no_client() -> None:
    code = (
        "import sys, skeletons; skeletons.names(); "
        "print([name for name in ('networkx', 'openai') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_package_offers_two_functions() -> None:
    assert skeletons.__all__ == sorted(skeletons.__all__) == ["load", "names"]
