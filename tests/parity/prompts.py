"""The project's own 24 parity prompts: chat, code, mathematics, other languages, and four of more than 1,000 tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ParityPrompt:
    name: str
    text: str
    is_chat: bool = True


def _ledger() -> str:
    goods = ("rope", "lamp oil", "oak planks", "salt", "iron nails", "wool", "candles", "barley")
    ports = ("Brightwater", "Harrow Point", "Saltmarsh", "Old Quay", "Finnick's Landing")
    lines = [
        f"Entry {n}: {(n * 37) % 90 + 10} crates of {goods[n % len(goods)]} left {ports[n % len(ports)]} "
        f"for {ports[(n * 3 + 1) % len(ports)]}, paid {(n * 53) % 400 + 25} marks."
        for n in range(1, 46)
    ]
    return "Here is a harbour ledger.\n" + "\n".join(lines) + "\nWhich goods appear most often, and where do they go?"


def _log() -> str:
    parts = ("pump", "valve", "turbine", "intake", "condenser")
    states = ("nominal", "warming", "above its limit", "idle", "restarted")
    lines = [
        f"{n // 6:02d}:{n % 6 * 10:02d} the {parts[n % 5]} in hall {n % 3 + 1} is {states[(n * n) % 5]}, "
        f"{(n * 17) % 60 + 20} degrees"
        for n in range(60)
    ]
    return "Summarise this night shift's log in three sentences.\n" + "\n".join(lines)


def _module() -> str:
    functions = [
        f"def convert_{a}_to_{b}(value: float) -> float:\n"
        f'    """Convert a length in {a} to {b}."""\n'
        f"    if value < 0:\n        raise ValueError('a length is not negative')\n"
        f"    return value * {factor}\n"
        for (a, b, factor) in [
            ("metres", "feet", 3.28084),
            ("feet", "metres", 0.3048),
            ("miles", "kilometres", 1.609344),
            ("kilometres", "miles", 0.621371),
            ("inches", "centimetres", 2.54),
            ("centimetres", "inches", 0.393701),
            ("yards", "metres", 0.9144),
            ("metres", "yards", 1.09361),
            ("fathoms", "metres", 1.8288),
            ("metres", "fathoms", 0.546807),
            ("leagues", "kilometres", 4.828032),
            ("kilometres", "leagues", 0.207124),
            ("chains", "metres", 20.1168),
            ("metres", "chains", 0.0497097),
        ]
    ]
    return "Review this module and suggest how to remove its repetition.\n\n" + "\n\n".join(functions)


def _tale() -> str:
    names = ("Mira", "Tobin", "Anselm", "Greta", "Ilse", "Corwin")
    places = ("the mill", "the north gate", "the orchard", "the ferry", "the chapel steps")
    things = ("a brass key", "a torn map", "a jar of honey", "a silver whistle", "an unsigned letter")
    sentences = [
        f"On day {n}, {names[n % 6]} met {names[(n * 5 + 2) % 6]} at {places[n % 5]} and handed over "
        f"{things[(n * 2) % 5]}, saying it was worth more than {n * 3 + 4} coins."
        for n in range(1, 41)
    ]
    return "Read the tale and tell me who ends up with the brass key.\n" + " ".join(sentences)


PROMPTS: tuple[ParityPrompt, ...] = (
    ParityPrompt("chat_tea", "How do I make a good cup of tea without a kettle?"),
    ParityPrompt("chat_move", "I am moving to a new city next month. What should I do first?"),
    ParityPrompt("chat_sky", "Explain to a curious child why the sky turns red in the evening."),
    ParityPrompt("chat_letter", "Write a short letter to a neighbour whose dog barks at night. Be kind."),
    ParityPrompt("chat_names", "Give me five names for a small bakery by the sea, with a reason for each."),
    ParityPrompt("chat_sleep", "What habits help people fall asleep faster?"),
    ParityPrompt("chat_one_word", "Hello"),
    ParityPrompt("code_reverse", "Write a Python function that reverses the words of a sentence but keeps each word."),
    ParityPrompt("code_sql", "Write an SQL query that finds the three customers with the highest total of orders."),
    ParityPrompt(
        "code_bug", "What is wrong here?\n\nfor i in range(len(items)):\n    if items[i] < 0:\n        del items[i]"
    ),
    ParityPrompt("code_raw", "import heapq\n\n\ndef shortest_path(graph, start, goal):\n    ", is_chat=False),
    ParityPrompt(
        "math_train", "A train leaves at 9:40 and arrives at 13:05. It stops for 25 minutes. How long does it move?"
    ),
    ParityPrompt("math_series", "What is the sum of the first 40 odd numbers? Show each step."),
    ParityPrompt(
        "math_area",
        "A square garden has a path one metre wide around it, of 44 square metres. How wide is the garden?",
    ),
    ParityPrompt("math_raw", "1, 1, 2, 3, 5, 8, 13,", is_chat=False),
    ParityPrompt("french", "Raconte en trois phrases une promenade en forêt un matin d'automne."),
    ParityPrompt("german", "Erkläre kurz, warum Brot beim Backen aufgeht."),
    ParityPrompt("spanish", "¿Cuáles son las ventajas de viajar en tren por la noche?"),
    ParityPrompt("chinese", "请用三句话介绍一下春天。"),
    ParityPrompt("russian_emoji", "Напиши короткое поздравление с днём рождения 🎂🎉"),
    ParityPrompt("long_ledger", _ledger()),
    ParityPrompt("long_log", _log()),
    ParityPrompt("long_module", _module()),
    ParityPrompt("long_tale", _tale()),
)
