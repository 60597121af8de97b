"""Every key of evermark.yaml is read by some part of the program."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Literal, get_args, get_origin

from evermark.config import Config, LogConfig
from evermark.config.models import CircuitBreakerConfig, DedupConfig, ReliabilityConfig
from evermark.settings.fields import Model
from tests.syntax import tree_of
from tests.unit.config.config_file import every_model, models_in, read, source

CODE = Path(__file__).resolve().parents[3] / "src" / "evermark"
# They show what a file says, or write one: nobody acts on it there.
SHOWING = ("cli/init.py",)
Key = tuple[type[Model], str]
_LEAVES = (ast.expr_context, ast.Name, ast.Constant, ast.operator, ast.cmpop)  # two of three nodes; nothing is below


@cache
def words_of(annotation: ast.expr) -> list[str]:
    return re.findall(r"\w+", ast.unparse(annotation))


@cache
def walked(tree: ast.Module) -> tuple[ast.AST, ...]:
    return tuple(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef))


class Reader(ast.NodeVisitor):
    """Finds which keys of which models some code reads. Follows a model through annotated parameters, assignments,
    attributes, loops and functions with an annotated result: a key of the same name elsewhere does not count."""

    def __init__(self, models: Iterable[type[Model]], trees: list[ast.Module]) -> None:
        self.models = {model.__name__: model for model in models}
        self.read: set[Key] = set()
        self._names: dict[str, type[Model]] = {}
        self._results: dict[str, type[Model]] = {}
        self._attributes: dict[str, type[Model]] = {}
        for tree in trees:
            self._declarations(tree)
        for _ in range(2):  # an attribute may be set from a parameter that is seen later
            for tree in trees:
                self._names = {}
                self.visit(tree)

    def _declarations(self, tree: ast.Module) -> None:
        for node in walked(tree):
            if isinstance(node, ast.FunctionDef) and (model := self._named(node.returns)):
                self._results[node.name] = model
            elif isinstance(node, ast.ClassDef):
                for each in node.body:
                    if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                        self._note(self._attributes, each.target.id, self._named(each.annotation))

    def _named(self, annotation: ast.expr | None) -> type[Model] | None:
        """The model that an annotation names, alone or in a container."""
        words = words_of(annotation) if annotation is not None else []
        return next((self.models[word] for word in words if word in self.models), None)

    @staticmethod
    def _note(names: dict[str, type[Model]], name: str, model: type[Model] | None) -> None:
        if model is not None:
            names[name] = model

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        own = self.models.get(node.name)
        for each in node.body:
            if isinstance(each, ast.FunctionDef):
                if own is not None and (each.name.startswith("_") or each.name == "listed"):
                    continue  # a validator only judges the value, and `listed` only shows it
                self._function(each, own)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._function(node, None)

    def _function(self, node: ast.FunctionDef, own: type[Model] | None) -> None:
        outer, self._names = self._names, dict(self._names)
        for argument in (*node.args.args, *node.args.kwonlyargs):
            self._note(self._names, argument.arg, own if argument.arg == "self" else self._named(argument.annotation))
        for statement in node.body:
            self.visit(statement)
        self._names = outer

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self._bind(target, node.value)

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple):
            values = value.elts if isinstance(value, ast.Tuple) else [value] * len(target.elts)
            for each, given in zip(target.elts, values, strict=False):
                self._bind(each, given)
        elif isinstance(target, ast.Name):
            self._note(self._names, target.id, self._model(value))
        elif isinstance(target, ast.Attribute):
            self._note(self._attributes, target.attr, self._model(value))

    def visit_For(self, node: ast.For) -> None:
        self._bind(node.target, node.iter)
        self.generic_visit(node)

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, _LEAVES):
            return
        for each in getattr(node, "generators", ()):  # of a comprehension, whose names stand before they are bound
            self._bind(each.target, each.iter)
        super().visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        model = self._model(node.value)
        for each in model.__mro__ if model is not None else ():
            if issubclass(each, Model) and node.attr in each.model_fields:
                self.read.add((each, node.attr))
        self.generic_visit(node)

    def _model(self, node: ast.expr) -> type[Model] | None:
        """The model that an expression has, or whose members a container has."""
        match node:
            case ast.Name(id):
                return self._names.get(id)
            case ast.Subscript(value) | ast.Starred(value) | ast.NamedExpr(value=value):
                return self._model(value)
            case ast.Attribute(value, attr):
                model = self._model(value)
                if model is not None and attr in model.model_fields:
                    return next(models_in(model.model_fields[attr].annotation), None)
                return model if attr in {"items", "values", "get"} else self._attributes.get(attr)
            case ast.Call(func=ast.Name(id), args=args):
                if id in {"sorted", "list", "enumerate", "tuple"}:
                    return self._model(args[0])
                return self.models.get(id) or self._results.get(id)
            case ast.Call(func=ast.Attribute(attr=attr) as func):
                return self._model(func) or self._results.get(attr)
            case ast.IfExp(body=body, orelse=orelse) | ast.BoolOp(values=[body, orelse]):
                return self._model(body) or self._model(orelse)
        return None


def unread(models: Iterable[type[Model]], code: Iterable[ast.Module]) -> set[Key]:
    """The keys that no part of the program reads."""
    models = list(models)
    found = Reader(models, list(code)).read
    inherited = {(model, key) for model in models for base, key in found if issubclass(model, base)}
    mine = {(model, key) for model in models for key in model.model_fields}
    return {(model, key) for model, key in mine - inherited if not nothing_to_read(model, key)}


def nothing_to_read(model: type[Model], key: str) -> bool:
    """A key that may have one value only, or that holds nothing but such keys."""
    field = model.model_fields[key]
    below = [(each, name) for each in models_in(field.annotation) for name in each.model_fields]
    return (get_origin(field.annotation) is Literal and len(get_args(field.annotation)) == 1) or (
        bool(below) and all(nothing_to_read(*each) for each in below)
    )


@cache
def product() -> tuple[ast.Module, ...]:
    files = [file for file in sorted(CODE.rglob("*.py")) if not file.relative_to(CODE).is_relative_to("testing")]
    return tuple(tree_of(file.read_text()) for file in files if str(file.relative_to(CODE)) not in SHOWING)


def test_every_key_of_the_file_has_a_reader() -> None:
    """GIVEN the models of the file, those of every kind of source included THEN each key is read."""
    assert sorted(f"{model.__name__}.{key}" for model, key in unread(every_model(), product())) == []


class LongerLog(LogConfig):
    enabled: bool = True  # a name that other models have as well
    colour: str = ""


class LongerBreaker(CircuitBreakerConfig):
    interval: int = 1


def test_a_key_without_a_reader_is_found() -> None:
    """GIVEN more keys that nobody reads THEN they are found, whatever their names."""
    longer = {(LongerLog, "enabled"), (LongerLog, "colour"), (LongerBreaker, "interval")}
    assert unread([*every_model(), LongerLog, LongerBreaker], product()) == longer
    reading = "def shown(log: LongerLog, breakers: dict[str, LongerBreaker]) -> None:\n"
    reading += "    print(log.enabled, log.colour, [breaker.interval for breaker in breakers.values()])\n"
    assert unread([*every_model(), LongerLog, LongerBreaker], [ast.parse(reading)]) & longer == set()


def test_a_validator_is_no_reader() -> None:
    """GIVEN a key that only its own model judges and shows THEN it has no reader."""
    code = "class LogConfig(Model):\n    def _check(self):\n        return self.retention\n"
    assert (LogConfig, "retention") in unread([Config, LogConfig], [ast.parse(code)])


def test_an_empty_section_means_its_defaults(tmp_path: Path) -> None:
    """GIVEN a file without the keys of a section, or with nothing in it THEN it loads, with the defaults."""
    assert read(tmp_path, source()).reliability == ReliabilityConfig()
    assert read(tmp_path, source() + "reliability: {dedup: {}, gap_detection:}\n").reliability.dedup == DedupConfig()
