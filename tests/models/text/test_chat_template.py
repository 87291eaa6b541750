"""models.text.chat_template renders as transformers does; failures are the client's fault."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from models.text.chat_template import ChatTemplate, may_set
from tests.checkpoints import write_tokenizer
from topspin.errors import ConfigError, InvalidRequest

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief <&> \u00fc."},
    {"role": "user", "content": "Hi "},
    {"role": "assistant", "content": " Hello", "reasoning_content": "greet back"},
    {"role": "user", "content": "Bye\n"},
]
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"a": ["<b>", 1.5, None]}}}]

_LOOP = """
    {%- set ns = namespace(count=0) %}
    {% for message in messages -%}
        {%- if message.role == 'tool' %}{% continue %}{% endif -%}
        {% if loop.index0 > 10 %}{% break %}{% endif %}
        {% set ns.count = ns.count + 1 %}
<|{{ message['role'] }}|>{{ message.content | trim }}{{ eos_token }}
        {% if message.reasoning_content %}({{ message.reasoning_content }}){% endif %}
    {% endfor %}
{{ ns.count }} {{ bos_token }}{{ pad_token }}{{ unk_token is defined }}
"""
TEMPLATES = {
    "loop": _LOOP,
    "tools": "{% if tools %}{{ tools | tojson }}{{ tools | tojson(indent=2) }}{% endif %}",
    "variable": "{{ enable_thinking }}{% if other is not defined %}x{% endif %}{{ documents }}",
    "generation_prompt": "{{ messages | length }}{% if add_generation_prompt %}<|a|>{% endif %}",
    "generation_block": (
        "{% for m in messages %}{% generation %}\n  {{ m.content }}{% set a = 1 %}\n"
        "{% endgeneration %}\n{{ a is defined }}{% endfor %}"
    ),
    "year": "{{ strftime_now('%Y') }}{{ dict(a=1) | tojson(sort_keys=true) }}{{ range(3) | list }}",
}


def _write(path: Path, chat_template: object) -> Path:
    path.mkdir(exist_ok=True)
    write_tokenizer(path)
    config = json.loads((path / "tokenizer_config.json").read_text())
    config["chat_template"] = chat_template
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def _oracle(path: Path, **options: Any) -> Any:
    auto = importlib.import_module("transformers").AutoTokenizer
    return auto.from_pretrained(path).apply_chat_template(MESSAGES, tokenize=False, **options)


@pytest.mark.parametrize("add_generation_prompt", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_rendering_equals_that_of_transformers(
    tmp_path: Path, name: str, add_generation_prompt: bool
) -> None:
    _write(tmp_path, TEMPLATES[name])
    ours = ChatTemplate.from_directory(tmp_path).render(
        MESSAGES, add_generation_prompt=add_generation_prompt, tools=TOOLS, enable_thinking=False
    )
    theirs = _oracle(
        tmp_path, add_generation_prompt=add_generation_prompt, tools=TOOLS, enable_thinking=False
    )
    assert ours == theirs
    assert ours


def test_a_template_file_wins_over_the_configuration(tmp_path: Path) -> None:
    _write(tmp_path, "from config")
    (tmp_path / "chat_template.jinja").write_text("from file")
    render = ChatTemplate.from_directory(tmp_path).render
    assert render(MESSAGES, add_generation_prompt=False) == "from file" == _oracle(tmp_path)


def test_named_templates_are_chosen_as_transformers_chooses(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "with tools"},
    ]
    _write(tmp_path / "listed", named)
    _write(tmp_path / "files", None)
    (tmp_path / "files" / "chat_template.jinja").write_text("plain")
    (tmp_path / "files" / "additional_chat_templates").mkdir()
    (tmp_path / "files" / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    for place in ("listed", "files"):
        render = ChatTemplate.from_directory(tmp_path / place).render
        assert render(MESSAGES, add_generation_prompt=False) == "plain" == _oracle(tmp_path / place)
        with_tools = render(MESSAGES, add_generation_prompt=False, tools=TOOLS)
        assert with_tools == "with tools" == _oracle(tmp_path / place, tools=TOOLS)


def test_a_checkpoint_without_a_template(tmp_path: Path) -> None:
    _write(tmp_path, None)
    assert ChatTemplate.find(tmp_path) is None
    with pytest.raises(ConfigError, match="no chat template"):
        ChatTemplate.from_directory(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    assert ChatTemplate.find(tmp_path) is None


@pytest.mark.parametrize(
    ("chat_template", "message"),
    [
        ("{% for %}", "chat template 'default'"),
        ([{"name": "other", "template": "x"}], "none is `default`"),
        ([{"template": "x"}], "must be a string or a list"),
        ({"default": "x"}, "must be a string or a list"),
    ],
)
def test_an_unusable_template_is_named(tmp_path: Path, chat_template: object, message: str) -> None:
    _write(tmp_path, chat_template)
    with pytest.raises(ConfigError, match=message):
        ChatTemplate.from_directory(tmp_path)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[9].content.x }}", "has no element 9"),
        ("{{ messages[0].content + 1 }}", "cannot render these messages"),
        ("{{ 1 // (messages | length - 4) }}", "cannot render these messages"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
        ("{% set ns = namespace() %}{% set ns.__html__ = 1 %}", "namespace"),
        ("{{ range(1000000000) | list }}", "cannot render these messages"),
    ],
)
def test_a_refusal_by_the_template_is_the_clients_fault(
    tmp_path: Path, template: str, message: str
) -> None:
    _write(tmp_path, template)
    with pytest.raises(InvalidRequest, match=message) as caught:
        ChatTemplate.from_directory(tmp_path).render(MESSAGES, add_generation_prompt=True)
    assert caught.value.param == "messages"


RESERVED = ["documents", "bos_token", "raise_exception", "__class__", "range", "namespace", "self"]


@pytest.mark.parametrize("name", [*RESERVED, "tools", "not a name", "", "a.b"])
def test_a_request_may_not_shadow_the_machinery(tmp_path: Path, name: str) -> None:
    assert not may_set(name)
    _write(tmp_path, "{{ [documents, bos_token, range(2) | list, self, namespace is callable] }}")
    template = ChatTemplate.from_directory(tmp_path)
    assert template.options == frozenset()
    plain = template.render(MESSAGES, add_generation_prompt=False)
    if name not in ("self", "tools"):  # these are render's own
        variables: dict[str, Any] = {name: "y"}
        assert template.render(MESSAGES, add_generation_prompt=False, **variables) == plain


def test_a_template_gets_the_variables_that_it_reads_and_no_others(tmp_path: Path) -> None:
    text = (
        "{% macro shown(x) %}{{ x }}{{ enable_thinking }}{% endmacro %}{% set set_here = 1 %}"
        "{{ shown(messages | length) }} {{ style if style is defined }} {{ messages.style_of }}"
        "{% for each in messages %}{{ loop.index }}{% endfor %}{{ set_here }}"
    )
    _write(tmp_path, text)
    template = ChatTemplate.from_directory(tmp_path)
    assert template.options == {"enable_thinking", "style"}
    variables: dict[str, Any] = {"style": "S", "each": "E", "x": "X", "set_here": "no", "loop": 3}
    assert template.render(MESSAGES[:1], add_generation_prompt=False, **variables) == "1 S 11"


def test_a_template_sees_plain_copies_only(tmp_path: Path) -> None:
    _write(tmp_path, "{{ thing }}")
    template = ChatTemplate.from_directory(tmp_path)
    with pytest.raises(InvalidRequest, match="JSON values, not PosixPath"):
        template.render(MESSAGES, add_generation_prompt=False, thing=Path("/"))


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_reaches_the_template_under_the_names_it_reads(tmp_path: Path, name: str) -> None:
    _write(tmp_path, "{{ messages[0].reasoning_content }} {{ messages[0].thinking }}")
    messages = [{"role": "assistant", "content": "x", name: "because"}]
    render = ChatTemplate.from_directory(tmp_path).render
    assert render(messages, add_generation_prompt=False) == "because because"
    assert messages == [{"role": "assistant", "content": "x", name: "because"}]
