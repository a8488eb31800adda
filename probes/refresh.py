"""Computing the numbers of a pool again, out of its traces: no model is asked.

A pool takes hours of model time, and a later version of the library may look at more. What is made
anew is all that follows from workflow and traces: diagnoses, features, process evidence. What
was run, asked, answered and scored stays as it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from probes.pool import Damage, Manifest, Shard, read_manifest, read_shards, shard_path
from probes.probing import edge_score
from probes.records import BaseRecord, ProbeRecord
from probes.rewriting import new_pool, require_empty, write_shard
from splice._version import __version__
from splice.diagnosis import diagnose
from splice.errors import SettingsError
from splice.features import query_features
from splice.line import evidence_of
from splice.queries import Split
from splice.records import Record, Trace, Trial, digest
from splice.store import read_store
from splice.trial import no_message
from splice.workflow import Workflow
from splice.workload import Workload


class Refreshed(Record):
    """What was written."""

    manifest: Manifest
    n_bases: int
    """Base records whose numbers were computed."""
    n_changed: int
    """Of these, those that another version of the workflow ran on: its fingerprint differs."""
    n_left_out: int
    """Records without a trace, which are not in the new pool."""
    damage: tuple[Damage, ...] = ()
    """Lines that are no records; they were left out."""


class _Asked(NamedTuple):
    """A question as its data has it."""

    query: str
    """Digest."""
    workflow: Workflow


def refresh(workloads: Mapping[Split, Workload], folder: str | Path, out: str | Path) -> Refreshed:
    """Write a pool again with the numbers that this version computes.

    Args:
        workloads: what the pool was generated from, by split.
        folder: of the pool.
        out: folder of the new pool; it must not exist, or be empty.

    Raises:
        SettingsError: the pool was merged, a question is not in the workloads or is another one
            there, or its workflow has other nodes or edges.
        StoreError: the pool can't be read, or the new one can't be written; there is none then.
    """
    folder, out = Path(folder), Path(out)
    require_empty(out)
    manifest = read_manifest(folder)
    if manifest.parts:
        raise SettingsError(f"{folder} was merged from other pools; refresh those, then merge them")
    work = _Refresh(folder, workloads)
    with new_pool(out, manifest.model_copy(update={"engine_version": __version__})) as new:
        for shard in read_shards(folder, work.damage):
            bases, probes = work.shard(shard)
            traces = shard_path(folder, "traces", shard.number)
            write_shard(new, shard.number, bases, probes, traces)
    return Refreshed(
        manifest=read_manifest(out),
        n_bases=work.n_bases,
        n_changed=work.n_changed,
        n_left_out=work.n_left_out,
        damage=tuple(work.damage),
    )


class _Refresh:
    """One pool with the questions that it was generated from."""

    def __init__(self, folder: Path, workloads: Mapping[Split, Workload]) -> None:
        self.damage: list[Damage] = []
        self.n_bases = self.n_changed = self.n_left_out = 0
        self._folder = folder
        self._asked = {
            (workload.name, example.query.id): _Asked(
                digest(example.query.model_dump_json()), workload.workflow_of(example)
            )
            for workload in workloads.values()
            for example in workload.examples
        }

    def shard(self, shard: Shard) -> tuple[list[BaseRecord], list[ProbeRecord]]:
        """The records of a shard, with new numbers."""
        path = shard_path(self._folder, "traces", shard.number)
        contents = read_store(path)
        self.damage += [
            Damage(file=path.name, line=line.line, reason=line.reason) for line in contents.damage
        ]
        bases: dict[str, BaseRecord] = {}
        workflows: dict[str, Workflow] = {}
        for id, base in shard.bases.items():
            if base.failure is not None:
                bases[id] = base
            elif (trace := contents.traces.get(base.trace or "")) is not None:
                workflows[id] = self._workflow(base, trace)
                bases[id] = self._base(base, workflows[id], trace)
        probes = []
        for probe in shard.probes.values():
            own = bases.get(probe.base)
            if own is None or (probe.trace is not None and probe.trace not in contents.traces):
                continue
            ran = contents.traces[own.trace or ""]
            tried = contents.traces.get(probe.trace or "")
            probes.append(_probe(probe, own, workflows[own.id], ran, tried))
        self.n_left_out += len(shard.bases) - len(bases) + len(shard.probes) - len(probes)
        return list(bases.values()), probes

    def _base(self, base: BaseRecord, workflow: Workflow, trace: Trace) -> BaseRecord:
        diagnosis = diagnose(workflow, trace)
        self.n_bases += 1
        self.n_changed += workflow.fingerprint != trace.fingerprint
        return base.model_copy(
            update={
                "diagnosis": diagnosis,
                "features": query_features(workflow, trace, diagnosis),
            }
        )

    def _workflow(self, base: BaseRecord, trace: Trace) -> Workflow:
        """The workflow of a question, checked.

        Raises:
            SettingsError: there is no such question, or its workflow has another shape.
        """
        where = f"question {base.query_id!r} of {base.workload} in {self._folder}"
        asked = self._asked.get((base.workload, base.query_id))
        if asked is None:
            raise SettingsError(f"{where} is not in the data; name all splits that the pool holds")
        if asked.query != base.query:
            raise SettingsError(f"{where} is another one in the data")
        parents = {run.node: run.expected for run in trace.node_runs}
        if parents != asked.workflow.plan.parents:
            raise SettingsError(f"{where} ran on a workflow with other nodes or edges")
        return asked.workflow


def _probe(
    probe: ProbeRecord, base: BaseRecord, workflow: Workflow, ran: Trace, tried: Trace | None
) -> ProbeRecord:
    scored = edge_score(base, workflow, ran, probe.edge)
    found: dict[str, object] = {"p_decisive": scored.p_decisive, "features": scored.features}
    if probe.evidence is not None and tried is not None:
        message = probe.message or no_message(probe.edge)
        trial = Trial(message=message, trace=tried, receipt=())
        found["evidence"] = evidence_of(workflow, ran, trial)
    return probe.model_copy(update=found)
