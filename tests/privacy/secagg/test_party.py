"""Secure sums: exactly the plain sum of those who got through, nothing else, whatever others send or leave out."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import chisquare

from privacy.accountants.calibration import filter_commitment
from privacy.events import NoiseShares, Poisson
from privacy.randomness.rng import simulation_generator
from privacy.secagg import keys, party, primitives
from privacy.secagg.aggregator import Aggregator, BadPart, NotOpened
from privacy.secagg.federation import Federation, load_identity, save_identity
from privacy.secagg.party import PartyState, Refused

N, DIM = 5, 300
SHARES = NoiseShares(N, 3, 0, 24)
CONTENT = bytes(32)
STEPS = ("keys", "shares", "masked", "consistency", "unmask")

IDENTITIES = [keys.fresh_identity() for _ in range(N)]
COMMITMENT, _ = filter_commitment(4.0, 1e-2, Poisson(1.0, N), 2, adjacency="zero_out", noise_shares=SHARES)
FEDERATION = Federation(tuple(map(keys.public_identity, IDENTITIES)), COMMITMENT)


def sharing(shares: NoiseShares) -> Federation:
    return replace(FEDERATION, commitment=replace(COMMITMENT, noise_shares=shares))


SESSION = FEDERATION.session("a run", "round", 1, 0, CONTENT)


def vectors(count: int = N, length: int = DIM) -> np.ndarray:
    return simulation_generator(3, "vectors").integers(-(1 << 20), 1 << 20, (count, length))


class Play:
    """A round in one process. ``gone`` says at which step a party does not answer any more."""

    def __init__(
        self,
        gone: dict[int, str] | None = None,
        federation: Federation = FEDERATION,
        identities: Sequence[bytes] = IDENTITIES,
        length: int = DIM,
    ) -> None:
        self.gone = {number: STEPS.index(step) for number, step in (gone or {}).items()}
        self.federation, self.identities = federation, identities
        self.states: dict[int, PartyState] = {}
        self.server = Aggregator(federation, SESSION, length)
        self.masked: dict[int, np.ndarray] = {}

    def answering(self, step: str, asked: Sequence[int]) -> list[int]:
        return [number for number in asked if self.gone.get(number, 9) > STEPS.index(step)]

    def keys(self) -> None:
        for number in self.answering("keys", range(len(self.identities))):
            state, said = party.begin(self.identities[number], self.federation, number, SESSION, CONTENT)
            self.states[number] = state
            self.server.add_announcement(number, said.to_bytes())

    def shares(self) -> None:
        said = list(self.server.announcements.values())
        for number in self.answering("shares", sorted(self.server.announcements)):
            self.states[number], sealed = party.share(self.states[number], self.federation, said)
            self.server.add_sealed(number, sealed)

    def mask(self, values: np.ndarray) -> None:
        for number in self.answering("masked", self.server.sharers):
            state = PartyState.from_text(self.states[number].to_text())  # as between two messages
            state = party.accept(state, self.federation, CONTENT, self.server.sealed_for(number))
            self.states[number], self.masked[number] = party.mask_vector(state, self.federation, values[number])
            self.server.add_masked(number, self.masked[number])

    def confirm(self) -> None:
        listed = self.server.survivors
        for number in self.answering("consistency", listed):
            self.states[number], word = party.confirm(
                self.states[number], self.federation, self.identities[number], listed
            )
            self.server.add_signature(number, word)

    def unmask(self, change: Callable[[int, dict[int, bytes]], dict[int, bytes]] | None = None) -> None:
        for number in self.answering("unmask", sorted(self.server.signatures)):
            shares = party.reveal(self.states[number], self.federation, self.server.signatures)
            self.server.add_revealed(number, shares if change is None else change(number, shares))

    def all(self, values: np.ndarray) -> np.ndarray:
        self.keys()
        self.shares()
        self.mask(values)
        self.confirm()
        self.unmask()
        return self.server.open_sum()


class TestSum:
    def test_of_everyone_is_exact(self) -> None:
        values = vectors()
        assert np.array_equal(Play().all(values), values.sum(axis=0))

    @pytest.mark.parametrize("gone", [dict(zip((0, 3), two, strict=True)) for two in itertools.product(STEPS, STEPS)])
    def test_of_those_who_handed_in_is_exact_whoever_drops_out_where(self, gone: dict[int, str]) -> None:
        """Two of five, each at any step: the sum is that of those who reached the third."""
        values = vectors()
        through = [n for n in range(N) if n not in gone or STEPS.index(gone[n]) > STEPS.index("masked")]
        assert np.array_equal(Play(gone).all(values), values[through].sum(axis=0))

    @pytest.mark.parametrize("bits", [16, 24, 32])
    def test_wraps_around_and_comes_back(self, bits: int) -> None:
        """Sums at both ends of the modulus, from vectors that are beyond it."""
        federation = sharing(NoiseShares(N, 3, 0, bits))
        half = 1 << (bits - 1)
        values = np.array([[5 * half, half - 1], [-4 * half, 0], [-half, 0], [0, -1], [-half, -half]])
        play = Play(federation=federation, length=2)
        assert play.all(values).tolist() == [-half, -2 + half - half]

    def test_one_more_dropout_and_nobody_opens_it(self) -> None:
        play = Play({0: "masked", 1: "masked", 2: "masked"})
        with pytest.raises(Refused, match="too little noise"):
            play.all(vectors())

    def test_too_few_shares_open_nothing(self) -> None:
        play = Play({0: "unmask", 1: "unmask", 2: "unmask"})
        with pytest.raises(NotOpened):
            play.all(vectors())

    def test_one_wrong_share_is_found_out_and_left_aside(self) -> None:
        values, play = vectors(), Play()
        play.keys()
        play.shares()
        play.mask(values)
        play.confirm()
        play.unmask(lambda number, shares: {v: bytes(64) for v in shares} if number == 1 else shares)
        assert np.array_equal(play.server.open_sum(), values.sum(axis=0))

    def test_wrong_shares_of_a_majority_open_nothing_rather_than_something_else(self) -> None:
        play = Play()
        play.keys()
        play.shares()
        play.mask(vectors())
        play.confirm()
        play.unmask(lambda number, shares: {v: bytes(64) for v in shares} if number < 3 else shares)
        with pytest.raises(NotOpened):
            play.server.open_sum()

    def test_who_seals_rubbish_drops_out_of_no_other_partys_answer(self) -> None:
        """Its own secret is then short of shares: the round fails, nobody crashes, nothing is opened."""
        values, play = vectors(), Play()
        play.keys()
        play.shares()
        play.server._sealed[2] = dict.fromkeys(set(range(N)) - {2}, bytes(party.SEALED_BYTES))
        play.mask(values)
        play.confirm()
        play.unmask()
        with pytest.raises(NotOpened):
            play.server.open_sum()


class TestWhatTheServerSees:
    def test_a_masked_vector_is_uniform_and_fresh(self) -> None:
        """Chi-square over both bytes of 10,000 values of a constant vector; the next round has other masks."""
        length = 10_000
        federation = sharing(NoiseShares(N, 3, 0, 16))
        runs = []
        for _ in range(2):
            play = Play(federation=federation, length=length)
            play.keys()
            play.shares()
            play.mask(np.full((N, length), 77))
            runs.append(play.masked[0].reshape(-1, 2))
        for column in (runs[0][:, 0], runs[0][:, 1], (runs[0] - runs[1])[:, 0]):
            assert chisquare(np.bincount(column, minlength=256)).pvalue > 1e-8

    def test_all_vectors_but_one_do_not_open_the_sum_of_the_others(self) -> None:
        """Two masked vectors added keep their own masks: still uniform."""
        play = Play(length=10_000, federation=sharing(NoiseShares(N, 3, 0, 16)))
        play.keys()
        play.shares()
        play.mask(np.zeros((N, 10_000), dtype=np.int64))
        total = sum(primitives.unpack_values(one, 16).astype(np.uint64) for one in play.masked.values()) % 65536
        assert chisquare(np.bincount((total >> 8).astype(np.int64), minlength=256)).pvalue > 1e-8

    def test_never_both_secrets_of_a_party(self) -> None:
        """Of survivors the shares of the seed, of the one that dropped out those of the key: one secret each."""
        play = Play({4: "masked"})
        play.keys()
        play.shares()
        play.mask(vectors())
        play.confirm()
        play.unmask()
        for number in range(N):
            held = {holder + 1: shares[number] for holder, shares in play.server._revealed.items()}
            secret = primitives.combine(dict(list(held.items())[: SHARES.threshold]))
            state = play.states[number]
            assert secret == (state.masking_private if number == 4 else state.seed)
            assert secret != (state.seed if number == 4 else state.masking_private)

    def test_fewer_shares_than_the_threshold_say_nothing(self) -> None:
        """Given t - 1 shares every value of the last one, hence every secret, is as likely: a share is uniform."""
        words = np.concatenate([np.frombuffer(primitives.split(bytes(32), 2, 3)[1], "<u4") for _ in range(400)])
        assert chisquare(np.histogram(words, 64, (0, primitives.PRIME))[0]).pvalue > 1e-8


class TestParty:
    """What a server may not make a party do."""

    def shared(self, said: Sequence[keys.Announcement] | None = None) -> Play:
        play = Play()
        play.keys()
        play.shares()
        return play

    def test_take_an_identity_that_is_not_its_own(self) -> None:
        with pytest.raises(Refused, match="identity"):
            party.begin(IDENTITIES[0], FEDERATION, 1, SESSION, CONTENT)
        with pytest.raises(Refused, match="identity"):
            party.begin(keys.fresh_identity(), FEDERATION, 0, SESSION, CONTENT)

    def test_trust_keys_that_no_member_signed(self) -> None:
        play = Play()
        play.keys()
        said = dict(play.server.announcements)
        _, mine = keys.fresh_key()
        forged = keys.announce(keys.fresh_identity(), SESSION, 1, mine, mine, bytes(32))
        other_session = party.begin(IDENTITIES[1], FEDERATION, 1, bytes(32), CONTENT)[1]
        for wrong in (forged, other_session, replace(said[1], masking_key=mine), replace(said[2], party=1)):
            with pytest.raises(Refused, match="signed"):
                party.share(play.states[0], FEDERATION, [*(one for n, one in said.items() if n != 1), wrong])

    def test_go_on_with_too_few_twice_the_same_or_without_itself(self) -> None:
        play = Play()
        play.keys()
        said = list(play.server.announcements.values())
        for wrong, reason in ((said[:2], "fewer"), ([*said, said[1]], "distinct"), (said[1:], "own")):
            with pytest.raises(Refused, match=reason):
                party.share(play.states[0], FEDERATION, wrong)

    def test_compute_something_else_than_was_announced(self) -> None:
        play = self.shared()
        with pytest.raises(Refused, match="another computation"):
            party.accept(play.states[0], FEDERATION, b"x" * 32, play.server.sealed_for(0))

    def test_mask_towards_too_few_or_with_strangers(self) -> None:
        play = self.shared()
        boxes = play.server.sealed_for(0)
        for wrong, reason in (
            ({1: boxes[1]}, "fewer"),
            (boxes | {0: boxes[1]}, "other parties"),
            (boxes | {7: boxes[1]}, "other parties"),
            (boxes | {1: b"short"}, "length"),
        ):
            with pytest.raises(Refused, match=reason):
                party.accept(play.states[0], FEDERATION, CONTENT, wrong)

    def test_sign_a_list_that_is_short_or_without_it_or_out_of_order(self) -> None:
        play = self.shared()
        play.mask(vectors())
        for wrong in ([0, 1], [1, 2, 3], [0, 2, 1, 3], [0, 1, 1, 2], [0, 1, 2, 9]):
            with pytest.raises(Refused):
                party.confirm(play.states[0], FEDERATION, IDENTITIES[0], wrong)

    def test_reveal_shares_unless_enough_parties_were_told_the_same(self) -> None:
        play = self.shared()
        play.mask(vectors())
        play.confirm()
        told_otherwise = keys.sign_survivors(IDENTITIES[2], SESSION, [0, 1, 2])
        two = {number: play.server.signatures[number] for number in (0, 1)}
        for wrong in (two, two | {2: told_otherwise}, two | {2: two[1]}, two | {9: two[1]}):
            with pytest.raises(Refused):
                party.reveal(play.states[0], FEDERATION, wrong)

    def test_take_a_step_twice_or_too_early(self) -> None:
        play = self.shared()
        said = list(play.server.announcements.values())
        with pytest.raises(Refused, match="once"):
            party.share(play.states[0], FEDERATION, said)
        with pytest.raises(Refused, match="follows"):
            party.reveal(play.states[0], FEDERATION, {})
        with pytest.raises(Refused, match="follows"):
            party.mask_vector(play.states[0], FEDERATION, vectors()[0])


class TestServer:
    """What a party may not do to the others."""

    def test_parts_that_are_wrong_are_refused(self) -> None:
        play = Play({1: "keys"})
        play.keys()
        server = play.server
        good = server.announcements[0].to_bytes()
        weak = keys.announce(IDENTITIES[1], SESSION, 1, bytes(32), bytes(32), bytes(32)).to_bytes()
        for number, data in ((0, good), (1, good), (9, good), (-1, good), (1, good[:-1]), (1, b""), (1, weak)):
            with pytest.raises(BadPart):
                server.add_announcement(number, data)
        play.gone[2] = 1
        play.shares()
        boxes = dict.fromkeys((0, 3, 4), bytes(party.SEALED_BYTES))
        for number, wrong in ((2, {}), (2, boxes | {2: boxes[0]}), (2, boxes | {0: b""}), (1, boxes), (0, boxes)):
            with pytest.raises(BadPart):
                server.add_sealed(number, wrong)
        play.gone[0] = 2
        play.mask(vectors())
        vector = play.masked[3]
        for number, wrong in ((0, vector[:-1]), (3, vector), (2, vector)):
            with pytest.raises(BadPart):
                server.add_masked(number, wrong)
        assert server.survivors == [3, 4]
        for number, wrong in ((3, bytes(64)), (3, b""), (0, bytes(64))):
            with pytest.raises(BadPart):
                server.add_signature(number, wrong)
        for number, shares in ((3, {0: bytes(64)}), (0, {})):  # neither has signed
            with pytest.raises(BadPart):
                server.add_revealed(number, shares)

    def test_reveals_of_strangers_and_of_other_lengths_are_refused(self) -> None:
        play = Play()
        play.keys()
        play.shares()
        play.mask(vectors())
        play.confirm()
        for wrong in ({9: bytes(64)}, {1: b""}):
            with pytest.raises(BadPart):
                play.server.add_revealed(0, wrong)


class TestShamir:
    @pytest.mark.parametrize(("threshold", "parties"), [(1, 1), (2, 3), (3, 5), (34, 100)])
    def test_any_threshold_of_shares_gives_the_secret_back(self, threshold: int, parties: int) -> None:
        secret = bytes(range(200, 232))
        shares = primitives.split(secret, threshold, parties)
        generator = simulation_generator(0, "shamir", parties)
        for _ in range(5):
            chosen = generator.choice(parties, threshold, replace=False)
            assert primitives.combine({int(i) + 1: shares[i] for i in chosen}) == secret
        if threshold > 1:
            fewer = chosen[:-1]
            assert primitives.combine({int(i) + 1: shares[i] for i in fewer}) != secret

    def test_what_is_no_share_gives_nothing(self) -> None:
        assert primitives.combine({1: b"short"}) is None
        assert primitives.combine({1: b"\xff" * 64}) is None

    def test_weights_are_lagranges(self) -> None:
        """The polynomial 7 + 3 x + x^2 at 0, from its values at 2, 5 and 9."""
        points = [2, 5, 9]
        found = sum(w * (7 + 3 * x + x * x) for w, x in zip(primitives.weights_at_zero(points), points, strict=True))
        assert found % primitives.PRIME == 7

    @pytest.mark.parametrize("points", list(itertools.combinations(range(1, 7), 3)))
    def test_the_worked_example_of_the_encyclopedia(self, points: tuple[int, ...]) -> None:
        """https://en.wikipedia.org/wiki/Shamir%27s_secret_sharing: six shares of 1234, of which any three suffice."""
        shares = {1: 1494, 2: 1942, 3: 2578, 4: 3402, 5: 4414, 6: 5614}
        weights = primitives.weights_at_zero(list(points))
        assert sum(w * shares[x] for w, x in zip(weights, points, strict=True)) % primitives.PRIME == 1234


class TestFederation:
    def test_text_brings_back_the_same(self) -> None:
        assert Federation.from_text(FEDERATION.to_text()) == FEDERATION

    @pytest.mark.parametrize(
        "text", ["", "[]", "{}", "null", FEDERATION.to_text().replace('"format": 2', '"format": 1')]
    )
    def test_other_text_is_refused(self, text: str) -> None:
        with pytest.raises(ValueError, match=r"federation|format|Expecting"):
            Federation.from_text(text)

    def test_nobody_stands_on_the_list_twice(self) -> None:
        with pytest.raises(ValueError, match="twice"):
            Federation((FEDERATION.members[0],) * N, COMMITMENT)
        alone = replace(COMMITMENT, noise_shares=None, adjacency="add_remove")
        with pytest.raises(ValueError, match="noise_shares"):
            Federation(FEDERATION.members, alone)

    def test_sessions_differ_in_all_that_names_them(self) -> None:
        names = [("a", "round", 1, 0, CONTENT), ("b", "round", 1, 0, CONTENT), ("a", "histogram", 1, 0, CONTENT)]
        names += [("a", "round", 2, 0, CONTENT), ("a", "round", 1, 1, CONTENT), ("a", "round", 1, 0, b"x" * 32)]
        assert len({FEDERATION.session(*name) for name in names}) == len(names)
        other = replace(FEDERATION, least_noise_multiplier=2.0)
        assert other.session(*names[0]) != FEDERATION.session(*names[0])

    def test_identities_are_kept_to_their_owner(self, tmp_path) -> None:
        path = tmp_path / "identity.key"
        save_identity(path, IDENTITIES[0])
        assert load_identity(path) == IDENTITIES[0]
        with pytest.raises(FileExistsError):
            save_identity(path, IDENTITIES[1])
        path.chmod(0o640)
        with pytest.raises(ValueError, match="group or others"):
            load_identity(path)
