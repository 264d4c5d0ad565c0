"""Networks for tests: one kills its process, one reads the values it computes, one reports where it is trained."""

import os
import signal
import time
from pathlib import Path

from torch import Tensor

from edge_fl.inputs import InputSpec
from tests.edge_fl.methods.toy import Flat


class Deadly(Flat):
    """Kills the process that trains it and removes the file `marker`, while there is one; with `always` it leaves the file."""

    def __init__(self, input: InputSpec, marker: str, always: bool = False) -> None:
        super().__init__(input)
        self.marker, self.always = Path(marker), always

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self._armed():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)

    def _armed(self) -> bool:
        """Whether this process is the one to die: of several at once, the one that removes the file."""
        if self.always:
            return self.marker.exists()
        try:
            self.marker.unlink()
        except FileNotFoundError:
            return False
        return True


class Asking(Flat):
    """Does something else when the sum of its features is negative, which no vectorised computation can follow."""

    def forward(self, x: Tensor) -> Tensor:
        z = super().forward(x)
        return -z if z.sum() < 0 else z


class Located(Flat):
    """Makes a file in `folder` named after the Ray node on which it is trained, and waits for that of a second node.

    Without the wait one node trains the whole of a small cohort while the other one still starts its worker.
    """

    def __init__(self, input: InputSpec, folder: str) -> None:
        super().__init__(input)
        self.folder = Path(folder)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            import ray

            if ray.is_initialized():
                (self.folder / ray.get_runtime_context().get_node_id()).touch()
                while len(list(self.folder.iterdir())) < 2:  # until the test's timeout
                    time.sleep(0.05)
        return super().forward(x)
