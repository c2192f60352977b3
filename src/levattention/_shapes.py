"""Shape annotations: jaxtyping's where it is installed, plain tensors where it is not.

The annotations are enforced in the tests only, so that importing the package needs torch and numpy alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Float64, Int64, Num
else:
    try:
        from jaxtyping import Bool, Float, Float64, Int64, Num
    except ImportError:

        class _Plain:
            """Stands for a jaxtyping dtype: subscripting gives back the array type."""

            def __class_getitem__(cls, item: tuple[Any, str]) -> Any:
                return item[0]

        Bool = Float = Float64 = Int64 = Num = _Plain

__all__ = ["Bool", "Float", "Float64", "Int64", "Num"]
