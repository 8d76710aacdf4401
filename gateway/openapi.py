"""The OpenAPI document of the gateway, made from its routes and from the tables by which it parses requests."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from starlette.routing import Route

from gateway.fields import SCHEMAS, RequestFields, body_schema
from gateway.request_record import MESSAGES_PATHS

_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")
_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "The field of the request that is wrong."},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_MESSAGES_ERROR_SCHEMA = {
    "type": "object",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message", "details"],
            "properties": {
                "type": {"type": "string"},
                "message": {"type": "string"},
                "details": {"type": ["object", "null"]},
            },
        },
        "request_id": {"type": "string"},
    },
}
_ERRORS = {"Error": _ERROR_SCHEMA, "MessagesError": _MESSAGES_ERROR_SCHEMA}


def openapi_document(
    routes: Iterable[Route], *, bodies: Mapping[str, type[RequestFields]], version: str
) -> dict[str, Any]:
    """Returns the document, of version 3.1. `bodies` has the fields of the requests' bodies, by path.

    Only error answers are described. Keys are optional, because a gateway may have no list of keys.
    """
    schemas: dict[str, Any] = dict(_ERRORS)
    paths: dict[str, Any] = {}
    for route in routes:
        path = _PARAMETER.sub(r"{\1}", route.path)
        names = [match[1] for match in _PARAMETER.finditer(route.path)]
        for method in sorted((route.methods or set()) - {"HEAD"}):
            operation = _operation(method, path, names)
            if (kind := bodies.get(route.path)) is not None and method == "POST":
                schema, definitions = body_schema(kind)
                schemas |= {kind.__name__: schema, **definitions}
                content = {"application/json": {"schema": {"$ref": SCHEMAS + kind.__name__}}}
                operation["requestBody"] = {"required": True, "content": content}
            paths.setdefault(path, {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": version},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "responses": {
                name: {
                    "description": "An error.",
                    "content": {"application/json": {"schema": {"$ref": SCHEMAS + name}}},
                }
                for name in _ERRORS
            },
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "bareKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"key": []}],
    }


def _operation(method: str, path: str, names: Sequence[str]) -> dict[str, Any]:
    parameters = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
    words = re.findall(r"\w+", path) or ["status"]
    is_messages_api = path in MESSAGES_PATHS
    error = "MessagesError" if is_messages_api else "Error"
    return {
        "operationId": "_".join([method.lower(), *words]),
        **({"parameters": parameters} if parameters else {}),
        **({"security": [{}, {"key": []}, {"bareKey": []}]} if is_messages_api else {}),
        "responses": {
            str(HTTPStatus.OK.value): {"description": "The answer."},
            "default": {"$ref": f"#/components/responses/{error}"},
        },
    }
