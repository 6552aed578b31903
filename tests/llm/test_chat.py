"""Prompts made of messages: as transformers makes them, and templates that are hostile or refuse messages."""

from __future__ import annotations

import gc
import resource
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from hidet_dist.errors import ConfigError, InputError
from hidet_dist.llm.chat import ChatTemplate

MESSAGES = [
    {"role": "system", "content": 'Be <brief> & "exact".'},
    {"role": "user", "content": "Wie groß ist 日本?"},
    {"role": "assistant", "content": "Big.", "tool_calls": [{"function": {"name": "area", "arguments": {"of": "JP"}}}]},
]
TOOLS = [{"type": "function", "function": {"name": "area", "parameters": {"type": "object", "properties": {}}}}]
TEMPLATE = """{{- bos_token }}
{%- set ns = namespace(count=0) %}
{%- if tools %}
    {{- '# Tools\\n' }}
    {%- for tool in tools %}{{ tool | tojson(indent=2) }}{% endfor %}
{%- endif %}
{% for message in messages %}
  {%- set ns.count = ns.count + 1 %}
  {%- if message.role == 'system' and loop.index0 > 3 %}{% break %}{% endif %}
<|im_start|>{{ message['role'] }}{{ '\\n' + message.content | trim }}<|im_end|>
  {%- if message.tool_calls %}{% generation %}{{ message.tool_calls | tojson }}{% endgeneration %}{% endif %}
{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
{%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{{ ns.count }}"""


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("options", [{}, {"enable_thinking": False}])
def test_a_prompt_is_the_one_that_transformers_makes(tools: Any, options: dict[str, Any]):
    ours = ChatTemplate(TEMPLATE, {"bos_token": "<s>"}).render(MESSAGES, tools, options=options)
    theirs, _ = render_jinja_template(
        [MESSAGES], tools=tools, chat_template=TEMPLATE, add_generation_prompt=True, bos_token="<s>", **options
    )
    assert ours == theirs[0]
    assert "<brief>" in ours and "日本" in ours


def test_a_template_that_refuses_messages_says_why():
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(InputError, match="roles must alternate"):
        template.render(MESSAGES)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace(__class__=1) %}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ 'a' * 10000000000 }}",
        "{{ 9 ** 99999999 }}",
        "{{ messages[9].content }}",
        "{{ 1 / 0 }}",
        "{% for i in range(1000000) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for i in range(99999) %}{{ 'a' * 99999 }}{% endfor %}",
        "{{ 'a'.ljust(10000000000) }}",
        "{{ '%9999999999d' % 1 }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        *(
            pytest.param(source, marks=pytest.mark.slow)
            for source in (
                "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
                "{% set n = namespace(x='a') %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
                "{% set n = namespace(x=3) %}{% for i in range(40) %}{% set n.x = n.x * n.x %}{% endfor %}",
                "{% set n = namespace(x=[1]) %}{% for i in range(40) %}{% set n.x = n.x + n.x %}{% endfor %}",
                "{{ lipsum(n=1000000) }}",
            )
        ),
    ],
)
def test_a_hostile_template_is_stopped_and_the_next_one_is_rendered(source: str):
    gc.disable()  # a collection takes half a second itself
    try:
        before = resource.getrusage(resource.RUSAGE_SELF)
        with pytest.raises(InputError):
            ChatTemplate(source, {}).render(MESSAGES)
        after = resource.getrusage(resource.RUSAGE_SELF)
    finally:
        gc.enable()
    assert after.ru_utime - before.ru_utime < 1  # of this process, which goes on meanwhile
    assert ChatTemplate("{{ messages | length }}", {}).render(MESSAGES) == str(len(MESSAGES))


@pytest.mark.slow
def test_a_template_that_takes_too_much_to_compile_is_refused():
    with pytest.raises(ConfigError, match="cannot be compiled: it takes more than 3 s"):
        ChatTemplate("{{ 1 | round(99999999, 'ceil') }}", {})


def test_a_malformed_template_is_refused():
    with pytest.raises(ConfigError, match="malformed"):
        ChatTemplate("{% for x in %}", {})


def test_messages_are_nested_up_to_a_bound():
    nested: list = []
    for _ in range(300):
        nested = [nested]
    with pytest.raises(InputError, match="lists and objects in one another"):
        ChatTemplate("{{ messages }}", {}).render([{"role": "user", "content": nested}])


def test_halves_of_surrogate_pairs_and_large_texts_pass_through():
    text = "\ud83d" + "é€🙂" * 100_000
    assert ChatTemplate("{{ messages[0].content }}", {}).render([{"role": "user", "content": text}]) == text


def test_messages_are_values_of_json():
    with pytest.raises(InputError, match="values of JSON"):
        ChatTemplate("{{ messages }}", {}).render([{"role": "user", "content": object()}])
