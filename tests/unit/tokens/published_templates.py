"""Chat templates with the structure of published ones, one for each way of taking messages. Their words are our own."""

LLAMA_VISION = """
{{- bos_token }}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = '' %}
{%- endif %}
{%- set seen = namespace(images=false) %}
{%- for message in messages %}
    {%- for content in message['content'] %}
        {%- if content['type'] == 'image' %}{%- set seen.images = true %}{%- endif %}
    {%- endfor %}
{%- endfor %}
{%- if seen.images and system_message %}{{- raise_exception('no system prompt with images') }}{%- endif %}
{%- if system_message or tools is not none %}
    {{- '<head>system</head>' + system_message + '<eot>' }}
{%- endif %}
{%- if tools is not none %}
    {%- set first = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
    {{- '<head>user</head>Answer as {"name": function name, "parameters": dictionary of arguments}.\n' }}
    {%- for tool in tools %}{{- tool | tojson(indent=4) + '\n\n' }}{%- endfor %}
    {{- first + '<eot>' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<head>' + message['role'] + '</head>' }}
        {%- if message['content'] is string %}
            {{- message['content'] }}
        {%- else %}
            {%- for content in message['content'] %}
                {%- if content['type'] == 'image' %}{{- '<image>' }}{%- elif content['type'] == 'text' %}{{- content['text'] }}{%- endif %}
            {%- endfor %}
        {%- endif %}
        {{- '<eot>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<head>assistant</head>{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- '}<eot>' }}
    {%- else %}
        {{- '<head>ipython</head>' }}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}{%- else %}{{- message.content }}{%- endif %}
        {{- '<eot>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<head>assistant</head>' }}{%- endif %}
"""

LLAVA_NEXT = (
    "{% for message in messages %}{% if message['role'] == 'system' %}{{ '<<S>>\n' + message['content'][0]['text'] + '\n<</S>>' }}"
    "{% elif message['role'] == 'user' %}{{ '[I] ' }}{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}"
    "{{ '<image>\n' }}{% endfor %}{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] }}"
    "{% endfor %}{{ ' [/I]' }}{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'][0]['text'] + eos_token }}{% endif %}{% endfor %}"
)

LLAVA_ONEVISION = (
    "{% for message in messages %}{{ '<s>' + message['role'] + ' ' }}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>' }}{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'video') %}{{ '<video>' }}{% endfor %}"
    "{% if message['role'] != 'assistant' %}{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ '\n' + content['text'] }}{% endfor %}{% else %}{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{% generation %}{{ '\n' + content['text'] }}{% endgeneration %}{% endfor %}{% endif %}{{ '<e>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)

QWEN2_VL = (
    "{% set images = namespace(value=0) %}{% for message in messages %}{% if loop.first and message['role'] != 'system' %}<s>system\n"
    "Be of help.<e>\n{% endif %}<s>{{ message['role'] }}\n{% if message['content'] is string %}{{ message['content'] }}<e>\n"
    "{% else %}{% for content in message['content'] %}{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
    "{% set images.value = images.value + 1 %}{% if add_vision_id %}Picture {{ images.value }}: {% endif %}<v><image><w>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<e>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)

QWEN3_VL = """{%- if tools %}
    {{- '<s>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {%- if messages[0].content is string %}{{- messages[0].content }}{%- else %}{%- for content in messages[0].content %}{%- if 'text' in content %}{{- content.text }}{%- endif %}{%- endfor %}{%- endif %}
        {{- '\\n\\n' }}
    {%- endif %}
    {{- '<tools>' }}{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\n<tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call><e>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<s>system\\n' }}
    {%- if messages[0].content is string %}{{- messages[0].content }}{%- else %}{%- for content in messages[0].content %}{%- if 'text' in content %}{{- content.text }}{%- endif %}{%- endfor %}{%- endif %}
    {{- '<e>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<s>user\\n' }}
        {%- if message.content is string %}{{- message.content }}{%- else %}{%- for content in message.content %}{%- if content.type == 'image' or 'image' in content %}{{- '<image>' }}{%- elif 'text' in content %}{{- content.text }}{%- endif %}{%- endfor %}{%- endif %}
        {{- '<e>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<s>assistant\\n' }}
        {%- if message.content is string %}{{- message.content }}{%- else %}{%- for part in message.content %}{%- if 'text' in part %}{{- part.text }}{%- endif %}{%- endfor %}{%- endif %}
        {%- if message.tool_calls %}
            {%- for call in message.tool_calls %}
                {%- if (loop.first and message.content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
                {%- if call.function %}{%- set call = call.function %}{%- endif %}
                {{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
                {%- if call.arguments is string %}{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}{%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<e>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or (messages[loop.index0 - 1].role != 'tool') %}{{- '<s>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' }}
        {%- if message.content is string %}{{- message.content }}{%- else %}{%- for part in message.content %}{%- if 'text' in part %}{{- part.text }}{%- endif %}{%- endfor %}{%- endif %}
        {{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != 'tool') %}{{- '<e>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<s>assistant\\n' }}{%- endif %}"""

INTERNVL = (
    "{% for message in messages %}{{ '<s>' + message['role'] + '\n' }}{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for content in message['content'] %}{% if content['type'] == 'image' %}{{ '<image>\n' }}{% elif content['type'] == 'video' %}"
    "{{ '<video>\n' }}{% elif content['type'] == 'text' %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<e>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)

IDEFICS3 = (
    "<s>{% for message in messages %}{{ message['role'] | capitalize }}{% if message['content'][0]['type'] == 'image' %}{{ ':' }}"
    "{% else %}{{ ': ' }}{% endif %}{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<e>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)

GEMMA3 = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set prefix = messages[0]['content'] + '\n\n' -%}
    {%- else -%}
        {%- set prefix = messages[0]['content'][0]['text'] + '\n\n' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("turns must alternate") }}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<turn>' + role + '\n' + (prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}{{ '<image>' }}{%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("unknown content") }}
    {%- endif -%}
    {{ '<end>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<turn>model\n' }}{%- endif -%}
"""

PIXTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message['role'] not in ['user', 'assistant'] or (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('users and assistants take turns') }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {{- "[I]" }}
        {%- if loop.last and system_message is defined %}{{- system_message + "\n\n" }}{%- endif %}
        {%- if message["content"] is not string %}
            {%- for chunk in message["content"] %}
                {%- if chunk["type"] == "text" %}{{- chunk["text"] }}{%- elif chunk["type"] == "image" %}{{- "<image>" }}{%- else %}{{- raise_exception("unknown part") }}{%- endif %}
            {%- endfor %}
        {%- else %}
            {{- message["content"] }}
        {%- endif %}
        {{- "[/I]" }}
    {%- else %}
        {{- message["content"] + eos_token }}
    {%- endif %}
{%- endfor %}
"""

MISTRAL_TOOLS = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- if messages[0]['content'] is string %}{%- set system = messages[0]['content'] %}{%- else %}{%- set system = messages[0]['content'][0]['text'] %}{%- endif %}
    {{- '[S]' + system + '[/S]' }}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- set last_user = (messages | selectattr('role', 'equalto', 'user') | list)[-1] %}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {%- if tools is not none and message == last_user %}{{- '[TOOLS]' + tools | tojson + '[/TOOLS]' }}{%- endif %}
        {%- if message['content'] is string %}
            {{- '[I]' + message['content'] + '[/I]' }}
        {%- else %}
            {{- '[I]' }}{%- for block in message['content'] %}{%- if block['type'] == 'text' %}{{- block['text'] }}{%- else %}{{- '<image>' }}{%- endif %}{%- endfor %}{{- '[/I]' }}
        {%- endif %}
    {%- elif message['role'] == 'assistant' and message.tool_calls is defined and message.tool_calls is not none %}
        {{- '[CALLS][' }}
        {%- for call in message.tool_calls %}
            {%- if call.id is undefined or call.id | length != 9 %}{{- raise_exception('ids of calls have nine characters') }}{%- endif %}
            {%- set out = call.function | tojson %}
            {{- out[:-1] + ', "id": "' + call.id + '"}' }}{%- if not loop.last %}{{- ', ' }}{%- endif %}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif message['role'] == 'assistant' %}
        {%- if message['content'] is string %}{{- message['content'] + eos_token }}{%- else %}{{- message['content'][0]['text'] + eos_token }}{%- endif %}
    {%- elif message['role'] == 'tool' %}
        {{- '[RESULT]{"content": ' + message.content | string + ', "call_id": "' + message.tool_call_id + '"}[/RESULT]' }}
    {%- else %}
        {{- raise_exception('unknown role') }}
    {%- endif %}
{%- endfor %}"""

PHI = (
    "{% for message in messages %}{{ '<' + message['role'] + '>\n' + message['content'] + '<end>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>\n' }}{% else %}{{ eos_token }}{% endif %}"
)

PHI_WITHOUT_SYSTEM = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ '<user>\n' + message['content'] + '<end>\n<assistant>\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + '<end>\n' }}{% endif %}{% endfor %}"
)

ULTRAVOX = (
    "{{ bos_token }}{% for message in messages %}{% set content = '<head>' + message['role'] + '</head>\n\n' + message['content'] | trim + '<eot>' %}"
    "{{ content }}{% endfor %}{% if add_generation_prompt %}{{ '<head>assistant</head>\n\n' }}{% endif %}"
)

QWEN2_AUDIO = (
    "{% set count = namespace(value=0) %}{% for message in messages %}{% if loop.first and message['role'] != 'system' %}<s>system\nBe of help.<e>\n"
    "{% endif %}<s>{{ message['role'] }}\n{% if message['content'] is string %}{{ message['content'] }}<e>\n{% else %}"
    "{% for content in message['content'] %}{% if 'audio' in content or 'audio_url' in content or message['type'] == 'audio' %}"
    "{% set count.value = count.value + 1 %}Audio {{ count.value }}: <audio>\n{% elif 'text' in content %}{{ content['text'] }}{% endif %}"
    "{% endfor %}<e>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)

GRANITE = """{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set system_message = 'Today is ' + strftime_now('%Y') + '.' %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- '<r>system</r>' + system_message + '<e>\n' }}
{%- if tools %}{{- '<r>tools</r>' + tools | tojson(indent=4) + '<e>\n' }}{%- endif %}
{%- for message in loop_messages %}
    {{- '<r>' + message['role'] + '</r>' + message['content'] + '<e>\n' }}
    {%- if loop.last and add_generation_prompt %}{{- '<r>assistant</r>' }}{%- endif %}
{%- endfor %}"""

DEEPSEEK = """{{- bos_token }}
{%- set state = namespace(system='') %}
{%- for message in messages %}{%- if message['role'] == 'system' %}{%- set state.system = state.system + message['content'] + '\n' %}{%- endif %}{%- endfor %}
{{- state.system }}
{%- if tools %}{{- tools | tojson }}{%- endif %}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{{- '<U>' + message['content'] + '<A>' }}{%- endif %}
    {%- if message['role'] == 'assistant' and message['tool_calls'] %}
        {%- for call in message['tool_calls'] %}{{- '<call>' + call['function']['name'] + '\n```json\n' + call['function']['arguments'] + '\n```</call>' }}{%- endfor %}
    {%- elif message['role'] == 'assistant' %}{{- message['content'] + eos_token }}{%- endif %}
    {%- if message['role'] == 'tool' %}{{- '<result>' + message['content'] + '</result>' }}{%- endif %}
{%- endfor %}"""

VOXTRAL = (
    "{{ bos_token }}{%- for message in messages -%}{%- if message['role'] == 'system' -%}{{- '[S]' + message['content'][0]['text'] + '[/S]' -}}"
    "{%- elif message['role'] == 'user' -%}{{- '[I]' -}}{%- for part in message['content'] -%}"
    "{{- '<audio>' if part['type'] == 'audio' else part['text'] -}}{%- endfor -%}{{- '[/I]' -}}"
    "{%- else -%}{{- message['content'][0]['text'] + eos_token -}}{%- endif -%}{%- endfor -%}"
)

TEMPLATES = {name.lower(): source for name, source in globals().items() if name.isupper() and isinstance(source, str)}
