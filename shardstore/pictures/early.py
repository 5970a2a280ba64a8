"""Stopping a JPEG's decoder early: its frame is declared lower, so that it ends with the last row that is needed.

Huffman decoding is four fifths of the work, and goes from the top; rows above the cut are bit-exact. Only for what
libjpeg then reads in one go: sequential Huffman frames (SOF0, SOF1; ITU T.81 table B.1) of a single scan.
"""

from __future__ import annotations

ON = True  # the one switch

_SOI, _SOF0, _SOF1, _DHT, _JPG, _DAC, _SOS = 0xD8, 0xC0, 0xC1, 0xC4, 0xC8, 0xCC, 0xDA
_REACH = 2  # rows below that chroma upsampling looks at ("fancy upsampling" of libjpeg: a neighbour of half height)


def lowered(data: bytes, rows: int) -> bytes | bytearray:
    """The same JPEG, declared to end soon after its first ``rows`` rows; ``data`` itself where that cannot be.

    Sound only for bytes whose checksum was right: libjpeg must be told not to mind that data is left over.
    """
    frame = _frame(data) if ON else None
    if frame is None:
        return data
    at, height, mcu = frame
    needed = -(-(rows + _REACH) // mcu) * mcu
    if needed >= height:
        return data
    out = bytearray(data)
    out[at : at + 2] = needed.to_bytes(2, "big")
    return out


def _frame(data: bytes) -> tuple[int, int, int] | None:
    """Where the height stands, the height, and the rows of an MCU; None for another kind of JPEG."""
    position, found, components = 2, None, 0
    while position + 4 <= len(data) and data[position] == 0xFF:
        marker, length = data[position + 1], int.from_bytes(data[position + 2 : position + 4], "big")
        if marker in (_SOF0, _SOF1):
            components = data[position + 9]
            sampling = [data[position + 11 + 3 * i] & 15 for i in range(components)]
            rows = int.from_bytes(data[position + 5 : position + 7], "big")
            found = position + 5, rows, 8 * max(sampling, default=1)
        elif marker == _SOS:
            return found if found and data[position + 4] == components else None
        elif 0xC0 <= marker <= 0xCF and marker not in (_DHT, _JPG, _DAC):
            return None
        position += 2 + length
    return None
