"""Seeded draws of accepted drafts, as recorded runs of the peer show them, and when nothing is drawn."""

from fpmsdk._ext.speculation import DraftAcceptance, RandomWords


def test_the_words_are_a_function_of_the_seed_and_seeds_wrap():
    def words(seed):
        stream = RandomWords(seed)
        return [stream.next() for _ in range(20)]

    assert words(7) == words(7) == words(7 + 2**64)
    assert words(7) != words(8)
    assert all(0 <= word < 2**64 for word in words(7))
    assert len(set(words(7))) == 20


def test_a_certain_acceptance_draws_nothing():
    mixed = DraftAcceptance([1.0, 0.5], 3)
    plain = DraftAcceptance([0.5], 3)
    assert [mixed.sample(3) - 1 for _ in range(200)] == [plain.sample(2) for _ in range(200)]


def test_an_impossible_acceptance_draws_and_fails():
    blocked = DraftAcceptance([0.0, 1.0], 3)
    assert {blocked.sample(3) for _ in range(50)} == {1}


def test_a_width_of_one_draws_nothing():
    acceptance, untouched = DraftAcceptance([0.5], 3), DraftAcceptance([0.5], 3)
    assert {acceptance.sample(1) for _ in range(10)} == {1}
    assert [acceptance.sample(2) for _ in range(100)] == [untouched.sample(2) for _ in range(100)]


def test_rates_are_met_in_the_long_run():
    acceptance = DraftAcceptance([0.85, 0.3], 42)
    lengths = [acceptance.sample(3) for _ in range(20_000)]
    assert abs(sum(length >= 2 for length in lengths) / 20_000 - 0.85) < 0.01
    assert abs(sum(length == 3 for length in lengths) / 20_000 - 0.85 * 0.3) < 0.01
