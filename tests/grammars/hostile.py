"""Makes grammars that would harm the service that compiles them, or follows an output through them, if nothing limited
that.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from common.grammar.grammar import Grammar, GrammarKind

_KINDS = tuple(GrammarKind)
_WORDS = ("a", "ab", "é", "😀", "\u202e", "\u0000", '"', "\\", "\ufeff", "ﬀ", "İ", "\ud7ff", "\x7f", "</", "<|im_end|>")
_JSON_TEXTS = ("{", "[" * 9999, '{"type":' * 9999, "null", '{"const":1e999}', '{"enum":[]}', '{"a":NaN}', "{}" * 99)
_NAMES = ("a", "b", "const", "$ref", "properties", "\u0000", "a/b~c", "%25", "")


def hostile_grammar(draw: random.Random) -> Grammar:
    """Returns a random grammar of one of the families below, of random size and shape."""
    make = draw.choice((*_SCHEMAS, *_REGEXES, *_LARKS, *_OTHERS, _damaged))
    return make(draw)


def encoded(grammar: Grammar) -> bytes:
    """Returns the grammar as bytes: one for its kind, and its text."""
    return bytes([_KINDS.index(grammar.kind)]) + grammar.text.encode(errors="replace")


def decoded(data: bytes) -> Grammar:
    """Returns the grammar that the bytes encode. Any bytes encode one."""
    return Grammar(_KINDS[(data[0] if data else 0) % len(_KINDS)], data[1:].decode(errors="replace"))


def is_list_of_texts(text: str) -> bool:
    """Returns whether this is the text of a grammar of choices, as `Grammar.of_choices` makes it."""
    try:
        made = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(made, list) and all(isinstance(each, str) for each in made)


def _size(draw: random.Random, most: int) -> int:
    """Returns a random number from 1 to `most`. Numbers below 10 are as likely as those from 10 to 99, and so on."""
    return min(most, int(10 ** draw.uniform(0, len(str(most)))))


def _schema(make: Callable[[random.Random], Any]) -> Callable[[random.Random], Grammar]:
    def text(draw: random.Random) -> Grammar:
        made = make(draw)
        return Grammar(GrammarKind.JSON_SCHEMA, made if isinstance(made, str) else json.dumps(made))

    return text


def _deep(draw: random.Random) -> str:
    before, after = draw.choice(
        (
            ('{"type":"object","properties":{"a":', '},"required":["a"]}'),
            ('{"anyOf":[', ',{"type":"null"}]}'),
            ('{"allOf":[', ',{"minimum":1}]}'),
            ('{"type":"array","minItems":1,"items":', "}"),
            ('{"additionalProperties":', "}"),
            ('{"not":', "}"),
        )
    )
    num = _size(draw, 3000)
    return before * num + "{}" + after * num


def _reference_chain(draw: random.Random) -> Any:
    """Returns a schema whose references form a chain, a cycle or a tree. In a tree each definition has two references,
    so the size doubles at each.
    """
    num, width = _size(draw, 1200), draw.choice((1, 1, 2, 2, 3))
    last = draw.choice(("#/$defs/d0", f"#/$defs/d{num // 2}", "#", "#/$defs/none"))
    wrap = draw.choice(
        (
            lambda refs: refs[0],
            lambda refs: {"anyOf": refs},
            lambda refs: {"allOf": refs},
            lambda refs: {"oneOf": refs},
            lambda refs: {"type": "array", "prefixItems": refs, "minItems": len(refs)},
            lambda refs: {"type": "object", "properties": dict(zip("abc", refs, strict=False)), "required": ["a"]},
        )
    )
    defs = {
        f"d{place}": wrap([{"$ref": f"#/$defs/d{place + 1}" if place + 1 < num else last}] * width)
        for place in range(num)
    }
    if draw.random() < 0.5:
        defs[f"d{num - 1}"] = {"type": "string"}
    return {"$defs": defs, "$ref": "#/$defs/d0"}


def _wide(draw: random.Random) -> Any:
    num = _size(draw, 6000)
    return draw.choice(
        (
            lambda: {"enum": [f"v{place * 7919}" for place in range(num)]},
            lambda: {"enum": ["x" * place for place in range(min(num, 350))]},
            lambda: {"type": "object", "properties": {f"p{place}": {} for place in range(num)}},
            lambda: {
                "type": "object",
                "properties": {f"p{place}": {"type": "string"} for place in range(num)},
                "required": [f"p{place}" for place in range(0, num, draw.choice((1, 2, 7)))],
                "additionalProperties": False,
            },
            lambda: {"anyOf": [{"const": place} for place in range(num)]},
            lambda: {"anyOf": [{"type": "object", "properties": {f"p{place}": {}}} for place in range(num // 3 + 1)]},
            lambda: {
                "oneOf": [
                    {"type": "object", "properties": {"k": {"const": place}}, "required": ["k"]}
                    for place in range(num // 4 + 1)
                ]
            },
            lambda: {
                "type": "object",
                "patternProperties": {f"^{place}x": {"type": "null"} for place in range(num // 4 + 1)},
            },
            lambda: {
                "allOf": [{"anyOf": [{"minLength": place}, {"pattern": f"{place}"}]} for place in range(min(num, 40))]
            },
            lambda: {
                "type": "array",
                "prefixItems": [{"type": "string", "maxLength": 5000 + place} for place in range(num // 4 + 1)],
            },
            lambda: {"const": "x" * (num * 10)},
            lambda: {"const": draw.choice(_WORDS) * num},
            lambda: {"type": "string", "pattern": "|".join(f"{place}y*" for place in range(num))},
        )
    )()


def _numbers(draw: random.Random) -> Any:
    digits = 10 ** _size(draw, 400)
    number = draw.choice(
        (digits, -digits, 1 / _size(draw, 10**9), 0.1 + digits % 10**9, 9973, 9999, 7.77, 1e308, 5e-324)
    )
    return {
        "type": draw.choice(("integer", "number")),
        **dict.fromkeys(
            draw.sample(("multipleOf", "minimum", "maximum", "exclusiveMinimum"), draw.choice((1, 1, 2, 3))), number
        ),
    }


def _counts(draw: random.Random) -> Any:
    low, high = sorted((_size(draw, 10**9), _size(draw, 10**9)))
    keys = draw.choice((("minLength", "maxLength"), ("minItems", "maxItems"), ("minProperties", "maxProperties")))
    part = {keys[0]: draw.choice((0, low, -1)), keys[1]: draw.choice((high, 10**40))}
    for _ in range(draw.choice((0, 1, 4, 12))):
        part = {
            "type": "array",
            "items": part,
            "minItems": draw.choice((0, low % 100)),
            "maxItems": high % 5000 + 100,
        }
    return part


def _random_schema(draw: random.Random, depth: int = 0) -> Any:
    """Returns a schema with any keywords and any values, valid ones and others."""
    values: tuple[Callable[[], Any], ...] = (
        lambda: draw.choice(
            (True, False, None, 0, -1, 1.5, 10**20, "", [], {}, "#", "^a|b$", "(?=a)b", "date", "object")
        ),
        lambda: draw.choice(_WORDS) * _size(draw, 99),
        lambda: [_random_schema(draw, depth + 1) for _ in range(_size(draw, 4))],
        lambda: {draw.choice(_NAMES): _random_schema(draw, depth + 1) for _ in range(_size(draw, 4))},
        lambda: _random_schema(draw, depth + 1),
    )
    names = (
        *(
            "type",
            "enum",
            "const",
            "properties",
            "required",
            "items",
            "prefixItems",
            "anyOf",
            "oneOf",
            "allOf",
            "not",
            "$ref",
        ),
        *(
            "pattern",
            "format",
            "minLength",
            "maxItems",
            "minimum",
            "multipleOf",
            "additionalProperties",
            "patternProperties",
        ),
        *("$defs", "$id", "$anchor", "$schema", "x-guidance", "if", "uniqueItems", "minProperties", "default", "title"),
    )
    types = ("string", "integer", "number", "object", "array", "boolean", "null")
    made: dict[str, Any] = {} if draw.random() < 0.3 else {"type": draw.choice(types)}
    for _ in range(_size(draw, 6)):
        made[draw.choice(names)] = draw.choice(values if depth < 4 else values[:2])()
    return made


def _pattern(draw: random.Random, depth: int = 0) -> str:
    """Returns a regular expression with nested repeats, classes and alternatives."""
    if depth > 4 or draw.random() < 0.2:
        return draw.choice(
            ("a", "b", ".", r"\w", r"\p{L}", r"[^\x00-\x7f]", "(?s:.)", r"\d", "é", "(?i)k", "[a-z]", r"\b", "(?=a)")
        )
    low, high = sorted((_size(draw, 3000), _size(draw, 3000)))
    part = _pattern(draw, depth + 1)
    return draw.choice(
        (
            lambda: f"({part}|{_pattern(draw, depth + 1)})",
            lambda: f"({part})*",
            lambda: f"({part}){{{low},{high}}}",
            lambda: f"({part}){{{low}}}",
            lambda: f"{part}{_pattern(draw, depth + 1)}",
            lambda: f"({part}|{part})*{part}",
            lambda: f"(.*{part})*",
            lambda: f"({part})*a({part}){{{low % 300}}}",
        )
    )()


def _long_regex(draw: random.Random) -> str:
    num = _size(draw, 16_000)
    return draw.choice(
        (
            lambda: "(" * num + "a" + ")" * num,
            lambda: "|".join(str(place) for place in range(num // 5)),
            lambda: "a" * num,
            lambda: "a?" * (num // 4) + "a" * (num // 4),
            lambda: "(" + "|".join("ab" * (place % 50) for place in range(num // 60)) + "){1,50}",
            lambda: "[" + "".join(chr(0x4E00 + place * 2) for place in range(num // 2)) + "]{9,99}",
            lambda: ".*" + ".*".join("xyz"[place % 3] for place in range(num // 8)),
        )
    )()


def _lark(draw: random.Random) -> str:
    num = _size(draw, 2500)
    return draw.choice(
        (
            lambda: "start: start start | /a/ |",
            lambda: 'start: s s s s\ns: s s | "a" | "aa" |',
            lambda: "start: a\na: b | a a\nb: a | /x+/ | b b b",
            lambda: "\n".join(
                ["start: r0", *(f'r{place}: "x" r{place + 1} | "y"' for place in range(num)), f'r{num}: "z"']
            ),
            lambda: "\n".join(
                ["start: r0", *(f"r{place}: r{place + 1} r{place + 1}" for place in range(num)), f'r{num}: "z" |']
            ),
            lambda: "\n".join(["start: T0", *(f'T{place}: "x" T{place + 1}' for place in range(num)), f'T{num}: "z"']),
            lambda: "start: " + " | ".join(f'"{place}"' for place in range(num)),
            lambda: "start: " + "(" * num + '"a"' + ")" * num,
            lambda: f'start: ("a" | "b"){{{num}}}',
            lambda: "start: x{1,999}\nx: y{1,999}\ny: /[ab]{1,999}/",
            lambda: f"start: {_json_of(draw)} {_json_of(draw)}",
            lambda: f"start: A & B\nA: /{_pattern(draw)}/\nB: ~/{_pattern(draw)}/",
            lambda: "start: " + " ".join(f"/{_pattern(draw)}/" for _ in range(_size(draw, 30))),
            lambda: f"start[lazy]: /(.*x){{{num}}}/",
            lambda: (
                f"start[{draw.choice(('max_tokens=3', 'stop=/x/', 'temperature=9', 'suffix=/a*/', 'capture'))}]: /.*/"
            ),
            lambda: '%llguidance {"no_forcing": true, "allow_initial_skip": true}\nstart: start',
            lambda: "start: <[0-99999999]> | <|im_end|> | <[*]>",
            lambda: "%ignore /[ \\t]*/\nstart: ",
        )
    )()


def _ebnf(draw: random.Random) -> str:
    num = _size(draw, 2000)
    return draw.choice(
        (
            lambda: 'root ::= root root | "a" | ""',
            lambda: "root ::= " + "(" * num + '"a"' + ")" * num,
            lambda: "\n".join(["root ::= r0", *(f'r{place} ::= "x" r{place + 1}' for place in range(num // 2))]),
            lambda: "root ::= " + " | ".join(f'"{place}"*' for place in range(num)),
            lambda: f"root ::= x{{1,{num}}}\nx ::= y{{1,{num}}}\ny ::= [ab]{{1,{num}}}",
            lambda: "root ::= " + '"a"? ' * num,
            lambda: "root ::= (" + "(" * min(num, 200) + '""' + ")*" * min(num, 200) + ")+",
        )
    )()


def _choice(draw: random.Random) -> list[str]:
    num = _size(draw, 6000)
    texts = (f"v{place * 7919}" for place in range(num))
    return draw.choice(
        ([*texts], ["x" * place for place in range(min(num, 350))], [draw.choice(_WORDS) * num], [], [""])
    )


def _json_of(draw: random.Random) -> str:
    return "%json " + json.dumps(_random_schema(draw))


def _regex_of(make: Callable[[random.Random], str]) -> Callable[[random.Random], Grammar]:
    return lambda draw: Grammar(GrammarKind.REGEX, make(draw))


def _damaged(draw: random.Random) -> Grammar:
    """Returns a grammar of another family with some of its text changed, or no grammar at all."""
    if draw.random() < 0.1:
        return Grammar(draw.choice(_KINDS), draw.choice(_JSON_TEXTS))
    grammar = draw.choice((*_SCHEMAS, *_REGEXES, *_LARKS, *_OTHERS))(draw)
    text = grammar.text
    for _ in range(_size(draw, 5)):
        place = draw.randrange(len(text) + 1)
        text = text[:place] + draw.choice(("", *_WORDS, *"{}[]()|*?,:")) + text[place + draw.choice((0, 1, 1, 9)) :]
    return Grammar(grammar.kind, text)


_SCHEMAS = tuple(map(_schema, (_deep, _reference_chain, _wide, _numbers, _counts, _random_schema, _random_schema)))
_REGEXES = (
    _regex_of(_pattern),
    _regex_of(_long_regex),
    lambda draw: Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"type": "string", "pattern": _pattern(draw)})),
)
_LARKS = (lambda draw: Grammar(GrammarKind.LARK, _lark(draw)),) * 3
_OTHERS = (
    lambda draw: Grammar(GrammarKind.EBNF, _ebnf(draw)),
    lambda draw: Grammar.of_choices(_choice(draw)),
)
