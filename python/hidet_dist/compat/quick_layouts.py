"""hidet 0.6.1 takes seconds to make the layouts that its products of half precision choose from; now a fraction of one.

It makes 237 divisions of products among the threads of a block when it imports the kernel, and checks each layout on
the way through ABCs of integers. Layouts of ints are checked at once here, and an atom that is repeated as before is
taken from before. All other arguments go to hidet's functions.
"""

from __future__ import annotations

from typing import Any

from hidet.ir.cute import layout as cute

from hidet_dist.compat.replacing import Substitutes

hidet_congruent = cute.congruent
hidet_tuple = cute.tuple_
hidet_zoom = cute.zoom

_known: dict[Any, tuple[Any, Any, Any]] = {}


def _tuple(a: Any) -> Any:
    """Turn lists within into tuples; replaces ``tuple_`` of ``hidet.ir.cute.layout``."""
    kind = type(a)
    if kind is int:
        return a
    return tuple(map(_tuple, a)) if kind is tuple or kind is list else hidet_tuple(a)


def _congruent(a: Any, b: Any) -> bool:
    """Tell whether two tuples are nested alike; replaces ``congruent`` where layouts are made."""
    one, other = type(a), type(b)
    if one is tuple and other is tuple:
        return len(a) == len(b) and all(map(_congruent, a, b))
    if one is int and other is int:
        return True
    alike: bool = hidet_congruent(a, b)
    return alike


def _of_ints(a: Any) -> bool:
    return type(a) is int or (type(a) is tuple and all(map(_of_ints, a)))


def _zoom(atom_shape: Any, atom: Any, repeat_shape: Any, repeat_layout: Any) -> tuple[Any, Any]:
    """Repeat the layout of an atom; replaces ``zoom`` of ``hidet.ir.cute.layout``."""
    key = (atom_shape, atom.shape, atom.stride, repeat_shape, repeat_layout.shape, repeat_layout.stride)
    # An expression equals any other, and True equals 1: neither may be looked up.
    if not _of_ints(key):
        made: tuple[Any, Any] = hidet_zoom(atom_shape, atom, repeat_shape, repeat_layout)
        return made
    if key not in _known:
        shape, layout = hidet_zoom(atom_shape, atom, repeat_shape, repeat_layout)
        _known[key] = shape, layout.shape, layout.stride
    shape, of_layout, strides = _known[key]
    return shape, cute.TensorLayout(of_layout, strides)


SUBSTITUTES: Substitutes = ((cute, {"tuple_": _tuple, "congruent": _congruent, "zoom": _zoom}),)
