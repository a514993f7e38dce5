"""The ClientApp: two handlers, nothing else. The same app serves a simulated worker and a deployed client."""

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from client.wire import EvaluateRequest, TrainRequest, contribution_records, totals_records
from client.worker import warm_worker

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train the requested clients; reply with one bounded sum."""
    request = TrainRequest.from_records(message.content)
    contribution = warm_worker(request.job).contribution(request)
    return Message(contribution_records(contribution, request.round), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate the served adapter on part of a public split."""
    request = EvaluateRequest.from_records(message.content)
    metrics = warm_worker(request.job).metrics(request)
    return Message(totals_records(metrics.loss, metrics.accuracy, metrics.count), reply_to=message)
