// Attention of one to eight query tokens per row over one part of its pages: online softmax in float32.
//
// grid: (parts, kv heads x passes, rows) threadgroups of SIMDGROUPS x 32 threads.
// A threadgroup serves query vectors that share a K/V head: of its GROUP x QUERIES, those of one pass. Its simdgroups
// take turns with runs of TOKENS tokens, which lie in one page; their sums are put together at the end.
// What registers don't hold is divided: each of SETS sets of simdgroups has PASS vectors. Then TILE tokens at a time
// are read into threadgroup memory, once for all sets.
// With WHOLE there is one part, and `out` is the result; otherwise `out` and `stats` are what reduce.metal needs.
// With OPEN a query reads the tokens of its own page from the open pages, which aren't packed: after the other tokens of
// the part, by a loop of their own.

constexpr int VECTORS = GROUP * QUERIES;
constexpr int PASSES = (VECTORS + SETS * PASS - 1) / (SETS * PASS);
constexpr int MEMBERS = SIMDGROUPS / SETS;  // simdgroups of a set
constexpr int K_SIZE = lane_size<K_DIM>();
constexpr int V_SIZE = lane_size<V_DIM>();
constexpr int TILE_FLOATS = SETS > 1 ? TILE * 32 * (K_SIZE + V_SIZE) : 0;
constexpr int SUM_FLOATS = SIMDGROUPS * V_DIM;
constexpr int SCRATCH_FLOATS = TILE_FLOATS > SUM_FLOATS ? TILE_FLOATS : SUM_FLOATS;

threadgroup float tops[PASS * SIMDGROUPS];
threadgroup float sums[PASS * SIMDGROUPS];
// Tokens as lanes hold them, keys and then values; at the end the sums of one vector of each simdgroup.
threadgroup float scratch[SCRATCH_FLOATS];

const int lane = thread_index_in_simdgroup;
const int simdgroup = simdgroup_index_in_threadgroup;
const int row = threadgroup_position_in_grid.z;
const int kv_head = threadgroup_position_in_grid.y / PASSES;
const int set = simdgroup / MEMBERS;
const int pass_vector = threadgroup_position_in_grid.y % PASSES * (SETS * PASS);
const int first_vector = pass_vector + set * PASS;
const int kv_heads = key_pages_shape[1];

const int context_len = rows[4 * row];
const int query_len = rows[4 * row + 1];
const int low = rows[4 * row + 2];  // no query of this row sees a token in [keep, low)
const int start = rows[4 * row + 3];  // of its page ids
const int open_start = open_starts[2 * row];
const int full_until = open_starts[2 * row + 1];  // queries before this position read all tokens from open pages
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

for (int form = 0; form < (OPEN ? 2 : 1); form++) {
  const bool opened = OPEN && form == 1;
  // The first query's own page begins the open ones, the last one's ends the others.
  const int from = opened ? max(begin, first_open(context_len - query_len, PAGE, full_until)) : begin;
  const int stop = OPEN && !opened ? min(end, first_open(context_len - 1, PAGE, full_until)) : end;
  for (int tile = from; tile < stop; tile += TILE) {
    if (tile + TILE <= low && tile >= keep) {
      continue;
    }
    if (SETS > 1) {
      threadgroup_barrier(mem_flags::mem_threadgroup);  // everyone is done with the last tile
      UNROLL for (int item = 0; item < 2 * TILE; item += SIMDGROUPS) {
        const int u = (item + simdgroup) / 2;
        const int position = tile + u;
        if (in_reach(position, stop, low, keep)) {
          const int page = opened ? open_page_ids[open_start + position / PAGE] : page_ids[start + position / PAGE];
          if (simdgroup % 2 == 0) {
            const int64_t key = token_offset(page, kv_head, position % PAGE, kv_heads, PAGE, opened ? K_DIM : K_ROW);
            float x[K_SIZE];
            if (opened) {
              load_token<K_DIM>(open_key_pages + key, lane, x);
            } else {
              Row<K_DIM, K_BITS, K_GROUP, K_SCALE>::load(key_pages + key, lane, x);
            }
            UNROLL for (int i = 0; i < K_SIZE; i++) {
              scratch[(u * K_SIZE + i) * 32 + lane] = x[i];
            }
          } else {
            const int64_t value = token_offset(page, kv_head, position % PAGE, kv_heads, PAGE, opened ? V_DIM : V_ROW);
            float x[V_SIZE];
            if (opened) {
              load_token<V_DIM>(open_value_pages + value, lane, x);
            } else {
              Row<V_DIM, V_BITS, V_GROUP, V_SCALE>::load(value_pages + value, lane, x);
            }
            UNROLL for (int i = 0; i < V_SIZE; i++) {
              scratch[(TILE * K_SIZE + u * V_SIZE + i) * 32 + lane] = x[i];
            }
          }
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    for (int first = tile + simdgroup % MEMBERS * TOKENS; first < min(tile + TILE, stop); first += MEMBERS * TOKENS) {
      if (first + TOKENS <= low && first >= keep) {
        continue;
      }
      const int page =
          SETS > 1 ? 0 : opened ? open_page_ids[open_start + first / PAGE] : page_ids[start + first / PAGE];
      const int64_t key = token_offset(page, kv_head, first % PAGE, kv_heads, PAGE, opened ? K_DIM : K_ROW);
      const int64_t value = token_offset(page, kv_head, first % PAGE, kv_heads, PAGE, opened ? V_DIM : V_ROW);

      // All loads before the first sum, so that they overlap.
      float k[TOKENS * K_SIZE];
      UNROLL for (int u = 0; u < TOKENS; u++) {
        if (in_reach(first + u, stop, low, keep)) {
          if (SETS > 1) {
            UNROLL for (int i = 0; i < K_SIZE; i++) {
              k[u * K_SIZE + i] = scratch[((first - tile + u) * K_SIZE + i) * 32 + lane];
            }
          } else if (opened) {
            load_token<K_DIM>(open_key_pages + key + u * K_DIM, lane, k + u * K_SIZE);
          } else {
            Row<K_DIM, K_BITS, K_GROUP, K_SCALE>::load(key_pages + key + u * K_ROW, lane, k + u * K_SIZE);
          }
        }
      }

      float score[PASS * TOKENS];
      UNROLL for (int u = 0; u < TOKENS; u++) {
        const int position = first + u;
        const bool held = in_reach(position, stop, low, keep);
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
            if (OPEN) {
              seen = seen && (position >= first_open(own, PAGE, full_until)) == opened;
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
        if (in_reach(first + u, stop, low, keep)) {
          float x[V_SIZE];
          if (SETS > 1) {
            UNROLL for (int i = 0; i < V_SIZE; i++) {
              x[i] = scratch[(TILE * K_SIZE + (first - tile + u) * V_SIZE + i) * 32 + lane];
            }
          } else if (opened) {
            load_token<V_DIM>(open_value_pages + value + u * V_DIM, lane, x);
          } else {
            Row<V_DIM, V_BITS, V_GROUP, V_SCALE>::load(value_pages + value + u * V_ROW, lane, x);
          }
          UNROLL for (int v = 0; v < PASS; v++) {
            UNROLL for (int i = 0; i < V_SIZE; i++) {
              o[v * V_SIZE + i] += score[v * TOKENS + u] * x[i];
            }
          }
        }
      }
    }
  }
}

// The simdgroups' sums, one query vector of each at a time.
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

UNROLL for (int v = 0; v < PASS; v++) {
  const float factor = softmax_factor(top[v], highest<MEMBERS>(tops + v * SIMDGROUPS + set * MEMBERS));
  UNROLL for (int i = 0; i < V_SIZE; i++) {
    const int dim = lane_dim<V_DIM>(i, lane);
    if (V_DIM % 32 == 0 || dim < V_DIM) {
      scratch[simdgroup * V_DIM + dim] = o[v * V_SIZE + i] * factor;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = thread_index; i < SETS * V_DIM; i += 32 * SIMDGROUPS) {
    const int of = i / V_DIM;  // set
    const int dim = i % V_DIM;
    const int in_head = pass_vector + of * PASS + v;
    if (in_head < VECTORS) {
      const int first = v * SIMDGROUPS + of * MEMBERS;
      const float all_top = highest<MEMBERS>(tops + first);
      float all_sum = 0.0f;
      float all = 0.0f;
      for (int s = 0; s < MEMBERS; s++) {
        all_sum += sums[first + s] * softmax_factor(tops[first + s], all_top);
        all += scratch[(of * MEMBERS + s) * V_DIM + dim];
      }
      // Output vectors are in the order (row, kv head, query head of the group, query token).
      const int64_t vector = (int64_t(row) * kv_heads + kv_head) * VECTORS + in_head;
      const int64_t at = vector * extent[3] + threadgroup_position_in_grid.x;
      const float sink = SINKS ? float(sinks[kv_head * GROUP + in_head / QUERIES]) : 0.0f;
      out[at * V_DIM + dim] = static_cast<T>(WHOLE ? softmax_finish(all, all_sum, all_top, SINKS, sink) : all);
      if (dim == 0) {
        stats[2 * at] = all_top;
        stats[2 * at + 1] = all_sum;
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
