"""Who sees whom in rows of tokens: one description, from which dense masks and masks by block come.

Legend: B batch, S sequence, N heads here, Q queries and T keys of one part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PairRule = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(Positions of queries, positions of keys, numbers of heads) -> whether they see each other. The three broadcast."""


def window_rule(width: int) -> PairRule:
    """Return the rule by which a query sees the last `width` tokens, its own included."""

    def allows(queries: Tensor, keys: Tensor, heads: Tensor) -> Tensor:
        distance = queries - keys
        return (distance >= 0) & (distance < width)

    return allows


def rule_of_heads(rule: PairRule, first: int) -> PairRule:
    """Return the rule of the heads from number `first` on, which are counted from 0."""

    def allows(queries: Tensor, keys: Tensor, heads: Tensor) -> Tensor:
        return rule(queries, keys, heads + first)

    return allows


@dataclass(frozen=True)
class VisiblePairs:
    """Which queries see which keys of causal attention: earlier keys of the same document that a rule allows.

    Attributes:
        length: Number of tokens in a row, S.
        device: Device of the tokens.
        document_starts: Index in the row at which each token's document starts, [B, S]; None for one document a row.
        rule: What the kind of attention allows, by position in the document; None for all earlier keys.
        reach: Most tokens that a query sees, counted back from itself; None for any number. The rule says the same;
            this number tells which keys need not be looked at.
        rule_heads: Number of heads whose pairs differ; 1 if those of all heads are alike.
    """

    length: int
    device: torch.device
    document_starts: Tensor | None = None
    rule: PairRule | None = None
    reach: int | None = None
    rule_heads: int = 1

    def sees(self, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Return whether queries see keys. The indices of rows, heads, queries and keys broadcast."""
        seen = key <= query
        query_position = query
        key_position = key
        if self.document_starts is not None:
            start = self.document_starts[row, query]
            seen = seen & (key >= start)
            query_position = query - start
            key_position = key - start
        if self.rule is not None:
            seen = seen & self.rule(query_position, key_position, head)
        return seen

    @property
    def rows(self) -> int:
        """Number of rows whose pairs differ; 1 if those of all rows are alike."""
        if self.document_starts is None:
            return 1
        return self.document_starts.shape[0]

    def dense(self, queries: Sequence[range] | None = None) -> Tensor:
        """Return the pairs of some queries, by default of all, with all keys: bool [B or 1, N or 1, Q, S].

        Args:
            queries: Indices of the queries, as ranges; all of the row if None.
        """
        rows = torch.arange(self.rows, device=self.device)
        return self.part(rows, self.indices(queries), torch.arange(self.length, device=self.device))

    def indices(self, queries: Sequence[range] | None) -> Tensor:
        """Return the indices of queries given as ranges [Q]; of all queries if None."""
        if queries is None:
            return torch.arange(self.length, device=self.device)
        return torch.cat([torch.arange(run.start, run.stop, device=self.device) for run in queries])

    def part(self, rows: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        """Return the pairs of some rows, queries [Q] and keys [T], by their indices: bool [rows, N or 1, Q, T]."""
        heads = torch.arange(self.rule_heads, device=self.device)
        seen = self.sees(rows.view(-1, 1, 1, 1), heads.view(-1, 1, 1), queries.view(-1, 1), keys)
        return seen.expand(len(rows), self.rule_heads, -1, -1)

    def first_key(self, row: int, start: int, end: int) -> int:
        """Return an index before which no query of [start, end) sees a key of the row."""
        first = 0
        if self.document_starts is not None:
            first = int(self.document_starts[row, start])
        if self.reach is not None:
            first = max(first, start - self.reach + 1)
        return first
