"""Chat templates that show tools and calls in the formats of published ones, shortened."""

_TURN = "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
_ANSWER = "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
QWEN = (
    """{%- if tools %}
{{- '<|im_start|>system\n<tools>' }}
{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\n</tools>\n<tool_call>\n{"name": <name>, "arguments": <args>}\n</tool_call><|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
{%- elif message.tool_calls %}
{{- '<|im_start|>assistant' }}{%- if message.content %}{{- '\n' + message.content }}{%- endif %}
{%- for tool_call in message.tool_calls %}
{%- set tool_call = tool_call.function %}
{{- '\n<tool_call>\n{"name": "' + tool_call.name + '", "arguments": ' }}
{{- tool_call.arguments | tojson }}{{- '}\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\n' }}
{%- else %}"""
    + _TURN
    + "{%- endif %}\n{%- endfor %}"
    + _ANSWER
)
HERMES = QWEN.replace(
    "{%- if message.role == 'tool' %}",
    "{%- if message.role == 'tool' %}{%- if not message.name is defined %}"
    '{{ raise_exception("Tool responses need a name") }}{%- endif %}',
)
LLAMA = """{{- bos_token }}
{%- if tools %}
{{- '<|start_header_id|>system<|end_header_id|>\n\nRespond in the format ' }}
{{- '{"name": function name, "parameters": dictionary of arguments}.' }}
{%- for t in tools %}{{- t | tojson(indent=4) }}{%- endfor %}{{- '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
{%- if 'tool_calls' in message %}
{%- if message.tool_calls|length != 1 %}
{{- raise_exception("This model only supports single tool-calls at once!") }}
{%- endif %}
{%- set tool_call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + tool_call.name + '", ' }}
{{- '"parameters": ' }}{{- tool_call.arguments | tojson }}{{- "}<|eot_id|>" }}
{%- elif message.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + message.content | tojson + '<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content }}
{{- '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}"""
MISTRAL = """{{- bos_token }}
{%- set user_messages = messages | selectattr("role", "equalto", "user") | list %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if tools is not none and message == user_messages[-1] %}
{{- '[AVAILABLE_TOOLS] [' }}
{%- for tool in tools %}{{- tool | tojson }}{%- if not loop.last %}{{- ', ' }}{%- endif %}
{%- endfor %}{{- '][/AVAILABLE_TOOLS]' }}
{%- endif %}
{{- '[INST] ' + message.content + '[/INST]' }}
{%- elif message.tool_calls is defined and message.tool_calls is not none %}
{{- '[TOOL_CALLS] [' }}
{%- for tool_call in message.tool_calls %}
{%- set out = tool_call.function | tojson %}{{- out[:-1] }}
{%- if tool_call.id|length != 9 %}
{{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
{%- endif %}
{{- ', "id": "' + tool_call.id + '"}' }}{%- if not loop.last %}{{- ', ' }}{%- endif %}
{%- endfor %}{{- ']' + eos_token }}
{%- elif message.role == 'tool' %}
{{- '[TOOL_RESULTS] {"content": ' + message.content + ', "call_id": "' + message.tool_call_id }}
{{- '"}[/TOOL_RESULTS]' }}
{%- else %}
{{- ' ' + message.content + eos_token }}
{%- endif %}
{%- endfor %}"""
MISTRAL_ARGS = """{{- bos_token }}
{%- if tools %}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{{- '[INST]' + message.content + '[/INST]' }}
{%- elif message.role == 'tool' %}
{{- '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
{%- else %}
{{- message.content }}
{%- for tool_call in message.tool_calls or [] %}
{{- '[TOOL_CALLS]' + tool_call.function.name + '[ARGS]' }}
{{- tool_call.function.arguments | tojson }}
{%- endfor %}{{- eos_token }}
{%- endif %}
{%- endfor %}"""
MISTRAL_IDS = MISTRAL_ARGS.replace(
    "tool_call.function.name + '[ARGS]'",
    "tool_call.function.name + '[CALL_ID]' + tool_call.id + '[ARGS]'",
)
TEMPLATES = {
    "Qwen": QWEN,
    "Hermes": HERMES,
    "Llama 3": LLAMA,
    "Mistral": MISTRAL,
    "Mistral, newer": MISTRAL_ARGS,
    "Mistral, ids": MISTRAL_IDS,
}
# As published: `<tool_call>` of Qwen 2.5 is an added token, not a special one.
SPECIAL = {
    "Qwen": {"<|im_start|>": True, "<|im_end|>": True, "<tool_call>": False, "</tool_call>": False},
    "Hermes": {"<|im_start|>": True, "<|im_end|>": True, "<tool_call>": True, "</tool_call>": True},
    "Llama 3": {"<|start_header_id|>": True, "<|eot_id|>": True, "<|python_tag|>": True},
    "Mistral": {"[INST]": True, "[/INST]": True, "[TOOL_CALLS]": True},
    "Mistral, newer": {"[INST]": True, "[TOOL_CALLS]": True, "[ARGS]": True},
    "Mistral, ids": {"[INST]": True, "[TOOL_CALLS]": True, "[CALL_ID]": True, "[ARGS]": True},
}
WEATHER = {
    "name": "weather",
    "description": "Tells the weather.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Rom", "Bonn"]}, "days": {"type": "integer"}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
# Small, so that any model soon writes its end.
WEATHER["parameters"]["properties"]["days"] |= {"minimum": 1, "maximum": 14}
CLOCK = {"name": "clock", "description": "Tells the time."}


def spelled(name, calls, text=""):
    """An answer of a family that calls functions, as its models write it."""
    import json

    dumped = [(called, json.dumps(arguments)) for called, arguments in calls]
    if name in ("Qwen", "Hermes"):
        parts = [
            f'<tool_call>\n{{"name": "{n}", "arguments": {a}}}\n</tool_call>' for n, a in dumped
        ]
        return "\n".join(([text] if text else []) + parts)
    if name == "Llama 3":
        ((called, arguments),) = dumped
        return f'{text}{{"name": "{called}", "parameters": {arguments}}}'
    if name == "Mistral":
        listed = ", ".join(f'{{"name": "{n}", "arguments": {a}}}' for n, a in dumped)
        return f"{text}[TOOL_CALLS] [{listed}]"
    ids = "[CALL_ID]abcDEF123" if name == "Mistral, ids" else ""
    return text + "".join(f"[TOOL_CALLS]{n}{ids}[ARGS]{a}" for n, a in dumped)
