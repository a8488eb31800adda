"""Every error that SPLICE raises.

    SpliceError
    ├── WorkflowError        a workflow is not one: cycle, unknown node, missing tool, ...
    │   └── TraceMismatch    a recorded trace belongs to another workflow
    ├── QueryError           a query does not fit its workflow
    ├── DataError            a data file is missing, malformed or holds what it should not
    ├── SettingsError        settings, models or prices that can't work together
    ├── PromptError          a prompt template and its values differ
    ├── ModelError           no usable answer from a model, after the client's own retries
    │   └── ScriptExhausted  a scripted model was asked more often than its script says
    ├── BudgetExceeded       a call would go over a budget in calls, tokens or money
    ├── WriteBlocked         a trial would need a new write by a tool
    ├── WeightsError         weights or learned parts can't be had or are not what was promised
    └── StoreError           a trace store can't be read or written

Set-up mistakes (the first five) are raised before the first paid call. What a model got wrong is
no error here: it is data, recorded in the node run with the raw text.
"""

from __future__ import annotations


class SpliceError(Exception):
    """Base of every error that SPLICE raises on purpose."""


class WorkflowError(SpliceError):
    """Raised if a workflow, or a file that holds one, can't be used as it stands."""


class TraceMismatch(WorkflowError):
    """Raised if a recorded trace belongs to a workflow other than the given one."""


class QueryError(SpliceError):
    """Raised if a query is empty or names a node that its workflow does not have."""


class DataError(SpliceError):
    """Raised if a data file can't be read; the message names file, line and field."""


class SettingsError(SpliceError):
    """Raised if settings, models or prices are missing or contradict each other."""


class PromptError(SpliceError):
    """Raised if the values given to a prompt template and its placeholders differ."""


class ModelError(SpliceError):
    """Raised if a model gave no usable answer after the client's own retries.

    Attributes:
        status: HTTP status of the last answer; None if there was none.
        reason: short machine-readable cause, such as `timeout` or `rate_limit`.
    """

    def __init__(self, message: str, *, reason: str = "error", status: int | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.status = status


class ScriptExhausted(ModelError):
    """Raised if a scripted model has no reply left for the node that asks."""


class BudgetExceeded(SpliceError):
    """Raised if a call would take a run over its budget; the call is not made."""


class WriteBlocked(SpliceError):
    """Raised if a trial needs a write that the base run did not make."""


class WeightsError(SpliceError):
    """Raised if weights can't be fetched, or differ from the pinned hash; the same for learned parts."""


class StoreError(SpliceError):
    """Raised if a trace store can't be opened, read or written."""
