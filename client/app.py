"""The ClientApp: its handlers, nothing else. The same app serves a simulated worker and a deployed client."""

import numpy as np
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from client.instructed import check_instruction
from client.node import Node, kept_here, refuse_unless_for
from client.record_level import messages, participant, questions
from client.record_level.statistics import ACTION
from client.secure_sum import HANDLERS
from client.worker import warm_worker
from strategies.messages.client_update import (
    EvaluateRequest,
    ShardMetrics,
    TrainRequest,
    code_fingerprint,
    contribution_records,
)
from strategies.messages.own_clients import JOIN, JoinRequest, join_reply
from strategies.messages.records import BadMessage

app = ClientApp(mods=[check_instruction])
for step, answer in HANDLERS.items():
    app.train(step)(answer)
app.train(messages.ACTION)(participant.answer)
app.train(ACTION)(questions.answer_site)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train the requested clients; reply with one bounded sum."""
    node = Node.of(context.node_config)
    with kept_here(node):
        refuse_unless_for("sum", context.node_config, "drawn")
        request = TrainRequest.from_records(message.content)
        refuse_unless_for("sum" if request.own_draw is None else "drawn", context.node_config)
        if node is None:
            contribution = warm_worker(request.job).contribution(request)
        else:
            contribution = node.contribution(request)
        return Message(contribution_records(contribution, request.round), reply_to=message)


@app.query(JOIN)
def join(message: Message, context: Context) -> Message:
    """Join a run as a node with many clients; reply with their public number."""
    node = Node.of(context.node_config)
    with kept_here(node):
        if node is None:
            raise BadMessage("a worker of a simulation has no clients of its own")
        refuse_unless_for("drawn", context.node_config)
        clients = node.join(JoinRequest.from_records(message.content))
        return Message(join_reply(clients, code_fingerprint()), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate the served adapter on part of a public split, which only the workers of a simulation have."""
    node = Node.of(context.node_config)
    with kept_here(node):
        if node is not None:
            raise BadMessage("a node with records of its own has no public ones to evaluate on")
        request = EvaluateRequest.from_records(message.content)
        metrics = warm_worker(request.job).metrics(request)
        confusion = None if metrics.confusion is None else np.array(metrics.confusion)
        shard = ShardMetrics(metrics.loss, metrics.accuracy, metrics.count, confusion)
        return Message(shard.to_records(), reply_to=message)
