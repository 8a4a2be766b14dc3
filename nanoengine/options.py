"""Options: the base class of dataclasses of options."""

from __future__ import annotations

from nanoengine.core.options import check


class Options:
    """The values are checked by the rules of their fields when a dataclass is made (see `core.options.check`)."""

    __slots__ = ()

    def __post_init__(self) -> None:
        check(self)
