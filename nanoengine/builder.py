"""The composition root: from options to an engine that is ready to step. Every door, such as `LLM`, calls it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from nanoengine.config import EngineConfig
from nanoengine.engine.async_llm_engine import AsyncLLMEngine
from nanoengine.engine.executor import Executor, ExecutorInfo
from nanoengine.engine.kv.block_manager import BlockManager
from nanoengine.engine.kv.disk_tier import DiskTier
from nanoengine.engine.kv.host_tier import HostTier
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.engine.metrics import EngineStats
from nanoengine.engine.preemption import Preemption
from nanoengine.engine.scheduler import Scheduler
from nanoengine.engine.speculation.ngram import NgramProposer
from nanoengine.engine.speculation.speculation import Speculation
from nanoengine.engine.speculation.step_costs import StepCosts
from nanoengine.engine.speculation.suffix import SuffixProposer
from nanoengine.errors import InvalidConfig, shown
from nanoengine.model_config import ModelConfig
from nanoengine.models.description import Description, describe
from nanoengine.models.names import WEIGHT_FILES, find_model
from nanoengine.tokenizer import ModelTokenizer

ExecutorFactory = Callable[[EngineConfig, ModelConfig, Path, bool], Executor]
"""Makes an executor of the options, the model's shape, the path of its weights, and whether to show bars."""


@dataclass(frozen=True, slots=True)
class Built:
    """An engine, and what its doors need beside it."""

    engine: LLMEngine
    model_config: ModelConfig
    tokenizer: ModelTokenizer
    default_sampling: Mapping[str, int | float]  # what the model's makers advise


def build_engine(config: EngineConfig, use_tqdm: bool = True, executor: ExecutorFactory | None = None) -> Built:
    """Find a model, look at all that its files say, and only then load it.

    Args:
        config: the options.
        use_tqdm: show what is being done.
        executor: makes what computes the steps, perhaps in another process. None: the model in this one.

    Raises:
        InvalidConfig, KVCacheTooSmall: the options cannot work on this machine.
        ModelNotFound, UnsupportedModel, InvalidWeights: the model is missing, unsupported or broken. Nothing that its files
            say takes time or memory before it was compared with the headers of its weights.
    """
    other = None if config.tokenizer is None else find_model(str(config.tokenizer))
    model = describe(find_model(config.model), other)
    if config.draft_model is not None:
        _check_tokens(config.draft_model, describe(find_model(config.draft_model)), model)
    path = find_model(config.model, WEIGHT_FILES)  # the description is sound: now the weights are worth fetching
    # torch is needed from here on, and not before: `import nanoengine` takes no time, and mistakes are told at once.
    from nanoengine.models.loader import check_weights, open_checkpoint

    check_weights(model.config, open_checkpoint(path))
    runner = (executor or _executor_in_this_process)(config, model.config, path, use_tqdm)
    try:
        stats = EngineStats()
        engine = LLMEngine(
            _scheduler(config, runner.info, stats, model.config.vocab_size),
            runner,
            model.tokenizer,
            vocab_size=model.config.vocab_size,
            eos_token_ids=model.eos_token_ids,
            seed=config.seed,
            stats=stats,
            max_steps_in_flight=runner.info.max_steps_in_flight,
        )
    except BaseException:
        runner.close()
        raise
    return Built(engine, model.config, model.tokenizer, model.default_sampling)


def build_async_engine(config: EngineConfig) -> AsyncLLMEngine:
    """The same engine for callers on an event loop, in a thread of its own. Raises as `build_engine`."""
    return AsyncLLMEngine(lambda: build_engine(config, use_tqdm=False).engine)


def _executor_in_this_process(config: EngineConfig, model_config: ModelConfig, path: Path, use_tqdm: bool) -> Executor:
    from nanoengine.runner.startup import start_runner

    return start_runner(config, model_config, path, use_tqdm=use_tqdm)


def _scheduler(config: EngineConfig, info: ExecutorInfo, stats: EngineStats, vocab_size: int) -> Scheduler:
    host = HostTier(info.num_host_blocks) if info.num_host_blocks else None
    disk = None if config.kv_disk_path is None else _disk_tier(config.kv_disk_path, config.kv_disk_bytes, info)
    return Scheduler(
        BlockManager(
            info.num_blocks,
            config.block_size,
            config.enable_prefix_caching,
            specs=info.groups,
            most_new_tokens=config.most_new_tokens,
            host=host,
            disk=disk,
            # On disk, hashes are the names of files: they must be the same in every process.
            hash_seed=None if disk is None else int(disk.fingerprint[:16], 16),
        ),
        max_num_seqs=info.num_rows,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=info.max_model_len,
        policy=config.scheduling_policy,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        max_client_share=config.max_client_share,
        preemption=Preemption(
            config.preemption_mode,
            copy_bytes_per_second=info.copy_bytes_per_second or 1.0,
            block_bytes=info.block_bytes,
            prefill_rate=lambda: stats.prefill_rate,
        ),
        speculation=_speculation(config, info, vocab_size),
    )


def _check_tokens(name: str, draft: Description, model: Description) -> None:
    """See that a draft model means by its tokens what the model means."""
    if draft.tokenizer.token_ids() != model.tokenizer.token_ids():
        raise InvalidConfig(
            f"speculation is 'model:{name}', whose tokenizer has other tokens than the model's: choose a model of the same family"
        )


def _speculation(config: EngineConfig, info: ExecutorInfo, vocab_size: int) -> Speculation | None:
    if config.speculation is None:
        return None
    proposers = {"ngram": NgramProposer, "suffix": SuffixProposer}
    return Speculation(
        None if config.draft_model is not None else proposers[config.speculation](),
        num_drafts=config.num_drafts,
        vocab_size=vocab_size,
        costs=StepCosts(info.step_seconds),
        guess_share=info.guess_share,
    )


def _disk_tier(folder: str, max_bytes: int, info: ExecutorInfo) -> DiskTier:
    assert info.kv_fingerprint is not None, "the executor has seen kv_disk_path"
    try:
        return DiskTier(Path(folder), info.kv_fingerprint, info.block_bytes, max_bytes)
    except (OSError, ValueError) as error:  # the second for what cannot be a path at all
        raise InvalidConfig(f"kv_disk_path is {shown(folder)}, which cannot be used: {error}") from error
