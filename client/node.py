"""A deployed node: one client with records of its own. What it is, is its operator's to say and not the server's.

``flower-supernode --node-config 'data="jsonl:/data/records.jsonl" authority="/keys/ca.crt" cache="/cache"'``:

- ``data`` (needed): the node's records, see :mod:`client.data.local`. Without it a node is a worker of a simulation.
- ``authority`` (needed): the federation's ``ca.crt``, by which it knows the server, see :mod:`client.instructed`.
- ``cache``: folder for what is prepared from them; default ``$XDG_CACHE_HOME/lacquer`` or ``~/.cache/lacquer``.
- ``model``: folder of the base model, for a base that the package does not bring. The server's settings then only name
  the model, and no path of theirs is opened here.

A node trains one client a round, itself: a request that names more would count its records more than once. What goes
wrong is told in full to the node's own log, and to the server as nothing but the exception's class: its text may quote
records, and Flower would send it.
"""

import functools
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from client.data.local import open_own
from client.models.files import fingerprint
from client.settings import cache_folder
from client.worker import Job, Worker
from privacy.contribution import Contribution
from strategies.messages.client_update import TrainRequest
from strategies.messages.records import BadMessage

log = logging.getLogger(__name__)


SECURE = ("identity", "federation")
"""Settings of a node that takes part in secure sums: it answers nothing else."""
TERMS = ("epsilon-limit", "delta-limit", "privacy-unit")
"""Settings of a site that protects its own records (:mod:`client.record_level.participant`)."""


class NodeFailed(RuntimeError):
    """What the server is told of a failure on a node: the class of the exception."""


class OtherModel(ValueError):
    """The node's base model is another than the server's: what it learnt would mean something else there."""


@dataclass(frozen=True)
class Node:
    """The settings of a node that owns its records."""

    data: str
    cache: str = ""
    model: str = ""

    @staticmethod
    def of(node_config: Mapping[str, Any]) -> "Node | None":
        """From Flower's node configuration; None where the node has no records of its own."""
        if "data" not in node_config:
            return None
        return Node(**{name: str(node_config.get(name, "")) for name in ("data", "cache", "model")})

    def contribution(self, request: TrainRequest) -> Contribution:
        """The clipped contribution of this one client.

        Raises:
            BadMessage: more or fewer than one client is asked for.
        """
        if len(request.clients) != 1:
            raise BadMessage("a node with records of its own is one client")
        return own_worker(request.job, self).contribution(request)


def refuse_unless_for(request: str, node_config: Mapping[str, Any]) -> None:
    """BadMessage where the node's operator set it up for requests that trust the server less.

    Args:
        request: ``"sum"`` of clipped contributions without noise, ``"secure"`` sum, ``"silo"`` with noise of its own.
        node_config: Flower's.
    """
    for settings, kind, what in ((SECURE, "secure", "secure sums"), (TERMS, "silo", "what it protects by itself")):
        said = [name for name in settings if name in node_config]
        if said and request != kind:
            raise BadMessage(f"this node answers requests for {what} only: {', '.join(said)} in its settings")


@contextmanager
def kept_here(node: Node | None) -> Iterator[None]:
    """Within the block, an exception on a node with its own records is logged here and loses its text on the way out.

    Raises:
        NodeFailed: instead of any other exception.
    """
    try:
        yield
    except Exception as error:
        if node is None:
            raise
        log.exception("this message could not be answered; the server is told the exception's class and nothing else")
        raise NodeFailed(type(error).__name__) from None


@functools.lru_cache(maxsize=1)
def own_worker(text: str, node: Node) -> Worker:
    """The worker on a node's own records."""
    job = Job.from_json(text)
    reading = job.reading
    if reading is None:
        raise ValueError("the server's job says nothing of how to read a node's own records (data.held-by = 'nodes')")
    if job.task != reading.task or job.num_labels != len(reading.labels):
        # a loss that some labels make raise would tell the server of records that have them
        raise ValueError(
            f"the server's job trains for {job.task} with {job.num_labels} labels, but records would be read for "
            f"{reading.task} with {len(reading.labels)}"
        )
    if not node.model and (job.model.startswith(("/", ".", "~")) or Path(job.model).exists()):
        raise ValueError("no model of that name is on this node; name its folder in the node's own settings (model)")
    job = job.but(model=node.model or job.model)
    cache = Path(node.cache).expanduser() if node.cache else cache_folder()
    if fingerprint(job.model) != job.fingerprint:
        raise OtherModel(f"the base model {job.model!r} of this node is not the server's; copy the server's folder")
    data = open_own(node.data, reading, job.model, cache)
    return Worker(job.but(data=str(data.folder), canaries=0), data)
