"""Parts of a sweep."""

import pytest

from fpmsdk.errors import OnboardError
from fpmsdk.recommendation.shards import Shard, parse_shard


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_every_candidate_belongs_to_one_part(count):
    parts = [parse_shard(f"{number}/{count}") for number in range(1, count + 1)]
    assert [sum(part.has(index) for part in parts) for index in range(20)] == [1] * 20


@pytest.mark.parametrize("text", ["", "1", "0/2", "3/2", "1/0", "-1/2", "1/2/3", "a/b", "01/2", "1.0/2", " 1/2"])
def test_what_is_no_part_is_refused(text):
    with pytest.raises(OnboardError, match=r"--shard: found .*, accepted is i/n with 1 <= i <= n, such as 1/4"):
        parse_shard(text)


def test_a_part_is_written_as_it_is_given():
    assert str(Shard(2, 5)) == "2/5"
