"""The kernels of `asr.model.flash_attention`, in Triton.

A program handles a block of queries (or keys) of one head of one utterance, and loops over the blocks of keys (or
queries). The D numbers of a row of queries, keys or values are contiguous, the heads of a frame follow one another, and
frames are `q_stride` or (keys and values) `k_stride` apart; results are `(B, L, H, D)`. Logarithms are to base two.

A weight is dropped if the lower 32 bits of the product of two random numbers, an odd one for the query and one for the
key, are less than `threshold` (multiplicative hashing; Dietzfelbinger et al. 1997). The backward pass recomputes the
same decisions.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
launched = triton.jit(do_not_specialize=["H", "L_q", "L_k"])


@triton.jit
def _rows(first, rows, stride, end, D: tl.constexpr, WIDTH: tl.constexpr):
    """The addresses of `rows`, `(rows, WIDTH)`, and which of them are real: rows before `end`, D numbers per row."""
    columns = tl.arange(0, WIDTH)
    real = rows[:, None] < end
    if D != WIDTH:
        real = real & (columns[None, :] < D)
    return first + rows[:, None] * stride + columns[None, :], real


@triton.jit
def _load(first, rows, stride, end, D: tl.constexpr, WIDTH: tl.constexpr):
    places, real = _rows(first, rows, stride, end, D, WIDTH)
    return tl.load(places, mask=real, other=0.0)


@triton.jit
def _store(first, x, rows, stride, end, D: tl.constexpr, WIDTH: tl.constexpr):
    places, real = _rows(first, rows, stride, end, D, WIDTH)
    tl.store(places, x.to(first.dtype.element_ty), mask=real)


@triton.jit
def _keeps(of_queries, of_keys, threshold):
    return (of_queries | 1).to(tl.uint32, bitcast=True) * of_keys.to(tl.uint32, bitcast=True) >= threshold


@triton.jit
def _place(L, BLOCK: tl.constexpr, H):
    """The utterance, the head and the first row of this program; the blocks of a head are neighbouring programs."""
    blocks = tl.cdiv(L, BLOCK)
    head = tl.program_id(0) // blocks
    return (head // H).to(tl.int64), head % H, tl.program_id(0) % blocks * BLOCK


@launched
def forward(
    Q, K, V, out, lse, lens, of_queries, of_keys, scale, threshold, enlarged, H, L_q, L_k, q_stride, k_stride,
    D: tl.constexpr, WIDTH: tl.constexpr, DROPS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Computes out, and lse `(B, H, L_q)`, the log-sum-exp of each query's scores. `lens` None: causal."""
    CAUSAL: tl.constexpr = lens is None
    b, h, begin = _place(L_q, QUERIES, H)
    lse += (b * H + h) * L_q
    of_queries += (b * H + h) * L_q
    K += b * L_k * k_stride + h * D
    V += b * L_k * k_stride + h * D
    queries = begin + tl.arange(0, QUERIES)
    q = _load(Q + b * L_q * q_stride + h * D, queries, q_stride, L_q, D, WIDTH)
    seen = L_k if CAUSAL else tl.minimum(tl.load(lens + b), L_k).to(tl.int32)
    if DROPS:
        drawn = tl.load(of_queries + queries, mask=queries < L_q, other=0)
    largest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    sums = tl.zeros([QUERIES, WIDTH], tl.float32)
    for start in range(0, tl.minimum(begin + QUERIES, seen) if CAUSAL else seen, KEYS):
        keys = start + tl.arange(0, KEYS)
        k = _load(K, keys, k_stride, seen, D, WIDTH)
        s = tl.dot(q, tl.trans(k))
        s = tl.where(keys[None, :] <= queries[:, None] if CAUSAL else keys[None, :] < seen, s, float("-inf"))
        larger = tl.maximum(largest, tl.max(s, 1) * scale)
        p = tl.exp2(s * scale - larger[:, None])
        shrunk = tl.exp2(largest - larger)
        total = total * shrunk + tl.sum(p, 1)
        if DROPS:
            p = tl.where(_keeps(drawn[:, None], tl.load(of_keys + keys, mask=keys < seen)[None, :], threshold), p, 0.0)
        v = _load(V, keys, k_stride, seen, D, WIDTH)
        sums = tl.dot(p.to(v.dtype), v, sums * shrunk[:, None])
        largest = larger
    total = tl.where(total == 0.0, 1.0, total)
    tl.store(lse + queries, largest + tl.log2(total), mask=queries < L_q)
    _store(out + (b * L_q * H + h) * D, sums * (enlarged / total)[:, None], queries, H * D, L_q, D, WIDTH)


@launched
def backward_of_queries(
    Q, K, V, out, G, lse, delta, dQ, lens, of_queries, of_keys, scale, threshold, enlarged,
    H, L_q, L_k, q_stride, k_stride,
    D: tl.constexpr, WIDTH: tl.constexpr, DROPS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Computes dQ from the result's gradient G, and delta `(B, H, L_q)`, the sum of each query's weights times their
    gradients, which equals the sum of its result times G (Dao et al. 2022, appendix B.2)."""
    CAUSAL: tl.constexpr = lens is None
    b, h, begin = _place(L_q, QUERIES, H)
    lse += (b * H + h) * L_q
    delta += (b * H + h) * L_q
    of_queries += (b * H + h) * L_q
    K += b * L_k * k_stride + h * D
    V += b * L_k * k_stride + h * D
    queries = begin + tl.arange(0, QUERIES)
    q = _load(Q + b * L_q * q_stride + h * D, queries, q_stride, L_q, D, WIDTH)
    g = _load(G + (b * L_q * H + h) * D, queries, H * D, L_q, D, WIDTH)
    o = _load(out + (b * L_q * H + h) * D, queries, H * D, L_q, D, WIDTH)
    mean = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
    tl.store(delta + queries, mean, mask=queries < L_q)
    total = tl.load(lse + queries, mask=queries < L_q, other=float("inf"))
    seen = L_k if CAUSAL else tl.minimum(tl.load(lens + b), L_k).to(tl.int32)
    if DROPS:
        drawn = tl.load(of_queries + queries, mask=queries < L_q, other=0)
    dq = tl.zeros([QUERIES, WIDTH], tl.float32)
    for start in range(0, tl.minimum(begin + QUERIES, seen) if CAUSAL else seen, KEYS):
        keys = start + tl.arange(0, KEYS)
        k = _load(K, keys, k_stride, seen, D, WIDTH)
        v = _load(V, keys, k_stride, seen, D, WIDTH)
        p = tl.exp2(tl.dot(q, tl.trans(k)) * scale - total[:, None])
        p = tl.where(keys[None, :] <= queries[:, None] if CAUSAL else keys[None, :] < seen, p, 0.0)
        dp = tl.dot(g, tl.trans(v))
        if DROPS:
            dp = tl.where(
                _keeps(drawn[:, None], tl.load(of_keys + keys, mask=keys < seen)[None, :], threshold), dp, 0.0
            )
        dq = tl.dot((p * (dp * enlarged - mean[:, None])).to(k.dtype), k, dq)
    _store(dQ + b * L_q * q_stride + h * D, dq * (scale / LOG2_E), queries, q_stride, L_q, D, WIDTH)


@launched
def backward_of_keys(
    Q, K, V, G, lse, delta, dK, dV, lens, of_queries, of_keys, scale, threshold, enlarged,
    H, L_q, L_k, q_stride, k_stride,
    D: tl.constexpr, WIDTH: tl.constexpr, DROPS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Computes dK and dV, with zeros in the padding."""
    CAUSAL: tl.constexpr = lens is None
    b, h, begin = _place(L_k, KEYS, H)
    lse += (b * H + h) * L_q
    delta += (b * H + h) * L_q
    of_queries += (b * H + h) * L_q
    Q += b * L_q * q_stride + h * D
    G += (b * L_q * H + h) * D
    keys = begin + tl.arange(0, KEYS)
    seen = L_k if CAUSAL else tl.minimum(tl.load(lens + b), L_k).to(tl.int32)
    k = _load(K + b * L_k * k_stride + h * D, keys, k_stride, seen, D, WIDTH)
    v = _load(V + b * L_k * k_stride + h * D, keys, k_stride, seen, D, WIDTH)
    if DROPS:
        drawn = tl.load(of_keys + keys, mask=keys < seen, other=0)
    dk, dv = tl.zeros([KEYS, WIDTH], tl.float32), tl.zeros([KEYS, WIDTH], tl.float32)
    for start in range(begin // QUERIES * QUERIES if CAUSAL else 0, L_q if begin < seen else 0, QUERIES):
        queries = start + tl.arange(0, QUERIES)
        q = _load(Q, queries, q_stride, L_q, D, WIDTH)
        g = _load(G, queries, H * D, L_q, D, WIDTH)
        total = tl.load(lse + queries, mask=queries < L_q, other=float("inf"))
        mean = tl.load(delta + queries, mask=queries < L_q, other=0.0)
        p = tl.exp2(tl.dot(k, tl.trans(q)) * scale - total[None, :])
        if CAUSAL:
            p = tl.where(keys[:, None] <= queries[None, :], p, 0.0)
        dp = tl.dot(v, tl.trans(g))
        kept = p
        if DROPS:
            keeps = _keeps(tl.load(of_queries + queries, mask=queries < L_q)[None, :], drawn[:, None], threshold)
            dp = tl.where(keeps, dp, 0.0)
            kept = tl.where(keeps, p, 0.0)
        dv = tl.dot(kept.to(g.dtype), g, dv)
        dk = tl.dot((p * (dp * enlarged - mean[None, :])).to(q.dtype), q, dk)
    real = keys[:, None] < seen
    dk = tl.where(real, dk * (scale / LOG2_E), 0.0)
    dv = tl.where(real, dv * enlarged, 0.0)
    _store(dK + b * L_k * k_stride + h * D, dk, keys, k_stride, L_k, D, WIDTH)
    _store(dV + b * L_k * k_stride + h * D, dv, keys, k_stride, L_k, D, WIDTH)
