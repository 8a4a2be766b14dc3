"""Mutants of adapters."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

ADAPTER = "nanoengine/features/lora/adapter.py"
ADAPTERS = "nanoengine/features/lora/adapters.py"
PART = "nanoengine/features/lora/runner_part.py"
NATIVE = "nanoengine/features/lora/native_products.py"
KERNEL = "nanoengine/kernels/native/cpp/lora.cpp"
CAPABILITY = "nanoengine/features/lora/capability.py"
PRODUCTS = "nanoengine/features/lora/products.py"
TEST_ADAPTER = "tests/features/lora/test_adapter.py"
TEST_ENGINES = "tests/features/lora/test_adapters.py"
TEST_PRODUCTS = "tests/features/lora/test_products.py"

MUTANTS = (
    Mutant(
        "adapters-share-the-prefix-cache",
        ADAPTERS,
        "request.cache_salt += SALT + adapter.digest",
        "request.cache_salt += SALT",
        "A request finds the K/V that another adapter has computed.",
        (TEST_ENGINES,),
    ),
    Mutant(
        "digest-leaves-out-the-config",
        ADAPTER,
        "hashlib.sha256(hashlib.sha256(said).digest() + hashlib.sha256(content).digest()).hexdigest()",
        "hashlib.sha256(content).hexdigest()",
        "An adapter whose scale was changed finds the K/V of the one before.",
        (TEST_ADAPTER,),
    ),
    Mutant(
        "slots-outlive-a-failed-step",
        ADAPTERS,
        "            self._slots.clear()  # nobody knows",
        "            pass  # nobody knows",
        "An adapter whose load was in a failed step is taken for loaded.",
        (TEST_ENGINES,),
    ),
    Mutant(
        "row-keeps-the-adapter-of-whoever-was-there",
        PART,
        "            self._slots[row] = NONE\n",
        "            self._slots[row] = max(NONE, self._slots[row])\n",
        "A request without an adapter gets that of the row's last sequence.",
        (TEST_ENGINES,),
    ),
    Mutant(
        "recordings-with-and-without-adapters-are-one",
        CAPABILITY,
        "            runner.recorder.variant = lambda: products.is_used\n",
        "            runner.recorder.variant = lambda: None\n",
        "A step with adapters replays one that was recorded without.",
        (TEST_ENGINES,),
    ),
    Mutant(
        "unloaded-adapters-stay-in-the-runner",
        ADAPTERS,
        "        orders.drops = [self._slots.pop(digest) for digest in self._slots.keys() - kept]\n",
        "        orders.drops = []\n",
        "Memory of adapters that nobody needs is never given back.",
        (TEST_ENGINES,),
    ),
    Mutant(
        "an-adapter-in-use-makes-room",
        ADAPTERS,
        "if adapter.digest not in in_use] if makes_room else []",
        "] if makes_room else []",
        "There are more adapters in use than the limit, and than the kernels have room for.",
        (TEST_ENGINES,),
    ),
    Mutant(
        "rows-of-b-stand-in-the-order-of-the-file",
        PRODUCTS,
        "b.view(place.count, own.rank)[place.order].to(dtype)",
        "b.view(place.count, own.rank).to(dtype)",
        "Heads of which a part is rotated get the wrong outputs of an adapter.",
        (TEST_PRODUCTS,),
    ),
    Mutant(
        "sum-of-a-depends-on-the-rows-beside-it",
        KERNEL,
        "    for (; m < unit.count; m++) shrink_rows<1, 4, T, W>(unit, m, inputs, row_of);\n",
        "    for (; m < unit.count; m++) shrink_rows<1, 4, T, W>(unit, m, inputs - inputs % 64, row_of);\n",
        "A row that no other stands beside is computed otherwise.",
        (TEST_PRODUCTS,),
    ),
    Mutant(
        "dora-is-taken-for-lora",
        ADAPTER,
        "        if config[name]:  # not None",
        '        if config[name] and name != "use_dora":  # not None',
        "An adapter that scales the weights is computed without that.",
        (TEST_ADAPTER,),
    ),
)
