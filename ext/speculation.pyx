"""How many draft tokens of a multi-token prediction (MTP) are accepted: seeded draws, the same in every run.

Not the scheduler: which requests carry drafts and what they may emit is decided there.
Source: engine-and-replay.md 2.6.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t

cdef enum:
    NUM_WORDS = 16
    DOUBLE_ROUNDS = 6  # ChaCha12


cdef inline uint32_t rotated(uint32_t value, int bits) noexcept nogil:
    return (value << bits) | (value >> (32 - bits))


cdef inline void quarter_round(uint32_t* words, int a, int b, int c, int d) noexcept nogil:
    words[a] += words[b]
    words[d] = rotated(words[d] ^ words[a], 16)
    words[c] += words[d]
    words[b] = rotated(words[b] ^ words[c], 12)
    words[a] += words[b]
    words[d] = rotated(words[d] ^ words[a], 8)
    words[c] += words[d]
    words[b] = rotated(words[b] ^ words[c], 7)


cdef class RandomWords:
    """A ChaCha12 stream of 64-bit words; its key comes from the seed through PCG32.

    >>> RandomWords(42).next() == RandomWords(42).next(), RandomWords(42).next() == RandomWords(43).next()
    (True, False)
    """

    def __init__(self, seed):
        cdef uint64_t expanding = <uint64_t>(seed % 2**64)
        cdef uint32_t mixed
        cdef int word, turn
        self.state[0], self.state[1] = 0x61707865, 0x3320646E
        self.state[2], self.state[3] = 0x79622D32, 0x6B206574
        for word in range(4, 12):
            expanding = expanding * <uint64_t>6364136223846793005 + <uint64_t>11634580027462260723
            mixed = <uint32_t>(((expanding >> 18) ^ expanding) >> 27)
            turn = <int>(expanding >> 59)
            self.state[word] = (mixed >> turn) | (mixed << ((32 - turn) & 31))
        for word in range(12, NUM_WORDS):  # block counter and nonce
            self.state[word] = 0
        self.used = NUM_WORDS

    cdef uint64_t draw(self) noexcept nogil:
        if self.used == NUM_WORDS:
            self._refill()
        self.used += 2
        return self.block[self.used - 2] | <uint64_t>self.block[self.used - 1] << 32

    cdef void _refill(self) noexcept nogil:
        cdef uint32_t* block = self.block
        cdef int word, rounds
        for word in range(NUM_WORDS):
            block[word] = self.state[word]
        for rounds in range(DOUBLE_ROUNDS):
            quarter_round(block, 0, 4, 8, 12)
            quarter_round(block, 1, 5, 9, 13)
            quarter_round(block, 2, 6, 10, 14)
            quarter_round(block, 3, 7, 11, 15)
            quarter_round(block, 0, 5, 10, 15)
            quarter_round(block, 1, 6, 11, 12)
            quarter_round(block, 2, 7, 8, 13)
            quarter_round(block, 3, 4, 9, 14)
        for word in range(NUM_WORDS):
            block[word] += self.state[word]
        self.state[12] += 1
        if self.state[12] == 0:
            self.state[13] += 1
        self.used = 0

    def next(self):
        """Return the next word."""
        return self.draw()


cdef class DraftAcceptance:
    """Draws the lengths of bursts on one rank.

    Parameters
    ----------
    rates : sequence of float
        Acceptance rate in [0, 1] of each draft token, given that those before it were accepted; at most 5.
    seed : int
        Of this rank.

    >>> DraftAcceptance([1.0, 1.0, 0.0], 42).sample(4)
    3
    """

    def __cinit__(self, rates, seed):
        cdef int draft
        if len(rates) > MAX_DRAFT_TOKENS:
            raise ValueError(f"expected at most {MAX_DRAFT_TOKENS} acceptance rates, found {len(rates)}")
        self.draft_tokens = len(rates)
        for draft, rate in enumerate(rates):
            self.rates[draft] = rate
            self.thresholds[draft] = 0 if rate >= 1.0 else int(rate * 2.0**64)
        self.words = RandomWords(seed)

    cdef int64_t burst(self, int64_t width) noexcept nogil:
        """Tokens that a forward of `width` positions yields: one, and the drafts before the first failure."""
        cdef int64_t tokens = 1
        while tokens < width:
            # A certain acceptance draws nothing, an impossible one draws and fails.
            if self.rates[tokens - 1] < 1.0 and self.words.draw() >= self.thresholds[tokens - 1]:
                break
            tokens += 1
        return tokens

    def sample(self, int64_t width):
        """Return the tokens of one forward of `width` positions."""
        return self.burst(width)
