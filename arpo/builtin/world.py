"""The toy world: a generated, fictional knowledge base with questions about it; a benchmark for a laptop.

Questions are one-, two- and three-hop chains, sums and differences of two numbers, and comparisons. Each fact is one
document, `The R of E is V.`, so a query must name the right entity and the right relation. All names are two words from
fixed pools, so nothing can be known beforehand and every name must be copied from a document.

Guarantees: the same settings give the same world. Every question has exactly one answer, which follows from the
documents. Training and test questions are about disjoint entities, and no fact connects the two.

    world = build_world(schema.World(seed=1))
    world.documents[0].text, world.train[0].question, world.test[0].answers
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from arpo.config.schema import World as WorldSection
from arpo.errors import ArpoError
from arpo.types import Document, Task, derive_seed


@dataclass(frozen=True, slots=True)
class Half:
    """The training or the test half: entities by kind, and the value of every relation of every entity."""

    names: dict[str, tuple[str, ...]]
    values: dict[tuple[str, str], str]

    def facts(self) -> list[str]:
        """All facts as sentences."""
        return [f"The {relation} of {entity} is {value}." for (relation, entity), value in self.values.items()]


@dataclass(frozen=True, slots=True)
class World:
    """Documents to search in, training questions and test questions."""

    settings: WorldSection
    halves: tuple[Half, Half]
    documents: tuple[Document, ...]
    train: tuple[Task, ...]
    test: tuple[Task, ...]


# relation -> (kind of its entity, kind of its value, which for numbers is a range)
ENTITY_RELATIONS = {
    "birthplace": ("person", "town"),
    "employer": ("person", "firm"),
    "seat": ("firm", "town"),
    "head": ("firm", "person"),
    "region": ("town", "region"),
    "mayor": ("town", "person"),
    "capital": ("region", "town"),
    "governor": ("region", "person"),
}
NUMBER_RELATIONS = {
    "birth year": ("person", (10, 99)),
    "founding year": ("firm", (10, 99)),
    "staff": ("firm", (10, 99)),
    "households": ("town", (10, 99)),
    "area": ("region", (10, 99)),
}
SHARES = {"person": 0.5, "firm": 0.2, "town": 0.2, "region": 0.1}
KINDS = ("hop1", "hop2", "hop3", "sum", "difference", "compare")


def _words(count: int, seed: int, pattern: str) -> tuple[str, ...]:
    """`count` invented words after a pattern of c(onsonant) and v(owel); the same on every machine."""
    rng = random.Random(seed)
    letters = {"c": "bdfgklmnprstvz", "v": "aeiou"}
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(rng.choice(letters[p]) for p in pattern).capitalize()] = None
    return tuple(found)


_POOLS = {
    "person": (_words(40, 1, "cvcv"), _words(60, 2, "cvccvc")),
    "firm": (
        _words(50, 3, "cvcvc"),
        ("Glass", "Mills", "Steel", "Foods", "Paper", "Motors", "Salt", "Clocks", "Boats"),
    ),
    "town": (("North", "South", "East", "West", "Upper", "Lower", "Old", "New", "Great"), _words(50, 4, "vccvc")),
    "region": (_words(40, 5, "cvvc"), ("Valley", "Coast", "Plain", "Hills", "Marsh", "Isles")),
}


def world_vocabulary() -> tuple[str, ...]:
    """Every word of a name that any world can contain."""
    return tuple(word for first, second in _POOLS.values() for word in (*first, *second))


def build_world(settings: WorldSection, without: frozenset[str] = frozenset()) -> World:
    """Generate the world of these settings, without the names in `without`."""
    names: dict[str, list[str]] = {}
    for kind, share in SHARES.items():
        first, second = _POOLS[kind]
        pool = [name for a in first for b in second if (name := f"{a} {b}") not in without]
        count = min(len(pool), max(6, round(settings.entities * share)))
        names[kind] = _rng(settings, kind).sample(pool, count)
    cut = {kind: len(some) * 2 // 3 for kind, some in names.items()}
    train_half = _half({kind: tuple(some[: cut[kind]]) for kind, some in names.items()}, _rng(settings, "train facts"))
    test_half = _half({kind: tuple(some[cut[kind] :]) for kind, some in names.items()}, _rng(settings, "test facts"))
    facts = [*train_half.facts(), *test_half.facts()]
    _rng(settings, "order").shuffle(facts)
    return World(
        settings,
        (train_half, test_half),
        tuple(Document(title="", text=fact) for fact in facts),
        _questions(train_half, "train", settings.train_questions, settings),
        _questions(test_half, "test", settings.test_questions, settings),
    )


def _rng(settings: WorldSection, what: str) -> random.Random:
    return random.Random(f"{settings.seed} {what}")


def _half(names: dict[str, tuple[str, ...]], rng: random.Random) -> Half:
    values: dict[tuple[str, str], str] = {}
    for relation, (kind, target) in ENTITY_RELATIONS.items():
        for entity in names[kind]:
            values[relation, entity] = rng.choice(names[target])
    for relation, (kind, (low, high)) in NUMBER_RELATIONS.items():
        for entity in names[kind]:
            values[relation, entity] = str(rng.randint(low, high))
    return Half(names, values)


def _questions(half: Half, split: str, count: int, settings: WorldSection) -> tuple[Task, ...]:
    """`count` different questions; with the difficulty, long chains and computations become more frequent."""
    rng, d = _rng(settings, f"{split} questions"), settings.difficulty
    weights = (1 - d, 1.0, d, d, d, d)
    found: dict[str, Task] = {}
    for _ in range(20 * count + 1000):
        if len(found) == count:
            break
        kind = rng.choices(KINDS, weights)[0]
        text, answer, plan = _generate(half, rng, kind)
        if text not in found:
            task_id = f"world-{settings.seed}-{split}-{len(found)}"
            found[text] = Task(task_id, text, (answer,), kind, {"plan": plan})
    if len(found) < count:
        raise ArpoError(
            f"world.{split}_questions = {count}: a world of {settings.entities} entities has only about {len(found)} "
            "different ones; ask for fewer or raise world.entities"
        )
    return tuple(found.values())


# A plan is what a perfect solver would do: [relation, entity] per look-up (entity None: the value found before), and
# for computed questions the operator. Only the writer of cold-start traces may use it.
Plan = dict[str, object]


def _chain(half: Half, rng: random.Random, hops: int) -> tuple[str, str, Plan]:
    """A question about a random walk over relations; only the last hop may lead to a number."""
    while True:
        kind = rng.choice(tuple(SHARES))
        entity = rng.choice(half.names[kind])
        value, relations, seen = entity, [], {entity}
        for hop in range(hops):
            options = [r for r, (k, _) in ENTITY_RELATIONS.items() if k == kind]
            if hop == hops - 1:
                options += [r for r, (k, _) in NUMBER_RELATIONS.items() if k == kind]
            relation = rng.choice(options)
            relations.append(relation)
            value = half.values[relation, value]
            if value in seen:  # a cycle would have a shorter solution
                break
            seen.add(value)
            kind = ENTITY_RELATIONS[relation][1] if relation in ENTITY_RELATIONS else "number"
        else:
            phrase = " of the ".join(reversed(relations))
            lookups = [[relation, entity if i == 0 else None] for i, relation in enumerate(relations)]
            return f"What is the {phrase} of {entity}?", value, {"lookups": lookups}


def _computed(half: Half, rng: random.Random, kind: str) -> tuple[str, str, Plan]:
    """A sum, a difference or a comparison of two numbers."""
    relations = [relation for relation in NUMBER_RELATIONS if kind != "sum" or not relation.endswith("year")]
    x = y = 0
    while x == y:
        relation = rng.choice(relations)
        a, b = rng.sample(half.names[NUMBER_RELATIONS[relation][0]], 2)
        x, y = int(half.values[relation, a]), int(half.values[relation, b])
    if kind == "difference" and x < y:
        a, b, x, y = b, a, y, x
    plan: Plan = {"lookups": [[relation, a], [relation, b]], "operator": "+" if kind == "sum" else "-"}
    if kind == "compare":
        more = "later" if relation.endswith("year") else "larger"
        return f"Which has the {more} {relation}, {a} or {b}?", a if x > y else b, {**plan, "choices": [a, b]}
    word, result = ("plus", x + y) if kind == "sum" else ("minus", x - y)
    return f"What is the {relation} of {a} {word} the {relation} of {b}?", str(result), plan


def _generate(half: Half, rng: random.Random, kind: str) -> tuple[str, str, Plan]:
    """A question of this kind, its answer and its plan."""
    return _chain(half, rng, int(kind[-1])) if kind.startswith("hop") else _computed(half, rng, kind)


def other_world(world: World, number: int, entities: int) -> World:
    """A small world with facts of its own and none of the names in `world`'s test half."""
    taken = frozenset(name for names in world.halves[1].names.values() for name in names)
    seed = derive_seed(world.settings.seed, "other world", number)
    update = {"seed": seed, "entities": entities, "train_questions": 1, "test_questions": 1}
    return build_world(world.settings.model_copy(update=update), taken)


def sample_task(world: World, rng: random.Random) -> Task:
    """One more training question of a random kind, for cold-start traces."""
    kind = rng.choice(KINDS)
    text, answer, plan = _generate(world.halves[0], rng, kind)
    return Task("trace", text, (answer,), kind, {"plan": plan})
