"""The child's end of the protocol: a line on standard input asks for a round or for the weights, a line of JSON answers."""

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Weights = Callable[[], Mapping[str, np.ndarray]]


class Turns:
    """Answers on the original standard output; whatever libraries print goes to standard error.

    `about` describes the side (version, engine) and is part of every answer.
    """

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._running = False
        self.about: dict[str, Any] = {}

    def wait(self, weights: Weights | None = None) -> None:
        """Report the round that has ended, then wait until the next is asked for. `weights` are those after the round.

        Raises SystemExit at the end of the input.
        """
        if self._running:
            self._answer()
        for line in iter(sys.stdin.readline, ""):
            request, _, path = line.rstrip("\n").partition(" ")
            if request == "round":
                self._running = True
                return
            if weights is not None:
                np.savez(path, **weights())
            self._answer()
        raise SystemExit

    def _answer(self) -> None:
        self._answers.write(json.dumps(self.about) + "\n")
        self._answers.flush()
