"""Chat templates of published models, and a chat that each supports."""

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception("
    "'Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}"
    "{% endif %}{% endfor %}"
)
LLAMA_3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    "+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{% endif %}"
)
ZEPHYR = """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}
"""
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception("
    "'Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}"
    "{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\n' "
    "+ message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}"
    "{{'<start_of_turn>model\n'}}{% endif %}"
)
# What larger templates use: dates, tools, namespaces, loop controls, JSON, training marks.
TOOLS = """{{- bos_token }}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- set ns = namespace(found=false, last=0) %}
{%- set extra = dict(style='plain') %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.role == 'user' %}
        {%- set ns.found = true %}
        {%- set ns.last = index %}
        {%- break %}
    {%- endif %}
{%- endfor %}
    {% if documents is not none %}
  documents
    {% endif %}
{%- if tools is none and strftime_now is defined %}
    {{- 'Year: ' + strftime_now('%Y') + '\n' }}
{%- endif %}
{{ extra.style }} {{ ns.last }} {{ pad_token }}
  {# a comment #}
{% for message in messages %}
    {% if message.role == 'tool' %}{% continue %}{% endif %}
    {% if message.role == 'assistant' %}
<|assistant|>
    {% generation %}
    {%- set quoted = message.content | tojson %}
{{ quoted }}{{ message | tojson(indent=2) }}
    {% endgeneration %}
    {% else %}
<|{{ message.role }}|>{{ message['content'] | tojson }}{{ quoted }}
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}<|assistant|>
{% endif %}

"""
TEMPLATES = {
    "ChatML": CHATML,
    "Llama 2": LLAMA_2,
    "Llama 3": LLAMA_3,
    "Zephyr": ZEPHYR,
    "Gemma": GEMMA,
    "tools": TOOLS,
}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
QUESTION = [{"role": "user", "content": " What is 1 < 2 & \"so\" on?\n'é' "}]
TURNS = [
    *QUESTION,
    {"role": "assistant", "content": "<b>True</b>\n"},
    {"role": "user", "content": "Why?"},
]
SYSTEM = [{"role": "system", "content": "Be brief."}, *QUESTION]
