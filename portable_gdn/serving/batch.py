"""The batch of an update: which tokens belong to which request, and which slots hold their states."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..spec.errors import bad

__all__ = ["Batch"]

Array = Any


class Batch(NamedTuple):
    """The rows of an update: each row has tokens of one request. Made once per step, for all layers.

    All attributes are integer arrays on the host (including lists and numpy arrays) or on the device. For one compiled
    program to serve all steps, their shapes must stay the same; unused rows and tokens are padding.

    Attributes:
        query_start_loc: [N + 1], the first token of each row in [T, ...]; it starts at 0 and never decreases. Equal
            neighbours are rows without tokens, and tokens after the last entry are padding.
        state_indices: [N], the slot of each row's request. A row with 0 or less has no slot, and its o is 0.
        num_computed_tokens: [N], the request's tokens before this step, without rejected ones; 0 starts from zeros.
        num_accepted_tokens: [N], how many of the tokens that wait in the row's slot are accepted, counted from the
            first; ignored if none wait. None accepts all.
        read_state_indices: [N], slots to read instead and leave unchanged (copy-on-write). Rows that start from zeros
            read no slot.
        checkpoint_indices: [N, P], slots for the states at the next P multiples of ``checkpoint_every`` that the row's
            committed tokens reach; 0 or less stores none.
    """

    query_start_loc: Array
    state_indices: Array
    num_computed_tokens: Array
    num_accepted_tokens: Array | None = None
    read_state_indices: Array | None = None
    checkpoint_indices: Array | None = None

    def operands(self) -> dict[str, Array]:
        """Return the arrays that are given, by their names in error messages.

        Raises:
            GdnError: A required array is None.
        """
        for name in ("query_start_loc", "state_indices", "num_computed_tokens"):
            if getattr(self, name) is None:
                raise bad(f"batch.{name}", "None", "be an array of integers")
        return {f"batch.{name}": a for name, a in self._asdict().items() if a is not None}
