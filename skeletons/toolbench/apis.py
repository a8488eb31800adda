"""API documents as ToolBench names and describes them."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict

from skeletons.replay import Parameter
from splice.prompts import one_line, without_surrogates
from splice.records import Record

Text = Annotated[str, AfterValidator(without_surrogates)]

_TYPES = {"NUMBER": "number", "BOOLEAN": "boolean", "ARRAY": "array", "OBJECT": "object"}
_OTHER_TYPE = "string"

_RESERVED = frozenset({"from", "class", "return", "false", "true", "id", "and"})
"""Names that ToolBench writes as `is_...`, since it made Python functions of APIs."""

_LONGEST_NAME = 64


class Row(BaseModel):
    """A row of somebody else's file: keys that are not read here may be there."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class ParameterRow(Row):
    """An argument in an API document."""

    name: Text
    type: str = "STRING"
    description: Text | None = ""
    default: Any = ""


class ApiRow(Row):
    """An API document."""

    category_name: Text
    tool_name: Text
    api_name: Text
    api_description: Text | None = ""
    required_parameters: tuple[ParameterRow, ...] = ()
    optional_parameters: tuple[ParameterRow, ...] = ()


class Api(Record):
    """An API that is offered with a request."""

    place: tuple[str, ...]
    """Category, tool and API as the document names them; for recorded runs the function alone."""
    function: str
    """Name for the model."""
    description: str
    parameters: tuple[Parameter, ...]

    @property
    def label(self) -> str:
        """The place as one text, as `api_ids` spell it."""
        return "/".join(self.place)


def standard(name: str) -> str:
    """A name as ToolBench's files and functions spell it.

    The result holds no `/` and no `.`, so that it can't lead out of a folder.

    >>> standard("YTStream - Download YouTube Videos"), standard("/v1/list/"), standard("2nd")
    ('ytstream_download_youtube_videos', 'v1_list', 'get_2nd')
    """
    spelled = re.sub(r"[^\u4e00-\u9fa5A-Za-z0-9_^]|_", " ", name).split()
    joined = "_".join(spelled).lower()
    return f"get_{joined}" if joined[:1].isdigit() else joined


def parameter_name(name: str) -> str:
    """A parameter or an API as ToolBench spells it: standard, and no reserved word.

    >>> parameter_name("id"), parameter_name("per page")
    ('is_id', 'per_page')
    """
    spelled = standard(name)
    return f"is_{spelled}" if spelled in _RESERVED else spelled


def function_name(tool: str, api: str) -> str:
    """The function of an API, as ToolBench names it, in the characters that servers take.

    >>> function_name("Vimeo", "SearchVideos")
    'searchvideos_for_vimeo'
    """
    name = f"{parameter_name(api)}_for_{standard(tool)}"[-_LONGEST_NAME:]
    name = re.sub(r"[^A-Za-z0-9_]", "_", name)
    return f"_{name[1:]}" if name[0].isdigit() else name


def offered_api(row: ApiRow, function: str) -> Api:
    """An API document as an API that is offered under the name `function`."""
    required = [_parameter(parameter, is_required=True) for parameter in row.required_parameters]
    optional = [_parameter(parameter, is_required=False) for parameter in row.optional_parameters]
    by_name = {parameter.name: parameter for parameter in (*optional, *required)}
    return Api(
        place=(row.category_name, row.tool_name, row.api_name),
        function=function,
        description=row.api_description or "",
        parameters=tuple(by_name.values()),
    )


def _parameter(row: ParameterRow, *, is_required: bool) -> Parameter:
    text = row.description or ""
    if row.default not in ("", None):
        text = f"{text} For example: {one_line(without_surrogates(str(row.default)), 100)}".strip()
    return Parameter(
        name=parameter_name(row.name),
        type=_TYPES.get(row.type.upper(), _OTHER_TYPE),
        description=text,
        is_required=is_required,
    )
