"""A task of your own: a tool, and a function that scores answers."""

from collections.abc import Sequence

from arpo import Task, ToolError, tool

PRICES = {"apple": 40, "pear": 55, "plum": 25, "melon": 310}


@tool(quick=True)
def price(item: str) -> str:
    """Price of one piece of fruit, in cents."""
    if item.strip().lower() not in PRICES:
        raise ToolError(f"there is no {item!r}; there are: {', '.join(PRICES)}")
    return f"{PRICES[item.strip().lower()]} cents"


def closeness(prediction: str, golds: Sequence[str], task: Task) -> float:
    """1 for the right sum, 0.5 if it is off by at most a tenth, else 0."""
    digits = "".join(sign for sign in prediction if sign in "0123456789")[:9] or "0"
    wrong = abs(int(digits) - int(golds[0]))
    return 1.0 if wrong == 0 else 0.5 if wrong <= int(golds[0]) / 10 else 0.0
