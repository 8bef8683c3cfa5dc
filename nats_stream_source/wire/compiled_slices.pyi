"""Types of the compiled work on slices (``compiled_slices.pyx``)."""

import numpy as np
from numpy.typing import NDArray

def copy(
    buffer: bytes | memoryview,
    begin: NDArray[np.int64],
    end: NDArray[np.int64],
    prefix: bytes,
    offsets: NDArray[np.int32],
    data: NDArray[np.uint8],
) -> int:
    """Copy ``buffer[begin[i]:end[i]]`` without ``prefix`` for each i into ``data``, in order.

    Args:
        offsets: receives the offsets of an Arrow array over ``data``: one more than slices.

    Returns:
        the number of copied slices. It is less than all if the next slice is not within the buffer,
        does not start with ``prefix`` or does not fit into ``data``.

    Raises:
        ValueError: the arrays have other lengths, or ``data`` has more than 2 GiB.
    """

def find_lines(
    buffer: bytes | memoryview,
    begin: NDArray[np.int64],
    end: NDArray[np.int64],
    one: bytes,
    other: bytes,
    found: NDArray[np.uint8],
) -> None:
    """Set ``found[i]`` to whether ``buffer[begin[i]:end[i]]`` has a line feed and then a text.

    Args:
        one, other: the two texts, of the same length.

    Raises:
        ValueError: the arrays or texts have other lengths, or a slice is not within the buffer.
    """
