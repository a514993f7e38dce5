"""The in-process grid and run, with apps of a few lines; the real apps run in tests/end_to_end."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.supercore.task_identity import TaskIdentity

from server.config.load import parse
from server.run_folder.telemetry import Telemetry
from simulations.engines.inprocess import InProcessGrid, run_inprocess

client_app = ClientApp()
FAIL = 13


@client_app.train()
def train(message, context):
    values = message.content["arrays"]["x"].numpy()
    if values[0] == FAIL:
        raise RuntimeError("planted")
    count = context.state.config_records.get("count", ConfigRecord({"n": 0}))
    context.state["count"] = ConfigRecord({"n": int(count["n"]) + 1})
    numbers = {
        "partition": context.node_config["partition-id"],
        "partitions": context.node_config["num-partitions"],
        "calls": int(count["n"]) + 1,
        "sum": float(values.sum()),
    }
    return Message(RecordDict({"metrics": MetricRecord(numbers)}), reply_to=message)


def message(node, *values):
    content = RecordDict({"arrays": ArrayRecord({"x": Array(np.array(values, np.float32))})})
    return Message(content, node, MessageType.TRAIN)


def test_every_node_answers_and_keeps_its_own_state():
    grid = InProcessGrid(client_app, 3)
    assert list(grid.get_node_ids()) == [1, 2, 3]
    for calls in (1, 2):
        replies = list(grid.send_and_receive([message(node, node, 1) for node in (3, 1)]))
        numbers = [dict(reply.content["metrics"]) for reply in replies]
        assert numbers == [
            {"partition": 2, "partitions": 3, "calls": calls, "sum": 4.0},
            {"partition": 0, "partitions": 3, "calls": calls, "sum": 2.0},
        ]
        assert [reply.metadata.src_node_id for reply in replies] == [3, 1]


def test_a_client_that_raises_becomes_the_engines_error_reply_and_spares_the_others():
    grid = InProcessGrid(client_app, 2)
    failed, sound = grid.send_and_receive([message(1, 13), message(2, 1)])
    assert failed.has_error()
    assert failed.error.code == 2
    assert "planted" in failed.error.reason
    assert not sound.has_error()


def test_replies_name_the_message_they_answer():
    grid = InProcessGrid(client_app, 1)
    sent = [message(1, 1), message(1, 2)]
    identifiers = list(grid.push_messages(sent))
    assert list(grid.pull_messages(["unknown"])) == []
    replies = list(grid.pull_messages(identifiers))
    assert [reply.metadata.reply_to_message_id for reply in replies] == identifiers
    assert list(grid.pull_messages(identifiers)) == [], "a reply is given once"


def test_what_is_late_gets_no_reply():
    grid = InProcessGrid(client_app, 1)
    assert list(grid.send_and_receive([message(1, 1)], timeout=0.0)) == []
    assert len(list(grid.send_and_receive([message(1, 1)], timeout=60.0))) == 1


def test_a_client_cannot_change_what_the_server_holds():
    app = ClientApp()

    @app.train()
    def scribble(message, context):
        message.content["arrays"]["x"] = Array(np.zeros(1, np.float32))
        return Message(message.content, reply_to=message)

    sent = message(1, 5)
    (reply,) = InProcessGrid(app, 1).send_and_receive([sent])
    assert reply.content["arrays"]["x"].numpy() == 0
    assert sent.content["arrays"]["x"].numpy() == 5


def test_unknown_nodes_and_empty_grids_are_refused():
    with pytest.raises(ValueError, match="nodes are 1 to 2"):
        InProcessGrid(client_app, 2).push_messages([message(3, 1)])
    with pytest.raises(ValueError, match="num_nodes"):
        InProcessGrid(client_app, 0)


@pytest.mark.parametrize(("table", "nodes"), [({"workers": 3}, 3), ({}, 1)])
def test_a_run_gets_its_configuration_folder_and_nodes(table, nodes, tmp_path):
    seen = {}
    server_app = ServerApp()

    @server_app.main()
    def main(grid, context):
        seen.update(context.run_config, nodes=len(list(grid.get_node_ids())))
        with Telemetry(tmp_path, tensorboard=False) as telemetry:
            telemetry.status("completed", "done")

    config = parse({"engine": {"kind": "inprocess", **table}})
    run_inprocess(config, tmp_path, server_app=server_app, client_app=client_app)
    assert seen["run-folder"] == str(tmp_path)
    assert seen["nodes"] == nodes
    from server.config.load import load

    assert load(tmp_path / "config.toml").engine.workers == nodes


def test_with_one_client_per_node_there_are_as_many_nodes_as_clients(tmp_path):
    seen = []
    server_app = ServerApp()

    @server_app.main()
    def main(grid, context):
        seen.append(len(list(grid.get_node_ids())))

    config = parse({"clients": 50, "privacy": {"delta": 1e-3}, "simulation": {"clients-per-node": 1}})
    run_inprocess(config, tmp_path, server_app=server_app, client_app=client_app)
    assert seen == [50]


def test_what_the_server_raises_is_raised(tmp_path):
    server_app = ServerApp()

    @server_app.main()
    def main(grid, context):
        raise RuntimeError("planted")

    before = TaskIdentity.node_id
    with pytest.raises(RuntimeError, match="planted"):
        run_inprocess(parse({}), tmp_path, server_app=server_app, client_app=client_app)
    assert TaskIdentity.node_id == before
