"""Passages of the Python reference, and edited copies of them, for the tests of near-duplicates."""

from __future__ import annotations

import json
import random
from pathlib import Path
from pydoc_data.topics import topics

WORDS = ["amber", "basalt", "cedar", "drift", "ember", "fjord", "garnet", "heron", "iris", "jasper", "kelp", "larch"]


def passages(size: int, limit: int | None = None) -> list[str]:
    """Distinct passages of about `size` characters, cut at ends of lines."""
    found: list[str] = []
    for name in sorted(topics):
        lines, held = topics[name].splitlines(keepends=True), ""
        for line in lines:
            held += line
            if len(held) >= size:
                found.append(held)
                held = ""
    return sorted(set(found), key=found.index)[:limit]


def edited(text: str, edits: int, random: random.Random) -> str:
    """The text with so many words inserted, replaced or left out."""
    words = text.split(" ")
    for _ in range(edits):
        place = random.randrange(len(words))
        words[place : place + random.randrange(2)] = random.choices(WORDS, k=random.randrange(1, 3))
    return " ".join(words)


def with_copies(seed: int, size: int, most_edits: int, limit: int | None = None) -> list[str]:
    """Passages and, for about half of them, an edited copy, in random order."""
    rng = random.Random(seed)
    texts = passages(size, limit)
    texts += [edited(text, rng.randrange(most_edits + 1), rng) for text in texts if rng.random() < 0.5]
    rng.shuffle(texts)
    return texts


def write(path: Path, texts: list[str]) -> Path:
    """A file of documents."""
    lines = (json.dumps({"text": text, "url": f"http://x/{n}"}) for n, text in enumerate(texts))
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def kept_numbers(path: Path) -> list[int]:
    """Numbers of the documents in an output, from their URLs."""
    return [int(json.loads(line)["url"].rsplit("/", 1)[1]) for line in path.read_text().splitlines()]
