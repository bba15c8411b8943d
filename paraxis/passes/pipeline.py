"""The pipeline: every pass and every rewrite, in the order in which they run.

From a captured graph to the program that a rank runs. An entry has its name, one line of what it does, and when it
applies in terms of a :class:`~paraxis.passes.setting.Setting`. To add one, write a function in ``paraxis/optimize/``
that rewrites a graph module in place and returns how often, and add a line here. Users change the list through
``Config.pipeline``; ``paraxis code MODEL --after NAME`` prints the program after an entry, and ``paraxis plan MODEL
--timings`` the seconds of each.
"""

from __future__ import annotations

from dataclasses import replace

from ..config import Config
from ..data_parallel.shard import unshard_at_first_use
from ..optimize.activation_checkpointing import recompute
from ..optimize.cpu_attention import use_decode_attention, use_prefill_attention
from ..optimize.cpu_matmul import use_cpu_matmul
from ..optimize.decode_kernels import use_decode_kernels
from ..optimize.eager_collectives import run_all_reduces_in_place
from ..optimize.eager_fusions import fuse_eager_operators
from ..optimize.eager_masks import drop_plain_masks
from ..optimize.fuse_rope_kv_write import fuse_rope_kv_write, merge_cache_counters
from ..optimize.kv_cache_append import append_kv_cache_in_place, drop_empty_parts
from ..optimize.merge_all_reduces import merge_all_reduces
from ..optimize.moe_experts import run_experts_in_sequence
from ..optimize.prefill import drop_causal_masks, merge_narrow_linears
from ..optimize.quantized_linears import use_quantized_linears
from ..optimize.redistributions import drop_redistributions
from ..optimize.single_query_attention import decompose_single_query_attention
from .agree import AgreeOnProgramPass
from .annotate import ParallelLayerAnnotatePass
from .base import PassPipeline, Rewrite
from .inductor_options import store_residual_sums, use_cpu_matmul_in_inductor
from .initialize import InitializeOrLoadWeightsPass
from .lift import LiftShardsPass, lifted_of, scalars_to_device
from .place import PlaceParametersPass
from .replace import ParallelLayerReplacePass
from .solve import ParallelAxisSolverPass


def build_parallel_pass_pipeline() -> PassPipeline:
    """The default pipeline: solve, annotate, partition, agree, load, optimize, lift for the compiler."""
    return PassPipeline(
        [
            # From the captured graph to the local program.
            ParallelAxisSolverPass(),
            ParallelLayerAnnotatePass(),
            PlaceParametersPass(),
            ParallelLayerReplacePass(),
            Rewrite(
                "merge_all_reduces",
                "Small all-reduces that do not depend on one another become one.",
                lambda m, s: merge_all_reduces(m, s.grad),
                lambda s: s.ranks > 1,
                searching=True,
            ),
            AgreeOnProgramPass(),
            InitializeOrLoadWeightsPass(),
            # Optimizations of the local program.
            Rewrite(
                "drop_redistributions",
                "A single rank without gradients communicates nothing: redistributions are dropped.",
                lambda m, s: drop_redistributions(m),
                lambda s: s.ranks == 1 and s.inference,
            ),
            Rewrite(
                "fuse_eager_operators",
                "Sequences of operators that one operator computes become that one.",
                lambda m, s: fuse_eager_operators(m),
                lambda s: s.eager,
            ),
            Rewrite(
                "append_kv_cache",
                "Growing KV caches append in place instead of concatenating.",
                lambda m, s: append_kv_cache_in_place(m, s.compiled),
                lambda s: s.inference and (s.eager or s.device == "cpu"),
            ),
            Rewrite(
                "drop_empty_parts",
                "A new KV cache is a copy of its first keys and values, not a concatenation with nothing.",
                lambda m, s: drop_empty_parts(m, s.compiled),
                lambda s: s.inference and (s.eager or s.device == "cpu"),
            ),
            Rewrite(
                "drop_plain_masks",
                "Attention runs without masks that hide nothing, or later keys alone, as it does in an eager model.",
                lambda m, s: drop_plain_masks(m),
                lambda s: s.inference and s.eager and s.device != "cpu",
            ),
            Rewrite(
                "cpu_prefill_attention",
                "Causal attention of many queries runs in the CPU kernel for prefill.",
                lambda m, s: use_prefill_attention(m),
                lambda s: s.inference and s.device == "cpu",
            ),
            Rewrite(
                "cpu_decode_attention",
                "Attention of one query on a growing KV cache runs in the CPU kernel for decode.",
                lambda m, s: use_decode_attention(m, s.compiled),
                lambda s: s.inference and s.device == "cpu",
            ),
            Rewrite(
                "experts_in_sequence",
                "The experts of a MoE layer run one after the other, so that activations stay in the CPU's cache.",
                lambda m, s: run_experts_in_sequence(m),
                lambda s: s.inference and s.eager and s.device == "cpu",
            ),
            Rewrite(
                "cpu_matmul",
                "Linear layers and grouped matmuls run in the CPU kernels for GEMV and GEMM.",
                lambda m, s: use_cpu_matmul(m, s.compiled),
                lambda s: s.inference and s.device == "cpu",
            ),
            Rewrite(
                "unshard_at_first_use",
                "FSDP parameters are unsharded right before their first use, so that few are full at a time.",
                lambda m, s: unshard_at_first_use(m),
                lambda s: s.dp_sharded,
            ),
            Rewrite(
                "activation_checkpointing",
                "Regions under torch.utils.checkpoint are checkpointed: the backward pass recomputes activations.",
                lambda m, s: recompute(m),
                lambda s: s.grad and s.eager,
            ),
            # The program on plain tensors.
            LiftShardsPass(),
            Rewrite(
                "all_reduce_in_place",
                "Partial sums of linear layers are all-reduced in their own memory, by one call of the backend.",
                lambda m, s: run_all_reduces_in_place(m),
                lambda s: s.runs and s.inference and s.eager and s.ranks > 1,
            ),
            Rewrite(
                "quantized_linears",
                "Linear layers with a quantized weight become one operator on its codes and scales.",
                lambda m, s: use_quantized_linears(m, lifted_of(m).examples),
                lambda s: s.for_inductor and s.inference,
            ),
            Rewrite(
                "scalars_to_device",
                "Counters of KV caches are passed on the device instead of being copied layer by layer.",
                lambda m, s: scalars_to_device(m),
                lambda s: s.for_inductor and s.device == "cuda" and s.inference,
            ),
            Rewrite(
                "decode_kernels",
                "Norm, linear layers and gate of one row become one Triton kernel, and so do RoPE, KV write and"
                " attention of one query.",
                lambda m, s: use_decode_kernels(m, lifted_of(m).examples, merge_counters=not s.first_blocks),
                lambda s: s.for_inductor and s.device == "cuda" and s.inference and s.cuda_graphs,
            ),
            Rewrite(
                "decompose_single_query_attention",
                "Attention of one query on repeated keys and values becomes sums that Inductor fuses.",
                lambda m, s: decompose_single_query_attention(m),
                lambda s: s.for_inductor and s.device == "cuda" and s.inference,
            ),
            Rewrite(
                "drop_causal_masks",
                "Constant causal masks are dropped, so that prefill runs in the flash kernels.",
                lambda m, s: drop_causal_masks(m),
                lambda s: s.for_inductor and s.device == "cuda" and s.inference,
            ),
            Rewrite(
                "merge_narrow_linears",
                "Narrow linear layers on the same input become one GEMM in prefill.",
                lambda m, s: merge_narrow_linears(m, lifted_of(m).examples),
                lambda s: s.for_inductor and s.device == "cuda" and s.inference,
            ),
            Rewrite(
                "fuse_rope_kv_write",
                "RoPE and the writes into an empty KV cache become one Triton kernel per layer.",
                lambda m, s: fuse_rope_kv_write(m),
                lambda s: s.for_inductor and s.device == "cuda" and s.inference and s.cuda_graphs,
            ),
            Rewrite(
                "merge_cache_counters",
                "The counters of all layers' KV caches are incremented by one operator.",
                lambda m, s: merge_cache_counters(m),
                lambda s: (
                    s.for_inductor and s.device == "cuda" and s.inference and s.cuda_graphs and not s.first_blocks
                ),
            ),
            Rewrite(
                "store_residual_sums",
                "Inductor stores the residual sums of a prefill instead of recomputing them at every use.",
                lambda m, s: store_residual_sums(m),
                lambda s: s.for_inductor and s.device == "cuda",
            ),
            Rewrite(
                "cpu_matmul_in_inductor",
                "Inductor uses the CPU kernels for GEMV and GEMM, after its own decompositions.",
                lambda m, s: use_cpu_matmul_in_inductor(m),
                lambda s: s.for_inductor and s.device == "cpu" and s.inference,
            ),
        ]
    )


def without_loading(config: Config) -> Config:
    """The options with a pipeline that loads no weights: for a model that is inspected and not run."""
    passes = config.pipeline or build_parallel_pass_pipeline()
    return replace(config, pipeline=PassPipeline([p for p in passes if not isinstance(p, InitializeOrLoadWeightsPass)]))
