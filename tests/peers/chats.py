"""Chat templates of each kind, and conversations."""

TOKENS = {"bos_token": "<s>", "eos_token": "<|im_end|>"}
# Turns between tokens of their own, as most models have them.
PLAIN = """{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' %}
{%- generation %}
{{- m.content + eos_token }}
{%- endgeneration %}
{{- '\\n' }}
{%- else %}
{{- m.content | trim + eos_token + '\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
# Thoughts of the last reply only; tools and calls as JSON; a system prompt of its own.
THINKING = """{%- if tools %}
{{- '<|im_start|>tools\\n' + tools | tojson + eos_token + '\\n' }}
{%- endif %}
{%- if messages[0].role != 'system' %}
{{- '<|im_start|>system\\nHelp.' + eos_token + '\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}
{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role != 'assistant' %}
{{- m.content + eos_token + '\\n' }}{% continue %}
{%- endif %}
{%- generation %}
{%- if loop.index0 > ns.last %}
{{- '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}
{%- endif %}
{{- (m.content or '').split('</think>')[-1].lstrip('\\n') }}
{%- for call in m.tool_calls or [] %}
{{- '<call>' + call.function.arguments | tojson(indent=1) + '</call>' }}
{%- endfor %}
{{- eos_token }}
{%- endgeneration %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""
# BOS, no header before a reply, which ends the text; roles must alternate.
BRACKETS = """{{ bos_token }}
{%- for m in messages %}
    {%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {%- if m['role'] == 'user' %}
        {{- '[INST] ' + m['content'] + '[/INST]' }}
    {%- else %}
        {%- generation %}{{- ' ' + m['content'] + eos_token }}{% endgeneration %}
    {%- endif %}
{%- endfor %}"""
TEMPLATES = {"plain": PLAIN, "thinking": THINKING, "brackets": BRACKETS}
_say = lambda role, content, **more: {"role": role, "content": content, **more}
_CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "é<>"}}}
TALKS = {
  "turns": [
    _say("user", " one "),
    _say("assistant", "two\n"),
    _say("user", "three\n\n"),
    _say("assistant", "\nfour"),
  ],
  "calls": [
    _say("user", "sum"),
    _say("assistant", None, tool_calls=[_CALL], reasoning_content="add"),
    _say("tool", "2"),
    _say("assistant", "It is 2.", reasoning_content="done"),
  ],
}
