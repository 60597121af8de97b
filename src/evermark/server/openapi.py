"""The OpenAPI document of the HTTP API, from the same table and the same models that answer it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from evermark import durations
from evermark.config.fields import NAME
from evermark.config.subscriptions import DELIVERED_OPS
from evermark.server.bot_shapes import BotAsked
from evermark.server.routes import ROUTES
from evermark.server.routing import Route
from evermark.server.shapes import ErrorAnswer, SubscriptionAsked, SubscriptionChange

OPENAPI = "3.1.0"
_REF = "#/components/schemas/{model}"
# What only the operator's file may say, and what is given once.
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


def document() -> dict[str, Any]:
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
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
        "components": {
            "schemas": schemas(),
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def schemas() -> dict[str, Any]:
    taken: list[type[BaseModel]] = [route.body for route in ROUTES if route.body is not None]
    given: list[type[BaseModel]] = [ErrorAnswer, *(route.answer for route in ROUTES if route.answer is not None)]
    wanted: list[tuple[type[BaseModel], Any]] = [(model, "validation") for model in dict.fromkeys(taken)]
    wanted += [(model, "serialization") for model in dict.fromkeys(given)]
    _, made = models_json_schema(wanted, ref_template=_REF)
    found: dict[str, Any] = _standard(made["$defs"])
    found.pop("Op")  # told where it is used, with those that are delivered
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


def _operation(route: Route) -> dict[str, Any]:
    said: dict[str, Any] = {"operationId": _name(route), "summary": route.text}
    parameters = list(_parameters(route))
    if parameters:
        said["parameters"] = parameters
    if route.body is not None:
        content: dict[str, Any] = {"schema": {"$ref": _REF.format(model=route.body.__name__)}}
        if route.example is not None:
            content["example"] = dict(route.example)
        said["requestBody"] = {"required": route.body_required, "content": {"application/json": content}}
    good: dict[str, Any] = {"description": "Done" if route.writes else "OK"}
    if route.answer is not None:
        good["content"] = {"application/json": {"schema": {"$ref": _REF.format(model=route.answer.__name__)}}}
    statuses = [401, 500, 503]
    statuses += [403] if route.needs_all else []
    statuses += [404] if "{" in route.path else []
    statuses += [400, 413, 422] if route.body is not None else [422] if route.query else []
    statuses += [409] if route.body is not None or route.method == "DELETE" else []
    said["responses"] = {str(route.status): good, **_errors(*sorted(statuses))}
    return said


def _name(route: Route) -> str:
    words = [part for part in route.path.split("/")[2:] if part and not part.startswith("{")]
    return "_".join([route.method.lower(), *(["one"] if route.path.endswith("}") else []), *words])


def _parameters(route: Route) -> Iterator[dict[str, Any]]:
    for part in route.path.split("/"):
        if part.startswith("{"):
            kind = "integer" if part == "{id}" else "string"
            yield {"name": part.strip("{}"), "in": "path", "required": True, "schema": {"type": kind}}
    for one in route.query:
        yield {"name": one.name, "in": "query", "description": one.text, "schema": {"type": one.type}}


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
