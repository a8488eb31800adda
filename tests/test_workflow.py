"""Workflows: what is refused and how it is said, canonical order, fingerprints, the file format."""

import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
from pydantic import ValidationError

import splice.sample
from splice.errors import QueryError, TraceMismatch, WorkflowError
from splice.executor import NodeInput, execute
from splice.models.scripted import ScriptedModel
from splice.records import Document, ModelSettings, Query, ToolSpec
from splice.tools import tool
from splice.workflow import (
    Agent,
    Function,
    Tool,
    Workflow,
    generations,
    load_workflow,
    workflow_schema,
)


def agents(*names: str) -> tuple[Agent, ...]:
    return tuple(Agent(id=name, role=f"You are {name}.") for name in names)


def make(edges: str, output: str, names: str | None = None) -> Workflow:
    """A workflow of agents from "a-b b-c"."""
    pairs = [tuple(edge.split("-")) for edge in edges.split()]
    order = (names or "".join(dict.fromkeys("".join("".join(pair) for pair in pairs)))).split()
    order = list(order[0]) if len(order) == 1 else order
    return Workflow(nodes=agents(*order), edges=pairs, output=output)


def random_workflow(seed: int, most_nodes: int = 9) -> Workflow:
    """A random graph in which every node reaches the output, declared in a random order."""
    rng = random.Random(seed)
    names = [f"n{i}" for i in range(rng.randint(1, most_nodes))]
    edges = []
    for place, source in enumerate(names[:-1]):
        later = names[place + 1 :]
        chosen = rng.sample(later, rng.randint(1, min(3, len(later))))
        edges += [(source, receiver) for receiver in chosen]
    declared = rng.sample(names, len(names))
    rng.shuffle(edges)
    return Workflow(nodes=agents(*declared), edges=edges, output=names[-1])


# --- what is no workflow ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("edges", "output", "message"),
    [
        ("a-b b-c c-a", "c", "cycle: a -> b -> c -> a|cycle: b -> c -> a -> b|cycle: c -> a -> b"),
        ("a-b b-a a-c", "c", "cycle: a -> b -> a|cycle: b -> a -> b"),
        ("a-a", "a", r"edges\[0\] 'a' -> 'a': a node can't read its own output"),
        ("a-b a-b", "b", r"edges\[1\] 'a' -> 'b': the edge is there already"),
        ("a-b b-c", "x", "output names unknown node 'x'; there are a, b, c"),
        ("a-b a-c", "b", "no path leads from 'c' to the output node 'b'"),
        ("a-b c-d e-d", "b", "no path leads from 'c', 'd', 'e' to the output node 'b'"),
    ],
)
def test_a_graph_that_is_no_workflow_is_refused_by_name_and_place(edges, output, message) -> None:
    with pytest.raises(WorkflowError, match=message):
        make(edges, output)


def test_a_cycle_behind_a_long_lead_in_is_named_without_the_lead_in() -> None:
    with pytest.raises(WorkflowError) as caught:
        make("a-b b-c c-d d-e e-c e-f", "f")
    loop = str(caught.value).removeprefix("cycle: ").split(" -> ")
    assert loop[0] == loop[-1]
    assert set(loop) == {"c", "d", "e"}
    assert all(pair in {("c", "d"), ("d", "e"), ("e", "c")} for pair in pairwise(loop))


def test_an_edge_to_a_node_that_does_not_exist_is_refused_with_the_choices() -> None:
    with pytest.raises(WorkflowError, match=r"edges\[0\] 'a' -> 'z': unknown node 'z'; .* a, b"):
        Workflow(nodes=agents("a", "b"), edges=(("a", "z"),), output="b")


def test_two_nodes_with_one_id_are_refused() -> None:
    with pytest.raises(WorkflowError, match=r"nodes\[1\]: there is a node 'a' already"):
        Workflow(nodes=agents("a", "a"), edges=(), output="a")


@pytest.mark.parametrize("name", ["", "1a", "a b", "a\n", "é", "a" * 65, "a/b", 'a"b', "-a"])
def test_a_malformed_id_is_refused(name: str) -> None:
    with pytest.raises(WorkflowError, match=r"nodes\[0\]: id .* is not a letter followed by"):
        Workflow(nodes=agents(name), edges=(), output=name)


def test_a_workflow_without_nodes_is_refused() -> None:
    with pytest.raises(WorkflowError, match="workflow 'empty' has no nodes"):
        Workflow(name="empty", nodes=(), edges=(), output="a")


def test_a_definition_that_no_file_can_hold_is_refused_before_it_runs() -> None:
    with pytest.raises(WorkflowError, match=r"nodes\[0\] 'a': not Unicode text"):
        Workflow(nodes=(Agent(id="a", role="\ud800"),), edges=(), output="a")


@tool
def look_up(city: str) -> str:
    """Look up a city."""
    return city


def test_a_missing_tool_is_refused_by_node_and_with_the_choices() -> None:
    node = Agent(id="a", role="r", tools=("search",))
    with pytest.raises(WorkflowError, match=r"node 'a' names missing tool 'search'; .* has none"):
        Workflow(nodes=(node,), edges=(), output="a")
    with pytest.raises(WorkflowError, match="missing tool 'search'; there are look_up"):
        Workflow(nodes=(node,), edges=(), output="a", tools=(look_up,))


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(WorkflowError, match="there are two tools named 'look_up'"):
        Workflow(nodes=agents("a"), edges=(), output="a", tools=(look_up, look_up))


def test_a_tool_that_can_not_be_described_to_a_model_is_refused() -> None:
    def bare(city):
        return city

    def spread(*cities: str) -> str:
        return ""

    with pytest.raises(WorkflowError, match="tool 'bare': 'city' has no annotation"):
        tool(bare)
    with pytest.raises(WorkflowError, match=r"tool 'spread': \*cities: str can't be given by name"):
        tool(spread)


def test_unknown_keys_are_refused_in_python_too() -> None:
    with pytest.raises(ValidationError, match="colour"):
        Agent(id="a", role="r", colour="red")


@pytest.mark.parametrize(
    ("query", "message"),
    [
        (Query(text=" \n"), "query 'query' is empty"),
        (Query(text="q", context={"z": ["x"]}), "context names unknown node 'z'; there are a, b"),
        (Query(text="q", subtasks={"z": "x"}), "subtasks names unknown node 'z'; there are a, b"),
        (Query(text="q\ud800"), "not Unicode text"),
        (Query(text="q", id="\ud800"), "not Unicode text"),
        (Query(text="q", context={"a": ["\ud800"]}), "not Unicode text"),
        (Query(text="q", context={"a": [Document(title="\ud800", text="")]}), "not Unicode text"),
        (Query(text="q", subtasks={"a": "\ud800"}), "not Unicode text"),
    ],
)
async def test_a_query_that_does_not_fit_is_refused_before_the_first_call(query, message) -> None:
    model = ScriptedModel({})
    with pytest.raises(QueryError, match=message):
        await execute(make("a-b", "b"), query, model)
    assert model.requests == []


# --- order -----------------------------------------------------------------------------------


def test_ties_follow_the_order_of_declaration() -> None:
    workflow = make("p-c p-t c-z t-z", "z", names="ptcz")
    assert generations(workflow) == (("p",), ("t", "c"), ("z",))
    assert workflow.plan.order == ("p", "t", "c", "z")


def test_the_order_of_edges_says_nothing_about_the_order_of_nodes() -> None:
    first = make("a-z b-z c-z", "z", names="abcz")
    second = make("c-z a-z b-z", "z", names="abcz")
    assert first.plan.order == second.plan.order == ("a", "b", "c", "z")


def test_parents_are_read_in_the_order_of_their_edges() -> None:
    assert make("c-z a-z b-z", "z", names="abcz").plan.parents["z"] == ("c", "a", "b")


def test_canonical_order_is_topological_and_keeps_declaration_within_a_generation() -> None:
    for seed in range(500):
        workflow = random_workflow(seed)
        place = {node: i for i, node in enumerate(workflow.plan.order)}
        declared = {node.id: i for i, node in enumerate(workflow.nodes)}
        assert sorted(place) == sorted(declared)
        assert all(place[source] < place[receiver] for source, receiver in workflow.edges)
        for group in generations(workflow):
            assert list(group) == sorted(group, key=declared.__getitem__)


def test_a_candidate_edge_never_closes_a_cycle_and_never_repeats_an_edge() -> None:
    for seed in range(500):
        workflow = random_workflow(seed)
        edges = set(workflow.edges)
        found = [(edge.source, edge.receiver) for edge in workflow.candidate_edges]
        assert len(found) == len(set(found))
        assert not edges & set(found)
        n = len(workflow.nodes)
        assert len(found) + len(edges) == n * (n - 1) // 2
        graph = nx.DiGraph(list(edges))
        graph.add_nodes_from(node.id for node in workflow.nodes)
        for edge in workflow.candidate_edges:
            larger = (*workflow.edges, (edge.source, edge.receiver))
            assert Workflow(nodes=workflow.nodes, edges=larger, output=workflow.output)
            is_ancestor = nx.has_path(graph, edge.source, edge.receiver)
            assert edge.kind == ("distant_ancestor" if is_ancestor else "parallel_branch")


def test_all_candidate_edges_together_close_no_cycle() -> None:
    for seed in range(200):
        workflow = random_workflow(seed)
        more = tuple((edge.source, edge.receiver) for edge in workflow.candidate_edges)
        Workflow(nodes=workflow.nodes, edges=workflow.edges + more, output=workflow.output)


def test_distances_count_edges_to_the_output_node() -> None:
    assert make("a-b b-c a-c c-d", "d").distances == {"a": 2, "b": 2, "c": 1, "d": 0}


def test_the_graph_that_is_given_out_can_not_change_the_workflow() -> None:
    workflow = make("a-b b-c", "c")
    with pytest.raises(nx.NetworkXError, match=r"[Ff]rozen"):
        workflow.graph.add_edge("a", "c")
    assert [(e.source, e.receiver) for e in workflow.candidate_edges] == [("a", "c")]


# --- fingerprints ----------------------------------------------------------------------------


def shout(given: NodeInput) -> str:
    return given.subtask.upper()


def whisper(given: NodeInput) -> str:
    return given.subtask.lower()


class Scaler:
    """A callable object; what it is set to is not in its source."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __call__(self, given: NodeInput) -> str:
        return str(self.factor)


def search_v1(q: str) -> str:
    """Search."""
    return q


def search_v2(q: str) -> str:
    """Search."""
    return q + "!"


def named_search(call: Callable[..., Any], **more: Any) -> Tool:
    return tool(name="search", **more)(call)


BASE = Agent(id="a", role="r", subtask="s", tools=("search",))


def one(node: Agent | Function, *, search: Tool | None = None, **more: Any) -> Workflow:
    tools = (search or named_search(search_v1),)
    return Workflow(**{"nodes": (node,), "edges": (), "output": node.id, "tools": tools, **more})


@pytest.mark.parametrize(
    "changed",
    [
        one(BASE.model_copy(update={"role": "other"})),
        one(BASE.model_copy(update={"subtask": "other"})),
        one(BASE.model_copy(update={"reply": "Briefly."})),
        one(BASE.model_copy(update={"documents": (Document(text="x"),)})),
        one(BASE.model_copy(update={"model": ModelSettings(name="m")})),
        one(BASE.model_copy(update={"model": ModelSettings(temperature=0.5)})),
        one(BASE.model_copy(update={"tools": ()})),
        one(BASE.model_copy(update={"may_abstain": True})),
        one(BASE, search=named_search(search_v2)),
        one(BASE, search=named_search(search_v1, effects="write")),
        one(
            BASE,
            search=named_search(search_v1).model_copy(
                update={"spec": ToolSpec(name="search", description="New.", parameters={})}
            ),
        ),
    ],
)
def test_a_change_of_what_a_node_is_changes_its_fingerprint(changed: Workflow) -> None:
    base = one(BASE)
    assert changed.node_fingerprints["a"] != base.node_fingerprints["a"]
    assert changed.fingerprint != base.fingerprint


def test_a_function_is_known_by_its_code_and_its_version() -> None:
    prints = [
        one(Function(id="a", call=call, version=version)).node_fingerprints["a"]
        for call, version in [
            (shout, ""),
            (whisper, ""),
            (shout, "2"),
            (Scaler(1), "x1"),
            (Scaler(2), "x2"),
        ]
    ]
    assert len(set(prints)) == 5
    assert one(Function(id="a", call=shout)).node_fingerprints["a"] == prints[0]
    assert one(Function(id="a", call=Scaler(9), version="x1")).node_fingerprints["a"] == prints[3]


def test_names_neighbours_and_unused_tools_leave_a_node_as_it_is() -> None:
    base = one(BASE)
    renamed = one(BASE, name="other", description="Other.")
    with_tool = one(BASE, tools=(named_search(search_v1), look_up))
    wider = Workflow(
        nodes=(*agents("x"), BASE),
        edges=(("x", "a"),),
        output="a",
        tools=(named_search(search_v1),),
    )
    same = [w.node_fingerprints["a"] for w in (base, renamed, with_tool, wider)]
    assert len(set(same)) == 1
    assert base.fingerprint == renamed.fingerprint == with_tool.fingerprint != wider.fingerprint


def test_edges_output_and_answer_rule_are_part_of_the_workflows_fingerprint() -> None:
    nodes = agents("a", "b", "c")
    full = {"nodes": nodes, "edges": (("a", "b"), ("b", "c")), "output": "c"}
    base = Workflow(**full)
    others = [
        Workflow(**full | {"edges": (("a", "c"), ("b", "c"))}),
        Workflow(**full | {"edges": (("a", "b"), ("b", "c"), ("a", "c"))}),
        Workflow(**full | {"answer": "answer_line"}),
        Workflow(**full | {"answer": lambda text: text[:1]}),
        Workflow(
            **full
            | {
                "answer": lambda text: text[:2],
            }
        ),
    ]
    assert len({base.fingerprint, *(other.fingerprint for other in others)}) == 6
    assert Workflow(**full).fingerprint == base.fingerprint


# --- traces of another version ---------------------------------------------------------------


async def test_a_trace_of_an_edited_workflow_is_refused_and_each_changed_node_is_named() -> None:
    old = make("a-b b-c", "c")
    trace = await execute(old, Query(text="q"), ScriptedModel(lambda request: "x"))
    old.check_trace(trace)
    nodes = (Agent(id="a", role="changed"), *agents("c", "d"))
    new = Workflow(nodes=nodes, edges=(("a", "c"), ("d", "c")), output="c")
    with pytest.raises(TraceMismatch) as caught:
        new.check_trace(trace)
    assert str(caught.value).splitlines()[1:] == [
        "- node 'b' is gone",
        "- node 'd' is new",
        "- node 'a' has changed",
    ]


async def test_a_trace_is_refused_if_only_edges_or_order_differ() -> None:
    old = make("a-c b-c", "c")
    trace = await execute(old, Query(text="q"), ScriptedModel(lambda request: "x"))
    for new in (make("a-c b-c a-b", "c"), make("a-c b-c", "c", names="bac")):
        with pytest.raises(TraceMismatch, match="edges, output, answer rule or order of nodes"):
            new.check_trace(trace)


async def test_outputs_are_never_put_on_other_nodes_by_position() -> None:
    def two(first: str, second: str) -> Workflow:
        return Workflow(nodes=agents(first, second), edges=((first, second),), output=second)

    trace = await execute(two("a", "b"), Query(text="q"), ScriptedModel(lambda request: "x"))
    with pytest.raises(TraceMismatch, match="node 'b' is gone"):
        two("a", "c").check_trace(trace)


# --- files -----------------------------------------------------------------------------------

FILE = """
name = "desk"
description = "Two colleagues."
output = "desk"
answer = "answer_line"
edges = [["routes", "desk"], ["count", "desk"]]

[model]
temperature = 0.5
max_tokens = 24

[[nodes]]
id = "routes"
role = "You look up routes."
subtask = "Where?"
abstention_phrase = "not found"
tools = ["look_up"]
documents = ["plain", { title = "T", text = "written" }, { file = "papers/routes.txt" }]

[nodes.model]
max_tokens = 8

[[nodes]]
id = "count"
kind = "function"
call = "shout"
version = "3"

[[nodes]]
id = "desk"
role = "You answer."
needs = "all"
"""


def write(folder: Path, text: str | bytes = FILE) -> Path:
    (folder / "papers").mkdir(exist_ok=True)
    (folder / "papers" / "routes.txt").write_text("from a file\n")
    path = folder / "workflow.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def load(folder: Path, text: str | bytes = FILE) -> Workflow:
    return load_workflow(write(folder, text), functions={"shout": shout}, tools=[look_up])


def test_a_file_and_python_give_the_same_workflow(tmp_path: Path) -> None:
    short = ModelSettings(temperature=0.5, max_tokens=8)
    documents = (
        Document(text="plain"),
        Document(title="T", text="written"),
        Document(text="from a file"),
    )
    written = Workflow(
        name="desk",
        description="Two colleagues.",
        nodes=(
            Agent(
                id="routes",
                role="You look up routes.",
                subtask="Where?",
                abstention_phrase="not found",
                tools=("look_up",),
                documents=documents,
                model=short,
            ),
            Function(id="count", call=shout, version="3"),
            Agent(
                id="desk",
                role="You answer.",
                needs="all",
                model=ModelSettings(temperature=0.5, max_tokens=24),
            ),
        ),
        edges=(("routes", "desk"), ("count", "desk")),
        output="desk",
        answer="answer_line",
        tools=(look_up,),
    )
    loaded = load(tmp_path)
    assert loaded == written
    assert loaded.fingerprint == written.fingerprint


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('output = "desk"', 'output = "desk"\ncolour = 1', "unknown key 'colour'"),
        ("temperature = 0.5", "temprature = 0.5", "unknown key 'model.temprature'"),
        ('subtask = "Where?"', 'task = "W"', r"nodes\[0\] 'routes': unknown key 'task'"),
        ("max_tokens = 8", "max_token = 8", r"'routes': unknown key 'model.max_token'"),
        ('title = "T",', 'titel = "T",', r"nodes\[0\] 'routes': .*titel"),
        ('version = "3"', 'role = "x"', r"nodes\[1\] 'count': unknown key 'role'"),
        ('name = "desk"', "name = 3", "name: Input should be a valid string"),
        ('name = "desk"', "", "key 'name' is missing"),
        ('output = "desk"\n', "", "key 'output' is missing"),
        ('id = "count"', "", r"nodes\[1\] '\(no id\)': key 'id' is missing"),
        ('id = "count"', "id = 3", r"nodes\[1\] 3: id: Input should be a valid string"),
        ('call = "shout"', "", r"nodes\[1\] 'count': key 'call' is missing"),
        ('call = "shout"', 'call = "os.system"', "'count': missing function 'os.system'; .* shout"),
        ('tools = ["look_up"]', 'tools = ["search"]', "node 'routes' names missing tool 'search'"),
        ('tools = ["look_up"]', 'tools = "look_up"', r"'routes': tools: Input should be"),
        ('kind = "function"', 'kind = "tool"', r"nodes\[1\] 'count': kind 'tool'; .*'agent' and"),
        ('kind = "function"', "kind = [1]", r"nodes\[1\] 'count': kind \[1\]"),
        ("max_tokens = 24", "max_tokens = 0", "model.max_tokens: .*greater than or equal to 1"),
        ("[model]\ntemperature = 0.5\nmax_tokens = 24", "model = 3", "model: Input should be"),
        ("[nodes.model]\nmax_tokens = 8", 'model = "big"', r"'routes': model: Input should be"),
        ('["count", "desk"]]', '["count"]]', r"edges\.1"),
        ('["count", "desk"]]', '["count", 3]]', r"edges\.1\.1: Input should be a valid string"),
        ('["count", "desk"]]', '["count", "dest"]]', r"edges\[1\] .*unknown node 'dest'"),
        ('["count", "desk"]]', '["count", "desk"], ["desk", "routes"]]', "cycle: "),
        ('needs = "all"', 'needs = "some"', r"nodes\[2\] 'desk': needs: Input should be"),
        ('id = "desk"', 'id = "a desk"', r"nodes\[2\]: id 'a desk' is not a letter"),
        ('answer = "answer_line"', 'answer = "best"', "answer: Input should be"),
        ("papers/routes.txt", "papers/none.txt", "document 'papers/none.txt': No such file"),
        ("papers/routes.txt", "papers", "document 'papers': Is a directory"),
        (
            "papers/routes.txt",
            "../secret.txt",
            r"'routes': document '\.\./secret.txt' lies outside",
        ),
        ("papers/routes.txt", "/etc/hostname", "document '/etc/hostname' lies outside"),
        ("papers/routes.txt", "a\\u0000b", "'routes': document .*null"),
        ("papers/routes.txt", "workflow.link", "document 'workflow.link' lies outside"),
        ("papers/routes.txt", "loop", "'routes': document 'loop'"),
        ('title = "T",', 'file = "x",', "a document has either a text or a file"),
    ],
)
def test_a_file_that_is_no_workflow_is_refused_by_file_node_and_key(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    folder = tmp_path / "inner"
    folder.mkdir()
    (tmp_path / "secret.txt").write_text("secret")
    (folder / "workflow.link").symlink_to(tmp_path / "secret.txt")
    (folder / "loop").symlink_to(folder / "loop")
    assert FILE.count(old) >= 1
    with pytest.raises(WorkflowError, match=message) as caught:
        load(folder, FILE.replace(old, new, 1))
    assert str(folder / "workflow.toml") in str(caught.value)
    assert "secret\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"name = \xff", "not UTF-8"),
        (b"name = ", "not TOML"),
        (b"a = " + b"[" * 100_000, "not TOML"),
        (b"", "is missing"),
        (b'name = "n"\noutput = "a"', r"no \[\[nodes\]\] table"),
        (b'name = "n"\noutput = "a"\nnodes = 3', r"no \[\[nodes\]\] table"),
        (b'name = "n"\noutput = "a"\nnodes = [3]', r"no \[\[nodes\]\] table"),
        (b'name = "n"\noutput = "a"\nnodes = []', "workflow 'n' has no nodes"),
    ],
)
def test_a_file_that_can_not_be_read_is_refused(tmp_path: Path, content, message) -> None:
    with pytest.raises(WorkflowError, match=message) as caught:
        load(tmp_path, content)
    assert "workflow.toml" in str(caught.value)


def test_a_file_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkflowError, match=r"none\.toml: No such file"):
        load_workflow(tmp_path / "none.toml")


def test_a_document_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path)
    (tmp_path / "papers" / "routes.txt").write_bytes(b"ok \xff")
    with pytest.raises(WorkflowError, match=r"'routes': document .* is not UTF-8 \(byte 3\)"):
        load_workflow(path, functions={"shout": shout}, tools=[look_up])


def test_opening_a_file_runs_no_code_that_it_names(tmp_path: Path) -> None:
    with pytest.raises(WorkflowError, match="missing function 'shout'; none was handed in"):
        load_workflow(write(tmp_path), tools=[look_up])


def fits(value: Any, schema: dict[str, Any], root: dict[str, Any]) -> bool:
    """Whether a value fits a JSON Schema, as far as workflow files use the language."""
    if "$ref" in schema:
        return fits(value, root["$defs"][schema["$ref"].removeprefix("#/$defs/")], root)
    for word in ("anyOf", "oneOf"):
        if word in schema and not any(fits(value, option, root) for option in schema[word]):
            return False
    kinds = {
        "object": dict,
        "array": list,
        "string": str,
        "integer": int,
        "number": (int, float),
        "boolean": bool,
        "null": type(None),
    }
    if "type" in schema and not isinstance(value, kinds[schema["type"]]):
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    if "const" in schema and value != schema["const"]:
        return False
    if isinstance(value, list):
        firsts = schema.get("prefixItems", [])
        pairs = [*zip(value, firsts, strict=False)]
        if "items" in schema:
            pairs += [(item, schema["items"]) for item in value[len(firsts) :]]
        most, least = schema.get("maxItems", len(value)), schema.get("minItems", 0)
        return least <= len(value) <= most and all(fits(v, s, root) for v, s in pairs)
    if isinstance(value, dict):
        known = schema.get("properties", {})
        if schema.get("additionalProperties") is False and not value.keys() <= known.keys():
            return False
        needed = set(schema.get("required", ()))
        return needed <= value.keys() and all(
            fits(v, known[k], root) for k, v in value.items() if k in known
        )
    return True


def test_the_schema_accepts_the_sample_and_refuses_unknown_keys(tmp_path: Path) -> None:
    import tomllib

    splice.sample.write_sample(tmp_path / "sample")
    path = tmp_path / "sample" / "workflow.toml"
    raw = tomllib.loads(path.read_text("utf-8"))
    schema = workflow_schema()
    assert fits(raw, schema, schema)
    assert fits(tomllib.loads(FILE), schema, schema)
    assert not fits(raw | {"colour": 1}, schema, schema)
    assert not fits(raw | {"edges": [["a"]]}, schema, schema)
    wrong = [*raw["nodes"][:-1], raw["nodes"][-1] | {"task": "x"}]
    assert not fits(raw | {"nodes": wrong}, schema, schema)
    assert load_workflow(path).plan.order[-1] == "desk"


def test_a_changed_workflow_keeps_nothing_that_was_derived_from_the_old_one() -> None:
    old = Workflow(
        nodes=(Agent(id="a", role="A."), Agent(id="b", role="B.")),
        edges=(("a", "b"),),
        output="b",
    )
    seen = old.by_id, old.fingerprint, old.agents, old.candidate_edges
    new = old.changed(
        nodes=(*old.nodes, Agent(id="c", role="C.")), edges=(("a", "c"), ("b", "c")), output="c"
    )
    assert set(new.by_id) == {"a", "b", "c"}
    assert new.fingerprint != old.fingerprint
    assert [(e.source, e.receiver) for e in new.candidate_edges] == [("a", "b")]
    assert (old.by_id, old.fingerprint, old.agents, old.candidate_edges) == seen
    assert new.description == old.description
    with pytest.raises(WorkflowError, match="cycle"):
        old.changed(edges=(("a", "b"), ("b", "a")))
