"""The record of what a run spends: charged durably before noise is drawn (``ledger``), stated afterwards
(``statement``).

``journal`` is the file, ``budget`` the rules of floor and filter mode, ``tuning`` the account of a private sweep.
"""

from privacy.ledger.journal import Journal
from privacy.ledger.ledger import Charge, Ledger, Receipt
from privacy.ledger.statement import privacy_statement, sentence

__all__ = ["Charge", "Journal", "Ledger", "Receipt", "privacy_statement", "sentence"]
