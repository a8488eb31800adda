"""The trace store: nothing written is lost, nothing is written twice, no secret gets in."""

import errno
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from soon import soon

import splice
from splice.errors import StoreError
from splice.lines import LineFile
from splice.prompts import quote
from splice.records import (
    SCHEMA_VERSION,
    Abstention,
    CallRecord,
    CandidateEdge,
    ChatMessage,
    Decision,
    Diagnosis,
    Document,
    EdgeScore,
    Evidence,
    Gap,
    GapItem,
    Likelihoods,
    MessageLine,
    ModelIdentity,
    NodeFailure,
    NodeRun,
    Query,
    Receipt,
    RepairResult,
    Span,
    SpliceMessage,
    ToolCall,
    ToolRequest,
    Trace,
    Trial,
    Usage,
    digest,
)
from splice.redact import Redactor
from splice.store import Damage, TraceStore, read_store

ROOT = str(Path(splice.__file__).parents[1])
EDGE = CandidateEdge(source="a", receiver="b", kind="parallel_branch")


def make_run(node: str, output: str, outputs: dict[str, str] | None = None, **more) -> NodeRun:
    """A function node's run that read `outputs` of its parents."""
    blocks = ["Question:\n> Which harbour is the oldest?"]
    blocks += [f"From {parent}:\n{quote(text)}" for parent, text in (outputs or {}).items()]
    values = {
        "node": node,
        "status": "ok",
        "output": output,
        "input": (ChatMessage(role="user", content="\n\n".join(blocks)),),
        "expected": tuple(outputs or ()),
        "received": tuple(outputs or ()),
        "key": digest(f"{node} {output} {outputs}"),
    }
    return NodeRun(**values | more)


def make_trace(runs: Sequence[NodeRun], **more) -> Trace:
    values = {
        "query": Query(text="Which harbour is the oldest?", id="q"),
        "workflow": "harbours",
        "fingerprint": digest("harbours"),
        "node_fingerprints": {run.node: digest(run.node) for run in runs},
        "node_runs": tuple(runs),
        "answer": runs[-1].output,
        "engine_version": "0.1.0",
    }
    return Trace(**values | more)


def text_of(rng: random.Random, n_bytes: int) -> str:
    """Words in lines of about eighty characters."""
    lines = []
    while sum(map(len, lines)) < n_bytes:
        lines.append(" ".join(f"{rng.getrandbits(40):x}" for _ in range(8)))
    return "\n".join(lines)[:n_bytes]


def fan_trace(seed: int) -> Trace:
    """One source, eight workers and a sink, with 2 KiB of output each."""
    rng = random.Random(seed)
    workers = [f"worker_{i}" for i in range(8)]
    outputs: dict[str, str] = {}
    runs = []
    for node, parents in [("source", []), *((w, ["source"]) for w in workers), ("sink", workers)]:
        given = {parent: outputs[parent] for parent in parents}
        outputs[node] = text_of(rng, 2048)
        times = {"started_s": rng.random(), "elapsed_s": rng.random()}
        runs.append(make_run(node, outputs[node], given, **times))
    query = Query(text=f"Which harbour is the oldest in country {seed}?", id=f"q{seed}")
    return make_trace(runs, query=query, elapsed_s=rng.random())


def every_status() -> Trace:
    """A trace with every status, tool calls and awkward texts."""
    runs = [
        make_run("plain", "One line.\r\nAnother\twith tab,\x0b breaks \u2028 and \x00 NUL."),
        make_run(
            "agent",
            "Grüße, 世界 🌍. Half a character: \ud83d, and two halves side by side: \ud83d\ude00 here.",
            {"plain": "One line.\nAnother with tab, < |im_end|> and all the rest of it."},
            status="ok",
            input=(
                ChatMessage(role="system", content="You find harbours.\nLines are material."),
                ChatMessage(role="user", content="Question:\n> Where?\n\n> \n> and > what\n>x\n> "),
                ChatMessage(
                    role="assistant",
                    content="",
                    tool_requests=(ToolRequest(id="1", name="search", arguments="{bad"),),
                ),
                ChatMessage(role="tool", content="> quoted", tool_request_id="1"),
            ),
            tool_calls=(
                ToolCall(
                    name="search", arguments='{"q":1}', result="nothing " * 20, effects="read"
                ),
                ToolCall(name="gone", arguments="{bad", result="", outcome="unknown_tool"),
            ),
            usage=Usage(prompt_tokens=10, completion_tokens=3, cached_tokens=0),
            model=ModelIdentity(name="m", provider="local", digest="ab" * 32),
            raw="raw \ud800 text",
            rollout=3,
        ),
        make_run(
            "careful",
            "abstained: ...",
            status="abstained",
            abstention=Abstention(category="Insufficient Input", rationale="No map was given."),
            expected=("agent", "plain"),
            received=("agent",),
        ),
        NodeRun(
            node="broken",
            status="failed",
            failure=NodeFailure(kind="timeout", message="not finished after 2 s"),
            expected=("careful",),
            key="k",
        ),
        NodeRun(node="held", status="withheld", output=None, started_s=1.5, elapsed_s=0.25),
        NodeRun(node="later", status="skipped", expected=("broken",), received=()),
    ]
    query = Query(
        text="Where?",
        id="q-1",
        context={"agent": (Document(text="private " * 10, title="map"), "short"), "$": ("odd",)},
        subtasks={"agent": "look"},
    )
    call = CallRecord(stage="run", node="agent", model="m", outcome="retried", status=429)
    return make_trace(
        runs,
        query=query,
        answer=None,
        stop_reason="run_timeout after 2 s",
        calls=(call, CallRecord(stage="run", model="m", outcome="ok", cost=0.25, elapsed_s=1.0)),
        rollout=3,
        elapsed_s=2.0,
        engine_version="0.0.7",
    )


def make_result(base: Trace | None = None, candidate: Trace | None = None) -> RepairResult:
    call = CallRecord(stage="run", model="m", outcome="ok", cost=0.5)
    base = base or fan_trace(1)
    base = base.model_copy(update={"calls": (call, call)})
    text = "The harbour of Byblos is older than that of Jaffa by some centuries."
    span = Span(origin="output", start=0, end=len(text), text=text)
    message = SpliceMessage(
        source="a",
        receiver="b",
        key=MessageLine(text=text, spans=(span,), item="Byblos"),
        not_found=("Tyre",),
        writer="extractive",
    )
    numbers = {
        name: 0.5 if field.annotation is float else False if field.annotation is bool else 1
        for name, field in Evidence.model_fields.items()
    }
    extra = CallRecord(stage="trial", node="b", model="m", outcome="ok", cost=0.25)
    score = EdgeScore(edge=EDGE, p_decisive=0.5, features={"$": 1.0, "overlap": 0.25}, reason="r")
    trial_trace = candidate or base.model_copy(update={"answer": "Byblos", "calls": (extra,)})
    return RepairResult(
        query=base.query,
        answer="Byblos",
        base=base,
        diagnosis=Diagnosis(
            base_score=0.4, base_reasons=("short",), edges=(score,), admission="headroom"
        ),
        edge=score,
        gap=Gap(edge=EDGE, items=(GapItem(text="Byblos", named_in="query", is_held=True),)),
        message=message,
        trial=Trial(
            message=message,
            trace=trial_trace,
            receipt=(
                Receipt(node="source", action="reused", reason="input_unchanged"),
                Receipt(node="sink", action="rerun", reason="input_changed", changed=("worker_1",)),
            ),
        ),
        evidence=Evidence(**numbers | {"survival": (0.5, 0.25)}),
        decision=Decision(
            action="adopt",
            reason="better",
            base_score=0.4,
            likelihoods=Likelihoods(beneficial=0.5, neutral=0.25, harmful=0.25),
            weighting="headroom",
            gain_side=0.3,
            loss_side=0.1,
        ),
        stop_reason="decided",
        calls=(call, call, extra),
    )


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def kinds_of(path: Path) -> list[object]:
    return ["run" if "run" in line else line["kind"] for line in lines_of(path)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "traces.jsonl"


@pytest.mark.parametrize("trace", [every_status(), fan_trace(0)], ids=["statuses", "fan"])
def test_a_trace_is_read_back_as_it_was_written(path: Path, trace: Trace) -> None:
    with TraceStore(path) as store:
        id = store.put_trace(trace)
        assert store.get(id) == trace
    contents = read_store(path)
    assert contents.traces == {id: trace}
    assert tuple(contents.node_runs.values()) == trace.node_runs
    assert contents.damage == ()
    path.read_bytes().decode("utf-8")


@pytest.mark.parametrize("stops_early", [False, True])
def test_a_result_is_read_back_as_it_was_written(path: Path, stops_early: bool) -> None:
    result = make_result()
    if stops_early:
        nothing = dict.fromkeys(("edge", "gap", "message", "trial", "evidence"))
        result = result.model_copy(update={**nothing, "calls": (), "stop_reason": "no_edge"})
    with TraceStore(path) as store:
        id = store.put_result(result)
    assert read_store(path).results == {id: result}


def test_ids_are_the_same_in_another_store_and_after_reading(tmp_path: Path) -> None:
    result = make_result()
    with TraceStore(tmp_path / "a") as a, TraceStore(tmp_path / "b") as b:
        b.put_trace(every_status())
        id = a.put_result(result)
        assert b.put_result(result) == id
        assert len(id) == 32
        again = a.results()[id]
        assert a.put_result(again) == id
        assert [a.put_node_run(run) for run in result.base.node_runs] == list(a.node_runs())


@pytest.mark.slow
def test_ten_megabytes_of_output_are_written_once(path: Path) -> None:
    long = text_of(random.Random(5), 10_000) * 1000
    runs = [make_run("a", long), make_run("b", long + "!", {"a": long}), make_run("c", long)]
    trace = make_trace(runs, answer=long)
    with TraceStore(path, redactor=None) as store:
        id = store.put_trace(trace)
    assert path.stat().st_size < 2.1 * len(long)
    assert read_store(path).traces[id] == trace


TEXTS = st.lists(
    st.sampled_from(
        [
            "> ",
            ">",
            "\n",
            "\r\n",
            " ",
            "\u2003",
            "From a:\n",
            "x" * 23,
            "x" * 24,
            "\ud83d",
            "\ude00",
            "\x7f",
            "é",
            "$",
        ]
    ),
    max_size=16,
).map("".join)


@settings(deadline=None, max_examples=200)
@given(outputs=st.lists(TEXTS, min_size=1, max_size=4), frame=TEXTS)
def test_any_text_is_read_back_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, outputs: list[str], frame: str
) -> None:
    path = tmp_path_factory.mktemp("texts") / "store"
    rendered = frame.join(["> " + output.replace("\n", "\n> ") for output in outputs])
    runs = [NodeRun(node=f"n{i}", status="ok", output=text) for i, text in enumerate(outputs)]
    for content in (rendered, frame + rendered, rendered):
        runs.append(
            NodeRun(
                node="reader",
                status="ok",
                output=content,
                input=(ChatMessage(role="user", content=content),),
                raw=frame,
            )
        )
    query = Query(text=frame, context={"$": (rendered,)})
    trace = make_trace(runs, query=query, answer=outputs[-1].strip())
    with TraceStore(path, redactor=None) as store:
        id = store.put_trace(trace)
    contents = read_store(path)
    assert contents.damage == ()
    assert contents.traces[id] == trace


def test_the_same_content_is_written_once(path: Path) -> None:
    trace = fan_trace(3)
    with TraceStore(path) as store:
        id = store.put_trace(trace)
        size = path.stat().st_size
        assert store.put_trace(trace) == id
        assert [store.put_node_run(run) for run in trace.node_runs] == list(store.node_runs())
    with TraceStore(path) as store:
        assert store.put_trace(trace) == id
    assert path.stat().st_size == size


def test_times_are_no_part_of_a_node_run_but_a_trace_keeps_its_own(path: Path) -> None:
    first = make_run("a", "found", started_s=0.5, elapsed_s=1.0)
    later = first.model_copy(update={"started_s": 7.0, "elapsed_s": 2.0})
    with TraceStore(path) as store:
        id = store.put_node_run(first)
        assert store.put_node_run(later) == id
        trace = make_trace([later])
        trace_id = store.put_trace(trace)
    contents = read_store(path)
    assert contents.node_runs == {id: first}
    assert contents.traces[trace_id] == trace


def test_a_run_that_is_put_again_has_the_same_id_whatever_else_has_its_key(path: Path) -> None:
    secret = "sk-abcdefghijklmnopqrstuvwx"
    runs = [
        make_run("a", "first", key="k"),
        make_run("a", "second", key="k"),
        make_run("b", "asked", key="s", input=(ChatMessage(role="user", content=secret),)),
        make_run("c", "no key", key=None),
    ]
    with TraceStore(path) as store:
        ids = [store.put_node_run(run) for run in runs]
        assert len(set(ids)) == 4
        assert [store.put_node_run(run) for run in runs] == ids
    with TraceStore(path) as store:
        assert [store.put_node_run(run) for run in runs] == ids
        assert [store.put_node_run(run) for run in store.memo().values()] == [ids[0], ids[2]]
    assert kinds_of(path).count("run") == 4


def test_a_trial_adds_only_the_node_runs_that_changed(path: Path) -> None:
    result = make_result()
    assert result.trial is not None
    changed = make_run("sink", "Byblos, as worker_1 was told. " * 50)
    runs = (*result.base.node_runs[:-1], changed)
    trial = result.trial.trace.model_copy(update={"node_runs": runs, "answer": changed.output})
    with TraceStore(path) as store:
        store.put_trace(result.base)
        n_lines, size = len(kinds_of(path)), path.stat().st_size
        store.put_trace(trial)
    assert kinds_of(path)[n_lines:] == ["run", "trace"]
    assert changed.output is not None
    assert path.stat().st_size - size < len(changed.output) + 1000


def test_a_result_does_not_repeat_its_traces(path: Path) -> None:
    result = make_result()
    with TraceStore(path) as store:
        store.put_trace(result.base)
        n_lines = len(kinds_of(path))
        store.put_result(result)
    assert kinds_of(path)[n_lines:] == ["trace", "result"]


def test_system_prompts_and_documents_are_written_once(path: Path) -> None:
    system, document = "You read timetables. " * 100, "Ferry at 8:15, then at 9:40. " * 100
    messages = (
        ChatMessage(role="system", content=system),
        ChatMessage(role="user", content=f"Your documents:\n{quote(document)}\n\nYour task: read"),
    )
    runs = [make_run(node, f"answer of {node}", input=messages) for node in ("a", "b", "c")]
    query = Query(text="When?", context={"a": (document,), "b": (document,)})
    with TraceStore(path) as store:
        store.put_trace(make_trace(runs, query=query))
    text = path.read_text()
    assert text.count("You read timetables.") == 100
    assert text.count("Ferry at 8:15") == 100


def test_an_output_that_quotes_something_is_still_referred_to_as_a_whole(path: Path) -> None:
    output = "He wrote:\n> the ferry does not leave on Sundays\nand nothing else about Sundays."
    with TraceStore(path) as store:
        store.put_node_run(make_run("a", output))
        store.put_node_run(make_run("b", "fine", {"a": output}))
    assert path.read_text().count("nothing else about Sundays") == 1


@pytest.mark.parametrize("output", ["{}\n", "\r\n\t {}", "> {} \n\n"])
def test_an_answer_that_is_an_output_without_the_blanks_around_it_is_not_written_again(
    path: Path, output: str
) -> None:
    run = make_run("a", output.format("The harbour of Byblos is the oldest of them."))
    assert run.output is not None
    reader = make_run("b", "fine", {"a": run.output.strip()})
    trace = make_trace([run, reader], answer=run.output.strip())
    with TraceStore(path) as store:
        id = store.put_trace(trace)
    assert path.read_text().count("The harbour of Byblos") == 1
    assert read_store(path).traces == {id: trace}


def test_a_trace_takes_little_more_than_its_outputs(path: Path) -> None:
    traces = [fan_trace(seed) for seed in range(20)]
    outputs = [run.output or "" for trace in traces for run in trace.node_runs]
    payload = sum(len(output.encode()) for output in outputs)
    assert payload == 20 * 10 * 2048
    with TraceStore(path) as store:
        for trace in traces:
            for run in trace.node_runs:
                store.put_node_run(run)
            store.put_trace(trace)
    assert list(read_store(path).traces.values()) == traces
    assert path.stat().st_size <= 1.15 * payload


def test_two_texts_whose_digests_begin_alike_are_told_apart(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("splice.store._SHORT", 1)
    traces = [fan_trace(seed) for seed in range(5)]
    with TraceStore(path) as store:
        for trace in traces:
            store.put_trace(trace)
    with TraceStore(path) as store:
        assert list(store.traces().values()) == traces
        assert len(store.node_runs()) == 50


def test_the_memo_holds_the_first_usable_run_of_each_key(path: Path) -> None:
    first, second = make_run("a", "first", key="k"), make_run("a", "second", key="k")
    failed = NodeRun(node="b", status="failed", key="f")
    abstained = make_run("c", "can't", status="abstained", key="c")
    with TraceStore(path) as store:
        for run in (first, second, failed, abstained, make_run("d", "no key", key=None)):
            store.put_node_run(run)
        assert store.memo() == {"k": first, "c": abstained}
    assert read_store(path).memo == {"k": first, "c": abstained}


def test_a_run_whose_output_was_redacted_is_not_gone_on_from(path: Path) -> None:
    secret = "sk-abcdefghijklmnopqrstuvwx"
    told = make_run("a", f"the key is {secret}", key="told")
    asked = make_run("b", "fine", key="asked", input=(ChatMessage(role="user", content=secret),))
    with TraceStore(path) as store:
        store.put_node_run(told)
        store.put_node_run(asked)
        assert list(store.memo()) == ["asked"]
        assert len(store.node_runs()) == 2


def some_run(rng: random.Random) -> NodeRun:
    """A run of any status, perhaps with a key, the same as another, or with a secret in it."""
    text = rng.choice(["fine", "sk-abcdefghijklmnopqrstuvwx", "half \ud83d"])
    asked = rng.choice(["why?", "is sk-abcdefghijklmnopqrstuvwx right?\n"])
    return make_run(
        rng.choice("ab"),
        f"{text} {rng.randrange(10)}",
        status=rng.choice(["ok", "abstained", "failed"]),
        key=rng.choice([None, *"klmnop"]),
        input=(ChatMessage(role="user", content=asked),),
        usage=rng.choice([None, Usage(prompt_tokens=3)]),
        model=rng.choice([None, ModelIdentity(name="m", provider="scripted")]),
        started_s=rng.random(),
    )


@pytest.mark.parametrize("seed", range(10))
def test_the_memo_is_at_any_time_what_the_file_holds(path: Path, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(3):
        with TraceStore(path) as store:
            for _ in range(8):
                runs = [some_run(rng) for _ in range(3)]
                ids = [store.put_node_run(runs[0]), store.put_trace(make_trace(runs))]
                contents = read_store(path)
                assert list(store.memo().items()) == list(contents.memo.items())
                assert all(id in store for id in (*ids, *contents.node_runs))
                assert store.contents() == contents


def test_the_memo_is_a_live_view_that_nobody_can_change(path: Path) -> None:
    run = make_run("a", "one", key="k")
    with TraceStore(path) as store:
        memo = store.memo()
        before = store.contents().memo
        id = store.put_node_run(run)
        assert memo == {"k": run}
        assert before == {}
        assert id in store
        assert "nothing" not in store
        with pytest.raises(TypeError):
            memo["l"] = run  # type: ignore[index]


def test_a_batch_reads_the_store_when_it_is_opened_and_never_again(path: Path) -> None:
    calls = []

    async def find(given: splice.NodeInput) -> str:
        calls.append(given.query.text)
        return f"found {given.query.text}\n"

    workflow = splice.Workflow(
        nodes=(splice.Function(id="a", call=find), splice.Function(id="b", call=find)),
        edges=(("a", "b"),),
        output="b",
    )
    queries = ["one", "two", "three"]
    with TraceStore(path) as store:
        first = splice.run(workflow, splice.Query(text="one", id="q1"), store=store)
    with TraceStore(path) as store:
        # Without a name the file can still be written, but not be opened and read again.
        path.unlink()
        batch = splice.repair_many(workflow, queries, store=store)
        again = splice.repair_many(workflow, queries, store=store)
        assert sorted(calls) == sorted(queries * 2)
        assert batch.results[0].base.node_runs == first.node_runs
        for result, repeated in zip(batch.results, again.results, strict=True):
            assert repeated.base.node_runs == result.base.node_runs
        with pytest.raises(StoreError, match="can't be read"):
            store.traces()


def test_a_store_is_continued_where_it_was_left(path: Path) -> None:
    traces = [fan_trace(seed) for seed in range(3)]
    for trace in traces:
        with TraceStore(path) as store:
            assert store.recovered is None
            store.put_trace(trace)
    assert list(read_store(path).traces.values()) == traces
    assert kinds_of(path).count("header") == 1
    assert kinds_of(path).count("workflow") == 1


@pytest.mark.slow
def test_cut_at_any_byte_the_store_keeps_everything_before(path: Path, tmp_path: Path) -> None:
    run = make_run("ä", "Grüße aus Genua 🌍, lang genug für einen Verweis")
    late = make_run("b", "ja", {"ä": run.output or ""}, started_s=2.0)
    with TraceStore(path) as store:
        store.put_trace(make_trace([run, late]))
    whole = path.read_bytes()
    cut = tmp_path / "cut"
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for n_bytes in range(len(whole) + 1):
        cut.write_bytes(whole[:n_bytes])
        # A record is whole without its newline, too.
        n_whole = sum(end - 1 <= n_bytes for end in ends)
        start = max((end for end in ends if end <= n_bytes), default=0)
        is_torn = n_bytes > start and n_bytes + 1 not in ends
        contents = read_store(cut)
        n_records = len(contents.node_runs) + len(contents.traces)
        expected = [kind for kind in kinds_of(path)[:n_whole] if kind in ("run", "trace")]
        assert n_records == len(expected), n_bytes
        assert len(contents.damage) == is_torn
        if is_torn:
            [damage] = contents.damage
            n_before = sum(end <= n_bytes for end in ends)
            assert (damage.line, damage.offset) == (n_before + 1, start)
        with TraceStore(cut) as store:
            assert (store.recovered is not None) == (n_bytes not in (0, *ends))
            store.put_trace(make_trace([run, late]))
        assert cut.read_bytes() == whole


def test_a_torn_last_line_is_reported_when_it_is_cut_off(path: Path) -> None:
    with TraceStore(path) as store:
        store.put_node_run(make_run("a", "one"))
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write('{"run":"é'.encode()[:-1])
    with TraceStore(path) as store:
        assert store.recovered == Damage(
            line=3, offset=size, reason="the last line is incomplete; it was cut off"
        )
        assert len(store.node_runs()) == 1
        assert store.contents().damage == ()
    assert path.stat().st_size == size


WRITER = """
import sys
from splice.records import NodeRun, Query, Trace
from splice.store import TraceStore

with TraceStore(sys.argv[1]) as store:
    for i in range(100_000):
        run = NodeRun(node="a", status="ok", output=f"output {i} " * (i % 700))
        print(store.put_node_run(run), flush=True)
        if i % 5 == 0:
            trace = Trace(query=Query(text=f"query {i}"), workflow="w", fingerprint="f",
                          node_runs=(run,), answer=None, engine_version="0.1.0")
            print(store.put_trace(trace), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_a_killed_writer_loses_nothing_that_it_finished(path: Path, seed: int) -> None:
    rng = random.Random(seed)
    environ = {**os.environ, "PYTHONPATH": ROOT}
    command = [sys.executable, "-c", WRITER, str(path)]
    told: set[str] = set()
    for _ in range(2):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as writer:
            assert writer.stdout is not None
            for _ in range(rng.randrange(1, 400)):
                told.add(writer.stdout.readline().strip())
            time.sleep(rng.random() / 100)
            writer.send_signal(signal.SIGKILL)
            # The last line may have been cut in the pipe.
            told.update(line for line in writer.stdout.read().split("\n")[:-1])
        contents = read_store(path)
        assert told <= {*contents.node_runs, *contents.traces}
        assert len(contents.damage) <= 1
    with TraceStore(path) as store:
        assert store.contents().damage == ()
        assert told <= {*store.node_runs(), *store.traces()}


LIMITED_WRITER = """
import resource, sys
from splice.errors import StoreError
from splice.lines import LineFile
from splice.records import NodeRun
from splice.store import TraceStore

_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
with TraceStore(sys.argv[1]) as store:
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, most))
    try:
        for i in range(100):
            store.put_node_run(NodeRun(node="a", status="ok", output=f"{i} " * 200))
    except StoreError as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    store.put_node_run(NodeRun(node="b", status="ok", output=f"{i} " * 200))
"""


def test_a_full_disk_stops_the_writer_and_spoils_nothing(path: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": ROOT}
    command = [sys.executable, "-c", LIMITED_WRITER, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=True)
    assert str(path) in done.stdout
    assert "every record before is safe" in done.stdout
    contents = read_store(path)
    assert contents.damage == ()
    runs = list(contents.node_runs.values())
    assert [run.node for run in runs] == ["a"] * (len(runs) - 1) + ["b"]
    assert len(runs) > 5


class _FailingFile(LineFile):
    """Writes a few bytes at a time, and fails after so many."""

    left = 1_000_000
    can_cut = True

    def _write_some(self, file: int, data: memoryview) -> int:
        if self.left <= 0:
            raise OSError(errno.EIO, "Input/output error")
        n_bytes = os.write(file, data[: min(7, self.left)])
        type(self).left -= n_bytes
        return n_bytes

    def cut(self) -> None:
        if not self.can_cut:
            raise StoreError("can't cut")
        super().cut()


@pytest.mark.parametrize("can_cut", [True, False])
def test_a_partial_line_is_cut_off_before_the_next_is_written(
    path: Path, can_cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(_FailingFile):
        pass

    monkeypatch.setattr("splice.store.LineFile", Failing)
    long = "a text that is long enough to be referred to\n"
    with TraceStore(path) as store:
        first = store.put_node_run(make_run("a", "one", key="a"))
        Failing.left, Failing.can_cut = 20, can_cut
        with pytest.raises(StoreError, match="Input/output error; every record before is safe"):
            store.put_node_run(make_run("b", long))
        assert list(read_store(path).node_runs) == [first]
        assert list(store.memo()) == ["a"]
        Failing.left = 1_000_000
        if not can_cut:
            with pytest.raises(StoreError, match="can't cut"):
                store.put_node_run(make_run("b", long))
            Failing.can_cut = True
        # Nothing may refer to the text of the line that failed.
        second = store.put_node_run(make_run("c", long.strip(), {"b": long}))
    contents = read_store(path)
    assert list(contents.node_runs) == [first, second]
    assert contents.damage == ()


def test_with_sync_each_trace_reaches_the_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_size))
    with TraceStore(path, sync=True) as store:
        store.put_node_run(make_run("a", "one"))
        assert synced == []
        store.put_trace(fan_trace(0))
        store.put_result(make_result())
    assert len(synced) == 2
    assert synced[-1] == path.stat().st_size


def damage_line(path: Path, number: int, line: bytes) -> int:
    """Replace a line, and return its offset."""
    lines = path.read_bytes().splitlines(keepends=True)
    lines[number - 1] = line + b"\n"
    path.write_bytes(b"".join(lines))
    return sum(map(len, lines[: number - 1]))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"", "not JSON"),
        (b'{"run":"a', "not JSON"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[1, 2]", "not a JSON object"),
        (b'{"kind":"recipe"}', "unknown kind of record 'recipe'"),
        (b'{"kind":["run"]}', "TypeError"),
        (b'{"kind":"query"}', "not a query: text: Field required"),
        (b'{"kind":"run"}', "not a record: KeyError"),
        (b'{"run":"a","model":"0123456789"}', "refers to the model 0123456789, which"),
        (b'{"run":"a","output":{"$":["?0123456789"]}}', "unknown mark"),
        (b'{"run":"a","output":{"$":["@0123456789"]}}', "text 0123456789, which"),
        (b'{"run":"a","output":{"$":["+a\x7fb"]}}', "not JSON|not a record"),
        (b'{"run":"a","output":{"$":[3]}}', "not a record"),
        (b'{"run":"a","times":[1]}', "not a record"),
        (b'{"run":"a","rollout":' + b"9" * 5000 + b"}", "not a record"),
        (b'{"kind":"trace","query":"00","workflow":"00","node_runs":[]}', "not a|missing"),
        (b'{"run":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"run":' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"}", "nested|not a run"),
    ],
)
def test_a_damaged_line_is_reported_and_the_rest_is_read(
    path: Path, line: bytes, reason: str
) -> None:
    with TraceStore(path) as store:
        ids = [store.put_node_run(make_run(node, f"output of {node}")) for node in "abc"]
    offset = damage_line(path, 3, line)
    contents = read_store(path)
    assert list(contents.node_runs) == [ids[0], ids[2]]
    [damage] = contents.damage
    assert (damage.line, damage.offset) == (3, offset)
    assert any(part in damage.reason for part in reason.split("|")), damage.reason
    with TraceStore(path) as store:
        assert store.recovered is None
        assert store.put_node_run(make_run("b", "output of b")) == ids[1]
    assert set(read_store(path).node_runs) == set(ids)


def test_what_refers_to_a_damaged_line_is_reported_and_left_out(path: Path) -> None:
    run = NodeRun(node="other", status="ok", output="It shares nothing with the rest.")
    good = make_trace([run], query=Query(text="Another question"))
    with TraceStore(path) as store:
        store.put_result(make_result(base=fan_trace(1)))
        id = store.put_trace(good)
    source = kinds_of(path).index("run") + 1
    damage_line(path, source, b"garbage")
    contents = read_store(path)
    assert contents.results == {}
    assert contents.traces == {id: good}
    reasons = [damage.reason for damage in contents.damage]
    assert reasons[0].startswith("not JSON")
    assert all("which is missing" in reason for reason in reasons[1:])
    assert any("refers to the text" in reason for reason in reasons)
    assert any("refers to the trace" in reason for reason in reasons)


@pytest.mark.parametrize("mark", ["@", ">"])
def test_a_text_can_not_be_blown_up_without_end(
    path: Path, monkeypatch: pytest.MonkeyPatch, mark: str
) -> None:
    monkeypatch.setattr("splice.store._MOST_CHARS", 10_000)
    text = "x" * 1000
    bomb = {"run": "b", "output": {"$": [mark + digest(text)[:10]] * 1000}}
    with TraceStore(path) as store:
        store.put_node_run(make_run("a", text))
    with path.open("a") as file:
        file.write(json.dumps(bomb) + "\n")
    contents = read_store(path)
    assert len(contents.node_runs) == 1
    assert "more than 10,000 characters" in contents.damage[0].reason


@pytest.mark.parametrize("seed", range(30))
def test_bytes_changed_at_random_never_stop_the_reader(path: Path, seed: int) -> None:
    rng = random.Random(seed)
    with TraceStore(path) as store:
        store.put_result(make_result(base=every_status()))
    data = bytearray(path.read_bytes())
    header_end = data.index(b"\n") + 1
    for _ in range(rng.randrange(1, 30)):
        data[rng.randrange(header_end, len(data))] = rng.choice(b'\x00\n"{}[]:,$@>\\u9e\xff')
    path.write_bytes(data)
    contents = read_store(path)
    for trace in contents.traces.values():
        assert trace.node_runs
    with TraceStore(path) as store:
        store.put_trace(fan_trace(0))
    assert fan_trace(0) in read_store(path).traces.values()


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xfe\x00binary",
        b"{}\n",
        b'{"kind":"run"}\n',
        b"[]",
        b"hello\n",
        b'{"kind":"header","schema_version":"1","engine_version":"0"}\n',
        b'{"kind":"header","schema_version":0,"engine_version":"0"}\n',
        b"\n",
        b"[" * 100_000,
    ],
)
def test_a_file_that_is_no_store_is_refused_and_left_alone(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    for attempt in (read_store, TraceStore):
        with pytest.raises(StoreError, match=r"traces\.jsonl is no trace store: line 1"):
            attempt(path)
    assert path.read_bytes() == data


def test_a_store_of_a_newer_schema_is_refused(path: Path) -> None:
    header = {"kind": "header", "schema_version": SCHEMA_VERSION + 1, "engine_version": "9.1"}
    path.write_text(json.dumps(header) + "\n" + '{"half a li')
    for attempt in (read_store, TraceStore):
        with pytest.raises(
            StoreError, match=r"traces\.jsonl was begun by engine 9\.1 with schema 2"
        ):
            attempt(path)
    assert path.read_text().endswith('{"half a li')


def test_a_missing_file_is_refused_where_none_may_be_created(path: Path) -> None:
    with pytest.raises(
        StoreError, match=r"traces\.jsonl can't be opened for writing: No such file"
    ):
        TraceStore(path, create=False)
    with pytest.raises(StoreError, match=r"traces\.jsonl can't be read: No such file"):
        read_store(path)
    assert not path.exists()


def test_folders_and_pipes_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path, tmp_path / "pipe"):
        for attempt in (read_store, TraceStore):
            with pytest.raises(StoreError, match="is not a regular file"):
                attempt(place)


def test_a_second_writer_is_refused_until_the_first_is_done(path: Path) -> None:
    with TraceStore(path) as store:
        store.put_node_run(make_run("a", "one"))
        with pytest.raises(StoreError, match=r"traces\.jsonl is in use by another writer"):
            TraceStore(path)
        store.put_node_run(make_run("b", "two"))
        assert len(read_store(path).node_runs) == 2
    with TraceStore(path) as store:
        assert len(store.node_runs()) == 2


def test_a_closed_store_says_so(path: Path) -> None:
    store = TraceStore(path)
    store.close()
    store.close()
    with pytest.raises(StoreError, match="is closed"):
        store.put_node_run(make_run("a", "one"))


def test_an_unknown_id_is_an_error_that_names_it(path: Path) -> None:
    with TraceStore(path) as store, pytest.raises(StoreError, match="'nothing'"):
        store.get("nothing")


def test_threads_may_share_a_store(path: Path) -> None:
    traces = [fan_trace(seed) for seed in range(8)]
    with TraceStore(path) as store:
        threads = [threading.Thread(target=store.put_trace, args=(trace,)) for trace in traces]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(trace.query.id for trace in store.traces().values()) == [
            trace.query.id for trace in traces
        ]
    assert read_store(path).damage == ()


def with_secret(secret: str) -> RepairResult:
    """A result that holds a secret in every field that is free text."""
    call = ToolCall(name="login", arguments=json.dumps({"as": secret}), result=f"ok {secret}")
    failure = NodeFailure(kind="model", message=f"401 for {secret}")
    runs = [
        make_run("source", f"it is {secret}", tool_calls=(call,), raw=secret),
        make_run("sink", "fine", {"source": f"it is {secret}"}),
        NodeRun(node="late", status="failed", failure=failure),
    ]
    query = Query(text=f"why is {secret} wrong?", context={"source": (f"key {secret}",)})
    reason = CallRecord(stage="run", model="m", outcome="failed", reason=f"bad {secret}")
    result = make_result(base=make_trace(runs, query=query, stop_reason=secret))
    message = result.message
    assert message is not None
    return result.model_copy(
        update={
            "answer": secret,
            "calls": (*result.calls, reason),
            "message": message.model_copy(update={"focus": secret, "not_found": (secret,)}),
        }
    )


@pytest.mark.parametrize("secret", ["sk-proj-abcDEF0123456789xyz", "plain-value-of-a-variable"])
def test_secrets_do_not_reach_the_disk(path: Path, secret: str) -> None:
    redactor = Redactor({"SOME_API_KEY": "plain-value-of-a-variable"})
    with TraceStore(path, redactor=redactor) as store:
        id = store.put_result(with_secret(secret))
    text = path.read_text()
    assert secret not in text
    assert "[redacted]" in text
    contents = read_store(path)
    assert contents.damage == ()
    assert contents.results[id].answer == "[redacted]"
    with TraceStore(path, redactor=redactor) as store:
        assert store.put_result(with_secret(secret)) == id
        assert store.put_result(contents.results[id]) == id
    assert path.read_text() == text


def test_a_secret_that_is_a_word_of_the_format_spoils_no_record(path: Path) -> None:
    trace = every_status()
    with TraceStore(
        path, redactor=Redactor(secrets=["abstained", "plain", "timeout", "run"])
    ) as store:
        store.put_trace(trace)
    [read] = read_store(path).traces.values()
    assert [(run.node, run.status) for run in read.node_runs] == [
        (run.node, run.status) for run in trace.node_runs
    ]


def test_without_a_redactor_everything_is_kept(path: Path) -> None:
    result = with_secret("sk-proj-abcDEF0123456789xyz")
    with TraceStore(path, redactor=None) as store:
        id = store.put_result(result)
        assert store.results()[id] == result


@pytest.mark.slow
def test_thousands_of_traces_are_loaded_in_no_time(path: Path) -> None:
    def write(numbers: range) -> None:
        with TraceStore(path) as store:
            for i in numbers:
                runs = [make_run(node, f"{node} says {i}, at some length") for node in "ab"]
                store.put_trace(make_trace(runs, query=Query(text=f"query {i}", id=str(i))))

    write(range(2000))
    with soon():
        contents = read_store(path)
    assert len(contents.traces) == 2000
