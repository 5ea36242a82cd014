"""The batch of an update: which tokens belong to which request, and where its states lie."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..spec.errors import bad

__all__ = ["Batch"]

Array = Any


class Batch(NamedTuple):
    """The rows of an update, each some tokens of one request; made once a step, for all layers.

    All are integer arrays, on the host (lists and numpy arrays, too) or on the device, of shapes that stay the same
    from step to step where one compiled program is to serve all: rows and tokens that a step does not need are padding.

    Attributes:
        query_start_loc: [N + 1], where each row's tokens begin in [T, ...], from 0 on and never decreasing; equal
            neighbours are rows without tokens, and tokens behind the last entry are padding.
        state_indices: [N], the slot of each row's request; 0 and below are no slot, and their rows give o = 0.
        num_computed_tokens: [N], tokens of the request before this step's, without rejected ones; 0 starts from zeros.
        num_accepted_tokens: [N], how many of the tokens that wait in the row's slot are accepted, from the first one
            on; ignored where none wait. None accepts all.
        read_state_indices: [N], slots to read instead, which stay as they are: copy-on-write. Rows that start from
            zeros read none.
        checkpoint_indices: [N, P], slots for the states at the next P multiples of ``checkpoint_every`` that the row's
            committed tokens reach; 0 and below keep none.
    """

    query_start_loc: Array
    state_indices: Array
    num_computed_tokens: Array
    num_accepted_tokens: Array | None = None
    read_state_indices: Array | None = None
    checkpoint_indices: Array | None = None

    def operands(self) -> dict[str, Array]:
        """The arrays that are there, by the names that errors call them by.

        Raises:
            GdnError: one that must be there is None.
        """
        for name in ("query_start_loc", "state_indices", "num_computed_tokens"):
            if getattr(self, name) is None:
                raise bad(f"batch.{name}", "None", "be an array of integers")
        return {f"batch.{name}": a for name, a in self._asdict().items() if a is not None}
