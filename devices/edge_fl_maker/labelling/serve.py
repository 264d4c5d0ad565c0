"""Assemble the service of a device: predictions and, where its data are a folder, the label page and capture."""

import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from edge_fl.console.output import print_status
from edge_fl.errors import InputError
from edge_fl.files.paths import text
from edge_fl.wire.hosts import is_loopback
from edge_fl_devices.config import DeviceConfig
from edge_fl_devices.data import location
from edge_fl_devices.serving.show import print_threshold
from edge_fl_maker import access
from edge_fl_maker.access import HttpAccess
from edge_fl_maker.capture import pool as pools
from edge_fl_maker.capture.capture import Capture
from edge_fl_maker.capture.pool import Pool
from edge_fl_maker.http_server import Service
from edge_fl_maker.labelling.learner import Learner
from edge_fl_maker.labelling.moves import Moves
from edge_fl_maker.labelling.routes import routes
from edge_fl_maker.labelling.session import LabelSession


@contextmanager
def serving(
    folder: Path, config: DeviceConfig | None, host: str, port: int, options: Mapping[str, Any]
) -> Iterator[Service]:
    """Open the service of a device's folder. Labels need its settings, and `data` that is a folder.

    On other addresses than loopback it requires a token, and uses TLS if the device has an identity.
    Raises InputError for an unusable folder or address.
    """
    labels = config is not None and config.reads_folder
    allowed, tls, line = HttpAccess(), None, ""
    if not is_loopback(host):
        token, is_new = access.token(folder)
        tls = access.tls(config.broker.identity) if config else None
        allowed = HttpAccess(token, secure=tls is not None)
        line = f"#token={token}" if is_new else ""
        print_status(f"clients need the token in {text(folder / access.TOKEN_FILE)}")
        if tls is None:
            print_status("without an identity there is no TLS: others in this network can read the traffic")
    with ExitStack() as stack:
        service = stack.enter_context(
            Service(folder, port, host=host, access=allowed, tls=tls, optional=labels, **options)
        )
        name = socket.gethostname() if host == "0.0.0.0" else host
        address = f"{'https' if tls else 'http'}://{name}:{service.port}"
        try:
            print_threshold(service.predictor)
        except InputError as error:
            print_status(f"{error.message}; label pictures to get one")
        print_status(f"{address}/predict serves {text(folder)}; stop with Ctrl-C")
        if config and labels:
            stack.enter_context(labelling(service, config))
            print_status(f"{address}/label{line} to label pictures")
        elif config is None:
            print_status(f"{text(folder)}: without settings of a device run; labels need them, or --config")
        yield service


@contextmanager
def labelling(service: Service, config: DeviceConfig) -> Iterator[LabelSession]:
    """Add the label page to a service, and capture and learn until the block ends."""
    folder, data = Path(config.folder), Path(location.parsed(config.data)[1])
    pool = Pool(folder / pools.FOLDER, config.capture)
    learner = Learner(config, data, service.model, pool, service.lock)
    pool.order = learner.order
    moves = Moves(pool, data, folder)
    moves.settle()
    session, capture = LabelSession(pool, moves, learner), Capture(config.capture, pool, config.budget)
    service.routes.update(routes(session, capture, service.access, service.lock))
    service.parts["capture"] = capture.status
    if remark := pool.too_small_disk():
        print_status(remark)
    learner.start()
    capture.start()
    try:
        yield session
    finally:
        capture.stop()
        learner.stop()
