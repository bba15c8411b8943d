"""The blocks of a paged KV cache: which are free, which belong to sequences, and which hold the prefix of a prompt."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

Key = tuple[int, tuple[int, ...]]
"""What a full block holds: the number of what stands before it, and its tokens."""


class BlockPool:
    """Blocks of ``size`` positions. A full block can be shared by all sequences that begin with the same tokens.

    A shared block that nobody uses any more stays until its memory is needed, the one unused for longest first. Blocks
    are recognized by their tokens, not by a hash of them: two prompts are never taken for one another.

    Args:
        count: How many blocks there are.
        size: Positions of a block.
        sharing: Whether sequences share prefixes.
    """

    def __init__(self, count: int, size: int, sharing: bool = True) -> None:
        self.count, self.size, self.sharing = count, size, sharing
        self._free = list(range(count - 1, -1, -1))
        self._users = [0] * count
        self._unused: OrderedDict[int, None] = OrderedDict()
        self._block_of: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}
        self._number_of: dict[int, int] = {}
        self._next_number = 1

    @property
    def available(self) -> int:
        """How many blocks can be taken."""
        return len(self._free) + len(self._unused)

    @property
    def used(self) -> int:
        """How many blocks belong to sequences."""
        return self.count - self.available

    def blocks_for(self, positions: int) -> int:
        """How many blocks so many positions take."""
        return -(-positions // self.size)

    def take(self) -> int | None:
        """A block that nobody uses; None if there is none."""
        if self._free:
            block = self._free.pop()
        elif self._unused:
            block, _ = self._unused.popitem(last=False)
            self._forget(block)
        else:
            return None
        self._users[block] = 1
        return block

    def release(self, blocks: Sequence[int]) -> None:
        """A sequence does not use these blocks any more, which are in its order."""
        for block in reversed(blocks):  # the end of a prefix is of use to fewer sequences than its beginning
            self._users[block] -= 1
            if self._users[block]:
                continue
            if block in self._key_of:
                self._unused[block] = None
            else:
                self._free.append(block)

    def match(self, tokens: Sequence[int]) -> list[int]:
        """The blocks that hold the beginning of these tokens; they are taken. At least one token is left over, whose
        logits are wanted."""
        found: list[int] = []
        if not self.sharing:
            return found
        before = 0
        for start in range(0, len(tokens) - self.size, self.size):
            block = self._block_of.get((before, tuple(tokens[start : start + self.size])))
            if block is None:
                break
            found.append(block)
            before = self._number_of[block]
        for block in found:
            if not self._users[block]:
                del self._unused[block]
            self._users[block] += 1
        return found

    def fill(self, blocks: Sequence[int], tokens: Sequence[int], first: int, positions: int) -> None:
        """The first ``positions`` of these tokens have been computed in a sequence's blocks, of which those before the
        block ``first`` were full already."""
        if not self.sharing:
            return
        for i in range(first, positions // self.size):
            before = self._number_of.get(blocks[i - 1], 0) if i else 0
            if (i and not before) or blocks[i] in self._key_of:
                continue  # what stands before it is in a block of another sequence
            key = before, tuple(tokens[i * self.size : (i + 1) * self.size])
            if key in self._block_of:
                continue
            self._block_of[key], self._key_of[blocks[i]] = blocks[i], key
            self._number_of[blocks[i]] = self._next_number
            self._next_number += 1

    def _forget(self, block: int) -> None:
        self._block_of.pop(self._key_of.pop(block))
        self._number_of.pop(block)
