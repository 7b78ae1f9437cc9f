"""Laws across keys that do not depend on the number of ranks."""

from __future__ import annotations

from neox.config.sections import NeoXConfig


def static_problems(config: NeoXConfig) -> list[str]:
    """Return every violation as a sentence."""
    problems = []
    model = config.model
    for key in ("num_layers", "hidden_size", "num_attention_heads", "seq_length"):
        if getattr(model, key) is None:
            problems.append(f"`{key}` is missing")
    if model.pos_emb not in ("rotary", "none"):
        problems.append(f"`pos_emb: {model.pos_emb}` ({config.source('pos_emb')}) does not work here; use rotary")
    return problems
