"""A site's answer to a server that asks what its units are like, with noise of its own.

A deployed site answers under its operator's limits and its owner's policy, and only where its owner keeps an account:
that counts the questions, which no ledger of one answer could. Request and reply are those of a site's steps, without
an adapter.
"""

import logging
import secrets
from pathlib import Path
from typing import Final

from flwr.app import Context, Message

from client.data.records import Records
from client.node import Node, kept_here, own_worker, refuse_unless_for
from client.node_state.owner import Owner
from client.record_level.messages import SiteReply, SiteRequest
from client.record_level.participant import OperatorLimits, not_allowed, refusal, refused_unread, state_folder
from client.record_level.state import LEDGER
from client.record_level.statistics import Source, answer, price
from client.worker import Job, warm_worker
from privacy.errors import AccountRefused
from privacy.ledger.ledger import Ledger
from privacy.ledger.place import At

ASKED: Final = "asked"
"""Folder of a deployed site's questions, in that of its state."""

log = logging.getLogger(__name__)


def answer_site(message: Message, context: Context) -> Message:
    """The handler of ``train.ask``: a worker's simulated site, or the node's own records."""
    node = Node.of(context.node_config)
    with kept_here(node):
        refuse_unless_for("site", context.node_config)
        request = SiteRequest.from_records(message.content)
        account: At | None = None
        if node is None:
            worker, folder = warm_worker(request.job), Path(request.state) / str(request.client)
        else:
            folder, owner = state_folder(context.node_config) / ASKED, Owner.of(context.node_config)
            limits, account = OperatorLimits.of(context.node_config), owner.account
            if account is None:
                reason = "this site answers no questions: its owner keeps no account that would count them (account)"
            else:
                reason = not_allowed(request, owner) or refused_unread(request, limits, folder)
            if reason:
                return Message(refusal(request, reason).to_records(), reply_to=message)
            worker, folder = own_worker(request.job, node, several_units=True), folder / secrets.token_hex(8)
        reply = tell(request, worker.data.client(request.client), worker.job, folder, account)
        return Message(reply.to_records(), reply_to=message)


def tell(request: SiteRequest, records: Records, job: Job, folder: Path, account: At | None) -> SiteReply:
    """A site's answer, with noise of its own; or why it gives none.

    Args:
        job: how many labels the records have, and by whose tokenizer they were made.
        folder: new; for the ledger of this one answer.
    """
    site = request.site
    if not len(records):
        return refusal(request, "this site has no records")
    source = Source.of_records(records, ("",) * job.num_labels, job.model, grouped=site.unit != "record")
    try:
        asked = price(len(source), site.unit, source.labels, site.epsilon, site.delta)
    except ValueError as error:  # of public numbers
        return refusal(request, str(error))
    try:
        mean = answer(source, asked, folder / LEDGER, account)
    except AccountRefused as error:
        log.error("%s", error)
        return refusal(request, "the account of this site's records does not pay for that; its own log says what fits")
    with Ledger.open(folder / LEDGER, read_only=True) as ledger:
        guaranteed = ledger.epsilon_guaranteed()
    return SiteReply(request.round, mean.numpy(), 1, "", guaranteed, len(source), asked.noise_multiplier)
