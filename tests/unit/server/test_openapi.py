"""The OpenAPI document: whole, true to the server, and its examples are taken."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route

from evermark.config import BotConfig
from evermark.config.subscription_requests import asked, asked_changes
from evermark.delivery.model import Cursor, GroupWork
from evermark.delivery.replay.plan import AskedBy, Request
from evermark.server.api import STATUSES
from evermark.server.bots import BotAsked, BotChange, KeysAsked
from evermark.server.calls import CALLS
from evermark.server.deliveries import DeliveryPage
from evermark.server.messages import ErrorAnswer
from evermark.server.openapi import document
from evermark.server.replays import ReplayAsked
from evermark.server.subscriptions import PauseAsked, RotateAsked, SubscriptionAsked, SubscriptionChange
from evermark.testing.contracts.scene import P0, T0, done, event
from tests.unit.server.api_scene import BOT, SECRET, WANTED, Scene, served

# What JSON Schema 2020-12 and OpenAPI 3.1 know, of what we use: a misspelt keyword means nothing to any reader.
KEYWORDS = {
    "$ref", "additionalProperties", "anyOf", "const", "default", "description", "enum", "exclusiveMinimum", "format",
    "items", "maxItems", "maxLength", "maxProperties", "maximum", "minItems", "minLength", "minProperties", "minimum",
    "pattern", "properties", "required", "title", "type", "writeOnly",
}  # fmt: skip
TYPES = {"string", "integer", "number", "boolean", "null", "array", "object"}


@pytest.fixture(scope="module")
def doc() -> dict[str, Any]:
    return document()


def schemas_in(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield schema
    below = [*schema.get("properties", {}).values(), *schema.get("anyOf", ()), schema.get("items")]
    for one in [*below, schema.get("additionalProperties")]:
        if isinstance(one, dict):
            yield from schemas_in(one)


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for one in value.values():
            yield from references(one)
    elif isinstance(value, list):
        for one in value:
            yield from references(one)


def fits(value: Any, schema: dict[str, Any], doc: dict[str, Any]) -> bool:
    """Whether a value is what a schema says, as far as we use schemas."""
    if "$ref" in schema:
        return fits(value, doc["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]], doc)
    if "anyOf" in schema:
        return any(fits(value, one, doc) for one in schema["anyOf"])
    kinds = schema.get("type", [])
    names = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", list: "array"}
    kind = names.get(type(value), "object")
    if kinds and kind not in kinds and not (kind == "integer" and "number" in kinds):
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    if kind == "array" and "items" in schema:
        return all(fits(one, schema["items"], doc) for one in value)
    if kind == "object":
        keys = schema.get("properties", {})
        if schema.get("additionalProperties") is False and value.keys() - keys.keys():
            return False
        return set(schema.get("required", ())) <= value.keys() and all(
            fits(one, keys[key], doc) for key, one in value.items() if key in keys
        )
    return True


def test_the_document_is_well_formed(doc: dict[str, Any]) -> None:
    """GIVEN the document THEN version, info, one id per operation, parameters for each part, no dangling reference."""
    assert doc["openapi"].startswith("3.1") and doc["info"]["title"] and doc["info"]["version"]
    assert json.loads(json.dumps(doc)) == doc
    operations = [(path, op) for path, methods in doc["paths"].items() for op in methods.values()]
    idents = [op["operationId"] for _, op in operations]
    assert len(set(idents)) == len(idents)
    for path, op in operations:
        declared = {p["name"] for p in op.get("parameters", ()) if p["in"] == "path"}
        assert declared == set(re.findall(r"{(\w+)}", path))
        assert all(p.get("required") for p in op.get("parameters", ()) if p["in"] == "path")
        assert op["summary"] and all(answer["description"] for answer in op["responses"].values())
    known = {f"#/components/schemas/{name}" for name in doc["components"]["schemas"]}
    used = set(references(doc))
    assert used <= known
    assert doc["security"] == [{"bearer": []}] and "bearer" in doc["components"]["securitySchemes"]


def test_every_schema_speaks_json_schema(doc: dict[str, Any]) -> None:
    """No keyword or type that a reader of the document would not know."""
    for name, schema in doc["components"]["schemas"].items():
        for one in schemas_in(schema):
            assert one.keys() <= KEYWORDS, (name, one.keys() - KEYWORDS)
            kinds = one.get("type", [])
            assert set([kinds] if isinstance(kinds, str) else kinds) <= TYPES, name


def test_every_route_of_the_server_is_in_it_and_no_other(doc: dict[str, Any], tmp_path: Path) -> None:
    """GIVEN the routes the server has WHEN compared THEN the document names exactly those."""
    with served(tmp_path) as scene:
        there = {
            (method, re.sub(r"{(\w+):[^/]*}", r"{\1}", route.path))
            for route in scene.server.app.routes
            if isinstance(route, Route) and route.path.startswith("/v1")
            for method in (route.methods or set()) - {"HEAD"}
        }
        assert scene.get("/v1/openapi.json").json == doc
    named = {(method.upper(), path) for path, methods in doc["paths"].items() for method in methods}
    assert there == named


def test_the_examples_are_taken(doc: dict[str, Any]) -> None:
    """GIVEN each example WHEN held against its schema and given to the code that reads it THEN both take it."""
    readers: dict[Any, Callable[[dict[str, Any]], object]] = {
        SubscriptionAsked: lambda body: asked(body.pop("name"), {**body, "secret": SECRET}),
        SubscriptionChange: lambda body: asked_changes("billing", body),
        PauseAsked: PauseAsked.model_validate,
        RotateAsked: RotateAsked.model_validate,
        BotAsked: lambda body: asked(body.pop("name"), {**body, "secret": SECRET}, BotConfig),
        BotChange: BotChange.model_validate,
        KeysAsked: KeysAsked.model_validate,
        ReplayAsked: ReplayAsked.model_validate,
    }
    seen = 0
    for call in CALLS:
        if call.body is None:
            continue
        content = doc["paths"][call.path][call.method.lower()]["requestBody"]["content"]["application/json"]
        example = dict(content["example"])
        assert fits(example, content["schema"], doc), call
        readers[call.body](example)
        seen += 1
    assert seen == 8


def test_the_document_takes_what_the_server_takes(doc: dict[str, Any]) -> None:
    """The keys are the file's, without those that only the file may have."""
    schemas = doc["components"]["schemas"]
    asked_keys = set(schemas["SubscriptionAsked"]["properties"])
    assert {"name", "url", "secret", "from", "where"} <= asked_keys and "allow_networks" not in asked_keys
    assert asked_keys - set(schemas["SubscriptionChange"]["properties"]) == {"name", "from", "secret"}
    assert fits(WANTED, schemas["SubscriptionAsked"], doc)
    assert not fits({**WANTED, "urls": 1}, schemas["SubscriptionAsked"], doc)
    assert not fits({"bundle": "many"}, schemas["SubscriptionChange"], doc)


def test_answers_are_as_the_document_says(doc: dict[str, Any], tmp_path: Path) -> None:
    """GIVEN a real exchange of every route WHEN each answer is held against its schema THEN it fits, errors too."""
    with served(tmp_path) as scene:
        for call in (*CALLS[:2], *CALLS[1:]):
            ident = _prepared(scene, call.path)
            body = {**WANTED, "name": "other"} if call.path == "/v1/subscriptions" and call.writes else call.example
            if call.path == "/v1/bots" and call.writes:
                body = {**BOT, "name": "another"}
            name = "helper" if call.path.startswith("/v1/bots") else "billing"
            told = scene.ask(
                call.method, call.path.format(name=name, id=ident, session="session-17", replay=_replay(scene)), body
            )
            answers = doc["paths"][call.path][call.method.lower()]["responses"]
            assert str(told.status) in answers, (call.method, call.path, told.text)
            if told.text:
                schema = answers[str(told.status)]["content"]["application/json"]["schema"]
                assert fits(told.json, schema, doc), (call, told.text)


def _replay(scene: Scene) -> str:
    """A replay to ask about."""
    return scene.replays.request(Request(AskedBy.API, "shop", T0, T0), scene.epoch)


def _prepared(scene: Scene, path: str) -> int:
    """A subscription and a parked delivery to ask about, whatever was removed before."""
    if "billing" not in scene.store.subscriptions():
        assert scene.post("/v1/subscriptions", WANTED).status == 201
    if "helper" not in scene.store.subscriptions():
        assert scene.post("/v1/bots", BOT).status == 201
    if "{id}" in path and not scene.store.parked.rows():
        members = scene.store.group().members
        at = scene.store.group().cursors[P0].batch
        outcomes = [done(name, *([event(at + 1)] if name == "billing" else [])) for name in members]
        if "billing" not in members:
            scene.store.settle_subscription(
                "billing", P0, Cursor(0), Cursor(1), done("billing", event(1)), T0, scene.epoch
            )
        else:
            scene.store.settle_group(GroupWork(P0, Cursor(at), Cursor(at + 1), members), outcomes, T0, scene.epoch)
    return next((row.id for row in scene.store.parked.rows()), 1)


def test_every_status_an_error_may_have_is_described(doc: dict[str, Any]) -> None:
    """The table of statuses and the document know the same ones."""
    described = {
        int(status) for methods in doc["paths"].values() for op in methods.values() for status in op["responses"]
    }
    assert {*STATUSES.values(), 400, 401, 403, 413, 500} <= described
    assert ErrorAnswer.model_fields.keys() == {"error"} and DeliveryPage.model_fields.keys() == {"deliveries", "after"}
