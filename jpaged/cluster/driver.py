"""The start of a run on Ray: what its workers are, and what the driver knows of their engines before they start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..config.engine_config import EngineConfig
from ..intake.request_builder import RequestBuilder
from ..remote.process_client import sent_config
from ..startup.open_model import ModelHandle
from ..startup.sizing.sizes import CPU_SEQS, DEVICE_SEQS, chosen_dtypes, requested_max_len
from ..step.step_sizes import StepSizes
from ..text.prompts import PromptEncoder
from .ray_engine import RayEngine
from .ray_options import RayOptions
from .ray_session import ray_session
from .worker import WorkerSpec
from .worker_plan import WorkerPlan, worker_plan

PATH_OPTIONS = ("model", "tokenizer", "compilation_cache_dir", "weights_cache_dir")
"""Options that may be paths, which are relative to the folder of the driver."""


@contextmanager
def cluster_engine(
    options: RayOptions,
    config: EngineConfig,
    handle: ModelHandle,
    encoder: PromptEncoder,
    core_options: Mapping[str, Any],
    *,
    num_samples: int,
) -> Iterator[RayEngine]:
    """Join a cluster during a `with`, with what computes a run on its workers.

    `encoder` checks the lengths of prompts, `core_options` are those of the workers' `make_engine`, and `num_samples`
    the most samples of one prompt. Raise ConfigError if there is no cluster, if it does not let this process in, or if
    it has no room for the workers.
    """
    with ray_session(options.address):
        import ray

        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        plan = worker_plan(options, nodes, config)
        config = _worker_config(config, plan, num_samples)
        spec = WorkerSpec(sent_config(config), plan.max_on_node, core_options)
        yield RayEngine(plan, spec, _builder(config, handle, encoder, plan.platform))


def _worker_config(config: EngineConfig, plan: WorkerPlan, num_samples: int) -> EngineConfig:
    """Return the options of each worker's engine. All samples of a prompt run at the same time."""
    paths: dict[str, Any] = {
        name: str(Path(value).absolute())
        for name in PATH_OPTIONS
        if (value := getattr(config, name)) is not None and Path(value).exists()
    }
    config = replace(config, data_parallel_size=1, **paths)
    if config.max_num_seqs is None and num_samples > _default_seqs(plan.platform):
        config = replace(config, max_num_seqs=num_samples)
    return config


def _default_seqs(platform: str) -> int:
    return CPU_SEQS if platform == "cpu" else DEVICE_SEQS


def _builder(config: EngineConfig, handle: ModelHandle, encoder: PromptEncoder, platform: str) -> RequestBuilder:
    """Return what makes messages for engines as large as the options allow; workers know how large theirs are."""
    max_num_seqs = config.max_num_seqs or _default_seqs(platform)
    dtype, kv_cache_dtype = chosen_dtypes(config, handle.spec, platform)
    sizes = StepSizes(
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        block_size=config.block_size or 1,
        max_model_len=requested_max_len(config, handle.spec),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens or max_num_seqs,
    )
    return RequestBuilder(config, encoder, sizes, handle.sampling_defaults)
