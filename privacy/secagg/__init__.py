"""Secure aggregation: the server learns the sum of the parties' vectors modulo 2^b, and nothing else of them.

Bonawitz et al., "Practical secure aggregation for privacy-preserving machine learning" (CCS 2017, ePrint 2017/281),
figure 4, in the variant for a server that may lie: signed keys and a consistency check. One round:

===========  ==========================================  ======================================================
step         a party sends                               what it has checked before
===========  ==========================================  ======================================================
keys         two public keys and a commitment to the     its number is that of its identity
             seed of its own mask, signed by its
             long-term identity
shares       Shamir shares of its masking key and of     the signatures of all, by the identities of its own
             the seed, sealed for every other party      list of the federation; enough parties; one session
masked       its vector + own mask + pairwise masks      the work is the one that all signed for; enough left
consistency  its signature of the list of those whose    the list is long enough, and it is on it
             masked vectors arrived
unmask       one share of every party: of the seed if    enough parties signed the same list
             it is on the list, else of its key
===========  ==========================================  ======================================================

``party.py`` is a party, ``aggregator.py`` the server; both are plain functions of values, without a network. Masks come
from ChaCha20, keys from X25519 and HKDF, signatures are Ed25519, shares are sealed with ChaCha20-Poly1305.
"""

from privacy.secagg.aggregator import Aggregator, BadPart, NotOpened
from privacy.secagg.federation import Federation, load_identity, save_identity
from privacy.secagg.keys import fresh_identity, public_identity
from privacy.secagg.party import PartyState, Refused, accept, begin, confirm, mask_vector, reveal, share

__all__ = [
    "Aggregator",
    "BadPart",
    "Federation",
    "NotOpened",
    "PartyState",
    "Refused",
    "accept",
    "begin",
    "confirm",
    "fresh_identity",
    "load_identity",
    "mask_vector",
    "public_identity",
    "reveal",
    "save_identity",
    "share",
]
