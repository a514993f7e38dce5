"""The same ServerApp and the same ClientApp in one process, without Flower's engine and without Ray.

:class:`InProcessGrid` stands where Flower's grid stands: messages are pickled on their way and back as they are on Ray,
and a client that raises becomes the error reply that Flower's engine makes of it. Contributions are integers, so the
sums of a round are those of any other engine, whatever the number of nodes.

``lacquer run --engine inprocess`` starts this module as a process; so does every run that needs no clients, over the
records of one site or in phases.
"""

import json
import logging
import pickle
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from server import notice
from server.config.load import load
from server.config.schema import RunConfig
from server.run_folder.names import CONFIG_FILE, write_config
from simulations.engines.hardware import resources, with_workers
from simulations.engines.processes import end_with_launcher

log = logging.getLogger(__name__)

CLIENT_APP_RAISED_EXCEPTION = 2  # flwr.common.constant.ErrorCode
RUN_ID = 1
SERVER_NODE = 0


class InProcessGrid(Grid):
    """Nodes ``1..num_nodes`` served one after the other by one ClientApp in this process.

    Args:
        num_nodes: how many nodes the ServerApp sees.
        run_config: what a client finds in ``context.run_config``.
        node_config: added to every node's ``partition-id`` and ``num-partitions``.

    Attributes:
        contexts: of the nodes, each with what its operator has set.
        settle: seconds for which the number of nodes must stay the same; they are all here from the start.
        patience: seconds to wait for nodes that are away; none comes while this process waits.
    """

    settle = 0.0
    patience = 0.0

    def __init__(
        self,
        client_app: ClientApp,
        num_nodes: int,
        run_config: dict[str, str | int | float | bool] | None = None,
        node_config: dict[str, str | int | float | bool] | None = None,
    ) -> None:
        if num_nodes < 1:
            raise ValueError(f"num_nodes must be >= 1, got {num_nodes}")
        self._client_app = client_app
        self.contexts = {
            node: Context(
                run_id=RUN_ID,
                node_id=node,
                node_config={"partition-id": node - 1, "num-partitions": num_nodes, **(node_config or {})},
                state=RecordDict(),
                run_config=dict(run_config or {}),
            )
            for node in range(1, num_nodes + 1)
        }
        self._pushed: dict[str, Message] = {}
        self._count = 0

    @property
    def run(self) -> Run:
        return Run.create_empty(RUN_ID)

    def set_run(self, run: Run) -> None:
        """There is one run in this process."""

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Take messages; they are answered when they are pulled."""
        identifiers = []
        for message in messages:
            if message.metadata.dst_node_id not in self.contexts:
                raise ValueError(
                    f"no node {message.metadata.dst_node_id}; nodes are 1 to {len(self.contexts)} (get_node_ids)"
                )
            self._count += 1
            identifier = str(self._count)
            message.metadata.__dict__["_message_id"] = identifier
            self._pushed[identifier] = message
            identifiers.append(identifier)
        return identifiers

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Answer the messages of these ids that were pushed and not pulled yet."""
        return [self._answer(self._pushed.pop(identifier)) for identifier in message_ids if identifier in self._pushed]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Answer messages in order; those not begun when ``timeout`` seconds are over get no reply, as on Ray."""
        deadline = None if timeout is None else time.monotonic() + timeout
        replies: list[Message] = []
        waiting = list(self.push_messages(messages))
        for identifier in waiting:
            if deadline is not None and time.monotonic() >= deadline:
                break
            replies.extend(self.pull_messages([identifier]))
        for identifier in waiting:
            self._pushed.pop(identifier, None)
        return replies

    def _answer(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        arrived, context = pickle.loads(pickle.dumps((message, self.contexts[node])))
        try:
            with identity(node):
                reply = self._client_app(message=arrived, context=context)
            self.contexts[node] = context
        except Exception as error:  # what Flower's engine does: one client's failure is a reply, not the end of a run
            log.error("node %d raised:\n%s", node, traceback.format_exc())
            with identity(node):
                reply = Message(
                    Error(CLIENT_APP_RAISED_EXCEPTION, f"{type(error).__name__}: {error}"), reply_to=arrived
                )
        self._count += 1
        reply.metadata.__dict__["_message_id"] = str(self._count)
        returned: Message = pickle.loads(pickle.dumps(reply))
        return returned


@contextmanager
def identity(node: int) -> Iterator[None]:
    """Flower's messages ask a class of their process who it is; here one process is everybody in turn."""
    names = ("_run_id", "_node_id", "_task_id")
    before = {name: getattr(TaskIdentity, name) for name in names}
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = RUN_ID, node, 1
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(TaskIdentity, name, value)


def run_inprocess(
    config: RunConfig,
    run_folder: Path,
    *,
    server_app: ServerApp | None = None,
    client_app: ClientApp | None = None,
    keys: Mapping[str, str | bool] | None = None,
) -> None:
    """Run ``config`` in this process; whatever the ServerApp raises is raised here.

    Args:
        config: the resolved configuration, see :func:`simulations.engines.launcher.run_flower`.
        run_folder: existing folder of the run.
        server_app, client_app: the apps to run; Lacquer's own by default.
        keys: further keys for the ServerApp: ``resume`` resumes the run in ``run_folder``.
    """
    keys, run_folder = dict(keys or {}), run_folder.resolve()
    if config.is_single_site:
        from server.runs.start import run_in_folder

        run_in_folder(config, run_folder, resume=bool(keys.get("resume")), other_code=bool(keys.get("other-code")))
        return
    if server_app is None or client_app is None:
        import client.app  # they load torch and transformers, which a grid in a test may not need
        import server.app

        server_app = server_app or server.app.app
        client_app = client_app or client.app.app
    config = with_workers(config, resources(config).workers)
    nodes = config.clients if config.simulation.clients_per_node == 1 else config.engine.workers
    run_config: dict[str, str | int | float | bool] = {
        "config-file": str(write_config(run_folder, config)),
        "run-folder": str(run_folder),
        **keys,
    }
    grid = InProcessGrid(client_app, nodes, run_config)
    with identity(SERVER_NODE):
        server_app(
            grid=grid,
            context=Context(
                run_id=RUN_ID, node_id=SERVER_NODE, node_config={}, state=RecordDict(), run_config=dict(run_config)
            ),
        )


if __name__ == "__main__":
    launcher, private, folder, plugins, *special = sys.argv[1:]
    end_with_launcher(int(launcher), Path(private))
    notice.listen()
    sys.path.append(plugins)  # a user's own modules are found there, and shadow nothing
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    run_inprocess(load(Path(folder) / CONFIG_FILE), Path(folder), keys=json.loads(special[0]) if special else None)
