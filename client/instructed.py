"""A deployed node follows the instructions of its federation's server, each of them once, and nobody else's.

    flower-supernode --node-config 'authority="/keys/ca.crt" ...'

names the authority that signed the server's certificate for instructions, see :mod:`strategies.messages.instruction`.
There is no switch that turns this off: a node without the setting refuses everything. Only a worker of a simulation,
which Flower's engine gives a ``partition-id`` and ``num-partitions`` and no operator anything else, asks for no
signature: server and worker are parts of one program there.

What a node has followed stays in its cache (``instructions-NODE.json``: the last sequence number of every run), so that
an instruction is followed once although the node was restarted. It is noted before the work begins.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context, Message

from client.node import Node, kept_here
from client.settings import cache_folder
from privacy import durable
from privacy.errors import CorruptRun
from strategies.messages import instruction
from strategies.messages.instruction import NotInstructed

OF_A_WORKER = frozenset({"partition-id", "num-partitions"})
"""What Flower's simulation engine sets, and all that it sets."""
SETTING = "authority"


def check_instruction(message: Message, context: Context, follow: Callable[[Message, Context], Message]) -> Message:
    """Check a message before anything else, in the form of Flower's mods: what is no instruction goes no further."""
    if not is_simulated(context.node_config):
        with kept_here(Node.of(context.node_config)):
            accept(message, context)
    return follow(message, context)


def is_simulated(node_config: Mapping[str, Any]) -> bool:
    """Whether this is a worker of a simulation."""
    return set(node_config) == OF_A_WORKER


def accept(message: Message, context: Context) -> None:
    """Take the server's signature out of a message and note that it is followed.

    Raises:
        NotInstructed: it is no instruction of the server to this node, or was followed before.
        CorruptRun: what was followed before cannot be read.
    """
    config = context.node_config
    if SETTING not in config:
        raise NotInstructed(
            f"this node knows no server: its settings name no {SETTING}; add the federation's ca.crt to --node-config, "
            f'for example {SETTING}="/keys/ca.crt"'
        )
    authority = instruction.load_authority(Path(str(config[SETTING])).expanduser())
    sequence = instruction.take(message, context.run_id, context.node_id, authority)
    cache = str(config.get("cache", ""))
    _once(Path(cache).expanduser() if cache else cache_folder(), context.node_id, context.run_id, sequence)


def _once(folder: Path, node: int, run: int, sequence: int) -> None:
    """Note an instruction. A SuperNode hands over one message at a time, so nothing changes the file meanwhile."""
    path = folder / f"instructions-{node}.json"
    followed = _followed(path)
    if sequence <= followed.get(str(run), 0):
        raise NotInstructed("this instruction, or a later one of its run, was followed before")
    durable.new_folder(folder)
    durable.write(path, json.dumps(followed | {str(run): sequence}) + "\n")


def _followed(path: Path) -> dict[str, int]:
    """The last sequence number by run."""
    if not path.is_file():
        return {}
    try:
        return {str(run): int(last) for run, last in json.loads(path.read_text(encoding="utf-8")).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise CorruptRun(
            f"{path} cannot be read ({error}): which instructions were followed is unknown; restore it, or remove it "
            "while no run is going on"
        ) from error
