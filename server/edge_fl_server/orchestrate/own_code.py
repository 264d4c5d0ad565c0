"""What a run checks and says of a method or model of the user's own before its first round."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from io import StringIO

from edge_fl import models, plugins
from edge_fl.errors import MethodError
from edge_fl.methods import METHODS
from edge_fl.methods.contract import steps
from edge_fl_server.orchestrate.execution import RunSetup


def require_exported(setup: RunSetup) -> None:
    """Raise MethodError for a model of the user's own that cannot be exported: devices get its extractor as a release."""
    if reason := export_obstacle(setup):
        raise MethodError(f"{reason}, as its releases to devices have to be", "no run was started")


def export_obstacle(setup: RunSetup) -> str:
    """Why a model of the user's own cannot be exported as ONNX; empty for one that can, and for others, which tests export."""
    if not (models.is_own(setup.spec.model) and setup.method.exports):
        return ""
    from edge_fl_server.release import export

    try:
        with _quiet():
            export.export(setup.method, steps.start(setup.method))
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__:  # torch's own frame says only that the export failed
            cause = cause.__cause__
        first = (str(cause).strip() or type(cause).__name__).splitlines()[0]
        where = plugins.own_line(cause) or plugins.own_line(error)
        reason = f"{where}: {first}" if where else first
        return f"model {setup.spec.model.name}: cannot be exported as ONNX ({reason})"
    finally:
        setup.method.net.to(setup.device)
    return ""


def not_built_in(setup: RunSetup) -> str:
    """The method and the model that devices do not have with edge-fl, as "method gentle, model mine:Wide"; empty if none trains."""
    if setup.recipe.source not in ("fleet", "hybrid"):
        return ""
    method = setup.spec.method.name
    own = [f"method {method}"] if method.removesuffix("+ft") not in METHODS else []
    return ", ".join(own + [f"model {setup.spec.model.name}"] * models.is_own(setup.spec.model))


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what torch prints in the block: of a failed export a hundred lines of its own graphs."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stderr(StringIO()):
            yield
    finally:
        logging.disable(before)
