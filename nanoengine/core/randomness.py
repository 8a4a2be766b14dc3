"""Seeds: a sampled token depends on its distribution and on (seed, completion index, position) alone.

The mixing function is the finalizer of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
2014). `sampling.py` applies it to whole vocabularies.
"""

MASK = (1 << 64) - 1
GOLDEN_GAMMA = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB


def mix(value: int) -> int:
    """Scramble 64 bits: equal inputs give equal outputs, neighbouring inputs unrelated ones."""
    value &= MASK
    value = ((value ^ (value >> 30)) * MIX_1) & MASK
    value = ((value ^ (value >> 27)) * MIX_2) & MASK
    return value ^ (value >> 31)


def sequence_seed(seed: int, index: int) -> int:
    """The 64-bit seed of one completion of a request."""
    return mix(mix(seed + GOLDEN_GAMMA) + (index + 1) * GOLDEN_GAMMA)
