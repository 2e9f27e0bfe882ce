"""One call or more of every op that regions are made of, in float64 so that tolerances are tight."""

from __future__ import annotations

import torch

aten = torch.ops.aten
GENERATOR = torch.Generator().manual_seed(0)


def r(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64)


def ids(most: int, *shape: int) -> torch.Tensor:
    return torch.randint(most, shape, generator=GENERATOR)


def _ignoring(targets: torch.Tensor) -> torch.Tensor:
    targets.view(-1)[::3] = -100
    return targets


def _attention(mask: torch.Tensor | None, causal: bool) -> tuple[tuple, tuple, dict]:
    q, k, v = r(2, 3, 5, 4), r(2, 3, 6, 4), r(2, 3, 6, 4)
    kwargs = {"attn_mask": mask}
    out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v, 0.0, causal, **kwargs)
    return (q, k, v, 0.0, causal), (r(2, 3, 5, 4), q, k, v, out, logsumexp, 0.0, causal), kwargs


X, M = r(6, 5, 4), r(6, 5)
IMAGES, STATISTICS = r(4, 6, 8, 8), (r(6), r(6).abs() + 1)
PLAIN, CAUSAL = _attention(None, False), _attention(None, True)
MASKED, BROADCAST = _attention(r(2, 3, 5, 6), False), _attention(r(2, 1, 5, 6), False)
FLAT = _attention(r(5, 6), False)
SAMPLED = r(4, 5, 3, 2).tanh()
POOLED, AT = aten.max_pool2d_with_indices.default(IMAGES, [2, 2], [2, 2])
NORM = (r(6, 5, 4), [4], r(6, 5, 1), r(6, 5, 1).abs() + 1, r(4), r(4))
GROUPS = aten.native_group_norm.default(IMAGES, r(6), r(6), 4, 6, 64, 3, 1e-5)
HERE, FORWARD_KERNEL, BACKWARD_KERNEL = [[1, 1], [1, 1], [1, 1]], aten.convolution.default, aten.convolution_backward.default
SCORES, TARGETS, WEIGHTS = r(7, 9), _ignoring(ids(9, 7)), r(9).abs()
MAPS, LABELS = r(3, 5, 4, 6), _ignoring(ids(5, 3, 4, 6))

CALLS = [
    (aten.mm.default, (M, r(5, 7))),
    (aten.addmm.default, (r(7), M, r(5, 7))),
    (aten.addmm.default, (r(6, 7), M, r(5, 7))),
    (aten.bmm.default, (X, r(6, 4, 3))),
    (aten.baddbmm.default, (r(6, 5, 3), X, r(6, 4, 3))),
    (aten.view.default, (X, [30, 4])),
    (aten.view.default, (X, [6, 20])),
    (aten.view.default, (X, [-1, 5, 2, 2])),
    (aten.view.default, (r(4, 6, 3), [6, 4, 3])),
    (aten._unsafe_view.default, (r(6, 20), [6, 5, 4])),
    (aten.reshape.default, (X, [30, 4])),
    (aten.expand.default, (r(6, 1, 4), [3, 6, 5, -1])),
    (aten.alias.default, (X,)),
    (aten.detach.default, (X,)),
    (aten.permute.default, (X, [2, 0, 1])),
    (aten.transpose.int, (X, 0, -1)),
    (aten.t.default, (M,)),
    (aten.unsqueeze.default, (X, -2)),
    (aten.squeeze.dim, (r(3, 1, 4), 1)),
    (aten.squeeze.dims, (r(3, 1, 4), [0, 1])),
    (aten.select.int, (X, 1, 2)),
    (aten.select_backward.default, (r(6, 4), [6, 5, 4], 1, 2)),
    (aten.select_backward.default, (r(5, 5), [5, 5, 5], -1, 2)),
    (aten.slice.Tensor, (X, 1, 1, 3)),
    (aten.slice.Tensor, (r(6, 1, 4),)),
    (aten.flip.default, (X, [0, -1])),
    (aten.roll.default, (X, [2], [-1])),
    (aten._fft_r2c.default, (X, [1, 2], 0, True)),
    (aten.view_as_complex.default, (r(6, 5, 2),)),
    (aten.slice_backward.default, (r(6, 2, 4), [6, 5, 4], 1, 1, 3, 1)),
    (aten.split.Tensor, (X, 2, 1)),
    (aten.split_with_sizes.default, (X, [1, 4], 1)),
    (aten.unbind.int, (X, 1)),
    (aten.cat.default, ([X, r(6, 2, 4)], 1)),
    (aten.stack.default, ([X, X], 1)),
    (aten.stack.default, ([X, X], -1)),
    (aten.constant_pad_nd.default, (X, [1, 2])),
    (aten.repeat.default, (X, [1, 2, 1])),
    (aten.clone.default, (X,)),
    (aten._to_copy.default, (X,), {"dtype": torch.float32}),
    (aten.copy.default, (X, r(5, 1))),
    (aten.add.Tensor, (X, r(5, 1))),
    (aten.mul.Tensor, (X, 2.0)),
    (aten.where.self, (X > 0, X, r(1, 5, 4))),
    (aten.masked_fill.Scalar, (X, r(6, 1, 4) > 0, -1.0)),
    (aten.gelu.default, (X,), {"approximate": "tanh"}),
    (aten.gelu_backward.default, (X, r(6, 5, 4))),
    (aten.hardtanh_backward.default, (X, r(6, 5, 4), 0.0, 6.0)),
    (aten.leaky_relu.default, (X,)),
    (aten.native_dropout_backward.default, (X, X > 0, 2.0)),
    (aten._softmax.default, (X, -1, False)),
    (aten._softmax_backward_data.default, (X, r(6, 5, 4), -1, torch.float64)),
    (aten._log_softmax.default, (X, 1, False)),
    (aten._log_softmax_backward_data.default, (X, r(6, 5, 4), 1, torch.float64)),
    (aten.logsumexp.default, (X, [-1])),
    (aten.native_layer_norm.default, (X, [4], r(4), r(4), 1e-5)),
    (aten.native_layer_norm_backward.default, (X, *NORM, [True, True, True])),
    (aten.native_layer_norm_backward.default, (X, *NORM, [True, False, False])),
    (aten._fused_rms_norm.default, (X, [4], r(4), 1e-5)),
    (aten.native_group_norm.default, (IMAGES, r(6), r(6), 4, 6, 64, 3, 1e-5)),
    (aten.native_group_norm_backward.default, (r(4, 6, 8, 8), IMAGES, *GROUPS[1:], r(6), 4, 6, 64, 3, [True, True, True])),
    (aten.native_batch_norm.default, (IMAGES, r(6), r(6), *STATISTICS, False, 0.1, 1e-5)),
    (aten._native_batch_norm_legit_no_training.default, (IMAGES, r(6), r(6), *STATISTICS, 0.1, 1e-5)),
    (aten._native_batch_norm_legit_functional.default, (IMAGES, r(6), r(6), *STATISTICS, True, 0.1, 1e-5)),
    *(
        (aten.native_batch_norm_backward.default,
         (r(4, 6, 8, 8), IMAGES, r(6), *STATISTICS, *STATISTICS, train, 1e-5, [True, True, True]))
        for train in (True, False)
    ),
    (aten.native_batch_norm_backward.default,
     (r(4, 6, 8, 8), IMAGES, r(6), *STATISTICS, r(0), r(0), False, 1e-5, [True, True, True])),
    (aten.sum.default, (X,)),
    (aten.sum.dim_IntList, (X, [0, 1], True)),
    (aten.nansum.default, (X, [0, -1])),
    (aten.kthvalue.default, (X, 2, 0, True)),
    (aten.mean.dim, (X, [-1], True)),
    (aten.amax.default, (X, [1])),
    (aten.var_mean.correction, (X, [-1]), {"correction": 0}),
    (aten.linalg_vector_norm.default, (X, 2, [-1])),
    (aten.cumsum.default, (X, -1)),
    (aten.topk.default, (X, 2)),
    (aten.sort.default, (X, 1)),
    (aten.max.dim, (X, 1)),
    (aten.gather.default, (X, 2, ids(4, 6, 5, 3))),
    (aten.scatter.value, (X, 2, ids(4, 6, 5, 1), 1.0)),
    (aten.scatter_add.default, (X, 2, ids(4, 6, 5, 3), r(6, 5, 3))),
    (aten.index_select.default, (X, 1, ids(5, 3))),
    (aten.index_add.default, (X, 1, ids(5, 3), r(6, 3, 4))),
    (aten.index_add.default, (M, 0, ids(6, 9), r(9, 5)), {"alpha": 2}),
    *((aten.scatter_reduce.two, (X, 2, ids(4, 6, 5, 3), r(6, 5, 3), how)) for how in ("amax", "sum", "prod", "mean")),
    (aten.scatter_reduce.two, (X, 2, ids(4, 6, 5, 3), r(6, 5, 3), "sum"), {"include_self": False}),
    (aten.index.Tensor, (X, [None, ids(5, 3)])),
    (aten.index.Tensor, (X, [ids(6, 2, 3), None, ids(4, 3)])),
    (aten.index.Tensor, (IMAGES, [None, ids(6, 2, 3), ids(8, 1)])),
    (aten._unsafe_index.Tensor, (IMAGES, [None, None, ids(8, 16, 1), ids(8, 16)])),
    (aten.index_put.default, (X, [None, ids(5, 3)], r(6, 3, 4), True)),
    (aten.index_put.default, (X, [ids(6, 7)], r(7, 5, 4), True)),
    (aten.index_put.default, (X, [ids(6, 7, 3), None, ids(4, 3)], r(5), True)),
    (aten.index_put.default, (X, [ids(6, 7), ids(5, 7)], r(7, 1), True)),
    (aten._unsafe_index_put.default, (IMAGES, [None, None, ids(8, 16, 1), ids(8, 16)], r(4, 6, 16, 16), True)),
    (aten.embedding.default, (r(9, 4), ids(9, 3, 5))),
    (aten.embedding_dense_backward.default, (r(3, 5, 4), ids(9, 3, 5), 9, -1, False)),
    (aten.embedding_dense_backward.default, (r(3, 5, 4), ids(9, 3, 5), 9, 2, True)),
    *(
        (aten.nll_loss_forward.default, (SCORES, TARGETS, weight, reduction, -100))
        for weight in (None, WEIGHTS) for reduction in (0, 2)
    ),
    *(
        (aten.nll_loss_backward.default,
         (r(7) if reduction == 0 else r(), SCORES, TARGETS, weight, reduction, -100, r().abs() + 3))
        for weight in (None, WEIGHTS) for reduction in (0, 1, 2)
    ),
    *((aten.nll_loss2d_forward.default, (MAPS, LABELS, None, reduction, -100)) for reduction in (0, 2)),
    *(
        (aten.nll_loss2d_backward.default,
         (r(3, 4, 6) if reduction == 0 else r(), MAPS, LABELS, None, reduction, -100, r().abs() + 3))
        for reduction in (0, 1, 2)
    ),
    (aten.mse_loss.default, (X, r(6, 5, 4), 2)),
    (aten.mse_loss_backward.default, (r(), X, r(6, 5, 4), 2)),
    (aten.binary_cross_entropy_with_logits.default, (X, X.sigmoid(), None, r(4), 0)),
    *(
        (aten._scaled_dot_product_flash_attention_for_cpu.default, forward, kwargs)
        for forward, _, kwargs in (PLAIN, CAUSAL, MASKED, BROADCAST, FLAT)
    ),
    *(
        (aten._scaled_dot_product_flash_attention_for_cpu_backward.default, backward, kwargs)
        for _, backward, kwargs in (PLAIN, CAUSAL, MASKED, BROADCAST, FLAT)
    ),
    (FORWARD_KERNEL, (IMAGES, r(5, 6, 3, 3), r(5), *HERE, False, [0, 0], 1)),
    (FORWARD_KERNEL, (IMAGES, r(5, 6, 3, 3), None, *HERE, False, [0, 0], 1)),
    (FORWARD_KERNEL, (IMAGES, r(6, 5, 3, 3), r(5), *HERE, True, [0, 0], 1)),
    (FORWARD_KERNEL, (IMAGES, r(6, 5, 3, 3), None, *HERE, True, [0, 0], 1)),
    (FORWARD_KERNEL, (IMAGES, r(6, 1, 3, 3), r(6), *HERE, False, [0, 0], 6)),
    (FORWARD_KERNEL, (IMAGES, r(4, 3, 3, 3), r(4), *HERE, False, [0, 0], 2)),
    *(
        (BACKWARD_KERNEL, (r(4, 5, 8, 8), IMAGES, weight, [5], *HERE, transposed, [0, 0], 1, mask))
        for weight, transposed in ((r(5, 6, 3, 3), False), (r(6, 5, 3, 3), True))
        for mask in ([True, True, True], [True, True, False], [False, True, False], [True, False, False], [False, True, True])
    ),
    *(
        (BACKWARD_KERNEL, (r(4, 6, 8, 8), IMAGES, r(6, 1, 3, 3), [6], *HERE, False, [0, 0], 6, mask))
        for mask in ([True, True, True], [False, True, False])
    ),
    (aten._native_batch_norm_legit.no_stats, (IMAGES, r(6), r(6), True, 0.1, 1e-5)),
    (aten.max_pool3d_with_indices.default, (r(2, 3, 4, 4, 4), [2, 2, 2])),
    (aten.avg_pool2d.default, (IMAGES, [2, 2])),
    (aten.avg_pool2d_backward.default, (r(4, 6, 4, 4), IMAGES, [2, 2], [2, 2], [0, 0], False, True, None)),
    (aten._adaptive_avg_pool2d.default, (IMAGES, [2, 2])),
    (aten._adaptive_avg_pool2d_backward.default, (r(4, 6, 2, 2), IMAGES)),
    (aten.max_pool2d_with_indices.default, (IMAGES, [2, 2], [2, 2])),
    (aten.max_pool2d_with_indices_backward.default, (POOLED, IMAGES, [2, 2], [2, 2], [0, 0], [1, 1], False, AT)),
    (aten.adaptive_max_pool3d.default, (r(2, 3, 4, 4, 4), [2, 2, 2])),
    (aten.adaptive_max_pool3d_backward.default, (r(2, 3, 2, 2, 2), r(2, 3, 4, 4, 4), ids(64, 2, 3, 2, 2, 2))),
    (aten.max_unpool2d.default, (POOLED, AT, [8, 8])),
    (aten.grid_sampler_2d.default, (IMAGES, SAMPLED, 0, 0, False)),
    (aten.grid_sampler_2d_backward.default, (r(4, 6, 5, 3), IMAGES, SAMPLED, 0, 0, False, [True, True])),
    (aten.upsample_nearest1d.default, (X, [8])),
    (aten._upsample_bilinear2d_aa.default, (IMAGES, [4, 4], False)),
    (aten.upsample_nearest2d.default, (IMAGES, [16, 16])),
    (aten.upsample_nearest2d_backward.default, (r(4, 6, 16, 16), [16, 16], [4, 6, 8, 8])),
    (aten.upsample_bilinear2d.vec, (IMAGES, None, False, [2.0, 2.0])),
    (aten.upsample_bilinear2d_backward.default, (r(4, 6, 16, 16), [16, 16], [4, 6, 8, 8], False)),
    (aten.new_zeros.default, (r(3), [6, 5])),
    (aten.full_like.default, (X, 2.0)),
    (aten.tril.default, (X,)),
]  # fmt: skip
"""(op, arguments) or (op, arguments, keyword arguments). All of these have a rule."""
