"""A checkpoint's chat template: messages in, prompt text out.

Owns finding the template, and rendering it in a sandbox as transformers does: same globals, same
whitespace rules, same choice between named templates. Owns too the forms in which a template takes
contents and the arguments of calls, found by rendering a few messages. Knows no HTTP and no tokens
(the text is tokenised without adding special tokens); gateways call it. Imports no torch. A
template comes with the checkpoint, never from a request.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.defaults import DEFAULT_NAMESPACE
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from models.description.config_fields import read_json
from models.text.tokenizer_files import SPECIAL_TOKEN_NAMES, read_special_tokens
from topspin.errors import ConfigError, InvalidRequest

Part = Mapping[str, object]
Render = Callable[[Sequence[Mapping[str, object]]], str]
"""Returns a chat as the template writes it; raises InvalidRequest if it refuses."""

# No template has a use for these; nine characters, as some want of the ids of calls.
_FIRST: Final = "probe1abc"
_SECOND: Final = "probe2xyz"
_USER: Final = {"role": "user", "content": "x"}


class CallForm(NamedTuple):
    """A message with calls and no content: its content's place, and whether arguments are a text.

    `members` are the content, if it has one.
    """

    members: Mapping[str, str | None]
    has_texts: bool


# As transformers leaves it out, as clients send it, and as the templates want it that can do
# neither.
_CALL_FORMS: Final = (
    CallForm({}, False),
    CallForm({"content": None}, False),
    CallForm({"content": None}, True),
    CallForm({"content": ""}, False),
    CallForm({"content": ""}, True),
)
_USUAL_FORM: Final = CallForm({"content": ""}, False)


class MessageForms:
    """The forms that one template takes; may be shared by threads.

    Of a message with calls: `calls` is its form, `has_one_call`: only the first of them is shown;
    `has_one_text`: it is refused if it has both content and reasoning.
    """

    def __init__(self, render: Render) -> None:
        self._render = render
        self._of_role: dict[str, tuple[bool, bool]] = {}
        self.calls = self._call_form()
        self.has_one_call = not self._shows_two_calls()
        is_shown = bool(self._try(self._called(self.calls)))
        has_both = bool(self._try(self._called(self.calls, content="x", thinking="x")))
        self.has_one_text = is_shown and not has_both

    def content(self, role: str, texts: Sequence[str], *, is_list: bool) -> str | list[Part]:
        """Return the content of a message of `role`, given as a text or as a list of several.

        It stays as it was given where the template takes that. Otherwise texts are joined by line
        breaks, or a text is made a part of its own.
        """
        if role not in self._of_role:
            self._of_role[role] = self._takes_text(role), self._takes_parts(role)
        takes_text, takes_parts = self._of_role[role]
        if texts and takes_parts and (is_list or not takes_text):
            return _parts(texts)
        return "\n".join(texts)

    def _takes_text(self, role: str) -> bool:
        return _FIRST in self._shown(role, _FIRST)

    def _takes_parts(self, role: str) -> bool:
        """Return whether both parts are shown, and not as JSON or a Python list."""
        shown = self._shown(role, _parts([_FIRST, _SECOND]))
        is_raw = re.search(rf"text\W+{_FIRST}", shown) is not None
        return _FIRST in shown and _SECOND in shown and not is_raw

    def _shown(self, role: str, content: object) -> str:
        """Return a chat with a message of `role` as the template writes it; "" if it refuses."""
        message = {"role": role, "content": content}
        if role == "tool":
            message |= {"tool_call_id": _FIRST, "name": "f"}
            return self._try([_USER, _call({}, {"content": ""}), message])
        return self._try([message, _USER] if role == "system" else [_USER, message])

    def _call_form(self) -> CallForm:
        """Return the form closest to what clients send, in which the calls are shown."""
        for form in _CALL_FORMS:
            shown = self._try(self._called(form))
            if _SECOND in shown and re.search("None|null", shown) is None:
                return form
        return _USUAL_FORM

    def _shows_two_calls(self) -> bool:
        chat = self._called(self.calls)
        [call] = chat[1]["tool_calls"]
        empty = "{}" if self.calls.has_texts else {}
        other = {**call, "function": {**call["function"], "arguments": empty}}
        chat[1]["tool_calls"] = [other, call]
        shown = self._try(chat)
        return not shown or _SECOND in shown

    def _called(self, form: CallForm, **members: str) -> list[dict[str, Any]]:
        """Return a chat with a call in this form, whose message has other `members`."""
        arguments = json.dumps({"a": _SECOND}) if form.has_texts else {"a": _SECOND}
        result = {"role": "tool", "tool_call_id": _FIRST, "name": "f", "content": "x"}
        return [_USER, _call(arguments, {**form.members, **members}), result]

    def _try(self, messages: Sequence[Mapping[str, object]]) -> str:
        try:
            return self._render(messages)
        except InvalidRequest:
            return ""


def marked(content: str | list[Part], *, before: str = "", after: str = "") -> str | list[Part]:
    """Return a content with text added at its ends."""
    if isinstance(content, str):
        return f"{before}{content}{after}"
    texts = [str(part["text"]) for part in content]
    texts[0] = before + texts[0]
    texts[-1] += after
    return _parts(texts)


def text_of(content: str | list[Part]) -> str:
    """Return the text of a content."""
    return content if isinstance(content, str) else "".join(str(part["text"]) for part in content)


def _parts(texts: Sequence[str]) -> list[Part]:
    return [{"type": "text", "text": text} for text in texts]


def _call(arguments: object, members: Mapping[str, object]) -> dict[str, object]:
    call = {"id": _FIRST, "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", **members, "tool_calls": [call]}


_TEMPLATE_FILE = "chat_template.jinja"
_TEMPLATE_DIR = "additional_chat_templates"
_CONFIG_FILE = "tokenizer_config.json"
_RESERVED = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "raise_exception",
        "strftime_now",
        "namespace",
        "self",
        *SPECIAL_TOKEN_NAMES,
        *DEFAULT_NAMESPACE,
    }
)
# A message's reasoning has several names; templates read the first (gpt-oss the second).
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")


def may_set(name: str) -> bool:
    """Return whether a request may set a template's variable `name`: it is not one of ours."""
    return name.isidentifier() and not name.startswith("_") and name not in _RESERVED


def has_template(path: Path) -> bool:
    """Return whether the checkpoint directory `path` has a chat template."""
    return bool(_sources(path))


class ChatTemplate:
    """The compiled templates of one checkpoint; immutable, may be shared by threads."""

    def __init__(
        self, sources: Mapping[str, str], *, special_tokens: Mapping[str, str], source: str
    ) -> None:
        """Compile the named templates (a lone one is called `default`).

        Raises ConfigError if one is not valid Jinja, or if none is called `default`.
        """
        if "default" not in sources:
            raise ConfigError(f"{source}: chat templates {sorted(sources)}: none is `default`")
        environment = _environment()
        self._special_tokens = dict(special_tokens)
        self._templates: dict[str, jinja2.Template] = {}
        self._sources = tuple(sources.values())
        self._text = sources["default"]
        self._words: set[object] = set()
        read: set[str] = set()
        for name, text in sources.items():
            try:
                self._templates[name] = environment.from_string(text)
                parsed = environment.parse(text)
                self._words.update(_words(parsed))
                read |= find_undeclared_variables(parsed)
            except jinja2.TemplateError as error:
                raise ConfigError(f"{source}: chat template {name!r}: {error}") from error
        self.options = frozenset(filter(may_set, read - special_tokens.keys()))
        """The variables that a request may set and that a template reads."""

    @classmethod
    def from_directory(cls, path: Path) -> ChatTemplate:
        """Return the checkpoint's template. Raises ConfigError if it has none."""
        template = cls.find(path)
        if template is None:
            raise ConfigError(
                f"{path}: has no chat template (neither {_TEMPLATE_FILE} nor `chat_template` in "
                f"{_CONFIG_FILE}); a base model serves /v1/completions only"
            )
        return template

    @classmethod
    def find(cls, path: Path) -> ChatTemplate | None:
        """Return the checkpoint's template, or None if it has none, as base models do not."""
        sources = _sources(Path(path))
        if not sources:
            return None
        return cls(sources, special_tokens=read_special_tokens(path), source=str(path))

    @classmethod
    def from_file(cls, checkpoint: Path, file: str) -> ChatTemplate:
        """Return the template in a Jinja file, with the checkpoint's special tokens.

        Raises ConfigError if it cannot be read.
        """
        text = _read(Path(file).expanduser())
        special = read_special_tokens(checkpoint)
        return cls({"default": text}, special_tokens=special, source=file)

    @property
    def text(self) -> str:
        """The source of the template that is used without tools."""
        return self._text

    @cached_property
    def forms(self) -> MessageForms:
        """The forms in which the template takes messages."""
        return MessageForms(partial(self.render, add_generation_prompt=False))

    def mentions(self, word: str) -> bool:
        """Return whether the code of a template has `word` as a name, a key or a string.

        A template that does not mention a role or a member of messages cannot use it.
        """
        return word in self._words

    def has_text(self, text: str) -> bool:
        """Return whether the source of a template has `text`, such as a marker that it writes."""
        return any(text in source for source in self._sources)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, object]] | None = None,
        **variables: object,
    ) -> str:
        """Return the prompt text of a conversation.

        Of `variables` it gets those that are among its `options`, such as enable_thinking. Raises
        InvalidRequest if a value is not plain JSON, or if the template refuses the conversation.
        """
        is_tool_use = tools is not None and "tool_use" in self._templates
        template = self._templates["tool_use" if is_tool_use else "default"]
        options = variables.keys() & self.options
        values = {name: _plain(variables[name]) for name in options}
        try:
            return template.render(
                messages=[_with_reasoning(_plain_object(message)) for message in messages],
                tools=None if tools is None else [_plain_object(tool) for tool in tools],
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
                **values,
            )
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"chat template: {error}", param="messages") from error
        except (TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
            # A template is a program, and raises these errors for unexpected messages.
            raise InvalidRequest(
                f"the chat template cannot render these messages: {error}", param="messages"
            ) from error


def _words(template: nodes.Template) -> Iterator[object]:
    """Yield names, attributes and constants in the template's code, not its literal text."""
    for node in template.find_all((nodes.Name, nodes.Getattr, nodes.Const)):
        if isinstance(node, nodes.Name):
            yield node.name
        elif isinstance(node, nodes.Getattr):
            yield node.attr
        elif isinstance(node, nodes.Const) and isinstance(node.value, str):
            yield node.value


def _sources(path: Path) -> dict[str, str]:
    """Return name -> text of the checkpoint's templates; files win over tokenizer_config.json."""
    files = {}
    if (path / _TEMPLATE_FILE).exists():
        files["default"] = path / _TEMPLATE_FILE
    files.update({file.stem: file for file in sorted((path / _TEMPLATE_DIR).glob("*.jinja"))})
    if files:
        return {name: _read(file) for name, file in files.items()}
    if not (path / _CONFIG_FILE).exists():
        return {}
    value = read_json(path / _CONFIG_FILE).get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    try:
        return {str(item["name"]): str(item["template"]) for item in _list(value)}
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"{path / _CONFIG_FILE}: chat_template must be a string or a list of "
            f"objects with name and template: {error!r}"
        ) from error


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(type(value).__name__)
    return value


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error


def _plain(value: object) -> object:
    """Return a copy of a JSON value: a template gets only objects of built-in types."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    raise InvalidRequest(f"a chat template takes JSON values, not {type(value).__name__}")


def _plain_object(value: Mapping[str, object]) -> dict[str, object]:
    return {str(key): _plain(item) for key, item in value.items()}


def _with_reasoning(message: dict[str, object]) -> dict[str, object]:
    """Return the message with its reasoning under each name that a template may read."""
    given = [message[name] for name in _REASONING_NAMES if message.get(name) is not None]
    if not given:
        return message
    return {"thinking": given[0], **message, "reasoning_content": given[0]}


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _PublicNamespace
    return environment


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without the HTML escapes of Jinja's filter, which models never saw."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format_string: str) -> str:
    return datetime.now().strftime(format_string)


class _PublicNamespace(Namespace):
    """A `namespace()` without underscore names, which the sandbox's checks would not see."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.TemplateError(f"a namespace takes no attribute {name!r}")
        super().__setitem__(name, value)


class _GenerationBlock(Extension):
    """`{% generation %}`: marks the assistant's text for training; here it is only a scope."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it as an instance variable)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)
