"""The record of what a run spends: charged durably before noise is drawn (``ledger``), stated afterwards
(``statement``).

``journal`` is the file, ``budget`` the rules of floor and filter mode, ``tuning`` the ledger of a private sweep;
``account`` is what all runs on a data set spend together, ``lifetime`` its terms.
"""

from privacy.ledger.journal import Journal
from privacy.ledger.ledger import Charge, Ledger, Receipt
from privacy.ledger.statement import privacy_statement, sentence

__all__ = ["Charge", "Journal", "Ledger", "Receipt", "privacy_statement", "sentence"]
