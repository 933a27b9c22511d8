"""A model's name for each domain, in vLLM's server: a request for `NAME:math` is one for NAME corrected for `math`."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from suture.vllm.slots import DOMAINS, KEY

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class DomainNames:
    """ASGI middleware for `vllm serve --middleware`; a domain that the request itself names in `vllm_xargs` wins."""

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass a request on, with `vllm_xargs.suture_domain` set where the model's name says a domain."""
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self.app(scope, receive, send)
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] != "http.request":  # the client has gone
                return None
            body += message.get("body", b"")
            more = message.get("more_body", False)
        changed = with_domain(body)
        if changed is not body and not _carries(scope):
            return await _refuse(send)
        length = str(len(changed)).encode()
        headers = [(name, length if name == b"content-length" else value) for name, value in scope["headers"]]
        given = False

        async def replay() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": changed, "more_body": False}

        return await self.app({**scope, "headers": headers}, replay, send)


def _carries(scope: Message) -> bool:
    """Whether the server's model is one of the plugin's; another would answer without the domain's correction."""
    config = getattr(getattr(scope.get("app"), "state", None), "vllm_config", None)
    processors = getattr(getattr(config, "model_config", None), "logits_processors", None) or ()
    return any(DOMAINS in str(each) for each in processors)


async def _refuse(send: Send) -> None:
    message = "vLLM does not run this model by suture's plugin, so that no domain can be chosen by the model's name"
    body = json.dumps(
        {"error": {"message": message, "type": "BadRequestError", "param": "model", "code": 400}}
    ).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def with_domain(body: bytes) -> bytes:
    """A request's body with the domain from its model's name; the same bytes where there is none to set."""
    try:
        request = json.loads(body)
    except ValueError:
        return body  # vLLM says what is wrong with it
    if not isinstance(request, dict) or not isinstance(request.get("model"), str):
        return body
    _, colon, domain = request["model"].rpartition(":")
    given = request.get("vllm_xargs") or {}
    if not colon or not isinstance(given, dict) or KEY in given:
        return body
    return json.dumps({**request, "vllm_xargs": {**given, KEY: domain}}).encode()
