"""Chat templates as Hugging Face's `apply_chat_template` renders them, fed as vLLM feeds them.

The template is untrusted text from a model folder: it runs sandboxed. What it may use besides plain Jinja
(`raise_exception`, `strftime_now`, `tojson`, `break`/`continue`, `generation` blocks) is what Transformers
documents for template writers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from prefixwatch.kvcache.prompts.media import TEXT_PARTS, is_text, mark_of

Messages = Sequence[Mapping[str, Any]]

_TOOL_KEYS, _OPTIONAL_TOOL_KEYS = ("type", "function"), ("defer_loading",)
_FUNCTION_KEYS, _OPTIONAL_FUNCTION_KEYS = ("name", "description", "parameters"), ("strict", "defer_loading")


class ChatTemplateError(ValueError):
    """A template that can't be compiled, or that refuses a conversation."""


class ChatTemplate:
    """One compiled template. `variables` are the special tokens that every rendering sees."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            self.takes_parts = _loops_over_content(environment.parse(source))
        except TemplateError as error:
            raise ChatTemplateError(f"the chat template is not valid: {error}") from error
        self._variables = dict(variables)

    def render(self, messages: Messages, *, tools: Any = None, **arguments: Any) -> str:
        """The text of a conversation, up to where the assistant answers. Raises ChatTemplateError."""
        prepared = [_message(message, position, self.takes_parts) for position, message in enumerate(messages)]
        values = {"add_generation_prompt": True, "documents": None, **self._variables, **arguments}
        try:
            return self._template.render(messages=prepared, tools=_tools(tools), **values)
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            raise ChatTemplateError(f"the chat template refuses this conversation: {error}") from error


def _message(message: Any, position: int, takes_parts: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ChatTemplateError(f"message {position} must be an object with a role, not {type(message).__name__}")
    texts = _texts(message.get("content"), position)
    content: Any = (
        [{"type": "text", "text": text} for text in texts]
        if takes_parts
        else "\n".join(sorted(texts, key=is_text))  # vLLM puts a message's images first where a template takes texts
    )
    prepared = {**message, "content": content}
    if isinstance(message.get("tool_calls"), list):
        prepared["tool_calls"] = [_tool_call(call) for call in message["tool_calls"]]
    return prepared


def _texts(content: Any, position: int) -> list[str]:
    """The texts of OpenAI content parts. A part that isn't text is marked; see `kvcache.prompts.media`."""
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise ChatTemplateError(f"content of message {position} must be a text or a list of parts")
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, Mapping):
            field = TEXT_PARTS.get(str(part.get("type", "text")))
            texts.append(mark_of(part) if field is None else str(part.get(field, "")))
        else:
            raise ChatTemplateError(f"a content part of message {position} must be an object with a type")
    return texts


def _tools(tools: Any) -> Any:
    """Tools as vLLM hands them on: its own order of keys, null for a missing description or schema, nothing else.

    A template prints them as JSON, so the client's order of keys must not show. What vLLM would refuse stays as it is.
    """
    return [_tool(tool) for tool in tools] if isinstance(tools, list | tuple) and tools else tools or None


def _tool(tool: Any) -> Any:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or "name" not in function:
        return tool
    deferred = {"defer_loading": tool["defer_loading"]} if tool.get("defer_loading") is not None else {}
    known = {**deferred, **{key: value for key, value in function.items() if value is not None}}
    inside = _picked(known, _FUNCTION_KEYS, _OPTIONAL_FUNCTION_KEYS)
    return _picked({"type": "function", **tool, "function": inside}, _TOOL_KEYS, _OPTIONAL_TOOL_KEYS)


def _picked(values: Mapping[str, Any], always: Sequence[str], optional: Sequence[str]) -> dict[str, Any]:
    given = {key: values[key] for key in optional if values.get(key) is not None}
    return {key: values.get(key) for key in always} | given


def _tool_call(call: Any) -> Any:
    """OpenAI sends arguments as JSON text; templates expect the object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except json.JSONDecodeError as error:
        raise ChatTemplateError(f"the arguments of a tool call are not JSON: {error}") from error
    return {**call, "function": {**function, "arguments": arguments}}


def _loops_over_content(tree: jinja2.nodes.Template) -> bool:
    """Whether the template walks through a message's content: it then wants parts, otherwise one text."""
    names = {"content"}
    for assignment in tree.find_all(jinja2.nodes.Assign):
        if isinstance(assignment.target, jinja2.nodes.Name) and _is_content(assignment.node, set()):
            names.add(assignment.target.name)
    return any(_is_content(loop.iter, names) for loop in tree.find_all(jinja2.nodes.For))


def _is_content(node: jinja2.nodes.Node, names: set[str]) -> bool:
    match node:
        case jinja2.nodes.Name(name=name):
            return name in names
        case jinja2.nodes.Getattr(attr=attribute):
            return bool(attribute == "content")
        case jinja2.nodes.Getitem(arg=jinja2.nodes.Const(value=value)):
            return bool(value == "content")
        case jinja2.nodes.Filter(node=jinja2.nodes.Node() as inner):
            return _is_content(inner, names)
    return False


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %} … {% endgeneration %}` marks the assistant's words for training; it prints its inside."""

    tags = {"generation"}  # noqa: RUF012  # Jinja's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def strftime_now(pattern: str) -> str:
        return datetime.now().strftime(pattern)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment
