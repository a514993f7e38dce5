"""The ClientApp of `against_flower.py`: Lacquer's own, and the usual one that trains PEFT for one client per message.

The usual one does what Flower's examples for language models do: take the base model, put an adapter on it, load the
global parameters, train with PyTorch, send the parameters back. With ``rebuild`` the model is loaded anew for every
message, as those examples do; without, it is kept from message to message, which takes some care to write. Tokens come
ready from the prepared data set and every batch is padded to its longest record, which is more than the examples do.
"""

import functools

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from peft import PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

from client.app import app as lacquer
from client.data.prepared import PreparedData
from client.engine.batching import Pool, local_steps
from client.models.base import load_base
from client.models.lora import peft_config
from client.models.tasks import SequenceClassification
from client.worker import Job, local_seed
from simulations.benchmarks.engine import jobs

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """One message of either kind."""
    if "rebuild" not in message.content.config_records["config"]:
        return lacquer(message, context)
    torch.set_num_threads(1)
    config, arrays = message.content.config_records["config"], message.content.array_records["arrays"]
    text = str(config["job"])
    model = load_model(text) if config["rebuild"] else kept_model(text)
    set_peft_model_state_dict(model, arrays.to_torch_state_dict())
    count = train_one(model, Job.from_json(text), int(context.node_config["partition-id"]), int(config["server-round"]))  # type: ignore[arg-type]
    reply = RecordDict(
        {
            "arrays": ArrayRecord(get_peft_model_state_dict(model)),
            "metrics": MetricRecord({"num-examples": count}),
        }
    )
    return Message(reply, reply_to=message)


def load_model(job: str) -> PeftModel:
    """Base model from its files, adapter on top."""
    settings = Job.from_json(job)
    model, _ = load_base(settings.model, settings.task, settings.num_labels)
    adapted: PeftModel = get_peft_model(model, peft_config(settings.spec)).eval()
    return adapted


@functools.lru_cache(maxsize=1)
def kept_model(job: str) -> PeftModel:
    """The model of this process."""
    return load_model(job)


def train_one(model: PeftModel, job: Job, client: int, round: int) -> int:
    """Local training of one client; returns its number of records."""
    records = PreparedData.open(job.data).client(client)
    pool, task = Pool([records]), SequenceClassification(job.num_labels, job.local.balance)
    rows = local_steps(job.local, len(records), local_seed(job.seed, round, client))
    batches = (pool.batch(some, 0, torch.device("cpu")) for some in rows)
    jobs.run_steps(model, [p for p in model.parameters() if p.requires_grad], batches, task, job.local)
    return len(records)
