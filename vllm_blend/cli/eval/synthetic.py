"""Tasks whose answer needs attention from chunk to chunk, so that lost attention shows at once.

``cut``: each person's profile is cut in two chunks. The first names the person, the second says only
where "this person" lives; which second half belongs to whom, order alone tells. A chunk computed alone
cannot know it. ``whole``: name and city stand in one chunk, among chunks that look alike. The prompt
ends in the beginning of the answer: so asked, SmolLM2-135M is right more than half of the time.
"""

from __future__ import annotations

import random

from vllm_blend.cli.eval.data import Example, Passage

NAMES = (
    ("Anna", "Abel"), ("Boris", "Brandt"), ("Carla", "Costa"), ("Dmitri", "Duval"), ("Elena", "Ek"),
    ("Farid", "Ferrer"), ("Greta", "Gruber"), ("Hugo", "Holm"), ("Ines", "Ivers"), ("Jonas", "Jansen"),
    ("Karin", "Keller"), ("Lukas", "Lund"), ("Marta", "Moreau"), ("Nils", "Novak"), ("Olga", "Olsen"),
)  # fmt: skip
FIRST, LAST = [first for first, _ in NAMES], [last for _, last in NAMES]
CITIES = (
    "Paris", "London", "Berlin", "Madrid", "Rome", "Vienna", "Lisbon", "Dublin", "Prague", "Oslo",
    "Athens", "Warsaw", "Zurich", "Milan",
)  # fmt: skip
JOBS = (
    "teacher", "nurse", "carpenter", "lawyer", "painter", "farmer", "chemist", "pilot", "baker",
    "dentist", "tailor", "singer",
)  # fmt: skip
HOBBIES = (
    "chess", "gardening", "swimming", "photography", "cooking", "cycling", "fishing", "astronomy",
    "pottery", "climbing",
)  # fmt: skip
KINDS = ("cut", "whole")


def synthetic(kind: str, count: int, people: int = 3, seed: int = 0) -> list[Example]:
    """Examples of one kind; the same for the same arguments.

    Args:
        kind: "cut" or "whole".
        count: of examples.
        people: in each, at most 10. By chance one in ``people`` answers is right.

    Raises:
        ValueError: names the argument that is not allowed.
    """
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}; allowed: {', '.join(KINDS)}")
    if not 2 <= people <= len(HOBBIES):
        raise ValueError(f"people is {people}; allowed: 2 to {len(HOBBIES)}")
    draw = random.Random(f"{kind}-{people}-{seed}")
    return [_example(kind, f"{kind}{people}-{seed}-{index}", people, draw) for index in range(count)]


def _example(kind: str, name: str, people: int, draw: random.Random) -> Example:
    full_names = [
        f"{first} {last}"
        for first, last in zip(draw.sample(FIRST, people), draw.sample(LAST, people), strict=True)
    ]
    cities, jobs = draw.sample(CITIES, people), draw.sample(JOBS, people)
    hobbies, asked = draw.sample(HOBBIES, people), draw.randrange(people)
    passages = []
    for i, (who, city, job, hobby) in enumerate(zip(full_names, cities, jobs, hobbies, strict=True)):
        mine = i == asked
        if kind == "cut":
            passages += [Passage(f"{who} works as a {job} and likes {hobby}.", gold=mine)]
            passages += [Passage(f"This person lives in {city} and has a cat.", gold=mine)]
        else:
            passages += [Passage(f"Profile. Name: {who}. Job: {job}. City: {city}.", gold=mine)]
    question = f"In which city does {full_names[asked]} live?\nAnswer: {full_names[asked]} lives in"
    return Example(name, tuple(passages), question, (cities[asked],))
