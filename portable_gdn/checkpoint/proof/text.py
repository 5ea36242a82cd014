"""The text that both sides of a proof read: Abraham Lincoln's Gettysburg Address (1863; public domain)."""

from __future__ import annotations

__all__ = ["DECODED", "PREFILLED", "TEXT"]

PREFILLED = 150
"""Tokens read at once: two chunks of 64 and a ragged third."""
DECODED = 20
"""Tokens read one by one after them."""

TEXT = (
    "Four score and seven years ago our fathers brought forth, upon this continent, a new nation, conceived in "
    "Liberty, "
    "and dedicated to the proposition that all men are created equal. Now we are engaged in a great civil war, testing "
    "whether that nation, or any nation so conceived, and so dedicated, can long endure. We are met on a great "
    "battle-field of that war. We have come to dedicate a portion of that field, as a final resting place for "
    "those who "
    "here gave their lives that that nation might live. It is altogether fitting and proper that we should do "
    "this. But, "
    "in a larger sense, we can not dedicate, we can not consecrate, we can not hallow this ground. The brave "
    "men, living "
    "and dead, who struggled here, have consecrated it, far above our poor power to add or detract. The world will "
    "little note, nor long remember what we say here, but it can never forget what they did here. It is for us the "
    "living, rather, to be dedicated here to the unfinished work which they who fought here have thus far so nobly "
    "advanced."
)
