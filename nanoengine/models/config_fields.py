"""ConfigFields: a config.json, read field by field, so that what nobody reads can be refused."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from nanoengine.config import MAX_INT32, MAX_LAYERS, MAX_POSITIONS
from nanoengine.core import model_config as core
from nanoengine.errors import UnsupportedModel, shown

MAX_HEAD_DIM = 2**16

WITHOUT_EFFECT = re.compile(
    r"_(name_or_path|commit_hash|class_name|diffusers_version|from_auto|.*implementation.*)|architectures|model_type|.*_token_id|"
    r".*(dropout|_pdrop|jitter_noise)|initializer_range|cache_implementation|.*loss_coef|output_(attentions|hidden_states|router_logits|scores|past)|"
    r"return_dict.*|use_cache|auto_map|pretraining_tp|(transformers|unsloth|torchscript|mlx).*|is_(decoder|encoder_decoder|"
    r"llama_config)|cross_attention_hidden_size|add_cross_attention|tie_encoder_decoder|chunk_size_feed_forward|pruned_heads|"
    r"id2label|label2id|problem_type|task_specific_params|tokenizer_class|prefix|finetuning_task|tf_legacy_loss|use_bfloat16|"
    r"attn_implementation|base_model_.*|name_or_path|"
    # what generation did of old, and sampling parameters say here
    r"max_length|min_length|do_sample|early_stopping|num_beams|num_beam_groups|diversity_penalty|temperature|top_[kp]|typical_p|"
    r"repetition_penalty|length_penalty|(encoder_)?no_repeat_ngram_size|bad_words_ids|num_return_sequences|begin_suppress_tokens|"
    r"suppress_tokens|exponential_decay_length_penalty|remove_invalid_values|forced_.*"
)
"""Fields that change nothing about what a model computes when it is used."""

OFF: tuple[object, ...] = (None, False, 0, "", [], {})

LIMITS = {"num_hidden_layers": MAX_LAYERS, "max_position_embeddings": MAX_POSITIONS, "head_dim": MAX_HEAD_DIM}
"""The largest values of some fields."""


class ConfigFields(core.ConfigFields):
    """Remembers which fields were read: `refuse_others` names one that nobody read, though it may matter.

    Args:
        table: the content of a config.json, or of a table in it.
        where: what messages call it.

    Raises:
        UnsupportedModel: by every method, for a value that is missing or wrong; it names field, value and what it must be.
    """

    def __init__(self, table: Mapping[str, Any], where: str = "the model's config.json"):
        super().__init__(table, where)
        self._read: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return key in self.table

    def default(self, key: str, value: Any) -> None:
        """What holds if the file does not say it."""
        if self.table.get(key) is None:
            self.table = {**self.table, key: value}

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add(key)
        return super().get(key, default)

    def integer(self, key: str, default: Any = None, most: int = MAX_INT32) -> int:
        return super().integer(key, default, min(most, LIMITS.get(key, most)))

    def number(self, key: str, default: Any = None, least: float = 0.0, most: float = math.inf) -> float:
        """A positive number within bounds; a field that is there as null is wrong."""
        value = super().number(key, default)
        if not least <= value <= most:
            raise self.wrong(key, self.get(key, default), f"from {least:g} to {most:g}")
        return value

    def numbers(self, key: str, count: int, least: float, most: float) -> tuple[float, ...]:
        """A list of so many positive numbers."""
        values = self.get(key)
        if not isinstance(values, list) or len(values) != count:
            raise self.wrong(key, values, f"a list of {count} numbers")
        return tuple(ConfigFields({key: value}, self.where).number(key, None, least, most) for value in values)

    def refuse_others(self) -> None:
        """Refuse what nobody read, unless it changes nothing, or says that something is off."""
        for key, value in self.table.items():
            if (
                key not in self._read
                and not WITHOUT_EFFECT.fullmatch(key)
                and not any(value is off or value == off for off in OFF)
            ):
                raise UnsupportedModel(
                    f"{shown(key)} is {shown(value)} in {self.where}: this field is not known, and might change what the model "
                    "computes; take it out if it does not"
                )
