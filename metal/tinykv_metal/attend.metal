// Attention of one to eight query tokens per row over one part of its pages: online softmax in float32.
//
// grid: (parts, kv heads x passes, rows) threadgroups of SIMDGROUPS x 32 threads.
// A threadgroup serves PASS query vectors that share a K/V head: of its GROUP x QUERIES, those of one pass. Its
// simdgroups take turns with runs of TOKENS tokens, which lie in one page; their sums are put together at the end.
// With WHOLE there is one part, and `out` is the result; otherwise `out` and `stats` are what reduce.metal needs.

constexpr int VECTORS = GROUP * QUERIES;
constexpr int PASSES = (VECTORS + PASS - 1) / PASS;
constexpr int K_SIZE = lane_size<K_DIM>();
constexpr int V_SIZE = lane_size<V_DIM>();

const int lane = thread_index_in_simdgroup;
const int simdgroup = simdgroup_index_in_threadgroup;
const int row = threadgroup_position_in_grid.z;
const int kv_head = threadgroup_position_in_grid.y / PASSES;
const int first_vector = threadgroup_position_in_grid.y % PASSES * PASS;
const int kv_heads = key_pages_shape[1];
const int max_pages = block_table_shape[1];

const int context_len = rows[4 * row];
const int query_len = rows[4 * row + 1];
const int low = rows[4 * row + 2];  // no query of this row sees a token in [keep, low)
const int window = extent[0];       // 0: none
const int keep = extent[1];
const int part = extent[2] + threadgroup_position_in_grid.x;
const float scale = numbers[0];
const float softcap = numbers[1];

float q[PASS * K_SIZE];
float o[PASS * V_SIZE];
float top[PASS];
float sum[PASS];
UNROLL for (int v = 0; v < PASS; v++) {
  const int vector = min(first_vector + v, VECTORS - 1);
  const int64_t from = row * queries_strides[0] + (kv_head * GROUP + vector / QUERIES) * queries_strides[1] +
      vector % QUERIES * queries_strides[2];
  UNROLL for (int i = 0; i < K_SIZE; i++) {
    const int dim = lane_dim<K_DIM>(i, lane);
    q[v * K_SIZE + i] = K_DIM % 32 == 0 || dim < K_DIM ? scale * float(queries[from + dim * queries_strides[3]]) : 0.0f;
  }
  UNROLL for (int i = 0; i < V_SIZE; i++) {
    o[v * V_SIZE + i] = 0.0f;
  }
  top[v] = -INFINITY;
  sum[v] = 0.0f;
}

const int end = min((part + 1) * PART, context_len);
int begin = part * PART;
if (begin >= keep) {
  begin = max(begin, low / TOKENS * TOKENS);  // skipped, not masked
}

for (int first = begin + simdgroup * TOKENS; first < end; first += SIMDGROUPS * TOKENS) {
  if (first + TOKENS <= low && first >= keep) {
    continue;
  }
  const int page = block_table[row * max_pages + first / PAGE];
  const int64_t key = token_offset<PAGE>(page, kv_head, first % PAGE, kv_heads, K_ROW);
  const int64_t value = token_offset<PAGE>(page, kv_head, first % PAGE, kv_heads, V_ROW);

  // All loads before the first sum, so that they overlap.
  float k[TOKENS * K_SIZE];
  UNROLL for (int u = 0; u < TOKENS; u++) {
    if (in_reach(first + u, end, low, keep)) {
      Row<K_DIM, K_BITS, K_GROUP, K_SCALE>::load(key_pages + key + u * K_ROW, lane, k + u * K_SIZE);
    }
  }

  float score[PASS * TOKENS];
  UNROLL for (int u = 0; u < TOKENS; u++) {
    const int position = first + u;
    const bool held = in_reach(position, end, low, keep);
    UNROLL for (int v = 0; v < PASS; v++) {
      float s = -INFINITY;
      if (held) {
        float products = 0.0f;
        UNROLL for (int i = 0; i < K_SIZE; i++) {
          products += q[v * K_SIZE + i] * k[u * K_SIZE + i];
        }
        s = simd_sum(products);
        if (SOFTCAP) {
          s = softcap * precise::tanh(s / softcap);
        }
        const int vector = first_vector + v;
        const int query = vector % QUERIES;
        const int own = context_len - query_len + query;
        bool seen = vector < VECTORS && query < query_len;
        if (CAUSAL) {
          seen = seen && position <= own;
        }
        if (WINDOW) {
          seen = seen && (position > own - (window - keep) || position < keep || own < window);
        }
        if (MASK != 0 && seen) {
          const int64_t at = row * mask_strides[0] + (kv_head * GROUP + vector / QUERIES) * mask_strides[1] +
              query * mask_strides[2] + position * mask_strides[3];
          if (MASK == 1) {
            seen = float(mask[at]) != 0.0f;
          } else {
            s += float(mask[at]);
          }
        }
        if (!seen) {
          s = -INFINITY;
        }
      }
      score[v * TOKENS + u] = s;
    }
  }

  UNROLL for (int v = 0; v < PASS; v++) {
    float higher = top[v];
    UNROLL for (int u = 0; u < TOKENS; u++) {
      higher = max(higher, score[v * TOKENS + u]);
    }
    const float factor = softmax_factor(top[v], higher);
    sum[v] *= factor;
    UNROLL for (int i = 0; i < V_SIZE; i++) {
      o[v * V_SIZE + i] *= factor;
    }
    UNROLL for (int u = 0; u < TOKENS; u++) {
      score[v * TOKENS + u] = softmax_factor(score[v * TOKENS + u], higher);
      sum[v] += score[v * TOKENS + u];
    }
    top[v] = higher;
  }

  UNROLL for (int u = 0; u < TOKENS; u++) {
    if (in_reach(first + u, end, low, keep)) {
      float x[V_SIZE];
      Row<V_DIM, V_BITS, V_GROUP, V_SCALE>::load(value_pages + value + u * V_ROW, lane, x);
      UNROLL for (int v = 0; v < PASS; v++) {
        UNROLL for (int i = 0; i < V_SIZE; i++) {
          o[v * V_SIZE + i] += score[v * TOKENS + u] * x[i];
        }
      }
    }
  }
}

// The simdgroups' sums, one query vector at a time, so that threadgroup memory holds V_DIM floats per simdgroup.
threadgroup float tops[PASS * SIMDGROUPS];
threadgroup float sums[PASS * SIMDGROUPS];
threadgroup float values[SIMDGROUPS * V_DIM];
const int thread_index = simdgroup * 32 + lane;
if (lane == 0) {
  UNROLL for (int v = 0; v < PASS; v++) {
    tops[v * SIMDGROUPS + simdgroup] = top[v];
    sums[v * SIMDGROUPS + simdgroup] = sum[v];
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);
if (thread_index == 0 && row == 0 && threadgroup_position_in_grid.x == 0 && threadgroup_position_in_grid.y == 0) {
  token[0] = 0;
}

for (int v = 0; v < PASS && first_vector + v < VECTORS; v++) {
  float all_top = -INFINITY;
  for (int s = 0; s < SIMDGROUPS; s++) {
    all_top = max(all_top, tops[v * SIMDGROUPS + s]);
  }
  float all_sum = 0.0f;
  for (int s = 0; s < SIMDGROUPS; s++) {
    all_sum += sums[v * SIMDGROUPS + s] * softmax_factor(tops[v * SIMDGROUPS + s], all_top);
  }
  const float factor = softmax_factor(top[v], all_top);
  UNROLL for (int i = 0; i < V_SIZE; i++) {
    const int dim = lane_dim<V_DIM>(i, lane);
    if (V_DIM % 32 == 0 || dim < V_DIM) {
      values[simdgroup * V_DIM + dim] = o[v * V_SIZE + i] * factor;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  // Output vectors are in the order (row, kv head, query head of the group, query token).
  const int64_t vector = (int64_t(row) * kv_heads + kv_head) * VECTORS + first_vector + v;
  const int head = kv_head * GROUP + (first_vector + v) / QUERIES;
  for (int dim = thread_index; dim < V_DIM; dim += 32 * SIMDGROUPS) {
    float all = 0.0f;
    for (int s = 0; s < SIMDGROUPS; s++) {
      all += values[s * V_DIM + dim];
    }
    const int64_t at = vector * extent[3] + threadgroup_position_in_grid.x;
    out[at * V_DIM + dim] =
        static_cast<T>(WHOLE ? softmax_finish(all, all_sum, all_top, SINKS, SINKS ? float(sinks[head]) : 0.0f) : all);
    if (dim == 0) {
      stats[2 * at] = all_top;
      stats[2 * at + 1] = all_sum;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
