"""Types of the compiled decoder of Base64 (``compiled_base64.pyx``)."""

import numpy as np
from numpy.typing import NDArray

def decode(
    data: NDArray[np.uint8],
    offsets: NDArray[np.int32],
    tokens: bool,
    decoded_offsets: NDArray[np.int32],
    decoded: NDArray[np.uint8],
) -> int:
    """Decode ``data[offsets[i]:offsets[i + 1]]`` for each i into ``decoded``, in order.

    Args:
        tokens: whether a row is tokens with dots between them, which do not contain dots
            themselves; else it is one token.
        decoded_offsets: receives the offsets of an Arrow array over ``decoded``.
        decoded: at least as many bytes as the rows have.

    Returns:
        the number of decoded rows. It is less than all if the next row is not exactly the encoding
        of bytes.

    Raises:
        ValueError: the arrays have other lengths, or a row is not within ``data``.
    """
