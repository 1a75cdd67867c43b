"""How trials are shared among branches."""

import pytest

from fpmsdk.recommendation.search.rounds import Rounds


class Numbered:
    """Suggests so many candidates, named by their branch."""

    waits = False
    repetitions = 0

    def __init__(self, name, count):
        self.left = [f"{name}{number}" for number in range(count)]

    def suggest(self, count):
        found, self.left = self.left[:count], self.left[count:]
        return found


def suggested(sizes, max_trials, batch=2):
    rounds = Rounds(
        [Numbered("ab"[place], size) for place, size in enumerate(sizes)], max_trials=max_trials, batch=batch
    )
    batches = []
    while found := rounds.next():
        batches.append([suggestion.sample for suggestion in found])
    return batches


CASES = [
    ("a batch of each in turn", (4, 4), None, [["a0", "a1"], ["b0", "b1"], ["a2", "a3"], ["b2", "b3"]]),
    ("equal parts", (9, 9), 4, [["a0", "a1"], ["b0", "b1"]]),
    ("the first gets the remainder", (9, 9), 5, [["a0", "a1"], ["b0", "b1"], ["a2"]]),
    ("one that is exhausted leaves the rest", (1, 9), 6, [["a0"], ["b0", "b1"], ["b2", "b3"], ["b4"]]),
    ("also to one that had used its part", (9, 1), 6, [["a0", "a1"], ["b0"], ["a2"], ["a3", "a4"]]),
    ("everything there is", (1, 2), 100, [["a0"], ["b0", "b1"]]),
    ("nothing", (0, 0), 4, []),
]


@pytest.mark.parametrize(("name", "sizes", "max_trials", "batches"), CASES, ids=[case[0] for case in CASES])
def test_trials_are_shared(name, sizes, max_trials, batches):
    assert suggested(sizes, max_trials) == batches


def test_suggestions_are_numbered_in_order():
    rounds = Rounds([Numbered("a", 3), Numbered("b", 3)], max_trials=None, batch=2)
    numbers = [[(each.index, each.branch) for each in rounds.next()] for _ in range(4)]
    assert numbers == [[(0, 0), (1, 0)], [(2, 1), (3, 1)], [(4, 0)], [(5, 1)]]
