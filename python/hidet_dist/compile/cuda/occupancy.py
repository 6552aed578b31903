"""How many queries a block of attention computes: fewer where the GPU would have too few blocks."""


def parts_of_block(most: int, least: int, rows: int, queries: int, heads: int, multiprocessors: int) -> int:
    """Choose the parts of a block, of ``rows`` queries each: up to ``most``, a power of two.

    They are halved while half of them have all queries of a head, and, down to ``least``, while there is no block for
    each multiprocessor.
    """
    parts = most
    while parts > 1:
        idle = parts // 2 * rows >= queries
        few = parts > least and heads * -(-queries // (parts * rows)) < multiprocessors
        if not idle and not few:
            break
        parts //= 2
    return parts
