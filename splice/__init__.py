"""SPLICE: repair fixed workflows of LLM agents, query by query.

The public names are imported when they are first used, so that `splice --help` and a bare
`import splice` stay quick; the table below says where each of them lives.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from splice._version import __version__

if TYPE_CHECKING:
    from splice.api import (
        acoordinate,
        arepair,
        arepair_many,
        aresume,
        arun,
        coordinate,
        repair,
        repair_many,
        resume,
        run,
    )
    from splice.coordination import CoordinationSettings
    from splice.diagnosis import diagnose
    from splice.errors import (
        BudgetExceeded,
        DataError,
        ModelError,
        PromptError,
        QueryError,
        ScriptExhausted,
        SettingsError,
        SpliceError,
        StoreError,
        TraceMismatch,
        WeightsError,
        WorkflowError,
        WriteBlocked,
    )
    from splice.executor import NodeInput, RunSettings
    from splice.ledger import Budget
    from splice.line import RepairSettings
    from splice.message import MessageSettings
    from splice.models.cache import CachedModel
    from splice.models.endpoint import Endpoint
    from splice.models.limits import Limits
    from splice.models.local import LocalModel
    from splice.models.scripted import ScriptedModel
    from splice.models.spread import Spread
    from splice.queries import Case, load_cases
    from splice.records import (
        Abstention,
        Action,
        ClarifyingQuestion,
        CoordinationResult,
        Document,
        ModelSettings,
        NodeRun,
        Price,
        Query,
        RepairBatch,
        RepairResult,
        Trace,
    )
    from splice.selector import RuleSelector
    from splice.store import TraceStore
    from splice.tools import tool
    from splice.workflow import Agent, Function, Tool, Workflow, load_workflow
    from splice.workload import Example, Workload

_HOME = {
    "splice.api": (
        "acoordinate",
        "arepair",
        "arepair_many",
        "aresume",
        "arun",
        "coordinate",
        "repair",
        "repair_many",
        "resume",
        "run",
    ),
    "splice.coordination": ("CoordinationSettings",),
    "splice.diagnosis": ("diagnose",),
    "splice.errors": (
        "BudgetExceeded",
        "DataError",
        "ModelError",
        "PromptError",
        "QueryError",
        "ScriptExhausted",
        "SettingsError",
        "SpliceError",
        "StoreError",
        "TraceMismatch",
        "WeightsError",
        "WorkflowError",
        "WriteBlocked",
    ),
    "splice.executor": ("NodeInput", "RunSettings"),
    "splice.ledger": ("Budget",),
    "splice.line": ("RepairSettings",),
    "splice.message": ("MessageSettings",),
    "splice.models.cache": ("CachedModel",),
    "splice.models.endpoint": ("Endpoint",),
    "splice.models.limits": ("Limits",),
    "splice.models.local": ("LocalModel",),
    "splice.models.scripted": ("ScriptedModel",),
    "splice.models.spread": ("Spread",),
    "splice.queries": ("Case", "load_cases"),
    "splice.records": (
        "Abstention",
        "Action",
        "ClarifyingQuestion",
        "CoordinationResult",
        "Document",
        "ModelSettings",
        "NodeRun",
        "Price",
        "Query",
        "RepairBatch",
        "RepairResult",
        "Trace",
    ),
    "splice.selector": ("RuleSelector",),
    "splice.store": ("TraceStore",),
    "splice.tools": ("tool",),
    "splice.workflow": ("Agent", "Function", "Tool", "Workflow", "load_workflow"),
    "splice.workload": ("Example", "Workload"),
}
_MODULE = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "Abstention",
    "Action",
    "Agent",
    "Budget",
    "BudgetExceeded",
    "CachedModel",
    "Case",
    "ClarifyingQuestion",
    "CoordinationResult",
    "CoordinationSettings",
    "DataError",
    "Document",
    "Endpoint",
    "Example",
    "Function",
    "Limits",
    "LocalModel",
    "MessageSettings",
    "ModelError",
    "ModelSettings",
    "NodeInput",
    "NodeRun",
    "Price",
    "PromptError",
    "Query",
    "QueryError",
    "RepairBatch",
    "RepairResult",
    "RepairSettings",
    "RuleSelector",
    "RunSettings",
    "ScriptExhausted",
    "ScriptedModel",
    "SettingsError",
    "SpliceError",
    "Spread",
    "StoreError",
    "Tool",
    "Trace",
    "TraceMismatch",
    "TraceStore",
    "WeightsError",
    "Workflow",
    "WorkflowError",
    "Workload",
    "WriteBlocked",
    "__version__",
    "acoordinate",
    "arepair",
    "arepair_many",
    "aresume",
    "arun",
    "coordinate",
    "diagnose",
    "load_cases",
    "load_workflow",
    "repair",
    "repair_many",
    "resume",
    "run",
    "tool",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
