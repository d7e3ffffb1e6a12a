"""JSON schemas of tools: made from a function's signature, and used to check the arguments of a model's call.

Guarantees: `Checker` rejects a broken schema in its constructor. `Checker.problem` never raises, and its time is
bounded by the size of the arguments. Its message names the argument, the expected and the given value, and the tool's
arguments. 1.0 and true are not integers.
Not covered: regular expressions (`pattern`, `patternProperties`) and `format` are not checked, because a hostile text
can make a regular expression run forever; the tool has to check them itself. References to other documents are
refused.
"""

from __future__ import annotations

import inspect
import json
import threading
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from typing import Any

from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
from jsonschema.exceptions import SchemaError, ValidationError  # type: ignore[import-untyped]
from jsonschema.validators import extend, validator_for  # type: ignore[import-untyped]
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from arpo.errors import ArpoError
from arpo.types import Task, ToolSpec

MAX_REFERENCES = 2000  # followed in one check; recursive alternatives can need exponentially many
MAX_VALUE_CHARS = 60
MAX_ERRORS = 20  # among which the one to report is chosen

_JSON_TYPES: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array"}
_TYPE_NAMES = {**_JSON_TYPES, dict: "object", type(None): "null"}


def build_spec(function: Callable[..., Any]) -> ToolSpec:
    """Return a function's name, the first paragraph of its docstring, and the JSON schema of its arguments.

    Left out are the `self` of a method and the argument that receives the task.
    """
    name = function.__name__
    description = " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split())
    if not description:
        raise TypeError(f"tool {name}: it needs a docstring, which describes it to the model")
    hints = typing.get_type_hints(function)
    properties: dict[str, Any] = {}
    required: list[str] = []
    hidden = {"self"} if is_method(function) else set()
    hidden |= {task_argument(function) or ""}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in hidden:
            continue
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"tool {name}: {parameter} cannot be passed by name")
        if parameter.name not in hints:
            raise TypeError(f"tool {name}: argument {parameter.name} needs a type hint")
        schema = _schema(hints[parameter.name], f"tool {name}: argument {parameter.name}")
        if parameter.default is parameter.empty:
            required.append(parameter.name)
        elif parameter.default is not None:
            schema["default"] = parameter.default
        properties[parameter.name] = schema
    return ToolSpec(
        name,
        description,
        {"type": "object", "properties": properties, "required": required, "additionalProperties": False},
    )


def is_method(function: Callable[..., Any]) -> bool:
    """Whether a function is a method that is not bound yet: its first parameter is `self`."""
    return next(iter(inspect.signature(function).parameters), "") == "self"


def task_argument(function: Callable[..., Any]) -> str | None:
    """The parameter of a function that has the type `Task`, or None."""
    hints = typing.get_type_hints(function)
    found = [name for name in inspect.signature(function).parameters if hints.get(name) is Task]
    return found[0] if found else None


def _schema(hint: Any, where: str) -> dict[str, Any]:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is list:
        return {"type": "array", "items": _schema(args[0], where)}
    if origin in (typing.Union, types.UnionType):
        others = [arg for arg in args if arg is not type(None)]
        if len(others) == 1:
            schema = _schema(others[0], where)
            return {**schema, "type": [schema["type"], "null"]}
    elif hint in _JSON_TYPES:
        return {"type": _JSON_TYPES[hint]}
    raise TypeError(f"{where} has type {hint}; use str, int, float, bool, list, or one of these | None")


class Checker:
    """Checks arguments against one tool's schema."""

    def __init__(self, spec: ToolSpec) -> None:
        try:
            schema = json.loads(json.dumps(dict(spec.schema)))  # a plain copy that nobody else can change
            _check_schema(schema)
        except Exception as error:  # a schema from a server can hold anything
            reason = error.message if isinstance(error, SchemaError) else str(error)
            raise ArpoError(f"tool {spec.name}: its schema is broken, so it cannot be used: {reason[:300]}") from None
        strict = _strict(validator_for(schema, default=Draft202012Validator))
        self._validator = strict(schema, registry=Registry())
        properties: Mapping[str, Any] = schema.get("properties", {})
        takes = ", ".join(f"{name} ({_type_name(value)})" for name, value in properties.items())
        self._takes = f"; it takes {takes or 'no arguments'}"

    def problem(self, args: Mapping[str, Any]) -> str | None:
        """Return what is wrong with the arguments, in words for the model, or None."""
        try:
            plain = dict(args)
            json.dumps(plain, allow_nan=False)
            _budget.references = MAX_REFERENCES
            errors = list(islice(self._validator.iter_errors(plain), MAX_ERRORS))
            missing = [error for error in errors if error.validator == "required" and not error.absolute_path]
            return _explain((missing or errors)[0]) + self._takes if errors else None
        except Exception:
            return "the arguments are not plain JSON, or too large or too deeply nested to check" + self._takes


def _check_schema(schema: dict[str, Any]) -> None:
    """Raise SchemaError or ValueError if arguments cannot be checked against this schema."""
    validator_for(schema, default=Draft202012Validator).check_schema(schema)
    if "object" not in schema.get("type", "object"):  # a name, or a list of names
        raise ValueError(f"it must describe an object, not {_type_name(schema)}")
    resolver = Registry().resolver_with_root(DRAFT202012.create_resource(schema))
    for reference in _references(schema):
        try:
            resolver.lookup(reference)
        except Unresolvable:
            raise ValueError(f"the reference {reference!r} leads nowhere inside it") from None


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from (value[key] for key in ("$ref", "$dynamicRef") if isinstance(value.get(key), str))
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _references(inner)


_budget = threading.local()  # `references`: how many the running check may still follow


@cache
def _strict(base: Any) -> Any:
    """A subclass of the validator class `base`: strict integers, no regular expressions, bounded time."""
    keywords = base.VALIDATORS

    def additional(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
        if "patternProperties" not in schema:
            yield from keywords["additionalProperties"](validator, value, instance, schema)

    def unique(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
        items = [json.dumps(item, sort_keys=True) for item in instance] if isinstance(instance, list) else []
        if value and len(set(items)) < len(items):
            yield ValidationError("repeated")

    def counted(keyword: str) -> Callable[..., Iterator[ValidationError]]:
        def check(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
            _budget.references -= 1
            if _budget.references < 0:
                raise RecursionError
            yield from keywords[keyword](validator, value, instance, schema)

        return check

    def is_integer(_: Any, value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool)

    overrides = {
        **dict.fromkeys(("pattern", "patternProperties", "unevaluatedProperties"), lambda *_: ()),
        "additionalProperties": additional,
        "uniqueItems": unique,
        **{keyword: counted(keyword) for keyword in ("$ref", "$dynamicRef") if keyword in keywords},
    }
    return extend(base, overrides, type_checker=base.TYPE_CHECKER.redefine("integer", is_integer))


# Messages for the model.

_LIMITS = {
    "minimum": "at least",
    "maximum": "at most",
    "exclusiveMinimum": "more than",
    "exclusiveMaximum": "less than",
    "multipleOf": "a multiple of",
}
_SIZES = {
    "minLength": ("at least", "characters"),
    "maxLength": ("at most", "characters"),
    "minItems": ("at least", "items"),
    "maxItems": ("at most", "items"),
}


def _explain(error: ValidationError) -> str:
    keyword, value, instance, path = error.validator, error.validator_value, error.instance, [*error.absolute_path]
    what = f"argument {_where(path)}" if path else "the object of all arguments"
    if keyword is None:  # the schema `false`; its errors have no path
        return f"{_short(instance)} stands where nothing is allowed"
    if keyword == "required":
        missing = next(name for name in value if name not in instance)
        return f"argument {_where([*path, missing])!r} is missing"
    if keyword == "additionalProperties":
        extra = next(name for name in instance if name not in error.schema.get("properties", {}))
        return f"unexpected argument {_where([*path, extra])!r}"
    expected, found = _type_name(error.schema), _TYPE_NAMES.get(type(instance), type(instance).__name__)
    if keyword in ("type", "anyOf", "oneOf") and {found, "any"}.isdisjoint(expected.split(" or ")):
        return f"{what} must be {expected}, not {found}"
    if keyword in ("enum", "const"):
        return f"{what} must be {expected}, not {_short(instance)}"
    if keyword in _LIMITS:
        return f"{what} must be {_LIMITS[keyword]} {_short(value)}, not {_short(instance)}"
    if keyword in _SIZES:
        bound, unit = _SIZES[keyword]
        return f"{what} must have {bound} {value} {unit}, not {len(instance)}"
    return f"{what} is {_short(instance)}, which does not fit the schema's {keyword}: {_short(value)}"


def _where(path: Sequence[str | int]) -> str:
    """`["hours", 1, "from"]` -> `hours[1].from`."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).removeprefix(".")[:200]


def _type_name(schema: Any) -> str:
    """The value that a schema asks for, in a few words."""
    if not isinstance(schema, dict):
        return "any"
    if "const" in schema:
        return _short(schema["const"])
    if "enum" in schema:
        return "one of " + ", ".join(map(_short, schema["enum"]))
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema:
            return " or ".join(dict.fromkeys(map(_type_name, schema[keyword])))
    allowed = schema.get("type", "any")
    return allowed if isinstance(allowed, str) else " or ".join(allowed)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[:MAX_VALUE_CHARS]}..."
