"""Prompts as an agent's loop sends them: files that are read, edited and read again.

All comes from a seed. A turn's prompt is the task, the files that are open, the one that was touched
last at the end, and what the agent has done lately. So an edit, or another order, changes the prompt
from its first part on, while most of what stands there was in earlier prompts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

NUM_FILES, NUM_OPEN = 30, 4
LINES = 18, 40
"""Of a file, from and to."""
EDITS, EDITED_LINES = 0.3, 3
"""Share of the turns that edit a file, and lines that an edit changes at most."""
STEPS_TOLD = 6
"""Of what the agent has done, so many steps are in a prompt."""

NOUNS = "order invoice parcel tenant sensor ledger window packet region driver ticket folder".split()  # noqa: SIM905
VERBS = "load check merge split count trace apply reset store route close parse".split()  # noqa: SIM905


@dataclass
class Agent:
    """An agent at work on some files.

    Args:
        seed: of all that it does.

    Attributes:
        files: their lines, by name.
        open: names of those in the next prompt, the one touched last at the end.
        steps: what was done, in words.
    """

    seed: int
    files: dict[str, list[str]] = field(default_factory=dict)
    open: list[str] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.choose = Random(f"agent {self.seed}")
        for number in range(NUM_FILES):
            name = f"{NOUNS[number % len(NOUNS)]}_{number}.py"
            self.files[name] = [self.line() for _ in range(self.choose.randint(*LINES))]
        self.order = self.choose.sample(list(self.files), NUM_FILES)

    def line(self) -> str:
        """A line of a program."""
        one, two, three = self.choose.choices(NOUNS, k=3)
        verb, number = self.choose.choice(VERBS), self.choose.randrange(1000)
        forms = [
            f"    {one} = {verb}_{two}({three}, limit={number})",
            f"    if {one}.{two}_id != {number}:",
            f"        return {verb}_{one}({two})",
            f"def {verb}_{one}_{number}({two}, {three}):",
            f"    {one}[{number}] = {two}.{verb}({three})",
            f"    # {verb} each {one} before its {two} is {number}",
        ]
        return self.choose.choice(forms)

    def turn(self) -> str:
        """Reads or edits a file, and says what the next prompt is."""
        weights = [1 / rank for rank in range(1, NUM_FILES + 1)]
        name = self.choose.choices(self.order, weights)[0]
        if name in self.open and self.choose.random() < EDITS / (1 - EDITS):
            lines = self.files[name]
            for _ in range(self.choose.randint(1, EDITED_LINES)):
                lines[self.choose.randrange(len(lines))] = self.line()
            self.steps.append(f"edited {name}")
        else:
            self.steps.append(f"read {name}")
        self.open = [*(one for one in self.open if one != name), name][-NUM_OPEN:]
        return self.prompt()

    def prompt(self) -> str:
        files = [f"File {name}:\n" + "\n".join(self.files[name]) for name in self.open]
        done = "\n".join(f"- {step}" for step in self.steps[-STEPS_TOLD:])
        task = "You change a program so that its tests pass. One step at a time."
        return "\n\n".join([task, *files, f"Steps so far:\n{done}", "Next step:"])


def prompts(num_turns: int, seed: int = 0) -> Iterator[str]:
    """The prompts of an agent's first turns."""
    agent = Agent(seed)
    for _ in range(num_turns):
        yield agent.turn()
