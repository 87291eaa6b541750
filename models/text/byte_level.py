"""The letters of byte-level vocabularies: which of them stands for which byte.

Knows no vocabulary; models.text.tokenizer reads tokens by it, models.text.rank_file writes them.
"""

from __future__ import annotations


def byte_of_letter() -> dict[str, int]:
    """Return GPT-2's table: printable Latin-1 for itself, U+0100 on for the other bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + idx): byte for idx, byte in enumerate(others)})
    return table
