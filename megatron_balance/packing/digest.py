"""The digest of a large array: of the lengths of documents, and of their order."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np

_CHUNK_BYTES = 2**24
_THREADS = 8  # of one process; a node has as many processes as GPUs
_DIGEST_BYTES = 16


def digest(values: np.ndarray) -> str:
    """Hexadecimal BLAKE2b of the little-endian bytes of a vector and their number.

    It is the digest of the digests of chunks, so that several threads can work; how many there are does not change it.
    """
    content = values.astype(values.dtype.newbyteorder("<"), copy=False).view(np.uint8)
    chunks = [content[first : first + _CHUNK_BYTES] for first in range(0, content.size, _CHUNK_BYTES)]
    whole = hashlib.blake2b(content.size.to_bytes(8, "little"), digest_size=_DIGEST_BYTES)
    if len(chunks) <= 1:
        parts = [_part(chunk) for chunk in chunks]
    else:
        with ThreadPoolExecutor(_THREADS) as threads:  # hashing lets other threads run
            parts = list(threads.map(_part, chunks))
    whole.update(b"".join(parts))
    return whole.hexdigest()


def _part(chunk: np.ndarray) -> bytes:
    return hashlib.blake2b(chunk).digest()
