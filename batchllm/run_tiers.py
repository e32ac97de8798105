"""The tiers of a run: opened for the first stage that computes something, and shared by all that follow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from batchllm.engine.blocks import num_blocks_for
from batchllm.engine.decoder import kv_shape
from batchllm.engine.metrics import RunMetrics
from batchllm.engine.offload import StageReuse
from batchllm.engine.sizing import most_blocks
from batchllm.engine.tier_report import TierReport, report_tiers
from batchllm.engine.tier_setup import DiskRequest, TierRequest, open_tiers
from batchllm.engine.transfer import TierSetup
from batchllm.errors import JobError
from batchllm.job import Job
from batchllm.models.decoder import Decoder
from batchllm.planner.plan import Plan
from batchllm.run_stages import Stage
from batchllm.storage.keys import KeyScope


class RunTiers:
    """Owns what `job` asks for in tiers, until `close`. The stages' engines use it one after the other."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._setup: TierSetup | None = None

    def for_stage(self, stage: Stage, *, decoder: Decoder, plan: Plan) -> TierSetup | None:
        """What the engine of the next stage is given; None where the job wants no tier. Raises JobError."""
        if self._setup is None:
            self._setup = self._open(decoder, plan)
        if self._setup is None:
            return None
        reuse = StageReuse(continues=stage.job.prompt.continues, is_continued=stage.is_continued, number=stage.number)
        return replace(self._setup, reuse=reuse)

    def close(self, metrics: RunMetrics) -> TierReport | None:
        """Closes the tiers, if any were opened: what they did, in a run of these `metrics`."""
        if self._setup is None:
            return None
        setup, self._setup = self._setup, None
        setup.store.close()
        return report_tiers(setup, metrics)

    def _open(self, decoder: Decoder, plan: Plan) -> TierSetup | None:
        settings, shape = self._job.engine, kv_shape(decoder)
        kv, block_size = settings.kv, settings.block_size
        if decoder.device.type not in ("cpu", "cuda") and (kv.host or kv.disk):
            raise JobError(f"engine.kv: tiers are not supported on {decoder.device.type} yet; leave host and disk out")
        disk = None
        if kv.disk is not None:
            disk = DiskRequest(Path(kv.disk.path), kv.disk.size, max_age_s=kv.disk.max_age_days * 86400)
        layout = f"block-major {shape.num_layers}x2x{shape.num_kv_heads}x{block_size}x{shape.head_dim}"
        max_context = decoder.config.max_context
        if self._job.stages:
            # The later stages' prompts are not known yet.
            num_blocks = plan.num_prompts * num_blocks_for(max_context, block_size)
        else:
            num_blocks = most_blocks(plan, max_context=max_context, block_size=block_size)
        return open_tiers(
            TierRequest(host_bytes=kv.host, disk=disk, policy=kv.policy, persist=kv.persist),
            # The bits of keys and values depend on the kernels too.
            scope=KeyScope(
                model=decoder.fingerprint.encode(),
                layout=f"{layout} {decoder.kernels.name}",
                dtype=f"{decoder.dtype} kept as {decoder.kv_dtype}",
            ),
            block_bytes=shape.block_bytes(block_size),
            block_size=block_size,
            most_blocks=num_blocks,
        )
