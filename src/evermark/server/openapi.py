"""The OpenAPI document of the HTTP API, from the same table and the same models that answer it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from functools import cache
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from evermark import durations
from evermark.config.subscriptions import DELIVERED_OPS
from evermark.server.bots import BotAsked
from evermark.server.calls import CALLS, Call
from evermark.server.followed import FOLLOWED
from evermark.server.messages import Asked, ErrorAnswer
from evermark.server.subscriptions import SubscriptionAsked, SubscriptionChange
from evermark.settings.fields import NAME

OPENAPI = "3.1.0"
_TEXT = {"type": "string"}
_REF = "#/components/schemas/{model}"
# Keys that only the operator's file may have, and keys that are given once.
_NOT_BY_API = ("allow_networks",)
_NOT_CHANGED = ("name", "from", "secret")
_ERRORS = {
    400: "The body is not JSON",
    401: "No token, or none that is known",
    403: "The token may only read",
    404: "There is no such thing",
    409: "It is there already, or the file made it",
    413: "The body is too large",
    422: "A key or value is not right; the message names it",
    500: "The instance has trouble of its own; its log says which",
    503: "Starting, busy or without its state just now: come back after Retry-After seconds",
}


@cache
def document_text() -> bytes:
    """As it is served. It is made when first asked for: a tenth of a second of processor."""
    return json.dumps(document()).encode()


def document() -> dict[str, Any]:
    paths: dict[str, dict[str, Any]] = {}
    for call in CALLS:
        paths.setdefault(call.path, {})[call.method.lower()] = _operation(call)
    for path, query in FOLLOWED.items():
        paths[path] = {"get": _followed(path, query)}
    paths["/v1/openapi.json"] = {
        "get": {
            "operationId": "get_openapi",
            "summary": "This document",
            "responses": {"200": {"description": "OK"}, **_errors(401)},
        }
    }
    return {
        "openapi": OPENAPI,
        "info": {"title": "Evermark", "version": version("evermark"), "description": "Subscriptions and deliveries."},
        "security": [{"bearer": []}],
        "paths": paths,
        "components": {"schemas": schemas(), "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}}},
    }


def schemas() -> dict[str, Any]:
    taken: list[type[BaseModel]] = [call.body for call in CALLS if call.body is not None]
    given: list[type[BaseModel]] = [ErrorAnswer, *(call.answer for call in CALLS if call.answer is not None)]
    wanted: list[tuple[type[BaseModel], Any]] = [(model, "validation") for model in dict.fromkeys(taken)]
    wanted += [(model, "serialization") for model in dict.fromkeys(given)]
    _, made = models_json_schema(wanted, ref_template=_REF)
    found: dict[str, Any] = _standard(made["$defs"])
    found.pop("Op")  # its delivered values stand at the key `ops`
    for model in (SubscriptionAsked, SubscriptionChange, BotAsked):
        _as_taken(found[model.__name__])
    change = found[SubscriptionChange.__name__]
    for asked in (SubscriptionAsked, BotAsked):
        found[asked.__name__]["properties"]["name"]["pattern"] = NAME
    for key in _NOT_CHANGED:
        change["properties"].pop(key, None)
    change.pop("required", None)
    for name, key in change["properties"].items():
        key.pop("default", None)
        if name != "url":
            change["properties"][name] = {"anyOf": [key, {"type": "null"}]}
    return found


def _as_taken(schema: dict[str, Any]) -> None:
    """Where the model says less than its validators: a secret may stand alone, some operations are not delivered."""
    keys = schema["properties"]
    for key in _NOT_BY_API:
        keys.pop(key)
    one = {"type": "string", "writeOnly": True, "description": "whsec_ and the base64 of 24 to 64 bytes"}
    keys["secret"] = {"anyOf": [one, {"type": "array", "items": one, "maxItems": 4}]}
    keys["ops"]["items"] = {"type": "string", "enum": list(DELIVERED_OPS)}
    keys["timeout"]["default"] = durations.show(timedelta(seconds=10))


def _standard(schema: Any) -> Any:
    """Bounds that stand behind a validator keep the validator's words."""
    words = {"ge": "minimum", "le": "maximum", "gt": "exclusiveMinimum", "lt": "exclusiveMaximum"}
    if isinstance(schema, dict):
        return {words.get(key, key): _standard(value) for key, value in schema.items()}
    return [_standard(one) for one in schema] if isinstance(schema, list) else schema


def _operation(call: Call) -> dict[str, Any]:
    words = [part for part in call.path.split("/")[2:] if part and not part.startswith("{")]
    name = "_".join([call.method.lower(), *(["one"] if call.path.endswith("}") else []), *words])
    said: dict[str, Any] = {"operationId": name, "summary": call.summary}
    if parameters := list(_parameters(call.path, call.query)):
        said["parameters"] = parameters
    if call.body is not None:
        content: dict[str, Any] = {"schema": {"$ref": _REF.format(model=call.body.__name__)}}
        if call.example is not None:
            content["example"] = dict(call.example)
        said["requestBody"] = {"required": not call.body_optional, "content": {"application/json": content}}
    good: dict[str, Any] = {"description": "Done" if call.writes else "OK"}
    if call.answer is not None:
        good["content"] = {"application/json": {"schema": {"$ref": _REF.format(model=call.answer.__name__)}}}
    statuses = [401, 500, 503]
    statuses += [403] if call.needs_all else []
    statuses += [404] if "{" in call.path else []
    statuses += [400, 413, 422] if call.body is not None else [422] if call.query.model_fields else []
    statuses += [409] if call.body is not None or call.method == "DELETE" else []
    said["responses"] = {str(call.status): good, **_errors(*sorted(statuses))}
    return said


def _followed(path: str, query: type[Asked]) -> dict[str, Any]:
    """A call of the live tail, whose answer does not end."""
    what = "what a subscription wants" if "{name}" in path else "a wish"
    last_id = {"name": "Last-Event-ID", "in": "header", "description": "Go on after this event.", "schema": _TEXT}
    good = {"description": "Server-sent events (docs/tail.md)", "content": {"text/event-stream": {"schema": _TEXT}}}
    return {
        "operationId": "_".join(["get", *(part for part in path.split("/")[2:] if not part.startswith("{"))]),
        "summary": f"Follow the events of {what}, as they come",
        "parameters": [*_parameters(path, query), last_id],
        "responses": {"200": good, **_errors(401, *([404] if "{" in path else []), 422, 500, 503)},
    }


def _parameters(path: str, query: type[Asked]) -> Iterator[dict[str, Any]]:
    for part in path.split("/"):
        if part.startswith("{"):
            kind = "integer" if part == "{id}" else "string"
            yield {"name": part.strip("{}"), "in": "path", "required": True, "schema": {"type": kind}}
    for name, schema in query.model_json_schema().get("properties", {}).items():
        said = {key: value for key, value in schema.items() if key not in ("title", "description", "default")}
        yield {"name": name, "in": "query", "description": schema["description"], "schema": said}


def _errors(*statuses: int) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": _REF.format(model=ErrorAnswer.__name__)}}}
    retry = {"Retry-After": {"schema": {"type": "integer"}, "description": "seconds"}}
    return {
        str(status): {
            "description": _ERRORS[status],
            "content": content,
            **({"headers": retry} if status == 503 else {}),
        }
        for status in statuses
    }
