"""Malformed request bodies from a seed, so that failures are reproducible."""

import base64
import json
from random import Random
from typing import Any

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
GOOD_URL = "data:image/png;base64," + base64.b64encode(PNG).decode()
ODD: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**63,
    10**30,
    1e308,
    -0.0,
    "",
    "x",
    "\x00",
    "\u202e",
    "é" * 50,
    "<image>",
    "A" * 3000,
    [],
    [[]],
    {},
    {"a": {"b": []}},
    [None] * 40,
)
URLS = (
    "data:,",
    "data:image/png;base64,",
    "data:image/png;base64,AAAA",
    "data:image/png;base64,A===",
    "data:text/html;base64,PGI+",
    "data:image/svg+xml;utf8,<svg/>",
    "http://127.0.0.1/",
    "http://[::1]/",
    "http://2130706433/",
    "https://a@b/",
    "https://\u2024/",
    "https://" + "a." * 200,
    "file:///etc/passwd",
    "javascript:1",
    "//",
    "http://",
    "http://[",
    "https://example.com:99999/",
)
FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "n", "seed", "stop", "stop_token_ids", "min_tokens", "max_tokens",
    "max_completion_tokens", "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "logprobs",
    "top_logprobs", "response_format", "tools", "tool_choice", "stream", "stream_options", "user", "priority",
    "cache_salt", "ignore_eos", "modalities", "audio", "functions", "prediction", "metadata", "echo", "suffix",
)  # fmt: skip

OTHER_FIELDS = (
    "stream", "tools", "tool_choice", "text", "reasoning", "include", "metadata", "store", "previous_response_id",
    "instructions", "system", "thinking", "output_config", "stop_sequences", "temperature", "model_fields", "copy",
)  # fmt: skip


class Bodies:
    """An endless supply of (path, body)."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._calm = False
        """Whether this body is nearly a good one: otherwise few would get past the first check."""

    def next(self) -> tuple[str, bytes]:
        random = self._random
        self._calm = random.random() < 0.5
        kind = random.random()
        if kind < 0.05:
            return "/v1/chat/completions", random.randbytes(random.randrange(200))
        if kind < 0.15:
            prompt = random.choice((*ODD, ["x"], ["x", "y"], [1, 2]))
            return "/v1/completions", self._bytes({"model": self._model(), "prompt": prompt, **self._fields()})
        if kind < 0.35:
            return self._other_form(messages=kind < 0.25)
        if kind < 0.45:
            body = {"messages": self._messages()} if random.random() < 0.7 else {"prompt": random.choice(ODD)}
            return "/tokenize", self._bytes({"model": self._model(), **body})
        document = {"model": self._model(), "messages": self._messages(), **self._fields()}
        return "/v1/chat/completions", self._bytes(document)

    def _other_form(self, *, messages: bool) -> tuple[str, bytes]:
        """A body of Messages, or of Responses."""
        random = self._random
        turns = self._messages()
        for turn in turns if isinstance(turns, list) else ():
            for part in turn["content"] if isinstance(turn, dict) and isinstance(turn.get("content"), list) else ():
                if isinstance(part, dict) and random.random() < 0.95:
                    self._reshape(part, messages=messages)
        fields = {} if random.random() < 0.5 else {random.choice(OTHER_FIELDS): random.choice(ODD)}
        if messages:
            path = random.choice(("/v1/messages", "/v1/messages", "/v1/messages/count_tokens"))
            most = {"max_tokens": 5} if path == "/v1/messages" else {}
            return path, self._bytes({"model": self._model(), "messages": turns, **most, **fields})
        return "/v1/responses", self._bytes({"model": self._model(), "input": turns, **fields})

    def _reshape(self, part: dict[str, Any], *, messages: bool) -> None:
        """Turn a part of a chat's message into a block of Messages, or a part of Responses."""
        if part.get("type") == "text" and not messages:
            part["type"] = self._random.choice(("input_text", "output_text"))
        elif part.get("type") == "image_url":
            image = part.pop("image_url")
            url = image.get("url") if isinstance(image, dict) else image
            if messages:
                part |= {"type": "image", "source": {"type": "url", "url": url}}
            else:
                part |= {"type": "input_image", "image_url": url}

    def _bytes(self, document: Any) -> bytes:
        body = json.dumps(document).encode()
        if self._random.random() < 0.1 and body:  # truncated, or one byte changed
            at = self._random.randrange(len(body))
            flip = bytes([self._random.randrange(256)])
            return body[:at] if self._random.random() < 0.5 else body[:at] + flip + body[at + 1 :]
        return body

    def _model(self) -> Any:
        return "demo" if self._random.random() < 0.9 else self._random.choice(ODD)

    def _fields(self) -> dict[str, Any]:
        random = self._random
        chosen = random.sample(FIELDS, random.randrange(2 if self._calm else 4))
        return {name: self._value(name) for name in chosen}

    def _value(self, name: str) -> Any:
        random = self._random
        good: dict[str, tuple[Any, ...]] = {
            "n": (1, 3, 128),
            "logprobs": (True, 1),
            "stream": (True, True, True),
            "stream_options": ({"include_usage": True},),
            "logit_bias": ({"5": 1}, {"x": 1}, {"1" * 5000: 0}),
            "response_format": ({"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": {}}}),
            "tools": ([{"type": "function", "function": {"name": "f"}}], [{}]),
        }
        return random.choice((*good.get(name, ()), *good.get(name, ()), *ODD))

    def _messages(self) -> Any:
        random = self._random
        if random.random() < 0.05 and not self._calm:
            return random.choice(ODD)
        return [self._message() for _ in range(random.randrange(1, 4))]

    def _message(self) -> Any:
        random = self._random
        if random.random() < 0.05 and not self._calm:
            return random.choice(ODD)
        roles = ("user", "user", "assistant", "system", "developer")
        role = random.choice(roles if self._calm else (*roles, "tool", *ODD[:2]))
        if random.random() < 0.2 and not self._calm:
            return {"role": role, "content": random.choice(ODD)}
        return {"role": role, "content": [self._part() for _ in range(random.randrange(5))]}

    def _part(self) -> Any:
        random = self._random
        if self._calm and random.random() < 0.9:
            text = {"type": "text", "text": random.choice(("", "x", "<image>", "é" * 50))}
            return text if random.random() < 0.7 else {"type": "image_url", "image_url": {"url": GOOD_URL}}
        kind = random.random()
        if kind < 0.1:
            return random.choice(ODD)
        if kind < 0.3:
            return {"type": "text", "text": random.choice(ODD)}
        if kind < 0.4:
            return {"type": random.choice(("input_audio", "video_url", "image", "refusal")), "input_audio": {}}
        return {"type": "image_url", "image_url": self._image()}

    def _image(self) -> Any:
        random = self._random
        kind = random.random()
        if kind < 0.1:
            return random.choice(ODD)
        if kind < 0.3:
            return {"url": random.choice(URLS), "detail": random.choice(("low", "high", *ODD[:3]))}
        media = bytearray(PNG)
        for _ in range(random.randrange(3)):
            media[random.randrange(len(media))] = random.randrange(256)
        return {"url": "data:image/png;base64," + base64.b64encode(media[: random.randrange(len(media) + 1)]).decode()}
