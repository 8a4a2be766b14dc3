"""Adapters: the policy's part of adapters: the loaded ones, those of requests, and the orders to the runner."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Seq
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary

from nanoengine.core.errors import InvalidRequest, shown
from nanoengine.core.messages import StepResult
from nanoengine.core.scheduler import Step
from nanoengine.core.seams import PolicyPart
from nanoengine.core.sequence import Request, Sequence
from nanoengine.features.lora.adapter import Adapter, read_adapter
from nanoengine.features.lora.messages import LORA, AdapterOrders
from nanoengine.features.lora.options import LoRAOptions
from nanoengine.features.lora.request import LoRARequest
from nanoengine.sizes import format_bytes

SALT = "\0lora "
"""Separates the salt of a request from the digest of its adapter: no salt of a user contains it."""


class Adapters(PolicyPart):
    """All adapters of an engine, by their names.

    An adapter is the content of its files when they were read: its digest is part of the hash of every block that it computes. An
    adapter that is loaded anew, or unloaded, stays for the requests that have it.

    `load`, `unload`, `find` and `use` may be called from any thread, other methods from the engine's.

    Args:
        options: the limits.
        shapes: see `read_adapter`.
    """

    def __init__(self, options: LoRAOptions, shapes: Mapping[str, tuple[int, int]]):
        self.options, self.shapes = options, shapes
        self.loaded: OrderedDict[str, Adapter] = OrderedDict()  # least recently requested first
        self._of: WeakKeyDictionary[Request, Adapter] = WeakKeyDictionary()
        self._lock = RLock()
        self._slots: dict[str, int] = {}  # digest -> slot in the runner
        self._may_drop = False  # whether one of these may be unused

    # ---- for callers

    def load(self, name: str, path: str, *, replaces: bool = True, makes_room: bool = False) -> Adapter:
        """Read an adapter from its folder.

        Args:
            replaces: whether a loaded one of the same name is replaced; otherwise it is an error.
            makes_room: whether unused adapters are unloaded, least recently requested first, if there are too many.

        Raises:
            InvalidRequest: there are too many, or their weights are too large.
            ModelNotFound, UnsupportedModel, InvalidWeights: see `read_adapter`.
        """
        LoRARequest(name, 1, path)  # checks name and path
        limits = {"max_rank": self.options.max_lora_rank, "max_bytes": self.options.max_lora_bytes}
        adapter = read_adapter(name, path, self.shapes, **limits)
        with self._lock:
            before = self.loaded.get(name)
            if before is not None and not replaces:
                raise InvalidRequest(f"the adapter {shown(name)} is loaded: unload it first, or say load_inplace")
            if before is not None and before.digest == adapter.digest:
                self.loaded.move_to_end(name)
                return before
            others = {other: loaded for other, loaded in self.loaded.items() if other != name}
            in_use = self._in_use()
            unused = [other for other, loaded in others.items() if loaded.digest not in in_use] if makes_room else []
            while (error := self._no_room(adapter, others)) is not None:
                if not unused:
                    raise error
                del others[unused.pop(0)]
            self.loaded, self._may_drop = OrderedDict({**others, name: adapter}), True
        return adapter

    def _in_use(self) -> dict[str, Adapter]:
        """The adapters of requests that have not ended, by digest."""
        return _by_digest(adapter for request, adapter in self._of.items() if not request.finished)

    def _no_room(self, adapter: Adapter, others: Mapping[str, Adapter]) -> InvalidRequest | None:
        """An error about the limit that an adapter exceeds beside the loaded ones and those in use; None if it fits."""
        adapters = self._in_use() | _by_digest((*others.values(), adapter))
        size, most_bytes = sum(each.num_bytes for each in adapters.values()), self.options.max_lora_bytes
        if len(adapters) > self.options.max_loras:
            reason = f"{self.options.max_loras} are loaded or in use, the most that may be (max_loras)"
        elif size > most_bytes:
            reason = f"all together have {format_bytes(size)}, and {format_bytes(most_bytes)} may be (max_lora_bytes)"
        else:
            return None
        return InvalidRequest(f"there is no room for the adapter {shown(adapter.name)}: {reason}: unload one")

    def unload(self, name: str) -> Adapter:
        """Unload an adapter, except for requests that have it.

        Raises:
            InvalidRequest: none of this name is loaded.
        """
        with self._lock:
            if name not in self.loaded:
                raise InvalidRequest(f"no adapter {shown(name)} is loaded")
            self._may_drop = True
            return self.loaded.pop(name)

    def find(self, wanted: LoRARequest) -> Adapter:
        """The adapter of a `LoRARequest`, read from its folder if it has one.

        Raises:
            InvalidRequest: none of this name is loaded, and the request has no folder.
            Others: see `load`.
        """
        if not isinstance(wanted, LoRARequest):
            raise InvalidRequest("lora_request", f" is {shown(wanted)}: it must be a LoRARequest, or a list of them")
        if wanted.lora_path:
            return self.load(wanted.lora_name, wanted.lora_path, makes_room=True)
        with self._lock:
            if (known := self.loaded.get(wanted.lora_name)) is None:
                raise InvalidRequest(f"no adapter {shown(wanted.lora_name)} is loaded: load it, or give its lora_path")
            self.loaded.move_to_end(wanted.lora_name)
        return known

    def use(self, request: Request, adapter: Adapter) -> None:
        """Set the adapter of a request that was made, and not submitted yet.

        Raises:
            InvalidRequest: it was unloaded meanwhile, and there are too many others.
        """
        with self._lock:
            if (error := self._no_room(adapter, self.loaded)) is not None:
                raise error
            self._of[request] = adapter
            request.cache_salt += SALT + adapter.digest

    def use_for_requests(self, requests: Seq[Request], wanted: LoRARequest | Seq[LoRARequest | None]) -> None:
        """As `find` and `use` for several requests: one adapter, or one (or None) for each.

        Raises:
            InvalidRequest: the numbers differ.
            Others: see `find`.
        """
        each: list[Any] = list(wanted) if isinstance(wanted, list | tuple) else [wanted] * len(requests)
        if len(each) != len(requests):
            raise InvalidRequest(
                "lora_request", f" has {len(each)} entries for {len(requests)} prompts: give one, or one for each"
            )
        adapters: dict[int, Adapter] = {}  # each is read once
        try:
            for request, lora_request in zip(requests, each, strict=True):
                if lora_request is not None:
                    if (key := id(lora_request)) not in adapters:
                        adapters[key] = self.find(lora_request)
                    self.use(request, adapters[key])
        except Exception:  # its traceback holds requests that never run: their adapters are not in use
            for request in requests:
                self._of.pop(request, None)
            raise

    # ---- with replicas: in the front, and in each replica

    def adapter_digest(self, request: Request) -> str | None:
        """The digest of the adapter of a request, if it has one."""
        adapter = self._of.get(request)
        return None if adapter is None else adapter.digest

    def in_memory(self) -> dict[str, Adapter]:
        """The adapters that are loaded or in use, by digest."""
        with self._lock:
            return self._in_use() | _by_digest(self.loaded.values())

    def keep(self, adapters: Mapping[str, Adapter], drops: Collection[str]) -> None:
        """Add and remove adapters without the limits, which the front has checked."""
        with self._lock:
            others = {digest: loaded for digest, loaded in self.loaded.items() if digest not in drops}
            self.loaded, self._may_drop = OrderedDict({**others, **adapters}), True

    def give(self, request: Request, digest: str) -> None:
        """Set the adapter of a request from the front; its salt includes the digest already.

        Raises:
            InvalidRequest: it is not in this replica.
        """
        with self._lock:
            if (adapter := self.loaded.get(digest)) is None:
                raise InvalidRequest(f"the adapter of digest {digest} is not in this replica")
            self._of[request] = adapter

    # ---- PolicyPart

    def wants_step(self) -> bool:
        return self._may_drop and bool(self._slots)

    def complete(self, step: Step) -> None:
        orders = AdapterOrders()
        with self._lock:
            if self._may_drop:
                self._drop_unused(orders)
            for seq, start in zip(step.started, step.plan.started, strict=True):
                if (adapter := self._of.get(seq.request)) is not None:
                    orders.rows[start.row] = self._slot(adapter, orders)
        if orders.drops or orders.rows:
            step.plan.extras[LORA] = orders

    def _drop_unused(self, orders: AdapterOrders) -> None:
        """Order the runner to drop adapters that are neither loaded nor in use."""
        self._may_drop = False
        used = self._in_use().keys() | _by_digest(self.loaded.values()).keys()
        orders.drops = [self._slots.pop(digest) for digest in self._slots.keys() - used]

    def _slot(self, adapter: Adapter, orders: AdapterOrders) -> int:
        """The runner's slot of an adapter; without one, it is loaded in this step."""
        slot = self._slots.get(adapter.digest)
        if slot is None:
            slot = min(set(range(len(self._slots) + 1)) - set(self._slots.values()))
            self._slots[adapter.digest], orders.loads[slot] = slot, adapter
        return slot

    def after_step(self, step: Step, result: StepResult | BaseException, seqs: list[Sequence]) -> None:
        if isinstance(result, BaseException) and not step.is_dropped:
            self._slots.clear()  # its orders may have been carried out or not, and all sequences start anew

    def finished(self, seq: Sequence) -> None:
        self._may_drop |= bool(self._slots)


def _by_digest(adapters: Iterable[Adapter]) -> dict[str, Adapter]:
    return {adapter.digest: adapter for adapter in adapters}


def adapters_of(parts: Iterable[PolicyPart]) -> Adapters:
    """The `Adapters` among the parts of an engine.

    Raises:
        InvalidRequest: there is none.
    """
    adapters = next((part for part in parts if isinstance(part, Adapters)), None)
    if adapters is None:
        raise InvalidRequest("an adapter is wanted, but the engine was built without: set enable_lora=True")
    return adapters
