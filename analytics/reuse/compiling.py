"""How the innermost kernels are compiled: `uncounted` is numba's `njit` for functions that allocate nothing.

numba counts a reference, atomically, for every array that a function takes, also inside a named tuple; it drops these counts again only
where a function has no loop. A request reaches a few nodes through a few dozen small functions, so that the counts cost more than
the work: without them WEKA takes a third less time, and Mooncake in blocks of 16 tokens a tenth less. The caller holds every array
for as long as a kernel runs, hence nothing needs counting. The option is not among numba's documented ones: where numba has it no longer,
the kernels are compiled with the counts, with the same results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba as nb
from numba.core.options import DefaultOptions

Kernel = TypeVar("Kernel", bound=Callable[..., Any])

OPTIONS: dict[str, Any] = {"cache": True, "nogil": True, **({"_nrt": False} if hasattr(DefaultOptions, "_nrt") else {})}


def uncounted(function: Kernel) -> Kernel:
    """Compile a function that creates no array and returns none (views of its arguments are no creation).

    Raises numba's `NumbaRuntimeError` at the first call where a function does allocate.
    """
    return nb.njit(**OPTIONS)(function)
