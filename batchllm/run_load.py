"""A decoder that loads on a thread of its own while the run tokenises and plans, which need none."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from batchllm.engine.pool import KvShape
from batchllm.models.decoder import Decoder, kv_dtype_for
from batchllm.models.loading import load_decoder
from batchllm.models.source import ModelSource, read_config
from batchllm.ops import select_kernels, why_reference


class DecoderLoad:
    """Owns the thread until `close`, which ends the load after the tensor that it is at, unless it is done.

    The thread leaves one core to the run: else torch's threads would wait for each other behind the tokenizer at every tensor.
    `source`: what it loads. `max_context`, `vocab_size` and `kv_shape`: the model's. `slow_kernels`: see `why_reference`.
    """

    def __init__(
        self,
        source: ModelSource,
        *,
        dtype: torch.dtype,
        device: torch.device,
        int8_parts: frozenset[str],
        kv_dtype: str,
        fingerprint: str,
    ) -> None:
        """`kv_dtype` as the job names it. Raises ModelError or JobError for a model or a wish for kernels that cannot run; the weights are not
        read yet.
        """
        config = read_config(source)
        kernels = select_kernels(device, head_dim=config.head_dim)
        self.slow_kernels = why_reference(device, head_dim=config.head_dim)
        kept_dtype = kv_dtype_for(kv_dtype, dtype=dtype, kernels=kernels)
        self.source = source
        self.max_context = config.max_context
        self.vocab_size = config.vocab_size
        self.kv_shape = KvShape.of(config, kept_dtype)
        self._num_threads = torch.get_num_threads()
        self._given_up = threading.Event()

        def load() -> Decoder:
            torch.set_num_threads(max(1, self._num_threads - 1))
            return load_decoder(
                source,
                dtype=dtype,
                device=device,
                kernels=kernels,
                int8_parts=int8_parts,
                kv_dtype=kept_dtype,
                fingerprint=fingerprint,
                given_up=self._given_up.is_set,
            )

        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="load")
        self._decoder = self._pool.submit(load)

    def wait(self) -> Decoder:
        """The decoder. Raises what loading it raised: ModelError for weights that cannot be read."""
        try:
            return self._decoder.result()
        finally:
            self.close()

    def close(self) -> None:
        """Ends the thread. What a load that nobody waited for raised is nobody's."""
        self._given_up.set()
        self._pool.shutdown()
        # The number is that of threads made later too.
        torch.set_num_threads(self._num_threads)
