"""The process in which original and port meet, FLA hidden: an order on standard input, one JSON object a line out."""

from __future__ import annotations

import importlib
import json
import os
import sys
from itertools import product
from pathlib import Path

__all__: list[str] = []


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print goes to standard error

    def say(**facts: object) -> None:
        print(json.dumps(facts), file=answers, flush=True)

    from ...spec.errors import GdnError
    from ..reader import Checkpoint
    from ..source import read
    from .oracle import hide_fla, layer_by_layer, layers_alone, whole_model
    from .ours import compare, compare_logits, compare_whole
    from .text import PREFILLED

    order = json.loads(sys.stdin.read())
    whole_logits = importlib.import_module(order["decoder"]).whole_logits
    try:
        hide_fla()
        for job in order["jobs"]:
            source = read(Checkpoint(Path(job["source"])), job["family"])
            original = {"whole": whole_model, "layer by layer": layer_by_layer, "alone": layers_alone}[job["how"]](
                source
            )
            for port, backend in product(job["ports"], order["backends"]):
                for number, what, error, limit in compare(Path(port), original, backend):
                    code = original.layers[number].code
                    say(port=port, backend=backend, layer=number, what=what, error=error, limit=limit, code=code)
                if original.logits is not None:
                    error = compare_logits(Path(port), original, backend)
                    say(port=port, backend=backend, layer=None, what="logits", error=error, code="the whole model")
                if original.logits is None:
                    say(port=port, not_whole="the original's whole model does not run on a CPU")
                    continue
                try:
                    logits = whole_logits(Path(port), original.ids, PREFILLED, backend, job["how"] == "whole")
                except GdnError as error:
                    say(port=port, not_whole=str(error))
                    continue
                for what, off, limit in compare_whole(logits, original):
                    facts = {"what": what, "error": off, "limit": limit, "code": "the whole model"}
                    say(port=port, backend=backend, layer=None, **facts)
        say(done=True)
    except GdnError as error:
        say(refused=str(error))


if __name__ == "__main__":
    _serve()
