"""Tokens of emulated responses: token i depends on the sample's seed and i alone.

So whoever continues a response generates what the first replica would have, and a test can compare token by token.
A response is a piece of one long random tape, from a place that its seed chooses; cutting a piece costs no arithmetic.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

from laminar.core.lengths import uniform
from laminar.wire.codec import pack_logprobs, pack_tokens

NUM_PLACES = 1 << 16
_TAPE_SEED = 20_251_013
"""The same tape in every engine of every job."""
_PLACE_STREAM = 1
"""Of the numbers that belong to a sample seed; 0 draws its length."""


class TokenTape:
    """Random tokens that are uniform over `vocabulary`, for responses of up to `max_length` tokens."""

    def __init__(self, vocabulary: Iterable[int], eos_id: int, max_length: int) -> None:
        ids = sorted(set(vocabulary) - {eos_id})
        if not ids:
            raise ValueError("the vocabulary has no token beside the end of sequence")
        rng = random.Random(_TAPE_SEED)
        self._tokens = pack_tokens(rng.choices(ids, k=NUM_PLACES + max_length))
        self._logprobs = pack_logprobs([-math.log(len(ids))] * max_length)
        self._end = pack_tokens([eos_id])

    def tokens(self, seed: int, begin: int, end: int, *, ended: bool = False) -> bytes:
        """Packed tokens [begin, end) of a response; `ended`: the last one is the end of sequence."""
        place = int(uniform(seed, _PLACE_STREAM) * NUM_PLACES)
        piece = self._tokens[4 * (place + begin) : 4 * (place + end)]
        return piece[:-4] + self._end if ended else piece

    def logprobs(self, begin: int, end: int) -> bytes:
        """Packed log-probs of as many tokens."""
        return self._logprobs[: 4 * (end - begin)]
