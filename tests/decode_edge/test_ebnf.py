"""Grammars in llama.cpp's form of EBNF allow the texts that their rules describe, and no others."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import reduce
from itertools import product

import pytest

from common.grammar.grammar import Grammar, GrammarKind
from common.text.ebnf import EbnfRefused, ebnf_to_lark
from tests.decode_edge.tokenizers_for_tests import allowed, byte_level, eos_id, grammars_of

TOKENIZER = byte_level()
END = eos_id(TOKENIZER)
GRAMMARS = grammars_of(TOKENIZER)
ARITHMETIC = """
# sums of products, as in llama.cpp's examples
root  ::= (expr "=" ws term "\\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \\t\\n]*
"""
JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
LINES = """
root ::= select
  | "DROP " table   # each alternative on its line
select ::= "SELECT " column " FROM "
  table
column ::= "a" | "b"
table ::= "t_1" | "t_2"
"""


def fits(grammar: str, text: str) -> bool:
    """Returns whether the output may be this text, written one byte at a time, and end there."""
    matcher = GRAMMARS.matcher(Grammar(GrammarKind.EBNF, grammar))
    return all(map(matcher.accept, text.encode())) and END in allowed(matcher, TOKENIZER)


@pytest.mark.parametrize(
    ("grammar", "sentences", "others"),
    [
        ('root ::= "yes" | "no"', ["yes", "no"], ["", "y", "yesno", "maybe"]),
        ('root ::= [a-z]+ "s"', ["bass", "ss"], ["s", "sat", ""]),
        ('root ::= word "s" list\nword ::= [a-z]+\nlist ::= "" | "," list', ["bass", "bass,,"], ["s", "sat", "sat,"]),
        ('root ::= ("a" | "ab") "c"?', ["a", "ab", "ac", "abc"], ["b", "abcc"]),
        ('root ::= "a"{2,3} "b"{2} "c"{1,} "d"{0}', ["aabbc", "aaabbccc"], ["abbc", "aaaabbc", "aabb", "aabbcd"]),
        ('root ::= "a"*', ["", "aaa"], ["b"]),
        ('root ::= "(" root ")" | ""', ["", "()", "((()))"], ["(", "())", ")("]),
        ('root ::= root "a" | "b"', ["b", "baa"], ["", "a", "ab"]),
        ('root ::= a b\na ::= "x"*\nb ::= "[" b "]" | a', ["", "xx", "[[x]]", "x[]"], ["[x", "x]"]),
        (r'root ::= "\"\\\n\t\x41\u00e9ab\U0001F600" "/*"', ['"\\\n\tAéab😀/*'], ['"\\\n\tAéab😀/', "\\"]),
        (r"root ::= [\]\\^a&&b~~\-c-]", [*"]\\^a&b~-c"], ["d", "[", "", "ab"]),
        (r"root ::= [^\n] [^a-cé-]", ["xd", "aà"], ["\nd", "xb", "xé", "x-"]),
        ('root ::= . "b"', ["ab", "\nb", "😀b"], ["b", "a"]),
        ('root::="a"\n  # "b"\n|"c"', ["a", "c"], ["b", "ac"]),
        ("root ::= my-rule_2 MyRule\nmy-rule_2 ::= [0-9]\nMyRule ::= [a]", ["0a"], ["a0"]),
        ('root ::= word list\nword ::= [a-z]+\nlist ::= "s" list | "."', ["bass.", "as.", "s."], ["s", ".", "sa"]),
        ('root ::= ("a" | "ab") b\nb ::= "b" b | "c"', ["ac", "abc", "abbc"], ["ab", "c", "bc"]),
        ('root ::= [ab]* ("a" | "ba"{2,}) b\nb ::= "b" b | "a" | ""', ["a", "ba", "baba", "abab"], ["b", "bb", ""]),
        ('root ::= n+ e\nn ::= "-"? d d?\nd ::= [0-9]\ne ::= d e | "!"', ["12-3!", "1!", "-45678!"], ["!", "-!", "1"]),
        (LINES, ["SELECT a FROM t_2", "DROP t_1"], ["SELECT c FROM t_1", "DROP t_1DROP t_1"]),
        (ARITHMETIC, ["a+b*2= 3\n", "((x1)-2 )=y \n\n1=1\n"], ["a+=3\n", "(a=3\n", "1=1"]),
        (JSON, ['{"a": [1, -2.5e3, {"b\\u00e9": null}] }', "{}"], ["[]", '{"a": 01}', '{"a"}', '{"\n": 1}']),
    ],
)
def test_sentences_fit_and_other_texts_do_not(grammar: str, sentences: list[str], others: list[str]) -> None:
    assert [text for text in sentences if not fits(grammar, text)] == []
    assert [text for text in others if fits(grammar, text)] == []


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ("", "no rule root"),
        ('start ::= "a"', "no rule root"),
        ('root ::= "a" b', "rule root needs b, which is not there"),
        ('root ::= "a"\nroot ::= "b"', "rule root is there twice, in line 2"),
        ('root ::= "a', '" is expected, in line 1'),
        ("root ::= [a", "] is expected"),
        ('root ::= "a" | b\nb ::= "b" b', "rule b has no sentence that ends"),
        ("root ::= []", "a class has no characters"),
        ("root ::= [z-a]", "the wrong way round"),
        ('root ::= ("a"', ") is expected"),
        ('root ::= "a")', "a rule, NAME ::= ..., is expected"),
        ('root ::= "a" (= "b")', ") is expected"),
        ('root ::= "a"{2001}', "from 0 to 2000 times"),
        ('root ::= "a"{3,2}', "from 0 to 2000 times"),
        ('root ::= (("a"{2000}){2000})', "rule root is too long"),
        (r'root ::= "\q"', r"\q is not known"),
        (r'root ::= "\x4"', r"\x needs 2 hexadecimal digits"),
        (r'root ::= "\ud800"', r"\ud800 is no character"),
        (r'root ::= "\U00110000"', r"\U00110000 is no character"),
        ("root ::= " + "(" * 101 + '"a"' + ")" * 101, "more than 100 parentheses"),
        ('root ::= "a" <end>', "a rule, NAME ::= ..., is expected"),
        ('start: "a"', "a rule, NAME ::= ..., is expected"),
    ],
)
def test_what_is_not_understood_is_refused_with_its_line(grammar: str, words: str) -> None:
    with pytest.raises(EbnfRefused) as refusal:
        ebnf_to_lark(grammar)
    assert words in str(refusal.value)


def test_rules_that_double_their_text_are_refused_at_once() -> None:
    rules = "\n".join(f"r{number} ::= r{number + 1} r{number + 1}" for number in range(200))
    with pytest.raises(EbnfRefused, match="is too long with the rules that it refers to"):
        ebnf_to_lark(f'root ::= r0\n{rules}\nr200 ::= "a"')


MAX_CHARS = 4
Sentences = Callable[[Mapping[str, set[str]]], set[str]]
"""A function that returns the sentences of a part of a grammar, up to MAX_CHARS long, given the sentences known for
each rule.
"""


def joined(first: set[str], second: set[str]) -> set[str]:
    return {one + other for one in first for other in second if len(one) + len(other) <= MAX_CHARS}


def repeated(part: set[str], least: int) -> set[str]:
    found, times = set[str](), {""}
    for number in range(least + MAX_CHARS + 1):
        if number >= least:
            found |= times
        times = joined(times, part)
    return found


def random_part(draw: random.Random, names: list[str], depth: int) -> tuple[str, Sentences]:
    kind = draw.choice(["name", "text", "sequence", "alternatives", "times"] if depth else ["name", "text"])
    if kind == "name":
        name = draw.choice(names)
        return name, lambda known: known[name]
    if kind == "text":
        text, found = draw.choice(
            [('"a"', {"a"}), ('"ab"', {"ab"}), ('"ba"', {"ba"}), ('""', {""}), ("[ab]", {"a", "b"}), ("[^a]", {"b"})]
        )
        return text, lambda known: found
    texts, parts = zip(*(random_part(draw, names, depth - 1) for _ in range(draw.randint(1, 3))), strict=True)
    if kind == "sequence":
        return " ".join(texts), lambda known: reduce(joined, (part(known) for part in parts))
    if kind == "alternatives":
        return f"({' | '.join(texts)})", lambda known: set().union(*(part(known) for part in parts))
    sign, least = draw.choice([("*", 0), ("+", 1), ("{2,}", 2)])
    return f"({texts[0]}){sign}", lambda known: repeated(parts[0](known), least)


def test_of_random_grammars_only_sentences_are_written_and_nearly_all_of_them() -> None:
    num_complete = num_grammars = 0
    texts = ["".join(text) for length in range(MAX_CHARS + 1) for text in product("ab", repeat=length)]
    for seed in range(120):
        draw, names = random.Random(seed), ["root", "x", "y"]
        rules = {name: random_part(draw, names, depth=3) for name in names}
        grammar = "\n".join(f"{name} ::= {text}" for name, (text, _) in rules.items())
        known: dict[str, set[str]] = {name: set() for name in names}
        for _ in range(3 * len(texts)):
            known = {name: sentences(known) for name, (_, sentences) in rules.items()}
        if not all(known.values()):
            continue
        written = {text for text in texts if fits(grammar, text)}
        assert written <= known["root"], grammar
        num_complete += written == known["root"]
        num_grammars += 1
    assert num_grammars > 50
    assert num_complete >= 0.9 * num_grammars
