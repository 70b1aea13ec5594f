"""Chat templates of Mistral's tokenizers, for folders that have none.

A tokenizer's version fixes the form of a conversation:

    v1      <s>[INST] text [/INST] answer</s>, without tools; the system's text is before the first
            user's
    v2, v3  [AVAILABLE_TOOLS] before, and the system's text in, the last user's message,
            in v2 without earlier calls and results
    v7      [SYSTEM_PROMPT]...[/SYSTEM_PROMPT]; [TOOL_RESULTS]id[TOOL_CONTENT]text[/TOOL_RESULTS]
    v11     [TOOL_CALLS]name[CALL_ID]id[ARGS]{...} for each call, instead of a list
    v13     tools before the first user's message; calls and results without ids; [THINK]
    v15     [MODEL_SETTINGS]{...}[/MODEL_SETTINGS] after the tools

Tokenizers from SentencePiece models write a space before each text between two control tokens.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

_EFFORT = "reasoning_effort"
_TEXT = """\
{%- macro said(content) -%}
  {%- if content is string -%}
    {{- content -}}
  {%- else -%}
    {%- for part in content -%}
      {%- if part.type == 'text' -%}
        {{- part.text -}}
      {%- elif part.type == 'thinking' -%}
        {{- '[THINK]' + (part.thinking if part.thinking is string else said(part.thinking)) -}}
        {{- '[/THINK]' -}}
      {%- elif part.type in ('image', 'image_url') -%}
        {{- '[IMG]' -}}
      {%- else -%}
        {{- raise_exception('parts of messages must be texts or images, found ' + part.type) -}}
      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
"""
# An image after the only texts of a message moves before them.
_USER = """\
{%- macro asked(content) -%}
  {%- set found = namespace(images=0, last='') -%}
  {%- if content is not string -%}
    {%- for part in content -%}
      {%- set found.images = found.images + (part.type in ('image', 'image_url')) -%}
      {%- set found.last = part.type -%}
    {%- endfor -%}
  {%- endif -%}
  {%- if found.images == 1 and found.last in ('image', 'image_url') -%}
    {{- '[IMG]' + said(content[:-1]) -}}
  {%- else -%}
    {{- said(content) -}}
  {%- endif -%}
{%- endmacro -%}
"""
_PLACES = """\
{%- set at = namespace(first=-1, last=-1, system='') -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}
    {%- set at.last = loop.index0 -%}
    {%- if at.first < 0 -%}{%- set at.first = loop.index0 -%}{%- endif -%}
  {%- elif message.role in ('system', 'developer') and not SYSTEM_APART -%}
    {%- if at.system -%}{%- set at.system = at.system + '\n\n' -%}{%- endif -%}
    {%- set at.system = at.system + (said(message.content) | trim) -%}
  {%- endif -%}
{%- endfor -%}
"""
_FIRST_VERSION = """\
{{- bos_token -}}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}
    {{- '[INST] ' -}}
    {%- if loop.index0 == at.first and at.system -%}{{- at.system + '\n\n' -}}{%- endif -%}
    {{- said(message.content) + ' [/INST]' -}}
  {%- elif message.role == 'assistant' -%}
    {{- ' ' + said(message.content) + eos_token -}}
  {%- elif message.role not in ('system', 'developer') -%}
    {{- raise_exception('this model has no role ' + message.role) -}}
  {%- endif -%}
{%- endfor -%}
"""
_LOOP = """\
{{- bos_token -}}
{%- for message in messages -%}
  {%- if message.role in ('system', 'developer') -%}
    {%- if SYSTEM_APART -%}
      {{- '[SYSTEM_PROMPT]' + said(message.content) + '[/SYSTEM_PROMPT]' -}}
    {%- endif -%}
  {%- elif message.role == 'user' -%}
    {%- if loop.index0 == at.WITH_TOOLS -%}
      {%- if tools -%}
        {{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' -}}
      {%- endif -%}
      SETTINGS
    {%- endif -%}
    {{- '[INST]' -}}
    {%- if loop.index0 == at.last and at.system -%}
      {%- if message.content is string -%}
        {{- at.system + '\n\n' + message.content -}}
      {%- else -%}
        {{- at.system + '\n\n' + asked(message.content) -}}
      {%- endif -%}
    {%- else -%}
      {{- asked(message.content) -}}
    {%- endif -%}
    {{- '[/INST]' -}}
  {%- elif FORGETS and loop.index0 < at.last and (message.tool_calls or message.role == 'tool') -%}
  {%- elif message.role == 'assistant' -%}
    THOUGHT
    {%- if message.content -%}{{- said(message.content) -}}{%- endif -%}
    {%- if message.tool_calls -%}
      CALLS
    {%- endif -%}
    {{- eos_token -}}
  {%- elif message.role == 'tool' -%}
    RESULT
  {%- else -%}
    {{- raise_exception('this model has no role ' + message.role) -}}
  {%- endif -%}
{%- endfor -%}
"""
_ARGUMENTS = """\
{%- macro written(arguments) -%}
  {{- arguments if arguments is string else (arguments | tojson) -}}
{%- endmacro -%}
"""
_LISTED = """\
{{- '[TOOL_CALLS][' -}}
      {%- for call in message.tool_calls -%}
        {{- ', ' if not loop.first -}}
        {{- '{"name": ' + (call.function.name | tojson) + ', "arguments": ' -}}
        {{- written(call.function.arguments) -}}
        {%- if call.id and WITH_ID -%}{{- ', "id": ' + (call.id | tojson) -}}{%- endif -%}
        {{- '}' -}}
      {%- endfor -%}
      {{- ']' -}}"""
_EACH = """\
{%- for call in message.tool_calls -%}
        {{- '[TOOL_CALLS]' + call.function.name -}}
        {%- if call.id and WITH_ID -%}{{- '[CALL_ID]' + call.id -}}{%- endif -%}
        {{- '[ARGS]' + written(call.function.arguments) -}}
      {%- endfor -%}"""
# JSON stays as it is in a result, and other texts become strings.
_VALUE = """\
{%- set text = said(message.content) | trim -%}
    {%- set is_json = text[:1] in ('{', '[') and text[-1:] in ('}', ']') -%}
    {%- set value = text if is_json else (text | tojson) -%}
    """
_RESULTS = {
    2: _VALUE
    + """\
{{- '[TOOL_RESULTS][{"name": ' + (message.name | tojson) + ', "content": ' -}}
    {{- value + '}][/TOOL_RESULTS]' -}}""",
    3: _VALUE
    + """\
{{- '[TOOL_RESULTS]{"content": ' + value + ', "call_id": ' -}}
    {{- (message.tool_call_id | tojson) + '}[/TOOL_RESULTS]' -}}""",
    7: """\
{{- '[TOOL_RESULTS]' + message.tool_call_id + '[TOOL_CONTENT]' -}}
    {{- said(message.content) + '[/TOOL_RESULTS]' -}}""",
    13: "{{- '[TOOL_RESULTS]' + said(message.content) + '[/TOOL_RESULTS]' -}}",
}
_THOUGHT = """\
{%- set thought = message.reasoning_content or message.reasoning -%}
    {%- if thought -%}{{- '[THINK]' + thought + '[/THINK]' -}}{%- endif -%}"""
_SETTINGS = """\
{%- set effort = reasoning_effort if reasoning_effort else EFFORT -%}
      {%- if effort not in EFFORTS -%}
        {{- raise_exception('reasoning_effort must be one of ' + EFFORTS | join(', ')) -}}
      {%- endif -%}
      {{- '[MODEL_SETTINGS]{"reasoning_effort": ' + (effort | tojson) + '}[/MODEL_SETTINGS]' -}}"""


def chat_template(
    version: str,
    *,
    settings: Mapping[str, Any] | None = None,
    thinks: bool = False,
) -> str:
    """Return the template of a tokenizer's version, such as v7.

    `settings`: model_settings_builder of tekken.json. `thinks`: the tokenizer has [THINK].
    """
    digits = re.search(r"\d+", version)
    number = int(digits[0]) if digits else 1
    if number < 2:
        return _filled(_TEXT + _PLACES + _FIRST_VERSION, SYSTEM_APART="false")
    results = _RESULTS[max(each for each in _RESULTS if each <= number)]
    calls = _EACH if number >= 11 else _LISTED
    whole = _TEXT + _USER + _ARGUMENTS + _PLACES + _LOOP
    whole = _filled(
        whole,
        CALLS=calls,
        RESULT=results,
        THOUGHT=_THOUGHT if thinks else "",
        SETTINGS=_settings(settings or {}) if number >= 15 else "",
    )
    return _filled(
        whole,
        SYSTEM_APART="true" if number >= 7 else "false",
        WITH_TOOLS="first" if number >= 13 else "last",
        FORGETS="true" if number < 3 else "false",
        WITH_ID="true" if 3 <= number < 13 else "false",
    )


def _settings(settings: Mapping[str, Any]) -> str:
    """Return the part that writes the effort of reasoning; "": the model has no such setting."""
    effort = settings.get(_EFFORT)
    values = effort.get("values") if isinstance(effort, dict) else None
    default = effort.get("default") if isinstance(effort, dict) else None
    if not isinstance(values, list) or default not in values:
        return ""
    return _filled(_SETTINGS, EFFORTS=json.dumps(values), EFFORT=json.dumps(default))


def _filled(template: str, **values: str) -> str:
    """Replace the words in capitals."""
    for word, value in values.items():
        template = re.sub(rf"\b{word}\b", lambda _, value=value: value, template)
    return template
